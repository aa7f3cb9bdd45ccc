"""Forward: ``y = extra + scale * (x @ W.T)`` in one step."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

import torch

from functional_te import pytree
from functional_te.fuser.rule import FusionRule, Slot, Window
from functional_te.kernels import kernels
from functional_te.ops import AddExtraInput, BasicLinear, ConstantScale, FusedOp, FwdResult, Op, OpRequiresGrad
from functional_te.ops.common import TensorOrQuantized
from functional_te.ops.products import (
    LinearForwardArgs,
    linear_output_spec,
    operand_specs,
    operands,
    refuse_parallel,
    saved_operands,
)

__all__ = ["FORWARD_LINEAR_SCALE_ADD", "ForwardLinearScaleAdd", "LinearScaleAddArgs", "refuse_factor"]


@pytree.bundle
class LinearScaleAddArgs:
    """Bundle: a linear's, the extra tensor ``[..., out_features]``, and the factor of the product."""

    linear: LinearForwardArgs
    extra: torch.Tensor
    scale: float = pytree.static(default=1.0)


def _forward(args: LinearScaleAddArgs) -> FwdResult:
    x, w, aux, observed = operands(args.linear)
    k = kernels(args.linear.backend)
    y = k.gemm_nt(x, w, dtype=args.linear.dtype, add=args.extra, alpha=args.scale)
    return FwdResult(y, aux, (), observed)


def _forward_fake(args: LinearScaleAddArgs) -> FwdResult:
    aux, observed = operand_specs(args.linear)
    y = linear_output_spec(args.linear)
    return FwdResult(y.with_(dtype=torch.promote_types(y.dtype, args.extra.dtype)), aux, (), observed)


def _setup_context(args: LinearScaleAddArgs, aux: Any) -> tuple[Any, ...]:
    return saved_operands(args.linear, aux), (), ()


@dataclasses.dataclass(frozen=True, eq=False)
class ForwardLinearScaleAdd(FusedOp):
    """BasicLinear, ConstantScale, AddExtraInput.

    The factor is applied before the product is rounded, where the unfused ops round the product, its multiple and the
    sum.
    """

    fwd_args_type: ClassVar[type[Any]] = LinearScaleAddArgs

    forward_impl = staticmethod(_forward)
    forward_fake = staticmethod(_forward_fake)
    setup_context = staticmethod(_setup_context)

    def resolve_fwd_args(
        self,
        input_: TensorOrQuantized,
        *,
        params: tuple[Any, ...],
        state: tuple[Any, ...],
        requires_grad: tuple[OpRequiresGrad, ...],
        extra_inputs: tuple[tuple[torch.Tensor, ...], ...],
        compute_dtype: torch.dtype | None = None,
        backward_override: str | None = None,
        backend: str = "reference",
    ) -> LinearScaleAddArgs:
        """The forward bundle."""
        linear, scale, _ = self.ops
        assert isinstance(linear, BasicLinear)
        assert isinstance(scale, ConstantScale)
        return LinearScaleAddArgs(
            linear=linear.resolve_fwd_args(
                input_,
                params=params[0],
                state=state[0],
                requires_grad=requires_grad[0],
                compute_dtype=compute_dtype,
                backward_override=backward_override,
                backend=backend,
            ),
            extra=extra_inputs[-1][0],
            scale=scale.scale,
        )


def refuse_factor(scale: Op) -> str | None:
    """None, or why a ConstantScale cannot become the factor of a product."""
    assert isinstance(scale, ConstantScale)
    if scale.scale == 0:
        return "a factor of 0 would hide inf and nan of the product"
    return None if math.isfinite(scale.scale) else "the factor is not finite"


def _build(ops: tuple[Op, ...]) -> ForwardLinearScaleAdd:
    return ForwardLinearScaleAdd(ops)


def _refuse(window: Window) -> str | None:
    return refuse_factor(window.ops[1]) or refuse_parallel(window.ops[0], "row")


FORWARD_LINEAR_SCALE_ADD = FusionRule(
    name="forward_linear_scale_add",
    pattern=(Slot((BasicLinear,)), Slot((ConstantScale,)), Slot((AddExtraInput,))),
    build=_build,
    refuse=_refuse,
)
