"""Ops that move, scale or branch tensors, as modules with te.ops" names and constructor signatures."""

from __future__ import annotations

from collections.abc import Iterable

import functional_te as fte
from bridge.ops.operation import BasicOperation

__all__ = ["AddExtraInput", "ConstantScale", "Identity", "MakeExtraOutput", "Reshape"]


class Identity(BasicOperation):
    """``y = x``."""

    def __init__(self) -> None:
        super().__init__(fte.Identity())


class Reshape(BasicOperation):
    """``y = x.reshape(shape)``; one size may be -1."""

    def __init__(self, shape: Iterable[int]) -> None:
        super().__init__(fte.Reshape(tuple(shape)))


class ConstantScale(BasicOperation):
    """``y = x * scale``."""

    def __init__(self, scale: float) -> None:
        super().__init__(fte.ConstantScale(scale))
        self.scale = scale


class AddExtraInput(BasicOperation):
    """``y = extra + x``. ``in_place`` is accepted; arguments are never written to."""

    def __init__(self, *, in_place: bool = False) -> None:
        super().__init__(fte.AddExtraInput(in_place=in_place))


class MakeExtraOutput(BasicOperation):
    """``y = x`` and ``x`` as an extra output. ``in_place`` is accepted; gradients are never written to."""

    def __init__(self, *, in_place: bool = False) -> None:
        super().__init__(fte.MakeExtraOutput(in_place=in_place))
