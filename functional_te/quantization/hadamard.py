"""The random Hadamard transform of NVFP4: it spreads outliers over groups of 16 values.

The matrix is ``diag(SIGNS) @ H / 4`` with the Sylvester-ordered Hadamard matrix ``H`` of size 16, whose entries are
``(-1) ** popcount(i & j)``. It is orthogonal, so transforming both operands of a product along the reduced dimension
leaves the product as it was.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from functional_te._errors import value_error

__all__ = ["GROUP", "SIGNS", "hadamard", "hadamard_inverse", "hadamard_matrix"]

GROUP = 16
SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)


def hadamard_matrix(dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.Tensor:
    """The matrix ``[16, 16]``; a group as a row vector times the matrix is the transform."""
    rows = [[sign * (-1) ** (i & j).bit_count() / 4 for j in range(GROUP)] for i, sign in enumerate(SIGNS)]
    return torch.tensor(rows, dtype=dtype, device=device)


def hadamard(x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """Transform each group of 16 consecutive values along ``dim``.

    Sums are taken in float32 in one fixed order (a butterfly), so that every device gives the same bits, and rounded
    once to the dtype of ``x``. A transformed value is at most four times the largest of its group.

    Args:
        x: float values of any shape and strides; the size of ``dim`` is a multiple of 16.
        dim: the dimension that the groups run along. The result is contiguous: for the transform of a transposed
            matrix, ``hadamard(x, dim=0).T`` is several times quicker than ``hadamard(x.T)``.

    Raises:
        ValueError: the size of ``dim`` is not a multiple of 16.
    """
    values = [v * (sign / 4) for v, sign in zip(_split(x, dim), SIGNS, strict=True)]
    return _join(_butterfly(values), x, dim)


def hadamard_inverse(x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """Undo :func:`hadamard`: multiply each group by the transposed matrix. The same rules hold."""
    values = [v * (sign / 4) for v, sign in zip(_butterfly(_split(x, dim)), SIGNS, strict=True)]
    return _join(values, x, dim)


def _butterfly(values: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """The 16 values of every group times ``H``, in four stages of sums and differences."""
    for step in (8, 4, 2, 1):
        values = [values[i - step] - v if i & step else v + values[i + step] for i, v in enumerate(values)]
    return values


def _split(x: torch.Tensor, dim: int) -> list[torch.Tensor]:
    """The 16 members of all groups as float32."""
    dim = dim % x.dim()
    if x.shape[dim] % GROUP != 0:
        raise value_error("hadamard", "x", f"a multiple of {GROUP} values along dimension {dim}", x.shape[dim])
    groups = x.unflatten(dim, (x.shape[dim] // GROUP, GROUP))
    return [member.to(torch.float32) for member in groups.unbind(dim + 1)]


def _join(values: Sequence[torch.Tensor], x: torch.Tensor, dim: int) -> torch.Tensor:
    """Undo :func:`_split`, in the dtype of ``x``."""
    dim = dim % x.dim()
    return torch.stack([v.to(x.dtype) for v in values], dim + 1).flatten(dim, dim + 1)
