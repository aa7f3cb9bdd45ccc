"""Backward of BasicLinear then ConstantScale: ``dx = scale * (dy @ W)`` and ``dW = scale * (dy.T @ x)`` in one step."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from functional_te import pytree
from functional_te.fuser.rule import FusionRule, Slot, Window
from functional_te.fuser.rules.forward_linear_scale_add import refuse_factor
from functional_te.ops import BackwardContext, BasicLinear, BwdResult, ConstantScale, FusedOp, Op
from functional_te.ops.products import LinearBackwardArgs, grad_specs, grads, linear_backward_fields, refuse_parallel

__all__ = ["BACKWARD_LINEAR_SCALE", "BackwardLinearScale", "LinearScaleBackwardArgs"]


@pytree.bundle
class LinearScaleBackwardArgs:
    """Bundle: the linear's, and the factor of both products."""

    linear: LinearBackwardArgs
    scale: float = pytree.static(default=1.0)


def _cover_both(result: BwdResult) -> BwdResult:
    # what the products observe belongs to the linear, the first of the covered ops
    return BwdResult(result.grad_input, (result.grad_params, ()), (), result.amaxes)


def _backward(args: LinearScaleBackwardArgs) -> BwdResult:
    return _cover_both(grads(args.linear, alpha=args.scale))


def _backward_fake(args: LinearScaleBackwardArgs) -> BwdResult:
    return _cover_both(grad_specs(args.linear))


@dataclasses.dataclass(frozen=True, eq=False)
class BackwardLinearScale(FusedOp):
    """BasicLinear, ConstantScale.

    In low precision the gradient is cast as it comes in, before it is scaled (as in Transformer Engine): a
    delayed-scaling quantizer observes the amax of the unscaled gradient, where the unfused ops show it the scaled one.
    """

    bwd_args_type: ClassVar[type[Any]] = LinearScaleBackwardArgs

    backward_impl = staticmethod(_backward)
    backward_fake = staticmethod(_backward_fake)
    quantizes_grad_input: ClassVar[bool] = True

    def resolve_bwd_args(self, ctxs: tuple[BackwardContext, ...], grad_output: Any) -> LinearScaleBackwardArgs:
        """The backward bundle."""
        scale = self.ops[1]
        assert isinstance(scale, ConstantScale)
        return LinearScaleBackwardArgs(
            linear=LinearBackwardArgs(**linear_backward_fields(self.ops[0], ctxs[0], grad_output)), scale=scale.scale
        )


def _build(ops: tuple[Op, ...]) -> BackwardLinearScale:
    return BackwardLinearScale(ops)


def _refuse(window: Window) -> str | None:
    return refuse_factor(window.ops[1]) or refuse_parallel(window.ops[0], "column")


BACKWARD_LINEAR_SCALE = FusionRule(
    name="backward_linear_scale",
    pattern=(Slot((BasicLinear,)), Slot((ConstantScale,))),
    build=_build,
    refuse=_refuse,
)
