"""AdaptiveLayerNorm: ``y = (x - mean) * rstd * (1 + scale) + shift``, scale and shift being inputs."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch

from functional_te import pytree
from functional_te._errors import value_error
from functional_te.kernels import kernels
from functional_te.ops.common import amaxes, check_channel, check_float, check_last_dim, check_number, spec_store
from functional_te.ops.layer_norm import LayerNormStats
from functional_te.ops.op import BackwardContext, BwdResult, FwdResult, Op, OpRequiresGrad
from functional_te.ops.work import per_element
from functional_te.quantization.tensor import BoundQuantizer
from functional_te.tensor_spec import TensorSpec

__all__ = [
    "AdaptiveLayerNorm",
    "AdaptiveLayerNormBackwardArgs",
    "AdaptiveLayerNormForwardArgs",
    "AdaptiveLayerNormSaved",
]

_MAX_HIDDEN_SIZE = 16384


@pytree.bundle
class AdaptiveLayerNormForwardArgs:
    """Bundle of the forward.

    Attributes:
        input_: ``[..., hidden]``.
        scale: ``[batch, hidden]``, or the input's rank with dimensions of size one between.
        shift: likewise.
        output_quantizer: the next op's input quantizer.
        eps: added to the variance.
        batch_dim: dimension of the input that scale and shift have rows for.
        backend: name of the kernel backend.
    """

    input_: torch.Tensor
    scale: torch.Tensor
    shift: torch.Tensor
    output_quantizer: BoundQuantizer | None = None
    eps: float = pytree.static(default=1e-5)
    batch_dim: int = pytree.static(default=0)
    backend: str = pytree.static(default="reference")


@pytree.node
class AdaptiveLayerNormSaved:
    """Kept for the backward: input and scale, a view without elements of the shift, and the statistics."""

    input_: torch.Tensor
    scale: torch.Tensor
    shift_like: torch.Tensor
    stats: LayerNormStats


@pytree.bundle
class AdaptiveLayerNormBackwardArgs:
    """Bundle of the backward.

    Attributes:
        grad_output: ``[..., hidden]``.
        input_: the saved input.
        scale: the saved scale.
        shift_like: a tensor with the shape and dtype of the shift.
        stats: the saved statistics.
        batch_dim: see :class:`AdaptiveLayerNormForwardArgs`.
        needs_input: whether the input needs a gradient.
        needs_scale: whether the scale needs a gradient.
        needs_shift: whether the shift needs a gradient.
        backend: name of the kernel backend.
    """

    grad_output: torch.Tensor
    input_: torch.Tensor
    scale: torch.Tensor
    shift_like: torch.Tensor
    stats: LayerNormStats
    batch_dim: int = pytree.static(default=0)
    needs_input: bool = pytree.static(default=True)
    needs_scale: bool = pytree.static(default=True)
    needs_shift: bool = pytree.static(default=True)
    backend: str = pytree.static(default="reference")


def adaptive_forward(args: AdaptiveLayerNormForwardArgs) -> FwdResult:
    """The implementation of the forward."""
    k = kernels(args.backend)
    y, mean, rstd = k.adaptive_layer_norm_forward(
        args.input_, args.scale, args.shift, eps=args.eps, batch_dim=args.batch_dim
    )
    output, amax = k.store(y, args.input_.dtype, args.output_quantizer)
    return FwdResult(output, LayerNormStats(mean=mean, rstd=rstd), (), amaxes(output=amax))


def adaptive_forward_fake(args: AdaptiveLayerNormForwardArgs) -> FwdResult:
    """The twin of :func:`adaptive_forward` over :class:`TensorSpec`."""
    x: Any = args.input_
    output, amax = spec_store(x, x.dtype, args.output_quantizer)
    stat = x.with_(shape=x.shape[:-1], dtype=torch.float32)
    return FwdResult(output, LayerNormStats(mean=stat, rstd=stat), (), amaxes(output=amax))


def _setup_context(args: AdaptiveLayerNormForwardArgs, aux: LayerNormStats) -> AdaptiveLayerNormSaved:
    shift_like = args.shift.new_empty(()).expand(args.shift.shape)
    return AdaptiveLayerNormSaved(input_=args.input_, scale=args.scale, shift_like=shift_like, stats=aux)


def _backward(args: AdaptiveLayerNormBackwardArgs) -> BwdResult:
    needs = (args.needs_input, args.needs_scale, args.needs_shift)
    found = kernels(args.backend).adaptive_layer_norm_backward(
        args.grad_output,
        args.input_,
        args.scale,
        args.stats.mean,
        args.stats.rstd,
        batch_dim=args.batch_dim,
        needs=needs,
    )
    like = (args.input_, args.scale, args.shift_like)
    dx, dscale, dshift = (
        None if grad is None else grad.reshape(own.shape).to(own.dtype) for grad, own in zip(found, like, strict=True)
    )
    return BwdResult(dx, (), (dscale, dshift))


def _backward_fake(args: AdaptiveLayerNormBackwardArgs) -> BwdResult:
    return BwdResult(
        args.input_ if args.needs_input else None,
        (),
        (args.scale if args.needs_scale else None, args.shift_like if args.needs_shift else None),
    )


@dataclasses.dataclass(frozen=True, eq=False)
class AdaptiveLayerNorm(Op):
    """``y = xh (1 + scale) + shift`` with ``xh = (x - mean) rstd`` and ``rstd = 1 / sqrt(mean((x - mean)**2) + eps)``.

    LayerNorm of the last dimension, without parameters and modulated per sample (Peebles and Xie, 2023). Extra inputs:
    scale and shift, each ``[batch, hidden]`` or of the input's rank with every dimension but batch and last equal to
    1, in any float dtype. Arithmetic is float32 with one rounding; output and ``dx`` have the input's dtype, also
    under autocast. With ``q = dy (1 + scale)``: ``dx = rstd (q - mean(q) - xh mean(q xh))``, and over the dimensions
    that share them ``dscale = sum dy xh`` and ``dshift = sum dy``, in their own shapes and dtypes.

    Args:
        hidden_size: size of the last dimension, in [1, 16384].
        eps: added to the variance, finite and not negative.
        batch_dim: the dimension that scale and shift have rows for; not the last.
        scale_channel: take the scale from this channel instead of from the caller.
        shift_channel: take the shift from this channel instead of from the caller.

    Raises:
        ValueError: an argument out of these ranges.
    """

    hidden_size: int
    eps: float = 1e-5
    batch_dim: int = 0
    scale_channel: str | None = None
    shift_channel: str | None = None

    num_extra_inputs: ClassVar[int] = 2
    extra_input_fields: ClassVar[tuple[str, ...]] = ("scale_channel", "shift_channel")
    quantizes_output: ClassVar[bool] = True
    fwd_args_type: ClassVar[type[Any]] = AdaptiveLayerNormForwardArgs
    bwd_args_type: ClassVar[type[Any]] = AdaptiveLayerNormBackwardArgs

    forward_impl = staticmethod(adaptive_forward)
    forward_fake = staticmethod(adaptive_forward_fake)
    backward_impl = staticmethod(_backward)
    backward_fake = staticmethod(_backward_fake)
    setup_context = staticmethod(_setup_context)
    forward_work = staticmethod(per_element(7, kind="rows"))
    backward_work = staticmethod(per_element(12, kind="rows"))

    def __post_init__(self) -> None:
        where = "AdaptiveLayerNorm"
        if type(self.hidden_size) is not int or not 1 <= self.hidden_size <= _MAX_HIDDEN_SIZE:
            raise value_error(where, "hidden_size", f"an int in [1, {_MAX_HIDDEN_SIZE}]", repr(self.hidden_size))
        if type(self.batch_dim) is not int or self.batch_dim < 0:
            raise value_error(where, "batch_dim", "an int of at least 0", repr(self.batch_dim))
        object.__setattr__(self, "eps", check_number(self.eps, where, "eps", least=0))
        for name in self.extra_input_fields:
            check_channel(getattr(self, name), where, name)

    def check(self, input_: TensorSpec, params: Any, extra_inputs: tuple[Any, ...], where: str) -> None:
        """The input's rank and last dimension, and the shapes of scale and shift."""
        del params
        check_last_dim(input_, self.hidden_size, where)
        shape = tuple(input_.shape)
        if len(shape) < 2:
            raise value_error(where, "input", "at least two dimensions", f"shape {shape}")
        if self.batch_dim >= len(shape) - 1:
            wanted = f"a dimension {self.batch_dim} (batch_dim) before the last"
            raise value_error(where, "input", wanted, f"shape {shape}")
        flat = (shape[self.batch_dim], shape[-1])
        full = tuple(size if dim in (self.batch_dim, len(shape) - 1) else 1 for dim, size in enumerate(shape))
        for slot, name in enumerate(("scale", "shift")):
            extra = extra_inputs[slot]
            check_float(extra, f"extra input {slot} ({name})", where)
            if tuple(extra.shape) not in (flat, full):
                wanted = f"shape {flat}" + (f" or {full}" if full != flat else "")
                raise value_error(where, f"extra input {slot} ({name})", wanted, f"shape {tuple(extra.shape)}")

    def resolve_fwd_args(
        self,
        input_: torch.Tensor,
        *,
        params: Any,
        state: Any,
        requires_grad: OpRequiresGrad,
        extra_inputs: tuple[torch.Tensor, ...],
        next_op_input_quantizer: BoundQuantizer | None = None,
        backend: str = "reference",
    ) -> AdaptiveLayerNormForwardArgs:
        """The forward bundle."""
        del params, state, requires_grad
        return AdaptiveLayerNormForwardArgs(
            input_=input_,
            scale=extra_inputs[0],
            shift=extra_inputs[1],
            output_quantizer=next_op_input_quantizer,
            eps=self.eps,
            batch_dim=self.batch_dim,
            backend=backend,
        )

    def resolve_bwd_args(self, ctx: BackwardContext, grad_output: torch.Tensor) -> AdaptiveLayerNormBackwardArgs:
        """The backward bundle."""
        needs = ctx.requires_grad
        return AdaptiveLayerNormBackwardArgs(
            grad_output=grad_output,
            input_=ctx.saved.input_,
            scale=ctx.saved.scale,
            shift_like=ctx.saved.shift_like,
            stats=ctx.saved.stats,
            batch_dim=self.batch_dim,
            needs_input=needs.input,
            needs_scale=needs.extra_inputs[0],
            needs_shift=needs.extra_inputs[1],
            backend=ctx.backend,
        )
