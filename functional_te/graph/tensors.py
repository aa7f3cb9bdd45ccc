"""From meta tensors and quantizers to what a graph says of them."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch

from functional_te import pytree
from functional_te.graph.value import Tensor
from functional_te.quantization.formats import ELEMENT_NAMES
from functional_te.quantization.quantizers import Quantizer
from functional_te.quantization.tensor import CachedWeight, QuantizedTensor

__all__ = ["dtype_name", "format_of", "nbytes", "tensor_of"]


def dtype_name(dtype: torch.dtype) -> str:
    """``"bfloat16"`` for ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")


@functools.lru_cache(1024)
def format_of(quantizer: Quantizer) -> str:
    """Elements and scales of a quantizer: ``"E4M3 per tensor"``, ``"E4M3 1x32"``, or both of a hybrid one."""
    own = [_one(quantizer.of(columnwise)) for columnwise in (False, True)]
    return own[0] if own[0] == own[1] or not quantizer.columnwise else f"{own[0]} / {own[1]}"


def _one(quantizer: Quantizer) -> str:
    name = dtype_name(quantizer.dtype)
    tile = quantizer.tile
    return f"{ELEMENT_NAMES.get(name, name)} " + ("per tensor" if tile is None else f"{tile[0]}x{tile[1]}")


def nbytes(value: Any) -> int:
    """Bytes of a tensor or of all tensors of a tree."""
    if isinstance(value, torch.Tensor):
        return value.nbytes
    flat: list[Any] = []
    pytree.structure(value, flat)
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in flat if hasattr(leaf, "dtype"))


@functools.lru_cache(1024)
def _plain(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    name = dtype_name(dtype)
    return Tensor(shape, name, name, "", (), math.prod(shape) * dtype.itemsize)


def tensor_of(value: Any) -> Tensor:
    """The description of a meta tensor, or of a quantized tensor of some."""
    if isinstance(value, CachedWeight):
        value = value.quantized if value.stored else value.value
    if not isinstance(value, QuantizedTensor):
        return _plain(tuple(value.shape), value.dtype)
    parts = value.rowwise_data, value.columnwise_data
    copies = tuple([copy for copy, data in zip(("rowwise", "columnwise"), parts, strict=True) if data is not None])
    kind, form = type(value.quantizer).__name__, _format_of_copies(value.quantizer, copies)
    return Tensor(tuple(value.shape), dtype_name(value.dtype), form, kind, copies, nbytes(value))


@functools.lru_cache(1024)
def _format_of_copies(quantizer: Quantizer, copies: tuple[str, ...]) -> str:
    """The format of the copies that are left, not of those that were made."""
    own = quantizer.with_usage("rowwise" in copies, "columnwise" in copies)
    return format_of(own if len(copies) != 1 else own.of(copies[0] == "columnwise"))
