"""What te.ops keeps in the contexts of its basic ops, translated to and from what the functional ops keep.

A hook that replaces the forward of built-in ops saves what te.ops' backwards read; one that replaces their backward
reads what te.ops' forwards save. One entry of :data:`TRANSLATORS` per family of ops:

==================  ===============================================  =============================================
op                  saved tensors                                    attributes
==================  ===============================================  =============================================
BasicLinear         input or None, weight                            ``dtype``, ``with_quantized_compute``,
                                                                     ``backward_override``, four quantizers,
                                                                     ``input_requires_grad``,
                                                                     ``weight_requires_grad``
activations         input                                            ``dtype``, ``prev_op_grad_output_quantizer``
scaled activations  input, row scale                                 ``dtype``, ``input_requires_grad``,
                                                                     ``extra_input_requires_grad``
RMSNorm             input, rstd                                      ``dtype``
LayerNorm           input, mean, rstd                                ``dtype``
L2Normalization     input, factor per row
Reshape                                                              ``input_shape``
Bias                                                                 ``grad_input_quantizer``
the others          nothing
==================  ===============================================  =============================================

Tensors that were saved in low precision are handed out as the values they stand for. A gradient is cast by the op that
reads it, so the quantizers of neighbours are None.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

import functional_te as fte
from bridge.ops.context import HookSaved, OperationContext, reopened
from bridge.ops.quantizer_view import QuantizerView
from functional_te.ops import Activation, BackwardContext, Op
from functional_te.ops.activation import ActivationSaved
from functional_te.ops.common import dense
from functional_te.ops.l2_normalization import L2Normalization, L2NormalizationSaved
from functional_te.ops.layer_norm import LayerNormSaved, LayerNormStats
from functional_te.ops.products import LinearSaved
from functional_te.ops.rms_norm import RMSNormSaved
from functional_te.ops.scaled_activation import ScaledActivation, ScaledSaved
from functional_te.ops.structural import ShapeOf

__all__ = ["TRANSLATORS", "Translator", "native_from_te", "te_from_native"]


class FromTe(NamedTuple):
    """What a translation from te.ops' form sees: the op, its module and parameters, the tensors and the context."""

    op: Any
    module: Any
    params: Mapping[str, Any]
    tensors: tuple[Any, ...]
    ctx: OperationContext
    main_input: torch.Tensor


class Translator(NamedTuple):
    """Both directions for one family of ops.

    Attributes:
        saved: how many tensors te.ops saves.
        to_native: from te.ops' form to the pytree that the functional backward reads.
        to_te: from a functional backward context to the tensors; sets attributes on the context it gets.
    """

    saved: int
    to_native: Callable[[FromTe], Any]
    to_te: Callable[[Any, Any, BackwardContext, OperationContext], tuple[Any, ...]]


def _values(x: Any) -> Any:
    return None if x is None else dense(x)


def _like_input(own: FromTe, x: torch.Tensor, trailing: tuple[int, ...] | None = None) -> torch.Tensor:
    """``x`` with the leading dimensions of the chain's tensors; te.ops keeps matrices."""
    features = trailing or tuple(x.shape[-1:])
    leading = tuple(own.main_input.shape[: own.main_input.dim() - len(features)])
    if math.prod(leading) * math.prod(features) == x.numel():
        return x.reshape(*leading, *features)
    return x


# BasicLinear


def _linear_to_native(own: FromTe) -> LinearSaved:
    x, weight = own.tensors
    if weight is None:
        weight = own.params["weight"]
    return LinearSaved(input_=x, weight=weight, dtype=getattr(own.ctx, "dtype", None) or weight.dtype)


def _linear_to_te(op: Any, module: Any, native: BackwardContext, ctx: OperationContext) -> tuple[Any, ...]:
    del op
    saved, bound = native.saved, native.quantizers.get("grad_output")
    states = {role: state for role, _, state in module.named_states()}
    ctx.__dict__.update(
        with_quantized_compute=bound is not None,
        backward_override=None,
        input_quantizer=None,
        weight_quantizer=None,
        grad_output_quantizer=None
        if bound is None
        else QuantizerView(bound.quantizer, states.get("grad_output"), bound),
        grad_input_quantizer=None,
        dtype=saved.dtype,
        input_requires_grad=native.requires_grad.input,
        weight_requires_grad=native.requires_grad.params[0],
    )
    weight = module.weight if saved.weight is None else _values(saved.weight)
    return _values(saved.input_), weight


# activations


def _activation_to_native(own: FromTe) -> ActivationSaved:
    (x,) = own.tensors
    return ActivationSaved(input_=x, dtype=getattr(own.ctx, "dtype", None) or x.dtype)


def _activation_to_te(op: Any, module: Any, native: BackwardContext, ctx: OperationContext) -> tuple[Any, ...]:
    del op, module
    ctx.__dict__.update(dtype=native.saved.dtype, prev_op_grad_output_quantizer=None)
    return (_values(native.saved.input_),)


def _scaled_to_native(own: FromTe) -> ScaledSaved:
    x, scale = own.tensors
    return ScaledSaved(input_=x, scale=scale, dtype=getattr(own.ctx, "dtype", None) or x.dtype)


def _scaled_to_te(op: Any, module: Any, native: BackwardContext, ctx: OperationContext) -> tuple[Any, ...]:
    del op, module
    ctx.__dict__.update(
        dtype=native.saved.dtype,
        input_requires_grad=native.requires_grad.input,
        extra_input_requires_grad=native.requires_grad.extra_inputs[0],
    )
    return native.saved.input_, native.saved.scale


# normalizations


def _rms_norm_to_native(own: FromTe) -> RMSNormSaved:
    x, rstd = own.tensors
    x = _like_input(own, x, tuple(own.op.normalized_shape))
    leading = x.shape[: x.dim() - len(own.op.normalized_shape)]
    return RMSNormSaved(input_=x, weight=own.params["weight"], rstd=rstd.reshape(leading))


def _rms_norm_to_te(op: Any, module: Any, native: BackwardContext, ctx: OperationContext) -> tuple[Any, ...]:
    del module
    saved = native.saved
    ctx.__dict__.update(dtype=saved.input_.dtype)
    return saved.input_.reshape(-1, math.prod(op.normalized_shape)), saved.rstd.reshape(-1)


def _layer_norm_to_native(own: FromTe) -> LayerNormSaved:
    x, mean, rstd = own.tensors
    x = _like_input(own, x, tuple(own.op.normalized_shape))
    leading = x.shape[: x.dim() - len(own.op.normalized_shape)]
    stats = LayerNormStats(mean=mean.reshape(leading), rstd=rstd.reshape(leading))
    return LayerNormSaved(input_=x, weight=own.params["weight"], stats=stats)


def _layer_norm_to_te(op: Any, module: Any, native: BackwardContext, ctx: OperationContext) -> tuple[Any, ...]:
    del module
    saved = native.saved
    ctx.__dict__.update(dtype=saved.input_.dtype)
    rows = saved.input_.reshape(-1, math.prod(op.normalized_shape))
    return rows, saved.stats.mean.reshape(-1), saved.stats.rstd.reshape(-1)


def _l2_to_native(own: FromTe) -> L2NormalizationSaved:
    x, rho = own.tensors
    x = _like_input(own, x)
    return L2NormalizationSaved(input_=x, rho=rho.reshape(x.shape[:-1]))


def _l2_to_te(op: Any, module: Any, native: BackwardContext, ctx: OperationContext) -> tuple[Any, ...]:
    del op, module, ctx
    return native.saved.input_, native.saved.rho.unsqueeze(-1)


# structure


def _reshape_to_native(own: FromTe) -> ShapeOf:
    shape = getattr(own.ctx, "input_shape", own.main_input.shape)
    return ShapeOf(template=own.main_input.new_empty(()).expand(tuple(shape)))


def _reshape_to_te(op: Any, module: Any, native: BackwardContext, ctx: OperationContext) -> tuple[Any, ...]:
    del op, module
    ctx.__dict__.update(input_shape=native.saved.template.shape)
    return ()


def _nothing_to_native(own: FromTe) -> Any:
    del own
    return ()


def _nothing_to_te(op: Any, module: Any, native: BackwardContext, ctx: OperationContext) -> tuple[Any, ...]:
    del module, native
    if isinstance(op, fte.Bias):
        ctx.__dict__.update(grad_input_quantizer=None)
    return ()


_NOTHING = Translator(0, _nothing_to_native, _nothing_to_te)

TRANSLATORS: dict[type[Op], Translator] = {
    fte.BasicLinear: Translator(2, _linear_to_native, _linear_to_te),
    Activation: Translator(1, _activation_to_native, _activation_to_te),
    ScaledActivation: Translator(2, _scaled_to_native, _scaled_to_te),
    L2Normalization: Translator(2, _l2_to_native, _l2_to_te),
    fte.RMSNorm: Translator(2, _rms_norm_to_native, _rms_norm_to_te),
    fte.LayerNorm: Translator(3, _layer_norm_to_native, _layer_norm_to_te),
    fte.Reshape: Translator(0, _reshape_to_native, _reshape_to_te),
    fte.Bias: _NOTHING,
    fte.ConstantScale: _NOTHING,
    fte.AddExtraInput: _NOTHING,
    fte.MakeExtraOutput: _NOTHING,
    fte.Identity: _NOTHING,
    fte.Quantize: _NOTHING,
}


def _translator(op: Op) -> Translator:
    for kind in type(op).__mro__:
        if kind in TRANSLATORS:
            return TRANSLATORS[kind]
    raise RuntimeError(
        f"{type(op).__name__}: its context has no form in te.ops: a fusion of one direction cannot cover it. "
        "Register one of both directions with register_forward_backward_fusion()."
    )


def native_from_te(op: Op, module: Any, params: Mapping[str, Any], ctx: OperationContext, main_input: Any) -> Any:
    """What the functional backward of ``op`` reads, from what a forward hook saved.

    Raises:
        RuntimeError: another number of saved tensors than te.ops', or an op whose context has no such form.
    """
    translator, tensors = _translator(op), tuple(ctx.to_save)
    if len(tensors) != translator.saved:
        raise RuntimeError(
            f"{type(op).__name__}: the forward of a fusion saved {len(tensors)} tensors in its context; its backward "
            f"reads {translator.saved}."
        )
    return translator.to_native(FromTe(op, module, params, tensors, ctx, main_input))


def te_from_native(op: Op, module: Any, native: BackwardContext) -> OperationContext:
    """The context that a backward hook reads, from what the functional forward of ``op`` saved."""
    ctx = OperationContext(native.requires_grad.any)
    if native.saved is None:  # an op before the first that takes part
        ctx.loaded = ()
        return ctx
    if isinstance(native.saved, HookSaved):
        return reopened(native.saved, native.requires_grad.any)
    ctx.loaded = _translator(op).to_te(op, module, native, ctx)
    return ctx
