"""Quantizers: one file per format, one line each here."""

from functional_te.quantization.quantizer import IdentityQuantizer, Quantizer
from functional_te.quantization.quantizers.fp8_block import Float8BlockQuantizer
from functional_te.quantization.quantizers.hybrid import HybridQuantizer
from functional_te.quantization.quantizers.mxfp8 import MXFP8Quantizer
from functional_te.quantization.quantizers.nvfp4 import NVFP4Quantizer
from functional_te.quantization.quantizers.per_tensor import (
    Float8CurrentScalingQuantizer,
    Float8DelayedScalingQuantizer,
)

__all__ = [
    "QUANTIZERS",
    "Float8BlockQuantizer",
    "Float8CurrentScalingQuantizer",
    "Float8DelayedScalingQuantizer",
    "HybridQuantizer",
    "IdentityQuantizer",
    "MXFP8Quantizer",
    "NVFP4Quantizer",
    "Quantizer",
]

QUANTIZERS: tuple[type[Quantizer], ...] = (
    Float8CurrentScalingQuantizer,
    Float8DelayedScalingQuantizer,
    Float8BlockQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    HybridQuantizer,
)
