"""Whole chains on the Triton backend against the reference backend: pure API and bridge, eager and compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import bridge
import functional_te as fte

R = fte.recipes
RECIPES: dict[str, Any] = {
    "none": None,
    "current": R.Float8CurrentScaling(),
    "delayed": R.DelayedScaling(amax_history_len=4),
    "block": R.Float8BlockScaling(),
}
# a product in another order changes roundings to bfloat16, and a few casts behind them
TOLERANCE = 0.07


def residual(*ops: fte.Op) -> fte.Chain:
    return fte.chain(
        fte.MakeExtraOutput(channel="residual", output_to_caller=False),
        *ops,
        fte.AddExtraInput(channel="residual"),
    )


CHAINS: dict[str, fte.Chain] = {
    "swiglu": residual(fte.RMSNorm(64), fte.Linear(64, 192, bias=False), fte.SwiGLU(), fte.Linear(96, 64, bias=False)),
    "bias": residual(fte.LayerNorm(48), fte.Linear(48, 80), fte.GELU(), fte.Linear(80, 48)),
    "quantize": residual(fte.RMSNorm(32, zero_centered_gamma=True), fte.Quantize(), fte.Linear(32, 32), fte.Quantize()),
}


def inputs(chain: fte.Chain, recipe: Any, device: str) -> tuple[Any, Any, Tensor]:
    params = fte.init(chain, seed=1, dtype=torch.bfloat16, device=device)
    width = chain.ops[1].normalized_shape[0]  # type: ignore[attr-defined]
    return params, fte.init_state(chain, recipe, device=device), torch.randn(2, 24, width).to(device, torch.bfloat16)


def relative(got: Tensor, want: Tensor) -> float:
    """Largest difference over the largest value."""
    return ((got.float() - want.float()).abs().max() / want.float().abs().max().clamp(min=1e-12)).item()


@pytest.mark.parametrize(
    ("chain", "recipe"),
    [*(("swiglu", recipe) for recipe in RECIPES), ("bias", "delayed"), ("bias", "current"), ("quantize", "delayed")],
)
def test_the_pure_functions_agree_with_the_reference(chain: str, recipe: str, device: str) -> None:
    block, own = CHAINS[chain], RECIPES[recipe]
    params, state, x = inputs(block, own, device)
    found = {}
    for backend in ("reference", "triton"):
        outputs, current = [], state
        for _ in range(2):
            out, pullback = fte.vjp(block, params, x, state=current, recipe=own, backend=backend)
            grads = pullback(out.output - x)
            current = fte.update_state(block, own, grads.state)
            outputs += [out.output, *fte.pytree.leaves((grads.params, grads.input, current))]
        found[backend] = outputs
    for got, want in zip(found["triton"], found["reference"], strict=True):
        assert got.dtype is want.dtype
        assert got.shape == want.shape
        assert relative(got, want) < TOLERANCE


def test_compiled_calls_are_eager_ones(device: str, dynamo: Any) -> None:
    """On the CPU the kernels run in the interpreter, so that ops are opaque; on a GPU a compiler sees through them."""
    block, own = CHAINS["bias"], RECIPES["delayed"]
    params, state, x = inputs(block, own, device)
    leaves = [leaf.requires_grad_() for leaf in fte.pytree.leaves(params)]

    def run(x: Tensor) -> Tensor:
        return bridge.apply(block, params, x, state=state, recipe=own, backend="triton")[0]

    found = []
    for call in (run, torch.compile(run, fullgraph=True, backend="aot_eager")):
        x = x.detach().requires_grad_()
        y = call(x)
        found.append([y, *torch.autograd.grad(y.float().square().mean(), [x, *leaves])])
    for got, want in zip(found[1], found[0], strict=True):
        assert relative(got, want) < TOLERANCE
    assert dynamo["stats"]["unique_graphs"] == 1


def test_the_plan_says_which_backend_runs(device: str) -> None:
    assert fte.plan(CHAINS["bias"], backend="triton", device=device).backend == "triton"
    assert fte.plan(CHAINS["bias"], device="cpu").backend == "reference"
    usable = {name: note for name, _, note in fte.backends(device).rows}
    assert usable["triton"] == "usable"
    assert usable["reference"] == "usable"
