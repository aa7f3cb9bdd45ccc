"""Matrix products of a linear layer. Operands are tensors or quantized tensors, any number of leading dimensions.

Low-precision operands are multiplied as a tensor core does: exact products of the decoded values, float32
accumulation, then the factors that the formats leave for the end, then one rounding. An operand whose other one is in
high precision is dequantized. The names say which side is transposed: ``nt`` is ``a @ b.T`` (forward), ``nn`` is
``a @ b`` (input gradient), ``tn`` is ``a.T @ b`` (weight gradient). Of quantized operands every product reads the
copies that reduce over their last dimension.
"""

from __future__ import annotations

import torch
from torch.nn.functional import linear  # noqa: TID251 - a function, no module

from functional_te.quantization.hadamard import hadamard_inverse
from functional_te.quantization.tensor import QuantizedTensor

__all__ = ["gemm_nn", "gemm_nt", "gemm_tn"]

Operand = torch.Tensor | QuantizedTensor


def _dense(x: Operand, dtype: torch.dtype, columnwise: bool = False) -> torch.Tensor:
    if isinstance(x, QuantizedTensor):
        return x.dequantize(dtype, columnwise=columnwise)
    return x if x.dtype is dtype else x.to(dtype)


def _quantized_product(
    a: QuantizedTensor,
    a_columnwise: bool,
    b: QuantizedTensor,
    b_columnwise: bool,
    dtype: torch.dtype,
    alpha: float | None = None,
) -> torch.Tensor:
    """``alpha * left @ right.T`` over the last dimension of one copy of each, ``[rows of left, rows of right]``."""
    left, left_factor = a.decoded(a_columnwise)
    right, right_factor = b.decoded(b_columnwise)
    left_rotates = a_columnwise and a.quantizer.rotates
    right_rotates = b_columnwise and b.quantizer.rotates
    if left_rotates != right_rotates:  # the rotations of both cancel, that of one has to be undone
        if left_rotates:
            left = hadamard_inverse(left)
        else:
            right = hadamard_inverse(right)
    if a_columnwise and b_columnwise:
        one, other = a.quantizer.of(True).token_multiple, b.quantizer.of(True).token_multiple
        if one > other:  # what one format padded with zeros, the other does not have
            left = left[:, : right.shape[1]]
        elif other > one:
            right = right[:, : left.shape[1]]
    y = torch.mm(left, right.t())
    if left_factor is not None:
        y = y * (left_factor if right_factor is None else left_factor * right_factor)
    elif right_factor is not None:
        y = y * right_factor
    return (y if alpha is None else y * alpha).to(dtype)


def _scaled_product(
    left: torch.Tensor, right: torch.Tensor, alpha: float, add: torch.Tensor | None = None
) -> torch.Tensor:
    """``alpha * left @ right (+ add)`` with one rounding; ``left`` of any number of dimensions, ``right`` a matrix."""
    rows = _rows(left)
    if add is not None and left.dim() == 2 and add.dtype is left.dtype:
        return torch.addmm(add, rows, right, alpha=alpha)
    # beta=0: the first argument is not read
    y = torch.addmm(rows.new_empty(1), rows, right, beta=0, alpha=alpha).reshape(*left.shape[:-1], right.shape[1])
    return y if add is None else add + y


def gemm_nt(
    a: Operand,
    b: Operand,
    *,
    dtype: torch.dtype,
    bias: torch.Tensor | None = None,
    add: torch.Tensor | None = None,
    alpha: float | None = None,
) -> torch.Tensor:
    """``[alpha *] a @ b.T (+ bias) (+ add)``.

    Args:
        a: ``[..., K]``.
        b: ``[N, K]``.
        dtype: dtype of the result; the sum with bias and ``add`` follows torch's type promotion.
        bias: ``[N]``.
        add: ``[..., N]``.
        alpha: factor of the product, a finite number other than 0; no ``bias`` then.

    Returns:
        ``[..., N]``.
    """
    if isinstance(a, QuantizedTensor) and isinstance(b, QuantizedTensor):
        y = _quantized_product(a, False, b, False, dtype, alpha)
        y = y.reshape(*a.shape[:-1], y.shape[-1])
    else:
        left, right = _dense(a, dtype), _dense(b, dtype)
        if alpha is not None:
            return _scaled_product(left, right.t(), alpha, add)
        if bias is None and add is not None and left.dim() == 2 and add.dtype is dtype:
            return torch.addmm(add, left, right.t())
        same = bias is not None and bias.dtype is dtype
        y = linear(left, right, bias if same else None)
        if same:
            bias = None
    if bias is not None:
        y = y + bias
    return y if add is None else add + y


def gemm_nn(
    a: Operand, b: Operand, *, dtype: torch.dtype, add: torch.Tensor | None = None, alpha: float | None = None
) -> torch.Tensor:
    """``[alpha *] a @ b (+ add)``: ``[..., N] @ [N, K]`` gives ``[..., K]`` in ``dtype``. ``alpha`` as above."""
    if isinstance(a, QuantizedTensor) and isinstance(b, QuantizedTensor):
        y = _quantized_product(a, False, b, True, dtype, alpha)
        y = y.reshape(*a.shape[:-1], y.shape[-1])
    else:
        left, right = _dense(a, dtype), _dense(b, dtype, True)
        if alpha is not None:
            return _scaled_product(left, right, alpha, add)
        if add is not None and left.dim() == 2 and add.dtype is dtype:
            return torch.addmm(add, left, right)
        y = torch.matmul(left, right)
    return y if add is None else add + y


def gemm_tn(a: Operand, b: Operand, *, dtype: torch.dtype, alpha: float | None = None) -> torch.Tensor:
    """``[alpha *] a.T @ b`` over the flattened leading dimensions: ``[..., N], [..., K]`` gives ``[N, K]``.

    ``dtype`` and ``alpha`` are as above.
    """
    if isinstance(a, QuantizedTensor) and isinstance(b, QuantizedTensor):
        return _quantized_product(a, True, b, True, dtype, alpha)
    left, right = _rows(_dense(a, dtype, True)), _rows(_dense(b, dtype, True))
    if left.shape[0] != right.shape[0]:  # one of them has only the padded columnwise copy
        tokens = min(left.shape[0], right.shape[0])
        left, right = left[:tokens], right[:tokens]
    return torch.mm(left.t(), right) if alpha is None else _scaled_product(left.t(), right, alpha)


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
