"""DistributedDataParallel on two gloo ranks. (Sharded layers: tests/bridge/test_distributed.py.)"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.habits.ddp_ranks import CASES, SIZE

ROOT = Path(__file__).parents[2]
LIMIT = 240


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """What became of every case on every rank."""
    folder = tmp_path_factory.mktemp("ddp")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    ranks = []
    for rank in range(SIZE):
        with (folder / f"{rank}.log").open("w") as log:
            command = [sys.executable, "-m", "tests.habits.ddp_ranks", str(rank), str(folder)]
            ranks.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT))
    end = time.monotonic() + LIMIT
    try:
        for rank in ranks:
            rank.wait(max(1.0, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        pass
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    found = []
    for rank in range(SIZE):
        report = folder / f"{rank}.json"
        log = (folder / f"{rank}.log").read_text()[-4000:]
        found.append((json.loads(report.read_text()) if report.exists() else {}, log))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_two_ranks(reports, case):
    for rank, (found, log) in enumerate(reports):
        assert found.get(case, f"not reached\n{log}") == "ok", f"rank {rank}"
