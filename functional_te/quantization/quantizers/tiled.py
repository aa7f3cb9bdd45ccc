"""What the formats with one level of scales per tile of FP8 data share."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from functional_te.quantization.fp8_block import block_grid
from functional_te.quantization.groups import GroupLayout
from functional_te.quantization.quantizer import Cast, Copy, Quantizer, as_matrix, rows_of

__all__ = ["TiledQuantizer"]


class TiledQuantizer(Quantizer):
    """Each copy has its own tiles, along its own last dimension.

    Attributes:
        scale_dtype: how a scale is stored.
    """

    scale_dtype: ClassVar[torch.dtype] = torch.float32

    def cast_matrix(self, matrix: torch.Tensor, transpose: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Data and scales of ``matrix [M, K]``, or of its transpose."""
        raise NotImplementedError

    def cast(
        self,
        x: torch.Tensor,
        *,
        scale: torch.Tensor | None = None,
        key: torch.Tensor | None = None,
        groups: GroupLayout | None = None,
    ) -> Cast:
        """Scales come from the tiles themselves."""
        del scale, key, groups
        matrix, row, column = as_matrix(x), None, None
        if self.rowwise:
            data, scales = self.cast_matrix(matrix, False)
            row = Copy(data.view(x.shape), scales)
        if self.columnwise:
            column = Copy(*self.cast_matrix(matrix, True))
        return Cast(row, column)

    def copy_spec(self, shape: tuple[Any, ...], columnwise: bool) -> Copy:
        """Data of the logical shape or ``[K, M]``; a grid of scales."""
        rows, cols = rows_of(shape), shape[-1] if shape else 1
        if columnwise:
            rows, cols = cols, rows
        data = (rows, cols) if columnwise else shape
        assert self.tile is not None
        return Copy((data, self.dtype), (block_grid(rows, cols, self.tile), self.scale_dtype))
