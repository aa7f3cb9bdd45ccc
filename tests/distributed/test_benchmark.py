"""The benchmark of two GPUs runs without them, tiny."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_rows_of_a_block_in_tensor_parallel(tmp_path):
    arguments = ["--count", "1", "--only", "mlp", "--out", str(tmp_path / "rows.json")]
    line = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    command = [*line, "tests.benchmarks.gpu.two_gpus", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    one, two = json.loads((tmp_path / "rows.json").read_text())
    assert two["of one GPU"] == two["ms"] / one["ms"]
    assert two["predicted ms"] > 0
