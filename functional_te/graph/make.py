"""``fte.graph``: check the arguments, plan, trace, and build; a broken chain gives the graph up to the fault."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from functional_te._errors import kind_of, type_error
from functional_te.chain import Chain, as_chain, chain
from functional_te.check import infer
from functional_te.graph.build import NO_FUSIONS, graph_of, with_unreached, without_fusions
from functional_te.graph.devices import Device, device_of, here
from functional_te.graph.plans import plan_of
from functional_te.graph.trace import Trace, Undescribed, described, trace
from functional_te.graph.value import Graph
from functional_te.ops import Op
from functional_te.params import by_op
from functional_te.pytree import tree_map
from functional_te.quantization.tensor import QuantizedTensor
from functional_te.tensor_spec import TensorSpec

__all__ = ["make_graph", "plan_of_call"]


def make_graph(block: Any, params: Any, x: Any, extra_inputs: tuple[Any, ...], device: Any, **options: Any) -> Graph:
    """The graph of a chain; :func:`functional_te.graph` documents the arguments.

    Args:
        block: a chain, an op, or a sequence of both, which need not fit together.
        params: parameters or their specs, or None.
        x: the main input or its spec.
        extra_inputs: the extra inputs or their specs.
        device: the device to estimate for, or None.
        options: ``backend`` and what else :func:`functional_te.plan` takes.
    """
    if not isinstance(x, (torch.Tensor, TensorSpec, QuantizedTensor)):
        raise type_error("graph", "x", "a tensor or a TensorSpec", kind_of(x))
    kind = torch.device(x.device).type
    on = here(kind) if device is None else device_of(device)
    options["device"] = None if kind == "meta" else kind
    if isinstance(block, Sequence):
        return _of_sequence(tuple(block), params, x, extra_inputs, on, options)
    return _of_chain(as_chain(block), params, x, extra_inputs, on, options)


def plan_of_call(block: Chain, x: Any, **options: Any) -> Any:
    """The plan that the graph of a call shows."""
    kind = torch.device(x.device).type
    return plan_of(block, **{**options, "device": None if kind == "meta" else kind})


def _of_sequence(
    blocks: tuple[Any, ...], params: Any, x: Any, extra_inputs: tuple[Any, ...], on: Device, options: dict[str, Any]
) -> Graph:
    """The graph of ops that may not make a chain: channels that lead nowhere, say."""
    flat = tuple(op for own in blocks for op in (own.ops if isinstance(own, Chain) else (own,)))
    try:
        whole = chain(*flat)
    except ValueError as error:
        if not all(isinstance(op, Op) for op in flat) or not flat:
            raise
        count = next(n for n in range(len(flat)) if not _makes_chain(flat[: n + 1]))
        return _up_to(flat, count, str(error), params, x, extra_inputs, on, options)
    return _of_chain(whole, params, x, extra_inputs, on, options)


def _makes_chain(ops: tuple[Op, ...]) -> bool:
    try:
        chain(*ops)
    except ValueError:
        return False
    return True


def _of_chain(
    block: Chain, params: Any, x: Any, extra_inputs: tuple[Any, ...], on: Device, options: dict[str, Any]
) -> Graph:
    if params is None:
        params = tuple(op.param_specs(x.dtype, x.device) for op in block.ops)
    params = by_op(block, params)
    try:
        plan, run, alone = _traces(block, params, x, extra_inputs, options)
    except Undescribed as error:
        index, message = error.args
        return _up_to(block.ops, index, message, params, x, extra_inputs, on, options)
    except (TypeError, ValueError) as error:
        # errors of an op start with its index, and those of the call as a whole do not
        if not str(error).startswith("op "):
            raise
        count = _sound(block, params, x, extra_inputs, options)
        return _up_to(block.ops, count, str(error), params, x, extra_inputs, on, options)
    return graph_of(plan, run, alone, on)


def _traces(
    block: Chain, params: Any, x: Any, extra_inputs: tuple[Any, ...], options: dict[str, Any]
) -> tuple[Any, Trace, Trace]:
    plan = plan_of(block, **options)
    infer(block, params, x, extra_inputs, plan.compute_dtype, plan.input_multiples)
    x, params, extra_inputs = tree_map(described, (x, tuple(params), extra_inputs))
    known: dict[Any, Any] = {}
    run = trace(plan, x, params, extra_inputs, known)
    if without_fusions(plan):
        return plan, run, run
    alone = plan_of(block, **{**options, "fusions": NO_FUSIONS})
    return plan, run, trace(alone, x, params, extra_inputs, known)


def _prefix(block: Chain, count: int, extra_inputs: tuple[Any, ...]) -> tuple[Chain, tuple[Any, ...]]:
    first = Chain(block.ops[:count])
    return first, extra_inputs[: first.num_extra_inputs]


def _sound(block: Chain, params: Any, x: Any, extra_inputs: tuple[Any, ...], options: dict[str, Any]) -> int:
    """How many ops from the first on have nothing wrong."""
    for count in range(1, len(block) + 1):
        first, extras = _prefix(block, count, extra_inputs)
        try:
            plan = plan_of(first, **_of_prefix(options))
            infer(first, params[:count], x, extras, plan.compute_dtype, plan.input_multiples)
        except (TypeError, ValueError):
            return count - 1
    return len(block) - 1


def _of_prefix(options: dict[str, Any]) -> dict[str, Any]:
    pattern = options.get("requires_grad", True)
    return {**options, "requires_grad": pattern if isinstance(pattern, bool) else True}


def _written(recipe: Any) -> str:
    return "" if recipe is None else repr(recipe)


def _up_to(
    ops: tuple[Op, ...],
    count: int,
    error: str,
    params: Any,
    x: Any,
    extra_inputs: tuple[Any, ...],
    on: Device,
    options: dict[str, Any],
) -> Graph:
    """The graph of the first ``count`` ops, with the fault marked on the next."""
    if count == 0:
        sound = Graph((), (), (), (), _written(options.get("recipe")), options.get("backend", "auto"), on)
    else:
        first = Chain(ops[:count])
        own = None if params is None else params[:count]
        sound = _of_chain(first, own, x, extra_inputs[: first.num_extra_inputs], on, _of_prefix(options))
    return with_unreached(sound, ops, error)
