"""How a module is converted in place: its class becomes a generated subclass that runs chains.

The module object, its parameters, buffers, children, hooks and names stay as they are. The subclass bears the name of
its base, so what looks classes up by name finds what it found before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from bridge import recipe_context
from bridge.compat import in_backward
from functional_te.recipes import Recipe

__all__ = ["ATTRIBUTE", "Record", "base_class", "converted_class", "is_converted", "original", "rebuild"]

ATTRIBUTE = "_functional_te"


class Record:
    """What a converted module has besides its own attributes.

    Attributes:
        rule: name of the rule.
        call: a module-level function ``call(module, *args, **kwargs)`` that runs in the place of ``forward``.
        data: what it needs: chains and parts.
        ops: the operations whose state moves with the module.
        recipe: the recipe outside of any autocast.
        kept: attributes of the module that were changed, with their values before.
        report: of the conversion; only the model that was given has it.
    """

    def __init__(
        self, rule: str, call: Callable[..., Any], data: Any, ops: tuple[Any, ...], kept: dict[str, Any] | None = None
    ) -> None:
        self.rule = rule
        self.call = call
        self.data = data
        self.ops = ops
        self.recipe: Recipe | None = None
        self.kept = kept or {}
        self.report: Any = None


def is_converted(module: torch.nn.Module) -> bool:
    """Whether a module was converted."""
    return ATTRIBUTE in module.__dict__


def base_class(module: torch.nn.Module) -> type[torch.nn.Module]:
    """The class of a module before it was converted."""
    kind = type(module)
    return kind.__mro__[1] if "_functional_te_base" in kind.__dict__ else kind


def original(module: Any, *args: Any, **kwargs: Any) -> Any:
    """The forward as the module's own class defines it, over parts that may be converted."""
    return module._functional_te_base.forward(module, *args, **kwargs)


def _outside_of_contexts() -> bool:
    """Whether a call is to enter the recipe given to the conversion. Recomputed forwards remember their own."""
    if recipe_context.in_context():
        return False
    return torch.compiler.is_compiling() or not in_backward()


@functools.cache
def _made(base: Any) -> Any:
    """See :func:`converted_class`."""

    @functools.wraps(base.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        record = self._functional_te
        if record.recipe is not None and _outside_of_contexts():
            with recipe_context.autocast(recipe=record.recipe):
                return record.call(self, *args, **kwargs)
        return record.call(self, *args, **kwargs)

    def _apply(self: Any, fn: Any, recurse: bool = True) -> Any:
        base._apply(self, fn, recurse)
        for op in self._functional_te.ops:
            op._apply(fn)
        return self

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        del protocol
        return rebuild, (base,), self.__getstate__()

    return type(base)(
        base.__name__,
        (base,),
        {
            "__module__": base.__module__,
            "__qualname__": base.__qualname__,
            "__doc__": base.__doc__,
            "__reduce_ex__": __reduce_ex__,
            "_apply": _apply,
            "_functional_te_base": base,
            "forward": forward,
        },
    )


def converted_class(base: Any) -> Any:
    """The subclass of ``base`` whose modules run what their record says. One for every base."""
    return _made(base)


def rebuild(base: Any) -> Any:
    """An empty converted module over ``base``, for copies and pickles."""
    kind = converted_class(base)
    return kind.__new__(kind)
