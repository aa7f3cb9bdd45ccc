"""What a drawing is made of: boxes with lines of text, lines with arrows, and loose texts, each at its place."""

from __future__ import annotations

import dataclasses

__all__ = ["Box", "Label", "Line", "Scene", "Text", "cut", "text_width", "wrapped"]

# advance of a monospaced letter, in parts of the font size: 0.602 in the widest font of the list, and up to this where
# a renderer rounds it to whole pixels
_ADVANCE = 0.637


@dataclasses.dataclass(frozen=True)
class Text:
    """A line of text.

    Attributes:
        text: the words.
        role: how it looks: ``"text"``, ``"muted"``, ``"mark"``, ``"bad"``.
        size: of the font, in pixels.
        bold: whether it is bold.
    """

    text: str
    role: str = "text"
    size: float = 11
    bold: bool = False


@dataclasses.dataclass(frozen=True)
class Label:
    """A text at a place.

    Attributes:
        x: where it starts, ends or has its middle.
        y: its base line.
        text: the text.
        anchor: ``"start"``, ``"middle"`` or ``"end"``.
        tip: what is shown on hovering.
    """

    x: float
    y: float
    text: Text
    anchor: str = "start"
    tip: str = ""


@dataclasses.dataclass(frozen=True)
class Box:
    """A rectangle with lines of text in it.

    Attributes:
        x: left.
        y: top.
        width: width.
        height: height.
        role: how it looks: ``"op"``, ``"forward"``, ``"backward"``, ``"saved"``, ``"bad"``, ``"faint"``, ``"bar-..."``.
        lines: what stands in it.
        tip: what is shown on hovering.
        strong: whether its border is thick.
        marked: whether it stands out.
    """

    x: float
    y: float
    width: float
    height: float
    role: str
    lines: tuple[Text, ...] = ()
    tip: str = ""
    strong: bool = False
    marked: bool = False


@dataclasses.dataclass(frozen=True)
class Line:
    """A line through points.

    Attributes:
        points: corners.
        role: how it looks: ``"flow"``, ``"gradient"``, ``"channel"``, ``"faint"``.
        arrow: whether it ends in an arrow.
        dashed: whether it is dashed.
    """

    points: tuple[tuple[float, float], ...]
    role: str
    arrow: bool = False
    dashed: bool = False


@dataclasses.dataclass
class Scene:
    """A drawing.

    Attributes:
        title: what it shows, for those who cannot see it.
        width: width.
        height: height.
        boxes: drawn above lines.
        lines: drawn first.
        labels: drawn last.
    """

    title: str
    width: float = 0
    height: float = 0
    boxes: list[Box] = dataclasses.field(default_factory=list)
    lines: list[Line] = dataclasses.field(default_factory=list)
    labels: list[Label] = dataclasses.field(default_factory=list)


def text_width(text: str, size: float) -> float:
    """Width of a text at most."""
    return len(text) * size * _ADVANCE


def cut(text: str, width: float, size: float) -> str:
    """The text, shortened to a width."""
    room = int(width / (size * _ADVANCE))
    return text if len(text) <= room else text[: max(room - 1, 0)] + "…"


def wrapped(text: str, width: float, size: float) -> list[str]:
    """The text in lines of a width."""
    room = max(int(width / (size * _ADVANCE)), 8)
    lines: list[str] = [""]
    for word in text.split():
        if lines[-1] and len(lines[-1]) + 1 + len(word) > room:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
        while len(lines[-1]) > room:
            lines[-1:] = [lines[-1][:room], lines[-1][room:]]
    return lines
