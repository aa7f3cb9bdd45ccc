"""Argument checks that run before any kernel, and shape evaluation, which is the same walk."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from functional_te._errors import type_error, value_error
from functional_te.chain import Chain, where
from functional_te.fuser.plan import Plan
from functional_te.ops import FwdResult, OpRequiresGrad
from functional_te.quantization.quantizers import Float8DelayedScalingQuantizer, Quantizer
from functional_te.quantization.state import StochasticRoundingState, state_type
from functional_te.quantization.tensor import CachedWeight, QuantizedTensor
from functional_te.tensor_spec import TensorSpec, spec_of

__all__ = ["ShapeResult", "check_call", "check_state", "infer"]


class ShapeResult(NamedTuple):
    """Shapes of a chain's results.

    Attributes:
        output: :class:`TensorSpec` of the main output.
        extra_outputs: :class:`TensorSpec` of every extra output returned to the caller.
    """

    output: TensorSpec
    extra_outputs: tuple[TensorSpec, ...]


def infer(
    block: Chain,
    params: Any,
    x: Any,
    extra_inputs: tuple[Any, ...] = (),
    compute_dtype: torch.dtype | None = None,
    multiples: tuple[int, ...] = (),
) -> ShapeResult:
    """Check every argument of every op in order and evaluate shapes and dtypes, without storage.

    Args:
        multiples: :attr:`Plan.input_multiples`, or nothing to leave casts out of the check.
    """
    _check_structure(block, params, extra_inputs)
    device = _device(x)
    produced: dict[tuple[int, int], Any] = {}
    flow: Any = _logical(_spec(x, "input", where(block.ops, 0)))
    no_grads: dict[tuple[int, int], OpRequiresGrad] = {}
    for index, op in enumerate(block.ops):
        here = where(block.ops, index)
        own = {name: _spec(params[index][name], name, here, device) for name in op.param_names}
        for name in op.param_names:
            if name not in op.forward_quantizers and isinstance(params[index][name], (QuantizedTensor, CachedWeight)):
                raise type_error(here, name, "a tensor", type(params[index][name]).__name__)
        extras = []
        for slot, source in enumerate(block.extra_sources[index]):
            if source.public >= 0:
                there = None if slot in op.free_device_slots else device
                extras.append(_spec(extra_inputs[source.public], f"extra input {slot}", here, there))
            else:
                extras.append(produced[source.op, source.slot])
        op.check(flow, own, tuple(extras), here)
        if multiples and multiples[index] > 1:
            _check_features(flow, multiples[index], here)
        if not op.describes_output:
            return ShapeResult(flow, tuple(produced.get(place, flow) for place in block.extra_outputs))
        count = len(own), len(extras)
        if count not in no_grads:
            no_grads[count] = OpRequiresGrad(False, False, (False,) * count[0], (False,) * count[1])
        result = _evaluate(op, flow, own, tuple(extras), no_grads[count], compute_dtype)
        for slot, spec in enumerate(result.extra_outputs):
            produced[index, slot] = spec
        flow = flow if result.output is None else _logical(result.output)
    return ShapeResult(flow, tuple(produced[place] for place in block.extra_outputs))


def _check_features(x: Any, multiple: int, here: str) -> None:
    if len(x.shape) == 0 or x.shape[-1] % multiple:
        wanted = f"a last dimension that is a multiple of {multiple} to be cast"
        raise value_error(here, "input", wanted, f"shape {tuple(x.shape)}")


def _evaluate(
    op: Any,
    x: Any,
    params: Any,
    extras: tuple[Any, ...],
    requires_grad: OpRequiresGrad,
    compute_dtype: torch.dtype | None,
) -> FwdResult:
    provided = {
        "params": params,
        "state": {},
        "requires_grad": requires_grad,
        "compute_dtype": compute_dtype,
        "extra_inputs": extras,
    }
    names = op.provided_names
    args = op.resolve_fwd_args(x, **{name: value for name, value in provided.items() if name in names})
    if not hasattr(op, "forward_fake"):
        # an op of the user's without a fake: nothing is known of its output but what its input is
        return FwdResult(x, (), (x,) * op.num_extra_outputs)
    result = op.forward_fake(args)
    return result if type(result) is FwdResult else FwdResult(*result)


def _logical(spec: Any) -> Any:
    """The nominal spec of a quantized one."""
    if isinstance(spec, QuantizedTensor):
        return TensorSpec(tuple(spec.shape), spec.dtype, spec.device)
    return spec


def _device(x: Any) -> Any:
    return x.device if isinstance(x, (torch.Tensor, TensorSpec, QuantizedTensor)) else None


def _spec(value: Any, argument: str, here: str, device: Any = None) -> Any:
    if isinstance(value, CachedWeight):
        value = value.quantized if value.stored else value.value
    if not isinstance(value, (torch.Tensor, TensorSpec, QuantizedTensor)):
        raise type_error(here, argument, "a tensor", type(value).__name__)
    if isinstance(value, torch.Tensor) and value.layout is not torch.strided:
        raise type_error(here, argument, "a strided tensor", value.layout)
    if device is not None and torch.device(value.device) != torch.device(device):
        raise value_error(here, argument, f"device {device}, where the input is", f"device {value.device}")
    return spec_of(value)


def _check_structure(block: Chain, params: Any, extra_inputs: tuple[Any, ...]) -> None:
    if not isinstance(params, (tuple, list)):
        raise type_error("chain", "params", f"a tuple of {len(block)} dicts, one per op", type(params).__name__)
    if len(params) != len(block):
        raise value_error("chain", "params", f"{len(block)} entries, one per op", f"{len(params)} entries")
    for index, op in enumerate(block.ops):
        own = params[index]
        if not isinstance(own, Mapping):
            raise type_error(where(block.ops, index), "params", "a dict", type(own).__name__)
        if own.keys() != set(op.param_names):
            raise value_error(where(block.ops, index), "params", f"keys {list(op.param_names)}", f"keys {list(own)}")
    if len(extra_inputs) != block.num_extra_inputs:
        takers = [where(block.ops, i) for i, s in enumerate(block.extra_sources) for t in s if t.public >= 0]
        wanted = f"{block.num_extra_inputs} extra inputs" + (f" (for {', '.join(takers)})" if takers else "")
        raise value_error("chain", "extra_inputs", wanted, len(extra_inputs))


def check_call(plan: Plan, params: Any, x: Any, extra_inputs: tuple[Any, ...]) -> None:
    """Check the tensors of a call; remembered by their shapes, dtypes and devices."""
    block = plan.chain
    if torch.compiler.is_compiling():
        infer(block, params, x, extra_inputs, plan.compute_dtype, plan.input_multiples)
        _check_copies(plan, params, x)
        return
    checked: dict[Any, None] = block.checked  # type: ignore[attr-defined]
    try:
        key: list[Any] = [
            x.shape,
            x.dtype,
            x.device,
            plan.compute_dtype,
            plan.input_multiples,
            len(params),
            type(x),
            getattr(x, "layout", None),
        ]
        for own in params:
            key.append(len(own))
        for index, name in plan.param_slots:
            param = params[index][name]
            key += (type(param), param.shape, param.dtype, param.device)
            if isinstance(param, (QuantizedTensor, CachedWeight)):
                key.append((plan, _copies(param)))
        for extra in extra_inputs:
            key += (type(extra), extra.shape, extra.dtype, extra.device)
        if isinstance(x, QuantizedTensor):
            key.append((plan, _copies(x)))
        known = tuple(key)
    except (AttributeError, KeyError, IndexError, TypeError):  # something is amiss: the walk says what
        infer(block, params, x, extra_inputs, plan.compute_dtype, plan.input_multiples)
        raise
    if known in checked:
        return
    _refuse_specs(block, params, x, extra_inputs)
    infer(block, params, x, extra_inputs, plan.compute_dtype, plan.input_multiples)
    _check_copies(plan, params, x)
    if len(checked) >= 1024:
        checked.clear()
    checked[known] = None


def _copies(value: Any) -> Any:
    """What tells quantized operands apart: how they were made, and which copies they have."""
    quantized = value.quantized if isinstance(value, CachedWeight) else value
    rowwise, columnwise = quantized.rowwise_data is not None, quantized.columnwise_data is not None
    return quantized.quantizer, rowwise, columnwise, getattr(value, "stored", False)


def _check_copies(plan: Plan, params: Any, x: Any) -> None:
    """Raise unless quantized operands that the caller gives have the copies that the plan's products read."""
    block = plan.chain
    forward_only = plan.recipe is not None and plan.recipe.override is not None
    # a tensor that comes in cast is read by the first op that does not merely pass it on
    first = 0
    while first < len(block.ops) and block.ops[first].passes_input:
        first += 1
    given = [(first, "input", x)] if first < len(block.ops) else []
    for index, name in plan.param_slots:
        param = params[index][name]
        given.append((index, name, param.quantized if isinstance(param, CachedWeight) else param))
    if not torch.compiler.is_compiling():
        _check_casts(plan, params)
    for index, name, value in given:
        if not isinstance(value, QuantizedTensor) or name not in block.ops[index].forward_quantizers:
            continue
        rowwise, columnwise = block.ops[index].copies(name, plan.op_requires_grad[index])
        for needed, direction in ((rowwise, False), (columnwise and not forward_only, True)):
            if needed and plan.recipe is not None and not value.serves(direction):
                wanted = f"a quantized tensor with a {'columnwise' if direction else 'rowwise'} copy"
                got = f"one of {type(value.quantizer).__name__} without"
                raise value_error(where(block.ops, index), name, wanted, got, "See QuantizedTensor.requantize().")


def _check_casts(plan: Plan, params: Any) -> None:
    """Raise if a cached weight was cast for another recipe."""
    for step in plan.forward:
        for index, pairs in zip(step.indices, step.quantizers, strict=True):
            for role, quantizer in pairs:
                weight = params[index].get(role)
                if not isinstance(weight, CachedWeight) or weight.stored:
                    continue
                made = weight.quantized.quantizer
                if made.with_usage(True, True) is not quantizer.with_usage(True, True):
                    fix = "Cast again for this recipe; see fte.quantize_params()."
                    raise value_error(where(plan.chain.ops, index), role, f"a cast by {quantizer!r}", repr(made), fix)


def _refuse_specs(block: Chain, params: Any, x: Any, extra_inputs: tuple[Any, ...]) -> None:
    """Specs are for :func:`functional_te.eval_shape`."""
    named = [("input", 0, x), *[(name, i, own[name]) for i, own in enumerate(params) for name in own]]
    for slot, extra in enumerate(extra_inputs):
        named.append((f"extra input {slot}", 0, extra))
    for name, index, value in named:
        if isinstance(value, TensorSpec):
            raise type_error(where(block.ops, index), name, "a tensor", "a TensorSpec", "See fte.eval_shape().")


def check_state(plan: Plan, state: Any, device: Any = None) -> None:
    """Raise unless ``state`` has the structure that the plan's recipe needs, on ``device`` if one is given."""
    block = plan.chain
    recipe = "no recipe" if plan.recipe is None else type(plan.recipe).__name__
    if state is None:
        if any(plan.state_roles):
            raise value_error("chain", "state", f"the state of {recipe}", None, "See fte.init_state().")
        return
    if not isinstance(state, (tuple, list)) or len(state) != len(block):
        got = f"{len(state)} entries" if isinstance(state, (tuple, list)) else type(state).__name__
        raise value_error("chain", "state", f"{len(block)} entries, one per op", got)
    for index, roles in enumerate(plan.state_roles):
        own = state[index]
        if not isinstance(own, Mapping):
            raise type_error(where(block.ops, index), "state", "a dict", type(own).__name__)
        if len(own) != len(roles):
            raise value_error(
                where(block.ops, index),
                "state",
                f"entries {[role for role, _ in roles]} for {recipe}",
                f"entries {list(own)}",
                "A state belongs to one recipe; see fte.init_state().",
            )
        for role, quantizer in roles:
            if role not in own:
                raise value_error(where(block.ops, index), "state", f"an entry {role!r} for {recipe}", list(own))
            _check_entry(own[role], quantizer, where(block.ops, index), f"state[{role!r}]", device)


def _check_entry(state: Any, quantizer: Quantizer, here: str, argument: str, device: Any) -> None:
    kind: Any = state_type(quantizer)
    if not isinstance(state, kind):
        raise type_error(here, argument, f"a {kind.__name__}", type(state).__name__)
    if isinstance(state, StochasticRoundingState):
        tensors: tuple[Any, ...] = (
            ("key", state.key, 2, torch.int64),
            ("amax_history", state.amax_history, 1, torch.float32),
        )
    else:
        assert isinstance(quantizer, Float8DelayedScalingQuantizer)
        length = quantizer.amax_history_len
        tensors = (
            ("scale", state.scale, 1, torch.float32),
            ("amax_history", state.amax_history, length, torch.float32),
        )
    for name, tensor, size, dtype in tensors:
        if not isinstance(tensor, torch.Tensor):
            raise type_error(here, f"{argument}.{name}", "a tensor", type(tensor).__name__)
        if tensor.dtype is not dtype:
            raise type_error(here, f"{argument}.{name}", str(dtype).removeprefix("torch."), tensor.dtype)
        if tensor.dim() != 1 or tensor.shape[0] != size:
            got = tensor.shape[0] if tensor.dim() == 1 else f"shape {tuple(tensor.shape)}"
            raise value_error(here, f"{argument}.{name}", f"length {size}", got)
        if device is not None and tensor.device != device:
            wanted = f"device {device}, where the input is"
            raise value_error(here, f"{argument}.{name}", wanted, f"device {tensor.device}")
        if tensor._base is not None:
            raise value_error(here, f"{argument}.{name}", "a tensor of its own", "a view of another tensor")
