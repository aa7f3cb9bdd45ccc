"""Subsets of the built-in fusions give what no fusion gives: outputs, gradients and state."""

import itertools
import random

import pytest
import torch

import functional_te as fte
from functional_te import pytree
from functional_te.fuser.rules import BACKWARD, FORWARD
from tests import oracles
from tests.helpers import RECIPES, random_params, recipe_id, uniform

CHAINS = {
    "mlp_residual": fte.chain(
        fte.MakeExtraOutput(channel="residual", output_to_caller=False),
        fte.RMSNorm(16),
        fte.Linear(16, 64),
        fte.SwiGLU(),
        fte.Linear(32, 16),
        fte.AddExtraInput(channel="residual"),
        fte.MakeExtraOutput(channel="second", output_to_caller=False),
        fte.Linear(16, 32),
        fte.GELU(),
        fte.Linear(32, 16, bias=False),
        fte.AddExtraInput(channel="second"),
    ),
    "public_extras": fte.chain(
        fte.Linear(16, 16),
        fte.AddExtraInput(),
        fte.MakeExtraOutput(),
        fte.Linear(16, 16),
        fte.ReLU(),
        fte.MakeExtraOutput(),
        fte.RMSNorm(16, zero_centered_gamma=True),
        fte.Linear(16, 16),
    ),
    "activations": fte.chain(
        fte.Linear(16, 32),
        fte.SwiGLU(glu_interleave_size=4),
        fte.Linear(16, 16),
        fte.Linear(16, 32, bias=False),
        fte.GEGLU(cache_quantized_input=True),
        fte.Bias(16),
        fte.SiLU(),
    ),
    "norms": fte.chain(
        fte.AddExtraInput(),
        fte.MakeExtraOutput(channel="residual", output_to_caller=False),
        fte.RMSNorm(16),
        fte.Linear(16, 16),
        fte.GELU(),
        fte.AddExtraInput(channel="residual"),
        fte.MakeExtraOutput(),
        fte.RMSNorm(16, zero_centered_gamma=True),
    ),
}
# what each of them exercises
RULES = {
    "mlp_residual": {
        "forward_linear_bias_add",
        "forward_linear_bias_activation",
        "backward_rms_norm_linear",
        "backward_linear_add",
        "backward_activation_bias",
        "backward_add_rms_norm",
    },
    "public_extras": {
        "forward_linear_bias_add",
        "forward_linear_bias_activation",
        "backward_rms_norm_linear",
        "backward_linear_add",
        "backward_activation_bias",
        "backward_add_rms_norm",
    },
    "activations": {"forward_linear_bias_activation", "backward_activation_bias"},
    "norms": {
        "forward_linear_bias_activation",
        "forward_add_rms_norm",
        "backward_rms_norm_linear",
        "backward_activation_bias",
        "backward_add_rms_norm",
    },
}


def subsets(name: str) -> list[fte.Fusions]:
    """Each rule alone, all but one, all, and some others: what interacts is mostly two rules, or one and the rest."""
    names = sorted(RULES[name])
    count = len(names)
    flags = {(True,) * count}
    for i in range(count):
        flags |= {tuple(j == i for j in range(count)), tuple(j != i for j in range(count))}
    every = list(itertools.product((False, True), repeat=count))[1:]
    flags |= set(random.Random(0).sample(every, min(8, len(every))))
    wanted = [{rule for rule, on in zip(names, chosen, strict=True) if on} for chosen in sorted(flags)]
    return [
        fte.Fusions(
            forward=tuple(r for r in FORWARD if r.name in chosen),
            backward=tuple(r for r in BACKWARD if r.name in chosen),
        )
        for chosen in wanted
    ]


def run(block: fte.Chain, recipe, dtype: torch.dtype, fusions: fte.Fusions, steps: int = 2):
    """A few steps, so that delayed scaling runs with scales other than 1; the last step's results."""
    params = pytree.tree_map(lambda p: (p - 0.75) / 2, random_params(block))
    params = pytree.tree_map(lambda p: p.to(dtype), params)
    state = fte.init_state(block, recipe)
    for step in range(steps):
        x = uniform((4, 3, 16), dtype, 10 + step)
        extras = tuple(uniform((4, 3, 16), dtype, 30 + i + step) for i in range(block.num_extra_inputs))
        result, pullback = fte.vjp(block, params, x, *extras, state=state, recipe=recipe, fusions=fusions)
        grads = pullback(
            *[uniform(o.shape, dtype, 50 + i) for i, o in enumerate((result.output, *result.extra_outputs))]
        )
        state = fte.update_state(block, recipe, grads.state)
    return (result.output, result.extra_outputs, grads.input, grads.params, grads.extra_inputs), grads.state


def assert_agree(actual, expected, floor: float) -> None:
    one, spec = pytree.tree_flatten(actual)
    other, expected_spec = pytree.tree_flatten(expected)
    assert spec == expected_spec
    assert len(one) > 3
    for left, right in zip(one, other, strict=True):
        assert left.dtype is right.dtype
        assert left.shape == right.shape
        assert oracles.snr(left, right) > floor


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("recipe", RECIPES, ids=recipe_id)
@pytest.mark.parametrize("name", CHAINS)
def test_subsets_agree_with_none(name: str, recipe, dtype: torch.dtype) -> None:
    block = CHAINS[name]
    # one rounding more or less in bf16, and FP8 rounding that it tips over
    floor = (110.0 if recipe is None else 50.0) if dtype is torch.float32 else (38.0 if recipe is None else 26.0)
    expected, expected_state = run(block, recipe, dtype, fte.Fusions())
    for fusions in subsets(name):
        actual, state = run(block, recipe, dtype, fusions)
        assert_agree(actual, expected, floor)
        for left, right in zip(pytree.leaves(state), pytree.leaves(expected_state), strict=True):
            torch.testing.assert_close(left, right, rtol=1e-5 if dtype is torch.float32 else 4e-2, atol=1e-6)


@pytest.mark.parametrize("name", CHAINS)
def test_the_chains_exercise_the_rules(name: str) -> None:
    used = set()
    for rule in (*FORWARD, *BACKWARD):
        kind = "forward" if rule in FORWARD else "backward"
        plan = fte.plan(CHAINS[name], fusions=fte.Fusions(**{kind: (rule,)}))
        if any(step.fused for step in getattr(plan, kind)):
            used.add(rule.name)
    assert used == RULES[name]
    assert len(subsets(name)) == len(set(subsets(name))) >= len(used) + 1


def test_high_precision_is_right() -> None:
    """The yardstick of the subsets, against float64."""
    block = CHAINS["mlp_residual"]
    (output, _, dx, dparams, _), _ = run(block, None, torch.float32, fte.Fusions(), steps=1)
    params = pytree.tree_map(lambda p: ((p - 0.75) / 2).double().requires_grad_(), random_params(block))
    x = uniform((4, 3, 16), seed=10).double().requires_grad_()
    (want,) = oracles.run(block, params, x)
    want.backward(uniform(want.shape, seed=50).double())
    assert oracles.snr(output, want.detach()) > 110
    assert oracles.snr(dx, x.grad) > 110
    for left, right in zip(pytree.leaves(dparams), pytree.leaves(params), strict=True):
        assert oracles.snr(left, right.grad) > 110
