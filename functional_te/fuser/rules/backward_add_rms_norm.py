"""Backward of MakeExtraOutput then RMSNorm: the norm's input gradient plus the residual branch's, in one step."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch

from functional_te.fuser.rule import FusionRule, Slot, Window
from functional_te.ops import BackwardContext, BwdResult, FusedOp, MakeExtraOutput, Op, RMSNorm
from functional_te.ops.rms_norm import (
    RMSNormBackwardArgs,
    rms_norm_backward,
    rms_norm_backward_args,
    rms_norm_backward_fake,
)

__all__ = ["BACKWARD_ADD_RMS_NORM", "BackwardAddRMSNorm"]


def _cover_both(result: BwdResult) -> BwdResult:
    return BwdResult(result.grad_input, ((), result.grad_params), (), result.amaxes)


def _backward(args: RMSNormBackwardArgs) -> BwdResult:
    return _cover_both(rms_norm_backward(args))


def _backward_fake(args: RMSNormBackwardArgs) -> BwdResult:
    return _cover_both(rms_norm_backward_fake(args))


@dataclasses.dataclass(frozen=True, eq=False)
class BackwardAddRMSNorm(FusedOp):
    """MakeExtraOutput, RMSNorm."""

    bwd_args_type: ClassVar[type[Any]] = RMSNormBackwardArgs

    backward_impl = staticmethod(_backward)
    backward_fake = staticmethod(_backward_fake)

    def resolve_bwd_args(self, ctxs: tuple[BackwardContext, ...], grad_output: torch.Tensor) -> RMSNormBackwardArgs:
        """The backward bundle."""
        fork, norm = ctxs
        op = self.ops[1]
        assert isinstance(op, RMSNorm)
        return rms_norm_backward_args(op, norm, grad_output, add=fork.grad_extra_outputs[0])


def _build(ops: tuple[Op, ...]) -> BackwardAddRMSNorm:
    return BackwardAddRMSNorm(ops)


def _refuse(window: Window) -> str | None:
    return None if window.requires_grad[1].input else "the norm's input needs no gradient"


BACKWARD_ADD_RMS_NORM = FusionRule(
    name="backward_add_rms_norm",
    pattern=(Slot((MakeExtraOutput,)), Slot((RMSNorm,))),
    build=_build,
    refuse=_refuse,
)
