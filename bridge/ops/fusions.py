"""Fusions in the style of te.ops: functions over modules that put fused modules in the place of basic ones.

A registered function gets the ops of a group and returns a list in which it has put instances of
:class:`~bridge.ops.FusedOperation` subclasses in the place of consecutive ops. The passes are te.ops': the functions
for both directions see the basic ops; those for the forward and those for the backward each see the result of that.
What comes out is one fusion rule per fused module, which matches at its very position; the built-in rules apply to the
rest of the plan. Registering takes effect at the next call of every group.
"""

from __future__ import annotations

import dataclasses
import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from bridge.ops.custom import hooked_fused_op
from bridge.ops.hook_calls import module_of, remember
from functional_te import fuser
from functional_te._errors import type_error
from functional_te._value import Table, Value, value_of
from functional_te.chain import Chain
from functional_te.ops import FusedOp, Op
from functional_te.recipes import Recipe

__all__ = [
    "FusionCache",
    "register_backward_fusion",
    "register_forward_backward_fusion",
    "register_forward_fusion",
    "registered",
]

FusionFunction = Callable[..., list[Any]]


class _Registered:
    """The registered functions.

    Attributes:
        version: names the current set; empty if there are none. A string, so that traced code may be guarded by it.
    """

    def __init__(self) -> None:
        self.joint: list[FusionFunction] = []
        self.forward: list[FusionFunction] = []
        self.backward: list[FusionFunction] = []
        self.version = ""
        self.count = itertools.count(1)

    def add(self, direction: str, function: Any, prepend: bool) -> None:
        if isinstance(function, fuser.FusionRule):
            register = {
                "joint": fuser.register_forward_backward_fusion,
                "forward": fuser.register_forward_fusion,
                "backward": fuser.register_backward_fusion,
            }
            register[direction](function, prepend=prepend)
            return
        if not callable(function):
            raise type_error(f"register_{direction}_fusion", "func", "a function or a FusionRule", repr(function))
        functions: list[FusionFunction] = getattr(self, direction)
        functions.insert(0 if prepend else len(functions), function)
        self.changed()

    def remove(self, function: FusionFunction) -> None:
        """Take a function back out of every pass."""
        for functions in (self.joint, self.forward, self.backward):
            while function in functions:
                functions.remove(function)
        self.changed()

    def changed(self) -> None:
        known = self.joint or self.forward or self.backward
        self.version = f"r{next(self.count)}" if known else ""


registered = _Registered()


def register_forward_fusion(func: Any, prepend: bool = False) -> None:
    """Register a fusion of the forward.

    Args:
        func: ``func(ops, *, recipe, **unused) -> list`` over modules, or a :class:`functional_te.FusionRule`. Fusions
            over modules come before the built-in ones.
        prepend: put it before those registered earlier.
    """
    registered.add("forward", func, prepend)


def register_backward_fusion(func: Any, prepend: bool = False) -> None:
    """Register a fusion of the backward; see :func:`register_forward_fusion`."""
    registered.add("backward", func, prepend)


def register_forward_backward_fusion(func: Any, prepend: bool = False) -> None:
    """Register a fusion of both directions; see :func:`register_forward_fusion`."""
    registered.add("joint", func, prepend)


@dataclasses.dataclass(frozen=True, eq=False)
class _Builder(Value):
    """Builds the adapter of a fused module."""

    serial: str
    direction: str
    needed: tuple[tuple[str, ...], ...]

    def __call__(self, ops: tuple[Op, ...]) -> FusedOp:
        return hooked_fused_op(module_of(self.serial), self.serial, ops, self.direction, self.needed)


@dataclasses.dataclass(frozen=True, eq=False)
class PositionedRule(fuser.FusionRule):
    """A rule that matches at one place of a chain.

    Attributes:
        start: index of the first basic op.
        count: how many it covers.
    """

    start: int = 0
    count: int = 0

    def match(self, ops: Sequence[Op | FusedOp], start: int) -> int:
        """``count`` if the basic ops from there are the ones meant."""
        index = sum(len(op.ops) if isinstance(op, FusedOp) else 1 for op in ops[:start])
        covered = ops[start : start + self.count]
        fits = index == self.start and len(covered) == self.count and all(isinstance(op, Op) for op in covered)
        return self.count if fits else 0


Items = list[Any]


def _basic(item: Any) -> list[Any]:
    return list(item.basic_ops) if item.is_fused_op else [item]


def _run_pass(functions: list[FusionFunction], items: Items, basic: list[Any], recipe: Recipe | None) -> Items:
    for function in functions:
        result = function(list(items), recipe=recipe)
        name = getattr(function, "__name__", repr(function))
        if not isinstance(result, (list, tuple)):
            raise RuntimeError(f"fusion {name}: expected a list of operations, got {type(result).__name__}.")
        for item in result:
            if not hasattr(item, "is_fused_op"):
                raise RuntimeError(f"fusion {name}: expected operations, got {type(item).__name__}.")
        expanded = [op for item in result for op in _basic(item)]
        same = len(expanded) == len(basic) and all(a is b for a, b in zip(expanded, basic, strict=True))
        if not same:
            raise RuntimeError(
                f"fusion {name}: mismatch: expected operations that expand to "
                f"{[type(op).__name__ for op in basic]}, got {[type(op).__name__ for op in expanded]}."
            )
        items = list(result)
    return items


_serials = itertools.count(1)


def _serial_of(module: Any) -> str:
    """The serial of a fused module; a copy of a module has none yet."""
    known: str | None = module.__dict__.get("_hook_serial")
    try:
        if known is not None and module_of(known) is module:
            return known
    except AttributeError:  # its namesake is gone
        pass
    serial = f"f{next(_serials)}"
    module.__dict__["_hook_serial"] = serial
    return serial


def _needed(block: Chain, start: int, count: int) -> tuple[tuple[str, ...], ...]:
    """For every covered op and extra output, why it has to be given."""
    inside = range(start, start + count)
    consumed = {
        (source.op, source.slot)
        for index, sources in enumerate(block.extra_sources)
        if index not in inside
        for source in sources
        if source.public < 0
    }
    return tuple(
        tuple(
            "is public"
            if (index, slot) in block.extra_outputs
            else "is consumed outside its forward fusion"
            if (index, slot) in consumed
            else ""
            for slot in range(block.ops[index].num_extra_outputs)
        )
        for index in inside
    )


def _rules(items: Items, direction: str, block: Chain, taken: Items) -> tuple[PositionedRule, ...]:
    """One rule per fused module of ``items`` that is not among ``taken``."""
    rules, start = [], 0
    for item in items:
        count = len(_basic(item))
        if item.is_fused_op and not any(item is known for known in taken):
            _check_hooks(item, direction)
            serial = _serial_of(item)
            remember(serial, item)
            rules.append(
                PositionedRule(
                    name=f"{type(item).__name__} at {start}",
                    pattern=(fuser.Slot((Op,)),) * count,
                    build=_Builder(serial, direction, _needed(block, start, count)),
                    start=start,
                    count=count,
                )
            )
        start += count
    return tuple(rules)


def _check_hooks(module: Any, direction: str) -> None:
    from bridge.ops.operation import FusedOperation

    for hook in ("forward", "backward"):
        own = getattr(type(module), f"fuser_{hook}")
        if direction in (hook, "joint") and own is getattr(FusedOperation, f"fuser_{hook}"):
            raise RuntimeError(f"{type(module).__name__}: a {direction} fusion has to override fuser_{hook}.")


def _check_nesting(items: Items, joint: Items, direction: str) -> None:
    for fused in joint:
        if fused.is_fused_op and not any(fused is item for item in items):
            raise RuntimeError(
                f"{type(fused).__name__}: a {direction} fusion took apart what a fusion of both directions had put "
                "together."
            )


def _make_fusions(modules: list[Any], block: Chain, recipe: Recipe | None) -> tuple[fuser.Fusions, list[Any]]:
    """The rules for one chain of modules, and the fused modules that they name."""
    joint = _run_pass(registered.joint, list(modules), modules, recipe)
    forward = _run_pass(registered.forward, joint, modules, recipe)
    backward = _run_pass(registered.backward, joint, modules, recipe)
    for items, direction in ((forward, "forward"), (backward, "backward")):
        _check_nesting(items, joint, direction)
    default = fuser.default_fusions()
    fusions = fuser.Fusions(
        joint=(*_rules(joint, "joint", block, []), *default.joint),
        forward=(*_rules(forward, "forward", block, joint), *default.forward),
        backward=(*_rules(backward, "backward", block, joint), *default.backward),
    )
    fused = [item for items in (joint, forward, backward) for item in items if item.is_fused_op]
    return fusions, fused


class FusionCache:
    """The fusions of a group by chain and recipe, as long as the same functions are registered.

    Keeps the fused modules alive, which op values only name.
    """

    def __init__(self, modules: list[Any]) -> None:
        self.modules = modules
        self.serial = f"c{next(_serials)}"
        self.made: dict[Any, tuple[fuser.Fusions, list[Any]]] = {}
        _caches[self.serial] = self

    def fusions(self, block: Chain, recipe: Recipe | None) -> fuser.Fusions:
        """The fusions to plan a call with, while at least one function is registered."""
        if torch.compiler.is_compiling():
            names = f"{self.serial}/{registered.version}/{block.uid}/{'' if recipe is None else recipe.uid}"
            return getattr(_traced, _find_while_traced(names))
        key = (registered.version, fuser.default_fusions(), block, recipe)
        found = self.made.get(key)
        if found is None:
            self.made = {k: v for k, v in self.made.items() if k[0] == registered.version}
            found = self.made[key] = _make_fusions(self.modules, block, recipe)
        return found[0]


_caches: weakref.WeakValueDictionary[str, FusionCache] = weakref.WeakValueDictionary()
_traced = Table()


@torch.compiler.assume_constant_result
def _find_while_traced(names: str) -> str:
    """Make the fusions of a group, for real, while a caller is traced."""
    serial, version, block, recipe = names.split("/")
    cache = _caches[serial]
    key = (version, fuser.default_fusions(), value_of(block), value_of(recipe))
    if key not in cache.made:
        cache.made[key] = _make_fusions(cache.modules, value_of(block), value_of(recipe))
    name = "fusions_" + names.replace("/", "_")
    setattr(_traced, name, cache.made[key][0])
    return name
