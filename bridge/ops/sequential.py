"""A container that runs consecutive fusible ops as one chain."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch

from bridge.ops.group import Group
from bridge.ops.operation import BasicOperation, FusibleOperation
from functional_te._errors import type_error, value_error

__all__ = ["Sequential"]


class Sequential(torch.nn.Sequential):
    """Modules in order; consecutive fusible ops run as one chain, other modules are called with the main tensor.

    Args:
        args: modules, or one mapping from names to modules.
    """

    def __init__(self, *args: Any) -> None:
        if len(args) == 1 and isinstance(args[0], Mapping):
            from collections import OrderedDict

            args = (OrderedDict(args[0]),)
        super().__init__(*args)
        self.regroup()

    def regroup(self) -> None:
        """Compute the groups again, after ops were exchanged or their channels were set."""
        for group in self.__dict__.get("_module_groups", ()):
            if isinstance(group, Group) and group.ran:
                for captured in group.modules:
                    captured._captured = True
        groups: list[Any] = []
        run: list[BasicOperation] = []
        self._group_error: Exception | None = None
        for module in self._modules.values():
            if isinstance(module, FusibleOperation):
                run.extend(module.basic_operations())
                continue
            if run:
                groups.append(self._group(run))
                run = []
            groups.append(module)
        if run:
            groups.append(self._group(run))
        # a plain attribute: the modules are registered under their own names already
        self.__dict__["_module_groups"] = groups

    def _group(self, modules: list[BasicOperation]) -> Group | None:
        for module in modules:
            if not any(owner() is self for owner in module._owners):
                module._owners.append(weakref.ref(self))
        try:
            return Group(modules)
        except ValueError as error:  # channels may still be set; a forward raises what is left
            self._group_error = error
            return None

    def forward(self, input: torch.Tensor, *extra_inputs: torch.Tensor, op_kwargs: Any = None) -> Any:
        """Run the modules.

        Args:
            input: the main tensor.
            extra_inputs: extra inputs that come from no channel, in module order.
            op_kwargs: forward kwargs by contained op or its index.

        Returns:
            The main output, or a tuple of it and the extra outputs.

        Raises:
            ValueError: too few or too many extra inputs, kwargs for something that takes none, broken channels.
        """
        if self._group_error is not None:
            raise self._group_error
        kwargs = self._bind_kwargs(op_kwargs) if op_kwargs else None
        x, extras, taken = input, [], 0
        groups: list[Any] = self.__dict__["_module_groups"]
        for group in groups:
            if not isinstance(group, Group):
                x = group(x)
                continue
            count = group.num_extra_inputs
            if taken + count > len(extra_inputs):
                raise value_error(
                    "Sequential", "extra_inputs", f"at least {taken + count} extra inputs", len(extra_inputs)
                )
            given = None
            if kwargs:
                given = {i: kwargs[m] for i, m in enumerate(group.modules) if m in kwargs}
            x, *more = group(x, extra_inputs[taken : taken + count], given)
            taken += count
            extras.extend(more)
        if taken != len(extra_inputs):
            raise value_error("Sequential", "extra_inputs", f"{taken} extra inputs", len(extra_inputs))
        return (x, *extras) if extras else x

    def _bind_kwargs(self, op_kwargs: Any) -> dict[Any, dict[str, Any]]:
        contained = list(self._modules.values())
        bound = {}
        for key, kwargs in op_kwargs.items():
            module = contained[key] if isinstance(key, int) and -len(contained) <= key < len(contained) else key
            if not any(module is known for known in contained):
                raise value_error("Sequential", "op_kwargs", "contained ops or their indices", repr(key))
            if not isinstance(module, BasicOperation):
                raise value_error("Sequential", "op_kwargs", "a basic op", type(module).__name__)
            bound[module] = dict(kwargs)
        return bound

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if isinstance(value, torch.nn.Module):
            self.regroup()

    def __delattr__(self, name: str) -> None:
        super().__delattr__(name)
        self.regroup()

    def _is_numbered(self) -> bool:
        """Whether the names are those that a Sequential gives; else names are kept when others come and go."""
        return list(self._modules) == [str(index) for index in range(len(self))]

    def _next_name(self) -> str:
        return str(max([int(name) for name in self._modules if name.isdecimal()], default=-1) + 1)

    def __delitem__(self, index: Any) -> None:
        if self._is_numbered():
            super().__delitem__(index)
        else:
            names = list(self._modules)[index]
            for name in names if isinstance(names, list) else [names]:
                del self._modules[name]
        self.regroup()

    def append(self, module: Any) -> Any:
        """Add a module at the end, under the number that follows the largest."""
        self.add_module(self._next_name(), module)
        return self

    def add_module(self, name: str, module: Any) -> None:
        """Add a module; every other way to add some ends here or in an attribute."""
        super().add_module(name, module)
        self.regroup()

    def insert(self, index: int, module: Any) -> Any:
        """Insert a module."""
        if self._is_numbered():
            super().insert(index, module)
        else:
            named = list(self._modules.items())
            if not -len(named) <= index <= len(named):
                raise IndexError(f"Sequential: index {index!r} is out of range; there are {len(named)} modules.")
            self.append(module)
            named.insert(index, (next(reversed(self._modules)), module))
            self._modules.clear()
            self._modules.update(named)
        self.regroup()
        return self

    def __iadd__(self, other: Any) -> Any:
        if not isinstance(other, (torch.nn.Sequential, list, tuple)):
            raise type_error("Sequential", "+=", "a Sequential or a list of modules", type(other).__name__)
        for module in list(other):
            self.append(module)
        return self

    def __add__(self, other: Any) -> Any:
        if not isinstance(other, torch.nn.Sequential):
            raise type_error("Sequential", "+", "a Sequential", type(other).__name__)
        return type(self)(*self, *other)

    def __mul__(self, times: int) -> Any:
        if not isinstance(times, int) or times < 1:
            raise value_error("Sequential", "*", "a positive int", repr(times))
        return type(self)(*(module for _ in range(times) for module in self))

    __rmul__ = __mul__

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        state.pop("_module_groups", None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.regroup()
