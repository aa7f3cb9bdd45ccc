"""The graph as a Mermaid flowchart: one box for each forward step with the ops in it, and the backward beside it."""

from __future__ import annotations

from functional_te.graph.collapse import Segment, segments
from functional_te.graph.text import headline, op_title, step_time, summary
from functional_te.graph.units import bytes_text, tensor_text, time_text
from functional_te.graph.value import Edge, Graph, OpNode, Step

__all__ = ["to_mermaid"]

_STYLES = (
    "classDef op fill:#f6f8fa,stroke:#59636e,color:#1f2328",
    "classDef back fill:#fff1e5,stroke:#bc4c00,color:#1f2328",
    "classDef bad fill:#ffebe9,stroke:#d1242f,color:#1f2328",
    "classDef more fill:none,stroke-dasharray:4 4,stroke:#59636e",
)


def to_mermaid(graph: Graph, *, collapse: bool = True) -> str:
    """The flowchart. Solid lines are the forward, dotted ones the backward and what is kept for it."""
    shown = segments(graph, collapse)
    rows = {index for segment in shown for index in range(segment.start, segment.stop)}
    lines = ["flowchart TB", f"    %% {headline(graph)}; {summary(graph)}"]
    lines += ["    input([input])", "    output([output])"]
    lines += _steps(graph, graph.forward, rows, "forward")
    covered = {index for step in graph.forward for index in step.indices}
    lines += [f"    {_op(op)}" for op in graph.ops if op.index in rows and op.index not in covered]
    lines += _steps(graph, graph.backward, rows, "backward")
    lines += _gaps(shown)
    places = _places(graph, shown)
    known = set()
    for edge in graph.edges:
        line = _edge(edge, places, len(graph.ops))
        if line is not None and line not in known:
            known.add(line)
            lines.append(line)
    lines += _side(graph, rows)
    lines += [f"    {style}" for style in _STYLES]
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    return text.replace('"', "'").replace("<", "#lt;").replace(">", "#gt;").replace("\n", " ")


def _op(op: OpNode) -> str:
    kind = "bad" if op.state == "error" else "op"
    title = _quoted(op_title(op)) + (f"<br/>{_quoted(op.error)}" if op.error else "")
    return f'o{op.index}["{title}"]:::{kind}'


def _steps(graph: Graph, steps: tuple[Step, ...], rows: set[int], direction: str) -> list[str]:
    lines = []
    for step in steps:
        shown = [index for index in step.indices if index in rows]
        if not shown:
            continue
        own = step_time(graph, step)
        cost = f"{time_text(own.seconds)}, {own.bound}" if own.bound else "inline"
        if direction == "backward":
            covers = ", ".join(str(index) for index in step.indices)
            lines.append(f'    b{step.position}["{step.kind} backward of {covers}<br/>{cost}"]:::back')
            continue
        if step.rule:
            lines.append(f'    subgraph f{step.position}["{step.kind}: {cost}"]')
            lines += [f"        {_op(graph.ops[index])}" for index in shown]
            lines.append("    end")
        else:
            op = graph.ops[shown[0]]
            lines.append(f'    o{op.index}["{_quoted(op_title(op))}<br/>{cost}"]:::op')
    return lines


def _gaps(shown: tuple[Segment, ...]) -> list[str]:
    return [
        f'    more{own.start}["ops {own.start} to {own.stop - 1}, {own.repeats} times"]:::more'
        for own in shown
        if own.repeats > 1
    ]


def _places(graph: Graph, shown: tuple[Segment, ...]) -> dict[tuple[str, int], str]:
    """The box of every op in each direction; that of the gap for ops that are not shown."""
    places = {}
    for segment in shown:
        for index in range(segment.start, segment.stop):
            places["forward", index] = f"o{index}"
        for index in range(segment.stop, segment.end):
            places["forward", index] = places["backward", index] = f"more{segment.start}"
    for step in graph.backward:
        for index in step.indices:
            places.setdefault(("backward", index), f"b{step.position}")
    return places


def _edge(edge: Edge, places: dict[tuple[str, int], str], count: int) -> str | None:
    forward = edge.direction == "forward"
    ends = []
    for index in (edge.source, edge.target):
        outside = "input" if index < 0 else "output" if index >= count else None
        place = outside or places.get((edge.direction, index))
        if place is None:
            return None
        ends.append(place)
    if ends[0] == ends[1] or (not forward and edge.inside):
        return None
    label = tensor_text(edge.tensor) + (f", {edge.role}" if edge.role else "")
    return f'    {ends[0]} {"-->" if forward else "-.->"}|"{label}"| {ends[1]}'


def _side(graph: Graph, rows: set[int]) -> list[str]:
    """Side branches, and what is kept for the backward."""
    lines = []
    steps = {index: step.position for step in graph.backward for index in step.indices}
    for op in graph.ops:
        if op.index not in rows:
            continue
        for extra in op.extra_inputs:
            source = (
                f"o{extra.source}" if extra.source >= 0 else f"extra{extra.position}([extra input {extra.position}])"
            )
            if extra.source < 0 or extra.source in rows:
                lines.append(f'    {source} ==>|"{_quoted(extra.channel or "extra")}"| o{op.index}')
        for out in op.extra_outputs:
            if out.to_caller:
                lines.append(f"    o{op.index} ==> out{op.index}_{out.slot}([extra output])")
        kept = sum(saved.nbytes for saved in op.saved)
        if kept and op.index in steps:
            lines.append(f'    o{op.index} -.->|"keeps {bytes_text(kept)}"| b{steps[op.index]}')
    return lines
