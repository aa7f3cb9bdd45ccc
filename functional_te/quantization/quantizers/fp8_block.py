"""FP8 block scaling: one float32 scale per 1x128 block or 128x128 tile.

Formulas: DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 3.3; rounding of the scales as in Transformer
Engine. Edge blocks are partial, so any shape can be cast.
"""

from __future__ import annotations

import dataclasses

import torch

from functional_te._errors import value_error
from functional_te.quantization.fp8_block import BLOCK, block_cast, block_decode
from functional_te.quantization.quantizer import Copy, as_matrix
from functional_te.quantization.quantizers.tiled import TiledQuantizer

__all__ = ["Float8BlockQuantizer"]


@dataclasses.dataclass(frozen=True, eq=False)
class Float8BlockQuantizer(TiledQuantizer):
    """FP8 with a scale for every block of 128.

    Attributes:
        amax_epsilon: floor of the amax of a block.
        power_2_scale: whether scales are rounded down to powers of two.
        block_scaling_dim: 1 for blocks of 1x128 along the reduced dimension, 2 for tiles of 128x128.
    """

    amax_epsilon: float = 0.0
    power_2_scale: bool = True
    block_scaling_dim: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block_scaling_dim not in (1, 2):
            raise value_error("Float8BlockQuantizer", "block_scaling_dim", "1 or 2", self.block_scaling_dim)

    @property
    def tile(self) -> tuple[int, int]:
        """Rows and columns that share a scale."""
        return (1, BLOCK) if self.block_scaling_dim == 1 else (BLOCK, BLOCK)

    @property
    def transposable(self) -> bool:
        """Square tiles are the same tiles when transposed."""
        return self.block_scaling_dim == 2

    def cast_matrix(self, matrix: torch.Tensor, transpose: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Float32 factors ``1 / scale`` beside the data."""
        return block_cast(
            matrix,
            self.dtype,
            tile=self.tile,
            epsilon=self.amax_epsilon,
            power_of_2=self.power_2_scale,
            transpose=transpose,
        )

    def decode(self, copy: Copy, columnwise: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Data times the scale of its block."""
        del columnwise
        return block_decode(as_matrix(copy.data), copy.scale_inv, self.tile), None
