"""The demo on two processes, by the line that the README gives."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bridge.demo.__main__ import main

pytest.importorskip("tqdm", reason="needs tqdm and matplotlib (the `demo` extra)")
pytest.importorskip("matplotlib", reason="needs tqdm and matplotlib (the `demo` extra)")

ROOT = Path(__file__).parents[2]
SMALL = ["--steps=4", "--layers=1", "--width=32", "--batch=4", "--context=16", "--recipe=delayed"]


def torchrun(*arguments):
    """The README's line, with ``torchrun`` as the module that it is."""
    (line,) = re.findall(r"^torchrun .*-m bridge\.demo", (ROOT / "README.md").read_text(), flags=re.M)
    command = [sys.executable, "-m", "torch.distributed.run", *line.split()[1:], *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment, check=False)


def losses(folder):
    return torch.load(folder / "checkpoint-delayed.pt", weights_only=True)["progress"]["losses"]


@pytest.mark.parametrize("backend", ["none", pytest.param("aot_eager", marks=pytest.mark.slow)])
def test_two_processes_train_as_one(backend, tmp_path, capsys):
    text = tmp_path / "text"
    text.write_text("the quick brown fox jumps over the lazy dog, " * 40)
    given = [*SMALL, "--backend", backend, "--text", str(text), "--out"]
    done = torchrun(*given, str(tmp_path / "two"))
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("FP8 delayed") == 1  # the first process alone reports
    assert "2 processes trained together." in done.stdout
    assert main([*given, str(tmp_path / "one")]) == 0
    capsys.readouterr()
    found, expected = losses(tmp_path / "two"), losses(tmp_path / "one")
    assert len(found) == 4
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=2e-3, atol=0)


@pytest.mark.slow
def test_a_batch_that_two_processes_cannot_share_out(tmp_path):
    done = torchrun(*SMALL, "--batch", "3", "--out", str(tmp_path))
    assert done.returncode != 0
    assert "--batch: expected a multiple of the 2 processes, got 3" in done.stderr
