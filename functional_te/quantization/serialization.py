"""Quantized tensors and quantizer states as plain tensors by name, and back.

The result goes through ``torch.save`` (read with ``weights_only=True``), safetensors and a ``state_dict``. What is no
tensor, the structure and the quantizers, travels as JSON in one uint8 tensor. Reading it looks names up in fixed
tables and checks every value, so a file can name no code.

Pickling a :class:`QuantizedTensor` goes through the same JSON: plain ``pickle`` and ``deepcopy`` work, and
``torch.load(weights_only=True)`` reads it, as it reads states. A quantizer that holds a function is pickled by
reference instead, which ``weights_only=True`` refuses.
"""

from __future__ import annotations

import copyreg
import dataclasses
import json
import reprlib
import typing
from collections.abc import Mapping
from typing import Any

import torch

from functional_te import pytree
from functional_te._errors import type_error, value_error
from functional_te.quantization.quantizer import Quantizer
from functional_te.quantization.quantizers import QUANTIZERS
from functional_te.quantization.state import DelayedScalingState, StochasticRoundingState
from functional_te.quantization.tensor import CachedWeight, QuantizedTensor

__all__ = [
    "STRUCTURE",
    "check_copies",
    "describe",
    "from_tensors",
    "quantizer_from_json",
    "quantizer_to_json",
    "restore",
    "to_tensors",
]

STRUCTURE = "_structure"

_NODES: dict[str, Any] = {
    kind.__name__: kind for kind in (QuantizedTensor, CachedWeight, DelayedScalingState, StochasticRoundingState)
}
_QUANTIZERS = {kind.__name__: kind for kind in QUANTIZERS}
_NOMINAL = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_ELEMENT = {
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
    "float4_e2m1fn_x2": torch.float4_e2m1fn_x2,
}
_NAMES = {dtype: name for name, dtype in {**_NOMINAL, **_ELEMENT}.items()}
# the plain values of fields that may also hold a function
_CHOICES: dict[str, tuple[Any, ...]] = {
    "amax_compute_algo": ("max", "most_recent"),
    "scaling_factor_compute_algo": (None,),
}


def to_tensors(tree: Any, prefix: str = "") -> dict[str, torch.Tensor]:
    """A tree of tensors, quantized tensors and quantizer states as a flat dict of plain tensors.

    Names are paths of keys, positions and field names joined with dots. One more uint8 tensor, ``_structure``, holds
    the rest as JSON. The tensors are detached and contiguous, else shared with the tree, not copied. A tensor that
    stands in several places is there once.

    Args:
        tree: tensors, None, :class:`QuantizedTensor`, :class:`CachedWeight` and states in tuples, lists and dicts with
            string keys.
        prefix: put in front of every name, as it is: ``"layer.weight."``.

    Raises:
        TypeError: something else in the tree, a tensor subclass, or a quantizer of an unknown class.
        ValueError: a quantizer that holds a function, or two tensors of one name.
    """
    found: dict[str, torch.Tensor] = {}
    description = _write(tree, (), found, {})
    found[STRUCTURE] = _text_tensor(json.dumps(description))
    return {prefix + name: tensor for name, tensor in found.items()}


def from_tensors(tensors: Mapping[str, torch.Tensor], prefix: str = "", like: Any = None) -> Any:
    """The tree that :func:`to_tensors` made ``tensors`` of. Its tensors are those of the dict, not copies.

    Args:
        tensors: the dict; other names are ignored.
        prefix: the prefix it was made with.
        like: a tree to compare with: structure, quantizers, shapes and dtypes must be the same.

    Raises:
        ValueError: a name that is missing, content that :func:`to_tensors` does not write, a quantized tensor whose
            tensors do not fit its quantizer, or a tree unlike ``like``. The message names the key.
    """
    where, key = "from_tensors", prefix + STRUCTURE
    content = tensors.get(key)
    if not isinstance(content, torch.Tensor) or content.dtype is not torch.uint8 or content.dim() != 1:
        raise value_error(where, key, "the uint8 tensor that to_tensors() writes", _short(content))
    description = _parse(bytes(content.tolist()), where, key)
    tree = _Reader(tensors, prefix, where).read(description)
    if like is not None:
        _check_like(tree, like, where, prefix)
    return tree


def quantizer_to_json(quantizer: Quantizer) -> str:
    """A quantizer as JSON: the name of its class and the values of its fields.

    Raises:
        TypeError: no quantizer of :data:`QUANTIZERS`.
        ValueError: a field that holds a function.
    """
    if not isinstance(quantizer, Quantizer):
        raise type_error("quantizer_to_json", "quantizer", "a Quantizer", type(quantizer).__name__)
    return json.dumps(describe(quantizer, "quantizer_to_json"))


def quantizer_from_json(text: str) -> Quantizer:
    """The quantizer of :func:`quantizer_to_json`.

    Raises:
        ValueError: anything else; nothing is looked up but the classes of :data:`QUANTIZERS` and their fields.
    """
    where, key = "quantizer_from_json", "text"
    made = restore(_parse(text, where, key), where, key)
    if not isinstance(made, Quantizer):
        raise value_error(where, key, "a quantizer", _short(text))
    return made


def describe(value: Any, where: str) -> Any:
    """A quantizer, a dtype or a plain value as something that JSON holds; see :func:`restore`."""
    if isinstance(value, torch.dtype) and value in _NAMES:
        return {"kind": "dtype", "name": _NAMES[value]}
    if value is None or type(value) in (bool, int, float, str):
        return value
    if _QUANTIZERS.get(type(value).__name__) is not type(value):
        wanted = f"a plain value, or a quantizer among {sorted(_QUANTIZERS)}"
        raise type_error(where, "quantizer", wanted, type(value).__name__)
    fields = {}
    for field in dataclasses.fields(value):
        own = getattr(value, field.name)
        if field.name in _CHOICES and own not in _CHOICES[field.name]:
            wanted = " or ".join(repr(choice) for choice in _CHOICES[field.name])
            name = f"{type(value).__name__}.{field.name}"
            raise value_error(where, name, wanted, own, "A function cannot be saved.")
        fields[field.name] = describe(own, where)
    return {"kind": type(value).__name__, "fields": fields}


def restore(data: Any, where: str, key: str) -> Any:
    """What :func:`describe` described; everything else is a ``ValueError`` that names ``where`` and ``key``."""
    if data is None or type(data) in (bool, int, float, str):
        return data
    kind = data.get("kind") if isinstance(data, dict) else None
    if kind == "dtype" and isinstance(data.get("name"), str):
        found = {**_NOMINAL, **_ELEMENT}.get(data["name"])
        if found is not None:
            return found
    quantizer = _QUANTIZERS.get(kind) if isinstance(kind, str) else None
    if quantizer is None or not isinstance(data.get("fields"), dict):
        raise value_error(where, key, f"a dtype or a quantizer among {sorted(_QUANTIZERS)}", _short(data))
    fields = {name: restore(value, where, key) for name, value in data["fields"].items()}
    return _make(quantizer, fields, where, key)


# ---------------------------------------------------------------------------- writing


def _text_tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def _write(value: Any, path: tuple[str, ...], found: dict[str, torch.Tensor], known: dict[int, str]) -> Any:
    """Describe ``value`` and collect its tensors in ``found``; ``known`` has the name of each tensor object."""
    if value is None:
        return None
    if isinstance(value, torch.Tensor):
        return _write_tensor(value, path, found, known)
    kind = type(value)
    if kind is tuple or kind is list:
        return {
            "kind": kind.__name__,
            "items": [_write(item, (*path, str(i)), found, known) for i, item in enumerate(value)],
        }
    if kind is dict and all(type(name) is str for name in value):
        return {
            "kind": "dict",
            "items": {name: _write(item, (*path, name), found, known) for name, item in value.items()},
        }
    if _NODES.get(kind.__name__) is not kind:
        wanted = f"tensors, tuples, lists, dicts with string keys, None or {', '.join(_NODES)}"
        raise type_error("to_tensors", ".".join(path) or "tree", wanted, kind.__name__)
    # a weight that is stored in low precision only has no values besides them
    children = [name for name in kind._tree_children if not (name == "value" and value.stored)]
    fields = {name: _write(getattr(value, name), (*path, name), found, known) for name in children}
    fields |= {name: describe(getattr(value, name), "to_tensors") for name in kind._tree_static}
    return {"kind": kind.__name__, "fields": fields}


def _write_tensor(
    value: torch.Tensor, path: tuple[str, ...], found: dict[str, torch.Tensor], known: dict[int, str]
) -> str:
    name = ".".join(path) or "value"
    plain = value.detach()
    if type(plain) is not torch.Tensor:
        raise type_error("to_tensors", name, "a plain tensor", type(plain).__name__)
    if id(value) in known:
        return known[id(value)]
    if name in found or name == STRUCTURE:
        raise value_error("to_tensors", "tree", "one tensor of a name", f"another one of the name {name!r}")
    found[name] = plain.contiguous()
    known[id(value)] = name
    return name


# ---------------------------------------------------------------------------- reading


def _short(value: Any) -> str:
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, torch.Tensor) else reprlib.repr(value)


def _parse(text: str | bytes, where: str, key: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, TypeError, RecursionError) as error:
        raise value_error(where, key, "JSON", _short(text)) from error


def _fits(value: Any, hint: Any, name: str) -> bool:
    """Whether a value may stand in a field of this annotation."""
    if name in _CHOICES:
        return value in _CHOICES[name]
    if hint is float:
        return type(value) in (int, float)
    return isinstance(value, hint) and (type(value) is not bool or hint is bool)


def _make(kind: type[Any], fields: dict[str, Any], where: str, key: str) -> Any:
    """``kind(**fields)`` if the fields are known and of their types."""
    hints = typing.get_type_hints(kind)
    known = {field.name for field in dataclasses.fields(kind)}
    for name, value in fields.items():
        if name not in known or not _fits(value, hints[name], name):
            wanted = f"{hints[name]}" if name in known else "a known field"
            raise value_error(where, key, f"{kind.__name__}.{name}: {wanted}", _short(value))
        if isinstance(value, torch.dtype) and value not in (_ELEMENT if kind in QUANTIZERS else _NOMINAL).values():
            raise value_error(where, key, f"{kind.__name__}.{name}: another dtype", value)
    try:
        return kind(**fields)
    except (TypeError, ValueError) as error:
        raise value_error(where, key, f"the fields of a {kind.__name__}", str(error)) from error


class _Reader:
    """Rebuilds a tree from its description, checking everything."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], prefix: str, where: str) -> None:
        self.tensors = tensors
        self.prefix = prefix
        self.where = where
        self.key = prefix + STRUCTURE

    def read(self, data: Any) -> Any:
        """The value of a description."""
        if data is None:
            return None
        if isinstance(data, str):
            return self._tensor(data)
        kind = data.get("kind") if isinstance(data, dict) else None
        items = data.get("items") if isinstance(data, dict) else None
        if kind in ("tuple", "list") and isinstance(items, list):
            made = [self.read(item) for item in items]
            return tuple(made) if kind == "tuple" else made
        if kind == "dict" and isinstance(items, dict):
            return {name: self.read(item) for name, item in items.items()}
        node = _NODES.get(kind) if isinstance(kind, str) else None
        if node is None or not isinstance(data.get("fields"), dict):
            raise value_error(self.where, self.key, "what to_tensors() writes", _short(data))
        return self._node(node, data["fields"])

    def _tensor(self, name: str) -> torch.Tensor:
        key = self.prefix + name
        found = self.tensors.get(key)
        if not isinstance(found, torch.Tensor) or name == STRUCTURE:
            raise value_error(self.where, key, "a tensor", _short(found))
        return found

    def _node(self, kind: Any, fields: dict[str, Any]) -> Any:
        static = kind._tree_static
        values = {
            name: restore(value, self.where, self.key) if name in static else self.read(value)
            for name, value in fields.items()
        }
        if kind is CachedWeight and values.get("stored") is True:
            held = values.get("quantized")
            if isinstance(held, QuantizedTensor):
                values["value"] = held.data.new_empty((), dtype=held.dtype).expand(held.shape)
        made = _make(kind, values, self.where, self.key)
        if kind is QuantizedTensor:
            check_copies(made, self.where, self.key)
        return made


def check_copies(q: QuantizedTensor, where: str, key: str) -> None:
    """Raise a ``ValueError`` unless the tensors of ``q`` have the shapes and dtypes that its quantizer makes."""
    if not isinstance(q.quantizer, Quantizer):
        raise value_error(where, key, "a quantizer", q.quantizer)
    row, column = q.rowwise_data, q.columnwise_data
    packed = row is not None and row.dim() == 0 and q.quantizer.of(False).packing > 1
    if (row is None and column is None) or (column is not None and column.dim() != 2) or packed:
        got = f"data of shapes {[None if data is None else tuple(data.shape) for data in (row, column)]}"
        raise value_error(where, key, "a rowwise copy, or a columnwise copy of two dimensions", got)
    for columnwise, name in ((False, "rowwise"), (True, "columnwise")):
        wanted = q.quantizer.copy_spec(q.shape, columnwise)
        if q.copy(columnwise) is None:
            wanted = wanted._replace(data=None, scale_inv=None, amax=None)
        for part in wanted._fields:
            got = getattr(q, f"{name}_{part}")
            found = None if got is None else (tuple(got.shape), got.dtype)
            if found != getattr(wanted, part):
                raise value_error(where, key, f"{name}_{part}: {getattr(wanted, part)}", found)


def _check_like(tree: Any, like: Any, where: str, prefix: str) -> None:
    leaves, spec = pytree.tree_flatten(tree)
    others, wanted = pytree.tree_flatten(like)
    if spec != wanted:
        raise value_error(where, prefix + STRUCTURE, f"the structure of `like`, {wanted}", spec)
    for leaf, other in zip(leaves, others, strict=True):
        own, expected = (tuple(leaf.shape), leaf.dtype), (tuple(other.shape), other.dtype)
        if own != expected:
            raise value_error(where, prefix + STRUCTURE, f"tensors like those of `like`, {expected}", own)


# ---------------------------------------------------------------------------- pickle


def _reduce_quantized(q: QuantizedTensor) -> Any:
    """For pickle: bytes in the place of FP8 tensors, which plain pickle cannot hold."""
    tensors = {}
    for name in _NODES["QuantizedTensor"]._tree_children:
        tensor = getattr(q, name)
        if isinstance(tensor, torch.Tensor):
            dtype = _NAMES.get(tensor.dtype, "")
            tensors[name] = (tensor.view(torch.uint8) if dtype in _ELEMENT else tensor, dtype)
        elif tensor is not None:  # a tree of something else
            return q.__reduce_ex__(4)
    try:
        quantizer: Any = quantizer_to_json(q.quantizer)
    except (TypeError, ValueError):
        quantizer = q.quantizer
    return _rebuild_quantized, (tensors, q.dtype, quantizer)


def _rebuild_quantized(tensors: Any, dtype: Any, quantizer: Any) -> QuantizedTensor:
    """What :func:`_reduce_quantized` took apart. All of it is checked, since a file may hold anything."""
    where, key = "QuantizedTensor", "pickled content"
    if isinstance(quantizer, str):
        quantizer = quantizer_from_json(quantizer)
    fields: dict[str, Any] = {"dtype": dtype, "quantizer": quantizer}
    for name, (tensor, element) in tensors.items():
        fields[name] = tensor.view(_ELEMENT[element]) if element in _ELEMENT else tensor
    made = _make(QuantizedTensor, fields, where, key)
    check_copies(made, where, key)
    return made


copyreg.pickle(QuantizedTensor, _reduce_quantized)
# what torch.load(weights_only=True) may call; these hold tensors and nothing else
torch.serialization.add_safe_globals([_rebuild_quantized, CachedWeight, DelayedScalingState, StochasticRoundingState])
