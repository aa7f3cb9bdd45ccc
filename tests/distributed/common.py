"""What the cases of several ranks share. A module of cases ends with ``main(globals())`` under its main guard."""

import contextlib
import json
import sys
import time
import traceback
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.ranks import reports_of


def cases_of(names: dict[str, Any], prefix: str = "case_") -> dict[str, Any]:
    """The functions ``case_*(rank, size, folder)`` of a module; those that take long are called ``slow_case_*``."""
    return {name.removeprefix(prefix): case for name, case in names.items() if name.startswith(prefix)}


def run(module: str, folder: Path, size: int, limit: float, *more: str) -> list[tuple[dict, str]]:
    """What became of the cases of a module on ``size`` ranks."""
    return reports_of(module, folder, size, limit, str(size), str(folder), *more)


def main(names: dict[str, Any]) -> None:
    """One rank: ``python -m MODULE RANK SIZE FOLDER [CASE]``; without a case all but the slow ones run."""
    rank, size, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=size, timeout=timedelta(seconds=60)
    )
    report: dict[str, str] = {}
    cases = cases_of(names)
    if sys.argv[4:]:
        every = {**cases, **cases_of(names, "slow_case_")}
        cases = {name: every[name] for name in sys.argv[4:]}
    for name, case in cases.items():
        torch.manual_seed(0)
        torch._dynamo.reset()
        start = time.perf_counter()
        try:
            case(rank, size, folder)
            report[name] = "ok"
            print(f"{name}: {time.perf_counter() - start:.1f} s", flush=True)
        except BaseException:  # the other ranks wait for calls that do not come, so nothing can follow
            report[name] = traceback.format_exc()
            print(report[name], flush=True)
        (folder / f"{rank}.json").write_text(json.dumps(report))
        if report[name] != "ok":
            break
    dist.destroy_process_group()


class _Messages(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, torch.dtype, int]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace in ("_c10d_functional", "c10d") and "wait" not in func.name():
            tensor = next(value for value in tree_leaves(args) if isinstance(value, torch.Tensor))
            self.seen.append((func.name().split("::")[1], tensor.dtype, tensor.numel()))
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def messages() -> Iterator[list[tuple[str, torch.dtype, int]]]:
    """Yield the list of what is sent inside: name of the collective, dtype and number of elements."""
    mode = _Messages()
    with mode:
        yield mode.seen


def same_on_all_ranks(tensors: Any) -> None:
    """Assert that tensors have the same bits on all ranks."""
    for own in tensors:
        both = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(both, own.contiguous())
        for other in both:
            torch.testing.assert_close(other, both[0], rtol=0, atol=0, equal_nan=True)
