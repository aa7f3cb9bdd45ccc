"""The reference backend: every kernel in plain PyTorch, on any device."""

from functional_te.kernels.reference.activation import activation_backward, activation_forward
from functional_te.kernels.reference.gemm import gemm_nn, gemm_nt, gemm_tn
from functional_te.kernels.reference.norm import (
    layer_norm_backward,
    layer_norm_forward,
    rms_norm_backward,
    rms_norm_forward,
)
from functional_te.quantization.cast import quantize_bound as quantize

__all__ = [
    "activation_backward",
    "activation_forward",
    "gemm_nn",
    "gemm_nt",
    "gemm_tn",
    "layer_norm_backward",
    "layer_norm_forward",
    "quantize",
    "rms_norm_backward",
    "rms_norm_forward",
]
