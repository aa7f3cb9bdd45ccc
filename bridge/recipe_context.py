"""``autocast``: which recipe the modules run, and when a step of delayed scaling is closed.

A module's quantizers observe while it runs; a step is closed, for all modules, when the outermost ``autocast`` of the
*next* forward is entered. So every forward and backward of one step, a recomputed forward included, reads
the same scales, and the scales of each step are those Transformer Engine would use: it closes the forward's
quantizers when the context ends and the backward's when the backward ends, both before the next step. Nothing is
closed while a backward runs (activation checkpointing enters contexts again) or inside of a ``torch.func`` transform,
which may write to nothing. Without grad mode nothing is observed.

Where ranks agree on amaxes (:func:`bridge.distributed.agree_amaxes`) they do so when a step is closed. Then a context
that is entered without grad mode closes nothing: ranks evaluate as they like.

A context that is entered inside a compiled function cannot see the modules of the next step. There each module closes
its forward quantizers when it first runs in the context, and each backward closes its gradient quantizers.
"""

from __future__ import annotations

from typing import Any

import torch

from bridge import compat
from bridge.closing import close_steps, holders, prepare_states
from bridge.state import close_states_
from bridge.weight_cache import count_optimizer_steps, refresh_known_weights
from functional_te._errors import type_error
from functional_te.recipes import DelayedScaling, Recipe, as_recipe

__all__ = [
    "active_recipe",
    "add_agreement",
    "agreements",
    "autocast",
    "close_in_graph",
    "closed_steps",
    "closes_in_graph",
    "default_recipe",
    "in_context",
    "reads_weight_casts",
    "remove_agreement",
    "shared_modules",
    "steps_to_close",
]


class _Active:
    """The innermost active context.

    Attributes:
        depth: how many contexts are open.
        recipe: the recipe of the innermost enabled one, or None.
        cache_recipe: the recipe of the outermost context if it keeps casts of weights, else None.
        closed: modules whose step was closed inside the graph being traced; None if the outermost context was not
            entered inside a graph.
        captured: modules whose step was closed inside the CUDA graph being captured; None if the outermost context was
            not entered inside of a capture.
    """

    def __init__(self) -> None:
        self.depth = 0
        self.recipe: Recipe | None = None
        self.closed: list[Any] | None = None
        self.captured: list[Any] | None = None
        self.cache_recipe: Recipe | None = None


_active = _Active()
# what ranks share, in the order in which they said so
_agreements: list[Any] = []


def add_agreement(agreement: Any) -> None:
    """Have ``agreement.agree(recipe)`` called whenever a training step of its ``modules`` is closed."""
    _agreements.append(agreement)


def remove_agreement(agreement: Any) -> None:
    """Undo :func:`add_agreement`; nothing if it is undone already."""
    if agreement in _agreements:
        _agreements.remove(agreement)


def agreements() -> tuple[Any, ...]:
    """Those that hold, in the order in which they were made."""
    return tuple(_agreements)


def shared_modules() -> set[Any]:
    """The modules on whose amaxes ranks agree."""
    return {module for own in _agreements for module in own.modules}


def default_recipe() -> Recipe:
    """The recipe of ``autocast(recipe=None)``: delayed scaling, Transformer Engine's default up to Hopper."""
    return DelayedScaling()


def active_recipe() -> Recipe | None:
    """The recipe that modules run, or None for high precision."""
    return _active.recipe


def in_context() -> bool:
    """Whether any ``autocast`` is open, a disabled one included."""
    return _active.depth > 0


def reads_weight_casts() -> bool:
    """Whether modules may read casts of weights that are kept: those of the outermost context's recipe."""
    return _active.cache_recipe is not None and _active.cache_recipe is _active.recipe


class autocast:
    """Run the modules of :mod:`bridge.ops` with a recipe. Reusable, not reentrant; contexts may nest.

    The setting belongs to the process, as in Transformer Engine, not to a thread: modules of one process that run in
    several threads share it.

    Entered inside a compiled function, a context may not hold activation checkpointing of modules with delayed scaling
    (Dynamo refuses what would be remembered of a forward that it traces twice); enter it around the compiled call.

    Args:
        enabled: False runs high precision inside.
        calibrating: accepted for compatibility; no op uses it.
        recipe: a recipe, also one of Transformer Engine; None means :func:`default_recipe`.
        amax_reduction_group: None, or a process group for which :func:`bridge.distributed.agree_amaxes` was called: on
            entry nobody knows what will run inside, and all ranks have to send the same.
        cache_weights: keep the casts of the weights of modules that run inside, and cast them again on entry of the
            outermost context if they have changed: with gradient accumulation each weight is cast once per optimizer
            step. Costs the memory of the casts. Weights may not be written to between entry and a compiled forward,
            nor through ``.data``. With delayed scaling a kept cast keeps its scale, where casting again would use the
            next one.
            Without effect if the outermost context is entered inside a compiled function.

    Raises:
        TypeError: ``recipe`` is no recipe, or ``enabled`` no bool.
        NotImplementedError: an ``amax_reduction_group`` without such a call.
        RuntimeError: the object is entered while it is open; or inside of a compiled function or a CUDA graph that is
            captured, while ranks agree on amaxes.
    """

    def __init__(
        self,
        enabled: bool = True,
        calibrating: bool = False,
        recipe: Recipe | None = None,
        amax_reduction_group: Any = None,
        _graph: bool = False,
        *,
        cache_weights: bool = False,
    ) -> None:
        del calibrating, _graph
        if not isinstance(cache_weights, bool):
            raise type_error("autocast", "cache_weights", "a bool", repr(cache_weights))
        self.cache_weights = cache_weights
        if not isinstance(enabled, bool):
            raise type_error("autocast", "enabled", "a bool", repr(enabled), "Pass a recipe as recipe=.")
        if recipe is not None and not isinstance(recipe, Recipe):
            recipe = as_recipe(recipe)
        if amax_reduction_group is not None and not any(own.reduces(amax_reduction_group) for own in _agreements):
            raise NotImplementedError(
                "autocast: amax_reduction_group: nothing is known of its ranks. First say which modules they share: "
                "bridge.distributed.agree_amaxes(model, group)."
            )
        self.recipe = (default_recipe() if recipe is None else recipe) if enabled else None
        self._outer: tuple[Recipe | None, list[Any] | None] | None = None

    def __enter__(self) -> autocast:
        if self._outer is not None:
            raise RuntimeError("autocast: this context is already open; make a second one to nest.")
        outer = (_active.recipe, _active.closed)
        if _active.depth == 0:
            if torch.compiler.is_compiling():
                _refuse_agreements("inside of a compiled function")
                _active.closed = []
            elif torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
                _refuse_agreements("while a CUDA graph is captured")
                _active.captured = []
            elif not compat.in_backward() and not compat.functorch_active():
                prepare_states(self.recipe)
                close_steps(_agree(self.recipe) if _agreements else set())
                cache = self.recipe if self.cache_weights else None
                if cache is not None:
                    count_optimizer_steps()
                for module in holders():
                    if module.weight_casts or module.wants_casts:
                        refresh_known_weights(module, cache)
                _active.cache_recipe = cache
        self._outer = outer
        _active.depth += 1
        _active.recipe = self.recipe
        return self

    def __exit__(self, *exception: object) -> None:
        assert self._outer is not None
        _active.recipe, _active.closed = self._outer
        _active.depth -= 1
        if _active.depth == 0:
            _active.cache_recipe = _active.captured = None
        self._outer = None


def _refuse_agreements(when: str) -> None:
    if len(_agreements) > 0:
        raise RuntimeError(f"autocast: ranks agree on amaxes by one message per step; enter the context not {when}.")


def _agree(recipe: Recipe | None) -> set[Any]:
    """Have ranks agree on amaxes if a training step begins.

    Returns:
        Modules whose step is not to be closed: all that others share, if none begins.
    """
    if not torch.is_grad_enabled():
        return shared_modules()
    for own in _agreements:
        own.agree(recipe)
    return set()


def close_in_graph(module: Any, roles: Any, states: dict[str, Any]) -> None:
    """Close the step of a module's forward quantizers inside a graph whose outermost context was entered inside it.

    Once per context. The gradient quantizers are closed by the backward, because a compiled graph may not write to
    one tensor in both of its halves.
    """
    if not any(steps_to_close([module])):
        return
    closed_steps([module])
    close_states_(
        [(quantizer, states[role], None) for role, quantizer in roles if role in module.op.forward_quantizers]
    )


def steps_to_close(modules: Any) -> tuple[bool, ...]:
    """For every module, whether its forward quantizers have to close their step before it runs in this graph.

    Empty if none has to; :func:`closed_steps` says that it was done.
    """
    closed = _active.closed
    if closed is None or not torch.is_grad_enabled():
        return ()
    return tuple([not any(module is known for known in closed) for module in modules])


def closed_steps(modules: Any) -> None:
    """Remember that modules have closed their step in this graph."""
    if _active.closed is not None and torch.is_grad_enabled():
        _active.closed.extend(modules)


def close_captured(module: Any, roles: Any, states: dict[str, Any]) -> None:
    """Close the step of a module whose context was entered while a CUDA graph is captured, when it first runs in it.

    A graph that is replayed may write to the modules that it runs, and to no other that happens to be alive.
    """
    captured = _active.captured
    if captured is None or not torch.is_grad_enabled() or any(module is known for known in captured):
        return
    captured.append(module)
    entries = [(quantizer, states[role], None) for role, quantizer in roles]
    written = [tensor for _, state, _ in entries for tensor in (state.read, state.amax_history)]
    with torch.no_grad(), compat.preserved_versions(tuple(written)):
        close_states_(entries)


def closes_in_graph() -> bool:
    """Whether the outermost context was entered inside the graph being traced."""
    return _active.closed is not None
