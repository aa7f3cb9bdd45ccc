"""Ops that move, scale or branch tensors, as modules with te.ops' names and constructor signatures."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch

import functional_te as fte
from bridge.ops.operation import BasicOperation

__all__ = ["AddExtraInput", "ConstantScale", "Dropout", "Identity", "MakeExtraOutput", "Quantize", "Reshape"]

# no value can be made while a graph is traced
_IDENTITY = fte.Identity()


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


class Quantize(BasicOperation):
    """An explicit cast of the main tensor, of its gradient, or of both. See :class:`functional_te.Quantize`.

    At the end of a group the cast values come back as an ordinary tensor.
    """

    def __init__(self, forward: bool = True, backward: bool = False) -> None:
        super().__init__(fte.Quantize(forward, backward))


class Dropout(BasicOperation):
    """Dropout. See :class:`functional_te.Dropout`.

    In training mode every call draws a key from torch's generator of the input's device, so ``torch.manual_seed``,
    activation checkpointing and CUDA graphs do with it what they do with ``torch.nn.Dropout``. Forward kwargs ``key``
    and ``training`` of the caller come first. In evaluation mode it is the identity.
    """

    provides_kwargs: ClassVar[bool] = True

    def __init__(self, p: float) -> None:
        super().__init__(fte.Dropout(p))
        self.p = self.dropout_probability = float(p)

    @property
    def evaluation_op(self) -> fte.Op:
        """Nothing at all."""
        return _IDENTITY

    def forward_kwargs(self, x: Any, given: dict[str, Any]) -> dict[str, Any]:
        """A fresh key in training mode; in evaluation mode, beside others in training, no mask."""
        if not self.training:
            return {"training": False}
        if self.p == 0 or "key" in given or not given.get("training", True):
            return {}
        return {"key": torch.randint(1 << 32, (2,), dtype=torch.int64, device=x.device)}
