"""A compiled chain that is called under ``torch.autocast`` gives eager's gradients: its backward leaves autocast."""

from __future__ import annotations

import pytest
import torch

import bridge
import functional_te as fte

from .compiled import assert_same_bits, leaves_of

BLOCK = fte.chain(fte.Linear(64, 64, bias=False), fte.GELU())
RECIPES = {
    "none": None,
    "current": fte.recipes.Float8CurrentScaling(),
    "delayed": fte.recipes.DelayedScaling(amax_history_len=4),
}


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_autocast_around_the_compiled_call(dynamo, dtype, name) -> None:
    recipe = RECIPES[name]
    results = []
    for compiled in (False, True):
        params, state = leaves_of(BLOCK), fte.init_state(BLOCK, recipe)
        x = torch.randn(256, 64, generator=torch.Generator().manual_seed(0)).requires_grad_()

        def run(x, params=params, state=state):
            return bridge.apply(BLOCK, params, x, state=state, recipe=recipe)[0]

        function = torch.compile(run, fullgraph=True, backend="aot_eager") if compiled else run
        with torch.autocast("cpu", dtype=dtype):
            y = function(x)
        assert y.dtype is dtype
        y.float().sum().backward()
        results.append((y.detach(), x.grad, params[0]["weight"].grad, fte.tree_map(torch.clone, state)))
        assert torch.isfinite(x.grad).all()
    assert_same_bits(*results)


def test_meta_tensors_run_through_the_bridge() -> None:
    params = fte.init(BLOCK, device="meta")
    y, _ = bridge.apply(BLOCK, params, torch.empty(4, 64, device="meta", requires_grad=True))
    assert y.is_meta
    assert y.shape == (4, 64)


def test_state_under_func_transforms_is_refused_with_the_way_out() -> None:
    params, state = fte.init(BLOCK), fte.init_state(BLOCK, RECIPES["delayed"])
    with pytest.raises(RuntimeError, match=r"functional_te\.vjp"):
        torch.func.grad(lambda x: bridge.apply(BLOCK, params, x, state=state, recipe=RECIPES["delayed"])[0].sum())(
            torch.randn(2, 64)
        )
