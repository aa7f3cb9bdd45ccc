"""AddExtraInput and MakeExtraOutput: side branches of a chain, by position or by a named channel."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch

from functional_te import pytree
from functional_te._errors import type_error, value_error
from functional_te.ops.common import check_channel, check_float
from functional_te.ops.op import BackwardContext, BwdResult, FwdResult, Op, OpRequiresGrad
from functional_te.ops.structural import InlineArgs
from functional_te.ops.work import per_element
from functional_te.tensor_spec import TensorSpec

__all__ = ["AddExtraInput", "AddForwardArgs", "MakeExtraOutput", "SumArgs"]


@pytree.bundle
class AddForwardArgs:
    """Bundle of an addition: ``extra + input_``, in torch's promoted dtype."""

    input_: torch.Tensor
    extra: torch.Tensor


@pytree.bundle
class SumArgs:
    """Bundle of a gradient sum: ``grad_extra + grad_output``."""

    grad_output: torch.Tensor
    grad_extra: torch.Tensor | None = None


def _add(args: AddForwardArgs) -> FwdResult:
    return FwdResult(args.extra + args.input_)


def _add_fake(args: Any) -> FwdResult:
    return FwdResult(args.input_.with_(dtype=torch.promote_types(args.extra.dtype, args.input_.dtype)))


def _pass_both(args: InlineArgs) -> BwdResult:
    return BwdResult(None, (), (args.input_,))


@dataclasses.dataclass(frozen=True, eq=False)
class AddExtraInput(Op):
    """``y = extra + x``; the gradient goes to both.

    Args:
        in_place: accepted for compatibility. The functional op never writes into its arguments; where te.ops would
            overwrite the extra tensor, a new one is returned.
        channel: take the extra tensor from this channel instead of from the caller.
    """

    in_place: bool = False
    channel: str | None = None

    num_extra_inputs: ClassVar[int] = 1
    extra_input_fields: ClassVar[tuple[str, ...]] = ("channel",)
    # the backward hands one gradient to two places, which a custom op may not
    inline_backward: ClassVar[bool] = True
    fwd_args_type: ClassVar[type[Any]] = AddForwardArgs
    bwd_args_type: ClassVar[type[Any]] = InlineArgs

    forward_impl = staticmethod(_add)
    forward_fake = staticmethod(_add_fake)
    backward_impl = staticmethod(_pass_both)
    backward_fake = staticmethod(_pass_both)
    forward_work = staticmethod(per_element(1))

    def __post_init__(self) -> None:
        check_channel(self.channel, "AddExtraInput")

    def check(self, input_: TensorSpec, params: Any, extra_inputs: tuple[Any, ...], where: str) -> None:
        """Two floating tensors of one shape."""
        del params
        (extra,) = extra_inputs
        check_float(input_, "input", where)
        check_float(extra, "extra input 0", where)
        if tuple(extra.shape) != tuple(input_.shape):
            raise value_error(where, "extra input 0", f"shape {tuple(input_.shape)}", f"shape {tuple(extra.shape)}")

    def resolve_fwd_args(
        self,
        input_: torch.Tensor,
        *,
        params: Any,
        state: Any,
        requires_grad: OpRequiresGrad,
        extra_inputs: tuple[torch.Tensor, ...],
    ) -> AddForwardArgs:
        """The forward bundle."""
        del params, state, requires_grad
        return AddForwardArgs(input_=input_, extra=extra_inputs[0])

    def resolve_bwd_args(self, ctx: BackwardContext, grad_output: torch.Tensor) -> InlineArgs:
        """The backward bundle."""
        del ctx
        return InlineArgs(input_=grad_output)


def _fork(args: InlineArgs) -> FwdResult:
    return FwdResult(args.input_, (), (args.input_,))


def _sum(args: SumArgs) -> BwdResult:
    return BwdResult(None if args.grad_extra is None else args.grad_extra + args.grad_output)


def _sum_fake(args: Any) -> BwdResult:
    if args.grad_extra is None:
        return BwdResult(None)
    return BwdResult(args.grad_output.with_(dtype=torch.promote_types(args.grad_extra.dtype, args.grad_output.dtype)))


@dataclasses.dataclass(frozen=True, eq=False)
class MakeExtraOutput(Op):
    """``y = x``, and ``x`` once more as an extra output; ``dx`` is the sum of both gradients.

    An absent gradient of the extra output counts as zeros.

    Args:
        in_place: accepted for compatibility; the functional op never writes into its arguments.
        channel: name of the channel that carries the extra output to a later op.
        output_to_caller: whether the extra output is also returned by the chain.
    """

    in_place: bool = False
    channel: str | None = None
    output_to_caller: bool = True

    num_extra_outputs: ClassVar[int] = 1
    extra_output_fields: ClassVar[tuple[str, ...]] = ("channel",)
    inline_forward: ClassVar[bool] = True
    fwd_args_type: ClassVar[type[Any]] = InlineArgs
    bwd_args_type: ClassVar[type[Any]] = SumArgs

    forward_impl = staticmethod(_fork)
    forward_fake = staticmethod(_fork)
    backward_impl = staticmethod(_sum)
    backward_fake = staticmethod(_sum_fake)
    backward_work = staticmethod(per_element(1))

    def __post_init__(self) -> None:
        check_channel(self.channel, "MakeExtraOutput")
        if not isinstance(self.output_to_caller, bool):
            raise type_error("MakeExtraOutput", "output_to_caller", "a bool", repr(self.output_to_caller))
        if self.channel is None and not self.output_to_caller:
            raise value_error("MakeExtraOutput", "output_to_caller", "True without a channel", False)

    @property
    def extra_outputs_to_caller(self) -> tuple[bool, ...]:
        """Whether the chain returns the extra output."""
        return (self.output_to_caller,)

    def check(self, input_: TensorSpec, params: Any, extra_inputs: tuple[Any, ...], where: str) -> None:
        """A floating input."""
        del params, extra_inputs
        check_float(input_, "input", where)

    def resolve_fwd_args(
        self, input_: torch.Tensor, *, params: Any, state: Any, requires_grad: OpRequiresGrad
    ) -> InlineArgs:
        """The forward bundle."""
        del params, state, requires_grad
        return InlineArgs(input_=input_)

    def resolve_bwd_args(self, ctx: BackwardContext, grad_output: torch.Tensor) -> SumArgs:
        """The backward bundle."""
        return SumArgs(grad_output=grad_output, grad_extra=ctx.grad_extra_outputs[0])
