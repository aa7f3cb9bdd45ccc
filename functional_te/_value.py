"""Hash-consed values: ops, chains, recipes, quantizers and rules are compared by value at the cost of ``is``.

Two equal values are one object. That makes equality and hashing O(1), lets :func:`torch.compile` guard a whole
chain with one string (:attr:`Value.uid`), and lets plan caches key on whole values instead of on types.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import threading
import weakref
from typing import Any, ClassVar

_lock = threading.Lock()
_table: weakref.WeakValueDictionary[tuple[Any, ...], Any] = weakref.WeakValueDictionary()
_by_uid: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
_uids = itertools.count(1)


def uid_of(value: Any) -> str:
    """The :attr:`Value.uid` of a value; an empty string for None."""
    return "" if value is None else value.uid


def value_of(uid: str) -> Any:
    """The interned value with this :attr:`Value.uid`; None for an empty string."""
    return _by_uid[uid] if uid else None


class Table:
    """Objects by name, as attributes.

    For what ordinary Python makes while a caller is traced (functions marked ``assume_constant_result``): Dynamo reads
    an attribute when it is asked for, but the contents of a dict once per trace.
    """


def _field_key(value: Any) -> Any:
    """Distinguish what ``==`` does not: ``1``, ``1.0`` and ``True``; ``0.0`` and ``-0.0``."""
    if isinstance(value, float):
        return (float, value.hex())
    if isinstance(value, tuple):
        return (tuple, tuple(_field_key(item) for item in value))
    return (type(value), value)


def _rebuild(cls: type[Any], fields: dict[str, Any]) -> Any:
    return cls(**fields)


class _ValueMeta(type):
    @property
    def __signature__(cls) -> inspect.Signature:
        """That of the constructor, which ``__call__`` hides."""
        own = inspect.signature(cls.__init__)  # type: ignore[misc]
        return own.replace(parameters=list(own.parameters.values())[1:], return_annotation=inspect.Signature.empty)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        made = super().__call__(*args, **kwargs)
        names = [field.name for field in dataclasses.fields(made)]
        try:
            key = (cls, *(_field_key(getattr(made, name)) for name in names))
            hash(key)
        except TypeError as error:
            raise TypeError(f"{cls.__name__}: every field must be hashable, got {made!r}") from error
        with _lock:
            known = _table.get(key)
            if known is None:
                object.__setattr__(made, "uid", f"v{next(_uids)}")
                _table[key] = known = made
                _by_uid[made.uid] = made
        return known


class Value(metaclass=_ValueMeta):
    """Base of frozen, interned values. Subclasses are ``@dataclass(frozen=True, eq=False)``.

    Equality is identity, which for interned values *is* equality by value. Copies and unpickled values are the
    interned object again.

    Attributes:
        uid: names the value within this process. A string, because a compiler may make an integer that differs from
            one call to the next symbolic.
    """

    uid: ClassVar[str]

    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}  # type: ignore[arg-type]
        return _rebuild, (type(self), fields)


@dataclasses.dataclass(frozen=True, eq=False)
class Constants(Value):
    """A tuple of plain constants as one value, for bundle fields that a compiler must not look into.

    Attributes:
        values: the constants.
    """

    values: tuple[Any, ...] = ()


NO_CONSTANTS = Constants()
