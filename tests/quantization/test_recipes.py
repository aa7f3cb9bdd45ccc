"""Recipes as values, and what they cost in accuracy."""

import copy
import dataclasses
import pickle

import pytest
import torch

import functional_te as fte
from functional_te import pytree
from functional_te.recipes import RECIPES, DelayedScaling, Float8CurrentScaling, Format, MMParams, Role
from tests import oracles

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2

# names and defaults of transformer_engine.common.recipe
FIELDS = {
    DelayedScaling: {
        "margin": 0,
        "fp8_format": Format.HYBRID,
        "amax_history_len": 1024,
        "amax_compute_algo": "max",
        "scaling_factor_compute_algo": None,
        "reduce_amax": True,
        "fp8_dpa": False,
        "fp8_mha": False,
        "backward_override": None,
    },
    Float8CurrentScaling: {
        "use_power_2_scales": False,
        "fp8_format": Format.HYBRID,
        "fp8_gemm_fprop": MMParams(use_split_accumulator=False),
        "fp8_gemm_dgrad": MMParams(use_split_accumulator=True),
        "fp8_gemm_wgrad": MMParams(use_split_accumulator=True),
        "fp8_dpa": False,
        "fp8_mha": False,
        "backward_override": None,
    },
}
every_recipe = pytest.mark.parametrize("kind", RECIPES)


@every_recipe
def test_fields_and_defaults(kind) -> None:
    recipe = kind()
    assert {f.name: getattr(recipe, f.name) for f in dataclasses.fields(kind)} == FIELDS[kind]
    assert getattr(fte.recipes, kind.__name__) is kind


@every_recipe
def test_frozen_values(kind) -> None:
    assert kind() is kind()
    assert hash(kind()) == hash(kind())
    assert kind(fp8_format=Format.E4M3) is not kind()
    assert kind(fp8_format=Format.E4M3) != kind()
    assert {kind(): 1}[kind()] == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        kind().fp8_format = Format.E4M3
    for copied in (copy.deepcopy(kind()), copy.copy(kind()), pickle.loads(pickle.dumps(kind()))):
        assert copied is kind()
    assert dataclasses.replace(kind(), fp8_format=Format.E4M3) is kind(fp8_format=Format.E4M3)


def test_values_that_compare_equal_in_python_stay_apart() -> None:
    assert DelayedScaling(margin=0) is not DelayedScaling(margin=False)
    assert DelayedScaling(reduce_amax=True) is not DelayedScaling(reduce_amax=False)
    assert DelayedScaling(amax_history_len=4) is not DelayedScaling(amax_history_len=5)


@every_recipe
def test_unknown_fields(kind) -> None:
    with pytest.raises(TypeError, match="no_such_field"):
        kind(no_such_field=1)


@every_recipe
@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"fp8_format": "HYBRID"}, TypeError, "fp8_format: expected a Format, got HYBRID"),
        ({"fp8_format": Format.E5M2}, ValueError, "fp8_format: expected HYBRID or E4M3, got E5M2"),
        ({"backward_override": "high_precision"}, ValueError, "backward_override: expected None, got high_precision"),
    ],
)
def test_checks_of_every_recipe(kind, fields, error, message: str) -> None:
    with pytest.raises(error, match=f"{kind.__name__}: {message}"):
        kind(**fields)


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"amax_history_len": 0}, ValueError, "amax_history_len: expected at least 1, got 0"),
        ({"amax_history_len": -3}, ValueError, "amax_history_len: expected at least 1, got -3"),
        ({"amax_history_len": 4.0}, TypeError, "amax_history_len: expected an int, got 4.0"),
        ({"amax_history_len": True}, TypeError, "amax_history_len: expected an int, got True"),
        ({"margin": 0.5}, TypeError, "margin: expected an int, got 0.5"),
        ({"amax_compute_algo": "mean"}, ValueError, "amax_compute_algo: expected 'max', 'most_recent' or a function"),
        ({"scaling_factor_compute_algo": "x"}, TypeError, "scaling_factor_compute_algo: expected None or a function"),
    ],
)
def test_checks_of_delayed_scaling(fields, error, message: str) -> None:
    with pytest.raises(error, match=message):
        DelayedScaling(**fields)


@pytest.mark.parametrize(
    ("field", "value"),
    [("use_power_2_scales", 2), ("use_power_2_scales", "no"), ("fp8_gemm_fprop", True), ("fp8_gemm_wgrad", None)],
)
def test_checks_of_current_scaling(field: str, value) -> None:
    """As documented: a field of the wrong kind is a TypeError."""
    with pytest.raises(TypeError, match=field):
        Float8CurrentScaling(**{field: value})


@every_recipe
def test_formats_of_the_roles(kind) -> None:
    for fmt, gradient in ((Format.HYBRID, E5M2), (Format.E4M3, E4M3)):
        recipe = kind(fp8_format=fmt)
        found = {r: recipe.quantizer(Role("BasicLinear", r)).dtype for r in ("input", "weight", "grad_output")}
        assert found == {"input": E4M3, "weight": E4M3, "grad_output": gradient}


def test_settings_reach_the_quantizers() -> None:
    delayed = DelayedScaling(margin=2, amax_history_len=7, amax_compute_algo="most_recent")
    quantizer = delayed.quantizer(Role("BasicLinear", "weight"))
    assert (quantizer.margin, quantizer.amax_history_len, quantizer.amax_compute_algo) == (2, 7, "most_recent")
    assert quantizer.stateful
    current = Float8CurrentScaling(use_power_2_scales=True).quantizer(Role("BasicLinear", "input"))
    assert current.power_2_scale
    assert not current.stateful


# ---- accuracy --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("recipe", "floor"), [(DelayedScaling(), 20.0), (Float8CurrentScaling(), 25.0)])
def test_signal_to_noise_of_a_linear(recipe, floor: float) -> None:
    block = fte.Linear(128, 128, bias=False)
    params, x = fte.init(block), torch.randn(256, 128)
    exact = fte.apply(block, params, x).output
    found = fte.apply(block, params, x, recipe=recipe, state=fte.init_state(block, recipe)).output
    assert floor < oracles.snr(found, exact) < 60  # above 60 dB nothing was cast


@pytest.mark.parametrize(
    "recipe",
    [
        DelayedScaling(amax_history_len=4),
        DelayedScaling(amax_history_len=4, fp8_format=Format.E4M3),
        DelayedScaling(amax_history_len=4, margin=1),
        Float8CurrentScaling(),
        Float8CurrentScaling(use_power_2_scales=True),
        Float8CurrentScaling(fp8_format=Format.E4M3),
    ],
    ids=repr,
)
def test_signal_to_noise_of_a_chain(recipe) -> None:
    """Forward and all gradients of a block, after the scales have settled."""
    block = fte.chain(fte.RMSNorm(64), fte.Linear(64, 256), fte.SwiGLU(), fte.Linear(128, 64))
    params, x, dy = fte.init(block, seed=3), torch.randn(128, 64), torch.randn(128, 64) * 1e-3
    exact, pullback = fte.vjp(block, params, x)
    exact_grads = pullback(dy)
    state = fte.init_state(block, recipe)
    for _ in range(3):
        result, pullback = fte.vjp(block, params, x, recipe=recipe, state=state)
        grads = pullback(dy)
        state = fte.update_state(block, recipe, grads.state)
    assert 22 < oracles.snr(result.output, exact.output) < 60
    floor = 16 if recipe.fp8_format is Format.HYBRID else 20
    assert floor < oracles.snr(grads.input, exact_grads.input) < 60
    for one, other in zip(pytree.leaves(grads.params), pytree.leaves(exact_grads.params), strict=True):
        assert oracles.snr(one, other) > floor


def test_quantized_operands_give_the_same_product() -> None:
    """A tensor that comes in quantized is used as it is."""
    block, recipe = fte.Linear(16, 16, bias=False), Float8CurrentScaling()
    params, x = fte.init(block), torch.randn(4, 16)
    quantized = fte.quantize(x, recipe.quantizer(Role("BasicLinear", "input")))
    want = fte.apply(block, params, x, recipe=recipe).output
    assert torch.equal(fte.apply(block, params, quantized, recipe=recipe).output, want)
    exact = x64 = quantized.data.double() * quantized.scale_inv.double()
    weight = fte.quantize(params[0]["weight"], recipe.quantizer(Role("BasicLinear", "weight")))
    exact = x64 @ (weight.data.double() * weight.scale_inv.double()).T
    torch.testing.assert_close(want.double(), exact, rtol=1e-5, atol=1e-6)
