"""The gradient of a bias in plain PyTorch."""

from __future__ import annotations

import torch

__all__ = ["bias_grad"]


def bias_grad(dy: torch.Tensor) -> torch.Tensor:
    """Sum over the leading dimensions, accumulated in float32, in the dtype of ``dy``."""
    if dy.dim() == 1:
        return dy.clone()
    return dy.flatten(0, -2).sum(0)
