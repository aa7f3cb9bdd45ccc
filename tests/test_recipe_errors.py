"""What recipes refuse: before any kernel runs, and by name."""

import dataclasses

import pytest
import torch

import bridge
import functional_te as fte
from bridge import ops
from bridge.recipe_context import active_recipe
from functional_te import pytree
from functional_te.quantization import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8DelayedScalingQuantizer,
    HybridQuantizer,
    IdentityQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    make_key,
)
from functional_te.recipes import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)
from tests.every_recipe import QUANTIZERS, VARIANTS, WHOLE, a_state, quantizer_of
from tests.helpers import assert_same, recorded_kernels, unchanged, uniform

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
MX, NV = MXFP8Quantizer(dtype=E4M3), NVFP4Quantizer()
CURRENT = Float8CurrentScalingQuantizer(dtype=E4M3)
RUNNING = {"apply": fte.apply, "vjp": fte.vjp, "bridge": bridge.apply}
every_entry = pytest.mark.parametrize("entry", RUNNING)


def refused(error, parts, function, *args, **options) -> None:
    """A call raises with every part in its message, runs no kernel and writes to nothing it was given."""
    watched = [t for t in pytree.leaves((args, options)) if isinstance(t, torch.Tensor)]
    with unchanged(watched), recorded_kernels() as kernels, pytest.raises(error) as caught:
        function(*args, **options)
    assert set(kernels) <= {"aten.t.default"}  # a view, for the shape of a columnwise copy
    for part in parts:
        assert part in str(caught.value)


# ---- features that no block divides ------------------------------------------------------------------------------


def sixteens_for_gradients(role):
    return NV if role.is_gradient else CURRENT


def two_multiples(role):
    """The larger multiple of the two copies counts."""
    if role.tensor != "input":
        return CURRENT
    return HybridQuantizer(rowwise_quantizer=NV, columnwise_quantizer=MX)


INDIVISIBLE = {
    "mxfp8 in": (MXFP8BlockScaling(), (48, 32), ("in_features", "multiple of 32", "MXFP8Quantizer", "got 48")),
    "mxfp8 out": (MXFP8BlockScaling(), (64, 40), ("out_features", "multiple of 32", "MXFP8Quantizer", "got 40")),
    "mxfp8 2-D": (MXFP8BlockScaling(enable_2d_quantization=True), (64, 40), ("out_features", "multiple of 32", "40")),
    "nvfp4 in": (NVFP4BlockScaling(), (24, 32), ("in_features", "multiple of 16", "NVFP4Quantizer", "got 24")),
    "nvfp4 out": (NVFP4BlockScaling(), (32, 8), ("out_features", "multiple of 16", "NVFP4Quantizer", "got 8")),
    "nvfp4 override": (
        NVFP4BlockScaling(backward_override="dequantized"),
        (32, 8),
        ("out_features", "cast the weight", "multiple of 16", "8"),
    ),
    "custom gradient": (
        CustomRecipe(qfactory=sixteens_for_gradients),
        (24, 8),
        ("out_features", "cast the grad_output", "multiple of 16", "got 8"),
    ),
    "custom copies": (CustomRecipe(qfactory=two_multiples), (48, 8), ("in_features", "multiple of 32", "got 48")),
}


@every_entry
@pytest.mark.parametrize("case", INDIVISIBLE)
def test_features_that_no_block_divides(entry: str, case: str) -> None:
    """One rule per recipe, for all operands of forward and backward, whatever needs a gradient."""
    recipe, (first, second), parts = INDIVISIBLE[case]
    block = fte.chain(fte.GELU(), fte.Linear(first, second))
    params, x, parts = fte.init(block), torch.ones(3, first), ("op 1 (BasicLinear): ", *parts)
    refused(ValueError, parts, RUNNING[entry], block, params, x, recipe=recipe)
    refused(ValueError, parts, fte.init_state, block, recipe)
    refused(ValueError, parts, fte.quantize_params, block, params, recipe)
    refused(ValueError, parts, fte.plan, block, recipe=recipe, requires_grad=False)


def test_the_op_is_named() -> None:
    block = fte.chain(fte.GELU(), fte.BasicLinear(32, 32), fte.BasicLinear(32, 48, name="out"))
    with pytest.raises(
        ValueError, match=r"op 2 \(BasicLinear 'out'\): out_features: expected a multiple of 32 .* got 48"
    ):
        fte.plan(block, recipe=MXFP8BlockScaling())


@pytest.mark.parametrize(
    "recipe",
    [DelayedScaling(), Float8CurrentScaling(), Float8BlockScaling(), CustomRecipe(qfactory=sixteens_for_gradients)],
)
def test_features_that_other_recipes_take(recipe) -> None:
    """Per-tensor scales need no blocks, and blocks of 128 may be partial."""
    block = fte.BasicLinear(7, 16)
    params, x = fte.init(block), torch.randn(5, 7)
    result, pullback = fte.vjp(block, params, x, recipe=recipe, state=fte.init_state(block, recipe))
    grads = pullback(torch.randn(5, 16))
    assert all(torch.isfinite(t).all() for t in (result.output, grads.input, grads.params[0]["weight"]))


@pytest.mark.parametrize(
    ("quantizer", "multiple"),
    [
        (MX, 32),
        (MXFP8Quantizer(dtype=E5M2, with_2d_quantization=True), 32),
        (NV, 16),
        (NVFP4Quantizer(with_rht=True, rowwise=False, columnwise=True), 16),
        (HybridQuantizer(rowwise_quantizer=NV, columnwise_quantizer=MX, columnwise=True), 32),
    ],
    ids=lambda value: type(value).__name__,
)
def test_quantize_refuses_them_too(quantizer, multiple: int) -> None:
    for shape in ((4, multiple + 8), (multiple, multiple // 2), (1,), ()):
        wanted = ("quantize: x", f"multiple of {multiple}", type(quantizer).__name__, f"got shape {shape}")
        refused(ValueError, wanted, fte.quantize, torch.ones(shape), quantizer)
    assert fte.quantize(torch.ones(3, 2 * multiple), quantizer).shape[-1] == 2 * multiple


def test_a_module_of_indivisible_size_is_refused_when_it_runs() -> None:
    model = ops.Linear(24, 24, bias=False)
    x = torch.randn(4, 24)
    wanted = r"op 0 \(BasicLinear\): in_features: .* multiple of 32"
    with pytest.raises(ValueError, match=wanted), bridge.autocast(recipe=MXFP8BlockScaling()):
        model(x)
    assert active_recipe() is None
    torch.testing.assert_close(model(x), x @ model.weight.T)
    with bridge.autocast(recipe=Float8CurrentScaling()):
        model(x).sum().backward()


def test_a_module_of_indivisible_size_that_does_not_run_is_nobodys_business() -> None:
    """A head in high precision, another model in the same process."""
    head, body = ops.Linear(24, 10), ops.Linear(32, 32)
    for recipe in (MXFP8BlockScaling(), NVFP4BlockScaling()):
        with bridge.autocast(recipe=recipe):
            body(torch.randn(4, 32)).sum().backward()
            with bridge.autocast(enabled=False):
                head(torch.randn(4, 24))
        with bridge.autocast(recipe=recipe, cache_weights=True):
            body(torch.randn(4, 32)).sum().backward()
    del head


def test_a_context_that_could_not_be_entered_is_not_open() -> None:
    def no_weight(role):
        return None if role.tensor == "weight" else CURRENT

    model, context = ops.Linear(32, 32), bridge.autocast(recipe=CustomRecipe(qfactory=no_weight))
    for _ in range(2):
        with pytest.raises(ValueError, match="CustomRecipe: qfactory: expected a quantizer"), context:
            model(torch.randn(4, 32))
        assert active_recipe() is None


# ---- custom recipes that give nothing usable ---------------------------------------------------------------------


def nothing(role):
    return None


def no_gradient(role):
    return None if role.is_gradient else CURRENT


def a_string(role):
    return "MXFP8" if role.tensor == "weight" else CURRENT


def a_class(role):
    return Float8CurrentScalingQuantizer


def raises(role):
    raise KeyError(role.tensor)


@every_entry
@pytest.mark.parametrize(
    ("qfactory", "error", "parts"),
    [
        (nothing, ValueError, ("CustomRecipe: qfactory", "IdentityQuantizer()", "None for Role(", "'input'")),
        (no_gradient, ValueError, ("CustomRecipe: qfactory", "None for Role(", "op='BasicLinear'", "'grad_output'")),
        (a_string, TypeError, ("CustomRecipe: qfactory", "a quantizer", "str for Role(", "'weight'")),
        (a_class, TypeError, ("CustomRecipe: qfactory", "a quantizer", "for Role(", "'input'")),
        (raises, KeyError, ("input",)),
    ],
)
def test_factories_that_give_no_quantizer(entry: str, qfactory, error, parts) -> None:
    block = fte.chain(fte.GELU(), fte.BasicLinear(32, 32))
    params, recipe = fte.init(block), CustomRecipe(qfactory=qfactory)
    refused(error, parts, RUNNING[entry], block, params, torch.ones(2, 32), recipe=recipe)
    refused(error, parts, fte.init_state, block, recipe)


def delayed_input(role):
    return Float8DelayedScalingQuantizer(dtype=E4M3) if role.tensor == "input" else CURRENT


def test_delayed_quantizers_and_overrides() -> None:
    recipe = CustomRecipe(qfactory=delayed_input, backward_override="high_precision")
    parts = ("CustomRecipe: backward_override", "None with delayed scaling", "high_precision")
    refused(ValueError, parts, fte.plan, fte.BasicLinear(32, 32), recipe=recipe)


# ---- states that do not fit --------------------------------------------------------------------------------------

LINEAR = fte.BasicLinear(32, 32)
PARAMS, X = fte.init(LINEAR), uniform((3, 32))
KEY, ZERO = make_key(0), torch.zeros(1)


def delayed_state(length=4):
    return fte.init_state(LINEAR, DelayedScaling(amax_history_len=length))


def random_state(key=KEY, amax_history=ZERO):
    return ({"grad_output": fte.StochasticRoundingState(key=key, amax_history=amax_history)},)


HERE = "op 0 (BasicLinear)"
DELAYED, NVFP4 = DelayedScaling(amax_history_len=4), NVFP4BlockScaling()
STATES = {
    "nvfp4: none": (NVFP4, None, ValueError, ("chain: state", "the state of NVFP4BlockScaling", "None")),
    "nvfp4: of another chain": (NVFP4, ({}, {}), ValueError, ("chain: state", "1 entries", "2 entries")),
    "nvfp4: of a stateless recipe": (NVFP4, ({},), ValueError, (HERE, "['grad_output']", "NVFP4BlockScaling", "[]")),
    "nvfp4: of delayed scaling": (NVFP4, delayed_state(), ValueError, (HERE, "['grad_output']", "'input'")),
    "nvfp4: a delayed gradient": (
        NVFP4,
        ({"grad_output": delayed_state()[0]["grad_output"]},),
        TypeError,
        (HERE, "state['grad_output']", "a StochasticRoundingState", "DelayedScalingState"),
    ),
    "nvfp4: no key": (NVFP4, random_state(key=None), TypeError, (HERE, "state['grad_output'].key", "a tensor")),
    "nvfp4: a short key": (NVFP4, random_state(KEY[:1].clone()), ValueError, (HERE, ".key", "length 2", "got 1")),
    "nvfp4: a number": (NVFP4, random_state(torch.tensor(3)), ValueError, (HERE, ".key", "length 2", "shape ()")),
    "nvfp4: a float key": (NVFP4, random_state(KEY.float()), TypeError, (HERE, ".key", "int64", "float32")),
    "nvfp4: a part of a buffer": (
        NVFP4,
        random_state(torch.zeros(8, dtype=torch.int64)[2:4]),
        ValueError,
        (HERE, ".key", "a tensor of its own", "a view"),
    ),
    "nvfp4: a long history": (
        NVFP4,
        random_state(amax_history=torch.zeros(4)),
        ValueError,
        (HERE, ".amax_history", "length 1", "got 4"),
    ),
    "delayed: of nvfp4": (DELAYED, random_state(), ValueError, (HERE, "'input'", "DelayedScaling", "['grad_output']")),
    "delayed: a key": (
        DELAYED,
        ({**delayed_state()[0], **random_state()[0]},),
        TypeError,
        (HERE, "state['grad_output']", "a DelayedScalingState", "StochasticRoundingState"),
    ),
    "delayed: of another length": (DELAYED, delayed_state(5), ValueError, (HERE, "amax_history", "length 4", "got 5")),
    "block: of delayed scaling": (
        Float8BlockScaling(),
        delayed_state(),
        ValueError,
        (HERE, "state", "Float8BlockScaling", "'input'"),
    ),
    "override: with a key": (
        NVFP4BlockScaling(backward_override="dequantized"),
        random_state(),
        ValueError,
        (HERE, "state", "[]", "['grad_output']"),
    ),
    "nearest: with a key": (
        NVFP4BlockScaling(disable_stochastic_rounding=True),
        random_state(),
        ValueError,
        (HERE, "state", "NVFP4BlockScaling", "['grad_output']"),
    ),
    "custom: all of delayed scaling": (
        CustomRecipe(qfactory=delayed_input),
        fte.init_state(LINEAR, DelayedScaling()),
        ValueError,
        (HERE, "['input']", "CustomRecipe", "'weight'"),
    ),
}


@every_entry
@pytest.mark.parametrize("case", STATES)
def test_states_that_do_not_fit(entry: str, case: str) -> None:
    recipe, state, error, parts = STATES[case]
    refused(error, parts, RUNNING[entry], LINEAR, PARAMS, X, recipe=recipe, state=state)
    refused(error, parts, fte.update_state, LINEAR, recipe, state)


@pytest.mark.parametrize("case", [case for case in STATES if case != "nvfp4: none"])
def test_states_that_do_not_fit_quantize_params(case: str) -> None:
    """None is enough where casting weights needs no state."""
    recipe, state, error, parts = STATES[case]
    refused(error, parts, fte.quantize_params, LINEAR, PARAMS, recipe, state=state)


def test_quantize_and_states() -> None:
    random = NVFP4Quantizer(stochastic_rounding=True)
    refused(ValueError, ("quantize: state", "the state of NVFP4Quantizer", "None"), fte.quantize, X, random)
    for quantizer in (CURRENT, MX, NV, Float8BlockQuantizer(dtype=E4M3)):
        refused(
            ValueError, ("quantize: state", "None for a quantizer without"), fte.quantize, X, quantizer, random_state()
        )
    without = dataclasses.replace(MX, rowwise=False)
    refused(ValueError, ("quantize: quantizer", "a rowwise or a columnwise copy", "none"), fte.quantize, X, without)
    refused(
        TypeError, ("quantize: quantizer", "a Quantizer", "IdentityQuantizer"), fte.quantize, X, IdentityQuantizer()
    )


def test_quantize_refuses_the_state_of_another_quantizer() -> None:
    random, delayed = NVFP4Quantizer(stochastic_rounding=True), Float8DelayedScalingQuantizer(dtype=E4M3)
    for quantizer, state in ((random, a_state(delayed)), (delayed, a_state(random)), (delayed, 3)):
        with pytest.raises((TypeError, ValueError), match="quantize: state"):
            fte.quantize(X, quantizer, state)


# ---- dtypes and kinds of values ----------------------------------------------------------------------------------

STATELESS = {n: WHOLE[n] for n in ("current", "block", "mxfp8", "mixed")} | {"nvfp4": VARIANTS["nvfp4 to nearest"]}


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.bool, torch.complex64, E4M3, torch.uint8], ids=str)
def test_dtypes_that_are_refused(dtype) -> None:
    x = torch.zeros(3, 32).to(dtype)
    for recipe in WHOLE.values():
        state = fte.init_state(LINEAR, recipe)
        for entry in RUNNING.values():
            refused(
                TypeError, (HERE, "input", "float32", str(dtype)), entry, LINEAR, PARAMS, x, recipe=recipe, state=state
            )
            weight = ({"weight": torch.zeros(32, 32).to(dtype)},)
            refused(
                TypeError, (HERE, "weight", "float32", str(dtype)), entry, LINEAR, weight, X, recipe=recipe, state=state
            )
        _, pullback = fte.vjp(LINEAR, PARAMS, X, recipe=recipe, state=state)
        refused(TypeError, ("pullback: grad_output", "float32", str(dtype)), pullback, x)
    for quantizer in QUANTIZERS.values():
        state = a_state(quantizer) if quantizer.stateful else None
        refused(TypeError, ("quantize: x", "float32", str(dtype)), fte.quantize, x, quantizer, state)


@pytest.mark.parametrize("name", STATELESS)
def test_quantized_operands_without_the_copy_that_is_read(name) -> None:
    recipe = STATELESS[name]
    for role, params, x in (("input", PARAMS, X), ("weight", PARAMS, X)):
        quantizer = quantizer_of(recipe, role)
        value = x if role == "input" else params[0]["weight"]
        for rowwise, columnwise in ((True, False), (False, True)):
            q = fte.quantize(value, quantizer.with_usage(rowwise, columnwise))
            arguments = (PARAMS, q) if role == "input" else (({"weight": q},), X)
            missing = "columnwise" if rowwise else "rowwise"
            if quantizer.transposable:
                fte.vjp(LINEAR, *arguments, recipe=recipe)
                continue
            parts = (HERE, role, f"a quantized tensor with a {missing} copy", type(quantizer).__name__, "requantize()")
            for entry in ("vjp", "bridge") if rowwise else RUNNING:
                given = arguments
                if entry == "bridge":  # asks for the gradients that the tensors need
                    own = ({"weight": PARAMS[0]["weight"].clone().requires_grad_()},)
                    given = (own, q) if role == "input" else (({"weight": q},), X.clone().requires_grad_())
                refused(ValueError, parts, RUNNING[entry], LINEAR, *given, recipe=recipe)
            if rowwise:  # what has no backward needs no second copy
                fte.apply(LINEAR, *arguments, recipe=recipe)
                fte.vjp(LINEAR, *arguments, recipe=recipe, requires_grad=(role == "input", ((role == "weight",),), ()))


def test_a_cached_weight_without_the_copy_that_is_read() -> None:
    weight = PARAMS[0]["weight"]
    q = fte.quantize(weight, MX)
    given = ({"weight": fte.CachedWeight(value=weight, quantized=q)},)
    parts = (HERE, "weight", "a columnwise copy", "MXFP8Quantizer")
    refused(ValueError, parts, fte.vjp, LINEAR, given, X, recipe=MXFP8BlockScaling())
    assert_same(
        fte.apply(LINEAR, given, X, recipe=MXFP8BlockScaling()).output,
        fte.apply(LINEAR, PARAMS, X, recipe=MXFP8BlockScaling()).output,
    )


def test_a_weight_that_was_cast_for_another_recipe() -> None:
    block = fte.BasicLinear(64, 32)
    params, x = fte.init(block), torch.randn(4, 64)
    cast = fte.quantize_params(block, params, NVFP4BlockScaling())
    wanted = r"op 0 \(BasicLinear\): weight: expected a cast by MXFP8Quantizer\(.*got NVFP4Quantizer\(.*quantize_params"
    with pytest.raises(ValueError, match=wanted):
        fte.apply(block, cast.params, x, recipe=MXFP8BlockScaling())
    with pytest.raises(ValueError, match=wanted):
        bridge.apply(block, cast.params, x, recipe=MXFP8BlockScaling())
    torch.testing.assert_close(fte.apply(block, cast.params, x).output, x @ params[0]["weight"].T)


@pytest.mark.parametrize("tensor", ["foo", "", None, "Weight"])
def test_unknown_roles(tensor) -> None:
    with pytest.raises(ValueError, match=r"Role: tensor: expected one of \('input', 'weight'"):
        fte.recipes.Role("BasicLinear", tensor)
