"""MXFP8: the pure math of casts with one E8M0 scale byte per block of 32.

A byte ``b`` means ``2**(b - 127)``, 255 means NaN. Scales are rounded up, so no finite element saturates.
"""

from __future__ import annotations

import math

import torch

from functional_te.quantization.formats import max_value
from functional_te.quantization.fp8_block import (
    amax_of_tiles,
    block_grid,
    cast_tiles,
    decode_tiles,
    pad_to_tiles,
    transposed,
)

__all__ = ["BLOCK", "block_grid", "mx_cast", "mx_decode"]

BLOCK = 32

_INFINITY = 0x7F800000  # bits of float32 infinity; those of NaN are larger
_MANTISSA = 0x007FFFFF
_SMALLEST = 0x00400000  # bits of 2**-127, which is subnormal
_NAN = 0x7FC00000


def mx_cast(
    x: torch.Tensor, dtype: torch.dtype, *, tile: tuple[int, int] = (1, BLOCK), transpose: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cast a matrix to FP8 with one power-of-two scale per tile.

    The byte is ``127 + ceil(log2(amax / limit))``, exact and at least 0; an amax of infinity gives 254, of NaN 255.
    The data are ``x * 2**(127 - byte)``, saturated. So in a tile that holds an infinity, infinities become the limit
    and the others are multiplied by ``2**-127``; a tile that holds a NaN becomes NaN as a whole. The formula is that
    of Transformer Engine's MXFP8BlockScaling, which differs from the rounding down of the OCP specification,
    "Microscaling Formats (MX)", 2023.

    Args:
        x: float32, float16 or bfloat16 ``[M, K]`` of any strides and sizes.
        dtype: ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.
        tile: rows and columns of a tile of the result: ``(1, 32)`` or ``(32, 32)``. Tiles at the edges are partial.
        transpose: whether the result is that of ``x.T``.

    Returns:
        The data, contiguous, of shape ``[R, C]``, that of ``x`` or of ``x.T``; and the scale bytes, uint8
        ``[ceil(R / tile[0]), ceil(C / tile[1])]``, contiguous.
    """
    tile = (tile[1], tile[0]) if transpose else tile  # of x
    whole = pad_to_tiles(x, tile)
    byte = _byte_of(amax_of_tiles(whole, tile), max_value(dtype))
    data = cast_tiles(whole, _power_of_2(254 - byte), dtype, tile, (x.shape[0], x.shape[1]), transpose)
    return data, transposed(byte.to(torch.uint8)) if transpose else byte.to(torch.uint8)


def mx_decode(data: torch.Tensor, scale: torch.Tensor, tile: tuple[int, int]) -> torch.Tensor:
    """Float32 values ``[R, C]`` of FP8 ``data`` times ``2**(byte - 127)`` of each tile; NaN where the byte is 255."""
    return decode_tiles(data, _power_of_2(scale.to(torch.int32)), tile)


def _byte_of(amax: torch.Tensor, limit: float) -> torch.Tensor:
    """Scale bytes, as int32, of float32 ``amax``."""
    fraction, exponent = math.frexp(limit)
    mantissa = round((2.0 * fraction - 1.0) * (_MANTISSA + 1))
    bits = amax.view(torch.int32) & 0x7FFFFFFF  # a NaN may have either sign
    # a mantissa above that of the limit carries into the exponent: divides and rounds log2 up without an error
    byte = ((bits + (_MANTISSA - mantissa)) >> 23) - (exponent - 1)
    byte = torch.where(bits < _INFINITY, byte.clamp(min=0), 254)
    return torch.where(bits > _INFINITY, 255, byte)


def _power_of_2(exponent: torch.Tensor) -> torch.Tensor:
    """Float32 ``2**(exponent - 127)`` of int32 exponents 0 to 254; NaN outside of them."""
    bits = torch.where(exponent == 0, _SMALLEST, exponent << 23)
    return torch.where((exponent < 0) | (exponent > 254), _NAN, bits).view(torch.float32)
