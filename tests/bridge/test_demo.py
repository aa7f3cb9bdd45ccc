"""The demo: deterministic, resumable bit for bit, honest about its losses."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from bridge.demo import report, train
from bridge.demo.__main__ import main
from bridge.demo.checkpoint import Progress, checkpoint_path
from bridge.demo.data import load_corpus
from bridge.demo.files import write_atomically
from bridge.demo.settings import DEFAULT_RECIPES, RECIPES, Settings

STEPS = 5
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _one_thread():
    """Models this small only wait for a second thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(f"{i} green bottles hanging on the wall; {i * i} of them fell.\n" for i in range(40)))
    return path


@pytest.fixture
def flags(text, tmp_path):
    """Flags of a run that takes a second, into a folder of its own."""

    def make(name="out", recipe="delayed", backend="none", steps=STEPS, **more):
        given = dict(steps=steps, layers=1, width=32, batch=2, context=16, text=text, backend=backend, recipe=recipe)
        arguments = [f"--{key.replace('_', '-')}={value}" for key, value in {**given, **more}.items()]
        return [*arguments, f"--out={tmp_path / name}"]

    return make


def load(out, recipe):
    return torch.load(checkpoint_path(out, recipe), weights_only=True)


def assert_same(a, b):
    """Bitwise equality of nested checkpoint content; wall times are not compared."""
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b)
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a.keys() - {"seconds"}:
            assert_same(a[key], b[key])
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for left, right in zip(a, b, strict=True):
            assert_same(left, right)
    else:
        assert a == b


def interrupt_after(monkeypatch, step, times=1):
    """Have SIGINT arrive while the given step of the loop runs."""
    original = train.Trainer.step

    def interrupted(self):
        loss = original(self)
        if len(self.progress.losses) == step:
            for _ in range(times):
                signal.raise_signal(signal.SIGINT)
        return loss

    monkeypatch.setattr(train.Trainer, "step", interrupted)


class TestRuns:
    def test_writes_table_plot_and_checkpoints(self, flags, tmp_path, capsys):
        assert main(flags(recipe="none,current,delayed")) == 0
        out = tmp_path / "out"
        printed = capsys.readouterr().out
        lines = (out / "table.txt").read_text().splitlines()
        assert lines[0].split("  ")[0] == "run"
        assert all(line in printed for line in lines)
        rows = {line[:14].strip(): line.split() for line in lines[2:5]}
        assert list(rows) == ["high precision", "FP8 current", "FP8 delayed"]
        for recipe, row in zip(DEFAULT_RECIPES, rows.values(), strict=True):
            progress = load(out, recipe)["progress"]
            assert progress["finished"]
            assert len(progress["losses"]) == len(progress["seconds"]) == STEPS
            assert [step for step, _ in progress["held_out"]] == list(range(1, STEPS + 1))
            assert f"{progress['held_out'][-1][1]:.4f}" in row
        image = (out / "loss.png").read_bytes()
        assert image.startswith(b"\x89PNG\r\n\x1a\n")
        assert int.from_bytes(image[16:20]) > 600  # the width, from its header

    @pytest.mark.parametrize("recipe", RECIPES)
    def test_same_seed_same_bits_other_seed_other_bits(self, flags, tmp_path, recipe):
        for name, seed in (("a", 3), ("b", 3), ("c", 4)):
            assert main(flags(name, recipe=recipe, seed=seed)) == 0
        first, second, other = (load(tmp_path / name, recipe) for name in "abc")
        assert_same(first, second)
        assert first["progress"]["losses"][0] != other["progress"]["losses"][0]

    def test_all_recipes(self, flags, tmp_path):
        assert main(flags(recipe="all", steps=2, gap_limit=50)) == 0
        losses = {name: load(tmp_path / "out", name)["progress"]["losses"] for name in RECIPES}
        # power-of-two scales of blocks of 128 and of 32 differ only in what underflows
        assert len({tuple(own) for name, own in losses.items() if name != "mxfp8"}) == len(RECIPES) - 1
        for own in losses.values():
            assert own == pytest.approx(losses["none"], rel=0.05)

    def test_recipes_start_from_the_same_parameters_and_data(self, flags, tmp_path):
        assert main(flags(recipe="none,current", steps=1)) == 0
        high, low = (load(tmp_path / "out", recipe)["progress"]["losses"][0] for recipe in ("none", "current"))
        assert low == pytest.approx(high, rel=0.01)
        assert low != high

    def test_learns(self, flags, tmp_path):
        assert main(flags(recipe="delayed", steps=60)) == 0
        progress = load(tmp_path / "out", "delayed")["progress"]
        assert progress["losses"][0] > 5.0
        assert progress["held_out"][-1][1] < 3.0

    def test_compiled_into_one_graph_each(self, flags, tmp_path, dynamo):
        assert main(flags(backend="aot_eager", steps=4)) == 0
        progress = load(tmp_path / "out", "delayed")["progress"]
        assert (progress["graphs"], progress["graph_breaks"], progress["recompiles"]) == (2, 0, 0)
        assert main(flags("eager", steps=4)) == 0
        eager = load(tmp_path / "eager", "delayed")["progress"]
        assert progress["losses"] == pytest.approx(eager["losses"], rel=1e-3)

    def test_low_precision_saves_less_for_backward(self):
        settings = Settings(layers=1, width=64, batch=8, context=128, backend="none")
        corpus = load_corpus(settings)
        saved = {recipe: train.saved_for_backward(settings, recipe, corpus) for recipe in RECIPES}
        assert saved["current"] < saved["none"]
        assert saved["delayed"] == pytest.approx(saved["current"], rel=0.01)
        assert saved["block"] < saved["none"]
        assert saved["current"] < saved["mxfp8"] < 1.1 * saved["current"]  # a byte of scale per 32 elements
        assert saved["nvfp4"] < saved["current"]


class TestInterrupts:
    @pytest.mark.parametrize(("step", "times"), [(1, 1), (2, 1), (3, 2)], ids=["compiling", "once", "twice"])
    @pytest.mark.parametrize("recipe", [*DEFAULT_RECIPES, "nvfp4"])
    def test_resumes_bit_for_bit(self, flags, tmp_path, monkeypatch, capsys, recipe, step, times):
        assert main(flags("whole", recipe=recipe)) == 0
        with monkeypatch.context() as patch:
            interrupt_after(patch, step, times)
            assert main(flags("cut", recipe=recipe)) == 130
        assert "--resume" in capsys.readouterr().out
        kept = load(tmp_path / "cut", recipe)["progress"]
        assert not kept["finished"]
        # a second Ctrl-C, or one before the first step is done, leaves the checkpoint of the start
        assert len(kept["losses"]) == (2 if (step, times) == (2, 1) else 0)
        assert main(["--resume", f"--out={tmp_path / 'cut'}"]) == 0
        assert_same(load(tmp_path / "whole", recipe), load(tmp_path / "cut", recipe))
        assert (tmp_path / "cut" / "loss.png").exists()

    def test_finished_runs_are_kept_and_later_ones_continue(self, flags, tmp_path, monkeypatch):
        with monkeypatch.context() as patch:
            original = train.Trainer.step

            def interrupted(self):
                loss = original(self)
                if self.recipe == "delayed" and len(self.progress.losses) == 2:
                    signal.raise_signal(signal.SIGINT)
                return loss

            patch.setattr(train.Trainer, "step", interrupted)
            assert main(flags(recipe="none,delayed,current")) == 130
        before = checkpoint_path(tmp_path / "out", "none").read_bytes()
        assert not checkpoint_path(tmp_path / "out", "current").exists()
        assert main(["--resume", f"--out={tmp_path / 'out'}"]) == 0
        assert checkpoint_path(tmp_path / "out", "none").read_bytes() == before
        assert all(load(tmp_path / "out", recipe)["progress"]["finished"] for recipe in DEFAULT_RECIPES)

    @pytest.mark.skipif(os.name != "posix", reason="sends a POSIX signal to another process")
    def test_sigint_to_a_process(self, flags, tmp_path):
        command = [sys.executable, "-m", "bridge.demo", *flags(steps=5000)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(
            command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        path = checkpoint_path(tmp_path / "out", "delayed")
        try:
            while process.poll() is None and not (path.exists() and load(path.parent, "delayed")["progress"]["losses"]):
                time.sleep(0.05)
            process.send_signal(signal.SIGINT)
            printed, _ = process.communicate(timeout=120)
        finally:
            process.kill()
            process.wait()
        assert process.returncode == 130
        assert "interrupted" in printed
        progress = load(tmp_path / "out", "delayed")["progress"]
        assert 50 <= len(progress["losses"]) < 5000
        assert not list((tmp_path / "out").glob(".*"))  # no temporary file is left

    def test_handler_is_put_back(self, flags):
        before = signal.getsignal(signal.SIGINT)
        assert main(flags(steps=1)) == 0
        assert signal.getsignal(signal.SIGINT) is before

    @pytest.mark.slow
    @pytest.mark.parametrize("recipe", ["current", "delayed"])
    def test_compiled_run_resumes_bit_for_bit(self, flags, tmp_path, monkeypatch, dynamo, recipe):
        assert main(flags("whole", recipe=recipe, backend="inductor")) == 0
        with monkeypatch.context() as patch:
            interrupt_after(patch, 2)
            assert main(flags("cut", recipe=recipe, backend="inductor")) == 130
        assert main(["--resume", f"--out={tmp_path / 'cut'}"]) == 0
        assert_same(load(tmp_path / "whole", recipe), load(tmp_path / "cut", recipe))


def progress_with(recipe, held_out):
    return Progress(recipe, [2.0, 1.5], [0.1, 0.1], [[2, held_out]], 10, 2, 0, 0, True)


class TestVerdict:
    def test_exit_status_when_the_gap_exceeds_the_limit(self, flags, tmp_path, capsys):
        assert main(flags(recipe="none,current", gap_limit=0)) == 1
        assert "NOT within 0 %" in capsys.readouterr().out
        assert "NOT within 0 %" in (tmp_path / "out" / "table.txt").read_text()

    @pytest.mark.parametrize(
        ("held_out", "good"),
        [(2.0, True), (2.039, True), (1.961, True), (2.041, False), (1.9, False), (math.nan, False)],
    )
    def test_limit_is_two_sided_and_nan_is_out(self, held_out, good):
        runs = [progress_with("none", 2.0), progress_with("delayed", held_out)]
        found, sentence = report.verdict(runs, 2.0)
        assert found is good
        assert ("NOT" in sentence) is not good

    def test_one_bad_run_is_enough_and_is_named(self):
        runs = [progress_with("none", 2.0), progress_with("current", 2.2), progress_with("delayed", 2.0)]
        good, sentence = report.verdict(runs, 2.0)
        assert not good
        assert "FP8 current (+10.00 %)" in sentence
        assert "delayed" not in sentence

    def test_without_high_precision_there_is_no_gap(self):
        good, sentence = report.verdict([progress_with("delayed", 9.0)], 2.0)
        assert good
        assert "--recipe none" in sentence
        assert report.gap_percent(progress_with("delayed", 9.0), []) is None

    def test_final_losses_by_hand(self):
        run = Progress("none", [float(i) for i in range(30)], held_out=[[15, 9.0], [30, 7.0]])
        assert report.final_losses(run) == (sum(range(10, 30)) / 20, 7.0)

    def test_plot_of_nan_losses(self, tmp_path):
        report.plot([progress_with("none", 2.0), progress_with("current", math.nan)], tmp_path / "p.png", 2.0)
        assert (tmp_path / "p.png").stat().st_size > 1000


class TestBadUse:
    @pytest.mark.parametrize(
        ("arguments", "wanted"),
        [
            (["--steps=0"], "--steps"),
            (["--steps=many"], "--steps"),
            (["--layers=-1"], "--layers"),
            (["--width=33"], "multiple of 32"),
            (["--batch=0"], "--batch"),
            (["--context=1"], "--context"),
            (["--seed=-1"], "--seed"),
            (["--recipe=fp4"], "'fp4'"),
            (["--recipe="], "--recipe"),
            (["--device=nowhere"], "--device"),
            (["--device=meta"], "--device"),
            (["--backend=magic"], "--backend"),
            (["--gap-limit=nan"], "--gap-limit"),
            (["--text=/no/such/file"], "--text"),
            (["--what"], "--what"),
            (["--resume"], "nothing to resume"),
        ],
    )
    def test_is_one_line_and_leaves_no_folder(self, arguments, wanted, tmp_path, capsys):
        assert main([*arguments, f"--out={tmp_path / 'out'}"]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith("error: ")
        assert captured.err.count("\n") == 1
        assert wanted in captured.err
        assert not (tmp_path / "out").exists()

    def test_text_too_short_says_what_is_needed(self, tmp_path, capsys):
        short = tmp_path / "short"
        needed = 10 * (2 * 16 + 1) + 1
        for size, status in ((needed - 20, 2), (needed, 0)):
            short.write_bytes(b"a" * size)
            found = main([f"--text={short}", "--batch=2", "--context=16", "--width=32", "--layers=1", "--steps=1",
                          "--recipe=none", "--backend=none", f"--out={tmp_path / 'out'}"])  # fmt: skip
            assert found == status
            if status:
                assert f"at least {needed} needed" in capsys.readouterr().err

    def test_out_is_a_file(self, flags, tmp_path, capsys):
        (tmp_path / "out").write_text("here first")
        assert main(flags()) == 2
        assert capsys.readouterr().err.startswith("error: --out")
        assert (tmp_path / "out").read_text() == "here first"

    def test_resume_with_another_setting_or_text(self, flags, tmp_path, text, capsys):
        assert main(flags(steps=1)) == 0
        out = f"--out={tmp_path / 'out'}"
        assert main(["--resume", "--steps=2", out]) == 2
        assert "has --steps 1, not 2" in capsys.readouterr().err
        settings = tmp_path / "out" / "settings.json"
        known = json.loads(settings.read_text())
        settings.write_text(json.dumps({**known, "digest": "0"}))
        assert main(["--resume", out]) == 2
        assert "text has changed" in capsys.readouterr().err
        settings.write_text("{")
        assert main(["--resume", out]) == 2
        assert "cannot read" in capsys.readouterr().err

    def test_damaged_checkpoint(self, flags, tmp_path, capsys):
        assert main(flags(steps=1)) == 0
        checkpoint_path(tmp_path / "out", "delayed").write_bytes(b"not a checkpoint")
        capsys.readouterr()
        assert main(["--resume", f"--out={tmp_path / 'out'}"]) == 2
        assert capsys.readouterr().err.startswith("error: --resume: cannot read")


def test_what_draws_is_missed_before_training(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(train, "run", lambda *args, **kwargs: pytest.fail("it trains"))
    assert main(["--out", str(tmp_path / "run")]) == 2
    assert "matplotlib is not installed; pip install 'functional_te[demo]'" in capsys.readouterr().err


def test_an_interrupted_write_keeps_the_old_file(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")

    def half(temporary):
        temporary.write_text("ne")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_atomically(path, half)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_corpus_is_split_without_overlap(text):
    settings = Settings(text=str(text), batch=2, context=16)
    corpus = load_corpus(settings)
    raw = text.read_bytes()
    assert bytes(corpus.train.tolist()) == raw[: len(raw) - len(raw) // 10]
    tail = raw[len(raw) - len(raw) // 10 :]
    windows = corpus.held_out.flatten(0, 1)
    for i, window in enumerate(windows.tolist()):
        assert bytes(window) == tail[16 * i : 16 * i + 17]
    sample = corpus.sample(3, 16, torch.Generator().manual_seed(0))
    assert sample.shape == (3, 17)
    assert all(bytes(row) in raw for row in sample.tolist())


def test_default_text_is_python_s_help():
    corpus = load_corpus(Settings())
    assert len(corpus.train) > 300_000
    assert b"statement" in bytes(corpus.train.tolist())
