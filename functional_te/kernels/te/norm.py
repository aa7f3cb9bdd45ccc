"""RMSNorm and LayerNorm with their gradients: ``tex.rmsnorm_fwd`` and so on, the cast of delayed scaling inside.

They compute in float32 and take inputs, parameters and results of one dtype.
"""

from __future__ import annotations

from typing import Any

import torch

from functional_te.kernels.te.cast import fuses, maker, quantize, result
from functional_te.kernels.te.library import library, takes
from functional_te.quantization.tensor import BoundQuantizer

__all__ = ["layer_norm", "layer_norm_grad", "rms_norm", "rms_norm_grad"]


def _rows(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``x`` as a contiguous matrix, one normalized row each."""
    return x.reshape(-1, weight.numel()).contiguous()


def _leading(x: torch.Tensor, weight: torch.Tensor) -> tuple[int, ...]:
    return tuple(x.shape[: x.dim() - weight.dim()])


def _forward(
    run: Any, x: torch.Tensor, weights: tuple[torch.Tensor, ...], numbers: tuple[float, bool], bound: Any
) -> tuple[Any, torch.Tensor | None, torch.Tensor | None, torch.Tensor]:
    """The stored result, the observed amax and the two statistics."""
    eps, zero_centered_gamma = numbers
    weight = weights[0]
    # the matrix that is normalized is transposed; that of the result has rows of x's last dimension
    own = maker(bound, x.device, transpose=weight.dim() == 1) if fuses(bound) else None
    quantizer, dtype = None if own is None else own.own, library().dtypes[x.dtype]
    flat = tuple(parameter.reshape(-1).contiguous() for parameter in weights)
    y, mean, rstd = run(_rows(x, weight), *flat, eps, None, quantizer, dtype, 0, zero_centered_gamma)
    leading = _leading(x, weight)
    mean, rstd = None if mean is None else mean.view(leading), rstd.view(leading)
    shape = tuple(x.shape)
    if own is not None:
        y._data = y._data.view(-1, x.shape[-1])
        return *result(y, bound, shape, x.dtype, own.amax), mean, rstd
    y = y.view(shape)
    return (y, None, mean, rstd) if bound is None else (*quantize(y, bound, x.dtype), mean, rstd)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    eps: float,
    zero_centered_gamma: bool,
    dtype: torch.dtype,
    bound: BoundQuantizer | None = None,
    add: torch.Tensor | None = None,
) -> tuple[Any, torch.Tensor | None, torch.Tensor, torch.Tensor | None] | None:
    """:meth:`Backend.rms_norm`; None unless x, the weight and the result have one dtype."""
    if not takes(x, weight, add, dtype=dtype):
        return None
    total = None if add is None else add + x
    read = x if total is None else total
    y, amax, _, rstd = _forward(library().kernels.rmsnorm_fwd, read, (weight,), (eps, zero_centered_gamma), bound)
    return y, amax, rstd, total


def rms_norm_grad(  # noqa: PLR0913 - the arguments of the formula
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    rstd: torch.Tensor,
    *,
    zero_centered_gamma: bool,
    dtype: torch.dtype,
    add: torch.Tensor | None = None,
    needs_input: bool = True,
    needs_weight: bool = True,
) -> tuple[torch.Tensor | None, torch.Tensor | None] | None:
    """:meth:`Backend.rms_norm_grad`; None unless all have one dtype."""
    if not takes(dy, x, weight, add, dtype=dtype):
        return None
    rest = (rstd.reshape(-1), weight.reshape(-1), 0, zero_centered_gamma)
    rows = _rows(dy, weight), _rows(x, weight)
    if add is None:
        dx, dweight = library().kernels.rmsnorm_bwd(*rows, *rest)
    else:
        dx, dweight = library().kernels.rmsnorm_bwd_add(*rows, _rows(add, weight), *rest)
    return dx.view(x.shape) if needs_input else None, dweight.view(weight.shape) if needs_weight else None


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    *,
    eps: float,
    zero_centered_gamma: bool,
    dtype: torch.dtype,
    bound: BoundQuantizer | None = None,
) -> tuple[Any, torch.Tensor | None, torch.Tensor, torch.Tensor] | None:
    """:meth:`Backend.layer_norm`; None unless x, the parameters and the result have one dtype."""
    if not takes(x, weight, bias, dtype=dtype):
        return None
    numbers = (eps, zero_centered_gamma)
    y, amax, mean, rstd = _forward(library().kernels.layernorm_fwd, x, (weight, bias), numbers, bound)
    assert mean is not None
    return y, amax, mean, rstd


def layer_norm_grad(  # noqa: PLR0913 - the arguments of the formula
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    *,
    zero_centered_gamma: bool,
    dtype: torch.dtype,
    needs_input: bool = True,
    needs_affine: bool = True,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None] | None:
    """:meth:`Backend.layer_norm_grad`; None unless all have one dtype."""
    if not takes(dy, x, weight, dtype=dtype):
        return None
    dx, dweight, dbias = library().kernels.layernorm_bwd(
        _rows(dy, weight),
        _rows(x, weight),
        mean.reshape(-1),
        rstd.reshape(-1),
        weight.reshape(-1),
        0,
        zero_centered_gamma,
    )
    if not needs_affine:
        return dx.view(x.shape), None, None
    return dx.view(x.shape) if needs_input else None, dweight.view(weight.shape), dbias.view(weight.shape)
