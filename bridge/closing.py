"""The steps of delayed scaling that end when a context is entered: those of all modules that observed, at once.

On a GPU they take one launch, however many they are. What it needs to know of them is found out once, and again when a
module comes, goes, or gets other quantizers or tensors. :mod:`bridge.recipe_context` says when a step ends.
"""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from bridge import compat
from bridge.state import closing, has_closing_kernel, is_builtin_delayed
from functional_te.quantization.quantizers import Quantizer
from functional_te.quantization.state import DelayedScalingState, update_scale
from functional_te.recipes import Recipe

__all__ = ["close_steps", "holders", "prepare_states", "register_holder"]

_holders: weakref.WeakSet[Any] = weakref.WeakSet()


def register_holder(module: Any) -> None:
    """Register a module that has quantizers, so that its steps can be closed."""
    _holders.add(module)


def holders() -> list[Any]:
    """The modules that were registered and are still alive."""
    return list(_holders)


def prepare_states(recipe: Recipe | None) -> None:
    """Give modules without state the state that ``recipe`` needs."""
    for module in _holders:
        module.prepare_state(recipe)


class _Entry(NamedTuple):
    """The place of a module among those that close, and the role, quantizer and state of one of its tensors."""

    place: int
    role: str
    quantizer: Quantizer
    state: Any


class _Group(NamedTuple):
    """States that are closed by one call.

    Attributes:
        close: closes; gives what casts read before.
        forward: of every forward quantizer the place among these states, the place of its module, and its role.
    """

    close: Callable[[], Sequence[torch.Tensor]]
    forward: tuple[tuple[int, int, str], ...]


class _Steps:
    """What there is to close.

    Args:
        modules: those that have quantizers.
        pending: what each said of its states (:meth:`bridge.ops.BasicOperation.pending`).
    """

    def __init__(self, modules: Sequence[Any], pending: list[list[Any]]) -> None:
        self.pending = pending
        together: dict[Any, list[_Entry]] = {}
        others: dict[Any, list[_Entry]] = {}
        for place, own in enumerate(pending):
            for role, quantizer, state in own:
                entry, device = _Entry(place, role, quantizer, state), state.read.device
                # a kernel is given addresses, which fake tensors lack
                if has_closing_kernel(quantizer, device) and type(state.read) is torch.Tensor:
                    together.setdefault((device, quantizer.amax_compute_algo), []).append(entry)
                else:
                    others.setdefault((quantizer, device), []).append(entry)
        # a launch writes to their addresses
        self.tensors = [
            tensor for own in together.values() for *_, state in own for tensor in (state.scale, state.amax_history)
        ]
        self.addresses = [tensor.data_ptr() for tensor in self.tensors]
        calls: list[tuple[list[_Entry], Callable[[], Any]]] = [
            (own, closing([(quantizer, state) for _, _, quantizer, state in own])) for own in together.values()
        ]
        for (quantizer, _), own in others.items():
            calls.append((own, functools.partial(_update_together, quantizer, [state for *_, state in own])))
        self.groups = [
            _Group(
                close,
                tuple(
                    (index, place, role)
                    for index, (place, role, _, _) in enumerate(own)
                    if role in modules[place].op.forward_quantizers
                ),
            )
            for own, close in calls
        ]

    def hold(self, pending: list[list[Any]]) -> bool:
        """Whether this is still all, and where it was."""
        return (
            len(pending) == len(self.pending)
            and all(map(operator.is_, pending, self.pending))
            and [tensor.data_ptr() for tensor in self.tensors] == self.addresses
        )


class _Last:
    """The steps that were closed last. They keep states alive, no module and no weight."""

    steps: _Steps | None = None


def close_steps(waiting: set[Any]) -> None:
    """Close the step of every module that observed something, but of those that are ``waiting``.

    What forward quantizers read before is remembered, for a forward that is recomputed.
    """
    modules = [module for module in _holders if module not in waiting] if waiting else list(_holders)
    pending = [module.pending() for module in modules]
    steps = _Last.steps
    if steps is None or not steps.hold(pending):
        steps = _Last.steps = _Steps(modules, pending)
    with torch.no_grad():
        for group in steps.groups:
            before = group.close()
            for index, place, role in group.forward:
                module = modules[place]
                if module.observed:
                    module.scales_before_close.setdefault(role, before[index])
    for module in modules:
        vars(module)["observed"] = False  # past torch.nn.Module, which looks for it among parameters first


def _update_together(quantizer: Quantizer, states: list[Any]) -> list[torch.Tensor]:
    """``update_scale`` for many states of one quantizer at once, written back in place.

    Returns:
        The scales (or keys) as they were before.
    """
    before = [state.read.clone() for state in states]
    # the backward of a compiled forward reads the gradient's scale as it is then
    with compat.preserved_versions(tuple([own for state in states for own in (state.read, state.amax_history)])):
        for state, update in zip(states, _updates(quantizer, states), strict=True):
            state.read.copy_(update.read)
            state.amax_history.copy_(update.amax_history)
    return before


def _updates(quantizer: Quantizer, states: list[Any]) -> list[Any]:
    if not is_builtin_delayed(quantizer):
        return [update_scale(quantizer, state) for state in states]
    stacked = DelayedScalingState(
        scale=torch.stack([state.scale for state in states]),
        amax_history=torch.stack([state.amax_history for state in states]),
    )
    updated = update_scale(quantizer, stacked)
    return [
        DelayedScalingState(scale=scale, amax_history=history)
        for scale, history in zip(updated.scale, updated.amax_history, strict=True)
    ]
