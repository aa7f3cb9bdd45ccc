"""The graph as plain Python values."""

from __future__ import annotations

import dataclasses
from typing import Any

from functional_te.graph.roofline import estimate, kernel_estimate
from functional_te.graph.value import Graph, Step

__all__ = ["SCHEMA", "to_dict"]

SCHEMA = 1  # raised when a field goes away or changes its meaning; new fields may come at any time


def to_dict(graph: Graph) -> dict[str, Any]:
    """Everything in a graph; see docs/graph.md."""
    return {
        "schema": SCHEMA,
        "recipe": graph.recipe,
        "backend": graph.backend,
        "device": _device(graph),
        "ops": [_plain(op) | {"params": {name: _plain(tensor) for name, tensor in op.params}} for op in graph.ops],
        "forward": [_step(graph, step) for step in graph.forward],
        "backward": [_step(graph, step) for step in graph.backward],
        "edges": [_plain(edge) for edge in graph.edges],
        "outputs": [_plain(tensor) for tensor in graph.outputs],
        "refusals": [{"rule": rule, "start": start, "reason": reason} for rule, start, reason in graph.refusals],
        "totals": {
            "flops": graph.flops,
            "read_bytes": sum(step.read for step in graph.steps),
            "written_bytes": sum(step.written for step in graph.steps),
            "saved_bytes": graph.saved_bytes,
            "forward_seconds": graph.time("forward"),
            "backward_seconds": graph.time("backward"),
        },
        "error": graph.error,
    }


def _device(graph: Graph) -> dict[str, Any]:
    device = graph.device
    rates = {name: list(rates) for name, rates in device.products.items()}
    own = {"name": device.name, "bandwidth_tb_s": device.bandwidth, "products_tflop_s": rates}
    return own | {"launch_seconds": device.launch, "source": device.source}


def _step(graph: Graph, step: Step) -> dict[str, Any]:
    own = estimate(step, graph.device)
    kernels = []
    for kernel in step.kernels:
        single = kernel_estimate(kernel, graph.device, step.direction)
        kernels.append(_plain(kernel) | {"seconds": single.seconds, "bound": single.bound})
    return _plain(step) | {
        "kernels": kernels,
        "flops": step.flops,
        "read_bytes": step.read,
        "written_bytes": step.written,
        "seconds": own.seconds,
        "bound": own.bound,
    }


def _plain(value: Any) -> Any:
    """A record as a dict and a tuple as a list, all the way down."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return [_plain(item) for item in value] if isinstance(value, tuple) else value
