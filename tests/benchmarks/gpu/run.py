"""The benchmark: ``python -m tests.benchmarks.gpu.run [--rows NAME,...] [--out DIR] [--quick] [--device cuda|cpu]``.

Prints a table of the goals and writes ``DIR/NAME.json`` after every measurement. On CUDA the rows run in a process of
their own: where a contestant breaks the device or the process, or hangs, that is recorded and a new one goes on.
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch

import functional_te as fte
from tests.benchmarks.gpu.ceilings import ceilings
from tests.benchmarks.gpu.force import force_backend
from tests.benchmarks.gpu.goals import ROWS_WITH_GOALS, markdown
from tests.benchmarks.gpu.measure import DeviceLost, release
from tests.benchmarks.gpu.results import FOLDER, Results, machine, versions
from tests.benchmarks.gpu.rows import ROWS, Settings, run_row

ROOT = Path(__file__).parents[3]
LOST = 75  # exit status: the device is unusable, what was at fault is recorded
RESTARTS = 20


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--rows", default="", help='names, patterns or "goals" (rows with a goal), separated by commas; default: all'
    )
    parser.add_argument("--list", action="store_true", help="print the names of the rows")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder of the results")
    parser.add_argument("--name", default="", help="name of the file; default: after the device")
    parser.add_argument(
        "--device", default="cuda", choices=("cuda", "cpu"), help="cpu: tiny sizes, tests the benchmark"
    )
    parser.add_argument("--backend", default="auto", help="kernel backend of ours")
    parser.add_argument("--quick", action="store_true", help="fewer iterations, and no extra contestants")
    parser.add_argument(
        "--profile", action="store_true", help="write tables of the kernels of our steps beside the JSON"
    )
    parser.add_argument(
        "--append",
        action="store_true",
        help="go on with the file: rows that are done stay as they are, other contestants of --only are added",
    )
    parser.add_argument(
        "--only", default="", help='patterns of contestants, separated by semicolons: "ours*;te.ops, eager"'
    )
    parser.add_argument("--table", action="store_true", help="only print the table of the file")
    parser.add_argument("--budget", type=float, help="seconds after which no contestant is begun")
    parser.add_argument("--stall", type=float, default=450, help="seconds without a result after which one is given up")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--deadline", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    try:
        options.chosen = select(options.rows)
    except ValueError as error:
        parser.error(str(error))
    if options.device == "cuda" and not (options.list or options.table) and not torch.cuda.is_available():
        parser.error("no CUDA device is there; --device cpu runs tiny sizes")
    return options


def select(rows: str) -> list[str]:
    """Names of rows: those given, in the order given.

    Raises:
        ValueError: a name or pattern that fits no row.
    """
    chosen: list[str] = []
    for wanted in [part.strip() for part in rows.split(",") if part.strip()] or ["*"]:
        found = ROWS_WITH_GOALS if wanted == "goals" else [name for name in ROWS if fnmatch.fnmatch(name, wanted)]
        if not found:
            raise ValueError(f"--rows: no row is called {wanted!r}; there are: {', '.join(ROWS)}")
        chosen += [name for name in found if name not in chosen]
    return chosen


def path_of(options: argparse.Namespace) -> Path:
    """The file of the results."""
    name = options.name
    if not name:
        device = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
        name = device.lower().replace("nvidia", "").strip().replace(" ", "-")
    return options.out / f"{name}.json"


def work(options: argparse.Namespace) -> int:
    """Measure in this process."""
    torch.manual_seed(0)
    results = Results(path_of(options), keep=options.append or options.worker)
    if options.backend != "auto":
        force_backend(options.backend)
    measured = ceilings(options.device)
    release(options.device)
    table = getattr(fte, "backends", None)
    results.data.update(
        machine=machine(options.device),
        versions=versions(),
        ceilings=measured,
        backends=repr(table(options.device)) if table is not None else None,
        settings={"backend": options.backend, "quick": options.quick, "device": options.device},
        written=time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
    )
    results.write()
    print(f"{results.data['machine']}\n{results.data['versions']}\nceilings: {measured}", flush=True)
    settings = Settings(
        device=options.device,
        backend=options.backend,
        quick=options.quick,
        only=tuple(part.strip() for part in options.only.split(";") if part.strip()),
        profile=path_of(options).with_suffix("") if options.profile else None,
        deadline=options.deadline,
        ceilings=measured,
    )
    for name in options.chosen:
        if settings.did(results.data["rows"].get(name, {})):
            continue
        if settings.late:
            print(f"{name}: left out, no time", flush=True)
            continue
        print(f"{name}", flush=True)
        try:
            run_row(ROWS[name], settings, results)
        except DeviceLost as lost:
            print(f"the device is lost: {lost}", flush=True)
            return LOST
    return 0


def supervise(options: argparse.Namespace, argv: list[str]) -> int:
    """Run `work` in processes, until one comes to the end. Exit status: 1 if none did."""
    path = path_of(options)
    if not options.append:
        path.unlink(missing_ok=True)
    command = [sys.executable, "-m", "tests.benchmarks.gpu.run", *argv, "--worker", "--name", path.stem]
    command += ["--out", str(path.parent.resolve())]
    if options.budget is not None:
        command += ["--deadline", str(time.time() + options.budget)]
    for _ in range(RESTARTS):
        status = _watch(command, path, options.stall)
        if status == 0:
            return 0
        if status == LOST:
            continue
        results = Results(path, keep=True)
        current = results.data["current"]
        if current is None:
            print(f"the process ended with status {status} before or between contestants", flush=True)
            return 1
        error = f"no result for {options.stall:g} s" if status is None else f"the process ended with status {status}"
        results.record(current["row"], current["name"], current["mode"], error=error, value=None, fatal=True)
        print(f"  {current['row']}: {current['name']}, {current['mode']}: {error}; a new process goes on", flush=True)
    return 1


def _watch(command: list[str], path: Path, stall: float) -> int | None:
    """Exit status of a process; None if it wrote no result for ``stall`` seconds and was killed."""
    process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, "PYTHONUNBUFFERED": "1"})
    last, seen = time.monotonic(), 0.0
    try:
        while process.poll() is None:
            time.sleep(0.2)
            written = path.stat().st_mtime if path.exists() else 0.0
            if written != seen:
                last, seen = time.monotonic(), written
            elif time.monotonic() - last > stall:
                return None
        return process.returncode
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def main(argv: list[str] | None = None) -> int:
    """Measure, print, and say whether the benchmark itself came to its end (missed goals are no failure)."""
    options = parse(argv)
    if options.list:
        print("\n".join(ROWS))
        return 0
    if options.worker:
        return work(options)
    status = 0
    if options.table:
        pass
    elif options.device == "cuda":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the process that is watched ends too
        status = supervise(options, sys.argv[1:] if argv is None else argv)
    else:
        options.deadline = None if options.budget is None else time.time() + options.budget
        status = work(options)
    print(markdown(Results(path_of(options), keep=True).data), flush=True)
    print(f"\nwritten: {path_of(options)}", flush=True)
    return status


if __name__ == "__main__":
    raise SystemExit(main())
