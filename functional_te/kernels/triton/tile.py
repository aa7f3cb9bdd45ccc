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
import functools
from typing import Any

import torch
import triton
import triton.language as tl

from functional_te.kernels.triton.rounding import (
    as_words,
    bits_of,
    cast,
    cast_words,
    inverse_of,
    round_through,
    rounded,
    scale_of,
)
from functional_te.quantization.formats import max_value
from functional_te.quantization.fp8_block import block_grid
from functional_te.quantization.quantizer import rows_of
from functional_te.quantization.quantizers import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8DelayedScalingQuantizer,
)
from functional_te.quantization.scaling import FLOAT32_MAX
from functional_te.quantization.tensor import BoundQuantizer, QuantizedTensor
from functional_te.torch_compat import statically_known_true

__all__ = ["Target", "below", "in_blocks", "offsets", "sized", "store_tile", "target", "whole"]

# How a tile ends: as it is; observed only; cast with the scale of delayed or of current scaling; cast in blocks.
# Kernels compare with these strings: Triton checks on every launch that constants of a module are what they were.
Ends = tuple[str, ...]
BLOCK = 128
# The dtypes that a result is rounded to before it is cast.
_ROUND = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


@triton.jit
def below(place, size, WHOLE: tl.constexpr):
    """Which of some rows or columns lie inside of a matrix; all do if WHOLE, which leaves nothing to mask."""
    if WHOLE:
        return tl.full(place.shape, True, tl.int1)
    else:
        return place < size


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
    PACK: tl.constexpr,
    ROUND: tl.constexpr,
    LIMIT: tl.constexpr,
    EPSILON: tl.constexpr,
    POWER_OF_2: tl.constexpr,
    OVERFLOW: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Round, observe, cast and write a tile.

    Args:
        y: float32 ``[BM, BN]``; what lies outside of the matrix may hold anything.
        row, col: int32 ``[BM]`` and ``[BN]``, consecutive; with blocks ``BM = BN = 128``, starting at multiples of it.
        top, left: the first of them, which spares reducing them.
        M, N: sizes of the matrix.
        row_data: ``[M, N]``; row_scale: ``[1]``, or the factors of its blocks.
        col_data: ``[N, M]``; col_scale: likewise.
        amax: float32 ``[1]``, the largest magnitude. scale: float32 ``[1]`` of delayed scaling.
        END: "plain", "observe", "delayed", "current", "block_1d" or "block_2d".
        ROWWISE, COLUMNWISE: which copies are written.
        PACK: whether ``row`` is in the order of :func:`rows_of_tile` and ``col_data`` is written in words of four.
        ROUND: see :func:`round_through`.
        LIMIT, EPSILON, POWER_OF_2, OVERFLOW: of the quantizer, see :func:`scale_of`.
        WHOLE: see :func:`whole`.
    """
    rows, cols = below(row, M, WHOLE), below(col, N, WHOLE)
    inside = rows[:, None] & cols[None, :]
    if END == "plain":
        tl.store(row_data + offsets(row, col, N), rounded(y, row_data), mask=inside)
    else:
        y = tl.where(inside, round_through(y, ROUND), 0.0)
        first = (top == 0) & (left == 0)
        if (END == "observe") or (END == "delayed"):
            largest = tl.max(bits_of(y))
            known = as_words(amax)
            # the maximum only grows, so a program that sees one as large already has nothing to add
            if largest > tl.load(known):
                tl.atomic_max(known, largest, sem="relaxed")
        if END != "observe":
            if (END == "delayed") or (END == "current"):
                if END == "delayed":
                    factor = tl.load(scale)
                else:
                    factor = scale_of(tl.load(amax), LIMIT, EPSILON, POWER_OF_2, OVERFLOW)
                if first:
                    inverse = inverse_of(factor, POWER_OF_2)
                    if ROWWISE:
                        tl.store(row_scale, inverse)
                    if COLUMNWISE:
                        tl.store(col_scale, inverse)
                y *= factor
            elif END == "block_2d":
                largest = tl.max(bits_of(y)).to(tl.float32, bitcast=True)
                own = scale_of(largest, LIMIT, EPSILON, POWER_OF_2, OVERFLOW)
                inverse = inverse_of(own, POWER_OF_2)
                zero = tl.full([], 0, tl.int64)
                down, across = zero + top // 128, zero + left // 128
                if (top < M) and (left < N):
                    if ROWWISE:
                        tl.store(row_scale + down * tl.cdiv(N, 128) + across, inverse)
                    if COLUMNWISE:
                        tl.store(col_scale + across * tl.cdiv(M, 128) + down, inverse)
                y *= own
            # one copy after the other, so that registers hold the values of one at a time
            if ROWWISE:
                by_row = y
                if END == "block_1d":
                    largest = tl.max(bits_of(y), axis=1).to(tl.float32, bitcast=True)
                    own = scale_of(largest, LIMIT, EPSILON, POWER_OF_2, OVERFLOW)
                    place = row.to(tl.int64) * tl.cdiv(N, 128) + left // 128
                    inverse = inverse_of(own, POWER_OF_2)
                    tl.store(row_scale + place, inverse, mask=rows & (left < N))
                    by_row = y * own[:, None]
                tl.store(row_data + offsets(row, col, N), cast(by_row, LIMIT), mask=inside)
            if COLUMNWISE:
                by_col = y
                if END == "block_1d":
                    largest = tl.max(bits_of(y), axis=0).to(tl.float32, bitcast=True)
                    own = scale_of(largest, LIMIT, EPSILON, POWER_OF_2, OVERFLOW)
                    place = col.to(tl.int64) * tl.cdiv(M, 128) + top // 128
                    inverse = inverse_of(own, POWER_OF_2)
                    tl.store(col_scale + place, inverse, mask=cols & (top < M))
                    by_col = y * own[None, :]
                if PACK:
                    word = top // 4 + tl.arange(0, y.shape[0] // 4)
                    held = cols[:, None] & below(word, M // 4, WHOLE)[None, :]
                    tl.store(as_words(col_data) + offsets(col, word, M // 4), cast_words(by_col, LIMIT), mask=held)
                else:
                    tl.store(col_data + offsets(col, row, M), tl.trans(cast(by_col, LIMIT)), mask=tl.trans(inside))


@dataclasses.dataclass
class Target:
    """What a producer writes to: the buffers and constants of :func:`store_tile`, and the result they make.

    Attributes:
        ends: one ``END`` for every pass of the producing kernel, in order.
        arguments: the tensors of :func:`store_tile` from ``row_data`` to ``scale``, in order.
        constants: its constants from ``ROWWISE`` on, by name.
    """

    ends: Ends
    arguments: tuple[torch.Tensor, ...]
    constants: dict[str, Any]
    quantizer: Any = None
    dtype: torch.dtype = torch.float32
    observed: torch.Tensor | None = None

    def result(self, dtype: torch.dtype | None = None) -> tuple[Any, torch.Tensor | None]:
        """The stored tensor, and the observed amax (float32 ``[1]``) or None, as :meth:`Backend.store` gives them.

        ``dtype`` may give a quantized tensor another nominal dtype.
        """
        row_data, row_scale, col_data, col_scale, *_ = self.arguments
        if self.quantizer is None:
            return row_data, None
        row, col = self.constants["ROWWISE"], self.constants["COLUMNWISE"]
        made = QuantizedTensor(
            rowwise_data=row_data if row else None,
            rowwise_scale_inv=row_scale if row else None,
            columnwise_data=col_data if col else None,
            columnwise_scale_inv=col_scale if col else None,
            dtype=dtype or self.dtype,
            quantizer=self.quantizer,
        )
        return made, self.observed


@functools.cache
def _format(quantizer: Any, dtype: torch.dtype, pack: bool) -> tuple[Ends, dict[str, Any]] | None:
    """How results of a nominal dtype end that a quantizer casts, and the constants; None without a kernel."""
    kind = type(quantizer)
    if not (quantizer.rowwise or quantizer.columnwise) or dtype not in _ROUND:
        return None
    if kind is Float8DelayedScalingQuantizer:
        ends: Ends = ("delayed",)
        numbers = (0.0, False, FLOAT32_MAX)
    elif kind is Float8CurrentScalingQuantizer:
        ends = ("observe", "current")
        numbers = (quantizer.amax_epsilon, quantizer.power_2_scale, FLOAT32_MAX)
    elif kind is Float8BlockQuantizer:
        ends = ("block_1d" if quantizer.block_scaling_dim == 1 else "block_2d",)
        numbers = (quantizer.amax_epsilon, quantizer.power_2_scale, torch.finfo(dtype).max)
    else:
        return None
    return ends, {
        "ROWWISE": quantizer.rowwise,
        "COLUMNWISE": quantizer.columnwise,
        "PACK": pack and quantizer.columnwise,
        "ROUND": 0 if quantizer.from_float32 else _ROUND[dtype],
        "LIMIT": max_value(quantizer.dtype),
        **dict(zip(("EPSILON", "POWER_OF_2", "OVERFLOW"), numbers, strict=True)),
    }


_PLAIN: dict[str, Any] = {
    "ROWWISE": False,
    "COLUMNWISE": False,
    "PACK": False,
    "ROUND": 0,
    "LIMIT": 1.0,
    "EPSILON": 0.0,
    "POWER_OF_2": False,
    "OVERFLOW": FLOAT32_MAX,
}


def in_blocks(bound: BoundQuantizer | None) -> bool:
    """Whether a cast takes tiles of 128 by 128."""
    return bound is not None and type(bound.quantizer) is Float8BlockQuantizer


def sized(case: str, bound: BoundQuantizer | None) -> str:
    """The case of :mod:`~functional_te.kernels.triton.sizes` of a kernel that casts so."""
    if not in_blocks(bound):
        return case
    return f"{case}_block_1d" if bound.quantizer.block_scaling_dim == 1 else f"{case}_block"  # type: ignore[union-attr]


def whole(rows: Any, cols: Any, height: int, width: int) -> bool:
    """Whether tiles of ``height`` by ``width`` cover a matrix ``[rows, cols]`` exactly.

    Not of symbolic sizes: an exported program may run with none of what is known to be more than none.
    """
    if not (isinstance(rows, int) and isinstance(cols, int)):
        return False
    return rows > 0 and cols > 0 and rows % height == 0 and cols % width == 0


def _packs(rows: Any, tile: tuple[int, int, int]) -> bool:
    """Whether the transposed copy is written in words of four rows.

    Every thread of such a tile holds all four: it has 16 columns of rows that lie at most a quarter of the tile apart.
    Elsewhere packing moves bytes between threads, which took four times as long as storing them.
    """
    height, width, warps = tile
    return statically_known_true(rows % 4 == 0) and height * width >= 2048 * warps


def target(
    shape: tuple[Any, ...],
    dtype: torch.dtype,
    bound: BoundQuantizer | None,
    device: torch.device,
    tile: tuple[int, int, int],
) -> Target | None:
    """Allocate what a result of ``shape`` is stored in.

    Args:
        shape: logical shape; the kernel looks at it as a matrix ``[M, N]`` of its last dimension.
        dtype: nominal dtype of the result.
        bound: how it is cast, or None.
        device: where it lives.
        tile: rows, columns and warps of the kernel's tiles.

    Returns:
        None for a format that :func:`store_tile` does not make.
    """
    if bound is None:
        return Target(("plain",), (torch.empty(shape, dtype=dtype, device=device),) * 6, _PLAIN)
    quantizer: Any = bound.quantizer
    rows, cols = rows_of(shape), shape[-1] if shape else 1
    pack = _packs(rows, tile)
    found = _format(quantizer, dtype, pack)
    if found is None:
        return None
    ends, constants = found
    blocks = ends[0].startswith("block")
    row = column = None
    if quantizer.rowwise:
        row = torch.empty(shape, dtype=quantizer.dtype, device=device), _scales(quantizer, blocks, rows, cols, device)
    if quantizer.columnwise:
        data = torch.empty((cols, rows), dtype=quantizer.dtype, device=device)
        column = data, _scales(quantizer, blocks, cols, rows, device)
    some: Any = row or column
    amax = some[1] if blocks else bound.blank
    if amax is None:
        amax = torch.zeros(1, dtype=torch.float32, device=device)
    scale = some[1] if bound.scale is None else bound.scale
    arguments = (*(row or some), *(column or some), amax, scale)
    return Target(ends, arguments, constants, quantizer, dtype, amax if quantizer.stateful else None)


def _scales(quantizer: Any, blocks: bool, rows: Any, cols: Any, device: torch.device) -> torch.Tensor:
    """Room for the factors of a copy ``[rows, cols]``."""
    size = block_grid(rows, cols, quantizer.tile) if blocks else (1,)
    return torch.empty(size, dtype=torch.float32, device=device)
