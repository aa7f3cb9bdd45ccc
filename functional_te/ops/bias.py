"""Bias: ``y = x + b`` on the last dimension."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch

from functional_te import pytree
from functional_te.kernels import kernels
from functional_te.ops.common import (
    TensorOrQuantized,
    amaxes,
    check_last_dim,
    check_param,
    check_size,
    quantized_spec,
)
from functional_te.ops.op import BackwardContext, BwdResult, FwdResult, Op, OpRequiresGrad
from functional_te.ops.work import per_element
from functional_te.quantization.tensor import BoundQuantizer
from functional_te.tensor_spec import TensorSpec

__all__ = ["Bias", "BiasBackwardArgs", "BiasForwardArgs"]


@pytree.bundle
class BiasForwardArgs:
    """Bundle of the forward: ``input_ [..., size]`` and ``bias [size]``."""

    input_: torch.Tensor
    bias: torch.Tensor


@pytree.bundle
class BiasBackwardArgs:
    """Bundle of the backward.

    Attributes:
        grad_output: ``[..., size]``.
        grad_input_quantizer: the previous op's gradient quantizer; None returns the gradient unchanged.
        needs_bias: whether the bias needs a gradient.
        backend: name of the kernel backend.
    """

    grad_output: torch.Tensor
    grad_input_quantizer: BoundQuantizer | None = None
    needs_bias: bool = pytree.static(default=True)
    backend: str = pytree.static(default="reference")


def _forward(args: BiasForwardArgs) -> FwdResult:
    return FwdResult(args.input_ + args.bias)


def _forward_fake(args: BiasForwardArgs) -> FwdResult:
    return FwdResult(args.input_.with_(dtype=torch.promote_types(args.input_.dtype, args.bias.dtype)))  # type: ignore[attr-defined]


def _backward(args: BiasBackwardArgs) -> BwdResult:
    k = kernels(args.backend)
    if args.grad_input_quantizer is None:
        return BwdResult(None, (k.bias_grad(args.grad_output) if args.needs_bias else None,))
    dx, amax, db = k.cast_bias(args.grad_output, args.grad_input_quantizer, needs_bias=args.needs_bias)
    return BwdResult(dx, (db,), (), amaxes(grad_input=amax))


def _backward_fake(args: BiasBackwardArgs) -> BwdResult:
    dy: Any = args.grad_output
    db = dy.with_(shape=dy.shape[-1:]) if args.needs_bias else None
    if args.grad_input_quantizer is None:
        return BwdResult(None, (db,))
    dx, amax = quantized_spec(dy, args.grad_input_quantizer)
    return BwdResult(dx, (db,), (), amaxes(grad_input=amax))


@dataclasses.dataclass(frozen=True, eq=False)
class Bias(Op):
    """``y = x + b``, in torch's promoted dtype. Backward: ``dx = dy``, ``db = sum of dy over the leading dims``.

    If the previous op casts gradients, ``dy`` is cast in the same step. Saves nothing.

    Args:
        size: size of the last dimension.

    Parameters: ``bias [size]``, zeros (unlike ``torch.nn.Linear``).
    """

    size: int

    param_names: ClassVar[tuple[str, ...]] = ("bias",)
    quantizes_grad_input: ClassVar[bool] = True
    fwd_args_type: ClassVar[type[Any]] = BiasForwardArgs
    bwd_args_type: ClassVar[type[Any]] = BiasBackwardArgs

    forward_impl = staticmethod(_forward)
    forward_fake = staticmethod(_forward_fake)
    backward_impl = staticmethod(_backward)
    backward_fake = staticmethod(_backward_fake)
    forward_work = staticmethod(per_element(1, folds=True))
    backward_work = staticmethod(per_element(1))

    def __post_init__(self) -> None:
        check_size(self.size, "Bias", "size")

    def param_specs(self, dtype: torch.dtype, device: torch.device | str) -> dict[str, TensorSpec]:
        """``bias [size]``."""
        return {"bias": TensorSpec((self.size,), dtype, device)}

    def init_params(
        self, generator: torch.Generator, dtype: torch.dtype, device: torch.device | str
    ) -> dict[str, torch.Tensor]:
        """Zeros."""
        del generator
        return {"bias": torch.zeros(self.size, dtype=dtype, device=device)}

    def check(self, input_: TensorSpec, params: Any, extra_inputs: tuple[Any, ...], where: str) -> None:
        """Last dimension and bias shape."""
        del extra_inputs
        check_last_dim(input_, self.size, where)
        check_param(params, "bias", (self.size,), where)

    def resolve_fwd_args(
        self,
        input_: TensorOrQuantized,
        *,
        params: Any,
        state: dict[str, BoundQuantizer],
        requires_grad: OpRequiresGrad,
    ) -> BiasForwardArgs:
        """The forward bundle."""
        del state, requires_grad
        return BiasForwardArgs(input_=input_, bias=params["bias"])  # type: ignore[arg-type]

    def resolve_bwd_args(self, ctx: BackwardContext, grad_output: torch.Tensor) -> BiasBackwardArgs:
        """The backward bundle."""
        return BiasBackwardArgs(
            grad_output=grad_output,
            grad_input_quantizer=ctx.prev_op_grad_output_quantizer,
            needs_bias=ctx.requires_grad.params[0],
            backend=ctx.backend,
        )
