"""Running a plan: the forward pass and the backward pass as pure functions over values.

Nothing here touches autograd or global state. How a step is launched (``launch(op, direction, args)``) is a parameter,
so that the bridge can put a custom op in the place of an implementation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from functional_te._errors import value_error
from functional_te.chain import where
from functional_te.fuser.plan import BackwardStep, ForwardStep, Plan
from functional_te.ops import BackwardContext, BwdResult, FwdResult
from functional_te.quantization.state import update_amax
from functional_te.quantization.tensor import BoundQuantizer, QuantizedTensor, bind

__all__ = ["BackwardOutcome", "ForwardOutcome", "backward_pass", "fold_amaxes", "forward_pass"]

Amaxes = dict[tuple[int, str], torch.Tensor]
_NO_STATE: dict[str, BoundQuantizer] = {}
_NO_KWARGS: dict[str, Any] = {}


class ForwardOutcome(NamedTuple):
    """What a forward pass gives.

    Attributes:
        output: the main output.
        extra_outputs: those returned to the caller, in (op, slot) order.
        amaxes: observed amaxes by (op index, role).
        saved: for every basic op, the pytree its backward needs, or None.
    """

    output: Any
    extra_outputs: tuple[torch.Tensor, ...]
    amaxes: Amaxes
    saved: tuple[Any, ...]


class BackwardOutcome(NamedTuple):
    """What a backward pass gives.

    Attributes:
        grad_input: gradient of the main input, or None.
        grad_params: for every basic op, one gradient or None per parameter.
        grad_extra_inputs: one gradient or None per public extra input.
        amaxes: observed amaxes by (op index, role).
    """

    grad_input: torch.Tensor | None
    grad_params: tuple[tuple[torch.Tensor | None, ...], ...]
    grad_extra_inputs: tuple[torch.Tensor | None, ...]
    amaxes: Amaxes


def _bind(quantizer: Any, state: Any, index: int, role: str) -> BoundQuantizer:
    return bind(quantizer, state[index][role] if quantizer.stateful else None)


def _bind_all(pairs: Any, state: Any, index: int) -> dict[str, BoundQuantizer]:
    return {role: _bind(quantizer, state, index, role) for role, quantizer in pairs}


def _extra_input(source: Any, public: Any, produced: dict[tuple[int, int], torch.Tensor]) -> Any:
    # None for what a fused op produces and consumes itself
    return public[source.public] if source.public >= 0 else produced.get((source.op, source.slot))


def _forward_args(
    step: ForwardStep,
    params: Any,
    state: Any,
    extra_inputs: Any,
    produced: dict[tuple[int, int], torch.Tensor],
    kwargs: dict[int, dict[str, Any]],
) -> dict[str, Any]:
    """The keywords of ``resolve_fwd_args`` for one step."""
    call = dict(step.static_kwargs)
    first, last = step.indices[0], step.indices[-1]
    if step.next_quantizer is not None:
        call["next_op_input_quantizer"] = _bind(step.next_quantizer, state, last + 1, "input")
    if step.takes_kwargs:
        call["kwargs"] = tuple([kwargs.get(i, _NO_KWARGS) for i in step.indices])
    if not step.fused:
        call.update(kwargs.get(first, _NO_KWARGS))
        call["params"] = params[first]
        if step.quantized:
            call["state"] = _bind_all(step.quantizers[0], state, first)
        if step.extra_sources[0]:
            call["extra_inputs"] = tuple([_extra_input(s, extra_inputs, produced) for s in step.extra_sources[0]])
        return call
    call["params"] = tuple([params[i] for i in step.indices])
    if step.quantized:
        call["state"] = tuple([_bind_all(q, state, i) for q, i in zip(step.quantizers, step.indices, strict=True)])
    if step.takes_extra_inputs:
        call["extra_inputs"] = tuple(
            [tuple([_extra_input(s, extra_inputs, produced) for s in sources]) for sources in step.extra_sources]
        )
    return call


def _check_kwargs(plan: Plan, kwargs: dict[int, dict[str, Any]]) -> None:
    """Raise if a fused op would drop forward kwargs of an op that it covers."""
    for step in plan.forward if kwargs else ():
        if not step.fused or step.takes_kwargs:
            continue
        for index in step.indices:
            if kwargs.get(index):
                raise value_error(
                    where(plan.chain.ops, index),
                    "kwargs",
                    f"none, because {type(step.op).__name__} runs the op and takes none",
                    f"{sorted(kwargs[index])}",
                    "Leave the fusion out; see fte.plan().",
                )


def _forward_observer(step: ForwardStep, role: str) -> tuple[int, str]:
    """Whose quantizer observed an amax of a forward step: the op behind, or the covered op that has the role."""
    if role == "output":
        return step.indices[-1] + 1, "input"
    position, _, own = role.rpartition(":")
    if position:
        return step.indices[int(position)], own
    return step.owners.get(role, step.indices[0]), role


def _save(step: ForwardStep, args: Any, result: FwdResult, saved: list[Any]) -> None:
    """Keep what the backward of the covered ops needs."""
    setup: Any = step.op.setup_context
    context = setup(args, result.aux, result.extra_outputs) if step.op.saves_extra_outputs else setup(args, result.aux)
    if not step.fused:
        saved[step.indices[0]] = context
        return
    for index, keep, own in zip(step.indices, step.saves, context, strict=True):
        saved[index] = own if keep else None


def forward_pass(
    plan: Plan,
    x: Any,
    params: Any,
    state: Any,
    extra_inputs: Any = (),
    kwargs: dict[int, dict[str, Any]] | None = None,
    launch: Callable[[Any, str, Any], Any] | None = None,
) -> ForwardOutcome:
    """Run the forward of a plan. Arguments are taken to fit; see :func:`functional_te.apply`."""
    kwargs = kwargs or {}
    _check_kwargs(plan, kwargs)
    amaxes: Amaxes = {}
    produced: dict[tuple[int, int], torch.Tensor] = {}
    saved: list[Any] = [None] * len(plan.chain.ops)
    for step in plan.forward:
        op, first = step.op, step.indices[0]
        if step.dense_input and isinstance(x, QuantizedTensor):
            x = x.dequantize()
        if step.simple and not kwargs:
            own = tuple([params[i] for i in step.indices]) if step.fused else params[first]
            args = op.resolve_fwd_args(x, params=own, **step.static_kwargs)  # type: ignore[union-attr]
        else:
            call = _forward_args(step, params, state, extra_inputs, produced, kwargs)
            args = op.resolve_fwd_args(x, **call)  # type: ignore[union-attr]
        result = op.forward_impl(args) if launch is None else launch(op, "forward", args)  # type: ignore[union-attr]
        if type(result) is not FwdResult:
            result = FwdResult(*result)
        if result.output is not None:
            x = result.output
        if result.extra_outputs:
            groups = result.extra_outputs if step.fused else (result.extra_outputs,)
            for index, extras in zip(step.indices, groups, strict=True):
                for slot, extra in enumerate(extras):
                    produced[index, slot] = extra
        if result.amaxes is not None:
            for role, amax in result.amaxes.items():
                amaxes[_forward_observer(step, role)] = amax
        if step.saves_any:
            _save(step, args, result, saved)
    extra_outputs = tuple([produced[place] for place in plan.chain.extra_outputs])
    return ForwardOutcome(x, extra_outputs, amaxes, tuple(saved))


def _backward_contexts(
    plan: Plan,
    step: BackwardStep,
    saved: Any,
    state: Any,
    grad_extras: dict[tuple[int, int], torch.Tensor],
    grad_dtypes: dict[int, tuple[torch.dtype | None, ...]],
) -> tuple[BackwardContext, ...]:
    contexts = []
    for position, index in enumerate(step.indices):
        previous = None
        if position == 0 and step.prev_quantizer is not None:
            previous = _bind(step.prev_quantizer, state, index - 1, "grad_output")
        quantizers = step.quantizers[position]
        slots = plan.chain.ops[index].num_extra_outputs
        contexts.append(
            BackwardContext(
                saved[index],
                step.requires_grad[position],
                _bind_all(quantizers, state, index) if quantizers else _NO_STATE,
                previous,
                tuple([grad_extras.get((index, slot)) for slot in range(slots)]) if slots else (),
                plan.backend,
                plan.compute_dtype,
                grad_dtypes.get(index, ()) if grad_dtypes else (),
            )
        )
    return tuple(contexts)


def backward_pass(
    plan: Plan,
    saved: Any,
    state: Any,
    grad_output: Any,
    grad_extra_outputs: Any = (),
    launch: Callable[[Any, str, Any], Any] | None = None,
    grad_dtypes: dict[int, tuple[torch.dtype | None, ...]] | None = None,
) -> BackwardOutcome:
    """Run the backward of a plan.

    Args:
        plan: the plan that the forward ran.
        saved: what the forward saved.
        state: quantizer state; only the gradient quantizers' is read.
        grad_output: gradient of the main output.
        grad_extra_outputs: one gradient or None for every extra output returned to the caller.
        launch: how a step is launched; None calls its implementation.
        grad_dtypes: see :attr:`BackwardContext.grad_dtypes`, by op index.
    """
    block, dy = plan.chain, grad_output
    amaxes: Amaxes = {}
    grad_params: list[tuple[torch.Tensor | None, ...]] = [(None,) * len(op.param_names) for op in block.ops]
    grad_public: list[torch.Tensor | None] = [None] * block.num_extra_inputs
    grad_extras = {
        place: grad for place, grad in zip(block.extra_outputs, grad_extra_outputs, strict=False) if grad is not None
    }
    for step in plan.backward:
        if step.dense_grad and isinstance(dy, QuantizedTensor):
            dy = dy.dequantize()
        contexts = _backward_contexts(plan, step, saved, state, grad_extras, grad_dtypes or {})
        args = step.op.resolve_bwd_args(contexts if step.fused else contexts[0], dy)  # type: ignore[union-attr]
        result = step.op.backward_impl(args) if launch is None else launch(step.op, "backward", args)  # type: ignore[union-attr]
        if type(result) is not BwdResult:
            result = BwdResult(result[0], tuple(result[1:]))
        if result.grad_input is not None:
            dy = result.grad_input
        by_op = result.grad_params if step.fused else (result.grad_params,)
        for index, grads in zip(step.indices, by_op, strict=True):
            if grads:
                grad_params[index] = tuple(grads)
        if result.grad_extra_inputs:
            groups = result.grad_extra_inputs if step.fused else (result.grad_extra_inputs,)
            _route([block.extra_sources[index] for index in step.indices], groups, grad_public, grad_extras)
        if result.amaxes is not None:
            for role, amax in result.amaxes.items():
                amaxes[_observer(block, step.indices, role)] = amax
    if isinstance(dy, QuantizedTensor):
        dy = dy.dequantize()
    return BackwardOutcome(dy if plan.requires_grad[0] else None, tuple(grad_params), tuple(grad_public), amaxes)


def _observer(block: Any, indices: tuple[int, ...], role: str) -> tuple[int, str]:
    """Whose quantizer observed an amax of a backward step: the op before, or the covered op that has the role."""
    if role == "grad_input":
        return indices[0] - 1, "grad_output"
    position, _, own = role.rpartition(":")
    if position:
        return indices[int(position)], own
    for index in reversed(indices):
        if role in block.ops[index].backward_quantizers:
            return index, role
    return indices[-1], role


def _route(sources: Any, grads: Any, grad_public: list[Any], grad_extras: dict[tuple[int, int], Any]) -> None:
    """Send gradients of extra inputs of every covered op to the caller or to the producing op, summed out of place."""
    pairs = [pair for own, found in zip(sources, grads, strict=True) if found for pair in zip(own, found, strict=True)]
    for source, grad in pairs:
        if grad is None:
            continue
        if source.public >= 0:
            grad_public[source.public] = grad
        else:
            place = (source.op, source.slot)
            known = grad_extras.get(place)
            grad_extras[place] = grad if known is None else known + grad


def fold_amaxes(state: Any, amaxes: Amaxes) -> Any:
    """The state with every observation folded in; other entries are kept as they are."""
    if not amaxes:
        return state
    folded = [dict(roles) for roles in state]
    for (index, role), amax in amaxes.items():
        folded[index][role] = update_amax(folded[index][role], amax)
    return tuple(folded)
