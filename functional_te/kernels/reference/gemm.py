"""Matrix products of a linear layer. Operands are tensors or quantized tensors, any number of leading dimensions.

Low-precision operands are multiplied as an FP8 tensor core does: exact products of the FP8 values, float32
accumulation, then the two dequantization factors, then one rounding. The names say which side is transposed:
``nt`` is ``a @ b.T`` (forward), ``nn`` is ``a @ b`` (input gradient), ``tn`` is ``a.T @ b`` (weight gradient).
"""

from __future__ import annotations

import torch
from torch.nn.functional import linear  # noqa: TID251 - a function, no module

from functional_te.quantization.tensor import QuantizedTensor

__all__ = ["gemm_nn", "gemm_nt", "gemm_tn"]

Operand = torch.Tensor | QuantizedTensor


def _operands(a: Operand, b: Operand, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Both operands in one dtype, and the float32 factor their product still needs (None: none)."""
    if isinstance(a, QuantizedTensor):
        if isinstance(b, QuantizedTensor):
            return a.data.to(torch.float32), b.data.to(torch.float32), a.scale_inv * b.scale_inv
        a = a.dequantize(dtype)
    if isinstance(b, QuantizedTensor):
        b = b.dequantize(dtype)
    return (
        a if a.dtype is dtype else a.to(dtype),
        b if b.dtype is dtype else b.to(dtype),
        None,
    )


def gemm_nt(
    a: Operand,
    b: Operand,
    *,
    dtype: torch.dtype,
    bias: torch.Tensor | None = None,
    add: torch.Tensor | None = None,
) -> torch.Tensor:
    """``a @ b.T (+ bias) (+ add)``.

    Args:
        a: ``[..., K]``.
        b: ``[N, K]``.
        dtype: dtype of the result; the sum with bias and ``add`` follows torch's type promotion.
        bias: ``[N]``.
        add: ``[..., N]``.

    Returns:
        ``[..., N]``.
    """
    left, right, factor = _operands(a, b, dtype)
    if factor is None and bias is None and add is not None and left.dim() == 2 and add.dtype is dtype:
        return torch.addmm(add, left, right.t())
    if factor is None:
        same = bias is not None and bias.dtype is dtype
        y = linear(left, right, bias if same else None)
        if same:
            bias = None
    else:
        y = (linear(left, right) * factor).to(dtype)
    if bias is not None:
        y = y + bias
    return y if add is None else add + y


def gemm_nn(a: Operand, b: Operand, *, dtype: torch.dtype, add: torch.Tensor | None = None) -> torch.Tensor:
    """``a @ b (+ add)``: ``[..., N] @ [N, K]`` gives ``[..., K]`` in ``dtype``."""
    left, right, factor = _operands(a, b, dtype)
    if factor is None and add is not None and left.dim() == 2 and add.dtype is dtype:
        return torch.addmm(add, left, right)
    y = torch.matmul(left, right)
    if factor is not None:
        y = (y * factor).to(dtype)
    return y if add is None else add + y


def gemm_tn(a: Operand, b: Operand, *, dtype: torch.dtype) -> torch.Tensor:
    """``a.T @ b`` over the flattened leading dimensions: ``[..., N], [..., K]`` gives ``[N, K]`` in ``dtype``."""
    left, right, factor = _operands(a, b, dtype)
    y = torch.mm(_rows(left).t(), _rows(right))
    return y if factor is None else (y * factor).to(dtype)


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
