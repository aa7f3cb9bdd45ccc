"""MXFP8: one power-of-two scale, stored in a byte, per 32 elements.

Formats: Open Compute Project, "OCP Microscaling Formats (MX) Specification", v1.0, 2023. The exponent of a scale is
rounded up, as in Transformer Engine, so that no element saturates; the specification's own example rounds down.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch

from functional_te.quantization.mxfp8 import BLOCK, mx_cast, mx_decode
from functional_te.quantization.quantizer import Copy, as_matrix
from functional_te.quantization.quantizers.tiled import TiledQuantizer

__all__ = ["MXFP8Quantizer"]


@dataclasses.dataclass(frozen=True, eq=False)
class MXFP8Quantizer(TiledQuantizer):
    """FP8 with an E8M0 scale (uint8, exponent biased by 127) for every block of 32.

    The number of features must be a multiple of 32. The last block of tokens of a columnwise copy may be partial:
    that is exact, because a scale depends on the elements that are there.

    Attributes:
        with_2d_quantization: whether tiles of 32x32 share a scale, else blocks of 1x32 along the reduced dimension.
    """

    with_2d_quantization: bool = False

    feature_multiple: ClassVar[int] = BLOCK
    scale_dtype: ClassVar[torch.dtype] = torch.uint8

    @property
    def tile(self) -> tuple[int, int]:
        """Rows and columns that share a scale."""
        return (BLOCK, BLOCK) if self.with_2d_quantization else (1, BLOCK)

    @property
    def transposable(self) -> bool:
        """Square tiles are the same tiles when transposed."""
        return self.with_2d_quantization

    def cast_matrix(self, matrix: torch.Tensor, transpose: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """E8M0 bytes beside the data."""
        return mx_cast(matrix, self.dtype, tile=self.tile, transpose=transpose)

    def decode(self, copy: Copy, columnwise: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Data times the power of two of its block; exact."""
        del columnwise
        return mx_decode(as_matrix(copy.data), copy.scale_inv, self.tile), None
