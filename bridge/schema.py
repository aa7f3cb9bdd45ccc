"""From a bundle class to a custom-op schema: one slot per field, decided by the field's annotation.

===============================================  =====================================================
annotation                                       slots
===============================================  =====================================================
``Tensor``, ``Tensor | None``                    ``Tensor``, ``Tensor?``
a node class (nested bundle, quantized tensor,   the node's own slots under ``<field>_<name>``
bound quantizer), also optional
``Tensor | QuantizedTensor`` (also ``| None``)   the tensor's slot and the node's slots
``int``, ``float``, ``bool``, ``str``            ``SymInt``, ``Scalar``, ``bool``, ``str`` (``?`` if optional)
``torch.dtype``, ``torch.device``                ``ScalarType``, ``Device``
anything else hashable (values, enums, tuples)   one shared last slot, ``str constants``
===============================================  =====================================================

A float is declared ``Scalar`` because Dynamo keeps a symbolic float symbolic there, where a ``float`` slot would
recompile for every new value. Which alternative of a union a call uses is part of the constants.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any

import torch

from functional_te._value import Value, value_of

__all__ = ["Schema"]

_PLAIN = {int: "SymInt", float: "Scalar", bool: "bool", str: "str", torch.dtype: "ScalarType", torch.device: "Device"}
# constants by their text, which is deterministic so that compiled artifacts of another process can be told apart
_constants: dict[str, tuple[Any, ...]] = {}


@dataclasses.dataclass(frozen=True)
class _Field:
    """How one field is encoded.

    Attributes:
        name: field name.
        tensor: whether a tensor may stand here.
        nodes: node classes that may stand here, with their own fields.
        plain: slot type of a plain value, or an empty string.
        optional: whether None may stand here.
        constant: whether the value goes into the shared slot of constants.
    """

    name: str
    tensor: bool
    nodes: tuple[tuple[type[Any], tuple[_Field, ...]], ...]
    plain: str
    optional: bool
    constant: bool


def _is_node(annotation: Any) -> bool:
    return isinstance(annotation, type) and dataclasses.is_dataclass(annotation) and not issubclass(annotation, Value)


def _parse(bundle: type[Any]) -> tuple[_Field, ...]:
    hints = typing.get_type_hints(bundle)
    return tuple(_parse_field(bundle, field.name, hints[field.name]) for field in dataclasses.fields(bundle))


def _parse_field(bundle: type[Any], name: str, annotation: Any) -> _Field:
    union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    members = typing.get_args(annotation) if union else (annotation,)
    optional = type(None) in members
    members = tuple(member for member in members if member is not type(None))
    tensor = torch.Tensor in members
    nodes = tuple((member, _parse(member)) for member in members if _is_node(member))
    plain = _PLAIN.get(members[0], "") if len(members) == 1 else ""
    others = [m for m in members if m is not torch.Tensor and not _is_node(m)]
    if others and (tensor or nodes):
        raise TypeError(f"{bundle.__name__}.{name}: a tensor may not share a field with {others}.")
    return _Field(name, tensor, nodes, plain, optional, constant=not (tensor or nodes or plain))


def _signature(fields: tuple[_Field, ...], prefix: str, inside: bool) -> list[str]:
    slots = []
    for field in fields:
        name = prefix + field.name
        maybe = "?" if field.optional or inside or len(field.nodes) + field.tensor > 1 else ""
        if field.tensor:
            slots.append(f"Tensor{maybe} {name}")
        for kind, inner in field.nodes:
            tag = f"{name}_" if len(field.nodes) == 1 else f"{name}_{kind.__name__.lower()}_"
            slots.extend(_signature(inner, tag, True))
        if field.plain:
            slots.append(f"{field.plain}{maybe} {name}")
    return slots


@torch.compiler.assume_constant_result
def _constants_text(items: tuple[Any, ...]) -> str:
    """Intern constants and return their text. Runs for real even while a caller is traced."""
    values = tuple(value_of(item[4:]) if isinstance(item, str) and item.startswith("uid:") else item for item in items)
    text = ", ".join(_describe(value) for value in values)
    while _constants.setdefault(text, values) != values:
        text += "'"
    return text


def _describe(value: Any) -> str:
    if isinstance(value, Value):
        fields = ((field.name, getattr(value, field.name)) for field in dataclasses.fields(value))  # type: ignore[arg-type]
        inner = ", ".join(f"{name}={_describe(item)}" for name, item in fields)
        return f"{type(value).__name__}({inner})"
    return repr(value)


class Schema:
    """Encodes bundles of one class as flat custom-op arguments, and back.

    Args:
        bundle: the bundle class.

    Raises:
        TypeError: a field mixes tensors with plain values.
    """

    def __init__(self, bundle: type[Any]) -> None:
        self.bundle = bundle
        self.fields = _parse(bundle)
        self.arguments = ", ".join([*_signature(self.fields, "", False), "str constants"])

    def encode(self, args: Any) -> tuple[Any, ...]:
        """The flat arguments of a bundle."""
        flat: list[Any] = []
        constants: list[Any] = []
        _encode(self.fields, args, flat, constants)
        return (*flat, _constants_text(tuple(constants)))

    def decode(self, flat: tuple[Any, ...]) -> Any:
        """The bundle of flat arguments."""
        constants = iter(_constants[flat[-1]])
        return _decode(self.bundle, self.fields, iter(flat), constants)


def _encode(fields: tuple[_Field, ...], args: Any, flat: list[Any], constants: list[Any]) -> None:
    """Append the slots of ``args``; a node that is absent gives empty slots."""
    for field in fields:
        value = None if args is None else getattr(args, field.name)
        if field.constant:
            constants.append(f"uid:{value.uid}" if isinstance(value, Value) else value)
            continue
        if field.plain:
            flat.append(value)
            continue
        chosen = 0 if value is None else -1
        if field.tensor:
            is_tensor = isinstance(value, torch.Tensor)
            chosen = 1 if is_tensor else chosen
            flat.append(value if is_tensor else None)
        for position, (kind, inner) in enumerate(field.nodes):
            here = isinstance(value, kind)
            chosen = position + 2 if here else chosen
            _encode(inner, value if here else None, flat, constants)
        if chosen < 0:
            raise TypeError(f"{type(args).__name__}.{field.name}: no slot for a {type(value).__name__}.")
        if field.nodes:
            constants.append(chosen)


def _decode(bundle: Any, fields: tuple[_Field, ...], flat: Any, constants: Any) -> Any:
    values: dict[str, Any] = {}
    for field in fields:
        if field.constant:
            values[field.name] = next(constants)
            continue
        if field.plain:
            values[field.name] = next(flat)
            continue
        options: list[Any] = [None, next(flat) if field.tensor else None]
        options.extend(_decode(kind, inner, flat, constants) for kind, inner in field.nodes)
        values[field.name] = options[next(constants) if field.nodes else 1]
    return bundle(**values)
