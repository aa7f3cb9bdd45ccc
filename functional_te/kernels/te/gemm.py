"""Products by ``tex.generic_gemm``: cuBLASLt with a bias epilogue, a factor and accumulation.

FP8 products take operands of one family of formats: per tensor, blocks of 128, or MXFP8. ``fast`` accumulation is for
per-tensor formats; see :data:`functional_te.kernels.backend.FAST_ACCUMULATION`. High precision products take
float16 and bfloat16; float32 would be multiplied in TF32, so the reference does that.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from functional_te.kernels import reference
from functional_te.kernels.backend import FAST_ACCUMULATION
from functional_te.kernels.reference.gemm import Operand
from functional_te.kernels.te.cast import PER_TENSOR, transposed
from functional_te.kernels.te.library import library, takes
from functional_te.kernels.te.tensors import te_layout
from functional_te.quantization.quantizer import Copy, Quantizer, as_matrix, rows_of
from functional_te.quantization.quantizers import Float8BlockQuantizer, MXFP8Quantizer
from functional_te.quantization.tensor import QuantizedTensor

__all__ = ["gemm_nn", "gemm_nt", "gemm_tn"]

_HALF = (torch.float16, torch.bfloat16)
# What Transformer Engine reserves for cuBLASLt on this generation: 32 MiB and room for aligned scalars.
_WORKSPACE = 32 * 1024 * 1024 + 1024
# Sizes of FP8 products, as cuBLASLt on Hopper takes them: the reduced size is a multiple of 16; a row of the result is
# one of 16 bytes; the rows of blocks of 128 and their right operand are multiples of 8.
_REDUCED, _ROW_BYTES, _BLOCK_ROWS = 16, 16, 8


class _Side(NamedTuple):
    """One operand as ``generic_gemm`` takes it.

    Attributes:
        tensor: a matrix, or a storage of one copy.
        rows: its rows, looked at with the reduced dimension last.
        reduced: size of the reduced dimension.
        family: None for a tensor in high precision, else the class of formats.
        kind: its dtype.
        square: whether square tiles share a scale.
    """

    tensor: Any
    rows: int
    reduced: int
    family: str | None
    kind: torch.dtype
    square: bool = False


class _Call(NamedTuple):
    """What else a product is given."""

    dtype: torch.dtype
    bias: torch.Tensor | None = None
    add: torch.Tensor | None = None
    alpha: float | None = None
    exact: bool = True


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
    """``[alpha *] a @ b.T (+ bias) (+ add)``; see :func:`functional_te.kernels.reference.gemm.gemm_nt`."""
    y = _product((a, False), (b, False), (*a.shape[:-1], b.shape[0]), _Call(dtype, bias, add, alpha, not fast))
    return reference.gemm_nt(a, b, dtype=dtype, bias=bias, add=add, alpha=alpha) if y is None else y


def gemm_nn(
    a: Operand,
    b: Operand,
    *,
    dtype: torch.dtype,
    add: torch.Tensor | None = None,
    alpha: float | None = None,
    fast: bool = FAST_ACCUMULATION[1],
) -> torch.Tensor:
    """``[alpha *] a @ b (+ add)``; see :func:`functional_te.kernels.reference.gemm.gemm_nn`."""
    y = _product((a, False), (b, True), (*a.shape[:-1], b.shape[-1]), _Call(dtype, None, add, alpha, not fast))
    return reference.gemm_nn(a, b, dtype=dtype, add=add, alpha=alpha) if y is None else y


def gemm_tn(
    a: Operand,
    b: Operand,
    *,
    dtype: torch.dtype,
    alpha: float | None = None,
    fast: bool = FAST_ACCUMULATION[2],
) -> torch.Tensor:
    """``[alpha *] a.T @ b``; see :func:`functional_te.kernels.reference.gemm.gemm_tn`."""
    y = _product((a, True), (b, True), (a.shape[-1], b.shape[-1]), _Call(dtype, None, None, alpha, not fast))
    return reference.gemm_tn(a, b, dtype=dtype, alpha=alpha) if y is None else y


def _product(a: tuple[Operand, bool], b: tuple[Operand, bool], shape: tuple[int, ...], call: _Call) -> Any:
    """``left @ right.T`` over the copies of each that reduce over their last dimension; None if no kernel takes it."""
    one, other = a[0], b[0]
    if isinstance(one, QuantizedTensor) and isinstance(other, QuantizedTensor):
        left, right = _quantized(one, a[1], call.dtype), _quantized(other, b[1], call.dtype)
    else:
        left, right = _dense(one, a[1], call.dtype), _dense(other, b[1], call.dtype)
    if left is None or right is None or not _multiplies(left, right, call.dtype):
        return None
    if rows_of((*shape, 1)) != left.rows * right.rows:  # an operand has only a copy that is padded
        return None
    return _run(left, a[1], right, b[1], shape, call)


def _run(left: _Side, left_columnwise: bool, right: _Side, right_columnwise: bool, shape: Any, call: _Call) -> Any:
    dtype, bias, add = call.dtype, call.bias, call.add
    # the epilogue adds a bias of the result's dtype, accumulation a matrix of that dtype; each sum is rounded
    inside = bias is not None and bias.dtype is dtype and (left.family is None or dtype in _HALF)
    epilogue = bias if inside else None
    into = None
    if add is not None and add.dtype is dtype and tuple(add.shape) == shape and (bias is None or inside):
        into = as_matrix(add).clone(memory_format=torch.contiguous_format)
    dtypes = library().dtypes
    # it writes [rows of B, rows of A]; a transposed copy tells it so by the flag
    y = library().kernels.generic_gemm(
        right.tensor,
        not right_columnwise,
        left.tensor,
        left_columnwise,
        into,
        None,
        dtypes[dtype],
        epilogue,
        dtypes[torch.bfloat16 if epilogue is None else epilogue.dtype],
        False,
        None,
        False,
        _workspace(),
        _WORKSPACE,
        into is not None,
        call.exact or left.family == "block",
        alpha=1.0 if call.alpha is None else call.alpha,
    )[0]
    y = y.view(shape)
    if bias is not None and not inside:
        y = y + bias
    return y if add is None or into is not None else add + y


def _workspace() -> torch.Tensor:
    """Scratch memory of one call: a buffer shared between calls would tie streams together."""
    return torch.empty(_WORKSPACE, dtype=torch.uint8, device=torch.cuda.current_device())


def _dense(x: Operand, columnwise: bool, dtype: torch.dtype) -> _Side | None:
    """A high precision operand, rounded to ``dtype`` as the reference does; 16 bits stay for a float32 result."""
    own = x.dequantize(dtype, columnwise=columnwise) if isinstance(x, QuantizedTensor) else x
    if dtype in _HALF and own.dtype is not dtype:
        own = own.to(dtype)
    if own.dtype not in _HALF or not takes(own):
        return None
    matrix = as_matrix(own).contiguous()
    rows, cols = matrix.shape
    return _Side(matrix, *((cols, rows) if columnwise else (rows, cols)), None, own.dtype)


def _quantized(x: QuantizedTensor, columnwise: bool, dtype: torch.dtype) -> _Side | None:
    """A storage of the copy for one direction, transposed from the other one if it is not there and can be."""
    copy, kind = x.copy(columnwise), x.quantizer.of(columnwise)
    if copy is None and x.quantizer.transposable:
        other, kind = x.copy(not columnwise), x.quantizer.of(not columnwise)
        if other is not None and kind.packing == 1 and takes(other.scale_inv):
            scale = other.scale_inv if kind.tile is None else other.scale_inv.t()
            copy = Copy(transposed(as_matrix(other.data)), scale)
    if copy is None or kind.packing != 1 or copy.data.device.type != "cuda":
        return None
    if copy.data.device.index != torch.cuda.current_device() or copy.data.numel() == 0:
        return None
    copy = copy._replace(data=as_matrix(copy.data).contiguous())
    rows, reduced = copy.data.shape
    family = _family(kind)
    if family is None or reduced % _REDUCED:
        return None
    square = kind.tile is not None and kind.tile[0] > 1
    tensor = _storage(family, copy, kind, columnwise, dtype)
    return _Side(tensor, rows, reduced, family, copy.data.dtype, square)


@functools.lru_cache(256)
def _family(kind: Quantizer) -> str | None:
    if isinstance(kind, PER_TENSOR):
        return "per_tensor"
    if isinstance(kind, Float8BlockQuantizer):
        # newer GPUs emulate blocks of 128 with MXFP8, which needs power-of-two scales
        native = torch.cuda.get_device_capability() < (10, 0)
        return "block" if native or kind.power_2_scale else None
    newer = torch.cuda.get_device_capability() >= (10, 0)
    return "mxfp8" if isinstance(kind, MXFP8Quantizer) and not kind.with_2d_quantization and newer else None


def _storage(family: str, copy: Copy, kind: Quantizer, columnwise: bool, dtype: torch.dtype) -> Any:
    """One copy as a storage of Transformer Engine."""
    data, scale = te_layout(copy, kind, columnwise)
    common = {"fp8_dtype": library().dtypes[copy.data.dtype], "fake_dtype": dtype, "quantizer": None}
    if family == "per_tensor":
        names = {"data": None, "data_transpose": None, "data_transpose" if columnwise else "data": data}
        return library().storage.per_tensor(**names, fp8_scale_inv=scale, **common)
    fields: dict[str, Any] = dict.fromkeys(
        ("rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv")
    )
    name = "columnwise" if columnwise else "rowwise"
    fields[f"{name}_data"] = data.contiguous()
    if family == "block":
        fields[f"{name}_scale_inv"] = _padded(scale, 1, 4)
        return library().storage.block(**fields, is_2D_scaled=kind.tile is not None and kind.tile[0] > 1, **common)
    fields[f"{name}_scale_inv"] = _padded(scale, 4, 128) if columnwise else _padded(scale, 128, 4)
    return library().storage.mxfp8(**fields, with_gemm_swizzled_scales=False, **common)


def _padded(scale: torch.Tensor, down: int, across: int) -> torch.Tensor:
    """A contiguous grid padded with zeros to multiples of ``down`` and ``across``."""
    below, right = -scale.shape[0] % down, -scale.shape[1] % across
    return torch.constant_pad_nd(scale, [0, right, 0, below]) if below or right else scale.contiguous()


def _multiplies(left: _Side, right: _Side, dtype: torch.dtype) -> bool:
    """Whether cuBLASLt has a kernel for two operands."""
    if left.family != right.family or left.reduced != right.reduced:
        return False
    if left.family is None:
        return left.kind is right.kind and dtype in (left.kind, torch.float32)
    if left.kind is right.kind is torch.float8_e5m2 or right.rows * dtype.itemsize % _ROW_BYTES:
        return False
    if left.family != "block":
        return True
    # two squares have no kernel
    whole = right.rows % _BLOCK_ROWS == 0 and (left.square or left.rows % _BLOCK_ROWS == 0)
    return whole and not (left.square and right.square)
