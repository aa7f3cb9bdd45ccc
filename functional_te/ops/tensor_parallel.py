"""Sharding of a linear layer over the ranks of a process group: what is sent before and after its products.

===================  =========================================  ================================================
mode                 forward                                    backward
===================  =========================================  ================================================
column               --                                         ``dx``: all-reduce
column, sequence     ``x``: all-gather                          ``dx``: reduce-scatter; ``x``: all-gather again
row                  ``y``: all-reduce                          --
row, sequence        ``y``: reduce-scatter                      ``dy``: all-gather
===================  =========================================  ================================================

Gathering and scattering run along dim 0. Sums are sent in the compute dtype. What is gathered to be cast with one scale
for the whole tensor is cast before it is sent, so that a quarter or half of the bytes travel: the ranks first agree on
the amax of the whole tensor, hence on the scale, and the bits are those of a cast of the gathered tensor. Other casts
are made when the tensor is whole.

Where something is left to compute that does not need a message, it is computed beside it: the cast of the weight while
the input is gathered, the weight gradient while the input gradient is summed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from functional_te import pytree
from functional_te._errors import type_error, value_error
from functional_te._value import Value
from functional_te.kernels import Backend, collectives
from functional_te.ops.common import check_size
from functional_te.quantization.quantizers import (
    Float8CurrentScalingQuantizer,
    Float8DelayedScalingQuantizer,
    Quantizer,
)
from functional_te.quantization.scaling import amax_of, current_scale
from functional_te.quantization.tensor import BoundQuantizer, QuantizedTensor
from functional_te.tensor_spec import TensorSpec

__all__ = [
    "TensorParallel",
    "gather_spec",
    "gathers",
    "reduce_spec",
    "reduces",
    "start_tp_cast",
    "start_tp_gather",
    "start_tp_reduce",
    "tp_gather",
    "tp_reduce",
]

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
    return collectives.finish(start_tp_gather(x, tp), tp.size, x.dtype)


def start_tp_gather(x: torch.Tensor, tp: TensorParallel) -> torch.Tensor:
    """Start :func:`tp_gather`; :func:`~functional_te.kernels.collectives.finish` gives the result."""
    return collectives.start_all_gather(x, tp.group, tp.size)


def start_tp_cast(
    x: torch.Tensor, bound: BoundQuantizer, dtype: torch.dtype, tp: TensorParallel, kernels: Backend
) -> Callable[[], tuple[QuantizedTensor, torch.Tensor | None]]:
    """Start the cast of ``x`` of all ranks.

    Returns:
        What finishes it and returns the cast and the amax observed of all of it, as ``kernels.quantize`` does. What is
        computed before it is called runs beside the message.
    """
    quantizer = bound.quantizer
    if isinstance(quantizer, Float8DelayedScalingQuantizer):
        own, amax = kernels.quantize(x, _given(quantizer, bound.scale), dtype)
        sent = collectives.start_all_gather(own.data, tp.group, tp.size)
        largest = collectives.start_greatest(amax, tp.group, tp.size)
        return lambda: (
            _gathered(sent, own, quantizer, tp, kernels),
            collectives.finish(largest, tp.size, torch.float32),
        )
    if isinstance(quantizer, Float8CurrentScalingQuantizer):
        amax = collectives.greatest(amax_of(x), tp.group, tp.size)
        scale = current_scale(amax, quantizer.limit, epsilon=quantizer.amax_epsilon, power_of_2=quantizer.power_2_scale)
        own, _ = kernels.quantize(x, _given(quantizer, scale), dtype)
        sent = collectives.start_all_gather(own.data, tp.group, tp.size)
        return lambda: (_gathered(sent, own, quantizer, tp, kernels), None)
    sent = start_tp_gather(x, tp)
    return lambda: kernels.quantize(collectives.finish(sent, tp.size), bound, dtype)


def _given(quantizer: Quantizer, scale: torch.Tensor | None) -> BoundQuantizer:
    """A rowwise cast with a scale that is given."""
    return BoundQuantizer(quantizer=Float8DelayedScalingQuantizer(dtype=quantizer.dtype), scale=scale)


def _gathered(
    sent: torch.Tensor, own: QuantizedTensor, quantizer: Quantizer, tp: TensorParallel, kernels: Backend
) -> QuantizedTensor:
    """Rowwise FP8 data of all ranks, which is being sent, with the copies that ``quantizer`` makes."""
    data = collectives.finish(sent, tp.size, own.data.dtype)
    fields: dict[str, Any] = {"rowwise_data": data, "rowwise_scale_inv": own.scale_inv} if quantizer.rowwise else {}
    if quantizer.columnwise:
        fields["columnwise_data"] = kernels.transpose(data.reshape(-1, data.shape[-1]))
        fields["columnwise_scale_inv"] = own.scale_inv.clone()
    return pytree.replace(own, **{"rowwise_data": None, "rowwise_scale_inv": None, **fields}, quantizer=quantizer)


def gather_spec(x: TensorSpec, tp: TensorParallel) -> TensorSpec:
    """The twin of :func:`tp_gather` over :class:`TensorSpec`."""
    return x.with_(shape=(x.shape[0] * tp.size, *x.shape[1:]))


def tp_reduce(y: torch.Tensor, tp: TensorParallel) -> torch.Tensor:
    """The sum over the ranks, or this rank's rows of it."""
    return collectives.finish(start_tp_reduce(y, tp), tp.size)


def start_tp_reduce(y: torch.Tensor, tp: TensorParallel) -> torch.Tensor:
    """Start :func:`tp_reduce`; :func:`~functional_te.kernels.collectives.finish` gives the result."""
    start: Any = collectives.start_reduce_scatter if tp.sequence_parallel else collectives.start_all_reduce
    started: torch.Tensor = start(y, tp.group, tp.size)
    return started


def reduce_spec(y: TensorSpec, tp: TensorParallel) -> TensorSpec:
    """The twin of :func:`tp_reduce` over :class:`TensorSpec`."""
    return y.with_(shape=(y.shape[0] // tp.size, *y.shape[1:])) if tp.sequence_parallel else y
