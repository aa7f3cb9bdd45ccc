"""What each step of an MLP block takes on this GPU, beside the estimate of the block's graph.

``python -m tests.benchmarks.gpu.steps`` prints a table for every recipe. Steps run eagerly under the profiler, which
labels them; the time of a step is that from the start of its first kernel to the end of its last, so the block has to
be large enough that the device never waits for the host.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch

import bridge
import functional_te as fte
from functional_te.graph.devices import device_of
from functional_te.graph.roofline import estimate
from tests.benchmarks.gpu.blocks import Mlp, bridge_model
from tests.benchmarks.gpu.contestants import RECIPES

SHAPE = Mlp(tokens=8192, width=4096, hidden=14336)


def measured(run: Any, steps: int, folder: str) -> list[tuple[str, float]]:
    """Labels of one training step in the order of the device, each with its median seconds over ``steps``."""
    for _ in range(5):
        run()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(steps):
            run()
        torch.cuda.synchronize()
    path = Path(folder) / "trace.json"
    profile.export_chrome_trace(str(path))
    events = [
        event
        for event in json.loads(path.read_text())["traceEvents"]
        if event.get("cat") == "gpu_user_annotation" and event["name"].startswith("functional_te::")
    ]
    events.sort(key=lambda event: event["ts"])
    count, rest = divmod(len(events), steps)
    if rest:
        raise RuntimeError(f"{len(events)} labels in {steps} steps")
    return [
        (events[place]["name"], statistics.median(event["dur"] for event in events[place::count]) * 1e-6)
        for place in range(count)
    ]


def estimates(name: str) -> list[tuple[str, float]]:
    """Custom op and estimated milliseconds on an H200 of every step that launches something."""
    with torch.device("meta"):
        model = bridge_model(SHAPE, "meta", torch.bfloat16)
    recipe = RECIPES[name]
    with bridge.autocast(enabled=recipe is not None, recipe=recipe):
        graph = bridge.graph(model, fte.TensorSpec(SHAPE.input_shape, torch.bfloat16), backend="triton", device="H200")
    device = device_of("H200")
    return [(step.custom_op, 1e3 * estimate(step, device).seconds) for step in graph.steps if step.kernels]


def pairs(name: str, steps: int, folder: str) -> list[tuple[str, float, float]]:
    """Custom op, measured and estimated milliseconds of every step under the recipe called ``name``."""
    torch.manual_seed(0)
    model = bridge_model(SHAPE, "cuda", torch.bfloat16)
    x = torch.randn(SHAPE.input_shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn_like(x)
    recipe = RECIPES[name]

    def run() -> None:
        model.zero_grad()
        x.grad = None
        with bridge.autocast(enabled=recipe is not None, recipe=recipe):
            y = model(x)
        y.backward(grad)

    expected = estimates(name)
    found = measured(run, steps, folder)
    if [f"functional_te::{op}" for op, _ in expected] != [label for label, _ in found]:
        raise RuntimeError(f"labels {[label for label, _ in found]}, steps {[op for op, _ in expected]}")
    return [(op, 1e3 * seconds, guess) for (op, guess), (_, seconds) in zip(expected, found, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipes", default="delayed,current,block,none")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--out", help="a JSON file for the measured milliseconds")
    chosen = parser.parse_args()
    results: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in chosen.recipes.split(","):
            own = pairs(name, chosen.steps, folder)
            results[name] = {op: round(ms, 4) for op, ms, _ in own}
            own.append(("all", sum(ms for _, ms, _ in own), sum(guess for *_, guess in own)))
            print(f"{name}: {'step':<40} measured  estimate  ratio")
            for op, ms, guess in own:
                print(f"  {op:<44} {ms:>8.3f}  {guess:>8.3f}  {guess / ms:>5.2f}", flush=True)
    if chosen.out:
        about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "unit": "ms"}
        Path(chosen.out).write_text(json.dumps(about | {"steps": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
