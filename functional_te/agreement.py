"""Amaxes of delayed scaling that several ranks agree on: the largest of what each of them observed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from functional_te.kernels import collectives
from functional_te.quantization.state import DelayedScalingState

__all__ = ["agree_amaxes", "agreed"]


def agreed(observed: Sequence[torch.Tensor], group: str, size: int) -> list[torch.Tensor]:
    """The largest of every amax over the ranks of a group, by one all-reduce for all of them.

    Args:
        observed: float32 ``[1]`` each; as many on every rank, in the same order.
        group: registry name of the process group; an empty string is the default group.
        size: how many ranks it has. Of one rank the amaxes are copied, and nothing is sent.

    Returns:
        As many tensors ``[1]``; NaN where a rank has NaN.
    """
    if not observed:
        return []
    return list(collectives.greatest(torch.cat(list(observed)), group, size).split(1))


def agree_amaxes(state: Any, group: str = "", size: int = 1) -> Any:
    """A chain's state whose running observations are the largest over the ranks, by one all-reduce.

    Repeating it changes nothing. Keys of stochastic rounding stay what they are.

    Args:
        state: quantizer state as of :func:`functional_te.init_state`; with the same entries on all ranks.
        group: see :func:`agreed`.
        size: likewise.

    Returns:
        The new state. Of one rank it is ``state`` itself.
    """
    if size == 1:
        return state
    places = [
        (index, role)
        for index, own in enumerate(state)
        for role, entry in own.items()
        if isinstance(entry, DelayedScalingState)
    ]
    largest = agreed([state[index][role].amax_history[:1] for index, role in places], group, size)
    result = [dict(own) for own in state]
    for (index, role), amax in zip(places, largest, strict=True):
        old = state[index][role]
        history = torch.cat((amax, old.amax_history[1:]))
        result[index][role] = DelayedScalingState(scale=old.scale, amax_history=history)
    return tuple(result)
