"""FP8 block scaling: every bf16 value and every scale against ml_dtypes, exact arithmetic and a numpy loop."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from functional_te.quantization.fp8_block import block_cast, block_decode, block_grid
from functional_te.quantization.scaling import current_scale
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
TILES = ((1, 128), (128, 128))
FLOAT32_MAX = float(np.finfo(np.float32).max)
every_tile = pytest.mark.parametrize("tile", TILES, ids=str)
every_power = pytest.mark.parametrize("power_of_2", [True, False], ids=["power of 2", "any scale"])


def exact_scale(amax: float, limit: float, epsilon: float, power_of_2: bool, overflow: float) -> np.float32:
    """The scale in exact arithmetic, rounded once to float32."""
    if not math.isfinite(amax):
        return np.float32(1)
    amax = max(amax, float(np.float32(epsilon)))
    if amax == 0:
        return np.float32(1)
    exact = Fraction(limit) / Fraction(amax)
    if exact >= Fraction(2) ** 128 - Fraction(2) ** 103:  # halfway between the largest float32 and the next power
        exact = Fraction(overflow)
    scale = nearest_float32(exact)
    return np.float32(2.0 ** (math.frexp(scale)[1] - 1)) if power_of_2 else scale


def nearest_float32(exact: Fraction) -> np.float32:
    """Round to nearest even; numpy would round a Fraction through float64, which rounds twice."""
    power = math.frexp(float(exact))[1] - 24
    return np.float32(math.ldexp(round(exact / Fraction(2) ** power), power))


def overflow_of(dtype: torch.dtype) -> float:
    """The largest finite values, written out."""
    return {torch.float32: FLOAT32_MAX, torch.float16: 65504.0, torch.bfloat16: 255.0 * 2.0**120}[dtype]


def oracle(x: torch.Tensor, dtype: torch.dtype, tile: tuple[int, int], power_of_2: bool):
    """Tile by tile: scales in exact arithmetic, data by ml_dtypes."""
    values = x.float().numpy()
    data, scales = np.zeros(values.shape, np.uint8), np.zeros(block_grid(*values.shape, tile), np.float32)
    for i, j in np.ndindex(*scales.shape):
        part = np.s_[i * tile[0] : (i + 1) * tile[0], j * tile[1] : (j + 1) * tile[1]]
        amax = float(np.abs(values[part]).max())
        scales[i, j] = exact_scale(amax, FORMATS[dtype][1], 0.0, power_of_2, overflow_of(x.dtype))
        data[part] = numpy_cast(values[part], scales[i, j], dtype)
    return data, np.float32(1) / scales


# -------------------------------------------------------------------------------- scales

AMAXES = [0.0, 1e-45, 1e-38, 2.0**-126, 1e-36, 2.0**-120, 1e-6, 0.5, 1.0, 3.0, 447.0, 448.0, 449.0, 6e4, 1e30]


@every_format
@every_power
@pytest.mark.parametrize("epsilon", [0.0, 1e-3, 1e-37])
def test_scales(epsilon: float, power_of_2: bool, dtype: torch.dtype) -> None:
    limit = FORMATS[dtype][1]
    amaxes = [*AMAXES, FLOAT32_MAX, math.inf, -math.nan, math.nan]
    amaxes += [
        float(np.nextafter(np.float32(limit * 2.0**n), np.float32(to))) for n in (-30, 0, 30) for to in (0, 1e38)
    ]
    for overflow in (overflow_of(torch.bfloat16), 65504.0):
        amax = torch.tensor(amaxes, dtype=torch.float32)
        scale = current_scale(amax, limit, epsilon=epsilon, power_of_2=power_of_2, overflow=overflow)
        want = [exact_scale(float(value), limit, epsilon, power_of_2, overflow) for value in amax]
        assert scale.tolist() == want


@every_format
@every_power
@given(amax=st.floats(2.0**-149, FLOAT32_MAX, width=32))
def test_scales_anywhere(amax: float, power_of_2: bool, dtype: torch.dtype) -> None:
    limit = FORMATS[dtype][1]
    options = dict(epsilon=0.0, power_of_2=power_of_2)
    scale = current_scale(torch.tensor([amax]), limit, overflow=FLOAT32_MAX, **options)
    assert scale.item() == exact_scale(amax, limit, 0.0, power_of_2, FLOAT32_MAX)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_overflow_is_the_largest_number_of_the_input(dtype: torch.dtype) -> None:
    x = torch.full((1, 1), 2.0**-126, dtype=dtype)
    for power_of_2 in (False, True):
        _, scale_inv = block_cast(x, E4M3, power_of_2=power_of_2)
        assert scale_inv.item() == np.float32(1) / np.float32(2.0**127 if power_of_2 else overflow_of(dtype))


def test_epsilon() -> None:
    x = torch.full((1, 128), 2.0**-10)
    data, scale_inv = block_cast(x, E4M3, epsilon=2.0**-4, power_of_2=False)
    assert scale_inv.item() == np.float32(1) / np.float32(448 * 16)
    assert (data.float() == 7).all()


# ---------------------------------------------------------------------------------- data


@every_format
@every_power
def test_every_bf16_value_alone_in_a_block(power_of_2: bool, dtype: torch.dtype) -> None:
    x = all_bf16().reshape(-1, 1)
    data, scale_inv = block_cast(x, dtype, power_of_2=power_of_2)
    values = x.float().numpy()[:, 0]
    overflow = overflow_of(torch.bfloat16)
    scales = [exact_scale(float(abs(value)), FORMATS[dtype][1], 0.0, power_of_2, overflow) for value in values]
    assert_bits(scale_inv[:, 0], np.float32(1) / np.array(scales))
    assert_bits(data[:, 0], numpy_cast(values, np.array(scales), dtype))


@every_format
def test_every_bf16_value_at_scale_1(dtype: torch.dtype) -> None:
    """In blocks that hold a NaN, an infinity, or nothing beyond the limit."""
    x = all_bf16()
    within = x[x.float().abs() <= FORMATS[dtype][1]]
    for values, neighbour in ((x, math.nan), (x, math.inf), (within, FORMATS[dtype][1])):
        data, scale_inv = block_cast(torch.stack((values, torch.full_like(values, neighbour)), dim=1), dtype)
        assert (scale_inv == 1).all()
        assert_bits(data[:, 0], numpy_cast(values.float().numpy(), np.float32(1), dtype))


@every_format
@every_tile
@given(case=matrices(edge=128), power_of_2=st.booleans())
def test_tiles_as_a_loop(case, power_of_2: bool, tile: tuple[int, int], dtype: torch.dtype) -> None:
    options = dict(tile=tile, power_of_2=power_of_2)
    results = block_cast(case, dtype, **options)
    for one, other in zip(results, oracle(case, dtype, tile, power_of_2), strict=True):
        assert_bits(one, other)
    transposed = block_cast(case, dtype, transpose=True, **options)
    for one, other in zip(transposed, block_cast(case.t().contiguous(), dtype, **options), strict=True):
        assert_bits(one, other)
    if tile == (128, 128):
        for one, other in zip(transposed, results, strict=True):
            assert_bits(one, other.t())


@every_format
@every_power
@pytest.mark.parametrize("name", [name for name in data_cases(64, 256) if name not in ("inf", "nan")])
def test_decoding(name: str, power_of_2: bool, dtype: torch.dtype) -> None:
    x = data_cases(64, 256)[name]
    for tile in TILES:
        data, scale_inv = block_cast(x, dtype, tile=tile, power_of_2=power_of_2)
        back = block_decode(data, scale_inv, tile)
        unit = scale_inv.double().repeat_interleave(tile[0], 0).repeat_interleave(128, 1)[:64]
        assert torch.equal(back, (data.float() * unit.float()))
        relative = 2.0 ** (-4 if dtype is E4M3 else -3)  # half a unit in the last place
        smallest = unit * 2.0 ** (-10 if dtype is E4M3 else -17)  # half of the smallest value of the format
        error = (back.double() - x.double()).abs()
        assert (error <= relative * (1 + 1e-5) * x.double().abs() + smallest * (1 + 1e-5)).all()


@every_tile
@pytest.mark.parametrize("shape", [(0, 256), (256, 0), (0, 0), (1, 1), (1, 129), (129, 1)], ids=str)
@pytest.mark.parametrize("transpose", [False, True])
def test_shapes_and_strides(shape: tuple[int, int], transpose: bool, tile: tuple[int, int]) -> None:
    for x in (torch.ones(shape), torch.ones(shape[::-1]).t(), torch.ones(shape[0], 1).expand(shape)):
        data, scale_inv = block_cast(x, E5M2, tile=tile, transpose=transpose)
        want = shape[::-1] if transpose else shape
        assert data.shape == want
        assert scale_inv.shape == block_grid(*want, tile)
        for result in (data, scale_inv):
            assert result.numel() == 0 or result.stride() == torch.empty(result.shape).stride()
        assert torch.equal(block_decode(data, scale_inv, tile), torch.ones(want))


# ------------------------------------------------------------------------------ compiled


@pytest.mark.parametrize(
    ("tile", "columns"), [((1, 128), 200), pytest.param((128, 128), 128, marks=pytest.mark.slow)], ids=str
)
def test_compiled_as_eager(tile: tuple[int, int], columns: int, dynamo) -> None:
    """The same bits, and one graph for every number of rows that needs more than one tile.

    PyTorch takes a dimension of size 1 as a case of its own, and the number of tiles is a dimension of the result: up
    to 128 rows are another graph.
    """

    def casts(x: torch.Tensor):
        data, scale_inv = block_cast(x, E4M3, tile=tile)
        columnwise, columnwise_scale_inv = block_cast(x, E5M2, tile=tile, power_of_2=False, transpose=True)
        decoded = block_decode(data, scale_inv, tile), block_decode(columnwise, columnwise_scale_inv, tile)
        return [data, scale_inv, columnwise, columnwise_scale_inv, *decoded]

    assert graphs_of(casts, [mixed(rows, columns) for rows in (130, 256, 300, 64, 96, 100, 128)]) == 2


def test_compiled_elements(dynamo) -> None:
    """Inductor's own FP8 conversion and division, over every bf16 value."""

    def casts(x: torch.Tensor):
        alone = x.reshape(-1, 1)
        return (*block_cast(x, E4M3), *block_cast(alone, E5M2), *block_cast(alone, E4M3, power_of_2=False))

    x = all_bf16()
    x[x.isinf() | x.isnan()] = 0  # so that no block has scale 1
    for one, other in zip(compiled(casts)(x.reshape(-1, 64)), casts(x.reshape(-1, 64)), strict=True):
        assert_bits(one, other)


def test_compiled_cast_that_is_sliced(dynamo) -> None:
    """Inductor 2.13 drops elements of a slice of joined tiles; nothing here is joined that way."""

    def casts(x: torch.Tensor):
        data, scale_inv = block_cast(x, E4M3)
        return [data[:, :200].contiguous(), block_decode(data, scale_inv, (1, 128))[:, :200].relu()]

    x = mixed(64, 512)
    for one, other in zip(compiled(casts)(x), casts(x), strict=True):
        assert_bits(one, other)


def test_two_formats_of_one_tensor_compiled_together(dynamo) -> None:
    """Two equal reductions of a bfloat16 tensor in one graph, which Inductor 2.13 cannot always compile."""

    def casts(x: torch.Tensor):
        return [*block_cast(x, E4M3, transpose=True), *block_cast(x, E5M2, transpose=True)]

    x = mixed(256, 64)
    for one, other in zip(compiled(casts)(x), casts(x), strict=True):
        assert_bits(one, other)
