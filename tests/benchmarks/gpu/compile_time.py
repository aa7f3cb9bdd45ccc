"""Seconds until the first forward and backward of compiled layers is done, with empty caches.

``python -m tests.benchmarks.gpu.compile_time WHO SHAPE DEVICE BACKEND`` prints one line of JSON; :func:`cold` runs that
in a process of its own, with cache directories of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]


def cold(who: str, shape: str, device: str, backend: str, timeout: float = 400) -> dict[str, Any]:
    """Measure in a fresh process: ``who`` is "ours", "torchao" or "torch bf16".

    Raises:
        RuntimeError: the process failed; with the end of what it said.
    """
    with tempfile.TemporaryDirectory() as folder:
        environment = {
            **os.environ,
            "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
            "TRITON_CACHE_DIR": f"{folder}/triton",
        }
        command = [sys.executable, "-m", "tests.benchmarks.gpu.compile_time", who, shape, device, backend]
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout, check=False
        )
    if done.returncode != 0:
        raise RuntimeError(f"exit status {done.returncode}: {(done.stdout + done.stderr)[-1200:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def main(who: str, shape_name: str, device: str, backend: str) -> None:
    """Compile once, in this process."""
    import torch

    from tests.benchmarks.gpu.contestants import build_ours, build_torch
    from tests.benchmarks.gpu.force import force_backend
    from tests.benchmarks.gpu.measure import synchronize
    from tests.benchmarks.gpu.rows import shapes

    if backend != "auto":
        force_backend(backend)
    shape = shapes(device)[shape_name]
    torch.ones(8, device=device).sum().item()  # the device's context
    if who == "ours":
        step = build_ours(shape, "delayed", "compiled", device, torch.bfloat16)
    else:
        step = build_torch(shape, "compiled", device, torch.bfloat16, float8=who == "torchao")
    synchronize(device)
    seconds = []
    for _ in range(2):
        step.clear()
        start = time.perf_counter()
        step.run()
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    print(json.dumps({"value": seconds[0], "second_step": seconds[1]}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
