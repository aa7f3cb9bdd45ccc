"""Sharding of a linear layer over the ranks of a process group: what is sent before and after its products.

===================  =========================================  ================================================
mode                 forward                                    backward
===================  =========================================  ================================================
column               --                                         ``dx``: all-reduce
column, sequence     ``x``: all-gather                          ``dx``: reduce-scatter; ``x``: all-gather again
row                  ``y``: all-reduce                          --
row, sequence        ``y``: reduce-scatter                      ``dy``: all-gather
===================  =========================================  ================================================

Gathering and scattering run along dim 0. Both happen in high precision: a gathered tensor is cast when it is whole.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from functional_te._errors import type_error, value_error
from functional_te._value import Value
from functional_te.kernels import collectives
from functional_te.ops.common import check_size
from functional_te.tensor_spec import TensorSpec

__all__ = ["TensorParallel", "gather_spec", "gathers", "reduce_spec", "reduces", "tp_gather", "tp_reduce"]

MODES = ("column", "row")


@dataclasses.dataclass(frozen=True, eq=False)
class TensorParallel(Value):
    """How a linear layer is sharded.

    Args:
        mode: ``"column"``: every rank has a part of the output features; ``"row"``: of the input features.
        group: registry name of a process group; an empty string is the default group when the op runs.
        size: how many ranks it has.
        sequence_parallel: whether dim 0 is sharded where the features are not.
    """

    mode: str
    group: str = ""
    size: int = 1
    sequence_parallel: bool = False

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise value_error("TensorParallel", "mode", "'column' or 'row'", repr(self.mode))
        if not isinstance(self.group, str):
            raise type_error("TensorParallel", "group", "the registry name of a process group", repr(self.group))
        check_size(self.size, "TensorParallel", "size")
        if not isinstance(self.sequence_parallel, bool):
            raise type_error("TensorParallel", "sequence_parallel", "a bool", repr(self.sequence_parallel))


def gathers(tp: TensorParallel | None, mode: str) -> bool:
    """Whether the input (``mode`` "column") or the output gradient ("row") is gathered before it is used."""
    return tp is not None and tp.mode == mode and tp.sequence_parallel


def reduces(tp: TensorParallel | None, mode: str) -> bool:
    """Whether the output (``mode`` "row") or the input gradient ("column") is summed over the ranks."""
    return tp is not None and tp.mode == mode


def tp_gather(x: torch.Tensor, tp: TensorParallel) -> torch.Tensor:
    """``x`` of all ranks."""
    return collectives.all_gather(x, tp.group, tp.size)


def gather_spec(x: TensorSpec, tp: TensorParallel) -> TensorSpec:
    """The twin of :func:`tp_gather` over :class:`TensorSpec`."""
    return x.with_(shape=(x.shape[0] * tp.size, *x.shape[1:]))


def tp_reduce(y: torch.Tensor, tp: TensorParallel) -> torch.Tensor:
    """The sum over the ranks, or this rank's rows of it."""
    reduce: Any = collectives.reduce_scatter if tp.sequence_parallel else collectives.all_reduce
    summed: torch.Tensor = reduce(y, tp.group, tp.size)
    return summed


def reduce_spec(y: TensorSpec, tp: TensorParallel) -> TensorSpec:
    """The twin of :func:`tp_reduce` over :class:`TensorSpec`."""
    return y.with_(shape=(y.shape[0] // tp.size, *y.shape[1:])) if tp.sequence_parallel else y
