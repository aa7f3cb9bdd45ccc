"""What stands for functions of torch does what they do, without importing the compiler."""

from __future__ import annotations

import subprocess
import sys

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from functional_te.torch_compat import assume_constant_result, statically_known_true


def test_results_that_are_constant() -> None:
    def function() -> int:
        return 1

    def other() -> int:
        return 1

    torch.compiler.assume_constant_result(other)
    assert assume_constant_result(function) is function
    assert vars(function) == vars(other)


def test_conditions_on_sizes() -> None:
    assert statically_known_true(True) is True
    assert statically_known_true(False) is False
    seen = []

    def function(x):
        # of a symbolic size nothing is known, and asking makes no guard
        seen.append((statically_known_true(x.shape[0] == 4), statically_known_true(x.shape[0] == x.shape[0])))
        return x + 1

    make_fx(function, tracing_mode="symbolic")(torch.ones(4, 8))
    assert seen[-1] == (False, True)


def test_compiled_code(dynamo) -> None:
    def function(x):
        return x + 1 if statically_known_true(x.shape[1] == 8) else x - 1

    compiled = torch.compile(function, fullgraph=True, backend="eager")
    assert torch.equal(compiled(torch.ones(4, 8)), torch.full((4, 8), 2.0))
    assert torch.equal(compiled(torch.ones(4, 7)), torch.zeros(4, 7))


def test_neither_imports_the_compiler() -> None:
    code = """
import sys
from functional_te.torch_compat import assume_constant_result, statically_known_true
before = "torch._dynamo" in sys.modules
assume_constant_result(lambda: 1)
assert statically_known_true(2 == 2)
assert ("torch._dynamo" in sys.modules) == before
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=200)
