"""Faults named at the start: ranks that were given different worlds, models or recipes."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch

from bridge.distributed.groups import group_of, process_group
from functional_te._errors import value_error

__all__ = ["check_same_on_all_ranks", "initialize"]

_WORLD = "functional_te/world"


def check_same_on_all_ranks(values: Mapping[str, Any], group: Any = None, where: str = "ranks") -> None:
    """Raise, on every rank, if something differs between the ranks of a group. A collective: all ranks have to call it.

    Args:
        values: what to compare, by name; by the text that ``repr`` gives, so values and plain data, no tensors.
            Functions count as the same if they have the same name.
        group: a process group; None is the default group. In a group of one rank nothing is compared.
        where: the caller, for the message.

    Raises:
        ValueError: the first name whose values differ, and the ranks with their values.
    """
    name, size = group_of(group, where, "group")
    if size == 1:
        return
    # an address is a process's own
    mine = {key: re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value)) for key, value in values.items()}
    # equal ranks only send a digest
    digest = hashlib.sha256(repr(sorted(mine.items())).encode()).hexdigest()
    found = process_group(name)
    digests: list[Any] = [None] * size
    torch.distributed.all_gather_object(digests, digest, found)
    if len(set(digests)) == 1:
        return
    every: list[Any] = [None] * size
    torch.distributed.all_gather_object(every, mine, found)
    for key in dict.fromkeys(key for own in every for key in own):
        told = [own.get(key, "nothing of that name") for own in every]
        if len(set(told)) > 1:
            raise value_error(where, key, "the same on all ranks", _told(told))


def _told(values: list[str]) -> str:
    """The different values with the ranks that have them; where they are long, from where they differ."""
    by_value: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        by_value.setdefault(value, []).append(rank)
    shortest = min(map(len, by_value))
    common = next((i for i in range(shortest) if len({value[i] for value in by_value}) > 1), shortest)
    start = max(0, common - 40)
    parts = []
    for value, ranks in by_value.items():
        text = ("..." if start else "") + value[start : start + 160] + ("..." if len(value) > start + 160 else "")
        parts.append(f"{text} on rank {', '.join(map(str, ranks))}")
    return "; ".join(parts)


def initialize(
    backend: str | None = None,
    *,
    init_method: str = "env://",
    rank: int = -1,
    world_size: int = -1,
    timeout: timedelta = timedelta(minutes=10),
) -> tuple[int, int]:
    """``torch.distributed.init_process_group``, after the ranks have compared how many they are.

    Ranks that disagree would otherwise all wait for each other until the timeout. So do those that came first, unless
    something like ``torchrun`` ends them when one fails.

    Args:
        backend: None is ``"nccl"`` on machines with CUDA devices, else ``"gloo"``.
        init_method: where ranks meet; the default is what ``torchrun`` sets up.
        rank: of this process, if ``init_method`` does not say.
        world_size: likewise.
        timeout: of every collective: how long ranks wait for one that was killed.

    Returns:
        This process's rank and the number of ranks.

    Raises:
        ValueError: ranks were told different numbers of ranks.
    """
    from torch.distributed.rendezvous import rendezvous

    store, rank, world_size = next(rendezvous(init_method, rank, world_size, timeout=timeout))
    store.set_timeout(timeout)
    known = store.compare_set(_WORLD, "", str(world_size)).decode()
    if int(known) != world_size:
        raise value_error(
            "initialize", "world_size", f"{known}, as another rank was told", f"{world_size} on rank {rank}"
        )
    if backend is None:
        backend = "nccl" if torch.cuda.is_available() else "gloo"
    if "nccl" in backend:
        torch.cuda.set_device(torch.distributed.get_node_local_rank(fallback_rank=rank))
    torch.distributed.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    return rank, world_size
