"""The graph in a terminal: one line for each op, with the steps of both directions beside it."""

from __future__ import annotations

from typing import Any

from functional_te.graph.collapse import segments
from functional_te.graph.roofline import Estimate, estimate, substituted
from functional_te.graph.units import bytes_text, flops_text, tensor_text, time_text
from functional_te.graph.value import Graph, OpNode, Step

__all__ = ["headline", "op_title", "step_time", "summary", "to_text"]


def op_title(op: OpNode) -> str:
    """``"2 BasicLinear 'gate'"``."""
    return f"{op.index} {op.kind}" + (f" {op.name!r}" if op.name else "")


def step_time(graph: Graph, step: Step) -> Estimate:
    """The estimate for a step on the graph's device."""
    return estimate(step, graph.device)


def headline(graph: Graph) -> str:
    """Recipe and backend."""
    recipe = graph.recipe.split("(")[0] or "high precision"
    return f"{len(graph.ops)} ops, {recipe}, {graph.backend.split(',')[0]} kernels"


def summary(graph: Graph) -> str:
    """Times, operations and what is kept."""
    forward, backward = time_text(graph.time("forward")), time_text(graph.time("backward"))
    device = graph.device.name
    times = f"{device} estimate: forward {forward}" + (f", backward {backward}" if graph.backward else "")
    return f"{times}; {flops_text(graph.flops)}; kept for the backward {bytes_text(graph.saved_bytes)}"


def _step_cells(graph: Graph, steps: tuple[Step, ...]) -> dict[int, str]:
    """By op, what stands beside it: the step at its first op, a line down the others."""
    cells: dict[int, str] = {}
    for step in steps:
        own = step_time(graph, step)
        cost = f" {time_text(own.seconds)} {own.bound}" if own.bound else " (inline)" if step.inline else ""
        name = step.kind.removeprefix(step.direction.capitalize()) if step.rule else ""
        first, *rest = step.indices
        corner = "┌ " if rest else "─ "
        cells[first] = f"{corner}{name}{cost if name else cost.lstrip()}"
        for index in rest:
            cells[index] = "└" if index == rest[-1] else "│"
    return cells


def _casts(graph: Graph) -> list[str]:
    """One line for each format: whose tensors are cast to it."""
    found: dict[str, dict[str, list[int]]] = {}
    for op in graph.ops:
        for cast in op.casts:
            kind = cast.format + (" ×2" if len(cast.copies) == 2 else "")
            kind += f", {cast.state} kept between steps" if cast.state else ""
            found.setdefault(kind, {}).setdefault(cast.role, []).append(op.index)
    lines = []
    for kind, roles in found.items():
        places = [f"{role} of {_listed(indices)}" for role, indices in roles.items()]
        lines.append(f"cast to {kind}: {'; '.join(places)}")
    return lines


def _listed(indices: list[int]) -> str:
    if len(indices) <= 6:
        return ", ".join(map(str, indices))
    return f"{', '.join(map(str, indices[:4]))}, … {indices[-1]} ({len(indices)} ops)"


def _row(op: OpNode, output: str, cells: tuple[dict[int, str], dict[int, str]]) -> tuple[str, ...]:
    title = op_title(op)
    for extra in op.extra_inputs:
        title += f" ← {extra.channel or 'caller'}"
    for out in op.extra_outputs:
        title += f" → {out.channel or 'caller'}"
    if op.state in ("error", "not reached"):
        return title, f"!! {op.error}" if op.error else "(not reached)", "", "", ""
    kept = sum(saved.nbytes for saved in op.saved)
    return (
        title,
        output,
        bytes_text(kept) if kept else "",
        cells[0].get(op.index, ""),
        cells[1].get(op.index, ""),
    )


_HEADER = ("op", "output", "kept", "forward ↓", "backward ↑")


def to_text(graph: Graph) -> str:
    """The table, with blocks that repeat once."""
    cells = _step_cells(graph, graph.forward), _step_cells(graph, graph.backward)
    outputs = {e.source: e for e in graph.edges if e.direction == "forward"}
    lines: list[Any] = [_HEADER]
    for segment in segments(graph):
        for index in range(segment.start, segment.stop):
            edge = outputs.get(index)
            text = "" if edge is None else f"({tensor_text(edge.tensor)})" if edge.inside else tensor_text(edge.tensor)
            lines.append(_row(graph.ops[index], text, cells))
        if segment.repeats > 1:
            lines.append(
                f"  … ops {segment.start}-{segment.stop - 1} come {segment.repeats} times, to {segment.end - 1}"
            )
    rows = [line for line in lines if isinstance(line, tuple) and not line[1].startswith("!!")]
    widths = [max(len(row[place]) for row in rows) for place in range(len(_HEADER))]
    used = [place for place, width in enumerate(widths) if any(row[place] for row in rows[1:])]
    head = [headline(graph), f"  {summary(graph)}"]
    table = []
    for line in lines:
        if isinstance(line, str):
            table.append(line)
        elif line[1].startswith("!!"):
            table.append(f"{line[0].ljust(widths[0])}  {line[1]}")
        else:
            table.append("  ".join(line[place].ljust(widths[place]) for place in used).rstrip())
    rule = "  ".join("─" * widths[place] for place in used)
    notes = _casts(graph)
    for op in graph.ops:
        if op.state == "assumed":
            notes.append(f"op {op.index} ({op.kind}) describes no output: taken to be like its input")
    for math in substituted(graph.steps, graph.device):
        notes.append(f"{graph.device.name} multiplies no {math}: estimated as bf16")
    if any(edge.inside for edge in graph.edges):
        notes.append("(in brackets: inside of a fusion)")
    tail = [f"not fused: {rule_} at op {start}: {why}" for rule_, start, why in graph.refusals]
    tail = tail[:8] + ([f"… and {len(tail) - 8} more"] if len(tail) > 8 else [])
    return "\n".join((*head, "", table[0], rule, *table[1:], *notes, *tail))
