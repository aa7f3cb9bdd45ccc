"""Text, dicts, flowcharts and drawings of graphs."""

from __future__ import annotations

import copy
import itertools
import json
import pickle
import re
import subprocess
import sys
from xml.etree import ElementTree

import pytest
import torch

import functional_te as fte
from functional_te.graph.collapse import Segment, segments
from functional_te.graph.layout import layout
from functional_te.graph.scene import cut, text_width, wrapped
from functional_te.graph.units import bytes_text, flops_text, time_text
from tests.graph.blocks import RECIPES, mlp, spec, stack

SVG = "{http://www.w3.org/2000/svg}"


def _wordy() -> fte.Chain:
    """Everything that has a long name, and channels that cross."""
    long = "a projection whose name is much longer than any box of a drawing is wide"
    return fte.chain(
        fte.MakeExtraOutput(channel="one", output_to_caller=True),
        fte.MakeExtraOutput(channel="two", output_to_caller=False),
        fte.AdaptiveLayerNorm(512),
        fte.Linear(512, 512, name=long),
        fte.AddExtraInput(channel="one"),
        fte.GELU(cache_quantized_input=True),
        fte.AddExtraInput(channel="two"),
        fte.Quantize(backward=True, name=long),
        fte.Reshape((-1, 8, 64)),
    )


def _hybrid(role):
    return fte.HybridQuantizer(
        rowwise_quantizer=fte.MXFP8Quantizer(dtype=torch.float8_e4m3fn),
        columnwise_quantizer=fte.Float8CurrentScalingQuantizer(dtype=torch.float8_e5m2),
    )


def _graphs():
    grouped = fte.chain(fte.GroupedLinear(8, 64, 128), fte.ScaledSwiGLU(), fte.GroupedLinear(8, 64, 64))
    splits = fte.TensorSpec((8,), torch.int64)
    custom = fte.recipes.CustomRecipe(_hybrid)
    return {
        "mlp": fte.graph(mlp(64, 96), None, spec(32, 64), recipe=RECIPES["delayed"]),
        "deep": fte.graph(stack(25), None, spec(32, 64), recipe=RECIPES["nvfp4"]),
        "wordy": fte.graph(_wordy(), None, spec(3, 64, 512), spec(3, 512), spec(3, 512), recipe=custom),
        "grouped": fte.graph(grouped, None, spec(32, 64), splits, fte.TensorSpec((32,), torch.float32), splits),
        "broken": fte.graph([fte.RMSNorm(64), fte.Linear(64, 96), fte.Linear(64, 64)], None, spec(8, 64)),
        "nothing": fte.graph([fte.RMSNorm(63)], None, spec(8, 64)),
        "op": fte.graph(fte.GELU(), None, spec(8, 64), requires_grad=False),
    }


GRAPHS = _graphs()
assert [name for name, graph in GRAPHS.items() if graph.error] == ["broken", "nothing"]
DIFF = GRAPHS["mlp"].diff(fte.graph(mlp(64, 96), None, spec(32, 64), fusions=fte.Fusions()))


def _overlap(one, other) -> bool:
    apart = one.x + one.width <= other.x or other.x + other.width <= one.x
    return not (apart or one.y + one.height <= other.y or other.y + other.height <= one.y)


def _extent(label) -> tuple[float, float]:
    width = text_width(label.text.text, label.text.size)
    left = {"start": label.x, "middle": label.x - width / 2, "end": label.x - width}[label.anchor]
    return left, left + width


def _check(scene) -> None:
    boxes = [box for box in scene.boxes if not box.role.startswith("bar-")]
    for one, other in itertools.combinations(boxes, 2):
        assert not _overlap(one, other), (one, other)
    for box in scene.boxes:
        assert box.x >= 0
        assert box.y >= 0
        assert box.x + box.width <= scene.width
        assert box.y + box.height <= scene.height
        assert 3 + 13 * len(box.lines) <= box.height, box
        for text in box.lines:
            assert text_width(text.text, text.size) <= box.width - 16 + 1, text
    places = [(*_extent(label), label.y) for label in scene.labels]
    for (left, right, y), label in zip(places, scene.labels, strict=True):
        assert left >= 0, label
        assert right <= scene.width, label
        assert 0 < y < scene.height, label
    for (l0, r0, y0), (l1, r1, y1) in itertools.combinations(places, 2):
        assert r0 <= l1 or r1 <= l0 or abs(y0 - y1) >= 10
    for (left, right, y), box in itertools.product(places, boxes):
        inside = box.x < right and left < box.x + box.width and box.y < y - 2 and y - 8 < box.y + box.height
        assert not inside, (left, right, y, box)
    for line in scene.lines:
        assert all(0 <= x <= scene.width and 0 <= y <= scene.height for x, y in line.points), line


@pytest.mark.parametrize("collapse", [True, False])
@pytest.mark.parametrize("name", GRAPHS)
def test_nothing_overlaps_or_leaves_its_box(name, collapse) -> None:
    _check(layout(GRAPHS[name], collapse=collapse))


def test_nothing_overlaps_in_the_drawing_of_differences() -> None:
    _check(layout(DIFF.after, marks=DIFF._marks(), notes=DIFF._notes()))


@pytest.mark.parametrize("theme", ["auto", "light", "dark"])
@pytest.mark.parametrize("name", GRAPHS)
def test_drawings_are_well_formed_and_self_contained(name, theme) -> None:
    svg = GRAPHS[name].to_svg(theme=theme)
    root = ElementTree.fromstring(svg)
    assert root.tag == f"{SVG}svg"
    assert "http" not in svg.replace("http://www.w3.org/2000/svg", "")
    assert ("<style>" in svg) == (theme == "auto")
    page = next(node for node in root.iter(f"{SVG}rect"))
    assert page.get("fill") == ("#0d1117" if theme == "dark" else "#ffffff")
    drawn = {node.text for node in root.iter(f"{SVG}text")}
    for op in GRAPHS[name].ops if len(GRAPHS[name].ops) < 12 else ():
        title = f"{op.index} {op.kind}"
        assert any(text and text.startswith(title) for text in drawn), title


def test_every_colour_has_a_dark_twin() -> None:
    svg = GRAPHS["wordy"].to_svg()
    used = {name for names in re.findall(r'class="([^"]+)"', svg) for name in names.split()}
    style = re.search(r"<style>(.*)</style>", svg).group(1)
    assert style.startswith("@media (prefers-color-scheme:dark)")
    assert {name for name in used if f".{name}{{" not in style} == set()


def test_drawings_are_as_dark_as_the_page_they_are_in() -> None:
    svg = GRAPHS["mlp"].to_svg()
    style = svg[svg.index("<style>") : svg.index("</style>")]
    viewer, dark, light = re.split(r":is\([^)]*\)", style)
    assert ".fte-page{fill:#0d1117" in viewer
    assert ".fte-page{fill:#0d1117" in dark
    assert ".fte-page{fill:#ffffff" in light
    used = set(re.findall(r'class="([^"]+)"', svg[svg.index("</style>") :]))
    for names in used:
        for name in names.split():
            assert f".{name}{{" in dark
            assert f".{name}{{" in light


def test_unknown_themes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"to_svg: theme: expected one of \['auto', 'light', 'dark'\], got 'blue'"):
        GRAPHS["op"].to_svg(theme="blue")


def test_blocks_that_repeat_are_shown_once() -> None:
    graph = GRAPHS["deep"]
    found = segments(graph)
    assert found == (Segment(0, 3, 1), Segment(3, 7, 24), Segment(99, 100, 1))
    assert sum(own.end - own.start for own in found) == 100
    assert layout(graph).height < layout(graph, collapse=False).height / 8
    assert "ops 3-6 come 24 times, to 98" in repr(graph)
    assert len(repr(graph).splitlines()) < 25
    assert "ops 3 to 6 come 24 times, to op 98" in graph.to_svg()
    assert 'more3["ops 3 to 6, 24 times"]' in graph.to_mermaid()
    assert segments(graph, False) == (Segment(0, 100, 1),)
    assert 'o98["' in graph.to_mermaid(collapse=False)


def test_what_differs_is_not_taken_for_a_repetition() -> None:
    ops = list(stack(25).ops)
    ops[41] = fte.BasicLinear(64, 128, name="special")
    found = segments(fte.graph(fte.chain(*ops), None, spec(32, 64)))
    shown = {index for own in found for index in range(own.start, own.stop)}
    assert 41 in shown
    assert sum(own.end - own.start for own in found) == 100
    assert len(shown) < 30


def test_text() -> None:
    text = repr(GRAPHS["mlp"])
    lines = text.splitlines()
    assert lines[0] == "7 ops, DelayedScaling, reference kernels"
    assert "kept for the backward" in lines[1]
    assert re.search(r"2 BasicLinear 'up' +\(\[32, 192\] bf16\) .*┌ LinearBiasActivation .* launch +└", text)
    assert "6 AddExtraInput ← residual" in text
    assert "cast to E5M2 per tensor, scale kept between steps: grad_output of 2, 4" in text
    assert all(len(line) < 160 for line in lines)


@pytest.mark.parametrize("name", GRAPHS)
def test_dicts_are_json(name) -> None:
    graph = GRAPHS[name]
    found = graph.to_dict()
    assert json.loads(json.dumps(found)) == found
    assert found["schema"] == 1
    assert set(found) == {
        "schema", "recipe", "backend", "device", "ops", "forward", "backward", "edges", "outputs", "refusals",
        "totals", "error",
    }  # fmt: skip
    assert found["totals"]["saved_bytes"] == graph.saved_bytes
    total = sum(step["seconds"] for step in found["forward"])
    assert total == pytest.approx(found["totals"]["forward_seconds"])
    assert all(sum(k["read"] for k in step["kernels"]) == step["read_bytes"] for step in found["forward"])


@pytest.mark.parametrize("name", GRAPHS)
def test_graphs_are_plain_values(name) -> None:
    assert pickle.loads(pickle.dumps(GRAPHS[name])) == GRAPHS[name]
    assert copy.deepcopy(GRAPHS[name]) == GRAPHS[name]


@pytest.mark.parametrize("name", GRAPHS)
def test_flowcharts_name_only_what_they_draw(name) -> None:
    chart = GRAPHS[name].to_mermaid()
    lines = [line.strip() for line in chart.splitlines()]
    assert lines[0] == "flowchart TB"
    nodes = set(re.findall(r"^(?:\w+ ==> )?(\w+)(?=[\[(])", "\n".join(lines), flags=re.M))
    nodes |= set(re.findall(r"(\w+)\(\[", chart))
    for line in lines:
        for end in re.findall(r"^(\w+) (?:-->|-\.->|==>)|(?:\| |==> )(\w+)(?:$|\()", line):
            assert (end[0] or end[1]) in nodes, line
    assert chart.count("subgraph ") == lines.count("end")
    for label in re.findall(r'\["(.*)"\]', chart):
        assert '"' not in label


def test_networkx() -> None:
    networkx = pytest.importorskip("networkx", reason="an extra: functional_te[notebook]")
    graph = GRAPHS["mlp"]
    net = graph.to_networkx()
    assert set(net.nodes) == {*range(7), "input", "output"}
    assert nodes_on_path(networkx, net, "main") == ["input", *range(7), "output"]
    assert nodes_on_path(networkx, net, "gradient") == ["output", *reversed(range(7)), "input"]
    (extra,) = [(u, v, data) for u, v, data in net.edges(data=True) if data["kind"] == "extra"]
    assert (extra[0], extra[1], extra[2]["channel"]) == (0, 6, "residual")
    assert net.nodes[3]["forward"] == net.nodes[2]["forward"]
    assert net.graph["totals"]["saved_bytes"] == graph.saved_bytes
    assert "extra input 0" in GRAPHS["grouped"].to_networkx()


def nodes_on_path(networkx, net, kind):
    only = networkx.DiGraph([(u, v) for u, v, data in net.edges(data=True) if data["kind"] == kind])
    return list(networkx.topological_sort(only))


def test_networkx_that_is_not_there(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "networkx", None)
    with pytest.raises(ImportError, match=r"^to_networkx needs networkx: pip install 'functional_te\[notebook\]'$"):
        GRAPHS["op"].to_networkx()


@pytest.mark.parametrize("shown", [GRAPHS["mlp"], GRAPHS["broken"], DIFF], ids=["graph", "broken", "diff"])
def test_what_notebooks_get(shown) -> None:
    bundle = shown._repr_mimebundle_()
    assert set(bundle) == {"text/html", "image/svg+xml", "text/plain"}
    assert bundle["image/svg+xml"].startswith("<svg ")
    assert bundle["text/plain"] == repr(shown)
    # what is left when a viewer drops drawings
    rest = re.sub(r"<svg.*?</svg>", "", bundle["text/html"], flags=re.S)
    assert "<table>" in rest
    ElementTree.fromstring(f"<div>{bundle['text/html']}</div>")
    assert set(shown._repr_mimebundle_(include=["text/plain"])) == {"text/plain"}
    assert set(shown._repr_mimebundle_(exclude={"text/html"})) == {"image/svg+xml", "text/plain"}


def test_nothing_is_imported_before_it_is_used() -> None:
    code = """
import sys, functional_te as fte, torch
made = [n for n in sys.modules if n.startswith("functional_te.graph.")]
assert not made, made
assert callable(fte.graph)
import functional_te.graph.value
assert fte.graph(fte.GELU(), None, fte.TensorSpec((2, 4), torch.float32)).ops
from functional_te.graph import DEVICES, Graph
assert not {"matplotlib", "networkx", "treescope", "IPython"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=200)


def test_units() -> None:
    assert [bytes_text(n) for n in (0, 999, 1000, 470_000_000, 999_999_999)] == [
        "0 B", "999 B", "1.00 kB", "470 MB", "1.00 GB",
    ]  # fmt: skip
    assert [time_text(s) for s in (0, 3e-6, 1.392e-3, 0.5, 2)] == ["0", "3.0 µs", "1.39 ms", "500 ms", "2.00 s"]
    assert [flops_text(n) for n in (None, 512, 1_924_145_348_608)] == ["? FLOP", "512 FLOP", "1.92 TFLOP"]
    assert cut("abcdef", text_width("abcd", 10), 10) == "abc…"
    assert wrapped("to be or not", text_width("to be or", 10), 10) == ["to be or", "not"]
    assert wrapped("x" * 20, text_width("x" * 9, 10), 10) == ["x" * 9, "x" * 9, "xx"]
