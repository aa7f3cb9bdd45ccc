"""A norm or an activation and the Quantize behind it in one step: same results as two, and why it refuses."""

import dataclasses

import pytest
import torch

import bridge
import functional_te as fte
from functional_te import pytree
from functional_te.pipeline import backward_pass, forward_pass
from functional_te.recipes import CustomRecipe
from tests import oracles
from tests.helpers import CURRENT, DELAYED, assert_same, random_params, recipe_id, require_grad, uniform
from tests.ops.test_fakes import Checked

NONE = fte.Fusions()
MXFP8 = fte.recipes.MXFP8BlockScaling()
LINEAR = fte.BasicLinear(32, 32)
# name: ops, size of the input, fused class
BLOCKS = {
    "rms_norm": (fte.chain(fte.RMSNorm(32), fte.Quantize(), LINEAR), 32, "ForwardNormQuantize"),
    "layer_norm": (
        fte.chain(fte.LayerNorm(32, zero_centered_gamma=True), fte.Quantize(True, True), fte.GELU()),
        32,
        "ForwardNormQuantize",
    ),
    "adaptive": (
        fte.chain(fte.AdaptiveLayerNorm(32, batch_dim=1), fte.Quantize(), LINEAR, fte.Bias(32)),
        32,
        "ForwardNormQuantize",
    ),
    "gelu": (fte.chain(LINEAR, fte.Identity(), fte.GELU(), fte.Quantize(), LINEAR), 32, "ForwardActivationQuantize"),
    "swiglu": (
        fte.chain(fte.SwiGLU(cache_quantized_input=True), fte.Quantize(True, True)),
        64,
        "ForwardActivationQuantize",
    ),
}


def arguments(block: fte.Chain, size: int, dtype: torch.dtype, seed: int):
    x = uniform((4, 8, size), dtype, seed)
    extras = tuple(uniform((8, size), dtype, seed + 50 + i) for i in range(block.num_extra_inputs))
    return pytree.tree_map(lambda p: p.to(dtype), random_params(block)), x, extras


def classes(block: fte.Chain, **options) -> list[str]:
    return [type(step.op).__name__ for step in fte.plan(block, **options).forward]


@pytest.mark.parametrize("recipe", [CURRENT, DELAYED, MXFP8], ids=recipe_id)
@pytest.mark.parametrize("name", BLOCKS)
def test_same_bits_as_two_steps(name: str, recipe) -> None:
    block, size, fused = BLOCKS[name]
    assert fused in classes(block, recipe=recipe)
    assert fused not in classes(block, recipe=recipe, fusions=NONE)
    states = [fte.init_state(block, recipe)] * 2
    for seed in range(3):
        params, x, extras = arguments(block, size, torch.float32, seed)
        results = []
        for place, fusions in enumerate((None, NONE)):
            result, pullback = fte.vjp(block, params, x, *extras, recipe=recipe, state=states[place], fusions=fusions)
            dy = uniform(tuple(result.output.shape), seed=seed + 9)
            grads = pullback(dy)
            states[place] = fte.update_state(block, recipe, grads.state) if recipe is DELAYED else states[place]
            results.append((result.output, grads.input, grads.params, grads.extra_inputs, states[place]))
        assert_same(*results)
        # inference makes the same cast
        assert_same(
            fte.apply(block, params, x, *extras, recipe=recipe, state=states[0]).output,
            fte.apply(block, params, x, *extras, recipe=recipe, state=states[0], fusions=NONE).output,
        )


@pytest.mark.parametrize("recipe", [CURRENT, DELAYED], ids=recipe_id)
@pytest.mark.parametrize("name", BLOCKS)
def test_bfloat16(name: str, recipe) -> None:
    """Current scaling casts the rounded value, as two steps do; delayed scaling spares one rounding."""
    block, size, _ = BLOCKS[name]
    params, x, extras = arguments(block, size, torch.bfloat16, 1)
    state = fte.init_state(block, recipe)
    outputs = []
    for fusions in (None, NONE):
        y = fte.apply(block, params, x, *extras, recipe=recipe, state=state, fusions=fusions).output
        outputs.append(y.dequantize() if isinstance(y, fte.QuantizedTensor) else y)
    assert oracles.snr(*outputs) > (100 if recipe is CURRENT else 26)


@pytest.mark.parametrize(
    ("name", "recipe"),
    [("rms_norm", DELAYED), ("adaptive", CURRENT), ("gelu", CURRENT), ("swiglu", DELAYED)],
    ids=["rms_norm-delayed", "adaptive-current", "gelu-current", "swiglu-delayed"],
)
def test_compiled(name: str, recipe, dynamo) -> None:
    block, size, _ = BLOCKS[name]

    def step(call, fusions):
        params, x, extras = require_grad(arguments(block, size, torch.float32, 1))
        state = fte.init_state(block, recipe)
        y, new_state = call(params, x, extras, state, fusions)
        y.square().sum().backward()
        return y.detach(), [t.grad for t in pytree.leaves((params, x, extras))], new_state

    def call(params, x, extras, state, fusions):
        return bridge.apply(block, params, x, *extras, recipe=recipe, state=state, fusions=fusions)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    expected = step(call, NONE)
    assert_same(step(call, None), expected)
    assert_same(step(compiled, None), expected)


@pytest.mark.parametrize("recipe", [CURRENT, DELAYED, MXFP8], ids=recipe_id)
@pytest.mark.parametrize("name", BLOCKS)
def test_fakes(name: str, recipe) -> None:
    block, size, fused = BLOCKS[name]
    for dtype in (torch.float32, torch.bfloat16):
        params, x, extras = arguments(block, size, dtype, 1)
        plan, state, launch = fte.plan(block, recipe=recipe), fte.init_state(block, recipe), Checked()
        out = forward_pass(plan, x, params, state, extras, None, launch)
        backward_pass(plan, out.saved, state, torch.zeros(tuple(out.output.shape), dtype=dtype), (), launch)
        assert (fused, "forward") in launch.seen


def keep_all(role):
    return fte.IdentityQuantizer()


@pytest.mark.parametrize("producer", [fte.RMSNorm(32), fte.LayerNorm(32), fte.AdaptiveLayerNorm(32), fte.GELU()])
@pytest.mark.parametrize(
    ("quantize", "recipe", "reason"),
    [
        (fte.Quantize(), None, "without a recipe"),
        (fte.Quantize(forward=False, backward=True), CURRENT, "no forward tensor"),
        (fte.Quantize(), CustomRecipe(keep_all), "high precision"),
    ],
)
def test_refusals(producer, quantize, recipe, reason: str) -> None:
    block = fte.chain(producer, quantize)
    plan = fte.plan(block, recipe=recipe)
    assert len(plan.forward) == 2
    (refusal,) = plan.refusals
    assert reason in refusal.reason
    assert refusal.rule in ("forward_norm_quantize", "forward_activation_quantize")
    assert refusal.start == 0


def test_what_goes_first() -> None:
    """A linear takes its activation; a norm behind a Quantize is another matter."""
    block = fte.chain(LINEAR, fte.GELU(), fte.Quantize(), fte.RMSNorm(32))
    assert classes(block, recipe=CURRENT) == ["ForwardLinearBiasActivation", "Quantize", "RMSNorm"]


def test_the_observation_belongs_to_the_quantize() -> None:
    block = BLOCKS["rms_norm"][0]
    params, x, _ = arguments(block, 32, torch.float32, 1)
    result = fte.apply(block, params, x, recipe=DELAYED, state=fte.init_state(block, DELAYED))
    y = fte.apply(block.ops[0], params[:1], x).output
    assert result.state[1]["input"].amax_history[0] == y.abs().max()
    assert result.state[2]["input"].amax_history[0] == 0  # the linear casts nothing
    found = {(e.index, e.role) for e in fte.numerics(block, params, x, recipe=DELAYED, state=result.state)}
    assert found == {(1, "input"), (2, "weight"), (2, "grad_output")}


def test_a_high_precision_backward() -> None:
    """What the norm keeps is what it always keeps."""
    recipe = dataclasses.replace(CURRENT, backward_override="high_precision")
    block = BLOCKS["rms_norm"][0]
    params, x, _ = arguments(block, 32, torch.float32, 1)
    found = []
    for fusions in (None, NONE):
        result, pullback = fte.vjp(block, params, x, recipe=recipe, fusions=fusions)
        grads = pullback(uniform(result.output.shape, seed=3))
        found.append((result.output, grads.input, grads.params))
    assert_same(*found)
