"""The math of NVFP4 against ml_dtypes, loops over blocks in numpy, and torchao; compiled = eager, bit for bit."""

import functools
import itertools
import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import functional_te as fte
from functional_te.quantization import nvfp4
from functional_te.quantization.hadamard import SIGNS
from functional_te.quantization.nvfp4 import (
    cast_e2m1,
    cast_e2m1_stochastic,
    decode_e2m1,
    nvfp4_cast,
    nvfp4_decode,
    pack_fp4,
    tensor_factor,
    tensor_scale,
    unpack_fp4,
)
from functional_te.quantization.random import make_key, random_bits
from tests.helpers import DTYPES, uniform

E2M1, E4M3 = ml_dtypes.float4_e2m1fn, ml_dtypes.float8_e4m3fn
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
F32 = np.float32
FLOAT32_MAX = float(np.finfo(F32).max)
ROWS, SQUARE = (1, 16), (16, 16)
every_tile = pytest.mark.parametrize("tile", [ROWS, SQUARE], ids=str)
every_copy = pytest.mark.parametrize("transpose", [False, True])


# ------------------------------------------------------------------------------------------ E2M1


def e2m1_codes(values: np.ndarray) -> np.ndarray:
    """Codes by ml_dtypes, which saturates too."""
    return np.clip(values, -6, 6).astype(E2M1).view(np.uint8)


def test_every_bf16_value() -> None:
    x = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    codes = cast_e2m1(x)
    assert codes.dtype is torch.uint8
    number = ~x.isnan()
    assert (codes[number].numpy() == e2m1_codes(x[number].numpy())).all()
    assert (codes[~number] == 7).all()
    assert cast_e2m1(torch.tensor([math.inf, -math.inf, 0.0, -0.0])).tolist() == [7, 15, 0, 8]


def test_around_every_tie() -> None:
    """The middle between two numbers goes to the even code, its float32 neighbours to theirs."""
    for code in range(7):
        middle = torch.tensor((VALUES[code] + VALUES[code + 1]) / 2)
        below, above = (torch.nextafter(middle, torch.tensor(end)) for end in (0.0, 9.0))
        even = code + code % 2
        assert cast_e2m1(torch.stack((below, middle, above))).tolist() == [code, even, code + 1]
        assert cast_e2m1(-torch.stack((below, middle, above))).tolist() == [8 + code, 8 + even, 9 + code]


def test_decode() -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    want = codes.numpy().view(E2M1).astype(F32)
    decoded = decode_e2m1(codes)
    assert decoded.dtype is torch.float32
    assert (decoded.numpy().view(np.int32) == want.view(np.int32)).all()  # the sign of zero included
    assert torch.equal(cast_e2m1(decoded), codes)


FIXED = (0.0, 1e-6, 0.1, 0.25, 0.3, 0.5, 0.75, 1.0, 1.2, 1.99, 2.0, 2.1, 2.5, 3.0, 3.3, 3.999, 4.0, 4.1, 5.0, 5.9, 6.0)


@pytest.mark.parametrize("number", [*FIXED, 6.1, 100.0, math.inf])
def test_stochastic_probability(number: float) -> None:
    """Over all 65,536 random values, as many round up as the fraction says, give or take one."""
    x = torch.full((65536,), number)
    bits = torch.arange(65536, dtype=torch.int32)
    codes = cast_e2m1_stochastic(x, bits)
    assert torch.equal(cast_e2m1_stochastic(-x, bits), codes + 8)
    exact = Fraction(min(x[0].item(), 6.0))
    low = max(code for code in range(8) if VALUES[code] <= exact)
    if VALUES[low] == exact:
        assert (codes == low).all()
        return
    assert set(codes.unique().tolist()) <= {low, low + 1}
    share = (exact - Fraction(VALUES[low])) / (Fraction(VALUES[low + 1]) - Fraction(VALUES[low]))
    assert abs((codes == low + 1).sum().item() - share * 65536) <= 1
    assert (codes.diff() >= 0).all()  # larger random values round up


def test_stochastic_rounding_is_unbiased() -> None:
    """The mean over many keys is the number, within five sigma; one key gives one result."""
    x = torch.tensor(FIXED).repeat(50)
    total = torch.zeros_like(x, dtype=torch.float64)
    for seed in range(64):
        key = make_key(1, seed)
        codes = cast_e2m1_stochastic(x, random_bits(key, x.numel()))
        assert torch.equal(codes, cast_e2m1_stochastic(x, random_bits(key, x.numel())))
        total += decode_e2m1(codes)
    mean = (total / 64).reshape(50, -1).mean(0)
    gap = torch.tensor([0.5] * 10 + [1.0] * 6 + [2.0] * 5, dtype=torch.float64)
    assert ((mean - torch.tensor(FIXED)).abs() <= gap * (5 * 0.5 / (64 * 50) ** 0.5 + 2.0**-16)).all()
    nan = cast_e2m1_stochastic(torch.tensor([math.nan]), torch.tensor([0]))
    assert nan.item() == 7


# --------------------------------------------------------------------------------------- packing


@pytest.mark.parametrize("shape", [(2,), (3, 4), (2, 3, 16), (0, 16), (4, 0)])
def test_packing(shape) -> None:
    codes = torch.randint(0, 16, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    packed = pack_fp4(codes)
    assert packed.dtype is torch.uint8
    assert packed.shape == (*shape[:-1], shape[-1] // 2)
    assert torch.equal(packed, codes[..., 0::2] + 16 * codes[..., 1::2])  # as torch.float4_e2m1fn_x2
    assert torch.equal(unpack_fp4(packed), codes)


def test_packing_of_views() -> None:
    codes = torch.randint(0, 16, (6, 9), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    for view in (codes[:, 1:], codes.T, codes.flatten()[None, 1:11], codes[::2, 1:9:2]):
        packed = pack_fp4(view)
        assert torch.equal(packed, view[:, 0::2] + 16 * view[:, 1::2])
        assert torch.equal(unpack_fp4(packed.T.contiguous().T), view)


# ---------------------------------------------------------------------------------------- scales


def usable(amax: float) -> bool:
    return math.isfinite(amax) and amax > 0


@pytest.mark.parametrize("e4m3_max", [448.0, 256.0])
@pytest.mark.parametrize(
    "amax", [0.0, 1e-45, 1e-38, 8e-36, 1e-6, 1.0, 3.0, 2688.0, 1e30, FLOAT32_MAX, math.inf, math.nan]
)
def test_scale_and_factor_of_a_tensor(amax: float, e4m3_max: float) -> None:
    given_amax = torch.tensor([amax], dtype=torch.float32)
    exact = given_amax.item()  # a float64
    scale, factor = tensor_scale(given_amax, e4m3_max), tensor_factor(given_amax, e4m3_max)
    assert scale.dtype is factor.dtype is torch.float32
    assert scale.item() == (float(F32(min(6 * e4m3_max / exact, FLOAT32_MAX))) if usable(exact) else 1.0)
    assert factor.item() == (float(F32(max(exact / (6 * e4m3_max), 1 / FLOAT32_MAX))) if usable(exact) else 1.0)


@given(amax=st.floats(2.0**-126, float(FLOAT32_MAX), width=32))
def test_scale_times_factor_is_one(amax: float) -> None:
    product = tensor_scale(torch.tensor([amax])).double() * tensor_factor(torch.tensor([amax])).double()
    assert abs(product.item() - 1) < 2e-7 or amax < 4e-35  # the factor is subnormal below


# --------------------------------------------------------------------------------- blocks, by loop


def capped(value: F32) -> F32:
    """``fmin(value, FLT_MAX)``, but NaN stays."""
    return F32(FLOAT32_MAX) if value > FLOAT32_MAX else value


def scale_of_tensor(amax: float, e4m3_max: float) -> F32:
    return capped(F32(6 * e4m3_max) / F32(amax)) if usable(amax) else F32(1)


def e4m3(value: F32) -> np.ndarray:
    return np.minimum(value, F32(448)).astype(E4M3)


def encode_factor(block_scale: np.ndarray, scale: F32) -> F32:
    return capped(F32(1) / (block_scale.astype(F32) * (F32(1) / scale)))


def tiles(a: np.ndarray, height: int):
    for i in range(-(-a.shape[0] // height)):
        for j in range(a.shape[1] // 16):
            yield i, j, a[i * height : (i + 1) * height, j * 16 : (j + 1) * 16]


def by_loop(a: np.ndarray, amax: np.ndarray, height: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Scaled elements, codes to nearest and scale bytes of ``a [R, C]``, in float32, block by block."""
    scaled = np.zeros(a.shape, F32)
    scales = np.zeros((-(-a.shape[0] // height), a.shape[1] // 16), np.uint8)
    with np.errstate(all="ignore"):
        for i, j, block in tiles(a, height):
            scale = scale_of_tensor(amax[i] if len(amax) > 1 else amax[0], 448.0)
            block_scale = e4m3(np.abs(block).max() * (scale * (F32(1) / F32(6))))
            scales[i, j] = block_scale.view(np.uint8)
            scaled[i * height : (i + 1) * height, j * 16 : (j + 1) * 16] = block * encode_factor(block_scale, scale)
    return scaled, np.where(np.isnan(scaled), 7, e2m1_codes(scaled)), scales


def assert_cast(got: tuple[torch.Tensor, torch.Tensor], codes: np.ndarray, scales: np.ndarray) -> None:
    data, scale = got
    assert data.dtype is torch.uint8
    assert scale.dtype is torch.float8_e4m3fn
    assert data.is_contiguous()
    assert scale.is_contiguous()
    assert scale.shape == scales.shape
    assert (scale.view(torch.uint8).numpy() == scales).all()
    assert (unpack_fp4(data).numpy() == codes).all()


def random_matrix(draw, dtype: torch.dtype) -> torch.Tensor:
    """A matrix with both sizes multiples of 16 in one of several memory layouts, over many magnitudes."""
    rows, columns = 16 * draw(st.integers(0, 3)), 16 * draw(st.integers(1, 3))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    wide = torch.randn(2 * rows, 2 * columns, generator=generator)
    wide *= 2.0 ** torch.randint(-12, 5, (2 * rows, 1), generator=generator)
    layout = draw(st.sampled_from(["rows", "columns", "steps", "corner", "transposed", "reversed"]))
    wide = wide.to(dtype)
    return {
        "rows": lambda: wide[:rows, :columns].contiguous(),
        "columns": lambda: wide[:rows, :columns].T.contiguous().T,
        "steps": lambda: wide[::2, ::2],
        "corner": lambda: wide[rows:, columns:],
        "transposed": lambda: wide[:columns, :rows].T,
        "reversed": lambda: wide[:rows, :columns].flip(0),
    }[layout]()


@every_tile
@every_copy
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(data=st.data())
def test_cast_against_loop(dtype: torch.dtype, transpose: bool, tile, data) -> None:
    x = random_matrix(data.draw, dtype)
    a = (x.T if transpose else x).float()
    drop = data.draw(st.integers(0, 15))  # any count of rows of A
    a, x = a[drop:], x[:, drop:] if transpose else x[drop:]
    per_row = tile == ROWS and data.draw(st.booleans())
    amax = a.abs().amax(1) if per_row and a.shape[1] else torch.tensor([a.abs().max() if a.numel() else 0.0])
    scaled, codes, scales = by_loop(a.numpy(), amax.numpy(), tile[0])
    assert_cast(nvfp4_cast(x, amax, tile=tile, transpose=transpose), codes, scales)
    # all random bits 0: towards zero; all ones: away from it, unless the number is nearly a code
    high = torch.rand(a.shape, generator=torch.Generator().manual_seed(0)) < 0.5
    bits = torch.where(high, 65535, 0)
    got = nvfp4_cast(x, amax, tile=tile, transpose=transpose, bits=bits)
    position = np.interp(np.abs(scaled).astype(np.float64), VALUES, range(8))
    rounded = np.where(high.numpy(), np.ceil(position), np.floor(position)) + 8 * np.signbit(scaled)
    clear = np.abs(position - np.round(position)) > 1e-4
    assert (unpack_fp4(got[0]).numpy() == rounded)[clear].all()
    assert torch.equal(got[1].view(torch.uint8), torch.from_numpy(scales))


@every_tile
@every_copy
@given(data=st.data())
def test_decoded_values_are_close(tile, transpose: bool, data) -> None:
    x = random_matrix(data.draw, torch.float32)
    a = x.T if transpose else x
    amax = torch.tensor([x.abs().max() if x.numel() else 0.0])
    cast = nvfp4_cast(x, amax, tile=tile, transpose=transpose)
    decoded = nvfp4_decode(*cast, tile)
    assert decoded.dtype is torch.float32
    assert decoded.shape == a.shape
    codes = unpack_fp4(cast[0]).numpy().view(E2M1).astype(F32)
    block = cast[1].float().repeat_interleave(16, 1).repeat_interleave(tile[0], 0)[: a.shape[0]]
    assert torch.equal(decoded, torch.from_numpy(codes) * block)
    # half the largest gap is 1, and a scale that was rounded down by 1/16 costs as much at the top
    bound = block * tensor_factor(amax) * 1.001 + tensor_factor(amax) * 6 * 2.0**-10
    assert ((decoded * tensor_factor(amax) - a).abs() <= bound).all()


@every_tile
@every_copy
@pytest.mark.parametrize("shape", [(0, 16), (16, 0), (0, 0)])
@pytest.mark.parametrize("four_over_six", [None, "MAE"])
def test_zero_size(tile, transpose: bool, shape, four_over_six) -> None:
    x = torch.zeros(shape, dtype=torch.bfloat16)
    rows, columns = shape[::-1] if transpose else shape
    data, scale = nvfp4_cast(x, torch.zeros(1), tile=tile, transpose=transpose, four_over_six=four_over_six)
    assert data.shape == (rows, columns // 2)
    assert scale.shape == (-(-rows // tile[0]), columns // 16)
    assert nvfp4_decode(data, scale, tile).shape == (rows, columns)


@pytest.mark.parametrize("four_over_six", [None, "MSE"])
def test_zeros_infinity_and_nan(four_over_six) -> None:
    x = torch.ones(5, 16)
    x[0], x[1, 3], x[2, 5], x[3] = 0.0, math.inf, math.nan, 2.0**-40
    data, scale = nvfp4_cast(x, torch.ones(1), four_over_six=four_over_six)
    codes = unpack_fp4(data)
    assert (codes[0] == 0).all()
    assert scale.float()[0].item() == 0
    assert codes[1, 3].item() == 7
    assert scale.float()[1].item() == 448
    assert scale.view(torch.uint8)[2].item() == 0x7F
    decoded = nvfp4_decode(data, scale)
    assert decoded[2].isnan().all()
    assert (decoded[3] == 0).all()  # its scale underflows
    assert not decoded[[0, 1, 3, 4]].isnan().any()
    assert (decoded[4] * tensor_factor(torch.ones(1)) == 1).all()
    # an amax that is not usable: tensor scale and factor are 1
    for amax in (math.inf, math.nan, 0.0):
        data, scale = nvfp4_cast(x, torch.tensor([amax]), four_over_six=four_over_six)
        decoded = nvfp4_decode(data, scale) * tensor_factor(torch.tensor([amax]))
        assert decoded[1, 3].item() == 6 * 448
        assert decoded[2].isnan().all()
        torch.testing.assert_close(decoded[4], x[4], rtol=0.07, atol=0)


def test_tiny_tensors_keep_their_magnitude() -> None:
    """Below 8e-36 the tensor scale is capped; Transformer Engine's factor goes on shrinking, ours stays its inverse."""
    x = uniform((4, 64)) * 1e-37
    amax = x.abs().max().reshape(1)
    decoded = nvfp4_decode(*nvfp4_cast(x, amax)) * tensor_factor(amax)
    assert ((decoded - x).abs() <= 0.2 * amax).all()
    assert decoded.abs().max() > 0.9 * amax


def test_arguments() -> None:
    x, amax = torch.ones(32, 24), torch.ones(1)
    with pytest.raises(ValueError, match="nvfp4_cast: x: expected a multiple of 16 values along the blocks, got 24"):
        nvfp4_cast(x, amax)
    with pytest.raises(ValueError, match="nvfp4_cast: tile: expected"):
        nvfp4_cast(x, amax, transpose=True, tile=(1, 32))
    with pytest.raises(ValueError, match='four_over_six: expected None, "MAE" or "MSE"'):
        nvfp4_cast(x, amax, transpose=True, four_over_six="RMS")
    with pytest.raises(ValueError, match="nvfp4_cast: bits: expected None with four_over_six"):
        nvfp4_cast(x, amax, transpose=True, four_over_six="MAE", bits=torch.zeros(24, 32))
    with pytest.raises(ValueError, match=r"nvfp4_cast: amax: expected shape \(1,\)"):
        nvfp4_cast(x, torch.ones(24), transpose=True, tile=SQUARE)


# --------------------------------------------------------------------------------- four over six


def best_of_two(a: np.ndarray, amax: F32, height: int, e4m3_max: float, measure: str):
    """Codes, scale bytes and which candidate won, by trying both on each tile; sums in float32 in the order of TE."""
    codes = np.zeros(a.shape, np.uint8)
    scales = np.zeros((-(-a.shape[0] // height), a.shape[1] // 16), np.uint8)
    won = np.zeros(scales.shape, bool)
    scale = scale_of_tensor(amax, e4m3_max)
    for i, j, block in tiles(a, height):
        candidates = []
        for stretch in (F32(1), F32(1.5)):
            block_scale = e4m3(np.abs(block).max() / F32(6) * scale * stretch)
            with np.errstate(divide="ignore"):
                found = e2m1_codes(block * encode_factor(block_scale, scale))
            value = found.view(E2M1).astype(F32) * block_scale.astype(F32) * amax / F32(6 * e4m3_max)
            error = np.abs(value - block) if measure == "MAE" else (value - block) ** 2
            rows = [functools.reduce(lambda one, other: one + other, row) for row in error]
            rows += [F32(0)] * (height - len(rows))
            while len(rows) > 1:
                half = len(rows) // 2
                rows = [one + other for one, other in zip(rows[:half], rows[half:], strict=True)]
            candidates.append((rows[0], found, block_scale))
        won[i, j] = candidates[1][0] < candidates[0][0]
        _, found, block_scale = candidates[int(won[i, j])]
        codes[i * height : (i + 1) * height, j * 16 : (j + 1) * 16] = found
        scales[i, j] = block_scale.view(np.uint8)
    return codes, scales, won


@every_tile
@every_copy
@pytest.mark.parametrize("measure", ["MAE", "MSE"])
@pytest.mark.parametrize("e4m3_max", [256.0, 448.0])
def test_four_over_six(tile, transpose: bool, measure: str, e4m3_max: float) -> None:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(48, 80, generator=generator)  # mostly better with the largest element at 6
    x[16:, 32:] = torch.tensor([0.25, 0.5, 0.75, 1.0, 2.0])[torch.randint(5, (32, 48), generator=generator)]  # at 4
    x[:16, :16] = 0  # a tie: the first candidate, scale 0
    x = x.to(torch.bfloat16)
    x = x[:, :75] if transpose else x[:43]
    a = (x.T if transpose else x).float().numpy()
    amax = x.abs().amax().float().reshape(1)
    codes, scales, won = best_of_two(a, amax.numpy()[0], tile[0], e4m3_max, measure)
    assert 0.1 < won.mean() < 0.9
    got = nvfp4_cast(x, amax, tile=tile, e4m3_max=e4m3_max, four_over_six=measure, transpose=transpose)
    assert_cast(got, codes, scales)


@pytest.mark.parametrize("dim", [0, 1])
def test_errors_are_summed_in_one_order(dim: int) -> None:
    """Along each block, then rows by halves; the magnitudes are so far apart that any other order has other bits."""
    errors = torch.rand(32, 48, generator=torch.Generator().manual_seed(0)) * 2.0 ** torch.arange(48).remainder(16)
    blocks = (errors if dim else errors.T.contiguous()).unflatten(dim, (3, 16))
    for height in (1, 16):
        rows = np.add.accumulate(errors.unflatten(1, (3, 16)).numpy(), axis=2, dtype=F32)[:, :, -1].reshape(
            -1, height, 3
        )
        while rows.shape[1] > 1:
            half = rows.shape[1] // 2
            rows = rows[:, :half] + rows[:, half:]
        total = nvfp4._Tiling(dim, height).total(blocks.unbind(dim + 1))
        assert ((total if dim else total.T).numpy() == rows[:, 0]).all()


def test_four_over_six_lowers_the_error() -> None:
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    amax = x.abs().max().reshape(1)
    for measure, error in (("MAE", torch.abs), ("MSE", torch.square)):
        errors = []
        for choice in (None, measure):
            cast = nvfp4_cast(x, amax, e4m3_max=256.0, four_over_six=choice)
            errors.append(error(nvfp4_decode(*cast) * tensor_factor(amax, 256.0) - x).sum())
        assert errors[1] < 0.97 * errors[0]


# --------------------------------------------------------------------------------------- torchao


def test_against_torchao() -> None:
    """Same layout and formats; torchao floors block scales and orders the float32 operations differently."""
    pytest.importorskip("torchao", reason="an oracle; needs torchao")
    from torchao.prototype.mx_formats.kernels import f4_unpacked_to_f32, pack_uint4, unpack_uint4
    from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize, per_tensor_amax_to_scale

    x = torch.randn(256, 512, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    x[:4] *= 2.0**-15
    amax = x.abs().amax().float().reshape(1)
    data, scale = nvfp4_cast(x, amax)
    their_scale, their_data = nvfp4_quantize(x, 16, per_tensor_amax_to_scale(amax[0]))
    codes = unpack_uint4(data)
    assert torch.equal(codes, unpack_fp4(data))
    assert torch.equal(pack_uint4(codes), data)
    assert torch.equal(f4_unpacked_to_f32(codes), decode_e2m1(codes))
    # 1. they floor block scales at the smallest normal E4M3 number, 2**-6
    floor = 2.0**-6
    assert (scale.float()[:4] < floor).any()
    assert (their_scale.float() >= floor).all()
    kept = scale.float() >= floor
    assert (their_scale.float() == floor)[~kept].all()
    # 2. they divide by 6 and by the tensor scale where we multiply: an E4M3 tie may go the other way
    ours, theirs = (s.view(torch.uint8).int() for s in (scale, their_scale))
    steps = (ours - theirs).abs()[kept]
    assert steps.max() <= 1
    assert (steps != 0).float().mean() < 0.01
    # 3. where scales agree, the encode factors differ by rounding: only elements on a tie may differ
    agree = (ours == theirs) & kept
    scaled = x.float().unflatten(1, (-1, 16)) * (tensor_scale(amax) / scale.float()).unsqueeze(2)
    middles = torch.tensor([(one + other) / 2 for one, other in itertools.pairwise(VALUES)])
    on_tie = ((scaled.abs().unsqueeze(3) - middles).abs() <= 4e-7 * middles).any(3)
    same = codes.unflatten(1, (-1, 16)) == unpack_uint4(their_data).unflatten(1, (-1, 16))
    assert (same | on_tie)[agree].all()
    assert agree.float().mean() > 0.97


# ------------------------------------------------------------------------------- compiled = eager


def special_matrix(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Random numbers with denormals, zeros of both signs, a block of zeros, infinities and NaN of both signs."""
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows))
    x.view(-1)[::7] *= 1e-38
    x.view(-1)[3::11] *= 1e-42
    x[0, 0], x[1, 17], x[1, 33], x[20, 2], x[5, 2] = math.inf, math.nan, -math.inf, -math.nan, -0.0
    x[16:32, 16:32] = 0
    return x.to(dtype)


def assert_same_bits(got, want) -> None:
    for one, other in zip(got, want, strict=True):
        assert one.dtype is other.dtype
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def test_compiled_is_eager(dynamo) -> None:
    """Both copies, both tiles, for any count of tokens in one graph. (The test below has the other combination.)"""

    def casts(x: torch.Tensor, amax: torch.Tensor):
        square = nvfp4_cast(x[:, :40], amax, tile=SQUARE, transpose=True)  # with a partial tile
        return [*nvfp4_cast(x, amax), *square, nvfp4_decode(*square, SQUARE)]

    compiled = torch.compile(casts, fullgraph=True)
    for tokens in (32, 48, 160):
        x = special_matrix(tokens, 48, torch.bfloat16)
        torch._dynamo.mark_dynamic(x, 0)
        for amax in (4.0, 1e-38, 0.0, math.inf, math.nan):
            assert_same_bits(compiled(x, torch.tensor([amax])), casts(x, torch.tensor([amax])))
    assert dynamo["stats"]["unique_graphs"] == 1


@pytest.mark.slow
def test_compiled_stochastic_rounding_is_eager(dynamo) -> None:
    def casts(x: torch.Tensor, amax: torch.Tensor, key: torch.Tensor):
        bits = random_bits(key, x.numel()).view(x.shape)
        column = nvfp4_cast(x, amax, bits=bits.view(x.shape[1], x.shape[0]), transpose=True)
        return [*nvfp4_cast(x, amax, bits=bits), *column, cast_e2m1_stochastic(x, bits), cast_e2m1(x)]

    compiled = torch.compile(casts, fullgraph=True)
    for tokens in (32, 80):
        x = special_matrix(tokens, 48, torch.float32)
        torch._dynamo.mark_dynamic(x, 0)
        for seed in (0, 1):
            arguments = (x, torch.tensor([3.5]), make_key(seed))
            assert_same_bits(compiled(*arguments), casts(*arguments))
    assert dynamo["stats"]["unique_graphs"] == 1


@pytest.mark.slow
def test_compiled_four_over_six_is_eager(dynamo) -> None:
    def casts(x: torch.Tensor, amax: torch.Tensor):
        return nvfp4_cast(x, amax, four_over_six="MSE", e4m3_max=256.0, tile=SQUARE)

    compiled = torch.compile(casts, fullgraph=True)
    for x in (special_matrix(48, 64, torch.float16), torch.randn(48, 64).to(torch.float16)):
        amax = x.nan_to_num(0, 0, 0).abs().amax().float().reshape(1)
        assert_same_bits(compiled(x, amax), casts(x, amax))


def test_all_names_are_public() -> None:
    assert {name for name in vars(nvfp4) if not name.startswith("_")} >= set(nvfp4.__all__)


def test_the_transform_of_large_float16_values_stays_finite() -> None:
    """A sum of 16 float16 numbers may be beyond the largest one."""
    x = torch.zeros(64, 32, dtype=torch.float16)
    x[:16, 0] = 2e4 * torch.tensor(SIGNS, dtype=torch.float16)
    q = fte.quantize(x, fte.NVFP4Quantizer(with_rht=True, columnwise=True))
    back = q.dequantize(torch.float32, columnwise=True)
    assert q.columnwise_amax.item() == 8e4
    assert (back - x.float()).norm() < 0.2 * x.float().norm()
