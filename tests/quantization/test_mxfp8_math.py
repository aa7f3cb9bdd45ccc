"""MXFP8 casts: every bf16 value and every scale byte against ml_dtypes, exact arithmetic, torchao and a numpy loop."""

import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given

from functional_te.quantization.mxfp8 import block_grid, mx_cast, mx_decode
from tests.quantization.tiles import (
    FORMATS,
    all_bf16,
    assert_bits,
    compiled,
    data_cases,
    every_format,
    graphs_of,
    matrices,
    mixed,
    numpy_cast,
)

E4M3, E5M2 = FORMATS
TILES = ((1, 32), (32, 32))
every_tile = pytest.mark.parametrize("tile", TILES, ids=str)


def byte_of(amax: float, dtype: torch.dtype) -> int:
    """``127 + ceil(log2(amax / limit))`` in exact arithmetic."""
    if math.isnan(amax):
        return 255
    if math.isinf(amax):
        return 254
    if amax == 0:
        return 0
    ratio = Fraction(amax) / Fraction(FORMATS[dtype][1])
    power = math.frexp(float(ratio))[1]  # close to the answer; walk to it
    while Fraction(2) ** power >= ratio:
        power -= 1
    while Fraction(2) ** power < ratio:
        power += 1
    return max(power + 127, 0)


def factor_of(byte: int) -> np.float32:
    """``2**(127 - byte)`` as float32, NaN for 255."""
    return np.float32(math.nan if byte == 255 else math.ldexp(1.0, 127 - int(byte)))


def oracle(x: torch.Tensor, dtype: torch.dtype, tile: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Tile by tile: scale bytes in exact arithmetic, data by ml_dtypes."""
    values = x.float().numpy()
    rows, cols = values.shape
    data, scale = np.zeros(values.shape, np.uint8), np.zeros(block_grid(rows, cols, tile), np.uint8)
    for i, j in np.ndindex(*scale.shape):
        part = np.s_[i * tile[0] : (i + 1) * tile[0], j * tile[1] : (j + 1) * tile[1]]
        scale[i, j] = byte_of(float(np.abs(values[part]).max()), dtype)
        data[part] = numpy_cast(values[part], factor_of(scale[i, j]), dtype)
    return data, scale


@every_format
def test_every_bf16_value_alone_in_a_block(dtype: torch.dtype) -> None:
    """The element is its own amax, so it lands in the upper half of the format, or below the smallest scale."""
    x = all_bf16().reshape(-1, 1)
    data, scale = mx_cast(x, dtype)
    values = x.float().numpy()[:, 0]
    bytes_ = np.array([byte_of(float(abs(value)), dtype) for value in values])
    assert (scale[:, 0].numpy() == bytes_).all()
    factors = np.array([factor_of(byte) for byte in range(256)])[bytes_]
    assert_bits(data[:, 0], numpy_cast(values, factors, dtype))


@every_format
def test_every_bf16_value_beside_a_limit(dtype: torch.dtype) -> None:
    """A neighbour of the limit's size makes the scale 1: all values up to it are cast as they are."""
    limit = FORMATS[dtype][1]
    x = all_bf16()
    x = x[x.float().abs() <= limit]
    blocks = torch.stack((x, torch.full_like(x, limit)), dim=1)
    data, scale = mx_cast(blocks, dtype)
    assert (scale == 127).all()
    assert_bits(data[:, 0], numpy_cast(x.float().numpy(), np.float32(1), dtype))


@every_format
def test_scale_bytes_around_every_power_of_2(dtype: torch.dtype) -> None:
    """The three float32 numbers around ``limit * 2**n`` for every n: rounding starts right above it."""
    limit = FORMATS[dtype][1]
    centres = np.array([limit * 2.0**n for n in range(-160, 119)] + [2.0**n for n in range(-149, 128)])
    centres = centres[(centres > 0) & (centres < 3.4e38)].astype(np.float32)
    amax = np.concatenate([np.nextafter(centres, np.float32(0)), centres, np.nextafter(centres, np.float32(np.inf))])
    _, scale = mx_cast(torch.from_numpy(amax).reshape(-1, 1), dtype)
    assert scale[:, 0].tolist() == [byte_of(float(value), dtype) for value in amax]


def test_every_scale_byte_decodes_as_e8m0() -> None:
    scale = torch.arange(256, dtype=torch.uint8).reshape(256, 1)
    ones = torch.ones(256, 3).to(E4M3)
    want = scale.numpy().view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    got = mx_decode(ones, scale, (1, 32)).numpy()
    assert np.array_equal(got, np.repeat(want, 3, axis=1), equal_nan=True)
    assert np.isnan(got[255]).all()
    assert got[0, 0] == 2.0**-127


@every_format
@every_tile
@given(case=matrices(edge=32))
def test_tiles_as_a_loop(case, tile: tuple[int, int], dtype: torch.dtype) -> None:
    data, scale = mx_cast(case, dtype, tile=tile)
    want_data, want_scale = oracle(case, dtype, tile)
    assert_bits(data, want_data)
    assert_bits(scale, want_scale)
    transposed = mx_cast(case, dtype, tile=tile, transpose=True)
    again = mx_cast(case.t().contiguous(), dtype, tile=tile)
    for one, other in zip(transposed, again, strict=True):
        assert_bits(one, other)
    if tile == (32, 32):
        for one, other in zip(transposed, (data, scale), strict=True):
            assert_bits(one, other.t())


@every_format
@pytest.mark.parametrize("name", [name for name in data_cases(32, 64) if name not in ("inf", "nan")])
def test_nothing_finite_saturates_and_errors_are_small(name: str, dtype: torch.dtype) -> None:
    x = data_cases(32, 64)[name]
    data, scale = mx_cast(x, dtype)
    back = mx_decode(data, scale, (1, 32))
    unit = torch.from_numpy(np.ldexp(1.0, scale.int().numpy() - 127)).repeat_interleave(32, 1)
    relative = 2.0 ** (-4 if dtype is E4M3 else -3)  # half a unit in the last place
    smallest = unit * 2.0 ** (-10 if dtype is E4M3 else -17)  # half of the smallest value of the format
    assert ((back.double() - x.double()).abs() <= relative * x.double().abs() + smallest).all()


@every_format
def test_infinity_and_nan(dtype: torch.dtype) -> None:
    limit = FORMATS[dtype][1]
    x = torch.ones(3, 64)
    x[0, 3], x[0, 5], x[1, 7], x[2, 40] = math.inf, -math.inf, math.nan, -math.nan
    data, scale = mx_cast(x, dtype)
    one = byte_of(1.0, dtype)
    assert scale.tolist() == [[254, one], [255, one], [one, 255]]
    values = data.float()
    assert values[0, 3] == limit
    assert values[0, 5] == -limit
    assert (values[0, :3] == 0).all()  # 2**-127 rounds to 0
    assert values[1, :32].isnan().all()
    assert values[2, 32:].isnan().all()
    assert mx_decode(data, scale, (1, 32))[1, :32].isnan().all()
    big = torch.full((1, 2), 3e38)
    big[0, 1] = math.inf
    assert mx_cast(big, dtype)[0].float()[0, 0] == pytest.approx(3e38 * 2.0**-127, rel=0.13)


@every_tile
@pytest.mark.parametrize("shape", [(0, 64), (64, 0), (0, 0), (1, 1), (1, 33), (33, 1)], ids=str)
@pytest.mark.parametrize("transpose", [False, True])
def test_shapes_and_strides(shape: tuple[int, int], transpose: bool, tile: tuple[int, int]) -> None:
    for x in (torch.ones(shape), torch.ones(shape[::-1]).t(), torch.ones(shape[0], 1).expand(shape)):
        data, scale = mx_cast(x, E4M3, tile=tile, transpose=transpose)
        want = shape[::-1] if transpose else shape
        assert data.shape == want
        assert scale.shape == block_grid(*want, tile)
        assert scale.dtype is torch.uint8
        for result in (data, scale):
            assert result.numel() == 0 or result.stride() == torch.empty(result.shape).stride()
        assert mx_decode(data, scale, tile).shape == want


# ------------------------------------------------------------------------------- torchao


def torchao_cast(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    pytest.importorskip("torchao")
    from torchao.prototype.mx_formats.mx_tensor import ScaleCalculationMode, to_mx

    scale, data = to_mx(x, dtype, 32, ScaleCalculationMode.RCEIL)
    return data, scale.view(torch.uint8)


@every_format
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", data_cases(64, 96))
def test_equal_to_torchao(name: str, dtype: torch.dtype) -> None:
    """All scales; and all data but those of the smallest blocks.

    Byte 0 means 2**-127: ours are multiplied by 2**127, and torchao's by 1, which rounds such elements to 0.
    """
    for x in (data_cases(64, 96)[name], data_cases(64, 96)[name].bfloat16()):
        (data, scale), (their_data, their_scale) = mx_cast(x, dtype), torchao_cast(x, dtype)
        assert_bits(scale, their_scale)
        small = (scale == 0).repeat_interleave(32, 1)
        assert_bits(data[~small], their_data[~small])
        assert (their_data[small].float() == 0).all()
        assert_bits(data[small], numpy_cast(x[small].float().numpy(), np.float32(2.0**127), dtype))
        if name == "tiny":
            assert small.all()
            assert (data.float() != 0).any()


@every_format
@pytest.mark.filterwarnings("ignore")
def test_torchao_rounds_the_logarithm(dtype: torch.dtype) -> None:
    """``log2`` in float32 loses the last bit of a quotient just above a power of two that is far from 1.

    torchao's scale is then one step too small and its largest element saturates; ours is rounded up exactly.
    """
    limit = FORMATS[dtype][1]
    centres = torch.tensor([limit * 2.0**n for n in range(-100, 100)])
    above = torch.nextafter(centres, torch.tensor(math.inf))
    x = torch.zeros(200, 32)
    x[:, 0] = above
    _, scale = mx_cast(x, dtype)
    _, theirs = torchao_cast(x, dtype)
    assert (scale[:, 0] == torch.arange(200) + 28).all()
    differences = scale.int() - theirs.int()
    assert ((differences == 0) | (differences == 1)).all()
    assert (differences == 1).any()


# ------------------------------------------------------------------------------ compiled


@pytest.mark.parametrize(
    ("tile", "columns"), [pytest.param((1, 32), 200, marks=pytest.mark.slow), ((32, 32), 32)], ids=str
)
def test_compiled_as_eager(tile: tuple[int, int], columns: int, dynamo) -> None:
    """One graph for every number of rows, and the same bits."""

    def casts(x: torch.Tensor):
        data, scale = mx_cast(x, E4M3, tile=tile)
        columnwise, columnwise_scale = mx_cast(x, E5M2, tile=tile, transpose=True)
        decoded = mx_decode(data, scale, tile), mx_decode(columnwise, columnwise_scale, tile)
        return [data, scale, columnwise, columnwise_scale, *decoded]

    assert graphs_of(casts, [mixed(rows, columns) for rows in (64, 96, 100, 130)]) == 1


def test_compiled_elements(dynamo) -> None:
    """Inductor's own FP8 conversion, over every bf16 value, alone in a block and among others."""

    def casts(x: torch.Tensor):
        return (*mx_cast(x, E4M3), *mx_cast(x.reshape(-1, 1), E5M2), *mx_cast(x.reshape(-1, 1), E4M3))

    x = all_bf16().reshape(-1, 64)
    for one, other in zip(compiled(casts)(x), casts(x), strict=True):
        assert_bits(one, other)
