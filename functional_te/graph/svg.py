"""A drawing as SVG, with nothing that a viewer would have to load.

Notebook viewers differ in what they leave of an SVG. Colours are attributes for a light page, with a background of the
drawing's own; a style sheet turns both dark where the page or the viewer is and keeps style sheets. So words stand out
from their background everywhere.
"""

from __future__ import annotations

from xml.sax.saxutils import escape, quoteattr

from functional_te._errors import value_error
from functional_te.graph.layout import Marks, layout
from functional_te.graph.scene import Box, Label, Line, Scene, Text
from functional_te.graph.value import Graph

__all__ = ["render", "to_svg"]

_FONT = "ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono','Liberation Mono',monospace"

# role: (light fill, light stroke, dark fill, dark stroke)
_BOXES = {
    "op": ("#f6f8fa", "#818b98", "#151b23", "#656c76"),
    "forward": ("#ddf4ff", "#54aeff", "#0c2745", "#388bfd"),
    "backward": ("#fff1e5", "#e16f24", "#33190b", "#db6d28"),
    "saved": ("#fbefff", "#a475f9", "#241437", "#a371f7"),
    "bad": ("#ffebe9", "#d1242f", "#3c1414", "#f85149"),
    "faint": ("#ffffff", "#afb8c1", "#0d1117", "#4f5762"),
    "bar-compute": ("#0969da", "none", "#58a6ff", "none"),
    "bar-memory": ("#1a7f37", "none", "#3fb950", "none"),
    "bar-launch": ("#6e7781", "none", "#9198a1", "none"),
    "page": ("#ffffff", "none", "#0d1117", "none"),
}
_LINES = {
    "flow": ("#0969da", "#58a6ff"),
    "gradient": ("#bc4c00", "#f0883e"),
    "channel": ("#1a7f37", "#3fb950"),
    "faint": ("#afb8c1", "#4f5762"),
}
_TEXTS = {
    "text": ("#1f2328", "#e6edf3"),
    "muted": ("#59636e", "#a3abb4"),
    "mark": ("#845400", "#e3b341"),
    "bad": ("#a40e26", "#ff7b72"),
}
_MARK = ("#bf8700", "#e3b341")
_THEMES = ("auto", "light", "dark")
# how JupyterLab, VS Code and Material for MkDocs mark their theme, which need not be the one of the system
_DARK_PAGES = ":is([data-jp-theme-light=false],[data-md-color-scheme=slate],.vscode-dark)"
_LIGHT_PAGES = ":is([data-jp-theme-light=true],[data-md-color-scheme=default],.vscode-light)"


def to_svg(graph: Graph, *, collapse: bool = True, theme: str = "auto") -> str:
    """The drawing of a graph.

    Raises:
        ValueError: another theme.
    """
    return render(layout(graph, collapse=collapse), theme)


def marked_svg(graph: Graph, marks: Marks, notes: tuple[str, ...], theme: str = "auto") -> str:
    """The drawing of a graph in which some things stand out."""
    return render(layout(graph, marks=marks, notes=notes), theme)


def render(scene: Scene, theme: str = "auto", *, fluid: bool = False) -> str:
    """A scene as SVG; a fluid one is as wide as what it stands in."""
    if theme not in _THEMES:
        raise value_error("to_svg", "theme", f"one of {list(_THEMES)}", repr(theme))
    dark = theme == "dark"
    width, height = f"{scene.width:.0f}", f"{scene.height:.0f}"
    size = 'width="100%"' if fluid else f'width="{width}" height="{height}"'
    space = 'xmlns="http://www.w3.org/2000/svg"'
    parts = [f'<svg {space} viewBox="0 0 {width} {height}" {size} role="img" font-family="{escape(_FONT)}">']
    parts.append(f"<title>{escape(scene.title)}</title>")
    if theme == "auto":
        parts.append(f"<style>{_style()}</style>")
    fill = _BOXES["page"][2 if dark else 0]
    parts.append(f'<rect class="fte-page" width="{width}" height="{height}" rx="6" fill="{fill}"/>')
    parts += [_line(line, dark) for line in scene.lines]
    parts += [_box(box, dark) for box in scene.boxes]
    parts += [_label(label, dark) for label in scene.labels]
    parts.append("</svg>")
    return "\n".join(part for part in parts if part)


def _style() -> str:
    """Dark where the viewer prefers that; where a page says which theme it has, that one.

    A page may hold many drawings, and all of them say the same.
    """
    light, dark = _rules(False), _rules(True)
    return f"@media (prefers-color-scheme:dark){{{dark}}}{_DARK_PAGES}{{{dark}}}{_LIGHT_PAGES}{{{light}}}"


def _rules(dark: bool) -> str:
    rules = [f".fte-{role}{{fill:{own[2 * dark]};stroke:{own[2 * dark + 1]}}}" for role, own in _BOXES.items()]
    rules += [f".fte-l-{role}{{stroke:{own[dark]}}}.fte-a-{role}{{fill:{own[dark]}}}" for role, own in _LINES.items()]
    rules += [f".fte-t-{role}{{fill:{own[dark]}}}" for role, own in _TEXTS.items()]
    return "".join(rules) + f".fte-marked{{stroke:{_MARK[dark]}}}"


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _text(text: Text, x: float, y: float, anchor: str, dark: bool) -> str:
    how = f' text-anchor="{anchor}"' if anchor != "start" else ""
    how += ' font-weight="600"' if text.bold else ""
    fill = _TEXTS[text.role][dark]
    return (
        f'<text class="fte-t-{text.role}" x="{_number(x)}" y="{_number(y)}" font-size="{_number(text.size)}" '
        f'fill="{fill}"{how} xml:space="preserve">{escape(text.text)}</text>'
    )


def _tipped(body: str, tip: str) -> str:
    return f"<g><title>{escape(tip)}</title>{body}</g>" if tip else body


def _label(label: Label, dark: bool) -> str:
    return _tipped(_text(label.text, label.x, label.y, label.anchor, dark), label.tip)


def _box(box: Box, dark: bool) -> str:
    fill, stroke = _BOXES[box.role][2 * dark : 2 * dark + 2]
    kind = f"fte-{box.role}"
    width = 2.0 if box.strong else 1.0
    if box.marked:
        kind, stroke, width = f"{kind} fte-marked", _MARK[dark], 3.0
    corner = 2 if box.role.startswith("bar-") else 5
    dash = ' stroke-dasharray="4 3"' if box.role == "faint" else ""
    body = (
        f'<rect class={quoteattr(kind)} x="{_number(box.x)}" y="{_number(box.y)}" width="{_number(box.width)}" '
        f'height="{_number(box.height)}" rx="{corner}" fill="{fill}" stroke="{stroke}" stroke-width="{width}"{dash}/>'
    )
    y = box.y + 3
    for text in box.lines:
        y += 13
        body += _text(text, box.x + 8, y, "start", dark)
    return _tipped(body, box.tip)


def _line(line: Line, dark: bool) -> str:
    colour = _LINES[line.role][dark]
    points = " ".join(f"{_number(x)},{_number(y)}" for x, y in line.points)
    dash = ' stroke-dasharray="3 3"' if line.dashed else ""
    width = 1.6 if line.role != "faint" else 1.0
    body = (
        f'<polyline class="fte-l-{line.role}" points="{points}" fill="none" stroke="{colour}" '
        f'stroke-width="{width}"{dash}/>'
    )
    return body + (_arrow(line, colour) if line.arrow else "")


def _arrow(line: Line, colour: str) -> str:
    """A head of its own: viewers that rewrite names break references to markers."""
    (x0, y0), (x, y) = line.points[-2:]
    length = max(abs(x - x0) + abs(y - y0), 1e-9)
    dx, dy = (x - x0) / length, (y - y0) / length
    back, side = 7.0, 3.5
    corners = (
        (x, y),
        (x - back * dx - side * dy, y - back * dy + side * dx),
        (x - back * dx + side * dy, y - back * dy - side * dx),
    )
    points = " ".join(f"{_number(a)},{_number(b)}" for a, b in corners)
    return f'<polygon class="fte-a-{line.role}" points="{points}" fill="{colour}"/>'
