"""Recipes as values, what their fields do, Transformer Engine's own objects, and what recipes cost in accuracy."""

import copy
import dataclasses
import pickle
import re

import pytest
import torch

import functional_te as fte
from functional_te import pytree
from functional_te.quantization import (
    QUANTIZERS,
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8DelayedScalingQuantizer,
    HybridQuantizer,
    IdentityQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
)
from functional_te.recipes import (
    RECIPES,
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MMParams,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QParams,
    Role,
)
from tests import oracles

E4M3, E5M2, E2M1 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float4_e2m1fn_x2
INPUT, WEIGHT, GRADIENT = ROLES = tuple(Role("BasicLinear", t) for t in ("input", "weight", "grad_output"))


def everything_in_e4m3(role):
    return Float8CurrentScalingQuantizer(dtype=E4M3)


CUSTOM = CustomRecipe(qfactory=everything_in_e4m3)
ATTENTION = {"fp8_dpa": False, "fp8_mha": False, "backward_override": None}
PER_ROLE = {"fp8_quant_fwd_inp": None, "fp8_quant_fwd_weight": None, "fp8_quant_bwd_grad": None}
# names and defaults of transformer_engine.common.recipe; here settings per role are fields, None means "as the flag"
FIELDS = {
    DelayedScaling: {
        "margin": 0,
        "fp8_format": Format.HYBRID,
        "amax_history_len": 1024,
        "amax_compute_algo": "max",
        "scaling_factor_compute_algo": None,
        "reduce_amax": True,
        **ATTENTION,
    },
    Float8CurrentScaling: {
        "use_power_2_scales": False,
        "fp8_format": Format.HYBRID,
        "fp8_gemm_fprop": MMParams(use_split_accumulator=False),
        "fp8_gemm_dgrad": MMParams(use_split_accumulator=True),
        "fp8_gemm_wgrad": MMParams(use_split_accumulator=True),
        **ATTENTION,
        **PER_ROLE,
    },
    Float8BlockScaling: {
        "use_f32_scales": False,
        "fp8_format": Format.E4M3,
        "x_block_scaling_dim": 1,
        "w_block_scaling_dim": 2,
        "grad_block_scaling_dim": 1,
        "fp8_gemm_fprop": MMParams(use_split_accumulator=True),
        "fp8_gemm_dgrad": MMParams(use_split_accumulator=True),
        "fp8_gemm_wgrad": MMParams(use_split_accumulator=True),
        **ATTENTION,
        **PER_ROLE,
    },
    MXFP8BlockScaling: {"margin": 0, "fp8_format": Format.E4M3, **ATTENTION, "enable_2d_quantization": False},
    NVFP4BlockScaling: {
        "disable_rht": False,
        "disable_stochastic_rounding": False,
        "disable_2d_quantization": False,
        "row_scaled_activation": False,
        "nvfp4_4over6": "none",
        "nvfp4_4over6_e4m3_use_256": "all",
        "nvfp4_4over6_err_mode": "MAE",
        "fp4_format": Format.E2M1,
        "fp8_format": Format.E4M3,
        **ATTENTION,
    },
    CustomRecipe: {
        "qfactory": everything_in_e4m3,
        "fp8_format": Format.HYBRID,
        **ATTENTION,
        "quantization_alignment": 128,
    },
}
# a field of each recipe with a value that is not its default
CHANGES = {
    DelayedScaling: {"margin": 1},
    Float8CurrentScaling: {"use_power_2_scales": True},
    Float8BlockScaling: {"use_f32_scales": True},
    MXFP8BlockScaling: {"enable_2d_quantization": True},
    NVFP4BlockScaling: {"disable_rht": True},
    CustomRecipe: {"quantization_alignment": 64},
}
every_recipe = pytest.mark.parametrize("kind", FIELDS)


def made(kind, **fields):
    """A recipe; a custom one needs its function."""
    return kind(**({"qfactory": everything_in_e4m3} if kind is CustomRecipe else {}), **fields)


# ---- values ----------------------------------------------------------------------------------------------------


@every_recipe
def test_fields_and_defaults(kind) -> None:
    recipe = made(kind)
    assert {f.name: getattr(recipe, f.name) for f in dataclasses.fields(kind)} == FIELDS[kind]
    assert getattr(fte.recipes, kind.__name__) is kind
    assert recipe.override is None


def test_every_recipe_that_needs_no_arguments_is_registered() -> None:
    assert set(RECIPES) == set(FIELDS) - {CustomRecipe}
    assert set(QUANTIZERS) == {
        Float8BlockQuantizer,
        Float8CurrentScalingQuantizer,
        Float8DelayedScalingQuantizer,
        HybridQuantizer,
        MXFP8Quantizer,
        NVFP4Quantizer,
    }
    assert all(getattr(fte, kind.__name__) is kind for kind in (*QUANTIZERS, IdentityQuantizer))


@every_recipe
def test_frozen_values(kind) -> None:
    recipe, change = made(kind), CHANGES[kind]
    changed = made(kind, **change)
    assert made(kind) is recipe
    assert hash(made(kind)) == hash(recipe)
    assert changed is not recipe
    assert changed != recipe
    assert {recipe: 1}[made(kind)] == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(recipe, next(iter(change)), None)
    for copied in (copy.deepcopy(recipe), copy.copy(recipe), pickle.loads(pickle.dumps(recipe))):
        assert copied is recipe
    assert dataclasses.replace(recipe, **change) is changed
    for role in ROLES:
        quantizer = recipe.quantizer(role)
        assert recipe.quantizer(role) is quantizer
        assert pickle.loads(pickle.dumps(quantizer)) is copy.deepcopy(quantizer) is quantizer


def test_values_that_compare_equal_in_python_stay_apart() -> None:
    assert DelayedScaling(margin=0) is not DelayedScaling(margin=False)
    assert DelayedScaling(reduce_amax=True) is not DelayedScaling(reduce_amax=False)
    assert DelayedScaling(amax_history_len=4) is not DelayedScaling(amax_history_len=5)


@every_recipe
def test_unknown_fields(kind) -> None:
    """Transformer Engine drops them silently."""
    with pytest.raises(TypeError, match="no_such_field"):
        made(kind, no_such_field=1)
    with pytest.raises(TypeError, match="no_such_field"):
        QParams(no_such_field=1)


@pytest.mark.parametrize("kind", [DelayedScaling, Float8CurrentScaling, Float8BlockScaling, MXFP8BlockScaling])
def test_formats(kind) -> None:
    name = kind.__name__
    with pytest.raises(TypeError, match=f"{name}: fp8_format: expected a Format, got HYBRID"):
        kind(fp8_format="HYBRID")
    for refused in (Format.E5M2, Format.E2M1):
        with pytest.raises(ValueError, match=f"{name}: fp8_format: expected HYBRID or E4M3, got {refused.name}"):
            kind(fp8_format=refused)


@pytest.mark.parametrize("kind", [kind for kind in FIELDS if kind is not DelayedScaling])
def test_backward_override(kind) -> None:
    for override in ("high_precision", "dequantized"):
        recipe = made(kind, backward_override=override)
        assert recipe.override == recipe.backward_override == override
    for wrong in ("quantized", "", 1, True):
        wanted = rf"{kind.__name__}: backward_override: expected None, 'high_precision' or 'dequantized', got {wrong!r}"
        with pytest.raises(ValueError, match=wanted):
            made(kind, backward_override=wrong)


def test_delayed_scaling_has_no_backward_override() -> None:
    for override in ("high_precision", "dequantized"):
        with pytest.raises(ValueError, match=f"DelayedScaling: backward_override: expected None, got {override}"):
            DelayedScaling(backward_override=override)


# what no field of that default takes
WRONG_KINDS = {
    bool: ("yes", 2, None, 0.5),
    int: ("1", 0.5, 1.0, None),
    Format: ("E4M3", None, E4M3, 1),
    MMParams: (True, None, {"use_split_accumulator": True}),
    str: (1, None, "unknown"),
}
OPEN = ("backward_override", "qfactory", "amax_compute_algo", "scaling_factor_compute_algo", *PER_ROLE)
WRONG_FIELDS = [
    pytest.param(
        kind,
        name,
        wrong,
        id=f"{kind.__name__}-{name}-{wrong!r}",
    )
    for kind, fields in FIELDS.items()
    for name, default in fields.items()
    if name not in OPEN
    for wrong in WRONG_KINDS[type(default)]
]


@pytest.mark.parametrize(("kind", "name", "wrong"), WRONG_FIELDS)
def test_fields_of_the_wrong_kind(kind, name, wrong) -> None:
    with pytest.raises((TypeError, ValueError), match=rf"{kind.__name__}: {name}: expected .*, got"):
        made(kind, **{name: wrong})


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"amax_history_len": 0}, ValueError, "amax_history_len: expected at least 1, got 0"),
        ({"amax_history_len": -3}, ValueError, "amax_history_len: expected at least 1, got -3"),
        ({"amax_history_len": 4.0}, TypeError, "amax_history_len: expected an int, got 4.0"),
        ({"amax_history_len": True}, TypeError, "amax_history_len: expected an int, got True"),
        ({"margin": 0.5}, TypeError, "margin: expected an int, got 0.5"),
        ({"amax_compute_algo": "mean"}, ValueError, "amax_compute_algo: expected 'max', 'most_recent' or a function"),
        ({"amax_compute_algo": None}, ValueError, "amax_compute_algo: expected 'max', 'most_recent' or a function"),
        ({"scaling_factor_compute_algo": "x"}, TypeError, "scaling_factor_compute_algo: expected None or a function"),
    ],
)
def test_checks_of_delayed_scaling(fields, error, message: str) -> None:
    with pytest.raises(error, match=f"DelayedScaling: {message}"):
        DelayedScaling(**fields)


@pytest.mark.parametrize("kind", [Float8CurrentScaling, Float8BlockScaling])
@pytest.mark.parametrize("field", PER_ROLE)
@pytest.mark.parametrize("wrong", [True, {"power_2_scale": True}, MMParams()], ids=repr)
def test_settings_per_role_of_the_wrong_kind(kind, field: str, wrong) -> None:
    with pytest.raises(TypeError, match=f"{kind.__name__}: {field}: expected None or QParams"):
        kind(**{field: wrong})


def test_checks_of_block_scaling() -> None:
    for field in ("x_block_scaling_dim", "w_block_scaling_dim", "grad_block_scaling_dim"):
        for wrong in (0, 3, "2"):
            with pytest.raises(ValueError, match=f"Float8BlockScaling: {field}: expected 1 or 2, got {wrong}"):
                Float8BlockScaling(**{field: wrong})
    for dims, product in (((2, 2, 1), "x and w"), ((1, 2, 2), "grad and w"), ((2, 1, 2), "x and grad")):
        fields = dict(zip(("x_block_scaling_dim", "w_block_scaling_dim", "grad_block_scaling_dim"), dims, strict=True))
        with pytest.raises(ValueError, match=rf"block_scaling_dim: expected 1 .*, got 2, {product}"):
            Float8BlockScaling(**fields)
    for dims in ((1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2)):
        assert Float8BlockScaling(
            x_block_scaling_dim=dims[0], w_block_scaling_dim=dims[1], grad_block_scaling_dim=dims[2]
        )
    for field in ("fp8_gemm_fprop", "fp8_gemm_dgrad", "fp8_gemm_wgrad"):
        with pytest.raises(ValueError, match=f"Float8BlockScaling: {field}: expected use_split_accumulator=True"):
            Float8BlockScaling(**{field: MMParams(use_split_accumulator=False)})
    for field in ("fp8_dpa", "fp8_mha"):
        with pytest.raises(ValueError, match=f"Float8BlockScaling: {field}: expected False, got True"):
            Float8BlockScaling(**{field: True})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"fp8_format": Format.HYBRID}, "fp8_format: expected E4M3, got HYBRID"),
        ({"fp8_format": Format.E5M2}, "fp8_format: expected E4M3, got E5M2"),
        ({"fp4_format": Format.E4M3}, "fp4_format: expected Format.E2M1"),
        ({"nvfp4_4over6": "inputs"}, "nvfp4_4over6: expected one of .*'activations'.*, got 'inputs'"),
        ({"nvfp4_4over6": True}, "nvfp4_4over6: expected one of"),
        ({"nvfp4_4over6_e4m3_use_256": "some"}, "nvfp4_4over6_e4m3_use_256: expected one of"),
        ({"nvfp4_4over6_err_mode": "mae"}, "nvfp4_4over6_err_mode: expected 'MAE' or 'MSE', got 'mae'"),
        ({"nvfp4_4over6": "activations"}, "nvfp4_4over6: expected 'none' or 'weights' with the transform"),
        ({"nvfp4_4over6": "all"}, "nvfp4_4over6: expected 'none' or 'weights' with the transform"),
    ],
)
def test_checks_of_nvfp4(fields, message: str) -> None:
    with pytest.raises(ValueError, match=f"NVFP4BlockScaling: {message}"):
        NVFP4BlockScaling(**fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dtype": E4M3}, "dtype"),
        ({"four_over_six": "mae"}, "four_over_six: expected None, 'MAE' or 'MSE', got 'mae'"),
        ({"four_over_six": "MAE", "with_rht": True}, "four_over_six: expected None with a transform or stochastic"),
        ({"four_over_six": "MSE", "stochastic_rounding": True}, "four_over_six: expected None with a transform or"),
        ({"row_scaled": True, "with_2d_quantization": True}, "row_scaled: expected False with 2-D tiles"),
        ({"e4m3_max": 240}, "e4m3_max: expected 448 or 256, got 240"),
    ],
)
def test_techniques_of_an_nvfp4_quantizer_that_exclude_each_other(fields, message: str) -> None:
    with pytest.raises(ValueError, match=f"NVFP4Quantizer: {message}"):
        NVFP4Quantizer(**fields)


def test_checks_of_a_hybrid_quantizer() -> None:
    row, column = Float8CurrentScalingQuantizer(dtype=E4M3), MXFP8Quantizer(dtype=E4M3)
    made_hybrid = HybridQuantizer(rowwise_quantizer=row, columnwise_quantizer=column)
    assert (made_hybrid.of(False), made_hybrid.of(True), made_hybrid.stateful) == (row, column, False)
    for name in ("rowwise_quantizer", "columnwise_quantizer"):
        both = {"rowwise_quantizer": row, "columnwise_quantizer": column}
        for wrong in (None, IdentityQuantizer(), "MXFP8"):
            with pytest.raises(TypeError, match=f"HybridQuantizer: {name}: expected a Quantizer, got"):
                HybridQuantizer(**{**both, name: wrong})
        stateful = Float8DelayedScalingQuantizer(dtype=E4M3)
        for wrong in (made_hybrid, stateful, NVFP4Quantizer(stochastic_rounding=True)):
            with pytest.raises(ValueError, match=f"HybridQuantizer: {name}: expected a plain quantizer without state"):
                HybridQuantizer(**{**both, name: wrong})
    with pytest.raises(ValueError, match="HybridQuantizer: columnwise_source: expected 'original' or"):
        HybridQuantizer(rowwise_quantizer=row, columnwise_quantizer=column, columnwise_source="rowwise")


def test_checks_of_a_block_quantizer() -> None:
    for wrong in (0, 3):
        with pytest.raises(ValueError, match="Float8BlockQuantizer: block_scaling_dim: expected 1 or 2, got"):
            Float8BlockQuantizer(dtype=E4M3, block_scaling_dim=wrong)


# ---- what the fields do ----------------------------------------------------------------------------------------


def test_roles() -> None:
    """Under Transformer Engine's names too, for factories written for it."""
    role = Role("BasicLinear", "weight", "fc1")
    assert (role.op, role.tensor, role.name) == ("BasicLinear", "weight", "fc1")
    assert (role.module_type, role.tensor_type, role.is_gradient) == ("linear", "weight", False)
    assert Role("GroupedLinear", "grad_output").module_type == "grouped_linear"
    assert Role("RMSNorm", "input").module_type == "rmsnorm"
    assert [Role("BasicLinear", t).is_gradient for t in ("input", "weight", "grad_output")] == [False, False, True]
    assert Role("BasicLinear", "weight") is WEIGHT


@pytest.mark.parametrize("kind", [DelayedScaling, Float8CurrentScaling, Float8BlockScaling, MXFP8BlockScaling])
def test_formats_of_the_roles(kind) -> None:
    for fmt, gradient in ((Format.HYBRID, E5M2), (Format.E4M3, E4M3)):
        recipe = kind(fp8_format=fmt)
        assert [recipe.quantizer(role).dtype for role in ROLES] == [E4M3, E4M3, gradient]


def test_quantizers_of_delayed_and_current_scaling() -> None:
    delayed = DelayedScaling(margin=2, amax_history_len=7, amax_compute_algo="most_recent")
    assert delayed.quantizer(GRADIENT) is Float8DelayedScalingQuantizer(
        dtype=E5M2, margin=2, amax_history_len=7, amax_compute_algo="most_recent"
    )
    assert delayed.quantizer(WEIGHT).stateful
    assert not delayed.quantizer(WEIGHT).stochastic
    current = Float8CurrentScaling(use_power_2_scales=True)
    assert current.quantizer(INPUT) is Float8CurrentScalingQuantizer(dtype=E4M3, power_2_scale=True)
    assert not current.quantizer(INPUT).stateful


def test_quantizers_of_block_scaling() -> None:
    def of(**fields):
        return [Float8BlockScaling(**fields).quantizer(role) for role in ROLES]

    def block(dim, dtype=E4M3, power_2_scale=True):
        return Float8BlockQuantizer(dtype=dtype, block_scaling_dim=dim, power_2_scale=power_2_scale)

    assert of() == [block(1), block(2), block(1)]
    assert of(use_f32_scales=True) == [
        block(1, power_2_scale=False),
        block(2, power_2_scale=False),
        block(1, power_2_scale=False),
    ]
    assert of(fp8_format=Format.HYBRID) == [block(1), block(2), block(1, E5M2)]
    assert of(x_block_scaling_dim=2, w_block_scaling_dim=1) == [block(2), block(1), block(1)]
    assert of(grad_block_scaling_dim=2, w_block_scaling_dim=1) == [block(1), block(1), block(2)]


@pytest.mark.parametrize("kind", [Float8CurrentScaling, Float8BlockScaling])
def test_settings_per_role(kind) -> None:
    """They win over the recipe's flag, for their role only."""
    default = kind().quantizer(INPUT).power_2_scale
    for role, field in zip(ROLES, PER_ROLE, strict=True):
        recipe = kind(**{field: QParams(power_2_scale=not default, amax_epsilon=0.25)})
        for other in ROLES:
            quantizer = recipe.quantizer(other)
            wanted = (not default, 0.25) if other is role else (default, 0.0)
            assert (quantizer.power_2_scale, quantizer.amax_epsilon) == wanted


def test_quantizers_of_mxfp8() -> None:
    plain, tiles = MXFP8Quantizer(dtype=E4M3), MXFP8Quantizer(dtype=E4M3, with_2d_quantization=True)
    assert [MXFP8BlockScaling().quantizer(role) for role in ROLES] == [plain, plain, plain]
    two = MXFP8BlockScaling(enable_2d_quantization=True)
    assert [two.quantizer(role) for role in ROLES] == [plain, tiles, plain]
    assert two.quantizer(Role("GroupedLinear", "weight")) is tiles
    assert two.quantizer(Role("Other", "weight")) is plain
    hybrid = MXFP8BlockScaling(fp8_format=Format.HYBRID, margin=3)
    assert [hybrid.quantizer(role).dtype for role in ROLES] == [E4M3, E4M3, E5M2]


NVFP4_ROLES = {
    "default": (
        {},
        {"with_rht": True},
        {"with_2d_quantization": True},
        {"with_rht": True, "stochastic_rounding": True},
    ),
    "no rht": (
        {"disable_rht": True},
        {},
        {"with_2d_quantization": True},
        {"stochastic_rounding": True},
    ),
    "to nearest": (
        {"disable_stochastic_rounding": True},
        {"with_rht": True},
        {"with_2d_quantization": True},
        {"with_rht": True},
    ),
    "1-D": ({"disable_2d_quantization": True}, {"with_rht": True}, {}, {"with_rht": True, "stochastic_rounding": True}),
    "rows": (
        {"row_scaled_activation": True},
        {"with_rht": True, "row_scaled": True},
        {"with_2d_quantization": True},
        {"with_rht": True, "stochastic_rounding": True},
    ),
    "4over6 of weights": (
        {"nvfp4_4over6": "weights"},
        {"with_rht": True},
        {"with_2d_quantization": True, "four_over_six": "MAE", "e4m3_max": 256},
        {"with_rht": True, "stochastic_rounding": True},
    ),
    "4over6 of everything": (
        {"nvfp4_4over6": "all", "disable_rht": True, "nvfp4_4over6_err_mode": "MSE"},
        {"four_over_six": "MSE", "e4m3_max": 256},
        {"with_2d_quantization": True, "four_over_six": "MSE", "e4m3_max": 256},
        {"stochastic_rounding": True},
    ),
    "4over6 of inputs, 448": (
        {"nvfp4_4over6": "activations", "disable_rht": True, "nvfp4_4over6_e4m3_use_256": "weights"},
        {"four_over_six": "MAE", "e4m3_max": 448},
        {"with_2d_quantization": True},
        {"stochastic_rounding": True},
    ),
}


@pytest.mark.parametrize("case", NVFP4_ROLES.values(), ids=NVFP4_ROLES)
def test_quantizers_of_nvfp4(case) -> None:
    fields, *expected = case
    found = [NVFP4BlockScaling(**fields).quantizer(role) for role in ROLES]
    assert found == [NVFP4Quantizer(**own) for own in expected]
    for quantizer, own in zip(found, expected, strict=True):
        assert quantizer.dtype is E2M1
        assert quantizer.stateful == quantizer.stochastic == own.get("stochastic_rounding", False)
        assert quantizer.rotates == own.get("with_rht", False)
        assert quantizer.tile == ((16, 16) if own.get("with_2d_quantization") else (1, 16))


# ---- custom recipes --------------------------------------------------------------------------------------------


def one_per_role(role):
    """By op, tensor and name."""
    if role.name == "plain" or role.op != "BasicLinear":
        return IdentityQuantizer()
    kinds = {
        "input": Float8CurrentScalingQuantizer(dtype=E4M3),
        "weight": MXFP8Quantizer(dtype=E4M3),
        "grad_output": Float8BlockQuantizer(dtype=E5M2, block_scaling_dim=1),
    }
    return kinds[role.tensor]


def no_quantizer(role):
    return None if role.tensor == "weight" else Float8CurrentScalingQuantizer(dtype=E4M3)


def a_format(role):
    return E4M3


def delayed_weight(role):
    return Float8DelayedScalingQuantizer(dtype=E4M3) if role.tensor == "weight" else IdentityQuantizer()


def test_a_custom_recipe_asks_its_function_for_every_role() -> None:
    recipe = CustomRecipe(qfactory=one_per_role)
    assert [recipe.quantizer(role) for role in ROLES] == [one_per_role(role) for role in ROLES]
    assert recipe.quantizer(Role("BasicLinear", "input", "plain")) is IdentityQuantizer()
    assert CustomRecipe(qfactory=one_per_role) is recipe
    assert CustomRecipe(qfactory=everything_in_e4m3) is not recipe
    block = fte.chain(fte.BasicLinear(32, 32), fte.BasicLinear(32, 32, name="plain"))
    steps = fte.plan(block, recipe=recipe).forward
    kinds = [{role: type(quantizer) for role, quantizer in step.quantizers[0]} for step in steps]
    assert kinds == [{"input": Float8CurrentScalingQuantizer, "weight": MXFP8Quantizer}, {}]


def test_checks_of_a_custom_recipe() -> None:
    with pytest.raises(TypeError, match="CustomRecipe: qfactory: expected a function of a Role, got None"):
        CustomRecipe()
    with pytest.raises(TypeError, match="CustomRecipe: qfactory: expected a function of a Role, got 'MXFP8'"):
        CustomRecipe(qfactory="MXFP8")
    with pytest.raises(ValueError, match="CustomRecipe: quantization_alignment: expected at least 1, got 0"):
        CustomRecipe(qfactory=one_per_role, quantization_alignment=0)
    with pytest.raises(TypeError, match="CustomRecipe: quantization_alignment: expected an int, got True"):
        CustomRecipe(qfactory=one_per_role, quantization_alignment=True)
    with pytest.raises(ValueError, match=r"CustomRecipe: qfactory: expected a quantizer .*, got None for Role.*weight"):
        CustomRecipe(qfactory=no_quantizer).quantizer(WEIGHT)
    with pytest.raises(TypeError, match=r"CustomRecipe: qfactory: expected a quantizer, got dtype for Role"):
        CustomRecipe(qfactory=a_format).quantizer(WEIGHT)
    assert CustomRecipe(qfactory=delayed_weight).quantizer(WEIGHT).stateful
    for override in ("high_precision", "dequantized"):
        recipe = CustomRecipe(qfactory=delayed_weight, backward_override=override)
        assert recipe.quantizer(INPUT) is IdentityQuantizer()
        with pytest.raises(ValueError, match=f"CustomRecipe: backward_override: expected None .*, got {override}"):
            recipe.quantizer(WEIGHT)


# ---- accuracy --------------------------------------------------------------------------------------------------

FLOORS = {
    DelayedScaling(): 20.0,
    Float8CurrentScaling(): 25.0,
    Float8BlockScaling(): 27.0,
    MXFP8BlockScaling(): 25.0,
    NVFP4BlockScaling(): 14.0,
    CUSTOM: 25.0,
}


@pytest.mark.parametrize(("recipe", "floor"), FLOORS.items(), ids=lambda value: type(value).__name__)
def test_signal_to_noise_of_a_linear(recipe, floor: float) -> None:
    block = fte.Linear(128, 128, bias=False)
    params, x = fte.init(block), torch.randn(256, 128)
    exact = fte.apply(block, params, x).output
    found = fte.apply(block, params, x, recipe=recipe, state=fte.init_state(block, recipe)).output
    assert floor < oracles.snr(found, exact) < 60  # above 60 dB nothing was cast


@pytest.mark.parametrize(
    ("recipe", "forward", "backward"),
    [
        (DelayedScaling(amax_history_len=4), 22, 16),
        (DelayedScaling(amax_history_len=4, fp8_format=Format.E4M3), 22, 20),
        (DelayedScaling(amax_history_len=4, margin=1), 22, 16),
        (Float8CurrentScaling(), 22, 16),
        (Float8CurrentScaling(use_power_2_scales=True), 22, 16),
        (Float8CurrentScaling(fp8_format=Format.E4M3), 22, 20),
        (Float8BlockScaling(), 22, 20),
        (Float8BlockScaling(fp8_format=Format.HYBRID), 22, 16),
        (MXFP8BlockScaling(), 22, 20),
        (MXFP8BlockScaling(enable_2d_quantization=True), 22, 20),
        (NVFP4BlockScaling(), 9, 6),
        (NVFP4BlockScaling(disable_stochastic_rounding=True), 9, 8),
        (CustomRecipe(qfactory=one_per_role), 22, 16),
    ],
    ids=lambda value: re.sub(r" at 0x\w+", "", repr(value)),
)
def test_signal_to_noise_of_a_chain(recipe, forward: float, backward: float) -> None:
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
    assert forward < oracles.snr(result.output, exact.output) < 60
    assert backward < oracles.snr(grads.input, exact_grads.input) < 60
    for one, other in zip(pytree.leaves(grads.params), pytree.leaves(exact_grads.params), strict=True):
        assert oracles.snr(one, other) > backward


def test_quantized_operands_give_the_same_product() -> None:
    """A tensor that comes in quantized is used as it is."""
    block, recipe = fte.Linear(16, 16, bias=False), Float8CurrentScaling()
    params, x = fte.init(block), torch.randn(4, 16)
    quantized = fte.quantize(x, recipe.quantizer(INPUT))
    want = fte.apply(block, params, x, recipe=recipe).output
    assert torch.equal(fte.apply(block, params, quantized, recipe=recipe).output, want)
    exact = x64 = quantized.data.double() * quantized.scale_inv.double()
    weight = fte.quantize(params[0]["weight"], recipe.quantizer(WEIGHT))
    exact = x64 @ (weight.data.double() * weight.scale_inv.double()).T
    torch.testing.assert_close(want.double(), exact, rtol=1e-5, atol=1e-6)
