"""Containers of parameters: any of them as one dict per op, and gradients back in the containers that were given."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from functional_te._errors import type_error, value_error
from functional_te.chain import Chain, where

__all__ = ["by_op", "in_containers_of"]


def by_op(block: Chain, params: Any) -> Any:
    """Parameters as a sequence with one dict per basic op.

    Args:
        block: the chain.
        params: one entry per basic op, in order: in a tuple, a list, a named tuple, a dataclass (registered with a
            pytree library or not; fields that are no pytree children are left out), or a mapping from op indices, as
            ints or in decimal, where ops without parameters may be absent. An entry is a mapping from parameter names,
            a named tuple or dataclass with these names as fields (others are None), or a tuple or list in the order of
            ``op.param_names``; None for an op without parameters.

    Returns:
        A tuple or list of dicts; ``params`` itself if it is that. What is no container of these comes back as it is,
        for the check of the call to refuse.

    Raises:
        TypeError: a key of a mapping is no op index.
        ValueError: a sequence of another length than the op has parameters.
    """
    if type(params) in (tuple, list) and all(type(own) is dict for own in params):
        return params
    entries = _entries(block, params)
    if entries is None or len(entries) != len(block.ops):
        return params if entries is None else entries
    return tuple([_named(block, index, own) for index, own in enumerate(entries)])


def in_containers_of(block: Chain, params: Any, values: tuple[dict[str, Any], ...]) -> Any:
    """Values by op and name, gradients say, in the containers of ``params``, which :func:`by_op` takes."""
    if type(params) is tuple and all(type(own) is dict for own in params):
        return values
    entries: Any = _entries(block, params)
    found = [_like(own, values[index]) for index, own in enumerate(entries)]
    if isinstance(params, Mapping):
        return _like(params, {key: found[int(key)] for key in params})
    if dataclasses.is_dataclass(params) and not isinstance(params, type):
        return dataclasses.replace(params, **dict(zip(_fields(params), found, strict=True)))
    return _sequence_like(params, found)


def _entries(block: Chain, params: Any) -> list[Any] | None:
    """One entry per op, or None for no container that is known."""
    if isinstance(params, Mapping):
        entries: list[Any] = [None] * len(block.ops)
        for key in params:
            index = int(key) if isinstance(key, str) and key.isdecimal() else key
            if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index < len(entries):
                wanted = f"a tuple of {len(entries)} dicts, one per op, or a mapping from op indices"
                fix = "A named tuple or a dataclass gives names to entries."
                raise type_error("chain", "params", wanted, f"a dict with the key {key!r}", fix)
            entries[index] = params[key]
        return entries
    if isinstance(params, (tuple, list)):
        return list(params)
    if dataclasses.is_dataclass(params) and not isinstance(params, type):
        return [getattr(params, name) for name in _fields(params)]
    return None


def _fields(node: Any) -> list[str]:
    """Names of the fields that are children; optree and PyTorch mark the others in their own ways."""
    return [field.name for field in dataclasses.fields(node) if field.metadata.get("pytree_node", True) and field.init]


def _named(block: Chain, index: int, own: Any) -> Any:
    if type(own) is dict:
        return own
    if isinstance(own, Mapping):
        return dict(own.items())
    names = block.ops[index].param_names
    if own is None and not names:
        return {}
    if isinstance(own, type):
        return own
    fields = _fields(own) if dataclasses.is_dataclass(own) else getattr(own, "_fields", None)
    if fields is not None:
        return {name: getattr(own, name) for name in fields if getattr(own, name) is not None}
    if isinstance(own, (tuple, list)):
        if len(own) != len(names):
            raise value_error(where(block.ops, index), "params", f"{len(names)} entries, {list(names)}", len(own))
        return dict(zip(names, own, strict=True))
    return own


def _like(own: Any, values: dict[str, Any]) -> Any:
    """Values by name in a container like ``own``."""
    if own is None:
        return None
    if isinstance(own, Mapping):
        ordered = {key: values[key] for key in own}
        return collections.OrderedDict(ordered) if isinstance(own, collections.OrderedDict) else ordered
    if dataclasses.is_dataclass(own) and not isinstance(own, type):
        return dataclasses.replace(own, **values)
    if hasattr(own, "_fields"):
        return own._replace(**values)
    return _sequence_like(own, list(values.values()))


def _sequence_like(given: Sequence[Any], values: list[Any]) -> Any:
    if hasattr(given, "_fields"):
        return type(given)(*values)
    return values if isinstance(given, list) else tuple(values)
