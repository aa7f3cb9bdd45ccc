"""MLPs around the GELU in the erf form: one chain each, in a model and by themselves."""

import copy
import functools

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import bridge
import functional_te as fte
from bridge import ops
from tests.convert.models import CASES, CURRENT, DELAYED, HIDDEN, WIDTH, bert, data, encoder, moved, run, snr, vit


def _chains(model):
    """Names of the operations of the chain around every activation of a converted model."""
    held = [module.__dict__["_functional_te"].data for module in model.modules() if "_functional_te" in module.__dict__]
    chains = [getattr(one, "whole", None) or getattr(getattr(one, "tail", None), "whole", None) for one in held]
    return [[type(op.op).__name__ for op in chain.ops] for chain in chains if chain is not None]


MLP = ["BasicLinear", "Bias", "ErfGELU", "BasicLinear", "Bias"]


@pytest.mark.parametrize(
    ("build", "around"),
    [
        (bert, (["MakeExtraOutput"], ["AddExtraInput", "LayerNorm"])),
        (vit, (["AddExtraInput", "MakeExtraOutput", "LayerNorm"], ["AddExtraInput"])),
        (
            lambda: encoder(True, functional.gelu),
            (["AddExtraInput", "MakeExtraOutput", "LayerNorm"], ["AddExtraInput"]),
        ),
        (lambda: encoder(True, nn.GELU()), (["AddExtraInput", "MakeExtraOutput", "LayerNorm"], ["AddExtraInput"])),
    ],
    ids=["bert", "vit", "function", "module"],
)
def test_linear_gelu_linear_is_one_chain(build, around):
    first, last = around
    assert _chains(bridge.convert(build())) == [[*first, *MLP, *last]] * 2


def _expected(model, x, grad):
    """Output and gradients in float64 of a module of torch's own."""
    plain = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH)).double()
    with torch.no_grad():
        for own, value in zip(plain.parameters(), model.parameters(), strict=True):
            own.copy_(value)
    x = x.detach().double().requires_grad_()
    y = plain(x)
    return [y, *torch.autograd.grad(y, (x, *plain.parameters()), grad.double())]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("recipe", [None, CURRENT, DELAYED], ids=["none", "current", "delayed"])
def test_modules_against_float64(recipe, compiled):
    torch.manual_seed(0)
    sizes = {"device": "cpu"}
    model = ops.Sequential(ops.Linear(WIDTH, HIDDEN, **sizes), ops.ErfGELU(), ops.Linear(HIDDEN, WIDTH, **sizes))
    x, grad = data(8, WIDTH).requires_grad_(), data(8, WIDTH)
    expected = _expected(model, x, grad)
    call = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
    for _ in range(3):  # delayed scaling needs a step to find its scales
        with bridge.autocast(enabled=recipe is not None, recipe=recipe):
            y = call(x)
        actual = [y, *torch.autograd.grad(y, (x, *model.parameters()), grad)]
    for one, other in zip(expected, actual, strict=True):
        if recipe is None:
            torch.testing.assert_close(other, one.float(), rtol=1e-5, atol=1e-5)
        else:
            assert 20 < snr(one, other.double()) < 60 or one.dim() == 1  # the last bias has a gradient that is not cast


@pytest.mark.parametrize("recipe", [None, CURRENT], ids=["none", "current"])
def test_values_as_pure_functions(recipe):
    block = fte.chain(fte.Linear(WIDTH, HIDDEN), fte.ErfGELU(cache_quantized_input=recipe is not None))
    params, x, grad = fte.init(block, seed=0), data(4, WIDTH), data(4, HIDDEN)
    result, pullback = fte.vjp(block, params, x, recipe=recipe)
    grads = pullback(grad)
    wide = [value.double().requires_grad_() for own in params for value in own.values()]
    source = x.double().requires_grad_()
    y = functional.gelu(functional.linear(source, *wide))
    found = torch.autograd.grad(y, (source, *wide), grad.double())
    given = [grads.input, *[value for own in grads.params for value in own.values()]]
    for one, other in zip((y, *found), (result.output, *given), strict=True):
        assert snr(one, other.double()) > (120 if recipe is None else 20)


# ---- the layer of BERT ----


def test_its_mlp_in_pieces_of_the_sequence():
    model = moved(bert())
    converted = bridge.convert(model)
    expected = run(model, CASES["bert"].call)
    for layer in converted.encoder.layer:
        layer.chunk_size_feed_forward = 4
    actual = run(converted, CASES["bert"].call)
    assert snr(expected.output, actual.output) > 100
    assert all(
        snr(expected.grads[own], actual.grads[own]) > 90 for own in expected.grads if not own.endswith("key.bias")
    )


def test_its_active_dropout_draws_the_numbers_it_drew():
    model = moved(bert())
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.2
    outputs = []
    for one in (model, bridge.convert(model), bridge.convert(model, CURRENT)):
        torch.manual_seed(5)
        outputs.append(CASES["bert"].call(one))
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-4, atol=1e-5)
    assert 12 < snr(outputs[0], outputs[2]) < 60


def test_its_parts_are_called_where_somebody_looks_or_one_was_replaced():
    model = bridge.convert(moved(bert()), CURRENT)
    call = CASES["bert"].call
    fused, seen = call(model), []
    layer = model.encoder.layer[0]
    for name in (
        "intermediate",
        "intermediate.dense",
        "intermediate.intermediate_act_fn",
        "output",
        "output.LayerNorm",
    ):
        handle = layer.get_submodule(name).register_forward_hook(lambda *args, name=name: seen.append(name))
        assert snr(fused, call(model)) > 15
        handle.remove()
    assert len(seen) == 5
    assert torch.equal(call(model), fused)
    layer.intermediate.intermediate_act_fn = nn.Sequential(nn.GELU(), nn.Hardtanh(1.0, 2.0))
    assert snr(fused, call(model)) < 15


@pytest.mark.parametrize("reentrant", [False, True], ids=["new", "reentrant"])
def test_it_is_recomputed_by_gradient_checkpointing(reentrant):
    model = bridge.convert(moved(bert()), CURRENT)
    other, calls = copy.deepcopy(model), []
    for layer in other.encoder.layer:
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = functools.partial(checkpoint, use_reentrant=reentrant)
        layer.attention.register_forward_hook(lambda *args: calls.append(1))
    expected, actual = run(model, CASES["bert"].call), run(other, CASES["bert"].call)
    assert len(calls) == 4
    assert torch.equal(actual.output, expected.output)
    assert all(torch.equal(actual.grads[name], expected.grads[name]) for name in expected.grads)
