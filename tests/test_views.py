"""Plots and trees show the values that they were given."""

from __future__ import annotations

import io
import subprocess
import sys
import time

import pytest
import torch

import functional_te as fte
from functional_te import views
from tests.graph.blocks import RECIPES, mlp, spec

BLOCK = mlp(64, 96)
DELAYED = fte.recipes.DelayedScaling(amax_history_len=4)


def _run(steps: int = 3):
    params, state = fte.init(BLOCK), fte.init_state(BLOCK, DELAYED)
    history, states, amaxes = [], [], []
    for step in range(steps):
        x = torch.randn(32, 64) * (step + 1)
        history.append(fte.numerics(BLOCK, params, x, recipe=DELAYED, state=state))
        out, pullback = fte.vjp(BLOCK, params, x, recipe=DELAYED, state=state)
        seen = pullback(torch.ones_like(out.output)).state
        amaxes.append(float(seen[2]["grad_output"].amax_history[0]))
        state = fte.update_state(BLOCK, DELAYED, seen)
        states.append(state)
    return params, history, states, amaxes


PARAMS, HISTORY, STATES, AMAXES = _run()


def _drawn(view) -> None:
    assert view._repr_png_().startswith(b"\x89PNG")
    assert "a plot" in repr(view)


@pytest.mark.parametrize("measure", ["snr_db", "underflow", "amax"])
def test_numerics(measure) -> None:
    pytest.importorskip("matplotlib", reason="an extra: functional_te[notebook]")
    assert views.numerics(HISTORY[0], measure=measure).figure.axes[0].images[0].get_array().shape[1] == 1
    view = views.numerics(HISTORY, measure=measure)
    (image,) = view.figure.axes[0].images
    for column, step in enumerate(HISTORY):
        for row, entry in enumerate(step):
            value = getattr(entry, measure)
            expected = value.log2() if measure == "amax" else value
            assert image.get_array()[row, column] == pytest.approx(float(expected))
    assert view.figure.axes[0].get_yticklabels()[0].get_text() == "2 BasicLinear, input (rowwise)"
    _drawn(view)


def test_amaxes() -> None:
    pytest.importorskip("matplotlib", reason="an extra: functional_te[notebook]")
    view = views.amaxes(STATES)
    upper, lower = view.figure.axes
    lines = {line.get_label(): list(line.get_ydata()) for line in upper.lines}
    assert set(lines) == {f"op {i}, {role}" for i in (2, 4) for role in ("input", "weight", "grad_output")}
    assert lines["op 2, grad_output"] == pytest.approx(AMAXES)
    assert list(lower.lines[0].get_ydata()) == pytest.approx([float(s[2]["input"].scale[0]) for s in STATES])
    _drawn(view)


def test_memory_and_recipes() -> None:
    pytest.importorskip("matplotlib", reason="an extra: functional_te[notebook]")
    graphs = {name: fte.graph(BLOCK, None, spec(32, 64), recipe=RECIPES[name]) for name in ("none", "mxfp8")}
    view = views.memory(graphs)
    for bars, graph in zip(view.figure.axes[0].containers, graphs.values(), strict=True):
        assert sum(bar.get_width() for bar in bars) == pytest.approx(graph.saved_bytes / 1e6)
    _drawn(view)
    _drawn(views.memory(graphs["none"]))
    view = views.recipes(graphs)
    forward, backward = view.figure.axes[0].containers
    for bar, more, graph in zip(forward, backward, graphs.values(), strict=True):
        assert bar.get_width() + more.get_width() == pytest.approx(graph.time() * 1e3)
    _drawn(view)


def test_trees() -> None:
    pytest.importorskip("treescope", reason="an extra: functional_te[notebook]")
    cast = fte.quantize(torch.ones(4, 32), fte.MXFP8Quantizer(dtype=torch.float8_e4m3fn))
    shown = views.tree({"params": PARAMS[2], "state": STATES[0][2], "cast": cast, "meta": torch.ones(2, device="meta")})
    text = repr(shown)
    assert "float32[192, 64] cpu in [-0.125, 0.125], mean" in text
    assert "DelayedScalingState(" in text
    assert "float8_e4m3fn[4, 32] cpu in [" in text
    assert "float32[2] meta" in text
    assert "<" in shown._repr_html_()
    bad = views.tree(torch.tensor([1.0, float("nan"), float("inf")]))
    assert "2 not finite" in repr(bad)


CALLS = {
    "numerics": ("matplotlib", lambda: views.numerics(HISTORY)),
    "amaxes": ("matplotlib", lambda: views.amaxes(STATES)),
    "memory": ("matplotlib", lambda: views.memory(fte.graph(fte.GELU(), None, spec(2, 4)))),
    "recipes": ("matplotlib", lambda: views.recipes({"one": fte.graph(fte.GELU(), None, spec(2, 4))})),
    "tree": ("treescope", lambda: views.tree(PARAMS)),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_package_that_is_missing_is_named_in_one_line(name, monkeypatch) -> None:
    package, call = CALLS[name]
    for module in (package, f"{package}.figure"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError) as caught:
        call()
    assert str(caught.value) == f"views.{name} needs {package}: pip install 'functional_te[notebook]'"


def test_bad_input() -> None:
    with pytest.raises(ValueError, match=r"views\.numerics: measure: expected one of \['amax', .*got 'snr'"):
        views.numerics(HISTORY, measure="snr")
    with pytest.raises(
        ValueError, match=r"views\.numerics: history: expected at least one step with casts, got 0 steps"
    ):
        views.numerics([])
    with pytest.raises(ValueError, match="the same casts in every step"):
        views.numerics([HISTORY[0], HISTORY[0][2]])
    with pytest.raises(ValueError, match=r"views\.amaxes: states: expected states of delayed scaling, got 1 without"):
        views.amaxes([({},)])
    with pytest.raises(TypeError, match=r"views\.memory: graphs: expected graphs by name, got list"):
        views.memory([])
    with pytest.raises(TypeError, match=r"views\.recipes: graphs: expected graphs by name"):
        views.recipes({"one": BLOCK})


def test_nothing_is_imported_before_a_view_is_made() -> None:
    code = "import sys; from functional_te import views; assert not {'matplotlib', 'treescope'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=200)


def test_progress_goes_through_the_steps(capsys) -> None:
    assert list(views.progress(range(3), "training")) == [0, 1, 2]
    assert capsys.readouterr() == ("", "")  # a short loop, and no terminal


def test_progress_shows_how_far_a_loop_is(monkeypatch) -> None:
    tqdm = pytest.importorskip("tqdm.auto", reason="an extra: functional_te[notebook]")
    shown = io.StringIO()
    shown.isatty = lambda: True
    bar = views.progress(range(4), "training")
    assert isinstance(bar, tqdm.tqdm)
    monkeypatch.setattr(sys, "stderr", shown)
    for step in views.progress(range(4), "training"):
        if step == 0:
            time.sleep(1.2)  # then it is worth a bar
    assert "training" in shown.getvalue()
    assert "4 [" in shown.getvalue()


def test_progress_without_tqdm_is_the_loop_itself(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    steps = range(3)
    assert views.progress(steps) is steps
