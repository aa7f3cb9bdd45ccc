"""Normalizations as modules, with te.ops' names and constructor signatures."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch

import functional_te as fte
from bridge.ops.operation import BasicOperation

__all__ = ["AdaptiveLayerNorm", "L2Normalization", "LayerNorm", "RMSNorm"]


class _Norm(BasicOperation):
    op_class: ClassVar[Any]
    weight: torch.nn.Parameter

    def __init__(
        self,
        normalized_shape: int | Iterable[int],
        *,
        eps: float = 1e-5,
        device: Any = None,
        dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        sm_margin: int | dict[str, int] = 0,
    ) -> None:
        del sm_margin  # a tuning hint for kernels that share the GPU with communication; no effect here
        shape = normalized_shape if isinstance(normalized_shape, int) else tuple(normalized_shape)
        super().__init__(self.op_class(shape, float(eps), bool(zero_centered_gamma)), device=device, dtype=dtype)
        self.eps, self.zero_centered_gamma = float(eps), bool(zero_centered_gamma)


class LayerNorm(_Norm):
    """Layer normalization. See :class:`functional_te.LayerNorm`; ``sm_margin`` is accepted without effect."""

    op_class = fte.LayerNorm
    bias: torch.nn.Parameter


class RMSNorm(_Norm):
    """Root-mean-square normalization. See :class:`functional_te.RMSNorm`; ``sm_margin`` is accepted without effect."""

    op_class = fte.RMSNorm


class AdaptiveLayerNorm(BasicOperation):
    """Layer normalization with scale and shift as extra inputs. See :class:`functional_te.AdaptiveLayerNorm`."""

    def __init__(self, hidden_size: int, *, eps: float = 1e-5, batch_dim: int = 0) -> None:
        super().__init__(fte.AdaptiveLayerNorm(hidden_size, eps, batch_dim))
        self.hidden_size, self.eps, self.batch_dim = hidden_size, float(eps), batch_dim


class L2Normalization(BasicOperation):
    """Division by the L2 norm of the last dimension. See :class:`functional_te.L2Normalization`.

    ``seq_length`` and ``micro_batch_size`` are accepted without effect: they are hints for kernels that are compiled
    ahead of the first call.
    """

    def __init__(
        self, *, eps: float = 1e-6, seq_length: int | None = None, micro_batch_size: int | None = None
    ) -> None:
        del seq_length, micro_batch_size
        super().__init__(fte.L2Normalization(eps))
        self.eps = float(eps)
