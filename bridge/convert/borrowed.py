"""Operations whose parameters belong to modules of the converted model and are read from there on every call."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch

import functional_te as fte
from bridge.joining import join
from bridge.ops.operation import BasicOperation, resolve_device
from bridge.packed_weight import packed
from bridge.quantized_weight import QuantizedWeight
from functional_te.kernels import collectives
from functional_te.ops import Op
from functional_te.recipes import Recipe

__all__ = ["Borrowed", "PackedBias", "PackedWeight", "Slice", "TransposedWeight", "local", "read_local_parts"]

# DTensor, once something shards parameters: importing it takes a second
_sharded: tuple[type[Any], ...] = ()


def read_local_parts(kind: type[Any]) -> None:
    """From now on, read this rank's part of parameters of this class."""
    global _sharded  # noqa: PLW0603  a tuple that traced code can look at
    _sharded = (kind,)


def local(value: Any) -> Any:
    """This rank's part of a tensor that is sharded over ranks (a ``DTensor``); other tensors as they are."""
    return value.to_local() if isinstance(value, _sharded) else value


# seeds of the keys of stochastic rounding; conversion draws no random numbers
_seeds = itertools.count(1)


class _SummedGradient(torch.autograd.Function):
    """A parameter that all ranks have; each rank's gradient is a part of the whole one."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, group: str, size: int) -> torch.Tensor:
        ctx.group = (group, size)
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return collectives.all_reduce(grads[0], *ctx.group), None, None


class Borrowed(BasicOperation):
    """An operation that has quantizer state but no parameters: those are attributes of the same name of ``source``.

    Args:
        op: the operation.
        source: the module that has the parameters; None for an operation without.

    Attributes:
        covered: whether another operation runs in its place when a recipe is active, so that it needs no state.
        gradient_group: name and size of the process group whose ranks each have a part of the gradient, or None.
    """

    gradient_group: tuple[str, int] | None = None

    def __init__(self, op: Op, *sources: torch.nn.Module) -> None:
        super().__init__(op)
        self.sources: tuple[Any, ...] = sources  # a tuple, which torch.nn does not register
        self.covered = False

    def _init_parameters(self, device: torch.device, dtype: torch.dtype | None) -> None:
        del device, dtype
        self._seed = next(_seeds)

    def pre_first_fuser_forward(self) -> None:
        """Nothing: the parameters are somebody else's."""

    @property
    def weight(self) -> Any:
        """The parameter of that name."""
        return self._read(self.sources[0].weight)

    @property
    def bias(self) -> Any:
        """The parameter of that name; zeros where a layer norm has none."""
        source = self.sources[0]
        return torch.zeros_like(source.weight, requires_grad=False) if source.bias is None else self._read(source.bias)

    def _read(self, value: Any) -> Any:
        value = local(value)
        return value if self.gradient_group is None else _SummedGradient.apply(value, *self.gradient_group)

    def parameters(self, recurse: bool = True) -> Iterator[torch.nn.Parameter]:
        """Those of the modules it reads from."""
        for source in self.sources:
            yield from source.parameters(recurse)

    def _state_device(self) -> torch.device:
        for own in self.parameters():
            return own.device
        return resolve_device(None)

    def prepare_state(self, recipe: Recipe | None) -> None:
        """State on entry of an autocast, unless another operation runs instead."""
        if self._state_roles or not self.covered:
            super().prepare_state(recipe)


class TransposedWeight(Borrowed):
    """A linear over a weight that is stored ``[in, out]``, which it reads as a view."""

    @property
    def weight(self) -> Any:
        """The view ``[out, in]``."""
        return self.sources[0].weight.t()


class Slice(Borrowed):
    """A linear, or its bias, over rows of a parameter of another name, which it reads as a view.

    Args:
        op: the operation.
        source: the module.
        weight: name of the parameter in the place of ``weight``.
        bias: likewise of ``bias``.
        rows: first row and the one after the last; None is all of them.
    """

    def __init__(
        self, op: Op, source: torch.nn.Module, *, weight: str = "", bias: str = "", rows: tuple[int, int] | None = None
    ) -> None:
        super().__init__(op, source)
        self.names = weight, bias
        self.rows = rows

    def _own(self, name: str) -> Any:
        own = getattr(self.sources[0], name)
        return own if self.rows is None else own[self.rows[0] : self.rows[1]]

    @property
    def weight(self) -> Any:
        """The rows of the weight."""
        return self._own(self.names[0])

    @property
    def bias(self) -> Any:
        """The rows of the bias."""
        return self._own(self.names[1])


class PackedWeight(Borrowed):
    """One linear over the weights of several modules with the same input.

    This is the only place that packs weights: it copies them, on every call.
    """

    def __init__(self, *sources: Any) -> None:
        rows = sum(source.weight.shape[0] for source in sources)
        super().__init__(fte.BasicLinear(sources[0].weight.shape[1], rows), *sources)

    @property
    def weight(self) -> Any:
        """The weights one above the other."""
        weights = [source.weight for source in self.sources]
        if isinstance(weights[0], QuantizedWeight):
            return packed(weights)
        return join([local(weight) for weight in weights], 0)


class PackedBias(Borrowed):
    """The biases of several modules as one."""

    def __init__(self, *sources: Any) -> None:
        super().__init__(fte.Bias(sum(source.bias.shape[0] for source in sources)), *sources)

    @property
    def bias(self) -> Any:
        """The biases one after the other."""
        return torch.cat([local(source.bias) for source in self.sources])
