"""Collectives between the ranks of a process group, as functions that return new tensors.

The only module that calls torch's functional collectives and looks groups up by name. Those are private, but the
public ones write into their arguments, so a compiled graph cannot hold them as nodes among others; a test fails if they
change. The ranks of a group must make the same calls in the same order.

A group is given by its name in torch's registry (``ProcessGroup.group_name``; an empty string is the default group when
the call is made) and its size, which shapes need before anything is sent. Of size 1 every function copies its argument,
and ``torch.distributed`` is not used.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["all_gather", "all_reduce", "process_group", "reduce_scatter"]


def process_group(name: str) -> Any:
    """The process group called ``name``; for an empty string the default group, None before it is initialized."""
    if not torch.distributed.is_available():
        return None
    if name == "":
        return torch.distributed.group.WORLD if torch.distributed.is_initialized() else None
    c10d: Any = torch.distributed.distributed_c10d
    return c10d._resolve_process_group(name)


def _resolve(group: str, size: int) -> str:
    """The registry name of a group that has to have ``size`` ranks."""
    found = process_group(group)
    if found is None:
        raise RuntimeError(f"collective: group: expected torch.distributed to be initialized with {size} ranks.")
    if found.size() != size:
        raise RuntimeError(f"collective: group: expected {size} ranks, got {found.size()}.")
    name: str = found.group_name
    return name


def _wait(x: torch.Tensor) -> torch.Tensor:
    done: torch.Tensor = torch.ops._c10d_functional.wait_tensor(x)
    return done


def _copy(x: torch.Tensor) -> torch.Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def all_reduce(x: torch.Tensor, group: str, size: int) -> torch.Tensor:
    """The sum of ``x`` over the ranks, in its dtype."""
    if size == 1:
        return _copy(x)
    return _wait(torch.ops._c10d_functional.all_reduce(x.contiguous(), "sum", _resolve(group, size)))


def all_gather(x: torch.Tensor, group: str, size: int) -> torch.Tensor:
    """``x`` of every rank, concatenated along the first dimension in the order of the ranks."""
    if size == 1:
        return _copy(x)
    return _wait(torch.ops._c10d_functional.all_gather_into_tensor(x.contiguous(), size, _resolve(group, size)))


def reduce_scatter(x: torch.Tensor, group: str, size: int) -> torch.Tensor:
    """This rank's chunk, along the first dimension, of the sum of ``x`` over the ranks."""
    if size == 1:
        return _copy(x)
    return _wait(torch.ops._c10d_functional.reduce_scatter_tensor(x.contiguous(), "sum", size, _resolve(group, size)))
