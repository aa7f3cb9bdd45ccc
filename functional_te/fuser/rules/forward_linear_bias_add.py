"""Forward: ``y = extra + (x @ W.T + b)`` in one step."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch

from functional_te import pytree
from functional_te.fuser.rule import FusionRule, Slot, Window
from functional_te.kernels import kernels
from functional_te.ops import AddExtraInput, BasicLinear, Bias, FusedOp, FwdResult, Op, OpRequiresGrad
from functional_te.ops.common import TensorOrQuantized
from functional_te.ops.products import (
    LinearForwardArgs,
    linear_output_spec,
    operand_specs,
    operands,
    refuse_parallel,
    saved_operands,
)

__all__ = ["FORWARD_LINEAR_BIAS_ADD", "ForwardLinearBiasAdd", "LinearBiasAddArgs"]


@pytree.bundle
class LinearBiasAddArgs:
    """Bundle: a linear's, the bias ``[out_features]`` or None, and the extra tensor ``[..., out_features]``."""

    linear: LinearForwardArgs
    extra: torch.Tensor
    bias: torch.Tensor | None = None


def _forward(args: LinearBiasAddArgs) -> FwdResult:
    x, w, aux, observed = operands(args.linear)
    k = kernels(args.linear.backend)
    y = k.gemm_nt(x, w, dtype=args.linear.dtype, bias=args.bias, add=args.extra)
    return FwdResult(y, aux, (), observed)


def _forward_fake(args: LinearBiasAddArgs) -> FwdResult:
    aux, observed = operand_specs(args.linear)
    y = linear_output_spec(args.linear)
    dtype = torch.promote_types(y.dtype, args.extra.dtype)
    if args.bias is not None:
        dtype = torch.promote_types(dtype, args.bias.dtype)
    return FwdResult(y.with_(dtype=dtype), aux, (), observed)


def _setup_context(args: LinearBiasAddArgs, aux: Any) -> tuple[Any, ...]:
    return (saved_operands(args.linear, aux), *(((),) * (1 if args.bias is None else 2)))


@dataclasses.dataclass(frozen=True, eq=False)
class ForwardLinearBiasAdd(FusedOp):
    """BasicLinear, [Bias], AddExtraInput."""

    fwd_args_type: ClassVar[type[Any]] = LinearBiasAddArgs

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
    ) -> LinearBiasAddArgs:
        """The forward bundle."""
        linear = self.ops[0]
        assert isinstance(linear, BasicLinear)
        return LinearBiasAddArgs(
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
            bias=params[1]["bias"] if isinstance(self.ops[1], Bias) else None,
        )


def _build(ops: tuple[Op, ...]) -> ForwardLinearBiasAdd:
    return ForwardLinearBiasAdd(ops)


def _refuse(window: Window) -> str | None:
    return refuse_parallel(window.ops[0], "row")


FORWARD_LINEAR_BIAS_ADD = FusionRule(
    name="forward_linear_bias_add",
    pattern=(Slot((BasicLinear,)), Slot((Bias,), optional=True), Slot((AddExtraInput,))),
    build=_build,
    refuse=_refuse,
)
