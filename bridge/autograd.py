"""The single autograd function: a whole chain is one node of autograd's graph.

Every distinct tensor is passed once, however many slots it fills (tied weights, a residual that is the input), and
its gradient is the sum over its slots. Inputs are saved as themselves; what the forward made is saved by value.
Quantizer state travels as an attribute of the context, because the backward writes to it.
"""

from __future__ import annotations

from typing import Any

import torch

from bridge import compat
from bridge.call import (
    Call,
    dense,
    distinct,
    eager_call,
    flat_call,
    grads_by_argument,
    merge_saved,
    refuse_second_derivatives,
    returned,
    split_saved,
)
from bridge.gate import eager_launcher, launcher
from bridge.program import MISFIT, forward_places, kinds_of, run_program, slots, states
from bridge.replay import replayed
from bridge.state import keep_gradient_scales, keep_scales, observe_
from functional_te import pytree
from functional_te._value import uid_of
from functional_te.api import bind_kwargs
from functional_te.chain import as_chain
from functional_te.check import check_call, check_state
from functional_te.fuser.plan import full_pattern
from functional_te.fuser.plan import plan as make_plan
from functional_te.params import by_op
from functional_te.pipeline import backward_pass, fold_amaxes, forward_pass
from functional_te.quantization.state import DelayedScalingState, StochasticRoundingState
from functional_te.quantization.tensor import CachedWeight, QuantizedTensor
from functional_te.recipes import Recipe

__all__ = ["apply", "run"]


def _forward(call: Call, unique: Any) -> tuple[list[torch.Tensor], Any, Any, Any]:
    """Outputs (main, extra, amaxes), what is to be saved, and the state and the buffers that the backward writes."""
    plan = call.plan
    x, params, extra_inputs, kwargs, state, targets = call.arguments(unique)
    if torch.compiler.is_compiling():
        outcome = forward_pass(plan, x, params, keep_scales(plan, state), extra_inputs, kwargs, launcher(plan))
    else:
        launch = eager_launcher(plan, "forward", call.takeovers)
        outcome = forward_pass(plan, x, params, state, extra_inputs, kwargs, launch)
    return returned(plan, outcome), outcome.saved, state, targets


def _grad_dtypes(call: Call, targets: Any) -> dict[int, tuple[torch.dtype | None, ...]] | None:
    """The dtypes of parameter gradients that are added to buffers, by op index."""
    if not call.main_grads:
        return None
    dtypes: dict[int, tuple[torch.dtype | None, ...]] = {}
    for own, target in zip(call.main_grads, targets, strict=True):
        known = dtypes.get(own.op, (None,) * len(call.plan.chain.ops[own.op].param_names))
        dtypes[own.op] = (*known[: own.param], target.dtype, *known[own.param + 1 :])
    return dtypes


def _accumulate(call: Call, targets: Any, grad_params: Any) -> Any:
    """Add gradients to their buffers; the gradients that are returned."""
    returned = [list(grads) for grads in grad_params]
    for own, target in zip(call.main_grads, targets, strict=True):
        grad = returned[own.op][own.param]
        if grad is not None:
            returned[own.op][own.param] = own.add(target, grad)
    return returned


def _backward(call: Call, saved: Any, state: Any, targets: Any, grads: Any, count: int) -> tuple[Any, ...]:
    """One gradient or None for each of ``count`` arguments; what the backward observes is written to ``state``."""
    plan = call.plan
    compiling = torch.compiler.is_compiling()
    launch = launcher(plan) if compiling else eager_launcher(plan, "backward", call.takeovers)
    grad_extras = grads[1 : 1 + len(plan.chain.extra_outputs)]
    reads = keep_gradient_scales(plan, state) if compiling and call.closes else state
    outcome = backward_pass(plan, saved, reads, grads[0], grad_extras, launch, _grad_dtypes(call, targets))
    observe_(plan, state, outcome.amaxes, call.closes)
    grad_params = _accumulate(call, targets, outcome.grad_params) if call.main_grads else outcome.grad_params
    return tuple(grads_by_argument(outcome, grad_params, call.grad_slots, count))


def _zeros_if_absent(grads: Any, like: Any) -> tuple[Any, ...]:
    """The rule for a main output that the loss does not use: its gradient is zeros."""
    if grads[0] is not None or like is None:  # a traced forward knows of no absent gradients
        return tuple(grads)
    shape, dtype, device = like
    return (torch.zeros(shape, dtype=dtype, device=device), *grads[1:])


class ChainFunction(torch.autograd.Function):
    """A planned chain."""

    @staticmethod
    def forward(ctx: Any, call: Call, *unique: Any) -> Any:
        """Run the forward; amaxes are returned beside the outputs and are not differentiable."""
        outputs, saved, state, ctx.targets = _forward(call, unique)
        leaves, ctx.saved_spec = pytree.tree_flatten(saved)
        tensors, ctx.values = split_saved(leaves)
        ctx.save_for_backward(*tensors)
        ctx.call, ctx.state, ctx.count = call, state, len(unique)
        ctx.set_materialize_grads(False)
        observed = len(call.plan.observes)
        if observed:
            ctx.mark_non_differentiable(*outputs[-observed:])
        # not is_compiling(), which another thread that compiles may have set for the process
        if not torch.compiler.is_dynamo_compiling():
            ctx.like = (outputs[0].shape, outputs[0].dtype, outputs[0].device)
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Run the backward."""
        if not torch.compiler.is_compiling() and torch.is_grad_enabled():
            refuse_second_derivatives()
        if not torch.compiler.is_dynamo_compiling():
            grads = _zeros_if_absent(grads, getattr(ctx, "like", None))
        device = grads[0].device.type
        saved = pytree.tree_unflatten(ctx.saved_spec, merge_saved(ctx.values, ctx.saved_tensors))
        # a traced backward always leaves autocast: the state that matters is the one around the compiled call
        if torch.compiler.is_compiling() or torch.is_autocast_enabled(device):
            with torch.autocast(device, enabled=False):
                result = _backward(ctx.call, saved, ctx.state, ctx.targets, grads, ctx.count)
        else:
            result = _backward(ctx.call, saved, ctx.state, ctx.targets, grads, ctx.count)
        return (None, *result)


class TransformableChainFunction(torch.autograd.Function):
    """The same for ``torch.func`` transforms, which need everything that is saved to be an input or an output."""

    generate_vmap_rule = True

    @staticmethod
    def forward(call: Call, *unique: Any) -> Any:
        """Run the forward; fresh saved tensors follow the outputs and amaxes."""
        outputs, saved, _, _ = _forward(call, unique)
        leaves, call.saved_spec = pytree.tree_flatten(saved)
        tensors, call.saved_values = split_saved(leaves)
        places = []
        for leaf in tensors:
            known = next((i for i, argument in enumerate(unique) if argument is leaf), -1)
            if known < 0:
                outputs.append(leaf)
            places.append((known >= 0, known if known >= 0 else len(outputs) - 1))
        call.saved_places = tuple(places)
        return tuple(outputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Save inputs and outputs."""
        call, *unique = inputs
        ctx.call, ctx.count = call, len(unique)
        ctx.save_for_backward(*[unique[i] if is_input else output[i] for is_input, i in call.saved_places])
        differentiable = 1 + len(call.plan.chain.extra_outputs)
        ctx.mark_non_differentiable(*output[differentiable:])
        ctx.state = call.arguments(unique)[4]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Run the backward."""
        saved = pytree.tree_unflatten(ctx.call.saved_spec, merge_saved(ctx.call.saved_values, ctx.saved_tensors))
        with torch.autocast(grads[0].device.type, enabled=False):
            return (None, *_backward(ctx.call, saved, ctx.state, (), grads, ctx.count))


def _requires(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.requires_grad
    return isinstance(value, CachedWeight) and value.value.requires_grad


def _pattern(block: Any, params: Any, x: Any, extra_inputs: Any) -> Any:
    """What of a call needs a gradient."""
    if not torch.is_grad_enabled() or len(extra_inputs) != block.num_extra_inputs:
        return full_pattern(block, False)
    return (
        _requires(x),
        tuple(
            [
                tuple([_requires(own[name]) for name in op.param_names])
                for op, own in zip(block.ops, params, strict=True)
            ]
        ),
        tuple([_requires(extra) for extra in extra_inputs]),
    )


def _has_own_gradients(block: Any, recipe: Any) -> bool:
    """Whether gradients may be others than derivatives of the forward: of casts, and of ops of the user's.

    A tracer of ``torch.func`` transforms drops the backward of an autograd function and differentiates its forward.
    """
    return recipe is not None or any(not type(op).__module__.startswith("functional_te.") for op in block.ops)


def run(
    block: Any,
    params: Any,
    x: Any,
    extra_inputs: tuple[Any, ...] = (),
    state: Any = None,
    recipe: Any = None,
    kwargs: Any = None,
    backend: str = "auto",
    fusions: Any = None,
    closes: bool = False,
    main_grads: Any = (),
    takeovers: Any = None,
    in_place: bool = False,
) -> tuple[list[torch.Tensor], dict[tuple[int, str], torch.Tensor]]:
    """Run a chain differentiably. Takes the arguments of :func:`apply`, with ``block`` as a chain.

    Args:
        closes: whether the backward closes the step of its quantizers.
        main_grads: destinations of parameter gradients; see :mod:`bridge.main_grad`.
        takeovers: see :class:`bridge.call.Call`.
        in_place: whether eager casts may observe into the histories of ``state``; amaxes that did are the histories. A
            call that fails half way leaves there what it observed.

    Returns:
        The main output and the extra outputs; and the observed forward amaxes by (op index, role).
    """
    device = x.device.type if isinstance(x, (torch.Tensor, QuantizedTensor)) else "cpu"
    if device != "meta" and torch.is_autocast_enabled(device):
        compute_dtype = torch.get_autocast_dtype(device)
        with torch.autocast(device, enabled=False):
            return _run(
                block,
                params,
                x,
                extra_inputs,
                state,
                recipe,
                kwargs,
                backend,
                fusions,
                compute_dtype,
                closes,
                main_grads,
                takeovers,
                in_place,
            )
    return _run(
        block,
        params,
        x,
        extra_inputs,
        state,
        recipe,
        kwargs,
        backend,
        fusions,
        None,
        closes,
        main_grads,
        takeovers,
        in_place,
    )


def _run(
    block: Any,
    params: Any,
    x: Any,
    extra_inputs: tuple[Any, ...],
    state: Any,
    recipe: Any,
    kwargs: Any,
    backend: str,
    fusions: Any,
    compute_dtype: Any,
    closes: bool,
    main_grads: Any,
    takeovers: Any,
    in_place: bool,
) -> tuple[list[torch.Tensor], dict[tuple[int, str], torch.Tensor]]:
    compiling = torch.compiler.is_compiling()
    if compiling and compat.functorch_active() and _has_own_gradients(block, recipe):
        raise RuntimeError(
            "functional_te: torch.func transforms inside of compiled code would differentiate through casts. Compile "
            "functional_te.vjp instead, or transform outside of compiled code."
        )
    if not (kwargs or main_grads or takeovers):
        way = (fusions, backend, compute_dtype, closes)
        known = _known(block, params, x, extra_inputs, state, recipe, way, in_place)
        if known is not None:
            return known
    try:
        pattern = _pattern(block, params, x, extra_inputs)
    except (KeyError, IndexError, ValueError, TypeError):
        pattern = full_pattern(block, False)  # params do not fit; the check below says how
    plan = make_plan(
        block,
        recipe=recipe,
        requires_grad=pattern,
        backend=backend,
        compute_dtype=compute_dtype,
        fusions=fusions,
        device=getattr(x, "device", None),
    )
    check_call(plan, params, x, extra_inputs)
    check_state(plan, state, x.device)
    bound = bind_kwargs(block, kwargs)
    if not plan.output_requires_grad:
        launch = launcher(plan) if compiling else eager_launcher(plan, "forward", takeovers)
        outcome = forward_pass(plan, x, params, state, extra_inputs, bound, launch)
        return [dense(outcome.output), *outcome.extra_outputs], outcome.amaxes
    if not compiling and compat.forward_ad_active():
        raise NotImplementedError(
            "functional_te: a chain that is recorded for autograd has no forward-mode derivative (torch.func.jvp, "
            "jacfwd, hessian). In high precision, call it under torch.no_grad(): its kernels have one."
        )
    bundle = (x, params, extra_inputs, bound, state, tuple([own.target for own in main_grads]))
    if compiling:
        call, unique = flat_call(plan, bundle, closes, main_grads)
        results = ChainFunction.apply(call, *unique)
    elif compat.functorch_active():
        if any(plan.state_roles):
            raise RuntimeError(
                "functional_te: a chain whose recipe has state cannot run under torch.func transforms, because its "
                "backward writes observations into the state. Use functional_te.vjp, which returns them as values."
            )
        if main_grads or takeovers:
            raise RuntimeError(
                "functional_te: accumulate_into_main_grad, delay_wgrad_compute and buffers of the caller cannot be "
                "used under torch.func transforms."
            )
        call, unique = flat_call(plan, bundle, closes)
        results = TransformableChainFunction.apply(call, *unique)
    else:
        call, unique = eager_call(plan, bundle, closes, main_grads)
        call.takeovers = takeovers
        results = ChainFunction.apply(call, *unique)
    if isinstance(results, torch.Tensor):
        return [results], {}
    count = 1 + len(block.extra_outputs)
    return list(results[:count]), dict(zip(plan.observes, results[count:], strict=False))


def _entries(state: Any, places: list[list[str]]) -> list[torch.Tensor] | None:
    """What casts read and the amax history of every entry of a state, or None if it does not fit."""
    if not places:
        return []
    entries = []
    for index, role, field in places:
        if not isinstance(state, (tuple, list)) or len(state) <= int(index) or role not in state[int(index)]:
            return None
        own = state[int(index)][role]
        if not isinstance(own, (DelayedScalingState, StochasticRoundingState)) or not hasattr(own, field):
            return None
        entries.extend([own.read, own.amax_history])
    reads = entries[::2]
    if len(distinct(reads)[0]) != len(reads) or any(tensor._base is not None for tensor in entries):
        return None
    return entries


def _known(
    block: Any, params: Any, x: Any, extra_inputs: Any, state: Any, recipe: Any, way: tuple[Any, ...], in_place: bool
) -> tuple[list[torch.Tensor], dict[tuple[int, str], torch.Tensor]] | None:
    """A call by what was written down of calls like it; None if the pipeline has to run."""
    fusions, backend, compute_dtype, closes = way
    if torch.compiler.is_dynamo_compiling():
        traced = (uid_of(fusions), backend, compute_dtype, (), closes)
        return _recorded(block, params, x, extra_inputs, state, recipe, traced)
    return replayed(block, params, x, extra_inputs, state, recipe, (fusions, backend, compute_dtype), in_place)


def _recorded(
    block: Any, params: Any, x: Any, extra_inputs: Any, state: Any, recipe: Any, way: tuple[Any, ...]
) -> tuple[list[torch.Tensor], dict[tuple[int, str], torch.Tensor]] | None:
    """A traced call by its recorded functions; None if the pipeline has to be traced, or to say what does not fit."""
    if not isinstance(params, (tuple, list)) or len(params) != len(block):
        return None
    places: list[list[str]] = []
    if recipe is not None:
        if not isinstance(recipe, Recipe):
            return None
        text = states(block.uid, recipe.uid)
        if text == MISFIT:
            return None
        places = [place.split(":") for place in text.split()]
    entries = _entries(state, places)
    given = []
    for slot in slots(block.uid).split():
        index, _, name = slot.partition(":")
        if name not in params[int(index)]:
            return None
        given.append(params[int(index)][name])
    if entries is None:
        return None
    found = run_program(block, given, x, extra_inputs, entries, kinds_of(entries), recipe, way)
    if found is None:
        return None
    outputs, amaxes, name = found
    keys = [(int(places[place][0]), places[place][1]) for place in forward_places(name)]
    return outputs, dict(zip(keys, amaxes, strict=True))


def apply(
    block: Any,
    params: Any,
    x: Any,
    *extra_inputs: torch.Tensor,
    state: Any = None,
    recipe: Any = None,
    kwargs: Any = None,
    backend: str = "auto",
    fusions: Any = None,
) -> tuple[Any, Any]:
    """Run a chain differentiably, in eager mode or inside ``torch.compile(fullgraph=True)``.

    Functional about the forward: the state with the forward's observations comes back as a value. What the backward
    observes is folded into slot 0 of the gradient quantizers' histories *of the state that was passed in*, like a
    donated buffer; :func:`functional_te.vjp` gives everything as values. A compiled function may update a state it was
    given and pass it on, but may not also return one that it made and used: the compiler refuses to write to its own
    output in the backward. The products, norms and activations follow
    ``torch.autocast`` if it is enabled.

    Args:
        block: a chain or an op.
        params: a tuple with one dict of parameters per basic op, see :func:`functional_te.init`, or other containers of
            them, see :func:`functional_te.params.by_op`; :func:`functional_te.quantize_params` for weights that are
            cast already. A :class:`CachedWeight` passes the
            gradient to its value; a :class:`QuantizedTensor` gets none.
        x: main input: a tensor of any stride, or a quantized tensor.
        extra_inputs: the extra inputs that come from no channel, in (op, slot) order.
        state: quantizer state; may be None for recipes without state.
        recipe: a recipe, or None for high precision.
        kwargs: forward kwargs by op index: tensors, quantized tensors and plain values. They get no gradients.
        backend: ``"auto"`` or the name of a kernel backend.
        fusions: the fusion rules to use, None for the default ones.

    Returns:
        ``(y, new_state)``; for a chain that returns extra outputs ``((y, *extra_outputs), new_state)``. The gradient
        of an output that the loss does not use counts as zeros, and is not observed.

    Raises:
        ValueError: shapes, dtypes, devices, channels or state that do not fit; raised before any kernel runs.
        TypeError: an argument of the wrong kind.
    """
    block = as_chain(block)
    outputs, amaxes = run(block, by_op(block, params), x, extra_inputs, state, recipe, kwargs, backend, fusions)
    return outputs[0] if len(outputs) == 1 else tuple(outputs), fold_amaxes(state, amaxes)
