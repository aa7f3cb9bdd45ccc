"""``torch.export``: quantized tensors, cached weights and quantizer states as inputs and outputs of exported programs.

They become nodes of PyTorch's own pytrees, so ``torch.utils._pytree.tree_map`` reaches their tensors too. In
``dynamic_shapes`` one stands for the list of its tensors, for a quantized tensor ``[None] * 6``.

An exported program is the forward: export it under ``torch.no_grad()`` and do not differentiate it, since a gradient
would go through its casts and not through the backward of the chain. Its custom ops exist where the same chain was
traced before; to load it elsewhere, save ``program.run_decompositions()``, which holds ATen operations only.
"""

from __future__ import annotations

from typing import Any

import torch

from bridge import compat
from functional_te._value import Table, Value, value_of
from functional_te.quantization import CachedWeight, DelayedScalingState, QuantizedTensor, StochasticRoundingState
from functional_te.quantization.serialization import describe, restore

__all__ = ["register_pytrees"]

_KINDS: tuple[type[Any], ...] = (QuantizedTensor, CachedWeight, DelayedScalingState, StochasticRoundingState)
_UID = "uid:"
# what structures of trees name: a structure may outlive the tensors, and a uid keeps nothing alive
_kept = Table()


@torch.compiler.assume_constant_result
def _keep(uid: str) -> str:
    setattr(_kept, uid, value_of(uid))
    return uid


def _context_of(value: Any) -> Any:
    """A static field as something that a tracer takes for a constant."""
    return _UID + _keep(value.uid) if isinstance(value, Value) else value


def _static_of(context: Any) -> Any:
    return getattr(_kept, context[len(_UID) :]) if isinstance(context, str) else context


def register_pytrees() -> None:
    """Register the classes with :mod:`torch.utils._pytree`; done once, when this module is imported."""
    for kind in _KINDS:
        if not compat.is_torch_pytree(kind):
            _register(kind)


def _register(kind: Any) -> None:
    children, static = kind._tree_children, kind._tree_static
    where = f"torch.export of a {kind.__name__}"

    def flatten(node: Any) -> tuple[list[Any], list[Any]]:
        return [getattr(node, name) for name in children], [_context_of(getattr(node, name)) for name in static]

    def unflatten(values: Any, context: Any) -> Any:
        fields = {name: _static_of(value) for name, value in zip(static, context, strict=True)}
        return kind(**dict(zip(children, values, strict=True)), **fields)

    def to_json(context: Any) -> Any:
        return [describe(_static_of(value), where) for value in context]

    def from_json(data: Any) -> Any:
        return [_context_of(restore(value, where, "structure")) for value in data]

    compat.register_torch_pytree(kind, children, (flatten, unflatten), (to_json, from_json))


register_pytrees()
