"""Products and sums of a grouped linear layer on a GPU; the functions are those of the reference.

The sizes of the groups stay on the device. Groups of rows in FP8 with one scale each are multiplied by the weights of
their groups in one kernel: two E4M3 operands as they are, with the scale of every row and every column of weights; a
mix with E5M2, and products over the rows, whose groups start anywhere, as bfloat16, which holds every FP8 value. That
kernel rounds to bfloat16 before the scales, so a result is within one unit in the last place, and float32 and float16
results are left to the reference. So is everything else: high precision (which goes to ``grouped_mm`` there), other
formats, features that are no multiple of 16.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import grouped_mm  # noqa: TID251 - a function, no module

from functional_te.kernels import reference
from functional_te.kernels.backend import FAST_ACCUMULATION
from functional_te.kernels.triton import compat
from functional_te.kernels.triton.gemm import PER_TENSOR, check_devices, k_major, operand
from functional_te.quantization.groups import Groups
from functional_te.quantization.quantizer import as_matrix
from functional_te.quantization.tensor import QuantizedTensor

__all__ = ["grouped_nn", "grouped_nt", "grouped_sum", "grouped_tn"]

Operand = torch.Tensor | QuantizedTensor
_E4M3 = torch.float8_e4m3fn
_ALIGNMENT = 16

grouped_sum = reference.grouped_sum


def grouped_nt(a: Operand, weights: tuple[Operand, ...], groups: Groups, *, dtype: torch.dtype) -> torch.Tensor:
    """``a_g @ W_g.T``: :func:`functional_te.kernels.reference.grouped.grouped_nt`.

    Raises:
        ValueError: operands on different devices, or not on a GPU.
    """
    check_devices("grouped_nt", a=a, **_named(weights))
    y = _rows_product("nt", a, weights, groups, dtype)
    return reference.grouped_nt(a, weights, groups, dtype=dtype) if y is None else y


def grouped_nn(a: Operand, weights: tuple[Operand, ...], groups: Groups, *, dtype: torch.dtype) -> torch.Tensor:
    """``a_g @ W_g``: :func:`functional_te.kernels.reference.grouped.grouped_nn`. Raises as above."""
    check_devices("grouped_nn", a=a, **_named(weights))
    y = _rows_product("nn", a, weights, groups, dtype)
    return reference.grouped_nn(a, weights, groups, dtype=dtype) if y is None else y


def grouped_tn(a: Operand, b: Operand, groups: Groups, *, dtype: torch.dtype) -> torch.Tensor:
    """``a_g.T @ b_g``: :func:`functional_te.kernels.reference.grouped.grouped_tn`. Raises as above."""
    check_devices("grouped_tn", a=a, b=b)
    if not (_takes((a, b), groups, dtype) and a.shape[-1] % _ALIGNMENT == 0 and b.shape[-1] % _ALIGNMENT == 0):
        return reference.grouped_tn(a, b, groups, dtype=dtype)
    assert isinstance(a, QuantizedTensor)
    assert isinstance(b, QuantizedTensor)
    layout = groups.layout()
    y = grouped_mm(_wide_rows(a).t(), _wide_rows(b), offs=layout.ends.to(torch.int32))
    return _times(torch.where((layout.sizes > 0)[:, None, None], y, 0.0), (a.scale_inv * b.scale_inv)[:, None, None])


def _named(weights: tuple[Operand, ...]) -> dict[str, Operand]:
    return {f"weights[{place}]": weight for place, weight in enumerate(weights)}


def _takes(operands: tuple[Operand, ...], groups: Groups, dtype: torch.dtype) -> bool:
    """Whether the operands are of one scale per group, and there is a kernel for the result."""
    for one in operands:
        if not isinstance(one, QuantizedTensor) or type(one.quantizer) not in PER_TENSOR:
            return False
    # no rows: grouped_mm refuses some empty matrices
    empty = isinstance(groups.rows, int) and groups.rows == 0
    return dtype is torch.bfloat16 and not empty and compat.can_scale_groups(operands[0].device)


def _rows_product(
    kind: str, a: Operand, weights: tuple[Any, ...], groups: Groups, dtype: torch.dtype
) -> torch.Tensor | None:
    """``a_g @ right_g.T`` with the weights' copy for one direction, or None."""
    if not _takes((a, *weights), groups, dtype):
        return None
    left, rights = operand(a, False), [operand(weight, kind == "nn") for weight in weights]  # type: ignore[arg-type]
    own = [right for right in rights if right is not None]
    if left is None or len(own) < len(rights):
        return None  # the reference says what is missing
    depth, columns = left[0].shape[1], own[0][0].shape[0]
    if depth % _ALIGNMENT or columns % _ALIGNMENT or len({data.dtype for data, _ in own}) > 1:
        return None
    layout = groups.layout()
    ends = layout.ends.to(torch.int32)
    right, scale = torch.stack([data for data, _ in own]), torch.cat([scale for _, scale in own])
    x = k_major(left[0])
    if x.dtype is right.dtype is _E4M3:
        of_columns = scale[:, None].expand(-1, columns).contiguous()
        fast = FAST_ACCUMULATION[0 if kind == "nt" else 1]
        y = compat.grouped_product(x, right, layout.per_tile(left[1], 1), of_columns, ends, fast=fast)
    else:
        y = grouped_mm(x.to(torch.bfloat16), right.to(torch.bfloat16).transpose(1, 2), offs=ends)
        y = _times(y, layout.per_tile(left[1] * scale, 1)[:, None])
    return torch.where(layout.used[:, None], y, 0.0)


def _times(y: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """``y * factor`` in float32, rounded to the dtype of ``y`` in the same pass."""
    return torch.mul(y, factor, out=torch.empty_like(y))


def _wide_rows(x: QuantizedTensor) -> torch.Tensor:
    """The FP8 values ``[T, K]``, exactly, in bfloat16 and row-major order."""
    data = x.columnwise_data.t() if x.rowwise_data is None else as_matrix(x.rowwise_data)  # type: ignore[union-attr]
    return data.to(torch.bfloat16).contiguous()
