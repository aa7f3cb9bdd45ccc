"""The plan of a graph, also for a backend that cannot run where the graph is looked at."""

from __future__ import annotations

import dataclasses
from typing import Any

from functional_te.fuser.plan import Plan, _with_copies, plan
from functional_te.kernels import kernels, with_accumulation
from functional_te.kernels.registry import BACKENDS

__all__ = ["plan_of"]


def plan_of(block: Any, backend: str, **options: Any) -> Plan:
    """The plan of a chain, as the backend would run it on a machine that it can run on.

    Args:
        block: the chain.
        backend: ``"auto"`` or the name of a backend.
        options: those of :func:`functional_te.plan`.

    Raises:
        ValueError: as :func:`functional_te.plan`; ``backend`` cannot even be loaded here.
    """
    known = {source.name: source for source in BACKENDS}
    source = known.get(backend)
    if source is None or source.missing("cpu") is None or source.missing("cuda") is None:
        return plan(block, backend=backend, **options)
    try:
        kernels(backend)
    except ImportError:
        return plan(block, backend=backend, **options)  # says what is missing
    return _as_on(plan(block, **options), backend)


def _as_on(made: Plan, backend: str) -> Plan:
    """A plan of the reference with the copies that another backend reads.

    A plan asks its backend which copies products read, nothing else, so the rest of it is the same.
    """
    recipe = made.recipe
    name = backend if recipe is None else with_accumulation(backend, recipe.fast_accumulation)
    count = len(made.chain.ops)
    forward: list[Any] = [()] * count
    backward: list[Any] = [()] * count
    for steps, found in ((made.forward, forward), (made.backward, backward)):
        for step in steps:
            for index, pairs in zip(step.indices, step.quantizers, strict=True):
                found[index] = pairs
    flow = made.op_requires_grad
    forward_casts = _with_copies(made.chain, tuple(forward), flow, recipe, name)
    backward_casts = _with_copies(made.chain, tuple(backward), flow, recipe, name)

    def shared(casts: Any, index: int, role: str, known: Any) -> Any:
        return None if known is None else dict(casts[index])[role]

    forward_steps = [
        dataclasses.replace(
            step,
            static_kwargs={**step.static_kwargs, **({"backend": name} if "backend" in step.static_kwargs else {})},
            quantizers=tuple(forward_casts[i] for i in step.indices),
            next_quantizer=shared(forward_casts, step.indices[-1] + 1, "input", step.next_quantizer),
        )
        for step in made.forward
    ]
    backward_steps = [
        dataclasses.replace(
            step,
            quantizers=tuple(backward_casts[i] for i in step.indices),
            prev_quantizer=shared(backward_casts, step.indices[0] - 1, "grad_output", step.prev_quantizer),
        )
        for step in made.backward
    ]
    traceable = kernels(name).traceable
    return dataclasses.replace(
        made, backend=name, traceable=traceable, forward=tuple(forward_steps), backward=tuple(backward_steps)
    )
