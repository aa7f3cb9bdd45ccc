"""Casts: quantizer objects of Transformer Engine, what they make as a :class:`QuantizedTensor`, and the bias gradient.

No object that holds tensors outlives a call: a quantizer of delayed scaling is made for every cast, around the given
scale and a new amax; those of other formats hold settings only and are kept.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from functional_te.kernels import reference
from functional_te.kernels.te.library import library, multiplies_every_layout, takes
from functional_te.kernels.te.tensors import read_block, read_mxfp8, read_per_tensor
from functional_te.quantization.groups import GroupLayout
from functional_te.quantization.quantizer import Copy, Quantizer, as_matrix
from functional_te.quantization.quantizers import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8DelayedScalingQuantizer,
    MXFP8Quantizer,
)
from functional_te.quantization.tensor import BoundQuantizer, QuantizedTensor

__all__ = ["Maker", "cast_bias", "fuses", "maker", "quantize", "result", "sums_rows", "transposed", "transposes"]

PER_TENSOR = (Float8CurrentScalingQuantizer, Float8DelayedScalingQuantizer)


class Maker(NamedTuple):
    """A quantizer of Transformer Engine for one cast.

    Attributes:
        own: the object.
        amax: float32 ``[1]`` that the kernel puts the observed amax in (delayed scaling), or None.
    """

    own: Any
    amax: torch.Tensor | None = None


def maker(bound: BoundQuantizer, device: torch.device, *, transpose: bool = True) -> Maker | None:
    """What makes the copies that a quantizer wants; None for a format or setting without kernels.

    Args:
        bound: the quantizer.
        device: where it casts.
        transpose: whether it makes transposed copies of delayed scaling too; if not, :func:`result` does.
    """
    quantizer: Any = bound.quantizer
    kind = type(quantizer)
    if kind is Float8DelayedScalingQuantizer:
        assert bound.scale is not None
        amax = torch.zeros(1, dtype=torch.float32, device=device)
        classes, dtype = library().per_tensor, library().dtypes[quantizer.dtype]
        # their kernels write no transposed copy alone
        columnwise = transpose and quantizer.columnwise
        own = classes.Float8Quantizer(bound.scale, amax, dtype, rowwise=True, columnwise=columnwise)
        own.internal = True
        return Maker(own, amax)
    if kind in (Float8CurrentScalingQuantizer, Float8BlockQuantizer):
        return Maker(_stateless(quantizer, device.type))
    if kind is MXFP8Quantizer and not quantizer.with_2d_quantization and torch.cuda.get_device_capability() >= (10, 0):
        return Maker(_stateless(quantizer, device.type))
    return None


@functools.lru_cache(256)
def _stateless(quantizer: Any, device: str) -> Any:
    """A quantizer object of settings only."""
    dtype = library().dtypes[quantizer.dtype]
    usage: dict[str, Any] = {"rowwise": quantizer.rowwise, "columnwise": quantizer.columnwise}
    if isinstance(quantizer, MXFP8Quantizer):
        own = library().mxfp8.MXFP8Quantizer(dtype, **usage)
    else:
        usage |= {"force_pow_2_scales": quantizer.power_2_scale, "amax_epsilon": quantizer.amax_epsilon}
        if isinstance(quantizer, Float8BlockQuantizer):
            dim = quantizer.block_scaling_dim
            own = library().block.Float8BlockQuantizer(dtype, block_scaling_dim=dim, **usage)
        else:
            usage["rowwise"] = True  # as above
            own = library().per_tensor.Float8CurrentScalingQuantizer(dtype, device, **usage)
    own.internal = True
    return own


def fuses(bound: BoundQuantizer | None) -> bool:
    """Whether a producer's kernel can end with this cast and keep to the contract of :meth:`Backend.store`.

    That is delayed scaling, which casts float32 results. Of the others the cast has to see the rounded result: in
    block scaling Transformer Engine itself runs two kernels, and in current scaling its producers take the amax of the
    result before it is rounded.
    """
    return bound is not None and type(bound.quantizer) is Float8DelayedScalingQuantizer


def transposes(matrix: torch.Tensor) -> bool:
    """Whether kernels that do something else before they cast a matrix write its transposed copy too: whole vectors."""
    rows, cols = matrix.shape
    return rows % 8 == 0 and cols % 4 == 0


def sums_rows(matrix: torch.Tensor, bound: BoundQuantizer) -> bool:
    """Whether kernels of delayed scaling that sum the rows of what they cast take it: they write both copies."""
    return bound.quantizer.columnwise and transposes(matrix) and not multiplies_every_layout()


def result(
    made: Any, bound: BoundQuantizer, shape: tuple[int, ...], dtype: torch.dtype, amax: torch.Tensor | None
) -> tuple[QuantizedTensor, torch.Tensor | None]:
    """A storage of Transformer Engine as the quantized tensor of ``shape`` that the quantizer wants."""
    quantizer: Any = bound.quantizer
    row: Copy | None
    if isinstance(quantizer, PER_TENSOR):
        row, column = read_per_tensor(made, quantizer.dtype)
        if column is None and quantizer.columnwise:
            assert row is not None
            column = Copy(transposed(row.data), row.scale_inv.clone())
    elif isinstance(quantizer, Float8BlockQuantizer):
        row, column = read_block(made, quantizer.dtype, quantizer.tile)
    else:
        row, column = read_mxfp8(made, quantizer.dtype, quantizer.tile[1])
    row, column = row if quantizer.rowwise else None, column if quantizer.columnwise else None
    return (
        QuantizedTensor(
            rowwise_data=None if row is None else row.data.view(shape),
            rowwise_scale_inv=None if row is None else row.scale_inv,
            columnwise_data=None if column is None else column.data,
            columnwise_scale_inv=None if column is None else column.scale_inv,
            dtype=dtype,
            quantizer=quantizer,
        ),
        amax,
    )


def transposed(data: torch.Tensor) -> torch.Tensor:
    """The transpose of an FP8 matrix, in memory."""
    matrix = data.contiguous().view(torch.uint8)
    made: torch.Tensor = library().kernels.fp8_transpose(matrix, library().dtypes[data.dtype], out=None)
    return made.view(data.dtype)


def quantize(
    x: torch.Tensor, bound: BoundQuantizer, dtype: torch.dtype | None = None, groups: GroupLayout | None = None
) -> tuple[QuantizedTensor, torch.Tensor | None]:
    """:func:`functional_te.quantization.cast.quantize_bound` by ``tex.quantize``.

    The reference casts groups, empty tensors and formats without a kernel for this GPU.
    """
    own = maker(bound, x.device) if groups is None and takes(x) and _fits(x, bound.quantizer) else None
    if own is None:
        return reference.quantize(x, bound, dtype, groups)
    made = library().kernels.quantize(as_matrix(x), own.own)
    return result(made, bound, tuple(x.shape), x.dtype if dtype is None else dtype, own.amax)


def cast_bias(
    dy: torch.Tensor, bound: BoundQuantizer, *, dtype: torch.dtype, needs_bias: bool = True
) -> tuple[QuantizedTensor, torch.Tensor | None, torch.Tensor | None] | None:
    """The cast of ``dy``, the observed amax and the sum over its rows, by ``tex.bgrad_quantize``.

    One kernel in delayed scaling with both copies; None for what has none.
    """
    if not (needs_bias and fuses(bound) and takes(dy, dtype=dtype) and sums_rows(as_matrix(dy), bound)):
        return None
    own = maker(bound, dy.device)
    assert own is not None
    dbias, made = library().kernels.bgrad_quantize(as_matrix(dy), own.own)
    return *result(made, bound, tuple(dy.shape), dtype, own.amax), dbias


def _fits(x: torch.Tensor, quantizer: Quantizer) -> bool:
    """Whether the sizes are ones that the format's kernels take."""
    if not isinstance(quantizer, MXFP8Quantizer):
        return True
    rows, cols = as_matrix(x).shape
    return rows % 32 == 0 and cols % 32 == 0
