"""When the step of delayed scaling is closed, and of which modules: captures, modules used twice, equal blocks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import bridge
from bridge import ops
from functional_te.recipes import DelayedScaling

RECIPE = DelayedScaling(amax_history_len=4)
X = torch.linspace(-2, 2, 16 * 32).reshape(16, 32)


def block() -> ops.Sequential:
    torch.manual_seed(0)
    return ops.Sequential(ops.RMSNorm(32, device="cpu"), ops.Linear(32, 32, device="cpu"))


def step(model: Any, x: Tensor = X) -> None:
    with bridge.autocast(recipe=RECIPE):
        y = model(x.clone().requires_grad_())
    y.square().mean().backward()


def states(model: torch.nn.Module) -> list[Tensor]:
    return [buffer.clone() for _, buffer in sorted(model.named_buffers())]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.fixture
def capture(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run a function as if a CUDA graph were being captured."""

    def run(function: Any) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda, "is_initialized", lambda: True)
            patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
            function()

    return run


@pytest.mark.parametrize("between", ["nothing", "evaluation", "another model"])
def test_a_captured_step_closes_what_an_ordinary_one_closes(capture: Any, between: str) -> None:
    # one after the other: a context closes the steps of all models that are alive
    found = []
    for run in (capture, lambda function: function()):
        model, other = block(), block()
        step(model)
        step(model, 3 * X)
        if between == "evaluation":
            with torch.no_grad(), bridge.autocast(recipe=RECIPE):
                model(X)
        elif between == "another model":
            step(other)
        run(lambda model=model: step(model, 5 * X))
        after = states(model)
        step(model)
        found.append([*after, *states(model)])
    assert same(*found)


def test_a_captured_step_leaves_other_models_alone(capture: Any) -> None:
    model, other = block(), block()
    for own in (model, other):
        step(own)
    before = states(other)
    capture(lambda: step(model))
    assert same(states(other), before)
    step(other)
    assert not same(states(other), before)


def test_a_captured_module_that_runs_twice_is_closed_once(capture: Any) -> None:
    found = []
    for run in (capture, lambda function: function()):
        model = block()

        def twice(x: Tensor, model: Any = model) -> Tensor:
            return model(model(x))

        step(twice)
        run(lambda twice=twice: step(twice))
        found.append(states(model))
    assert same(*found)


def test_a_module_that_stands_in_a_chain_twice_observes_the_larger_amax() -> None:
    linear = ops.Linear(32, 32, bias=False, device="cpu")
    with torch.no_grad():
        linear.weight.mul_(20.0)
    step(ops.Sequential(linear, linear))
    with torch.no_grad():
        largest = torch.maximum(X.abs().max(), torch.nn.functional.linear(X, linear.weight).abs().max())
    observed = next(own for name, own in linear.named_buffers() if name.endswith("input_amax_history"))[0]
    torch.testing.assert_close(observed, largest, rtol=0.2, atol=0)
    assert observed > X.abs().max()


def test_equal_blocks_share_compiled_code(dynamo: Any) -> None:
    """Each compiled by itself, the context around them: no graph is guarded by which of them it runs."""
    blocks = [block() for _ in range(4)]
    for own in blocks:
        step(own)
        own.compile(backend="aot_eager", fullgraph=True)
    for _ in range(2):
        with bridge.autocast(recipe=RECIPE):
            y = X.clone().requires_grad_()
            for own in blocks:
                y = own(y)
        y.sum().backward()
    assert dynamo["stats"]["unique_graphs"] <= 2
