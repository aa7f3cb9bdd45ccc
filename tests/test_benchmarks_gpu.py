"""The GPU benchmark itself, tiny and on the CPU: what it compares, how it judges, that it goes on after failures."""

import dataclasses
import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.benchmarks.gpu import measure, plot, run
from tests.benchmarks.gpu.blocks import Llama, Mlp, bridge_model, torch_model
from tests.benchmarks.gpu.ceilings import floor_ms
from tests.benchmarks.gpu.compile_time import cold
from tests.benchmarks.gpu.contestants import inputs
from tests.benchmarks.gpu.goals import FLOOR, GOALS, Goal, judge
from tests.benchmarks.gpu.results import Results
from tests.benchmarks.gpu.rows import ROWS, Settings, run_row

LLAMA = Llama(2, 8, 32, 4, 2, 48)


@pytest.mark.parametrize("shape", [Mlp(6, 16, 24, layers=2), LLAMA], ids=["mlp", "llama"])
def test_models_compute_the_same(shape: Any) -> None:
    """With the same parameters, ours and torch's give the same output and gradients: they are the same work."""
    ours, theirs = (make(shape, "cpu", torch.float32) for make in (bridge_model, torch_model))
    with torch.no_grad():
        for own, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            own.copy_(other)
    results = []
    for model in (ours, theirs):
        x, dy = inputs(shape, "cpu", torch.float32)
        y = model(x)
        y.backward(dy)
        results.append([y, x.grad, *(parameter.grad for parameter in model.parameters())])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_run_writes_every_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Values, errors of what cannot run here, a table, a picture; what is done is not measured again."""
    only = "ours, eager;ours, captured;torch bf16, eager;te.ops, eager;cast*;up, forward*"
    command = ["--device", "cpu", "--rows", "gemms,mlp-t512-delayed", "--only", only, "--out", str(tmp_path)]
    assert run.main(command) == 0
    data = json.loads((tmp_path / "cpu.json").read_text())
    assert list(data["rows"]) == ["gemms", "mlp-t512-delayed"]
    assert data["current"] is None
    assert data["versions"]["torch"] == torch.__version__
    assert data["machine"]["cpus"]
    assert data["ceilings"]["copy_tb_s"] > 0
    row = data["rows"]["mlp-t512-delayed"]
    assert row["done"]
    assert row["unit"] == "ms"
    assert row["shape"] == {"tokens": 32, "width": 64, "hidden": 128, "layers": 1}
    entries = {f"{entry['name']}, {entry['mode']}": entry for entry in row["entries"]}
    assert entries.keys() == {"ours, eager", "ours, captured", "torch bf16, eager", "te.ops, eager"}
    eager, peer = entries["ours, eager"], entries["torch bf16, eager"]
    assert eager["value"] >= eager["min"] > 0
    assert eager["ratio_to_best_peer"] == eager["value"] / peer["value"]
    assert peer["ratio_to_best_peer"] == 1
    if not torch.cuda.is_available():
        assert "CUDA" in entries["ours, captured"]["error"]
        assert entries["ours, captured"]["value"] is None
    assert eager["of_bound"] == pytest.approx(eager["value"] / row["floor_ms"])
    assert [goal["limit"] for goal in eager["goals"]] == [0.6]
    assert all(entry["value"] > 0 for entry in data["rows"]["gemms"]["entries"])
    assert len(data["goals"]) == len(GOALS)
    table = capsys.readouterr().out
    assert "| goal | measured | met |" in table
    assert "mlp-t512-delayed: ours, eager at most 0.6 of te.ops, eager" in table
    plot.main([str(tmp_path / "cpu.json"), str(tmp_path / "picture.png")])
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    assert run.main([*command, "--append"]) == 0
    assert json.loads((tmp_path / "cpu.json").read_text())["rows"] == data["rows"]
    assert run.main([*command[:4], "--only", "torch bf16, compiled", *command[6:], "--append"]) == 0
    added = json.loads((tmp_path / "cpu.json").read_text())["rows"]["mlp-t512-delayed"]["entries"]
    assert [entry["name"] for entry in added] == [*(entry["name"] for entry in row["entries"]), "torch bf16"]


def _results(path: Path, **values: float) -> Results:
    results = Results(path, keep=False)
    results.row("mlp-t8192-delayed", title="", unit="ms", floor_ms=4.0)
    for name, value in values.items():
        results.record("mlp-t8192-delayed", name, "x", peer=name != "ours", value=value)
    return results


def test_goals_are_judged(tmp_path: Path) -> None:
    rows = _results(tmp_path / "r.json", ours=5.0, one=10.0, other=20.0).data["rows"]
    best = judge(Goal("mlp-t8192-delayed", "ours, x", "the best peer", 0.5), rows)
    assert (best["measured"], best["met"]) == (0.5, True)
    floor = judge(Goal("mlp-t8192-delayed", "ours, x", FLOOR, 1.2), rows)
    assert (floor["measured"], floor["met"]) == (1.25, False)
    missing = judge(Goal("mlp-t8192-delayed", "ours, y", FLOOR, 1.2), rows)
    assert (missing["measured"], missing["met"], missing["note"]) == (None, None, "ours, y: not measured")
    more = judge(Goal("mlp-t8192-delayed", "ours, x", "other, x", 0.25, at_least=True), rows)
    assert (more["measured"], more["met"]) == (0.25, True)


def test_every_goal_names_a_row() -> None:
    assert {goal.row for goal in GOALS} <= ROWS.keys()


def test_floor() -> None:
    """18 t h f FLOPs and 18 th + 12 hf + 16 tf bytes; of layers, the sum."""
    ceiling = {"fp8_fast_tflops": 1e-9, "copy_tb_s": 1e-9}  # one operation and one byte for each millisecond
    assert floor_ms(Mlp(2, 3, 5), ceiling) == pytest.approx(18 * 30 + 18 * 6 + 12 * 15 + 16 * 10)
    assert floor_ms(Mlp(2, 3, 5, layers=4), ceiling) == pytest.approx(4 * floor_ms(Mlp(2, 3, 5), ceiling))
    assert floor_ms(Mlp(2, 3, 5), {"fp8_fast_tflops": None, "copy_tb_s": 1.0}) is None


def test_a_row_that_fails_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What goes wrong outside of a contestant ends its row, not the run."""

    def fail(*_: Any) -> bool:
        raise RuntimeError("broken")

    monkeypatch.setitem(ROWS, "gemms", dataclasses.replace(ROWS["gemms"], measure=fail))
    assert run.main(["--device", "cpu", "--rows", "gemms,kernels", "--only", "nobody", "--out", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "cpu.json").read_text())["rows"]
    assert rows["gemms"]["error"] == "RuntimeError: broken"
    assert rows["gemms"]["done"]
    assert rows["kernels"]["done"]
    assert "error" not in rows["kernels"]


def test_a_lost_device_ends_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The contestant is at fault for good, and the row is not done: a new process measures the others."""

    def broken(device: str) -> None:
        raise RuntimeError("illegal memory access")

    results = Results(tmp_path / "r.json", keep=False)
    results.row("gemms", unit="TFLOP/s", title="")
    monkeypatch.setattr(measure, "synchronize", broken)
    settings = Settings("cpu", only=("up, forward*",))
    with pytest.raises(measure.DeviceLost):
        run_row(ROWS["gemms"], settings, results)
    row = json.loads((tmp_path / "r.json").read_text())["rows"]["gemms"]
    assert row["done"] is False
    assert [(entry["mode"], entry["fatal"]) for entry in row["entries"]] == [("delayed", True)]
    monkeypatch.undo()
    run_row(ROWS["gemms"], settings, results)
    entries = results.row("gemms")["entries"]
    assert [(entry["mode"], entry["value"] is None) for entry in entries] == [("delayed", True), ("block", False)]


def test_a_crash_is_recorded_and_the_rest_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that dies while it measures: its entry says so, and a second process is started."""
    path, statuses = tmp_path / "cpu.json", iter([run.LOST, -11, None, 0])

    def watch(command: list[str], where: Path, stall: float) -> int | None:
        assert command.count("--worker") == 1
        results, status = Results(where, keep=True), next(statuses)
        if status in (-11, None):
            results.begin("mlp-t512-delayed", "ours", f"mode {status}")
        return status

    monkeypatch.setattr(run, "_watch", watch)
    argv = ["--device", "cpu", "--out", str(tmp_path), "--name", "cpu"]
    handler = signal.getsignal(signal.SIGTERM)
    assert run.supervise(run.parse(argv), argv) == 0
    assert signal.getsignal(signal.SIGTERM) is handler
    results = Results(path, keep=True)
    errors = {entry["mode"]: entry["error"] for entry in results.data["rows"]["mlp-t512-delayed"]["entries"]}
    assert errors == {"mode -11": "the process ended with status -11", "mode None": "no result for 450 s"}
    assert results.fatal("mlp-t512-delayed", "ours", "mode -11")


def test_a_process_is_watched(tmp_path: Path) -> None:
    assert run._watch([sys.executable, "-c", "raise SystemExit(3)"], tmp_path / "none.json", 60) == 3
    assert run._watch([sys.executable, "-c", "import time; time.sleep(60)"], tmp_path / "none.json", 0.3) is None


def test_unknown_rows_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run.parse(["--device", "cpu", "--rows", "nothing"])
    assert "no row is called 'nothing'" in capsys.readouterr().err
    assert run.select("goals, mlp-t512-*")[0] == "mlp-t8192-delayed"


@pytest.mark.slow
def test_cold_compilation_is_measured() -> None:
    """In a process of its own, whose errors are those of the row."""
    found = cold("ours", "mlp-t512", "cpu", "reference")
    assert found["value"] > found["second_step"] > 0
    with pytest.raises(RuntimeError, match="exit status"):
        cold("ours", "no such shape", "cpu", "auto")
