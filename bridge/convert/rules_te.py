"""Rules for modules of Transformer Engine, by class name and package, written over the names of their attributes.

Converted, they follow ``bridge.autocast`` and no longer Transformer Engine's. Sharded layers, outputs in FP8 and
modules that return more than their output are left alone.
"""

from __future__ import annotations

from typing import Any

import torch

import functional_te as fte
from bridge.convert.borrowed import Borrowed, Slice
from bridge.convert.chains import BoundChain, Parts
from bridge.convert.rule import Fused, Leaf, Site, is_from
from bridge.convert.rules_torch import tensor_reason
from bridge.convert.swap import original
from functional_te._errors import value_error

__all__ = ["te_leaf", "te_sequential"]

_PACKAGE = "transformer_engine."
_ONLY_INSIDE = "operations of te.ops are converted with the te.ops.Sequential that they are in"
_ACTIVATIONS: dict[str, Any] = {
    op.kind: op
    for op in (
        *(fte.GELU(), fte.GEGLU(), fte.QGELU(), fte.QGEGLU(), fte.ReLU(), fte.ReGLU(), fte.SReLU(), fte.SReGLU()),
        *(fte.SiLU(), fte.SwiGLU(), fte.GLU()),
    )
}


def _held(module: Any, name: str) -> bool:
    """Whether a module has a parameter: Transformer Engine puts empty tensors in the place of absent ones."""
    own = getattr(module, name, None)
    return isinstance(own, torch.Tensor) and own.numel() > 0


def _linear(module: Any, weight: str, bias: str) -> tuple[Borrowed, ...]:
    outputs, inputs = getattr(module, weight).shape
    ops: tuple[Borrowed, ...] = (Slice(fte.BasicLinear(inputs, outputs), module, weight=weight),)
    if _held(module, bias):
        ops = (*ops, Slice(fte.Bias(outputs), module, bias=bias))
    return ops


def _norm(module: Any, prefix: str = "layer_norm_") -> tuple[Borrowed, ...]:
    shape, zero_centered = tuple(getattr(module, f"{prefix}weight").shape), bool(module.zero_centered_gamma)
    weight, bias = f"{prefix}weight", f"{prefix}bias"
    kind = fte.LayerNorm if _held(module, bias) else fte.RMSNorm
    return (Slice(kind(shape, float(module.eps), zero_centered), module, weight=weight, bias=bias),)


def _unfit(module: Any, *weights: str) -> str | None:
    """Why a module of te is left alone; None if it is converted."""
    if getattr(module, "tp_size", 1) > 1 or getattr(module, "tensor_parallel_size", 1) > 1:
        return "it is sharded over ranks"
    for flag in ("return_bias", "return_layernorm_output", "return_layernorm_output_gathered"):
        if getattr(module, flag, False):
            return f"{flag} asks for more than the output"
    for weight in weights:
        if not _held(module, weight):
            return f"it has no {weight}"
        reason = tensor_reason(module, weight)
        if reason is not None:
            return reason
    return None


def _run_module(module: Any, inp: torch.Tensor, is_first_microbatch: Any = None, **options: Any) -> Any:
    """The forward of a module of te. Casts of weights are kept by ``autocast(cache_weights=True)`` instead."""
    del is_first_microbatch
    asked = [name for name, value in options.items() if value]
    if asked:
        raise value_error(type(module).__name__, ", ".join(asked), "nothing: the module is converted", "something")
    return module._functional_te.data(inp)


def _module(module: Any) -> Leaf | str:
    """te.Linear, te.LayerNormLinear, te.LayerNormMLP."""
    name = type(module).__name__
    weights = {
        "Linear": ("weight",),
        "LayerNormLinear": ("layer_norm_weight", "weight"),
        "LayerNormMLP": ("layer_norm_weight", "fc1_weight", "fc2_weight"),
    }[name]
    reason = _unfit(module, *weights)
    if reason is not None:
        return reason
    if name == "Linear":
        ops = _linear(module, "weight", "bias")
        return Leaf("te linear", ops, "BasicLinear" + ", Bias" * (len(ops) - 1), call=_run_module)
    wanted = "LayerNorm" if _held(module, "layer_norm_bias") else "RMSNorm"
    if module.normalization != wanted:
        return f"{module.normalization} without the parameters of {wanted}"
    if name == "LayerNormLinear":
        ops = (*_norm(module), *_linear(module, "weight", "bias"))
        return Leaf("te layer norm linear", ops, f"{wanted}, BasicLinear", call=_run_module)
    act = _ACTIVATIONS.get(module.activation)
    if act is None:
        return f"no operation for the activation {module.activation!r}"
    up, down = _linear(module, "fc1_weight", "fc1_bias"), _linear(module, "fc2_weight", "fc2_bias")
    ops = (*_norm(module), *up, Borrowed(act), *down)
    why = f"{wanted}, BasicLinear, {type(act).__name__}, BasicLinear"
    return Leaf("te layer norm mlp", ops, why, call=_run_module)


def _operation(module: Any) -> Leaf | str:
    """An operation of te.ops."""
    name = type(module).__name__
    if name == "Linear":  # holds a BasicLinear and a Bias
        inner = [_operation(one) for one in module.basic_ops]
        known = [leaf for leaf in inner if isinstance(leaf, Leaf)]
        if len(known) < len(inner):
            return "an operation inside has no rule"
        return Leaf("te op", tuple(op for leaf in known for op in leaf.ops), name, only_inside=_ONLY_INSIDE)
    if name in ("BasicLinear", "LayerNorm", "RMSNorm"):
        reason = _unfit(module, "weight")
        if reason is not None:
            return reason
        ops = _linear(module, "weight", "") if name == "BasicLinear" else _norm(module, "")
    elif name == "Bias":
        ops = (Slice(fte.Bias(module.bias.shape[0]), module, bias="bias"),)
    else:
        act = _ACTIVATIONS.get(name.lower())
        if act is None or getattr(module, "glu_interleave_size", None):
            return f"no rule for te.ops.{name}"
        ops = (Borrowed(act),)
    return Leaf("te op", ops, name, only_inside=_ONLY_INSIDE)


def te_leaf(module: torch.nn.Module) -> Leaf | str | None:
    """The leaf of a module of Transformer Engine, why it is left alone, or None if there is no rule for it."""
    if not is_from(module, (type(module).__name__,), _PACKAGE) or type(module).__name__ == "Sequential":
        return None
    if ".ops." in type(module).__module__:
        return _operation(module)
    known = ("Linear", "LayerNormLinear", "LayerNormMLP")
    return _module(module) if type(module).__name__ in known else None


def _run_sequential(module: Any, input: torch.Tensor, *extra_inputs: torch.Tensor, **kwargs: Any) -> Any:
    chain, parts = module._functional_te.data
    if extra_inputs or kwargs or not parts.intact():
        return original(module, input, *extra_inputs, **kwargs)
    return chain(input)


def te_sequential(module: Any, site: Site) -> Fused | str | None:
    """A te.ops.Sequential all of whose operations have rules."""
    if not is_from(module, ("Sequential",), _PACKAGE):
        return None
    children = module._modules
    ops = [site.ops(child) for child in children.values()]
    missing = [name for name, own in zip(children, ops, strict=True) if own is None]
    if missing or not ops:
        return f"no rule for {', '.join(missing) or 'an empty Sequential'}"
    chain = BoundChain(*[op for own in ops for op in own or ()])
    data = (chain, Parts(*[(module, name, child) for name, child in children.items()]))
    return Fused("te sequential", _run_sequential, data, (), tuple(children.values()), "one chain")
