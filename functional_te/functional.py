"""One call per op: pure forward functions on tensors, without chains, parameters trees or gradients.

Each runs the op's own implementation on the reference kernels. Use :func:`functional_te.vjp` for gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    AdaptiveLayerNorm,
    Bias,
    ClampedSwiGLU,
    ConstantScale,
    Dropout,
    ErfGELU,
    GroupedLinear,
    L2Normalization,
    LayerNorm,
    Op,
    ReGLU,
    ReLU,
    RMSNorm,
    ScaledClampedQGeGLU,
    ScaledSiTUGLU,
    ScaledSReLU,
    ScaledSwiGLU,
    ScaledTanhSReLU,
    SiLU,
    SiTUGLU,
    SReGLU,
    SReLU,
    SwiGLU,
)
from functional_te.quantization.recipes import Recipe

__all__ = [
    "adaptive_layer_norm",
    "bias",
    "clamped_swiglu",
    "constant_scale",
    "dropout",
    "erf_gelu",
    "geglu",
    "gelu",
    "glu",
    "grouped_linear",
    "l2_normalization",
    "layer_norm",
    "linear",
    "qgeglu",
    "qgelu",
    "reglu",
    "relu",
    "rms_norm",
    "scaled_clamped_qgeglu",
    "scaled_situglu",
    "scaled_srelu",
    "scaled_swiglu",
    "scaled_tanh_srelu",
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


def grouped_linear(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor] | torch.Tensor,
    splits: torch.Tensor,
    biases: Sequence[torch.Tensor] | torch.Tensor | None = None,
    *,
    scales: torch.Tensor | None = None,
    recipe: Recipe | None = None,
    state: Any = None,
) -> torch.Tensor:
    """``x_t @ W_g.T + s_t b_g`` for every row ``t`` of group ``g``.

    Args:
        x: ``[..., in_features]``.
        weights: ``[out_features, in_features]`` of each group, or one tensor ``[G, out_features, in_features]``.
        splits: rows of each group, integers ``[G]``; see :class:`functional_te.ops.GroupedLinear`.
        biases: ``[out_features]`` of each group, one tensor ``[G, out_features]``, or None.
        scales: one factor of the bias per row, or None.
        recipe: a recipe, or None for high precision.
        state: quantizer state for a recipe that has some; see :func:`functional_te.init_state`.

    Returns:
        ``[..., out_features]``.
    """
    single, single_bias = isinstance(weights, torch.Tensor), isinstance(biases, torch.Tensor)
    out_features, in_features = weights[0].shape
    op = GroupedLinear(
        len(weights), in_features, out_features, biases is not None, scales is not None, single, single_bias
    )
    values = [*((weights,) if single else weights), *((biases,) if single_bias else biases or ())]
    params = (dict(zip(op.param_names, values, strict=True)),)
    extras = (splits,) if scales is None or biases is None else (splits, scales)
    return api.apply(op, params, x, *extras, recipe=recipe, state=state).output


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


def l2_normalization(x: torch.Tensor, *, eps: float = 1e-6) -> torch.Tensor:
    """``x / sqrt(sum(x**2) + eps)`` over the last dimension, in the dtype of ``x``."""
    return _pointwise(L2Normalization(eps), x)


def adaptive_layer_norm(
    x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, *, eps: float = 1e-5, batch_dim: int = 0
) -> torch.Tensor:
    """``(x - mean(x)) / sqrt(var(x) + eps) * (1 + scale) + shift`` over the last dimension, in the dtype of ``x``.

    Args:
        x: ``[..., hidden]`` with two or more dimensions.
        scale: ``[batch, hidden]``, or the rank of ``x`` with every dimension but batch and last equal to 1.
        shift: likewise.
        eps: added to the variance.
        batch_dim: the dimension of ``x`` that scale and shift have rows for.
    """
    op = AdaptiveLayerNorm(x.shape[-1], eps, batch_dim)
    return api.apply(op, ({},), x, scale, shift).output


def dropout(x: torch.Tensor, key: torch.Tensor | None, *, p: float, training: bool = True) -> torch.Tensor:
    """``x * keep / (1 - p)`` with a mask that is a function of ``key``; a copy of ``x`` if not ``training``.

    Args:
        x: any shape.
        key: int64 ``[2]``, see :func:`functional_te.make_key`; the same key gives the same mask.
        p: probability to drop, in [0, 1), honoured to ``2**-16``.
        training: whether anything is dropped.
    """
    return api.apply(Dropout(p), ({},), x, kwargs={0: {"key": key, "training": training}}).output


def constant_scale(x: torch.Tensor, scale: float) -> torch.Tensor:
    """``x * scale``."""
    return _pointwise(ConstantScale(scale), x)


def _pointwise(op: Op, x: torch.Tensor) -> torch.Tensor:
    return api.apply(op, ({},), x).output


def gelu(x: torch.Tensor) -> torch.Tensor:
    """GELU, tanh form."""
    return _pointwise(GELU(), x)


def erf_gelu(x: torch.Tensor) -> torch.Tensor:
    """GELU, erf form."""
    return _pointwise(ErfGELU(), x)


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


def scaled_swiglu(x: torch.Tensor, scale: torch.Tensor, *, glu_interleave_size: int | None = None) -> torch.Tensor:
    """``scale * silu(a) * b`` with ``x = [a | b]`` and one scale per row."""
    return _scaled(ScaledSwiGLU(glu_interleave_size), x, scale)


def scaled_situglu(
    x: torch.Tensor,
    scale: torch.Tensor,
    *,
    beta1: float = 4.0,
    beta2: float = 25.0,
    glu_interleave_size: int | None = None,
) -> torch.Tensor:
    """:func:`situglu` times one scale per row."""
    return _scaled(ScaledSiTUGLU(glu_interleave_size, beta1, beta2), x, scale)


def scaled_clamped_qgeglu(
    x: torch.Tensor,
    scale: torch.Tensor,
    *,
    limit: float = 7.0,
    alpha: float = 1.702,
    glu_linear_offset: float = 1.0,
    glu_interleave_size: int | None = None,
) -> torch.Tensor:
    """:func:`clamped_swiglu` times one scale per row."""
    return _scaled(ScaledClampedQGeGLU(glu_interleave_size, limit, alpha, glu_linear_offset), x, scale)


def scaled_srelu(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """``scale * max(x, 0)**2`` with one scale per row."""
    return _scaled(ScaledSReLU(), x, scale)


def scaled_tanh_srelu(x: torch.Tensor, scale: torch.Tensor, *, tanh_clamp_scale: float) -> torch.Tensor:
    """``scale * (s tanh(max(x, 0) / s))**2`` with ``s = tanh_clamp_scale`` and one scale per row."""
    return _scaled(ScaledTanhSReLU(tanh_clamp_scale), x, scale)


def _scaled(op: Op, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return api.apply(op, ({},), x, scale).output
