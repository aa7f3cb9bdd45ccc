"""Forward: ``y = extra + dropout(x + b)`` in one step; the bias is optional."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch

from functional_te import pytree
from functional_te.fuser.rule import FusionRule, Slot
from functional_te.kernels import kernels
from functional_te.ops import AddExtraInput, Bias, Dropout, FusedOp, FwdResult, Op, OpRequiresGrad
from functional_te.ops.dropout import DropoutForwardArgs, dropout_context

__all__ = ["FORWARD_BIAS_DROPOUT_ADD", "BiasDropoutAddArgs", "ForwardBiasDropoutAdd"]


@pytree.bundle
class BiasDropoutAddArgs:
    """Bundle: the dropout's, whose dtype is its output's, the bias ``[size]`` or None, and the extra tensor."""

    dropout: DropoutForwardArgs
    extra: torch.Tensor
    bias: torch.Tensor | None = None


def _forward(args: BiasDropoutAddArgs) -> FwdResult:
    own = args.dropout
    dtype = torch.promote_types(args.extra.dtype, own.dtype)
    return FwdResult(
        kernels(own.backend).dropout(own.input_, own.key, p=own.p, dtype=dtype, bias=args.bias, add=args.extra)
    )


def _forward_fake(args: Any) -> FwdResult:
    return FwdResult(args.dropout.input_.with_(dtype=torch.promote_types(args.extra.dtype, args.dropout.dtype)))


def _setup_context(args: BiasDropoutAddArgs, aux: Any) -> tuple[Any, ...]:
    own = dropout_context(args.dropout, aux)
    return (own, ()) if args.bias is None else ((), own, ())


@dataclasses.dataclass(frozen=True, eq=False)
class ForwardBiasDropoutAdd(FusedOp):
    """[Bias], Dropout, AddExtraInput."""

    fwd_args_type: ClassVar[type[Any]] = BiasDropoutAddArgs

    forward_impl = staticmethod(_forward)
    forward_fake = staticmethod(_forward_fake)
    setup_context = staticmethod(_setup_context)

    def resolve_fwd_args(
        self,
        input_: torch.Tensor,
        *,
        params: tuple[Any, ...],
        state: tuple[Any, ...],
        requires_grad: tuple[OpRequiresGrad, ...],
        extra_inputs: tuple[tuple[torch.Tensor, ...], ...],
        kwargs: tuple[dict[str, Any], ...],
        compute_dtype: torch.dtype | None = None,
        backend: str = "reference",
    ) -> BiasDropoutAddArgs:
        """The forward bundle."""
        dropout = self.ops[-2]
        assert isinstance(dropout, Dropout)
        bias = params[0]["bias"] if isinstance(self.ops[0], Bias) else None
        own = dropout.resolve_fwd_args(
            input_,
            params=params[-2],
            state=state[-2],
            requires_grad=requires_grad[-2],
            compute_dtype=compute_dtype,
            backend=backend,
            **kwargs[-2],
        )
        if bias is not None and (compute_dtype is None or not kwargs[-2].get("training", True)):
            # the dropout has the dtype of what it gets
            own = pytree.replace(own, dtype=torch.promote_types(input_.dtype, bias.dtype))
        return BiasDropoutAddArgs(dropout=own, extra=extra_inputs[-1][0], bias=bias)


def _build(ops: tuple[Op, ...]) -> ForwardBiasDropoutAdd:
    return ForwardBiasDropoutAdd(ops)


FORWARD_BIAS_DROPOUT_ADD = FusionRule(
    name="forward_bias_dropout_add",
    pattern=(Slot((Bias,), optional=True), Slot((Dropout,)), Slot((AddExtraInput,))),
    build=_build,
)
