"""The graph for networkx."""

from __future__ import annotations

from typing import Any

from functional_te.graph.value import Graph

__all__ = ["to_networkx"]


def to_networkx(graph: Graph) -> Any:
    """A ``MultiDiGraph``: nodes are the indices of ops, ``"input"``, ``"output"`` and the caller's extra tensors.

    Edges have the fields of :meth:`Graph.to_dict`, and ``kind``: ``"main"``, ``"gradient"`` or ``"extra"``.
    """
    try:
        import networkx
    except ImportError as error:
        message = "to_networkx needs networkx: pip install 'functional_te[notebook]'"
        raise ImportError(message) from error
    described = graph.to_dict()
    count = len(graph.ops)
    net = networkx.MultiDiGraph()
    net.graph.update({name: described[name] for name in ("recipe", "backend", "device", "totals", "error")})
    net.add_node("input", kind="caller")
    net.add_node("output", kind="caller")
    for op in described["ops"]:
        net.add_node(op["index"], **op)
    for direction in ("forward", "backward"):
        for step in described[direction]:
            for index in step["indices"]:
                net.nodes[index][direction] = step["position"]
    for edge in described["edges"]:
        ends = [_end(edge[name], count) for name in ("source", "target")]
        net.add_edge(*ends, kind="main" if edge["direction"] == "forward" else "gradient", **edge)
    for op in described["ops"]:
        for extra in op["extra_inputs"]:
            source = extra["source"] if extra["source"] >= 0 else f"extra input {extra['position']}"
            net.add_edge(source, op["index"], kind="extra", channel=extra["channel"], tensor=extra["tensor"])
    return net


def _end(index: int, count: int) -> Any:
    return "input" if index < 0 else "output" if index >= count else index
