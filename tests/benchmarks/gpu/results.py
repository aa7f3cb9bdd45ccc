"""The results of a run: one JSON file, written again after every change, so that a killed run keeps what it has."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import time
from pathlib import Path
from typing import Any

import torch

from tests.benchmarks.gpu.goals import conclude

FOLDER = Path(__file__).parents[1] / "results"


def versions() -> dict[str, str | None]:
    """What is installed."""
    found: dict[str, str | None] = {"python": platform.python_version(), "torch": torch.__version__}
    found["cuda"] = torch.version.cuda
    for name in ("triton", "torchao", "transformer_engine", "functional_te"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def machine(device: str) -> dict[str, Any]:
    """What it runs on."""
    found: dict[str, Any] = {"device": platform.processor() or platform.machine(), "cpus": os.cpu_count()}
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        found["device"] = properties.name
        found["memory_gb"] = round(properties.total_memory / 1e9, 1)
        found["multiprocessors"] = properties.multi_processor_count
        query = ["nvidia-smi", "--query-gpu=driver_version,clocks.max.sm,power.limit", "--format=csv,noheader"]
        try:
            said = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False).stdout
            found["driver, clock, power"] = said.strip().splitlines()[0] if said.strip() else None
        except (OSError, subprocess.SubprocessError):
            found["driver, clock, power"] = None
    return found


class Results:
    """The results and their file.

    Args:
        path: the file.
        keep: whether to go on with what the file has.
    """

    def __init__(self, path: Path, *, keep: bool) -> None:
        self.path = path
        self.data: dict[str, Any] = {"rows": {}, "goals": [], "current": None}
        if keep and path.exists():
            self.data = json.loads(path.read_text())

    def write(self) -> None:
        """Conclude and write, as one step."""
        conclude(self.data)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        draft = self.path.with_suffix(".tmp")
        draft.write_text(json.dumps(self.data, indent=1) + "\n")
        draft.replace(self.path)

    def row(self, name: str, **fields: Any) -> dict[str, Any]:
        """A row, made if it is new; ``fields`` are set."""
        row = self.data["rows"].setdefault(name, {"title": "", "unit": "ms", "entries": [], "done": False})
        row.update(fields)
        return row

    def begin(self, row: str, name: str, mode: str) -> None:
        """Say what is about to run: if the process dies, that is what it died of."""
        self.data["current"] = {"row": row, "name": name, "mode": mode, "since": time.time()}
        self.write()

    def record(self, row: str, name: str, mode: str, *, peer: bool = False, **fields: Any) -> None:
        """Add to an entry of a row, and write."""
        entries = self.row(row)["entries"]
        for entry in entries:
            if (entry["name"], entry["mode"]) == (name, mode):
                break
        else:
            entry = {"name": name, "mode": mode, "peer": peer}
            entries.append(entry)
        if fields.get("value") is not None:
            entry.pop("error", None)
        entry.update(fields)
        self.data["current"] = None
        self.write()

    def fatal(self, row: str, name: str, mode: str) -> bool:
        """Whether that entry ended an earlier process."""
        entries = self.data["rows"].get(row, {}).get("entries", ())
        return any((e["name"], e["mode"]) == (name, mode) and e.get("fatal") for e in entries)
