"""Blocks of a chain that repeat, so that a hundred ops are drawn as one block and how often it comes."""

from __future__ import annotations

from typing import Any, NamedTuple

from functional_te.graph.value import Graph

__all__ = ["Segment", "segments"]

_LONGEST = 64  # ops of a block


class Segment(NamedTuple):
    """Rows that are drawn.

    Attributes:
        start: index of the first op.
        stop: index behind the last op that is drawn.
        repeats: how often ``ops[start:stop]`` comes in a row; once for ops that do not repeat.
    """

    start: int
    stop: int
    repeats: int

    @property
    def end(self) -> int:
        """Index behind the last repetition."""
        return self.start + (self.stop - self.start) * self.repeats


def _signatures(graph: Graph, marks: Any) -> list[int]:
    """A number for every op; equal ones look the same in a drawing."""
    steps: dict[int, list[Any]] = {}
    for step in graph.steps:
        for place, index in enumerate(step.indices):
            launch = (step.direction, place, len(step.indices), step.kind, step.kernels, step.gate, step.input.format)
            steps.setdefault(index, []).append(launch)
    numbers: dict[Any, int] = {}
    found = []
    for op in graph.ops:
        extras = tuple((extra.slot, extra.channel is None, extra.source >= 0) for extra in op.extra_inputs)
        kept = tuple((saved.name, saved.tensor, saved.origin) for saved in op.saved)
        casts = tuple((cast.role, cast.format, cast.copies) for cast in op.casts)
        own = (
            op.kind,
            op.name,
            op.input,
            op.output,
            op.params,
            casts,
            extras,
            kept,
            op.state,
            tuple(steps.get(op.index, ())),
            marks(op.index) if marks is not None else None,
        )
        found.append(numbers.setdefault(own, len(numbers)))
    return found


def _repeats(numbers: list[int], start: int, length: int) -> int:
    """How often the ``length`` numbers from ``start`` on come in a row."""
    count = 1
    while numbers[start : start + length] == numbers[start + count * length : start + (count + 1) * length]:
        count += 1
    return count


def segments(graph: Graph, collapse: bool = True, marks: Any = None) -> tuple[Segment, ...]:
    """The rows to draw.

    Args:
        graph: the graph.
        collapse: False draws every op.
        marks: a function from the index of an op to something that has to be equal as well.
    """
    count = len(graph.ops)
    if not collapse or count < 4:
        return (Segment(0, count, 1),) if count else ()
    numbers = _signatures(graph, marks)
    # a block starts and ends between steps, in both directions
    inside = {index for step in graph.steps for index in step.indices[1:]}
    found: list[Segment] = []
    position = plain = 0
    while position < count:
        best = Segment(position, position + 1, 1)
        if position not in inside:
            for length in range(1, min(_LONGEST, (count - position) // 2) + 1):
                repeats = _repeats(numbers, position, length)
                hidden = (repeats - 1) * length
                if repeats > 1 and position + length not in inside and hidden > best.end - best.stop:
                    best = Segment(position, position + length, repeats)
        if best.repeats > 1 and best.end - best.stop >= 2:
            if plain < position:
                found.append(Segment(plain, position, 1))
            found.append(best)
            position = plain = best.end
        else:
            position += 1
    if plain < count:
        found.append(Segment(plain, count, 1))
    return tuple(found)
