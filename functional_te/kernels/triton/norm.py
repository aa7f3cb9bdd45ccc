"""RMSNorm and LayerNorm: statistics, gain and cast in one reading of the input where that pays.

A forward is one or two passes of one kernel, in which a program owns some rows and a range of columns. *Statistics*
walks over the whole rows once; *normalizing* walks over the program's columns, which it then finds in the L2 cache (the
first reading asks it to keep them, the second to let them go), and ends every tile as
:func:`functional_te.kernels.triton.tile.store_tile` does. Current scaling observes in the first pass and casts in the
second, which reads the statistics of the first; blocks of 128 rows, of which there are few, are normalized in a pass of
their own too. Rows that a program holds in registers take one reading.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl

from functional_te.kernels.triton.launch import blocks, launch
from functional_te.kernels.triton.rounding import bits_of, divide, round_like, rounded, rows_of_tile
from functional_te.kernels.triton.sizes import norm_passes
from functional_te.kernels.triton.tile import Target, below, offsets, store_tile, target, whole
from functional_te.quantization.tensor import BoundQuantizer

__all__ = ["layer_norm", "rms_norm"]

Stored = Any  # a tensor or a QuantizedTensor


@triton.jit
def load_gain(weight, col, N, ZERO_CENTERED: tl.constexpr):
    """Float32 gains ``[BN]``; 0 or 1 outside."""
    gain = tl.load(weight + col, mask=col < N, other=0.0).to(tl.float32)
    if ZERO_CENTERED:
        gain += 1.0
    return gain


@triton.jit
def _load_sum(x, add, total, place, inside, ADD: tl.constexpr, EVICT: tl.constexpr):
    """Float32 values of ``x``, or of ``add + x`` as ``total`` holds it. EVICT is what caches do with what was read."""
    value = tl.load(x + place, mask=inside, other=0.0, eviction_policy=EVICT).to(tl.float32)
    if ADD:
        extra = tl.load(add + place, mask=inside, other=0.0, eviction_policy=EVICT).to(tl.float32)
        value = round_like(extra + value, total)
    return value


@triton.jit
def _rstd(square, N, eps):
    """``1 / sqrt(square / N + eps)``."""
    return divide(1.0, tl.sqrt_rn(divide(square, N + tl.zeros_like(square)) + tl.cast(eps, tl.float32)))


@triton.jit
def _mean_square(
    x,
    add,
    total,
    weight,
    row,
    first,
    last,
    M,
    N,
    ADD: tl.constexpr,
    PEAK: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    EVICT: tl.constexpr,
    BM: tl.constexpr,
    BS: tl.constexpr,
):
    """Sums of squares of rows, and with PEAK the largest ``|x * gain|``. Writes ``total``, ``first`` to ``last``."""
    square = tl.zeros([BM, BS], tl.float32)
    peak = tl.zeros([BM, BS], tl.int32)
    for start in tl.range(0, N, BS):
        col = start + tl.arange(0, BS)
        inside = (row < M)[:, None] & (col < N)[None, :]
        place = offsets(row, col, N)
        value = _load_sum(x, add, total, place, inside, ADD, EVICT)
        square += value * value
        if PEAK:
            gain = load_gain(weight, col, N, ZERO_CENTERED)
            peak = tl.maximum(peak, tl.where(inside, bits_of(value * gain[None, :]), 0))
        if ADD:
            own = inside & ((col >= first) & (col < last))[None, :]
            tl.store(total + place, rounded(value, total), mask=own)
    return tl.sum(square, 1), tl.max(peak, 1).to(tl.float32, bitcast=True)


@triton.jit
def _mean_and_deviation(x, row, M, N, EVICT: tl.constexpr, BM: tl.constexpr, BS: tl.constexpr):
    """Means of rows, and sums of squared deviations from them.

    One reading: each lane keeps those of its own columns (Welford, 1962), and the lanes' are merged at the end (Chan,
    Golub and LeVeque, 1983).
    """
    mean = tl.zeros([BM, BS], tl.float32)
    square = tl.zeros([BM, BS], tl.float32)
    count = 0.0
    for start in tl.range(0, N, BS):
        col = start + tl.arange(0, BS)
        inside = (row < M)[:, None] & (col < N)[None, :]
        value = tl.load(x + offsets(row, col, N), mask=inside, other=0.0, eviction_policy=EVICT).to(tl.float32)
        count += 1.0
        delta = value - mean
        mean = tl.where(inside, mean + delta * (1.0 / count), mean)
        square = tl.where(inside, square + delta * (value - mean), square)
    lane = tl.arange(0, BS)
    held = ((N + BS - 1 - lane) // BS).to(tl.float32)[None, :]
    size = N + tl.zeros([BM], tl.float32)
    center = divide(tl.sum(mean * held, 1), size)
    # what rounding left: lanes that agree then give their mean exactly
    center += divide(tl.sum((mean - center[:, None]) * held, 1), size)
    off = mean - center[:, None]
    return center, tl.sum(square + held * off * off, 1)


@triton.jit
def _normalized(value, row_center, spread, weight, bias, col, N, LAYER: tl.constexpr, ZERO_CENTERED: tl.constexpr):
    """The result of a tile of values."""
    gain = load_gain(weight, col, N, ZERO_CENTERED)[None, :]
    if LAYER:
        offset = tl.load(bias + col, mask=col < N, other=0.0).to(tl.float32)[None, :]
        value = (value - row_center[:, None]) * spread[:, None] * gain + offset
    else:
        value = (value * gain) * spread[:, None]
    return value


@triton.jit
def _rows_kernel(
    x,
    add,
    total,
    weight,
    bias,
    mean,
    rstd,
    M,
    N,
    eps,
    row_data,
    row_scale,
    col_data,
    col_scale,
    amax,
    scale,
    END: tl.constexpr,
    ROWWISE: tl.constexpr,
    COLUMNWISE: tl.constexpr,
    PACK: tl.constexpr,
    ROUND: tl.constexpr,
    LIMIT: tl.constexpr,
    EPSILON: tl.constexpr,
    POWER_OF_2: tl.constexpr,
    OVERFLOW: tl.constexpr,
    WHOLE: tl.constexpr,
    LAYER: tl.constexpr,
    ADD: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """Whole rows, read once: a tile as wide as the matrix."""
    top = tl.program_id(0) * BM
    row = rows_of_tile(top, BM, PACK)
    col = tl.arange(0, BN)
    rows = below(row, M, WHOLE)
    inside = rows[:, None] & below(col, N, WHOLE)[None, :]
    place = offsets(row, col, N)
    value = _load_sum(x, add, total, place, inside, ADD, "")
    if ADD:
        tl.store(total + place, rounded(value, total), mask=inside)
    center = tl.zeros([BM], tl.float32)
    off = value
    if LAYER:
        center = divide(tl.sum(value, 1), N + center)
        # what rounding left: equal values then give their mean exactly
        center += divide(tl.sum(tl.where(inside, value - center[:, None], 0.0), 1), N + tl.zeros_like(center))
        off = tl.where(inside, value - center[:, None], 0.0)
        tl.store(mean + row, center, mask=rows)
    spread = _rstd(tl.sum(off * off, 1), N, eps)
    tl.store(rstd + row, spread, mask=rows)
    store_tile(
        _normalized(value, center, spread, weight, bias, col, N, LAYER, ZERO_CENTERED),
        row,
        col,
        top,
        0,
        M,
        N,
        row_data,
        row_scale,
        col_data,
        col_scale,
        amax,
        scale,
        END,
        ROWWISE,
        COLUMNWISE,
        PACK,
        ROUND,
        LIMIT,
        EPSILON,
        POWER_OF_2,
        OVERFLOW,
        WHOLE,
    )


@triton.jit
def _forward_kernel(
    x,
    add,
    total,
    weight,
    bias,
    mean,
    rstd,
    M,
    N,
    width,
    eps,
    row_data,
    row_scale,
    col_data,
    col_scale,
    amax,
    scale,
    END: tl.constexpr,
    ROWWISE: tl.constexpr,
    COLUMNWISE: tl.constexpr,
    PACK: tl.constexpr,
    ROUND: tl.constexpr,
    LIMIT: tl.constexpr,
    EPSILON: tl.constexpr,
    POWER_OF_2: tl.constexpr,
    OVERFLOW: tl.constexpr,
    WHOLE: tl.constexpr,
    LAYER: tl.constexpr,
    ADD: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    STATISTICS: tl.constexpr,
    NORMALIZE: tl.constexpr,
    PEAK: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BS: tl.constexpr,
):
    program = tl.program_id(0)
    if not STATISTICS:
        # backwards: what the pass before read last is in the cache still
        program = tl.num_programs(0) - 1 - program
    across = tl.cdiv(N, width)
    top = (program // across) * BM
    # tiles that are not cast are of few rows, in any order
    row = rows_of_tile(top, BM, PACK and NORMALIZE and END != "observe")
    first = (program % across) * width
    last = tl.minimum(first + width, N)
    rows = below(row, M, WHOLE)
    center = tl.zeros([BM], tl.float32)
    if STATISTICS:
        if LAYER:
            center, square = _mean_and_deviation(x, row, M, N, FIRST, BM, BS)
            peak = center
        else:
            square, peak = _mean_square(
                x, add, total, weight, row, first, last, M, N, ADD, PEAK, ZERO_CENTERED, FIRST, BM, BS
            )
        spread = _rstd(square, N, eps)
        if first == 0:
            tl.store(rstd + row, spread, mask=rows)
            if LAYER:
                tl.store(mean + row, center, mask=rows)
        if PEAK:
            # Rounding is monotonic, so (x * gain) * rstd is largest where |x * gain| is: the row's peak stands for it.
            store_tile(
                (peak * spread)[:, None],
                row,
                tl.arange(0, 1),
                top,
                0,
                M,
                N,
                row_data,
                row_scale,
                col_data,
                col_scale,
                amax,
                scale,
                END,
                ROWWISE,
                COLUMNWISE,
                PACK,
                ROUND,
                LIMIT,
                EPSILON,
                POWER_OF_2,
                OVERFLOW,
                WHOLE,
            )
    else:
        spread = tl.load(rstd + row, mask=rows, other=0.0)
        if LAYER:
            center = tl.load(mean + row, mask=rows, other=0.0)
    if NORMALIZE:
        for start in tl.range(first, last, BN):
            col = start + tl.arange(0, BN)
            inside = rows[:, None] & below(col, N, WHOLE)[None, :]
            y = _load_sum(x, add, total, offsets(row, col, N), inside, ADD, SECOND)
            store_tile(
                _normalized(y, center, spread, weight, bias, col, N, LAYER, ZERO_CENTERED),
                row,
                col,
                top,
                start,
                M,
                N,
                row_data,
                row_scale,
                col_data,
                col_scale,
                amax,
                scale,
                END,
                ROWWISE,
                COLUMNWISE,
                PACK,
                ROUND,
                LIMIT,
                EPSILON,
                POWER_OF_2,
                OVERFLOW,
                WHOLE,
            )


def _forward(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    add: torch.Tensor | None,
    dtype: torch.dtype,
    bound: BoundQuantizer | None,
    eps: float,
    zero_centered_gamma: bool,
) -> tuple[Target, torch.Tensor, torch.Tensor, torch.Tensor | None] | None:
    """What the result is stored in; mean (``rstd`` again for RMSNorm), ``rstd`` and ``add + x``.

    None for a cast without a kernel, or if the matrix that is cast, of the last dimension, is not the norm's.
    """
    if bound is not None and weight.dim() != 1:
        return None
    layer = bias is not None
    leading = tuple(x.shape[: x.dim() - weight.dim()])
    rows, cols = math.prod(leading), weight.numel()
    passes = norm_passes(rows, cols, bound)
    made = target(tuple(x.shape), dtype, bound, x.device, (passes[-1].rows, passes[-1].cols, passes[-1].warps))
    if made is None:
        return None
    matrix, weight = x.reshape(rows, cols).contiguous(), weight.contiguous()
    rstd = torch.empty(leading, dtype=torch.float32, device=x.device)
    mean = torch.empty_like(rstd) if layer else rstd
    total = None
    if add is not None:
        total = torch.empty(x.shape, dtype=torch.promote_types(x.dtype, add.dtype), device=x.device)
        add = add.reshape(rows, cols).contiguous()
    tensors = (weight, weight if bias is None else bias.contiguous(), mean, rstd)
    constants = dict(**made.constants, LAYER=layer, ZERO_CENTERED=zero_centered_gamma)
    if passes[0].whole:
        (step,) = passes
        extra, sum_ = matrix if add is None else add, matrix if total is None else total
        launch(
            _rows_kernel,
            (blocks(rows, step.rows),),
            matrix,
            *(matrix, extra, sum_, *tensors, rows, cols, eps, *made.arguments),
            END=made.ends[0],
            ADD=add is not None,
            WHOLE=whole(rows, cols, step.rows, step.cols),
            BM=step.rows,
            BN=step.cols,
            num_warps=step.warps,
            **constants,
        )
        return made, mean, rstd, total
    # statistics that are a pass of their own end in nothing
    ends = made.ends if len(passes) == len(made.ends) else ("plain", *made.ends)
    for end, step in zip(ends, passes, strict=True):
        adds = add is not None and step.statistics
        source = matrix if total is None or step.statistics else total
        peak = end == "observe" and not layer
        again = step.statistics and step.normalize and not peak
        launch(
            _forward_kernel,
            (blocks(rows, step.rows) * blocks(cols, step.width),),
            source,
            source,
            add if adds else source,
            source if total is None else total,
            *(*tensors, rows, cols, step.width, eps, *made.arguments),
            END=end,
            ADD=adds,
            STATISTICS=step.statistics,
            NORMALIZE=step.normalize and not peak,
            PEAK=peak,
            FIRST="evict_last" if again else "",
            SECOND="evict_first" if again else "",
            WHOLE=whole(rows, cols, step.rows, step.cols),
            BM=step.rows,
            BN=step.cols,
            BS=step.lanes,
            num_warps=step.warps,
            **constants,
        )
    return made, mean, rstd, total


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    eps: float,
    zero_centered_gamma: bool,
    dtype: torch.dtype,
    bound: BoundQuantizer | None,
    add: torch.Tensor | None = None,
) -> tuple[Stored, torch.Tensor | None, torch.Tensor, torch.Tensor | None] | None:
    """``y = g * s * rstd`` with ``rstd = 1 / sqrt(mean(s^2) + eps)`` (Zhang and Sennrich, 2019).

    ``s`` is ``x``, or ``add + x`` as it is rounded; ``g`` is ``weight``, or ``1 + weight`` if ``zero_centered_gamma``.

    Args:
        x: any float dtype and strides, shape (*leading, *weight.shape).
        weight: any float dtype, one or more dims.
        eps: added to the mean square.
        zero_centered_gamma: see above.
        dtype: nominal dtype of ``y``.
        bound: how ``y`` is cast, or None.
        add: x's shape, any float dtype, or None.

    Returns:
        The stored ``y``; the observed amax (float32 ``[1]``) or None; ``rstd``, float32 of the leading shape; ``s`` in
        torch's promoted dtype, or None without ``add``. None for a cast without a kernel.
    """
    done = _forward(x, weight, None, add, dtype, bound, eps, zero_centered_gamma)
    if done is None:
        return None
    made, _, rstd, total = done
    return (*made.result(), rstd, total)


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    *,
    eps: float,
    zero_centered_gamma: bool,
    dtype: torch.dtype,
    bound: BoundQuantizer | None,
) -> tuple[Stored, torch.Tensor | None, torch.Tensor, torch.Tensor] | None:
    """``y = g * (x - mean) * rstd + bias`` with ``rstd = 1 / sqrt(mean((x - mean)^2) + eps)`` (Ba et al., 2016).

    Args:
        x, weight, eps, zero_centered_gamma, dtype, bound: as for :func:`rms_norm`.
        bias: any float dtype, weight's shape.

    Returns:
        The stored ``y``; the observed amax (float32 ``[1]``) or None; ``mean`` and ``rstd``, float32 of the leading
        shape. None for a cast without a kernel.
    """
    done = _forward(x, weight, bias, None, dtype, bound, eps, zero_centered_gamma)
    if done is None:
        return None
    made, mean, rstd, _ = done
    return (*made.result(), mean, rstd)
