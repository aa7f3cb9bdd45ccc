"""Delayed scaling's end of a step, in place and for many quantizers in one launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from functional_te._errors import value_error
from functional_te.kernels.triton.launch import launch
from functional_te.kernels.triton.tile import divide
from functional_te.quantization.scaling import FLOAT32_MAX

__all__ = ["close_step"]

# Quantizers of a launch: as many as the kernel has arguments for.
_CHUNK = 8
_BLOCK = 1024
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
    L,
    largest_float,
    CLOSES: tl.constexpr,
    RECENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program ``i`` serves quantizer ``i``; ``top`` is its limit times ``2**-margin``."""
    index = tl.program_id(0)
    # not branches: of values that one branch yields, a compiler takes all for mutated if one is
    scale, history, amax, top = scale0, history0, amax0, top0
    scale = tl.where(index == 1, scale1, scale)
    history = tl.where(index == 1, history1, history)
    amax = tl.where(index == 1, amax1, amax)
    top = tl.where(index == 1, top1, top)
    scale = tl.where(index == 2, scale2, scale)
    history = tl.where(index == 2, history2, history)
    amax = tl.where(index == 2, amax2, amax)
    top = tl.where(index == 2, top2, top)
    scale = tl.where(index == 3, scale3, scale)
    history = tl.where(index == 3, history3, history)
    amax = tl.where(index == 3, amax3, amax)
    top = tl.where(index == 3, top3, top)
    scale = tl.where(index == 4, scale4, scale)
    history = tl.where(index == 4, history4, history)
    amax = tl.where(index == 4, amax4, amax)
    top = tl.where(index == 4, top4, top)
    scale = tl.where(index == 5, scale5, scale)
    history = tl.where(index == 5, history5, history)
    amax = tl.where(index == 5, amax5, amax)
    top = tl.where(index == 5, top5, top)
    scale = tl.where(index == 6, scale6, scale)
    history = tl.where(index == 6, history6, history)
    amax = tl.where(index == 6, amax6, amax)
    top = tl.where(index == 6, top6, top)
    scale = tl.where(index == 7, scale7, scale)
    history = tl.where(index == 7, history7, history)
    amax = tl.where(index == 7, amax7, amax)
    top = tl.where(index == 7, top7, top)
    observed = _larger(tl.load(history), tl.load(amax))
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
        tl.store(scale, tl.where(usable, tl.minimum(new, tl.cast(largest_float, tl.float32)), tl.load(scale)))
        for start in tl.range(0, L, BLOCK):
            slot = start + tl.arange(0, BLOCK)
            moved = tl.load(history + slot + 1, mask=slot + 1 < L, other=0.0)
            moved = tl.where(slot == L - 1, observed, moved)
            tl.debug_barrier()
            tl.store(history + slot, tl.where(slot == 0, 0.0, moved), mask=slot < L)


def close_step(
    scales: Sequence[torch.Tensor],
    histories: Sequence[torch.Tensor],
    amaxes: Sequence[torch.Tensor | None],
    *,
    limit: Sequence[float],
    margin: int = 0,
    algorithm: str = "max",
    closes: bool = True,
) -> None:
    """Fold observations into the histories of delayed scaling and close their step, in place.

    The bits are those of :func:`functional_te.quantization.state.update_amax` and then, if ``closes``,
    :func:`~functional_te.quantization.state.update_scale`: a quantizer that observed nothing stays as it is. One launch
    for every eight quantizers with histories of one length.

    Args:
        scales: float32 ``[1]`` of each quantizer.
        histories: float32 ``[L]`` of each, contiguous; lengths may differ.
        amaxes: float32 ``[1]`` of each, or None for nothing to fold in.
        limit: largest finite value of the element format of each.
        margin: scales are divided by ``2**margin``.
        algorithm: ``"max"`` over the history, or ``"most_recent"``.
        closes: whether the step is closed, or only observations are folded in.

    Raises:
        ValueError: another algorithm; sequences of different lengths.
    """
    where = "close_step"
    if algorithm not in _ALGORITHMS:
        raise value_error(where, "algorithm", " or ".join(map(repr, _ALGORITHMS)), repr(algorithm))
    for name, given in (("histories", histories), ("amaxes", amaxes), ("limit", limit)):
        if len(given) != len(scales):
            raise value_error(where, name, f"one for each of {len(scales)} scales", len(given))
    by_length: dict[Any, list[int]] = {}
    for index, history in enumerate(histories):
        if closes or amaxes[index] is not None:
            length: Any = history.shape[0]
            # symbolic ones have no hash
            by_length.setdefault(length if isinstance(length, int) else str(length), []).append(index)
    for indices in by_length.values():
        for start in range(0, len(indices), _CHUNK):
            chunk = indices[start : start + _CHUNK]
            # Arguments of programs that do not run. Not those of another one: a compiler that makes mutation explicit
            # would write both back.
            missing = _CHUNK - len(chunk)
            idle = [torch.empty_like(scales[0])] * missing if missing else []
            own = [histories[index] for index in chunk]
            found = [amaxes[index] for index in chunk]
            # folding in 0 changes nothing
            none = torch.zeros_like(scales[0]) if any(amax is None for amax in found) else None
            launch(
                _close_kernel,
                (len(chunk),),
                own[0],
                *(scales[index] for index in chunk),
                *idle,
                *own,
                *idle,
                *(none if amax is None else amax for amax in found),
                *idle,
                *(limit[index] * 2.0**-margin for index in chunk),
                *(0.0 for _ in idle),
                own[0].shape[0],
                FLOAT32_MAX,
                CLOSES=closes,
                RECENT=algorithm == "most_recent",
                BLOCK=_BLOCK,
                num_warps=4,
            )
