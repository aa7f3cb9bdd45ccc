"""What PyTorch only offers at the price of importing its compiler, which takes longer than importing PyTorch itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

__all__ = ["assume_constant_result", "statically_known_true"]

_F = TypeVar("_F", bound=Callable[..., Any])


def assume_constant_result(function: _F) -> _F:
    """:func:`torch.compiler.assume_constant_result`, which imports ``torch._dynamo`` to set this one attribute."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def statically_known_true(condition: Any) -> bool:
    """Whether a condition on sizes is known to hold, without a guard on symbolic ones.

    :func:`torch.fx.experimental.symbolic_shapes.statically_known_true`, which is imported for symbolic sizes only.
    """
    if not torch.compiler.is_compiling() and type(condition) is bool:
        return condition
    from torch.fx.experimental.symbolic_shapes import statically_known_true as known

    return known(condition)
