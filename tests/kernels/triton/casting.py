"""Formats that the kernels make, and the comparison of what they made with the reference cast, bit for bit."""

from __future__ import annotations

from typing import Any

import torch

from functional_te.quantization.cast import quantize_bound
from functional_te.quantization.quantizer import Quantizer
from functional_te.quantization.quantizers import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8DelayedScalingQuantizer,
)
from functional_te.quantization.tensor import BoundQuantizer

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2

FORMATS: dict[str, Quantizer] = {
    "delayed": Float8DelayedScalingQuantizer(E4M3, columnwise=True),
    "delayed-e5m2": Float8DelayedScalingQuantizer(E5M2, columnwise=True),
    "current": Float8CurrentScalingQuantizer(E4M3, columnwise=True),
    "current-power": Float8CurrentScalingQuantizer(E5M2, columnwise=True, power_2_scale=True, amax_epsilon=0.5),
    "block-1d": Float8BlockQuantizer(E4M3, columnwise=True, block_scaling_dim=1),
    "block-2d": Float8BlockQuantizer(E4M3, columnwise=True),
    "block-1d-exact": Float8BlockQuantizer(
        E5M2, columnwise=True, block_scaling_dim=1, power_2_scale=False, amax_epsilon=0.25
    ),
    "block-2d-exact": Float8BlockQuantizer(E5M2, columnwise=True, power_2_scale=False),
}
# One of each way to end a tile.
ENDS = ("delayed", "current", "block-1d", "block-2d")


def bound_to(quantizer: Quantizer, device: str, scale: float = 37.5) -> BoundQuantizer:
    """With a scale where the format keeps one."""
    if not quantizer.stateful:
        return BoundQuantizer(quantizer=quantizer)
    return BoundQuantizer(quantizer=quantizer, scale=torch.tensor([scale], device=device))


def bits(x: torch.Tensor) -> torch.Tensor:
    """Integers that are equal where values are; NaNs of FP8 and float32 are one value, whatever their bits."""
    if x.dtype in (E4M3, E5M2):
        numbers = x.view(torch.uint8)
        return torch.where(x.float().isnan(), 0x7F, numbers)
    return torch.where(x.isnan(), 0x7FC00000, x.contiguous().view(torch.int32))


def assert_cast(actual: Any, x: torch.Tensor, bound: BoundQuantizer, dtype: torch.dtype) -> None:
    """``actual`` is the pair (quantized, amax) that the reference makes of ``x``."""
    expected = quantize_bound(x, bound, dtype)
    (made, amax), (wanted, wanted_amax) = actual, expected
    assert made.quantizer == wanted.quantizer
    assert made.dtype is wanted.dtype
    for name in ("rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv"):
        one, other = getattr(made, name), getattr(wanted, name)
        assert (one is None) == (other is None), name
        if one is not None:
            assert one.dtype is other.dtype
            assert one.shape == other.shape, name
            assert one.is_contiguous()
            assert torch.equal(bits(one), bits(other)), name
    assert (amax is None) == (wanted_amax is None)
    if amax is not None:
        assert amax.dtype is torch.float32
        assert torch.equal(bits(amax), bits(wanted_amax))
