"""How every producer ends: one tile of float32 results is rounded, observed, cast and written row-wise and transposed.

Kernels compute a tile ``y [BM, BN]`` of a result ``[M, N]`` in registers and hand it to :func:`store_tile`. What has to
be allocated and passed for a quantizer, and how many passes it takes, is decided on the host by :func:`target`.

A scale that comes from the result itself (current scaling) takes two passes of the producing kernel: the first only
observes the largest magnitude, the second computes the same values again and casts them. That moves fewer bytes than
storing the result in high precision in between.

The largest magnitude is folded with an atomic maximum over the bits of non-negative floats, which order as integers do;
so it does not depend on the order of programs, and a NaN, above every number, stays.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import triton
import triton.language as tl

from functional_te.kernels.triton.launch import INTERPRETED
from functional_te.quantization.formats import max_value
from functional_te.quantization.quantizers import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8DelayedScalingQuantizer,
)
from functional_te.quantization.scaling import FLOAT32_MAX
from functional_te.quantization.tensor import BoundQuantizer, QuantizedTensor

__all__ = ["Target", "divide", "offsets", "round_through", "rounded", "store_tile", "target"]

# How a tile ends.
PLAIN, OBSERVE, DELAYED, CURRENT, BLOCK_1D, BLOCK_2D = range(6)
BLOCK = 128
# The dtypes that a result is rounded to before it is cast.
_ROUND = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


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
        y = to_bfloat16(y).to(tl.float32)
    if ROUND == 2:
        y = y.to(tl.float16).to(tl.float32)
    return y


@triton.jit
def saturate(y, LIMIT: tl.constexpr):
    """``y`` clamped to ``[-LIMIT, LIMIT]``; NaN stays."""
    return tl.where(y != y, y, tl.minimum(tl.maximum(y, -LIMIT), LIMIT))


@triton.jit
def cast_in_interpreter(y, BITS: tl.constexpr, LOWEST: tl.constexpr, data):
    """:func:`cast` of finite values and NaN, for Triton's interpreter.

    The interpreter (3.7) loses the carry of a mantissa that rounds up to a power of two, the sign of zero and NaN. So
    values are first rounded to ``BITS`` bits of mantissa, with subnormals below the exponent ``LOWEST``.
    """
    exponent = tl.maximum((y.to(tl.int32, bitcast=True) >> 23) & 0xFF, LOWEST + 127)
    step = ((exponent - BITS) << 23).to(tl.float32, bitcast=True)
    shift = 12582912.0  # 1.5 * 2**23: adding it rounds to integers, ties to even
    exact = tl.abs((y / step + shift) - shift) * step
    bits = exact.to(data.dtype.element_ty).to(tl.uint8, bitcast=True)
    bits = tl.where(y != y, 0x7F, bits) | ((y.to(tl.int32, bitcast=True) >> 31) & 0x80)
    return bits.to(tl.uint8).to(data.dtype.element_ty, bitcast=True)


@triton.jit
def cast(y, LIMIT: tl.constexpr, data):
    """Float32 ``y`` in the FP8 type that ``data`` points to: to nearest even, saturating, NaN stays."""
    y = saturate(y, LIMIT)
    if INTERPRETED_:
        if LIMIT == 448.0:
            return cast_in_interpreter(y, 3, -6, data)
        else:
            return cast_in_interpreter(y, 2, -14, data)
    else:
        return y.to(data.dtype.element_ty)


@triton.jit
def bits_of(y):
    """The bits of ``|y|``, as integers that order as the magnitudes do, NaN above all."""
    return tl.abs(y).to(tl.int32, bitcast=True)


@triton.jit
def scale_of(amax, LIMIT: tl.constexpr, EPSILON: tl.constexpr, POWER_OF_2: tl.constexpr, OVERFLOW: tl.constexpr):
    """:func:`functional_te.quantization.scaling.current_scale` of float32 ``amax``."""
    floored = tl.where(amax < EPSILON, EPSILON, amax)
    usable = (floored > 0.0) & (floored < float("inf"))
    scale = divide(LIMIT + tl.zeros_like(floored), tl.where(usable, floored, 1.0))
    scale = tl.where(scale == float("inf"), OVERFLOW, scale)
    if POWER_OF_2:
        scale = (scale.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    return tl.where(usable, scale, 1.0)


@triton.jit
def offsets(row, col, stride):
    """Offsets of a matrix's elements, in 64 bits: tensors of more than 2**31 elements are ordinary."""
    return row.to(tl.int64)[:, None] * stride + col.to(tl.int64)[None, :]


@triton.jit
def store_tile(
    y,
    row,
    col,
    top,
    left,
    M,
    N,
    row_data,
    row_scale,
    col_data,
    col_scale,
    amax,
    scale,
    END: tl.constexpr,
    ROWWISE: tl.constexpr,
    COLUMNWISE: tl.constexpr,
    ROUND: tl.constexpr,
    LIMIT: tl.constexpr,
    EPSILON: tl.constexpr,
    POWER_OF_2: tl.constexpr,
    OVERFLOW: tl.constexpr,
):
    """Round, observe, cast and write a tile.

    Args:
        y: float32 ``[BM, BN]``; what lies outside of the matrix may hold anything.
        row, col: int32 ``[BM]`` and ``[BN]``, consecutive; with blocks ``BM = BN = 128``, starting at multiples of it.
        top, left: the first of them, which spares reducing them.
        M, N: sizes of the matrix.
        row_data: ``[M, N]``; row_scale: ``[1]``, or the factors of its blocks.
        col_data: ``[N, M]``; col_scale: likewise.
        amax: int32 ``[1]``: bits of the largest magnitude. scale: float32 ``[1]`` of delayed scaling.
        END: PLAIN, OBSERVE, DELAYED, CURRENT, BLOCK_1D or BLOCK_2D.
        ROWWISE, COLUMNWISE: which copies are written.
        ROUND: see :func:`round_through`.
        LIMIT, EPSILON, POWER_OF_2, OVERFLOW: of the quantizer, see :func:`scale_of`.
    """
    rows, cols = row < M, col < N
    inside = rows[:, None] & cols[None, :]
    if END == PLAIN_:
        tl.store(row_data + offsets(row, col, N), rounded(y, row_data), mask=inside)
    else:
        y = tl.where(inside, round_through(y, ROUND), 0.0)
        first = (top == 0) & (left == 0)
        if (END == OBSERVE_) or (END == DELAYED_):
            largest = tl.max(bits_of(y))
            # the maximum only grows, so a program that sees one as large already has nothing to add
            if largest > tl.load(amax):
                tl.atomic_max(amax, largest, sem="relaxed")
        if END != OBSERVE_:
            if (END == DELAYED_) or (END == CURRENT_):
                if END == DELAYED_:
                    factor = tl.load(scale)
                else:
                    factor = scale_of(tl.load(amax).to(tl.float32, bitcast=True), LIMIT, EPSILON, POWER_OF_2, OVERFLOW)
                if first:
                    inverse = divide(1.0, factor)
                    if ROWWISE:
                        tl.store(row_scale, inverse)
                    if COLUMNWISE:
                        tl.store(col_scale, inverse)
                y *= factor
            elif END == BLOCK_2D_:
                largest = tl.max(bits_of(y)).to(tl.float32, bitcast=True)
                own = scale_of(largest, LIMIT, EPSILON, POWER_OF_2, OVERFLOW)
                inverse = divide(1.0, own)
                down, across = (top // 128).to(tl.int64), (left // 128).to(tl.int64)
                if (top < M) and (left < N):
                    if ROWWISE:
                        tl.store(row_scale + down * tl.cdiv(N, 128) + across, inverse)
                    if COLUMNWISE:
                        tl.store(col_scale + across * tl.cdiv(M, 128) + down, inverse)
                y *= own
            # one copy after the other, so that registers hold the values of one at a time
            if ROWWISE:
                by_row = y
                if END == BLOCK_1D_:
                    largest = tl.max(bits_of(y), axis=1).to(tl.float32, bitcast=True)
                    own = scale_of(largest, LIMIT, EPSILON, POWER_OF_2, OVERFLOW)
                    place = row.to(tl.int64) * tl.cdiv(N, 128) + left // 128
                    inverse = divide(tl.full(own.shape, 1.0, tl.float32), own)
                    tl.store(row_scale + place, inverse, mask=rows & (left < N))
                    by_row = y * own[:, None]
                data = cast(by_row, LIMIT, row_data)
                tl.store(row_data + offsets(row, col, N), data, mask=inside)
            if COLUMNWISE:
                by_col = y
                if END == BLOCK_1D_:
                    largest = tl.max(bits_of(y), axis=0).to(tl.float32, bitcast=True)
                    own = scale_of(largest, LIMIT, EPSILON, POWER_OF_2, OVERFLOW)
                    place = col.to(tl.int64) * tl.cdiv(M, 128) + top // 128
                    inverse = divide(tl.full(own.shape, 1.0, tl.float32), own)
                    tl.store(col_scale + place, inverse, mask=cols & (top < M))
                    by_col = y * own[None, :]
                data = tl.trans(cast(by_col, LIMIT, col_data))
                tl.store(col_data + offsets(col, row, M), data, mask=tl.trans(inside))


# Kernels may read constants of a module only if these are constexpr.
INTERPRETED_ = tl.constexpr(INTERPRETED)
PLAIN_ = tl.constexpr(PLAIN)
OBSERVE_ = tl.constexpr(OBSERVE)
DELAYED_ = tl.constexpr(DELAYED)
CURRENT_ = tl.constexpr(CURRENT)
BLOCK_1D_ = tl.constexpr(BLOCK_1D)
BLOCK_2D_ = tl.constexpr(BLOCK_2D)


@dataclasses.dataclass
class Target:
    """What a producer writes to: the buffers and constants of :func:`store_tile`, and the result they make.

    Attributes:
        ends: one ``END`` for every pass of the producing kernel, in order.
        blocks: whether tiles have to be 128 by 128.
        arguments: the tensors of :func:`store_tile` from ``row_data`` to ``scale``, in order.
        constants: its constants from ``ROWWISE`` on, by name.
    """

    ends: tuple[int, ...]
    blocks: bool
    arguments: tuple[torch.Tensor, ...]
    constants: dict[str, Any]
    quantizer: Any = None
    dtype: torch.dtype = torch.float32
    observed: torch.Tensor | None = None

    def result(self) -> tuple[Any, torch.Tensor | None]:
        """The stored tensor, and the observed amax (float32 ``[1]``) or None, as :meth:`Backend.store` gives them."""
        row_data, row_scale, col_data, col_scale, *_ = self.arguments
        if self.quantizer is None:
            return row_data, None
        row, col = self.constants["ROWWISE"], self.constants["COLUMNWISE"]
        made = QuantizedTensor(
            rowwise_data=row_data if row else None,
            rowwise_scale_inv=row_scale if row else None,
            columnwise_data=col_data if col else None,
            columnwise_scale_inv=col_scale if col else None,
            dtype=self.dtype,
            quantizer=self.quantizer,
        )
        return made, None if self.observed is None else self.observed.view(torch.float32)


def target(
    shape: tuple[Any, ...], dtype: torch.dtype, bound: BoundQuantizer | None, device: torch.device
) -> Target | None:
    """Allocate what a result of ``shape`` is stored in.

    Args:
        shape: logical shape; the kernel looks at it as a matrix ``[M, N]`` of its last dimension.
        dtype: nominal dtype of the result.
        bound: how it is cast, or None.
        device: where it lives.

    Returns:
        None for a format that :func:`store_tile` does not make.
    """
    if bound is None:
        data = torch.empty(shape, dtype=dtype, device=device)
        return Target((PLAIN,), False, (data,) * 6, _constants(False, False, 0, 1.0))
    quantizer: Any = bound.quantizer
    kind = type(quantizer)
    if kind is Float8DelayedScalingQuantizer:
        ends: tuple[int, ...] = (DELAYED,)
        numbers = (0.0, False, FLOAT32_MAX)
    elif kind is Float8CurrentScalingQuantizer:
        ends = (OBSERVE, CURRENT)
        numbers = (quantizer.amax_epsilon, quantizer.power_2_scale, FLOAT32_MAX)
    elif kind is Float8BlockQuantizer:
        ends = (BLOCK_1D if quantizer.block_scaling_dim == 1 else BLOCK_2D,)
        numbers = (quantizer.amax_epsilon, quantizer.power_2_scale, torch.finfo(dtype).max)
    else:
        return None
    copies: dict[bool, tuple[torch.Tensor, torch.Tensor]] = {}
    for columnwise in (False, True):
        if quantizer.columnwise if columnwise else quantizer.rowwise:
            spec = quantizer.copy_spec(shape, columnwise)
            copies[columnwise] = tuple(torch.empty(size, dtype=kind, device=device) for size, kind in spec[:2])  # type: ignore[assignment]
    if not copies:
        return None
    some = next(iter(copies.values()))
    observes = DELAYED in ends or OBSERVE in ends
    amax = torch.zeros(1, dtype=torch.int32, device=device) if observes else some[1]
    scale = some[1] if bound.scale is None else bound.scale
    arguments = (*copies.get(False, some), *copies.get(True, some), amax, scale)
    rounds = 0 if quantizer.from_float32 else _ROUND[dtype]
    constants = _constants(False in copies, True in copies, rounds, max_value(quantizer.dtype), *numbers)
    observed = amax if quantizer.stateful else None
    return Target(ends, BLOCK_1D in ends or BLOCK_2D in ends, arguments, constants, quantizer, dtype, observed)


def _constants(
    rowwise: bool,
    columnwise: bool,
    rounds: int,
    limit: float,
    epsilon: float = 0.0,
    power_of_2: bool = False,
    overflow: float = FLOAT32_MAX,
) -> dict[str, Any]:
    return {
        "ROWWISE": rowwise,
        "COLUMNWISE": columnwise,
        "ROUND": rounds,
        "LIMIT": limit,
        "EPSILON": epsilon,
        "POWER_OF_2": power_of_2,
        "OVERFLOW": overflow,
    }
