"""Pictures of a training run: what casts did over steps, amaxes and scales, memory, recipes side by side, and trees.

Beside them :func:`progress`, for the loop that makes what they show.

Imported on its own: ``from functional_te import views``. Plots need matplotlib and trees need treescope, which are
imported when a view is made (``pip install 'functional_te[notebook]'``). A view shows itself in notebooks.
"""

from __future__ import annotations

import dataclasses
import importlib
import io
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from functional_te._errors import kind_of, type_error, value_error
from functional_te.graph import Graph
from functional_te.graph.text import op_title
from functional_te.numerics import MEASURES, Numerics
from functional_te.pytree import tree_map
from functional_te.quantization.state import DelayedScalingState

__all__ = ["Tree", "View", "amaxes", "memory", "numerics", "progress", "recipes", "tree"]

_T = TypeVar("_T")

_LABELS = {
    "amax": "largest magnitude",
    "scale_min": "smallest scale",
    "scale_max": "largest scale",
    "saturated": "share saturated",
    "underflow": "share lost to zero",
    "snr_db": "signal to noise (dB)",
}


@dataclasses.dataclass(frozen=True, repr=False)
class View:
    """A plot.

    Attributes:
        figure: the ``matplotlib.figure.Figure``; change it as you like.
        title: what it shows.
    """

    figure: Any
    title: str

    def __repr__(self) -> str:
        return f"<{self.title}: a plot; view.figure.savefig(...) writes it to a file>"

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.figure.savefig(buffer, format="png", dpi=110)
        return buffer.getvalue()


@dataclasses.dataclass(frozen=True, repr=False)
class Tree:
    """A tree that unfolds.

    Attributes:
        html: the page that shows it.
        text: the same in words.
    """

    html: str
    text: str

    def __repr__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        return self.html


def _needs(module: str, view: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ImportError(f"views.{view} needs {package}: pip install 'functional_te[notebook]'") from error


def _axes(view: str, title: str, size: tuple[float, float]) -> tuple[Any, Any]:
    # a figure of its own: nothing of pyplot's global state, and no window
    figure = _needs("matplotlib.figure", view).Figure(figsize=size, layout="constrained")
    axes = figure.subplots()
    axes.set_title(title)
    return figure, axes


def numerics(history: Sequence[Numerics] | Numerics, *, measure: str = "snr_db") -> View:
    """A heatmap of what casts did: one row for each cast, one column for each step.

    Args:
        history: what :func:`functional_te.numerics` gave at every step, for one chain and recipe; or of one step.
        measure: ``"snr_db"``, ``"saturated"``, ``"underflow"``, or one that is drawn as its logarithm to base 2:
            ``"amax"``, ``"scale_min"``, ``"scale_max"``.

    Raises:
        ValueError: another measure, no steps, or steps with different casts.
        ImportError: matplotlib is not installed.
    """
    if measure not in MEASURES:
        raise value_error("views.numerics", "measure", f"one of {list(MEASURES)}", repr(measure))
    if isinstance(history, Numerics):
        history = [history]
    steps = [[(f"{e.index} {e.op}", e.role, e.copy) for e in step] for step in history]
    if not steps or not steps[0]:
        raise value_error("views.numerics", "history", "at least one step with casts", f"{len(steps)} steps")
    if any(step != steps[0] for step in steps):
        raise value_error("views.numerics", "history", "the same casts in every step", "different ones")
    values = torch.stack([torch.stack([getattr(e, measure).cpu() for e in step]) for step in history], dim=1)
    label = _LABELS[measure]
    if measure in ("amax", "scale_min", "scale_max"):
        values, label = values.log2(), f"{label} (log2)"
    rows, columns = values.shape
    figure, axes = _axes("numerics", f"{label} of every cast", (min(4 + 0.25 * columns, 14), 1.4 + 0.26 * rows))
    image = axes.imshow(values.numpy(), aspect="auto", interpolation="nearest")
    axes.set_yticks(range(rows), [f"{op}, {role} ({copy})" for op, role, copy in steps[0]], fontsize=8)
    axes.set_xlabel("step")
    figure.colorbar(image, ax=axes, label=label)
    return View(figure, f"{label} over {columns} steps")


def amaxes(states: Sequence[Any]) -> View:
    """Amaxes and scales of delayed scaling over training: two plots with one line for each tensor.

    Args:
        states: the quantizer state after every step, as :func:`functional_te.update_state` gives it. The amax of a step
            is the newest that is closed.

    Raises:
        ValueError: no states, or none of delayed scaling.
        ImportError: matplotlib is not installed.
    """
    found: dict[tuple[int, str], tuple[list[float], list[float]]] = {}
    for state in states:
        for index, own in enumerate(state):
            for role, entry in own.items():
                if isinstance(entry, DelayedScalingState):
                    newest = entry.amax_history[-1 if len(entry.amax_history) > 1 else 0]
                    lines = found.setdefault((index, role), ([], []))
                    lines[0].append(float(newest))
                    lines[1].append(float(entry.scale[0]))
    if not found:
        raise value_error("views.amaxes", "states", "states of delayed scaling", f"{len(states)} without")
    figure = _needs("matplotlib.figure", "amaxes").Figure(figsize=(9, 6), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True)
    for (index, role), (amax, scale) in found.items():
        upper.plot(amax, label=f"op {index}, {role}", marker=".")
        lower.plot(scale, marker=".")
    for axes, label in ((upper, "amax"), (lower, "scale")):
        axes.set_ylabel(label)
        # zeros, of tensors that saw nothing yet, have no logarithm
        axes.set_yscale(
            "log" if any(any(v > 0 for v in lines[label == "scale"]) for lines in found.values()) else "linear"
        )
    lower.set_xlabel("step")
    figure.legend(loc="outside right upper", fontsize=8)
    return View(figure, f"amaxes and scales of {len(found)} tensors")


def memory(graphs: Graph | Mapping[str, Graph]) -> View:
    """Bars of what every op keeps for the backward, for one graph or for several of one chain, by name.

    Raises:
        TypeError: no graphs.
        ImportError: matplotlib is not installed.
    """
    named = _named(graphs, "memory")
    ops = max((graph.ops for graph in named.values()), key=len)
    figure, axes = _axes("memory", "kept for the backward", (8, 1.6 + 0.3 * len(ops)))
    height = 0.8 / len(named)
    for place, (name, graph) in enumerate(named.items()):
        sizes = [sum(saved.nbytes for saved in op.saved) / 1e6 for op in graph.ops]
        where = [index + (place - (len(named) - 1) / 2) * height for index in range(len(sizes))]
        axes.barh(where, sizes, height, label=f"{name}: {graph.saved_bytes / 1e6:.4g} MB in all")
    axes.set_yticks(range(len(ops)), [op_title(op) for op in ops], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("MB")
    axes.legend()
    return View(figure, "memory from the forward to the backward")


def recipes(graphs: Mapping[str, Graph]) -> View:
    """Estimated time and kept memory of graphs side by side, by name.

    Raises:
        TypeError: no graphs.
        ImportError: matplotlib is not installed.
    """
    named = _named(graphs, "recipes")
    figure = _needs("matplotlib.figure", "recipes").Figure(figsize=(10, 1.8 + 0.4 * len(named)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    names = list(named)
    forward = [graph.time("forward") * 1e3 for graph in named.values()]
    left.barh(names, forward, label="forward")
    left.barh(names, [graph.time("backward") * 1e3 for graph in named.values()], left=forward, label="backward")
    left.set_xlabel(f"ms, estimated for {', '.join(sorted({graph.device.name for graph in named.values()}))}")
    left.invert_yaxis()
    figure.legend(loc="outside upper center", ncols=2)
    right.barh(names, [graph.saved_bytes / 1e6 for graph in named.values()], color="tab:purple")
    right.set_xlabel("MB kept for the backward")
    return View(figure, f"{len(named)} graphs side by side")


def progress(steps: Iterable[_T], title: str = "") -> Iterable[_T]:
    """The steps of a loop with a bar that shows how far it is: in a notebook, or on stderr of a terminal.

    Without tqdm the steps are returned as they are. A loop that ends within a second shows no bar, nor does one whose
    output goes to a file.

    Args:
        steps: what the loop goes through; one that knows its length shows the time that is left.
        title: what stands before the bar.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # without widgets it says so, and writes text
            auto = importlib.import_module("tqdm.auto")
    except ImportError:
        return steps
    # None: nothing where stderr is no terminal; a notebook's is none
    disable = False if "ipykernel" in sys.modules else None
    bar: Iterable[_T] = auto.tqdm(steps, desc=title or None, delay=1, leave=False, disable=disable)
    return bar


def _named(graphs: Any, view: str) -> dict[str, Graph]:
    named = {"graph": graphs} if isinstance(graphs, Graph) else dict(graphs) if isinstance(graphs, Mapping) else {}
    if not named or not all(isinstance(graph, Graph) for graph in named.values()):
        raise type_error(f"views.{view}", "graphs", "graphs by name", kind_of(graphs))
    return named


class _Summary:
    """Stands for a tensor in a tree."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text

    def __treescope_repr__(self, path: Any, subtree_renderer: Any) -> Any:
        """Nothing but the text."""
        del path, subtree_renderer
        return importlib.import_module("treescope.rendering_parts").text(self.text)


def _summary(leaf: Any) -> Any:
    """Shape, dtype, device, placement over ranks, and statistics of a tensor; other leaves as they are."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    text = f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)} {leaf.device}"
    placements = getattr(leaf, "placements", None)
    if placements is not None:
        text += f" {list(placements)}"
    if leaf.device.type == "meta" or leaf.numel() == 0 or leaf.dtype is torch.float4_e2m1fn_x2:
        return _Summary(text)
    values = leaf.detach().to(torch.float32)
    low, high = float(values.min()), float(values.max())
    text += f" in [{low:.4g}, {high:.4g}]" if leaf.numel() > 1 else f" {low:.4g}"
    if leaf.dtype.is_floating_point and leaf.numel() > 1:
        text += f", mean {float(values.mean()):.3g}, std {float(values.std()):.3g}"
        lost = int((~values.isfinite()).sum())
        text += f", {lost} not finite" if lost else ""
    return _Summary(text)


def tree(value: Any) -> Tree:
    """Parameters, state or a bundle as a tree that unfolds: what every tensor is, and its statistics.

    Raises:
        ImportError: treescope is not installed.
    """
    treescope = _needs("treescope", "tree")
    # summaries of our own: treescope reads tensors through numpy, which knows no FP8
    described = tree_map(_summary, value)
    return Tree(treescope.render_to_html(described), treescope.render_to_text(described))
