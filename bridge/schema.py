"""From a bundle class to a custom-op schema: one slot per field, decided by the field's annotation.

===============================================  =====================================================
annotation                                       slots
===============================================  =====================================================
``Tensor``, ``Tensor | None``                    ``Tensor``, ``Tensor?``
a node class (nested bundle, quantized tensor,   the node's own slots under ``<field>_<name>``
bound quantizer), also optional
``Tensor | QuantizedTensor`` (also ``| None``)   the tensor's slot and the node's slots
``tuple[X, ...]`` with ``X`` one of these        ``Tensor[]``: all its tensors; its structure is a constant
``int``, ``float``, ``bool``, ``str``            ``SymInt``, ``Scalar``, ``bool``, ``str`` (``?`` if optional)
``torch.dtype``, ``torch.device``                ``ScalarType``, ``Device``
anything else hashable (values, enums, tuples)   one shared last slot, ``str constants``
===============================================  =====================================================

A float is declared ``Scalar`` because Dynamo keeps a symbolic float symbolic there, where a ``float`` slot would
recompile for every new value. Which alternative of a union a call uses is part of the constants.
"""

from __future__ import annotations

import dataclasses
import operator
import types
import typing
from typing import Any

import torch

from functional_te import pytree
from functional_te._value import Value, value_of
from functional_te.tensor_spec import TensorSpec

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
        many: whether it is a tuple of tensors or nodes, which travels as a list of tensors and its structure.
    """

    name: str
    tensor: bool
    nodes: tuple[tuple[type[Any], tuple[_Field, ...]], ...]
    plain: str
    optional: bool
    constant: bool
    many: bool = False


def _is_node(annotation: Any) -> bool:
    return isinstance(annotation, type) and dataclasses.is_dataclass(annotation) and not issubclass(annotation, Value)


def _parse(bundle: type[Any]) -> tuple[_Field, ...]:
    hints = typing.get_type_hints(bundle)
    return tuple(_parse_field(bundle, field.name, hints[field.name]) for field in dataclasses.fields(bundle))


def _members(annotation: Any) -> tuple[Any, ...]:
    union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    return typing.get_args(annotation) if union else (annotation,)


def _is_many(annotation: Any) -> bool:
    """Whether a field is a tuple of any length of tensors or nodes."""
    inner = typing.get_args(annotation)
    if typing.get_origin(annotation) is not tuple or len(inner) != 2 or inner[1] is not Ellipsis:
        return False
    return any(member is torch.Tensor or _is_node(member) for member in _members(inner[0]))


def _parse_field(bundle: type[Any], name: str, annotation: Any) -> _Field:
    if _is_many(annotation):
        return _Field(name, False, (), "", False, constant=False, many=True)
    members = _members(annotation)
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
        if field.many:
            slots.append(f"Tensor[] {name}")
    return slots


@torch.compiler.assume_constant_result
def _constants_text(items: tuple[Any, ...]) -> str:
    """Intern constants and return their text. Runs for real even while a caller is traced."""
    values = _resolved(items)
    text = ", ".join(_describe(value) for value in values)
    while _constants.setdefault(text, values) != values:
        text += "'"
    return text


def _resolved(item: Any) -> Any:
    """Constants with the values that uids name in their place."""
    if isinstance(item, tuple):
        return tuple(_resolved(inner) for inner in item)
    return value_of(item[4:]) if isinstance(item, str) and item.startswith("uid:") else item


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

    Attributes:
        arguments: the arguments as a schema declares them.
        names: their names, without that of the constants, which come last.

    Raises:
        TypeError: a field mixes tensors with plain values.
    """

    def __init__(self, bundle: type[Any]) -> None:
        self.bundle = bundle
        self.fields = _parse(bundle)
        slots = _signature(self.fields, "", False)
        self.arguments = ", ".join([*slots, "str constants"])
        self.names = [slot.split()[1] for slot in slots]
        self._kinds = [slot.split()[0].rstrip("?") for slot in slots]
        self._encode, self._summary = _generate(bundle, self.fields, self._kinds)

    def encode(self, args: Any) -> tuple[Any, ...]:
        """The flat arguments of a bundle."""
        flat, constants = self._encode(args)
        return (*flat, _constants_text(constants))

    def summary(self, flat: tuple[Any, ...]) -> tuple[Any, ...]:
        """What the structure of a result may depend on: for every slot (dimensions, dtype) of a tensor (a tuple of them
        for a list), a bool, a string, a dtype; None where there is none; numbers are left out. Traceable, and constant
        to a tracer.
        """
        return (*self._summary(flat), flat[-1])

    def placeholder(self, summary: tuple[Any, ...]) -> Any:
        """A bundle of :class:`TensorSpec` that has this summary, for evaluating a result's structure."""
        flat: list[Any] = list(summary)
        for position, kind in enumerate(self._kinds):
            if kind == "Tensor[]":
                flat[position] = [TensorSpec((2,) * dims, dtype) for dims, dtype in summary[position]]
            elif isinstance(summary[position], tuple):
                flat[position] = TensorSpec((2,) * summary[position][0], summary[position][1])
        return self.decode(tuple(flat))

    def decode(self, flat: tuple[Any, ...]) -> Any:
        """The bundle of flat arguments."""
        constants = iter(_constants[flat[-1]])
        return _decode(self.bundle, self.fields, iter(flat), constants)


class _Source:
    """Lines of the functions that :func:`_generate` makes, and the classes that they name."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.flat: list[str] = []
        self.constants: list[str] = []
        self.classes: dict[str, Any] = {
            "Tensor": torch.Tensor,
            "uid": _uid_or_self,
            "refuse": _refuse,
            "flatten": _flatten_many,
        }

    def name(self) -> str:
        return f"v{len(self.lines)}"


def _uid_or_self(value: Any) -> Any:
    """How a constant is passed on: a value by its uid, a tuple with its integers made definite, else as it is.

    A tracer may have made an integer symbolic that changed since the last call; ``operator.index`` asks for its value.
    """
    if isinstance(value, Value):
        return f"uid:{value.uid}"
    if isinstance(value, tuple):
        return tuple([_uid_or_self(item) for item in value])
    return operator.index(value) if type(value) is int else value


def _flatten_many(values: Any) -> tuple[list[torch.Tensor], Any]:
    """The tensors of a tuple, and its structure as a constant: what :func:`functional_te.pytree.rebuild` takes."""
    flat: list[torch.Tensor] = []
    return flat, _frozen(pytree.structure(() if values is None else values, flat))


def _frozen(structure: Any) -> Any:
    if structure is None or isinstance(structure, str):
        return structure
    kind, children, static_values = structure
    return kind, tuple([_frozen(child) for child in children]), None if static_values is None else tuple(static_values)


def _refuse(bundle: str, field: str, value: Any) -> Any:
    raise TypeError(f"{bundle}.{field}: no slot for a {type(value).__name__}.")


def _generate(bundle: type[Any], fields: tuple[_Field, ...], kinds: list[str]) -> tuple[Any, Any]:
    """Straight-line functions that encode a bundle and summarize its slots.

    Generated, because a tracer would otherwise walk the records of the fields for every call: that took most of the
    time that Dynamo needs for a chain.
    """
    source = _Source()
    _generate_fields(source, bundle.__name__, fields, "args")
    slots = "".join(f"{slot}, " for slot in source.flat)
    constants = "".join(f"{constant}, " for constant in source.constants)
    summaries = {
        "Tensor": "None if flat[{i}] is None else (flat[{i}].dim(), flat[{i}].dtype)",
        "Tensor[]": "tuple([(tensor.dim(), tensor.dtype) for tensor in flat[{i}]])",
        "SymInt": "1",
        "Scalar": "1.0",
    }
    summary = "".join(summaries.get(kind, "flat[{i}]").format(i=i) + ", " for i, kind in enumerate(kinds))
    code = "\n".join(
        [
            "def encode(args):",
            *(f"    {line}" for line in source.lines),
            f"    return ({slots}), ({constants})",
            "def summary(flat):",
            f"    return ({summary})",
        ]
    )
    namespace = source.classes
    exec(compile(code, f"<schema of {bundle.__name__}>", "exec"), namespace)
    return namespace["encode"], namespace["summary"]


def _generate_fields(source: _Source, bundle: str, fields: tuple[_Field, ...], holder: str) -> None:
    """Append the lines that read the fields of ``holder``, a variable that may be None inside of nested nodes."""
    for field in fields:
        value = source.name()
        maybe = "" if holder == "args" else f" if {holder} is not None else None"
        source.lines.append(f"{value} = {holder}.{field.name}{maybe}")
        if field.constant:
            source.constants.append(f"uid({value})")
            continue
        if field.plain:
            source.flat.append(value)
            continue
        if field.many:
            tensors, structure = f"{value}_tensors", f"{value}_structure"
            source.lines.append(f"{tensors}, {structure} = flatten({value})")
            source.flat.append(tensors)
            source.constants.append(f"uid({structure})")
            continue
        choice = ["0 if {v} is None else "]
        if field.tensor:
            tensor = source.name()
            source.lines.append(f"{tensor} = {value} if isinstance({value}, Tensor) else None")
            source.flat.append(tensor)
            choice.append(f"1 if {tensor} is not None else ")
        for position, (kind, inner) in enumerate(field.nodes):
            node = source.name()
            label = f"{kind.__name__}_{len(source.classes)}"
            source.classes[label] = kind
            source.lines.append(f"{node} = {value} if isinstance({value}, {label}) else None")
            choice.append(f"{position + 2} if {node} is not None else ")
            _generate_fields(source, kind.__name__, inner, node)
        chosen = source.name()
        rest = f"refuse({bundle!r}, {field.name!r}, {value})"
        source.lines.append(f"{chosen} = {''.join(choice).format(v=value)}{rest}")
        if field.nodes:
            source.constants.append(chosen)


def _decode(bundle: Any, fields: tuple[_Field, ...], flat: Any, constants: Any) -> Any:
    values: dict[str, Any] = {}
    for field in fields:
        if field.constant:
            values[field.name] = next(constants)
            continue
        if field.plain:
            values[field.name] = next(flat)
            continue
        if field.many:
            tensors = next(flat)
            values[field.name] = pytree.rebuild(next(constants), tensors)
            continue
        options: list[Any] = [None, next(flat) if field.tensor else None]
        options.extend(_decode(kind, inner, flat, constants) for kind, inner in field.nodes)
        values[field.name] = options[next(constants) if field.nodes else 1]
    return bundle(**values)
