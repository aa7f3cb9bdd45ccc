"""Writing quantizer state back: mutable custom ops, correct in eager mode, compiled graphs and CUDA graphs.

On a GPU the delayed-scaling states of a whole pass are folded, or folded and closed, by one kernel, which a compiled
graph launches itself. Elsewhere, and for algorithms of the user's, the formulas run as they are and their results are
copied into the state.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from bridge.library import NAMESPACE
from functional_te.fuser.plan import Plan
from functional_te.kernels import kernels, resolve_backend
from functional_te.quantization.quantizers import Float8DelayedScalingQuantizer, Quantizer
from functional_te.quantization.scaling import fold_amax
from functional_te.quantization.state import update_amax, update_scale

__all__ = [
    "close_",
    "close_states_",
    "closing",
    "fold_amaxes_",
    "has_closing_kernel",
    "is_builtin_delayed",
    "keep",
    "keep_gradient_scales",
    "keep_scales",
    "observe_",
    "open_",
    "recording",
    "write_",
]

_library = torch.library.Library(NAMESPACE, "FRAGMENT")
_library.define("fold_amax_(Tensor(a!) amax_history, Tensor amax) -> ()")
_library.define("keep(Tensor[] read) -> Tensor[]")
_library.define("keep_one(Tensor read) -> Tensor")
_library.define("write_(Tensor(a!) target, Tensor value) -> ()")
_signatures = {
    "fold_amaxes_": "(Tensor(a!)[] amax_histories, Tensor[] amaxes) -> ()",
    "close_step_": "(Tensor(a!)[] scales, Tensor(b!)[] amax_histories, Tensor[] amaxes, float[] limits, int margin, "
    "str algorithm) -> ()",
    "open_step_": "(Tensor(a!)[] scales, Tensor(b!)[] amax_histories, float[] limits, int margin, str algorithm) "
    "-> Tensor[]",
    "keep_scales": "(Tensor[] scales, bool blanks=False) -> Tensor[]",
}


def _fold_amax(amax_history: torch.Tensor, amax: torch.Tensor) -> None:
    amax_history[:1].copy_(fold_amax(amax_history[:1], amax))


def _write(target: torch.Tensor, value: torch.Tensor) -> None:
    target.copy_(value)


def _keep(read: list[torch.Tensor]) -> list[torch.Tensor]:
    return [own.clone() for own in read]


def _kernel(device: str) -> Any:
    """The kernel that closes steps on a device type, or None."""
    return None if device == "cpu" else _fused(device).close_step


@functools.cache
def _fused(device: str) -> Any:
    """The fused kernels of a device type."""
    return kernels(resolve_backend("auto", device)).fused


@torch.compiler.assume_constant_result
def _has_kernel(device: str) -> bool:
    """Whether there is one. Runs for real even while a caller is traced."""
    return _kernel(device) is not None


def _unfolded(amax_histories: Sequence[torch.Tensor], amaxes: Sequence[torch.Tensor]) -> Sequence[torch.Tensor | None]:
    """Amaxes to fold in. A cast that observed into the history itself has given that, and has folded."""
    return [None if amax is history else amax for history, amax in zip(amax_histories, amaxes, strict=True)]


def _fold_amaxes(amax_histories: Sequence[torch.Tensor], amaxes: Sequence[torch.Tensor]) -> None:
    observed = _unfolded(amax_histories, amaxes)
    if any(amax is not None for amax in observed):
        kernel = _kernel(amaxes[0].device.type)
        # folding alone neither reads nor writes scales
        kernel(amaxes, amax_histories, observed, limit=[1.0] * len(amaxes), closes=False)


def _close_step(
    scales: Sequence[torch.Tensor],
    amax_histories: Sequence[torch.Tensor],
    amaxes: Sequence[torch.Tensor],
    limits: Sequence[float],
    margin: int,
    algorithm: str,
    keeps: str = "",
    blanks: bool = False,
) -> list[torch.Tensor]:
    observed = _unfolded(amax_histories, amaxes) if amaxes else [None] * len(scales)
    kept: list[torch.Tensor] = _kernel(scales[0].device.type)(
        scales,
        amax_histories,
        observed,
        limit=limits,
        margin=margin,
        algorithm=algorithm,
        keeps=keeps,
        blanks=blanks,
    )
    return kept


def _close_step_(*args: Any) -> None:
    _close_step(*args)


def _open_step_(
    scales: Sequence[torch.Tensor],
    amax_histories: Sequence[torch.Tensor],
    limits: Sequence[float],
    margin: int,
    algorithm: str,
) -> list[torch.Tensor]:
    return _close_step(scales, amax_histories, [], limits, margin, algorithm, "new", True)


def _keep_scales(scales: Sequence[torch.Tensor], blanks: bool = False) -> list[torch.Tensor]:
    copied: list[torch.Tensor] = _fused(scales[0].device.type).copies(scales, blanks)
    return copied


def _closed(body: Any) -> Any:
    """``body`` as a closed op may run it, whose results may not share memory, as scales of one launch do."""

    def run(*args: Any) -> Any:
        made = body(*args)
        return None if made is None else [own.clone() for own in made]

    return run


_Launch = tuple[str, Any, Any]
# Ops that are launches of kernels: a compiler looks into their bodies. Each has a twin with a closed body, and a fake.
# Defaults of the schema are theirs too: PyTorch hands on no argument that equals its default.
_LAUNCHES: tuple[_Launch, ...] = (
    ("fold_amaxes_", _fold_amaxes, lambda amax_histories, amaxes: None),
    ("close_step_", _close_step_, lambda *args: None),
    ("open_step_", _open_step_, lambda scales, *args: [torch.empty_like(scale) for scale in (*scales, *scales)]),
    (
        "keep_scales",
        _keep_scales,
        lambda scales, blanks=False: [torch.empty_like(scale) for scale in (*scales, *scales * blanks)],
    ),
)
for _name, _body, _fake in _LAUNCHES:
    _schema = _signatures[_name]
    _library.define(f"{_name}{_schema}")
    _library.impl(_name, _body, "CompositeImplicitAutograd")
    _library.define(f"{_name}_opaque{_schema}")
    _library.impl(f"{_name}_opaque", _closed(_body), "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{_name}_opaque", _fake, lib=_library)
_library.impl("keep", _keep, "CompositeExplicitAutograd")
_library.impl("keep_one", torch.clone, "CompositeExplicitAutograd")
torch.library.register_fake(f"{NAMESPACE}::keep_one", torch.empty_like, lib=_library)
torch.library.register_fake(f"{NAMESPACE}::keep", lambda read: [torch.empty_like(own) for own in read], lib=_library)
_library.impl("fold_amax_", _fold_amax, "CompositeExplicitAutograd")
_library.impl("write_", _write, "CompositeExplicitAutograd")
torch.library.register_fake(f"{NAMESPACE}::fold_amax_", lambda amax_history, amax: None, lib=_library)
torch.library.register_fake(f"{NAMESPACE}::write_", lambda target, value: None, lib=_library)


class _Recording:
    """Whether calls are being written down (:mod:`bridge.recording`), which keeps every op closed."""

    active = False


@contextlib.contextmanager
def recording() -> Iterator[None]:
    """Inside, calls of this module's ops are recorded as calls of their closed twins."""
    _Recording.active = True
    try:
        yield
    finally:
        _Recording.active = False


def _op(name: str) -> Any:
    return getattr(torch.ops.functional_te, f"{name}_opaque" if _Recording.active else name).default


def keep(read: list[torch.Tensor]) -> list[torch.Tensor]:
    """Copies of scales and keys, for use inside a compiled graph.

    Which intermediate a compiler saves for the backward is its choice, and ``scale`` may stand for ``1 / scale``. A
    copy made by an op it cannot look into is what it has to save, so that the live scale may change before the
    backward runs.
    """
    one_dtype = all(own.dtype is torch.float32 for own in read)
    if one_dtype and _has_kernel(read[0].device.type):
        kept: list[torch.Tensor] = _op("keep_scales")(read)
        return kept
    return torch.ops.functional_te.keep(read)


def keep_scales(plan: Plan, state: Any) -> Any:
    """``state`` with copies of the forward scales and keys; see :func:`keep`."""
    if not plan.observes:
        return state
    return _reading(state, plan.observes, keep([state[index][role].read for index, role in plan.observes]))


def keep_gradient_scales(plan: Plan, state: Any) -> Any:
    """``state`` with copies of the backward's scales and keys, for a backward that closes their step.

    A gradient is divided by its scale where the compiler sees fit, and Inductor moves that behind an op that writes to
    the scale: it puts off what only reads, and orders it after the op whose argument it is about to change.
    """
    own = [(index, role) for index, roles in enumerate(plan.state_roles) for role, _ in roles]
    keys = [key for key in own if key not in plan.observes]
    # one by one: generated C++ crashes in a backward that calls an op of lists (PyTorch 2.13)
    return _reading(state, keys, [torch.ops.functional_te.keep_one(state[index][role].read) for index, role in keys])


def _reading(state: Any, keys: Sequence[tuple[int, str]], kept: Sequence[torch.Tensor]) -> Any:
    """``state`` where casts of some ops and roles read other tensors."""
    copies = [dict(own) for own in state]
    for (index, role), own in zip(keys, kept, strict=True):
        copies[index][role] = copies[index][role].reading(own)
    return tuple(copies)


def write_(target: torch.Tensor, value: torch.Tensor) -> None:
    """``target.copy_(value)`` as one op that a compiled graph keeps."""
    torch.ops.functional_te.write_(target, value)


def fold_amaxes_(state: Any, amaxes: dict[tuple[int, str], torch.Tensor]) -> None:
    """Fold observations into slot 0 of the histories of ``state``, in place.

    A direct kernel call in eager mode, where the dispatcher would cost more than the work.
    """
    observed = _by_state(state, amaxes)
    histories = [own.amax_history for _, own, _ in observed]
    values = [amax for _, _, amax in observed]
    compiling = torch.compiler.is_compiling()
    if _has_kernel(values[0].device.type):
        if compiling:
            _op("fold_amaxes_")(histories, values)
        else:
            _fold_amaxes(histories, values)
        return
    fold = torch.ops.functional_te.fold_amax_ if compiling else _fold_amax
    for history, amax in zip(histories, values, strict=True):
        fold(history, amax)


def _by_state(state: Any, amaxes: dict[tuple[int, str], torch.Tensor]) -> list[tuple[Any, Any, torch.Tensor]]:
    """For every state that observed its (op index, role), itself and its amax.

    A module may stand in a chain twice: its amaxes are one. Traceable.
    """
    found: list[tuple[Any, Any, torch.Tensor]] = []
    for key, amax in amaxes.items():
        own = state[key[0]][key[1]]
        for place in range(len(found)):
            first, known, before = found[place]
            if known.amax_history is own.amax_history:
                found[place] = (first, known, torch.maximum(before, amax))
                break
        else:
            found.append((key, own, amax))
    return found


def is_builtin_delayed(quantizer: Quantizer) -> bool:
    """Whether it is delayed scaling with the built-in algorithms, which many states may run at once."""
    return (
        isinstance(quantizer, Float8DelayedScalingQuantizer)
        and isinstance(quantizer.amax_compute_algo, str)
        and quantizer.scaling_factor_compute_algo is None
    )


def has_closing_kernel(quantizer: Quantizer, device: torch.device) -> bool:
    """Whether one kernel closes the steps of many such quantizers on a device."""
    return is_builtin_delayed(quantizer) and _has_kernel(device.type)


def close_states_(entries: Sequence[tuple[Quantizer, Any, torch.Tensor | None]]) -> None:
    """Close the step of quantizers that observed, in place.

    Args:
        entries: a quantizer, its state, and an amax to fold in first or None; of one pass, so all have one or none has.
    """
    groups: dict[tuple[int, str], list[Any]] = {}
    for entry in entries:
        quantizer, state, amax = entry
        if has_closing_kernel(quantizer, state.read.device):
            how = (quantizer.margin, quantizer.amax_compute_algo)  # type: ignore[attr-defined]
            groups.setdefault(how, []).append(entry)
            continue
        new = update_scale(quantizer, state if amax is None else update_amax(state, amax))
        write_(state.read, new.read)
        write_(state.amax_history, new.amax_history)
    for (margin, algorithm), own in groups.items():
        scales = [state.scale for _, state, _ in own]
        histories = [state.amax_history for _, state, _ in own]
        amaxes = [amax for _, _, amax in own if amax is not None]
        limits = [quantizer.limit for quantizer, _, _ in own]
        close = _op("close_step_") if torch.compiler.is_compiling() else _close_step_
        close(scales, histories, amaxes, limits, margin, algorithm)


def closing(entries: Sequence[tuple[Any, Any]]) -> Any:
    """What closes the steps of quantizers that have a kernel for it, of one algorithm and device, when it is called.

    Args:
        entries: quantizers and their states, which have to stay where they are.

    Returns:
        A function without arguments. It gives what casts read before, which it has copied.
    """
    return _fused(entries[0][1].scale.device.type).closing(
        [state.scale for _, state in entries],
        [state.amax_history for _, state in entries],
        limit=[quantizer.limit * 2.0**-quantizer.margin for quantizer, _ in entries],
        algorithm=entries[0][0].amax_compute_algo,
    )


def open_(
    entries: Sequence[tuple[Quantizer, Any]], opens: Sequence[bool], blanks: bool
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """What begins a pass in a compiled graph: close the steps of some quantizers, and copy what all casts read.

    Args:
        entries: quantizers and their states.
        opens: which of them close their step.
        blanks: whether casts may observe into tensors that are made here (:attr:`BoundQuantizer.blank
            <functional_te.quantization.tensor.BoundQuantizer.blank>`), for ops that a compiler sees through; only with
            kernels that close many steps.

    Returns:
        What casts read, and float32 ``[1]`` of zero, one for each of them or none.
    """
    reads = [state.read for _, state in entries]
    # not where ops stay closed: no compiler takes a closed op that writes to some tensors and returns others
    blanks = blanks and all(has_closing_kernel(quantizer, state.read.device) for quantizer, state in entries)
    hows = {(quantizer.margin, quantizer.amax_compute_algo) for quantizer, _ in entries} if blanks else set()  # type: ignore[attr-defined]
    if len(hows) == 1 and all(opens):
        ((margin, algorithm),) = hows
        limits = [quantizer.limit for quantizer, _ in entries]
        made = _op("open_step_")(reads, [state.amax_history for _, state in entries], limits, margin, algorithm)
    else:
        close_states_([(*entry, None) for entry, own in zip(entries, opens, strict=True) if own])
        made = _op("keep_scales")(reads, True) if blanks else keep(reads)
    return made[: len(reads)], made[len(reads) :]


def close_(plan: Plan, state: Any, amaxes: dict[tuple[int, str], torch.Tensor]) -> None:
    """Fold observations in and close the step of the quantizers that observed, in place."""
    close_states_(
        [(dict(plan.state_roles[index])[role], own, amax) for (index, role), own, amax in _by_state(state, amaxes)]
    )


def observe_(plan: Plan, state: Any, amaxes: dict[tuple[int, str], torch.Tensor], closes: bool) -> None:
    """Fold what a backward observed into ``state``, in place, and with ``closes`` close the step of who observed."""
    if not amaxes:
        return
    if closes:
        close_(plan, state, amaxes)
    else:
        fold_amaxes_(state, amaxes)
