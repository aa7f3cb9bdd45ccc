"""Forward: ``s = extra + x`` as an extra output and ``rms_norm(s)`` as the output, in one step."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch

from functional_te import pytree
from functional_te.fuser.rule import FusionRule, Slot
from functional_te.kernels import kernels
from functional_te.ops import AddExtraInput, FusedOp, FwdResult, MakeExtraOutput, Op, OpRequiresGrad, RMSNorm
from functional_te.ops.common import amaxes, spec_store
from functional_te.ops.rms_norm import RMSNormForwardArgs, RMSNormSaved
from functional_te.quantization.tensor import BoundQuantizer

__all__ = ["FORWARD_ADD_RMS_NORM", "AddRMSNormArgs", "ForwardAddRMSNorm"]


@pytree.bundle
class AddRMSNormArgs:
    """Bundle: the norm's, whose input is the other addend, and the extra tensor of the input's shape."""

    norm: RMSNormForwardArgs
    extra: torch.Tensor


def _forward(args: AddRMSNormArgs) -> FwdResult:
    norm = args.norm
    k = kernels(norm.backend)
    output, amax, rstd, total = k.rms_norm(
        norm.input_,
        norm.weight,
        eps=norm.eps,
        zero_centered_gamma=norm.zero_centered_gamma,
        dtype=norm.dtype,
        bound=norm.output_quantizer,
        add=args.extra,
    )
    assert total is not None
    return FwdResult(output, rstd, ((), (total,), ()), amaxes(output=amax))


def _forward_fake(args: AddRMSNormArgs) -> FwdResult:
    norm, x = args.norm, args.norm.input_
    total: Any = x.with_(dtype=torch.promote_types(args.extra.dtype, x.dtype))  # type: ignore[attr-defined]
    output, amax = spec_store(total, norm.dtype, norm.output_quantizer)
    rstd = total.with_(shape=total.shape[: len(total.shape) - len(norm.weight.shape)], dtype=torch.float32)
    return FwdResult(output, rstd, ((), (total,), ()), amaxes(output=amax))


def _setup_context(args: AddRMSNormArgs, aux: torch.Tensor, extra_outputs: Any) -> tuple[Any, ...]:
    return (), (), RMSNormSaved(input_=extra_outputs[1][0], weight=args.norm.weight, rstd=aux)


@dataclasses.dataclass(frozen=True, eq=False)
class ForwardAddRMSNorm(FusedOp):
    """AddExtraInput, MakeExtraOutput, RMSNorm. The norm reads the sum as it was rounded, like the unfused ops."""

    quantizes_output: ClassVar[bool] = True
    saves_extra_outputs: ClassVar[bool] = True
    fwd_args_type: ClassVar[type[Any]] = AddRMSNormArgs

    forward_impl = staticmethod(_forward)
    forward_fake = staticmethod(_forward_fake)
    setup_context: ClassVar[Any] = staticmethod(_setup_context)

    def resolve_fwd_args(
        self,
        input_: torch.Tensor,
        *,
        params: tuple[Any, ...],
        state: tuple[Any, ...],
        requires_grad: tuple[OpRequiresGrad, ...],
        extra_inputs: tuple[tuple[torch.Tensor, ...], ...],
        next_op_input_quantizer: BoundQuantizer | None = None,
        compute_dtype: torch.dtype | None = None,
        backend: str = "reference",
    ) -> AddRMSNormArgs:
        """The forward bundle."""
        norm = self.ops[2]
        assert isinstance(norm, RMSNorm)
        return AddRMSNormArgs(
            norm=norm.resolve_fwd_args(
                input_,
                params=params[2],
                state=state[2],
                requires_grad=requires_grad[2],
                next_op_input_quantizer=next_op_input_quantizer,
                compute_dtype=compute_dtype,
                backend=backend,
            ),
            extra=extra_inputs[0][0],
        )


def _build(ops: tuple[Op, ...]) -> ForwardAddRMSNorm:
    return ForwardAddRMSNorm(ops)


FORWARD_ADD_RMS_NORM = FusionRule(
    name="forward_add_rms_norm",
    pattern=(Slot((AddExtraInput,)), Slot((MakeExtraOutput,)), Slot((RMSNorm,))),
    build=_build,
)
