"""Data-free descriptions of tensors, for shape evaluation, planning and the fakes of custom ops."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

__all__ = ["TensorSpec", "spec_of"]


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """Shape, dtype and device of a tensor, without storage.

    Args:
        shape: the dimensions; entries may be symbolic integers while a program is being traced.
        dtype: the element type.
        device: where the tensor would live. A string or a ``torch.device``.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device | str = "cpu"

    def dim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    def numel(self) -> int:
        """Number of elements."""
        count = 1
        for size in self.shape:
            count = count * size
        return count

    def with_(self, *, shape: tuple[int, ...] | None = None, dtype: torch.dtype | None = None) -> TensorSpec:
        """The same description with another shape or dtype."""
        return TensorSpec(self.shape if shape is None else shape, self.dtype if dtype is None else dtype, self.device)


def spec_of(value: Any) -> Any:
    """The :class:`TensorSpec` of a tensor; anything else is returned as it is."""
    if isinstance(value, torch.Tensor):
        return TensorSpec(tuple(value.shape), value.dtype, value.device)
    return value
