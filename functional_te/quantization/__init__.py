"""Quantization: formats, quantizers, their states, quantized tensors and recipes."""

from functional_te.quantization import recipes
from functional_te.quantization.cast import dequantize, quantize, quantize_bound
from functional_te.quantization.formats import Format, saturating_cast
from functional_te.quantization.quantizer import (
    Float8CurrentScalingQuantizer,
    Float8DelayedScalingQuantizer,
    Quantizer,
)
from functional_te.quantization.state import DelayedScalingState, init_quantizer_state, update_amax, update_scale
from functional_te.quantization.tensor import BoundQuantizer, QuantizedTensor

__all__ = [
    "BoundQuantizer",
    "DelayedScalingState",
    "Float8CurrentScalingQuantizer",
    "Float8DelayedScalingQuantizer",
    "Format",
    "QuantizedTensor",
    "Quantizer",
    "dequantize",
    "init_quantizer_state",
    "quantize",
    "quantize_bound",
    "recipes",
    "saturating_cast",
    "update_amax",
    "update_scale",
]
