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
    "scale_of_amax",
    "spread",
    "with_amax",
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

    The scale is that of :func:`scale_of_amax`; where ``limit / amax`` overflows it is the largest finite value of the
    dtype of ``x``. A tile that holds an infinity or a NaN, or only zeros, has scale 1: its elements are cast as they
    are, infinities and values beyond the limit saturate, NaN stays NaN.

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
    x, amax = with_amax(x, tile, transpose)
    scale = scale_of_amax(
        amax, max_value(dtype), epsilon=epsilon, power_of_2=power_of_2, overflow=torch.finfo(x.dtype).max
    )
    return cast_tiles(x, scale, dtype, tile), scale.reciprocal()


def block_decode(data: torch.Tensor, scale_inv: torch.Tensor, tile: tuple[int, int]) -> torch.Tensor:
    """Float32 values ``[R, C]`` of FP8 ``data`` times the factor of each tile, as :func:`block_cast` gave them."""
    return data.to(torch.float32) * spread(scale_inv, (data.shape[0], data.shape[1]), tile)


def block_grid(rows: int, cols: int, tile: tuple[int, int]) -> tuple[int, int]:
    """How many tiles cover ``[rows, cols]`` downwards and across; sizes may be symbolic."""
    return (rows + tile[0] - 1) // tile[0], (cols + tile[1] - 1) // tile[1]


def scale_of_amax(
    amax: torch.Tensor, limit: float, *, epsilon: float, power_of_2: bool, overflow: float
) -> torch.Tensor:
    """``limit / max(amax, epsilon)`` of each float32 ``amax``, rounded to nearest.

    ``overflow`` replaces an infinite quotient. With ``power_of_2`` the mantissa is cleared, which rounds the scale
    down. An amax of 0, infinity or NaN gives scale 1.
    """
    floored = amax.clamp(min=epsilon) if epsilon > 0.0 else amax
    # tensor / tensor: torch computes number / tensor as reciprocal times number, which rounds twice
    scale = torch.full_like(floored, limit) / floored
    scale = torch.where(torch.isinf(scale), overflow, scale)
    if power_of_2:
        scale = (scale.view(torch.int32) & 0x7F800000).view(torch.float32)
    return torch.where((floored > 0) & torch.isfinite(floored), scale, 1.0)


def with_amax(x: torch.Tensor, tile: tuple[int, int], transpose: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """``x [M, K]`` or a view of its transpose, with the amax of each of its tiles."""
    if not transpose:
        return x, amax_of_tiles(x, tile)
    # reduced in the order of memory, then transposed: much faster in Inductor than reducing the transpose
    return x.t(), amax_of_tiles(x, (tile[1], tile[0])).t().clone(memory_format=torch.contiguous_format)


def amax_of_tiles(x: torch.Tensor, tile: tuple[int, int]) -> torch.Tensor:
    """Largest magnitude of each tile of ``x [M, K]``, float32 ``[tiles down, tiles across]``; NaN if it holds one."""
    down, across = block_grid(x.shape[0], x.shape[1], tile)
    below, right = down * tile[0] - x.shape[0], across * tile[1] - x.shape[1]
    # a symbolic size is always padded: one graph serves sizes that divide and sizes that do not
    if not (statically_known_true(below == 0) and statically_known_true(right == 0)):
        x = torch.constant_pad_nd(x, [0, right, 0, below])
    # in float32: Inductor (2.13) fails to compile two equal bfloat16 reductions in one graph
    return x.reshape(down, tile[0], across, tile[1]).abs().to(torch.float32).amax((1, 3))


def cast_tiles(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, tile: tuple[int, int]) -> torch.Tensor:
    """``x [R, C]`` of any strides times the ``scale [tiles down, tiles across]`` of each tile, cast; contiguous."""
    # as_strided puts the scales in memory: Inductor then computes each once, not again for every element it scales
    scale = scale.as_strided(scale.shape, (scale.shape[1], 1))
    data = saturating_cast(x * spread(scale, (x.shape[0], x.shape[1]), tile), dtype)  # float32 by promotion
    # a clone has the strides of a new tensor also where a size is 1; contiguous() has not
    return data.clone(memory_format=torch.contiguous_format)


def spread(values: torch.Tensor, shape: tuple[int, int], tile: tuple[int, int]) -> torch.Tensor:
    """The value of each tile ``[tiles down, tiles across]`` at every element of a matrix of ``shape``."""
    # by index: Inductor (2.13) drops elements of a slice of repeat_interleave() or of a reshape where the last tile is
    # partial, because it splits the loop over a dimension that the tile does not divide
    for dim, size in enumerate(tile):
        if size > 1:
            values = values.index_select(dim, torch.arange(shape[dim], device=values.device) // size)
    return values
