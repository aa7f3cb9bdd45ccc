"""Backward of Bias then Dropout: the mask, the bias gradient and the cast for the op before, in one step."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch

from functional_te import pytree
from functional_te.fuser.rule import FusionRule, Slot
from functional_te.kernels import kernels
from functional_te.ops import BackwardContext, Bias, BwdResult, Dropout, FusedOp, Op
from functional_te.ops.common import amaxes, quantized_spec
from functional_te.ops.dropout import DropoutBackwardArgs, dropout_grad
from functional_te.quantization.tensor import BoundQuantizer

__all__ = ["BACKWARD_BIAS_DROPOUT", "BackwardBiasDropout", "BiasDropoutBackwardArgs"]


@pytree.bundle
class BiasDropoutBackwardArgs:
    """Bundle: the dropout's, how to cast the result for the op before, and whether the bias needs a gradient."""

    dropout: DropoutBackwardArgs
    grad_input_quantizer: BoundQuantizer | None = None
    needs_bias: bool = pytree.static(default=True)


def _backward(args: BiasDropoutBackwardArgs) -> BwdResult:
    own = args.dropout
    dropped = own.key is not None
    dy = dropout_grad(own) if dropped else own.grad_output
    k = kernels(own.backend)
    if args.grad_input_quantizer is None:
        # a dropout that kept everything passes its gradient on
        return BwdResult(dy if dropped else None, ((k.bias_grad(dy) if args.needs_bias else None,), ()))
    dx, amax, db = k.cast_bias(dy, args.grad_input_quantizer, needs_bias=args.needs_bias)
    return BwdResult(dx, ((db,), ()), (), amaxes(grad_input=amax))


def _backward_fake(args: Any) -> BwdResult:
    own = args.dropout
    dropped = own.key is not None
    dy = own.grad_output.with_(dtype=own.dtype) if dropped else own.grad_output
    db = dy.with_(shape=dy.shape[-1:]) if args.needs_bias else None
    if args.grad_input_quantizer is None:
        return BwdResult(dy if dropped else None, ((db,), ()))
    dx, amax = quantized_spec(dy, args.grad_input_quantizer)
    return BwdResult(dx, ((db,), ()), (), amaxes(grad_input=amax))


@dataclasses.dataclass(frozen=True, eq=False)
class BackwardBiasDropout(FusedOp):
    """Bias, Dropout."""

    quantizes_grad_input: ClassVar[bool] = True
    bwd_args_type: ClassVar[type[Any]] = BiasDropoutBackwardArgs

    backward_impl = staticmethod(_backward)
    backward_fake = staticmethod(_backward_fake)

    def resolve_bwd_args(self, ctxs: tuple[BackwardContext, ...], grad_output: torch.Tensor) -> BiasDropoutBackwardArgs:
        """The backward bundle."""
        bias, own = ctxs
        dropout = self.ops[1]
        assert isinstance(dropout, Dropout)
        return BiasDropoutBackwardArgs(
            dropout=dropout.resolve_bwd_args(own, grad_output),
            grad_input_quantizer=bias.prev_op_grad_output_quantizer,
            needs_bias=bias.requires_grad.params[0],
        )


def _build(ops: tuple[Op, ...]) -> BackwardBiasDropout:
    return BackwardBiasDropout(ops)


BACKWARD_BIAS_DROPOUT = FusionRule(
    name="backward_bias_dropout",
    pattern=(Slot((Bias,)), Slot((Dropout,))),
    build=_build,
)
