"""``bridge.quantized_model_init``: modules whose weights are stored in low precision only, in every recipe."""

import copy
import dataclasses
import io
import pickle

import pytest
import torch

import bridge
import functional_te as fte
from bridge import ops
from bridge.packed_weight import _StandIn
from functional_te.kernels import registry as backend
from functional_te.quantization import Float8CurrentScalingQuantizer, NVFP4Quantizer
from functional_te.recipes import CustomRecipe, DelayedScaling, MXFP8BlockScaling, NVFP4BlockScaling, Role
from tests.every_recipe import VARIANTS, WHOLE

from .compiled import assert_same_bits, break_count, graph_count

MX, DELAYED, NVFP4 = MXFP8BlockScaling(), DelayedScaling(amax_history_len=4), NVFP4BlockScaling()
STORED = {**WHOLE, "hybrid": VARIANTS["hybrid"], "mxfp8 2-D": VARIANTS["mxfp8 2-D"]}
SIZE, HIDDEN = 32, 64


def batch(seed, tokens=8):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, tokens, SIZE, generator=generator), torch.randn(2, tokens, SIZE, generator=generator)


def make(seed=0):
    torch.manual_seed(seed)
    return ops.Sequential(
        ops.RMSNorm(SIZE), ops.Linear(SIZE, 2 * HIDDEN), ops.SwiGLU(), ops.Linear(HIDDEN, SIZE, bias=False)
    )


def basics(model):
    return [module for module in model.modules() if isinstance(module, ops.BasicLinear)]


def stored(recipe, seed=0, **options):
    torch.manual_seed(seed)
    with bridge.quantized_model_init(recipe=recipe, **options):
        return make(seed)


every_stored = pytest.mark.parametrize("recipe", STORED.values(), ids=STORED)


def weights_of(model):
    return [module.weight for module in basics(model)]


@every_stored
def test_what_is_stored(recipe):
    """Weights of linear modules, without state, in the copies that products read; the rest as ever."""
    model, plain = stored(recipe), make()
    quantizer = recipe.quantizer(Role("BasicLinear", "weight"))
    for weight, exact in zip(weights_of(model), weights_of(plain), strict=True):
        assert isinstance(weight, bridge.QuantizedWeight)
        assert isinstance(weight, torch.nn.Parameter)
        assert not weight.quantizer.stateful
        assert weight.quantizer.dtype is quantizer.dtype
        assert weight.quantized().serves(False)
        assert weight.quantized().serves(True)
        assert weight.quantized().nbytes < 0.7 * exact.nbytes
        error = (weight.detach().dequantize() - exact).norm() / exact.norm()
        assert 1e-3 < error < 0.2
    others = [p for p in model.parameters() if not any(p is w for w in weights_of(model))]
    assert all(type(p) is torch.nn.Parameter and type(p.data) is torch.Tensor for p in others)
    assert {name for name, _ in model.named_parameters()} == {name for name, _ in plain.named_parameters()}


def test_delayed_scaling_stores_with_the_scale_of_the_weight_itself():
    weight = weights_of(stored(DELAYED))[0]
    assert type(weight.quantizer) is Float8CurrentScalingQuantizer
    exact = weights_of(make())[0]
    assert_same_bits(weight.quantized().rowwise_scale_inv, 1 / (448 / exact.detach().abs().max()).reshape(1))


def test_a_recipe_that_rounds_weights_at_random_stores_them_to_nearest():
    recipe = CustomRecipe(qfactory=_random_weights)
    assert weights_of(stored(recipe))[0].quantizer == NVFP4Quantizer(columnwise=True)


def _random_weights(role):
    return NVFP4Quantizer(stochastic_rounding=role.tensor == "weight")


def test_a_weight_that_a_recipe_does_not_cast_is_ordinary():
    model = stored(VARIANTS["plain weight"])
    assert all(type(w) is torch.nn.Parameter for w in weights_of(model))


@every_stored
def test_forward_and_gradients(recipe):
    """Those of the values that are stored; no cast of a weight."""
    model = stored(recipe)
    block = fte.chain(*[module.op for module in model.modules() if isinstance(module, bridge.ops.BasicOperation)])
    params = tuple(
        {name: p.quantized() if isinstance(p, bridge.QuantizedWeight) else p.detach() for name, p in own.items()}
        for own in (
            {n: getattr(m, n) for n in m.op.param_names}
            for m in model.modules()
            if isinstance(m, bridge.ops.BasicOperation)
        )
    )
    x, dy = batch(0)
    x.requires_grad_()
    with bridge.autocast(recipe=recipe):
        y = model(x)
    y.backward(dy)
    state = tuple(
        {role: state for role, _, state in m.named_states()}
        for m in model.modules()
        if isinstance(m, bridge.ops.BasicOperation)
    )
    fresh = fte.tree_map(lambda t: torch.zeros_like(t) if t.dtype is torch.float32 and t.shape != (1,) else t, state)
    result, pullback = fte.vjp(block, params, x.detach(), recipe=recipe, state=fresh)
    grads = pullback(dy)
    assert_same_bits((y, x.grad), (result.output, grads.input))
    for module, own in zip(
        [m for m in model.modules() if isinstance(m, bridge.ops.BasicOperation)], grads.params, strict=True
    ):
        for name, grad in own.items():
            assert_same_bits(getattr(module, name).grad, grad)
            assert type(getattr(module, name).grad) is torch.Tensor


def test_stored_weights_are_cast_by_the_optimizer_only(monkeypatch):
    shapes, record = [], backend._BY_NAME["reference"]

    def quantize(x, *args, **kwargs):
        shapes.append(tuple(x.shape))
        return record.quantize(x, *args, **kwargs)

    with bridge.quantized_model_init(recipe=MX):
        model = ops.Linear(3 * SIZE, 5 * SIZE, bias=False)  # no other weight has this shape
    monkeypatch.setitem(backend._BY_NAME, "reference", dataclasses.replace(record, quantize=quantize))
    for cache in (False, True, True):
        with bridge.autocast(recipe=MX, cache_weights=cache):
            y = model(torch.randn(2, 3, 3 * SIZE))
        y.sum().backward()
    assert (2, 3, 3 * SIZE) in shapes
    assert (5 * SIZE, 3 * SIZE) not in shapes
    assert not basics(model)[0].weight_casts


def loss_of(model, recipe, run=None):
    x, dy = batch(77)
    with bridge.autocast(recipe=recipe):
        y = (model if run is None else run)(x)
    return (y - dy).square().mean()


def fit(model, recipe, steps, run=None):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, recipe, run)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@every_stored
def test_training_goes_down(recipe):
    model = stored(recipe)
    before = addresses(model)
    losses = fit(model, recipe, 30)
    assert losses[-1] < 0.8 * losses[0]
    assert addresses(model) == before  # written in place
    assert all(isinstance(w, bridge.QuantizedWeight) for w in weights_of(model))


def addresses(model):
    return [t.data_ptr() for w in weights_of(model) for t in fte.pytree.leaves(w.quantized())]


@pytest.mark.parametrize("name", ["current", "mxfp8", pytest.param("nvfp4", marks=pytest.mark.slow)])
def test_compiled_training_of_stored_weights(dynamo, name):
    """One graph for all steps, with what the optimizer has written; the bits of eager mode."""
    recipe = STORED[name]
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        with bridge.quantized_model_init(recipe=recipe):
            models.append(ops.Linear(SIZE, SIZE, bias=False))
    compiled = torch.compile(models[0], fullgraph=True, backend="aot_eager")
    assert fit(models[0], recipe, 4, compiled) == fit(models[1], recipe, 4)
    for one, other in zip(weights_of(models[0]), weights_of(models[1]), strict=True):
        assert_same_bits(one.quantized(), other.quantized())
    assert graph_count(dynamo) == 1
    assert break_count(dynamo) == 0


@every_stored
def test_without_a_context_values_are_read(recipe):
    """In high precision; with another recipe too, whose products then read the values that are stored."""
    model, plain = stored(recipe), make()
    for module, weight in zip(basics(plain), weights_of(model), strict=True):
        with torch.no_grad():
            module.weight.copy_(weight.detach().dequantize())
    x, dy = batch(0)
    found, expected = [], []
    for one, seen in ((model, found), (plain, expected)):
        y = one(x)
        y.backward(dy)
        seen.append((y.detach(), [p.grad for p in one.parameters()]))
    assert_same_bits(found, expected)


@every_stored
def test_state_dict_of_stored_weights(recipe):
    model, other = stored(recipe), stored(recipe, seed=1)
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    content = torch.load(buffer, weights_only=True)
    other.load_state_dict(content)
    for one, loaded in zip(weights_of(model), weights_of(other), strict=True):
        assert_same_bits(one.quantized(), loaded.quantized())
    plain = make(seed=2)
    plain.load_state_dict(content)
    for one, loaded in zip(weights_of(model), weights_of(plain), strict=True):
        assert type(loaded.data) is torch.Tensor
        assert_same_bits(one.detach().dequantize(), loaded.detach())
    other.load_state_dict(make(seed=3).state_dict())
    for one, loaded in zip(weights_of(stored(recipe, seed=3)), weights_of(other), strict=True):
        assert_same_bits(one.quantized(), loaded.quantized())


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"]
)
@pytest.mark.parametrize("recipe", [MX, NVFP4, DELAYED], ids=["mxfp8", "nvfp4", "delayed"])
def test_copies_of_modules_with_stored_weights(recipe, duplicate):
    model = stored(recipe)
    fit(model, recipe, 2)
    other = duplicate(model)
    assert not set(addresses(other)) & set(addresses(model))
    assert fit(other, recipe, 2) == fit(model, recipe, 2)


@pytest.mark.parametrize("recipe", [MX, NVFP4, DELAYED], ids=["mxfp8", "nvfp4", "delayed"])
def test_meta_device(recipe):
    """Made without storage, materialized and reset later: stored as it was meant to be."""
    with bridge.quantized_model_init(recipe=recipe):
        model = ops.Linear(SIZE, 64, bias=False, device="meta")
    (weight,) = weights_of(model)
    assert isinstance(weight, bridge.QuantizedWeight)
    assert weight.device.type == weight.quantized().device.type == "meta"
    model.to_empty(device="cpu")
    for module in basics(model):
        module.reset_parameters()
    (weight,) = weights_of(model)
    assert isinstance(weight, bridge.QuantizedWeight)
    assert weight.device.type == "cpu"
    values = weight.detach().dequantize()
    assert 0 < values.abs().max() <= SIZE**-0.5 * 1.1
    x = torch.randn(4, SIZE)
    with bridge.autocast(recipe=recipe):
        model(x).sum().backward()
    assert torch.isfinite(weight.grad).all()


@pytest.mark.parametrize("recipe", [MX, NVFP4, DELAYED], ids=["mxfp8", "nvfp4", "delayed"])
def test_reset_parameters_of_a_model_without_storage(recipe):
    with bridge.quantized_model_init(recipe=recipe):
        model = ops.Linear(SIZE, 64, bias=False, device="meta")
    for module in basics(model):
        module.reset_parameters()
    (weight,) = weights_of(model)
    assert isinstance(weight, bridge.QuantizedWeight)
    assert weight.device.type != "meta"
    assert weight.detach().dequantize().abs().max() > 0


def test_reset_parameters_casts_again():
    model = stored(MX)
    before, places = [w.detach().dequantize() for w in weights_of(model)], addresses(model)
    for module in basics(model):
        module.reset_parameters()
    assert addresses(model) == places
    assert not any(torch.equal(old, w.detach().dequantize()) for old, w in zip(before, weights_of(model), strict=True))


def test_contexts_of_initialization_nest_and_restore():
    with bridge.quantized_model_init(recipe=MX):
        with bridge.quantized_model_init(enabled=False):
            inner = ops.Linear(SIZE, SIZE)
        with pytest.raises(ZeroDivisionError), bridge.quantized_model_init(recipe=NVFP4):
            raise ZeroDivisionError
        outer = ops.Linear(SIZE, SIZE)
    after = ops.Linear(SIZE, SIZE)
    assert [isinstance(weights_of(m)[0], bridge.QuantizedWeight) for m in (inner, outer, after)] == [False, True, False]
    assert type(weights_of(outer)[0].quantizer).__name__ == "MXFP8Quantizer"
    context = bridge.quantized_model_init(recipe=MX)
    for _ in range(2):
        with context, context:
            assert isinstance(weights_of(ops.Linear(SIZE, SIZE))[0], bridge.QuantizedWeight)
    assert not isinstance(weights_of(ops.Linear(SIZE, SIZE))[0], bridge.QuantizedWeight)


def test_initial_values_may_be_kept():
    model, plain = stored(MX, preserve_high_precision_init_val=True), make()
    for weight, exact in zip(weights_of(model), weights_of(plain), strict=True):
        assert_same_bits(weight.get_high_precision_init_val(), exact.detach())
    for weight in weights_of(stored(MX)):
        assert weight.get_high_precision_init_val() is None


@pytest.mark.parametrize("wrong", ["mxfp8", MXFP8BlockScaling, 1])
def test_bad_arguments_of_initialization(wrong):
    with pytest.raises(TypeError, match="recipe"):
        bridge.quantized_model_init(recipe=wrong)
    with pytest.raises(TypeError, match="quantized_model_init: enabled: expected a bool"):
        bridge.quantized_model_init(wrong)


def test_indivisible_weights_are_refused_where_they_are_made():
    with bridge.quantized_model_init(recipe=MX), pytest.raises(ValueError, match=r"multiple of 32"):
        ops.Linear(24, 32)


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("guard", [torch.no_grad, torch.enable_grad])
def test_several_weights_as_one_in_compiled_code(count, guard, dynamo):
    weights = [torch.randn(16, 8, requires_grad=True) for _ in range(count)]
    call = torch.compile(lambda *own: _StandIn.apply(len(own), *own), backend="eager", fullgraph=True)
    with guard():
        whole = call(*weights)
    assert whole.shape == (16 * count, 8)
    if whole.requires_grad:
        grad = torch.randn(whole.shape)
        for own, wanted in zip(torch.autograd.grad(whole, weights, grad), grad.split(16), strict=True):
            assert torch.equal(own, wanted)
