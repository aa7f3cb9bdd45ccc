"""The experts of a mixture in one step: the same bits as in three, whatever the sizes, recipe and gradients wanted."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import bridge
import functional_te as fte
from functional_te import pytree
from functional_te.fuser.rules.grouped_mlp import GROUPED_MLP, GroupedMLP
from functional_te.pipeline import backward_pass, forward_pass
from tests.bridge.compiled import GraphLog, graph_count
from tests.every_recipe import WHOLE
from tests.helpers import assert_same, clone, double, require_grad, uniform
from tests.ops.grouped import formula, sizes_of_groups
from tests.ops.test_fakes import Checked

NONE, FUSED = fte.Fusions(), fte.Fusions(joint=(GROUPED_MLP,))
SIZES = (21, 0, 12)


def experts(act=None, size: int = 64, hidden: int = 32, **options) -> fte.Chain:
    """Both layers with biases, those of the second scaled."""
    act = fte.ScaledSwiGLU() if act is None else act
    width = 2 * hidden if act.gated else hidden
    first = fte.GroupedLinear(3, size, width, **options)
    return fte.chain(first, act, fte.GroupedLinear(3, hidden, size, scale_bias=True, **options))


BLOCKS = {
    "swiglu": experts(),
    "interleaved": experts(fte.ScaledClampedQGeGLU(32)),
    "srelu": experts(fte.ScaledSReLU()),
    "recomputed": experts(fte.ScaledSReLU(activation_recompute_in_mlp=True)),
    "recomputed tanh": experts(fte.ScaledTanhSReLU(2.0, activation_recompute_in_mlp=True)),
    "single": experts(single_weight=True, single_bias=True),
}
every_block = pytest.mark.parametrize("name", BLOCKS)


def arguments(block, sizes, dtype=torch.float32):
    """Parameters, rows, extra inputs and an output gradient."""
    rows = sum(sizes)
    params = tuple(
        {n: uniform(tuple(s.shape), dtype, 10 * i + j) for j, (n, s) in enumerate(op.param_specs(dtype, "cpu").items())}
        for i, op in enumerate(block.ops)
    )
    splits = torch.tensor(sizes)
    extras = (splits, uniform((rows,), dtype, 2), splits.to(torch.int32), uniform((rows,), dtype, 3))
    size = block.ops[0].in_features
    return params, uniform((rows, size), dtype, 1), extras, uniform((rows, size), dtype, 4)


def run(block, params, x, extras, dy, fusions, recipe=None, state=None, requires_grad=True):
    """Everything a step gives, as a tree."""
    result, pullback = fte.vjp(
        block, params, x, *extras, recipe=recipe, state=state, fusions=fusions, requires_grad=requires_grad
    )
    grads = pullback(dy)
    return result.output, grads.input, grads.params, grads.extra_inputs, grads.state


@pytest.mark.parametrize("recipe", [None, *WHOLE.values()], ids=["none", *WHOLE])
@every_block
def test_fused_equals_unfused(name, recipe) -> None:
    block = BLOCKS[name]
    params, x, extras, dy = arguments(block, SIZES)
    state = fte.init_state(block, recipe)
    if recipe is not None:
        state = fte.update_state(block, recipe, run(block, params, x, extras, dy, NONE, recipe, state)[-1])
    want = run(block, params, x, extras, dy, NONE, recipe, state)
    assert_same(run(block, params, x, extras, dy, FUSED, recipe, state), want)
    plan = fte.plan(block, recipe=recipe, fusions=FUSED)
    stateful = name.startswith("recomputed") and recipe is WHOLE["delayed"]
    assert len(plan.forward) == len(plan.backward) == (3 if stateful else 1)
    assert [refusal.rule for refusal in plan.refusals] == (["grouped_mlp"] if stateful else [])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@every_block
def test_other_dtypes(name, dtype) -> None:
    block = BLOCKS[name]
    params, x, extras, dy = arguments(block, SIZES, dtype)
    assert_same(run(block, params, x, extras, dy, FUSED), run(block, params, x, extras, dy, NONE))
    wide = arguments(block, SIZES)[0]
    assert_same(run(block, wide, x, extras, dy, FUSED), run(block, wide, x, extras, dy, NONE))


@settings(max_examples=8)
@given(sizes=sizes_of_groups())
def test_any_sizes(sizes) -> None:
    for name, recipe in (("swiglu", None), ("recomputed", WHOLE["current"])):
        params, x, extras, dy = arguments(BLOCKS[name], sizes)
        want = run(BLOCKS[name], params, x, extras, dy, NONE, recipe)
        assert_same(run(BLOCKS[name], params, x, extras, dy, FUSED, recipe), want)


def test_the_formula() -> None:
    block = BLOCKS["srelu"]
    params, x, extras, dy = arguments(block, SIZES)
    leaves = double((params[0], params[2], x, extras[1], extras[3]))
    first, second, x64, scale, factors = leaves
    h = scale[:, None] * formula(block.ops[0], x64, first, SIZES).clamp(min=0) ** 2
    y = formula(block.ops[2], h, second, SIZES, factors)
    grads = torch.autograd.grad(y, pytree.leaves(leaves), dy.double())
    got = run(block, params, x, extras, dy, FUSED)
    found = (got[0], *pytree.leaves((got[2][0], got[2][2], got[1], got[3][1], got[3][3])))
    for actual, want in zip(found, (y, *grads), strict=True):
        torch.testing.assert_close(actual.double(), want.detach(), rtol=1e-5, atol=1e-4)


FLAGS = st.booleans()


@settings(max_examples=8)
@given(wants_x=FLAGS, first=FLAGS, scale=FLAGS, second=FLAGS, biases=FLAGS, factors=FLAGS)
def test_only_requested_gradients(wants_x, first, scale, second, biases, factors) -> None:
    for name in ("swiglu", "recomputed"):
        block = BLOCKS[name]
        params, x, extras, dy = arguments(block, SIZES)
        flags = ((first,) * 3 + (first and biases,) * 3, (), (second,) * 3 + (biases,) * 3)
        pattern = (wants_x, flags, (False, scale, False, factors))
        want = run(block, params, x, extras, dy, NONE, requires_grad=pattern)
        got = run(block, params, x, extras, dy, FUSED, requires_grad=pattern)
        assert_same(got, want)
        assert (got[1] is not None) is wants_x
        assert (got[2][2]["weight0"] is not None) is second
        assert (got[3][1] is not None) is scale


@pytest.mark.parametrize("recipe", [None, *WHOLE.values()], ids=["none", *WHOLE])
@pytest.mark.parametrize("name", ["swiglu", "recomputed"])
def test_fakes_agree(name, recipe) -> None:
    block = BLOCKS[name]
    for dtype, requires_grad in ((torch.float32, True), (torch.bfloat16, True), (torch.float32, False)):
        params, x, extras, dy = arguments(block, SIZES, dtype)
        plan = fte.plan(block, recipe=recipe, requires_grad=requires_grad, fusions=FUSED)
        launch, state = Checked(), fte.init_state(block, recipe)
        forward = forward_pass(plan, x, params, state, extras, None, launch)
        if requires_grad:
            backward_pass(plan, forward.saved, state, dy, (), launch)


def saved_bytes(block, recipe, fusions) -> int:
    params, x, extras, _ = arguments(block, (256, 0, 256))
    plan = fte.plan(block, recipe=recipe, fusions=fusions)
    saved = forward_pass(plan, x, params, fte.init_state(block, recipe), extras).saved
    return sum(leaf.nbytes for leaf in pytree.leaves(saved))


def test_what_is_recomputed_is_not_kept() -> None:
    for recipe in (None, WHOLE["mxfp8"]):
        kept = saved_bytes(BLOCKS["srelu"], recipe, FUSED)
        assert kept == saved_bytes(BLOCKS["srelu"], recipe, NONE)
        again = saved_bytes(BLOCKS["recomputed"], recipe, FUSED)
        assert kept - again >= 512 * 32 * (4 if recipe is None else 1)


@pytest.mark.parametrize(
    ("block", "reason"),
    [
        (
            fte.chain(fte.GroupedLinear(3, 8, 16), fte.ScaledSwiGLU(), fte.GroupedLinear(2, 8, 8)),
            "3 and 2 groups",
        ),
        (
            fte.chain(fte.GroupedLinear(3, 8, 16), fte.ScaledSwiGLU(), fte.GroupedLinear(3, 16, 8)),
            "gives 16 features, the activation needs 32",
        ),
    ],
    ids=["groups", "features"],
)
def test_refusals(block, reason) -> None:
    plan = fte.plan(block, fusions=FUSED)
    assert len(plan.forward) == 3
    assert reason in plan.refusals[0].reason


def test_the_default_rules_fuse_it_inside_of_a_chain() -> None:
    block = fte.chain(fte.RMSNorm(64), BLOCKS["swiglu"], fte.Identity())
    assert [type(step.op).__name__ for step in fte.plan(block).forward] == ["RMSNorm", "GroupedMLP", "Identity"]


def test_each_layer_takes_its_own_sizes() -> None:
    """Nothing is assumed of the second tensor of sizes."""
    block = BLOCKS["swiglu"]
    params, x, extras, dy = arguments(block, SIZES)
    other = (extras[0], extras[1], torch.tensor((3, 30, 0)), extras[3])
    want = run(block, params, x, other, dy, NONE)
    assert_same(run(block, params, x, other, dy, FUSED), want)
    assert not torch.equal(want[0], run(block, params, x, extras, dy, FUSED)[0])
    for slot in (0, 2):
        wrong = list(extras)
        wrong[slot] = torch.tensor((3, 3, 3))
        with pytest.raises(ValueError, match=r"extra input 0.*33 rows"):
            run(block, params, x, wrong, dy, FUSED)


@pytest.mark.parametrize("name", ["none", "delayed"])
def test_compiled(name, dynamo) -> None:
    """One node each way, the bits of eager mode, one graph for all sizes."""
    block, recipe = BLOCKS["swiglu"], WHOLE.get(name)
    log = GraphLog()

    def call(params, x, extras, state):
        return bridge.apply(block, params, x, *extras, recipe=recipe, state=state)[0]

    compiled = torch.compile(call, fullgraph=True, backend=log)
    for sizes in (SIZES, (0, 33, 0), (11, 11, 11)):
        params, x, extras, dy = arguments(block, sizes)
        results = []
        for function in (call, compiled):
            state = clone(fte.init_state(block, recipe))
            leaves = require_grad((params, x, (extras[1], extras[3])))
            given_extras = (extras[0], leaves[2][0], extras[2], leaves[2][1])
            y = function(leaves[0], leaves[1], given_extras, state)
            y.backward(dy)
            grads = [leaf.grad for leaf in pytree.leaves(leaves)]
            results.append((y.detach(), grads, [own for own in state if any("grad" in role for role in own)]))
        assert_same(results[1], results[0])
    assert graph_count(dynamo) == 1
    assert log.custom_ops().count("groupedmlp_forward") == 1
    assert isinstance(fte.plan(block).forward[0].op, GroupedMLP)


def test_modules() -> None:
    torch.manual_seed(0)
    model = bridge.ops.Sequential(
        bridge.ops.GroupedLinear(3, 64, 64), bridge.ops.ScaledSwiGLU(), bridge.ops.GroupedLinear(3, 32, 64)
    )
    x, splits, scale = uniform((33, 64)), torch.tensor(SIZES), uniform((33,), seed=1)
    params = tuple(dict(module.named_parameters()) for module in model)
    block = fte.chain(*(module.op for module in model))
    assert_same(
        model(x, splits, scale, splits), fte.apply(block, params, x, splits, scale, splits, fusions=NONE).output
    )
    assert set(model.state_dict()) >= {"0.weight0", "0.bias2", "2.weight1"}
