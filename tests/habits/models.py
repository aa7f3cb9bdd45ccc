"""What the tests of habits share: a model, its twin in ``torch.nn``, ways to run it, and steps of training."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

import bridge
import functional_te as fte
from bridge import ops
from tests.helpers import uniform

FEATURES, HIDDEN, ROWS = 32, 64, 16
RECIPES = {
    "none": None,
    "current": fte.recipes.Float8CurrentScaling(),
    "delayed": fte.recipes.DelayedScaling(amax_history_len=4),
}
every_recipe = pytest.mark.parametrize("recipe", RECIPES)
every_mode = pytest.mark.parametrize("mode", ["eager", "compiled"])
every_recipe_and_mode = pytest.mark.parametrize(
    ("recipe", "mode"),
    [
        *[(recipe, "eager") for recipe in RECIPES],
        ("none", "compiled"),
        pytest.param("delayed", "compiled", marks=pytest.mark.slow),  # with state, where there is most to go wrong
    ],
)


def mlp(seed: int = 0) -> ops.Sequential:
    """LayerNorm, Linear, GELU, Linear; every parameter is random."""
    torch.manual_seed(seed)
    model = ops.Sequential(
        ops.LayerNorm(FEATURES, device="cpu"),
        ops.Linear(FEATURES, HIDDEN, device="cpu"),
        ops.GELU(),
        ops.Linear(HIDDEN, FEATURES, device="cpu"),
    )
    with torch.no_grad():
        for index, own in enumerate(model.parameters()):
            own.add_(0.1 * uniform(own.shape, seed=index))
    return model


def twin(model: torch.nn.Module) -> torch.nn.Sequential:
    """The same in ``torch.nn``, with copies of the parameters."""
    made = torch.nn.Sequential(
        torch.nn.LayerNorm(FEATURES),
        torch.nn.Linear(FEATURES, HIDDEN),
        torch.nn.GELU(approximate="tanh"),
        torch.nn.Linear(HIDDEN, FEATURES),
    )
    with torch.no_grad():
        for own, other in zip(made.parameters(), model.parameters(), strict=True):
            own.copy_(other)
    return made


def batch(seed: int, rows: int = ROWS) -> torch.Tensor:
    return uniform((rows, FEATURES), seed=1000 + seed)


def as_mode(mode: str, function: Callable[..., Any], backend: str = "aot_eager") -> Callable[..., Any]:
    """``function``, or compiled into one graph."""
    return torch.compile(function, fullgraph=True, backend=backend) if mode == "compiled" else function


def precision(recipe: str) -> Any:
    """The context of a recipe by name."""
    chosen = RECIPES[recipe]
    return contextlib.nullcontext() if chosen is None else bridge.autocast(recipe=chosen)


def gradients(model: torch.nn.Module) -> list[torch.Tensor | None]:
    return [None if own.grad is None else own.grad.clone() for own in model.parameters()]


def train(model: torch.nn.Module, run: Any, recipe: str = "none", steps: int = 3, **options: Any) -> list[torch.Tensor]:
    """Losses of a few steps of SGD, and the parameters after them.

    Args:
        options: ``between``: called after every step; ``optimizer``: from parameters to an optimizer.
    """
    optimizer = options.get("optimizer", lambda params: torch.optim.SGD(params, lr=0.1))(model.parameters())
    seen = []
    for step in range(steps):
        optimizer.zero_grad()
        with precision(recipe):
            loss = run(batch(step)).square().mean()
        loss.backward()
        optimizer.step()
        seen.append(loss.detach())
        options.get("between", lambda: None)()
    return [*seen, *[own.detach().clone() for own in model.parameters()]]
