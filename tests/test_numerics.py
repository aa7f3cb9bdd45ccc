"""The numerics view against formulas in numpy, and that it sees the casts that happen."""

import copy
import dataclasses
import html
import json
import math
import pickle
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import functional_te as fte
from functional_te import pytree
from functional_te.kernels import registry as backends
from functional_te.numerics import Numerics, TensorNumerics
from functional_te.quantization.hadamard import SIGNS
from functional_te.recipes import (
    RECIPES,
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)
from tests.helpers import CURRENT, DELAYED, assert_same, require_grad, unchanged

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
ROLES = ("input", "weight", "grad_output")
every_recipe = pytest.mark.parametrize("kind", RECIPES)


def spread(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values over ten decades, some of them zero, so that small ones vanish in every format."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * torch.exp(4 * torch.randn(shape, generator=generator) - 3)
    return (x * (torch.rand(shape, generator=generator) > 0.1)).to(dtype)


# --------------------------------------------------------------------------- oracle: one cast, in numpy, tile by tile


def fp8(x: np.ndarray, scale: np.float32, kind: type) -> np.ndarray:
    limit = np.float32(ml_dtypes.finfo(kind).max)
    return np.clip(x * scale, -limit, limit).astype(kind).astype(np.float64)


def per_tensor(x: np.ndarray, kind: type, scale: float | None = None) -> tuple[np.ndarray, np.ndarray]:
    if scale is None:
        scale = np.float32(ml_dtypes.finfo(kind).max) / np.abs(x).max()
    return fp8(x, np.float32(scale), kind) / float(scale), np.full(x.shape, 1 / float(scale))


def tiles(shape: tuple[int, int], tile: tuple[int, int]):
    for i in range(0, shape[0], tile[0]):
        for j in range(0, shape[1], tile[1]):
            yield slice(i, i + tile[0]), slice(j, j + tile[1])


def blockwise(x: np.ndarray, tile: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Scales are powers of two, the largest that do not saturate."""
    values, factor = np.empty(x.shape), np.empty(x.shape)
    for place in tiles(x.shape, tile):
        amax = np.abs(x[place]).max()
        scale = 2.0 ** math.floor(math.log2(448 / amax)) if amax > 0 else 1.0
        values[place], factor[place] = fp8(x[place], np.float32(scale), ml_dtypes.float8_e4m3fn) / scale, 1 / scale
    return values, factor


def microscaled(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    values, factor = np.empty(x.shape), np.empty(x.shape)
    for place in tiles(x.shape, (1, 32)):
        amax = float(np.abs(x[place]).max())
        exponent = max(math.ceil(math.log2(amax / 448)), -127) if amax > 0 else -127
        factor[place] = 2.0**exponent
        values[place] = fp8(x[place], np.float32(2.0**-exponent), ml_dtypes.float8_e4m3fn) * 2.0**exponent
    return values, factor


def fp4(x: np.ndarray, tile: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    amax, values, factor = float(np.abs(x).max()), np.empty(x.shape), np.empty(x.shape)
    whole = amax / (448 * 6)
    for place in tiles(x.shape, tile):
        block = np.float32(min(float(np.abs(x[place]).max()) / 6 / whole, 448)).astype(ml_dtypes.float8_e4m3fn)
        factor[place] = own = float(block) * whole
        scaled = np.clip(x[place].astype(np.float64) / own, -6, 6) if own else np.zeros_like(x[place])
        values[place] = scaled.astype(ml_dtypes.float4_e2m1fn).astype(np.float64) * own
    return values, factor


def measures(x: np.ndarray, values: np.ndarray, factor: np.ndarray, limit: float) -> dict[str, float]:
    """The definitions, for one copy."""
    exact, noise = x.astype(np.float64), x.astype(np.float64) - values
    used = factor[factor > 0]
    return {
        "amax": float(np.abs(x).max()),
        "scale_min": float((1 / used).min()),
        "scale_max": float((1 / used).max()),
        "saturated": float((np.abs(exact) > 1.000001 * limit * factor)[factor > 0].sum() / x.size),
        "underflow": float(((values == 0) & (exact != 0)).sum() / (exact != 0).sum()),
        "snr_db": 10 * math.log10((exact**2).sum() / (noise**2).sum()),
    }


def check_entry(entry: TensorNumerics, expected: dict[str, float]) -> None:
    for name, value in expected.items():
        got = getattr(entry, name)
        assert got.dtype is torch.float32
        assert got.shape == ()
        if name == "amax":
            assert got.item() == value
        elif name == "snr_db":
            assert got.item() == pytest.approx(value, abs=2e-3)
        else:
            assert got.item() == pytest.approx(value, rel=1e-6, abs=1e-9), name


def expected_copies(recipe, role: str, x: np.ndarray, scale: float = 1.0) -> dict[str, dict[str, float]]:
    """The measures of every copy that a linear needs in training."""
    kind = ml_dtypes.float8_e5m2 if role == "grad_output" else ml_dtypes.float8_e4m3fn
    limit = float(ml_dtypes.finfo(kind).max)
    match recipe:
        case Float8CurrentScaling():
            return {"rowwise": measures(x, *per_tensor(x, kind), limit)}
        case DelayedScaling():
            return {"rowwise": measures(x, *per_tensor(x, kind, scale), limit)}
        case Float8BlockScaling():
            if role == "weight":
                return {"rowwise": measures(x, *blockwise(x, (128, 128)), 448.0)}
            copies = {"rowwise": (x, blockwise(x, (1, 128))), "columnwise": (x.T, blockwise(x.T, (1, 128)))}
            return {name: measures(source, *cast, 448.0) for name, (source, cast) in copies.items()}
        case MXFP8BlockScaling():
            copies = {"rowwise": (x, microscaled(x)), "columnwise": (x.T, microscaled(x.T))}
            return {name: measures(source, *cast, 448.0) for name, (source, cast) in copies.items()}
        case NVFP4BlockScaling():
            if role == "weight":
                return {"rowwise": measures(x, *fp4(x, (16, 16)), 6.0)}
            copies = {"rowwise": (x, fp4(x, (1, 16))), "columnwise": (x.T, fp4(x.T, (1, 16)))}
            return {name: measures(source, *cast, 6.0) for name, (source, cast) in copies.items()}
    raise NotImplementedError(recipe)


NVFP4_PLAIN = NVFP4BlockScaling(disable_rht=True, disable_stochastic_rounding=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "recipe",
    [CURRENT, DELAYED, Float8BlockScaling(), MXFP8BlockScaling(), NVFP4_PLAIN],
    ids=lambda recipe: type(recipe).__name__,
)
def test_every_measure_of_one_linear(recipe, dtype) -> None:
    """168 tokens and 160 features: blocks at the edges are partial, and NVFP4 pads tokens."""
    block = fte.chain(fte.BasicLinear(160, 32))
    tensors = {"input": spread((168, 160), 1, dtype), "weight": spread((32, 160), 2, dtype)}
    tensors["grad_output"] = spread((168, 32), 3, dtype) * 1e-3
    for tensor in tensors.values():  # an amax with the factor 131: no quotient by it is halfway between two E4M3
        tensor[0, 0] = 131 * 2.0 ** math.ceil(math.log2(tensor.abs().max() / 131))
    state, scales = fte.init_state(block, recipe), dict.fromkeys(ROLES, 1.0)
    if recipe is DELAYED:  # inputs that saturate, weights that vanish
        scales = {"input": 64.0, "weight": 0.125, "grad_output": 1.0}
        state = ({r: pytree.replace(s, scale=torch.full((1,), scales[r])) for r, s in state[0].items()},)
    found = fte.numerics(
        block,
        ({"weight": tensors["weight"]},),
        tensors["input"],
        recipe=recipe,
        state=state,
        grad_output=tensors["grad_output"],
    )
    expected = {role: expected_copies(recipe, role, t.float().numpy(), scales[role]) for role, t in tensors.items()}
    assert [(e.index, e.role, e.copy) for e in found] == [(0, r, c) for r, copies in expected.items() for c in copies]
    for entry in found:
        check_entry(entry, expected[entry.role][entry.copy])
    assert max(entry.underflow.item() for entry in found) > 0.05
    if recipe in (DELAYED, NVFP4_PLAIN):
        assert max(entry.saturated.item() for entry in found) > 0.005


def test_a_rotated_copy() -> None:
    """Scales and shares are of the rotated elements, SNR is of the tensor."""
    recipe, block = NVFP4BlockScaling(disable_stochastic_rounding=True), fte.BasicLinear(64, 32)
    params, x = fte.init(block), spread((40, 64), 4)  # padded to 48 tokens
    matrix = np.array([[1.0]])
    for _ in range(4):
        matrix = np.kron([[1, 1], [1, -1]], matrix)
    matrix = np.diag(SIGNS) @ matrix / 4
    groups = np.pad(x.numpy(), ((0, 8), (0, 0))).T.astype(np.float64).reshape(64, 3, 16)
    rotated = (groups @ matrix).reshape(64, 48).astype(np.float32)
    expected = measures(rotated, *fp4(rotated, (1, 16)), 6.0)
    found = fte.numerics(block, params, x, recipe=recipe)[0, "input", "columnwise"]
    assert found.amax == x.abs().max()
    for name in ("scale_min", "scale_max"):
        assert getattr(found, name).item() == pytest.approx(expected[name], rel=1e-6)
    assert found.saturated.item() == pytest.approx(expected["saturated"], abs=2 / rotated.size)
    assert found.underflow.item() == pytest.approx(expected["underflow"], abs=2 / rotated.size)
    assert found.saturated.item() > 0.01
    assert found.underflow.item() > 0.01

    x = torch.randn(5, 64)  # most of the noise of the rotated elements falls on tokens that are padding
    back = fte.quantize(x, found.quantizer.with_usage(False, True)).dequantize()[:5]
    noise = (x.double() - back.double()).square().sum().item()
    found = fte.numerics(block, params, x, recipe=recipe)[0, "input", "columnwise"]
    assert found.snr_db.item() == pytest.approx(10 * math.log10(x.double().square().sum().item() / noise), abs=1e-3)


# ------------------------------------------------------------------------------------------ constructed data


def one(recipe, x: torch.Tensor, scale: float | None = None) -> TensorNumerics:
    """The rowwise entry of the input of a square linear."""
    block = fte.BasicLinear(x.shape[-1], 32)
    state = fte.init_state(block, recipe)
    if scale is not None:
        state = ({r: pytree.replace(s, scale=torch.full((1,), scale)) for r, s in state[0].items()},)
    return fte.numerics(block, fte.init(block), x, recipe=recipe, state=state, grad_output=False)[0, "input", "rowwise"]


def test_saturated_and_underflow_by_construction() -> None:
    x = torch.full((4, 32), 100.0)
    x[0, :8] = torch.tensor([448.0, 449.0, -1e6, math.inf, -math.inf, 0.0, 1e-4, -1e-9])
    entry = one(DELAYED, x, 1.0)
    assert entry.saturated.item() == pytest.approx(4 / 128)
    assert entry.underflow.item() == pytest.approx(2 / 127)
    assert math.isnan(entry.snr_db)
    assert math.isinf(entry.amax)
    entry = one(DELAYED, x, 0.25)
    assert (entry.scale_min, entry.scale_max) == (0.25, 0.25)
    assert entry.saturated.item() == pytest.approx(3 / 128)


@pytest.mark.parametrize(
    "recipe",
    [CURRENT, Float8BlockScaling(), Float8BlockScaling(use_f32_scales=True), MXFP8BlockScaling()],
    ids=["current", "block", "block float32", "mxfp8"],
)
def test_nothing_saturates_where_the_scale_is_of_the_block(recipe) -> None:
    """Whatever the amax: rounding of scales is no saturation."""
    for seed in range(8):
        assert one(recipe, spread((32, 128), seed)).saturated == 0


def test_exact_casts_have_infinite_snr() -> None:
    x = torch.tensor([448.0, 1.0, -0.5, 2.0**-6]).repeat(2, 8)
    for recipe in (CURRENT, MXFP8BlockScaling(), Float8BlockScaling()):
        entry = one(recipe, x)
        assert entry.snr_db == math.inf
        assert entry.underflow == 0


def test_a_scale_that_overflows() -> None:
    """448 / 1e-37 is no float32, and 1 / scale_inv would be none either, by rounding."""
    entry = one(CURRENT, torch.full((4, 32), 1e-37))
    assert entry.scale_min == entry.scale_max == torch.finfo(torch.float32).max
    assert entry.saturated == 0


@every_recipe
def test_zeros_nothing_and_nan(kind) -> None:
    recipe = kind()
    entry = one(recipe, torch.zeros(4, 32))
    assert (entry.amax, entry.saturated, entry.underflow, entry.snr_db) == (0, 0, 0, math.inf)
    entry = one(recipe, torch.zeros(0, 32))
    assert (entry.amax, entry.saturated, entry.underflow, entry.snr_db) == (0, 0, 0, math.inf)
    assert entry.scale_min == 1 if kind is DelayedScaling else math.isnan(entry.scale_min)
    x = torch.ones(4, 32)
    x[1, 2] = math.nan
    entry = one(recipe, x)
    assert math.isnan(entry.amax)
    assert math.isnan(entry.snr_db)
    assert entry.saturated == 0


@every_recipe
def test_a_batch_of_nothing(kind) -> None:
    """Forward, backward and table."""
    block = fte.chain(fte.RMSNorm(32), fte.Linear(32, 32), fte.GELU(), fte.Linear(32, 32))
    recipe = kind()
    found = fte.numerics(block, fte.init(block), torch.zeros(0, 32), recipe=recipe, state=fte.init_state(block, recipe))
    assert {(e.index, e.role) for e in found} == {(i, role) for i in (1, 4) for role in ROLES}
    assert len(str(found).splitlines()) == len(found) + 2
    assert all(entry.underflow == 0 for entry in found if entry.role != "weight")


# ----------------------------------------------------------------------------------- the casts that happen


FORK, ADD = fte.MakeExtraOutput(channel="skip", output_to_caller=False), fte.AddExtraInput(channel="skip")
BLOCK = fte.chain(
    FORK,
    fte.Linear(32, 64, name="first"),
    fte.GELU(cache_quantized_input=True),
    fte.Linear(64, 32, name="second"),
    ADD,
    fte.MakeExtraOutput(),
    fte.RMSNorm(32),
    fte.Linear(32, 64, bias=False, name="third"),
    fte.SwiGLU(),
    fte.BasicLinear(32, 32),
)
LINEARS = [i for i, op in enumerate(BLOCK.ops) if isinstance(op, fte.BasicLinear)]
FUSIONS = [None, fte.Fusions()]


def inputs(dtype: torch.dtype = torch.float32) -> tuple:
    return fte.init(BLOCK, dtype=dtype), spread((4, 8, 32), 5, dtype).clamp(-2, 2)


class Float8Casts(TorchDispatchMode):
    """Counts what becomes FP8."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._to_copy.default:
            self.count += kwargs["dtype"] in (E4M3, E5M2)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("fusions", FUSIONS, ids=["fused", "unfused"])
@pytest.mark.parametrize("recipe", [CURRENT, DELAYED, Float8BlockScaling(), MXFP8BlockScaling()], ids=str)
def test_one_entry_for_each_cast_and_copy(recipe, fusions) -> None:
    params, x = inputs()
    state = fte.init_state(BLOCK, recipe)
    with Float8Casts() as casts:
        out, pullback = fte.vjp(BLOCK, params, x, recipe=recipe, state=state, fusions=fusions)
        pullback(out.output)
    found = fte.numerics(BLOCK, params, x, recipe=recipe, state=state, fusions=fusions)
    assert len(found) == casts.count
    assert {(e.index, e.role) for e in found} == {*((i, role) for i in LINEARS for role in ROLES), (3, "cached_input")}
    copies = {(e.role, e.copy) for e in found if e.role != "cached_input"}
    columns = {"input", "weight", "grad_output"} if isinstance(recipe, MXFP8BlockScaling) else {"input", "grad_output"}
    columns = set() if recipe in (CURRENT, DELAYED) else columns
    assert copies == {*((role, "rowwise") for role in ROLES), *((role, "columnwise") for role in columns)}
    for entry in found:
        assert (entry.op, entry.name) == (type(BLOCK.ops[entry.index]).__name__, BLOCK.ops[entry.index].name)
    places = [(e.index, [*ROLES, "cached_input"].index(e.role), e.copy == "columnwise") for e in found]
    assert places == sorted(places)


@pytest.mark.parametrize("fusions", FUSIONS, ids=["fused", "unfused"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_amaxes_are_those_that_the_state_observes(dtype, fusions) -> None:
    params, x = inputs(dtype)
    state = fte.init_state(BLOCK, DELAYED)
    options = {"recipe": DELAYED, "state": state, "fusions": fusions}
    out, pullback = fte.vjp(BLOCK, params, x, **options)
    dy, dextra = spread(out.output.shape, 6, dtype), spread(out.extra_outputs[0].shape, 7, dtype)
    observed = pullback(dy, dextra).state
    with unchanged((params, x, state)):
        found = fte.numerics(BLOCK, params, x, **options, grad_output=(dy, dextra))
    for index in LINEARS:
        for role in ROLES:
            assert found[index, role, "rowwise"].amax == observed[index][role].amax_history[0]
            assert found[index, role, "rowwise"].scale_max == 1
    if dtype is torch.float32:  # so a place that was mistaken for another would have been seen
        assert len({entry.amax.item() for entry in found}) == len(found)

    # without the gradient of the extra output
    observed, found = pullback(dy).state, fte.numerics(BLOCK, params, x, **options, grad_output=dy)
    for index in LINEARS:
        assert found[index, "grad_output", "rowwise"].amax == observed[index]["grad_output"].amax_history[0]


def test_state_with_random_bits() -> None:
    """The amax that stochastic rounding observes; the key is read and stays."""
    recipe = NVFP4BlockScaling()
    params, x = inputs()
    state = fte.init_state(BLOCK, recipe, seed=3)
    out, pullback = fte.vjp(BLOCK, params, x, recipe=recipe, state=state)
    observed = pullback(out.output).state
    with unchanged(state):
        first = fte.numerics(BLOCK, params, x, recipe=recipe, state=state, grad_output=out.output)
    assert_same(first, fte.numerics(BLOCK, params, x, recipe=recipe, state=state, grad_output=out.output))
    for index in LINEARS:
        assert first[index, "grad_output", "rowwise"].amax == observed[index]["grad_output"].amax_history[0]
    other = fte.numerics(
        BLOCK, params, x, recipe=recipe, state=fte.init_state(BLOCK, recipe, seed=4), grad_output=out.output
    )
    last = LINEARS[-1], "grad_output", "rowwise"
    assert first[last].snr_db != other[last].snr_db


def by_name(role: fte.recipes.Role):
    """Another quantizer for every op and tensor."""
    number = ["first", "second", "third", ""].index(role.name) * 3 + ROLES.index(role.tensor)
    return fte.Float8CurrentScalingQuantizer(dtype=E4M3, amax_epsilon=2.0**-number)


@pytest.mark.parametrize("fusions", FUSIONS, ids=["fused", "unfused"])
def test_who_cast_what(fusions) -> None:
    params, x = inputs()
    found = fte.numerics(BLOCK, params, x, recipe=CustomRecipe(qfactory=by_name), fusions=fusions)
    assert len(found) == 3 * len(LINEARS) + 1
    for place, index in enumerate(LINEARS):
        for number, role in enumerate(ROLES):
            assert found[index, role, "rowwise"].quantizer.amax_epsilon == 2.0 ** -(3 * place + number)


def mixed(role: fte.recipes.Role):
    """Four kinds in one chain."""
    if role.name == "first":
        return fte.MXFP8Quantizer(dtype=E4M3)
    if role.name == "second":
        return fte.IdentityQuantizer()
    if role.name == "third":
        return fte.HybridQuantizer(
            rowwise_quantizer=fte.Float8CurrentScalingQuantizer(dtype=E4M3),
            columnwise_quantizer=fte.MXFP8Quantizer(dtype=E5M2),
        )
    return fte.Float8DelayedScalingQuantizer(dtype=E5M2)


def test_mixed_formats() -> None:
    params, x = inputs()
    recipe = CustomRecipe(qfactory=mixed)
    found = fte.numerics(BLOCK, params, x, recipe=recipe, state=fte.init_state(BLOCK, recipe))
    formats = {(e.name, e.copy): (e.format, e.dtype) for e in found if e.role != "cached_input"}
    assert formats == {
        ("first", "rowwise"): ("MXFP8Quantizer", E4M3),
        ("first", "columnwise"): ("MXFP8Quantizer", E4M3),
        ("third", "rowwise"): ("Float8CurrentScalingQuantizer", E4M3),
        ("third", "columnwise"): ("MXFP8Quantizer", E5M2),
        ("", "rowwise"): ("Float8DelayedScalingQuantizer", E5M2),
    }
    third = LINEARS[2]
    assert found[third, "input", "rowwise"].scale_min == found[third, "input", "rowwise"].scale_max
    assert math.log2(found[third, "input", "columnwise"].scale_max) % 1 == 0
    assert found[third, "input", "columnwise"].saturated == 0  # by the limit of E5M2, not of E4M3


class SquareOp(fte.Op):
    """An op of the user's that casts on its own, with a quantizer that is in no recipe."""

    @staticmethod
    def forward_impl(args):
        from functional_te.kernels import kernels
        from functional_te.quantization.tensor import bind

        x, name = args
        held, _ = kernels(name).quantize(x, bind(fte.MXFP8Quantizer(dtype=E5M2), None), x.dtype)
        return held.dequantize() ** 2, held

    @staticmethod
    def backward_impl(args):
        held, grad = args
        return (2 * held.dequantize() * grad,)

    def resolve_fwd_args(self, input_, *, params, state, requires_grad, backend="reference"):
        return input_, backend

    def resolve_bwd_args(self, ctx, grad_output):
        return ctx.saved, grad_output


def test_a_cast_that_no_recipe_asked_for() -> None:
    block = fte.chain(fte.Linear(32, 32), dataclasses.dataclass(frozen=True, eq=False)(SquareOp)())
    found = fte.numerics(block, fte.init(block), spread((8, 32), 1), recipe=CURRENT)
    assert [(e.index, e.role) for e in found] == [*((0, role) for role in ROLES), (2, "other")]
    assert found[2, "other", "rowwise"].dtype is E5M2


# ------------------------------------------------------------------------------------------ the arguments


def test_high_precision_and_what_is_quantized_already() -> None:
    block = fte.chain(fte.Linear(32, 32), fte.GELU(), fte.Linear(32, 32))
    params, x = fte.init(block), spread((8, 32), 1)
    none = fte.numerics(block, params, x, recipe=None)
    assert len(none) == 0
    assert none.rows() == []
    assert str(none) == "no casts"
    assert none._repr_html_() == "<p>no casts</p>"
    with pytest.raises(KeyError):
        none[0]
    cached = fte.quantize_params(block, params, CURRENT).params
    found = fte.numerics(block, cached, x, recipe=CURRENT)
    assert {(e.index, e.role) for e in found} == {(i, role) for i in (0, 3) for role in ("input", "grad_output")}
    full = fte.numerics(block, params, x, recipe=CURRENT)
    assert_same(found[3, "input"], full[3, "input"])
    qx = fte.quantize(x, fte.Float8CurrentScalingQuantizer(dtype=E4M3))
    found = fte.numerics(block, params, qx, recipe=CURRENT)
    assert (0, "input") not in {(e.index, e.role) for e in found}
    assert_same(found[3, "input"], full[3, "input"])


def test_the_gradient() -> None:
    params, x = inputs(torch.float16)
    out = fte.apply(BLOCK, params, x, recipe=CURRENT)
    default = fte.numerics(BLOCK, params, x, recipe=CURRENT)
    dy = (out.output.float() * 2 / out.output.numel()).half()
    assert_same(default, fte.numerics(BLOCK, params, x, recipe=CURRENT, grad_output=dy))
    assert_same(default, fte.numerics(BLOCK, params, x, recipe=CURRENT, grad_output=(None, None)))
    assert default[LINEARS[-1], "grad_output", "rowwise"].amax == dy.abs().max()
    forward = fte.numerics(BLOCK, params, x, recipe=MXFP8BlockScaling(), grad_output=False)
    assert {(e.role, e.copy) for e in forward} == {("input", "rowwise"), ("weight", "rowwise")}


@pytest.mark.parametrize("override", ["high_precision", "dequantized"])
def test_backward_override(override) -> None:
    params, x = inputs()
    found = fte.numerics(BLOCK, params, x, recipe=MXFP8BlockScaling(backward_override=override))
    assert {(e.role, e.copy) for e in found} == {
        ("input", "rowwise"),
        ("weight", "rowwise"),
        ("cached_input", "rowwise"),
    }


def test_options_reach_the_chain() -> None:
    block = fte.chain(fte.AddExtraInput(), fte.Linear(32, 32))
    params, x = fte.init(block), spread((8, 32), 1)
    plain = fte.numerics(block, params, x, x, recipe=CURRENT)
    assert plain[1, "input", "rowwise"].amax == 2 * x.abs().max()
    # under autocast the sum is cast to bfloat16 before it is measured
    low = fte.numerics(block, params, x.bfloat16(), x.bfloat16(), recipe=CURRENT, compute_dtype=torch.bfloat16)
    assert low[1, "grad_output", "rowwise"].amax != plain[1, "grad_output", "rowwise"].amax
    with pytest.raises(ValueError, match="kwargs"):
        fte.numerics(block, params, x, x, recipe=CURRENT, kwargs={1: {"no_such": 1}})
    with pytest.raises(TypeError, match="recipe"):
        fte.numerics(block, params, x, x)  # type: ignore[call-arg]


BAD = {
    "x": lambda p: ((p, torch.ones(4, 31)), {}),
    "params": lambda p: ((p[:-1], torch.ones(4, 32)), {}),
    "extra": lambda p: ((p, torch.ones(4, 32), torch.ones(4, 32)), {}),
    "state": lambda p: ((p, torch.ones(4, 32)), {"recipe": DELAYED}),
    "other state": lambda p: ((p, torch.ones(4, 32)), {"state": ({}, {})}),
    "backend": lambda p: ((p, torch.ones(4, 32)), {"backend": "none such"}),
    "fusions": lambda p: ((p, torch.ones(4, 32)), {"fusions": ()}),
    "recipe": lambda p: ((p, torch.ones(4, 32)), {"recipe": "fp8"}),
    "kwargs": lambda p: ((p, torch.ones(4, 32)), {"kwargs": {99: {}}}),
    "list": lambda p: ((p, [1.0]), {}),
}


@pytest.mark.parametrize("case", BAD)
def test_errors_are_those_of_vjp(case) -> None:
    args, options = BAD[case](fte.init(BLOCK))
    options = {"recipe": CURRENT, **options}
    with pytest.raises((ValueError, TypeError, AttributeError)) as expected:
        fte.vjp(BLOCK, *args, **options)
    with pytest.raises(type(expected.value)) as got:
        fte.numerics(BLOCK, *args, **options)
    assert str(got.value) == str(expected.value)


@pytest.mark.parametrize("grad", [torch.ones(3), torch.ones(4, 8, 32).double(), True, [None], (None, None, None)])
def test_bad_gradients(grad) -> None:
    params, x = inputs()
    with pytest.raises((ValueError, TypeError), match="grad_"):
        fte.numerics(BLOCK, params, x, recipe=CURRENT, grad_output=grad)


# ------------------------------------------------------------------------------------------ nothing stays


@dataclasses.dataclass(frozen=True, eq=False)
class Failing(fte.Op):
    """Fails in one of the passes."""

    backward: bool = False

    @staticmethod
    def forward_impl(args):
        if not args[1]:
            raise RuntimeError("forward failed")
        return args[0].clone(), ()

    @staticmethod
    def backward_impl(args):
        raise RuntimeError("backward failed")

    def resolve_fwd_args(self, input_, *, params, state, requires_grad):
        return input_, self.backward

    def resolve_bwd_args(self, ctx, grad_output):
        return grad_output


@pytest.mark.parametrize("backward", [False, True])
def test_nothing_stays_after_an_exception(backward) -> None:
    block = fte.chain(fte.Linear(32, 32), Failing(backward=backward), fte.Linear(32, 32))
    before = dict(backends._BY_NAME)
    with pytest.raises(RuntimeError, match="backward failed" if backward else "forward failed"):
        fte.numerics(block, fte.init(block), spread((4, 32), 1), recipe=CURRENT)
    assert before == backends._BY_NAME
    assert torch.is_grad_enabled()


def test_plans_are_not_polluted() -> None:
    block = fte.chain(fte.Linear(32, 32), fte.GELU(), fte.Linear(32, 32))
    params, x = fte.init(block), spread((4, 32), 1)
    out, pullback = fte.vjp(block, params, x, recipe=CURRENT)
    grads = pullback(out.output)
    plans, names = dict(block.plans), dict(backends._BY_NAME)
    fte.numerics(block, params, x, recipe=CURRENT)
    assert block.plans == plans
    assert names == backends._BY_NAME
    again, pullback = fte.vjp(block, params, x, recipe=CURRENT)
    assert_same(again.output, out.output)
    assert_same(pullback(again.output).params, grads.params)


def test_an_observed_backend_cannot_be_asked_for() -> None:
    casts = []
    with backends.observing("reference", lambda *cast: casts.append(cast)) as name:
        assert backends.kernels(name).name == name
        assert backends.kernels(name).gemm_nt is backends.REFERENCE.gemm_nt
        with pytest.raises(ValueError, match=r"one of \['reference', 'te', 'triton'\]"):
            backends.resolve_backend(name)
        with backends.observing(name, lambda *cast: casts.append(cast)) as twice:
            bound = fte.BoundQuantizer(quantizer=fte.MXFP8Quantizer(dtype=E4M3))
            x = torch.ones(2, 32)
            made, amax = backends.kernels(twice).quantize(x, bound, torch.float16)
    assert made.dtype is torch.float16
    assert amax is None
    assert len(casts) == 2
    for cast in casts:
        assert cast[0] is x
        assert cast[1] is bound
        assert cast[2] is made
    with pytest.raises(ValueError, match="observed"):
        backends.kernels(name)


def test_threads_do_not_mix() -> None:
    params, x = inputs()
    alone = [fte.numerics(BLOCK, params, x * (1 + i), recipe=CURRENT) for i in range(4)]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda i: fte.numerics(BLOCK, params, x * (1 + i), recipe=CURRENT), range(4)))
    assert_same(together, alone)


# ------------------------------------------------------------------------------------------ the result


def view() -> Numerics:
    block = fte.chain(
        fte.RMSNorm(32), fte.Linear(32, 64, bias=False, name="<up>"), fte.SwiGLU(), fte.BasicLinear(32, 32)
    )
    recipe = Float8BlockScaling(fp8_format=Format.HYBRID)
    params, x = require_grad((fte.init(block), spread((8, 32), 1)))
    return fte.numerics(block, params, x, recipe=recipe)


def test_pytree() -> None:
    found = view()
    leaves, spec = pytree.tree_flatten(found)
    assert len(leaves) == 6 * len(found)
    assert_same(pytree.tree_unflatten(spec, leaves), found)
    doubled = fte.tree_map(lambda leaf: 2 * leaf, found)
    assert doubled[1, "input", "rowwise"].amax == 2 * found[1, "input", "rowwise"].amax
    assert doubled[1, "input", "rowwise"].role == "input"
    for made in (pickle.loads(pickle.dumps(found)), copy.deepcopy(found)):
        assert_same(made, found)
    assert not any(leaf.requires_grad for leaf in leaves)


def test_lookup() -> None:
    found = view()
    assert [e.index for e in found[1]] == [1] * 5
    assert [(e.role, e.copy) for e in found[3, "input"]] == [("input", "rowwise"), ("input", "columnwise")]
    assert found[3, "input", "columnwise"] is found[3, "input"].entries[1]
    for missing in (0, (1, "grad_input"), (3, "weight", "columnwise"), (), -1, "input"):
        with pytest.raises(KeyError, match="no cast at"):
            found[missing]
    assert list(found) == list(found.entries)


def test_rows_are_plain() -> None:
    found = view()
    rows = found.rows()
    assert json.loads(json.dumps(found.to_dict())) == {"entries": rows}
    assert rows[0].keys() >= {"index", "op", "name", "role", "copy", "format", "dtype", "amax", "scale_min", "snr_db"}
    assert {type(value) for row in rows for value in row.values()} == {int, float, str}
    first, entry = rows[0], found.entries[0]
    assert (first["index"], first["op"], first["name"]) == (1, "BasicLinear", "<up>")
    assert (first["format"], first["dtype"]) == ("Float8BlockQuantizer", "float8_e4m3fn")
    assert first["amax"] == entry.amax.item()
    assert first["underflow"] == entry.underflow.item()


def measured(**changes) -> TensorNumerics:
    fields = {
        "index": 3, "op": "BasicLinear", "name": "<b>", "role": "grad_output", "copy": "columnwise",
        "quantizer": fte.MXFP8Quantizer(dtype=E5M2), "amax": 1.5, "scale_min": 0.25, "scale_max": 4096.0,
        "saturated": 0.5, "underflow": 0.00012345, "snr_db": 31.44,
    }  # fmt: skip
    fields |= changes
    return TensorNumerics(**{k: torch.tensor(v) if isinstance(v, float) else v for k, v in fields.items()})


def test_table_text() -> None:
    other = measured(index=10, name="", role="input", scale_max=0.25, saturated=0.0, snr_db=math.inf)
    assert str(Numerics(entries=(measured(), other))).splitlines() == [
        "op                   role         copy        format      amax         scale  saturated  underflow  SNR dB",
        "-------------------  -----------  ----------  ----------  ----  ------------  ---------  ---------  ------",
        "3 BasicLinear '<b>'  grad_output  columnwise  MXFP8 E5M2   1.5  0.25 to 4096        50%    0.0123%    31.4",
        "10 BasicLinear       input        columnwise  MXFP8 E5M2   1.5          0.25         0%    0.0123%     inf",
    ]


def test_table_html() -> None:
    text = Numerics(entries=(measured(), measured(index=4)))._repr_html_()
    assert text.startswith("<table>")
    assert text.endswith("</table>")
    assert text.count("<tr>") == 3
    assert text.count("<td>") == 18
    assert html.escape("3 BasicLinear '<b>'") in text
    assert "<b>" not in text
