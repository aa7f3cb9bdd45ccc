"""What rules are, and what they see of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

import functional_te as fte
from bridge.convert.borrowed import Borrowed, PackedBias, PackedWeight
from bridge.convert.swap import base_class
from functional_te.chain import Chain
from functional_te.fuser.plan import plan as make_plan
from functional_te.ops import Op
from functional_te.recipes import Recipe

__all__ = ["GATED", "Fused", "Leaf", "Site", "is_from", "pack", "plain", "refusal"]

# fused forms of activations that multiply the second half of their input
GATED: dict[type[Op], Op] = {
    fte.SiLU: fte.SwiGLU(),
    fte.GELU: fte.GEGLU(),
    fte.ReLU: fte.ReGLU(),
    fte.QGELU: fte.QGEGLU(),
}


class Leaf(NamedTuple):
    """A module that is a chain by itself.

    Attributes:
        rule: name of the rule.
        ops: the chain.
        why: what it does, for the report.
        call: what runs it with the arguments of its forward; None is the chain.
        only_inside: why it is converted only as a part of a larger chain; "" if also by itself.
        data: what runs in the place of a chain over ``ops``, if there are none.
    """

    rule: str
    ops: tuple[Borrowed, ...]
    why: str
    call: Callable[..., Any] | None = None
    only_inside: str = ""
    data: Any = None


class Fused(NamedTuple):
    """A module whose forward runs chains over its parts.

    Attributes:
        rule: name of the rule.
        call: see :class:`~bridge.convert.swap.Record`.
        data: likewise.
        ops: operations that no part of it has.
        parts: the modules that the chains run without calling them.
        why: what it does, for the report.
        covered: operations of parts in whose place one of ``ops`` runs a recipe.
        changed: attributes of the module to set.
    """

    rule: str
    call: Callable[..., Any]
    data: Any
    ops: tuple[Borrowed, ...]
    parts: tuple[torch.nn.Module, ...]
    why: str
    covered: tuple[Borrowed, ...] = ()
    changed: dict[str, Any] | None = None


class Site:
    """The model as rules for containers see it: the leaves and fused modules found so far.

    Args:
        leaves: by id of the module.
        recipe: the recipe of the conversion, or None.
    """

    def __init__(self, leaves: dict[int, Leaf], recipe: Recipe | None) -> None:
        self._leaves = leaves
        self.fused: dict[int, Fused] = {}
        self.recipe = recipe

    def leaf(self, module: Any) -> Leaf | None:
        """The leaf of a module, if it has one."""
        return self._leaves.get(id(module))

    def ops(self, module: Any, *kinds: type[Op]) -> tuple[Borrowed, ...] | None:
        """The operations of a leaf, if it has some and the first is one of ``kinds`` (any, without)."""
        leaf = self._leaves.get(id(module))
        if leaf is None or not leaf.ops or (kinds and not isinstance(leaf.ops[0].op, kinds)):
            return None
        return leaf.ops


def plain(module: Any, forward: Any) -> bool:
    """Whether a module runs exactly this forward."""
    return base_class(module).forward is forward and "forward" not in module.__dict__


def is_from(module: Any, names: Iterable[str], package: str = "transformers.") -> bool:
    """Whether the class of a module has one of these names and comes from a package, and runs its own forward."""
    kind = base_class(module)
    return kind.__name__ in names and kind.__module__.startswith(package) and "forward" not in module.__dict__


def refusal(ops: Iterable[Borrowed], recipe: Recipe | None) -> str | None:
    """Why a recipe cannot run operations; None if it can."""
    if recipe is None:
        return None
    for op in ops:
        try:
            make_plan(Chain((op.op,)), recipe=recipe)
        except ValueError as error:
            return f"{type(recipe).__name__} cannot run it: {str(error).removeprefix('op 0 ')}"
    return None


def pack(leaves: list[Leaf], recipe: Recipe | None) -> tuple[Borrowed, ...] | str:
    """One linear, with bias if they have one, in the place of several with the same input; or why there is none."""
    sources: list[Any] = [leaf.ops[0].sources[0] for leaf in leaves]
    if any(type(leaf.ops[0]) is not Borrowed for leaf in leaves):
        return "weights that are stored otherwise cannot be packed"
    if len({(source.weight.dtype, source.weight.device, source.weight.shape[1]) for source in sources}) > 1:
        return "weights of different dtypes, devices or widths cannot be packed"
    biased = {len(leaf.ops) > 1 for leaf in leaves}
    if len(biased) > 1:
        return "some have a bias and some have none"
    ops: tuple[Borrowed, ...] = (PackedWeight(*sources),)
    if biased == {True}:
        ops = (*ops, PackedBias(*sources))
    return refusal(ops, recipe) or ops
