"""The op graph of a chain, to look at: :func:`graph` makes it, without data and without kernels.

Everything but :func:`graph` itself is imported when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from functional_te.fuser.rule import Fusions
    from functional_te.graph.devices import DEVICES, Device
    from functional_te.graph.diff import GraphDiff
    from functional_te.graph.scale import LINKS, Link, Scaled
    from functional_te.graph.value import Graph
    from functional_te.quantization.recipes import Recipe

__all__ = ["DEVICES", "LINKS", "Device", "Graph", "GraphDiff", "Link", "Scaled", "graph"]

_HOMES = {
    "DEVICES": "devices",
    "Device": "devices",
    "Graph": "value",
    "GraphDiff": "diff",
    "LINKS": "scale",
    "Link": "scale",
    "Scaled": "scale",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def graph(
    block: Any,
    params: Any,
    x: Any,
    *extra_inputs: Any,
    recipe: Recipe | None = None,
    backend: str = "auto",
    device: Any = None,
    requires_grad: Any = True,
    fusions: Fusions | None = None,
    compute_dtype: torch.dtype | None = None,
) -> Graph:
    """What a chain does forward and backward: steps and fusions, tensors, casts, what is kept, operations, bytes, time.

    Made from shapes and dtypes alone; tensors are not looked into, and no kernel runs. Prints as text, draws itself in
    notebooks, and compares: ``graph.diff(other)``.

    Args:
        block: a chain or an op, or a list of them. A list need not make a chain: the graph of what does not fit ends
            before the op that is at fault, and the error is marked there. So it is with shapes and dtypes.
        params: parameters as :func:`functional_te.init` gives them, or specs in their place; None takes specs of the
            dtype of ``x``.
        x: the main input: a tensor, a quantized tensor or a :class:`TensorSpec`.
        extra_inputs: the extra inputs, or specs.
        recipe: a recipe, or None for high precision.
        backend: ``"auto"`` or the name of a kernel backend; one that is installed and cannot run here, for want of a
            GPU, is planned for all the same.
        device: what times are estimated for: ``"H200"``, ``"H100"``, ``"B200"``, ``"A100"``, ``"cpu"`` (this one), a
            :class:`functional_te.graph.Device`; None is this machine's GPU if the tensors are there, else an H200.
        requires_grad: what to differentiate; see :func:`functional_te.plan`.
        fusions: the fusion rules to use, None for the default ones.
        compute_dtype: see :func:`functional_te.plan`.

    Raises:
        TypeError: arguments of the wrong kind.
        ValueError: an unknown backend or device, or arguments that fit no op in particular.
    """
    from functional_te.graph.make import make_graph

    return make_graph(
        block,
        params,
        x,
        extra_inputs,
        device,
        recipe=recipe,
        backend=backend,
        requires_grad=requires_grad,
        fusions=fusions,
        compute_dtype=compute_dtype,
    )
