"""RMSNorm and LayerNorm with their gradients in plain PyTorch, in float32.

Formulas: Transformer Engine 2.20.2 ``te.ops`` (rmsnorm, layernorm). RMSNorm: Zhang & Sennrich 2019. LayerNorm: Ba et
al. 2016. Everything normalizes over the last ``weight.dim()`` dims, whose sizes are ``weight.shape``; the gain ``g`` is
``weight``, or ``1 + weight`` when ``zero_centered_gamma``. Statistics, affine part and gradients are float32 and
leave unrounded; statistics have the leading shape ``x.shape[: x.dim() - weight.dim()]``.

LayerNorm is one ATen kernel each way, which Inductor decomposes. RMSNorm has no such kernel on the CPU
(``torch.rms_norm`` is composed of smaller calls), so it is written here in few calls: tensor operands and ``value=``
arguments, because a call with a Python scalar operand costs twice one between tensors on small inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from functional_te.kernels.reference.precision import float32

# Resolved once: looking an overload up on every call is not free.
_layer_norm_backward = torch.ops.aten.native_layer_norm_backward.default


def _gain(weight: Tensor, zero_centered_gamma: bool) -> Tensor:
    # To float32 first: in 16 bits 1 + weight would lose most of the weight.
    return float32(weight) + 1.0 if zero_centered_gamma else float32(weight)


def rms_norm_forward(x: Tensor, weight: Tensor, *, eps: float, zero_centered_gamma: bool) -> tuple[Tensor, Tensor]:
    """``y = g * x * rstd`` with ``rstd = 1 / sqrt(mean(x^2) + eps)``.

    Args:
        x: any float dtype, shape (*leading, *weight.shape).
        weight: any float dtype, one or more dims.
        eps: added to the mean square.
        zero_centered_gamma: the gain is ``1 + weight``.

    Returns:
        y, float32 of x's shape, and rstd, float32 of the leading shape.
    """
    if weight.dim() > 1:
        y, rstd = rms_norm_forward(
            x.flatten(-weight.dim()), weight.flatten(), eps=eps, zero_centered_gamma=zero_centered_gamma
        )
        return y.unflatten(-1, weight.shape), rstd
    x, weight = float32(x), float32(weight)
    # Not vector_norm: it is one call less, but sums without cascading (1e-5 off on constant rows of 8192).
    total = (x * x).sum(-1)
    # eps + total / size; the 0-d tensor costs less than a call with a scalar operand.
    rstd = total.new_full((), eps).add(total, alpha=1.0 / weight.numel()).rsqrt()
    xhat = x * rstd.unsqueeze(-1)
    # xhat + xhat * weight spares the call, and the rounding, of 1 + weight.
    y = torch.addcmul(xhat, xhat, weight) if zero_centered_gamma else xhat * weight
    return y, rstd


def add_rms_norm_forward(
    x: Tensor, extra: Tensor, weight: Tensor, *, eps: float, zero_centered_gamma: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """``s = extra + x`` in torch's promoted dtype, and :func:`rms_norm_forward` of ``s`` as it was rounded.

    Args:
        x, extra: one shape, any float dtypes.
        weight, eps, zero_centered_gamma: as for `rms_norm_forward`.

    Returns:
        s; y, float32 of x's shape; rstd, float32 of the leading shape.
    """
    total = extra + x
    return total, *rms_norm_forward(total, weight, eps=eps, zero_centered_gamma=zero_centered_gamma)


def rms_norm_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    rstd: Tensor,
    *,
    zero_centered_gamma: bool,
    add: Tensor | None = None,
    needs_input: bool = True,
    needs_weight: bool = True,
) -> tuple[Tensor | None, Tensor | None]:
    """``dx = rstd * (q - xhat * mean(q * xhat)) [+ add]`` and ``dweight = sum(dy * xhat)`` over the leading dims.

    Here ``xhat = x * rstd`` and ``q = g * dy``.

    Args:
        dy: gradient of y: x's shape, any float dtype.
        x, weight, zero_centered_gamma: as given to `rms_norm_forward`.
        rstd: as returned by it.
        add: another gradient of x (a residual branch), any float dtype, added before anything is rounded.
        needs_input, needs_weight: what to compute; the other is None.

    Returns:
        dx, float32 of x's shape, and dweight, float32 of weight's shape.
    """
    if not (needs_input or needs_weight):
        return None, None
    if weight.dim() > 1:
        dx, dweight = rms_norm_backward(
            dy.flatten(-weight.dim()),
            x.flatten(-weight.dim()),
            weight.flatten(),
            rstd,
            zero_centered_gamma=zero_centered_gamma,
            add=None if add is None else add.flatten(-weight.dim()),
            needs_input=needs_input,
            needs_weight=needs_weight,
        )
        return (
            None if dx is None else dx.unflatten(-1, weight.shape),
            None if dweight is None else dweight.view(weight.shape),
        )
    dy, rstd = float32(dy), rstd.unsqueeze(-1)
    xhat = float32(x) * rstd
    dx = dweight = None
    if needs_weight:
        dweight = dy * xhat
        if x.dim() > 1:  # an empty tuple of dims would mean all of them
            dweight = dweight.sum(tuple(range(x.dim() - 1)))
    if needs_input:
        weight = float32(weight)
        q = torch.addcmul(dy, dy, weight) if zero_centered_gamma else dy * weight
        projection = (q * xhat).sum(-1, keepdim=True)
        dx = torch.addcmul(q, xhat, projection, value=-1.0 / weight.numel())
        dx = dx * rstd if add is None else torch.addcmul(float32(add), dx, rstd)
    return dx, dweight


def layer_norm_forward(
    x: Tensor, weight: Tensor, bias: Tensor, *, eps: float, zero_centered_gamma: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """``y = g * (x - mean) * rstd + bias`` with ``rstd = 1 / sqrt(mean((x - mean)^2) + eps)``.

    Args:
        x: any float dtype, shape (*leading, *weight.shape).
        weight, bias: any float dtype, one or more dims, the same shape.
        eps: added to the variance.
        zero_centered_gamma: the gain is ``1 + weight``.

    Returns:
        y, float32 of x's shape; mean and rstd, float32 of the leading shape.
    """
    gain = _gain(weight, zero_centered_gamma)
    y, mean, rstd = torch.native_layer_norm(float32(x), weight.shape, gain, float32(bias), eps)
    for _ in range(weight.dim()):  # ATen keeps the normalized dims, with size one
        mean, rstd = mean.squeeze(-1), rstd.squeeze(-1)
    return y, mean, rstd


def layer_norm_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    mean: Tensor,
    rstd: Tensor,
    *,
    zero_centered_gamma: bool,
    needs_input: bool = True,
    needs_affine: bool = True,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """``dx = rstd * (q - mean(q) - xhat * mean(q * xhat))``, ``dweight = sum(dy * xhat)``, ``dbias = sum(dy)``.

    Here ``xhat = (x - mean) * rstd`` and ``q = g * dy``; the sums run over the leading dims.

    Args:
        dy: gradient of y: x's shape, any float dtype.
        x, weight, zero_centered_gamma: as given to `layer_norm_forward`.
        mean, rstd: as returned by it.
        needs_input, needs_affine: what to compute; the others are None.

    Returns:
        dx, float32 of x's shape; dweight and dbias, float32 of weight's shape.
    """
    if not (needs_input or needs_affine):
        return None, None, None
    gain = _gain(weight, zero_centered_gamma)
    # The bias argument lends its shape and dtype only, and the gain has the same.
    wanted = [needs_input, needs_affine, needs_affine]
    return _layer_norm_backward(float32(dy), float32(x), weight.shape, mean, rstd, gain, gain, wanted)
