"""Where Transformer Engine's tensor classes hold what a :class:`QuantizedTensor` holds, and in which layout.

=====================  =============================  ================================================================
quantizer              class                          differences in layout
=====================  =============================  ================================================================
per tensor             ``Float8Tensor``               one scale for both copies
Float8BlockQuantizer   ``Float8BlockwiseQTensor``     grids of scales padded to multiples of 4 along their last
                                                      dimension; those of 1x128 blocks transposed
MXFP8Quantizer         ``MXFP8Tensor``                columnwise data in the logical shape, its grid transposed; grids
                                                      padded; a row of scales per row of elements also in 2-D
=====================  =============================  ================================================================

Data are uint8, and transposed data have the dimension of the features first. Nothing here imports Transformer Engine.
"""

from __future__ import annotations

from typing import Any

import torch

from functional_te.quantization.fp8_block import block_grid
from functional_te.quantization.quantizer import Copy, Quantizer, as_matrix, rows_of
from functional_te.quantization.quantizers import Float8BlockQuantizer, MXFP8Quantizer

__all__ = ["cut_grid", "read_block", "read_mxfp8", "read_per_tensor", "te_layout"]

Copies = tuple[Copy | None, Copy | None]


def cut_grid(scale: torch.Tensor, rows: int, cols: int, transposed: bool) -> torch.Tensor:
    """A grid ``[rows, cols]``, strided as a new tensor, cut out of a padded one that may be stored transposed."""
    cut = (scale[:cols, :rows].t() if transposed else scale[:rows, :cols]).contiguous()
    return cut.as_strided((rows, cols), (cols, 1))


def read_per_tensor(tensor: Any, dtype: torch.dtype) -> Copies:
    """The rowwise and the columnwise copy of a ``Float8Tensor`` or its storage; their scales share no memory."""
    scale, row, column = tensor._scale_inv.reshape(1), None, None
    if tensor._data is not None:
        row = Copy(tensor._data.view(dtype), scale)
    if tensor._transpose is not None and not tensor._transpose_invalid:
        column = Copy(_columnwise(tensor._transpose).view(dtype), scale.clone())
    return row, column


def read_block(tensor: Any, dtype: torch.dtype, tile: tuple[int, int]) -> Copies:
    """The same of a ``Float8BlockwiseQTensor`` or its storage."""
    copies = list[Copy | None]()
    for name in ("rowwise", "columnwise"):
        data, scale = getattr(tensor, f"_{name}_data"), getattr(tensor, f"_{name}_scale_inv")
        if data is None:
            copies.append(None)
            continue
        if name == "columnwise":
            data = _columnwise(data)
        rows, cols = as_matrix(data).shape
        copies.append(Copy(data.view(dtype), cut_grid(scale, *block_grid(rows, cols, tile), not tensor._is_2D_scaled)))
    return copies[0], copies[1]


def read_mxfp8(tensor: Any, dtype: torch.dtype, width: int) -> Copies:
    """The same of an ``MXFP8Tensor`` or its storage, with a row of scales for every row of elements."""
    row = column = None
    if tensor._rowwise_data is not None:
        rows, cols = as_matrix(tensor._rowwise_data).shape
        grid = cut_grid(tensor._rowwise_scale_inv, rows, -(-cols // width), False)
        row = Copy(tensor._rowwise_data.view(dtype), grid)
    if tensor._columnwise_data is not None:
        data = as_matrix(tensor._columnwise_data).t().contiguous()
        grid = cut_grid(tensor._columnwise_scale_inv, data.shape[0], -(-data.shape[1] // width), True)
        column = Copy(data.view(dtype), grid)
    return row, column


def te_layout(copy: Copy, quantizer: Quantizer, columnwise: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Data and scales of a copy in Transformer Engine's layout, as views; the grid is not padded yet.

    Args:
        copy: one copy; MXFP8 with a row of scales for every row of elements.
        quantizer: what made it.
        columnwise: which one it is.
    """
    data, scale = copy.data.view(torch.uint8), copy.scale_inv
    flipped = isinstance(quantizer, MXFP8Quantizer) and columnwise
    if flipped or (isinstance(quantizer, Float8BlockQuantizer) and quantizer.block_scaling_dim == 1):
        scale = scale.t()
    return data.t() if flipped else data, scale


def _columnwise(data: torch.Tensor) -> torch.Tensor:
    """Transposed data ``[K, leading dimensions]`` as a matrix."""
    return data.reshape(data.shape[0], rows_of((*data.shape[1:], 1)))
