"""The two functions of torch without a settled interface that this backend calls: scaled products of FP8 data.

``torch.nn.functional.scaled_mm`` and ``scaled_grouped_mm`` are public, but do not do the same. What they call cannot be
compiled: the shape function of ``_scaled_mm_v2`` (torch 2.13) refuses block scaling of sizes that are no multiple of
128, Inductor lowers it to a call of the first version, which wants other scales, and ``_scaled_grouped_mm_v2`` has no
shape function at all. A call also takes the host 10 microseconds longer (32 instead of 23). So the first versions are
called, here and nowhere else.

What they need is checked by what is there, never by torch's version. Their operands are matrices ``[rows, K]`` of FP8
elements in row-major order, ``K`` and the rows of ``b`` multiples of 16, data and scales at multiples of 16 bytes; two
E5M2 operands are refused.
"""

from __future__ import annotations

import functools

import torch

__all__ = [
    "BY_OPERATOR",
    "block_scaled_product",
    "can_scale",
    "can_scale_blocks",
    "can_scale_groups",
    "grouped_product",
    "product",
]

_scaled_mm = getattr(torch, "_scaled_mm", None)
_scaled_grouped_mm = getattr(torch, "_scaled_grouped_mm", None)

# the operators of these, for who calls them as they were recorded
BY_OPERATOR = {} if _scaled_mm is None else {torch.ops.aten._scaled_mm.default: _scaled_mm}


@functools.lru_cache
def _capability(device: torch.device) -> tuple[int, int]:
    """Compute capability; (0, 0) for what is no CUDA device."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def _toolkit() -> tuple[int, ...]:
    """The CUDA version that torch was built with; cuBLASLt comes with it."""
    return tuple(int(part) for part in (torch.version.cuda or "0").split(".")[:2])


@functools.lru_cache
def can_scale(device: torch.device) -> bool:
    """Whether :func:`product` runs: tensor cores with FP8 are in Ada (8.9), Hopper and later GPUs."""
    return _scaled_mm is not None and _capability(device) >= (8, 9)


@functools.lru_cache
def can_scale_blocks(device: torch.device) -> bool:
    """Whether :func:`block_scaled_product` runs: on Hopper, with cuBLASLt 12.9 or later."""
    return _scaled_mm is not None and _capability(device)[0] == 9 and _toolkit() >= (12, 9)


@functools.lru_cache
def can_scale_groups(device: torch.device) -> bool:
    """Whether :func:`grouped_product` runs: on Hopper."""
    return _scaled_grouped_mm is not None and _capability(device)[0] == 9


def product(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    *,
    dtype: torch.dtype,
    bias: torch.Tensor | None = None,
    fast: bool = False,
) -> torch.Tensor:
    """``a_scale * b_scale * a @ b.T (+ bias)`` with one rounding.

    Args:
        a: FP8 ``[M, K]``.
        b: FP8 ``[N, K]``.
        a_scale: float32 ``[1]``; b_scale likewise.
        dtype: float32, bfloat16 or float16.
        bias: ``[N]`` of ``dtype``, which is not float32 then.
        fast: whether partial sums stay in the tensor core's own accumulator, of fewer bits.
    """
    assert _scaled_mm is not None
    return _scaled_mm(a, b.t(), a_scale, b_scale, bias=bias, out_dtype=dtype, use_fast_accum=fast)


def block_scaled_product(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    *,
    dtype: torch.dtype,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """The same with float32 scales of blocks of 1x128 or 128x128, not of 128x128 in both operands.

    The scales of 1x128 blocks are read column by column, columns at multiples of 16 bytes; those of 128x128 blocks row
    by row, rows at multiples of 16 bytes. torch refuses strides for that other than the sizes and does not check the
    second (2.11: wrong results), so sizes have to be such.

    Args:
        a: FP8 ``[M, K]``.
        b: FP8 ``[N, K]``.
        a_scale: ``[M, ceil(K / 128)]`` with strides ``(1, M)``, ``M`` a multiple of 4, or contiguous
            ``[ceil(M / 128), ceil(K / 128)]``, columns a multiple of 4.
        b_scale: likewise.
        dtype: float32, bfloat16 or float16.
        bias: as above.
    """
    assert _scaled_mm is not None
    return _scaled_mm(a, b.t(), a_scale, b_scale.t(), bias=bias, out_dtype=dtype)


def grouped_product(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    ends: torch.Tensor,
    *,
    fast: bool = False,
) -> torch.Tensor:
    """``a_g @ b_g.T`` of the rows of every group, scaled by row of ``a`` and of ``b``: bfloat16 ``[T, N]``.

    Args:
        a: E4M3 ``[T, K]``.
        b: E4M3 ``[G, N, K]``.
        a_scale: float32 ``[T]``.
        b_scale: float32 ``[G, N]``.
        ends: where groups end, int32 ``[G]``.
        fast: as above.
    """
    assert _scaled_grouped_mm is not None
    return _scaled_grouped_mm(
        a, b.transpose(1, 2), a_scale, b_scale, offs=ends, out_dtype=torch.bfloat16, use_fast_accum=fast
    )
