"""Quantize: an explicit cast of the main tensor, of its gradient, or of both."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch

from functional_te import pytree
from functional_te._errors import type_error
from functional_te.kernels import kernels
from functional_te.ops.common import TensorOrQuantized, amaxes, check_float, quantized_spec
from functional_te.ops.op import BackwardContext, BwdResult, FwdResult, Op, OpRequiresGrad
from functional_te.ops.work import Work
from functional_te.quantization.tensor import BoundQuantizer, QuantizedTensor
from functional_te.tensor_spec import TensorSpec

__all__ = ["Quantize", "QuantizeArgs"]


@pytree.bundle
class QuantizeArgs:
    """Bundle of both directions.

    Attributes:
        tensor: the main input, or the incoming gradient.
        quantizer: how to cast it if it is not quantized yet; None passes it on.
        backend: name of the kernel backend.
    """

    tensor: TensorOrQuantized
    quantizer: BoundQuantizer | None = None
    backend: str = pytree.static(default="reference")


def _cast(args: QuantizeArgs) -> tuple[QuantizedTensor | None, torch.Tensor | None]:
    """The cast tensor and the observed amax; None for a tensor that is passed on."""
    if args.quantizer is None or isinstance(args.tensor, QuantizedTensor):
        return None, None
    quantized: tuple[QuantizedTensor, torch.Tensor | None] = kernels(args.backend).quantize(args.tensor, args.quantizer)
    return quantized


def _cast_spec(args: Any) -> tuple[Any, Any]:
    if args.quantizer is None or isinstance(args.tensor, QuantizedTensor):
        return None, None
    return quantized_spec(args.tensor, args.quantizer)


def _forward(args: QuantizeArgs) -> FwdResult:
    output, amax = _cast(args)
    return FwdResult(output, (), (), amaxes(input=amax))


def _forward_fake(args: QuantizeArgs) -> FwdResult:
    output, amax = _cast_spec(args)
    return FwdResult(output, (), (), amaxes(input=amax))


def _backward(args: QuantizeArgs) -> BwdResult:
    grad, amax = _cast(args)
    return BwdResult(grad, (), (), amaxes(grad_output=amax))


def _backward_fake(args: QuantizeArgs) -> BwdResult:
    grad, amax = _cast_spec(args)
    return BwdResult(grad, (), (), amaxes(grad_output=amax))


def _work(args: Any, result: Any) -> Work:
    """One multiplication and one rounding of each element, if anything is cast."""
    casts = (result.output if isinstance(result, FwdResult) else result.grad_input) is not None
    return Work(flops=2 * args.tensor.numel() if casts else 0, passes=casts)


@dataclasses.dataclass(frozen=True, eq=False)
class Quantize(Op):
    """``y = cast(x)`` and ``dx = cast(dy)``, each if it is asked for and there is a recipe; else passed on as it is.

    Makes both copies of a tensor, so that any op can read it, and casts nothing twice: a linear that follows reads the
    cast tensor and does not cast it again, and a tensor that comes in cast stays as it is. Saves nothing.

    Args:
        forward: cast the main tensor; its role is ``"input"``.
        backward: cast the gradient; its role is ``"grad_output"``. A recipe's ``backward_override`` switches it off.
    """

    forward: bool = True
    backward: bool = False

    passes_input: ClassVar[bool] = True
    accepts_quantized_input: ClassVar[bool] = True
    accepts_quantized_grad: ClassVar[bool] = True
    shares_quantizers: ClassVar[bool] = False
    fwd_args_type: ClassVar[type[Any]] = QuantizeArgs
    bwd_args_type: ClassVar[type[Any]] = QuantizeArgs

    forward_impl = staticmethod(_forward)
    forward_fake = staticmethod(_forward_fake)
    backward_impl = staticmethod(_backward)
    backward_fake = staticmethod(_backward_fake)
    forward_work = staticmethod(_work)
    backward_work = staticmethod(_work)

    def __post_init__(self) -> None:
        for name in ("forward", "backward"):
            if not isinstance(getattr(self, name), bool):
                raise type_error("Quantize", name, "a bool", repr(getattr(self, name)))

    @property
    def forward_quantizers(self) -> tuple[str, ...]:  # type: ignore[override]
        """``("input",)`` if the main tensor is cast."""
        return ("input",) if self.forward else ()

    @property
    def backward_quantizers(self) -> tuple[str, ...]:  # type: ignore[override]
        """``("grad_output",)`` if the gradient is cast."""
        return ("grad_output",) if self.backward else ()

    def copies(self, role: str, requires_grad: OpRequiresGrad) -> tuple[bool, bool]:
        """Both: who reads the tensor is not known."""
        del role, requires_grad
        return True, True

    def check(self, input_: TensorSpec, params: Any, extra_inputs: tuple[Any, ...], where: str) -> None:
        """A floating input."""
        del params, extra_inputs
        check_float(input_, "input", where)

    def resolve_fwd_args(
        self,
        input_: TensorOrQuantized,
        *,
        params: Any,
        state: dict[str, BoundQuantizer],
        requires_grad: OpRequiresGrad,
        backend: str = "reference",
    ) -> QuantizeArgs:
        """The forward bundle."""
        del params, requires_grad
        return QuantizeArgs(tensor=input_, quantizer=state.get("input"), backend=backend)

    def resolve_bwd_args(self, ctx: BackwardContext, grad_output: TensorOrQuantized) -> QuantizeArgs:
        """The backward bundle."""
        return QuantizeArgs(tensor=grad_output, quantizer=ctx.quantizers.get("grad_output"), backend=ctx.backend)
