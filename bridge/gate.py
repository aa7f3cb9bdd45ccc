"""The gate: which ops of a plan run their custom op in a compiled graph, and which their eager implementation.

Decided once per plan, while the graph is traced, by ordinary Python. Under ``fullgraph=True`` there is no leaving the
graph, so an op without a custom op is traced through its implementation and the reason is reported once.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch

from bridge.call import launch_taken_over
from bridge.checkpointing import closed
from bridge.library import ensure_registered
from functional_te.fuser.plan import Plan, on_traced_plan
from functional_te.labels import labelled, profiling

__all__ = [
    "CompileEagerFallbackWarning",
    "eager_launcher",
    "launch_opaque",
    "launch_traced",
    "launcher",
    "warn_compile_eager_fallback",
]


class CompileEagerFallbackWarning(UserWarning):
    """An op has no custom op; a compiled graph contains its eager implementation instead."""


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


def _register_ops(plan: Plan) -> None:
    """Register the custom ops of a plan, and report what has none."""
    for op in [step.op for step in plan.forward] + [step.op for step in plan.backward]:
        reason = ensure_registered(type(op))
        if reason is not None:
            warn_compile_eager_fallback(reason)


on_traced_plan.append(_register_ops)


def launch_traced(op: Any, direction: str, args: Any) -> Any:
    """Launch a step inside a compiled graph: its custom op if it has one, else its implementation."""
    return _launch(op, direction, args, False)


def launch_opaque(op: Any, direction: str, args: Any) -> Any:
    """The same with the custom op's body closed to the compiler."""
    return _launch(op, direction, args, True)


def _launch(op: Any, direction: str, args: Any, opaque: bool) -> Any:
    pair = type(op).compile_ops
    if direction == "forward":
        return op.forward_impl(args) if pair is None or pair[0] is None else pair[0](args, opaque)
    return op.backward_impl(args) if pair is None or pair[1] is None else pair[1](args, opaque)


def launcher(plan: Plan) -> Any:
    """How the steps of a plan are launched inside a compiled graph."""
    return launch_traced if plan.traceable else launch_opaque


def _launch_closed(op: Any, direction: str, args: Any) -> Any:
    ensure_registered(type(op))
    return _launch(op, direction, args, True)


def eager_launcher(plan: Plan, direction: str, takeovers: Any) -> Any:
    """How the steps of one pass are launched in eager mode; None for their implementations.

    Custom ops with closed bodies run if a policy of selective checkpointing is to see them, and labels are put around
    steps if a profiler is on.
    """
    launch = launch_taken_over(plan, direction, takeovers)
    if launch is None and closed.depth:
        launch = _launch_closed
    return labelled(launch) if profiling() else launch
