"""Forward: an activation whose output a Quantize casts, in one step that ends in the cast."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch

from functional_te.fuser.rule import FusionRule, Slot
from functional_te.fuser.rules.forward_norm_quantize import observed_by_quantize, refuse_no_cast
from functional_te.ops import Activation, FusedOp, FwdResult, Op, OpRequiresGrad, Quantize
from functional_te.ops.activation import ActivationForwardArgs
from functional_te.ops.common import TensorOrQuantized

__all__ = ["FORWARD_ACTIVATION_QUANTIZE", "ForwardActivationQuantize"]


def _forward(args: ActivationForwardArgs) -> FwdResult:
    return observed_by_quantize(Activation.forward_impl(args))


def _forward_fake(args: ActivationForwardArgs) -> FwdResult:
    return observed_by_quantize(Activation.forward_fake(args))


def _setup_context(args: ActivationForwardArgs, aux: Any) -> tuple[Any, ...]:
    return Activation.setup_context(args, aux), ()


@dataclasses.dataclass(frozen=True, eq=False)
class ForwardActivationQuantize(FusedOp):
    """Activation, Quantize."""

    fwd_args_type: ClassVar[type[Any]] = ActivationForwardArgs

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
        compute_dtype: torch.dtype | None = None,
        backend: str = "reference",
    ) -> ActivationForwardArgs:
        """The forward bundle."""
        activation = self.ops[0]
        assert isinstance(activation, Activation)
        return activation.resolve_fwd_args(
            input_,
            params=params[0],
            state={},
            requires_grad=requires_grad[0],
            next_op_input_quantizer=state[1].get("input"),
            compute_dtype=compute_dtype,
            backend=backend,
        )


def _build(ops: tuple[Op, ...]) -> ForwardActivationQuantize:
    return ForwardActivationQuantize(ops)


FORWARD_ACTIVATION_QUANTIZE = FusionRule(
    name="forward_activation_quantize",
    pattern=(Slot((Activation,)), Slot((Quantize,))),
    build=_build,
    refuse=refuse_no_cast,
)
