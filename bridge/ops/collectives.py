"""Collectives as modules, with te.ops' names and constructor signatures, and process groups by name."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

import functional_te as fte
from bridge.ops.operation import BasicOperation
from functional_te._errors import type_error
from functional_te.kernels import collectives

__all__ = ["AllGather", "AllReduce", "ReduceScatter", "group_of"]


def group_of(process_group: Any, where: str, argument: str = "process_group") -> tuple[str, int]:
    """The registry name and the size of a process group.

    Args:
        process_group: a ``torch.distributed.ProcessGroup``, or None for the default group, which has size 1 while
            ``torch.distributed`` is not initialized.
        where: for messages.
        argument: likewise.
    """
    if process_group is None:
        default = collectives.process_group("")
        return "", 1 if default is None else default.size()
    if not (torch.distributed.is_available() and isinstance(process_group, torch.distributed.ProcessGroup)):
        wanted = "None or a torch.distributed.ProcessGroup that this rank is in"
        raise type_error(where, argument, wanted, repr(process_group))
    return process_group.group_name, process_group.size()


class _Collective(BasicOperation):
    """A collective; of a group of one rank the identity.

    Attributes:
        process_group_size: how many ranks the group had when the module was made.

    The module holds the group by its name, so that it can be copied and pickled.
    """

    op_class: ClassVar[Any]

    def __init__(self, process_group: Any = None) -> None:
        name, size = group_of(process_group, type(self).__name__)
        super().__init__(fte.Identity() if size == 1 else self.op_class(name, size))
        self._group_name, self.process_group_size = name, size

    @property
    def process_group(self) -> Any:
        """The process group; None for the default group before ``torch.distributed`` is initialized."""
        return collectives.process_group(self._group_name)


class AllReduce(_Collective):
    """``y = sum of x over the ranks``; ``dx = dy``, whatever ``reduce_in_backward`` is (as in te.ops)."""

    op_class = fte.AllReduce

    def __init__(self, process_group: Any = None, reduce_in_backward: bool = True) -> None:
        super().__init__(process_group)
        self._reduce_in_backward = reduce_in_backward


class AllGather(_Collective):
    """``x`` of every rank, concatenated along dim 0. See :class:`functional_te.AllGather`."""

    op_class = fte.AllGather


class ReduceScatter(_Collective):
    """This rank's chunk of the sum along dim 0. See :class:`functional_te.ReduceScatter`."""

    op_class = fte.ReduceScatter
