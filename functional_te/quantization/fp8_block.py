"""FP8 block scaling: the pure math of casts with one float32 scale per 1x128 run or 128x128 tile.

``data = cast(x * scale)`` and ``x ~ data * scale_inv``; what is stored is ``scale_inv = 1 / scale``. The functions of
tiles also serve :mod:`functional_te.quantization.mxfp8`.
"""

from __future__ import annotations

import torch

from functional_te.quantization.formats import max_value, saturating_cast
from functional_te.quantization.scaling import current_scale, reciprocal
from functional_te.torch_compat import statically_known_true

__all__ = [
    "BLOCK",
    "amax_of_tiles",
    "block_cast",
    "block_decode",
    "block_grid",
    "cast_tiles",
    "decode_tiles",
    "pad_to_tiles",
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
    """Cast a matrix to FP8 with one scale per tile; the formula is that of Transformer Engine's Float8BlockScaling.

    The scale is that of :func:`~functional_te.quantization.scaling.current_scale`; where ``limit / amax`` overflows it
    is the largest finite value of the dtype of ``x``. A tile that holds an infinity or a NaN, or only zeros, has
    scale 1: its elements are cast as they are, infinities and values beyond the limit saturate, NaN stays NaN.

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
    tile = (tile[1], tile[0]) if transpose else tile  # of x
    whole = pad_to_tiles(x, tile)
    amax, overflow = amax_of_tiles(whole, tile), torch.finfo(x.dtype).max
    scale = current_scale(amax, max_value(dtype), epsilon=epsilon, power_of_2=power_of_2, overflow=overflow)
    data = cast_tiles(whole, scale, dtype, tile, (x.shape[0], x.shape[1]), transpose)
    scale_inv = reciprocal(scale)
    return data, transposed(scale_inv) if transpose else scale_inv


def block_decode(data: torch.Tensor, scale_inv: torch.Tensor, tile: tuple[int, int]) -> torch.Tensor:
    """Float32 values ``[R, C]`` of FP8 ``data`` times the factor of each tile, as :func:`block_cast` gave them."""
    return decode_tiles(data, scale_inv, tile)


def block_grid(rows: int, cols: int, tile: tuple[int, int]) -> tuple[int, int]:
    """How many tiles cover ``[rows, cols]`` downwards and across; sizes may be symbolic."""
    return (rows + tile[0] - 1) // tile[0], (cols + tile[1] - 1) // tile[1]


def pad_to_tiles(x: torch.Tensor, tile: tuple[int, int]) -> torch.Tensor:
    """``x [M, K]``, with zeros below and to the right up to whole tiles.

    A symbolic size is always padded: one graph then serves the sizes that divide and those that do not.
    """
    down, across = block_grid(x.shape[0], x.shape[1], tile)
    below, right = down * tile[0] - x.shape[0], across * tile[1] - x.shape[1]
    if statically_known_true(below == 0) and statically_known_true(right == 0):
        return x
    return torch.constant_pad_nd(x, [0, right, 0, below])


def amax_of_tiles(whole: torch.Tensor, tile: tuple[int, int]) -> torch.Tensor:
    """Largest magnitude of each of the whole tiles, float32 ``[tiles down, tiles across]``; NaN if it holds one."""
    down, across = block_grid(whole.shape[0], whole.shape[1], tile)
    # in float32: Inductor (2.13) fails to compile two equal bfloat16 reductions in one graph
    amax = whole.abs().to(torch.float32)
    if tile[1] > 1:
        amax = amax.reshape(whole.shape[0], across, tile[1]).amax(2)
    if tile[0] > 1:  # by 8 rows at first: twice as fast in Inductor as reading all rows of a tile at a time
        amax = amax.reshape(down, tile[0] // 8, 8, across).amax(2).amax(1)
    return amax


def cast_tiles(
    whole: torch.Tensor,
    scale: torch.Tensor,
    dtype: torch.dtype,
    tile: tuple[int, int],
    shape: tuple[int, int],
    transpose: bool,
) -> torch.Tensor:
    """Whole tiles times the ``scale [tiles down, tiles across]`` of each, cast: the part of ``shape`` or its transpose.

    The result is contiguous.
    """
    exact = _same((whole.shape[0], whole.shape[1]), shape)
    if exact and transpose:  # columns of one tile's height: Inductor transposes these faster
        scale, tile = scale.repeat_interleave(tile[1], 1), (tile[0], 1)
    scale = _in_memory(scale)  # computed once, not again for every element that it multiplies
    data = saturating_cast(_as_tiles(whole, tile) * scale[:, None, :, None], dtype)  # float32 by promotion
    if exact:
        return _joined(data.permute(2, 3, 0, 1) if transpose else data)
    part = _cut(_joined(data), shape)
    return transposed(part) if transpose else part.clone(memory_format=torch.contiguous_format)


def decode_tiles(data: torch.Tensor, factor: torch.Tensor, tile: tuple[int, int]) -> torch.Tensor:
    """Float32 ``data [R, C]`` times the ``factor [tiles down, tiles across]`` of each tile."""
    whole = pad_to_tiles(data.to(torch.float32), tile)
    values = _joined(_as_tiles(whole, tile) * factor[:, None, :, None])
    shape = (data.shape[0], data.shape[1])
    if _same((whole.shape[0], whole.shape[1]), shape):
        return values
    return _cut(values, shape).clone(memory_format=torch.contiguous_format)


def transposed(matrix: torch.Tensor) -> torch.Tensor:
    """A copy of the transpose, with the strides of a new tensor also where a size is 1."""
    return matrix.t().clone(memory_format=torch.contiguous_format)


def _as_tiles(whole: torch.Tensor, tile: tuple[int, int]) -> torch.Tensor:
    """A view ``[tiles down, tile[0], tiles across, tile[1]]`` of whole tiles."""
    down, across = block_grid(whole.shape[0], whole.shape[1], tile)
    return whole.reshape(down, tile[0], across, tile[1])


def _joined(tiles: torch.Tensor) -> torch.Tensor:
    """The contiguous matrix of tiles ``[tiles down, tile[0], tiles across, tile[1]]``.

    In memory, because Inductor (2.13) drops elements when it fuses this with a slice: it splits the loop over a
    dimension of the slice by the size of the tile, which need not divide it.
    """
    down, height, across, width = tiles.shape
    return _in_memory(tiles.contiguous().reshape(down * height, across * width))


def _in_memory(matrix: torch.Tensor) -> torch.Tensor:
    """A contiguous ``matrix``, with the strides of a new tensor; Inductor fuses nothing across an as_strided()."""
    return matrix.as_strided(matrix.shape, (matrix.shape[1], 1))


def _cut(matrix: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """The first rows and columns of a contiguous ``matrix``; rows alone are a view."""
    rows = matrix.as_strided((shape[0], matrix.shape[1]), (matrix.shape[1], 1))
    if statically_known_true(matrix.shape[1] == shape[1]):
        return rows
    # by index: a slice is contiguous or not depending on the size, and PyTorch would make a graph for each
    return rows.index_select(1, torch.arange(shape[1], device=matrix.device))


def _same(one: tuple[int, int], other: tuple[int, int]) -> bool:
    """Whether two shapes are known to be equal, without a guard on symbolic sizes."""
    return statically_known_true(one[0] == other[0]) and statically_known_true(one[1] == other[1])
