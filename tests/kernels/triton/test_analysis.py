"""Answers about kernels are remembered where they have to be the same, and nowhere else."""

from __future__ import annotations

import inspect
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode


class Kernel:
    """What the module of a kernel is known of."""

    def __init__(self, module: str | None = "functional_te.kernels.triton.cast") -> None:
        self.__module__ = module  # type: ignore[assignment]


@pytest.fixture
def asked() -> tuple[Any, list[dict[str, Any]]]:
    """A remembering analysis, and what reached the one behind it."""
    from functional_te.kernels.triton.analysis import remembering

    found = list[dict[str, Any]]()

    def analyze(kernel: Any, kwargs: dict[str, Any], tma_descriptor_metadata: Any) -> list[str]:
        found.append(kwargs)
        return [name for name, value in kwargs.items() if isinstance(value, torch.Tensor)]

    return remembering(analyze), found


def fake(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    with FakeTensorMode():
        return torch.empty(4, dtype=dtype)


def test_the_same_question_is_asked_once(asked: Any) -> None:
    ask, found = asked
    own = Kernel()
    for _ in range(3):
        answer = ask(own, {"x": fake(), "size": 128, "limit": 448.0, "END": "cast", "none": None}, {})
        assert answer == ["x"]
        answer.append("what a caller does with it")
    assert len(found) == 1


def test_what_makes_a_question_another(asked: Any) -> None:
    ask, found = asked
    first = {"x": fake(), "size": 128, "FLAG": True}
    own = Kernel()
    ask(own, first, {})
    others: list[Any] = [
        (Kernel(), first),
        (own, {**first, "x": fake(torch.bfloat16)}),
        (own, {**first, "size": 1}),
        (own, {**first, "size": 128.0}),
        (own, {**first, "FLAG": 1}),
        (own, {**first, "FLAG": "cast"}),
        (own, {**first, "y": fake()}),
        (own, {"x": first["x"], "size": 128}),
    ]
    for count, (kernel_, kwargs) in enumerate(others, 2):
        ask(kernel_, kwargs, {})
        assert len(found) == count
    for kernel_, kwargs in others:
        ask(kernel_, kwargs, {})
    assert len(found) == 1 + len(others)


@pytest.mark.parametrize(
    "case", ["another package", "no module", "descriptors", "a real tensor", "an unknown argument"]
)
def test_other_questions_are_passed_on(case: str, asked: Any) -> None:
    ask, found = asked
    own = Kernel({"another package": "functional_test.kernels", "no module": None}.get(case, "functional_te.kernels"))
    kwargs: dict[str, Any] = {"x": torch.ones(4) if case == "a real tensor" else fake()}
    if case == "an unknown argument":
        kwargs["y"] = object()
    metadata = {"x": ("stable", ([4],))} if case == "descriptors" else {}
    for _ in range(2):
        assert ask(own, kwargs, metadata) == ["x"]
    assert len(found) == 2


def test_wrapped_kernels(asked: Any) -> None:
    ask, found = asked

    def wrapped(kernel: Any, *configs: dict[str, Any]) -> Any:
        return SimpleNamespace(fn=kernel, configs=[SimpleNamespace(kwargs=own) for own in configs])

    first, second = Kernel(), Kernel()
    for _ in range(2):
        ask(wrapped(first, {}), {"x": fake()}, {})
        ask(wrapped(first), {"x": fake()}, {})
        ask(first, {"x": fake()}, {})
    assert len(found) == 1
    ask(wrapped(second, {}), {"x": fake()}, {})
    ask(wrapped(first, {"BM": 64}), {"x": fake()}, {})
    ask(wrapped(first, {"BM": 32}), {"x": fake()}, {})
    assert len(found) == 4
    for _ in range(2):
        ask(wrapped(Kernel("elsewhere.kernels"), {}), {"x": fake()}, {})
    assert len(found) == 6


def test_symbols(asked: Any) -> None:
    import sympy

    ask, found = asked
    own = Kernel()
    for value in (sympy.Symbol("s0"), sympy.Symbol("s1"), sympy.Symbol("s0") * 2):  # PyTorch looks at none of them
        ask(own, {"size": value}, {})
    assert len(found) == 1


def test_pytorch_has_what_is_replaced() -> None:
    """One of the functions, with these arguments; else nothing is remembered, and compiling takes twice as long."""
    code = """
import inspect
from torch._higher_order_ops import triton_kernel_wrap as own
from functional_te.kernels.triton.analysis import ANALYSES, remember_analyses
there = [name for name in ANALYSES if hasattr(own, name)]
assert len(there) == 1, there
before = getattr(own, there[0])
assert list(inspect.signature(before).parameters) == ["kernel", "kwargs", "tma_descriptor_metadata"]
assert inspect.getsource(own.get_mutated_tensors).count(there[0] + "(") == 1
remember_analyses()
remember_analyses()
assert getattr(own, there[0]).__wrapped__ is before
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_inductor_asks_the_same_function() -> None:
    """It imports the function by its name when it needs it, so that it finds the one that remembers."""
    import torch._inductor.ir

    from functional_te.kernels.triton.analysis import ANALYSES

    source = inspect.getsource(torch._inductor.ir.UserDefinedTritonKernel)
    assert any(f"{name}(" in source for name in ANALYSES)
    assert "from torch._higher_order_ops.triton_kernel_wrap import" in source
