"""Dropout from an explicit key, with a bias before and a residual after it, in one kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from functional_te.kernels.reference.dropout import dropout_threshold
from functional_te.kernels.triton.launch import blocks, launch
from functional_te.kernels.triton.rounding import rounded
from functional_te.kernels.triton.sizes import tile_size
from functional_te.torch_compat import statically_known_true

__all__ = ["dropout"]


@triton.jit
def _dropout_kernel(
    x,
    key,
    bias,
    add,
    out,
    count,
    randoms,
    width,
    threshold,
    factor,
    KEY: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    EVEN: tl.constexpr,
    B: tl.constexpr,
):
    """Elements ``half * randoms + j``, one of each eighth of the tensor: the random block ``j`` has their values."""
    block = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    at = block
    w0 = block
    w1 = block
    w2 = block
    w3 = block
    if KEY:
        # random_bits: the counter is (block, 0, stream 0, tag 0)
        words = block.to(tl.uint32)
        zero = words * 0
        seed = tl.load(key) | (tl.load(key + 1) << 32)
        w0, w1, w2, w3 = tl.philox(seed, words, zero, zero, zero, 10)
    if BIAS:
        at = (block % width).to(tl.int32)
    for half in tl.static_range(8):
        # the last eighths may be short, or empty
        start = tl.full([], half, tl.int64) * randoms
        place = start + block
        inside = (block < randoms) & (place < count)
        y = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
        if BIAS:
            # start + block, modulo width
            index = at + (start % width).to(tl.int32)
            index = tl.where(index >= width, index - width, index)
            if EVEN:
                index = tl.max_contiguous(tl.multiple_of(index, 8), 8)
            y += tl.load(bias + index, mask=inside, other=0.0).to(tl.float32)
        if KEY:
            if half < 2:
                word = w0
            elif half < 4:
                word = w1
            elif half < 6:
                word = w2
            else:
                word = w3
            if half % 2 == 1:
                word = word >> 16
            value = (word & 0xFFFF).to(tl.int32)
            y *= tl.where(value >= threshold, factor, 0.0)
        if ADD:
            y = tl.load(add + place, mask=inside, other=0.0).to(tl.float32) + y
        tl.store(out + place, rounded(y, out), mask=inside)


def dropout(
    x: torch.Tensor,
    key: torch.Tensor | None,
    *,
    p: float,
    dtype: torch.dtype,
    bias: torch.Tensor | None = None,
    add: torch.Tensor | None = None,
) -> torch.Tensor:
    """:func:`functional_te.kernels.reference.dropout.dropout` with the same mask, rounded to ``dtype``.

    ``y = (x + bias) * keep / (1 - p) + add`` in float32, rounded once.

    Args:
        x: any float dtype, shape and strides.
        key: int64 ``[2]``, or None to keep everything unscaled.
        p: probability to drop, in [0, 1).
        dtype: dtype of the result.
        bias: added before the mask, of the last dim's size, or None.
        add: added after it, of x's shape, or None.

    Returns:
        ``y``, of ``dtype`` and x's shape.
    """
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    x = x.contiguous()
    count = x.numel()
    randoms = (count + 7) // 8
    width = x.shape[-1] if x.dim() else 1
    # then eight elements in a row take eight of the bias in a row
    even = bias is not None and statically_known_true(width % 8 == 0) and statically_known_true(randoms % 8 == 0)
    _, size, warps = tile_size("dropout", count, 1)
    launch(
        _dropout_kernel,
        (blocks(randoms, size),),
        x,
        x,
        x if key is None else key.contiguous(),
        x if bias is None else bias.contiguous(),
        x if add is None else add.contiguous(),
        out,
        count,
        randoms,
        width,
        dropout_threshold(p),
        1.0 / (1.0 - p),
        KEY=key is not None,
        BIAS=bias is not None,
        ADD=add is not None,
        EVEN=even,
        B=size,
        num_warps=warps,
    )
    return out
