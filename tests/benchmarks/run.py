"""Speed and memory of the reference backend on the CPU, as ratios against plain torch.nn measured in the same run.

``python -m tests.benchmarks.run`` prints a table and exits non-zero if a ratio is above its limit. Times are medians
of alternating rounds, so that a busy machine disturbs both sides alike.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import bridge
import functional_te as fte
from tests.benchmarks.blocks import TorchBlock, chain, chain_params, module


def ratio(ours: Callable[[], Any], theirs: Callable[[], Any], *, calls: int, rounds: int = 11) -> float:
    """Median of the ratios of ``rounds`` alternating rounds of ``calls`` calls each."""
    for warm in (ours, theirs):
        for _ in range(max(calls // 4, 3)):
            warm()
    ratios = []
    for _ in range(rounds):
        ratios.append(_seconds(ours, calls) / _seconds(theirs, calls))
    return statistics.median(ratios)


def _seconds(function: Callable[[], Any], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        function()
    return time.perf_counter() - start


def dispatch_training() -> float:
    """Eager forward and backward of the module over torch.nn: width 64, 8 tokens."""
    ours, theirs = module(64), TorchBlock(64)
    x = torch.randn(8, 64, requires_grad=True)
    return ratio(lambda: ours(x).sum().backward(), lambda: theirs(x).sum().backward(), calls=200)


def dispatch_inference() -> float:
    """``fte.apply`` without grad mode over torch.nn: width 64, 8 tokens."""
    theirs, block = TorchBlock(64), chain(64)
    params, x = chain_params(theirs), torch.randn(8, 64)
    with torch.no_grad():
        return ratio(lambda: fte.apply(block, params, x), lambda: theirs(x), calls=400)


def compiled_training(recipe: fte.recipes.Recipe | None = None) -> float:
    """Compiled forward and backward over compiled torch.nn: width 512, 512 tokens."""
    theirs, block = TorchBlock(512), chain(512)
    params, x = chain_params(theirs), torch.randn(512, 512, requires_grad=True)
    state = fte.init_state(block, recipe)

    def run(x: torch.Tensor) -> torch.Tensor:
        return bridge.apply(block, params, x, state=state, recipe=recipe)[0]

    ours_compiled = torch.compile(run, fullgraph=True)
    theirs_compiled = torch.compile(theirs, fullgraph=True)
    return ratio(
        lambda: ours_compiled(x).sum().backward(), lambda: theirs_compiled(x).sum().backward(), calls=10, rounds=15
    )


def saved_bytes(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> int:
    """Bytes of the distinct storages that autograd keeps for the backward of one call, parameters included."""
    storages: dict[int, tuple[int, torch.Tensor]] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        function(x)
    return sum(size for size, _ in storages.values())


def saved_ratio(recipe: fte.recipes.Recipe | None, tokens: int = 512, width: int = 512) -> float:
    """Bytes saved for the backward over plain autograd: width 512, 512 tokens."""
    theirs, block = TorchBlock(width), chain(width)
    params, x = chain_params(theirs), torch.randn(tokens, width, requires_grad=True)
    state = fte.init_state(block, recipe)
    ours = saved_bytes(lambda x: bridge.apply(block, params, x, state=state, recipe=recipe)[0], x)
    return ours / saved_bytes(theirs, x)


def planning_share() -> float:
    """Time of ``fte.plan`` on an equal, rebuilt chain over the time of planning it the first time."""
    widths = iter(range(16, 10_000, 16))
    first = statistics.median(_plan_seconds(chain(next(widths))) for _ in range(20))
    block = chain(64)
    fte.plan(block)
    return statistics.median(_plan_seconds(block) for _ in range(200)) / first


def _plan_seconds(block: fte.Chain) -> float:
    start = time.perf_counter()
    fte.plan(block)
    return time.perf_counter() - start


ROWS: tuple[tuple[str, Callable[[], float], float], ...] = (
    ("dispatch, forward+backward, eager bridge / torch.nn (64 wide, 8 tokens)", dispatch_training, 2.0),
    ("dispatch, no grad, fte.apply / torch.nn (64 wide, 8 tokens)", dispatch_inference, 1.3),
    ("compiled bridge / compiled torch.nn (512 wide, 512 tokens)", compiled_training, 1.05),
    ("bytes saved for backward / autograd, high precision", lambda: saved_ratio(None), 1.0),
    ("bytes saved for backward / autograd, FP8 current scaling", lambda: saved_ratio(CURRENT), 0.55),
    ("bytes saved for backward / autograd, FP8 delayed scaling", lambda: saved_ratio(DELAYED), 0.55),
    ("planning a second time / the first time", planning_share, 0.2),
)
CURRENT = fte.recipes.Float8CurrentScaling()
DELAYED = fte.recipes.DelayedScaling(amax_history_len=16)


def main() -> int:
    """Print the table; 1 if a ratio is above its limit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    worst = 0
    print(f"torch {torch.__version__}, {options.threads} thread(s), float32")
    for title, measure, limit in ROWS:
        value = measure()
        worst |= value > limit
        print(f"{value:6.2f}  limit {limit:4.2f}  {'ok  ' if value <= limit else 'OVER'}  {title}", flush=True)
    for title, recipe in (("current", CURRENT), ("delayed", DELAYED)):
        print(f"{compiled_training(recipe):6.2f}  (no limit)       compiled FP8 {title} emulation / compiled torch.nn")
    return int(worst)


if __name__ == "__main__":
    raise SystemExit(main())
