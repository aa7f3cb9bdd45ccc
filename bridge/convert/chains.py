"""Chains over borrowed operations, and what decides at a call whether they may run."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from bridge.compat import in_backward
from bridge.ops.group import Group
from bridge.ops.operation import BasicOperation
from bridge.ops.structural import AddExtraInput, MakeExtraOutput
from bridge.recipe_context import active_recipe

__all__ = ["BoundChain", "Parts", "add", "chains_in", "fork", "inert", "runs_recipe"]


class BoundChain:
    """Operations that run as one chain.

    Attributes:
        ops: the operations; they may also be in other chains, and have one state in all of them.
    """

    def __init__(self, *ops: BasicOperation) -> None:
        self.ops = ops
        for op in ops:
            op._owners.append(weakref.ref(self))
        self.regroup()

    def regroup(self) -> None:
        """Also when an operation becomes another one, as when it is sharded."""
        self._group = Group(list(self.ops))

    def __call__(self, x: torch.Tensor, *extra_inputs: torch.Tensor) -> Any:
        """The output, or a tuple of it and the extra outputs."""
        outputs = self._group(x, extra_inputs)
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def __getstate__(self) -> dict[str, Any]:
        return {"ops": self.ops}

    def __setstate__(self, state: dict[str, Any]) -> None:
        BoundChain.__init__(self, *state["ops"])


def chains_in(data: Any) -> list[BoundChain]:
    """The chains in what a converted module needs, each once."""
    found: dict[int, BoundChain] = {}
    waiting, seen = [data], set()
    while waiting:
        value = waiting.pop(0)
        if isinstance(value, BoundChain):
            found.setdefault(id(value), value)
        elif id(value) not in seen and not isinstance(value, (torch.Tensor, torch.nn.Module, type)):
            seen.add(id(value))
            held = value.values() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else None
            waiting.extend(getattr(value, "__dict__", {}).values() if held is None else held)
    return list(found.values())


def fork(channel: str | None = "residual") -> BasicOperation:
    """The start of a residual branch: into a channel, or (None) returned to the caller."""
    op = MakeExtraOutput()
    return op if channel is None else op.set_extra_output_channel(0, channel, output_to_caller=False)


def add(channel: str | None = "residual") -> BasicOperation:
    """The end of a residual branch: from a channel, or (None) given by the caller."""
    op = AddExtraInput()
    return op if channel is None else op.set_extra_input_channel(0, channel)


class Parts:
    """Modules that a chain runs without calling them.

    Args:
        members: for every module, the module it is a child of, its name there, and itself.
    """

    def __init__(self, *members: tuple[torch.nn.Module, str, torch.nn.Module]) -> None:
        self.members = members

    def intact(self) -> bool:
        """Whether they are still in their places and nothing wants to see their calls."""
        for owner, name, part in self.members:
            if owner._modules.get(name) is not part:
                return False
            if part._forward_hooks or part._forward_pre_hooks or part._backward_hooks or part._backward_pre_hooks:
                return False
        return True


def inert(dropouts: tuple[Any, ...]) -> bool:
    """Whether none of these dropouts changes anything in this call."""
    return not any(dropout.training and dropout.p > 0 for dropout in dropouts)


def runs_recipe(op: Any) -> bool:
    """Whether an operation runs a recipe in this call.

    A forward that is recomputed by a backward outside of any context does what it did first, as chains do.
    """
    recipe = active_recipe()
    if torch.compiler.is_compiling():
        return recipe is not None
    if recipe is None and in_backward():
        return op._last_recipe is not None
    if op._last_recipe is not recipe:
        op._last_recipe = recipe
    return recipe is not None
