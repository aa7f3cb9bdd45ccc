"""The Triton backend's record: what it does itself, and the reference for the rest."""

from __future__ import annotations

import dataclasses

from functional_te.kernels.backend import FAST_ACCUMULATION, REFERENCE, Fused
from functional_te.kernels.triton.activation import activation, activation_grad
from functional_te.kernels.triton.cast import cast_bias, quantize, transpose
from functional_te.kernels.triton.concatenate import concatenate
from functional_te.kernels.triton.dropout import dropout
from functional_te.kernels.triton.gemm import gemm_nn, gemm_nt, gemm_tn
from functional_te.kernels.triton.grouped import grouped_nn, grouped_nt, grouped_sum, grouped_tn
from functional_te.kernels.triton.launch import INTERPRETED
from functional_te.kernels.triton.norm import layer_norm, rms_norm
from functional_te.kernels.triton.norm_grad import layer_norm_grad, rms_norm_grad
from functional_te.kernels.triton.state import Closing, close_step, copies

__all__ = ["TRITON"]

TRITON = dataclasses.replace(
    REFERENCE,
    name="triton",
    quantize=quantize,
    gemm_nt=gemm_nt,
    gemm_nn=gemm_nn,
    gemm_tn=gemm_tn,
    grouped_nt=grouped_nt,
    grouped_nn=grouped_nn,
    grouped_tn=grouped_tn,
    grouped_sum=grouped_sum,
    transposed_copies=True,
    fast_accumulation=FAST_ACCUMULATION,
    # a compiler cannot trace through the interpreter
    traceable=not INTERPRETED,
    repeatable=True,
    fused=Fused(
        activation=activation,
        activation_grad=activation_grad,
        cast_bias=cast_bias,
        rms_norm=rms_norm,
        rms_norm_grad=rms_norm_grad,
        layer_norm=layer_norm,
        layer_norm_grad=layer_norm_grad,
        dropout=dropout,
        close_step=close_step,
        closing=Closing,
        copies=copies,
        transpose=transpose,
        concatenate=concatenate,
    ),
)
