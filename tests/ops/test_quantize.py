"""Quantize: what it casts and what it passes on, its state, its neighbours, aliasing, compiled."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import bridge
import functional_te as fte
from bridge import ops
from functional_te.pipeline import backward_pass, forward_pass
from functional_te.recipes import CustomRecipe
from tests.bridge.compiled import GraphLog
from tests.helpers import CURRENT, DELAYED, assert_same, random_params, recipe_id, recorded_kernels, uniform

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
MXFP8 = fte.recipes.MXFP8BlockScaling()
STATELESS = (CURRENT, fte.recipes.Float8BlockScaling(), MXFP8)
EVERY = (*STATELESS, DELAYED, fte.recipes.NVFP4BlockScaling())
BOTH = fte.Quantize(forward=True, backward=True)
X = uniform((64, 32), torch.bfloat16, 1)
DY = uniform((64, 32), torch.bfloat16, 2)


def quantizer(recipe, tensor: str) -> fte.Quantizer:
    """The recipe's, making both copies where they differ."""
    own = recipe.quantizer(fte.recipes.Role("Quantize", tensor))
    return own.with_usage(True, not own.transposable)


def state_of(block, recipe):
    """A state that is not the initial one."""
    state = fte.init_state(block, recipe)
    if recipe is not DELAYED:
        return state
    return fte.tree_map(lambda t: torch.full_like(t, 2.0) if t.shape == (1,) else t, state)


# ---------------------------------------------------------------------------- what is cast


@pytest.mark.parametrize("recipe", EVERY, ids=recipe_id)
def test_forward_and_backward_casts(recipe) -> None:
    state = state_of(BOTH, recipe)
    plan = fte.plan(BOTH, recipe=recipe)
    out = forward_pass(plan, X, ({},), state)
    wanted = fte.quantize(X, quantizer(recipe, "input"), state[0].get("input"))
    assert_same(out.output, wanted[0] if isinstance(wanted, tuple) else wanted)
    assert out.output.serves(False)
    assert out.output.serves(True)
    assert set(out.amaxes) == ({(0, "input")} if "input" in state[0] else set())
    back = backward_pass(plan, out.saved, state, DY)
    wanted = fte.quantize(DY, quantizer(recipe, "grad_output"), state[0].get("grad_output"))
    grad = wanted[0] if isinstance(wanted, tuple) else wanted
    assert_same(back.grad_input, grad.dequantize())
    assert set(back.amaxes) == ({(0, "grad_output")} if "grad_output" in state[0] else set())
    assert not torch.equal(back.grad_input, DY)


@pytest.mark.parametrize("forward", [True, False])
@pytest.mark.parametrize("backward", [True, False])
def test_each_direction_is_asked_for(forward: bool, backward: bool) -> None:
    op = fte.Quantize(forward, backward)
    assert op.forward_quantizers == (("input",) if forward else ())
    assert op.backward_quantizers == (("grad_output",) if backward else ())
    assert [sorted(own) for own in fte.init_state(op, DELAYED)] == [
        sorted(op.backward_quantizers + op.forward_quantizers)
    ]
    result, pullback = fte.vjp(op, ({},), X, recipe=CURRENT)
    assert isinstance(result.output, fte.QuantizedTensor) is forward
    assert torch.equal(pullback(DY).input, DY) is not backward
    with bridge.autocast(recipe=CURRENT):
        x = X.detach().clone().requires_grad_()
        y = ops.Quantize(forward, backward)(x)
    y.backward(DY)
    assert torch.equal(y, X) is not forward
    assert torch.equal(x.grad, DY) is not backward


def test_a_high_precision_backward_casts_no_gradient() -> None:
    for override in ("high_precision", "dequantized"):
        recipe = fte.recipes.Float8CurrentScaling(backward_override=override)
        result, pullback = fte.vjp(BOTH, ({},), X, recipe=recipe)
        assert isinstance(result.output, fte.QuantizedTensor)
        assert_same(pullback(DY).input, DY)


def test_nothing_is_cast_twice() -> None:
    qx = fte.quantize(X, fte.MXFP8Quantizer(dtype=E4M3, columnwise=True))
    assert fte.apply(BOTH, ({},), qx, recipe=CURRENT).output is qx
    assert fte.apply(BOTH, ({},), qx).output is qx
    state = fte.init_state(BOTH, DELAYED)
    rows_only = fte.quantize(X, fte.MXFP8Quantizer(dtype=E4M3))
    assert fte.apply(BOTH, ({},), rows_only, recipe=MXFP8).output is rows_only
    into_linear = fte.chain(BOTH, fte.BasicLinear(32, 32))
    with pytest.raises(ValueError, match=r"op 1 \(BasicLinear\): input: .*columnwise"):
        fte.vjp(into_linear, random_params(into_linear), rows_only, recipe=MXFP8)
    assert_same(fte.apply(BOTH, ({},), qx, recipe=DELAYED, state=state).state, state)  # nothing was observed
    block = fte.chain(BOTH, BOTH)
    plan = fte.plan(block, recipe=CURRENT)
    out = forward_pass(plan, X, ({}, {}), None)
    assert_same(out.output, fte.apply(BOTH, ({},), X, recipe=CURRENT).output)
    made = [(entry.index, entry.role) for entry in fte.numerics(block, ({}, {}), X, recipe=CURRENT)]
    assert made == [(0, "input"), (1, "grad_output")]


@pytest.mark.parametrize("recipe", EVERY, ids=recipe_id)
def test_a_linear_reads_what_was_cast(recipe) -> None:
    """``Quantize`` before and after a linear: the casts that the linear would make, and no more."""
    alone = fte.chain(fte.BasicLinear(32, 64))
    block = fte.chain(fte.Quantize(), *alone.ops, fte.Quantize(forward=False, backward=True))
    params = random_params(alone, torch.bfloat16)
    state = state_of(alone, recipe)
    of_input, of_grad = ({r: s for r, s in state[0].items() if r == role} for role in ("input", "grad_output"))
    split = (of_input, state[0], of_grad)
    dy = uniform((64, 64), torch.bfloat16, 3)
    result, pullback = fte.vjp(block, ({}, *params, {}), X, recipe=recipe, state=split)
    want, want_pullback = fte.vjp(alone, params, X, recipe=recipe, state=state)
    assert_same(result.output, want.output)
    grads, want_grads = pullback(dy), want_pullback(dy)
    assert_same((grads.input, grads.params[1]), (want_grads.input, want_grads.params[0]))
    found = {(e.index, e.role) for e in fte.numerics(block, ({}, *params, {}), X, recipe=recipe, state=split)}
    assert found == {(0, "input"), (1, "weight"), (2, "grad_output")}
    if recipe is DELAYED:
        after = grads.state
        assert_same(after[0]["input"], want_grads.state[0]["input"])
        assert_same(after[2]["grad_output"], want_grads.state[0]["grad_output"])
        assert_same(after[1]["input"], state[0]["input"])  # the linear's own were not used
        closed = fte.update_state(block, recipe, after)
        assert_same(closed[0]["input"], fte.update_state(alone, recipe, want_grads.state)[0]["input"])


def test_neighbours_do_not_cast_for_it() -> None:
    block = fte.chain(fte.BasicLinear(32, 32), fte.GELU(), BOTH, fte.GELU(), fte.BasicLinear(32, 32))
    plan = fte.plan(block, recipe=CURRENT, fusions=fte.Fusions())
    assert [step.indices for step in plan.forward if step.next_quantizer is not None] == [(3,)]
    assert [step.indices for step in plan.backward if step.prev_quantizer is not None] == [(1,)]


def test_roles_of_a_custom_recipe() -> None:
    seen = []

    def choose(role):
        seen.append((role.op, role.tensor, role.name))
        if role.name == "keep" or role.is_gradient:
            return fte.IdentityQuantizer()
        return fte.Float8CurrentScalingQuantizer(dtype=E5M2)

    recipe = CustomRecipe(choose)
    block = fte.chain(fte.Quantize(name="keep"), fte.ConstantScale(1.0), fte.Quantize(True, True, name="cast"))
    result, pullback = fte.vjp(block, ({}, {}, {}), X, recipe=recipe)
    assert result.output.quantizer.dtype is E5M2
    assert_same(pullback(DY).input, DY)
    assert set(seen) == {
        ("Quantize", "input", "keep"),
        ("Quantize", "input", "cast"),
        ("Quantize", "grad_output", "cast"),
    }


@pytest.mark.parametrize("shape", [(), (1,), (0, 32), (2, 3, 32)])
def test_shapes(shape: tuple[int, ...]) -> None:
    x, dy = uniform(shape, seed=3), uniform(shape, seed=4)
    result, pullback = fte.vjp(BOTH, ({},), x, recipe=CURRENT)
    assert tuple(result.output.shape) == shape
    assert pullback(dy).input.shape == shape
    assert fte.eval_shape(BOTH, ({},), fte.TensorSpec(shape, torch.float32)).output.shape == shape


def test_features_that_no_block_divides() -> None:
    block = fte.chain(fte.GELU(), fte.Quantize(name="mine"))
    for shape in ((4, 24), ()):
        x = uniform(shape)
        fte.apply(block, ({}, {}), x)  # fits without the recipe, which is remembered
        with recorded_kernels() as seen, pytest.raises(ValueError, match=r"op 1 \(Quantize 'mine'\): input.*of 32"):
            fte.apply(block, ({}, {}), x, recipe=MXFP8)
        assert seen == []
        fte.apply(block, ({}, {}), x, recipe=CURRENT)
    with pytest.raises(ValueError, match="of 32"):
        fte.apply(fte.Quantize(forward=False, backward=True), ({},), uniform((4, 24)), recipe=MXFP8)


def test_arguments_are_bools() -> None:
    for wrong in (1, None, "yes"):
        with pytest.raises(TypeError, match="Quantize: forward"):
            fte.Quantize(wrong)
        with pytest.raises(TypeError, match="Quantize: backward"):
            ops.Quantize(backward=wrong)


# ---------------------------------------------------------------------------- passing on, and storage

FORK = fte.MakeExtraOutput()


@pytest.mark.parametrize(
    "chain",
    [(BOTH,), (BOTH, BOTH), (FORK, BOTH), (BOTH, FORK), (fte.Reshape((4, 8)), BOTH, FORK), (fte.GELU(), FORK, BOTH)],
)
@pytest.mark.parametrize("recipe", [None, CURRENT], ids=recipe_id)
def test_outputs_never_share_storage(chain, recipe) -> None:
    block, x = fte.chain(*chain), uniform((4, 8)).requires_grad_()
    params = ({},) * len(chain)
    outputs, _ = bridge.apply(block, params, x, recipe=recipe)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    places = [t.untyped_storage().data_ptr() for t in (x, *outputs)]
    assert len(set(places)) == len(places)
    torch.autograd.backward(outputs, [torch.ones_like(out) for out in outputs])
    assert x.grad.shape == x.shape


def test_passing_on_copies_nothing() -> None:
    x = uniform((4, 8))
    assert fte.apply(BOTH, ({},), x).output is x
    with recorded_kernels() as seen:
        fte.vjp(BOTH, ({},), x)[1](x)
    assert seen == []


# ---------------------------------------------------------------------------- modules and compiled


@pytest.mark.parametrize("recipe", [None, DELAYED], ids=recipe_id)
def test_compiled_equals_eager(recipe, dynamo) -> None:
    def make():
        torch.manual_seed(0)
        return ops.Sequential(
            ops.Quantize(backward=True), ops.Linear(32, 32, bias=False), ops.Quantize(backward=True), ops.GELU()
        )

    def step(call, seed: int):
        x = uniform((8, 32), seed=seed).requires_grad_()
        with bridge.autocast(enabled=recipe is not None, recipe=recipe):
            y = call(x)
        y.square().sum().backward()
        return y.detach(), x.grad

    eager, module, log = make(), make(), GraphLog()
    compiled = torch.compile(module, fullgraph=True, backend=log)
    for seed in range(3):
        assert_same(step(compiled, seed), step(eager, seed))
    assert_same([p.grad for p in module.parameters()], [p.grad for p in eager.parameters()])
    # a compiled graph closes a step at its end, eager mode at the next: the histories are rotated
    histories = [[b.sort()[0] for n, b in m.named_buffers() if n.endswith("amax_history")] for m in (module, eager)]
    assert_same(*histories)
    assert len(list(module.buffers())) == (14 if recipe is DELAYED else 0)
    assert dynamo["stats"]["unique_graphs"] == 1
    assert "quantize_forward" in log.custom_ops()


def test_state_of_the_module_is_saved() -> None:
    def make():
        return ops.Sequential(ops.Quantize(backward=True))

    model, other = make(), make()
    for seed in range(3):
        x = uniform((8, 32), seed=seed).requires_grad_()
        with bridge.autocast(recipe=DELAYED):
            model(x).square().sum().backward()
    assert model[0].input_scale.item() != 1
    assert model[0].grad_output_scale.item() != 1
    other.load_state_dict(model.state_dict())
    x = uniform((8, 32), seed=9)
    with bridge.autocast(recipe=DELAYED):
        assert_same(other(x), model(x))
    assert_same(other[0].input_scale, model[0].input_scale)


@pytest.mark.parametrize("reentrant", [True, False])
def test_state_under_checkpointing(reentrant: bool) -> None:
    """A recomputed cast reads the same scale and observes nothing a second time."""
    results = []
    for checkpointed in (False, True):
        torch.manual_seed(0)
        model = ops.Sequential(ops.RMSNorm(32), ops.Quantize(backward=True), ops.Linear(32, 32), ops.GELU())
        for seed in range(3):
            x = uniform((8, 32), seed=seed).requires_grad_()
            with bridge.autocast(recipe=DELAYED):
                y = checkpoint(model, x, use_reentrant=reentrant) if checkpointed else model(x)
                y.square().sum().backward()
        state = [b.clone() for b in model.buffers()]  # the next model's autocast closes the step of this one too
        results.append((y.detach(), x.grad, [p.grad for p in model.parameters()], state))
    assert_same(*results)
