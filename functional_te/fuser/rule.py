"""Fusion rules are data: a pattern of op classes, a predicate that gives its reason for refusing, a builder."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from functional_te._errors import type_error
from functional_te._value import Value
from functional_te.ops import FusedOp, Op, OpRequiresGrad
from functional_te.quantization.recipes import Recipe

__all__ = ["FusionRule", "Fusions", "Slot", "Window"]


@dataclasses.dataclass(frozen=True, eq=False)
class Slot(Value):
    """One place of a pattern.

    Attributes:
        types: op classes that may stand here (subclasses included).
        optional: whether the place may stay empty.
    """

    types: tuple[type[Op], ...]
    optional: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.types, tuple) or not self.types:
            raise type_error("Slot", "types", "a tuple of op classes", repr(self.types))
        for kind in self.types:
            if not (isinstance(kind, type) and issubclass(kind, Op)):
                raise type_error("Slot", "types", "op classes", repr(kind))


@dataclasses.dataclass(frozen=True)
class Window:
    """What a predicate sees of a candidate.

    Attributes:
        ops: the matched ops in chain order.
        start: index of the first of them.
        recipe: the recipe, or None.
        requires_grad: what the backward of each matched op has to produce.
    """

    ops: tuple[Op, ...]
    start: int
    recipe: Recipe | None
    requires_grad: tuple[OpRequiresGrad, ...]


def _always(window: Window) -> str | None:
    del window
    return None


@dataclasses.dataclass(frozen=True, eq=False)
class FusionRule(Value):
    """A fusion.

    Attributes:
        name: name in plans and messages.
        pattern: places in chain order.
        build: from the matched ops to the fused op.
        refuse: None if a match may be fused, else the reason; a module-level function.
    """

    name: str
    pattern: tuple[Slot, ...]
    build: Callable[[tuple[Op, ...]], FusedOp]
    refuse: Callable[[Window], str | None] = _always

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise type_error("FusionRule", "name", "a non-empty string", repr(self.name))
        if not isinstance(self.pattern, tuple) or not self.pattern:
            raise type_error("FusionRule", "pattern", "a tuple of Slots", repr(self.pattern))
        for slot in self.pattern:
            if not isinstance(slot, Slot):
                raise type_error("FusionRule", "pattern", "a tuple of Slots", repr(slot), "Write Slot((Op,)).")
        for argument in ("build", "refuse"):
            if not callable(getattr(self, argument)):
                raise type_error("FusionRule", argument, "a function", repr(getattr(self, argument)))

    def match(self, ops: Sequence[Op | FusedOp], start: int) -> int:
        """How many items from ``start`` the pattern takes; 0 if it does not match. Optional places are greedy."""
        position = start
        for slot in self.pattern:
            if position < len(ops) and isinstance(ops[position], slot.types):
                position += 1
            elif not slot.optional:
                return 0
        return position - start


@dataclasses.dataclass(frozen=True, eq=False)
class Fusions(Value):
    """The rules a plan may use, each pass in order of priority.

    Attributes:
        joint: rules whose fused op runs both directions.
        forward: forward-only rules.
        backward: backward-only rules.
    """

    joint: tuple[FusionRule, ...] = ()
    forward: tuple[FusionRule, ...] = ()
    backward: tuple[FusionRule, ...] = ()

    def __post_init__(self) -> None:
        for name in ("joint", "forward", "backward"):
            for rule in getattr(self, name):
                if not isinstance(rule, FusionRule):
                    raise type_error("Fusions", name, "FusionRule entries", type(rule).__name__)
