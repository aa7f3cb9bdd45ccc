"""The functional interface: init, init_state, apply, vjp, eval_shape, update_state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from functional_te._errors import type_error, value_error
from functional_te.agreement import agree_amaxes
from functional_te.chain import Chain, as_chain, where
from functional_te.check import ShapeResult, check_call, check_state, infer
from functional_te.fuser.plan import plan as make_plan
from functional_te.fuser.rule import Fusions
from functional_te.kernels import kernels
from functional_te.labels import labels
from functional_te.ops import Op
from functional_te.ops.op import FLOAT_DTYPES
from functional_te.params import by_op, in_containers_of
from functional_te.pipeline import backward_pass, fold_amaxes, forward_pass
from functional_te.quantization.recipes import Recipe
from functional_te.quantization.state import init_quantizer_state, update_scale
from functional_te.quantization.tensor import CachedWeight, bind

__all__ = [
    "ApplyResult", "Grads", "QuantizedParams", "apply", "bind_kwargs", "eval_shape", "init", "init_state",
    "quantize_params", "update_state", "vjp",
]  # fmt: skip

Block = Chain | Op
Params = tuple[dict[str, torch.Tensor], ...]
State = tuple[dict[str, Any], ...]


class ApplyResult(NamedTuple):
    """What :func:`apply` gives.

    Attributes:
        output: the main output.
        extra_outputs: the extra outputs returned to the caller.
        state: the quantizer state after this forward.
    """

    output: torch.Tensor
    extra_outputs: tuple[torch.Tensor, ...]
    state: Any


class Grads(NamedTuple):
    """What a pullback gives.

    Attributes:
        params: gradients in the structure of the parameters.
        input: gradient of the main input.
        extra_inputs: one gradient per extra input.
        state: the quantizer state after forward and backward.
    """

    params: Any
    input: torch.Tensor | None
    extra_inputs: tuple[torch.Tensor | None, ...]
    state: Any


def init(
    block: Block, *, seed: int = 0, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> Params:
    """Fresh parameters of a chain: a tuple with one dict per basic op.

    Random numbers are drawn on the CPU from one generator per op, so that values depend neither on the device nor on
    the other ops.

    Args:
        block: a chain or an op.
        seed: non-negative seed.
        dtype: float32, float16 or bfloat16.
        device: where the parameters live; ``"meta"`` gives parameters without storage.

    Raises:
        ValueError: another dtype, or a negative seed.
    """
    if not isinstance(seed, int) or isinstance(seed, bool) or seed < 0:
        raise value_error("init", "seed", "a non-negative int", repr(seed))
    if dtype not in FLOAT_DTYPES:
        raise value_error("init", "dtype", "float32, float16 or bfloat16", dtype)
    params = []
    for index, op in enumerate(as_chain(block).ops):
        generator = torch.Generator().manual_seed(seed * 1_000_003 + index)
        params.append(op.init_params(generator, dtype, device))
    return tuple(params)


def init_state(block: Block, recipe: Recipe | None, *, device: torch.device | str = "cpu", seed: int = 0) -> State:
    """Fresh quantizer state of a chain: a tuple with one dict per basic op, from role to state.

    The dicts are empty for high precision and for recipes without state.

    Args:
        block: a chain or an op.
        recipe: a recipe, or None for high precision.
        device: where the state lives.
        seed: seed of the random bits of stochastic rounding; every quantizer gets a key of its own.
    """
    roles = make_plan(as_chain(block), recipe=recipe).state_roles
    return tuple(
        {
            role: init_quantizer_state(quantizer, device, seed=seed, path=(index, place))
            for place, (role, quantizer) in enumerate(own)
        }
        for index, own in enumerate(roles)
    )


class QuantizedParams(NamedTuple):
    """What :func:`quantize_params` gives.

    Attributes:
        params: the parameters with cast weights in the place of weights.
        state: the quantizer state with what the casts observed.
    """

    params: Params
    state: Any


def quantize_params(
    block: Block,
    params: Any,
    recipe: Recipe | None,
    *,
    state: State | None = None,
    keep_values: bool = True,
    requires_grad: Any = True,
    backend: str = "auto",
) -> QuantizedParams:
    """Cast the weights of a chain once, for all microbatches of an optimizer step.

    The result goes in the place of the parameters, with the same results as casting in every call.

    Args:
        block: a chain or an op.
        params: parameters, see :func:`init`.
        recipe: a recipe; None gives the parameters back.
        state: quantizer state; may be None if casting weights needs none.
        keep_values: True gives :class:`CachedWeight` (the parameter and its cast: what :func:`bridge.apply`
            differentiates); False gives the :class:`QuantizedTensor` alone, for weights that are kept in low precision.
        requires_grad: which copies the backward will need; see :func:`functional_te.plan`.
        backend: ``"auto"`` or the name of a kernel backend.
    """
    block, given = as_chain(block), params
    params = by_op(block, given)
    device = next((value.device for own in params for value in own.values() if isinstance(value, torch.Tensor)), None)
    plan = make_plan(block, recipe=recipe, requires_grad=requires_grad, backend=backend, device=device)
    weights = {(index, name) for index, name in plan.param_slots}
    if state is not None or any(place in weights for place in plan.observes):
        check_state(plan, state)
    amaxes, cast = {}, [dict(own) for own in params]
    for step in plan.forward:
        for index, pairs in zip(step.indices, step.quantizers, strict=True):
            for role, quantizer in pairs:
                value = cast[index].get(role)
                if not isinstance(value, torch.Tensor):
                    continue  # no parameter, or one that is quantized already
                bound = bind(quantizer, state[index][role] if state is not None and quantizer.stateful else None)
                with torch.no_grad():
                    quantized, amax = kernels(plan.backend).quantize(value.detach(), bound, value.dtype)
                if amax is not None:
                    amaxes[index, role] = amax
                cast[index][role] = CachedWeight(value=value, quantized=quantized) if keep_values else quantized
    return QuantizedParams(in_containers_of(block, given, tuple(cast)), fold_amaxes(state, amaxes))


def update_state(block: Block, recipe: Recipe | None, state: State, *, group: str = "", size: int = 1) -> State:
    """Close a training step: every quantizer that observed something gets its next scale and a rolled history.

    Call it once per optimizer step, before the next forward. Under gradient accumulation it may be called once per
    step or once per microbatch; observations in between are combined by their maximum.

    Args:
        block: a chain or an op.
        recipe: the recipe, or None.
        state: the state after the backward.
        group: registry name of a process group whose ranks agree on the amaxes before the step is closed, so that they
            have the same scales; see :func:`functional_te.agree_amaxes`. An empty string is the default group.
        size: how many ranks it has. With one nothing is sent.
    """
    plan = make_plan(as_chain(block), recipe=recipe)
    check_state(plan, state)
    state = agree_amaxes(state, group, size)
    return tuple(
        {role: update_scale(quantizer, state[index][role]) for role, quantizer in own}
        for index, own in enumerate(plan.state_roles)
    )


def eval_shape(
    block: Block, params: Any, x: Any, *extra_inputs: Any, compute_dtype: torch.dtype | None = None
) -> ShapeResult:
    """Shapes and dtypes of a chain's results, without storage and without kernels.

    Args:
        block: a chain or an op.
        params: parameters: tensors or :class:`TensorSpec`.
        x: main input: a tensor or a :class:`TensorSpec`.
        extra_inputs: extra inputs, likewise.
        compute_dtype: see :func:`functional_te.plan`.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit, naming op, argument, got and wanted.
        TypeError: something is no tensor.
    """
    block = as_chain(block)
    return infer(block, by_op(block, params), x, tuple(extra_inputs), compute_dtype)


def bind_kwargs(block: Chain, kwargs: Any) -> dict[int, dict[str, Any]]:
    """Forward kwargs by op index, checked against the ops' signatures.

    Args:
        block: the chain.
        kwargs: None, or a mapping from op index to a mapping of forward kwargs.

    Raises:
        TypeError: no mapping.
        ValueError: an index outside the chain, a name that the op does not take, or what the op's check refuses.
    """
    asking: tuple[int, ...] = block.kwarg_ops  # type: ignore[attr-defined]
    if not kwargs and not asking:
        return {}
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise type_error("chain", "kwargs", "a mapping from op index to kwargs", type(kwargs).__name__)
    bound: dict[int, dict[str, Any]] = {}
    for index, own in (kwargs or {}).items():
        if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index < len(block):
            raise value_error("chain", "kwargs", f"op indices in [0, {len(block)})", repr(index))
        if not isinstance(own, Mapping):
            raise type_error(where(block.ops, index), "kwargs", "a mapping from names to values", type(own).__name__)
        names = block.ops[index].fwd_kwarg_names
        for name in own:
            if name not in names:
                raise value_error(where(block.ops, index), "kwargs", f"names among {sorted(names)}", repr(name))
        bound[index] = dict(own)
    for index in asking:
        block.ops[index].check_kwargs(bound.get(index, {}), where(block.ops, index))
    return bound


def apply(
    block: Block,
    params: Any,
    x: Any,
    *extra_inputs: torch.Tensor,
    state: State | None = None,
    recipe: Recipe | None = None,
    kwargs: Any = None,
    backend: str = "auto",
    fusions: Fusions | None = None,
    compute_dtype: torch.dtype | None = None,
) -> ApplyResult:
    """Run a chain forward. Pure: no argument is written to, nothing is recorded for autograd.

    Args:
        block: a chain or an op.
        params: a tuple with one dict of parameters per basic op, see :func:`init`; or other containers of them, see
            :func:`functional_te.params.by_op`.
        x: main input, float32, float16 or bfloat16, or a quantized tensor.
        extra_inputs: the extra inputs that come from no channel, in (op, slot) order.
        state: quantizer state; may be None for recipes without state.
        recipe: a recipe, or None for high precision.
        kwargs: forward kwargs by op index.
        backend: ``"auto"`` or the name of a kernel backend.
        fusions: the fusion rules to use, None for the default ones.
        compute_dtype: see :func:`functional_te.plan`.

    Raises:
        ValueError: shapes, dtypes, devices, channels or state that do not fit; raised before any kernel runs.
        TypeError: an argument of the wrong kind.
    """
    block = as_chain(block)
    plan = make_plan(
        block,
        recipe=recipe,
        requires_grad=False,
        backend=backend,
        compute_dtype=compute_dtype,
        fusions=fusions,
        device=getattr(x, "device", None),
    )
    params = by_op(block, params)
    check_call(plan, params, x, extra_inputs)
    check_state(plan, state, x.device)
    bound = bind_kwargs(block, kwargs)
    if torch.is_grad_enabled():
        with torch.no_grad():
            outcome = forward_pass(plan, x, params, state, extra_inputs, bound, labels())
    else:
        outcome = forward_pass(plan, x, params, state, extra_inputs, bound, labels())
    return ApplyResult(outcome.output, outcome.extra_outputs, fold_amaxes(state, outcome.amaxes))


def vjp(
    block: Block,
    params: Any,
    x: torch.Tensor,
    *extra_inputs: torch.Tensor,
    state: State | None = None,
    recipe: Recipe | None = None,
    kwargs: Any = None,
    backend: str = "auto",
    fusions: Fusions | None = None,
    compute_dtype: torch.dtype | None = None,
    requires_grad: Any = True,
) -> tuple[ApplyResult, Callable[..., Grads]]:
    """Run a chain forward and return its pullback. Pure, like :func:`apply`, whose arguments it takes.

    Args:
        requires_grad: True, or a pattern as in :func:`functional_te.plan`: what to differentiate.

    Returns:
        The result, and ``pullback(grad_output, *grad_extra_outputs) -> Grads``. An absent gradient of an extra
        output (None) counts as zeros. ``Grads.state`` has the observations of this forward and this backward.
    """
    block = as_chain(block)
    plan = make_plan(
        block,
        recipe=recipe,
        requires_grad=requires_grad,
        backend=backend,
        compute_dtype=compute_dtype,
        fusions=fusions,
        device=getattr(x, "device", None),
    )
    given, params = params, by_op(block, params)
    check_call(plan, params, x, extra_inputs)
    check_state(plan, state, x.device)
    with torch.no_grad():
        outcome = forward_pass(plan, x, params, state, extra_inputs, bind_kwargs(block, kwargs), labels())
    after_forward = fold_amaxes(state, outcome.amaxes)

    def pullback(grad_output: torch.Tensor, *grad_extra_outputs: torch.Tensor | None) -> Grads:
        check_grads(block, outcome, grad_output, grad_extra_outputs)
        with torch.no_grad():
            back = backward_pass(plan, outcome.saved, state, grad_output, grad_extra_outputs, labels())
        grads = tuple(
            dict(zip(op.param_names, own, strict=True)) for op, own in zip(block.ops, back.grad_params, strict=True)
        )
        returned = in_containers_of(block, given, grads)
        return Grads(returned, back.grad_input, back.grad_extra_inputs, fold_amaxes(after_forward, back.amaxes))

    return ApplyResult(outcome.output, outcome.extra_outputs, after_forward), pullback


def check_grads(block: Chain, outcome: Any, grad_output: Any, grad_extra_outputs: tuple[Any, ...]) -> None:
    """Raise unless the gradients given to a pullback fit the outputs of its forward."""
    if len(grad_extra_outputs) > len(block.extra_outputs):
        raise value_error(
            "pullback", "grad_extra_outputs", f"at most {len(block.extra_outputs)}", len(grad_extra_outputs)
        )
    outputs = (outcome.output, *outcome.extra_outputs)
    for position, (grad, output) in enumerate(zip((grad_output, *grad_extra_outputs), outputs, strict=False)):
        argument = "grad_output" if position == 0 else f"grad_extra_outputs[{position - 1}]"
        if grad is None and position > 0:
            continue
        if not isinstance(grad, torch.Tensor):
            raise type_error("pullback", argument, "a tensor", type(grad).__name__)
        if grad.dtype not in FLOAT_DTYPES:
            raise type_error("pullback", argument, "float32, float16 or bfloat16", grad.dtype)
        if grad.shape != output.shape or grad.device != output.device:
            raise value_error(
                "pullback",
                argument,
                f"shape {tuple(output.shape)} on {output.device}",
                f"shape {tuple(grad.shape)} on {grad.device}",
            )
