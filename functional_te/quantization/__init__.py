"""Quantization: formats, quantizers, their states, quantized tensors and recipes."""

from functional_te.quantization import recipes
from functional_te.quantization.cast import dequantize, quantize, quantize_bound
from functional_te.quantization.formats import Format, saturating_cast
from functional_te.quantization.quantizers import (
    QUANTIZERS,
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8DelayedScalingQuantizer,
    HybridQuantizer,
    IdentityQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    Quantizer,
)
from functional_te.quantization.random import make_key, next_key
from functional_te.quantization.serialization import (
    from_tensors,
    quantizer_from_json,
    quantizer_to_json,
    to_tensors,
)
from functional_te.quantization.state import (
    DelayedScalingState,
    StochasticRoundingState,
    init_quantizer_state,
    update_amax,
    update_scale,
)
from functional_te.quantization.tensor import BoundQuantizer, CachedWeight, QuantizedTensor

__all__ = [
    "QUANTIZERS",
    "BoundQuantizer",
    "CachedWeight",
    "DelayedScalingState",
    "Float8BlockQuantizer",
    "Float8CurrentScalingQuantizer",
    "Float8DelayedScalingQuantizer",
    "Format",
    "HybridQuantizer",
    "IdentityQuantizer",
    "MXFP8Quantizer",
    "NVFP4Quantizer",
    "QuantizedTensor",
    "Quantizer",
    "StochasticRoundingState",
    "dequantize",
    "from_tensors",
    "init_quantizer_state",
    "make_key",
    "next_key",
    "quantize",
    "quantize_bound",
    "quantizer_from_json",
    "quantizer_to_json",
    "recipes",
    "saturating_cast",
    "to_tensors",
    "update_amax",
    "update_scale",
]
