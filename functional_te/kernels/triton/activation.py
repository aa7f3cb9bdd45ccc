"""Activations and their gradients with what ends a producer fused in: rounding, amax, both casts, bias gradient.

A gated activation reads two halves of its input, laid out ``[a | b]`` or in interleaved blocks. Its gradient has both
halves too: a program computes the same columns of each, from one reading, and stores two tiles.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from functional_te.kernels.reference.activation import ACTIVATIONS
from functional_te.kernels.triton.column_sums import round_and_sum, sum_rows
from functional_te.kernels.triton.formulas import FORMULAS, formula
from functional_te.kernels.triton.launch import blocks, launch
from functional_te.kernels.triton.rounding import rows_of_tile
from functional_te.kernels.triton.sizes import tile_size
from functional_te.kernels.triton.tile import below, in_blocks, offsets, sized, store_tile, target, whole
from functional_te.quantization.quantizer import as_matrix
from functional_te.quantization.tensor import BoundQuantizer
from functional_te.torch_compat import statically_known_true

__all__ = ["activation", "activation_grad"]


@triton.jit
def _halves(col, N, INTERLEAVE: tl.constexpr):
    """Columns of a gated input ``[M, 2 N]`` that hold gate and linear part of the output's columns ``col``."""
    if INTERLEAVE == 0:
        gate = col
        linear = col + N
    else:
        gate = (col // INTERLEAVE) * (2 * INTERLEAVE) + col % INTERLEAVE
        linear = gate + INTERLEAVE
    return gate, linear


@triton.jit
def _load(x, row, col, stride, inside):
    return tl.load(x + offsets(row, col, stride), mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _forward_kernel(
    x,
    M,
    N,
    row_data,
    row_scale,
    col_data,
    col_scale,
    amax,
    scale,
    VALUE: tl.constexpr,
    LINEAR: tl.constexpr,
    INTERLEAVE: tl.constexpr,
    C0: tl.constexpr,
    C1: tl.constexpr,
    C2: tl.constexpr,
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
    """``y [M, N]`` of ``x [M, N]``, or of ``x [M, 2 N]`` if there is a formula ``LINEAR``."""
    across = tl.maximum(tl.cdiv(N, BN), 1)
    tile = tl.program_id(0)
    top, left = (tile // across) * BM, (tile % across) * BN
    row = rows_of_tile(top, BM, PACK)
    col = left + tl.arange(0, BN)
    inside = below(row, M, WHOLE)[:, None] & below(col, N, WHOLE)[None, :]
    if LINEAR == "":
        a = _load(x, row, col, N, inside)
        y, _ = formula(a, a, VALUE, C0, C1, C2)
    else:
        gate, linear = _halves(col, N, INTERLEAVE)
        a = _load(x, row, gate, 2 * N, inside)
        b = _load(x, row, linear, 2 * N, inside)
        phi, _ = formula(a, a, VALUE, C0, C1, C2)
        lam, _ = formula(b, b, LINEAR, C0, C1, C2)
        y = phi * lam
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
def _backward_kernel(
    dy,
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
    VALUE: tl.constexpr,
    LINEAR: tl.constexpr,
    INTERLEAVE: tl.constexpr,
    C0: tl.constexpr,
    C1: tl.constexpr,
    C2: tl.constexpr,
    EVEN: tl.constexpr,
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
    """``dx`` of ``dy [M, N]``, in the shape and layout of ``x``.

    EVEN: whether BN divides N.
    """
    across = tl.maximum(tl.cdiv(N, BN), 1)
    tile = tl.program_id(0)
    top, left = (tile // across) * BM, (tile % across) * BN
    row = rows_of_tile(top, BM, PACK)
    col = left + tl.arange(0, BN)
    inside = below(row, M, WHOLE)[:, None] & below(col, N, WHOLE)[None, :]
    grad = _load(dy, row, col, N, inside)
    if LINEAR == "":
        width = N
        a = _load(x, row, col, N, inside)
        _, dx = formula(a, grad, VALUE, C0, C1, C2)
    else:
        width = 2 * N
        gate, linear = _halves(col, N, INTERLEAVE)
        a = _load(x, row, gate, width, inside)
        b = _load(x, row, linear, width, inside)
        lam, _ = formula(b, grad, LINEAR, C0, C1, C2)
        phi, _ = formula(a, grad, VALUE, C0, C1, C2)
        # both before anything is stored: two tiles of results need fewer registers than three of inputs
        _, da = formula(a, grad * lam, VALUE, C0, C1, C2)
        _, dx = formula(b, grad * phi, LINEAR, C0, C1, C2)
        if INTERLEAVE == 0 and not EVEN:
            # columns behind the first half are inside of the matrix, but belong to programs of the second
            gate = tl.where(col < N, gate, width)
        da = round_and_sum(da, row, gate, M, width, bias, partials, BIAS, END)
        store_tile(
            da,
            row,
            gate,
            top,
            left,
            M,
            width,
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
        col = linear
        left += N
    dx = round_and_sum(dx, row, col, M, width, bias, partials, BIAS, END)
    store_tile(
        dx,
        row,
        col,
        top,
        left,
        M,
        width,
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


def _constants(kind: str, config: tuple[float, ...], interleave: int) -> dict[str, Any]:
    """The constexpr arguments of an activation."""
    value, linear = FORMULAS[kind]
    c0, c1, c2, *_ = (*(config or ACTIVATIONS[kind].defaults), 0.0, 0.0, 0.0)
    return dict(VALUE=value, LINEAR=linear, INTERLEAVE=interleave if linear else 0, C0=c0, C1=c1, C2=c2)


def activation(
    x: torch.Tensor,
    kind: str,
    config: tuple[float, ...],
    interleave: int,
    *,
    dtype: torch.dtype,
    bound: BoundQuantizer | None,
) -> tuple[Any, torch.Tensor | None] | None:
    """``phi(x)``, or ``phi(a) * lam(b)`` of a gated ``kind``, rounded or cast, in one kernel (current scaling: two).

    Args:
        x: float32, float16 or bfloat16 ``[..., n]`` of any strides; ``n`` is even for a gated kind.
        kind: a key of :data:`~functional_te.kernels.triton.formulas.FORMULAS`.
        config: constants of the formula; empty means the defaults.
        interleave: 0 when the last dimension is ``[a | b]``, or the block size of the interleaved layout.
        dtype: nominal dtype of the result.
        bound: how it is cast, or None.

    Returns:
        The stored tensor, and the observed amax (float32 ``[1]``) or None. None for a kind or format without a kernel.
    """
    if kind not in FORMULAS:
        return None
    gated = FORMULAS[kind][1] != ""
    shape = (*x.shape[:-1], x.shape[-1] // 2) if gated else tuple(x.shape)
    matrix = as_matrix(x).contiguous()
    rows, cols = matrix.shape[0], matrix.shape[1] // 2 if gated else matrix.shape[1]
    bm, bn, warps = tile = tile_size(sized("gated" if gated else "activation", bound), rows, cols)
    made = target(shape, dtype, bound, x.device, tile)
    if made is None:
        return None
    constants = dict(**_constants(kind, config, interleave), **made.constants, BM=bm, BN=bn, num_warps=warps)
    constants["WHOLE"] = whole(rows, cols, bm, bn)
    grid = (blocks(rows, bm) * blocks(cols, bn),)
    for end in made.ends:
        launch(_forward_kernel, grid, matrix, matrix, rows, cols, *made.arguments, END=end, **constants)
    return made.result()


def activation_grad(
    dy: torch.Tensor,
    x: torch.Tensor,
    kind: str,
    config: tuple[float, ...],
    interleave: int,
    *,
    dtype: torch.dtype,
    bound: BoundQuantizer | None,
    needs_bias: bool = False,
) -> tuple[Any, torch.Tensor | None, torch.Tensor | None] | None:
    """Gradient of :func:`activation` with respect to ``x``, rounded or cast, and that of a bias added to ``x``.

    With ``needs_bias`` the gradient is rounded to ``dtype`` before it is summed, and every format casts the rounded
    values.

    Args:
        dy: gradient of the output: its shape, any float dtype.
        x: the input. kind, config, interleave: as given to :func:`activation`.
        dtype: nominal dtype of the result.
        bound: how it is cast, or None.
        needs_bias: whether the sums over the leading dimensions are wanted.

    Returns:
        The stored gradient in the shape and layout of ``x``; the observed amax (float32 ``[1]``) or None; the bias
        gradient, float32 sums rounded to ``dtype``, or None. None for a case without a kernel: another kind or format,
        a cast of an interleaved layout, blocks of halves that do not start at one.
    """
    if kind not in FORMULAS:
        return None
    gated = FORMULAS[kind][1] != ""
    if gated and interleave and bound is not None:
        return None
    grad, matrix = as_matrix(dy).contiguous(), as_matrix(x).contiguous()
    rows, cols = matrix.shape[0], matrix.shape[1] // 2 if gated else matrix.shape[1]
    bm, bn, warps = tile = tile_size(sized("gated_grad" if gated else "activation_grad", bound), rows, cols)
    even = statically_known_true(cols % bn == 0)
    if gated and in_blocks(bound) and not even:
        return None
    made = target(tuple(x.shape), dtype, bound, x.device, tile)
    if made is None:
        return None
    bias, partials = grad, grad
    if needs_bias:
        bias = torch.empty(matrix.shape[1], dtype=dtype, device=x.device)
        partials = torch.empty((blocks(rows, bm), matrix.shape[1]), dtype=torch.float32, device=x.device)
    constants = dict(**_constants(kind, config, interleave), **made.constants, BM=bm, BN=bn, num_warps=warps)
    constants["WHOLE"] = whole(rows, cols, bm, bn)
    grid = (blocks(rows, bm) * blocks(cols, bn),)
    arguments = (grad, matrix, bias, partials, rows, cols, *made.arguments)
    constants.update(EVEN=even, BIAS=needs_bias)
    if needs_bias:
        constants["ROUND"] = 0  # it is rounded before it is summed
    for end in made.ends:
        launch(_backward_kernel, grid, matrix, *arguments, END=end, **constants)
    if needs_bias:
        sum_rows(partials, bias)
    return (*made.result(), bias if needs_bias else None)
