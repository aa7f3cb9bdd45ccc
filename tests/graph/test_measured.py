"""The estimate for an H200 beside times that were measured on one (``python -m tests.benchmarks.gpu.steps``)."""

import json
from pathlib import Path

import pytest
import torch

import functional_te as fte
from tests.benchmarks.gpu.steps import estimates

MEASURED = json.loads(Path(__file__).with_name("h200_steps.json").read_text())["steps"]


@pytest.mark.parametrize("recipe", MEASURED)
def test_a_block_is_within_15_percent_and_its_steps_within_30(recipe) -> None:
    measured, estimated = MEASURED[recipe], dict(estimates(recipe))
    assert estimated.keys() == measured.keys()
    assert sum(estimated.values()) == pytest.approx(sum(measured.values()), rel=0.15)
    assert estimated == pytest.approx(measured, rel=0.3)


@pytest.mark.parametrize("recipe", [None, fte.recipes.DelayedScaling()], ids=["none", "delayed"])
def test_a_chain_whose_input_needs_no_gradient_has_an_estimate(recipe) -> None:
    chain = fte.chain(fte.MakeExtraOutput(), fte.RMSNorm(128), fte.Linear(128, 128), fte.AddExtraInput())
    params, x = fte.init(chain), torch.zeros(128, 128)
    pattern = (False, tuple((True,) * len(op.param_names) for op in chain.ops), (False,))
    graph = fte.graph(chain, params, x, x, recipe=recipe, device="H200", requires_grad=pattern)
    assert graph.time("backward") > 0
