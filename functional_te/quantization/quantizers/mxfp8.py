"""MXFP8: one power-of-two scale, stored in a byte, per 32 elements.

Formats: Open Compute Project, "OCP Microscaling Formats (MX) Specification", v1.0, 2023. The exponent of a scale is
rounded up, as in Transformer Engine, so that no element saturates; the specification's own example rounds down.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch

from functional_te.quantization.fp8_block import block_grid
from functional_te.quantization.mxfp8 import BLOCK, mx_cast, mx_decode
from functional_te.quantization.quantizer import Cast, Copy, Quantizer, as_matrix, rows_of

__all__ = ["MXFP8Quantizer"]


@dataclasses.dataclass(frozen=True, eq=False)
class MXFP8Quantizer(Quantizer):
    """FP8 with an E8M0 scale (uint8, exponent biased by 127) for every block of 32.

    The number of features must be a multiple of 32. The last block of tokens of a columnwise copy may be partial:
    that is exact, because a scale depends on the elements that are there.

    Attributes:
        with_2d_quantization: whether tiles of 32x32 share a scale, else blocks of 1x32 along the reduced dimension.
    """

    with_2d_quantization: bool = False

    feature_multiple: ClassVar[int] = BLOCK

    @property
    def tile(self) -> tuple[int, int]:
        """Rows and columns that share a scale."""
        return (BLOCK, BLOCK) if self.with_2d_quantization else (1, BLOCK)

    @property
    def transposable(self) -> bool:
        """Square tiles are the same tiles when transposed."""
        return self.with_2d_quantization

    def cast(self, x: torch.Tensor, *, scale: torch.Tensor | None = None, key: torch.Tensor | None = None) -> Cast:
        """Each copy has its own blocks, along its own last dimension."""
        del scale, key
        matrix, row, column = as_matrix(x), None, None
        if self.rowwise:
            data, byte = mx_cast(matrix, self.dtype, tile=self.tile)
            row = Copy(data.view(x.shape), byte)
        if self.columnwise:
            column = Copy(*mx_cast(matrix, self.dtype, tile=self.tile, transpose=True))
        return Cast(row, column)

    def decode(self, copy: Copy, columnwise: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Data times the power of two of its block; exact."""
        del columnwise
        return mx_decode(as_matrix(copy.data), copy.scale_inv, self.tile), None

    def copy_spec(self, shape: tuple[Any, ...], columnwise: bool) -> Copy:
        """Data of the logical shape or ``[K, M]``; a grid of bytes."""
        rows, cols = rows_of(shape), shape[-1] if shape else 1
        if columnwise:
            rows, cols = cols, rows
        data = (rows, cols) if columnwise else shape
        return Copy((data, self.dtype), (block_grid(rows, cols, self.tile), torch.uint8))
