"""What the two directions of a grouped linear layer cost; see :mod:`functional_te.ops.work`."""

from __future__ import annotations

import math
from typing import Any

from functional_te.ops.common import quantized_spec
from functional_te.ops.grouped import grouped_output_spec, rows_spec
from functional_te.ops.op import BwdResult, FwdResult
from functional_te.ops.work import Cast, Product, Work
from functional_te.quantization.quantizer import rows_of
from functional_te.quantization.tensor import QuantizedTensor

__all__ = ["grouped_backward_work", "grouped_forward_work"]


def grouped_forward_work(args: Any, result: FwdResult) -> Work:
    """Casts of rows and weights, one product for each group, the biases."""
    del result
    x, casts = args.input_, []
    if args.input_quantizers:
        casts.append(Cast(x, rows_spec(x, args.input_quantizers, args.dtype)[0]))
        x = casts[-1].result
    w = _weights(args)
    if args.weight_quantizers:
        casts.extend(
            Cast(weight, quantized_spec(weight.with_(dtype=args.dtype), bound)[0])
            for weight, bound in zip(w, args.weight_quantizers, strict=True)
            if not isinstance(weight, QuantizedTensor)
        )
        w = [cast.result for cast in casts[len(casts) - len(w) :]] if len(casts) >= len(w) else w
    y = grouped_output_spec(args)
    product = Product("nt", x, tuple(w), y, args.input_.shape[-1], len(w))
    biases = math.prod(y.shape) if args.biases else 0
    return Work((product,), tuple(casts), biases, passes=bool(args.biases))


def grouped_backward_work(args: Any, result: BwdResult) -> Work:
    """The cast of the gradient, both products for each group, the gradients of biases."""
    dy, casts, products = args.grad_output, [], []
    groups, rows = args.splits.shape[0], rows_of(tuple(args.grad_output.shape))
    if args.grad_output_quantizers and (args.weights or args.input_ is not None):
        casts.append(Cast(dy, rows_spec(dy, args.grad_output_quantizers, args.dtype)[0]))
        dy = casts[-1].result
    if args.weights:
        products.append(Product("nn", dy, tuple(_weights(args)), result.grad_input, dy.shape[-1], groups))
    if args.input_ is not None:
        shape = (dy.shape[-1], args.input_.shape[-1])
        dw = args.grad_output.with_(shape=(groups * shape[0], shape[1]), dtype=args.grad_weight_dtype)
        # every group sums over rows of its own, so all together over each row once
        products.append(Product("tn", dy, args.input_, dw, rows // max(groups, 1), groups))
    biases = any(args.wants_biases)
    return Work(tuple(products), tuple(casts), math.prod(args.grad_output.shape) if biases else 0, passes=biases)


def _weights(args: Any) -> list[Any]:
    """The weight of each group."""
    first = args.weights[0]
    if len(args.weights) == 1 and len(first.shape) == 3:
        count = first.shape[0]
        return [first if isinstance(first, QuantizedTensor) else first.with_(shape=first.shape[1:])] * count
    return list(args.weights)
