"""Activations times a scale per row, as modules with te.ops' names and constructor signatures."""

from __future__ import annotations

import functional_te as fte
from bridge.ops.activation import ClampedSwiGLU
from bridge.ops.operation import BasicOperation

__all__ = ["ScaledClampedQGeGLU", "ScaledSReLU", "ScaledSiTUGLU", "ScaledSwiGLU", "ScaledTanhSReLU"]


class ScaledSwiGLU(BasicOperation):
    """See :class:`functional_te.ScaledSwiGLU`."""

    def __init__(self, glu_interleave_size: int | None = None, *, activation_recompute_in_mlp: bool = False) -> None:
        op = fte.ScaledSwiGLU(glu_interleave_size, activation_recompute_in_mlp=activation_recompute_in_mlp)
        super().__init__(op)
        self.glu_interleave_size = glu_interleave_size


class ScaledSiTUGLU(BasicOperation):
    """See :class:`functional_te.ScaledSiTUGLU`."""

    def __init__(
        self,
        glu_interleave_size: int | None = None,
        *,
        activation_recompute_in_mlp: bool = False,
        beta1: float = 4.0,
        beta2: float = 25.0,
    ) -> None:
        op = fte.ScaledSiTUGLU(
            glu_interleave_size, beta1, beta2, activation_recompute_in_mlp=activation_recompute_in_mlp
        )
        super().__init__(op)
        self.glu_interleave_size = glu_interleave_size


class ScaledClampedQGeGLU(BasicOperation):
    """See :class:`functional_te.ScaledClampedQGeGLU`."""

    def __init__(
        self,
        glu_interleave_size: int | None = None,
        *,
        activation_recompute_in_mlp: bool = False,
        limit: float = 7.0,
        alpha: float = 1.702,
        glu_linear_offset: float = 1.0,
    ) -> None:
        op = fte.ScaledClampedQGeGLU(
            glu_interleave_size,
            limit,
            alpha,
            glu_linear_offset,
            activation_recompute_in_mlp=activation_recompute_in_mlp,
        )
        super().__init__(op)
        self.glu_interleave_size = glu_interleave_size
        # te.ops keeps this op inside, so its state_dict has the key of one
        self._clamped = ClampedSwiGLU(limit=limit, alpha=alpha, glu_linear_offset=glu_linear_offset)


class ScaledSReLU(BasicOperation):
    """See :class:`functional_te.ScaledSReLU`."""

    def __init__(self, *, activation_recompute_in_mlp: bool = False) -> None:
        super().__init__(fte.ScaledSReLU(activation_recompute_in_mlp=activation_recompute_in_mlp))


class ScaledTanhSReLU(BasicOperation):
    """See :class:`functional_te.ScaledTanhSReLU`."""

    def __init__(self, *, tanh_clamp_scale: float, activation_recompute_in_mlp: bool = False) -> None:
        op = fte.ScaledTanhSReLU(tanh_clamp_scale, activation_recompute_in_mlp=activation_recompute_in_mlp)
        super().__init__(op)
        self.tanh_clamp_scale = op.tanh_clamp_scale
