"""Whole chains in every recipe: the bits of ``fte.vjp``, of ``bridge.apply`` and of one compiled graph are the same."""

import dataclasses

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import bridge
import functional_te as fte
from bridge import program
from functional_te.quantization import quantize_bound
from functional_te.quantization.tensor import BoundQuantizer
from functional_te.recipes import CustomRecipe, Float8BlockScaling, MXFP8BlockScaling, NVFP4BlockScaling, Role
from tests import every_recipe as recipes
from tests.every_recipe import VARIANTS, WHOLE, feed_forward, with_biases, with_state
from tests.oracles import snr

from .compiled import (
    assert_same_bits,
    backward,
    break_count,
    copy_of,
    grads_of,
    graph_count,
    leaf,
    leaves_of,
    same_bits,
    tensors,
)

NVFP4 = NVFP4BlockScaling()
SEED = 7  # of the gradients that `backward` draws
every_variant = pytest.mark.parametrize("recipe", VARIANTS.values(), ids=VARIANTS)
every_whole = pytest.mark.parametrize("recipe", WHOLE.values(), ids=WHOLE)
BLOCKS = {"feed forward": feed_forward, "biases": with_biases}


def run(block, params, x, state, recipe):
    return bridge.apply(block, params, x, state=state, recipe=recipe)


def checkpointed(block, params, x, state, recipe):
    return checkpoint(run, block, params, x, state, recipe, use_reentrant=False)


def step(function, block, params, x, state, recipe):
    """Output, gradients, and the state with everything observed, of one step on copies."""
    params, x, state = copy_of(params), copy_of(x), copy_of(state)
    y, after = function(block, params, x, state, recipe)
    backward(y)
    # the forward's observations are in `after`, those of the backward were written into `state`
    merged = tuple(
        {role: (state if role == "grad_output" else after)[i][role] for role in own} for i, own in enumerate(state)
    )
    return y.detach(), x.grad, grads_of(params), merged


def by_vjp(block, params, x, state, recipe):
    """The same by values."""
    result, pullback = fte.vjp(block, params, x.detach(), state=state, recipe=recipe)
    dy = torch.randn(result.output.shape, generator=torch.Generator().manual_seed(SEED)).to(result.output.dtype)
    grads = pullback(dy)
    return result.output, grads.input, grads.params, grads.state


def settled(block, recipe, dtype=torch.float32, tokens=40):
    params, x = leaves_of(block, dtype=dtype), leaf(tokens, 32, dtype=dtype)
    dy = torch.randn(tokens, 32, generator=torch.Generator().manual_seed(1)).to(dtype)
    return params, x, with_state(block, recipe, copy_of(params), x.detach(), dy)


@every_variant
@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bridge_and_functional(recipe, block, dtype):
    block = block()
    params, x, state = settled(block, recipe, dtype)
    found = step(run, block, params, x, state, recipe)
    assert_same_bits(found, by_vjp(block, params, x, state, recipe))
    assert_same_bits(found, step(checkpointed, block, params, x, state, recipe))
    assert found[0].dtype is dtype
    # the recipe did something, in the forward and in the backward
    exact = step(run, block, params, x, ({},) * len(block), None)
    assert all(torch.isfinite(t).all() for t in tensors(found) if t.is_floating_point())
    assert 5 < snr(found[0], exact[0]) < 60
    first = next(index for index, op in enumerate(block.ops) if isinstance(op, fte.BasicLinear))
    assert 3 < snr(found[2][first]["weight"], exact[2][first]["weight"]) < 60


COMPILED = {
    **{(name, "feed forward"): recipe for name, recipe in WHOLE.items()},
    ("block", "biases"): WHOLE["block"],
    ("nvfp4", "biases"): WHOLE["nvfp4"],
    ("hybrid", "biases"): VARIANTS["hybrid"],
    ("plain weight", "biases"): VARIANTS["plain weight"],
    ("nvfp4 rows", "biases"): VARIANTS["nvfp4 rows"],
    ("rotated gradient", "biases"): VARIANTS["rotated gradient"],
    ("high_precision", "feed forward"): MXFP8BlockScaling(backward_override="high_precision"),
    ("dequantized", "feed forward"): NVFP4BlockScaling(backward_override="dequantized"),
}
FAST = {(name, "feed forward") for name in ("delayed", "block")}
COMPILED_CASES = [
    pytest.param(*case, recipe, id=", ".join(case), marks=() if case in FAST else pytest.mark.slow)
    for case, recipe in COMPILED.items()
]


@pytest.mark.parametrize(("name", "block", "recipe"), COMPILED_CASES)
def test_compiled(dynamo, name, block, recipe):
    """One graph with the bits of eager mode; another number of tokens costs one more graph, and then none."""
    block = BLOCKS[block]()
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    params, _, state = settled(block, recipe)
    # where only one of two formats pads tokens, numbers of tokens that need no padding are compiled apart
    divides = 3 if name in ("hybrid", "rotated gradient") else 2
    for graphs, tokens in ((1, 160), (2, 136), (2, 201), (divides, 256)):
        x = leaf(tokens, 32, seed=tokens)
        expected = step(run, block, params, x, state, recipe)
        assert_same_bits(step(compiled, block, params, x, state, recipe), expected)
        assert graph_count(dynamo) == graphs
    assert break_count(dynamo) == 0
    if name == "mxfp8":  # fewer tokens than one block: sizes of 1 are compiled apart
        for tokens in (17, 9):
            x = leaf(tokens, 32, seed=tokens)
            assert_same_bits(
                step(compiled, block, params, x, state, recipe), step(run, block, params, x, state, recipe)
            )
        assert graph_count(dynamo) == 3


INDUCTOR = {
    **WHOLE,
    "mxfp8 2-D": VARIANTS["mxfp8 2-D"],
    "block grad 2-D": VARIANTS["block grad 2-D"],
    "nvfp4 4over6 all": VARIANTS["nvfp4 4over6 all"],
}
INDUCTOR_CASES = [
    pytest.param(recipe, id=name, marks=() if name == "mxfp8" else pytest.mark.slow)
    for name, recipe in INDUCTOR.items()
]


@pytest.mark.parametrize("recipe", INDUCTOR_CASES)
def test_a_linear_through_inductor(dynamo, recipe):
    """Operands are cast from the same values, so all that may differ is how products are summed. Blocks are partial."""
    block = fte.BasicLinear(160, 96)
    params, x = leaves_of(block), leaf(40, 160)
    state = with_state(block, recipe, copy_of(params), x.detach(), leaf(40, 96, requires_grad=False))
    compiled = torch.compile(run, fullgraph=True, backend="inductor")
    found, expected = (step(function, block, params, x, state, recipe) for function in (compiled, run))
    for one, other in zip(tensors(found), tensors(expected), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4 * other.abs().max().item())
    assert graph_count(dynamo) == 1


@every_whole
@pytest.mark.slow
def test_a_block_through_inductor(dynamo, recipe):
    """Sums of the norm are in another order, so a few elements are cast to a neighbour."""
    block = feed_forward()
    params, x, state = settled(block, recipe)
    compiled = torch.compile(run, fullgraph=True, backend="inductor")
    found, expected = (step(function, block, params, x, state, recipe) for function in (compiled, run))
    for one, other in zip(tensors(found[:3]), tensors(expected[:3]), strict=True):
        assert snr(one, other) > 30
    assert graph_count(dynamo) == 1


@pytest.mark.parametrize("name", [pytest.param("nvfp4", marks=pytest.mark.slow), "delayed"])
def test_compiled_and_checkpointed(dynamo, name):
    """Recomputed casts give the same bits, and observe nothing twice."""
    block, recipe = fte.chain(fte.BasicLinear(32, 32), fte.SiLU()), WHOLE[name]
    params, x, state = settled(block, recipe)
    compiled = torch.compile(checkpointed, fullgraph=True, backend="aot_eager")
    found = step(compiled, block, params, x, state, recipe)
    assert_same_bits(found, step(run, block, params, x, state, recipe))
    assert break_count(dynamo) == 0


def quantized_by(factory_role):
    quantizer = recipes.rotated_gradient(Role("BasicLinear", factory_role))
    return quantizer.with_usage(True, True)


def test_a_compiled_cast_is_random_in_the_same_way(dynamo):
    """The key goes in as a tensor: another key is no new graph."""
    quantizer = quantized_by("grad_output")

    def cast(x, key):
        return quantize_bound(x, BoundQuantizer(quantizer=quantizer, key=key))

    compiled = torch.compile(cast, fullgraph=True, backend="aot_eager")
    x, seen = leaf(24, 32, requires_grad=False), []
    for seed in range(3):
        key = recipes.make_key(seed)
        found = compiled(x, key)
        assert_same_bits(found, cast(x, key))
        seen.append(found)
    assert not same_bits(seen[0], seen[1])
    assert graph_count(dynamo) == 1


# ---- one process, many recipes -------------------------------------------------------------------------------------


def test_one_function_and_many_recipes(dynamo):
    """A recipe is part of what a graph is compiled for: by value, so an equal one costs nothing."""
    block = fte.BasicLinear(32, 32)
    params, x = leaves_of(block), leaf(16, 32)
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    given = [
        MXFP8BlockScaling(),
        Float8BlockScaling(),
        CustomRecipe(qfactory=recipes.mixed),
        MXFP8BlockScaling(),
        CustomRecipe(qfactory=recipes.mixed),
    ]
    for graphs, recipe in zip((1, 2, 3, 3, 3), given, strict=True):
        assert_same_bits(step(compiled, block, params, x, ({},), recipe), step(run, block, params, x, ({},), recipe))
        assert graph_count(dynamo) == graphs


# ---- stochastic rounding -------------------------------------------------------------------------------------------

LINEAR = fte.BasicLinear(32, 32)


def gradients(state, x=None, dy=None, recipe=NVFP4, params=None):
    """Gradients of a linear layer, and the state after the backward."""
    params = fte.init(LINEAR, seed=2) if params is None else params
    x = leaf(24, 32, requires_grad=False) if x is None else x
    dy = leaf(*x.shape, seed=9, requires_grad=False) if dy is None else dy
    _, pullback = fte.vjp(LINEAR, params, x, recipe=recipe, state=state)
    grads = pullback(dy)
    return (grads.input, grads.params), grads.state


def test_random_bits_belong_to_the_state():
    state = fte.init_state(LINEAR, NVFP4, seed=3)
    first, after = gradients(state)
    assert_same_bits(gradients(state)[0], first)
    assert_same_bits(gradients(fte.init_state(LINEAR, NVFP4, seed=3))[0], first)
    assert not same_bits(gradients(fte.init_state(LINEAR, NVFP4, seed=4))[0], first)
    # the same key until the step is closed: a recomputed or repeated backward rounds as before
    assert_same_bits(gradients(after)[0], first)
    closed = fte.update_state(LINEAR, NVFP4, after)
    second, _ = gradients(closed)
    assert not same_bits(second, first)
    assert not any(same_bits(one, other) for one, other in zip(second, first, strict=True))
    # in the forward nothing is random
    x, params = leaf(24, 32, requires_grad=False), fte.init(LINEAR, seed=2)
    forward = [fte.apply(LINEAR, params, x, recipe=NVFP4, state=s).output for s in (state, closed)]
    assert_same_bits(forward[0], forward[1])


def test_every_quantizer_has_a_key_of_its_own():
    block = feed_forward()
    state = fte.init_state(block, NVFP4, seed=1)
    keys = [entry.key for own in state for entry in own.values()]
    assert [list(own) for own in state] == [[], [], ["grad_output"], [], ["grad_output"], []]
    assert all(key.dtype is torch.int64 and key.shape == (2,) for key in keys)
    assert not torch.equal(keys[0], keys[1])
    other = [entry.key for own in fte.init_state(block, NVFP4, seed=2) for entry in own.values()]
    assert not torch.equal(keys[0], other[0])


def test_a_key_advances_only_when_something_was_rounded():
    state = fte.init_state(LINEAR, NVFP4)
    key = state[0]["grad_output"].key
    assert_same_bits(fte.update_state(LINEAR, NVFP4, state), state)
    after_forward = fte.apply(
        LINEAR, fte.init(LINEAR), leaf(4, 32, requires_grad=False), recipe=NVFP4, state=state
    ).state
    assert_same_bits(fte.update_state(LINEAR, NVFP4, after_forward), state)
    zero = torch.zeros(24, 32)
    grads, after_zeros = gradients(state, dy=zero)
    assert not any(t.any() for t in tensors(grads))
    assert_same_bits(fte.update_state(LINEAR, NVFP4, after_zeros), state)
    keys = [key]
    for _ in range(4):
        _, state = gradients(state)
        state = fte.update_state(LINEAR, NVFP4, state)
        keys.append(state[0]["grad_output"].key)
        assert_same_bits(state[0]["grad_output"].amax_history, torch.zeros(1))
    assert len({tuple(key.tolist()) for key in keys}) == 5


def test_microbatches_of_one_step_do_not_share_their_rounding_errors():
    """The largest magnitude of the data is mixed into the key, so other data are rounded by other bits."""
    state = fte.init_state(LINEAR, NVFP4)
    dy = leaf(24, 32, seed=9, requires_grad=False)
    dy[-1, 0] = 8.0
    # only the last row differs; all scales of the others are half of what they were, and so are cast to the same values
    other = dy.clone()
    other[-1, 0] = 16.0
    nearest = NVFP4BlockScaling(disable_stochastic_rounding=True)
    one, two = (gradients(None, dy=value, recipe=nearest)[0][0][:-1] for value in (dy, other))
    torch.testing.assert_close(one, two)
    one, two = (gradients(state, dy=value)[0][0][:-1] for value in (dy, other))
    assert (one - two).norm() > 0.05 * one.norm()


PLAIN = NVFP4BlockScaling(disable_rht=True, disable_2d_quantization=True)


def default_operands(role):
    return recipes.IdentityQuantizer() if role.is_gradient else NVFP4.quantizer(role)


def plain_operands(role):
    return recipes.IdentityQuantizer() if role.is_gradient else PLAIN.quantizer(role)


def drawn(recipe, qfactory, params, x, dy, count):
    """Gradients of ``count`` steps, and those of a gradient that is not cast."""
    state, draws = fte.init_state(LINEAR, recipe, seed=11), []
    for _ in range(count):
        (dx, dw), after = gradients(state, x, dy, recipe, params)
        draws.append((dx, dw[0]["weight"]))
        state = fte.update_state(LINEAR, recipe, after)
    (dx, dw), _ = gradients(None, x, dy, CustomRecipe(qfactory=qfactory), params)
    return [torch.stack(own).double() for own in zip(*draws, strict=True)], (dx, dw[0]["weight"])


def test_rounding_is_unbiased():
    """The mean over keys goes to the gradient of the values before rounding, as fast as chance allows."""
    x, params = leaf(32, 32, requires_grad=False), fte.init(LINEAR, seed=2)
    dy = 12 * torch.rand(32, 32, generator=torch.Generator().manual_seed(9)) - 6
    # every block along rows and columns has the largest number of the format: scales are 1, and nothing saturates
    index = torch.arange(32)
    dy[index[:, None] % 16 == index[None] % 16] = 6.0
    count = 256
    (near_dx, near_dw), _ = gradients(None, x, dy, dataclasses.replace(PLAIN, disable_stochastic_rounding=True), params)
    means, exacts = drawn(PLAIN, plain_operands, params, x, dy, count)
    for several, exact, nearest in zip(means, exacts, (near_dx, near_dw[0]["weight"]), strict=True):
        spread = (several - several.mean(0)).square().mean(0).sum().sqrt()
        assert spread > 0.05 * exact.norm()
        assert (several.mean(0) - exact).norm() < 1.25 * spread / count**0.5
        assert (several.mean(0) - exact).norm() < 0.2 * (nearest - exact).norm()


def test_rounding_of_any_gradient_averages_out():
    """With the transform, and scales that are rounded so that some elements saturate."""
    x, params, dy = (
        leaf(32, 32, requires_grad=False),
        fte.init(LINEAR, seed=2),
        leaf(32, 32, requires_grad=False, seed=9),
    )
    for several, exact in zip(*drawn(NVFP4, default_operands, params, x, dy, 64), strict=True):
        one = (several - exact).square().sum((1, 2)).mean().sqrt()
        assert one > 0.05 * exact.norm()
        assert (several.mean(0) - exact).norm() < 0.25 * one


def test_a_recomputed_forward_rounds_as_the_first_one():
    """Stochastic rounding of inputs too, under checkpointing: eager and with the step closed in between."""
    recipe = CustomRecipe(qfactory=_random_inputs)
    state = fte.init_state(LINEAR, recipe)
    params, x = leaves_of(LINEAR), leaf(24, 32)
    assert set(state[0]) == {"input", "grad_output"}
    found = step(checkpointed, LINEAR, params, x, state, recipe)
    assert_same_bits(found, step(run, LINEAR, params, x, state, recipe))
    assert_same_bits(found, by_vjp(LINEAR, params, x, state, recipe))


def _random_inputs(role):
    return recipes.ROTATED if role.tensor == "weight" else fte.NVFP4Quantizer(stochastic_rounding=True)


class Twice(torch.nn.Module):
    """A parametrization, whose derivative Inductor computes where it likes."""

    def forward(self, weight):
        return weight * 2


@pytest.mark.parametrize("recorded", [True, False], ids=["recorded", "traced"])
def test_gradients_are_divided_by_the_scales_of_their_step(recorded, monkeypatch, dynamo):
    """Inductor orders what reads a scale, and waits to be fused, behind an op that changes the scale."""
    monkeypatch.setattr(program, "_found", {})
    if not recorded:
        monkeypatch.setattr(program, "_make", lambda key, name: "")
    recipe = fte.recipes.DelayedScaling(amax_history_len=4)

    def gradients(compiled):
        torch.manual_seed(0)
        ops = bridge.ops
        model = ops.Sequential(ops.Linear(32, 48, bias=False), ops.GELU(), ops.Linear(48, 32, bias=False)).to("cpu")
        for linear in (model[0], model[2]):
            torch.nn.utils.parametrize.register_parametrization(linear.basic_ops[0], "weight", Twice())

        def call(x):
            with bridge.autocast(recipe=recipe):
                return model(x)

        run = torch.compile(call, fullgraph=True) if compiled else call
        found = []
        for step in range(3):
            x = (torch.randn(16, 32) * 4**step).requires_grad_()
            run(x).square().mean().backward()
            found += [x.grad, *[parameter.grad.clone() for parameter in model.parameters()]]
        return found

    for got, want in zip(gradients(True), gradients(False), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)
