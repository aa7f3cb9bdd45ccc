"""Weights that are cast once and used several times: as values, and kept by modules between microbatches."""

import copy
import dataclasses
import gc
import pickle
import weakref

import pytest
import torch
from torch._subclasses.fake_tensor import is_fake

import bridge
import functional_te as fte
from bridge import ops
from functional_te.kernels import registry as backend
from functional_te.quantization import CachedWeight, QuantizedTensor
from functional_te.recipes import (
    DelayedScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Role,
)
from tests import every_recipe as recipes
from tests.every_recipe import VARIANTS, WHOLE, feed_forward

from .compiled import assert_same_bits, backward, break_count, copy_of, grads_of, graph_count, leaf, leaves_of

MX, DELAYED, NVFP4 = MXFP8BlockScaling(), DelayedScaling(amax_history_len=4), NVFP4BlockScaling()
CURRENT = Float8CurrentScaling()
STATELESS = {name: VARIANTS[name] for name in ("current", "block", "mxfp8", "mixed", "nvfp4 to nearest", "hybrid")}
STORED = {**WHOLE, "hybrid": VARIANTS["hybrid"], "mxfp8 2-D": VARIANTS["mxfp8 2-D"]}
SIZE, HIDDEN = 32, 64


@pytest.fixture
def casts(monkeypatch):
    """What is cast, in order: shapes and addresses."""
    seen = []
    record = backend._BY_NAME["reference"]

    def quantize(x, *args, **kwargs):
        seen.append((tuple(x.shape), None if torch.compiler.is_compiling() or is_fake(x) else x.data_ptr()))
        return record.quantize(x, *args, **kwargs)

    monkeypatch.setitem(backend._BY_NAME, "reference", dataclasses.replace(record, quantize=quantize))
    return seen


def weights(seen, *models):
    """How many weights of the models were cast; of no model: how many matrices."""
    addresses = {p.data_ptr() for model in models for p in model.parameters()}
    return sum(address in addresses if models else len(shape) == 2 for shape, address in seen)


def batch(seed, tokens=8):
    """Three dimensions, so that nothing but weights has two."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, tokens, SIZE, generator=generator), torch.randn(2, tokens, SIZE, generator=generator)


def make(seed=0):
    torch.manual_seed(seed)
    return ops.Sequential(
        ops.RMSNorm(SIZE), ops.Linear(SIZE, 2 * HIDDEN), ops.SwiGLU(), ops.Linear(HIDDEN, SIZE, bias=False)
    )


def basics(model):
    return [module for module in model.modules() if isinstance(module, ops.BasicLinear)]


def step(model, recipe, seed, microbatches=3, *, cache=True, one_context=False, run=None):
    """Accumulate gradients over microbatches: outputs and gradients."""
    model.zero_grad()
    outputs = []
    run = model if run is None else run
    if one_context:
        with bridge.autocast(recipe=recipe, cache_weights=cache):
            for index in range(microbatches):
                x, dy = batch(10 * seed + index)
                y = run(x)
                y.backward(dy)
                outputs.append(y.detach())
    else:
        for index in range(microbatches):
            x, dy = batch(10 * seed + index)
            with bridge.autocast(recipe=recipe, cache_weights=cache):
                y = run(x)
            y.backward(dy)
            outputs.append(y.detach())
    return outputs, [p.grad.clone() for p in model.parameters()]


def train(model, recipe, steps=3, make_optimizer=None, **options):
    optimizer = (make_optimizer or _adamw)(model)
    seen = []
    for seed in range(steps):
        seen.append(step(model, recipe, seed, **options))
        optimizer.step()
    return seen, [p.detach().clone() for p in model.parameters()]


def _adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01)


# ---- as values -----------------------------------------------------------------------------------------------------


def arguments(recipe, seed=0):
    block = feed_forward(SIZE, HIDDEN)
    params = fte.init(block, seed=seed)
    x, dy = batch(seed)
    return block, params, x, dy, recipes.with_state(block, recipe, params, x, dy)


@pytest.mark.parametrize("recipe", [pytest.param(r, id=n) for n, r in VARIANTS.items()])
@pytest.mark.parametrize("keep_values", [True, False], ids=["cached", "alone"])
def test_quantized_params_give_the_same_results(recipe, keep_values):
    """The same bits as casting in every call, gradients and observations included."""
    block, params, x, dy, state = arguments(recipe)
    expected, expected_pullback = fte.vjp(block, params, x, recipe=recipe, state=state)
    cast = fte.quantize_params(block, params, recipe, state=state, keep_values=keep_values)
    kinds = {index: type(own["weight"]) for index, own in enumerate(cast.params) if "weight" in own}
    is_cast = recipe.quantizer(Role("BasicLinear", "weight")) is not recipes.IdentityQuantizer()
    kind = (CachedWeight if keep_values else QuantizedTensor) if is_cast else torch.Tensor
    assert kinds == {1: torch.Tensor, 2: kind, 4: kind}
    result, pullback = fte.vjp(block, cast.params, x, recipe=recipe, state=cast.state)
    assert_same_bits(result, expected)
    assert_same_bits(pullback(dy), expected_pullback(dy))


every_override = pytest.mark.parametrize("override", ["high_precision", "dequantized"])


@every_override
@pytest.mark.parametrize("name", ["current", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("requires_grad", [True, False])
def test_quantized_params_and_an_override(name, override, requires_grad):
    """The high-precision backward of a cached weight reads the weight, as without a cache."""
    recipe = dataclasses.replace(WHOLE[name], backward_override=override)
    block, params, x, dy, _ = arguments(recipe)
    cast = fte.quantize_params(block, params, recipe, requires_grad=requires_grad)
    result, pullback = fte.vjp(block, cast.params, x, recipe=recipe)
    expected, expected_pullback = fte.vjp(block, params, x, recipe=recipe)
    assert_same_bits(result, expected)
    assert_same_bits(pullback(dy), expected_pullback(dy))


def test_what_quantize_params_casts(casts):
    """Each weight once, in the copies that will be read; nothing else, and nothing twice."""
    block, params, x, _, _ = arguments(MX)
    casts.clear()
    cast = fte.quantize_params(block, params, MX)
    assert sorted(shape for shape, _ in casts) == [(SIZE, HIDDEN), (2 * HIDDEN, SIZE)]
    both = cast.params[2]["weight"].quantized
    assert both.rowwise_data is not None
    assert both.columnwise_data is not None
    forward = fte.quantize_params(block, params, MX, requires_grad=False).params[2]["weight"].quantized
    assert forward.columnwise_data is None
    assert cast.params[2]["weight"].value is params[2]["weight"]
    assert cast.params[1] == params[1]
    casts.clear()
    again = fte.quantize_params(block, cast.params, MX)
    assert casts == []
    assert again.params[2]["weight"] is cast.params[2]["weight"]
    for _ in range(2):
        result, pullback = fte.vjp(block, cast.params, x, recipe=MX)
        pullback(result.output)
    assert weights(casts) == 0
    assert fte.quantize_params(block, params, None) == (params, None)


def test_observations_of_quantize_params():
    """What delayed scaling observes is in the state that comes back, and the given one is untouched."""
    block, params, _, _, _ = arguments(DELAYED)
    state = fte.init_state(block, DELAYED)
    before = copy_of(state)
    cast = fte.quantize_params(block, params, DELAYED, state=state)
    assert_same_bits(state, before)
    for index in (2, 4):
        assert cast.state[index]["weight"].amax_history[0] == params[index]["weight"].abs().max()
        assert cast.state[index]["input"].amax_history[0] == 0
    after = fte.update_state(block, DELAYED, cast.state)
    assert after[2]["weight"].scale == 448 / params[2]["weight"].abs().max()
    with pytest.raises(ValueError, match="chain: state: expected the state of DelayedScaling"):
        fte.quantize_params(block, params, DELAYED)


@pytest.mark.parametrize("name", ["delayed", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("mode", ["eager", "compiled"])
def test_gradients_of_cached_weights(dynamo, name, mode):
    """Through the bridge they go to the parameter, and are those of the cast in every call."""
    recipe = WHOLE[name]
    block = fte.chain(fte.RMSNorm(SIZE), fte.BasicLinear(SIZE, SIZE))
    x, params = leaf(12, SIZE), leaves_of(block)
    state = recipes.with_state(block, recipe, copy_of(params), x.detach(), leaf(12, SIZE, requires_grad=False))

    def run(params, x, state):
        return bridge.apply(block, params, x, state=state, recipe=recipe)[0]

    expected_params, expected_x = copy_of(params), copy_of(x)
    expected = run(expected_params, expected_x, copy_of(state))
    backward(expected)
    function = torch.compile(run, fullgraph=True, backend="aot_eager") if mode == "compiled" else run
    cast = fte.quantize_params(block, params, recipe, state=state)
    sums = expected_grads = grads_of(expected_params)
    for _ in range(2):
        own_x = copy_of(x)
        y = function(cast.params, own_x, cast.state)
        backward(y)
        assert_same_bits((y, own_x.grad), (expected, expected_x.grad))
        assert_same_bits(grads_of(params), sums)
        sums = fte.tree_map(torch.add, sums, expected_grads)
    if mode == "compiled":
        assert graph_count(dynamo) == 1
        assert break_count(dynamo) == 0


def test_a_quantized_weight_gets_no_gradient():
    block, recipe = fte.BasicLinear(SIZE, SIZE), MX
    params, x = fte.init(block), leaf(4, SIZE)
    alone = fte.quantize_params(block, params, recipe, keep_values=False).params
    y, _ = bridge.apply(block, alone, x, recipe=recipe)
    y.sum().backward()
    expected = fte.vjp(block, params, x.detach(), recipe=recipe)[1](torch.ones(4, SIZE))
    assert_same_bits(x.grad, expected.input)


# ---- kept by modules -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", STATELESS.values(), ids=STATELESS)
@pytest.mark.parametrize("one_context", [False, True], ids=["contexts", "one context"])
def test_training_is_the_same(recipe, one_context):
    """Bit for bit, for every recipe whose weights have no state."""
    expected = train(make(), recipe, cache=False, one_context=one_context)
    assert_same_bits(train(make(), recipe, one_context=one_context), expected)


@every_override
def test_training_with_an_override_is_the_same(override):
    recipe = dataclasses.replace(MX, backward_override=override)
    assert_same_bits(train(make(), recipe), train(make(), recipe, cache=False))


def test_training_with_stochastic_rounding_is_the_same():
    expected = train(make(), NVFP4, cache=False)
    assert_same_bits(train(make(), NVFP4), expected)


@pytest.mark.parametrize("length", [2, 7])
def test_delayed_scaling_after_another_history_length(length):
    """As without a cache: the history is cut at its end or padded there."""
    gc.collect()
    found = []
    for cache in (False, True):
        model = make()
        step(model, DelayedScaling(amax_history_len=length), 0, cache=False)
        results = train(model, DELAYED, cache=cache, one_context=True)
        found.append((results, closed_state(model, DELAYED)))
    assert_same_bits(found[1], found[0])


def closed_state(model, recipe):
    """Copies of the state once what was observed is closed."""
    with bridge.autocast(recipe=recipe):
        return {name: b.clone() for name, b in model.named_buffers()}


def test_training_with_delayed_scaling():
    """A weight is cast with the scale of the step and observed once; scales follow those without a cache."""
    gc.collect()
    found = []
    for cache in (False, True):
        model = make()
        results = train(model, DELAYED, cache=cache, one_context=True)
        found.append((results, closed_state(model, DELAYED)))
    assert_same_bits(found[1], found[0])


def test_delayed_scaling_of_a_model_that_does_not_run():
    """Its state waits for it, whatever another model trains with."""
    gc.collect()
    idle, model = ops.Linear(SIZE, SIZE, bias=False), make()
    step(idle, DELAYED, 0, microbatches=1, cache=False)
    before = closed_state(idle, DELAYED)
    train(model, DELAYED)
    assert_same_bits(closed_state(idle, DELAYED), before)


@pytest.mark.parametrize("first", [NVFP4, VARIANTS["delayed input"]], ids=["nvfp4", "custom"])
def test_delayed_scaling_after_another_recipe_with_state(first):
    """The state of the recipe that is entered is made before weights are cast."""
    found = []
    for cache in (False, True):
        model = make()
        step(model, first, 0, cache=False)
        results = train(model, DELAYED, cache=cache, one_context=True)
        found.append((results, closed_state(model, DELAYED)))
    assert_same_bits(found[1], found[0])


@pytest.mark.parametrize("one_context", [False, True], ids=["contexts", "one context"])
def test_each_weight_is_cast_once_per_step(casts, one_context):
    model = make()
    optimizer = _adamw(model)
    for seed in range(3):
        casts.clear()
        step(model, MX, seed, microbatches=4, one_context=one_context)
        assert weights(casts, model) == 2
        optimizer.step()
        casts.clear()
        step(model, MX, seed, microbatches=4, cache=False, one_context=one_context)
        assert weights(casts, model) == 8


def _load(model):
    model.load_state_dict(make(seed=3).state_dict())


def _copy(model):
    with torch.no_grad():
        basics(model)[0].weight.copy_(torch.randn(2 * HIDDEN, SIZE))


def _replace(model):
    basics(model)[1].weight = torch.nn.Parameter(torch.randn(SIZE, HIDDEN))


def _data(model):
    basics(model)[0].weight.data = torch.randn(2 * HIDDEN, SIZE)


def _optimize(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.step()


def _foreach(model):
    torch.optim.AdamW(model.parameters(), lr=0.1, foreach=True).step()


def _reset(model):
    for module in basics(model):
        module.reset_parameters()


def _to_half(model):
    model.to(torch.bfloat16).to(torch.float32)


WRITES = {
    "optimizer": (_optimize, 2),
    "foreach": (_foreach, 2),
    "load_state_dict": (_load, 2),
    "copy_": (_copy, 1),
    "another parameter": (_replace, 1),
    "reset": (_reset, 2),
    "to and back": (_to_half, 2),
}


@pytest.mark.parametrize("write", WRITES)
def test_what_was_written_is_cast_again(casts, write):
    """And only that."""
    model, (function, count) = make(), WRITES[write]
    step(model, MX, 0)
    function(model)
    casts.clear()
    found = step(model, MX, 1)
    assert weights(casts, model) == count
    assert_same_bits(found, step(copy.deepcopy(model), MX, 1, cache=False))


def test_data_that_were_replaced_are_cast_again():
    """``weight.data = ...`` changes no version, so it is told by where the data are."""
    model = make()
    step(model, MX, 0)
    _data(model)
    plain = copy.deepcopy(model)
    assert_same_bits(step(model, MX, 1), step(plain, MX, 1, cache=False))


def test_a_write_inside_of_a_context_is_seen_in_eager_mode(casts):
    model = make()
    x, dy = batch(0)
    with bridge.autocast(recipe=MX, cache_weights=True):
        model(x).backward(dy)
        _copy(model)
        plain = copy.deepcopy(model)
        model.zero_grad()
        y = model(x)
        y.backward(dy)
    plain.zero_grad()
    with bridge.autocast(recipe=MX):
        expected = plain(x)
    expected.backward(dy)
    assert_same_bits((y, [p.grad for p in model.parameters()]), (expected, [p.grad for p in plain.parameters()]))


def test_another_recipe_casts_again(casts):
    model = make()
    for recipe, count in ((MX, 2), (MX, 0), (CURRENT, 2), (MX, 2), (MXFP8BlockScaling(margin=1), 0)):
        casts.clear()
        step(model, recipe, 0)
        assert weights(casts, model) == count


def bytes_kept(model):
    return sum(cast.quantized.nbytes for module in basics(model) for cast in module.weight_casts.values())


def test_the_memory_of_the_casts():
    """Both copies with their scales; given back by a context that keeps none."""
    model = make()
    assert bytes_kept(model) == 0
    step(model, MX, 0)
    elements = 2 * HIDDEN * SIZE + SIZE * HIDDEN
    assert bytes_kept(model) == 2 * (elements + elements // 32)
    (reference,) = [weakref.ref(c.quantized.rowwise_data) for c in basics(model)[0].weight_casts.values()]
    with bridge.autocast(recipe=MX):
        assert bytes_kept(model) == 0
    gc.collect()
    assert reference() is None
    step(model, CURRENT, 0)
    assert bytes_kept(model) == elements + 2 * 4  # one copy serves all products
    with bridge.autocast(enabled=False):
        assert bytes_kept(model) == 0


@pytest.mark.parametrize("inner", [{"enabled": False}, {"recipe": CURRENT}], ids=["off", "current"])
def test_an_inner_context_with_another_recipe_does_not_read_them(casts, inner):
    """Casts belong to the recipe of the outermost context."""
    model, (x, _) = make(), batch(0)
    with bridge.autocast(recipe=MX, cache_weights=True), bridge.autocast(**inner):
        found = model(x).detach()
    with bridge.autocast(**inner):
        expected = model(x).detach()
    assert_same_bits(found, expected)


def test_the_outermost_context_decides(casts):
    model, (x, _) = make(), batch(0)
    step(model, MX, 0, microbatches=1)
    with bridge.autocast(recipe=MX, cache_weights=True):
        casts.clear()
        with bridge.autocast(recipe=MX):
            model(x)
        assert weights(casts, model) == 0
    with bridge.autocast(recipe=MX):
        with bridge.autocast(recipe=MX, cache_weights=True):
            casts.clear()
            model(x)
        assert weights(casts, model) == 2


@pytest.mark.parametrize("wrong", [1, None, "yes"])
def test_cache_weights_is_a_bool(wrong):
    with pytest.raises(TypeError, match="autocast: cache_weights: expected a bool"):
        bridge.autocast(recipe=MX, cache_weights=wrong)


def test_evaluation_reads_them_too(casts):
    model, (x, _) = make(), batch(0)
    with torch.inference_mode():
        for tokens in range(3):
            casts.clear()
            with bridge.autocast(recipe=MX, cache_weights=True):
                y = model(x)
            assert weights(casts, model) == (2 if tokens == 0 else 0)
        with bridge.autocast(recipe=MX):
            assert_same_bits(y, model(x))
    # and training goes on with the same casts
    casts.clear()
    step(model, MX, 0)
    assert weights(casts, model) == 2  # those that were made in between are gone


def test_weights_that_share_a_parameter(casts):
    """Each module has its own cast; the gradient is the sum."""
    one, other = ops.Linear(SIZE, SIZE, bias=False), ops.Linear(SIZE, SIZE, bias=False)
    other.basic_ops[0].weight = one.basic_ops[0].weight
    model = ops.Sequential(one, ops.GELU(), other)
    expected = step(copy.deepcopy(model), MX, 0, cache=False)
    casts.clear()
    assert_same_bits(step(model, MX, 0), expected)


@pytest.mark.parametrize("recipe", [MX, NVFP4, DELAYED], ids=["mxfp8", "nvfp4", "delayed"])
def test_compiled_training_is_the_same(dynamo, recipe):
    """One graph for all steps, with the bits of eager mode."""
    gc.collect()
    model, eager = (ops.Linear(SIZE, SIZE, bias=False) for _ in range(2))
    eager.load_state_dict(model.state_dict())
    for twin, own in zip(basics(eager), basics(model), strict=True):
        twin._seed = own._seed
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    found = train(model, recipe, run=compiled, one_context=True)
    assert_same_bits(found, train(eager, recipe, one_context=True))
    assert graph_count(dynamo) == 1
    assert break_count(dynamo) == 0


def test_compiled_graphs_cast_no_weights(dynamo, casts):
    """What is cast while a graph is made is what the graph casts."""
    model = make()
    casts.clear()
    step(model, MX, 0, microbatches=1, cache=False, run=torch.compile(model, fullgraph=True, backend="aot_eager"))
    without = weights(casts)
    assert without >= 2
    torch._dynamo.reset()
    step(model, MX, 0, microbatches=1)
    with bridge.autocast(recipe=MX, cache_weights=True):
        casts.clear()  # the weights were cast on entry
        x, dy = batch(0)
        y = torch.compile(model, fullgraph=True, backend="aot_eager")(x)
        y.backward(dy)
    assert weights(casts) == 0
    assert any(len(shape) == 3 for shape, _ in casts)


def test_a_compiled_context_keeps_nothing(dynamo):
    """Entered inside of compiled code it has no effect, and changes no result."""
    model = ops.Linear(SIZE, SIZE, bias=False)

    def run(x):
        with bridge.autocast(recipe=MX, cache_weights=True):
            return model(x)

    x, _ = batch(0)
    y = torch.compile(run, fullgraph=True, backend="aot_eager")(x)
    with bridge.autocast(recipe=MX):
        assert_same_bits(y, model(x))
    assert bytes_kept(model) == 0


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"]
)
def test_copies_of_modules_have_no_casts(casts, duplicate):
    """They make their own: the casts of one model never serve another one."""
    model = make()
    step(model, MX, 0)
    other = duplicate(model)
    assert bytes_kept(other) == 0
    assert bytes_kept(model) > 0
    _copy(other)
    casts.clear()
    found = step(other, MX, 1)
    assert weights(casts, other) == 2
    plain = duplicate(other)
    assert_same_bits(found, step(plain, MX, 1, cache=False))


def test_checkpoints_hold_no_casts():
    model = make()
    before = set(model.state_dict())
    step(model, MX, 0)
    assert set(model.state_dict()) == before


def test_modules_that_do_not_run_are_cast_by_their_own_needs_only(casts):
    """Another model of the process, in no context of ours: its weights cost nothing."""
    idle, model = ops.Linear(SIZE, SIZE, bias=False), make()
    casts.clear()
    step(model, MX, 0)
    assert weights(casts, model) == 2
    assert weights(casts, idle) == 0
    assert bytes_kept(idle) == 0


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_a_fused_optimizer_is_seen(kind):
    """It writes to parameters without counting."""
    model = make()
    optimizer = kind(model.parameters(), lr=0.1, fused=True)
    for seed in range(2):
        step(model, MX, seed)
        optimizer.step()
    assert_same_bits(step(copy.deepcopy(model), MX, 3, cache=False), step(model, MX, 3))


def test_parameters_made_in_inference_mode():
    with torch.inference_mode():
        model, (x, _) = make(), batch(0)
        with bridge.autocast(recipe=MX, cache_weights=True):
            found = model(x), model(x)
        with bridge.autocast(recipe=MX):
            expected = model(x)
    assert_same_bits(found, (expected, expected))
