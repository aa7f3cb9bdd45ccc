"""Random bits as values: counter-based, so nothing is hidden and a recomputation sees the same bits.

A *key* is an int64 tensor of shape ``[2]`` with entries in ``[0, 2**32)``. A key is never used up: the same key gives
the same bits, eager, compiled, recomputed and on every device. New bits come from a new key (:func:`next_key`,
:func:`fold_in`) or from another stream of :func:`random_bits`.

The generator is Philox-4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011). The last
word of its counter is a tag that says what a call is for, so the functions below never share a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from functional_te._errors import type_error, value_error

__all__ = ["fold_in", "make_key", "next_key", "philox_4x32", "random_bits", "random_bits_of_rows"]

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_TAG_BITS, _TAG_NEXT, _TAG_FOLD, _TAG_PATH, _TAG_ROWS = range(5)

Word = Any  # a Python int or an int64 tensor, in [0, 2**32)


def philox_4x32(counter: Sequence[Word], key: Sequence[Word]) -> tuple[Word, Word, Word, Word]:
    """Four random 32-bit words from four counter words and two key words, Philox-4x32-10.

    Words are Python ints or int64 tensors that broadcast. The integer math is exact: no product overflows int64.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        high0, low0 = _multiply(_MULTIPLIERS[0], c0)
        high1, low1 = _multiply(_MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _KEY_STEPS[0]) & _MASK, (k1 + _KEY_STEPS[1]) & _MASK
    return c0, c1, c2, c3


def _multiply(multiplier: int, word: Word) -> tuple[Word, Word]:
    """High and low half of a 32 by 32 bit product.

    Both multipliers are above ``2**31``, so ``multiplier - 2**32`` times a word stays within ``2**62``; what was
    taken off is one ``word`` of the high half.
    """
    product = (multiplier - (1 << 32)) * word
    return (product >> 32) + word, product & _MASK


def make_key(seed: int, *path: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """The key of ``seed``, or of a place below it: ``make_key(seed, layer, slot)``.

    Without a path the key is the seed itself, its low word first. Each number of the path replaces the key by a
    Philox block of it, so distinct seeds are distinct for sure and distinct paths but for a chance of ``2**-64``.
    Made of Python ints: call it outside a traced function.

    Args:
        seed: in ``[0, 2**64)``.
        path: any count of numbers in ``[0, 2**64)``.
        device: where the key lives.

    Raises:
        TypeError: a number is not an int.
        ValueError: a number is out of range.
    """
    for name, number in (("seed", seed), *(("path", entry) for entry in path)):
        if not isinstance(number, int):
            raise type_error("make_key", name, "an int", type(number).__name__)
        if not 0 <= number < 1 << 64:
            raise value_error("make_key", name, "an int in [0, 2**64)", number)
    key: Sequence[int] = (seed & _MASK, seed >> 32)
    for entry in path:
        key = philox_4x32((entry & _MASK, entry >> 32, 0, _TAG_PATH), key)[:2]
    return torch.tensor(key, dtype=torch.int64, device=device)


def next_key(key: torch.Tensor) -> torch.Tensor:
    """The key of the next step."""
    return torch.stack(philox_4x32((0, 0, 0, _TAG_NEXT), key.unbind())[:2])


def fold_in(key: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
    """A key that depends on ``key`` and on the bits of ``data``, a float32 tensor ``[1]``; every NaN counts as 0.

    Keys ``[2, n]`` with data ``[n]`` give keys ``[2, n]``, one by one.
    """
    data = torch.where(torch.isnan(data), 0.0, data)
    bits = data.view(torch.int32).to(torch.int64)
    if key.dim() == 1:
        (bits,) = bits.unbind()
    return torch.stack(philox_4x32((bits & _MASK, 0, 0, _TAG_FOLD), key.unbind())[:2])


def random_bits(key: torch.Tensor, count: int, stream: int = 0) -> torch.Tensor:
    """Uniformly distributed 16-bit values, int32 ``[count]`` in ``[0, 65536)``.

    One Philox block gives eight values. With ``n = ceil(count / 8)`` blocks, value ``i`` is the half ``i // n`` of
    block ``i % n``: halves are ordered low, high of word 0, low, high of word 1 and so on. This order stores each
    half contiguously, which is what makes it quick.

    Args:
        key: int64 ``[2]``.
        count: how many, below ``2**35``; may be symbolic.
        stream: in ``[0, 2**32)``; streams of one key are independent.
    """
    blocks = (count + 7) // 8
    # the masks keep Inductor from taking the products for index arithmetic, which it does in 32 bits
    block = torch.arange(blocks, dtype=torch.int64, device=key.device) & _MASK
    lane = torch.full((), stream, dtype=torch.int64, device=key.device) & _MASK
    words = philox_4x32((block, 0, lane, _TAG_BITS), key.unbind())
    halves = [half.to(torch.int32) for word in words for half in (word & 0xFFFF, word >> 16)]
    return torch.cat(halves)[:count]


def random_bits_of_rows(keys: torch.Tensor, row: torch.Tensor, size: int, stream: int = 0) -> torch.Tensor:
    """Uniformly distributed 16-bit values for the rows of a matrix, int32 ``[rows, size]`` in ``[0, 65536)``.

    Those of a row depend on its own key and number only, so that groups of rows with keys of their own do not depend
    on each other.

    Args:
        keys: int64 ``[2, rows]``.
        row: int64 ``[rows]``, the number of each row among those with the same key, in ``[0, 2**32)``.
        size: values per row.
        stream: in ``[0, 2**32)``; streams of one key are independent.
    """
    blocks = (size + 7) // 8
    block = torch.arange(blocks, dtype=torch.int64, device=keys.device) & _MASK
    counter = (block, (row & _MASK)[:, None], stream, _TAG_ROWS)
    words = philox_4x32(counter, keys.unsqueeze(-1).unbind())
    halves = [half.to(torch.int32) for word in words for half in (word & 0xFFFF, word >> 16)]
    return torch.cat(halves, -1)[:, :size]
