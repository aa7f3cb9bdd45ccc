"""Forward: ``y = act(x @ W.T + b)`` in one step; bias and activation are each optional, but not both absent."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch

from functional_te import pytree
from functional_te._value import NO_CONSTANTS, Constants
from functional_te.fuser.rule import FusionRule, Slot, Window
from functional_te.kernels import kernels
from functional_te.ops import Activation, BasicLinear, Bias, FusedOp, FwdResult, Op, OpRequiresGrad
from functional_te.ops.activation import INPUT_CACHE, ActivationSaved
from functional_te.ops.common import TensorOrQuantized, amaxes, quantized_spec, spec_store
from functional_te.ops.products import (
    LinearForwardArgs,
    LinearSaved,
    linear_output_spec,
    operand_specs,
    operands,
    refuse_parallel,
    saved_operands,
)
from functional_te.quantization.tensor import BoundQuantizer

__all__ = ["FORWARD_LINEAR_BIAS_ACTIVATION", "ForwardLinearBiasActivation", "LinearBiasActivationArgs"]


@pytree.bundle
class LinearBiasActivationArgs:
    """Bundle: a linear's, the bias, and the static fields of the activation.

    Attributes:
        linear: bundle of the product, without an output quantizer.
        bias: ``[out_features]``, or None.
        output_quantizer: the next op's input quantizer.
        activation: name in the table of formulas, or an empty string.
        gated: whether the activation halves the size.
        config: constants of the formula.
        interleave: block size of an interleaved gated layout.
        dtype: dtype of the output.
        cache_quantized_input: see :class:`functional_te.ops.Activation`.
        saves_activation: whether the backward needs the activation's input.
    """

    linear: LinearForwardArgs
    bias: torch.Tensor | None = None
    output_quantizer: BoundQuantizer | None = None
    activation: str = pytree.static(default="")
    gated: bool = pytree.static(default=False)
    config: Constants = pytree.static(default=NO_CONSTANTS)
    interleave: int = pytree.static(default=0)
    dtype: torch.dtype = pytree.static(default=torch.float32)
    cache_quantized_input: bool = pytree.static(default=False)
    saves_activation: bool = pytree.static(default=False)


def _forward(args: LinearBiasActivationArgs) -> FwdResult:
    k = kernels(args.linear.backend)
    x, w, aux, observed = operands(args.linear)
    y: Any = k.gemm_nt(x, w, dtype=args.linear.dtype, bias=args.bias)
    kept = None
    if args.activation:
        if args.saves_activation:
            kept = k.quantize(y, INPUT_CACHE, args.dtype)[0] if args.cache_quantized_input else y
        output, amax = k.activation(
            y, args.activation, args.config.values, args.interleave, dtype=args.dtype, bound=args.output_quantizer
        )
    else:
        output, amax = k.store(y, args.dtype, args.output_quantizer)
    return FwdResult(output, (aux, kept), (), amaxes(observed, output=amax))


def _forward_fake(args: LinearBiasActivationArgs) -> FwdResult:
    aux, observed = operand_specs(args.linear)
    y: Any = linear_output_spec(args.linear)
    if args.bias is not None:
        y = y.with_(dtype=torch.promote_types(y.dtype, args.bias.dtype))
    kept = None
    if args.activation:
        if args.saves_activation:
            caches = args.cache_quantized_input
            kept = quantized_spec(y.with_(dtype=args.dtype), INPUT_CACHE)[0] if caches else y
        if args.gated:
            y = y.with_(shape=(*y.shape[:-1], y.shape[-1] // 2))
    output, amax = spec_store(y, args.dtype, args.output_quantizer)
    return FwdResult(output, (aux, kept), (), amaxes(observed, output=amax))


def _setup_context(args: LinearBiasActivationArgs, aux: Any) -> tuple[Any, ...]:
    linear: LinearSaved = saved_operands(args.linear, aux[0])
    saved: tuple[Any, ...] = (linear,) if args.bias is None else (linear, ())
    if args.activation:
        saved = (*saved, ActivationSaved(input_=aux[1], dtype=args.dtype) if args.saves_activation else None)
    return saved


@dataclasses.dataclass(frozen=True, eq=False)
class ForwardLinearBiasActivation(FusedOp):
    """BasicLinear, [Bias], [Activation]."""

    quantizes_output: ClassVar[bool] = True
    fwd_args_type: ClassVar[type[Any]] = LinearBiasActivationArgs

    forward_impl = staticmethod(_forward)
    forward_fake = staticmethod(_forward_fake)
    setup_context = staticmethod(_setup_context)

    def resolve_fwd_args(
        self,
        input_: TensorOrQuantized,
        *,
        params: tuple[Any, ...],
        state: tuple[Any, ...],
        requires_grad: tuple[OpRequiresGrad, ...],
        next_op_input_quantizer: BoundQuantizer | None = None,
        compute_dtype: torch.dtype | None = None,
        backward_override: str | None = None,
        backend: str = "reference",
    ) -> LinearBiasActivationArgs:
        """The forward bundle."""
        linear, last = self.ops[0], self.ops[-1]
        assert isinstance(linear, BasicLinear)
        linear_args = linear.resolve_fwd_args(
            input_,
            params=params[0],
            state=state[0],
            requires_grad=requires_grad[0],
            compute_dtype=compute_dtype,
            backward_override=backward_override,
            backend=backend,
        )
        bias = params[1]["bias"] if isinstance(self.ops[1], Bias) else None
        dtype = linear_args.dtype if bias is None else torch.promote_types(linear_args.dtype, bias.dtype)
        if not isinstance(last, Activation):
            return LinearBiasActivationArgs(
                linear=linear_args,
                bias=bias,
                output_quantizer=next_op_input_quantizer,
                config=NO_CONSTANTS,
                dtype=dtype,
            )
        return LinearBiasActivationArgs(
            linear=linear_args,
            bias=bias,
            output_quantizer=next_op_input_quantizer,
            activation=last.kind,
            gated=last.gated,
            config=last.config,
            interleave=last.interleave,
            dtype=dtype if compute_dtype is None else compute_dtype,
            cache_quantized_input=last.cache_quantized_input,
            saves_activation=requires_grad[-1].input,
        )


def _build(ops: tuple[Op, ...]) -> ForwardLinearBiasActivation:
    return ForwardLinearBiasActivation(ops)


def _refuse(window: Window) -> str | None:
    if len(window.ops) == 1:
        return "a linear alone is nothing to fuse"
    return refuse_parallel(window.ops[0], "row")


FORWARD_LINEAR_BIAS_ACTIVATION = FusionRule(
    name="forward_linear_bias_activation",
    pattern=(Slot((BasicLinear,)), Slot((Bias,), optional=True), Slot((Activation,), optional=True)),
    build=_build,
    refuse=_refuse,
)
