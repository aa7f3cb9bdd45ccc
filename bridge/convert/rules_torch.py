"""Rules for single modules of torch.nn: linear layers, norms, activations; and runs of them in nn.Sequential."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import functional_te as fte
from bridge.convert.borrowed import Borrowed
from bridge.convert.chains import BoundChain, Parts
from bridge.convert.rule import Fused, Leaf, Site, plain
from bridge.convert.swap import original
from functional_te.ops.op import FLOAT_DTYPES

__all__ = ["run_leaf", "sequential", "tensor_reason", "torch_leaf"]


def run_leaf(module: Any, x: torch.Tensor) -> torch.Tensor:
    """The forward of a leaf: its chain."""
    output: torch.Tensor = module._functional_te.data(x)
    return output


def tensor_reason(module: nn.Module, name: str) -> str | None:
    """Why a parameter cannot be read by a chain; None if it can."""
    tensor = getattr(module, name)
    if isinstance(tensor, nn.parameter.UninitializedParameter):
        return f"{name} is not initialised yet"
    parametrized = nn.utils.parametrize.is_parametrized(module, name)
    if type(tensor) not in (nn.Parameter, torch.Tensor) and not parametrized:
        return f"{name} is a {type(tensor).__name__}"
    if tensor.dtype not in FLOAT_DTYPES:
        return f"{name} is {str(tensor.dtype).removeprefix('torch.')}"
    return None


def _linear(module: Any) -> Leaf | str:
    reason = tensor_reason(module, "weight")
    if reason is not None:
        return reason
    outputs, inputs = module.weight.shape
    if not (outputs and inputs):
        return "it has no features"
    ops: tuple[Borrowed, ...] = (Borrowed(fte.BasicLinear(inputs, outputs), module),)
    if module.bias is not None:
        ops = (*ops, Borrowed(fte.Bias(outputs), module))
    return Leaf("linear", ops, "BasicLinear" + ", Bias" * (module.bias is not None))


def _layer_norm(module: Any) -> Leaf | str:
    if module.weight is None:
        return "it has no weight"
    reason = tensor_reason(module, "weight")
    if reason is not None:
        return reason
    why = "LayerNorm" if module.bias is not None else "LayerNorm, with zeros for the bias"
    return Leaf("layer norm", (Borrowed(fte.LayerNorm(module.normalized_shape, module.eps), module),), why)


class RMSNormByDtype:
    """RMSNorm without ``eps``, which then is the machine epsilon of the input."""

    def __init__(self, module: nn.RMSNorm) -> None:
        self.chains = {
            dtype: BoundChain(Borrowed(fte.RMSNorm(module.normalized_shape, torch.finfo(dtype).eps), module))
            for dtype in FLOAT_DTYPES
        }

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.chains[x.dtype](x)
        return output


def _rms_norm(module: Any) -> Leaf | str:
    if module.weight is None:
        return "it has no weight"
    reason = tensor_reason(module, "weight")
    if reason is not None:
        return reason
    if module.eps is None:
        return Leaf("rms norm", (), "RMSNorm, eps by the dtype of the input", data=RMSNormByDtype(module))
    return Leaf("rms norm", (Borrowed(fte.RMSNorm(module.normalized_shape, module.eps), module),), "RMSNorm")


def _activation(module: Any) -> Leaf | str | None:
    if plain(module, nn.SiLU.forward):
        op: Any = fte.SiLU()
    elif plain(module, nn.ReLU.forward):
        op = fte.ReLU()
    elif plain(module, nn.GELU.forward):
        op = fte.GELU() if module.approximate == "tanh" else fte.ErfGELU()
    else:
        return None
    why = "it works in place, and no linear layer stands beside it" if getattr(module, "inplace", False) else ""
    return Leaf("activation", (Borrowed(op),), type(op).__name__, only_inside=why)


def torch_leaf(module: nn.Module) -> Leaf | str | None:
    """The leaf of a module of torch.nn, why it is left alone, or None if there is no rule for it."""
    for forward, build in (
        (nn.Linear.forward, _linear),
        (nn.LayerNorm.forward, _layer_norm),
        (nn.RMSNorm.forward, _rms_norm),
    ):
        if plain(module, forward):
            return build(module)
    return _activation(module)


# ------------------------------------------------------------------------------------ nn.Sequential


class Runs:
    """What a Sequential runs: chains over neighbours, and modules.

    Attributes:
        steps: chains and modules in order.
        parts: the modules in chains.
        count: how many modules the Sequential had.
    """

    def __init__(self, steps: tuple[Any, ...], parts: Parts, count: int) -> None:
        self.steps, self.parts, self.count = steps, parts, count


def _run_sequential(module: Any, input: Any) -> Any:
    runs: Runs = module._functional_te.data
    if len(module._modules) != runs.count or not runs.parts.intact():
        return original(module, input)
    for step in runs.steps:
        input = step(input)
    return input


def sequential(module: Any, site: Site) -> Fused | str | None:
    """Runs of at least two neighbouring leaves of an nn.Sequential, of which one is a linear layer."""
    if not plain(module, nn.Sequential.forward):
        return None
    groups: list[list[tuple[str, nn.Module]]] = []
    others: dict[int, nn.Module] = {}
    open_group: list[tuple[str, nn.Module]] = []
    for name, child in module._modules.items():
        if site.ops(child):
            open_group.append((name, child))
            if open_group not in groups:
                groups.append(open_group)
            continue
        others[len(groups)] = child
        groups.append([(name, child)])
        open_group = []
    fusable = [group for group in groups if len(group) > 1]
    if not any(site.ops(child, fte.BasicLinear) for group in fusable for _, child in group):
        return None
    steps: list[Any] = []
    for index, group in enumerate(groups):
        if index in others or len(group) == 1:
            steps.append(group[0][1])
        else:
            steps.append(BoundChain(*[op for _, child in group for op in site.ops(child) or ()]))
    members = [(module, name, child) for group in fusable for name, child in group]
    what = "; ".join(", ".join(type(child).__name__ for _, child in group) for group in fusable)
    data = Runs(tuple(steps), Parts(*members), len(module._modules))
    return Fused("sequential", _run_sequential, data, (), tuple(child for *_, child in members), what)
