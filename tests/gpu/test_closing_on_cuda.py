"""Compiled steps of delayed scaling whose recipe is entered inside: the call closes its own steps, on every backend."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import bridge
import functional_te as fte
from functional_te.kernels import registry
from tests.oracles import snr

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch.*")

RECIPE = fte.recipes.DelayedScaling(amax_history_len=4)
OPTIONS: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
# a plan that was made for "auto" is found again: every backend has matrices of its own size
WIDTHS = {"reference": 64, "triton": 96, "te": 160}
STEPS = 4


class Twice(torch.nn.Module):
    """A parametrization, whose derivative Inductor computes where it likes."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight * 2


def trained(make: Callable[[], Any], arguments: Callable[[int], tuple[Tensor, ...]], compiled: bool) -> list[Any]:
    """Outputs, gradients and state of training steps whose magnitudes differ by powers of four."""
    torch.manual_seed(0)
    model = make()

    def call(*own: Tensor) -> Any:
        with bridge.autocast(recipe=RECIPE):
            return model(*own)

    run, found = torch.compile(call, fullgraph=True) if compiled else call, []
    for step in range(STEPS):
        model.zero_grad(set_to_none=True)
        x, *others = arguments(step)
        x.requires_grad_()
        y = run(x, *others)
        (y.float().square().mean() * 4.0**step).backward()
        gradients = [x.grad, *[parameter.grad.clone() for parameter in model.parameters()]]
        # a backward in compiled code closes its step itself, in eager code the next call does
        state = [own.clone() for name, own in sorted(model.named_buffers()) if "grad_output" not in name]
        found.append((y.detach(), gradients, state))
    return found


def assert_alike(got: list[Any], want: list[Any]) -> None:
    for (y, gradients, state), (y2, gradients2, state2) in zip(want, got, strict=True):
        for one, other in zip([y, *gradients], [y2, *gradients2], strict=True):
            assert snr(other, one) > 20
        assert len(state) == len(state2) > 0
        for one, other in zip(state, state2, strict=True):
            # bfloat16 that another kernel rounds elsewhere moves an amax by a step of it
            torch.testing.assert_close(other, one, rtol=0.02, atol=0)


@pytest.mark.parametrize("backend", WIDTHS)
def test_gradients_are_divided_by_the_scales_of_their_step(backend: str, monkeypatch: Any, dynamo: Any) -> None:
    if backend == "te" and importlib.util.find_spec("transformer_engine") is None:
        pytest.skip("needs transformer_engine (the `te` extra)")
    monkeypatch.setitem(registry._found, "cuda", backend)
    width, ops = WIDTHS[backend], bridge.ops
    assert fte.plan(fte.Linear(width, 2 * width), device="cuda").backend == backend

    def make() -> Any:
        first, last = ops.Linear(width, 2 * width, bias=False, **OPTIONS), ops.Linear(2 * width, width, **OPTIONS)
        model = ops.Sequential(first, ops.GELU(), last)
        for linear in (first, last):
            torch.nn.utils.parametrize.register_parametrization(linear.basic_ops[0], "weight", Twice())
        return model

    def arguments(step: int) -> tuple[Tensor, ...]:
        generator = torch.Generator("cuda").manual_seed(step)
        return (torch.randn(128, width, generator=generator, **OPTIONS) * 4**step,)

    assert_alike(trained(make, arguments, True), trained(make, arguments, False))
    assert dynamo["stats"]["unique_graphs"] == 1
    assert not dynamo["graph_break"]


def test_grouped_linears_close_their_steps(dynamo: Any) -> None:
    ops = bridge.ops

    def make() -> Any:
        return ops.Sequential(
            ops.RMSNorm(128, **OPTIONS),
            ops.GroupedLinear(4, 128, 256, **OPTIONS),
            ops.ScaledSwiGLU(),
            ops.GroupedLinear(4, 128, 128, **OPTIONS),
        )

    def arguments(step: int) -> tuple[Tensor, ...]:
        generator = torch.Generator("cuda").manual_seed(step)
        sizes = torch.tensor(
            ((40, 24, 88, 40), (16, 64, 48, 64), (64, 64, 32, 32), (1, 2, 3, 186))[step], device="cuda"
        )
        x, scales = (torch.randn(*shape, generator=generator, **OPTIONS) for shape in ((192, 128), (192,)))
        return x * 4**step, sizes, scales, sizes

    assert_alike(trained(make, arguments, True), trained(make, arguments, False))
    assert dynamo["stats"]["unique_graphs"] == 1
    assert not dynamo["graph_break"]
