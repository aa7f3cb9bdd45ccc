"""Backward of Bias then Activation: activation gradient, bias gradient and the cast for the op before, in one step."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch

from functional_te import pytree
from functional_te.fuser.rule import FusionRule, Slot
from functional_te.ops import Activation, BackwardContext, Bias, BwdResult, FusedOp, Op
from functional_te.ops.activation import ActivationBackwardArgs, activation_grad
from functional_te.ops.common import amaxes, spec_store
from functional_te.quantization.tensor import BoundQuantizer
from functional_te.tensor_spec import TensorSpec

__all__ = ["BACKWARD_ACTIVATION_BIAS", "ActivationBiasBackwardArgs", "BackwardActivationBias"]


@pytree.bundle
class ActivationBiasBackwardArgs:
    """Bundle: the activation's, how to cast the result for the op before, and whether the bias needs a gradient."""

    activation: ActivationBackwardArgs
    grad_input_quantizer: BoundQuantizer | None = None
    needs_bias: bool = pytree.static(default=True)


def _backward(args: ActivationBiasBackwardArgs) -> BwdResult:
    act = args.activation
    dx, amax, db = activation_grad(act, args.grad_input_quantizer, args.needs_bias)
    return BwdResult(dx, ((db,), ()), (), amaxes(grad_input=amax))


def _backward_fake(args: ActivationBiasBackwardArgs) -> BwdResult:
    act = args.activation
    spec = TensorSpec(tuple(act.input_.shape), act.dtype, act.grad_output.device)
    db = spec.with_(shape=spec.shape[-1:]) if args.needs_bias else None
    dx, amax = spec_store(spec, act.dtype, args.grad_input_quantizer)
    return BwdResult(dx, ((db,), ()), (), amaxes(grad_input=amax))


@dataclasses.dataclass(frozen=True, eq=False)
class BackwardActivationBias(FusedOp):
    """Bias, Activation."""

    quantizes_grad_input: ClassVar[bool] = True
    bwd_args_type: ClassVar[type[Any]] = ActivationBiasBackwardArgs

    backward_impl = staticmethod(_backward)
    backward_fake = staticmethod(_backward_fake)

    def resolve_bwd_args(
        self, ctxs: tuple[BackwardContext, ...], grad_output: torch.Tensor
    ) -> ActivationBiasBackwardArgs:
        """The backward bundle."""
        bias, act = ctxs
        activation = self.ops[1]
        assert isinstance(activation, Activation)
        return ActivationBiasBackwardArgs(
            activation=activation.resolve_bwd_args(act, grad_output),
            grad_input_quantizer=bias.prev_op_grad_output_quantizer,
            needs_bias=bias.requires_grad.params[0],
        )


def _build(ops: tuple[Op, ...]) -> BackwardActivationBias:
    return BackwardActivationBias(ops)


BACKWARD_ACTIVATION_BIAS = FusionRule(
    name="backward_activation_bias",
    pattern=(Slot((Bias,)), Slot((Activation,))),
    build=_build,
)
