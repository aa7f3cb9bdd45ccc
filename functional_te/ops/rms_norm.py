"""RMSNorm: ``y = g * x / sqrt(mean(x**2) + eps)``."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch

from functional_te import pytree
from functional_te.kernels import kernels
from functional_te.ops.common import (
    TensorOrQuantized,
    amaxes,
    check_normalized,
    check_param,
    normalized_shape_of,
    spec_store,
)
from functional_te.ops.op import BackwardContext, BwdResult, FwdResult, Op, OpRequiresGrad
from functional_te.ops.work import per_element
from functional_te.quantization.tensor import BoundQuantizer
from functional_te.tensor_spec import TensorSpec

__all__ = ["RMSNorm", "RMSNormBackwardArgs", "RMSNormForwardArgs", "RMSNormSaved"]


@pytree.bundle
class RMSNormForwardArgs:
    """Bundle of the forward.

    Attributes:
        input_: ``[..., *normalized_shape]``.
        weight: ``[*normalized_shape]``.
        output_quantizer: the next op's input quantizer.
        dtype: the dtype of the output.
        eps: added to the mean square.
        zero_centered_gamma: whether the gain is ``1 + weight``.
        backend: name of the kernel backend.
    """

    input_: torch.Tensor
    weight: torch.Tensor
    output_quantizer: BoundQuantizer | None = None
    dtype: torch.dtype = pytree.static(default=torch.float32)
    eps: float = pytree.static(default=1e-5)
    zero_centered_gamma: bool = pytree.static(default=False)
    backend: str = pytree.static(default="reference")


@pytree.node
class RMSNormSaved:
    """Kept for the backward: the input, the parameter and ``rstd`` (float32, one value per row)."""

    input_: torch.Tensor
    weight: torch.Tensor
    rstd: torch.Tensor


@pytree.bundle
class RMSNormBackwardArgs:
    """Bundle of the backward.

    Attributes:
        grad_output: ``[..., *normalized_shape]``; None where a fused op still has to compute it.
        input_: the saved input.
        weight: the parameter.
        rstd: the saved reciprocal root mean square.
        add: a gradient to add to the input gradient (a residual branch), or None.
        zero_centered_gamma: whether the gain is ``1 + weight``.
        needs_input: whether the input needs a gradient.
        needs_weight: whether the weight needs a gradient.
        backend: name of the kernel backend.
    """

    grad_output: torch.Tensor | None
    input_: torch.Tensor
    weight: torch.Tensor
    rstd: torch.Tensor
    add: torch.Tensor | None = None
    zero_centered_gamma: bool = pytree.static(default=False)
    needs_input: bool = pytree.static(default=True)
    needs_weight: bool = pytree.static(default=True)
    backend: str = pytree.static(default="reference")


def _forward(args: RMSNormForwardArgs) -> FwdResult:
    k = kernels(args.backend)
    output, amax, rstd, _ = k.rms_norm(
        args.input_,
        args.weight,
        eps=args.eps,
        zero_centered_gamma=args.zero_centered_gamma,
        dtype=args.dtype,
        bound=args.output_quantizer,
    )
    return FwdResult(output, rstd, (), amaxes(output=amax))


def _forward_fake(args: RMSNormForwardArgs) -> FwdResult:
    x: Any = args.input_
    output, amax = spec_store(x, args.dtype, args.output_quantizer)
    rstd = x.with_(shape=x.shape[: len(x.shape) - len(args.weight.shape)], dtype=torch.float32)
    return FwdResult(output, rstd, (), amaxes(output=amax))


def _setup_context(args: RMSNormForwardArgs, aux: torch.Tensor) -> RMSNormSaved:
    return RMSNormSaved(input_=args.input_, weight=args.weight, rstd=aux)


def rms_norm_backward(args: RMSNormBackwardArgs) -> BwdResult:
    """Gradients ``dx`` (plus ``add``) and ``dweight``, in the dtypes of the incoming gradient and the weight."""
    dy = args.grad_output
    assert dy is not None
    dx, dw = kernels(args.backend).rms_norm_grad(
        dy,
        args.input_,
        args.weight,
        args.rstd,
        zero_centered_gamma=args.zero_centered_gamma,
        dtype=dy.dtype,
        add=args.add,
        needs_input=args.needs_input,
        needs_weight=args.needs_weight,
    )
    return BwdResult(dx, (dw,))


def rms_norm_backward_fake(args: RMSNormBackwardArgs) -> BwdResult:
    """The twin of :func:`rms_norm_backward` over :class:`TensorSpec`."""
    weight: Any = args.weight
    return BwdResult(args.grad_output if args.needs_input else None, (weight if args.needs_weight else None,))


@dataclasses.dataclass(frozen=True, eq=False)
class RMSNorm(Op):
    """``y = g * x * rstd`` with ``rstd = 1 / sqrt(mean(x**2) + eps)`` (Zhang and Sennrich, 2019).

    Statistics and gain are float32 with one rounding. Output dtype: autocast's, else the weight's. With ``q = g dy``
    and ``xh = x rstd``: ``dx = rstd (q - xh mean(q xh))``, ``dweight = sum dy xh``.

    Args:
        normalized_shape: the trailing dimensions, an int or an iterable of ints.
        eps: added to the mean square.
        zero_centered_gamma: the gain is ``1 + weight`` and the weight starts at 0.

    Parameters: ``weight [*normalized_shape]``, ones (zeros if zero-centered).
    """

    normalized_shape: tuple[int, ...]
    eps: float = 1e-5
    zero_centered_gamma: bool = False

    param_names: ClassVar[tuple[str, ...]] = ("weight",)
    quantizes_output: ClassVar[bool] = True
    fwd_args_type: ClassVar[type[Any]] = RMSNormForwardArgs
    bwd_args_type: ClassVar[type[Any]] = RMSNormBackwardArgs

    forward_impl = staticmethod(_forward)
    forward_fake = staticmethod(_forward_fake)
    backward_impl = staticmethod(rms_norm_backward)
    backward_fake = staticmethod(rms_norm_backward_fake)
    setup_context = staticmethod(_setup_context)
    forward_work = staticmethod(per_element(4, kind="rows"))
    backward_work = staticmethod(per_element(9, kind="rows"))

    def __post_init__(self) -> None:
        object.__setattr__(self, "normalized_shape", normalized_shape_of(self.normalized_shape, "RMSNorm"))

    def param_specs(self, dtype: torch.dtype, device: torch.device | str) -> dict[str, TensorSpec]:
        """``weight [*normalized_shape]``."""
        return {"weight": TensorSpec(self.normalized_shape, dtype, device)}

    def init_params(
        self, generator: torch.Generator, dtype: torch.dtype, device: torch.device | str
    ) -> dict[str, torch.Tensor]:
        """Gain 1."""
        del generator
        start = 0.0 if self.zero_centered_gamma else 1.0
        return {"weight": torch.full(self.normalized_shape, start, dtype=dtype, device=device)}

    def check(self, input_: TensorSpec, params: Any, extra_inputs: tuple[Any, ...], where: str) -> None:
        """Trailing dimensions and weight shape."""
        del extra_inputs
        check_normalized(input_, self.normalized_shape, where)
        check_param(params, "weight", self.normalized_shape, where)

    def resolve_fwd_args(
        self,
        input_: TensorOrQuantized,
        *,
        params: Any,
        state: dict[str, BoundQuantizer],
        requires_grad: OpRequiresGrad,
        next_op_input_quantizer: BoundQuantizer | None = None,
        compute_dtype: torch.dtype | None = None,
        backend: str = "reference",
    ) -> RMSNormForwardArgs:
        """The forward bundle."""
        del state, requires_grad
        weight = params["weight"]
        return RMSNormForwardArgs(
            input_=input_,  # type: ignore[arg-type]
            weight=weight,
            output_quantizer=next_op_input_quantizer,
            dtype=weight.dtype if compute_dtype is None else compute_dtype,
            eps=self.eps,
            zero_centered_gamma=self.zero_centered_gamma,
            backend=backend,
        )

    def resolve_bwd_args(self, ctx: BackwardContext, grad_output: torch.Tensor) -> RMSNormBackwardArgs:
        """The backward bundle."""
        return rms_norm_backward_args(self, ctx, grad_output)


def rms_norm_backward_args(
    op: RMSNorm, ctx: BackwardContext, grad_output: torch.Tensor | None, add: torch.Tensor | None = None
) -> RMSNormBackwardArgs:
    """The backward bundle of ``op``, optionally with a gradient to add."""
    saved = ctx.saved
    return RMSNormBackwardArgs(
        grad_output=grad_output,
        input_=saved.input_,
        weight=saved.weight,
        rstd=saved.rstd,
        add=add,
        zero_centered_gamma=op.zero_centered_gamma,
        needs_input=ctx.requires_grad.input,
        needs_weight=ctx.requires_grad.params[0],
        backend=ctx.backend,
    )
