"""Dropout from an explicit key, in float32 (Srivastava et al., 2014; survivors scaled, so that evaluation is free).

The mask is a function of the key and of the position of an element in row-major order, and of nothing else: the same
key gives the same mask again, in the backward, under recomputation, compiled, and on every device and layout.
"""

from __future__ import annotations

import torch
from torch import Tensor

from functional_te.kernels.reference.precision import float32
from functional_te.quantization.random import random_bits

# the steps that probabilities come in: random_bits gives 16-bit values
RESOLUTION = 1 << 16


def dropout_threshold(p: float) -> int:
    """How many of the 65536 random values drop an element: ``p`` to the nearest multiple of ``2**-16``."""
    return round(p * RESOLUTION)


def dropout(
    x: Tensor, key: Tensor | None, *, p: float, bias: Tensor | None = None, add: Tensor | None = None
) -> Tensor:
    """``y = (x + bias) * keep / (1 - p) + add``. Its own gradient in x, without bias and add: both are linear.

    An element is kept with probability ``1 - p``, ``p`` rounded to a multiple of ``2**-16``; the scale ``1 / (1 - p)``
    is not rounded. What is dropped is multiplied by 0, so a NaN stays one and an infinity becomes one.

    Args:
        x: any float dtype and shape.
        key: int64 ``[2]``, or None to keep everything unscaled.
        p: probability to drop, in [0, 1).
        bias: added before the mask, of the last dim's size, or None.
        add: added after it, of x's shape, or None.

    Returns:
        y, float32 of x's shape.
    """
    y = float32(x)
    if bias is not None:
        y = y + float32(bias)
    if key is not None:
        keep = random_bits(key, x.numel()) >= dropout_threshold(p)
        y = y * (keep.to(torch.float32) * (1.0 / (1.0 - p))).reshape(x.shape)
    if add is not None:
        y = float32(add) + y
    return y
