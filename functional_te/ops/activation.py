"""Activations without extra inputs: unary ones, and gated ones whose non-linearity acts on the first half."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch

from functional_te import pytree
from functional_te._errors import type_error, value_error
from functional_te._value import NO_CONSTANTS, Constants
from functional_te.kernels import kernels
from functional_te.ops.common import (
    TensorOrQuantized,
    amaxes,
    check_float,
    check_number,
    dense,
    quantized_spec,
    spec_store,
)
from functional_te.ops.op import BackwardContext, BwdResult, FwdResult, Op, OpRequiresGrad
from functional_te.ops.work import Work, elements
from functional_te.quantization.quantizers import Float8CurrentScalingQuantizer
from functional_te.quantization.tensor import BoundQuantizer
from functional_te.tensor_spec import TensorSpec

__all__ = [
    "GEGLU",
    "GELU",
    "GLU",
    "QGEGLU",
    "QGELU",
    "Activation",
    "ActivationBackwardArgs",
    "ActivationForwardArgs",
    "ActivationSaved",
    "ClampedSwiGLU",
    "ErfGELU",
    "GatedActivation",
    "ReGLU",
    "ReLU",
    "SReGLU",
    "SReLU",
    "SiLU",
    "SiTUGLU",
    "SwiGLU",
]

# the input kept for the backward with cache_quantized_input
INPUT_CACHE = BoundQuantizer(quantizer=Float8CurrentScalingQuantizer(dtype=torch.float8_e4m3fn))


@pytree.bundle
class ActivationForwardArgs:
    """Bundle of the forward.

    Attributes:
        input_: ``[..., size]``.
        output_quantizer: the next op's input quantizer.
        kind: name in the table of formulas.
        gated: whether the output has half the size.
        config: constants of the formula.
        interleave: block size of an interleaved gated layout, 0 for two halves.
        dtype: the dtype of the output.
        cache_quantized_input: keep the input for the backward as per-tensor current-scaled E4M3.
        saves: whether there will be a backward.
        backend: name of the kernel backend.
    """

    input_: TensorOrQuantized
    output_quantizer: BoundQuantizer | None = None
    kind: str = pytree.static(default="relu")
    gated: bool = pytree.static(default=False)
    config: Constants = pytree.static(default=NO_CONSTANTS)
    interleave: int = pytree.static(default=0)
    dtype: torch.dtype = pytree.static(default=torch.float32)
    cache_quantized_input: bool = pytree.static(default=False)
    saves: bool = pytree.static(default=True)
    backend: str = pytree.static(default="reference")


@pytree.node
class ActivationSaved:
    """Kept for the backward: the input, as it was or cached in FP8, and the compute dtype."""

    input_: TensorOrQuantized
    dtype: torch.dtype = pytree.static(default=torch.float32)


@pytree.bundle
class ActivationBackwardArgs:
    """Bundle of the backward.

    Attributes:
        grad_output: gradient of the output.
        input_: the saved input.
        grad_input_quantizer: the previous op's gradient quantizer.
        kind: name in the table of formulas.
        config: constants of the formula.
        interleave: block size of an interleaved gated layout, 0 for two halves.
        dtype: the dtype of the input gradient.
        backend: name of the kernel backend.
    """

    grad_output: torch.Tensor
    input_: TensorOrQuantized
    grad_input_quantizer: BoundQuantizer | None = None
    kind: str = pytree.static(default="relu")
    config: Constants = pytree.static(default=NO_CONSTANTS)
    interleave: int = pytree.static(default=0)
    dtype: torch.dtype = pytree.static(default=torch.float32)
    backend: str = pytree.static(default="reference")


def _forward(args: ActivationForwardArgs) -> FwdResult:
    k = kernels(args.backend)
    x = dense(args.input_, args.dtype)
    output, amax = k.activation(
        x, args.kind, args.config.values, args.interleave, dtype=args.dtype, bound=args.output_quantizer
    )
    cached = k.quantize(x, INPUT_CACHE, args.dtype)[0] if args.cache_quantized_input and args.saves else None
    return FwdResult(output, cached, (), amaxes(output=amax))


def _forward_fake(args: ActivationForwardArgs) -> FwdResult:
    x: Any = args.input_
    if not isinstance(x, TensorSpec):
        x = TensorSpec(x.shape, args.dtype, x.device)
    shape = (*x.shape[:-1], x.shape[-1] // 2) if args.gated else x.shape
    output, amax = spec_store(x.with_(shape=shape), args.dtype, args.output_quantizer)
    caches = args.cache_quantized_input and args.saves
    cached = quantized_spec(x.with_(dtype=args.dtype), INPUT_CACHE)[0] if caches else None
    return FwdResult(output, cached, (), amaxes(output=amax))


def _setup_context(args: ActivationForwardArgs, aux: TensorOrQuantized | None) -> ActivationSaved:
    return ActivationSaved(input_=args.input_ if aux is None else aux, dtype=args.dtype)


def activation_grad(
    args: ActivationBackwardArgs, bound: BoundQuantizer | None, needs_bias: bool | None = None
) -> tuple[Any, torch.Tensor | None, torch.Tensor | None]:
    """Input gradient of a backward bundle, its amax, and a bias gradient; see :meth:`Backend.activation_grad`."""
    return kernels(args.backend).activation_grad(
        args.grad_output,
        dense(args.input_, args.dtype),
        args.kind,
        args.config.values,
        args.interleave,
        dtype=args.dtype,
        bound=bound,
        needs_bias=needs_bias,
    )


def _backward(args: ActivationBackwardArgs) -> BwdResult:
    dx, amax, _ = activation_grad(args, args.grad_input_quantizer)
    return BwdResult(dx, (), (), amaxes(grad_input=amax))


def _backward_fake(args: ActivationBackwardArgs) -> BwdResult:
    spec = TensorSpec(tuple(args.input_.shape), args.dtype, args.grad_output.device)
    dx, amax = spec_store(spec, args.dtype, args.grad_input_quantizer)
    return BwdResult(dx, (), (), amaxes(grad_input=amax))


# operations for each element of the output, forward and backward, counted as in ops/work.py
OPERATIONS = {
    "gelu": (9, 18),
    "erf_gelu": (5, 10),
    "qgelu": (5, 11),
    "silu": (4, 9),
    "relu": (1, 2),
    "srelu": (2, 4),
    "glu": (4, 9),
    "geglu": (10, 21),
    "qgeglu": (6, 14),
    "reglu": (2, 5),
    "sreglu": (3, 7),
    "swiglu": (5, 12),
    "situglu": (12, 26),
    "clamped_swiglu": (9, 18),
    "tanh_srelu": (5, 10),
}


def activation_forward_work(args: Any, result: FwdResult) -> Work:
    """The operations of the formula."""
    return Work(flops=OPERATIONS[args.kind][0] * elements(args, result)) if args.kind in OPERATIONS else Work()


def activation_backward_work(args: Any, result: BwdResult) -> Work:
    """The operations of the derivative."""
    del result
    return Work(flops=OPERATIONS[args.kind][1] * args.grad_output.numel()) if args.kind in OPERATIONS else Work()


def set_constants(op: Any, *names: str, positive: tuple[str, ...]) -> None:
    """Check the fields that are the constants of an activation's formula, make them floats, and set ``config``.

    Args:
        op: an activation in the making.
        names: the fields, in the order in which the formula takes them.
        positive: which of them have to exceed 0.

    Raises:
        TypeError: one is no number.
        ValueError: one is not finite, or not positive.
    """
    for name in names:
        number = check_number(getattr(op, name), type(op).__name__, name, positive=name in positive)
        object.__setattr__(op, name, number)
    object.__setattr__(op, "config", Constants(tuple(getattr(op, name) for name in names)))


@dataclasses.dataclass(frozen=True, eq=False)
class Activation(Op):
    """Base of the activations. Arithmetic is float32 with one rounding; the output has the input's dtype.

    Args:
        cache_quantized_input: keep the input for the backward as per-tensor current-scaled E4M3 (a quarter of the
            bytes of float32).
    """

    cache_quantized_input: bool = False

    kind: ClassVar[str] = ""
    # the constants of the formula; of classes that have some, an attribute of the instance
    config: ClassVar[Constants] = NO_CONSTANTS
    gated: ClassVar[bool] = False
    accepts_quantized_input: ClassVar[bool] = True
    quantizes_output: ClassVar[bool] = True
    quantizes_grad_input: ClassVar[bool] = True
    fwd_args_type: ClassVar[type[Any]] = ActivationForwardArgs
    bwd_args_type: ClassVar[type[Any]] = ActivationBackwardArgs

    forward_impl = staticmethod(_forward)
    forward_fake = staticmethod(_forward_fake)
    backward_impl = staticmethod(_backward)
    backward_fake = staticmethod(_backward_fake)
    setup_context = staticmethod(_setup_context)
    forward_work = staticmethod(activation_forward_work)
    backward_work = staticmethod(activation_backward_work)

    @property
    def interleave(self) -> int:
        """Block size of an interleaved gated layout, 0 for two halves."""
        return 0

    def check(self, input_: TensorSpec, params: Any, extra_inputs: tuple[Any, ...], where: str) -> None:
        """A floating input; for gated forms a last dimension that splits."""
        del params, extra_inputs
        check_float(input_, "input", where)
        if not self.gated:
            return
        unit = 2 * max(self.interleave, 1)
        if len(input_.shape) == 0 or input_.shape[-1] % unit:
            raise value_error(where, "input", f"a last dimension divisible by {unit}", f"shape {tuple(input_.shape)}")

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
    ) -> ActivationForwardArgs:
        """The forward bundle."""
        del params, state
        return ActivationForwardArgs(
            input_=input_,
            output_quantizer=next_op_input_quantizer,
            kind=self.kind,
            gated=self.gated,
            config=self.config,
            interleave=self.interleave,
            dtype=input_.dtype if compute_dtype is None else compute_dtype,
            cache_quantized_input=self.cache_quantized_input,
            saves=requires_grad.input,
            backend=backend,
        )

    def resolve_bwd_args(self, ctx: BackwardContext, grad_output: torch.Tensor) -> ActivationBackwardArgs:
        """The backward bundle. An interleaved layout is never cast: its gradient is permuted after the math."""
        return ActivationBackwardArgs(
            grad_output=grad_output,
            input_=ctx.saved.input_,
            grad_input_quantizer=None if self.interleave else ctx.prev_op_grad_output_quantizer,
            kind=self.kind,
            config=self.config,
            interleave=self.interleave,
            dtype=ctx.saved.dtype,
            backend=ctx.backend,
        )


@dataclasses.dataclass(frozen=True, eq=False)
class GatedActivation(Activation):
    """Base of the gated activations: the last dimension is two halves ``[a | b]``, ``y = phi(a) * b``.

    The non-linearity acts on the *first* half, unlike :func:`torch.nn.functional.glu`.
    """

    gated: ClassVar[bool] = True


@dataclasses.dataclass(frozen=True, eq=False)
class GELU(Activation):
    """``0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x**3)))`` (Hendrycks and Gimpel, 2016; tanh form)."""

    kind: ClassVar[str] = "gelu"


@dataclasses.dataclass(frozen=True, eq=False)
class ErfGELU(Activation):
    """``0.5 x (1 + erf(x / sqrt(2)))`` (Hendrycks and Gimpel, 2016; exact form).

    What :func:`torch.nn.functional.gelu` computes by default; Transformer Engine has none.
    """

    kind: ClassVar[str] = "erf_gelu"


@dataclasses.dataclass(frozen=True, eq=False)
class QGELU(Activation):
    """``x * sigmoid(1.702 x)``."""

    kind: ClassVar[str] = "qgelu"


@dataclasses.dataclass(frozen=True, eq=False)
class SiLU(Activation):
    """``x * sigmoid(x)``."""

    kind: ClassVar[str] = "silu"


@dataclasses.dataclass(frozen=True, eq=False)
class ReLU(Activation):
    """``max(x, 0)``."""

    kind: ClassVar[str] = "relu"


@dataclasses.dataclass(frozen=True, eq=False)
class SReLU(Activation):
    """``max(x, 0)**2`` (So et al., 2021)."""

    kind: ClassVar[str] = "srelu"


@dataclasses.dataclass(frozen=True, eq=False)
class GLU(GatedActivation):
    """``sigmoid(a) * b`` (Dauphin et al., 2017)."""

    kind: ClassVar[str] = "glu"


@dataclasses.dataclass(frozen=True, eq=False)
class GEGLU(GatedActivation):
    """``gelu(a) * b`` (Shazeer, 2020; tanh form)."""

    kind: ClassVar[str] = "geglu"


@dataclasses.dataclass(frozen=True, eq=False)
class QGEGLU(GatedActivation):
    """``a * sigmoid(1.702 a) * b``."""

    kind: ClassVar[str] = "qgeglu"


@dataclasses.dataclass(frozen=True, eq=False)
class ReGLU(GatedActivation):
    """``max(a, 0) * b`` (Shazeer, 2020)."""

    kind: ClassVar[str] = "reglu"


@dataclasses.dataclass(frozen=True, eq=False)
class SReGLU(GatedActivation):
    """``max(a, 0)**2 * b``."""

    kind: ClassVar[str] = "sreglu"


@dataclasses.dataclass(frozen=True, eq=False)
class InterleavedActivation(GatedActivation):
    """Base of the gated activations whose halves may be interleaved.

    Args:
        cache_quantized_input: see :class:`Activation`.
        glu_interleave_size: block size ``s`` of a last dimension laid out ``[a_0..a_{s-1}, b_0..b_{s-1}, a_s..]``;
            None for two halves.
    """

    glu_interleave_size: int | None = None

    def __post_init__(self) -> None:
        size = self.glu_interleave_size
        if size is None:
            return
        where = type(self).__name__
        if not isinstance(size, int) or isinstance(size, bool):
            raise type_error(where, "glu_interleave_size", "None or an int", repr(size))
        if size < 1:
            raise value_error(where, "glu_interleave_size", "at least 1", size)

    @property
    def interleave(self) -> int:
        """Block size of the interleaved layout, 0 for two halves."""
        return self.glu_interleave_size or 0


@dataclasses.dataclass(frozen=True, eq=False)
class SwiGLU(InterleavedActivation):
    """``silu(a) * b`` (Shazeer, 2020)."""

    kind: ClassVar[str] = "swiglu"


@dataclasses.dataclass(frozen=True, eq=False)
class SiTUGLU(InterleavedActivation):
    """``beta1 tanh(a / beta1) sigmoid(a) * beta2 tanh(b / beta2)``.

    Args:
        beta1: bound of the gate, finite and positive.
        beta2: bound of the linear half, finite and positive.
        cache_quantized_input: see :class:`Activation`.
        glu_interleave_size: see :class:`InterleavedActivation`.
    """

    beta1: float = 4.0
    beta2: float = 25.0

    kind: ClassVar[str] = "situglu"

    def __post_init__(self) -> None:
        InterleavedActivation.__post_init__(self)
        set_constants(self, "beta1", "beta2", positive=("beta1", "beta2"))


@dataclasses.dataclass(frozen=True, eq=False)
class ClampedSwiGLU(InterleavedActivation):
    """``m sigmoid(alpha m) * (clamp(b, -limit, limit) + glu_linear_offset)`` with ``m = min(a, limit)``.

    Gradients flow at the boundaries. The gate has an upper bound only.

    Args:
        limit: the clamp.
        alpha: slope inside the sigmoid.
        glu_linear_offset: added to the clamped linear half.
        cache_quantized_input: see :class:`Activation`.
        glu_interleave_size: see :class:`InterleavedActivation`.
    """

    limit: float = 7.0
    alpha: float = 1.702
    glu_linear_offset: float = 1.0

    kind: ClassVar[str] = "clamped_swiglu"

    def __post_init__(self) -> None:
        InterleavedActivation.__post_init__(self)
        set_constants(self, "limit", "alpha", "glu_linear_offset", positive=("limit",))
