"""Modules of Transformer Engine itself, converted; tests/convert/test_te_modules.py has stand-ins of them."""

import pytest
import torch

import bridge
import functional_te as fte
from tests.convert.models import run, snr

pytestmark = pytest.mark.te


def _modules():
    te = pytest.importorskip("transformer_engine.pytorch", reason="needs transformer_engine (the `te` extra)")
    kwargs = {"device": "cuda", "params_dtype": torch.bfloat16}
    ops = {"device": "cuda", "dtype": torch.bfloat16}
    return {
        "linear": te.Linear(256, 512, **kwargs),
        "layer-norm-linear": te.LayerNormLinear(256, 512, **kwargs),
        "mlp": te.LayerNormMLP(256, 512, normalization="RMSNorm", activation="swiglu", bias=False, **kwargs),
        "ops": te.ops.Sequential(te.ops.RMSNorm(256, **ops), te.ops.Linear(256, 512, **ops), te.ops.SiLU()),
    }


@pytest.mark.parametrize("name", ["linear", "layer-norm-linear", "mlp", "ops"])
def test_modules_compute_the_same(name):
    model = torch.nn.ModuleDict({"part": _modules()[name]})
    x = torch.randn(64, 256, device="cuda", dtype=torch.bfloat16)
    expected = run(model, lambda m: m["part"](x))
    assert bridge.convert(model, inplace=True) is model
    assert bridge.conversion_report(model).counts["left alone"] == 0
    actual = run(model, lambda m: m["part"](x))
    assert snr(expected.output, actual.output) > 40
    with bridge.autocast(recipe=fte.recipes.Float8CurrentScaling()):
        low = run(model, lambda m: m["part"](x))
    assert 15 < snr(expected.output, low.output) < 45
    bridge.revert(model)
    again = run(model, lambda m: m["part"](x))
    assert torch.equal(again.output, expected.output)
