"""Experts on several ranks: rows travel to the rank of their expert and back."""

from __future__ import annotations

from typing import Any

import torch

from bridge.distributed.groups import group_of
from bridge.distributed.start import check_same_on_all_ranks
from functional_te._errors import type_error, value_error
from functional_te.kernels import collectives
from functional_te.ops.common import check_size

__all__ = ["ExpertParallel"]


class _Exchange(torch.autograd.Function):
    """All-to-all of rows; the gradient goes back the way they came."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, to: list[int], of: list[int], group: tuple[str, int]) -> torch.Tensor:
        ctx.to, ctx.of, ctx.group = to, of, group
        return collectives.all_to_all(rows, to, of, *group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return collectives.all_to_all(grads[0], ctx.of, ctx.to, *ctx.group), None, None, None


class ExpertParallel(torch.nn.Module):
    """Experts that are shared out over the ranks of a group: rank ``r`` has the ``r``-th part of them.

    Called with rows ``[rows, features]`` that are sorted by expert, and how many of them each of all experts gets,
    ``[num_experts]`` integers. Gives the experts' results in the same order. How many rows travel is data, so the host
    waits for the counts once per call, and in compiled code the module is a graph break. A rank may hold no rows, and
    an expert get none; every rank calls it equally often.

    Args:
        experts: called with rows and how many of them each of this rank's experts gets, as
            :class:`bridge.ops.GroupedLinear` or a :class:`bridge.ops.Sequential` of them is.
        num_experts: the number of experts on all ranks together.
        group: a process group; None is the default group. In a group of one rank nothing is sent.
        layers: how often ``experts`` takes the counts: once for each grouped linear layer in it.

    Raises:
        ValueError: experts that the ranks cannot share out evenly, or another number on another rank.
    """

    def __init__(self, experts: torch.nn.Module, num_experts: int, group: Any = None, *, layers: int = 1) -> None:
        super().__init__()
        check_size(num_experts, "ExpertParallel", "num_experts")
        check_size(layers, "ExpertParallel", "layers")
        self._group = group_of(group, "ExpertParallel", "group")
        size = self._group[1]
        if num_experts % size:
            raise value_error("ExpertParallel", "num_experts", f"a multiple of the {size} ranks", num_experts)
        check_same_on_all_ranks({"num_experts": num_experts}, group, "ExpertParallel")
        self.experts, self.num_experts, self.layers = experts, num_experts, layers

    def forward(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Send rows to their experts, run these, and send the results back."""
        self._check(rows, counts)
        size = self._group[1]
        if size == 1:
            alone: torch.Tensor = self.experts(rows, *[counts] * self.layers)
            return alone
        sent = counts.reshape(size, -1)
        each = [1] * size
        # [rank that sent, expert of this rank]
        came = collectives.all_to_all(sent.to(torch.int64), each, each, *self._group)
        to, of = torch.stack((sent.to(torch.int64).sum(1), came.sum(1))).tolist()
        received = _Exchange.apply(rows, to, of, self._group)
        experts = torch.arange(came.shape[1], device=came.device).repeat(size)
        order = torch.repeat_interleave(experts, came.flatten()).argsort(stable=True)
        made = self.experts(received[order], *[came.sum(0)] * self.layers)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=order.device)
        result: torch.Tensor = _Exchange.apply(made[back], of, to, self._group)
        return result

    def _check(self, rows: torch.Tensor, counts: torch.Tensor) -> None:
        if not isinstance(counts, torch.Tensor) or counts.dtype.is_floating_point:
            raise type_error("ExpertParallel", "counts", "a tensor of integers", getattr(counts, "dtype", counts))
        if tuple(counts.shape) != (self.num_experts,):
            raise value_error(
                "ExpertParallel", "counts", f"shape ({self.num_experts},)", f"shape {tuple(counts.shape)}"
            )
        if rows.dim() != 2:
            raise value_error("ExpertParallel", "rows", "two dimensions", f"shape {tuple(rows.shape)}")
        total = int(counts.sum())
        if total != rows.shape[0]:
            raise value_error("ExpertParallel", "counts", f"a sum of {rows.shape[0]} rows", total)
