"""AllReduce, AllGather, ReduceScatter: sums and concatenations over the ranks of a process group."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch

from functional_te import pytree
from functional_te._errors import runtime_error, type_error, value_error
from functional_te.kernels import collectives
from functional_te.ops.common import check_float, check_size
from functional_te.ops.op import BackwardContext, BwdResult, FwdResult, Op, OpRequiresGrad
from functional_te.tensor_spec import TensorSpec

__all__ = ["AllGather", "AllReduce", "CollectiveArgs", "ReduceScatter", "check_rows"]


@pytree.bundle
class CollectiveArgs:
    """Bundle of both directions: the tensor, and the name and size of the group."""

    input_: torch.Tensor
    group: tuple[str, int] = pytree.static(default=("", 1))


def check_rows(x: Any, where: str, divisor: int = 1) -> None:
    """Raise unless ``x`` has a first dimension, one that ``divisor`` divides.

    Raises:
        ValueError: no dimension.
        RuntimeError: a first dimension that is not divisible.
    """
    if len(x.shape) == 0:
        raise value_error(where, "input", "at least one dimension", "shape ()")
    if x.shape[0] % divisor:
        raise runtime_error(where, "input", f"a first dimension divisible by {divisor} ranks", f"{x.shape[0]}")


def _all_reduce(args: CollectiveArgs) -> FwdResult:
    return FwdResult(collectives.all_reduce(args.input_, *args.group))


def _same_spec(args: CollectiveArgs) -> FwdResult:
    return FwdResult(args.input_)


def _unchanged(args: CollectiveArgs) -> BwdResult:
    del args
    return BwdResult(None)


def _all_gather(args: CollectiveArgs) -> FwdResult:
    return FwdResult(collectives.all_gather(args.input_, *args.group))


def _gathered_spec(args: Any) -> FwdResult:
    x = args.input_
    return FwdResult(x.with_(shape=(x.shape[0] * args.group[1], *x.shape[1:])))


def _reduce_scatter(args: CollectiveArgs) -> FwdResult:
    return FwdResult(collectives.reduce_scatter(args.input_, *args.group))


def _scattered_spec(args: Any) -> FwdResult:
    x = args.input_
    return FwdResult(x.with_(shape=(x.shape[0] // args.group[1], *x.shape[1:])))


def _gather_grad(args: CollectiveArgs) -> BwdResult:
    return BwdResult(_all_gather(args).output)


def _gather_grad_fake(args: CollectiveArgs) -> BwdResult:
    return BwdResult(_gathered_spec(args).output)


def _scatter_grad(args: CollectiveArgs) -> BwdResult:
    return BwdResult(_reduce_scatter(args).output)


def _scatter_grad_fake(args: CollectiveArgs) -> BwdResult:
    return BwdResult(_scattered_spec(args).output)


@dataclasses.dataclass(frozen=True, eq=False)
class _Collective(Op):
    group: str = ""
    size: int = 1

    fwd_args_type: ClassVar[type[Any]] = CollectiveArgs
    bwd_args_type: ClassVar[type[Any]] = CollectiveArgs

    def __post_init__(self) -> None:
        where = type(self).__name__
        if not isinstance(self.group, str):
            raise type_error(where, "group", "the registry name of a process group", repr(self.group))
        check_size(self.size, where, "size")

    def check(self, input_: TensorSpec, params: Any, extra_inputs: tuple[Any, ...], where: str) -> None:
        """A floating input with a first dimension."""
        del params, extra_inputs
        check_float(input_, "input", where)
        check_rows(input_, where)

    def resolve_fwd_args(
        self, input_: torch.Tensor, *, params: Any, state: Any, requires_grad: OpRequiresGrad
    ) -> CollectiveArgs:
        """The forward bundle."""
        del params, state, requires_grad
        return CollectiveArgs(input_=input_, group=(self.group, self.size))

    def resolve_bwd_args(self, ctx: BackwardContext, grad_output: torch.Tensor) -> CollectiveArgs:
        """The backward bundle."""
        del ctx
        return CollectiveArgs(input_=grad_output, group=(self.group, self.size))


@dataclasses.dataclass(frozen=True, eq=False)
class AllReduce(_Collective):
    """``y = sum of x over the ranks``, and ``dx = dy`` (every rank has the whole gradient already).

    Args:
        group: registry name of a process group; an empty string is the default group when the op runs.
        size: how many ranks it has. Of one rank the op copies and needs no ``torch.distributed``.
    """

    inline_backward: ClassVar[bool] = True

    forward_impl = staticmethod(_all_reduce)
    forward_fake = staticmethod(_same_spec)
    backward_impl = staticmethod(_unchanged)
    backward_fake = staticmethod(_unchanged)


@dataclasses.dataclass(frozen=True, eq=False)
class AllGather(_Collective):
    """``y`` is ``x`` of every rank, concatenated along dim 0; ``dx`` is this rank's chunk of the sum of ``dy``.

    Args:
        group: as for :class:`AllReduce`.
        size: likewise.
    """

    forward_impl = staticmethod(_all_gather)
    forward_fake = staticmethod(_gathered_spec)
    backward_impl = staticmethod(_scatter_grad)
    backward_fake = staticmethod(_scatter_grad_fake)


@dataclasses.dataclass(frozen=True, eq=False)
class ReduceScatter(_Collective):
    """``y`` is this rank's chunk, along dim 0, of the sum of ``x``; ``dx`` is ``dy`` of every rank, concatenated.

    A first dimension that ``size`` does not divide is a ``RuntimeError``, as in Transformer Engine.

    Args:
        group: as for :class:`AllReduce`.
        size: likewise.
    """

    forward_impl = staticmethod(_reduce_scatter)
    forward_fake = staticmethod(_scattered_spec)
    backward_impl = staticmethod(_gather_grad)
    backward_fake = staticmethod(_gather_grad_fake)

    def check(self, input_: TensorSpec, params: Any, extra_inputs: tuple[Any, ...], where: str) -> None:
        """A floating input whose first dimension is divisible."""
        super().check(input_, params, extra_inputs, where)
        check_rows(input_, where, self.size)
