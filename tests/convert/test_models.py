"""Every kind of model: converted it computes what it did, in FP8 nearly so, compiled as one graph."""

import pytest
import torch

import bridge
from tests.convert.models import CASES, CURRENT, DELAYED, copy_of, moved, run, snr

# Float32: the order of sums differs where a chain adds a bias or a residual inside of another operation.
RTOL, ATOL = 1e-4, 2e-5
# gradients that are 0 but for rounding: softmax does not change when all keys move
ZERO = ("key.bias", "k_proj.bias")

# what the same rules convert as others here
ALIKE = ("mistral", "qwen3", "vit-tanh", "bert-relu", "decoder-norm-last", "encoder-norm-first", "encoder-gelu-module")
NAMES = [pytest.param(name, marks=[pytest.mark.slow] * (name in ALIKE)) for name in CASES]


def _model(name):
    torch.manual_seed(0)
    return moved(CASES[name].build()), CASES[name].call


def _names(grads):
    return [name for name in grads if not name.endswith(ZERO)]


@pytest.mark.parametrize("name", NAMES)
def test_high_precision_computes_the_same(name):
    model, call = _model(name)
    expected = run(model, call)
    converted = bridge.convert(model)
    assert bridge.conversion_report(converted).counts["fused"] > 0
    actual = run(converted, call)
    torch.testing.assert_close(actual.output, expected.output, rtol=RTOL, atol=ATOL)
    assert actual.grads.keys() == expected.grads.keys()
    for own in expected.grads:
        torch.testing.assert_close(actual.grads[own], expected.grads[own], rtol=RTOL, atol=ATOL, msg=own)


@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_is_as_near_to_float32(name):
    """Where the order of roundings differs (a norm of Llama rounds before its gain, ours after), neither is nearer."""
    model, call = _model(name)
    exact = run(model, call).output
    low = copy_of(model).to(torch.bfloat16)
    original = run(low, call).output
    converted = run(bridge.convert(low), call).output
    assert converted.dtype is original.dtype
    assert snr(exact, converted.float()) > snr(exact, original.float()) - 2.0


@pytest.mark.parametrize("recipe", [DELAYED, CURRENT], ids=["delayed", "current"])
@pytest.mark.parametrize("name", NAMES)
def test_fp8_is_near(name, recipe):
    model, call = _model(name)
    expected = run(model, call)
    converted = bridge.convert(model, recipe)
    for _ in range(3):  # delayed scaling needs a step to find its scales
        actual = run(converted, call)
    assert 15 < snr(expected.output, actual.output) < 60  # an E4M3 product has about 30; no cast at all, more than 90
    found = sorted(snr(expected.grads[own], actual.grads[own]) for own in _names(expected.grads))
    assert found[0] > 8
    assert found[len(found) // 2] > 14


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in ("mlp", "llama") else [pytest.mark.slow]) for name in CASES]
)
def test_one_graph_and_no_second(name, dynamo):
    model, call = _model(name)
    converted = bridge.convert(model, DELAYED)
    eager = copy_of(converted)
    compiled = torch.compile(lambda: call(converted), fullgraph=True, backend="aot_eager")
    for _ in range(3):
        expected, actual = run(eager, call), run(converted, lambda _: compiled())
        assert dynamo["stats"]["unique_graphs"] == 1
    assert not dynamo["graph_break"]
    # both see the same scales up to the first step, and close it at the same place of the next
    assert snr(expected.output, actual.output) > 20


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_compiled_high_precision(name, dynamo):
    model, call = _model(name)
    expected = run(model, call)
    converted = bridge.convert(model)
    compiled = torch.compile(lambda: call(converted), fullgraph=True, backend="aot_eager")
    for _ in range(2):
        actual = run(converted, lambda _: compiled())
    assert dynamo["stats"]["unique_graphs"] == 1
    torch.testing.assert_close(actual.output, expected.output, rtol=RTOL, atol=ATOL)
    for own in expected.grads:
        torch.testing.assert_close(actual.grads[own], expected.grads[own], rtol=RTOL, atol=ATOL, msg=own)
