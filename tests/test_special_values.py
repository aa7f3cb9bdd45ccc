"""What zeros, nothing at all, infinities, NaN and the ends of the range do in every format and recipe."""

import math

import pytest
import torch

import functional_te as fte
from functional_te.quantization import MXFP8Quantizer, NVFP4Quantizer
from functional_te.recipes import NVFP4BlockScaling
from tests.every_recipe import QUANTIZERS, VARIANTS, a_state, quantized, quantizer_of, values64
from tests.helpers import assert_same, uniform

LINEAR = fte.BasicLinear(32, 32)
PARAMS, X = fte.init(LINEAR), uniform((3, 32))
NVFP4 = NVFP4BlockScaling()
every_quantizer = pytest.mark.parametrize("name", QUANTIZERS)
every_recipe = pytest.mark.parametrize("recipe", VARIANTS.values(), ids=VARIANTS)

# ---- nothing -----------------------------------------------------------------------------------------------------


ZERO_SIZES = [
    pytest.param(name, shape, id=f"{name}-{shape}")
    for name in QUANTIZERS
    for shape in ((0, 64), (4, 0), (0, 0), (2, 0, 64), (0, 3, 64), (0,))
]


@pytest.mark.parametrize(("name", "shape"), ZERO_SIZES)
def test_zero_size(name, shape) -> None:
    quantizer = QUANTIZERS[name]
    x = torch.zeros(shape)
    state = a_state(quantizer) if quantizer.stateful else None
    made = fte.quantize(x, quantizer, state)
    q, after = made if quantizer.stateful else (made, state)
    assert q.shape == tuple(shape)
    assert_same(q.dequantize(), x)
    columns = q.with_usage(rowwise=False, columnwise=True).dequantize()  # padded with tokens
    assert_same(columns[: math.prod(shape[:-1])], torch.zeros(math.prod(shape[:-1]), shape[-1]))
    if quantizer.stateful:
        assert_same(fte.update_scale(quantizer, after), state)


# ---- zeros -------------------------------------------------------------------------------------------------------


@every_quantizer
def test_zeros(name) -> None:
    """They stay zeros, signs included; the scale of nothing but zeros is 1, but for the smallest in MXFP8."""
    quantizer = QUANTIZERS[name]
    x = torch.zeros(40, 64)
    x[3] = -0.0
    q = quantized(x, quantizer)
    for columnwise in (False, True):
        values, _ = q.decoded(columnwise)
        assert_same(values, torch.zeros_like(values))
        own = quantizer.of(columnwise)
        scale, amax = q.copy(columnwise).scale_inv, q.copy(columnwise).amax
        if isinstance(own, MXFP8Quantizer):
            assert not scale.any()
        elif isinstance(own, NVFP4Quantizer):
            assert not amax.any()
        elif name != "delayed":
            assert (scale == 1).all()
    if name != "nvfp4 rotated":
        assert torch.signbit(q.dequantize()).equal(torch.signbit(x))
    half = torch.zeros(64, 64)
    half[:, 32:] = uniform((64, 32))
    q = quantized(half, quantizer)  # blocks of zeros beside others
    for columnwise in (False, True):
        assert not values64(q, columnwise)[:, :32].any()
        assert values64(q, columnwise)[:, 32:].any()


@every_recipe
def test_all_zero_operands(recipe) -> None:
    block = fte.BasicLinear(64, 32)
    x, w, dy = uniform((17, 64)), uniform((32, 64), seed=1), uniform((17, 32), seed=2)
    state = fte.init_state(block, recipe)
    for zeroed in range(3):
        one, two, three = (torch.zeros_like(t) if i == zeroed else t for i, t in enumerate((x, w, dy)))
        result, pullback = fte.vjp(block, ({"weight": two},), one, recipe=recipe, state=state)
        grads = pullback(three)
        found = (result.output, grads.input, grads.params[0]["weight"])
        assert [bool(t.any()) for t in found] == [zeroed == 2, zeroed == 0, zeroed == 1]
        assert all(torch.isfinite(t).all() for t in found)
        after = fte.update_state(block, recipe, grads.state)
        role = ("input", "weight", "grad_output")[zeroed]
        assert_same(after[0].get(role), state[0].get(role))


# ---- infinities, NaN, and the ends of the range --------------------------------------------------------------------

BAD = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}
every_bad = pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
ROW, COLUMN = 5, 40
# the block around [5, 40] of a tensor [64, 128] that shares a scale or a rotation with it: rowwise, columnwise
AROUND = {
    "current": ((slice(None), slice(None)), (slice(None), slice(None))),
    "delayed": ((slice(5, 6), slice(40, 41)), (slice(5, 6), slice(40, 41))),
    "block": ((slice(5, 6), slice(0, 128)), (slice(0, 128), slice(40, 41))),
    "block 2-D": ((slice(0, 128), slice(0, 128)), (slice(0, 128), slice(0, 128))),
    "mxfp8": ((slice(5, 6), slice(32, 64)), (slice(0, 32), slice(40, 41))),
    "mxfp8 2-D": ((slice(0, 32), slice(32, 64)), (slice(0, 32), slice(32, 64))),
    "nvfp4": ((slice(5, 6), slice(32, 48)), (slice(0, 16), slice(40, 41))),
    "nvfp4 rotated": ((slice(5, 6), slice(32, 48)), (slice(0, 16), slice(40, 41))),
    "nvfp4 random": ((slice(5, 6), slice(32, 48)), (slice(0, 16), slice(40, 41))),
    "nvfp4 2-D": ((slice(0, 16), slice(32, 48)), (slice(0, 16), slice(32, 48))),
    "nvfp4 rows": ((slice(5, 6), slice(32, 48)), (slice(0, 16), slice(40, 41))),
    "nvfp4 4over6": ((slice(5, 6), slice(32, 48)), (slice(0, 16), slice(40, 41))),
    "hybrid": ((slice(5, 6), slice(32, 64)), (slice(0, 16), slice(40, 41))),
}


def decoded(q, columnwise):
    """Values in float32 as a matrix of the tensor's shape; a rotation is undone."""
    rowwise_or = q.with_usage(rowwise=not columnwise, columnwise=columnwise)
    return rowwise_or.dequantize(torch.float32)


@every_quantizer
@every_bad
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_one_bad_value(name, bad, dtype) -> None:
    """FP8: infinities saturate and NaN stays, alone.

    MXFP8: infinity stays one and leaves nothing else of its block, NaN takes the block along. NVFP4: infinities
    saturate, rotated ones too, and NaN takes its block along.
    """
    quantizer = QUANTIZERS[name]
    x = uniform((64, 128), dtype, seed=3)
    x[ROW, COLUMN] = bad
    q = quantized(x, quantizer)
    exact = x.float()
    for columnwise in (False, True):
        found, own = decoded(q, columnwise), quantizer.of(columnwise)
        element, block = found[ROW, COLUMN].item(), found[AROUND[name][columnwise]]
        outside = torch.ones(64, 128, dtype=torch.bool)
        outside[AROUND[name][columnwise]] = False
        assert torch.isfinite(found[outside]).all()
        # other blocks do not notice, but for the level that all blocks of NVFP4 share: there it is 1
        if not isinstance(own, NVFP4Quantizer):
            assert (found[outside] - exact[outside]).abs().le(0.07 * exact[outside].abs() + 2**-7).all()
        elif not (own.row_scaled or own.rotates):
            assert (found[outside] - exact[outside]).abs().le(0.27).all()
        rotated = columnwise and own.rotates
        if math.isnan(bad):
            assert math.isnan(element)
        elif rotated:  # all 16 of the group are infinite, and saturate
            assert element == math.copysign(16 / 4 * 6 * own.e4m3_max, bad)
        elif isinstance(own, MXFP8Quantizer):
            assert element == bad
        else:
            scale = 1.0 if name != "delayed" else q.scale_inv.item()
            limit = 448.0 if own.packing == 1 else 6.0 * own.e4m3_max
            assert element == pytest.approx(math.copysign(limit * scale, bad), rel=1e-6)
        whole = own.packing == 2 or isinstance(own, MXFP8Quantizer)
        if math.isnan(bad) and whole:
            assert block.isnan().all()
        elif math.isnan(bad):
            assert block.isnan().sum() == 1
        elif isinstance(own, MXFP8Quantizer):
            assert block.abs().ge(2.0**-100).sum() == 1
        else:
            assert torch.isfinite(block).all()


BAD_OPERANDS = [
    pytest.param(recipe, value, id=f"{name}-{kind}") for name, recipe in VARIANTS.items() for kind, value in BAD.items()
]


@pytest.mark.parametrize(("recipe", "bad"), BAD_OPERANDS)
def test_bad_values_in_every_operand(recipe, bad) -> None:
    """Nothing raises; what the copies decode to decides which results are finite. States stay usable."""
    block = fte.BasicLinear(160, 96)
    clean = (uniform((33, 160)), uniform((96, 160), seed=1), uniform((33, 96), seed=2))
    state = fte.init_state(block, recipe)
    for place, role in enumerate(("input", "weight", "grad_output")):
        x, w, dy = (t.clone() for t in clean)
        (x, w, dy)[place][ROW, COLUMN] = bad
        result, pullback = fte.vjp(block, ({"weight": w},), x, recipe=recipe, state=state)
        grads = pullback(dy)
        copies = {}
        for name, value in (("input", x), ("weight", w), ("grad_output", dy)):
            quantizer = quantizer_of(recipe, name)
            own = None if quantizer is None else quantized(value, quantizer, state[0].get(name))
            for columnwise in (False, True):
                matrix = value if own is None else decoded(own, columnwise)[: value.shape[0]]
                copies[name, columnwise] = ~torch.isfinite(matrix)
        found = (result.output, grads.input, grads.params[0]["weight"])
        rows = {
            0: copies["input", False].any(1)[:, None] | copies["weight", False].any(1)[None],
            1: copies["grad_output", False].any(1)[:, None] | copies["weight", True].any(0)[None],
            2: copies["grad_output", True].any(0)[:, None] | copies["input", True].any(0)[None],
        }
        for index, tensor in enumerate(found):
            bad_places = ~torch.isfinite(tensor)
            assert torch.equal(bad_places, rows[index]), (role, index)
        after = fte.update_state(block, recipe, grads.state)
        for entry in after[0].values():
            assert torch.isfinite(entry.read).all()
        # the next step is as good as ever, once the history has forgotten
        clean_result, _ = fte.vjp(block, ({"weight": clean[1]},), clean[0], recipe=recipe, state=after)
        assert torch.isfinite(clean_result.output).all()


def test_a_bad_gradient_moves_the_key_on() -> None:
    """A NaN was rounded too: the next step has other bits, and the state holds no NaN."""
    state, dy = fte.init_state(LINEAR, NVFP4), uniform((3, 32))
    dy[1, 2] = math.nan
    _, pullback = fte.vjp(LINEAR, PARAMS, X, recipe=NVFP4, state=state)
    observed = pullback(dy).state
    assert observed[0]["grad_output"].amax_history.isnan()
    after = fte.update_state(LINEAR, NVFP4, observed)
    assert not torch.equal(after[0]["grad_output"].key, state[0]["grad_output"].key)
    assert_same(after[0]["grad_output"].amax_history, torch.zeros(1))


@every_quantizer
@pytest.mark.parametrize("magnitude", [1e-45, 1e-40, 1e-30, 3e38], ids=str)
def test_the_ends_of_the_range(name, magnitude) -> None:
    """Denormal and huge tensors give finite values of the right size, or zeros where a format has none so small."""
    quantizer = QUANTIZERS[name]
    x = uniform((32, 64), seed=4).sign() * magnitude
    q = quantized(x, quantizer)
    for columnwise in (False, True):
        found, rotated = decoded(q, columnwise), columnwise and quantizer.of(True).rotates
        if rotated and magnitude == 3e38:
            continue  # what is rotated is up to four times larger, and there is no such number
        assert not found.isnan().any()
        if name == "delayed":
            continue  # a scale of another step
        if magnitude == 1e-30:
            assert (found - x).double().norm() < 0.2 * x.double().norm()
        if magnitude < 1e-30:
            assert found.abs().max() <= 2 * magnitude
        if magnitude == 3e38:
            assert torch.isfinite(found).all()
            assert (found.sign() == x.sign()).float().mean() > 0.9
