"""The precision that reference kernels compute in."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["float32"]


def float32(x: Tensor) -> Tensor:
    """``x`` in float32. Even a conversion that does nothing costs a call."""
    return x if x.dtype is torch.float32 else x.float()
