"""The goals on an H200, as ratios of medians of one run, and whether the results meet them."""

from __future__ import annotations

import dataclasses
from typing import Any

PEERS = "the best peer"
FLOOR = "the floor"
COPY = "copy bandwidth"


@dataclasses.dataclass(frozen=True)
class Goal:
    """``ours`` over ``against`` is at most ``limit`` (at least, if ``at_least``).

    Attributes:
        row: name of the row.
        ours: name of our entry.
        against: name of an entry, or one of the names above.
        limit: of the ratio.
        at_least: whether larger is better.
    """

    row: str
    ours: str
    against: str
    limit: float
    at_least: bool = False


GOALS: tuple[Goal, ...] = (
    Goal("mlp-t8192-delayed", "ours, compiled", "te.ops, eager", 0.90),
    Goal("mlp-t8192-delayed", "ours, compiled", FLOOR, 1.15),
    Goal("mlp-t8192-current", "ours, compiled", "te.ops, eager", 0.92),
    Goal("mlp-t8192-block", "ours, compiled", "te.ops, eager", 0.90),
    Goal("mlp-t2048-delayed", "ours, reduce-overhead", PEERS, 0.75),
    Goal("mlp-t2048-delayed", "ours, captured", "te.ops, graphed", 0.50),
    Goal("mlp-t512-delayed", "ours, captured", "te.ops, graphed", 0.16),
    Goal("mlp-t512-delayed", "ours, eager", "te.ops, eager", 0.60),
    Goal("blocks8-t2048-delayed", "ours, compiled", "ours, captured", 1.2),
    Goal("blocks8-t2048-delayed", "ours, reduce-overhead", "ours, captured", 1.1),
    Goal("llama-large-delayed", "ours, compiled", "torchao, compiled", 0.85),
    Goal("llama-small-delayed", "ours, reduce-overhead", PEERS, 0.75),
    Goal("memory", "ours, compiled", "te.ops, eager", 1.0),
    Goal("compile-time", "ours, compiled", "torchao, compiled", 1.0),
    # as tokens per second: 1.15 of torchao, 1.3 of torch
    *(
        Goal(row, "converted, delayed, compiled", f"{peer}, compiled", 1 / gain)
        for row in ("hf-llama", "hf-llama-t32768")
        for peer, gain in (("torchao", 1.15), ("torch bf16", 1.3))
    ),
    *(
        Goal("kernels", f"{kernel}, delayed", COPY, 0.8, True)
        for kernel in (
            "SwiGLU+quantize+transpose",
            "dSwiGLU+quantize+transpose",
            "RMSNorm+quantize+transpose",
            "cast+transpose",
        )
    ),
)
ROWS_WITH_GOALS = tuple(dict.fromkeys(goal.row for goal in GOALS))


def name_of(entry: dict[str, Any]) -> str:
    return f"{entry['name']}, {entry['mode']}"


def best_peer(row: dict[str, Any]) -> dict[str, Any] | None:
    """The fastest peer that ran."""
    ran = [entry for entry in row["entries"] if entry["peer"] and entry.get("value")]
    return min(ran, key=lambda entry: entry["value"], default=None)


def bound_of(row: dict[str, Any]) -> float | None:
    """What the device can do at best, in the unit of the row: the floor, or the ceiling."""
    ceilings: dict[str, float | None] = row.get("ceilings") or {}
    known = {"ms": row.get("floor_ms"), "TB/s": ceilings.get("copy_tb_s"), "TFLOP/s": ceilings.get("fp8_fast_tflops")}
    return known.get(row["unit"])


def _entry(row: dict[str, Any], name: str) -> tuple[dict[str, Any] | None, str]:
    for entry in row["entries"]:
        if name_of(entry) == name:
            return (entry, "") if entry.get("value") else (None, f"{name}: {entry.get('error', 'no value')[:120]}")
    return None, f"{name}: not measured"


def judge(goal: Goal, rows: dict[str, Any]) -> dict[str, Any]:
    """The goal with what was measured: ``measured`` is the ratio and ``met`` a bool, or None with a ``note``."""
    judged: dict[str, Any] = {**dataclasses.asdict(goal), "measured": None, "met": None, "note": ""}
    row = rows.get(goal.row)
    if row is None:
        return {**judged, "note": "not measured"}
    mine, note = _entry(row, goal.ours)
    if mine is None:
        return {**judged, "note": note}
    if goal.against == FLOOR:
        base, who = bound_of(row), FLOOR
    elif goal.against == COPY:
        base, who = bound_of(row), COPY
    else:
        peer, note = (best_peer(row), "no peer ran") if goal.against == PEERS else _entry(row, goal.against)
        if peer is None:
            return {**judged, "note": note}
        base, who = peer["value"], name_of(peer)
    if not base:
        return {**judged, "note": f"{who}: not measured"}
    ratio = mine["value"] / base
    met = ratio >= goal.limit if goal.at_least else ratio <= goal.limit
    note = f"{mine['value']:.4g} against {base:.4g} {row['unit']} ({who})"
    return {**judged, "measured": ratio, "met": met, "note": note}


def conclude(results: dict[str, Any]) -> None:
    """Write the ratios to the best peer and the goals into the results."""
    for name, row in results["rows"].items():
        peer = best_peer(row)
        for entry in row["entries"]:
            ratio = entry["value"] / peer["value"] if peer and entry.get("value") else None
            entry["ratio_to_best_peer"] = ratio
            bound = bound_of(row)
            entry["of_bound"] = entry["value"] / bound if bound and entry.get("value") else None
            concerned = [goal for goal in GOALS if goal.row == name and goal.ours == name_of(entry)]
            judged = [judge(goal, results["rows"]) for goal in concerned]
            entry["goals"] = [{key: one[key] for key in ("against", "limit", "measured", "met")} for one in judged]
    results["goals"] = [judge(goal, results["rows"]) for goal in GOALS]


def markdown(results: dict[str, Any]) -> str:
    """The table of goals, then one of every row."""
    lines = ["| goal | measured | met |", "| --- | --- | --- |"]
    for goal in results["goals"]:
        sign = "at least" if goal["at_least"] else "at most"
        title = f"{goal['row']}: {goal['ours']} {sign} {goal['limit']:g} of {goal['against']}"
        measured = "-" if goal["measured"] is None else f"{goal['measured']:.3f}"
        met = {True: "yes", False: "no", None: "?"}[goal["met"]]
        lines.append(f"| {title} | {measured}: {goal['note']} | {met} |".replace("\n", " "))
    for name, row in results["rows"].items():
        bound, word = bound_of(row), "floor" if row["unit"] == "ms" else "ceiling"
        limit = f"; {word} {bound:.3f} {row['unit']}" if bound else ""
        failed = f"; {row['error'][:140]}" if row.get("error") else ""
        lines += ["", f"{name}: {row['title']}{limit}{failed}", ""]
        lines.append(f"| contestant | {row['unit']} | of the best peer | of the {word} |")
        lines.append("| --- | --- | --- | --- |")
        for entry in row["entries"]:
            value = f"{entry['value']:.4g}" if entry.get("value") else entry.get("error", "-")[:140].replace("\n", " ")
            ratio = f"{entry['ratio_to_best_peer']:.3f}" if entry.get("ratio_to_best_peer") else "-"
            share = f"{entry['of_bound']:.3f}" if entry.get("of_bound") else "-"
            lines.append(f"| {name_of(entry)} | {value.replace('|', '/')} | {ratio} | {share} |")
    return "\n".join(lines)
