"""GroupedLinear in low precision is a BasicLinear on the rows of each group, in every recipe."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings

import bridge
import functional_te as fte
from functional_te import pytree
from functional_te.kernels.reference import grouped
from functional_te.pipeline import backward_pass, forward_pass
from tests.bridge.compiled import graph_count
from tests.every_recipe import OVERRIDES, VARIANTS, WHOLE, with_state
from tests.helpers import assert_same, clone, uniform
from tests.ops.grouped import grouped_params, of_group, one_by_one, sizes_of_groups, slices
from tests.ops.test_fakes import Checked

OP = fte.GroupedLinear(3, 128, 64)
SINGLE = fte.GroupedLinear(3, 128, 64, single_weight=True, single_bias=True)
SIZES = (21, 0, 130)
RECIPES = {
    **VARIANTS,
    **{
        f"{name} {override}": dataclasses.replace(WHOLE[name], backward_override=override)
        for name in ("current", "block", "mxfp8", "nvfp4")
        for override in OVERRIDES
    },
}
every_recipe = pytest.mark.parametrize("name", RECIPES)


def is_stochastic(recipe) -> bool:
    plan = fte.plan(OP, recipe=recipe)
    return any(quantizer.stochastic for roles in plan.state_roles for _, quantizer in roles)


def arguments(sizes, dtype=torch.float32, op=OP):
    rows = sum(sizes)
    x, dy = 3 * uniform((rows, op.in_features), dtype, 1), uniform((rows, op.out_features), dtype, 2)
    return grouped_params(op, dtype), x, torch.tensor(sizes), dy


def state_after_a_step(op, recipe, params, x, splits, dy):
    """No scale is 1 and no key the first one."""
    state = fte.init_state(op, recipe)
    _, pullback = fte.vjp(op, (params,), x, splits, recipe=recipe, state=state)
    return fte.update_state(op, recipe, pullback(dy).state)


def near(actual, expected, what: str) -> None:
    """Equal but for the order of float32 sums, or one rounding to bfloat16 that it tips over."""
    assert actual.dtype is expected.dtype, what
    step = 2e-6 if expected.dtype is torch.float32 else 1e-2
    scale = expected.abs().max().item() if expected.numel() else 0.0
    torch.testing.assert_close(actual, expected, rtol=0, atol=step * scale, msg=lambda text: f"{what}: {text}")


def compare(recipe, sizes, dtype=torch.float32, op=OP) -> None:
    params, x, splits, dy = arguments(sizes, dtype, op)
    state = state_after_a_step(op, recipe, params, x, splits, dy)
    result, pullback = fte.vjp(op, (params,), x, splits, recipe=recipe, state=state)
    grads = pullback(dy)
    y, dx, dw, db, states = one_by_one(op, params, x, dy, sizes, recipe, state)
    near(result.output, y, "output")
    if not is_stochastic(recipe) or recipe.override is not None:
        near(grads.input, dx, "dx")
        for g in range(op.num_groups):
            near(of_group(op, grads.params[0], "weight", g), dw[g], f"dW{g}")
    for g in range(op.num_groups):
        near(of_group(op, grads.params[0], "bias", g), db[g], f"db{g}")
        for role, want in (states[g][0] if states[g] else {}).items():
            assert_same(grads.state[0][f"{role}{g}"], want)


@every_recipe
def test_every_group_is_a_linear_layer(name) -> None:
    compare(RECIPES[name], SIZES)


@pytest.mark.parametrize("name", WHOLE)
def test_bfloat16_and_one_parameter_for_all(name) -> None:
    compare(WHOLE[name], SIZES, torch.bfloat16)
    compare(WHOLE[name], SIZES, op=SINGLE)


@pytest.mark.parametrize("sizes", [(3, 0, 0), (1, 2, 33)], ids=str)
@pytest.mark.parametrize("name", ["nvfp4 to nearest", "rotated input", "block x 2-D", "mxfp8"])
def test_few_rows(name, sizes) -> None:
    """A rotation spreads them over the rows that fill their blocks."""
    compare(RECIPES[name], sizes)


@settings(max_examples=4)
@given(sizes=sizes_of_groups(largest=140))
def test_any_sizes(sizes) -> None:
    for name in ("delayed", "block", "nvfp4 to nearest"):
        compare(RECIPES[name], sizes)


@pytest.mark.parametrize("name", ["current", "nvfp4 to nearest", "rotated input"])
def test_products_without_a_grouped_kernel(name, monkeypatch) -> None:
    monkeypatch.setattr(grouped, "_grouped_mm", None)
    compare(RECIPES[name], (3, 0, 40))


@pytest.mark.parametrize("name", WHOLE)
def test_groups_do_not_depend_on_each_other(name) -> None:
    """Not even where rounding is random: other rows, infinite weights and NaN elsewhere change no bit."""
    recipe = WHOLE[name]
    params, x, splits, dy = arguments(SIZES)
    state = state_after_a_step(OP, recipe, params, x, splits, dy)

    def run(params, x, dy):
        result, pullback = fte.vjp(OP, (params,), x, splits, recipe=recipe, state=state)
        grads = pullback(dy)
        return result.output, grads

    y, grads = run(params, x, dy)
    mine, other = slices(SIZES)[2], slices(SIZES)[0]
    x, dy, params = x.clone(), dy.clone(), clone(params)
    x[other], dy[other], params["weight0"][3] = float("nan"), 1e30, float("inf")
    changed, found = run(params, x, dy)
    assert_same(changed[mine], y[mine])
    assert_same(found.input[mine], grads.input[mine])
    for own in ("weight2", "bias2", "weight1"):
        assert_same(found.params[0][own], grads.params[0][own])


def test_stochastic_rounding_is_unbiased() -> None:
    """The mean over many keys comes near the product with what is not rounded."""
    recipe, sizes = WHOLE["nvfp4"], (9, 0, 20)
    params, x, splits, dy = arguments(sizes)
    products = []
    for seed in range(24):
        state = fte.init_state(OP, recipe, seed=seed)
        _, pullback = fte.vjp(OP, (params,), x, splits, recipe=recipe, state=state)
        products.append(pullback(dy).input)
    nearest = dataclasses.replace(recipe, disable_stochastic_rounding=True)
    weights = [
        fte.dequantize(fte.quantize(params[f"weight{g}"], fte.plan(OP, recipe=nearest).forward[0].quantizers[0][1][1]))
        for g in range(3)
    ]
    exact = torch.cat([dy[rows] @ weights[g] for g, rows in enumerate(slices(sizes))])
    one, mean = (products[0] - exact).norm(), (torch.stack(products).mean(0) - exact).norm()
    assert not torch.equal(products[0], products[1])
    assert mean < 0.3 * one


@pytest.mark.parametrize(
    ("name", "share"),
    [("delayed", 0.26), ("current", 0.26), ("block", 0.28), ("mxfp8", 0.28), ("nvfp4", 0.16), ("none", 1.0)],
)
def test_saved_bytes(name, share) -> None:
    """What is saved are casts: a part of the float32 input and weights."""
    recipe = WHOLE.get(name)
    params, x, splits, _ = arguments((4096, 1024, 1000))
    plan = fte.plan(OP, recipe=recipe)
    saved = forward_pass(plan, x, (params,), fte.init_state(OP, recipe), (splits,)).saved[0]
    used = sum(leaf.nbytes for leaf in pytree.leaves((saved.input_, saved.weights)))
    full = x.nbytes + sum(params[f"weight{g}"].nbytes for g in range(3))
    assert used <= share * full
    assert used > 0.8 * share * full


@every_recipe
def test_fakes_agree(name) -> None:
    recipe = RECIPES[name]
    for op, sizes in ((OP, (5, 0, 12)), (SINGLE, (0, 0, 0))):
        params, x, splits, _ = arguments(sizes, torch.bfloat16, op)
        plan, launch, state = fte.plan(op, recipe=recipe), Checked(), fte.init_state(op, recipe)
        forward = forward_pass(plan, x, (params,), state, (splits,), None, launch)
        backward_pass(plan, forward.saved, state, torch.randn_like(forward.output), (), launch)
        assert len(launch.seen) == 2


@pytest.mark.parametrize("name", ["mxfp8", "delayed", "mxfp8 high_precision", "block dequantized"])
def test_weights_that_are_cast_before(name) -> None:
    recipe = RECIPES[name]
    params, x, splits, dy = arguments(SIZES)
    state = fte.init_state(OP, recipe)
    want, pullback = fte.vjp(OP, (params,), x, splits, recipe=recipe, state=state)
    grads = pullback(dy)
    cast = fte.quantize_params(OP, (params,), recipe, state=state)
    got, pullback = fte.vjp(OP, cast.params, x, splits, recipe=recipe, state=cast.state)
    found = pullback(dy)
    assert_same(got.output, want.output)
    assert_same(found.input, grads.input)
    assert_same(found.params[0], grads.params[0])


def test_neighbours_do_not_cast_for_it() -> None:
    block = fte.chain(fte.RMSNorm(128), OP, fte.GELU(), fte.BasicLinear(64, 64))
    plan = fte.plan(block, recipe=WHOLE["mxfp8"], fusions=fte.Fusions())
    assert plan.forward[0].next_quantizer is None
    assert all(step.prev_quantizer is None for step in plan.backward)


def test_features_that_no_block_divides() -> None:
    with pytest.raises(ValueError, match=r"op 0 \(GroupedLinear\): in_features.*multiple of 32"):
        fte.plan(fte.GroupedLinear(2, 48, 64), recipe=WHOLE["mxfp8"])


# ---- modules and compiled calls ----


def train(module, recipe, steps, call=None):
    """Losses, gradients and quantizer state of some steps with changing sizes."""
    seen = []
    for step in range(steps):
        sizes = ((10, 0, 54), (64, 0, 0), (0, 33, 31), (21, 21, 22))[step % 4]
        x = uniform((64, 128), seed=step).requires_grad_()
        with bridge.autocast(enabled=True, recipe=recipe):
            y = (module if call is None else call)(x, torch.tensor(sizes))
        y.backward(uniform(tuple(y.shape), seed=100 + step))
        seen.append((y.detach(), x.grad, {n: p.grad.clone() for n, p in module.named_parameters()}))
        module.zero_grad()
    return seen, {n: b.clone() for n, b in module.named_buffers()}


@pytest.mark.parametrize(("name", "backend"), [("delayed", "aot_eager"), ("nvfp4", "aot_eager"), ("mxfp8", "inductor")])
def test_compiled_steps_equal_eager_ones(name, backend, dynamo) -> None:
    recipe = WHOLE[name]
    results = []
    for compiles in (False, True):
        torch.manual_seed(0)
        module = bridge.ops.GroupedLinear(3, 128, 64)
        call = torch.compile(module, fullgraph=True, backend=backend) if compiles else None
        results.append(train(module, recipe, 4, call))
    assert_same(results[1], results[0])
    assert graph_count(dynamo) == 1


def test_histories_of_every_group() -> None:
    torch.manual_seed(0)
    module = bridge.ops.GroupedLinear(3, 128, 64)
    train(module, WHOLE["delayed"], 1)
    x = uniform((64, 128), seed=0)
    assert module.input0_amax_history.max() == x[:10].abs().max()
    assert not module.input1_amax_history.any()
    assert module.input2_amax_history.max() == x[10:].abs().max()
    again = bridge.ops.GroupedLinear(3, 128, 64)
    again.load_state_dict(module.state_dict())
    assert_same(dict(again.named_buffers()), dict(module.named_buffers()))


def test_stored_weights() -> None:
    with bridge.quantized_model_init(recipe=WHOLE["mxfp8"]):
        torch.manual_seed(0)
        module = bridge.ops.GroupedLinear(3, 128, 64)
    torch.manual_seed(0)
    plain = bridge.ops.GroupedLinear(3, 128, 64)
    assert type(module.weight2).__name__ == "QuantizedWeight"
    for one, other in zip(train(module, WHOLE["mxfp8"], 2)[0], train(plain, WHOLE["mxfp8"], 2)[0], strict=True):
        assert_same(one, other)


def test_zero_rows() -> None:
    for recipe in WHOLE.values():
        params, x, splits, dy = arguments((0, 0, 0))
        state = fte.init_state(OP, recipe)
        result, pullback = fte.vjp(OP, (params,), x, splits, recipe=recipe, state=state)
        grads = pullback(dy)
        assert result.output.shape == (0, 64)
        assert not any(grad.any() for grad in grads.params[0].values())


def test_state_of_a_step_is_that_of_plain_layers() -> None:
    """The helper of other tests, too: keys and scales move on for groups that saw rows only."""
    recipe = WHOLE["delayed"]
    params, x, splits, dy = arguments(SIZES)
    state = state_after_a_step(OP, recipe, params, x, splits, dy)
    for g, rows in enumerate(slices(SIZES)):
        own = ({"weight": params[f"weight{g}"]},)
        want = with_state(fte.BasicLinear(128, 64), recipe, own, x[rows], dy[rows])
        assert_same({role: state[0][f"{role}{g}"] for role in want[0]}, want[0])
