"""One call per op: pure forward functions on tensors, without chains, parameters trees or gradients.

Each runs the op's own implementation on the reference kernels. Use :func:`functional_te.vjp` for gradients.
"""

from __future__ import annotations

from typing import Any

import torch

from functional_te import api
from functional_te.chain import Linear
from functional_te.ops import (
    GEGLU,
    GELU,
    GLU,
    QGEGLU,
    QGELU,
    Bias,
    ClampedSwiGLU,
    ConstantScale,
    LayerNorm,
    Op,
    ReGLU,
    ReLU,
    RMSNorm,
    SiLU,
    SiTUGLU,
    SReGLU,
    SReLU,
    SwiGLU,
)
from functional_te.quantization.recipes import Recipe

__all__ = [
    "bias",
    "clamped_swiglu",
    "constant_scale",
    "geglu",
    "gelu",
    "glu",
    "layer_norm",
    "linear",
    "qgeglu",
    "qgelu",
    "reglu",
    "relu",
    "rms_norm",
    "silu",
    "situglu",
    "sreglu",
    "srelu",
    "swiglu",
]


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    recipe: Recipe | None = None,
    state: Any = None,
) -> torch.Tensor:
    """``x @ weight.T + bias``.

    Args:
        x: ``[..., in_features]``.
        weight: ``[out_features, in_features]``.
        bias: ``[out_features]`` or None.
        recipe: a recipe, or None for high precision.
        state: quantizer state for a recipe that has some; see :func:`functional_te.init_state`.

    Returns:
        ``[..., out_features]``.
    """
    block = Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    params: tuple[dict[str, torch.Tensor], ...] = ({"weight": weight},)
    if bias is not None:
        params = (*params, {"bias": bias})
    return api.apply(block, params, x, recipe=recipe, state=state).output


def bias(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """``x + bias`` on the last dimension."""
    return api.apply(Bias(bias.shape[0]), ({"bias": bias},), x).output


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, *, eps: float = 1e-5, zero_centered_gamma: bool = False
) -> torch.Tensor:
    """``g * x / sqrt(mean(x**2) + eps)`` over the trailing dimensions that ``weight`` has."""
    op = RMSNorm(tuple(weight.shape), eps, zero_centered_gamma)
    return api.apply(op, ({"weight": weight},), x).output


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    *,
    eps: float = 1e-5,
    zero_centered_gamma: bool = False,
) -> torch.Tensor:
    """``g * (x - mean(x)) / sqrt(var(x) + eps) + bias`` over the trailing dimensions that ``weight`` has."""
    op = LayerNorm(tuple(weight.shape), eps, zero_centered_gamma)
    return api.apply(op, ({"weight": weight, "bias": bias},), x).output


def constant_scale(x: torch.Tensor, scale: float) -> torch.Tensor:
    """``x * scale``."""
    return _pointwise(ConstantScale(scale), x)


def _pointwise(op: Op, x: torch.Tensor) -> torch.Tensor:
    return api.apply(op, ({},), x).output


def gelu(x: torch.Tensor) -> torch.Tensor:
    """GELU, tanh form."""
    return _pointwise(GELU(), x)


def qgelu(x: torch.Tensor) -> torch.Tensor:
    """``x * sigmoid(1.702 x)``."""
    return _pointwise(QGELU(), x)


def silu(x: torch.Tensor) -> torch.Tensor:
    """``x * sigmoid(x)``."""
    return _pointwise(SiLU(), x)


def relu(x: torch.Tensor) -> torch.Tensor:
    """``max(x, 0)``."""
    return _pointwise(ReLU(), x)


def srelu(x: torch.Tensor) -> torch.Tensor:
    """``max(x, 0)**2``."""
    return _pointwise(SReLU(), x)


def glu(x: torch.Tensor) -> torch.Tensor:
    """``sigmoid(a) * b`` with ``x = [a | b]``."""
    return _pointwise(GLU(), x)


def geglu(x: torch.Tensor) -> torch.Tensor:
    """``gelu(a) * b`` with ``x = [a | b]``."""
    return _pointwise(GEGLU(), x)


def qgeglu(x: torch.Tensor) -> torch.Tensor:
    """``qgelu(a) * b`` with ``x = [a | b]``."""
    return _pointwise(QGEGLU(), x)


def reglu(x: torch.Tensor) -> torch.Tensor:
    """``relu(a) * b`` with ``x = [a | b]``."""
    return _pointwise(ReGLU(), x)


def sreglu(x: torch.Tensor) -> torch.Tensor:
    """``relu(a)**2 * b`` with ``x = [a | b]``."""
    return _pointwise(SReGLU(), x)


def swiglu(x: torch.Tensor, *, glu_interleave_size: int | None = None) -> torch.Tensor:
    """``silu(a) * b`` with ``x = [a | b]``, or interleaved in blocks."""
    return _pointwise(SwiGLU(glu_interleave_size=glu_interleave_size), x)


def situglu(
    x: torch.Tensor, *, beta1: float = 4.0, beta2: float = 25.0, glu_interleave_size: int | None = None
) -> torch.Tensor:
    """``beta1 tanh(a/beta1) sigmoid(a) * beta2 tanh(b/beta2)`` with ``x = [a | b]``."""
    return _pointwise(SiTUGLU(beta1=beta1, beta2=beta2, glu_interleave_size=glu_interleave_size), x)


def clamped_swiglu(
    x: torch.Tensor,
    *,
    limit: float = 7.0,
    alpha: float = 1.702,
    glu_linear_offset: float = 1.0,
    glu_interleave_size: int | None = None,
) -> torch.Tensor:
    """The clamped gate of :class:`functional_te.ops.ClampedSwiGLU`."""
    op = ClampedSwiGLU(
        limit=limit, alpha=alpha, glu_linear_offset=glu_linear_offset, glu_interleave_size=glu_interleave_size
    )
    return _pointwise(op, x)
