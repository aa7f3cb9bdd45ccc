"""What is different between two graphs: two recipes, two backends, with and without fusions, two chains."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable
from typing import Any

from functional_te._errors import kind_of, type_error
from functional_te.graph.html import chosen, graph_html, table
from functional_te.graph.svg import marked_svg
from functional_te.graph.text import op_title, step_time
from functional_te.graph.units import bytes_text, flops_text, tensor_text, time_text
from functional_te.graph.value import Edge, Graph, OpNode, Step

__all__ = ["Change", "GraphDiff", "diff"]


@dataclasses.dataclass(frozen=True)
class Change:
    """One difference.

    Attributes:
        part: ``"graph"``, ``"op"``, ``"forward"``, ``"backward"``, ``"tensor"``, ``"gradient"`` or ``"kept"``.
        index: index of the op in the graph behind (in the graph before, if it is not there any more); -1 for the graph.
        what: what changed, in words.
        before: how it was, or an empty string.
        after: how it is, or an empty string.
    """

    part: str
    index: int
    what: str
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.what}: {self.before or 'nothing'} → {self.after or 'nothing'}"


# the part of a drawing that a change marks
_PLACES = {
    "op": "op",
    "forward": "forward",
    "backward": "backward",
    "tensor": "edge forward",
    "gradient": "edge backward",
    "kept": "saved",
}


@dataclasses.dataclass(frozen=True, repr=False)
class GraphDiff:
    """The differences of two graphs. Prints as a list; in notebooks it is the graph behind with the differences marked.

    Attributes:
        before: the one graph.
        after: the other.
        changes: what is different, from the first op on.
    """

    before: Graph
    after: Graph
    changes: tuple[Change, ...]

    def __bool__(self) -> bool:
        return bool(self.changes)

    def __len__(self) -> int:
        return len(self.changes)

    def __repr__(self) -> str:
        return "\n".join(map(str, self.changes)) if self.changes else "no differences"

    def to_dict(self) -> dict[str, Any]:
        """``{"changes": [...]}``, each with the fields of :class:`Change`."""
        return {"changes": [dataclasses.asdict(change) for change in self.changes]}

    def to_svg(self, *, theme: str = "auto") -> str:
        """The graph behind, with borders and words in another colour where it differs; see :meth:`Graph.to_svg`."""
        return marked_svg(self.after, self._marks(), self._notes(), theme)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        rows = [(change.what, change.before, change.after) for change in self.changes]
        drawn = graph_html(self.after, self._marks(), self._notes())
        listed = table(("what", "before", "after"), rows) if rows else "<p>no differences</p>"
        bundle = {
            "text/html": f"{drawn}\n<details><summary>{len(rows)} differences</summary>{listed}</details>",
            "image/svg+xml": self.to_svg(),
            "text/plain": repr(self),
        }
        return chosen(bundle, include, exclude)

    def _marks(self) -> dict[tuple[str, int], str]:
        marks = {}
        for change in self.changes:
            if change.part in _PLACES and change.after:
                marks[_PLACES[change.part], change.index] = change.before or "not there"
        return marks

    def _notes(self) -> tuple[str, ...]:
        own = [str(change) for change in self.changes if change.part == "graph" or not change.after]
        return tuple(own) if self.changes else ("no differences",)


def diff(before: Graph, after: Graph) -> GraphDiff:
    """The differences of two graphs; ops are matched by how they are written.

    Raises:
        TypeError: ``after`` is no graph.
    """
    if not isinstance(after, Graph):
        raise type_error("diff", "other", "a Graph", kind_of(after))
    changes = _totals(before, after)
    pairs, removed, added = _matched(before, after)
    for index in removed:
        changes.append(Change("op", index, f"op {op_title(before.ops[index])} is gone", before.ops[index].config, ""))
    for index in added:
        changes.append(Change("op", index, f"op {op_title(after.ops[index])} is new", "", after.ops[index].config))
    place = dict(pairs)
    for one, other in pairs:
        changes += _op_changes((before, one), (after, other), place)
    changes += _step_changes(before, after, place)
    order = list(_PLACES)
    first = [change for change in changes if change.part == "graph"]
    rest = [change for change in changes if change.part != "graph"]
    rest.sort(key=lambda change: (change.index, order.index(change.part)))
    return GraphDiff(before, after, (*first, *rest))


def _matched(before: Graph, after: Graph) -> tuple[list[tuple[int, int]], list[int], list[int]]:
    """Pairs of ops that are the same, and those of either graph that have none."""
    one, other = [op.config for op in before.ops], [op.config for op in after.ops]
    if len(one) == len(other) and [op.kind for op in before.ops] == [op.kind for op in after.ops]:
        return [(index, index) for index in range(len(one))], [], []
    blocks = difflib.SequenceMatcher(a=one, b=other, autojunk=False).get_matching_blocks()
    pairs = [(block.a + step, block.b + step) for block in blocks for step in range(block.size)]
    kept, there = {pair[0] for pair in pairs}, {pair[1] for pair in pairs}
    return pairs, [i for i in range(len(one)) if i not in kept], [j for j in range(len(other)) if j not in there]


def _totals(before: Graph, after: Graph) -> list[Change]:
    facts: tuple[tuple[str, Callable[[Graph], str]], ...] = (
        ("recipe", lambda graph: graph.recipe or "high precision"),
        ("backend", lambda graph: graph.backend),
        ("device", lambda graph: graph.device.name),
        ("steps", lambda graph: f"{len(graph.forward)} forward, {len(graph.backward)} backward"),
        ("time of the forward", lambda graph: time_text(graph.time("forward"))),
        ("time of the backward", lambda graph: time_text(graph.time("backward"))),
        ("operations", lambda graph: flops_text(graph.flops)),
        ("kept for the backward", lambda graph: bytes_text(graph.saved_bytes)),
        ("error", lambda graph: graph.error),
    )
    pairs = [(what, says(before), says(after)) for what, says in facts]
    return [Change("graph", -1, what, old, new) for what, old, new in pairs if old != new]


def _op_changes(one: tuple[Graph, int], other: tuple[Graph, int], place: dict[int, int]) -> list[Change]:
    (before, i), (after, j) = one, other
    title = op_title(after.ops[j])
    same = {index: index for index in range(-1, len(after.ops) + 1)}
    old, new = _op_facts(before.ops[i], place), _op_facts(after.ops[j], same)
    facts = [
        ("op", title, "; ".join(fact for fact in old if fact not in new), "; ".join(f for f in new if f not in old)),
        ("kept", f"{title} keeps", _kept_text(before.ops[i]), _kept_text(after.ops[j])),
    ]
    for part, direction in (("tensor", "forward"), ("gradient", "backward")):
        old_edge, new_edge = _edge_to(before, direction, i), _edge_to(after, direction, j)
        facts.append((part, f"{part} into {title}", _edge_text(old_edge, place), _edge_text(new_edge, same)))
    return [Change(part, j, what, was, now) for part, what, was, now in facts if was != now]


def _step_changes(before: Graph, after: Graph, place: dict[int, int]) -> list[Change]:
    """What runs for the same ops, once for each step of the graph behind."""
    back = {new: old for old, new in place.items()}
    same = {index: index for index in back}
    changes = []
    for direction in ("forward", "backward"):
        there = {index: step for step in getattr(before, direction) for index in step.indices}
        for step in getattr(after, direction):
            ops = [back[index] for index in step.indices if index in back]
            old = list({there[index].position: there[index] for index in ops if index in there}.values())
            if not ops or (len(old) == 1 and _step_key(old[0], place) == _step_key(step, same)):
                continue
            what = f"{direction} of {_listed(step.indices)}"
            was, now = " + ".join(_step_text(before, own) for own in old), _step_text(after, step)
            if was != now:  # else some bytes of scales differ, which the tensors say
                changes.append(Change(direction, step.indices[0], what, was, now))
    return changes


def _op_facts(op: OpNode, place: dict[int, int]) -> list[str]:
    """How an op is written, its parameters, and the casts that no tensor between ops shows."""
    facts = [op.config, *(f"{name} {tensor_text(tensor)}" for name, tensor in op.params)]
    facts += [f"{c.role} cast to {c.format}" for c in op.casts if c.role not in ("input", "grad_output")]
    for extra in op.extra_inputs:
        origin = f"op {place.get(extra.source, extra.source)}" if extra.source >= 0 else "the caller"
        facts.append(f"extra input from {origin}: {tensor_text(extra.tensor)}")
    return [*facts, op.error] if op.error else facts


def _kept_text(op: OpNode) -> str:
    return ", ".join(f"{saved.name} {tensor_text(saved.tensor)} {bytes_text(saved.nbytes)}" for saved in op.saved)


def _step_key(step: Step, place: dict[int, int]) -> Any:
    return step.kind, tuple(place.get(index) for index in step.indices), step.kernels, step.gate


def _step_text(graph: Graph, step: Step) -> str:
    own = step_time(graph, step)
    math = sorted({kernel.math for kernel in step.kernels if kernel.math})
    cost = time_text(own.seconds) if own.bound else "launches nothing" if step.inline else "no kernel"
    return f"{step.kind} of {_listed(step.indices)} ({cost}" + (f", {' and '.join(math)} products)" if math else ")")


def _listed(indices: tuple[int, ...]) -> str:
    return ", ".join(map(str, indices))


def _edge_to(graph: Graph, direction: str, target: int) -> Edge | None:
    return next((edge for edge in graph.edges if edge.direction == direction and edge.target == target), None)


def _edge_text(edge: Edge | None, place: dict[int, int]) -> str:
    if edge is None:
        return ""
    caster = edge.target if edge.cast_by == "target" else edge.source
    cast = f", cast by op {place.get(caster, caster)}" if edge.cast_by else ""
    return f"{tensor_text(edge.tensor)}{cast}" + (", inside of a fusion" if edge.inside else "")
