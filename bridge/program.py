"""Chains as straight-line functions: what Dynamo traces in the place of the pipeline.

The forward and the backward of a plan do the same for every call with tensors of the same kind: some custom ops, in
order, on tensors and constants. So the first compiled call of a kind runs the pipeline once, on tensors without
storage, and writes down what it does as a function of tensors. Dynamo then traces that function: a few calls with
literal arguments, and nothing of plans, ops and quantizers, whose attributes it would have to guard. That makes
tracing quick and a compiled call's guards few.

Everything that decides which function it is goes into one key of strings and constants. Leading dimensions do not: a
function fits every number of tokens, or else there is none, and the pipeline is traced as it is. So it is for calls
with forward kwargs, quantized arguments, hooks, or ops without a custom op.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Sequence
from typing import Any

import torch

from bridge import compat, recording
from bridge.call import distinct
from bridge.glue import call_source, define
from functional_te._value import Table, uid_of, value_of
from functional_te.chain import Chain
from functional_te.fuser import default_fusions
from functional_te.fuser.plan import find_plan

__all__ = ["MISFIT", "as_made", "fold", "forward_places", "kinds_of", "run_program", "slots", "states"]

_log = logging.getLogger("functional_te")
_functions = Table()
# by key, what :func:`_find` returns
_found: dict[Any, str] = {}
_PLAIN = (torch.Tensor, torch.nn.Parameter)
# what :func:`states` gives for a recipe that does not fit a chain
MISFIT = "misfit"


@torch.compiler.assume_constant_result
def slots(block: str) -> str:
    """The parameters of a chain (by uid) as ``op:name``, separated by spaces."""
    return " ".join(f"{i}:{name}" for i, op in enumerate(value_of(block).ops) for name in op.param_names)


@torch.compiler.assume_constant_result
def states(block: str, recipe: str) -> str:
    """The entries of a chain's state under a recipe (by uids) as ``op:role:field``; the field is what casts read.

    :data:`MISFIT` for a recipe that does not fit.
    """
    try:
        roles = find_plan(value_of(block), value_of(recipe), True, "reference", None, None).state_roles
    except (ValueError, TypeError):  # tracing the pipeline says why
        return MISFIT
    return " ".join(
        f"{i}:{role}:{'key' if quantizer.stochastic else 'scale'}"
        for i, own in enumerate(roles)
        for role, quantizer in own
    )


@torch.compiler.assume_constant_result
def _find(key: Any) -> str:
    """Find or make the functions of a key, for real while a caller is traced.

    Returns:
        Their name; empty if the pipeline has to be traced.
    """
    own = (key, default_fusions().uid)  # which may have become others since
    found = _found.get(own)
    if found is None:
        try:
            found = _make(recording.Key(*key), f"program_{len(_found)}")
        except Exception as error:  # not remembered: another call may fare better
            _log.warning("a call is traced as it is: %s: %s", type(error).__name__, error)
            return ""
        _found[own] = found
    return found


def _make(key: recording.Key, name: str) -> str:
    key = key._replace(kinds=tuple(recording.Kind(*kind) for kind in key.kinds))
    if len(key.entries) == 1:
        key = key._replace(entries=recording.AsMade(*key.entries))
    else:
        key = key._replace(entries=tuple(recording.Kind(*kind) for kind in key.entries))
    try:
        made = recording.record(key)
    except (ValueError, TypeError, NotImplementedError, recording.Unsupported) as error:
        # of arguments that do not fit, tracing the pipeline tells the caller
        _log.info("the pipeline of %s is traced as it is: %s", value_of(key.block), error)
        return ""
    around = define(call_source(made, name), __name__, {"_functions": _functions, "ProgramFunction": ProgramFunction})
    own: dict[str, Any] = {part: around[part] for part in ("run", "enter", "leave", "places", "fold") if part in around}
    # forward and backward are those of the recording; its fold is called by that which takes all entries
    recorded = {"amaxes" if part == "fold" else part: function for part, function in made.functions.items()}
    for part, function in {**own, **recorded}.items():
        setattr(_functions, f"{name}_{part}", function)
    return name


class ProgramFunction(torch.autograd.Function):
    """A recorded chain. Arguments: the distinct tensors, what ``begin`` gave, the state that the backward writes."""

    @staticmethod
    def forward(ctx: Any, name: str, *tensors: torch.Tensor) -> Any:
        """Run the forward; amaxes are returned beside the outputs and are not differentiable."""
        ctx.name = name
        return getattr(_functions, f"{name}_enter")(ctx, tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Run the backward; what it observes is written to the state."""
        function, device = getattr(_functions, f"{ctx.name}_leave"), grads[0].device.type
        if device == "meta":  # knows no autocast
            return function(ctx, grads)
        # a traced backward always leaves autocast: the state that matters is the one around the compiled call
        with torch.autocast(device, enabled=False):
            return function(ctx, grads)


def _device(tensor: torch.Tensor) -> Any:
    return tensor.device.type, tensor.device.index


def _definite(tensor: torch.Tensor) -> Any:
    """The kind of a tensor all of whose sizes are definite."""
    return tuple([operator.index(size) for size in tensor.shape]), tensor.dtype, _device(tensor)


def _open(tensor: torch.Tensor, x: torch.Tensor) -> Any:
    """The kind of the input ``x`` or of an extra input, whose sizes may differ as the input's leading ones do."""
    sizes: list[int | str] = []
    last = x.dim() - 1
    for axis in range(tensor.dim()):
        if axis < last and (tensor is x or tensor.shape[axis] == x.shape[axis]):
            sizes.append(f"size {axis}")
        else:
            sizes.append(operator.index(tensor.shape[axis]))
    return tuple(sizes), tensor.dtype, _device(tensor)


def run_program(
    block: Chain,
    params: Sequence[Any],
    x: Any,
    extra_inputs: Sequence[Any],
    entries: Sequence[torch.Tensor],
    kinds_of_entries: Any,
    recipe: Any,
    way: tuple[Any, ...],
) -> tuple[list[torch.Tensor], list[torch.Tensor], str] | None:
    """Run a chain by its recorded functions, in code that is being traced.

    Args:
        block, x, extra_inputs, recipe: as for :func:`bridge.apply`.
        params: the parameters of :func:`slots`.
        entries: what casts read and the amax history of every entry of the state, in the order of :func:`states`.
        kinds_of_entries: :func:`kinds_of` them, or the fields of :class:`bridge.recording.AsMade`.
        way: the fields of :class:`bridge.recording.Key` from ``fusions`` to ``closes``.

    Returns:
        The outputs, the observed forward amaxes, and the name that :func:`fold` takes; None if the pipeline has to be
        traced.
    """
    if compat.functorch_active():  # differentiates what it sees; the pipeline says where that would be wrong
        return None
    leaves = [x, *params, *extra_inputs]
    for leaf in leaves:
        if type(leaf) not in _PLAIN or leaf.layout is not torch.strided or leaf.dim() == 0:
            return None
    graded = torch.is_grad_enabled()
    flags = tuple([graded and leaf.requires_grad for leaf in leaves])
    kinds = [_open(x, x)]
    kinds.extend([_definite(leaf) for leaf in params])
    kinds.extend([_open(leaf, x) for leaf in extra_inputs])
    unique, places = distinct(leaves)
    name = _find((block.uid, uid_of(recipe), *way, flags, tuple(kinds), places, kinds_of_entries))
    if name == "":
        return None
    outputs, amaxes = getattr(_functions, f"{name}_run")(unique, entries)
    return outputs, amaxes, name


def kinds_of(tensors: Sequence[torch.Tensor]) -> Any:
    """The kinds of tensors all of whose sizes are definite."""
    return tuple([_definite(tensor) for tensor in tensors])


def as_made(entries: Sequence[torch.Tensor]) -> Any:
    """The fields of :class:`bridge.recording.AsMade` for the entries of a state."""
    return (_device(entries[0]),)


def fold(name: str, entries: Sequence[torch.Tensor], amaxes: Sequence[torch.Tensor]) -> None:
    """Fold the forward's amaxes into the histories among ``entries``, in place; ``name`` comes with the amaxes."""
    getattr(_functions, f"{name}_fold")(entries, amaxes)


def forward_places(name: str) -> list[int]:
    """Which entries of the state the amaxes of a call belong to."""
    found: list[int] = getattr(_functions, f"{name}_places")()
    return found
