"""ConstantScale: ``y = x * scale``."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch

from functional_te import pytree
from functional_te.ops.common import check_float
from functional_te.ops.op import BackwardContext, BwdResult, FwdResult, Op, OpRequiresGrad
from functional_te.ops.work import per_element
from functional_te.tensor_spec import TensorSpec

__all__ = ["ConstantScale", "ConstantScaleArgs"]


@pytree.bundle
class ConstantScaleArgs:
    """Bundle of both directions: the tensor to scale and the factor."""

    input_: torch.Tensor
    scale: float = pytree.static(default=1.0)


def _forward(args: ConstantScaleArgs) -> FwdResult:
    return FwdResult(args.input_ * args.scale)


def _forward_fake(args: ConstantScaleArgs) -> FwdResult:
    return FwdResult(args.input_)


def _backward(args: ConstantScaleArgs) -> BwdResult:
    return BwdResult(args.input_ * args.scale)


def _backward_fake(args: ConstantScaleArgs) -> BwdResult:
    return BwdResult(args.input_)


@dataclasses.dataclass(frozen=True, eq=False)
class ConstantScale(Op):
    """``y = x * scale`` and ``dx = dy * scale``.

    Args:
        scale: the factor.
    """

    scale: float

    fwd_args_type: ClassVar[type[Any]] = ConstantScaleArgs
    bwd_args_type: ClassVar[type[Any]] = ConstantScaleArgs

    forward_impl = staticmethod(_forward)
    forward_fake = staticmethod(_forward_fake)
    backward_impl = staticmethod(_backward)
    backward_fake = staticmethod(_backward_fake)
    forward_work = staticmethod(per_element(1, folds=True))
    backward_work = staticmethod(per_element(1, folds=True))

    def __post_init__(self) -> None:
        object.__setattr__(self, "scale", float(self.scale))

    def check(self, input_: TensorSpec, params: Any, extra_inputs: tuple[Any, ...], where: str) -> None:
        """A floating input."""
        del params, extra_inputs
        check_float(input_, "input", where)

    def resolve_fwd_args(
        self, input_: torch.Tensor, *, params: Any, state: Any, requires_grad: OpRequiresGrad
    ) -> ConstantScaleArgs:
        """The forward bundle."""
        del params, state, requires_grad
        return ConstantScaleArgs(input_=input_, scale=self.scale)

    def resolve_bwd_args(self, ctx: BackwardContext, grad_output: torch.Tensor) -> ConstantScaleArgs:
        """The backward bundle."""
        del ctx
        return ConstantScaleArgs(input_=grad_output, scale=self.scale)
