"""Activations times a scale per row, which is an extra input: ``y = p * act(x)``.

A mixture of experts weights each token by its routing probability here, between the two grouped products. All math is
float32 with one rounding. The scale is rounded to the compute dtype first, and its gradient is rounded to that dtype.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch

from functional_te import pytree
from functional_te._errors import type_error, value_error
from functional_te._value import NO_CONSTANTS, Constants
from functional_te.kernels import kernels
from functional_te.ops.activation import activation_backward_work, activation_forward_work, set_constants
from functional_te.ops.common import check_channel, check_float
from functional_te.ops.op import BackwardContext, BwdResult, FwdResult, Op, OpRequiresGrad
from functional_te.quantization.quantizer import rows_of
from functional_te.tensor_spec import TensorSpec

__all__ = [
    "ScaledActivation",
    "ScaledBackwardArgs",
    "ScaledClampedQGeGLU",
    "ScaledForwardArgs",
    "ScaledGatedActivation",
    "ScaledSReLU",
    "ScaledSaved",
    "ScaledSiTUGLU",
    "ScaledSwiGLU",
    "ScaledTanhSReLU",
]

INTERLEAVE_MULTIPLE = 32


@pytree.bundle
class ScaledForwardArgs:
    """Bundle of the forward.

    Attributes:
        input_: ``[..., size]``; None inside of the bundle of a fusion that makes it.
        scale: one number per row.
        kind: name in the table of formulas.
        gated: whether the output has half the size.
        config: constants of the formula.
        interleave: block size of an interleaved gated layout, 0 for two halves.
        dtype: the dtype of the output.
        backend: name of the kernel backend.
    """

    input_: torch.Tensor | None
    scale: torch.Tensor
    kind: str = pytree.static(default="srelu")
    gated: bool = pytree.static(default=False)
    config: Constants = pytree.static(default=NO_CONSTANTS)
    interleave: int = pytree.static(default=0)
    dtype: torch.dtype = pytree.static(default=torch.float32)
    backend: str = pytree.static(default="reference")


@pytree.node
class ScaledSaved:
    """Kept for the backward: the input, the scale, and the compute dtype."""

    input_: torch.Tensor
    scale: torch.Tensor
    dtype: torch.dtype = pytree.static(default=torch.float32)


@pytree.bundle
class ScaledBackwardArgs:
    """Bundle of the backward.

    Attributes:
        grad_output: gradient of the output; None inside of the bundle of a fusion that makes it.
        input_: the saved input.
        scale: the saved scale.
        kind: name in the table of formulas.
        config: constants of the formula.
        interleave: block size of an interleaved gated layout, 0 for two halves.
        dtype: the compute dtype, and the dtype of the input gradient.
        wants_input: whether the input gradient is needed.
        wants_scale: whether the gradient of the scale is needed.
        backend: name of the kernel backend.
    """

    grad_output: torch.Tensor | None
    input_: torch.Tensor
    scale: torch.Tensor
    kind: str = pytree.static(default="srelu")
    config: Constants = pytree.static(default=NO_CONSTANTS)
    interleave: int = pytree.static(default=0)
    dtype: torch.dtype = pytree.static(default=torch.float32)
    wants_input: bool = pytree.static(default=True)
    wants_scale: bool = pytree.static(default=True)
    backend: str = pytree.static(default="reference")


def per_row(scale: torch.Tensor, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``scale`` rounded to ``dtype``, as float32 to broadcast against ``x``."""
    return scale.to(dtype).to(torch.float32).reshape(*x.shape[:-1], 1)


def scaled_activation(args: Any) -> torch.Tensor:
    """``p * act(x)`` of a bundle, float32, before any rounding."""
    y = kernels(args.backend).activation_forward(args.input_, args.kind, args.config.values, args.interleave)
    scaled: torch.Tensor = y * per_row(args.scale, args.input_, args.dtype)
    return scaled


def _forward(args: ScaledForwardArgs) -> FwdResult:
    return FwdResult(scaled_activation(args).to(args.dtype))


def _forward_fake(args: ScaledForwardArgs) -> FwdResult:
    return FwdResult(scaled_output_spec(args))


def scaled_output_spec(args: Any) -> TensorSpec:
    """Spec of the output of a forward bundle."""
    x: Any = args.input_
    return TensorSpec((*x.shape[:-1], x.shape[-1] // 2) if args.gated else tuple(x.shape), args.dtype, x.device)


def _setup_context(args: Any, aux: Any) -> ScaledSaved:
    del aux
    return ScaledSaved(input_=args.input_, scale=args.scale, dtype=args.dtype)


def scaled_grads(args: Any) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """``dx = p dy act'(x)`` in the compute dtype and ``dp = sum(dy act(x))`` in that of the scale."""
    k = kernels(args.backend)
    dy = args.grad_output.to(torch.float32)
    how = (args.kind, args.config.values, args.interleave)
    dx = dp = None
    if args.wants_input:
        weighted = dy * per_row(args.scale, args.input_, args.dtype)
        dx = k.activation_backward(weighted, args.input_, *how).to(args.dtype)
    if args.wants_scale:
        dp = (dy * k.activation_forward(args.input_, *how)).sum(-1)
        dp = dp.to(args.dtype).to(args.scale.dtype).reshape(args.scale.shape)
    return dx, dp


def _backward(args: ScaledBackwardArgs) -> BwdResult:
    dx, dp = scaled_grads(args)
    return BwdResult(dx, (), (dp,))


def scaled_grad_specs(args: Any) -> tuple[TensorSpec | None, TensorSpec | None]:
    """The twin of :func:`scaled_grads`."""
    x, scale = args.input_, args.scale
    dx = TensorSpec(tuple(x.shape), args.dtype, x.device) if args.wants_input else None
    dp = TensorSpec(tuple(scale.shape), scale.dtype, scale.device) if args.wants_scale else None
    return dx, dp


def _backward_fake(args: ScaledBackwardArgs) -> BwdResult:
    dx, dp = scaled_grad_specs(args)
    return BwdResult(dx, (), (dp,))


@dataclasses.dataclass(frozen=True, eq=False)
class ScaledActivation(Op):
    """Base of the scaled activations: ``y = p * act(x)`` with ``p``, extra input 0, one number per row.

    The scale has the shape of the leading dimensions of ``x``, or any shape with as many elements. The output has the
    input's dtype, or autocast's. Neighbours' quantizers are not used: output and input gradient are in high precision.

    Args:
        activation_recompute_in_mlp: inside of a fused grouped MLP, compute the activation again in the backward
            instead of keeping it.
        channel: take the scale from this channel instead of from the caller.
    """

    activation_recompute_in_mlp: bool = dataclasses.field(default=False, kw_only=True)
    channel: str | None = dataclasses.field(default=None, kw_only=True)

    kind: ClassVar[str] = ""
    # see Activation
    config: ClassVar[Constants] = NO_CONSTANTS
    gated: ClassVar[bool] = False
    num_extra_inputs: ClassVar[int] = 1
    extra_input_fields: ClassVar[tuple[str, ...]] = ("channel",)
    fwd_args_type: ClassVar[type[Any]] = ScaledForwardArgs
    bwd_args_type: ClassVar[type[Any]] = ScaledBackwardArgs

    forward_impl = staticmethod(_forward)
    forward_fake = staticmethod(_forward_fake)
    backward_impl = staticmethod(_backward)
    backward_fake = staticmethod(_backward_fake)
    setup_context = staticmethod(_setup_context)
    forward_work = staticmethod(activation_forward_work)
    backward_work = staticmethod(activation_backward_work)

    def __post_init__(self) -> None:
        where = type(self).__name__
        check_channel(self.channel, where)
        if not isinstance(self.activation_recompute_in_mlp, bool):
            raise type_error(where, "activation_recompute_in_mlp", "a bool", repr(self.activation_recompute_in_mlp))

    @property
    def interleave(self) -> int:
        """Block size of an interleaved gated layout, 0 for two halves."""
        return 0

    def check(self, input_: TensorSpec, params: Any, extra_inputs: tuple[Any, ...], where: str) -> None:
        """A floating input whose last dimension splits if gated, and a floating scale for each row."""
        del params
        (scale,) = extra_inputs
        check_float(input_, "input", where)
        check_float(scale, "extra input 0", where)
        shape = tuple(input_.shape)
        unit = 2 * max(self.interleave, 1) if self.gated else 1
        if len(shape) == 0 or shape[-1] % unit:
            raise value_error(where, "input", f"a last dimension divisible by {unit}", f"shape {shape}")
        rows = rows_of(shape)
        if scale.numel() != rows:
            wanted = f"one scale for each of {rows} rows, shape {shape[:-1]}"
            raise value_error(where, "extra input 0", wanted, f"shape {tuple(scale.shape)}")

    def resolve_fwd_args(
        self,
        input_: Any,
        *,
        params: Any,
        state: Any,
        requires_grad: OpRequiresGrad,
        extra_inputs: tuple[torch.Tensor, ...],
        compute_dtype: torch.dtype | None = None,
        backend: str = "reference",
    ) -> ScaledForwardArgs:
        """The forward bundle."""
        del params, state, requires_grad
        return ScaledForwardArgs(
            input_=input_,
            scale=extra_inputs[0],
            kind=self.kind,
            gated=self.gated,
            config=self.config,
            interleave=self.interleave,
            dtype=input_.dtype if compute_dtype is None else compute_dtype,
            backend=backend,
        )

    def resolve_bwd_args(self, ctx: BackwardContext, grad_output: Any) -> ScaledBackwardArgs:
        """The backward bundle."""
        return ScaledBackwardArgs(
            grad_output=grad_output,
            input_=ctx.saved.input_,
            scale=ctx.saved.scale,
            kind=self.kind,
            config=self.config,
            interleave=self.interleave,
            dtype=ctx.saved.dtype,
            wants_input=ctx.requires_grad.input,
            wants_scale=ctx.requires_grad.extra_inputs[0],
            backend=ctx.backend,
        )


@dataclasses.dataclass(frozen=True, eq=False)
class ScaledGatedActivation(ScaledActivation):
    """Base of the gated ones: the last dimension is two halves ``[a | b]``, the non-linearity acts on the first.

    Args:
        glu_interleave_size: block size ``s``, a multiple of 32, of a last dimension laid out
            ``[a_0..a_{s-1}, b_0..b_{s-1}, a_s..]``; None for two halves.
        activation_recompute_in_mlp: must be False.
        channel: see :class:`ScaledActivation`.
    """

    glu_interleave_size: int | None = None

    gated: ClassVar[bool] = True

    def __post_init__(self) -> None:
        ScaledActivation.__post_init__(self)
        where, size = type(self).__name__, self.glu_interleave_size
        if self.activation_recompute_in_mlp:
            raise value_error(where, "activation_recompute_in_mlp", "False for a gated activation", True)
        if size is None:
            return
        if not isinstance(size, int) or isinstance(size, bool):
            raise type_error(where, "glu_interleave_size", "None or an int", repr(size))
        if size < 1 or size % INTERLEAVE_MULTIPLE:
            wanted = f"None or a positive multiple of {INTERLEAVE_MULTIPLE}"
            raise value_error(where, "glu_interleave_size", wanted, size)

    @property
    def interleave(self) -> int:
        """Block size of the interleaved layout, 0 for two halves."""
        return self.glu_interleave_size or 0


@dataclasses.dataclass(frozen=True, eq=False)
class ScaledSwiGLU(ScaledGatedActivation):
    """``p * silu(a) * b`` (SwiGLU: Shazeer, 2020)."""

    kind: ClassVar[str] = "swiglu"


@dataclasses.dataclass(frozen=True, eq=False)
class ScaledSiTUGLU(ScaledGatedActivation):
    """``p * beta1 tanh(a / beta1) sigmoid(a) * beta2 tanh(b / beta2)``.

    Args:
        glu_interleave_size: see :class:`ScaledGatedActivation`.
        beta1: bound of the gate, finite and positive.
        beta2: bound of the linear half, finite and positive.
        activation_recompute_in_mlp: must be False.
        channel: see :class:`ScaledActivation`.
    """

    beta1: float = 4.0
    beta2: float = 25.0

    kind: ClassVar[str] = "situglu"

    def __post_init__(self) -> None:
        ScaledGatedActivation.__post_init__(self)
        set_constants(self, "beta1", "beta2", positive=("beta1", "beta2"))


@dataclasses.dataclass(frozen=True, eq=False)
class ScaledClampedQGeGLU(ScaledGatedActivation):
    """``p * m sigmoid(alpha m) * (clamp(b, -limit, limit) + glu_linear_offset)`` with ``m = min(a, limit)``.

    Args:
        glu_interleave_size: see :class:`ScaledGatedActivation`.
        limit: the clamp.
        alpha: slope inside the sigmoid.
        glu_linear_offset: added to the clamped linear half.
        activation_recompute_in_mlp: must be False.
        channel: see :class:`ScaledActivation`.
    """

    limit: float = 7.0
    alpha: float = 1.702
    glu_linear_offset: float = 1.0

    kind: ClassVar[str] = "clamped_swiglu"

    def __post_init__(self) -> None:
        ScaledGatedActivation.__post_init__(self)
        set_constants(self, "limit", "alpha", "glu_linear_offset", positive=("limit",))


@dataclasses.dataclass(frozen=True, eq=False)
class ScaledSReLU(ScaledActivation):
    """``p * max(x, 0)**2`` (squared ReLU: So et al., 2021)."""

    kind: ClassVar[str] = "srelu"


@dataclasses.dataclass(frozen=True, eq=False)
class ScaledTanhSReLU(ScaledActivation):
    """``p * (s tanh(max(x, 0) / s))**2``: a squared ReLU that ``s**2`` bounds.

    Args:
        tanh_clamp_scale: ``s``, finite and positive.
        activation_recompute_in_mlp: see :class:`ScaledActivation`.
        channel: see :class:`ScaledActivation`.
    """

    tanh_clamp_scale: float

    kind: ClassVar[str] = "tanh_srelu"

    def __post_init__(self) -> None:
        ScaledActivation.__post_init__(self)
        set_constants(self, "tanh_clamp_scale", positive=("tanh_clamp_scale",))
