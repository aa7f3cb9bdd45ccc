"""Float32 values in registers: rounded to other types, cast to FP8, and the scales of casts.

What PTX has no Triton function for is inline PTX beside a branch for Triton's interpreter, which gives the same bits.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from functional_te.kernels.triton.launch import INTERPRETED

__all__ = [
    "as_words",
    "bits_of",
    "cast",
    "cast_words",
    "divide",
    "inverse_of",
    "quarters_of",
    "reciprocal",
    "round_like",
    "round_through",
    "rounded",
    "rows_of_tile",
    "scale_of",
]

INTERPRETED_ = tl.constexpr(INTERPRETED)


def _word(kind: str) -> Any:
    """PTX that casts four float32 numbers to a word, the first in its lowest byte."""
    pair = f"cvt.rn.satfinite.{kind}x2.f32"
    return tl.constexpr(f"{{.reg .b16 low, high; {pair} low, $2, $1; {pair} high, $4, $3; mov.b32 $0, {{low, high}};}}")


E4M3_WORD, E5M2_WORD = _word("e4m3"), _word("e5m2")


@triton.jit
def divide(numerator, denominator):
    """Float32 quotient, rounded to nearest."""
    return tl.div_rn(numerator, denominator)


@triton.jit
def to_bfloat16(y):
    """Float32 ``y`` in bfloat16, to nearest even. The interpreter (3.7) truncates, so its bits are rounded first."""
    if INTERPRETED_:
        bits = y.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        y = tl.where(y != y, y, bits.to(tl.float32, bitcast=True))
    return y.to(tl.bfloat16)


@triton.jit
def rounded(y, data):
    """Float32 ``y`` in the high-precision type that ``data`` points to."""
    if data.dtype.element_ty == tl.bfloat16:
        return to_bfloat16(y)
    else:
        return y.to(data.dtype.element_ty)


@triton.jit
def round_through(y, ROUND: tl.constexpr):
    """Float32 ``y`` rounded to bfloat16 (1) or float16 (2), as float32 again; 0 leaves it."""
    if ROUND == 1:
        if INTERPRETED_ or y.numel < 2:
            y = to_bfloat16(y).to(tl.float32)
        else:
            # two at a time, which is an instruction of full rate; one is not
            y = tl.inline_asm_elementwise(
                "{.reg .b32 both; cvt.rn.bf16x2.f32 both, $3, $2; shl.b32 $0, both, 16; and.b32 $1, both, 0xffff0000;}",
                "=r,=r,f,f",
                [y],
                tl.float32,
                is_pure=True,
                pack=2,
            )
    if ROUND == 2:
        y = y.to(tl.float16).to(tl.float32)
    return y


@triton.jit
def round_like(y, data):
    """Float32 ``y`` rounded to the high-precision type that ``data`` points to, as float32 again."""
    if data.dtype.element_ty == tl.bfloat16:
        y = round_through(y, 1)
    elif data.dtype.element_ty == tl.float16:
        y = round_through(y, 2)
    return y


@triton.jit
def reciprocal(y):
    """``1 / y`` to one unit in the last place; 0 where it is no normal number."""
    if INTERPRETED_:
        y = 1.0 / y
    else:
        y = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [y], tl.float32, is_pure=True, pack=1)
    return y


@triton.jit
def saturate(y, LIMIT: tl.constexpr):
    """``y`` clamped to ``[-LIMIT, LIMIT]``; NaN stays."""
    return tl.where(y != y, y, tl.minimum(tl.maximum(y, -LIMIT), LIMIT))


@triton.jit
def cast_in_interpreter(y, BITS: tl.constexpr, LOWEST: tl.constexpr, TYPE: tl.constexpr):
    """:func:`cast` of finite values and NaN, for Triton's interpreter.

    The interpreter (3.7) loses the carry of a mantissa that rounds up to a power of two, the sign of zero and NaN. So
    values are first rounded to ``BITS`` bits of mantissa, with subnormals below the exponent ``LOWEST``.
    """
    exponent = tl.maximum((y.to(tl.int32, bitcast=True) >> 23) & 0xFF, LOWEST + 127)
    step = ((exponent - BITS) << 23).to(tl.float32, bitcast=True)
    shift = 12582912.0  # 1.5 * 2**23: adding it rounds to integers, ties to even
    exact = tl.abs((y / step + shift) - shift) * step
    bits = exact.to(TYPE).to(tl.uint8, bitcast=True)
    bits = tl.where(y != y, 0x7F, bits) | ((y.to(tl.int32, bitcast=True) >> 31) & 0x80)
    return bits.to(tl.uint8).to(TYPE, bitcast=True)


@triton.jit
def cast(y, LIMIT: tl.constexpr):
    """Float32 ``y`` in the FP8 type whose largest value is ``LIMIT``: to nearest even, saturating, NaN stays."""
    TYPE: tl.constexpr = tl.float8e4nv if LIMIT == 448.0 else tl.float8e5
    if INTERPRETED_:
        if LIMIT == 448.0:
            data = cast_in_interpreter(saturate(y, LIMIT), 3, -6, TYPE)
        else:
            data = cast_in_interpreter(saturate(y, LIMIT), 2, -14, TYPE)
    else:
        # Four at a time, by an instruction that saturates. Of Triton's own conversion, in pairs, ptxas (12.8) loses
        # some where both a transposed and another copy need them.
        FOUR: tl.constexpr = E4M3_WORD if LIMIT == 448.0 else E5M2_WORD
        data = tl.inline_asm_elementwise(FOUR, "=r,f,f,f,f", [y], tl.int8, is_pure=True, pack=4)
        data = data.to(TYPE, bitcast=True)
    return data


@triton.jit
def byte(y, LIMIT: tl.constexpr):
    """:func:`cast` of ``y`` as the low byte of an int32."""
    return cast(y, LIMIT).to(tl.uint8, bitcast=True).to(tl.int32)


@triton.jit
def rows_of_tile(top, BM: tl.constexpr, PACK: tl.constexpr):
    """Rows of a tile from ``top`` on, int32 ``[BM]``; with PACK in the order that :func:`cast_words` wants."""
    row = tl.arange(0, BM)
    if PACK:
        tl.static_assert(BM % 4 == 0)
        row = (row % (BM // 4)) * 4 + row // (BM // 4)
    return top + row


@triton.jit
def quarters_of(y):
    """The four quarters of the rows of ``y [BM, BN]``, each ``[BM / 4, BN]``."""
    height: tl.constexpr = y.shape[0] // 4
    even, odd = tl.split(tl.permute(tl.reshape(y, [2, 2, height, y.shape[1]]), [2, 3, 0, 1]))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def cast_words(y, LIMIT: tl.constexpr):
    """:func:`cast` of ``y [BM, BN]`` to words of four rows, int32 ``[BN, BM / 4]``; rows as in :func:`rows_of_tile`.

    Four rows lie a quarter of the tile apart, where one thread has them, so that packing moves nothing between threads
    and the transposition moves words instead of bytes.
    """
    first, second, third, fourth = quarters_of(y)
    if INTERPRETED_:
        words = (
            byte(first, LIMIT) | (byte(second, LIMIT) << 8) | (byte(third, LIMIT) << 16) | (byte(fourth, LIMIT) << 24)
        )
    else:
        FOUR: tl.constexpr = E4M3_WORD if LIMIT == 448.0 else E5M2_WORD
        values = [first, second, third, fourth]
        words = tl.inline_asm_elementwise(FOUR, "=r,f,f,f,f", values, tl.int32, is_pure=True, pack=1)
    return tl.trans(words)


@triton.jit
def as_words(pointer):
    """A pointer to other data, as a pointer to int32."""
    return pointer.to(tl.pointer_type(tl.int32), bitcast=True)


@triton.jit
def bits_of(y):
    """The bits of ``|y|``, as integers that order as the magnitudes do, NaN above all."""
    return tl.abs(y).to(tl.int32, bitcast=True)


@triton.jit
def scale_of(amax, LIMIT: tl.constexpr, EPSILON: tl.constexpr, POWER_OF_2: tl.constexpr, OVERFLOW: tl.constexpr):
    """:func:`functional_te.quantization.scaling.current_scale` of float32 ``amax``."""
    floored = tl.where(amax < EPSILON, EPSILON, amax)
    usable = (floored > 0.0) & (floored < float("inf"))
    if POWER_OF_2:
        # Of LIMIT / amax, whose mantissa goes, only the exponent is needed. LIMIT is 1.75 * 2**top, and no float32
        # quotient rounds up to a power of two: its exponent is top - exponent(amax), one less for mantissas above 1.75.
        top: tl.constexpr = 8 if LIMIT == 448.0 else 15
        exponent = 254 + top - ((floored.to(tl.int32, bitcast=True) + 0x1FFFFF) >> 23)
        largest = (OVERFLOW + tl.zeros_like(floored)).to(tl.int32, bitcast=True) & 0x7F800000
        scale = tl.where(exponent > 254, largest, exponent << 23).to(tl.float32, bitcast=True)
    else:
        scale = divide(LIMIT + tl.zeros_like(floored), tl.where(usable, floored, 1.0))
        scale = tl.where(scale == float("inf"), OVERFLOW, scale)
    return tl.where(usable, scale, 1.0)


@triton.jit
def inverse_of(scale, POWER_OF_2: tl.constexpr):
    """``1 / scale`` of a float32 scale that :func:`scale_of` made."""
    if POWER_OF_2:
        bits = scale.to(tl.int32, bitcast=True)
        # half of the smallest normal number is the inverse of the largest power of two
        return tl.where(bits == 0x7F000000, 0x400000, 0x7F000000 - bits).to(tl.float32, bitcast=True)
    else:
        return divide(tl.full(scale.shape, 1.0, tl.float32), scale)
