"""The fusions that plans use by default: the built-in ones and those a user registered."""

from __future__ import annotations

import dataclasses

from functional_te._errors import type_error
from functional_te.fuser.rule import FusionRule, Fusions
from functional_te.fuser.rules import BACKWARD, FORWARD, JOINT

__all__ = [
    "default_fusions",
    "register_backward_fusion",
    "register_forward_backward_fusion",
    "register_forward_fusion",
]

_current = Fusions(joint=JOINT, forward=FORWARD, backward=BACKWARD)


def default_fusions() -> Fusions:
    """The rules in force. Plans made earlier keep the rules they were made with."""
    return _current


def _register(name: str, rule: FusionRule, prepend: bool) -> None:
    global _current  # noqa: PLW0603 - the one registry; its value is part of every plan's key
    if not isinstance(rule, FusionRule):
        raise type_error(f"register_{name}_fusion", "rule", "a FusionRule", type(rule).__name__)
    rules = tuple(known for known in getattr(_current, name) if known is not rule)
    _current = dataclasses.replace(_current, **{name: (rule, *rules) if prepend else (*rules, rule)})


def register_forward_fusion(rule: FusionRule, *, prepend: bool = False) -> None:
    """Add a forward-only fusion, last in priority or first."""
    _register("forward", rule, prepend)


def register_backward_fusion(rule: FusionRule, *, prepend: bool = False) -> None:
    """Add a backward-only fusion, last in priority or first."""
    _register("backward", rule, prepend)


def register_forward_backward_fusion(rule: FusionRule, *, prepend: bool = False) -> None:
    """Add a fusion that runs both directions, last in priority or first."""
    _register("joint", rule, prepend)
