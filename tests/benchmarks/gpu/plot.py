"""A picture of results: ``python -m tests.benchmarks.gpu.plot FILE [PICTURE]``, by default FILE's name with .svg."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

from tests.benchmarks.gpu.goals import bound_of, name_of

COLORS = {"ours": "#1b7837", "te": "#762a83", "torchao": "#e08214", "torch bf16": "#878787"}


def color(entry: dict[str, Any]) -> str:
    """One color for each library."""
    return COLORS.get(entry["name"].partition(".")[0], COLORS["ours"])


def draw(results: dict[str, Any], path: Path) -> None:
    """One panel for each row with values: horizontal bars, the floor or ceiling as a line, goals in the title.

    Raises:
        ValueError: no row has a value.
    """
    from matplotlib.figure import Figure

    rows = {name: [entry for entry in row["entries"] if entry.get("value")] for name, row in results["rows"].items()}
    rows = {name: entries for name, entries in rows.items() if entries}
    if not rows:
        raise ValueError("plot: the results have no values")
    across = min(3, len(rows))
    down = math.ceil(len(rows) / across)
    tallest = max(len(entries) for entries in rows.values())
    figure = Figure(figsize=(6.4 * across, down * (1.1 + 0.24 * tallest)), layout="constrained")
    panels = figure.subplots(down, across, squeeze=False).flat
    for panel, (name, entries) in zip(panels, rows.items(), strict=False):
        row = results["rows"][name]
        values = [entry["value"] for entry in entries]
        panel.barh(range(len(entries)), values, color=[color(entry) for entry in entries])
        panel.set_yticks(range(len(entries)), [name_of(entry) for entry in entries])
        panel.invert_yaxis()
        for index, entry in enumerate(entries):
            panel.text(entry["value"], index, f" {entry['value']:.3g}", va="center", fontsize=7)
        line = bound_of(row)
        if line:
            panel.axvline(line, color="black", linestyle=":", linewidth=1)
        judged = [goal for goal in results["goals"] if goal["row"] == name and goal["met"] is not None]
        met = f"; {sum(goal['met'] for goal in judged)} of {len(judged)} goals met" if judged else ""
        panel.set_title(f"{name} ({row['unit']}){met}", fontsize=9)
        panel.tick_params(labelsize=7)
        panel.margins(x=0.12)
        panel.spines[["top", "right"]].set_visible(False)
    for panel in list(figure.axes)[len(rows) :]:
        panel.set_visible(False)
    figure.suptitle(
        f"{results['machine']['device']}, PyTorch {results['versions']['torch']}; forward and backward", fontsize=10
    )
    figure.savefig(path, dpi=110)


def main(argv: list[str] | None = None) -> None:
    """Draw a file of results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("picture", type=Path, nargs="?")
    options = parser.parse_args(argv)
    picture = options.picture or options.file.with_suffix(".svg")
    draw(json.loads(options.file.read_text()), picture)
    print(picture, flush=True)


if __name__ == "__main__":
    main()
