"""Tiles of the kernels, by case: the one place to change after measuring.

``python -m tests.benchmarks.gpu.sweep`` measures them on a GPU.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from functional_te.quantization.quantizers import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8DelayedScalingQuantizer,
)
from functional_te.quantization.tensor import BoundQuantizer

__all__ = ["TILES", "NormGrad", "NormPass", "norm_grad_sizes", "norm_passes", "tile_size"]

# Rows, columns and warps of a tile. Rows of 128 columns are written in whole cache lines, and 64 or more rows make
# whole sectors of the transposed copy. Cases ending in "_block" have tiles of one block, 128 by 128; "_1d" are 1x128
# blocks, whose two copies have scales of their own. Measured on an H200, TB/s at 8192 x 14336 (8192 x 4096 with a bias)
# with 4, 8 and 16 warps: a cast in 1x128 blocks 2.5, 2.9, 1.5; gated 2.6, 3.0, 1.8; its gradient 1.3, 2.1, 1.8, in
# 128x128 blocks 2.2, 2.8, 3.5; a cast with a bias gradient 1.7, 1.4, 0.9.
TILES: dict[str, tuple[int, int, int]] = {
    "cast": (64, 128, 4),
    "cast_block": (128, 128, 8),
    "cast_block_1d": (128, 128, 8),
    "cast_bias": (32, 64, 1),
    "cast_bias_block": (128, 128, 4),
    "cast_bias_block_1d": (128, 128, 4),
    "activation": (64, 128, 4),
    "activation_block": (128, 128, 8),
    "activation_block_1d": (128, 128, 8),
    "activation_grad": (64, 64, 2),
    "activation_grad_block": (128, 128, 8),
    "activation_grad_block_1d": (128, 128, 4),
    "gated": (32, 128, 4),
    "gated_block": (128, 128, 8),
    "gated_block_1d": (128, 128, 8),
    "gated_grad": (32, 128, 8),
    "gated_grad_block": (128, 128, 16),
    "gated_grad_block_1d": (128, 128, 8),
    "transpose": (128, 64, 4),
    "sum_rows": (32, 32, 4),
    "dropout": (8, 1024, 4),
    "concatenate": (32, 256, 4),
}


def tile_size(case: str, rows: Any, cols: Any) -> tuple[int, int, int]:
    """Rows, columns and warps of a tile.

    Args:
        case: a key of :data:`TILES`.
        rows, cols: sizes of the matrix. One may be symbolic; only an int may decide anything.
    """
    del rows, cols  # one tile per case so far
    return TILES[case]


class NormPass(NamedTuple):
    """One pass of a norm's forward.

    Attributes:
        statistics: whether it computes the statistics of its rows.
        normalize: whether it writes results, or observes them.
        rows: rows of a program.
        cols: columns of a tile.
        width: columns of a program, a multiple of ``cols``.
        lanes: columns read at once for the statistics.
        warps: warps of a program.
        whole: whether a tile holds whole rows, which are then read once for both.
    """

    statistics: bool
    normalize: bool
    rows: int
    cols: int
    width: Any
    lanes: int
    warps: int
    whole: bool = False


# Elements of a tile of whole rows: half of what the registers of a multiprocessor hold.
_WHOLE_TILE = 16384


# Programs that fill a GPU: one for each of the 132 multiprocessors of an H100 or H200.
FILL = 132


def norm_passes(rows: Any, cols: Any, bound: BoundQuantizer | None) -> tuple[NormPass, ...]:
    """The passes of a norm over a matrix ``[rows, cols]``; a symbolic size decides nothing.

    Statistics are of few long rows at a time: as much in flight as registers hold. A transposed copy needs tall tiles.
    Programs of 32 whole rows, which read them twice, make them where there are enough rows to fill the GPU with such
    and the second reading is of the L2 cache; elsewhere a second pass of tiles. So does a scale that the first pass has
    to observe. Passes sum in different orders, so the last bits of statistics depend on how many rows there are.

    Args:
        rows, cols: sizes.
        bound: how the result is cast, or None.
    """
    lanes = _lanes(cols, 4096)
    if isinstance(cols, int) and cols <= 4096:
        # rows in registers (measured on an H200: 38 instead of 45 us without a cast at 8192 x 4096); a transposed copy
        # of wide ones would be written in strips of too few rows (125 instead of 78 us)
        height = min(_WHOLE_TILE // lanes, 16)
        delayed = bound is not None and type(bound.quantizer) is Float8DelayedScalingQuantizer
        if bound is None or (delayed and not bound.quantizer.columnwise):
            return (NormPass(True, True, height, lanes, lanes, lanes, 8, True),)
        if delayed and isinstance(rows, int) and rows >= 32 * FILL and cols >= 1024:
            # 27 instead of 42 us at 8192 x 2048, 58 instead of 70 at 8192 x 4096; 64 rows, 128 columns are slower
            return (NormPass(True, True, 32, 256, _whole(cols, 256), 256, 8),)
        if delayed and cols <= 2048:
            return (NormPass(True, True, 16, lanes, lanes, lanes, 8, True),)
    alone = NormPass(True, True, min(4096 // lanes, 64), lanes, _whole(cols, lanes), lanes, 4)
    if bound is None:
        return (alone,)
    observes = type(bound.quantizer) is Float8CurrentScalingQuantizer
    if type(bound.quantizer) is Float8BlockQuantizer or observes or bound.quantizer.columnwise:
        few = min(lanes, 512)  # of a few rows beside each other: 25 instead of 29 us at 8192 x 4096
        alone = NormPass(True, observes, min(4096 // few, 64), few, _whole(cols, few), few, 4)
    if type(bound.quantizer) is Float8BlockQuantizer:
        warps = 4 if bound.quantizer.block_scaling_dim == 1 else 8  # 62 instead of 75 us at 8192 x 4096
        return alone, NormPass(False, True, 128, 128, 128, lanes, warps)
    if observes or bound.quantizer.columnwise:
        return alone, NormPass(False, True, 32, 128, 128, lanes, 2)
    return (alone._replace(normalize=True),)


class NormGrad(NamedTuple):
    """Sizes of a norm's gradient.

    Attributes:
        rows: rows of a tile.
        cols: columns of a tile.
        whole: whether a tile holds whole rows. If not, a kernel before finds what the gradient needs of whole rows.
        programs: how many programs share the rows, each with a partial weight gradient.
        warps: warps of a program.
    """

    rows: int
    cols: int
    whole: bool
    programs: int
    warps: int


# Widest rows that a program holds in registers.
WHOLE_ROW = 8192


def norm_grad_sizes(rows: Any, cols: Any) -> NormGrad:
    """The sizes of the gradient of a norm over a matrix ``[rows, cols]``; a symbolic size decides nothing."""
    whole = isinstance(cols, int) and cols <= WHOLE_ROW
    wide = _lanes(cols, WHOLE_ROW) if whole else 512
    high = max(min(4096 // wide, 64), 1)
    programs = 2 * FILL
    if isinstance(rows, int):
        programs = max(min(programs, -(-rows // high)), 1)
    return NormGrad(high, wide, whole, programs, 16 if wide > 4096 else 8)


def _lanes(cols: Any, most: int) -> int:
    """A power of two that covers ``cols``, from 16 to ``most``."""
    return min(max(1 << (cols - 1).bit_length(), 16), most) if isinstance(cols, int) else most


def _whole(cols: Any, block: int) -> Any:
    """``cols`` rounded up to blocks."""
    return (cols + block - 1) // block * block
