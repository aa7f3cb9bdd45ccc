"""Closing the steps of all modules by one launch, which is given addresses: bit for bit as the formulas do."""

from __future__ import annotations

import gc
import importlib.util
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import bridge
from bridge import closing, ops, replay, state
from functional_te.recipes import DelayedScaling

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*"),
]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WIDTH, STEPS = 32, 6
RECIPES = {
    "max": DelayedScaling(amax_history_len=3, margin=1),
    "most_recent": DelayedScaling(amax_history_len=1, amax_compute_algo="most_recent"),
}


def model(count: int) -> Any:
    """So many linears, with three quantizers each."""
    torch.manual_seed(0)
    return ops.Sequential(*[ops.Linear(WIDTH, WIDTH, bias=False, device=DEVICE) for _ in range(count)])


def states(*models: Any) -> list[torch.Tensor]:
    """Scales and histories, and the scales that a recomputed forward would read."""
    found = []
    for own in models:
        found += [buffer.clone() for _, buffer in sorted(own.named_buffers())]
        for module in own.modules():
            kept = getattr(module, "scales_before_close", {})
            found += [kept[role].clone() for role in sorted(kept)]
    return found


def step(number: int, recipe: Any, *models: Any) -> None:
    x = torch.linspace(-2, 2, 16 * WIDTH, device=DEVICE).reshape(16, WIDTH) * (number % 3 + 1)
    with bridge.autocast(recipe=recipe):
        for own in models:
            own(x.clone().requires_grad_()).square().sum().backward()


Launches = list[list[torch.Tensor]]


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Calls that are repeated rely on the kernel. Nothing of a test is left for the next."""
    monkeypatch.setattr(replay, "_CALLS", 10**9)
    yield
    closing._Last.steps = None
    gc.collect()


def run(kernel: bool, recipe: Any, change: Any) -> tuple[list[Any], Launches, Launches]:
    """States after every step, and the scales for which a launch was prepared and made."""
    from functional_te.kernels.triton.record import TRITON

    made: Launches = []
    launched: Launches = []

    class Counted(TRITON.fused.closing):  # type: ignore[misc, name-defined]
        def __init__(self, scales: Any, *args: Any, **options: Any) -> None:
            super().__init__(scales, *args, **options)
            self.scales = scales
            made.append(scales)

        def __call__(self) -> Any:
            launched.append(self.scales)
            return super().__call__()

    with pytest.MonkeyPatch.context() as patch:
        fused = type("Fused", (), {"closing": Counted, "close_step": TRITON.fused.close_step})
        patch.setattr(state, "_fused", lambda device: fused)
        patch.setattr(state, "_kernel", lambda device: TRITON.fused.close_step if kernel else None)
        gc.collect()
        models, found = [model(4)], []
        for number in range(STEPS):
            if number == STEPS // 2:
                change(models)
            if number == 0 or not kernel:
                closing._Last.steps = None  # the formulas know nothing of the steps before
            step(number, recipe, *models)
            found.append(states(*models))
    return found, made, launched


def nothing(models: Any) -> None:
    pass


def another_model(models: Any) -> None:
    models.append(model(2))


def fewer_models(models: Any) -> None:
    models[0] = ops.Sequential(*list(models[0])[:2])
    gc.collect()


def other_tensors(models: Any) -> None:
    """As conversions do."""
    models[0]._apply(torch.clone)


def other_storage(models: Any) -> None:
    """Where the old tensors were is somebody else's memory now."""
    for own in models[0].buffers():
        own.data = own.detach().clone()


CHANGES = [nothing, another_model, fewer_models, other_tensors, other_storage]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("recipe", RECIPES)
def test_one_launch_closes_as_the_formulas_do(recipe: str, change: Any) -> None:
    got, made, launched = run(True, RECIPES[recipe], change)
    want, none, _ = run(False, RECIPES[recipe], change)
    assert not none
    for number, (mine, other) in enumerate(zip(got, want, strict=True)):
        assert len(mine) == len(other) > 0
        for one, two in zip(mine, other, strict=True):
            assert torch.equal(one, two), f"step {number}"
    own = [scales for scales in launched if len(scales) >= 6]
    assert len(own) == STEPS  # the context of the first step finds states that observed nothing
    assert len([scales for scales in made if len(scales) >= 6]) <= (1 if change is nothing else 2)


def test_nothing_big_is_kept_alive() -> None:
    own = model(1)
    step(0, RECIPES["max"], own)
    step(1, RECIPES["max"], own)
    weight = weakref.ref(own[0].weight)
    del own
    gc.collect()
    assert weight() is None


def test_two_algorithms_side_by_side() -> None:
    def mixed(kernel: bool) -> list[torch.Tensor]:
        with pytest.MonkeyPatch.context() as patch:
            from functional_te.kernels.triton.record import TRITON

            patch.setattr(state, "_fused", lambda device: TRITON.fused)
            patch.setattr(state, "_kernel", lambda device: TRITON.fused.close_step if kernel else None)
            one, two = model(1), model(2)
            for number in range(4):
                step(number, RECIPES["max"], one)
                step(number, RECIPES["most_recent"], two)
            return states(one, two)

    for mine, other in zip(mixed(True), mixed(False), strict=True):
        assert torch.equal(mine, other)
