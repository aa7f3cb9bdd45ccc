"""What a notebook shows of a graph."""

from __future__ import annotations

import html
from collections.abc import Iterable
from typing import Any

from functional_te.graph.layout import Marks, layout
from functional_te.graph.svg import render
from functional_te.graph.text import headline, step_time, summary
from functional_te.graph.units import bytes_text, flops_text, time_text
from functional_te.graph.value import Graph

__all__ = ["chosen", "graph_html", "mimebundle", "table"]

# a drawing shrinks to this share of its size where room is scarce: its smallest letters are 9 pixels tall then
SHRINK = 0.848

_HEADER = ("direction", "ops", "step", "custom op", "time", "bound", "operations", "read", "written", "compiled")


def mimebundle(graph: Graph, include: Any = None, exclude: Any = None) -> dict[str, str]:
    """HTML with the drawing and the steps as a table, the drawing alone, and text.

    Viewers that show notebooks of others drop drawings from HTML, or HTML; each finds something that it shows.
    """
    bundle = {"text/html": graph_html(graph), "image/svg+xml": graph.to_svg(), "text/plain": repr(graph)}
    return chosen(bundle, include, exclude)


def chosen(bundle: dict[str, str], include: Any, exclude: Any) -> dict[str, str]:
    """The entries that a notebook asks for."""
    wanted = set(bundle) if not include else set(include)
    return {kind: data for kind, data in bundle.items() if kind in wanted - set(exclude or ())}


def graph_html(graph: Graph, marks: Marks | None = None, notes: tuple[str, ...] = ()) -> str:
    """The drawing, as wide as there is room, and below it a table that unfolds. What is too wide scrolls by itself."""
    scene = layout(graph, marks=marks, notes=notes)
    size = f"min-width:{scene.width * SHRINK:.0f}px;max-width:{scene.width:.0f}px"
    parts = [f'<div style="overflow-x:auto"><div style="{size}">{render(scene, fluid=True)}</div></div>']
    if graph.error:
        parts.append(f"<p><b>error:</b> {html.escape(graph.error)}</p>")
    title = html.escape(f"{headline(graph)}; {summary(graph)}")
    steps = f'<div style="overflow-x:auto">{table(_HEADER, _rows(graph))}</div>'
    parts.append(f"<details><summary>{title}</summary>{steps}</details>")
    return "\n".join(parts)


def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table of text."""
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in header)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _rows(graph: Graph) -> Iterable[tuple[str, ...]]:
    for step in graph.steps:
        own = step_time(graph, step)
        yield (
            step.direction,
            ", ".join(map(str, step.indices)),
            step.kind,
            step.custom_op,
            time_text(own.seconds),
            own.bound,
            flops_text(step.flops),
            bytes_text(step.read),
            bytes_text(step.written),
            step.gate or "one node of the graph, and the compiler sees through it",
        )
