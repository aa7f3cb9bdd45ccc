"""The math of NVFP4: 4-bit elements, an E4M3 scale for each block of 16, and one float32 factor.

``value = q * s * factor`` with ``q`` an E2M1 number (0, 0.5, 1, 1.5, 2, 3, 4 or 6 and a sign), ``s`` the scale of its
block and ``factor`` computed from the largest magnitude of the tensor. Reference for the two levels and the order of
operations: NVIDIA, "Pretraining Large Language Models with NVFP4", 2025, and Transformer Engine's kernels.

Rules for what is not a number of the format: infinity saturates, in elements and in scales. A NaN makes the scale of
its block NaN, so the block decodes to NaN. A tensor whose amax is 0, infinity or NaN has tensor scale and factor 1.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch

from functional_te._errors import value_error
from functional_te.quantization.formats import max_value
from functional_te.quantization.scaling import FLOAT32_MAX, divide, reciprocal

__all__ = [
    "BLOCK",
    "E2M1_MAX",
    "cast_e2m1",
    "cast_e2m1_stochastic",
    "decode_e2m1",
    "nvfp4_cast",
    "nvfp4_decode",
    "pack_fp4",
    "tensor_factor",
    "tensor_scale",
    "unpack_fp4",
]

BLOCK = 16
E2M1_MAX = 6.0


def pack_fp4(codes: torch.Tensor) -> torch.Tensor:
    """Two codes to a byte: uint8 ``[..., C]`` below 16 to uint8 ``[..., C / 2]``, the first code in the low nibble."""
    # a pair of bytes as one integer: Inductor writes the codes out once instead of computing both halves apart
    pairs = _flat(codes).view(torch.int16)
    return (pairs | (pairs >> 4)).to(torch.uint8).view(*codes.shape[:-1], codes.shape[-1] // 2)


def unpack_fp4(data: torch.Tensor) -> torch.Tensor:
    """Undo :func:`pack_fp4`: uint8 ``[..., C / 2]`` to codes, uint8 ``[..., C]``."""
    pairs = data.to(torch.int16)
    codes = _flat((pairs | (pairs << 4)) & 0x0F0F).view(torch.uint8)
    return codes.view(*data.shape[:-1], data.shape[-1] * 2)


def _flat(x: torch.Tensor) -> torch.Tensor:
    """A copy of ``x`` with one dimension. as_strided, which has Inductor write it out first, in this order."""
    return x.clone(memory_format=torch.contiguous_format).as_strided((x.numel(),), (1,))


def cast_e2m1(x: torch.Tensor) -> torch.Tensor:
    """Codes (uint8, 0 to 15) of float32 ``x`` rounded to nearest even, saturating at 6.

    The sign is bit 3 and is kept for zeros. NaN becomes +6, which is what the conversion instruction of the hardware
    gives; E2M1 has no NaN.
    """
    x, magnitude = _clamped(x)
    steps = ((magnitude * 2).round(), magnitude.round() + 2, (magnitude * 0.5).round() + 4)
    return _signed(torch.minimum(torch.minimum(steps[0], steps[1]), steps[2]), x)


def cast_e2m1_stochastic(x: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """Codes of float32 ``x`` rounded up or down at random, by magnitude.

    A value that lies a fraction ``f`` of the way from one E2M1 number to the next becomes the next for ``f * 65536``
    of the 65,536 values of ``bits``, give or take one. E2M1 numbers stay what they are. Saturation, signs and NaN are
    those of :func:`cast_e2m1`.

    Args:
        x: float32.
        bits: integers in ``[0, 65536)`` of the shape of ``x``.
    """
    x, magnitude = _clamped(x)
    code = torch.minimum(torch.minimum(magnitude * 2, magnitude + 2), magnitude * 0.5 + 4)
    return _signed((code + bits.to(torch.float32) * 2.0**-16).floor(), x)


def decode_e2m1(codes: torch.Tensor) -> torch.Tensor:
    """The float32 values of E2M1 codes (uint8, 0 to 15)."""
    code = (codes & 7).to(torch.float32)
    magnitude = torch.maximum(torch.maximum(code * 0.5, code - 2), code * 2 - 8)
    return magnitude * (1 - 2 * (codes >> 3).to(torch.float32))


def _clamped(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``x`` without NaN, and its magnitude up to 6.

    The code of a magnitude ``m`` of E2M1 is ``2 m`` up to 2, ``m + 2`` up to 4, ``m / 2 + 4`` up to 6; each line is the
    lowest of the three where it holds. Between E2M1 numbers the same lines tell how far the next one is.
    """
    x = torch.where(x == x, x, E2M1_MAX)  # Inductor does not vectorize isnan()
    return x, x.abs().clamp(max=E2M1_MAX)


def _signed(magnitude: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The code of ``magnitude`` (float32, 0 to 7) with the sign of ``x``."""
    return magnitude.to(torch.uint8) | ((x.view(torch.int32) >> 28) & 8).to(torch.uint8)


def tensor_scale(amax: torch.Tensor, e4m3_max: float = 448.0) -> torch.Tensor:
    """The scale ``S = e4m3_max * 6 / amax`` of a tensor, float32 of the shape of ``amax``.

    It brings the largest element to 6 and the scale of its block to ``e4m3_max``. A quotient that overflows gives the
    largest float32; an amax of 0, infinity or NaN gives 1.
    """
    scale = divide(e4m3_max * E2M1_MAX, amax).clamp(max=FLOAT32_MAX)
    return torch.where(_usable(amax), scale, 1.0)


def tensor_factor(amax: torch.Tensor, e4m3_max: float = 448.0) -> torch.Tensor:
    """The factor ``amax / (6 * e4m3_max)`` that completes :func:`nvfp4_decode`, float32 of the shape of ``amax``.

    It is the reciprocal of :func:`tensor_scale`, rounded once: 1 for an amax of 0, infinity or NaN, and not below the
    reciprocal of the largest float32 (Transformer Engine lets it shrink further, so that there tensors with an amax
    below 8e-36 decode to less than they were).
    """
    factor = divide(amax, torch.full_like(amax, e4m3_max * E2M1_MAX)).clamp(min=1 / FLOAT32_MAX)
    return torch.where(_usable(amax), factor, 1.0)


def _usable(amax: torch.Tensor) -> torch.Tensor:
    return (amax > 0) & (amax <= FLOAT32_MAX)


def nvfp4_cast(
    x: torch.Tensor,
    amax: torch.Tensor,
    *,
    tile: tuple[int, int] = (1, BLOCK),
    e4m3_max: float = 448.0,
    bits: torch.Tensor | None = None,
    four_over_six: str | None = None,
    transpose: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cast a matrix ``A [R, C]``, which is ``x`` or its transpose, to NVFP4.

    Blocks of 16 run along the last dimension of ``A``. With ``S`` of :func:`tensor_scale`, the scale of a block is
    ``s = E4M3(block_amax * (S / 6))`` and its elements are E2M1 of ``x * min(1 / (s * (1 / S)), FLT_MAX)``, each
    operation rounded to float32 (``S / 6`` is a product with the float32 nearest to 1/6), as in Transformer Engine.
    A block of zeros has scale 0; so has one whose scale underflows, and it decodes to zeros.

    Args:
        x: float32, float16 or bfloat16 ``[M, K]``, any strides.
        amax: the largest magnitude of the tensor, float32 ``[1]``, or of each row of ``A``, ``[R]``, which needs
            the tile (1, 16); or what broadcasts to the scales: one of each row of tiles, ``[R / tile[0], 1]``, or of
            each column of blocks, ``[1, C / 16]``. Tiles are whole then.
        tile: the elements that share a scale, (1, 16) or (16, 16); the last tile of rows may be partial.
        e4m3_max: the block scale that the largest block gets.
        bits: random integers in ``[0, 65536)``, ``[R, C]``, for stochastic rounding; None rounds to nearest even. They
            are the largest scratch of a cast: ``random_bits`` takes four bytes an element.
        four_over_six: None, or ``"MAE"`` or ``"MSE"``: try the block scale as it is and times 1.5, so that the
            largest element becomes 6 or 4, and keep what has the lower error; the first on a tie.
        transpose: whether ``A`` is ``x.T``.

    Returns:
        Packed data, uint8 ``[R, C / 2]``, and scales, float8_e4m3fn ``[ceil(R / tile[0]), C / 16]``.

    Raises:
        ValueError: ``C`` is not a multiple of 16, or an option is unknown or excludes another.
    """
    tiling = _Tiling(dim=0 if transpose else 1, height=tile[0])
    _check_options(x.shape[tiling.dim], amax, tile, bits, four_over_six)
    blocks = tiling.blocks(x)
    if amax.dim() == 1:
        amax = amax.unsqueeze(tiling.dim)
    elif transpose:
        amax = amax.t()
    block_amax = tiling.largest(blocks.to(torch.float32).abs().amax(tiling.dim + 1))
    if four_over_six is not None:
        codes, block_scale = _better_of_two(blocks, block_amax, amax, e4m3_max, four_over_six, tiling)
    else:
        scale = tensor_scale(amax, e4m3_max)
        block_scale = _as_scale(block_amax * (scale * (1 / E2M1_MAX)))
        scaled = _scaled(blocks, block_scale, scale, tiling)
        if bits is None:
            codes = cast_e2m1(scaled)
        else:
            codes = cast_e2m1_stochastic(scaled, tiling.blocks(bits.T if transpose else bits))
    codes = codes.flatten(tiling.dim, tiling.dim + 1)
    if transpose:
        codes, block_scale = _in_memory(codes).T, block_scale.T
    return pack_fp4(codes[: x.shape[1 - tiling.dim]]), block_scale.contiguous()


def nvfp4_decode(data: torch.Tensor, scale: torch.Tensor, tile: tuple[int, int] = (1, BLOCK)) -> torch.Tensor:
    """The values ``q * s`` of :func:`nvfp4_cast`, float32 ``[R, C]``; exact, and without :func:`tensor_factor`."""
    tiling = _Tiling(dim=1, height=tile[0])
    blocks = decode_e2m1(tiling.blocks(unpack_fp4(data)))
    return (blocks * tiling.each_row(scale.to(torch.float32))).flatten(1)[: data.shape[0]]


class _Tiling(NamedTuple):
    """Where the blocks of ``A`` lie in the layout of ``x``.

    All math runs in the layout of ``x``, where memory is contiguous; only the codes are transposed in the end. With R
    rows of N blocks in T tiles, shapes are ``[R, N, 16]`` for elements, ``[R, N]`` per block and ``[T, N]`` per tile
    if ``dim`` is 1, and ``[N, 16, R]``, ``[N, R]`` and ``[N, T]`` if it is 0.
    """

    dim: int  # of x, along which blocks run; the rows of A run along the other
    height: int  # of a tile, in rows of A

    def blocks(self, x: torch.Tensor) -> torch.Tensor:
        """Elements by block; rows of zeros fill up the last tile."""
        if self.height > 1:
            missing = -x.shape[1 - self.dim] % self.height
            x = torch.constant_pad_nd(x, (0, 0, 0, missing) if self.dim else (0, missing))
        return x.unflatten(self.dim, (x.shape[self.dim] // BLOCK, BLOCK))

    def largest(self, per_block: torch.Tensor) -> torch.Tensor:
        """The largest value of each tile."""
        return per_block if self.height == 1 else self._split_rows(per_block).amax(2 - self.dim)

    def total(self, elements: Sequence[torch.Tensor]) -> torch.Tensor:
        """The sum of each tile from the 16 elements of all blocks: along each block one by one, then rows by halves."""
        per_block = functools.reduce(torch.add, elements)
        if self.height == 1:
            return per_block
        axis = 2 - self.dim
        rows = self._split_rows(per_block)
        for _ in range(self.height.bit_length() - 1):
            upper, lower = rows.chunk(2, axis)
            rows = upper + lower
        return rows.squeeze(axis)

    def each_row(self, per_tile: torch.Tensor) -> torch.Tensor:
        """What each tile has, to broadcast against elements."""
        if self.height > 1:
            per_tile = per_tile.repeat_interleave(self.height, 1 - self.dim)
        return per_tile.unsqueeze(self.dim + 1)

    def _split_rows(self, per_block: torch.Tensor) -> torch.Tensor:
        rows = per_block.shape[1 - self.dim]
        return per_block.unflatten(1 - self.dim, (rows // self.height, self.height))


def _check_options(
    size: int, amax: torch.Tensor, tile: tuple[int, int], bits: torch.Tensor | None, four_over_six: str | None
) -> None:
    where = "nvfp4_cast"
    if size % BLOCK != 0:
        raise value_error(where, "x", f"a multiple of {BLOCK} values along the blocks", size)
    if tile not in ((1, BLOCK), (BLOCK, BLOCK)):
        raise value_error(where, "tile", "(1, 16) or (16, 16)", tile)
    if tile[0] > 1 and amax.dim() == 1 and amax.shape[0] != 1:
        raise value_error(where, "amax", "shape (1,) with a tile of 16 rows", tuple(amax.shape))
    if four_over_six not in (None, "MAE", "MSE"):
        raise value_error(where, "four_over_six", 'None, "MAE" or "MSE"', repr(four_over_six))
    if four_over_six is not None and bits is not None:
        raise value_error(where, "bits", "None with four_over_six, which compares deterministic casts", "a tensor")


def _in_memory(x: torch.Tensor) -> torch.Tensor:
    """``x`` itself. Inductor writes it out here; it would compute it anew in every place that reads it."""
    return x.as_strided(x.shape, x.stride())


def _as_scale(scale: torch.Tensor) -> torch.Tensor:
    """Positive float32 to E4M3, saturating. The sign of a NaN, which differs between vector units, is cleared."""
    return scale.clamp(max=max_value(torch.float8_e4m3fn)).abs().to(torch.float8_e4m3fn)


def _scaled(blocks: torch.Tensor, block_scale: torch.Tensor, scale: torch.Tensor, tiling: _Tiling) -> torch.Tensor:
    """``blocks`` brought into the range of E2M1, float32."""
    encode = reciprocal(block_scale.to(torch.float32) * reciprocal(scale)).clamp(max=FLOAT32_MAX)
    return blocks.to(torch.float32) * tiling.each_row(_in_memory(encode))


def _square(x: torch.Tensor) -> torch.Tensor:
    """The square rounded to float32, in float64: a compiler would fuse a float32 product with the sum it goes into."""
    return x.to(torch.float64).square().to(torch.float32)


def _better_of_two(
    blocks: torch.Tensor, block_amax: torch.Tensor, amax: torch.Tensor, e4m3_max: float, measure: str, tiling: _Tiling
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of "four over six", in Transformer Engine's order of operations.

    Here the block scale is ``E4M3(block_amax / 6 * S * stretch)``. The error of a candidate is that of its decoded
    values against ``blocks``, summed one by one in float32.
    """
    scale = tensor_scale(amax, e4m3_max)
    base = divide(block_amax, torch.full_like(block_amax, E2M1_MAX)) * scale
    error_of, inner = _square if measure == "MSE" else torch.abs, tiling.dim + 1
    if tiling.height > 1 and amax.shape[1 - tiling.dim] != 1:  # one of each row of tiles
        amax = tiling.each_row(amax).squeeze(inner)
    divisor = torch.full_like(amax, e4m3_max * E2M1_MAX)
    candidates = []
    for stretch in (1.0, 1.5):
        block_scale = _as_scale(base * stretch)
        codes = _in_memory(cast_e2m1(_scaled(blocks, block_scale, scale, tiling)))
        per_tile = block_scale.to(torch.float32)
        per_row = tiling.each_row(per_tile).squeeze(inner)
        errors = [  # element by element: all at once would take eight bytes of memory for each
            error_of(divide(decode_e2m1(code) * per_row * amax, divisor) - value.to(torch.float32))
            for code, value in zip(codes.unbind(inner), blocks.unbind(inner), strict=True)
        ]
        candidates.append((codes, per_tile, tiling.total(errors)))
    (codes6, scale6, error6), (codes4, scale4, error4) = candidates
    take4 = error4 < error6
    codes = torch.where(tiling.each_row(take4), codes4, codes6)
    return codes, torch.where(take4, scale4, scale6).to(torch.float8_e4m3fn)
