"""LayerNorm: ``y = g * (x - mean(x)) / sqrt(var(x) + eps) + b``."""

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

__all__ = ["LayerNorm", "LayerNormBackwardArgs", "LayerNormForwardArgs", "LayerNormSaved"]


@pytree.bundle
class LayerNormForwardArgs:
    """Bundle of the forward.

    Attributes:
        input_: ``[..., *normalized_shape]``.
        weight: ``[*normalized_shape]``.
        bias: ``[*normalized_shape]``.
        output_quantizer: the next op's input quantizer.
        dtype: the dtype of the output.
        eps: added to the variance.
        zero_centered_gamma: whether the gain is ``1 + weight``.
        backend: name of the kernel backend.
    """

    input_: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor
    output_quantizer: BoundQuantizer | None = None
    dtype: torch.dtype = pytree.static(default=torch.float32)
    eps: float = pytree.static(default=1e-5)
    zero_centered_gamma: bool = pytree.static(default=False)
    backend: str = pytree.static(default="reference")


@pytree.node
class LayerNormStats:
    """Statistics of the forward: float32, one value per row."""

    mean: torch.Tensor
    rstd: torch.Tensor


@pytree.node
class LayerNormSaved:
    """Kept for the backward: the input, the gain parameter and the statistics."""

    input_: torch.Tensor
    weight: torch.Tensor
    stats: LayerNormStats


@pytree.bundle
class LayerNormBackwardArgs:
    """Bundle of the backward.

    Attributes:
        grad_output: ``[..., *normalized_shape]``.
        input_: the saved input.
        weight: the gain parameter.
        stats: the saved statistics.
        zero_centered_gamma: whether the gain is ``1 + weight``.
        needs_input: whether the input needs a gradient.
        needs_weight: whether the gain needs a gradient.
        needs_bias: whether the bias needs a gradient.
        backend: name of the kernel backend.
    """

    grad_output: torch.Tensor
    input_: torch.Tensor
    weight: torch.Tensor
    stats: LayerNormStats
    zero_centered_gamma: bool = pytree.static(default=False)
    needs_input: bool = pytree.static(default=True)
    needs_weight: bool = pytree.static(default=True)
    needs_bias: bool = pytree.static(default=True)
    backend: str = pytree.static(default="reference")


def _forward(args: LayerNormForwardArgs) -> FwdResult:
    k = kernels(args.backend)
    output, amax, mean, rstd = k.layer_norm(
        args.input_,
        args.weight,
        args.bias,
        eps=args.eps,
        zero_centered_gamma=args.zero_centered_gamma,
        dtype=args.dtype,
        bound=args.output_quantizer,
    )
    return FwdResult(output, LayerNormStats(mean=mean, rstd=rstd), (), amaxes(output=amax))


def _forward_fake(args: LayerNormForwardArgs) -> FwdResult:
    x: Any = args.input_
    output, amax = spec_store(x, args.dtype, args.output_quantizer)
    stat = x.with_(shape=x.shape[: len(x.shape) - len(args.weight.shape)], dtype=torch.float32)
    return FwdResult(output, LayerNormStats(mean=stat, rstd=stat), (), amaxes(output=amax))


def _setup_context(args: LayerNormForwardArgs, aux: LayerNormStats) -> LayerNormSaved:
    return LayerNormSaved(input_=args.input_, weight=args.weight, stats=aux)


def _backward(args: LayerNormBackwardArgs) -> BwdResult:
    dx, dw, db = kernels(args.backend).layer_norm_grad(
        args.grad_output,
        args.input_,
        args.weight,
        args.stats.mean,
        args.stats.rstd,
        zero_centered_gamma=args.zero_centered_gamma,
        dtype=args.grad_output.dtype,
        needs_input=args.needs_input,
        needs_affine=args.needs_weight or args.needs_bias,
    )
    return BwdResult(dx, (dw if args.needs_weight else None, db if args.needs_bias else None))


def _backward_fake(args: LayerNormBackwardArgs) -> BwdResult:
    weight: Any = args.weight
    return BwdResult(
        args.grad_output if args.needs_input else None,
        (weight if args.needs_weight else None, weight if args.needs_bias else None),
    )


@dataclasses.dataclass(frozen=True, eq=False)
class LayerNorm(Op):
    """``y = g * (x - mean) * rstd + b`` with ``rstd = 1 / sqrt(mean((x - mean)**2) + eps)`` (Ba et al., 2016).

    Statistics and affine are float32 with one rounding. Output dtype: autocast's, else the weight's. With ``q = g dy``
    and ``xh = (x - mean) rstd``: ``dx = rstd (q - mean(q) - xh mean(q xh))``, ``dweight = sum dy xh``,
    ``dbias = sum dy``.

    Args:
        normalized_shape: the trailing dimensions, an int or an iterable of ints.
        eps: added to the variance.
        zero_centered_gamma: the gain is ``1 + weight`` and the weight starts at 0.

    Parameters: ``weight``, ones (zeros if zero-centered), and ``bias``, zeros, both ``[*normalized_shape]``.
    """

    normalized_shape: tuple[int, ...]
    eps: float = 1e-5
    zero_centered_gamma: bool = False

    param_names: ClassVar[tuple[str, ...]] = ("weight", "bias")
    quantizes_output: ClassVar[bool] = True
    fwd_args_type: ClassVar[type[Any]] = LayerNormForwardArgs
    bwd_args_type: ClassVar[type[Any]] = LayerNormBackwardArgs

    forward_impl = staticmethod(_forward)
    forward_fake = staticmethod(_forward_fake)
    backward_impl = staticmethod(_backward)
    backward_fake = staticmethod(_backward_fake)
    setup_context = staticmethod(_setup_context)
    forward_work = staticmethod(per_element(7, kind="rows"))
    backward_work = staticmethod(per_element(12, kind="rows"))

    def __post_init__(self) -> None:
        object.__setattr__(self, "normalized_shape", normalized_shape_of(self.normalized_shape, "LayerNorm"))

    def param_specs(self, dtype: torch.dtype, device: torch.device | str) -> dict[str, TensorSpec]:
        """``weight`` and ``bias``, both ``[*normalized_shape]``."""
        spec = TensorSpec(self.normalized_shape, dtype, device)
        return {"weight": spec, "bias": spec}

    def init_params(
        self, generator: torch.Generator, dtype: torch.dtype, device: torch.device | str
    ) -> dict[str, torch.Tensor]:
        """Gain 1, bias 0."""
        del generator
        start = 0.0 if self.zero_centered_gamma else 1.0
        return {
            "weight": torch.full(self.normalized_shape, start, dtype=dtype, device=device),
            "bias": torch.zeros(self.normalized_shape, dtype=dtype, device=device),
        }

    def check(self, input_: TensorSpec, params: Any, extra_inputs: tuple[Any, ...], where: str) -> None:
        """Trailing dimensions and parameter shapes."""
        del extra_inputs
        check_normalized(input_, self.normalized_shape, where)
        check_param(params, "weight", self.normalized_shape, where)
        check_param(params, "bias", self.normalized_shape, where)

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
    ) -> LayerNormForwardArgs:
        """The forward bundle."""
        del state, requires_grad
        weight = params["weight"]
        return LayerNormForwardArgs(
            input_=input_,  # type: ignore[arg-type]
            weight=weight,
            bias=params["bias"],
            output_quantizer=next_op_input_quantizer,
            dtype=weight.dtype if compute_dtype is None else compute_dtype,
            eps=self.eps,
            zero_centered_gamma=self.zero_centered_gamma,
            backend=backend,
        )

    def resolve_bwd_args(self, ctx: BackwardContext, grad_output: torch.Tensor) -> LayerNormBackwardArgs:
        """The backward bundle."""
        needs = ctx.requires_grad
        return LayerNormBackwardArgs(
            grad_output=grad_output,
            input_=ctx.saved.input_,
            weight=ctx.saved.weight,
            stats=ctx.saved.stats,
            zero_centered_gamma=self.zero_centered_gamma,
            needs_input=needs.input,
            needs_weight=needs.params[0],
            needs_bias=needs.params[1],
            backend=ctx.backend,
        )
