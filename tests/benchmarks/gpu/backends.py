"""Times of kernel backends beside each other: the table of ``functional_te.kernels.measured``.

``python -m tests.benchmarks.gpu.backends`` prints it for this GPU: milliseconds of a training step of an MLP block by
recipe and backend, captured in a CUDA graph, where only kernels count.
"""

from __future__ import annotations

import gc
import statistics

import torch

import bridge
import functional_te as fte
from functional_te.kernels import BACKENDS
from tests.benchmarks.gpu.blocks import Mlp, mlp_chain
from tests.benchmarks.gpu.contestants import RECIPES, Step, captured
from tests.benchmarks.gpu.measure import durations

SHAPE = Mlp(tokens=2048, width=2048, hidden=5632)


def milliseconds(backend: str, recipe: str) -> float:
    """Median time of a step."""
    block = mlp_chain(SHAPE.width, SHAPE.hidden)
    params = fte.init(block, dtype=torch.bfloat16, device="cuda")
    leaves = [param.requires_grad_() for own in params for param in own.values()]
    chosen = RECIPES[recipe]
    state = None if chosen is None else fte.init_state(block, chosen, device="cuda")
    x = torch.randn(SHAPE.input_shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn_like(x)

    def run() -> None:
        y, _ = bridge.apply(block, params, x, state=state, recipe=chosen, backend=backend)
        y.backward(grad)

    def clear() -> None:
        x.grad = None
        for leaf in leaves:
            leaf.grad = None

    step = captured(Step(run, clear, tuple(leaves)))
    return statistics.median(durations(step.run, 20, "cuda"))


def main() -> None:
    usable = [source.name for source in BACKENDS if source.missing("cuda") is None]
    print(torch.cuda.get_device_name(), *usable)
    for recipe in RECIPES:
        times = []
        for backend in usable:
            try:
                times.append(f"{milliseconds(backend, recipe):.3f}")
            except Exception as error:
                times.append(f"{type(error).__name__}: {error}"[:100])
            gc.collect()
        print(f"{recipe:<10}", *(f"{time:>9}" for time in times), flush=True)


if __name__ == "__main__":
    main()
