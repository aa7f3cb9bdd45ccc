"""Products and sums of a grouped linear layer: rows in groups, one weight for each group.

The sizes of the groups stay on the device; see :mod:`functional_te.quantization.groups`. Every product reads only the
rows of its own group, so infinities and NaN stay where they are. ``torch.nn.functional.grouped_mm`` does it where it
needs no copy to the host and takes the sizes; elsewhere (float32 and float16 on CUDA, features that are no multiple of
16 bytes) every group multiplies all rows and takes its own: ``G`` times the operations.

Low-precision operands are multiplied as in :mod:`functional_te.kernels.reference.gemm`: decoded values in float32, then
the factors of the group, then one rounding. An operand whose other one is in high precision is dequantized.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as functions  # noqa: TID251 - functions, no modules

from functional_te.quantization.groups import GroupLayout, Groups
from functional_te.quantization.hadamard import hadamard_inverse
from functional_te.quantization.tensor import QuantizedTensor

__all__ = ["grouped_nn", "grouped_nt", "grouped_sum", "grouped_tn"]

Operand = torch.Tensor | QuantizedTensor
_grouped_mm: Callable[..., torch.Tensor] | None = getattr(functions, "grouped_mm", None)


def grouped_nt(a: Operand, weights: tuple[Operand, ...], groups: Groups, *, dtype: torch.dtype) -> torch.Tensor:
    """``a_g @ W_g.T`` for the rows of every group.

    Args:
        a: ``[T, K]``, or a quantized tensor of padded rows.
        weights: one ``[N, K]`` for each group, or one tensor ``[G, N, K]``.
        groups: the groups of the rows.
        dtype: dtype of the result.

    Returns:
        ``[T, N]``; zeros in rows that belong to no group.
    """
    return _rows_product(a, weights, False, groups, dtype)


def grouped_nn(a: Operand, weights: tuple[Operand, ...], groups: Groups, *, dtype: torch.dtype) -> torch.Tensor:
    """``a_g @ W_g`` for the rows of every group: ``[T, N]`` with weights ``[N, K]`` gives ``[T, K]``."""
    return _rows_product(a, weights, True, groups, dtype)


def grouped_tn(a: Operand, b: Operand, groups: Groups, *, dtype: torch.dtype) -> torch.Tensor:
    """``a_g.T @ b_g`` over the rows of every group: ``[T, N], [T, K]`` give ``[G, N, K]``; zeros for an empty group."""
    factor = None
    if isinstance(a, QuantizedTensor) and isinstance(b, QuantizedTensor):
        left, right, layout, factor = _reduced_rows(a, b, groups)
    else:
        layout = groups.layout()
        left, right = _dense_rows(a, groups, dtype, True), _dense_rows(b, groups, dtype, True)
    y = _reducing_product(left, right, layout)
    if factor is not None:
        y = y * factor[:, None, None]
    return torch.where((layout.sizes > 0)[:, None, None], y, 0.0).to(dtype)


def grouped_sum(x: torch.Tensor, groups: Groups) -> torch.Tensor:
    """Float32 sum of the rows of every group, in a fixed order: ``[T, N]`` gives ``[G, N]``."""
    height = 128
    layout = groups.layout(height)
    blocks = layout.pad(x.to(torch.float32)).unflatten(0, (layout.group.shape[0] // height, height)).sum(1)
    sums = []
    owner = layout.group[::height]
    for group in range(groups.count):
        sums.append(torch.where((owner == group)[:, None], blocks, 0.0).sum(0))
    return torch.stack(sums)


def _is_quantized(weights: tuple[Operand, ...]) -> bool:
    return all(isinstance(weight, QuantizedTensor) for weight in weights)


def _rows_product(
    a: Operand, weights: tuple[Operand, ...], columnwise: bool, groups: Groups, dtype: torch.dtype
) -> torch.Tensor:
    """``a_g @ right_g.T`` with the weights' copy for one direction."""
    compact = groups.layout()
    if isinstance(a, QuantizedTensor) and _is_quantized(weights):
        layout = groups.layout(a.quantizer.row_multiple)
        left, factor = a.decoded(False)
        right, right_factor = _decoded_weights(weights, columnwise)
        y = _product_of_rows(left, right.transpose(1, 2), layout)
        factor = _product(factor, right_factor)
        if factor is not None:
            y = y * layout.per_tile(factor, 1)[:, None]
        y = layout.unpad(y)
    else:
        left = _dense_rows(a, groups, dtype, False)
        right = _dense_weights(weights, columnwise, dtype)
        y = _product_of_rows(left, right if columnwise else right.transpose(1, 2), compact)
    return torch.where(compact.used[:, None], y, 0.0).to(dtype)


def _product(one: torch.Tensor | None, other: torch.Tensor | None) -> torch.Tensor | None:
    if one is None or other is None:
        return other if one is None else one
    return one * other


def _decoded_weights(weights: tuple[Any, ...], columnwise: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Float32 ``[G, N, K]``, or ``[G, K, N]`` for products over ``N``, and the factor of each group."""
    values, factors = [], []
    for weight in weights:
        value, factor = weight.decoded(columnwise)
        values.append(hadamard_inverse(value) if columnwise and weight.quantizer.rotates else value)
        factors.append(factor)
    return torch.stack(values), None if factors[0] is None else torch.cat(factors)


def _dense_weights(weights: tuple[Operand, ...], columnwise: bool, dtype: torch.dtype) -> torch.Tensor:
    """``[G, N, K]`` in high precision."""
    dense = [w.dequantize(dtype, columnwise=columnwise) if isinstance(w, QuantizedTensor) else w for w in weights]
    stacked = dense[0] if len(dense) == 1 and dense[0].dim() == 3 else torch.stack(dense)
    return stacked if stacked.dtype is dtype else stacked.to(dtype)


def _dense_rows(x: Operand, groups: Groups, dtype: torch.dtype, columnwise: bool) -> torch.Tensor:
    """Rows ``[T, K]`` in high precision."""
    if not isinstance(x, QuantizedTensor):
        return x if x.dtype is dtype else x.to(dtype)
    if x.rowwise_data is None or x.columnwise_data is None:
        columnwise = x.rowwise_data is None
    copy = x.copy(columnwise)
    assert copy is not None
    values, factor = x.quantizer.decode(copy, columnwise)
    if columnwise:
        values = (hadamard_inverse(values) if x.quantizer.rotates else values).t()
    layout = groups.layout(x.quantizer.row_multiple)
    if factor is not None:
        values = values * layout.per_tile(factor, 1)[:, None]
    return layout.unpad(values).to(dtype)


def _reduced_rows(
    a: QuantizedTensor, b: QuantizedTensor, groups: Groups
) -> tuple[torch.Tensor, torch.Tensor, GroupLayout, torch.Tensor | None]:
    """Both operands ``[rows, features]`` of a product over rows in one layout, and the factor of each group."""
    left, left_factor = a.decoded(True)
    right, right_factor = b.decoded(True)
    one, other = groups.layout(a.quantizer.row_multiple), groups.layout(b.quantizer.row_multiple)
    # the rotations of both cancel if they are of the same rows; that of one has to be undone
    same = a.quantizer.rotates and b.quantizer.rotates and one.multiple == other.multiple
    if a.quantizer.rotates and not same:
        left = hadamard_inverse(left)
    if b.quantizer.rotates and not same:
        right = hadamard_inverse(right)
    left, right, layout = left.t(), right.t(), one
    if one.multiple != other.multiple:
        left, right, layout = one.unpad(left), other.unpad(right), groups.layout()
    return left, right, layout, _product(left_factor, right_factor)


def _product_of_rows(left: torch.Tensor, right: torch.Tensor, layout: GroupLayout) -> torch.Tensor:
    """``left_g @ right_g``: ``[P, K], [G, K, N]`` give ``[P, N]``; rows that belong to no group hold anything."""
    left = _rows_of_their_own(left)
    if _takes(left, right.shape[2]):
        assert _grouped_mm is not None
        return _grouped_mm(_aligned(left), _aligned(right), offs=layout.ends.to(torch.int32))
    y = torch.mm(left, right[0])
    for group in range(1, right.shape[0]):
        y = torch.where((layout.group == group)[:, None], torch.mm(left, right[group]), y)
    return y


def _reducing_product(left: torch.Tensor, right: torch.Tensor, layout: GroupLayout) -> torch.Tensor:
    """``left_g.T @ right_g``: ``[P, N], [P, K]`` give ``[G, N, K]``; empty groups hold anything."""
    left, right = _rows_of_their_own(left), _rows_of_their_own(right)
    if _takes(left, right.shape[1]) and left.shape[1] * left.element_size() % 16 == 0:
        assert _grouped_mm is not None
        return _grouped_mm(_aligned(left).t(), _aligned(right), offs=layout.ends.to(torch.int32))
    products = []
    for group in range(layout.sizes.shape[0]):
        own = ((layout.group == group) & layout.held)[:, None]
        products.append(torch.mm(torch.where(own, left, 0.0).t(), torch.where(own, right, 0.0)))
    return torch.stack(products)


def _rows_of_their_own(x: torch.Tensor) -> torch.Tensor:
    """``x`` contiguous; a tensor without elements may call itself so with strides of 0, which grouped_mm refuses."""
    return x.contiguous().as_strided(x.shape, (x.shape[1], 1))


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """``x`` with data at a multiple of 16 bytes, as the kernel of a GPU wants them."""
    return x.clone() if x.device.type == "cuda" and x.data_ptr() % 16 else x


def _takes(left: torch.Tensor, columns: int) -> bool:
    """Whether grouped_mm takes these sizes, and leaves the ends of the groups on the device."""
    if _grouped_mm is None or left.shape[1] * left.element_size() % 16 or columns * left.element_size() % 16:
        return False
    return left.device.type == "cpu" or left.dtype is torch.bfloat16
