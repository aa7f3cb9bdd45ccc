"""Weights of gated activations in the interleaved layout."""

from __future__ import annotations

import torch

from functional_te._errors import value_error

__all__ = ["deinterleave_glu_tensor", "interleave_glu_tensor"]


def _check(tensor: torch.Tensor, size: int, where: str) -> None:
    if not isinstance(size, int) or size < 1:
        raise value_error(where, "interleave_size", "a positive int", repr(size))
    if tensor.dim() == 0 or tensor.shape[0] % (2 * size):
        wanted = f"a first dimension that is a multiple of {2 * size}"
        raise value_error(where, "tensor", wanted, f"shape {tuple(tensor.shape)}")


def interleave_glu_tensor(tensor: torch.Tensor, interleave_size: int) -> torch.Tensor:
    """The rows of a linear before a gated activation, from ``[a | b]`` to blocks ``a, b, a, b, ...``.

    Args:
        tensor: ``[2 * n, ...]``: a weight, or a bias.
        interleave_size: rows of a block, the activation's ``glu_interleave_size``; divides ``n``.

    Returns:
        A new tensor of the same shape.

    Raises:
        ValueError: a size that does not divide ``n``.
    """
    _check(tensor, interleave_size, "interleave_glu_tensor")
    blocks = tensor.reshape(2, -1, interleave_size, *tensor.shape[1:])
    return blocks.transpose(0, 1).clone(memory_format=torch.contiguous_format).reshape(tensor.shape)


def deinterleave_glu_tensor(tensor: torch.Tensor, interleave_size: int) -> torch.Tensor:
    """The inverse of :func:`interleave_glu_tensor`.

    Args:
        tensor: ``[2 * n, ...]`` in blocks ``a, b, a, b, ...``.
        interleave_size: rows of a block.

    Returns:
        A new tensor of the same shape.

    Raises:
        ValueError: a size that does not divide ``n``.
    """
    _check(tensor, interleave_size, "deinterleave_glu_tensor")
    blocks = tensor.reshape(-1, 2, interleave_size, *tensor.shape[1:])
    return blocks.transpose(0, 1).clone(memory_format=torch.contiguous_format).reshape(tensor.shape)
