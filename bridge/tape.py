"""Tapes: what a function of tensors does, as straight-line Python that calls kernels and ATen operators.

The function runs once on tensors without storage. Every launch of a kernel and every ATen operator is written down with
the numbers that it had, and compiled into a function that does the same to real tensors of the same shapes and dtypes.
What decides anything on the host is decided once, so a tape fits calls of one kind; who records says which.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Unwritable", "record_tape"]

# Single numbers lie 16 bytes apart, which every kernel takes for aligned.
_APART = 4
_OF_EMPTY = {"dtype", "device", "layout", "pin_memory"}


class Unwritable(Exception):
    """Something that no straight line of calls does."""


class _Step:
    """One call of ``function``; ``made`` is what it gave, ``mutates`` whether it writes to an argument."""

    def __init__(self, function: Any, args: Any, kwargs: Any, made: Any, mutates: bool) -> None:
        self.function, self.args, self.kwargs, self.made, self.mutates = function, args, kwargs, made, mutates


class _Writer(TorchDispatchMode):
    """Writes down calls. Inside of the mode of tensors without storage."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[_Step] = []
        self.made: dict[int, torch.Tensor] = {}  # by id, which is theirs as long as they live

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator and write it down."""
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        mutates = func._schema.is_mutable
        if not mutates and not any(True for _ in _tensors(made)):
            return made  # a number that follows from shapes
        if func.namespace != "aten":
            raise Unwritable(f"it calls {func}")
        if func is torch.ops.aten.detach.default and id(args[0]) in self.made:
            return args[0]  # nothing is recorded for autograd
        self.made.update((id(tensor), tensor) for tensor in _tensors(made))
        self.steps.append(_Step(func, args, kwargs, made, mutates))
        return made

    def launched(self, launch: Any, tensors: list[torch.Tensor]) -> None:
        """Write down a launch."""
        self.steps.append(_Step(launch, tensors, {}, None, True))


def _tensors(value: Any) -> Iterable[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _tensors(part)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


def _needed(steps: list[_Step], results: Any) -> list[_Step]:
    """The steps that a result or something written to depends on."""
    wanted = {id(tensor) for tensor in _tensors(results)}
    kept = []
    for step in reversed(steps):
        if step.mutates or any(id(tensor) in wanted for tensor in _tensors(step.made)):
            kept.append(step)
            wanted.update(id(tensor) for tensor in _tensors((step.args, step.kwargs)))
    return kept[::-1]


# The same by another way, which the interpreter takes in less time.
_QUICKER = {
    torch.ops.aten.t.default: torch.t,
    torch.ops.aten.view.default: torch.Tensor.view,
    torch.ops.aten.add.Tensor: torch.add,
}
# what makes one number: the zero that a kernel folds an amax into, or room for a scale
_NUMBERS = {
    torch.ops.aten.zeros.default: "zeros",
    torch.ops.aten.new_zeros.default: "zeros",
    torch.ops.aten.empty.memory_format: "empty",
}


def _number(step: _Step) -> str:
    """The function that makes many of the numbers that the step makes one of, or empty."""
    made = step.made
    name = _NUMBERS.get(step.function, "")
    return name if name and tuple(made.shape) == (1,) and made.dtype is torch.float32 else ""


class _Source:
    """Python source of a tape; ``quicker`` are functions to call in the place of operators."""

    def __init__(self, inputs: Sequence[torch.Tensor], results: Any, quicker: dict[Any, Any]) -> None:
        self.results = {id(tensor) for tensor in _tensors(results)}
        self.names: dict[int, str] = {}
        self.globals: dict[str, Any] = {"empty": torch.empty, "zeros": torch.zeros}
        # a line, and the variables in it
        self.lines: list[tuple[str, list[str]]] = []
        self.used: list[str] = []
        self.quicker = {**_QUICKER, **quicker}
        for index, tensor in enumerate(inputs):
            self.names.setdefault(id(tensor), f"x{index}")

    def constant(self, value: Any) -> str:
        for name, known in self.globals.items():
            if known is value or (type(known) is type(value) is torch.device and known == value):
                return name
        name = f"c{len(self.globals)}"
        self.globals[name] = value
        return name

    def name(self, tensor: torch.Tensor) -> str:
        """The variable of a tensor, a new one if it has none."""
        return self.names.setdefault(id(tensor), f"v{len(self.names)}")

    def expression(self, value: Any) -> str:
        if isinstance(value, torch.Tensor):
            if id(value) not in self.names:
                raise Unwritable("it uses a tensor that is no argument")
            self.used.append(self.names[id(value)])
            return self.names[id(value)]
        if isinstance(value, (tuple, list)):
            return "[" + ", ".join(map(self.expression, value)) + "]"
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            raise Unwritable("it depends on a symbolic number")
        return repr(value) if type(value) in (int, bool, type(None)) else self.constant(value)

    def call(self, function: str, args: Any, kwargs: Any) -> str:
        given = [self.expression(arg) for arg in args]
        given.extend(f"{name}={self.expression(value)}" for name, value in kwargs.items())
        return f"{function}({', '.join(given)})"

    def add(self, text: str, *made: str) -> None:
        self.lines.append((f"{', '.join(made)} = {text}" if made else text, [*self.used, *made]))
        self.used = []

    def numbers(self, function: str, steps: list[_Step]) -> None:
        """One allocation for all single numbers that ``function`` makes, and one fill."""
        if not steps:
            return
        kind = f"dtype={self.constant(torch.float32)}, device={self.constant(steps[0].made.device)}"
        self.add(f"{function}(({len(steps)}, {_APART}), {kind})[:, :1].unbind()", ", ".join(self.made(steps)) + ",")
        self.lines[-1][1][-1:] = self.made(steps)

    def made(self, steps: list[_Step]) -> list[str]:
        """The variables of what some steps make, a tensor each."""
        return [self.name(step.made) for step in steps]

    def step(self, step: _Step) -> None:
        function, kwargs = step.function, step.kwargs
        if function is torch.ops.aten.empty.memory_format and kwargs.keys() <= _OF_EMPTY:
            # of the ways to call it the quickest
            text = self.call("empty", step.args, {name: kwargs[name] for name in ("dtype", "device") if name in kwargs})
        else:
            text = self.call(self.constant(self.quicker.get(function, function)), step.args, kwargs)
        made = list(_tensors(step.made))
        if self._is_same(step):
            self.names[id(step.made)] = self.names[id(step.args[0])]
            self.used = []
        elif isinstance(step.made, torch.Tensor):
            self.add(text, self.name(step.made))
        elif made:
            self.add(f"{text}", f"{', '.join(map(self.name, made))},")
            self.lines[-1][1][-1:] = map(self.name, made)
        else:
            self.add(text)

    def _is_same(self, step: _Step) -> bool:
        """Whether it is a view that its argument can stand for. Not for a result, which is a tensor of its own."""
        if step.function is not torch.ops.aten.view.default or id(step.made) in self.results:
            return False
        return step.made.shape == step.args[0].shape and step.made.stride() == step.args[0].stride()

    def function(self, arguments: int, results: Any) -> Callable[..., Any]:
        """The function, which lets go of what it no longer needs."""
        self.add(f"return {self.expression(list(results))}")
        last = {name: number for number, (_, used) in enumerate(self.lines) for name in used}
        body = []
        for number, (line, used) in enumerate(self.lines[:-1]):
            gone = [name for name in dict.fromkeys(used) if last[name] == number and name[0] != "x"]
            body.append(line + (f"; del {', '.join(gone)}" if gone else ""))
        head = f"def tape({', '.join(f'x{index}' for index in range(arguments))}):"
        source = "\n    ".join([head, *body, self.lines[-1][0]])
        namespace = dict(self.globals)
        exec(compile(source, "<functional_te tape>", "exec"), namespace)
        function: Callable[..., Any] = namespace["tape"]
        function.source = source  # type: ignore[attr-defined]
        return function


def record_tape(
    mode: Any, function: Callable[..., Sequence[Any]], inputs: Sequence[torch.Tensor]
) -> tuple[Callable[..., list[Any]], Sequence[Any]]:
    """``function`` as a tape, and what it gave.

    Args:
        mode: in which tensors have no storage.
        function: from tensors to tensors and None.
        inputs: its arguments, of that mode, with definite sizes.

    Raises:
        Unwritable: it does something else than launching kernels and calling ATen operators.
    """
    from functional_te.kernels.triton.compat import BY_OPERATOR  # Triton may be absent
    from functional_te.kernels.triton.launch import recording_launches

    writer = _Writer()
    with mode, writer, recording_launches(writer.launched):
        results = function(*inputs)
    steps = _needed(writer.steps, results)
    source = _Source(inputs, list(results), BY_OPERATOR)
    # but not results: those that leave an autograd function are no views, or nobody may write to them
    numbers = {id(step): _number(step) for step in steps if id(step.made) not in source.results}
    for maker in ("zeros", "empty"):
        source.numbers(maker, [step for step in steps if numbers.get(id(step)) == maker])
    for step in steps:
        if not numbers.get(id(step)):
            source.step(step)
    return source.function(len(inputs), results), results
