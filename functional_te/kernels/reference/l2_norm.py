"""L2 normalization with its gradient in plain PyTorch, in float32.

Formula: Transformer Engine 2.20.2 ``te.ops`` (L2Normalization).
"""

from __future__ import annotations

from torch import Tensor

from functional_te.kernels.reference.precision import float32


def l2_norm_forward(x: Tensor, *, eps: float) -> tuple[Tensor, Tensor]:
    """``y = x * rho`` with ``rho = 1 / sqrt(sum(x^2) + eps)`` over the last dim.

    Args:
        x: any float dtype, one or more dims.
        eps: added to the sum of squares.

    Returns:
        y, float32 of x's shape, and rho, float32 of the leading shape.
    """
    x = float32(x)
    rho = (x * x).sum(-1).add(eps).rsqrt()
    return x * rho.unsqueeze(-1), rho


def l2_norm_backward(dy: Tensor, x: Tensor, rho: Tensor) -> Tensor:
    """``dx = rho * (dy - x * sum(x * dy) * rho^2)``, float32 of x's shape.

    Args:
        dy: gradient of y: x's shape, any float dtype.
        x: as given to `l2_norm_forward`.
        rho: as returned by it.
    """
    dy, rho = float32(dy), rho.unsqueeze(-1)
    # y = x * rho first: x * x times rho^2 could leave float32 on the way
    y = float32(x) * rho
    projection = (y * dy).sum(-1, keepdim=True)
    return (dy - y * projection) * rho
