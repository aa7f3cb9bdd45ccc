"""L2Normalization: ``y = x / sqrt(sum(x**2) + eps)`` over the last dimension."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch

from functional_te import pytree
from functional_te._errors import value_error
from functional_te.kernels import kernels
from functional_te.ops.common import check_float, check_number
from functional_te.ops.op import BackwardContext, BwdResult, FwdResult, Op, OpRequiresGrad
from functional_te.ops.work import per_element
from functional_te.tensor_spec import TensorSpec

__all__ = ["L2Normalization", "L2NormalizationBackwardArgs", "L2NormalizationForwardArgs", "L2NormalizationSaved"]


@pytree.bundle
class L2NormalizationForwardArgs:
    """Bundle of the forward.

    Attributes:
        input_: ``[..., size]``.
        eps: added to the sum of squares.
        backend: name of the kernel backend.
    """

    input_: torch.Tensor
    eps: float = pytree.static(default=1e-6)
    backend: str = pytree.static(default="reference")


@pytree.node
class L2NormalizationSaved:
    """Kept for the backward: the input, and ``rho`` (float32, one value per row)."""

    input_: torch.Tensor
    rho: torch.Tensor


@pytree.bundle
class L2NormalizationBackwardArgs:
    """Bundle of the backward.

    Attributes:
        grad_output: ``[..., size]``.
        input_: the saved input.
        rho: the saved reciprocal norm.
        backend: name of the kernel backend.
    """

    grad_output: torch.Tensor
    input_: torch.Tensor
    rho: torch.Tensor
    backend: str = pytree.static(default="reference")


def _rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x if x.dtype is dtype else x.to(dtype)


def _forward(args: L2NormalizationForwardArgs) -> FwdResult:
    y, rho = kernels(args.backend).l2_norm_forward(args.input_, eps=args.eps)
    return FwdResult(_rounded(y, args.input_.dtype), rho)


def _forward_fake(args: Any) -> FwdResult:
    x = args.input_
    return FwdResult(x, x.with_(shape=x.shape[:-1], dtype=torch.float32))


def _setup_context(args: L2NormalizationForwardArgs, aux: torch.Tensor) -> L2NormalizationSaved:
    return L2NormalizationSaved(input_=args.input_, rho=aux)


def _backward(args: L2NormalizationBackwardArgs) -> BwdResult:
    dx = kernels(args.backend).l2_norm_backward(args.grad_output, args.input_, args.rho)
    return BwdResult(_rounded(dx, args.input_.dtype))


def _backward_fake(args: Any) -> BwdResult:
    return BwdResult(args.input_)


@dataclasses.dataclass(frozen=True, eq=False)
class L2Normalization(Op):
    """``y = x rho`` with ``s = sum(x**2) + eps`` over the last dimension and ``rho = 1 / sqrt(s)``.

    Arithmetic is float32 with one rounding. Output and gradient have the input's dtype, also under autocast.
    ``dx = rho (dy - x sum(x dy) / s)``. Keeps the input and ``rho``.

    Args:
        eps: added to the sum of squares, finite and not negative.

    Raises:
        ValueError: another ``eps``.
    """

    eps: float = 1e-6

    fwd_args_type: ClassVar[type[Any]] = L2NormalizationForwardArgs
    bwd_args_type: ClassVar[type[Any]] = L2NormalizationBackwardArgs

    forward_impl = staticmethod(_forward)
    forward_fake = staticmethod(_forward_fake)
    backward_impl = staticmethod(_backward)
    backward_fake = staticmethod(_backward_fake)
    setup_context = staticmethod(_setup_context)
    forward_work = staticmethod(per_element(3, kind="rows"))
    backward_work = staticmethod(per_element(6, kind="rows"))

    def __post_init__(self) -> None:
        object.__setattr__(self, "eps", check_number(self.eps, "L2Normalization", "eps", least=0))

    def check(self, input_: TensorSpec, params: Any, extra_inputs: tuple[Any, ...], where: str) -> None:
        """A floating input with a last dimension."""
        del params, extra_inputs
        check_float(input_, "input", where)
        if len(input_.shape) == 0:
            raise value_error(where, "input", "at least one dimension", "shape ()")

    def resolve_fwd_args(
        self,
        input_: torch.Tensor,
        *,
        params: Any,
        state: Any,
        requires_grad: OpRequiresGrad,
        backend: str = "reference",
    ) -> L2NormalizationForwardArgs:
        """The forward bundle."""
        del params, state, requires_grad
        return L2NormalizationForwardArgs(input_=input_, eps=self.eps, backend=backend)

    def resolve_bwd_args(self, ctx: BackwardContext, grad_output: torch.Tensor) -> L2NormalizationBackwardArgs:
        """The backward bundle."""
        return L2NormalizationBackwardArgs(
            grad_output=grad_output, input_=ctx.saved.input_, rho=ctx.saved.rho, backend=ctx.backend
        )
