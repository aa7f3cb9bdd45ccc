"""Gradients of RMSNorm and LayerNorm: one kernel for the input's and partial sums of the parameters', then sums.

Each program owns a range of rows and goes over it in order, so two runs give the same bits.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl

from functional_te.kernels.triton.column_sums import sum_rows
from functional_te.kernels.triton.launch import blocks, launch
from functional_te.kernels.triton.norm import load_gain
from functional_te.kernels.triton.rounding import divide, rounded
from functional_te.kernels.triton.sizes import norm_grad_sizes
from functional_te.kernels.triton.tile import offsets

__all__ = ["layer_norm_grad", "rms_norm_grad"]


@triton.jit
def _load_rows(dy, x, mean, rstd, row, col, M, N, LAYER: tl.constexpr):
    """Float32 ``dy`` and normalized ``x``; 0 outside."""
    rows = row < M
    inside = rows[:, None] & (col < N)[None, :]
    place = offsets(row, col, N)
    grad = tl.load(dy + place, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    if LAYER:
        value = tl.where(inside, value - tl.load(mean + row, mask=rows, other=0.0)[:, None], 0.0)
    return grad, value * tl.load(rstd + row, mask=rows, other=0.0)[:, None]


@triton.jit
def _mean(values, N):
    """Means of rows of a tile that holds all ``N`` columns, or of their sums over tiles."""
    sums = tl.sum(values, 1)
    return divide(sums, N + tl.zeros_like(sums))


@triton.jit
def _row_means_kernel(
    dy,
    x,
    weight,
    mean,
    rstd,
    means,
    M,
    N,
    LAYER: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """Of every row the mean of ``q * xhat``, and with LAYER that of ``q``: float32 ``means [2, M]``."""
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    along = tl.zeros([BM, BN], tl.float32)
    level = tl.zeros([BM, BN], tl.float32)
    for start in tl.range(0, N, BN):
        col = start + tl.arange(0, BN)
        grad, xhat = _load_rows(dy, x, mean, rstd, row, col, M, N, LAYER)
        q = grad * load_gain(weight, col, N, ZERO_CENTERED)[None, :]
        along += q * xhat
        if LAYER:
            level += q
    tl.store(means + row, _mean(along, N), mask=row < M)
    if LAYER:
        tl.store(means + M + row, _mean(level, N), mask=row < M)


@triton.jit
def _grad_kernel(
    dy,
    x,
    weight,
    mean,
    rstd,
    means,
    add,
    dx,
    partial_weight,
    partial_bias,
    M,
    N,
    LAYER: tl.constexpr,
    ADD: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    WHOLE: tl.constexpr,
    INPUT: tl.constexpr,
    AFFINE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    program = tl.program_id(0)
    col = tl.program_id(1) * BN + tl.arange(0, BN)
    gain = load_gain(weight, col, N, ZERO_CENTERED)[None, :]
    sum_weight = tl.zeros([BM, BN], tl.float32)
    sum_bias = tl.zeros([BM, BN], tl.float32)
    span = tl.cdiv(tl.cdiv(M, BM), tl.num_programs(0)) * BM
    for top in tl.range(program * span, tl.minimum(program * span + span, M), BM):
        row = top + tl.arange(0, BM)
        rows = row < M
        grad, xhat = _load_rows(dy, x, mean, rstd, row, col, M, N, LAYER)
        if INPUT:
            q = grad * gain
            if WHOLE:
                along = _mean(q * xhat, N)
            else:
                along = tl.load(means + row, mask=rows, other=0.0)
            out = q - xhat * along[:, None]
            if LAYER:
                if WHOLE:
                    level = _mean(q, N)
                else:
                    level = tl.load(means + M + row, mask=rows, other=0.0)
                out -= level[:, None]
            out *= tl.load(rstd + row, mask=rows, other=0.0)[:, None]
            place = offsets(row, col, N)
            inside = rows[:, None] & (col < N)[None, :]
            if ADD:
                out += tl.load(add + place, mask=inside, other=0.0).to(tl.float32)
            tl.store(dx + place, rounded(out, dx), mask=inside)
        if AFFINE:
            sum_weight += grad * xhat
            if LAYER:
                sum_bias += grad
    if AFFINE:
        place = program.to(tl.int64) * N + col
        tl.store(partial_weight + place, tl.sum(sum_weight, 0), mask=col < N)
        if LAYER:
            tl.store(partial_bias + place, tl.sum(sum_bias, 0), mask=col < N)


def _backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    mean: torch.Tensor | None,
    rstd: torch.Tensor,
    add: torch.Tensor | None,
    needs: tuple[bool, bool],
    zero_centered_gamma: bool,
    dtype: torch.dtype,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """``dx`` in ``dtype``, ``dweight`` and (given ``mean``) ``dbias`` in the weight's dtype; None where not needed."""
    needs_input, needs_affine = needs
    if not (needs_input or needs_affine):
        return None, None, None
    layer = mean is not None
    rows, cols = math.prod(x.shape[: x.dim() - weight.dim()]), weight.numel()
    grad, matrix = dy.reshape(rows, cols).contiguous(), x.reshape(rows, cols).contiguous()
    gain, rstd = weight.contiguous(), rstd.contiguous()
    center = rstd if mean is None else mean.contiguous()
    size = norm_grad_sizes(rows, cols)
    new: dict[str, Any] = {"dtype": torch.float32, "device": x.device}
    means = rstd
    if needs_input and not size.whole:
        means = torch.empty((2, rows), **new)
        launch(
            _row_means_kernel,
            (blocks(rows, size.rows),),
            matrix,
            grad,
            matrix,
            gain,
            center,
            rstd,
            means,
            rows,
            cols,
            LAYER=layer,
            ZERO_CENTERED=zero_centered_gamma,
            BM=size.rows,
            BN=size.cols,
            num_warps=size.warps,
        )
    dx = torch.empty(x.shape, dtype=dtype, device=x.device) if needs_input else None
    partials = [torch.empty((size.programs, cols), **new) for _ in range((1 + layer) * needs_affine)]
    launch(
        _grad_kernel,
        (size.programs, blocks(cols, size.cols)),
        matrix,
        grad,
        matrix,
        gain,
        center,
        rstd,
        means,
        grad if add is None else add.reshape(rows, cols).contiguous(),
        rstd if dx is None else dx,
        partials[0] if partials else rstd,
        partials[-1] if partials else rstd,
        rows,
        cols,
        LAYER=layer,
        ADD=add is not None,
        ZERO_CENTERED=zero_centered_gamma,
        WHOLE=size.whole,
        INPUT=needs_input,
        AFFINE=needs_affine,
        BM=size.rows,
        BN=size.cols,
        num_warps=size.warps,
    )
    sums: list[torch.Tensor | None] = [None, None]
    for index, partial in enumerate(partials):
        total = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
        sum_rows(partial, total)
        sums[index] = total
    return dx, sums[0], sums[1]


def rms_norm_grad(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    rstd: torch.Tensor,
    *,
    zero_centered_gamma: bool,
    dtype: torch.dtype,
    add: torch.Tensor | None = None,
    needs_input: bool = True,
    needs_weight: bool = True,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """``dx = rstd * (q - xhat * mean(q * xhat)) [+ add]`` and ``dweight = sum(dy * xhat)`` over the leading dims.

    Here ``xhat = x * rstd`` and ``q = g * dy``, with the gain ``g`` of the forward.

    Args:
        dy: gradient of y: x's shape, any float dtype and strides.
        x, weight, zero_centered_gamma: as given to :func:`~functional_te.kernels.triton.norm.rms_norm`.
        rstd: as returned by it.
        dtype: dtype of ``dx``.
        add: another gradient of x, any float dtype, added before anything is rounded.
        needs_input, needs_weight: what to compute; the other is None.

    Returns:
        ``dx`` in ``dtype`` and ``dweight`` in the weight's dtype, each rounded once.
    """
    dx, dweight, _ = _backward(dy, x, weight, None, rstd, add, (needs_input, needs_weight), zero_centered_gamma, dtype)
    return dx, dweight


def layer_norm_grad(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    *,
    zero_centered_gamma: bool,
    dtype: torch.dtype,
    needs_input: bool = True,
    needs_affine: bool = True,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """``dx = rstd * (q - mean(q) - xhat * mean(q * xhat))``, ``dweight = sum(dy * xhat)``, ``dbias = sum(dy)``.

    Here ``xhat = (x - mean) * rstd`` and ``q = g * dy``; the sums run over the leading dims.

    Args:
        dy: gradient of y: x's shape, any float dtype and strides.
        x, weight, zero_centered_gamma: as given to :func:`~functional_te.kernels.triton.norm.layer_norm`.
        mean, rstd: as returned by it.
        dtype: dtype of ``dx``.
        needs_input, needs_affine: what to compute; the others are None.

    Returns:
        ``dx`` in ``dtype``, ``dweight`` and ``dbias`` in the weight's dtype, each rounded once.
    """
    return _backward(dy, x, weight, mean, rstd, None, (needs_input, needs_affine), zero_centered_gamma, dtype)
