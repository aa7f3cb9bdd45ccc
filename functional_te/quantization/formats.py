"""Low-precision element formats and the saturating cast every quantizer uses."""

from __future__ import annotations

import enum

import torch

__all__ = ["ELEMENT_NAMES", "Format", "max_value", "saturating_cast"]

_MAX = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0, torch.float4_e2m1fn_x2: 6.0}

# the short names of the formats, by the name of the dtype
ELEMENT_NAMES = {"float8_e4m3fn": "E4M3", "float8_e5m2": "E5M2", "float4_e2m1fn_x2": "E2M1"}


class Format(enum.Enum):
    """Element formats of a recipe: one for forward tensors, one for gradients.

    Reference: Micikevicius et al., "FP8 Formats for Deep Learning", 2022. Largest finite values: E4M3 448,
    E5M2 57344, E2M1 6. ``HYBRID`` is E4M3 for inputs and weights and E5M2 for gradients.
    """

    E2M1 = "E2M1"
    E4M3 = "E4M3"
    E5M2 = "E5M2"
    HYBRID = "HYBRID"

    @property
    def forward_dtype(self) -> torch.dtype:
        """Element type of inputs and weights."""
        if self is Format.E2M1:
            return torch.float4_e2m1fn_x2
        return torch.float8_e5m2 if self is Format.E5M2 else torch.float8_e4m3fn

    @property
    def backward_dtype(self) -> torch.dtype:
        """Element type of gradients."""
        return torch.float8_e5m2 if self is Format.HYBRID else self.forward_dtype


def max_value(dtype: torch.dtype) -> float:
    """Largest finite value of an FP8 or FP4 ``dtype``."""
    return _MAX[dtype]


def saturating_cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round float32 ``x`` to nearest even in ``dtype``, saturating.

    Values beyond the finite range, infinities included, become the largest finite value of their sign; NaN stays
    NaN. The clamp is explicit because PyTorch's own E5M2 cast overflows to infinity.
    """
    limit = _MAX[dtype]
    return x.clamp(-limit, limit).to(dtype)
