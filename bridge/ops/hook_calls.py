"""Calls of te.ops-style hooks: which module's, with what arguments, and what may come back."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch

from bridge.ops.context import OperationContext, reopened
from bridge.ops.quantizer_view import QuantizerView
from functional_te._value import Table
from functional_te.ops import BackwardContext
from functional_te.quantization.tensor import BoundQuantizer, QuantizedTensor

__all__ = ["HookCall", "contexts_of", "module_of", "remember", "run_backward", "run_forward"]

TENSORS = (torch.Tensor, QuantizedTensor)
# weak references to modules by serial, as attributes: traced code can follow those
_modules = Table()


def remember(serial: str, module: Any) -> None:
    """Let op values find ``module`` by its serial, for as long as it lives."""

    def forget(_: Any) -> None:
        _modules.__dict__.pop(serial, None)

    setattr(_modules, serial, weakref.ref(module, forget))


def module_of(serial: str) -> Any:
    """The module with this serial."""
    return getattr(_modules, serial)()


class HookCall:
    """The arguments of one call of a forward hook, or of a backward hook."""

    def __init__(self, op: Any, tensor: Any, **fields: Any) -> None:
        self.op = op
        self.tensor = tensor
        self.requires_grad: tuple[bool, ...] = fields.get("requires_grad", ())
        self.extra_inputs: tuple[tuple[Any, ...], ...] = fields.get("extra_inputs", ())
        self.kwargs: list[dict[str, Any]] = fields.get("kwargs", [])
        self.next_quantizer: BoundQuantizer | None = fields.get("next_quantizer")
        self.compute_dtype: torch.dtype | None = fields.get("compute_dtype")
        self.params: tuple[Mapping[str, Any], ...] = fields.get("params", ())
        self.contexts: tuple[BackwardContext, ...] = fields.get("contexts", ())


def _expect(condition: bool, who: str, what: str, wanted: Any, got: Any) -> None:
    if not condition:
        raise RuntimeError(f"{who}: {what}: expected {wanted}, got {got}.")


def _kind(value: Any) -> str:
    """What a hook returned, without its numbers."""
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}"
    return "None" if value is None else f"a {type(value).__name__}"


def _entries(value: Any, who: str, what: str, counts: tuple[int, ...]) -> tuple[tuple[Any, ...], ...]:
    """One tuple per covered op, each of the right length; None stands for Nones only."""
    _expect(not isinstance(value, torch.Tensor), who, what, "a list with one entry per basic op", _kind(value))
    given = list(value) if value is not None else [None] * len(counts)
    _expect(len(given) == len(counts), who, what, f"{len(counts)} entries, one per basic op", len(given))
    result = []
    for position, (own, count) in enumerate(zip(given, counts, strict=True)):
        _expect(not isinstance(own, torch.Tensor), who, f"{what} of basic op {position}", "a list", _kind(own))
        entry = (None,) * count if own is None else tuple(own)
        _expect(len(entry) == count, who, f"{what} of basic op {position}", count, len(entry))
        result.append(entry)
    return tuple(result)


def _pair(value: Any, count: int, who: str, what: str) -> tuple[Any, ...]:
    _expect(isinstance(value, (tuple, list)) and len(value) == count, who, what, f"{count} results", _kind(value))
    return tuple(value)


def _unshared(output: Any, extras: tuple[tuple[Any, ...], ...], call: HookCall) -> Any:
    """The same results as tensors of their own: a hook may return its input, or one tensor twice."""
    seen = [call.tensor, *[extra for own in call.extra_inputs for extra in own]]

    def own_tensor(tensor: Any) -> Any:
        if tensor is None:
            return None
        if any(tensor is known for known in seen):
            tensor = tensor.clone()
        seen.append(tensor)
        return tensor

    return own_tensor(output), tuple([tuple([own_tensor(extra) for extra in own]) for own in extras])


def run_forward(call: HookCall) -> tuple[Any, Any, list[OperationContext], Any]:
    """Output, extra outputs, contexts, and the amax that the next op's quantizer observed."""
    op = call.op
    module, who = module_of(op.serial), type(op).__name__
    contexts = [OperationContext(needed) for needed in call.requires_grad]
    following = (
        None if call.next_quantizer is None else QuantizerView(call.next_quantizer.quantizer, None, call.next_quantizer)
    )
    arguments: dict[str, Any] = {
        "basic_op_extra_inputs": [tuple(own) for own in call.extra_inputs],
        "prev_op_grad_output_quantizer": None,
        "next_op_input_quantizer": following,
        "basic_op_kwargs": call.kwargs,
    }
    with torch.no_grad():
        if call.compute_dtype is None:
            result = module.fuser_forward(contexts, call.tensor, **arguments)
        else:
            with torch.autocast(call.tensor.device.type, dtype=call.compute_dtype):
                result = module.fuser_forward(contexts, call.tensor, **arguments)
    output, extras = _pair(result, 2, who, "fuser_forward")
    _expect(isinstance(output, TENSORS), who, "output", "a tensor", _kind(output))
    extras = _entries(extras, who, "extra outputs", op.extra_output_counts)
    for position, needs in enumerate(op.needed_extra_outputs):
        for slot, why in enumerate(needs):
            if why and extras[position][slot] is None:
                raise RuntimeError(
                    f"{who}: extra output {slot} of basic op {position}: expected a tensor, got None; the output {why}."
                )
    output, extras = _unshared(output, extras, call)
    return output, extras, contexts, None if following is None else following.observed


def run_backward(call: HookCall, contexts: list[OperationContext]) -> tuple[Any, Any, Any]:
    """Input gradient, and for every basic op the gradients of its parameters and of its extra inputs."""
    op = call.op
    module, who = module_of(op.serial), type(op).__name__
    grads = [list(own.grad_extra_outputs) for own in call.contexts]
    with torch.no_grad():
        result = module.fuser_backward(contexts, call.tensor, basic_op_grad_extra_outputs=grads)
    grad_input, grad_params, grad_extras = _pair(result, 3, who, "fuser_backward")
    absent = grad_input is None and not call.contexts[0].requires_grad.input
    _expect(absent or isinstance(grad_input, TENSORS), who, "input gradient", "a tensor", _kind(grad_input))
    return (
        grad_input,
        _entries(grad_params, who, "parameter gradients", op.param_counts),
        _entries(grad_extras, who, "extra input gradients", op.extra_input_counts),
    )


def contexts_of(call: HookCall) -> list[OperationContext]:
    """The contexts that forward hooks saved, for the backward hooks."""
    return [reopened(own.saved, own.requires_grad.any) for own in call.contexts]
