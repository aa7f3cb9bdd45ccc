"""Where everything of a drawing goes: a row for each op, and what runs forward, backward and is kept beside it.

The ops stand in the order of the chain. A step is a box that is as tall as the rows that it covers, forward steps on
the left and backward steps on the right, so that the two layouts of fusions can be compared row by row.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from functional_te.graph.collapse import Segment, segments
from functional_te.graph.roofline import substituted
from functional_te.graph.scene import Box, Label, Line, Scene, Text, cut, wrapped
from functional_te.graph.text import headline, op_title, step_time, summary
from functional_te.graph.units import bytes_text, dtype_text, flops_text, shape_text, tensor_text, time_text
from functional_te.graph.value import Edge, Graph, OpNode, Step

__all__ = ["Marks", "layout"]

# what is marked: ("op", index), ("forward" or "backward", index), ("edge forward" or "edge backward", target),
# ("saved", index) -> what it was before
Marks = Mapping[tuple[str, int], str]

_PAD, _SIDE, _SPINE, _KEPT, _SPACE, _LANE = 16.0, 251.0, 352.0, 224.0, 18.0, 12.0
_ROW, _GAP, _LINE, _INSET = 66.0, 46.0, 13.0, 8.0
_SMALL = 10.5  # the smallest letters; see SHRINK in html.py
_MOST_NOTES = 14


class _Page:
    """The places of rows and columns, and the scene that is filled."""

    def __init__(self, graph: Graph, collapse: bool, marks: Marks) -> None:
        self.graph, self.marks = graph, marks
        self.shown = segments(graph, collapse, lambda index: tuple(key for key in sorted(marks) if key[1] == index))
        self.rows = [index for own in self.shown for index in range(own.start, own.stop)]
        self.lanes = _lanes(graph, set(self.rows))
        gutter = _SPACE + _LANE * (1 + max(self.lanes.values(), default=-1))
        self.forward = _PAD
        self.spine = self.forward + _SIDE + gutter
        self.backward = self.spine + _SPINE + _SPACE
        self.kept = self.backward + _SIDE + _SPACE
        self.middle = self.spine + _SPINE / 2
        self.scene = Scene(f"{headline(graph)}. {summary(graph)}")
        self.scene.width = self.kept + _KEPT + _PAD
        self.top: dict[int, float] = {}
        self.height: dict[int, float] = {}
        times = [step_time(graph, step).seconds for step in graph.steps]
        self.slowest = max(times, default=0.0)

    def label(self, x: float, y: float, text: str, **how: Any) -> None:
        anchor, tip = how.pop("anchor", "start"), how.pop("tip", "")
        self.scene.labels.append(Label(x, y, Text(text, **how), anchor, tip))


def layout(graph: Graph, *, collapse: bool = True, marks: Marks | None = None, notes: tuple[str, ...] = ()) -> Scene:
    """The drawing of a graph.

    Args:
        graph: the graph.
        collapse: whether blocks that repeat are drawn once.
        marks: what stands out.
        notes: lines below the title.
    """
    page = _Page(graph, collapse, marks or {})
    y = _head(page, notes)
    y = _place_rows(page, y)
    for index in page.rows:
        _op(page, graph.ops[index])
    for step in graph.steps:
        _step(page, step)
    for edge in graph.edges:
        _edge(page, edge)
    _channels(page)
    _foot(page, y)
    return page.scene


# ---- top, rows, bottom ----


def _head(page: _Page, notes: tuple[str, ...]) -> float:
    width = page.scene.width - 2 * _PAD
    page.label(_PAD, 28, cut(headline(page.graph), width, 15), size=15, bold=True, tip=page.graph.recipe)
    y = 46.0
    for line in wrapped(summary(page.graph), width, 11.5):
        page.label(_PAD, y, line, size=11.5, role="muted")
        y += 16
    for note in notes[:_MOST_NOTES]:
        page.label(_PAD, y, cut(note, width, 11), role="mark", tip=note)
        y += 15
    if len(notes) > _MOST_NOTES:
        page.label(_PAD, y, f"and {len(notes) - _MOST_NOTES} more", role="mark")
        y += 15
    y += 14
    page.label(page.forward, y, "forward ↓", bold=True)
    page.label(page.spine, y, "ops, tensors and gradients", bold=True)
    page.label(page.backward, y, "backward ↑", bold=True)
    page.label(page.kept, y, "kept for the backward", bold=True)
    return y + 10


def _place_rows(page: _Page, y: float) -> float:
    y += _GAP
    for segment in page.shown:
        for index in range(segment.start, segment.stop):
            page.top[index], page.height[index] = y, _row_height(page.graph.ops[index], bool(page.marks))
            y += page.height[index] + _GAP
        if segment.repeats > 1:
            y = _divider(page, segment, y)
    return y


def _row_height(op: OpNode, marked: bool) -> float:
    more = _LINE if marked else 0.0  # room for what was there before
    if op.state in ("ok", "assumed"):
        return max(_ROW, _INSET + 4 + _LINE * len(_op_lines(op))) + more
    lines = len(wrapped(op.error, _SPINE - 2 * _INSET, 11)) if op.error else 0
    return _INSET + 4 + _LINE * (1 + lines)


def _divider(page: _Page, segment: Segment, y: float) -> float:
    """The line below a block that repeats, and the bracket beside it."""
    count = segment.stop - segment.start
    what = f"op {segment.start} comes" if count == 1 else f"ops {segment.start} to {segment.stop - 1} come"
    text = f"{what} {segment.repeats} times, to op {segment.end - 1}"
    left, top = 6.0, page.top[segment.start] - 6
    corner = left + 5
    page.scene.lines.append(
        Line(((corner, top), (left, top), (left, y + 8), (page.scene.width - _PAD, y + 8)), "faint")
    )
    page.scene.boxes.append(Box(page.middle - 175, y - 3, 350, 22, "faint", (Text(cut(text, 330, 11), bold=True),)))
    return y + 28 + _GAP


def _foot(page: _Page, y: float) -> None:
    graph = page.graph
    lines = [f"no fusion {rule} at op {start}: {why}" for rule, start, why in graph.refusals[:4]]
    if len(graph.refusals) > 4:
        lines.append(f"and {len(graph.refusals) - 4} more fusions that were refused")
    device = graph.device.name
    lines += [f"{device} multiplies no {math}: estimated as bf16" for math in substituted(graph.steps, graph.device)]
    y += 16
    for line in lines:
        page.label(_PAD, y, cut(line, page.scene.width - 2 * _PAD, _SMALL), size=_SMALL, role="muted", tip=line)
        y += 14
    if graph.steps:
        x = _PAD
        for role, text in (("compute", "bound by products"), ("memory", "by memory"), ("launch", "by launches")):
            page.scene.boxes.append(Box(x, y - 7, 18, 5, f"bar-{role}"))
            page.label(x + 24, y, text, size=_SMALL, role="muted")
            x += 40 + 6.5 * len(text)
        text = "bars: share of the slowest step's time; thick borders: fusions; dashed: inside of a fusion"
        page.label(x + 6, y, text, size=_SMALL, role="muted")
        y += 14
    page.scene.height = y + 2


# ---- boxes ----


def _op_lines(op: OpNode) -> list[Text]:
    width = _SPINE - 2 * _INSET
    lines = [Text(cut(op_title(op), width, 12), size=12, bold=True)]
    for name, tensor in op.params[:2]:
        cast = next((cast for cast in op.casts if cast.role == name.rstrip("0123456789")), None)
        to = f" → {cast.format}" + (" ×2" if len(cast.copies) == 2 else "") if cast and cast.by else ""
        lines.append(Text(cut(f"{name} {tensor_text(tensor)}{to}", width, 11)))
    if len(op.params) > 2:
        lines.append(Text(f"and {len(op.params) - 2} more parameters", "muted"))
    for extra in op.extra_inputs:
        origin = (
            f"channel {extra.channel!r} from op {extra.source}" if extra.source >= 0 else "extra input of the caller"
        )
        lines.append(Text(cut(f"← {origin} {tensor_text(extra.tensor)}", width, 11), "muted"))
    if op.state == "assumed":
        lines.append(Text("describes no output: taken to be like its input", "muted"))
    for out in op.extra_outputs:
        places = [f"channel {out.channel!r}"] if out.channel else []
        places += ["the caller"] if out.to_caller else []
        lines.append(Text(cut(f"→ {' and '.join(places)}", width, 11), "muted"))
    return lines


def _was(was: str, width: float, most: int = 1) -> list[Text]:
    """What was there before, in at most so many lines."""
    if not was:
        return []
    lines = wrapped(f"was {was}", width - 2 * _INSET, _SMALL)
    if len(lines) > most:
        lines = [*lines[: most - 1], cut(" ".join(lines[most - 1 :]), width - 2 * _INSET, _SMALL)]
    return [Text(line, "mark", _SMALL) for line in lines]


def _op(page: _Page, op: OpNode) -> None:
    y, height = page.top[op.index], page.height[op.index]
    was = page.marks.get(("op", op.index), "")
    tip = op.config + "".join(f"\n{cast.role}: {cast.quantizer}, {cast.format}" for cast in op.casts)
    tip += f"\nwas: {was}" if was else ""
    if op.state in ("ok", "assumed"):
        lines = (*_op_lines(op), *_was(was, _SPINE))
        page.scene.boxes.append(Box(page.spine, y, _SPINE, height, "op", lines, tip, marked=bool(was)))
    else:
        bad = op.state == "error"
        title = op_title(op) + ("" if bad else " (not reached)")
        texts = [Text(cut(title, _SPINE - 2 * _INSET, 12), "bad" if bad else "muted", 12, True)]
        texts += [Text(line, "bad") for line in wrapped(op.error, _SPINE - 2 * _INSET, 11)] if op.error else []
        page.scene.boxes.append(
            Box(
                page.spine,
                y,
                _SPINE,
                height,
                "bad" if bad else "faint",
                tuple(texts),
                tip,
                strong=bad,
                marked=bool(was),
            )
        )
    if op.saved:
        _saved(page, op, y, height)


def _saved(page: _Page, op: OpNode, y: float, height: float) -> None:
    width = _KEPT - 2 * _INSET
    total = sum(saved.nbytes for saved in op.saved)
    lines = [Text(bytes_text(total) if total else "nothing more", bold=True)]
    room = int((height - 12 - _LINE * (2 if page.marks else 1)) // _LINE)
    for saved in op.saved[: room if len(op.saved) <= room else room - 1]:
        what = bytes_text(saved.nbytes) if saved.nbytes else saved.origin
        own = saved.tensor.format if saved.tensor.quantizer else dtype_text(saved.tensor.format)
        lines.append(Text(cut(f"{saved.name} {own}, {what}", width, _SMALL), size=_SMALL))
    if len(op.saved) > room:
        lines.append(Text(f"and {len(op.saved) - room + 1} more", "muted", _SMALL))
    tip = "\n".join(
        f"{saved.name} {tensor_text(saved.tensor)}: {bytes_text(saved.nbytes)} ({saved.origin})" for saved in op.saved
    )
    was = page.marks.get(("saved", op.index), "")
    lines += _was(was, _KEPT)
    tip += f"\nwas: {was}" if was else ""
    page.scene.boxes.append(Box(page.kept, y, _KEPT, height, "saved", tuple(lines), tip, marked=bool(was)))
    page.scene.lines.append(
        Line(((page.kept, y + height / 2), (page.backward + _SIDE, y + height / 2)), "faint", arrow=True)
    )


def _step(page: _Page, step: Step) -> None:
    graph = page.graph
    rows = [index for index in step.indices if index in page.top]
    if not rows:
        return
    x = page.forward if step.direction == "forward" else page.backward
    y, bottom = page.top[rows[0]], page.top[rows[-1]] + page.height[rows[-1]]
    own = step_time(graph, step)
    width = _SIDE - 2 * _INSET
    lines = [Text(cut(step.kind, width, 12), size=12, bold=True)]
    if step.inline:
        lines.append(Text("launches nothing", "muted", _SMALL))
    else:
        lines.append(Text(cut(step.custom_op or "no custom op", width, _SMALL), "muted", _SMALL))
        lines.append(Text(f"{time_text(own.seconds)}, {own.bound}" if own.bound else "no kernel"))
        cost = f"{flops_text(step.flops)}, {bytes_text(step.read)} in, {bytes_text(step.written)} out"
        lines.append(Text(cut(cost, width, _SMALL), size=_SMALL))
    was = next((page.marks[step.direction, index] for index in rows if (step.direction, index) in page.marks), "")
    lines += _was(was, _SIDE, 1 if len(rows) == 1 else 6)
    tip = _step_tip(graph, step) + (f"\nwas: {was}" if was else "")
    box = Box(x, y, _SIDE, bottom - y, step.direction, tuple(lines), tip, strong=step.rule, marked=bool(was))
    page.scene.boxes.append(box)
    if page.slowest > 0 and own.seconds > 0:
        share = max(own.seconds / page.slowest * (_SIDE - 8), 2)
        page.scene.boxes.append(Box(x + 4, bottom - 7, share, 4, f"bar-{own.bound}"))
    for index in rows:
        middle = page.top[index] + page.height[index] / 2
        ends = (x + _SIDE, page.spine) if step.direction == "forward" else (page.spine + _SPINE, x)
        page.scene.lines.append(Line(((ends[0], middle), (ends[1], middle)), "faint"))


def _step_tip(graph: Graph, step: Step) -> str:
    lines = [f"{step.kind}, {step.direction} of {', '.join(str(index) for index in step.indices)}"]
    lines += [f"functional_te::{step.custom_op}"] if step.custom_op else []
    lines += [step.gate] if step.gate else []
    for kernel in step.kernels:
        name = kernel.kind
        if kernel.kind == "product":
            rows, columns, reduced = kernel.sizes
            name = f"{kernel.math} product {kernel.layout} {rows}x{columns}x{reduced}"
        lines.append(
            f"{name}: {flops_text(kernel.flops)}, {bytes_text(kernel.read)} read, {bytes_text(kernel.written)} written"
        )
    return "\n".join([*lines, f"estimated for {graph.device.name}"])


# ---- tensors ----


def _edge(page: _Page, edge: Edge) -> None:
    """An arrow in the gap between two rows, with what flows there beside it."""
    forward = edge.direction == "forward"
    count = len(page.graph.ops)
    above, below = (edge.source, edge.target) if forward else (edge.target, edge.source)
    if below in page.top:
        bottom = page.top[below]
        top = bottom - _GAP if above not in page.top else page.top[above] + page.height[above]
        top = max(top, bottom - _GAP)
    elif above in page.top and (below >= count or above + 1 not in page.top):
        top = page.top[above] + page.height[above]
        bottom = top + _GAP
        if below < count and page.graph.ops[below].state in ("ok", "assumed"):
            return  # a repetition follows, which is not drawn
    else:
        return
    x = page.middle + (-14 if forward else 14)
    ends = ((x, top + 2), (x, bottom - 2)) if forward else ((x, bottom - 2), (x, top + 2))
    page.scene.lines.append(Line(ends, "flow" if forward else "gradient", arrow=True, dashed=edge.inside))
    kind = edge.tensor.format if edge.tensor.quantizer else dtype_text(edge.tensor.format)
    kind += " ×2" if len(edge.tensor.copies) == 2 else ""
    texts = [shape_text(edge.tensor), f"{kind}, inside" if edge.inside else kind]
    if edge.role:
        caster = edge.target if edge.cast_by == "target" else edge.source
        where = f"cast by {caster}" if edge.cast_by and 0 <= caster < count else "comes in cast"
        texts.append(f"{edge.role}, {where}")
    was = page.marks.get((f"edge {edge.direction}", edge.target), "")
    room = _SPINE / 2 - 14 - 6
    y = (top + bottom) / 2 + 4 - _LINE * (len(texts) - 1) / 2
    for text in texts:
        role = "mark" if was else "muted" if edge.inside else "text"
        anchor = "end" if forward else "start"
        tip = f"was: {was}" if was else tensor_text(edge.tensor)
        page.label(x + (-7 if forward else 7), y, cut(text, room, 10.5), size=10.5, role=role, anchor=anchor, tip=tip)
        y += _LINE


def _lanes(graph: Graph, rows: set[int]) -> dict[tuple[int, int], int]:
    """A lane for each side branch, by op and slot, such that no two that overlap share one."""
    busy: list[int] = []
    lanes: dict[tuple[int, int], int] = {}
    spans = [(e.source, op.index, e.slot) for op in graph.ops for e in op.extra_inputs if e.source >= 0]
    for source, target, slot in sorted(spans):
        if source not in rows or target not in rows:
            continue
        lane = next((place for place, end in enumerate(busy) if end <= source), len(busy))
        busy[lane : lane + 1] = [target]
        lanes[target, slot] = lane
    return lanes


def _channels(page: _Page) -> None:
    for (target, slot), lane in page.lanes.items():
        extra = page.graph.ops[target].extra_inputs[slot]
        x = page.spine - 10 - _LANE * lane
        start = page.top[extra.source] + page.height[extra.source] * 0.75
        end = page.top[target] + page.height[target] * 0.25
        points = ((page.spine, start), (x, start), (x, end), (page.spine, end))
        page.scene.lines.append(Line(points, "channel", arrow=True))
    for index in page.rows:
        for extra in page.graph.ops[index].extra_inputs:
            if (index, extra.slot) not in page.lanes:  # from the caller, or from a row that is not drawn
                y = page.top[index] + page.height[index] * 0.25
                page.scene.lines.append(Line(((page.spine - 14, y), (page.spine, y)), "channel", arrow=True))
