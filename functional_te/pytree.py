"""The only importer of optree: node classes and tree functions, with the namespace bound once.

A call that forgot the namespace would silently treat a whole node as one leaf, hence the single home.
``None`` is structure, not a leaf: a bundle with a bias and one without have different tree definitions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, dataclass_transform

import optree
import optree.dataclasses

if TYPE_CHECKING:
    from optree import PyTreeSpec

__all__ = [
    "NAMESPACE",
    "PyTreeSpec",
    "leaves",
    "node",
    "replace",
    "static",
    "tree_flatten",
    "tree_map",
    "tree_unflatten",
]

NAMESPACE = "functional_te"
_T = TypeVar("_T")


def static(**kwargs: Any) -> Any:
    """Declare a field of a node that is part of its structure (compared by ``==``), not a child."""
    return optree.dataclasses.field(pytree_node=False, **kwargs)


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(static, dataclasses.field))
def node(cls: type[_T]) -> type[_T]:
    """Make ``cls`` a frozen, keyword-only dataclass that is a pytree node."""
    return optree.dataclasses.dataclass(cls, frozen=True, kw_only=True, slots=True, namespace=NAMESPACE)  # type: ignore[no-any-return, call-overload]


def tree_map(function: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """Apply ``function`` to the leaves of ``tree`` (and of ``rest``, of the same structure)."""
    return optree.tree_map(function, tree, *rest, namespace=NAMESPACE)


def tree_flatten(tree: Any) -> tuple[list[Any], PyTreeSpec]:
    """The leaves of ``tree`` in order, and its structure."""
    flat, spec = optree.tree_flatten(tree, namespace=NAMESPACE)
    return flat, spec


def tree_unflatten(spec: PyTreeSpec, flat: Any) -> Any:
    """Rebuild a tree of structure ``spec`` from its leaves."""
    return optree.tree_unflatten(spec, flat)


def leaves(tree: Any) -> list[Any]:
    """The leaves of ``tree`` in order."""
    return optree.tree_leaves(tree, namespace=NAMESPACE)


replace = dataclasses.replace
