"""What a conversion did: one row per module, as text, HTML and plain values."""

from __future__ import annotations

import dataclasses
import html
from typing import Any

__all__ = ["ALONE", "CONVERTED", "FUSED", "Report", "Row"]

CONVERTED = "converted"
FUSED = "fused"
ALONE = "left alone"
_COLUMNS = ("name", "module", "what", "rule", "why")


@dataclasses.dataclass(frozen=True)
class Row:
    """One module.

    Attributes:
        name: its name in the model; "" is the model itself.
        module: name of its class.
        what: ``"converted"`` (runs as a chain of its own), ``"fused"`` (runs chains over several of its parts) or
            ``"left alone"``.
        rule: name of the rule, "" without one.
        why: what the module runs, or why it was left alone.
    """

    name: str
    module: str
    what: str
    rule: str
    why: str


@dataclasses.dataclass(frozen=True)
class Report:
    """Every module of a model that has a rule or parameters of its own, in the model's order."""

    rows: tuple[Row, ...]

    @property
    def counts(self) -> dict[str, int]:
        """Number of rows by ``what``."""
        return {what: sum(row.what == what for row in self.rows) for what in (CONVERTED, FUSED, ALONE)}

    def to_dict(self) -> dict[str, Any]:
        """Plain values: ``counts``, and ``rows`` as dicts."""
        return {"counts": self.counts, "rows": [dataclasses.asdict(row) for row in self.rows]}

    def _summary(self) -> str:
        return ", ".join(f"{count} {what}" for what, count in self.counts.items())

    def __str__(self) -> str:
        cells = [_COLUMNS, *[dataclasses.astuple(row) for row in self.rows]]
        widths = [max(len(row[column]) for row in cells) for column in range(len(_COLUMNS))]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells
        ]
        return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:], self._summary()])

    def _repr_html_(self) -> str:
        """A table, for notebooks."""
        head = "".join(f"<th>{column}</th>" for column in _COLUMNS)
        body = "".join(
            "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in dataclasses.astuple(row)) + "</tr>"
            for row in self.rows
        )
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table><p>{self._summary()}</p>"
