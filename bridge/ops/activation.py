"""Activations as modules, with te.ops' names and constructor signatures."""

from __future__ import annotations

from typing import Any, ClassVar

import functional_te as fte
from bridge.ops.operation import BasicOperation

__all__ = [
    "GEGLU",
    "GELU",
    "GLU",
    "QGEGLU",
    "QGELU",
    "ClampedSwiGLU",
    "ErfGELU",
    "ReGLU",
    "ReLU",
    "SReGLU",
    "SReLU",
    "SiLU",
    "SiTUGLU",
    "SwiGLU",
]


class _Activation(BasicOperation):
    op_class: ClassVar[Any]

    def __init__(self, *, cache_quantized_input: bool = False) -> None:
        self._configure(cache_quantized_input=cache_quantized_input)

    def _configure(self, *, cache_quantized_input: bool, **config: Any) -> None:
        BasicOperation.__init__(self, self.op_class(cache_quantized_input=cache_quantized_input, **config))
        self.cache_quantized_input = cache_quantized_input
        for name, value in config.items():
            setattr(self, name, value)


class GELU(_Activation):
    """See :class:`functional_te.GELU`."""

    op_class = fte.GELU


class ErfGELU(_Activation):
    """See :class:`functional_te.ErfGELU`; te.ops has none."""

    op_class = fte.ErfGELU


class QGELU(_Activation):
    """See :class:`functional_te.QGELU`."""

    op_class = fte.QGELU


class SiLU(_Activation):
    """See :class:`functional_te.SiLU`."""

    op_class = fte.SiLU


class ReLU(_Activation):
    """See :class:`functional_te.ReLU`."""

    op_class = fte.ReLU


class SReLU(_Activation):
    """See :class:`functional_te.SReLU`."""

    op_class = fte.SReLU


class GLU(_Activation):
    """See :class:`functional_te.GLU`."""

    op_class = fte.GLU


class GEGLU(_Activation):
    """See :class:`functional_te.GEGLU`."""

    op_class = fte.GEGLU


class QGEGLU(_Activation):
    """See :class:`functional_te.QGEGLU`."""

    op_class = fte.QGEGLU


class ReGLU(_Activation):
    """See :class:`functional_te.ReGLU`."""

    op_class = fte.ReGLU


class SReGLU(_Activation):
    """See :class:`functional_te.SReGLU`."""

    op_class = fte.SReGLU


class SwiGLU(_Activation):
    """See :class:`functional_te.SwiGLU`."""

    op_class = fte.SwiGLU

    def __init__(self, *, cache_quantized_input: bool = False, glu_interleave_size: int | None = None) -> None:
        self._configure(cache_quantized_input=cache_quantized_input, glu_interleave_size=glu_interleave_size)


class SiTUGLU(_Activation):
    """See :class:`functional_te.SiTUGLU`."""

    op_class = fte.SiTUGLU

    def __init__(
        self,
        *,
        beta1: float = 4.0,
        beta2: float = 25.0,
        cache_quantized_input: bool = False,
        glu_interleave_size: int | None = None,
    ) -> None:
        self._configure(
            cache_quantized_input=cache_quantized_input,
            glu_interleave_size=glu_interleave_size,
            beta1=beta1,
            beta2=beta2,
        )


class ClampedSwiGLU(_Activation):
    """See :class:`functional_te.ClampedSwiGLU`."""

    op_class = fte.ClampedSwiGLU

    def __init__(
        self,
        *,
        limit: float = 7.0,
        alpha: float = 1.702,
        glu_linear_offset: float = 1.0,
        cache_quantized_input: bool = False,
        glu_interleave_size: int | None = None,
    ) -> None:
        self._configure(
            cache_quantized_input=cache_quantized_input,
            glu_interleave_size=glu_interleave_size,
            limit=limit,
            alpha=alpha,
            glu_linear_offset=glu_linear_offset,
        )
