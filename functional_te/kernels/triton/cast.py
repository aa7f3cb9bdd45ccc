"""Casts of whole tensors: amax, cast, transposed cast and bias gradient over one reading of the tensor per pass."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from functional_te.kernels.triton.column_sums import round_and_sum, sum_rows
from functional_te.kernels.triton.launch import blocks, launch
from functional_te.kernels.triton.rounding import as_words, quarters_of, rows_of_tile
from functional_te.kernels.triton.sizes import tile_size
from functional_te.kernels.triton.tile import Target, below, offsets, sized, store_tile, target, whole
from functional_te.quantization.cast import quantize_bound
from functional_te.quantization.groups import GroupLayout
from functional_te.quantization.quantizer import as_matrix
from functional_te.quantization.tensor import BoundQuantizer, QuantizedTensor
from functional_te.torch_compat import statically_known_true

__all__ = ["cast_bias", "quantize", "transpose"]


@triton.jit
def _cast_kernel(
    x,
    bias,
    partials,
    M,
    N,
    row_data,
    row_scale,
    col_data,
    col_scale,
    amax,
    scale,
    BIAS: tl.constexpr,
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
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    across = tl.maximum(tl.cdiv(N, BN), 1)
    tile = tl.program_id(0)
    top, left = (tile // across) * BM, (tile % across) * BN
    row = rows_of_tile(top, BM, PACK)
    col = left + tl.arange(0, BN)
    inside = below(row, M, WHOLE)[:, None] & below(col, N, WHOLE)[None, :]
    y = tl.load(x + offsets(row, col, N), mask=inside, other=0.0).to(tl.float32)
    y = round_and_sum(y, row, col, M, N, bias, partials, BIAS, END)
    store_tile(
        y,
        row,
        col,
        top,
        left,
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
def _transpose_kernel(x, y, M, N, WHOLE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """Bytes of ``y [N, M]``, four rows of ``x [M, N]`` at a time, as :func:`store_tile` writes a transposed cast."""
    across = tl.maximum(tl.cdiv(N, BN), 1)
    tile = tl.program_id(0)
    top, left = (tile // across) * BM, (tile % across) * BN
    row = rows_of_tile(top, BM, True)
    col = left + tl.arange(0, BN)
    cols = below(col, N, WHOLE)
    source = x.to(tl.pointer_type(tl.uint8), bitcast=True) + offsets(row, col, N)
    data = tl.load(source, mask=below(row, M, WHOLE)[:, None] & cols[None, :], other=0).to(tl.int32)
    first, second, third, fourth = quarters_of(data)
    words = tl.trans(first | (second << 8) | (third << 16) | (fourth << 24))
    word = top // 4 + tl.arange(0, BM // 4)
    tl.store(as_words(y) + offsets(col, word, M // 4), words, mask=cols[:, None] & below(word, M // 4, WHOLE)[None, :])


def transpose(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor | None:
    """A transposed copy of data of a byte each.

    Args:
        x: ``[M, N]`` of an 8-bit dtype, contiguous.
        out: ``[N, M]``, contiguous, to write to; None makes a new one.

    Returns:
        The copy. None where M is no multiple of 4, of other dtypes, and for an ``out`` that begins within a word.
    """
    rows, cols = x.shape
    if x.dtype.itemsize != 1 or not statically_known_true(rows % 4 == 0):
        return None
    if out is not None and (out.dtype is not x.dtype or not statically_known_true(out.storage_offset() % 4 == 0)):
        return None
    out = torch.empty((cols, rows), dtype=x.dtype, device=x.device) if out is None else out
    bm, bn, warps = tile_size("transpose", rows, cols)
    grid = (blocks(rows, bm) * blocks(cols, bn),)
    fits = whole(rows, cols, bm, bn)
    launch(_transpose_kernel, grid, x, x, out, rows, cols, WHOLE=fits, BM=bm, BN=bn, num_warps=warps)
    return out


def quantize(
    x: torch.Tensor, bound: BoundQuantizer, dtype: torch.dtype | None = None, groups: GroupLayout | None = None
) -> tuple[QuantizedTensor, torch.Tensor | None]:
    """:func:`functional_te.quantization.cast.quantize_bound`, in a kernel (current scaling: two) if there is one."""
    done = None
    if groups is None and not bound.quantizer.stochastic:
        done = _cast(x, bound, x.dtype, None)  # the values are cast as they are, whatever dtype says
    return quantize_bound(x, bound, dtype, groups) if done is None else done.result(dtype)


def cast_bias(
    dy: torch.Tensor, bound: BoundQuantizer, *, dtype: torch.dtype, needs_bias: bool = True
) -> tuple[QuantizedTensor, torch.Tensor | None, torch.Tensor | None] | None:
    """Cast a gradient and sum it over its leading dimensions, from one reading (current scaling: two).

    Args:
        dy: float32, float16 or bfloat16 ``[..., n]`` of any strides.
        bound: how it is cast.
        dtype: nominal dtype of the result; with ``needs_bias`` the values are rounded to it first.
        needs_bias: whether the sums are wanted.

    Returns:
        The cast; the observed amax (float32 ``[1]``) or None; the bias gradient ``[n]``, float32 sums rounded to
        ``dtype``, or None. None for a format without a kernel.
    """
    bias = None
    if needs_bias:
        bias = torch.empty(dy.shape[-1] if dy.dim() else 1, dtype=dtype, device=dy.device)
    made = _cast(dy, bound, dtype, bias)
    return None if made is None else (*made.result(), bias)


def _cast(x: torch.Tensor, bound: BoundQuantizer, dtype: torch.dtype, bias: torch.Tensor | None) -> Target | None:
    """The cast of ``x`` of nominal ``dtype``; ``bias [N]`` is filled with column sums. None without a kernel."""
    matrix = as_matrix(x).contiguous()
    rows, cols = matrix.shape
    case = "cast" if bias is None else "cast_bias"
    bm, bn, warps = tile = tile_size(sized(case, bound), rows, cols)
    made = target(tuple(x.shape), dtype, bound, x.device, tile)
    if made is None:
        return None
    partials = matrix
    if bias is not None:
        partials = torch.empty((blocks(rows, bm), cols), dtype=torch.float32, device=x.device)
    constants = dict(**made.constants, BIAS=bias is not None, BM=bm, BN=bn, num_warps=warps)
    constants["WHOLE"] = whole(rows, cols, bm, bn)
    if bias is not None or x.dtype is dtype:
        constants["ROUND"] = 0  # it is rounded already
    grid = (blocks(rows, bm) * blocks(cols, bn),)
    arguments = (matrix, matrix if bias is None else bias, partials, rows, cols, *made.arguments)
    for end in made.ends:
        launch(_cast_kernel, grid, matrix, *arguments, END=end, **constants)
    if bias is not None:
        sum_rows(partials, bias)
    return made
