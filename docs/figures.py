"""Write the drawings of the pages: ``python docs/figures.py``. The graph is made by the code that it shows."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import functional_te as fte  # noqa: E402
from functional_te.graph.scene import Box, Label, Line, Scene, Text, text_width  # noqa: E402
from functional_te.graph.svg import render  # noqa: E402

IMAGES = Path(__file__).with_name("images")
_ROW = 14


def _box(scene: Scene, x: float, y: float, role: str, lines: Iterable[str]) -> Box:
    """A box around its words; the first line is bold."""
    first, *rest = lines
    texts = (Text(first, bold=True), *(Text(line, "muted") for line in rest))
    width = max(text_width(text.text, text.size) for text in texts) + 16
    box = Box(x, y, width, 13 * len(texts) + 11, role, texts)
    scene.boxes.append(box)
    scene.width, scene.height = max(scene.width, x + width + 16), max(scene.height, y + box.height + 16)
    return box


def _join(scene: Scene, source: Box, target: Box, role: str = "flow", text: str = "", share: float = 0.5) -> None:
    """An arrow from the right side of a box to the left side of another, with words above it."""
    start = (source.x + source.width, source.y + source.height * share)
    end = (target.x, target.y + target.height / 2)
    bend = end[0] - 18
    points = (start, end) if start[1] == end[1] else (start, (bend, start[1]), (bend, end[1]), end)
    scene.lines.append(Line(points, role, arrow=True))
    if text:
        scene.labels.append(Label((start[0] + end[0]) / 2, start[1] - 5, Text(text, "muted"), "middle"))


def _note(scene: Scene, x: float, y: float, text: str) -> None:
    scene.labels.append(Label(x, y, Text(text, "muted")))
    scene.width = max(scene.width, x + text_width(text, 11) + 16)
    scene.height = max(scene.height, y + _ROW)


def values() -> Scene:
    """What goes into a call and what comes out."""
    scene = Scene("a step as functions of values")
    given = [
        _box(scene, 16, 16, "op", ("block", "a chain, a frozen value")),
        _box(scene, 16, 64, "op", ("params", "a dict for each op")),
        _box(scene, 16, 112, "op", ("state", "scales, amaxes, keys")),
        _box(scene, 16, 160, "op", ("x", "[..., features]")),
    ]
    call = _box(scene, 232, 82, "forward", ("fte.vjp", "checks, plans, runs,", "writes to nothing"))
    for box in given:
        _join(scene, box, call)
    out = _box(scene, 412, 16, "op", ("out.output",))
    pull = _box(scene, 412, 91, "backward", ("pullback(dy)",))
    _join(scene, call, out)
    _join(scene, call, pull)
    grads = [_box(scene, 556, 55 + 36 * i, "op", (name,)) for i, name in enumerate(("params", "input", "state"))]
    for box in grads:
        _join(scene, pull, box, "gradient")
    _note(scene, 556, 44, "gradients")
    update = _box(scene, 412, 184, "saved", ("fte.update_state", "the state of the next step"))
    middle = grads[2].x + 24
    scene.lines.append(Line(((middle, 151), (middle, update.y)), "flow", arrow=True))
    return scene


def step() -> Scene:
    """Who reads and who writes the state of delayed scaling within a step."""
    scene = Scene("a training step with delayed scaling")
    scale = _box(scene, 16, 24, "saved", ("scale of step n", "from earlier amaxes"))
    forward = _box(scene, 232, 24, "forward", ("forward", "casts inputs, weights"))
    backward = _box(scene, 430, 24, "backward", ("backward", "casts gradients"))
    close = _box(scene, 584, 96, "saved", ("update_state", "the next scale"))
    _join(scene, scale, forward, text="read")
    _join(scene, forward, backward)
    slot = _box(scene, 232, 96, "op", ("amax_history[0]", "the largest magnitude seen in this step"))
    for box in (forward, backward):
        middle = box.x + 48
        scene.lines.append(Line(((middle, box.y + box.height), (middle, slot.y)), "gradient", arrow=True))
    _join(scene, slot, close, "gradient")
    _note(scene, 16, 156, "A forward that is recomputed, a second call, a microbatch: all read the scale of step n.")
    return scene


def compiled() -> Scene:
    """From a chain to kernels under torch.compile."""
    scene = Scene("how a compiled call runs")
    plan = _box(scene, 16, 16, "op", ("plan", "steps, casts,", "kernels"))
    record = _box(scene, 154, 16, "op", ("recording", "the pipeline runs,", "launches noted"))
    traced = _box(scene, 328, 16, "forward", ("one graph", "one custom op", "for each step"))
    kernels = _box(scene, 478, 16, "forward", ("Inductor", "sees through the ops,", "fuses them"))
    for one, other in ((plan, record), (record, traced), (traced, kernels)):
        _join(scene, one, other)
    _note(scene, 16, 92, "once for every plan and pattern of tensors")
    _note(scene, 328, 92, "in every step")
    return scene


def block_graph() -> Scene:
    """The op graph of a feed-forward block."""
    from functional_te.graph.layout import layout

    block = fte.chain(
        fte.MakeExtraOutput(channel="residual", output_to_caller=False),
        fte.RMSNorm(4096),
        fte.Linear(4096, 2 * 14336, bias=False),
        fte.SwiGLU(),
        fte.Linear(14336, 4096, bias=False),
        fte.AddExtraInput(channel="residual"),
    )
    x = fte.TensorSpec((8192, 4096), torch.bfloat16)
    recipe = fte.recipes.DelayedScaling()
    return layout(fte.graph(block, None, x, recipe=recipe, backend="reference", device="H200"))


FIGURES = {"values": values, "step": step, "compiled": compiled, "graph": block_graph}


def drawing(name: str) -> str:
    """A figure as SVG."""
    return render(FIGURES[name]()) + "\n"


if __name__ == "__main__":
    IMAGES.mkdir(exist_ok=True)
    for name in FIGURES:
        (IMAGES / f"{name}.svg").write_text(drawing(name))
