"""Backward of MakeExtraOutput then BasicLinear: ``dx = g_extra + dy @ W`` in one step."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch

from functional_te import pytree
from functional_te.fuser.rule import FusionRule, Slot, Window
from functional_te.ops import BackwardContext, BasicLinear, BwdResult, FusedOp, MakeExtraOutput, Op
from functional_te.ops.products import LinearBackwardArgs, grad_specs, grads, linear_backward_fields, refuse_parallel

__all__ = ["BACKWARD_LINEAR_ADD", "BackwardLinearAdd", "LinearAddBackwardArgs"]


@pytree.bundle
class LinearAddBackwardArgs:
    """Bundle: the linear's, and the gradient of the extra output to add, or None."""

    linear: LinearBackwardArgs
    grad_extra: torch.Tensor | None = None


def _backward(args: LinearAddBackwardArgs) -> BwdResult:
    result = grads(args.linear, add=args.grad_extra)
    return BwdResult(result.grad_input, ((), result.grad_params), (), result.amaxes)


def _backward_fake(args: LinearAddBackwardArgs) -> BwdResult:
    result = grad_specs(args.linear)
    dx = result.grad_input
    if args.grad_extra is not None and dx is not None:
        dx = dx.with_(dtype=torch.promote_types(dx.dtype, args.grad_extra.dtype))
    return BwdResult(dx, ((), result.grad_params), (), result.amaxes)


@dataclasses.dataclass(frozen=True, eq=False)
class BackwardLinearAdd(FusedOp):
    """MakeExtraOutput, BasicLinear."""

    bwd_args_type: ClassVar[type[Any]] = LinearAddBackwardArgs

    backward_impl = staticmethod(_backward)
    backward_fake = staticmethod(_backward_fake)

    def resolve_bwd_args(self, ctxs: tuple[BackwardContext, ...], grad_output: Any) -> LinearAddBackwardArgs:
        """The backward bundle."""
        fork, linear = ctxs
        return LinearAddBackwardArgs(
            linear=LinearBackwardArgs(**linear_backward_fields(self.ops[1], linear, grad_output)),
            grad_extra=fork.grad_extra_outputs[0],
        )


def _build(ops: tuple[Op, ...]) -> BackwardLinearAdd:
    return BackwardLinearAdd(ops)


def _refuse(window: Window) -> str | None:
    if not window.requires_grad[1].input:
        return "the linear's input needs no gradient"
    return refuse_parallel(window.ops[1], "column")


BACKWARD_LINEAR_ADD = FusionRule(
    name="backward_linear_add",
    pattern=(Slot((MakeExtraOutput,)), Slot((BasicLinear,))),
    build=_build,
    refuse=_refuse,
)
