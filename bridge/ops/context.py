"""The context that te.ops-style hooks save into, and how it travels from the forward to the backward."""

from __future__ import annotations

from typing import Any

import torch

from functional_te import pytree

__all__ = ["HookSaved", "OperationContext", "reopened", "saved_by"]


class OperationContext:
    """What a hook keeps for its backward, as ``ctx`` of a ``torch.autograd.Function``.

    Arbitrary attributes may be set. What :meth:`save_for_backward` gets is kept by autograd.

    Attributes:
        requires_grad: whether the op takes part in a backward.
    """

    def __init__(self, requires_grad: bool = False) -> None:
        self.requires_grad = requires_grad
        self.to_save: tuple[Any, ...] = ()
        self.loaded: tuple[Any, ...] | None = None

    def save_for_backward(self, *tensors: Any) -> None:
        """Keep tensors, quantized tensors or None for the backward. The last call counts."""
        self.to_save = tensors

    def attributes(self) -> dict[str, Any]:
        """The attributes that hooks have set, by name."""
        return {name: value for name, value in self.__dict__.items() if name not in _OWN}

    @property
    def saved_tensors(self) -> tuple[Any, ...]:
        """What was saved; in the backward only."""
        if self.loaded is None:
            raise ValueError("OperationContext: saved_tensors: expected to be read in the backward only.")
        return self.loaded


_OWN = frozenset(("requires_grad", "to_save", "loaded"))


@pytree.node
class HookSaved:
    """A context between forward and backward.

    Attributes:
        tensors: what ``save_for_backward`` got.
        context: the context itself, emptied, as one leaf; None where a graph is traced.
        attributes: there, its attributes by name: tensors among them have to be saved as such.
    """

    tensors: tuple[Any, ...] = ()
    context: Any = None
    attributes: Any = None


def saved_by(ctx: OperationContext) -> HookSaved:
    """What to keep of a context for the backward."""
    tensors = tuple(ctx.to_save)
    if torch.compiler.is_compiling():
        return HookSaved(tensors=tensors, attributes=ctx.attributes())
    ctx.to_save = ()  # autograd keeps them, and may free them
    return HookSaved(tensors=tensors, context=ctx)


def reopened(saved: HookSaved, requires_grad: bool) -> OperationContext:
    """The context as the backward sees it: a new one each time, so that a graph may be walked twice."""
    ctx = OperationContext(requires_grad)
    attributes = saved.attributes if saved.context is None else saved.context.attributes()
    for name, value in (attributes or {}).items():
        setattr(ctx, name, value)
    ctx.loaded = tuple(saved.tensors)
    return ctx
