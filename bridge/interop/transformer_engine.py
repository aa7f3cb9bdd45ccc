"""Quantized tensors of Transformer Engine: the same bits in their classes, and back.

The layouts of their FP8 classes are in :mod:`functional_te.kernels.te.tensors`; an ``NVFP4Tensor`` of an NVFP4Quantizer
has padded grids, and a row of scales per row also in 2-D. Every class is read also as the bare ``...Storage``. Their
classes go by name, so reading one imports nothing.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from bridge.interop.torchao import spread_rows, take_rows
from functional_te._errors import type_error, value_error
from functional_te.kernels.te.tensors import cut_grid, read_block, read_mxfp8, read_per_tensor, te_layout
from functional_te.quantization import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8DelayedScalingQuantizer,
    HybridQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    QuantizedTensor,
    Quantizer,
)
from functional_te.quantization.quantizer import Copy, as_matrix, rows_of
from functional_te.quantization.recipes.foreign import as_quantizer
from functional_te.quantization.serialization import check_copies

__all__ = ["from_transformer_engine", "te_fields", "to_transformer_engine"]

_ELEMENT = {"kFloat8E4M3": torch.float8_e4m3fn, "kFloat8E5M2": torch.float8_e5m2}
_PER_TENSOR = (Float8CurrentScalingQuantizer, Float8DelayedScalingQuantizer)


def from_transformer_engine(tensor: Any, quantizer: Quantizer | None = None) -> QuantizedTensor:
    """A quantized tensor of Transformer Engine as one of this library: the copies it has, with the same bits.

    Tensors whose layouts agree are shared, not copied. A bare storage that does not know its nominal dtype is float32.

    Args:
        tensor: a ``Float8Tensor``, ``Float8BlockwiseQTensor``, ``MXFP8Tensor``, ``NVFP4Tensor`` or its storage.
        quantizer: the value to record, which must make tensors of this layout. Default: that of the tensor's own
            quantizer; delayed scaling with default settings for a ``Float8Quantizer``, whose history is elsewhere.

    Raises:
        TypeError: something else.
        ValueError: a tensor without data, scales swizzled for a GPU or in another format, a Hadamard transform with
            other signs, or a ``quantizer`` that does not make such tensors.
    """
    where = "from_transformer_engine"
    names = [kind.__name__.removesuffix("Storage").removesuffix("Base") for kind in type(tensor).__mro__]
    name = next((name for name in names if name in _READERS), None)
    if name is None:
        raise type_error(where, "tensor", f"one of {sorted(_READERS)} or its storage", type(tensor).__name__)
    if getattr(tensor, "_with_gemm_swizzled_scales", False):
        raise value_error(where, "tensor", "scales in order", "swizzled ones", "Quantize without optimize_for_gemm.")
    kinds, default, read = _READERS[name]
    if quantizer is None:
        quantizer = _quantizer_of(tensor, default)
    if not isinstance(quantizer, kinds):
        raise value_error(where, "quantizer", f"a quantizer of a {name}", quantizer)
    row, column = read(tensor, quantizer)
    if row is None and column is None:
        raise value_error(where, "tensor", "a tensor with data", "none")
    nominal = getattr(tensor, "dtype", None) or getattr(tensor, "_dtype", None)
    made = QuantizedTensor(
        rowwise_data=None if row is None else row.data,
        rowwise_scale_inv=None if row is None else row.scale_inv,
        rowwise_amax=None if row is None else row.amax,
        columnwise_data=None if column is None else column.data,
        columnwise_scale_inv=None if column is None else column.scale_inv,
        columnwise_amax=None if column is None else column.amax,
        dtype=nominal if isinstance(nominal, torch.dtype) else torch.float32,
        quantizer=quantizer.with_usage(row is not None, column is not None),
    )
    check_copies(made, where, "tensor")
    return made


def to_transformer_engine(q: QuantizedTensor) -> Any:
    """A quantized tensor as one of Transformer Engine, with the same bits; the data are copied.

    Its quantizer is made of the value in ``q``. That of delayed scaling has the scale of this very tensor.

    Raises:
        ImportError: Transformer Engine is not installed.
        TypeError: ``q`` is no quantized tensor.
        ValueError: two formats in one tensor, or a size that Transformer Engine does not allow.
    """
    fields = te_fields(q)
    maker, shape = _te_quantizer(q), q.shape
    made = maker.make_empty(shape, dtype=q.dtype, device=q.device)
    for name, value in fields.items():
        target = getattr(made, name)
        if target is None:
            # a GPU that multiplies FP8 in every layout has no transposed copy
            if name == "_transpose" and "_data" in fields:
                continue
            raise value_error("to_transformer_engine", "q", f"what fills {name}", "a tensor without it there")
        if name.endswith("_scale_inv") and value.dim() == 2:
            # their grids are padded, which no product reads
            target.zero_()
            target[: value.shape[0], : value.shape[1]].copy_(value)
        else:
            target.copy_(value.reshape(target.shape))
    if "_transpose" in fields:
        made._transpose_invalid = made._transpose is None
    return made


# ---------------------------------------------------------------------------- layouts, from Transformer Engine


def _element_of(tensor: Any) -> torch.dtype:
    name = str(getattr(tensor._fp8_dtype, "name", tensor._fp8_dtype)).rpartition(".")[-1]
    if name not in _ELEMENT:
        raise value_error("from_transformer_engine", "tensor", f"elements among {sorted(_ELEMENT)}", name)
    return _ELEMENT[name]


def _quantizer_of(tensor: Any, default: Callable[[Any], Quantizer]) -> Quantizer:
    own = getattr(tensor, "_quantizer", None)
    if own is None:
        return default(tensor)
    if type(own).__name__ == "Float8Quantizer":
        return Float8DelayedScalingQuantizer(dtype=_element_of(tensor))
    made = as_quantizer(own)
    assert isinstance(made, Quantizer)
    return made


def _read_per_tensor(tensor: Any, quantizer: Quantizer) -> tuple[Copy | None, Copy | None]:
    return read_per_tensor(tensor, _element_of(tensor))


def _read_block(tensor: Any, quantizer: Quantizer) -> tuple[Copy | None, Copy | None]:
    layout = getattr(tensor, "_data_format", None)
    if layout is not None and str(getattr(layout, "name", layout)).rpartition(".")[-1] != "GEMM_READY":
        raise value_error("from_transformer_engine", "tensor", "the format GEMM_READY", layout)
    assert quantizer.tile is not None
    if tensor._is_2D_scaled != (quantizer.tile[0] > 1):
        wanted = f"block_scaling_dim {2 if tensor._is_2D_scaled else 1}"
        raise value_error("from_transformer_engine", "quantizer", wanted, quantizer)
    return read_block(tensor, _element_of(tensor), quantizer.tile)


def _read_mxfp8(tensor: Any, quantizer: Quantizer) -> tuple[Copy | None, Copy | None]:
    assert quantizer.tile is not None
    height, width = quantizer.tile
    row, column = (
        None if copy is None else copy._replace(scale_inv=take_rows(copy.scale_inv, height, "from_transformer_engine"))
        for copy in read_mxfp8(tensor, _element_of(tensor), width)
    )
    return row, column


def _read_nvfp4(tensor: Any, quantizer: Quantizer) -> tuple[Copy | None, Copy | None]:
    assert quantizer.tile is not None
    (height, width), copies = quantizer.tile, list[Copy | None]()
    for name in ("rowwise", "columnwise"):
        data, scale, amax = (getattr(tensor, f"_{field}") for field in _nvfp4_names(name))
        if data is None:
            copies.append(None)
            continue
        signs = getattr(getattr(tensor, "_quantizer", None), "rht_matrix_random_sign_mask_t", None)
        if name == "columnwise" and quantizer.rotates and signs == 0:
            raise value_error("from_transformer_engine", "tensor", "a Hadamard transform with its signs", "none")
        if name == "columnwise":
            data = data.reshape(data.shape[0], rows_of((*data.shape[1:], 1)))
        rows, packed = as_matrix(data).shape
        grid = cut_grid(scale, rows, -(-2 * packed // width), False).view(torch.float8_e4m3fn)
        copies.append(Copy(data, take_rows(grid, height, "from_transformer_engine"), amax.reshape(-1)))
    return copies[0], copies[1]


def _nvfp4_names(name: str) -> tuple[str, str, str]:
    return f"{name}_data", f"{name}_scale_inv", f"amax_{name}"


_READERS: dict[str, tuple[Any, Callable[[Any], Quantizer], Callable[..., tuple[Copy | None, Copy | None]]]] = {
    "Float8Tensor": (_PER_TENSOR, lambda t: Float8CurrentScalingQuantizer(dtype=_element_of(t)), _read_per_tensor),
    "Float8BlockwiseQTensor": (
        Float8BlockQuantizer,
        lambda t: Float8BlockQuantizer(dtype=_element_of(t), block_scaling_dim=2 if t._is_2D_scaled else 1),
        _read_block,
    ),
    "MXFP8Tensor": (MXFP8Quantizer, lambda t: MXFP8Quantizer(dtype=_element_of(t)), _read_mxfp8),
    "NVFP4Tensor": (
        NVFP4Quantizer,
        lambda t: NVFP4Quantizer(row_scaled=t._amax_rowwise is not None and t._amax_rowwise.numel() > 1),
        _read_nvfp4,
    ),
}


# ---------------------------------------------------------------------------- layouts, to Transformer Engine


def te_fields(q: QuantizedTensor) -> dict[str, torch.Tensor]:
    """The tensors of ``q`` under Transformer Engine's attribute names and in its layouts, with grids not yet padded.

    Data are uint8, transposed data ``[K, M]``.

    Raises:
        TypeError: ``q`` is no quantized tensor.
        ValueError: a tensor that Transformer Engine cannot hold.
    """
    where = "to_transformer_engine"
    if not isinstance(q, QuantizedTensor):
        raise type_error(where, "q", "a QuantizedTensor", type(q).__name__)
    quantizer = q.quantizer
    if isinstance(quantizer, HybridQuantizer) or quantizer is None:
        raise value_error(where, "q.quantizer", "one format for both copies", quantizer)
    multiple = 32 if isinstance(quantizer, MXFP8Quantizer) else 16 if isinstance(quantizer, NVFP4Quantizer) else 1
    if rows_of(q.shape) % multiple or (q.shape[-1:] and q.shape[-1] % multiple):
        raise value_error(where, "q", f"a matrix whose sizes are multiples of {multiple}", f"shape {q.shape}")
    fields: dict[str, torch.Tensor] = {}
    for columnwise, name in ((False, "rowwise"), (True, "columnwise")):
        copy = q.copy(columnwise)
        if copy is None:
            continue
        if quantizer.tile is None:
            data, fields["_scale_inv"] = te_layout(copy, quantizer, columnwise)
            fields["_transpose" if columnwise else "_data"] = data
            continue
        if not isinstance(quantizer, Float8BlockQuantizer):
            scale = spread_rows(copy.scale_inv, as_matrix(copy.data).shape[0], quantizer.tile[0]).view(torch.uint8)
            copy = copy._replace(scale_inv=scale)
        fields[f"_{name}_data"], fields[f"_{name}_scale_inv"] = te_layout(copy, quantizer, columnwise)
        if copy.amax is not None:
            fields[f"_amax_{name}"] = copy.amax
    return fields


def _te_class(module: str, name: str) -> Any:
    try:
        return getattr(importlib.import_module(f"transformer_engine.pytorch.tensor.{module}"), name)
    except (ImportError, AttributeError) as error:
        message = f"to_transformer_engine: {name} is missing; pip install 'transformer_engine[pytorch]==2.20.2'."
        raise ImportError(message) from error


def _te_quantizer(q: QuantizedTensor) -> Any:
    """A quantizer of Transformer Engine that makes tensors like ``q``."""
    own = q.quantizer
    usage: dict[str, Any] = {"rowwise": q.rowwise_data is not None, "columnwise": q.columnwise_data is not None}
    if isinstance(own, NVFP4Quantizer):
        return _te_class("nvfp4_tensor", "NVFP4Quantizer")(**_nvfp4_options(own), **usage)
    made = _te_class(*_TE_CLASSES[type(own)])
    # which of the two modules has it differs between versions
    types = getattr(importlib.import_module("transformer_engine.pytorch"), "DType", None)
    types = importlib.import_module("transformer_engine_torch").DType if types is None else types
    dtype = next(getattr(types, name) for name, element in _ELEMENT.items() if element is own.dtype)
    if isinstance(own, Float8DelayedScalingQuantizer):
        return made(q.scale_inv.reciprocal(), torch.zeros_like(q.scale_inv), dtype, **usage)
    if isinstance(own, MXFP8Quantizer):
        return made(dtype, with_2d_quantization=own.with_2d_quantization, **usage)
    assert isinstance(own, (Float8CurrentScalingQuantizer, Float8BlockQuantizer))
    usage |= {"force_pow_2_scales": own.power_2_scale, "amax_epsilon": own.amax_epsilon}
    if isinstance(own, Float8BlockQuantizer):
        return made(dtype, block_scaling_dim=own.block_scaling_dim, **usage)
    return made(dtype, q.device, **usage)


_TE_CLASSES: dict[Any, tuple[str, str]] = {
    Float8CurrentScalingQuantizer: ("float8_tensor", "Float8CurrentScalingQuantizer"),
    Float8DelayedScalingQuantizer: ("float8_tensor", "Float8Quantizer"),
    Float8BlockQuantizer: ("float8_blockwise_tensor", "Float8BlockQuantizer"),
    MXFP8Quantizer: ("mxfp8_tensor", "MXFP8Quantizer"),
}


def _nvfp4_options(own: NVFP4Quantizer) -> dict[str, Any]:
    """Constructor arguments; those that older versions do not know only where they matter."""
    options: dict[str, Any] = {
        "with_rht": own.with_rht,
        "with_post_rht_amax": own.with_rht,
        "with_2d_quantization": own.with_2d_quantization,
        "stochastic_rounding": own.stochastic_rounding,
    }
    if own.row_scaled:
        options["row_scaled_nvfp4"] = True
    if own.four_over_six is not None:
        options |= {"nvfp4_use_4over6": True, "nvfp4_4over6_err_mode": own.four_over_six}
    if own.e4m3_max != 448:
        options["nvfp4_e4m3_max"] = own.e4m3_max
    return options
