"""Transformer Engine's own recipe objects and quantizers, by stand-ins with its names, modules and attributes."""

import dataclasses
import enum
import types

import pytest
import torch

import bridge
import functional_te as fte
from bridge.recipe_context import active_recipe
from functional_te.quantization import (
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
    Format,
    MMParams,
    MXFP8BlockScaling,
    QParams,
    Role,
    as_recipe,
)

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
INPUT, WEIGHT, GRADIENT = ROLES = tuple(Role("BasicLinear", t) for t in ("input", "weight", "grad_output"))
PER_ROLE = ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad")

TEFormat = enum.Enum("Format", {"E2M1": 2, "E4M3": 4, "E5M2": 5, "HYBRID": 9})
TEDType = enum.Enum("DType", {"kFloat8E4M3": 7, "kFloat8E5M2": 8, "kFloat4E2M1": 10, "kFloat32": 4})


def te_object(kind: str, module: str = "transformer_engine.common.recipe", on_class=None, **attributes):
    """An object as Transformer Engine has it: a class of that name and module, and attributes."""
    made_class = type(kind, (), {"__module__": module, **(on_class or {})})
    instance = made_class()
    vars(instance).update(attributes)
    return instance


def te_products(*split: bool):
    names = ("fp8_gemm_fprop", "fp8_gemm_dgrad", "fp8_gemm_wgrad")
    pairs = zip(names, split, strict=True)
    return {name: types.SimpleNamespace(use_split_accumulator=value) for name, value in pairs}


def te_settings(**changes):
    return types.SimpleNamespace(**{f.name: f.default for f in dataclasses.fields(QParams)} | changes)


def te_recipe(kind: str, **changes):
    """A recipe object with every attribute of Transformer Engine's, at its default there unless changed."""
    shared = {"fp8_dpa": False, "fp8_mha": False, "backward_override": None}
    # its settings per role are attributes of the class, from environment variables
    per_role = dict.fromkeys(PER_ROLE, te_settings(power_2_scale=kind == "Float8BlockScaling"))
    own, on_class = {
        "DelayedScaling": (
            {
                "margin": 0,
                "fp8_format": TEFormat.HYBRID,
                "amax_history_len": 1024,
                "amax_compute_algo": "max",
                "scaling_factor_compute_algo": None,
                "reduce_amax": True,
            },
            {},
        ),
        "Float8CurrentScaling": (
            {"use_power_2_scales": False, "fp8_format": TEFormat.HYBRID, **te_products(False, True, True)},
            per_role,
        ),
        "Float8BlockScaling": (
            {
                "use_f32_scales": False,
                "fp8_format": TEFormat.E4M3,
                "x_block_scaling_dim": 1,
                "w_block_scaling_dim": 2,
                "grad_block_scaling_dim": 1,
                **te_products(True, True, True),
            },
            per_role,
        ),
        "MXFP8BlockScaling": ({"margin": 0, "fp8_format": TEFormat.E4M3, "enable_2d_quantization": False}, {}),
        "NVFP4BlockScaling": (
            {
                "disable_rht": False,
                "disable_stochastic_rounding": False,
                "disable_2d_quantization": False,
                "row_scaled_activation": False,
                "nvfp4_4over6": "none",
                "nvfp4_4over6_e4m3_use_256": "all",
                "nvfp4_4over6_err_mode": "MAE",
                "fp4_format": TEFormat.E2M1,
                "fp8_format": TEFormat.E4M3,
                # made from the flags when the object is made
                "fp4_quant_fwd_inp": te_settings(random_hadamard_transform=True),
            },
            {},
        ),
        "CustomRecipe": ({"qfactory": None, "fp8_format": TEFormat.HYBRID, "quantization_alignment": 128}, {}),
    }[kind]
    return te_object(kind, on_class=on_class, **shared | own | changes)


@pytest.mark.parametrize("kind", RECIPES)
def test_a_foreign_recipe_is_the_same_value(kind) -> None:
    assert as_recipe(te_recipe(kind.__name__)) is kind()
    assert as_recipe(kind()) is kind()
    assert as_recipe(None) is None


FOREIGN_CHANGES = [
    ("DelayedScaling", {"margin": 2, "amax_history_len": 16, "amax_compute_algo": "most_recent", "reduce_amax": False}),
    ("DelayedScaling", {"fp8_format": TEFormat.E4M3, "amax_compute_algo": torch.amax}),
    ("Float8CurrentScaling", {"use_power_2_scales": True, "backward_override": "dequantized", "fp8_dpa": True}),
    ("Float8CurrentScaling", te_products(True, False, False)),
    ("Float8BlockScaling", {"use_f32_scales": True, "fp8_format": TEFormat.HYBRID}),
    ("Float8BlockScaling", {"x_block_scaling_dim": 2, "w_block_scaling_dim": 1}),
    ("MXFP8BlockScaling", {"enable_2d_quantization": True, "fp8_format": TEFormat.HYBRID, "fp8_mha": True}),
    ("NVFP4BlockScaling", {"disable_rht": True, "nvfp4_4over6": "all", "nvfp4_4over6_err_mode": "MSE"}),
    ("NVFP4BlockScaling", {"disable_stochastic_rounding": True, "backward_override": "high_precision"}),
]


@pytest.mark.parametrize(("kind", "changes"), FOREIGN_CHANGES)
def test_fields_of_a_foreign_recipe(kind: str, changes) -> None:
    """Flags of the recipe are honoured, where te.ops linears ignore two of them."""
    expected = {}
    for name, value in changes.items():
        if isinstance(value, TEFormat):
            value = Format[value.name]
        elif name.startswith("fp8_gemm"):
            value = MMParams(use_split_accumulator=value.use_split_accumulator)
        expected[name] = value
    assert as_recipe(te_recipe(kind, **changes)) is getattr(fte.recipes, kind)(**expected)


def test_settings_per_role_of_a_foreign_recipe_count_if_they_were_set_on_the_object() -> None:
    recipe = te_recipe("Float8BlockScaling", use_f32_scales=True)
    assert as_recipe(recipe) is Float8BlockScaling(use_f32_scales=True)
    recipe.fp8_quant_fwd_weight = te_settings(power_2_scale=True, amax_epsilon=0.5)
    found = as_recipe(recipe)
    assert found.fp8_quant_fwd_weight is QParams(power_2_scale=True, amax_epsilon=0.5)
    assert found.fp8_quant_fwd_inp is None
    assert found.quantizer(WEIGHT).power_2_scale
    assert not found.quantizer(INPUT).power_2_scale


def test_a_foreign_recipe_of_another_version_lacks_fields() -> None:
    recipe = te_recipe("MXFP8BlockScaling")
    del recipe.enable_2d_quantization, recipe.backward_override
    assert as_recipe(recipe) is MXFP8BlockScaling()


def test_a_foreign_recipe_is_checked() -> None:
    with pytest.raises(ValueError, match="DelayedScaling: amax_history_len: expected at least 1, got 0"):
        as_recipe(te_recipe("DelayedScaling", amax_history_len=0))


TE_QUANTIZERS = {
    "Float8CurrentScalingQuantizer": (
        {"dtype": TEDType.kFloat8E5M2, "amax_epsilon": 0.5, "force_pow_2_scales": True},
        Float8CurrentScalingQuantizer(dtype=E5M2, amax_epsilon=0.5, power_2_scale=True),
    ),
    "DelayedScalingRequest": (
        {
            "fp8_format": TEFormat.E4M3,
            "margin": 1,
            "amax_history_len": 8,
            "amax_compute_algo": "max",
            "scaling_factor_compute_algo": None,
            "reduce_amax": True,
        },
        Float8DelayedScalingQuantizer(dtype=E4M3, margin=1, amax_history_len=8),
    ),
    "Float8BlockQuantizer": (
        {"dtype": TEDType.kFloat8E4M3, "amax_epsilon": 0.0, "force_pow_2_scales": False, "block_scaling_dim": 1},
        Float8BlockQuantizer(dtype=E4M3, power_2_scale=False, block_scaling_dim=1),
    ),
    "MXFP8Quantizer": (
        {"dtype": TEDType.kFloat8E4M3, "with_2d_quantization": True},
        MXFP8Quantizer(dtype=E4M3, with_2d_quantization=True),
    ),
    "NVFP4Quantizer": (
        {
            "dtype": TEDType.kFloat4E2M1,
            "with_rht": True,
            "with_post_rht_amax": True,
            "with_2d_quantization": False,
            "stochastic_rounding": True,
            "row_scaled_nvfp4": False,
            "nvfp4_use_4over6": False,
            "nvfp4_e4m3_max": 448,
            "nvfp4_4over6_err_mode": "MAE",
        },
        NVFP4Quantizer(with_rht=True, stochastic_rounding=True),
    ),
    "IdentityQuantizer": ({"dtype": None}, IdentityQuantizer()),
}


def te_quantizer(kind: str):
    return te_object(kind, "transformer_engine.pytorch.quantization", **TE_QUANTIZERS[kind][0])


@pytest.mark.parametrize("kind", TE_QUANTIZERS)
def test_a_foreign_factory_may_return_foreign_quantizers(kind: str) -> None:
    seen = []

    def factory(role):
        seen.append((role.module_type, role.tensor_type, role.name))
        return te_quantizer(kind)

    recipe = as_recipe(te_recipe("CustomRecipe", qfactory=factory))
    assert isinstance(recipe, CustomRecipe)
    assert recipe.quantizer(Role("BasicLinear", "weight", "fc1")) is TE_QUANTIZERS[kind][1]
    assert seen == [("linear", "weight", "fc1")]
    assert as_recipe(te_recipe("CustomRecipe", qfactory=factory)) is recipe


def test_a_foreign_request_of_both_formats_gives_gradients_their_own() -> None:
    """A request of HYBRID: E4M3 forward and E5M2 for gradients, as its own state manager does."""
    fields = {**TE_QUANTIZERS["DelayedScalingRequest"][0], "fp8_format": TEFormat.HYBRID}

    def factory(role):
        return te_object("DelayedScalingRequest", "transformer_engine.pytorch.quantization", **fields)

    recipe = as_recipe(te_recipe("CustomRecipe", qfactory=factory))
    assert [recipe.quantizer(role).dtype for role in ROLES] == [E4M3, E4M3, E5M2]


def test_a_foreign_hybrid_quantizer() -> None:
    def factory(role):
        return te_object(
            "HybridQuantizer",
            "transformer_engine.pytorch.tensor.hybrid_tensor",
            rowwise_quantizer=te_quantizer("MXFP8Quantizer"),
            columnwise_quantizer=te_quantizer("Float8BlockQuantizer"),
            columnwise_source="rowwise_dequantized",
        )

    assert as_recipe(te_recipe("CustomRecipe", qfactory=factory)).quantizer(WEIGHT) is HybridQuantizer(
        rowwise_quantizer=TE_QUANTIZERS["MXFP8Quantizer"][1],
        columnwise_quantizer=TE_QUANTIZERS["Float8BlockQuantizer"][1],
        columnwise_source="rowwise_dequantized",
    )


def unknown_foreign_quantizer(role):
    return te_object("SomeQuantizer", "transformer_engine.pytorch.quantization")


def foreign_quantizer_of_float32(role):
    fields = {"dtype": TEDType.kFloat32, "amax_epsilon": 0.0, "force_pow_2_scales": False}
    return te_object("Float8CurrentScalingQuantizer", "transformer_engine.pytorch.quantization", **fields)


def test_what_is_no_recipe() -> None:
    wrong = [
        "delayed",
        1,
        object(),
        DelayedScaling,
        {"margin": 0},
        te_object("DelayedScaling", "some_engine.common.recipe", margin=0),
        te_object("SomeRecipe", margin=0),
    ]
    for value in wrong:
        with pytest.raises(TypeError, match=r"recipe: expected None or a recipe of .*, got"):
            as_recipe(value)
    with pytest.raises(TypeError, match="SomeQuantizer"):
        as_recipe(te_recipe("CustomRecipe", qfactory=unknown_foreign_quantizer)).quantizer(WEIGHT)
    with pytest.raises(ValueError, match=r"quantizer: expected an element type among .*, got kFloat32"):
        as_recipe(te_recipe("CustomRecipe", qfactory=foreign_quantizer_of_float32)).quantizer(WEIGHT)


def test_foreign_recipes_go_where_recipes_go() -> None:
    foreign, own = te_recipe("DelayedScaling", amax_history_len=4), DelayedScaling(amax_history_len=4)
    block = fte.BasicLinear(8, 8)
    params, x = fte.init(block), torch.randn(3, 8)
    state = fte.init_state(block, foreign)
    expected = fte.apply(block, params, x, recipe=own, state=fte.init_state(block, own))
    found = fte.apply(block, params, x, recipe=foreign, state=state)
    assert torch.equal(found.output, expected.output)
    assert torch.equal(bridge.apply(block, params, x, recipe=foreign, state=state)[0], expected.output)
    assert fte.update_state(block, foreign, found.state)[0]["input"].scale != 1
    assert fte.plan(block, recipe=foreign) is fte.plan(block, recipe=own)
    with bridge.autocast(recipe=foreign):
        assert active_recipe() is own
