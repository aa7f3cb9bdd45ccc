"""Steps that fuse scaling, residual addition and RMSNorm with a neighbour: against no fusion and against float64."""

import pytest
import torch

import bridge
import functional_te as fte
from functional_te import pytree
from functional_te.fuser.rules import BACKWARD, FORWARD
from functional_te.kernels import kernels
from functional_te.pipeline import forward_pass
from tests import oracles
from tests.helpers import CURRENT, DELAYED, DTYPES, RECIPES, assert_same, double, random_params, recipe_id, uniform

LINEAR, NORM = fte.BasicLinear(16, 16), fte.RMSNorm(16, zero_centered_gamma=True)
ADD, FORK = fte.AddExtraInput(), fte.MakeExtraOutput()
RULES = {rule.name: rule for rule in (*FORWARD, *BACKWARD)}
# rule, chain, class of the fused step
CASES = [
    ("forward_linear_scale_add", fte.chain(LINEAR, fte.ConstantScale(-2.5), ADD), "ForwardLinearScaleAdd"),
    ("backward_linear_scale", fte.chain(LINEAR, fte.ConstantScale(3.5)), "BackwardLinearScale"),
    ("backward_linear_scale", fte.chain(LINEAR, LINEAR, fte.ConstantScale(0.3), fte.GELU()), "BackwardLinearScale"),
    ("forward_add_rms_norm", fte.chain(ADD, FORK, NORM), "ForwardAddRMSNorm"),
    ("forward_add_rms_norm", fte.chain(ADD, FORK, NORM, LINEAR), "ForwardAddRMSNorm"),
    ("backward_rms_norm_linear", fte.chain(NORM, LINEAR), "BackwardRMSNormLinear"),
    ("backward_rms_norm_linear", fte.chain(LINEAR, FORK, NORM, LINEAR, fte.GELU()), "BackwardRMSNormLinear"),
]
IDS = [f"{i}-{case[0]}" for i, case in enumerate(CASES)]
# dB between two ways to round: in high precision, and of FP8 casts of values that differ by one rounding
EXACT = {torch.float32: 110.0, torch.float16: 55.0, torch.bfloat16: 38.0}
CAST = {torch.float32: 50.0, torch.float16: 30.0, torch.bfloat16: 26.0}
# and between FP8 and float64
FP8_FLOOR = 16.0


def arguments(block, dtype, shape=(4, 3)):
    params = pytree.tree_map(lambda p: ((p - 0.75) / 2).to(dtype), random_params(block))
    extras = tuple(uniform((*shape, 16), dtype, 30 + i) for i in range(block.num_extra_inputs))
    outputs = 1 + len(block.extra_outputs)
    return (
        params,
        uniform((*shape, 16), dtype, 1),
        extras,
        [uniform((*shape, 16), dtype, 50 + i) for i in range(outputs)],
    )


def run(block, dtype, recipe, fusions):
    """Outputs and all gradients, and the state."""
    params, x, extras, cotangents = arguments(block, dtype)
    state = fte.init_state(block, recipe)
    result, pullback = fte.vjp(block, params, x, *extras, state=state, recipe=recipe, fusions=fusions)
    grads = pullback(*cotangents)
    return (result.output, result.extra_outputs, grads.input, grads.params, grads.extra_inputs), grads.state


def expected(block, dtype):
    params, x, extras, cotangents = arguments(block, dtype)
    params, x, extras = double((params, x, extras))
    outputs = oracles.run(block, params, x, extras)
    torch.autograd.backward(outputs, [c.double() for c in cotangents])
    detached = [out.detach() for out in outputs]
    grads = pytree.tree_map(lambda t: t.grad, params)
    return detached[0], tuple(detached[1:]), x.grad, grads, tuple(e.grad for e in extras)


def only(name):
    return fte.Fusions(**{name.split("_")[0]: (RULES[name],)})


@pytest.mark.parametrize("recipe", RECIPES, ids=recipe_id)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("name", "block", "step"), CASES, ids=IDS)
def test_fused_equals_unfused(name, block, step, dtype, recipe):
    for fusions in (only(name), None):
        plan = fte.plan(block, recipe=recipe, fusions=fusions)
        assert step in [type(s.op).__name__ for s in getattr(plan, name.split("_")[0])]
        fused, state = run(block, dtype, recipe, fusions)
        plain, plain_state = run(block, dtype, recipe, fte.Fusions())
        scales = recipe is not None and any(isinstance(op, fte.ConstantScale) for op in block.ops)
        one, spec = pytree.tree_flatten(fused)
        other, plain_spec = pytree.tree_flatten(plain)
        assert spec == plain_spec
        floor = EXACT[dtype] if recipe is None else FP8_FLOOR if scales else CAST[dtype]
        for got, want, exact in zip(one, other, pytree.leaves(expected(block, dtype)), strict=True):
            assert (got.dtype, got.shape) == (want.dtype, want.shape)
            assert oracles.snr(got, want) > floor
            assert oracles.snr(got, exact) > (EXACT[dtype] if recipe is None else FP8_FLOOR)
        if not scales:
            for left, right in zip(pytree.leaves(state), pytree.leaves(plain_state), strict=True):
                torch.testing.assert_close(left, right, rtol=4e-2 if dtype is torch.bfloat16 else 5e-3, atol=1e-6)


def test_a_fused_norm_rounds_where_the_unfused_ones_do():
    """Bit for bit in every dtype and recipe, except for the residual's gradient, which is added before rounding."""
    for dtype in DTYPES:
        for recipe in RECIPES:
            for block, name in (
                (fte.chain(ADD, FORK, NORM, LINEAR), "forward_add_rms_norm"),
                (fte.chain(NORM, LINEAR), "backward_rms_norm_linear"),
            ):
                assert_same(run(block, dtype, recipe, only(name)), run(block, dtype, recipe, fte.Fusions()))


def test_what_a_scaled_linear_observes():
    """The fused backward casts the gradient before it is scaled, the unfused one afterwards."""
    block = fte.chain(LINEAR, fte.ConstantScale(0.25))
    for fusions, factor in ((None, 1.0), (fte.Fusions(), 0.25)):
        params, x, _, (dy,) = arguments(block, torch.float32)
        state = fte.init_state(block, DELAYED)
        _, pullback = fte.vjp(block, params, x, state=state, recipe=DELAYED, fusions=fusions)
        after = pullback(dy).state
        torch.testing.assert_close(after[0]["grad_output"].amax_history[0], factor * dy.abs().max())
        assert after[1] == {}


@pytest.mark.parametrize("factor", [0.0, float("inf")])
def test_a_factor_without_an_inverse_is_not_fused(factor):
    """0 times inf is nan, whatever the plan."""
    block = fte.chain(LINEAR, fte.ConstantScale(factor), ADD)
    params, x, extras, _ = arguments(block, torch.float32)
    x[0, 0, 0] = float("inf")
    one = fte.apply(block, params, x, *extras).output
    other = fte.apply(block, params, x, *extras, fusions=fte.Fusions()).output
    assert_same(one, other)
    assert not one[0, 0].isfinite().any()


def test_the_sum_is_saved_once():
    """The norm's saved input is the extra output itself."""
    block = fte.chain(ADD, FORK, NORM)
    params, x, extras, _ = arguments(block, torch.float32)
    outcome = forward_pass(fte.plan(block), x, params, ({},) * 3, extras)
    assert outcome.saved[2].input_ is outcome.extra_outputs[0]


def test_some_gradients_only():
    """Which gradients are wanted changes neither the others nor the layout's results."""
    block = fte.chain(LINEAR, FORK, NORM, LINEAR)
    params, x, _, cotangents = arguments(block, torch.float32)
    full = run(block, torch.float32, None, fte.Fusions())[0]
    for flags in (
        ((True,), (), (False,), (True,)),
        ((False,), (), (True,), (False,)),
        ((True,), (), (True,), (False,)),
    ):
        _, pullback = fte.vjp(block, params, x, requires_grad=(False, flags, ()))
        grads = pullback(*cotangents)
        for own, wanted, reference in zip(grads.params, flags, full[3], strict=True):
            for grad, want, known in zip(own.values(), wanted, reference.values(), strict=True):
                assert (grad is not None) == want
                if want:
                    assert oracles.snr(grad, known) > 110
    # without the gradient of the extra output
    result, pullback = fte.vjp(block, params, x)
    zeros = torch.zeros_like(result.extra_outputs[0])
    assert_same(pullback(cotangents[0], None).params, pullback(cotangents[0], zeros).params)


@pytest.mark.parametrize("recipe", [None, CURRENT, DELAYED], ids=recipe_id)
def test_compiled_equals_eager(recipe, dynamo):
    """All four in one compiled function, bit for bit."""
    chains = [case[1] for case in (CASES[0], CASES[4], CASES[6])]
    inputs = [arguments(block, torch.float32)[:3] for block in chains]

    def call(bundles, states):
        results = []
        for block, (params, x, extras), state in zip(chains, bundles, states, strict=True):
            out, after = bridge.apply(block, params, x, *extras, state=state, recipe=recipe)
            results.append((out, after))
        return results

    def both_directions(function):
        bundles = pytree.tree_map(lambda t: t.clone().requires_grad_(), inputs)
        states = [fte.init_state(block, recipe) for block in chains]
        outputs = [leaf for out, _ in function(bundles, states) for leaf in pytree.leaves(out)]
        torch.autograd.backward(outputs, [uniform(out.shape, seed=70 + i) for i, out in enumerate(outputs)])
        grads = [leaf.grad for leaf in pytree.leaves(bundles)]
        return [out.detach() for out in outputs], grads, [leaf.detach() for leaf in pytree.leaves(states)]

    eager = both_directions(call)
    assert_same(both_directions(torch.compile(call, fullgraph=True, backend="aot_eager")), eager)
    assert dynamo["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("shape", [(5, 8), (2, 3, 8), (0, 8), (8,)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_factors_of_products(shape, dtype):
    """``alpha`` of every product, with the sum and without, in one rounding."""
    k, alpha = kernels("reference"), -1.7
    a, b = uniform(shape, dtype, 1), uniform((6, 8), dtype, 2)
    add, dy = uniform((*shape[:-1], 6), dtype, 3), uniform((*shape[:-1], 6), dtype, 4)
    back = uniform(shape, dtype, 5)
    a64, b64, dy64 = a.double(), b.double(), dy.double()
    pairs = [
        (k.gemm_nt(a, b, dtype=dtype, alpha=alpha), alpha * a64 @ b64.t()),
        (k.gemm_nt(a, b, dtype=dtype, alpha=alpha, add=add), add.double() + alpha * a64 @ b64.t()),
        (k.gemm_nn(dy, b, dtype=dtype, alpha=alpha), alpha * dy64 @ b64),
        (k.gemm_nn(dy, b, dtype=dtype, alpha=alpha, add=back), back.double() + alpha * dy64 @ b64),
        (k.gemm_tn(dy, a, dtype=dtype, alpha=alpha), alpha * dy64.reshape(-1, 6).t() @ a64.reshape(-1, 8)),
    ]
    for got, want in pairs:
        assert got.dtype is dtype
        assert got.shape == want.shape
        assert got.numel() == 0 or want.abs().max() == 0 or oracles.snr(got, want) > EXACT[dtype]
