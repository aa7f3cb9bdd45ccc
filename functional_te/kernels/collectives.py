"""Collectives between the ranks of a process group, as functions that return new tensors.

The only module that calls torch's functional collectives and looks groups up by name. Those are private, but the
public ones write into their arguments, so a compiled graph cannot hold them as nodes among others; a test fails if they
change. The ranks of a group must make the same calls in the same order. Functions called ``start_...`` return at once
what :func:`finish` has to be called with before it is read: what is computed in between runs beside the message.

A group is given by its name in torch's registry (``ProcessGroup.group_name``; an empty string is the default group when
the call is made) and its size, which shapes need before anything is sent. Of size 1 every function copies its argument,
and ``torch.distributed`` is not used.
"""

from __future__ import annotations

from typing import Any

import torch

from functional_te.torch_compat import assume_constant_result

__all__ = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "finish",
    "greatest",
    "process_group",
    "reduce_scatter",
    "start_all_gather",
    "start_all_reduce",
    "start_greatest",
    "start_reduce_scatter",
]

# dtypes whose bytes are sent as they are: not every library of collectives knows them
_BYTES = (torch.float8_e4m3fn, torch.float8_e5m2)


def process_group(name: str) -> Any:
    """The process group called ``name``; for an empty string the default group, None before it is initialized."""
    if not torch.distributed.is_available():
        return None
    if name == "":
        return torch.distributed.group.WORLD if torch.distributed.is_initialized() else None
    c10d: Any = torch.distributed.distributed_c10d
    return c10d._resolve_process_group(name)


@assume_constant_result
def _resolve(group: str, size: int) -> str:
    """The registry name of a group that has to have ``size`` ranks. Looked up for real while a caller is traced."""
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


def finish(started: torch.Tensor, size: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """The result of a function called ``start_...`` of ranks of that number; ``dtype`` is that of its argument."""
    done = started if size == 1 else _wait(started)
    return done if dtype is None or done.dtype is dtype else done.view(dtype)


def _copy(x: torch.Tensor) -> torch.Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def all_reduce(x: torch.Tensor, group: str, size: int) -> torch.Tensor:
    """The sum of ``x`` over the ranks, in its dtype."""
    return finish(start_all_reduce(x, group, size), size)


def start_all_reduce(x: torch.Tensor, group: str, size: int) -> torch.Tensor:
    """Start :func:`all_reduce`."""
    return _start_all_reduce(x, "sum", group, size)


def _start_all_reduce(x: torch.Tensor, how: str, group: str, size: int) -> torch.Tensor:
    if size == 1:
        return _copy(x)
    started: torch.Tensor = torch.ops._c10d_functional.all_reduce(x.contiguous(), how, _resolve(group, size))
    return started


def greatest(amaxes: torch.Tensor, group: str, size: int) -> torch.Tensor:
    """The largest of every amax over the ranks; NaN if a rank has NaN.

    The bits of non-negative float32 numbers order as integers do, with NaN above all numbers, so the ranks compare
    those: what a maximum of floats does with NaN is not the same in all libraries.

    Args:
        amaxes: float32 of any shape, not negative.
        group: as everywhere in this module.
        size: likewise.
    """
    return finish(start_greatest(amaxes, group, size), size, torch.float32)


def start_greatest(amaxes: torch.Tensor, group: str, size: int) -> torch.Tensor:
    """Start :func:`greatest`."""
    return _start_all_reduce(amaxes.contiguous().view(torch.int32), "max", group, size)


def all_gather(x: torch.Tensor, group: str, size: int) -> torch.Tensor:
    """``x`` of every rank, concatenated along the first dimension in the order of the ranks."""
    return finish(start_all_gather(x, group, size), size, x.dtype)


def start_all_gather(x: torch.Tensor, group: str, size: int) -> torch.Tensor:
    """Start :func:`all_gather`, of bytes if ``x`` is FP8."""
    if size == 1:
        return _copy(x)
    sent = (x.view(torch.uint8) if x.dtype in _BYTES else x).contiguous()
    started: torch.Tensor = torch.ops._c10d_functional.all_gather_into_tensor(sent, size, _resolve(group, size))
    return started


def reduce_scatter(x: torch.Tensor, group: str, size: int) -> torch.Tensor:
    """This rank's chunk, along the first dimension, of the sum of ``x`` over the ranks."""
    return finish(start_reduce_scatter(x, group, size), size)


def start_reduce_scatter(x: torch.Tensor, group: str, size: int) -> torch.Tensor:
    """Start :func:`reduce_scatter`."""
    if size == 1:
        return _copy(x)
    name = _resolve(group, size)
    started: torch.Tensor = torch.ops._c10d_functional.reduce_scatter_tensor(x.contiguous(), "sum", size, name)
    return started


def all_to_all(x: torch.Tensor, to: list[int], of: list[int], group: str, size: int) -> torch.Tensor:
    """Rows of every rank that are meant for this one, in the order of the ranks.

    Args:
        x: ``[rows, ...]``: what goes to rank 0, then what goes to rank 1, and so on.
        to: how many rows go to each rank.
        of: how many come from each rank.
        group: as everywhere in this module.
        size: likewise.
    """
    if size == 1:
        return _copy(x)
    return _wait(torch.ops._c10d_functional.all_to_all_single(x.contiguous(), of, to, _resolve(group, size)))
