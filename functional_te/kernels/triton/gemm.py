"""Matrix products on a GPU: cuBLASLt's for FP8 data, the reference for everything else (cuBLAS, through ATen).

The functions are those of :mod:`functional_te.kernels.reference.gemm`. Two operands with one scale per tensor, or with
scales of blocks (all but two operands of 128x128 tiles), are multiplied as they are, on the copies that reduce over
their last dimension. The tensor core wants sizes in multiples of 16; others are padded with zeros, exactly, and cut
from the result. A copy that is not there is transposed from the other one. Everything else goes to the reference: high
precision, one operand in low precision, other formats, two operands in E5M2 (which tensor cores do not multiply).

Only ATen operations and no data-dependent Python: a compiler can trace every function. Symbolic sizes that are reduced
over or become columns are always padded, so that one graph serves all of them.
"""

from __future__ import annotations

from typing import Any

import torch

from functional_te._errors import value_error
from functional_te.kernels import reference
from functional_te.kernels.backend import FAST_ACCUMULATION
from functional_te.kernels.triton import compat
from functional_te.kernels.triton.launch import INTERPRETED, PLAIN_TYPES
from functional_te.quantization.fp8_block import BLOCK, transposed
from functional_te.quantization.quantizer import as_matrix
from functional_te.quantization.quantizers import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8DelayedScalingQuantizer,
)
from functional_te.quantization.tensor import QuantizedTensor
from functional_te.torch_compat import statically_known_true

__all__ = ["PER_TENSOR", "check_devices", "gemm_nn", "gemm_nt", "gemm_tn", "k_major", "operand"]

Operand = torch.Tensor | QuantizedTensor

PER_TENSOR = (Float8CurrentScalingQuantizer, Float8DelayedScalingQuantizer)
_OUTPUTS = (torch.float32, torch.bfloat16, torch.float16)
_ALIGNMENT = 16


def gemm_nt(
    a: Operand,
    b: Operand,
    *,
    dtype: torch.dtype,
    bias: torch.Tensor | None = None,
    add: torch.Tensor | None = None,
    alpha: float | None = None,
    fast: bool = FAST_ACCUMULATION[0],
) -> torch.Tensor:
    """``[alpha *] a @ b.T (+ bias) (+ add)``: :func:`functional_te.kernels.reference.gemm.gemm_nt`.

    A bias of ``dtype`` is summed before the product is rounded. ``fast`` is whether products with one scale per tensor
    leave their partial sums in the tensor core's own accumulator, of about 14 bits.

    Raises:
        ValueError: operands on different devices, or not on a GPU.
    """
    check_devices("gemm_nt", a=a, b=b, bias=bias, add=add)
    inside = bias if bias is not None and bias.dtype is dtype is not torch.float32 else None
    y = _quantized_product("nt", a, b, dtype, alpha, fast, inside)
    if y is None:
        return reference.gemm_nt(a, b, dtype=dtype, bias=bias, add=add, alpha=alpha)
    if a.dim() != 2:
        y = y.reshape(*a.shape[:-1], y.shape[-1])
    if bias is not None and inside is None:
        y = y + bias
    return y if add is None else add + y


def gemm_nn(
    a: Operand,
    b: Operand,
    *,
    dtype: torch.dtype,
    add: torch.Tensor | None = None,
    alpha: float | None = None,
    fast: bool = FAST_ACCUMULATION[1],
) -> torch.Tensor:
    """``[alpha *] a @ b (+ add)``: :func:`functional_te.kernels.reference.gemm.gemm_nn`. Raises as above."""
    check_devices("gemm_nn", a=a, b=b, add=add)
    y = _quantized_product("nn", a, b, dtype, alpha, fast)
    if y is None:
        return reference.gemm_nn(a, b, dtype=dtype, add=add, alpha=alpha)
    if a.dim() != 2:
        y = y.reshape(*a.shape[:-1], y.shape[-1])
    return y if add is None else add + y


def gemm_tn(
    a: Operand,
    b: Operand,
    *,
    dtype: torch.dtype,
    alpha: float | None = None,
    fast: bool = FAST_ACCUMULATION[2],
) -> torch.Tensor:
    """``[alpha *] a.T @ b``: :func:`functional_te.kernels.reference.gemm.gemm_tn`. Raises as above."""
    check_devices("gemm_tn", a=a, b=b)
    y = _quantized_product("tn", a, b, dtype, alpha, fast)
    return reference.gemm_tn(a, b, dtype=dtype, alpha=alpha) if y is None else y


def check_devices(where: str, **operands: Any) -> None:
    """Refuse operands on different devices, and those that are not on a GPU."""
    name, device = "", None
    for other, operand in operands.items():
        if operand is None:
            continue
        if device is None:
            name, device = other, operand.device
            if device.type != "cuda" and not INTERPRETED:
                fix = "The reference backend runs on every device."
                raise value_error(where, name, "a tensor on a CUDA device", device, fix)
        elif operand.device != device:
            raise value_error(where, other, f"a tensor on {device}, where {name} is", operand.device)


def operand(x: QuantizedTensor, columnwise: bool) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Data ``[rows, K]`` of the copy for one direction and its scales, possibly views; None if there is none."""
    own = x.copy(columnwise)
    if own is not None:
        return as_matrix(own.data), own.scale_inv
    other = x.copy(not columnwise)
    if other is None or not x.quantizer.transposable:
        return None
    scale = other.scale_inv
    return as_matrix(other.data).t(), scale.t() if scale.dim() == 2 else scale


def k_major(x: torch.Tensor, rows: int = 1, columns: int = _ALIGNMENT) -> torch.Tensor:
    """``x [M, K]`` in row-major order at a multiple of 16 bytes, with zeros up to multiples of ``rows, columns``."""
    below, right = _padding(x.shape[0], rows), _padding(x.shape[1], columns)
    if not (_is(below == 0) and _is(right == 0)):
        return torch.constant_pad_nd(x, [0, right, 0, below])
    x = x.contiguous()
    if _misaligned(x):
        return x.clone(memory_format=torch.contiguous_format)
    # one row calls itself contiguous whatever its stride
    return x if _is(x.stride(0) == x.shape[1]) else x.as_strided(x.shape, (x.shape[1], 1))


def _misaligned(x: torch.Tensor) -> bool:
    """Whether ``x`` does not start at a multiple of 16 bytes. While traced nobody knows; compilers align tensors."""
    return type(x) in PLAIN_TYPES and x.data_ptr() % _ALIGNMENT != 0


def _aligned(x: torch.Tensor) -> torch.Tensor:
    x = x.contiguous()
    return x.clone() if _misaligned(x) else x


def _padding(size: Any, multiple: int) -> Any:
    """How much ``size`` lacks to a multiple, in a form that simplifies to multiples for symbolic sizes."""
    return (size + (multiple - 1)) // multiple * multiple - size


def _is(condition: Any) -> bool:
    """Whether a condition on sizes is known to hold, without a guard on symbolic ones."""
    return condition if isinstance(condition, bool) else statically_known_true(condition)


def _quantized_product(
    kind: str,
    a: Operand,
    b: Operand,
    dtype: torch.dtype,
    alpha: float | None,
    fast: bool,
    bias: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """``[alpha *] left @ right.T (+ bias)``, ``[rows of left, rows of right]``; None if the reference has to do it."""
    if not (isinstance(a, QuantizedTensor) and isinstance(b, QuantizedTensor)) or not _takes(a, b):
        return None
    left, right = operand(a, kind == "tn"), operand(b, kind != "nt")
    if left is None or right is None:
        return None  # the reference says what is missing
    rows, columns, reduced = left[0].shape[0], right[0].shape[0], left[0].shape[1]
    output = dtype if dtype in _OUTPUTS else torch.float32
    if _is(rows == 0) or _is(columns == 0) or _is(reduced == 0):
        y = torch.zeros(rows, columns, dtype=output, device=a.device)
        return (y if bias is None else y + bias).to(dtype)
    if alpha is not None:  # in a scale it rounds no more than as a factor of the result
        left = left[0], left[1] * alpha
    if bias is not None:
        lacking = _padding(columns, _ALIGNMENT)
        bias = _aligned(bias) if _is(lacking == 0) else torch.constant_pad_nd(bias, [0, lacking])
    if type(a.quantizer) is Float8BlockQuantizer:
        y = _block_product(left, _square(a), right, _square(b), output, bias)
    else:
        y = compat.product(
            k_major(left[0]),
            k_major(right[0], _ALIGNMENT),
            _aligned(left[1]),
            _aligned(right[1]),
            dtype=output,
            bias=bias,
            fast=fast,
        )
    if not (_is(y.shape[0] == rows) and _is(y.shape[1] == columns)):
        y = y.as_strided((rows, columns), (y.shape[1], 1)).contiguous()
    return y if dtype is output else y.to(dtype)


def _takes(a: QuantizedTensor, b: QuantizedTensor) -> bool:
    """Whether there is a kernel for these formats on this device."""
    one, other = type(a.quantizer), type(b.quantizer)
    if a.quantizer.dtype is b.quantizer.dtype is torch.float8_e5m2:
        return False
    if one in PER_TENSOR and other in PER_TENSOR:
        return compat.can_scale(a.device)
    if one is other is Float8BlockQuantizer:
        return not (_square(a) and _square(b)) and compat.can_scale_blocks(a.device)
    return False


def _square(x: QuantizedTensor) -> bool:
    return x.quantizer.tile == (BLOCK, BLOCK)


def _block_product(
    left: tuple[torch.Tensor, torch.Tensor],
    left_square: bool,
    right: tuple[torch.Tensor, torch.Tensor],
    right_square: bool,
    dtype: torch.dtype,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """``left @ right.T (+ bias)`` of padded operands with scales of blocks."""
    blocks = 4 if left_square or right_square else 1
    rows = 1 if left_square else 4
    x, w = k_major(left[0], rows, blocks * BLOCK), k_major(right[0], _ALIGNMENT, blocks * BLOCK)
    return compat.block_scaled_product(
        x,
        w,
        _block_scales(left[1], left_square, blocks, rows, x),
        _block_scales(right[1], right_square, blocks, _ALIGNMENT, w),
        dtype=dtype,
        bias=bias,
    )


def _block_scales(scale: torch.Tensor, square: bool, blocks: int, rows: int, data: torch.Tensor) -> torch.Tensor:
    """The scales ``[blocks down, blocks across]`` of padded ``data``, in the order that cuBLASLt reads them in.

    Those of 128x128 tiles lie row by row, and ``blocks`` divides the number of columns; those of 1x128 blocks lie
    column by column, and ``rows`` divides the number of rows.
    """
    whole = k_major(scale, 1, blocks) if square else k_major(transposed(scale), blocks, rows).t()
    down, across = data.shape[0], (data.shape[1] + (BLOCK - 1)) // BLOCK
    if isinstance(down, int) and isinstance(across, int):
        return whole
    # Inductor has to know, without a guard, that symbolic sizes are those of the data
    if square:
        return whole.as_strided(((down + (BLOCK - 1)) // BLOCK, across), (across, 1))
    return whole.as_strided((down, across), (1, down))
