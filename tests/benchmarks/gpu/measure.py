"""Times of steps and of kernels, peak memory, and giving memory back between contestants."""

from __future__ import annotations

import gc
import math
import statistics
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.benchmarks.gpu.contestants import Step, forget_te_state


class DeviceLost(RuntimeError):
    """CUDA answers every call with an error: only a new process can go on."""


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def release(device: str, *, compiled: bool = False) -> None:
    """Give back what contestants held; with ``compiled``, also forget what was compiled."""
    if compiled:
        torch._dynamo.reset()
    gc.collect()
    forget_te_state()
    if device == "cuda":
        torch.cuda.empty_cache()


def explain(error: BaseException, device: str) -> str:
    """The error as text for the results; its traceback goes to the output.

    Raises:
        DeviceLost: the device is unusable since then.
    """
    text = f"{type(error).__name__}: {error}"[:1500]
    print("".join(traceback.format_exception(error, limit=-12))[-4000:], flush=True)
    error.__traceback__ = None  # it holds the frames that hold the tensors
    try:
        synchronize(device)
    except Exception as lost:
        raise DeviceLost(text) from lost
    return text


def durations(run: Callable[[], Any], count: int, device: str, before: Callable[[], Any] | None = None) -> list[float]:
    """Milliseconds of ``count`` calls after one untimed call; ``before`` runs before each call, untimed.

    On CUDA events around each call: where the host is faster than the device, calls queue up and the device's time is
    measured, where it is slower, the host's.
    """
    if before is not None:
        before()
    run()
    synchronize(device)
    times = []
    for _ in range(count):
        if before is not None:
            before()
        if device == "cuda":
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            run()
            end.record()
            times.append((start, end))
        else:
            begin = time.perf_counter()
            run()
            times.append(1e3 * (time.perf_counter() - begin))
    synchronize(device)
    return [one[0].elapsed_time(one[1]) if isinstance(one, tuple) else one for one in times]


def kernel_ms(run: Callable[[], Any], device: str, *, count: int = 50, batch: int = 10, captured: bool = True) -> float:
    """Median milliseconds of one call of a kernel, replayed in CUDA graphs of ``batch`` calls: the device alone.

    Not ``captured``: called ``batch`` times. In a CUDA graph a copy becomes a node that runs at 60 % of the kernel's
    bandwidth (H200).
    """
    if device != "cuda":
        return statistics.median(durations(run, 3, device))

    def several() -> None:
        for _ in range(batch):
            run()

    several()  # compiles
    synchronize(device)
    if not captured:
        return statistics.median(durations(several, max(count // batch, 5), device)) / batch
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        several()
    return statistics.median(durations(graph.replay, max(count // batch, 5), device)) / batch


def settle(step: Step, device: str, warmups: int = 3) -> float:
    """Run until everything is compiled, recorded and tuned; milliseconds of a step then."""
    for _ in range(warmups):
        step.clear()
        step.run()
    synchronize(device)
    return statistics.median(durations(step.run, 3, device, step.clear))


def iterations(ms: float, quick: bool, device: str) -> int:
    """How often a step of ``ms`` is timed: at least 20 times, unless it is slow, at most 100 times."""
    if device != "cuda":
        return 3
    least, most, budget = (10, 30, 400.0) if quick else (20, 100, 1500.0)
    return max(min(most, math.ceil(budget / max(ms, 1e-3))), least if ms < 500 else 3)


def drift(device: str) -> float:
    """Milliseconds of a fixed BF16 product: how fast the device is just now."""
    size = 4096 if device == "cuda" else 64
    a = torch.ones(size, size, device=device, dtype=torch.bfloat16)
    return statistics.median(durations(lambda: a @ a, 10, device))


def summary(samples: list[float]) -> dict[str, Any]:
    """What the results keep of many times."""
    ordered = sorted(samples)
    return {
        "value": statistics.median(ordered),
        "min": ordered[0],
        "p90": ordered[min(len(ordered) - 1, int(0.9 * len(ordered)))],
        "samples": len(ordered),
    }


def peak_megabytes(build: Callable[[], Step], device: str) -> dict[str, Any]:
    """Peak memory of one step over parameters, input and gradient of the output, in MB (1e6 bytes).

    What was allocated before the step was built does not count. Gradients are dropped before, so they do count.
    """
    if device != "cuda":
        raise RuntimeError("peak memory is measured on CUDA only")
    release(device)
    before = torch.cuda.memory_allocated()
    step = build()
    for _ in range(3):
        step.clear()
        step.run()
    step.clear()
    gc.collect()
    synchronize(device)
    torch.cuda.reset_peak_memory_stats()
    resting = torch.cuda.memory_allocated() - before
    step.run()
    synchronize(device)
    kept = sum(tensor.nbytes for tensor in step.tensors)
    return {
        "value": (torch.cuda.max_memory_allocated() - before - kept) / 1e6,
        "resting": (resting - kept) / 1e6,
        "kept": kept / 1e6,
    }


def write_profile(step: Step, path: Path, device: str, *, steps: int = 5) -> None:
    """The kernels of a few steps by time, as text."""
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device == "cuda")
    with profile(activities=activities) as found:
        for _ in range(steps):
            step.clear()
            step.run()
        synchronize(device)
    order = "cuda_time_total" if device == "cuda" else "cpu_time_total"
    table = found.key_averages().table(sort_by=order, row_limit=60, max_name_column_width=110)
    path.write_text(f"{steps} steps\n{table}\n")
    print(f"profile: {path}", flush=True)
