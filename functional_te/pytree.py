"""The only importer of optree: node classes and tree functions, with the namespace bound once.

A call that forgot the namespace would silently treat a whole node as one leaf, hence the single home.
``None`` is structure, not a leaf: a bundle with a bias and one without have different tree definitions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar, dataclass_transform

import optree
import optree.dataclasses
import torch

__all__ = [
    "NAMESPACE",
    "bundle",
    "leaves",
    "node",
    "rebuild",
    "rebuilder",
    "replace",
    "static",
    "structure",
    "tree_flatten",
    "tree_map",
    "tree_unflatten",
]

NAMESPACE = "functional_te"
_T = TypeVar("_T")


def static(**kwargs: Any) -> Any:
    """Declare a field of a node that is part of its structure (compared by ``==``), not a child."""
    return optree.dataclasses.field(pytree_node=False, **kwargs)  # type: ignore[call-overload]


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(static, dataclasses.field))
def node(cls: type[_T]) -> type[_T]:
    """Make ``cls`` a frozen, keyword-only dataclass that is a pytree node."""
    return _describe(optree.dataclasses.dataclass(cls, frozen=True, kw_only=True, slots=True, namespace=NAMESPACE))  # type: ignore[call-overload]


@dataclass_transform(kw_only_default=True, field_specifiers=(static, dataclasses.field))
def bundle(cls: type[_T]) -> type[_T]:
    """Make ``cls`` a keyword-only dataclass that is a pytree node: an argument bundle of an op.

    Not frozen, because a frozen dataclass takes twice as long to make and one is made for every launch. An
    implementation must not write to it all the same.
    """
    return _describe(optree.dataclasses.dataclass(cls, kw_only=True, slots=True, eq=False, namespace=NAMESPACE))  # type: ignore[call-overload]


def _describe(cls: Any) -> Any:
    """Write down, for traced code, which fields are children and which are static."""
    fields = dataclasses.fields(cls)
    cls._tree_children = tuple(field.name for field in fields if field.metadata.get("pytree_node", True))
    cls._tree_static = tuple(field.name for field in fields if not field.metadata.get("pytree_node", True))
    return cls


def tree_map(function: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """Apply ``function`` to the leaves of ``tree`` (and of ``rest``, of the same structure)."""
    if not rest and torch.compiler.is_compiling():
        flat: list[Any] = []
        spec = _traced_flatten(tree, flat)
        return _traced_unflatten(spec, iter([function(leaf) for leaf in flat]))
    return optree.tree_map(function, tree, *rest, namespace=NAMESPACE)


def tree_flatten(tree: Any) -> tuple[list[Any], Any]:
    """The leaves of ``tree`` in order, and its structure (to be passed to :func:`tree_unflatten` only)."""
    if torch.compiler.is_compiling():
        traced: list[Any] = []
        return traced, _traced_flatten(tree, traced)
    flat, spec = optree.tree_flatten(tree, namespace=NAMESPACE)
    return flat, spec


def tree_unflatten(spec: Any, flat: Any) -> Any:
    """Rebuild a tree of structure ``spec`` from its leaves."""
    # a structure that was traced may be rebuilt by ordinary code: the backward of a graph that was broken
    if torch.compiler.is_compiling() or spec is None or isinstance(spec, (tuple, str)):
        return _traced_unflatten(spec, iter(flat))
    return optree.tree_unflatten(spec, flat)


# Dynamo traces optree through Python stand-ins that cost a second of compile time for every few ops. The trees of this
# library are made of nodes, tuples, lists, dicts and None, so a traced region walks them with the few lines below.


def structure(tree: Any, flat: list[Any] | None = None) -> Any:
    """The structure of ``tree`` in the form that :func:`rebuild` takes, in traced and in ordinary code.

    Its leaves are appended to ``flat``, if one is given.
    """
    return _traced_flatten(tree, [] if flat is None else flat)


def rebuild(spec: Any, flat: Any) -> Any:
    """The tree of a :func:`structure` with the leaves ``flat``.

    Raises:
        ValueError: more leaves than the structure has.
    """
    rest = iter(flat)
    tree = _traced_unflatten(spec, rest)
    if next(rest, None) is not None:
        raise ValueError("pytree.rebuild: flat: expected as many leaves as the structure has, got more.")
    return tree


def rebuilder(spec: Any) -> Callable[[Any], Any]:
    """A straight-line function that does what :func:`rebuild` does with the structure ``spec``.

    Generated, because a tracer guards every element of a structure that it walks: that was a third of a compiled
    chain's guards.
    """
    namespace: dict[str, Any] = {}
    count = [0]
    expression = _expression(spec, namespace, count)
    code = f"""def build(flat):
    if len(flat) != {count[0]}:
        raise ValueError("pytree: flat: expected {count[0]} leaves, got " + str(len(flat)) + ".")
    return {expression}
"""
    exec(compile(code, "<structure>", "exec"), namespace)
    build: Callable[[Any], Any] = namespace["build"]
    return build


def _expression(spec: Any, namespace: dict[str, Any], count: list[int]) -> str:
    """The expression that makes a tree of structure ``spec``; the names that it uses go to ``namespace``."""

    def named(value: Any) -> str:
        if type(value) in (bool, int, str, type(None)):
            return repr(value)
        for name, known in namespace.items():
            if known is value:
                return name
        name = f"constant_{len(namespace)}"
        namespace[name] = value
        return name

    if spec is None:
        return "None"
    if isinstance(spec, str):
        count[0] += 1
        return f"flat[{count[0] - 1}]"
    kind, children, static_values = spec
    parts = [_expression(child, namespace, count) for child in children]
    names = getattr(kind, "_tree_children", None)
    if names is not None:
        fields = [*zip(names, parts, strict=True)]
        fields += [(name, named(value)) for name, value in zip(kind._tree_static, static_values, strict=True)]
        return f"{named(kind)}({', '.join(f'{name}={value}' for name, value in fields)})"
    if kind is dict:
        return "{" + ", ".join(f"{named(key)}: {part}" for key, part in zip(static_values, parts, strict=True)) + "}"
    if kind is list:
        return f"[{', '.join(parts)}]"
    inner = "".join(f"{part}, " for part in parts)
    return f"({inner})" if kind is tuple else f"{named(kind)}({inner})"


def _traced_flatten(tree: Any, flat: list[Any]) -> Any:
    """Append the leaves of ``tree``; return its structure: None, ``"*"`` for a leaf, or (class, children, static)."""
    if tree is None:
        return None
    kind = type(tree)
    names = getattr(kind, "_tree_children", None)
    if names is not None:
        children = [_traced_flatten(getattr(tree, name), flat) for name in names]
        return kind, children, [getattr(tree, name) for name in kind._tree_static]
    if isinstance(tree, (tuple, list)):
        return kind, [_traced_flatten(child, flat) for child in tree], None
    if kind is dict:
        keys = sorted(tree)
        return kind, [_traced_flatten(tree[key], flat) for key in keys], keys
    flat.append(tree)
    return "*"


def _traced_unflatten(spec: Any, flat: Any) -> Any:
    if spec is None:
        return None
    if isinstance(spec, str):
        return next(flat)
    kind, children, static_values = spec
    values = [_traced_unflatten(child, flat) for child in children]
    names = getattr(kind, "_tree_children", None)
    if names is not None:
        return kind(**dict(zip(names, values, strict=True)), **dict(zip(kind._tree_static, static_values, strict=True)))
    if kind is dict:
        return dict(zip(static_values, values, strict=True))
    if kind is list:
        return values
    return tuple(values) if kind is tuple else kind(*values)  # else a named tuple


def leaves(tree: Any) -> list[Any]:
    """The leaves of ``tree`` in order."""
    if torch.compiler.is_compiling():
        return tree_flatten(tree)[0]
    return optree.tree_leaves(tree, namespace=NAMESPACE)


replace = dataclasses.replace
