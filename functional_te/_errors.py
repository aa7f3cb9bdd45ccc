"""The one message template of argument errors: where, argument, what was wanted, what came."""

from __future__ import annotations

from typing import Any


def value_error(where: str, argument: str, wanted: str, got: Any, fix: str = "") -> ValueError:
    """A ``ValueError`` reading ``where: argument: expected ..., got .... fix``."""
    return ValueError(_message(where, argument, wanted, got, fix))


def type_error(where: str, argument: str, wanted: str, got: Any, fix: str = "") -> TypeError:
    """A ``TypeError`` reading ``where: argument: expected ..., got .... fix``."""
    return TypeError(_message(where, argument, wanted, got, fix))


def runtime_error(where: str, argument: str, wanted: str, got: Any, fix: str = "") -> RuntimeError:
    """A ``RuntimeError`` reading ``where: argument: expected ..., got .... fix``."""
    return RuntimeError(_message(where, argument, wanted, got, fix))


def kind_of(value: Any) -> str:
    """What a value of the wrong kind is, for a message."""
    return f"the class {value.__name__}; call it" if isinstance(value, type) else type(value).__name__


def _message(where: str, argument: str, wanted: str, got: Any, fix: str) -> str:
    return f"{where}: {argument}: expected {wanted}, got {got}." + (f" {fix}" if fix else "")
