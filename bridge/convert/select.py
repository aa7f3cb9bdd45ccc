"""Which modules ``include`` and ``exclude`` select."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable
from typing import Any

import torch

from functional_te._errors import type_error, value_error

__all__ = ["Selection"]

_WANTED = "name patterns, module types or predicates, one or several"


class Selection:
    """A set of modules by name pattern (``fnmatch``), type or predicate. What matches stands for all that is below it.

    Args:
        wanted: one of ``str``, a subclass of ``torch.nn.Module`` or ``predicate(name, module) -> bool``, or several.
        argument: name of the argument, for errors.
        model: the model.

    Raises:
        TypeError: something else.
        ValueError: a pattern that matches no module of ``model``.
    """

    def __init__(self, wanted: Any, argument: str, model: torch.nn.Module) -> None:
        self._tests = [_test(one, argument) for one in _listed(wanted, argument)]
        names = [name for name, _ in model.named_modules(remove_duplicate=False)]
        for one in _listed(wanted, argument):
            if isinstance(one, str) and not any(fnmatch.fnmatchcase(name, one) for name in names):
                raise value_error("convert", argument, "patterns of names of modules", f"{one!r}, which matches none")

    def __bool__(self) -> bool:
        return bool(self._tests)

    def covers(self, path: list[tuple[str, torch.nn.Module]]) -> bool:
        """Whether a module, the last of ``path``, or one that it is part of matches."""
        return any(test(name, module) for test in self._tests for name, module in path)


def _listed(wanted: Any, argument: str) -> list[Any]:
    if wanted is None:
        return []
    if isinstance(wanted, (str, type)) or callable(wanted):
        return [wanted]
    if not isinstance(wanted, Iterable):
        raise type_error("convert", argument, _WANTED, repr(wanted))
    return list(wanted)


def _test(one: Any, argument: str) -> Callable[[str, torch.nn.Module], bool]:
    if isinstance(one, str):
        return lambda name, module: fnmatch.fnmatchcase(name, one)
    if isinstance(one, type):
        if not issubclass(one, torch.nn.Module):
            raise type_error("convert", argument, _WANTED, repr(one))
        return lambda name, module: isinstance(module, one)
    if isinstance(one, torch.nn.Module) or not callable(one):
        raise type_error("convert", argument, _WANTED, repr(one))
    return lambda name, module: bool(one(name, module))
