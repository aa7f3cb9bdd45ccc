"""Activations and their gradients: ``tex.swiglu``, ``tex.dswiglu`` and so on, the cast of delayed scaling inside."""

from __future__ import annotations

from typing import Any

import torch

from functional_te.kernels.reference.activation import ACTIVATIONS
from functional_te.kernels.reference.bias import bias_grad
from functional_te.kernels.te.cast import fuses, maker, quantize, result, sums_rows, transposes
from functional_te.kernels.te.library import library, takes
from functional_te.quantization.quantizer import as_matrix
from functional_te.quantization.tensor import BoundQuantizer

__all__ = ["activation", "activation_grad"]

# Names of the kernels: forward, and backward.
_NAMES = {
    "gelu": ("gelu", "dgelu"),
    "qgelu": ("qgelu", "dqgelu"),
    "silu": ("silu", "dsilu"),
    "relu": ("relu", "drelu"),
    "srelu": ("srelu", "dsrelu"),
    "glu": ("glu", "dglu"),
    "geglu": ("geglu", "dgeglu"),
    "qgeglu": ("qgeglu", "dqgeglu"),
    "reglu": ("reglu", "dreglu"),
    "sreglu": ("sreglu", "dsreglu"),
    "swiglu": ("swiglu", "dswiglu"),
    "situglu": ("situglu", "dsituglu"),
    "clamped_swiglu": ("clamped_swiglu", "clamped_dswiglu"),
}
# Kernels that also sum the gradient over its rows.
_WITH_BIAS = {
    "gelu": "dbias_dgelu",
    "qgelu": "dbias_dqgelu",
    "silu": "dbias_dsilu",
    "relu": "dbias_drelu",
    "srelu": "dbias_dsrelu",
}


def activation(
    x: torch.Tensor,
    kind: str,
    config: tuple[float, ...] = (),
    interleave: int = 0,
    *,
    dtype: torch.dtype,
    bound: BoundQuantizer | None = None,
) -> tuple[Any, torch.Tensor | None] | None:
    """:meth:`Backend.activation`; None for another dtype than that of ``x``, interleaved halves, or no kernel."""
    if kind not in _NAMES or interleave or not takes(x, dtype=dtype):
        return None
    run, gated = getattr(library().kernels, _NAMES[kind][0]), ACTIVATIONS[kind].gated
    shape = (*x.shape[:-1], x.shape[-1] // 2) if gated else tuple(x.shape)
    constants = config or ACTIVATIONS[kind].defaults
    if bound is not None and fuses(bound):
        own = maker(bound, x.device, transpose=gated or transposes(as_matrix(x)))
        assert own is not None
        return result(run(as_matrix(x), own.own, *constants), bound, shape, dtype, own.amax)
    y = run(as_matrix(x), None, *constants).view(shape)
    return (y, None) if bound is None else quantize(y, bound, dtype)


def activation_grad(
    dy: torch.Tensor,
    x: torch.Tensor,
    kind: str,
    config: tuple[float, ...] = (),
    interleave: int = 0,
    *,
    dtype: torch.dtype,
    bound: BoundQuantizer | None = None,
    needs_bias: bool = False,
) -> tuple[Any, torch.Tensor | None, torch.Tensor | None] | None:
    """:meth:`Backend.activation_grad`; None as in :func:`activation`.

    With a bias gradient and delayed scaling the cast and the sum see the gradient before it is rounded to ``dtype``.
    """
    if kind not in _NAMES or interleave or not takes(dy, x, dtype=dtype):
        return None
    kernels, shape, gated = library().kernels, tuple(x.shape), ACTIVATIONS[kind].gated
    dy, x = as_matrix(dy), as_matrix(x)
    if bound is not None and fuses(bound):
        if needs_bias and kind in _WITH_BIAS and sums_rows(x, bound):
            own = maker(bound, x.device)
            assert own is not None
            dbias, made = getattr(kernels, _WITH_BIAS[kind])(dy, x, own.own)
            return *result(made, bound, shape, dtype, own.amax), dbias
        if not needs_bias:
            own = maker(bound, x.device, transpose=gated or transposes(x))
            assert own is not None
            made = getattr(kernels, _NAMES[kind][1])(dy, x, own.own, *(config or ACTIVATIONS[kind].defaults))
            return *result(made, bound, shape, dtype, own.amax), None
    dx = getattr(kernels, _NAMES[kind][1])(dy, x, None, *(config or ACTIVATIONS[kind].defaults))
    dbias = bias_grad(dx) if needs_bias else None
    dx = dx.view(shape)
    return (dx, None, dbias) if bound is None else (*quantize(dx, bound, dtype), dbias)
