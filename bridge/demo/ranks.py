"""The demo on several processes, as ``torchrun`` starts them: each sees its rows of every batch."""

from __future__ import annotations

from typing import Any

import torch

from bridge.demo.settings import DemoError

__all__ = ["ALONE", "Ranks", "join", "leave"]


class Ranks:
    """This process among those that train together.

    Attributes:
        rank: its number.
        size: how many there are.
    """

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size = rank, size

    @property
    def is_first(self) -> bool:
        """Whether it is the one that writes files and talks to the user."""
        return self.rank == 0

    def check_same(self, **values: Any) -> None:
        """Raise :class:`DemoError` if the processes were given different things."""
        if self.size == 1:
            return
        from bridge.distributed import check_same_on_all_ranks

        try:
            check_same_on_all_ranks(values, where="demo")
        except ValueError as error:
            raise DemoError(str(error)) from error

    def wait(self) -> None:
        """For all processes."""
        if self.size > 1:
            torch.distributed.barrier()

    def rows(self, windows: torch.Tensor) -> torch.Tensor:
        """This process's part of a batch."""
        return windows.chunk(self.size)[self.rank]

    def wrap(self, loss: torch.nn.Module) -> torch.nn.Module:
        """The module whose backward averages gradients over the processes."""
        if self.size == 1:
            return loss
        return torch.nn.parallel.DistributedDataParallel(loss)

    def agree(self, model: torch.nn.Module) -> Any:
        """Have all processes use the same scales until ``remove()`` is called on the result."""
        from bridge.distributed import agree_amaxes

        return agree_amaxes(model)

    def mean(self, value: torch.Tensor) -> float:
        """The mean of a number over the processes."""
        if self.size == 1:
            return value.item()
        total = value.detach().clone()
        torch.distributed.all_reduce(total)
        return total.item() / self.size

    def any(self, flag: bool) -> bool:
        """Whether it is true of one of the processes."""
        return flag if self.size == 1 else self.mean(torch.tensor(float(flag))) > 0


ALONE = Ranks()


def join(device: str) -> Ranks:
    """The processes that were started together; this one alone if ``torchrun`` did not start it."""
    if not (torch.distributed.is_available() and torch.distributed.is_torchelastic_launched()):
        return ALONE
    from bridge.distributed import initialize

    # a flag may lie on the host, so both kinds of tensors are sent
    return Ranks(*initialize("cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo"))


def leave(ranks: Ranks) -> None:
    """End what :func:`join` began."""
    if ranks.size > 1 and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
