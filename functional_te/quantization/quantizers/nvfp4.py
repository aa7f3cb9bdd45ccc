"""NVFP4: 4-bit elements with an E4M3 scale per 16 of them, and one float32 amax for the tensor.

Formulas: NVIDIA, "Pretraining Large Language Models with NVFP4", 2025, and Transformer Engine. Four techniques can each
be switched: square tiles for weights, a random Hadamard transform of the columnwise copy, stochastic rounding,
and the choice between two block scales ("4 over 6").
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch

from functional_te._errors import value_error
from functional_te.quantization.fp8_block import block_grid, pad_to_tiles
from functional_te.quantization.groups import GroupLayout
from functional_te.quantization.hadamard import hadamard
from functional_te.quantization.nvfp4 import BLOCK, nvfp4_cast, nvfp4_decode, tensor_factor
from functional_te.quantization.quantizer import Cast, Copy, Quantizer, as_matrix, rows_of
from functional_te.quantization.random import fold_in, random_bits, random_bits_of_rows
from functional_te.quantization.scaling import amax_of, amax_of_rows

__all__ = ["NVFP4Quantizer"]


@dataclasses.dataclass(frozen=True, eq=False)
class NVFP4Quantizer(Quantizer):
    """E2M1 data packed two to a byte, E4M3 block scales, float32 amax.

    The number of features must be a multiple of 16. A columnwise copy is padded with zero tokens to a multiple of 16,
    which is exact: products over tokens do not change.

    Attributes:
        dtype: ``torch.float4_e2m1fn_x2``; the data are stored as uint8.
        with_rht: whether the columnwise copy is of values transformed, in groups of 16 tokens, by an orthogonal matrix
            (Hadamard with fixed signs). The product of two transformed operands is the product of the originals.
        with_2d_quantization: whether tiles of 16x16 share a scale, else blocks of 1x16 along the reduced dimension.
        stochastic_rounding: whether elements are rounded up with the probability of their fraction.
        row_scaled: whether the rowwise copy has one amax per row.
        four_over_six: None, or ``"MAE"`` or ``"MSE"``: per block, the better of two scales by that error.
        e4m3_max: largest block scale used, 448 or 256.
    """

    dtype: torch.dtype = torch.float4_e2m1fn_x2
    with_rht: bool = False
    with_2d_quantization: bool = False
    stochastic_rounding: bool = False
    row_scaled: bool = False
    four_over_six: str | None = None
    e4m3_max: int = 448

    packing: ClassVar[int] = 2
    feature_multiple: ClassVar[int] = BLOCK
    token_multiple: ClassVar[int] = BLOCK

    def __post_init__(self) -> None:
        where = "NVFP4Quantizer"
        if self.dtype is not torch.float4_e2m1fn_x2:
            raise value_error(where, "dtype", "torch.float4_e2m1fn_x2", self.dtype)
        if self.four_over_six not in (None, "MAE", "MSE"):
            raise value_error(where, "four_over_six", "None, 'MAE' or 'MSE'", repr(self.four_over_six))
        if self.e4m3_max not in (448, 256):
            raise value_error(where, "e4m3_max", "448 or 256", self.e4m3_max)
        if self.four_over_six is not None and (self.with_rht or self.stochastic_rounding):
            raise value_error(where, "four_over_six", "None with a transform or stochastic rounding", "both")
        if self.row_scaled and self.with_2d_quantization:
            raise value_error(where, "row_scaled", "False with 2-D tiles", True)

    @property
    def stochastic(self) -> bool:
        """Whether a key is needed."""
        return self.stochastic_rounding

    @property
    def tile(self) -> tuple[int, int]:
        """Rows and columns that share a scale."""
        return (BLOCK, BLOCK) if self.with_2d_quantization else (1, BLOCK)

    @property
    def transposable(self) -> bool:
        """Square tiles are the same tiles when transposed, unless random or transformed."""
        return self.with_2d_quantization and not (self.with_rht or self.stochastic_rounding)

    @property
    def rotates(self) -> bool:
        """See ``with_rht``."""
        return self.with_rht

    def cast(
        self,
        x: torch.Tensor,
        *,
        scale: torch.Tensor | None = None,
        key: torch.Tensor | None = None,
        groups: GroupLayout | None = None,
    ) -> Cast:
        """Two levels: the amax of the (transformed) tensor, then the blocks."""
        del scale
        matrix, row, column = as_matrix(x), None, None
        amax = amax_of(x) if groups is None else groups.amax(matrix)
        observed = amax.clone() if self.stochastic_rounding else None
        if key is not None:
            # other data, other bits: microbatches of one step do not share their rounding errors
            key = fold_in(key, amax)
        if self.rowwise:
            own = amax_of_rows(matrix) if self.row_scaled else amax
            data, scales = self._blocks(matrix, own, key, False, groups)
            row = Copy(data.view(*x.shape[:-1], data.shape[-1]), scales, own)
        if self.columnwise:
            padded = pad_to_tiles(matrix, (BLOCK, 1))
            if self.with_rht:
                # a sum of 16 float16 numbers may overflow float16
                padded = hadamard(padded.to(torch.float32) if x.dtype is torch.float16 else padded, dim=0)
                amax = amax_of(padded) if groups is None else groups.amax(padded)
            elif self.rowwise and not self.row_scaled:
                amax = amax.clone()
            column = Copy(*self._blocks(padded, amax, key, True, groups), amax)
        return Cast(row, column, observed)

    def _blocks(
        self,
        matrix: torch.Tensor,
        amax: torch.Tensor,
        key: torch.Tensor | None,
        transpose: bool,
        groups: GroupLayout | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        bits = None
        if self.stochastic_rounding:
            assert key is not None
            rows, cols = matrix.shape
            if groups is not None:
                bits = random_bits_of_rows(key[:, groups.group], groups.row, cols, stream=int(transpose))
                bits = bits.t() if transpose else bits
            else:
                bits = random_bits(key, rows * cols, stream=int(transpose))
                bits = bits.reshape(cols, rows) if transpose else bits.reshape(rows, cols)
        if groups is not None and (transpose or not self.row_scaled):
            amax = self._amax_of_tiles(amax, transpose, groups)
        return nvfp4_cast(
            matrix,
            amax,
            tile=self.tile,
            e4m3_max=float(self.e4m3_max),
            bits=bits,
            four_over_six=self.four_over_six,
            transpose=transpose,
        )

    def _amax_of_tiles(self, amax: torch.Tensor, transpose: bool, groups: GroupLayout) -> torch.Tensor:
        """The amax ``[G]`` of the group of every row, row of tiles or column of blocks."""
        if transpose:
            return groups.per_tile(amax, BLOCK)[None]
        height = self.tile[0]
        rows = groups.per_tile(amax, height)
        return rows if height == 1 else rows[:, None]

    def decode(self, copy: Copy, columnwise: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Element times block scale, exactly; the tensor's factor apart, unless it differs between rows."""
        values = nvfp4_decode(as_matrix(copy.data), copy.scale_inv, self.tile)
        factor = tensor_factor(copy.amax, float(self.e4m3_max))
        if self.row_scaled and not columnwise:
            return values * factor[:, None], None
        return values, factor

    def copy_spec(self, shape: tuple[Any, ...], columnwise: bool) -> Copy:
        """Packed data, block scales, amax."""
        rows, cols = rows_of(shape), shape[-1] if shape else 1
        amax = (rows,) if self.row_scaled and not columnwise else (1,)
        data = (*shape[:-1], cols // 2)
        if columnwise:
            rows, cols = cols, BLOCK * ((rows + BLOCK - 1) // BLOCK)
            data = (rows, cols // 2)
        grid = block_grid(rows, cols, self.tile)
        return Copy((data, torch.uint8), (grid, torch.float8_e4m3fn), (amax, torch.float32))
