"""The products of a linear layer: bundles, casts of operands, gradients. BasicLinear and its fusions share them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from functional_te import pytree
from functional_te.kernels import kernels
from functional_te.kernels.collectives import finish
from functional_te.ops.common import (
    TensorOrQuantized,
    amaxes,
    one_copy,
    quantized_spec,
    spec_store,
)
from functional_te.ops.op import (
    FLOAT_DTYPES,
    Amaxes,
    BackwardContext,
    BwdResult,
    FwdResult,
)
from functional_te.ops.tensor_parallel import (
    TensorParallel,
    gather_spec,
    gathers,
    reduce_spec,
    reduces,
    start_tp_cast,
    start_tp_gather,
    start_tp_reduce,
    tp_gather,
)
from functional_te.ops.work import Cast, Product, Work
from functional_te.quantization.quantizer import rows_of
from functional_te.quantization.tensor import BoundQuantizer, QuantizedTensor
from functional_te.tensor_spec import TensorSpec

__all__ = [
    "LinearBackwardArgs",
    "LinearForwardArgs",
    "LinearSaved",
    "grad_specs",
    "grads",
    "grads_work",
    "linear_backward_fields",
    "linear_output_spec",
    "operand_specs",
    "operands",
    "product_work",
    "refuse_parallel",
    "saved_operands",
]


@pytree.bundle
class LinearForwardArgs:
    """Bundle of the forward.

    Attributes:
        input_: ``[..., in_features]``.
        weight: ``[out_features, in_features]``.
        input_quantizer: how to cast the input, if it is not quantized yet.
        weight_quantizer: how to cast the weight, if it is not quantized yet.
        output_quantizer: the next op's input quantizer.
        dtype: the compute dtype.
        save_input: whether the backward needs the input.
        save_weight: whether the backward needs the weight.
        override: what the backward reads instead of the copies for low-precision products: an empty string (those
            copies), ``"high_precision"`` (the operands before the casts) or ``"dequantized"`` (the rowwise copies).
        dense_weight: the weight before its cast, if it came in cast and the backward reads it.
        tensor_parallel: how the layer is sharded, or None.
        backend: name of the kernel backend.
    """

    input_: TensorOrQuantized
    weight: TensorOrQuantized
    input_quantizer: BoundQuantizer | None = None
    weight_quantizer: BoundQuantizer | None = None
    output_quantizer: BoundQuantizer | None = None
    dtype: torch.dtype = pytree.static(default=torch.float32)
    save_input: bool = pytree.static(default=False)
    save_weight: bool = pytree.static(default=False)
    override: str = pytree.static(default="")
    dense_weight: torch.Tensor | None = None
    tensor_parallel: TensorParallel | None = pytree.static(default=None)
    backend: str = pytree.static(default="reference")


@pytree.node
class LinearSaved:
    """Operands kept for the backward (quantized copies in low precision, else the tensors), and the compute dtype."""

    input_: TensorOrQuantized | None
    weight: TensorOrQuantized | None
    dtype: torch.dtype = pytree.static(default=torch.float32)


@pytree.bundle
class LinearBackwardArgs:
    """Bundle of the backward.

    Attributes:
        grad_output: ``[..., out_features]``.
        input_: the saved input, None if the weight needs no gradient.
        weight: the saved weight, None if the input needs no gradient.
        grad_output_quantizer: how to cast the gradient, if it is not quantized yet.
        grad_input_quantizer: the previous op's gradient quantizer.
        dtype: the compute dtype.
        grad_weight_dtype: dtype of the weight gradient, None for the compute dtype.
        tensor_parallel: how the layer is sharded, or None.
        backend: name of the kernel backend.
    """

    grad_output: TensorOrQuantized
    input_: TensorOrQuantized | None
    weight: TensorOrQuantized | None
    grad_output_quantizer: BoundQuantizer | None = None
    grad_input_quantizer: BoundQuantizer | None = None
    dtype: torch.dtype = pytree.static(default=torch.float32)
    grad_weight_dtype: torch.dtype | None = pytree.static(default=None)
    tensor_parallel: TensorParallel | None = pytree.static(default=None)
    backend: str = pytree.static(default="reference")


_NOTHING_FRESH = {dtype: LinearSaved(input_=None, weight=None, dtype=dtype) for dtype in FLOAT_DTYPES}


def operands(args: Any) -> tuple[TensorOrQuantized, TensorOrQuantized, LinearSaved, Amaxes | None]:
    """Cast input and weight of a forward bundle, and gather the input if the sequence is sharded.

    Returns:
        The two operands, those of them that are fresh and to be saved, and the observed amaxes.
    """
    x, w, tp = args.input_, args.weight, args.tensor_parallel
    casts_input = args.input_quantizer is not None and not isinstance(x, QuantizedTensor)
    if gathers(tp, "column") and not casts_input:
        x = tp_gather(x, tp)
    if args.input_quantizer is None and args.weight_quantizer is None:
        return x, w, _NOTHING_FRESH[args.dtype], None
    k = kernels(args.backend)
    amax_x = amax_w = fresh_x = fresh_w = None
    finish_input = None
    if casts_input:
        finish_input = start_cast(k, x, args.input_quantizer, args.dtype, tp if gathers(tp, "column") else None)
    try:
        if args.weight_quantizer is not None and not isinstance(w, QuantizedTensor):
            w, amax_w = k.quantize(w, args.weight_quantizer, args.dtype)
            fresh_w = w
    finally:  # what was started is waited for
        if finish_input is not None:
            x, amax_x = finish_input()
            fresh_x = x
    aux = LinearSaved(
        input_=_for_backward(fresh_x, args.override) if args.save_input else None,
        weight=_for_backward(fresh_w, args.override) if args.save_weight else None,
        dtype=args.dtype,
    )
    return x, w, aux, amaxes(input=amax_x, weight=amax_w)


def start_cast(
    k: Any, x: torch.Tensor, bound: BoundQuantizer, dtype: torch.dtype, tp: TensorParallel | None
) -> Callable[[], tuple[QuantizedTensor, torch.Tensor | None]]:
    """What gives the cast of ``x``, or with ``tp`` of ``x`` of all ranks, and the observed amax."""
    if tp is not None:
        return start_tp_cast(x, bound, dtype, tp, k)
    cast: Any = k.quantize(x, bound, dtype)
    return lambda: cast


def _for_backward(x: Any, override: str) -> Any:
    """What of a fresh cast the backward reads: nothing if it reads high precision, else one of two copies."""
    return None if override == "high_precision" else one_copy(x, override)


def operand_specs(args: Any) -> tuple[LinearSaved, Amaxes | None]:
    """The twin of :func:`operands` over :class:`TensorSpec`: what is saved and observed."""
    saved: dict[str, Any] = {"input_": None, "weight": None}
    observed: dict[str, Any] = {}
    for name, role, save in (("input_", "input", args.save_input), ("weight", "weight", args.save_weight)):
        value = _gathered_input(args) if name == "input_" else args.weight
        bound = getattr(args, f"{role}_quantizer")
        if bound is not None and not isinstance(value, QuantizedTensor):
            quantized, observed[role] = quantized_spec(value.with_(dtype=args.dtype), bound)
            saved[name] = _for_backward(quantized, args.override) if save else None
    return LinearSaved(**saved, dtype=args.dtype), amaxes(**observed)


def _gathered_input(args: Any) -> Any:
    """Spec of the input that the product reads."""
    tp = args.tensor_parallel
    return gather_spec(args.input_, tp) if gathers(tp, "column") else args.input_


def saved_operands(args: Any, aux: LinearSaved) -> LinearSaved:
    """What the backward needs: the fresh copies of ``aux``, else the bundle's own tensors."""
    if not args.save_input and not args.save_weight:
        return _NOTHING_FRESH[args.dtype]
    return LinearSaved(
        input_=(one_copy(args.input_, args.override) if aux.input_ is None else aux.input_)
        if args.save_input
        else None,
        weight=_saved_weight(args, aux) if args.save_weight else None,
        dtype=args.dtype,
    )


def _saved_weight(args: Any, aux: LinearSaved) -> Any:
    if args.dense_weight is not None:
        return args.dense_weight
    if aux.weight is not None:
        return aux.weight
    return one_copy(args.weight, args.override) if args.override else args.weight


def product_work(args: Any, result: FwdResult) -> Work:
    """What the forward does: casts of operands that come in high precision, the product, the cast of its result."""
    x, w, casts = _gathered_input(args), args.weight, []
    if args.input_quantizer is not None and not isinstance(x, QuantizedTensor):
        casts.append(Cast(x, quantized_spec(x.with_(dtype=args.dtype), args.input_quantizer)[0]))
        x = casts[-1].result
    if args.weight_quantizer is not None and not isinstance(w, QuantizedTensor):
        casts.append(Cast(w, quantized_spec(w.with_(dtype=args.dtype), args.weight_quantizer)[0]))
        w = casts[-1].result
    y = linear_output_spec(args)
    if args.output_quantizer is not None:
        casts.append(Cast(y, result.output))
    return Work((Product("nt", x, w, y, x.shape[-1]),), tuple(casts), 0, passes=False)


def grads_work(args: Any, result: BwdResult) -> Work:
    """What the backward does: the cast of the gradient if it comes in high precision, and both products."""
    dy, tp, casts, products = args.grad_output, args.tensor_parallel, [], []
    if gathers(tp, "row"):
        dy = gather_spec(dy, tp)
    if args.grad_output_quantizer is not None and not isinstance(dy, QuantizedTensor):
        casts.append(Cast(dy, quantized_spec(dy, args.grad_output_quantizer)[0]))
        dy = casts[-1].result
    if args.weight is not None:
        dx = TensorSpec((*dy.shape[:-1], args.weight.shape[1]), args.dtype, dy.device)
        products.append(Product("nn", dy, args.weight, dx, dy.shape[-1]))
        if args.grad_input_quantizer is not None:
            casts.append(Cast(dx, result.grad_input))
    if args.input_ is not None:
        products.append(Product("tn", dy, args.input_, result.grad_params[0], rows_of(tuple(dy.shape))))
    return Work(tuple(products), tuple(casts), 0, passes=False)


def linear_output_spec(args: Any) -> TensorSpec:
    """Spec of the product of a forward bundle."""
    x, w = _gathered_input(args), args.weight
    return TensorSpec((*x.shape[:-1], w.shape[0]), args.dtype, x.device)


def grads(args: Any, add: torch.Tensor | None = None, alpha: float | None = None) -> BwdResult:
    """Both gradients of a backward bundle, times ``alpha``; ``add`` is summed into the input's before its cast."""
    k = kernels(args.backend)
    dy: Any = args.grad_output
    tp = args.tensor_parallel
    observed: Amaxes | None = None
    casts = args.grad_output_quantizer is not None and not isinstance(dy, QuantizedTensor)
    if casts:
        dy, amax = start_cast(k, dy, args.grad_output_quantizer, args.dtype, tp if gathers(tp, "row") else None)()
        observed = amaxes(observed, grad_output=amax)
    elif gathers(tp, "row"):
        dy = tp_gather(dy, tp)
    dx: Any = None
    dw: Any = None
    summed = tp if reduces(tp, "column") else None
    # a cast was made of the gathered input
    is_part = gathers(tp, "column") and args.input_ is not None and not isinstance(args.input_, QuantizedTensor)
    gathered = tp if is_part else None
    x = args.input_ if gathered is None else start_tp_gather(args.input_, gathered)
    try:
        if args.weight is not None:
            dx = k.gemm_nn(dy, args.weight, dtype=args.dtype, add=add, alpha=alpha)
            if summed is None:
                dx, observed = _stored_gradient(args, dx, observed)
            else:
                dx = start_tp_reduce(dx, summed)
    finally:  # what was started is waited for
        x = x if gathered is None else finish(x, gathered.size)
    try:
        if x is not None:
            dw = _weight_gradient(args, dy, x, alpha)
    finally:
        dx = dx if summed is None or dx is None else finish(dx, summed.size)
    if summed is not None and dx is not None:
        dx, observed = _stored_gradient(args, dx, observed)
    return BwdResult(dx, (dw,), (), observed)


def _stored_gradient(args: Any, dx: torch.Tensor, observed: Amaxes | None) -> tuple[Any, Amaxes | None]:
    """The input's gradient as the previous op reads it, and the observed amaxes with its own."""
    if args.grad_input_quantizer is None:
        return dx, observed
    stored, amax = kernels(args.backend).store(dx, args.dtype, args.grad_input_quantizer)
    return stored, amaxes(observed, grad_input=amax)


def _weight_gradient(args: Any, dy: Any, x: Any, alpha: float | None) -> torch.Tensor:
    """The weight's gradient, in the layout that its parameter is stored in: another would be copied there."""
    k, dtype = kernels(args.backend), args.grad_weight_dtype or args.dtype
    if _is_transposed(args.weight):
        transposed: torch.Tensor = k.gemm_tn(x, dy, dtype=dtype, alpha=alpha).t()
        return transposed
    product: torch.Tensor = k.gemm_tn(dy, x, dtype=dtype, alpha=alpha)
    return product


def _is_transposed(weight: Any) -> bool:
    """Whether a weight is a view of a parameter that is stored ``[in_features, out_features]``."""
    return isinstance(weight, torch.Tensor) and weight.stride(0) == 1 and weight.stride(1) != 1


def grad_specs(args: Any) -> BwdResult:
    """The twin of :func:`grads` over :class:`TensorSpec`."""
    dy: Any = args.grad_output
    dx: Any = None
    dw: Any = None
    observed: Amaxes | None = None
    device = dy.device
    tp = args.tensor_parallel
    if gathers(tp, "row"):
        dy = gather_spec(dy, tp)
    if args.grad_output_quantizer is not None and not isinstance(dy, QuantizedTensor):
        _, amax = quantized_spec(dy, args.grad_output_quantizer)
        observed = amaxes(observed, grad_output=amax)
    if args.weight is not None:
        spec = TensorSpec((*dy.shape[:-1], args.weight.shape[1]), args.dtype, device)
        if reduces(tp, "column"):
            spec = reduce_spec(spec, tp)
        dx, amax = spec_store(spec, args.dtype, args.grad_input_quantizer)
        observed = amaxes(observed, grad_input=amax)
    if args.input_ is not None:
        dw = TensorSpec((dy.shape[-1], args.input_.shape[-1]), args.grad_weight_dtype or args.dtype, device)
    return BwdResult(dx, (dw,), (), observed)


def linear_backward_fields(op: Any, ctx: BackwardContext, grad_output: TensorOrQuantized) -> dict[str, Any]:
    """The fields of a linear backward bundle, from the linear and its own context."""
    return {
        "grad_output": grad_output,
        "input_": ctx.saved.input_,
        "weight": ctx.saved.weight,
        "grad_output_quantizer": ctx.quantizers.get("grad_output"),
        "grad_input_quantizer": ctx.prev_op_grad_output_quantizer,
        "dtype": ctx.saved.dtype,
        "grad_weight_dtype": ctx.grad_dtypes[0] if ctx.grad_dtypes else None,
        "tensor_parallel": op.tensor_parallel,
        "backend": ctx.backend,
    }


def refuse_parallel(op: Any, mode: str) -> str | None:
    """None, or why a fusion cannot go on with the product of a linear that is sharded in ``mode``."""
    return (
        f"the product of a {mode}-parallel linear is summed over ranks" if reduces(op.tensor_parallel, mode) else None
    )
