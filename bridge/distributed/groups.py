"""What the parts of this package share: process groups by name, and the operations of a model in one order."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

from bridge.convert.swap import ATTRIBUTE
from bridge.ops.collectives import group_of
from bridge.ops.operation import BasicOperation
from functional_te._errors import type_error
from functional_te.kernels.collectives import process_group

__all__ = ["check_model", "group_of", "operations_of", "process_group", "signature_of"]

_COMPILED = "_orig_mod."


def check_model(model: Any, where: str) -> None:
    """Raise unless ``model`` is a module."""
    if not isinstance(model, torch.nn.Module):
        raise type_error(where, "model", "a torch.nn.Module", type(model).__name__)


def operations_of(model: torch.nn.Module) -> Iterator[tuple[str, BasicOperation]]:
    """The operations in a model, modules and those of converted modules, each once, with a name of its own.

    The names do not depend on whether parts of the model are compiled, sharded or checkpointed.
    """
    seen: set[int] = set()
    for name, module in model.named_modules():
        name = name.replace(_COMPILED, "").replace("_checkpoint_wrapped_module.", "").removesuffix("._orig_mod")
        record = module.__dict__.get(ATTRIBUTE)
        own = [(name, module)] if isinstance(module, BasicOperation) else []
        own += [(f"{name}:{index}", op) for index, op in enumerate(record.ops)] if record is not None else []
        for path, op in own:
            if id(op) not in seen:
                seen.add(id(op))
                yield path, op


def _without_groups(op: Any) -> Any:
    """The op with process groups of no name: names differ between the rows of a mesh."""
    shared = getattr(op, "tensor_parallel", None)
    if shared is not None:
        return dataclasses.replace(op, tensor_parallel=dataclasses.replace(shared, group=""))
    return dataclasses.replace(op, group="") if isinstance(getattr(op, "group", None), str) else op


def signature_of(model: torch.nn.Module) -> dict[str, str]:
    """What has to be the same on all ranks: the operations of a model, and its recipe, as text."""
    found = {f"operation {name}": repr(_without_groups(op.op)) for name, op in operations_of(model)}
    record = model.__dict__.get(ATTRIBUTE)
    if record is not None:
        found["recipe"] = repr(record.recipe)
    return found
