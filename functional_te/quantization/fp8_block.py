"""FP8 block scaling: the pure math of casts with one float32 scale per 1x128 run or 128x128 tile.

``data = cast(x * scale)`` and ``x ~ data * scale_inv``; what is stored is ``scale_inv = 1 / scale``. The functions of
tiles also serve :mod:`functional_te.quantization.mxfp8`.
"""

from __future__ import annotations

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

from functional_te.quantization.formats import max_value, saturating_cast

__all__ = [
    "BLOCK",
    "amax_of_tiles",
    "block_cast",
    "block_decode",
    "block_grid",
    "cast_tiles",
    "spread",
    "transposed",
]

BLOCK = 128


def block_cast(
    x: torch.Tensor,
    dtype: torch.dtype,
    *,
    tile: tuple[int, int] = (1, BLOCK),
    epsilon: float = 0.0,
    power_of_2: bool = True,
    transpose: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cast a matrix to FP8 with one scale per tile.

    The scale is ``limit / max(amax, epsilon)``, rounded to nearest; if that overflows float32, it is the largest
    finite value of the dtype of ``x``. With ``power_of_2`` its mantissa is cleared, which rounds the scale down.
    Tiles whose amax is 0, infinity or NaN have scale 1: there infinities and values beyond the limit saturate, NaN
    stays NaN, and the other elements are cast as they are. The formula is that of Transformer Engine's
    ``Float8BlockScaling``.

    Args:
        x: float32, float16 or bfloat16 ``[M, K]`` of any strides and sizes.
        dtype: ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.
        tile: rows and columns of a tile of the result: ``(1, 128)`` or ``(128, 128)``. Tiles at the edges are partial.
        epsilon: floor of the amax.
        power_of_2: whether scales are powers of two.
        transpose: whether the result is that of ``x.T``.

    Returns:
        The data, contiguous, of shape ``[R, C]``, that of ``x`` or of ``x.T``; and the factors out of low precision
        ``1 / scale``, float32 ``[ceil(R / tile[0]), ceil(C / tile[1])]``, contiguous.
    """
    tile = tile[::-1] if transpose else tile
    overflow = torch.finfo(x.dtype).max
    scale = _scale_of(amax_of_tiles(x, tile), max_value(dtype), epsilon, power_of_2, overflow)
    data = cast_tiles(x, scale, dtype, tile, transpose)
    return data, transposed(scale.reciprocal()) if transpose else scale.reciprocal()


def block_decode(data: torch.Tensor, scale_inv: torch.Tensor, tile: tuple[int, int]) -> torch.Tensor:
    """Float32 values ``[R, C]`` of FP8 ``data`` times the factor of each tile, as :func:`block_cast` gave them."""
    return data.to(torch.float32) * spread(scale_inv, (data.shape[0], data.shape[1]), tile)


def block_grid(rows: int, cols: int, tile: tuple[int, int]) -> tuple[int, int]:
    """How many tiles cover ``[rows, cols]`` downwards and across; sizes may be symbolic."""
    return (rows + tile[0] - 1) // tile[0], (cols + tile[1] - 1) // tile[1]


def amax_of_tiles(x: torch.Tensor, tile: tuple[int, int]) -> torch.Tensor:
    """Largest magnitude of each tile of ``x [M, K]``, float32 ``[tiles down, tiles across]``; NaN if it holds one."""
    down, across = block_grid(x.shape[0], x.shape[1], tile)
    below, right = down * tile[0] - x.shape[0], across * tile[1] - x.shape[1]
    # a symbolic size is always padded: one graph serves sizes that divide and sizes that do not
    if not (statically_known_true(below == 0) and statically_known_true(right == 0)):
        x = torch.constant_pad_nd(x, [0, right, 0, below])
    # reduced in float32: Inductor (2.13) fails to compile two equal bfloat16 reductions in one graph
    return x.reshape(down, tile[0], across, tile[1]).abs().to(torch.float32).amax((1, 3))


def cast_tiles(
    x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, tile: tuple[int, int], transpose: bool
) -> torch.Tensor:
    """``x [M, K]`` times the ``scale [tiles down, tiles across]`` of each tile, cast: ``[M, K]`` or its transpose."""
    rows, cols = x.shape
    if transpose and statically_known_true(rows % tile[0] == 0):
        # Inductor transposes fastest by runs of a tile's height
        runs = x.reshape(rows // tile[0], tile[0], cols)
        scale = _in_memory(spread(scale, (rows, cols), (1, tile[1])))
        data = saturating_cast(runs * scale[:, None, :], dtype)  # float32 by promotion
        return data.permute(2, 0, 1).clone(memory_format=torch.contiguous_format).reshape(cols, rows)
    data = saturating_cast(x * spread(_in_memory(scale), (rows, cols), tile), dtype)
    return transposed(data) if transpose else data.contiguous()


def spread(values: torch.Tensor, shape: tuple[int, int], tile: tuple[int, int]) -> torch.Tensor:
    """The value of each tile ``[tiles down, tiles across]`` at every element of a matrix of ``shape``."""
    # indices, not repeat_interleave() and a slice: Inductor (2.13) drops elements of these where a tile is partial,
    # by splitting the loop over a dimension that the tile does not divide
    for dim, size in enumerate(tile):
        if size > 1:
            values = values.index_select(dim, torch.arange(shape[dim], device=values.device) // size)
    return values


def transposed(matrix: torch.Tensor) -> torch.Tensor:
    """A copy of the transpose, with the strides of a new tensor also where a size is 1."""
    return matrix.t().clone(memory_format=torch.contiguous_format)


def _in_memory(matrix: torch.Tensor) -> torch.Tensor:
    """``matrix`` itself, contiguous; Inductor then computes it once, not again for every element that reads it."""
    return matrix.as_strided(matrix.shape, (matrix.shape[1], 1))


def _scale_of(amax: torch.Tensor, limit: float, epsilon: float, power_of_2: bool, overflow: float) -> torch.Tensor:
    """Scale of each float32 ``amax``, see :func:`block_cast`; ``overflow`` replaces an infinite quotient."""
    floored = amax.clamp(min=epsilon) if epsilon > 0.0 else amax
    # tensor / tensor: torch computes number / tensor as reciprocal times number, which rounds twice
    scale = torch.full_like(floored, limit) / floored
    scale = torch.where(torch.isinf(scale), overflow, scale)
    if power_of_2:
        scale = (scale.view(torch.int32) & 0x7F800000).view(torch.float32)
    return torch.where((floored > 0) & torch.isfinite(floored), scale, 1.0)
