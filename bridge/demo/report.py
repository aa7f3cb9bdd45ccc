"""The end of a demo run: the table, the verdict on the losses, and the plot."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path

from bridge.demo.checkpoint import Progress
from bridge.demo.files import write_atomically

__all__ = ["final_losses", "gap_percent", "plot", "table", "verdict"]

_LABELS = {
    "none": "high precision",
    "current": "FP8 current",
    "delayed": "FP8 delayed",
    "block": "FP8 block",
    "mxfp8": "MXFP8",
    "nvfp4": "NVFP4",
    "custom": "custom mix",
}
_COLORS = dict(zip(_LABELS, ("#222222", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"), strict=True))
_MARKERS = dict(zip(_LABELS, "o^vsDP*", strict=True))
_AVERAGED_STEPS = 20
# runs with 4-bit tensors may be this many times further from high precision
_FOUR_BITS, _FOUR_BIT_FACTOR = ("nvfp4", "custom"), 4

_LEGEND = f"""\
train loss      mean over the last {_AVERAGED_STEPS} steps, nats per byte
held-out loss   on the last tenth of the text, which no step has seen
gap             of the held-out loss to high precision's
graphs          compiled with fullgraph=True: one for training (model and loss), one for the held-out loss
recompiles      graphs beyond those
saved           for backward by one training forward, measured once in eager mode: distinct storages, without parameters
ms/step         median, without the first step, which compiles. FP8 and FP4 are emulated in plain PyTorch here: their
                numerics are those of the hardware, their speed is not; expect it to be slower than high precision"""


def final_losses(progress: Progress) -> tuple[float, float]:
    """Final training loss (a mean over the last steps) and held-out loss."""
    return statistics.fmean(progress.losses[-_AVERAGED_STEPS:]), progress.held_out[-1][1]


def gap_percent(progress: Progress, runs: Sequence[Progress]) -> float | None:
    """How far the held-out loss is from high precision's, in percent; None without a run to compare with."""
    baseline = next((run for run in runs if run.recipe == "none"), None)
    if baseline is None or progress is baseline:
        return None
    reference = final_losses(baseline)[1]
    return 100.0 * (final_losses(progress)[1] / reference - 1.0)


def table(runs: Sequence[Progress]) -> str:
    """The table of all runs, with its legend."""
    header = ("run", "train loss", "held-out loss", "gap", "graphs", "breaks", "recompiles", "saved", "ms/step")
    rows = [header]
    for run in runs:
        train, held_out = final_losses(run)
        gap = gap_percent(run, runs)
        rows.append(
            (
                _LABELS[run.recipe],
                f"{train:.4f}",
                f"{held_out:.4f}",
                "-" if gap is None else f"{gap:+.2f} %",
                str(run.graphs),
                str(run.graph_breaks),
                str(run.recompiles),
                f"{run.saved_bytes / 1e6:.1f} MB",
                f"{1e3 * statistics.median(run.seconds[1:] or run.seconds):.0f}",
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        lines.append("  ".join(cells))
    lines.insert(1, "-" * len(lines[0]))
    return "\n".join([*lines, "", _LEGEND])


def verdict(runs: Sequence[Progress], limit: float) -> tuple[bool, str]:
    """Whether every low-precision run is within ``limit`` percent of high precision's held-out loss, and why."""
    gaps = {run.recipe: gap for run in runs if (gap := gap_percent(run, runs)) is not None}
    if not gaps:
        if any(run.recipe != "none" for run in runs):
            return True, "No high-precision run to compare with: add --recipe none."
        return True, "No low-precision run to compare."
    # a NaN compares false, and so is out
    out = [
        name for name, gap in gaps.items() if not abs(gap) <= limit * (_FOUR_BIT_FACTOR if name in _FOUR_BITS else 1)
    ]
    if out:
        named = ", ".join(f"{_LABELS[name]} ({gaps[name]:+.2f} %)" for name in out)
        return False, f"NOT within {limit:g} % of high precision's held-out loss: {named}."
    four = f" (4-bit runs: {_FOUR_BIT_FACTOR * limit:g} %)" if any(name in _FOUR_BITS for name in gaps) else ""
    return True, f"Held-out losses of the low-precision runs are within {limit:g} %{four} of high precision's."


def _smooth(values: Sequence[float]) -> list[float]:
    """Exponential moving average without the bias of its start."""
    smoothed, mean, weight = [], 0.0, 0.0
    for value in values:
        mean, weight = 0.9 * mean + 0.1 * value, 0.9 * weight + 0.1
        smoothed.append(mean / weight)
    return smoothed


def require() -> None:
    """Import what draws: who lacks it is to know before training, not after."""
    import matplotlib  # noqa: F401 - only whether it is there


def plot(runs: Sequence[Progress], path: Path, limit: float) -> None:
    """Draw losses, and the low-precision runs' gaps to high precision, into a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    losses, gaps = figure.subplots(1, 2, width_ratios=(3, 2))
    baseline = {step: loss for run in runs if run.recipe == "none" for step, loss in run.held_out}
    for run in runs:
        color, label = _COLORS[run.recipe], _LABELS[run.recipe]
        steps = range(1, len(run.losses) + 1)
        dashes = "--" if run.recipe == "delayed" else "-"
        losses.plot(steps, _smooth(run.losses), dashes, color=color, linewidth=1.4, label=f"{label}, training")
        places, values = zip(*run.held_out, strict=True)
        marker = _MARKERS[run.recipe]
        losses.plot(places, values, marker, color=color, fillstyle="none", label=f"{label}, held out")
        if run.recipe != "none" and baseline:
            percent = [(s, 100.0 * (v / baseline[s] - 1.0)) for s, v in run.held_out if s in baseline]
            gaps.plot(*zip(*percent, strict=True), dashes, marker=marker, color=color, label=label)
    losses.set(title="Loss (training: moving average)", xlabel="step", ylabel="nats per byte")
    losses.legend(frameon=False, fontsize="small")
    gaps.axhspan(-limit, limit, color="#009e73", alpha=0.12, linewidth=0, label=f"±{limit:g} %")
    gaps.axhline(0.0, color=_COLORS["none"], linewidth=0.8)
    top = max([1.5 * limit, *(abs(y) * 1.1 for line in gaps.lines for y in line.get_ydata() if math.isfinite(y))])
    gaps.set(
        title="Held-out loss against high precision", xlabel="step", ylabel="gap in %", ylim=(-top or -1, top or 1)
    )
    gaps.legend(frameon=False, fontsize="small")
    for axes in (losses, gaps):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    write_atomically(path, lambda temporary: figure.savefig(temporary, format="png", dpi=130))
