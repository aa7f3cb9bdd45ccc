"""Transformer Engine's kernels, called through its extension module ``transformer_engine_torch``.

No autograd function, module or global state of Transformer Engine is used: tensors go in, tensors come out, and what is
given is not changed. Nothing is imported before the first call. The functions have the names and arguments of the
methods and fields of :class:`functional_te.kernels.backend.Backend`; the fused ones return None for a case that no
kernel takes, the others hand it to the reference. Compilers cannot trace through them.

Casts have the bits of the reference, but for tensors with NaN: Transformer Engine's largest magnitude passes over NaN,
so a tile that holds one gets the scale of its other elements, and the amax observed is theirs. Where a derivative is
zero, a gradient of zero may have the other sign.
"""

from functional_te.kernels.te.activations import activation, activation_grad
from functional_te.kernels.te.cast import cast_bias, quantize
from functional_te.kernels.te.gemm import gemm_nn, gemm_nt, gemm_tn
from functional_te.kernels.te.library import available
from functional_te.kernels.te.norm import layer_norm, layer_norm_grad, rms_norm, rms_norm_grad

__all__ = [
    "activation",
    "activation_grad",
    "available",
    "cast_bias",
    "gemm_nn",
    "gemm_nt",
    "gemm_tn",
    "layer_norm",
    "layer_norm_grad",
    "quantize",
    "rms_norm",
    "rms_norm_grad",
]
