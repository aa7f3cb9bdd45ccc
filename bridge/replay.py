"""Eager calls that were made before: their launches again, without the pipeline.

On a GPU an eager step of a small chain waits for Python: plans, bundles, quantizers and checks decide on every call
what they decided before. So a call whose tensors have the shapes, dtypes and devices of earlier ones, under the same
recipe, runs two straight-line functions instead (:mod:`bridge.tape`): one that allocates what the forward makes and
launches its kernels, one for the backward. They launch the same kernels with the same numbers, so the bits are the
same.

What a tape cannot repeat runs the pipeline: forward kwargs, quantized arguments, ops, fusions, quantizers and kernels
of the user's, arguments that are not contiguous, profiles (whose labels are the pipeline's), modes that see every
operator, and calls of a kind that is rare.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from typing import Any

import torch

from bridge import compat, recording
from bridge.call import distinct, refuse_second_derivatives
from bridge.checkpointing import closed
from functional_te._value import uid_of
from functional_te.fuser import Fusions, default_fusions
from functional_te.kernels import kernels
from functional_te.labels import profiling
from functional_te.quantization.state import DelayedScalingState
from functional_te.recipes import Recipe

__all__ = ["replayed"]

_log = logging.getLogger("functional_te")
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_DEVICES = {"cuda"}
_RECIPES, _FUSIONS, _MAPS = (Recipe, type(None)), (Fusions, type(None)), (dict, Mapping)
# Calls of a kind before it is recorded, which takes as long as a hundred calls.
_CALLS = 3
# Kinds that are remembered. Who has more starts over, and records half as readily, or recordings would take the time.
_MOST = 1024

_lock = threading.Lock()
# By kind: how many calls there were, a program, or None for a kind that cannot be recorded.
_known: dict[Any, Any] = {}
# how often that was full
_starts = 0


class Program:
    """A recorded kind of call.

    Attributes:
        forward: from distinct arguments, scales and what casts observe into to outputs, amaxes and what is saved.
        backward: from what was saved, the gradients' state and gradients of outputs to gradients of the arguments.
        outputs, observes: numbers of outputs and of amaxes.
        reads, writes: op and role of the state that the forward reads, and of the one that the backward writes.
        observers: op and role of the amaxes.
        entries: op and role of all of the state.
        contiguous: for every tensor that is saved, whether it is contiguous.
        takes_blanks: whether the forward takes what casts observe into; else it makes that itself.
    """

    def __init__(self, made: recording.Recording, observers: tuple[tuple[int, str], ...]) -> None:
        self.forward = made.functions["forward"]
        self.backward = made.functions.get("backward")
        self.outputs, self.observes = made.outputs, made.observes
        self.reads = [made.entries[place] for place in made.forward]
        self.writes = [made.entries[place] for place in made.backward]
        self.observers = observers
        self.entries = list(made.entries)
        self.contiguous = made.contiguous
        self.takes_blanks = made.takes_blanks

    def blanks(self, state: Any, in_place: bool) -> list[torch.Tensor]:
        """What the casts of a forward observe into: their histories, or zeros."""
        if not (self.takes_blanks and self.reads):
            return []
        if in_place:
            return [state[index][role].amax_history for index, role in self.reads]
        device = state[self.reads[0][0]][self.reads[0][1]].scale.device
        # 16 bytes apart, which every kernel takes for aligned
        return list(torch.zeros((len(self.reads), 4), dtype=torch.float32, device=device)[:, :1].unbind())


class ReplayFunction(torch.autograd.Function):
    """A recorded chain; what :class:`bridge.autograd.ChainFunction` is for the pipeline."""

    @staticmethod
    def forward(ctx: Any, program: Program, reads: Any, blanks: Any, written: Any, *unique: torch.Tensor) -> Any:
        """Run the forward; amaxes that it makes are returned beside the outputs and are not differentiable."""
        made = program.forward(*unique, *reads, *blanks)
        saved = program.outputs + program.observes
        ctx.save_for_backward(*made[saved:])
        ctx.program, ctx.written = program, written
        ctx.set_materialize_grads(False)
        ctx.like = [(out.shape, out.dtype, out.device) for out in made[: program.outputs]]
        returned = program.outputs if blanks else saved
        if returned > program.outputs:
            ctx.mark_non_differentiable(*made[program.outputs : returned])
        return made[0] if returned == 1 else tuple(made[:returned])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Run the backward; what it observes is written to the state."""
        if torch.is_grad_enabled():
            refuse_second_derivatives()
        # the rule for an output that the loss does not use: its gradient is zeros
        own = [
            torch.zeros(shape, dtype=dtype, device=device) if grad is None else grad.contiguous()
            for grad, (shape, dtype, device) in zip(grads, ctx.like, strict=False)
        ]
        saved = [
            tensor.contiguous() if contiguous else tensor  # hooks may have unpacked others
            for tensor, contiguous in zip(ctx.saved_tensors, ctx.program.contiguous, strict=True)
        ]
        device = ctx.like[0][2].type
        if torch.is_autocast_enabled(device):  # operators have the dtypes that were recorded
            with torch.autocast(device, enabled=False):
                result = ctx.program.backward(*saved, *ctx.written, *own)
        else:
            result = ctx.program.backward(*saved, *ctx.written, *own)
        return (None, None, None, None, *result)


def _kind(tensor: Any) -> Any:
    """What a program depends on of a tensor; None for what it cannot take."""
    if type(tensor) not in _PLAIN or tensor.device.type not in _DEVICES:
        return None
    if tensor.layout is not torch.strided or not tensor.is_contiguous():
        return None
    return tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad


def _entries(state: Any, count: int) -> tuple[list[tuple[int, str]], list[torch.Tensor]] | None:
    """Op and role, and scale and amax history, of every entry of the state of ``count`` ops.

    None for a state that a program cannot take.
    """
    places: list[tuple[int, str]] = []
    found: list[torch.Tensor] = []
    if state is not None and len(state) != count:
        return None
    for index, own in enumerate(state or ()):
        for role, entry in own.items():
            if type(entry) is not DelayedScalingState:
                return None
            places.append((index, role))
            found.extend((entry.scale, entry.amax_history))
    return places, found


def _plain_eager() -> bool:
    """Whether nobody looks at what a call does in the meantime, and it is differentiated in the usual way."""
    return not (
        torch.compiler.is_compiling()
        or profiling()
        or closed.depth
        or compat.dispatch_modes_active()
        or compat.functorch_active()
        or compat.forward_ad_active()
    )


def replayed(
    block: Any,
    params: Any,
    x: Any,
    extra_inputs: tuple[Any, ...],
    state: Any,
    recipe: Any,
    way: tuple[Any, ...],
    in_place: bool = False,
) -> tuple[list[torch.Tensor], dict[tuple[int, str], torch.Tensor]] | None:
    """An eager call by its program.

    Args:
        block, params, x, extra_inputs, state, recipe: as for :func:`bridge.apply`.
        way: the fusions, the name of the backend, and the dtype that autocast asks for or None.
        in_place: whether casts may observe into the histories; amaxes that did so are the histories.

    Returns:
        What :func:`bridge.autograd.run` does, or None if the pipeline has to run.
    """
    if type(x) not in _PLAIN or x.device.type not in _DEVICES or not _plain_eager():
        return None
    fusions, backend, compute_dtype = way
    if not (isinstance(recipe, _RECIPES) and isinstance(fusions, _FUSIONS) and isinstance(backend, str)):
        return None  # the pipeline translates it or refuses it
    try:
        leaves = [x, *[own[name] for op, own in zip(block.ops, params, strict=True) for name in op.param_names]]
        known_state = _entries(state, len(block))
        misfit = known_state is None or sum([len(own) for own in params if isinstance(own, _MAPS)]) != len(leaves) - 1
    except (KeyError, TypeError, ValueError, AttributeError):
        return None  # the pipeline says what does not fit
    if known_state is None or misfit:
        return None  # as there are entries or parameters too many
    held, entries = known_state
    leaves.extend(extra_inputs)
    kinds = tuple([_kind(leaf) for leaf in leaves])
    if None in kinds or len({id(entry) for entry in entries}) < len(entries):
        return None  # launches that write to one tensor twice at once
    own_kinds = tuple([_kind(tensor) for tensor in entries])
    unique, places = distinct(leaves)
    graded = torch.is_grad_enabled()
    rules = default_fusions() if fusions is None else fusions
    key = (block.uid, uid_of(recipe), rules.uid, backend, compute_dtype, graded, places, kinds, own_kinds)
    program = _known.get(key, 0)
    if type(program) is int:
        program = _counted(key, program)
    if (
        program is None
        or program.entries != held
        or (x.device.type == "cuda" and x.device.index != torch.cuda.current_device())
    ):
        return None
    reads = [state[index][role].scale for index, role in program.reads]
    blanks = program.blanks(state, in_place)
    if program.backward is None:
        results: Any = program.forward(*unique, *reads, *blanks)
    else:
        written: list[torch.Tensor] = []
        for index, role in program.writes:
            entry = state[index][role]
            written.extend((entry.scale, entry.amax_history))
        results = ReplayFunction.apply(program, reads, blanks, written, *unique)
        results = [results] if isinstance(results, torch.Tensor) else results
    count = program.outputs
    if blanks:
        return list(results[:count]), dict(zip(program.reads, blanks, strict=True))
    return list(results[:count]), dict(zip(program.observers, results[count : count + program.observes], strict=True))


def _counted(key: Any, calls: int) -> Program | None:
    """The program of a kind that was called ``calls`` times before; None if it was not often enough."""
    global _starts  # noqa: PLW0603 - counts
    if calls == 0 and len(_known) >= _MOST:
        _known.clear()
        _starts += 1
    if calls + 1 < _CALLS << min(_starts, 16):
        _known[key] = calls + 1
        return None
    with _lock:
        known = _known.get(key, 0)
        if type(known) is not int:
            return known  # another thread was first
        try:
            program = _made(key)
        except Exception as error:
            _log.info("a kind of call runs the pipeline: %s: %s", type(error).__name__, error)
            program = None
        _known[key] = program
    return program


def _made(key: Any) -> Program:
    block, recipe, fusions, backend, compute_dtype, graded, places, kinds, own_kinds = key

    def described(kind: Any) -> recording.Kind:
        shape, dtype, device, _ = kind
        return recording.Kind(tuple(shape), dtype, (device.type, device.index))

    full = recording.Key(
        block=block,
        recipe=recipe,
        fusions=fusions,
        backend=backend,
        compute_dtype=compute_dtype,
        opens=(),
        closes=False,
        flags=tuple(graded and kind[3] for kind in kinds),
        kinds=tuple(map(described, kinds)),
        places=places,
        entries=tuple(map(described, own_kinds)),
    )
    plan = recording.plan_of(full)
    if not kernels(plan.backend).repeatable:
        raise recording.Unsupported(f"the {plan.backend} backend does more than launching kernels")
    return Program(recording.record_tapes(full), plan.observes)
