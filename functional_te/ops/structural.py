"""Identity and Reshape: ops that return their input or a view of it, and so stay outside custom ops."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch

from functional_te import pytree
from functional_te._errors import type_error, value_error
from functional_te.ops.common import check_float
from functional_te.ops.op import BackwardContext, BwdResult, FwdResult, Op, OpRequiresGrad
from functional_te.tensor_spec import TensorSpec

__all__ = ["Identity", "InlineArgs", "Reshape", "ShapeOf"]


@pytree.bundle
class InlineArgs:
    """Bundle of an inline op: the tensor, and where it goes.

    Attributes:
        input_: the main input, or the incoming gradient.
        shape: the shape to give it, or None to keep it.
    """

    input_: torch.Tensor
    shape: tuple[int, ...] | None = pytree.static(default=None)


@pytree.node
class ShapeOf:
    """Kept for the backward: a tensor without elements that carries a shape, so that symbolic sizes are not stored."""

    template: torch.Tensor


def _identity(args: InlineArgs) -> FwdResult:
    return FwdResult(args.input_)


def _identity_backward(args: InlineArgs) -> BwdResult:
    del args
    return BwdResult(None)


@dataclasses.dataclass(frozen=True, eq=False)
class Identity(Op):
    """``y = x``."""

    inline_forward: ClassVar[bool] = True
    inline_backward: ClassVar[bool] = True

    forward_impl = staticmethod(_identity)
    forward_fake = staticmethod(_identity)
    backward_impl = staticmethod(_identity_backward)
    backward_fake = staticmethod(_identity_backward)

    def check(self, input_: TensorSpec, params: Any, extra_inputs: tuple[Any, ...], where: str) -> None:
        """A floating input."""
        del params, extra_inputs
        check_float(input_, "input", where)

    def resolve_fwd_args(
        self, input_: torch.Tensor, *, params: Any, state: Any, requires_grad: OpRequiresGrad
    ) -> InlineArgs:
        """The forward bundle."""
        del params, state, requires_grad
        return InlineArgs(input_=input_)

    def resolve_bwd_args(self, ctx: BackwardContext, grad_output: torch.Tensor) -> InlineArgs:
        """The backward bundle."""
        del ctx
        return InlineArgs(input_=grad_output)


def _reshape(args: InlineArgs) -> FwdResult:
    assert args.shape is not None
    return FwdResult(args.input_.reshape(args.shape))


def _reshape_fake(args: Any) -> FwdResult:
    shape, numel = args.shape, args.input_.numel()
    if -1 in shape:
        known = 1
        for size in shape:
            known *= size if size != -1 else 1
        shape = tuple(numel // max(known, 1) if size == -1 else size for size in shape)
    return FwdResult(args.input_.with_(shape=shape))


def _reshape_backward(args: InlineArgs) -> BwdResult:
    assert args.shape is not None
    return BwdResult(args.input_.reshape(args.shape))


def _reshape_backward_fake(args: Any) -> BwdResult:
    return BwdResult(args.input_.with_(shape=args.shape))


@dataclasses.dataclass(frozen=True, eq=False)
class Reshape(Op):
    """``y = x.reshape(shape)``; one dimension may be -1.

    Args:
        shape: the output shape.
    """

    shape: tuple[int, ...]

    inline_forward: ClassVar[bool] = True
    inline_backward: ClassVar[bool] = True

    forward_impl = staticmethod(_reshape)
    forward_fake = staticmethod(_reshape_fake)
    backward_impl = staticmethod(_reshape_backward)
    backward_fake = staticmethod(_reshape_backward_fake)

    def __post_init__(self) -> None:
        shape = (self.shape,) if isinstance(self.shape, int) else tuple(self.shape)
        for size in shape:
            if not isinstance(size, int) or isinstance(size, bool):
                raise type_error("Reshape", "shape", "ints", repr(size))
            if size < -1:
                raise value_error("Reshape", "shape", "sizes of at least -1", shape)
        if shape.count(-1) > 1:
            raise value_error("Reshape", "shape", "at most one -1", shape)
        object.__setattr__(self, "shape", shape)

    def check(self, input_: TensorSpec, params: Any, extra_inputs: tuple[Any, ...], where: str) -> None:
        """Element counts that agree."""
        del params, extra_inputs
        check_float(input_, "input", where)
        known = 1
        for size in self.shape:
            known *= size if size != -1 else 1
        numel = input_.numel()
        fits = (known != 0 and numel % known == 0) if -1 in self.shape else numel == known
        if not fits:
            raise value_error(where, "input", f"a size that reshapes to {self.shape}", f"shape {tuple(input_.shape)}")

    def resolve_fwd_args(
        self, input_: torch.Tensor, *, params: Any, state: Any, requires_grad: OpRequiresGrad
    ) -> InlineArgs:
        """The forward bundle."""
        del params, state, requires_grad
        return InlineArgs(input_=input_, shape=self.shape)

    @staticmethod
    def setup_context(args: InlineArgs, aux: Any) -> ShapeOf:
        """The input's shape, carried by an expanded scalar."""
        del aux
        return ShapeOf(template=args.input_.new_empty(()).expand(args.input_.shape))

    def resolve_bwd_args(self, ctx: BackwardContext, grad_output: torch.Tensor) -> InlineArgs:
        """The backward bundle."""
        return InlineArgs(input_=grad_output, shape=tuple(ctx.saved.template.shape))
