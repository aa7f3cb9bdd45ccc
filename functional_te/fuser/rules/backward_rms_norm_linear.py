"""Backward of [MakeExtraOutput], RMSNorm, BasicLinear: ``dy @ W``, the norm's backward and the residual branch's
gradient in one step.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from functional_te import pytree
from functional_te.fuser.rule import FusionRule, Slot, Window
from functional_te.ops import BackwardContext, BasicLinear, BwdResult, FusedOp, MakeExtraOutput, Op, RMSNorm
from functional_te.ops.products import LinearBackwardArgs, grad_specs, grads, linear_backward_fields, refuse_parallel
from functional_te.ops.rms_norm import (
    RMSNormBackwardArgs,
    rms_norm_backward,
    rms_norm_backward_args,
    rms_norm_backward_fake,
)

__all__ = ["BACKWARD_RMS_NORM_LINEAR", "BackwardRMSNormLinear", "RMSNormLinearBackwardArgs"]


@pytree.bundle
class RMSNormLinearBackwardArgs:
    """Bundle: the linear's, and the norm's with ``grad_output`` None in the place of the linear's input gradient.

    Attributes:
        linear: the linear's bundle.
        norm: the norm's bundle.
        forks: whether a MakeExtraOutput is covered, too.
    """

    linear: LinearBackwardArgs
    norm: RMSNormBackwardArgs
    forks: bool = pytree.static(default=False)


def _backward(args: RMSNormLinearBackwardArgs) -> BwdResult:
    linear = grads(args.linear)
    return _cover(args, linear, rms_norm_backward(pytree.replace(args.norm, grad_output=linear.grad_input)))


def _backward_fake(args: RMSNormLinearBackwardArgs) -> BwdResult:
    linear = grad_specs(args.linear)
    return _cover(args, linear, rms_norm_backward_fake(pytree.replace(args.norm, grad_output=linear.grad_input)))


def _cover(args: RMSNormLinearBackwardArgs, linear: BwdResult, norm: BwdResult) -> BwdResult:
    params = (norm.grad_params, linear.grad_params)
    return BwdResult(norm.grad_input, ((), *params) if args.forks else params, (), linear.amaxes)


@dataclasses.dataclass(frozen=True, eq=False)
class BackwardRMSNormLinear(FusedOp):
    """[MakeExtraOutput], RMSNorm, BasicLinear. Rounds where the unfused ops do."""

    bwd_args_type: ClassVar[type[Any]] = RMSNormLinearBackwardArgs

    backward_impl = staticmethod(_backward)
    backward_fake = staticmethod(_backward_fake)

    def resolve_bwd_args(self, ctxs: tuple[BackwardContext, ...], grad_output: Any) -> RMSNormLinearBackwardArgs:
        """The backward bundle."""
        op = self.ops[-2]
        assert isinstance(op, RMSNorm)
        forks = len(ctxs) == 3
        return RMSNormLinearBackwardArgs(
            linear=LinearBackwardArgs(**linear_backward_fields(self.ops[-1], ctxs[-1], grad_output)),
            norm=rms_norm_backward_args(op, ctxs[-2], None, add=ctxs[0].grad_extra_outputs[0] if forks else None),
            forks=forks,
        )


def _build(ops: tuple[Op, ...]) -> BackwardRMSNormLinear:
    return BackwardRMSNormLinear(ops)


def _refuse(window: Window) -> str | None:
    if not window.requires_grad[-1].input:
        return "the linear's input needs no gradient"
    if len(window.ops) == 3 and not window.requires_grad[1].input:
        return "the norm's input needs no gradient"
    return refuse_parallel(window.ops[-1], "column")


BACKWARD_RMS_NORM_LINEAR = FusionRule(
    name="backward_rms_norm_linear",
    pattern=(Slot((MakeExtraOutput,), optional=True), Slot((RMSNorm,)), Slot((BasicLinear,))),
    build=_build,
    refuse=_refuse,
)
