"""The record of the backend that runs Transformer Engine's kernels: what they do, and the reference for the rest."""

from __future__ import annotations

import dataclasses

from functional_te.kernels import te
from functional_te.kernels.backend import FAST_ACCUMULATION, REFERENCE, Fused

__all__ = ["TRANSFORMER_ENGINE"]

TRANSFORMER_ENGINE = dataclasses.replace(
    REFERENCE,
    name="te",
    quantize=te.quantize,
    gemm_nt=te.gemm_nt,
    gemm_nn=te.gemm_nn,
    gemm_tn=te.gemm_tn,
    transposed_copies=True,
    fast_accumulation=FAST_ACCUMULATION,
    # the kernels are functions of an extension module
    traceable=False,
    fused=Fused(
        activation=te.activation,
        activation_grad=te.activation_grad,
        cast_bias=te.cast_bias,
        rms_norm=te.rms_norm,
        rms_norm_grad=te.rms_norm_grad,
        layer_norm=te.layer_norm,
        layer_norm_grad=te.layer_norm_grad,
    ),
)
