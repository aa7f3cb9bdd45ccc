"""Differences of graphs."""

from __future__ import annotations

import json

import pytest

import functional_te as fte
from tests.graph.blocks import RECIPES, mlp, spec

BLOCK, X = mlp(64, 96), spec(32, 64)


def _graph(recipe: str = "none", **how: object) -> fte.graph:
    return fte.graph(BLOCK, None, X, recipe=RECIPES[recipe], **how)


def _parts(diff):
    return {(change.part, change.index) for change in diff.changes}


def test_a_graph_does_not_differ_from_itself() -> None:
    diff = _graph("mxfp8").diff(_graph("mxfp8"))
    assert not diff
    assert len(diff) == 0
    assert repr(diff) == "no differences"
    assert "fte-marked" not in diff.to_svg(theme="light")


def test_two_recipes() -> None:
    diff = _graph().diff(_graph("mxfp8"))
    assert {("tensor", 2), ("gradient", 2), ("kept", 2), ("op", 2), ("tensor", 4), ("kept", 4)} <= _parts(diff)
    assert not {part for part in _parts(diff) if part[1] == 3 and part[0] in ("op", "tensor", "kept")}
    text = repr(diff)
    assert "recipe: high precision → MXFP8BlockScaling(" in text
    assert "tensor into 2 BasicLinear 'up': [32, 64] bf16 → [32, 64] E4M3 1x32 ×2, cast by op 1" in text
    assert "2 BasicLinear 'up': nothing → weight cast to E4M3 1x32" in text
    back = _graph("mxfp8").diff(_graph())
    assert {(c.part, c.index, c.before, c.after) for c in back.changes} == {
        (c.part, c.index, c.after, c.before) for c in diff.changes
    }


def test_with_and_without_fusions() -> None:
    diff = _graph(fusions=fte.Fusions()).diff(_graph())
    steps = [change for change in diff.changes if change.part in ("forward", "backward")]
    first = next(change for change in steps if change.part == "forward")
    assert first.what == "forward of 2, 3"
    assert first.before.startswith("BasicLinear of 2 (")
    assert " + SwiGLU of 3 (" in first.before
    assert first.after.startswith("ForwardLinearBiasActivation of 2, 3 (")
    assert not [change for change in diff.changes if change.part in ("op", "kept")]
    edge = next(change for change in diff.changes if change.part == "tensor")
    assert edge.after == "[32, 192] bf16, inside of a fusion"


def test_two_backends() -> None:
    pytest.importorskip("triton", reason="the plan of the Triton backend asks for its record")
    diff = _graph("delayed").diff(_graph("delayed", backend="triton"))
    assert any(change.what == "backend" for change in diff.changes)
    edge = next(change for change in diff.changes if change.part == "tensor")
    assert (edge.before, edge.after) == (
        "[32, 64] E4M3 per tensor, cast by op 1",
        "[32, 64] E4M3 per tensor ×2, cast by op 1",
    )


def test_two_devices_differ_in_time_only() -> None:
    diff = _graph().diff(_graph().on("B200"))
    assert {change.what for change in diff.changes} <= {"device", "time of the forward", "time of the backward"}


def test_two_chains() -> None:
    without = fte.chain(*[op for op in BLOCK.ops if not isinstance(op, fte.Bias)])
    diff = _graph().diff(fte.graph(without, None, X))
    gone = [change for change in diff.changes if change.part == "op"]
    assert [(change.what, change.after) for change in gone] == [("op 5 Bias is gone", "")]
    assert ("forward", 4) in _parts(diff)
    assert not any(change.part == "tensor" and change.index < 5 for change in diff.changes)
    other = fte.graph(without, None, X).diff(_graph())
    assert [change.what for change in other.changes if change.part == "op"] == ["op 5 Bias is new"]


def test_drawn_and_as_a_dict() -> None:
    diff = _graph().diff(_graph("mxfp8"))
    svg = diff.to_svg(theme="light")
    places = {change.index for change in diff.changes if change.part == "kept"}
    assert svg.count("fte-saved fte-marked") == len(places)
    assert "was ForwardLinearBiasActivation" in svg
    assert json.loads(json.dumps(diff.to_dict())) == diff.to_dict()
    assert len(diff.to_dict()["changes"]) == len(diff)


def test_what_is_no_graph_is_refused() -> None:
    with pytest.raises(TypeError, match="diff: other: expected a Graph, got Chain"):
        _graph().diff(BLOCK)
