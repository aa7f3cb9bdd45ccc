"""FP8 block scaling: the pure math of casts with one float32 scale per 1x128 run or 128x128 tile.

``data = cast(x * scale)`` and ``x ~ data * scale_inv``; what is stored is ``scale_inv = 1 / scale``. The functions
that cut a matrix into tiles and join them again also serve :mod:`functional_te.quantization.mxfp8`.
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
    "decode_tiles",
    "split_tiles",
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
    rows, cols = x.shape
    tiles = split_tiles(x, tile[::-1] if transpose else tile)
    overflow = torch.finfo(x.dtype).max
    scale = _scale_of(amax_of_tiles(tiles), max_value(dtype), epsilon, power_of_2, overflow)
    data = cast_tiles(tiles, scale, dtype, (rows, cols), transpose)
    return data, transposed(scale.reciprocal()) if transpose else scale.reciprocal()


def block_decode(data: torch.Tensor, scale_inv: torch.Tensor, tile: tuple[int, int]) -> torch.Tensor:
    """Float32 values ``[R, C]`` of FP8 ``data`` times the factor of each tile, as :func:`block_cast` gave them."""
    return decode_tiles(data, scale_inv, tile)


def block_grid(rows: int, cols: int, tile: tuple[int, int]) -> tuple[int, int]:
    """How many tiles cover ``[rows, cols]`` downwards and across; sizes may be symbolic."""
    return (rows + tile[0] - 1) // tile[0], (cols + tile[1] - 1) // tile[1]


def split_tiles(x: torch.Tensor, tile: tuple[int, int]) -> torch.Tensor:
    """``x [M, K]`` as ``[tiles down, tile[0], tiles across, tile[1]]``, padded with zeros to whole tiles."""
    down, across = block_grid(x.shape[0], x.shape[1], tile)
    below, right = down * tile[0] - x.shape[0], across * tile[1] - x.shape[1]
    # a symbolic size is always padded: one graph serves sizes that divide and sizes that do not
    if not _same((below, right), (0, 0)):
        x = torch.constant_pad_nd(x, [0, right, 0, below])
    return x.reshape(down, tile[0], across, tile[1])


def amax_of_tiles(tiles: torch.Tensor) -> torch.Tensor:
    """Largest magnitude of each tile, float32 ``[tiles down, tiles across]``; NaN if the tile holds one."""
    # reduced in float32: Inductor (2.13) fails to compile two equal bfloat16 reductions in one graph
    return tiles.abs().to(torch.float32).amax((1, 3))


def cast_tiles(
    tiles: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, shape: tuple[int, int], transpose: bool
) -> torch.Tensor:
    """Each tile times its ``scale [tiles down, tiles across]``, cast and joined: contiguous ``shape`` or its transpose."""
    down, height, across, width = tiles.shape
    if transpose and width > 1:  # Inductor transposes columns well, and tiles badly
        across, width, scale = across * width, 1, scale.repeat_interleave(width, 1)
        tiles = tiles.reshape(down, height, across, width)
    # as_strided puts its input in memory: Inductor then computes each scale once, not again for every element
    factor = scale.as_strided((down, height, across, width), (across, 0, 1, 0))
    data = saturating_cast(tiles.to(torch.float32) * factor, dtype)
    if transpose and _same((down * height, across * width), shape):
        columns = data.permute(2, 3, 0, 1).clone(memory_format=torch.contiguous_format)
        return columns.reshape(across * width, down * height)
    data = _cut(data.reshape(down * height, across * width), shape)
    return transposed(data) if transpose else data


def decode_tiles(data: torch.Tensor, factor: torch.Tensor, tile: tuple[int, int]) -> torch.Tensor:
    """Float32 ``data [R, C]`` times the ``factor [tiles down, tiles across]`` of each tile."""
    values = data.to(torch.float32)
    for dim, size in enumerate(tile):
        if size > 1:
            factor = factor.index_select(dim, torch.arange(data.shape[dim], device=data.device) // size)
    return values * factor


def transposed(matrix: torch.Tensor) -> torch.Tensor:
    """A copy of the transpose, with the strides of a new tensor also where a size is 1."""
    return matrix.t().clone(memory_format=torch.contiguous_format)


def _same(one: tuple[int, int], other: tuple[int, int]) -> bool:
    """Whether two shapes are known to be equal, without a guard on symbolic sizes."""
    return statically_known_true(one[0] == other[0]) and statically_known_true(one[1] == other[1])


def _cut(padded: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """A contiguous copy of the part of ``shape`` without padding, or ``padded`` itself where nothing was padded."""
    if _same((padded.shape[0], padded.shape[1]), shape):
        return padded
    # as_strided puts whole tiles in memory first: Inductor (2.13) drops elements when it fuses a slice with the joining
    # of tiles, because it splits the loop over a dimension that the size of the tile does not divide
    return padded.as_strided(shape, (padded.shape[1], 1)).clone(memory_format=torch.contiguous_format)


def _scale_of(amax: torch.Tensor, limit: float, epsilon: float, power_of_2: bool, overflow: float) -> torch.Tensor:
    """Scale of each float32 ``amax``, see :func:`block_cast`; ``overflow`` replaces an infinite quotient."""
    floored = amax.clamp(min=epsilon) if epsilon > 0.0 else amax
    # tensor / tensor: torch computes number / tensor as reciprocal times number, which rounds twice
    scale = torch.full_like(floored, limit) / floored
    scale = torch.where(torch.isinf(scale), overflow, scale)
    if power_of_2:
        scale = (scale.view(torch.int32) & 0x7F800000).view(torch.float32)
    return torch.where((floored > 0) & torch.isfinite(floored), scale, 1.0)
