"""Delayed scaling's end of a step, in place and for many quantizers in one launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from functional_te._errors import value_error
from functional_te.kernels.triton.launch import launch, launch_alike
from functional_te.kernels.triton.rounding import divide
from functional_te.quantization.scaling import FLOAT32_MAX

__all__ = ["Closing", "close_step", "copies"]

# Quantizers of a launch: as many as the kernel has arguments for.
_CHUNK = 8
_BLOCK = 1024
# Copies of scales lie 16 bytes apart, which every reader takes for aligned.
_APART = 4
_ALGORITHMS = ("max", "most_recent")


@triton.jit
def _larger(a, b):
    """``torch.maximum``: a NaN stays."""
    return tl.where(a != a, a, tl.where(b != b, b, tl.maximum(a, b)))


@triton.jit
def _largest(history, observed, L, BLOCK: tl.constexpr):
    """Largest of a history ``[L]`` whose slot 0 is ``observed``; NaN if it holds one."""
    largest = tl.zeros([BLOCK], tl.float32) + observed
    for start in tl.range(0, L, BLOCK):
        slot = start + tl.arange(0, BLOCK)
        largest = _larger(largest, tl.load(history + slot, mask=(slot > 0) & (slot < L), other=-float("inf")))
    # NaN is above every number in the order of the bits of non-negative floats
    return tl.max(tl.abs(largest).to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)


@triton.jit
def _serve(
    scale,
    history,
    amax,
    top,
    place,
    kept,
    L,
    huge,
    FOLDS: tl.constexpr,
    CLOSES: tl.constexpr,
    RECENT: tl.constexpr,
    KEEPS: tl.constexpr,
    BLANKS: tl.constexpr,
    APART: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Serve one quantizer; ``top`` is its limit times ``2**-margin``. KEEPS is which scale is kept, if any."""
    if BLANKS:
        tl.store(amax, 0.0)
    if KEEPS == "old":
        tl.store(kept + place * APART, tl.load(scale))
        tl.debug_barrier()
    if FOLDS or CLOSES:
        observed = tl.load(history)
        if FOLDS:
            observed = _larger(observed, tl.load(amax))
        if not CLOSES:
            tl.store(history, observed)
        elif observed != 0:
            if RECENT:
                largest = observed
            else:
                largest = _largest(history, observed, L, BLOCK)
            usable = (largest > 0.0) & (largest < float("inf"))
            # a compiler that launches the kernel itself may pass floats as float64
            new = divide(tl.cast(top, tl.float32), tl.where(usable, largest, 1.0))
            # every thread has read what it needs before any writes
            tl.debug_barrier()
            tl.store(scale, tl.where(usable, tl.minimum(new, tl.cast(huge, tl.float32)), tl.load(scale)))
            for start in tl.range(0, L, BLOCK):
                slot = start + tl.arange(0, BLOCK)
                moved = tl.load(history + slot + 1, mask=slot + 1 < L, other=0.0)
                moved = tl.where(slot == L - 1, observed, moved)
                tl.debug_barrier()
                tl.store(history + slot, tl.where(slot == 0, 0.0, moved), mask=slot < L)
    if KEEPS == "new":
        tl.debug_barrier()  # whichever thread wrote the scale
        tl.store(kept + place * APART, tl.load(scale))


@triton.jit
def _close_kernel(
    scale0,
    scale1,
    scale2,
    scale3,
    scale4,
    scale5,
    scale6,
    scale7,
    history0,
    history1,
    history2,
    history3,
    history4,
    history5,
    history6,
    history7,
    amax0,
    amax1,
    amax2,
    amax3,
    amax4,
    amax5,
    amax6,
    amax7,
    top0,
    top1,
    top2,
    top3,
    top4,
    top5,
    top6,
    top7,
    kept,
    L,
    huge,
    COUNT: tl.constexpr,
    FOLDS: tl.constexpr,
    CLOSES: tl.constexpr,
    RECENT: tl.constexpr,
    KEEPS: tl.constexpr,
    BLANKS: tl.constexpr,
    APART: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program ``i`` serves quantizer ``i`` of ``COUNT``.

    Branches that are left out at compile time, so that a compiler sees that nothing is written to the other arguments;
    and calls, because of values that one branch of several yields it takes all for written to if one is.
    """
    index = tl.program_id(0)
    if index == 0:
        _serve(scale0, history0, amax0, top0, 0, kept, L, huge, FOLDS, CLOSES, RECENT, KEEPS, BLANKS, APART, BLOCK)
    if COUNT > 1:
        if index == 1:
            _serve(scale1, history1, amax1, top1, 1, kept, L, huge, FOLDS, CLOSES, RECENT, KEEPS, BLANKS, APART, BLOCK)
    if COUNT > 2:
        if index == 2:
            _serve(scale2, history2, amax2, top2, 2, kept, L, huge, FOLDS, CLOSES, RECENT, KEEPS, BLANKS, APART, BLOCK)
    if COUNT > 3:
        if index == 3:
            _serve(scale3, history3, amax3, top3, 3, kept, L, huge, FOLDS, CLOSES, RECENT, KEEPS, BLANKS, APART, BLOCK)
    if COUNT > 4:
        if index == 4:
            _serve(scale4, history4, amax4, top4, 4, kept, L, huge, FOLDS, CLOSES, RECENT, KEEPS, BLANKS, APART, BLOCK)
    if COUNT > 5:
        if index == 5:
            _serve(scale5, history5, amax5, top5, 5, kept, L, huge, FOLDS, CLOSES, RECENT, KEEPS, BLANKS, APART, BLOCK)
    if COUNT > 6:
        if index == 6:
            _serve(scale6, history6, amax6, top6, 6, kept, L, huge, FOLDS, CLOSES, RECENT, KEEPS, BLANKS, APART, BLOCK)
    if COUNT > 7:
        if index == 7:
            _serve(scale7, history7, amax7, top7, 7, kept, L, huge, FOLDS, CLOSES, RECENT, KEEPS, BLANKS, APART, BLOCK)


@triton.jit
def _close_all_kernel(table, tops, kept, huge, RECENT: tl.constexpr, APART: tl.constexpr, BLOCK: tl.constexpr):
    """Program ``i`` closes the step of the quantizer in row ``i`` of a table of addresses, and keeps its old scale."""
    index = tl.program_id(0)
    row = table + 3 * index
    scale = tl.load(row).to(tl.pointer_type(tl.float32))
    history = tl.load(row + 1).to(tl.pointer_type(tl.float32))
    L = tl.load(row + 2).to(tl.int32)
    top = tl.load(tops + index)
    _serve(scale, history, scale, top, index, kept, L, huge, False, True, RECENT, "old", False, APART, BLOCK)


class Closing:
    """The end of a step of many quantizers, one launch however many they are: for those that end step after step.

    Addresses of the tensors are written to the device once. Calls read and write there: the caller keeps the tensors
    alive and where they are. Arguments are as for :func:`close_step`; calls are no part of any graph.

    Args:
        scales: float32 ``[1]`` of each quantizer, at least one, of one device, each only once.
        histories: float32 ``[L]`` of each, contiguous; lengths may differ.
        limit: largest finite value of the element format of each, divided by ``2**margin``.
        algorithm: ``"max"`` over the history, or ``"most_recent"``.

    Raises:
        ValueError: another algorithm; sequences of different lengths.
    """

    def __init__(
        self,
        scales: Sequence[torch.Tensor],
        histories: Sequence[torch.Tensor],
        *,
        limit: Sequence[float],
        algorithm: str = "max",
    ) -> None:
        _check("Closing", algorithm, len(scales), histories=histories, limit=limit)
        self.count, self.device, self.recent = len(scales), scales[0].device, algorithm == "most_recent"
        rows = [(scale.data_ptr(), own.data_ptr(), own.shape[0]) for scale, own in zip(scales, histories, strict=True)]
        self.table, self.tops = (
            _sent(torch.tensor(own, dtype=dtype), self.device)
            for own, dtype in ((rows, torch.int64), (limit, torch.float32))
        )

    def __call__(self) -> list[torch.Tensor]:
        """Close. Returns the scales as they were before, float32 ``[1]`` each."""
        kept = torch.empty((self.count, _APART), dtype=torch.float32, device=self.device)
        if self.device.type == "cuda":  # the last call may be on another stream than the one on which they were made
            stream = torch.cuda.current_stream(self.device)
            self.table.record_stream(stream)
            self.tops.record_stream(stream)
        constants = {"RECENT": self.recent, "APART": _APART, "BLOCK": _BLOCK, "num_warps": 4}
        launch(_close_all_kernel, (self.count,), kept, self.table, self.tops, kept, FLOAT32_MAX, **constants)
        return list(kept[:, :1].unbind())


def _sent(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """``tensor`` on a device; the host does not wait for it."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def _check(where: str, algorithm: str, count: int, **given: Sequence[Any]) -> None:
    if algorithm not in _ALGORITHMS:
        raise value_error(where, "algorithm", " or ".join(map(repr, _ALGORITHMS)), repr(algorithm))
    for name, own in given.items():
        if len(own) != count:
            raise value_error(where, name, f"one for each of {count} scales", len(own))


def close_step(
    scales: Sequence[torch.Tensor],
    histories: Sequence[torch.Tensor],
    amaxes: Sequence[torch.Tensor | None],
    *,
    limit: Sequence[float],
    margin: int = 0,
    algorithm: str = "max",
    closes: bool = True,
    keeps: str = "",
    blanks: bool = False,
) -> list[torch.Tensor]:
    """Fold observations into the histories of delayed scaling and close their step, in place.

    The bits are those of :func:`functional_te.quantization.state.update_amax` and then, if ``closes``,
    :func:`~functional_te.quantization.state.update_scale`: a quantizer that observed nothing stays as it is. One launch
    for every eight quantizers with histories of one length.

    Args:
        scales: float32 ``[1]`` of each quantizer, each only once: their programs run side by side.
        histories: float32 ``[L]`` of each, contiguous; lengths may differ.
        amaxes: float32 ``[1]`` of each, or None for nothing to fold in.
        limit: largest finite value of the element format of each.
        margin: scales are divided by ``2**margin``.
        algorithm: ``"max"`` over the history, or ``"most_recent"``.
        closes: whether the step is closed, or only observations are folded in.
        keeps: ``"old"`` to copy the scales as they were, ``"new"`` as they are afterwards, empty for no copies.
        blanks: whether to make tensors of zero too; with ``keeps``, and where nothing is folded in.

    Returns:
        With ``keeps`` the copies, float32 ``[1]`` each, and then with ``blanks`` as many zeros, float32 ``[1]``, each a
        tensor of its own, for kernels to observe into.

    Raises:
        ValueError: another algorithm; sequences of different lengths; something else to keep; ``blanks`` without
            ``keeps`` or with an amax.
    """
    where = "close_step"
    _check(where, algorithm, len(scales), histories=histories, amaxes=amaxes, limit=limit)
    if keeps not in ("", "old", "new"):
        raise value_error(where, "keeps", "'', 'old' or 'new'", repr(keeps))
    if blanks and not (keeps and all(amax is None for amax in amaxes)):
        raise value_error(where, "blanks", "keeps and no amaxes", f"keeps={keeps!r} and {len(amaxes)} amaxes")
    together: dict[Any, list[int]] = {}
    kept: dict[int, torch.Tensor] = {}
    zeros: dict[int, torch.Tensor] = {}
    for index, history in enumerate(histories):
        folds = amaxes[index] is not None
        if closes or folds or keeps:
            length: Any = history.shape[0]
            # symbolic ones have no hash
            together.setdefault((length if isinstance(length, int) else str(length), folds), []).append(index)
    for (_, folds), indices in together.items():
        for start in range(0, len(indices), _CHUNK):
            chunk = indices[start : start + _CHUNK]
            made, blank = _launch(
                [scales[index] for index in chunk],
                [histories[index] for index in chunk],
                [amaxes[index] for index in chunk] if folds else [],
                [limit[index] * 2.0**-margin for index in chunk],
                FOLDS=folds,
                CLOSES=closes,
                RECENT=algorithm == "most_recent",
                KEEPS=keeps,
                BLANKS=blanks,
            )
            kept.update(zip(chunk, made, strict=False))
            zeros.update(zip(chunk, blank, strict=False))
    return [own[index] for own in (kept, zeros) if own for index in range(len(scales))]


def copies(scales: Sequence[torch.Tensor], blanks: bool = False) -> list[torch.Tensor]:
    """A copy of each of some scales (float32 ``[1]``), in one launch for every eight.

    Args:
        scales: what to copy.
        blanks: whether to make as many zeros too, as :func:`close_step` does.
    """
    kept: list[torch.Tensor] = []
    zeros: list[torch.Tensor] = []
    for start in range(0, len(scales), _CHUNK):
        chunk = scales[start : start + _CHUNK]
        made = _launch(chunk, [], [], [], FOLDS=False, CLOSES=False, RECENT=False, KEEPS="old", BLANKS=blanks)
        kept.extend(made[0])
        zeros.extend(made[1])
    return kept + zeros


def _launch(
    scales: Any, histories: Any, amaxes: Any, tops: Any, **constants: Any
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Launch the kernel for at most eight quantizers; arguments that it does not look at may be missing.

    Returns:
        The copies and the zeros that were made.
    """
    count, device = len(scales), scales[0].device
    blanks: list[torch.Tensor] = []
    if constants["BLANKS"]:
        blanks = amaxes = [torch.empty(1, dtype=torch.float32, device=device) for _ in scales]
    kept = torch.empty((count, _APART), dtype=torch.float32, device=device) if constants["KEEPS"] else None
    # not one that is written to: a compiler that makes mutation explicit would write both back
    idle = torch.empty(1, dtype=torch.float32, device=device) if constants["CLOSES"] else scales[0]
    length = histories[0].shape[0] if histories else 0
    launch_alike(
        (count, len(amaxes), length, *tops, *constants.values()),
        _close_kernel,
        (count,),
        scales[0],
        *(tensor for own in (scales, histories, amaxes) for tensor in (*own, *[idle] * (_CHUNK - len(own)))),
        *(*tops, *[0.0] * (_CHUNK - len(tops))),
        idle if kept is None else kept,
        length,
        FLOAT32_MAX,
        COUNT=count,
        APART=_APART,
        BLOCK=_BLOCK,
        num_warps=4,
        **constants,
    )
    return ([] if kept is None else list(kept[:, :1].unbind())), blanks
