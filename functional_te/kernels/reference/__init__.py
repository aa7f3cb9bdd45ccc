"""The reference backend: every kernel in plain PyTorch, on any device."""

from functional_te.kernels.reference.activation import activation_backward, activation_forward
from functional_te.kernels.reference.adaptive_layer_norm import (
    adaptive_layer_norm_backward,
    adaptive_layer_norm_forward,
)
from functional_te.kernels.reference.bias import bias_grad
from functional_te.kernels.reference.dropout import dropout
from functional_te.kernels.reference.gemm import gemm_nn, gemm_nt, gemm_tn
from functional_te.kernels.reference.grouped import grouped_nn, grouped_nt, grouped_sum, grouped_tn
from functional_te.kernels.reference.l2_norm import l2_norm_backward, l2_norm_forward
from functional_te.kernels.reference.norm import (
    add_rms_norm_forward,
    layer_norm_backward,
    layer_norm_forward,
    rms_norm_backward,
    rms_norm_forward,
)
from functional_te.quantization.cast import quantize_bound as quantize

__all__ = [
    "activation_backward",
    "activation_forward",
    "adaptive_layer_norm_backward",
    "adaptive_layer_norm_forward",
    "add_rms_norm_forward",
    "bias_grad",
    "dropout",
    "gemm_nn",
    "gemm_nt",
    "gemm_tn",
    "grouped_nn",
    "grouped_nt",
    "grouped_sum",
    "grouped_tn",
    "l2_norm_backward",
    "l2_norm_forward",
    "layer_norm_backward",
    "layer_norm_forward",
    "quantize",
    "rms_norm_backward",
    "rms_norm_forward",
]
