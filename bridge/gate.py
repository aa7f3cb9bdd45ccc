"""The gate: which ops of a plan run their custom op in a compiled graph, and which their eager implementation.

Decided once per plan, while the graph is traced, by ordinary Python. Under ``fullgraph=True`` there is no leaving the
graph, so an op without a custom op is traced through its implementation and the reason is reported once.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch

from bridge.library import ensure_registered
from functional_te._value import uid_of, value_of
from functional_te.fuser.plan import Plan
from functional_te.fuser.plan import plan as make_plan

__all__ = [
    "CompileEagerFallbackWarning",
    "launch_traced",
    "traced_plan",
    "traced_state_roles",
    "warn_compile_eager_fallback",
]


class CompileEagerFallbackWarning(UserWarning):
    """An op has no custom op; a compiled graph contains its eager implementation instead."""


class _Table:
    """Plans by name, as attributes: Dynamo reads an attribute when it is asked for, but a dict once per trace."""


_plans = _Table()
_reported: set[str] = set()


@torch.compiler.assume_constant_result
def warn_compile_eager_fallback(reason: str) -> None:
    """Warn about an op that is traced through its eager implementation; once per reason. Safe while being traced."""
    if reason in _reported:
        return
    _reported.add(reason)
    warnings.warn(
        f"{reason}: the compiled graph traces its eager implementation.", CompileEagerFallbackWarning, stacklevel=2
    )


@torch.compiler.assume_constant_result
def _prepare(uids: str, pattern: Any, compute_dtype: Any) -> str:
    """Make the plan and register its ops; runs for real even while a caller is traced.

    Args:
        uids: ``chain/recipe/fusions/backend``, the first three by :attr:`Value.uid`.
        pattern: what needs a gradient.
        compute_dtype: the dtype that autocast asks for, or None.

    Returns:
        The name of the plan in the table.
    """
    block, recipe, fusions, backend = uids.split("/")
    key = f"plan_{uids}_{pattern}_{compute_dtype}"
    plan = make_plan(
        value_of(block),
        recipe=value_of(recipe),
        requires_grad=pattern,
        backend=backend,
        compute_dtype=compute_dtype,
        fusions=value_of(fusions),
    )
    for step in (*plan.forward, *plan.backward):
        reason = ensure_registered(type(step.op))
        if reason is not None:
            warn_compile_eager_fallback(reason)
    setattr(_plans, key, plan)
    return key


def traced_plan(block: Any, recipe: Any, pattern: Any, backend: str, compute_dtype: Any, fusions: Any) -> Plan:
    """The plan of a call that Dynamo is tracing. The graph is guarded by the uids of the values."""
    uids = f"{block.uid}/{uid_of(recipe)}/{uid_of(fusions)}/{backend}"
    return getattr(_plans, _prepare(uids, pattern, compute_dtype))  # type: ignore[no-any-return]


def traced_state_roles(block: Any, recipe: Any) -> tuple[tuple[tuple[str, Any], ...], ...]:
    """For every op, the (role, quantizer) pairs that have state; of a call that Dynamo is tracing."""
    return traced_plan(block, recipe, True, "auto", None, None).state_roles


def launch_traced(op: Any, direction: str, args: Any) -> Any:
    """Launch a step inside a compiled graph: its custom op if it has one, else its implementation."""
    pair = type(op).compile_ops
    if direction == "forward":
        return op.forward_impl(args) if pair is None or pair[0] is None else pair[0](args)
    return op.backward_impl(args) if pair is None or pair[1] is None else pair[1](args)
