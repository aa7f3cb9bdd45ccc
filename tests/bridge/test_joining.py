"""Joining and splitting by a kernel in compiled code, against PyTorch's own functions.

The kernel runs in the interpreter, which no compiler can look into, so the op around it is closed here;
``tests/gpu/test_joining_on_cuda.py`` has it open.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

from bridge import joining

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without CUDA"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*"),
]
SIZES = (40, 8, 16)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Along which axis the kernel joined."""
    from functional_te.kernels.triton.concatenate import concatenate

    found = list[int]()

    def counting(parts: Any, dim: int) -> torch.Tensor:
        found.append(dim)
        return concatenate(parts, dim)

    monkeypatch.setattr(joining, "_kernel", lambda device: counting)
    monkeypatch.setattr(joining.closed, "depth", 1)
    return found


def attend(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
    """Projections by one product; the gradients of the parts are views, a copy, and zeros."""
    q, k, v = joining.split(x @ joining.join(weights, 0).t(), SIZES)
    heads = q.sin().unflatten(-1, (4, 10)).transpose(-3, -2).cos()
    return heads.square().sum() + (k * 2).sum() + 0 * v.detach().sum()


def arguments(lead: tuple[int, ...] = (2, 5)) -> list[torch.Tensor]:
    torch.manual_seed(0)
    weights = [torch.randn(size, 24, requires_grad=True) for size in SIZES]
    return [torch.randn(*lead, 24, requires_grad=True), *weights]


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_values_and_gradients(backend: str, runs: list[int], dynamo: Any) -> None:
    own = arguments()
    want = attend(*own)
    want_grads = torch.autograd.grad(want, own)
    assert not runs  # PyTorch's own functions
    got = torch.compile(attend, fullgraph=True, backend=backend)(*own)
    torch.testing.assert_close(got, want)
    for grad, wanted in zip(torch.autograd.grad(got, own), want_grads, strict=True):
        torch.testing.assert_close(grad, wanted)
    assert runs == [0, 1]


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_any_number_of_parts_with_and_without_gradients(count: int, guard: Any, runs: list[int], dynamo: Any) -> None:
    def call(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        return torch.cat([2 * own for own in joining.split(x @ joining.join(weights, 0).t(), (8,) * count)], -1)

    own = [torch.randn(size, 24, requires_grad=True) for size in (5, *(8,) * count)]
    fast = torch.compile(call, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        with guard():
            got = fast(*own)
        torch.testing.assert_close(got, call(*own))
        if got.requires_grad:
            for grad, want in zip(
                torch.autograd.grad(got.sum(), own), torch.autograd.grad(call(*own).sum(), own), strict=True
            ):
                torch.testing.assert_close(grad, want)
    assert 0 in runs


def test_a_weight_that_stands_twice(runs: list[int], dynamo: Any) -> None:
    x, a, b, _ = arguments()
    fast = torch.compile(lambda x, a, b: joining.join([a, b, b], 0) @ x[0].t(), fullgraph=True, backend="aot_eager")
    assert torch.equal(fast(x, a, b), torch.cat([a, b, b]) @ x[0].t())
    assert not runs


def test_frozen_weights_and_inputs(runs: list[int], dynamo: Any) -> None:
    fast = torch.compile(attend, fullgraph=True, backend="aot_eager")
    for frozen in ([0], [1, 2, 3], [2], [0, 1, 2, 3]):
        own = arguments()
        for place in frozen:
            own[place] = own[place].detach()
        y = fast(*own)
        wanted = [tensor for tensor in own if tensor.requires_grad]
        assert y.requires_grad == bool(wanted)
        if wanted:
            for grad, want in zip(
                torch.autograd.grad(y, wanted), torch.autograd.grad(attend(*own), wanted), strict=True
            ):
                torch.testing.assert_close(grad, want)
    assert runs.count(0) == 4


def test_dynamic_numbers_of_tokens(runs: list[int], dynamo: Any) -> None:
    fast = torch.compile(attend, fullgraph=True, backend="aot_eager", dynamic=True)
    for lead in ((2, 5), (3, 7), (4, 2)):
        own = arguments(lead)
        got = torch.autograd.grad(fast(*own), own)
        for grad, want in zip(got, torch.autograd.grad(attend(*own), own), strict=True):
            torch.testing.assert_close(grad, want)
    assert dynamo["stats"]["unique_graphs"] == 1
    assert len(runs) == 6


def test_what_the_kernel_does_not_take(runs: list[int], dynamo: Any) -> None:
    def mixed(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return joining.join([a, b], 0)

    fast = torch.compile(mixed, fullgraph=True, backend="aot_eager")
    for a, b in (
        (torch.ones(3, 2), torch.ones(1, 2, dtype=torch.bfloat16)),  # dtypes are promoted
        (torch.ones(3), torch.ones(2)),
    ):
        assert torch.equal(fast(a, b), torch.cat([a, b]))
    with pytest.raises(Exception, match="Sizes of tensors must match"):  # as eagerly
        fast(torch.ones(3, 2), torch.ones(3, 4))
    x, weights = arguments()[0], arguments()[1:]

    def loss(*weights: torch.Tensor) -> torch.Tensor:
        return attend(x, *weights)

    grads = torch.compile(torch.func.grad(loss, argnums=(0, 1, 2)), backend="aot_eager")(*weights)
    for grad, want in zip(grads, torch.autograd.grad(loss(*weights), weights), strict=True):
        torch.testing.assert_close(grad, want)
    assert not runs


def test_opcheck(runs: list[int]) -> None:
    parts = [torch.randn(3, 8), torch.randn(5, 8)]
    torch.library.opcheck(torch.ops.functional_te.concatenate_opaque.default, (parts, 0))
