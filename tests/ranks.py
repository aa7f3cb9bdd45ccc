"""Running the cases of a module on several gloo ranks, each a process that writes a JSON report."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]


def reports_of(module: str, folder: Path, size: int, limit: float, *arguments: str) -> list[tuple[dict, str]]:
    """What became of every case on every rank, and the end of each rank's output.

    Args:
        module: run as ``python -m module RANK ARGUMENTS...``; it writes ``folder/RANK.json``.
        folder: an empty one.
        size: number of ranks.
        limit: seconds after which what still runs is killed.
        arguments: of every rank, with ``{rank}`` in the place of its number.
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    ranks = []
    for rank in range(size):
        with (folder / f"{rank}.log").open("w") as log:
            own = [argument.format(rank=rank) for argument in arguments]
            command = [sys.executable, "-m", module, str(rank), *own]
            ranks.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT))
    end = time.monotonic() + limit
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
    for rank in range(size):
        report = folder / f"{rank}.json"
        log = (folder / f"{rank}.log").read_text()[-4000:]
        found.append((json.loads(report.read_text()) if report.exists() else {}, log))
    return found
