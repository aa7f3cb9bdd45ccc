"""Quantized tensors of torchao: the same bits in their classes, and back.

==========================================  ==========================================================
quantizer                                   torchao
==========================================  ==========================================================
per tensor (current and delayed scaling)    ``torchao.quantization.Float8Tensor``, per tensor
``Float8BlockQuantizer``                    ``Float8Tensor`` with blocks of 1x128 or 128x128
``MXFP8Quantizer``                          ``torchao.prototype.mx_formats.mx_tensor.MXTensor``
``NVFP4Quantizer``                          ``torchao.prototype.mx_formats.nvfp4_tensor.NVFP4Tensor``
==========================================  ==========================================================

Their tensors hold one copy: the rowwise one travels, the columnwise one is left behind. Both sides dequantize to the
same bits, with three exceptions, which are theirs: an ``MXTensor`` multiplies in the dtype it returns, and float16
cannot hold every scale; an ``NVFP4Tensor`` multiplies its two scales first, which rounds once more, so the last bit
of a float32 may differ; a ``Float8TrainingTensor`` (accepted by :func:`from_torchao`) divides by its scale in the
nominal dtype.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from typing import Any

import torch

from functional_te._errors import type_error, value_error
from functional_te.quantization import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8DelayedScalingQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    QuantizedTensor,
    Quantizer,
)
from functional_te.quantization.fp8_block import BLOCK, block_grid
from functional_te.quantization.nvfp4 import E2M1_MAX, tensor_factor
from functional_te.quantization.quantizer import Copy, rows_of
from functional_te.quantization.serialization import check_copies

__all__ = ["from_torchao", "spread_rows", "take_rows", "to_torchao", "unswizzled"]

_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def to_torchao(q: QuantizedTensor) -> torch.Tensor:
    """The rowwise copy of ``q`` as a tensor of torchao, with the same bits; nothing is rounded again.

    Tiles that several rows share have their scale repeated for each row, where torchao knows rows only (MX, NVFP4).

    Raises:
        ImportError: torchao is not installed, or has no such tensor.
        TypeError: ``q`` is no quantized tensor.
        ValueError: no rowwise copy; a row-scaled NVFP4 tensor, or one without 2 or 3 dimensions; blocks of 128 that do
            not divide the tensor, or tiles of more than two dimensions.
    """
    where = "to_torchao"
    if not isinstance(q, QuantizedTensor):
        raise type_error(where, "q", "a QuantizedTensor", type(q).__name__)
    copy = q.copy(False)
    if copy is None:
        raise value_error(where, "q", "a rowwise copy", "a columnwise copy only", "See QuantizedTensor.requantize().")
    quantizer = q.quantizer.of(False)
    for kind, make in _MAKERS.items():
        if isinstance(quantizer, kind):
            return make(copy, quantizer, tuple(q.shape), q.dtype)
    raise value_error(where, "q.quantizer", "a per-tensor, block, MXFP8 or NVFP4 quantizer", quantizer)


def from_torchao(tensor: torch.Tensor, quantizer: Quantizer | None = None) -> QuantizedTensor:
    """A tensor of torchao as a quantized tensor with a rowwise copy of the same bits. torchao is not imported.

    Scales that are swizzled for a GPU are put in order. A scale per row becomes the scale of each of its 1x128 blocks.
    An NVFP4 amax is ``per_tensor_scale * 6 * 448``, rounded to float32: going back may give a scale that differs in
    the last bit, but one that came from :func:`to_torchao` comes back as it was.

    Args:
        tensor: a ``Float8Tensor``, ``Float8TrainingTensor``, ``MXTensor`` or ``NVFP4Tensor``.
        quantizer: the value to record, which must make tensors of this layout; torchao's tensors do not say how their
            scales were chosen. Default: current scaling, blocks, MXFP8 or NVFP4 with default settings.

    Raises:
        TypeError: something else.
        ValueError: a layout without a quantizer here: transposed, another block size, element type or axis, a scale
            per expert; or one that ``quantizer`` does not make.
    """
    where = "from_torchao"
    names = [kind.__name__ for kind in type(tensor).__mro__ if kind.__module__.partition(".")[0] == "torchao"]
    found = next((_READERS[name] for name in names if name in _READERS), None)
    if found is None:
        raise type_error(where, "tensor", f"a tensor of torchao among {sorted(_READERS)}", type(tensor).__name__)
    candidates = found(tensor)
    if quantizer is None:
        quantizer, copy = candidates[0]
    else:
        copy = _matching(candidates, quantizer)
    own, amax = quantizer.of(False), copy.amax
    if isinstance(own, NVFP4Quantizer):
        # what tensor_factor() undoes; so far the copy has torchao's scale of the tensor in its place
        amax = amax * (E2M1_MAX * own.e4m3_max)
    made = QuantizedTensor(
        rowwise_data=copy.data,
        rowwise_scale_inv=copy.scale_inv,
        rowwise_amax=amax,
        dtype=tensor.dtype,
        quantizer=quantizer,
    )
    check_copies(made, where, "tensor")
    return made


def _matching(candidates: list[tuple[Quantizer, Copy]], quantizer: Quantizer) -> Copy:
    """The copy, among the ways to read a tensor, that ``quantizer`` could have made."""
    own = quantizer.of(False)
    for default, copy in candidates:
        kinds = _PER_TENSOR if isinstance(default, _PER_TENSOR) else (type(default),)
        if not isinstance(own, kinds) or own.dtype is not default.dtype or getattr(own, "row_scaled", False):
            continue
        if own.tile == default.tile:
            return copy
        if own.tile is not None and default.tile is not None and own.tile[1] == default.tile[1] == own.tile[0]:
            return copy._replace(scale_inv=take_rows(copy.scale_inv, own.tile[0], "from_torchao"))
    wanted = f"a quantizer like {candidates[0][0]!r}"
    raise value_error("from_torchao", "quantizer", wanted, quantizer)


# ---------------------------------------------------------------------------- to torchao


def _class(module: str, name: str) -> Any:
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ImportError(f"to_torchao: {module}.{name} is missing; pip install 'torchao>=0.18'.") from error


def spread_rows(grid: torch.Tensor, rows: int, height: int) -> torch.Tensor:
    """One row of scales per row of elements, from one row of scales per ``height`` rows."""
    if height == 1:
        return grid
    return grid.view(torch.uint8).repeat_interleave(height, 0)[:rows].view(grid.dtype)


def take_rows(grid: torch.Tensor, height: int, where: str) -> torch.Tensor:
    """The inverse of :func:`spread_rows`.

    Raises:
        ValueError: the rows of a tile differ.
    """
    taken = grid[::height].contiguous()
    if not torch.equal(spread_rows(taken, grid.shape[0], height).view(torch.uint8), grid.view(torch.uint8)):
        raise value_error(where, "scales", f"the same scales in {height} rows", "others")
    return taken


def _make_float8(copy: Copy, quantizer: Quantizer, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    if quantizer.tile is None:
        block, scale = list(shape), copy.scale_inv.reshape([1] * len(shape))
    else:
        height, width = quantizer.tile
        if len(shape) < 2 or (height > 1 and len(shape) > 2):
            raise value_error("to_torchao", "q", "two dimensions", f"shape {shape}", "Reshape it first.")
        if shape[-1] % width or shape[-2] % height:
            raise value_error("to_torchao", "q", f"a shape that {height}x{width} divides", f"shape {shape}")
        block = [1] * (len(shape) - 2) + [height, width]
        scale = copy.scale_inv.reshape(*shape[:-2], shape[-2] // height, shape[-1] // width)
    made = _class("torchao.quantization", "Float8Tensor")
    return made(copy.data.contiguous(), scale, block_size=block, dtype=dtype)


def _make_mx(copy: Copy, quantizer: Quantizer, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    assert quantizer.tile is not None
    scale = spread_rows(copy.scale_inv, rows_of(shape), quantizer.tile[0]).contiguous()
    made = _class("torchao.prototype.mx_formats.mx_tensor", "MXTensor")
    preference = _class("torchao.quantization.quantize_.common", "KernelPreference")
    return made(
        copy.data.contiguous(),
        scale.view(torch.float8_e8m0fnu).reshape(*shape[:-1], shape[-1] // quantizer.tile[1]),
        elem_dtype=quantizer.dtype,
        block_size=quantizer.tile[1],
        orig_dtype=dtype,
        kernel_preference=preference.EMULATED,
        act_quant_kwargs=None,
        is_swizzled_scales=False,
    )


def _make_nvfp4(copy: Copy, quantizer: Quantizer, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    assert isinstance(quantizer, NVFP4Quantizer)
    if quantizer.row_scaled:
        raise value_error("to_torchao", "q", "one amax for the tensor", "one per row")
    if len(shape) not in (2, 3):
        raise value_error("to_torchao", "q", "2 or 3 dimensions", f"shape {shape}", "Reshape it first.")
    scale = spread_rows(copy.scale_inv, rows_of(shape), quantizer.tile[0]).contiguous()
    made = _class("torchao.prototype.mx_formats.nvfp4_tensor", "NVFP4Tensor")
    return made(
        copy.data.contiguous(),
        scale.reshape(*shape[:-1], shape[-1] // quantizer.tile[1]),
        block_size=quantizer.tile[1],
        orig_dtype=dtype,
        per_tensor_scale=tensor_factor(copy.amax, float(quantizer.e4m3_max)).reshape(()),
    )


_PER_TENSOR = (Float8CurrentScalingQuantizer, Float8DelayedScalingQuantizer)
_MAKERS: dict[Any, Callable[..., torch.Tensor]] = {
    _PER_TENSOR: _make_float8,
    Float8BlockQuantizer: _make_float8,
    MXFP8Quantizer: _make_mx,
    NVFP4Quantizer: _make_nvfp4,
}


# ---------------------------------------------------------------------------- from torchao


def unswizzled(scale: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
    """A grid ``[rows, cols]`` of scales in order, from tiles of 128x4 in the layout of Blackwell's tensor cores.

    There the grid is padded to whole tiles, and a tile is 32 rows of 16: row ``r``, column ``c`` of the tile stands at
    row ``r % 32``, column ``4 * (r // 32) + c``. Layout: NVIDIA, cuBLAS documentation, "1D block scaling factors".
    """
    down, across = block_grid(rows, cols, (128, 4))
    tiles = scale.reshape(down, across, 32, 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(down * 128, across * 4)[:rows, :cols].contiguous()


def _unsupported(wanted: str, got: Any) -> ValueError:
    return value_error("from_torchao", "tensor", wanted, got)


def _data(data: torch.Tensor) -> torch.Tensor:
    if not data.is_contiguous():
        raise _unsupported("contiguous data", "a transposed tensor")
    return data


def _element(dtype: Any) -> torch.dtype:
    if dtype not in _FP8:
        raise _unsupported("elements of float8_e4m3fn or float8_e5m2", dtype)
    return dtype


def _read_float8(tensor: Any) -> list[tuple[Quantizer, Copy]]:
    block = None if tensor.block_size is None else tuple(tensor.block_size)
    return _float8(_data(tensor.qdata), tensor.scale.to(torch.float32), block)


def _read_training(tensor: Any) -> list[tuple[Quantizer, Copy]]:
    shape, scale = tuple(tensor._data.shape), tensor._scale.to(torch.float32)
    block = (1,) * (len(shape) - 1) + shape[-1:] if tensor._axiswise_dim == -1 else None
    if tensor._axiswise_dim == 0 and scale.numel() != 1:
        raise _unsupported("a scale of the tensor or of each row", "a scale of each column")
    return _float8(_data(tensor._data), scale.reciprocal(), block)


def _float8(data: torch.Tensor, scale: torch.Tensor, block: tuple[int, ...] | None) -> list[tuple[Quantizer, Copy]]:
    """Every way to read FP8 data with these blocks, the most likely first."""
    dtype, shape, found = _element(data.dtype), tuple(data.shape), list[tuple[Quantizer, Copy]]()
    if scale.numel() == 1:
        found.append((Float8CurrentScalingQuantizer(dtype=dtype), Copy(data, scale.reshape(1))))
    if block and len(block) == len(shape) > 0:
        rows, cols = rows_of(shape), shape[-1]
        one_row = math.prod(block[:-1]) == 1
        if one_row and block[-1] in (BLOCK, cols):
            grid = scale.reshape(rows, -1).expand(rows, math.ceil(cols / BLOCK)).contiguous()
            found.append((Float8BlockQuantizer(dtype=dtype, block_scaling_dim=1), Copy(data, grid)))
        if block == (BLOCK, BLOCK):
            found.append((Float8BlockQuantizer(dtype=dtype), Copy(data, scale.contiguous())))
    if not found:
        raise _unsupported("one scale, a scale per row, or blocks of 1x128 or 128x128", f"blocks {block}")
    return found


def _block_scales(tensor: Any, shape: tuple[int, ...], size: int) -> torch.Tensor:
    """The block scales as a grid ``[rows, blocks]``."""
    if tensor.block_size != size:
        raise _unsupported(f"blocks of {size}", tensor.block_size)
    rows, cols = rows_of(shape), shape[-1] // size
    if tensor.is_swizzled_scales:
        return unswizzled(tensor.scale, rows, cols)
    return tensor.scale.reshape(rows, cols).contiguous()


def _read_mx(tensor: Any) -> list[tuple[Quantizer, Copy]]:
    quantizer = MXFP8Quantizer(dtype=_element(tensor.elem_dtype))
    data = _data(tensor.qdata)
    scale = _block_scales(tensor, tuple(data.shape), quantizer.tile[1]).view(torch.uint8)
    return [(quantizer, Copy(data, scale))]


def _read_nvfp4(tensor: Any) -> list[tuple[Quantizer, Copy]]:
    quantizer = NVFP4Quantizer()
    data, factor = _data(tensor.qdata).view(torch.uint8), tensor.per_tensor_scale
    if factor is None:
        factor = torch.ones((), dtype=torch.float32, device=data.device)
    if factor.numel() != 1:
        raise _unsupported("one scale for the tensor", f"{factor.numel()} scales")
    scale = _block_scales(tensor, (*data.shape[:-1], 2 * data.shape[-1]), quantizer.tile[1])
    return [(quantizer, Copy(data, scale, factor.to(torch.float32).reshape(1)))]


_READERS: dict[str, Callable[[Any], list[tuple[Quantizer, Copy]]]] = {
    "Float8Tensor": _read_float8,
    "Float8TrainingTensor": _read_training,
    "MXTensor": _read_mx,
    "NVFP4Tensor": _read_nvfp4,
}
