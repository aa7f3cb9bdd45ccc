"""LayerNorm with scale and shift per sample (Peebles & Xie 2023, "adaLN") with its gradients, in float32.

The last dim is normalized without gain; scale and shift have one row per index of the batch dim, and every other
leading dim shares it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from functional_te.kernels.reference.precision import float32


def _per_sample(modulation: Tensor, x: Tensor, batch_dim: int) -> Tensor:
    """Scale or shift in float32, in a shape that broadcasts to x's."""
    shape = [1] * x.dim()
    shape[batch_dim], shape[-1] = x.shape[batch_dim], x.shape[-1]
    return float32(modulation).reshape(shape)


def adaptive_layer_norm_forward(
    x: Tensor, scale: Tensor, shift: Tensor, *, eps: float, batch_dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    """``y = (x - mean) * rstd * (1 + scale) + shift`` with ``rstd = 1 / sqrt(mean((x - mean)^2) + eps)``.

    Args:
        x: any float dtype, two or more dims.
        scale, shift: any float dtype, (x.shape[batch_dim], x.shape[-1]), or that with dims of size one between.
        eps: added to the variance.
        batch_dim: the dim that scale and shift have rows for.

    Returns:
        y, float32 of x's shape; mean and rstd, float32 of the leading shape.
    """
    xhat, mean, rstd = torch.native_layer_norm(float32(x), x.shape[-1:], None, None, eps)
    gain = _per_sample(scale, x, batch_dim) + 1.0
    return torch.addcmul(_per_sample(shift, x, batch_dim), xhat, gain), mean.squeeze(-1), rstd.squeeze(-1)


def adaptive_layer_norm_backward(
    dy: Tensor,
    x: Tensor,
    scale: Tensor,
    mean: Tensor,
    rstd: Tensor,
    *,
    batch_dim: int,
    needs: tuple[bool, bool, bool] = (True, True, True),
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """``dx = rstd * (q - mean(q) - xhat * mean(q * xhat))``, ``dscale = sum(dy * xhat)``, ``dshift = sum(dy)``.

    Here ``xhat = (x - mean) * rstd`` and ``q = dy * (1 + scale)``; the sums run over every dim but batch and last.

    Args:
        dy: gradient of y: x's shape, any float dtype.
        x, scale, batch_dim: as given to `adaptive_layer_norm_forward`.
        mean, rstd: as returned by it.
        needs: what of dx, dscale and dshift to compute; the others are None.

    Returns:
        dx, float32 of x's shape; dscale and dshift, float32 (x.shape[batch_dim], x.shape[-1]).
    """
    needs_input, needs_scale, needs_shift = needs
    dy, x = float32(dy), float32(x)
    shared = tuple(dim for dim in range(x.dim() - 1) if dim != batch_dim)
    dx = dscale = dshift = None
    if needs_shift:
        dshift = dy.sum(shared) if shared else dy.clone()  # an empty tuple of dims would mean all of them
    if not (needs_input or needs_scale):
        return dx, dscale, dshift
    # ATen's kernel multiplies x before it subtracts the mean, which a large mean makes inexact
    rstd = rstd.unsqueeze(-1)
    xhat = (x - mean.unsqueeze(-1)) * rstd
    if needs_input:
        q = dy * (_per_sample(scale, x, batch_dim) + 1.0)
        dx = (q - q.mean(-1, keepdim=True) - xhat * (q * xhat).mean(-1, keepdim=True)) * rstd
    if needs_scale:
        dscale = dy * xhat
        dscale = dscale.sum(shared) if shared else dscale
    return dx, dscale, dshift
