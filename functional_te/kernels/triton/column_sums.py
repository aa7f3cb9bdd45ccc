"""Sums over the rows of a matrix in two stages: a row of float32 partial sums per tile row, then their sum.

No atomics: the order of additions depends on the tile's size alone, so two runs give the same bits.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from functional_te.kernels.triton.launch import blocks, launch
from functional_te.kernels.triton.rounding import round_like, rounded
from functional_te.kernels.triton.sizes import tile_size

__all__ = ["round_and_sum", "store_partial", "sum_rows"]


@triton.jit
def store_partial(y, row, col, M, N, partials):
    """Write the column sums of a tile of a matrix ``[M, N]`` as a part of one row of ``partials``.

    Args:
        y: float32 ``[BM, BN]``; what lies outside of the matrix may hold anything.
        row, col: int32 ``[BM]`` and ``[BN]``; ``row`` starts at a multiple of BM.
        partials: float32 ``[tiles down, N]``.
    """
    sums = tl.sum(tl.where((row < M)[:, None], y, 0.0), axis=0)
    down = (tl.min(row) // y.shape[0]).to(tl.int64)
    tl.store(partials + down * N + col, sums, mask=col < N)


@triton.jit
def round_and_sum(y, row, col, M, N, bias, partials, BIAS: tl.constexpr, END: tl.constexpr):
    """With a bias gradient: ``y`` rounded to the dtype of ``bias``, its column sums in ``partials``; else ``y``."""
    if BIAS:
        y = round_like(y, bias)
        if END != "observe":
            store_partial(y, row, col, M, N, partials)
    return y


@triton.jit
def _sum_rows_kernel(partials, out, R, N, BM: tl.constexpr, BN: tl.constexpr):
    col = tl.program_id(0) * BN + tl.arange(0, BN)
    sums = tl.zeros((BM, BN), tl.float32)
    for start in range(0, R, BM):
        row = start + tl.arange(0, BM)
        place = partials + row.to(tl.int64)[:, None] * N + col[None, :]
        sums += tl.load(place, mask=(row < R)[:, None] & (col < N)[None, :], other=0.0)
    tl.store(out + col, rounded(tl.sum(sums, axis=0), out), mask=col < N)


def sum_rows(partials: torch.Tensor, out: torch.Tensor) -> None:
    """Write the sums over the rows of float32 ``partials [R, N]``, rounded once, to ``out [N]``."""
    rows: Any
    rows, cols = partials.shape
    bm, bn, warps = tile_size("sum_rows", rows, cols)
    grid = (blocks(cols, bn),)
    launch(_sum_rows_kernel, grid, partials, partials, out, rows, cols, BM=bm, BN=bn, num_warps=warps)
