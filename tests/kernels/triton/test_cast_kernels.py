"""Casts of whole tensors, bit for bit those of the reference; with a bias gradient."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from functional_te.kernels import kernels
from functional_te.quantization.cast import quantize_bound
from functional_te.quantization.quantizers import Float8BlockQuantizer, Float8CurrentScalingQuantizer, MXFP8Quantizer
from functional_te.quantization.tensor import BoundQuantizer

from .casting import E4M3, E5M2, ENDS, FORMATS, assert_cast, bound_to

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*")

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
CASES = [
    *(((130, 200), dtype) for dtype in (F32, BF16, F16)),
    ((1, 7), F32),
    ((64, 128), BF16),
    ((3, 5, 33), F16),
    ((9,), BF16),
    ((), F32),
]


def quantize(*args, **kwargs):
    from functional_te.kernels.triton import cast

    return cast.quantize(*args, **kwargs)


def cast_bias(*args, **kwargs):
    from functional_te.kernels.triton import cast

    return cast.cast_bias(*args, **kwargs)


def transpose(*args, **kwargs):
    from functional_te.kernels.triton import cast

    return cast.transpose(*args, **kwargs)


def values(shape: tuple[int, ...], dtype: torch.dtype, device: str, seed: int = 0) -> torch.Tensor:
    """Magnitudes over many powers of two, zeros of both signs among them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * torch.exp2(torch.randint(-12, 7, shape, generator=generator).float())
    x = torch.where(torch.rand(shape, generator=generator) < 0.05, torch.copysign(torch.zeros(()), x), x)
    return x.to(dtype).to(device)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("shape", "dtype"), CASES)
def test_equals_the_reference(shape: tuple[int, ...], name: str, dtype: torch.dtype, device: str) -> None:
    x = values(shape, dtype, device)
    bound = bound_to(FORMATS[name], device)
    assert_cast(quantize(x, bound), x, bound, dtype)


def test_the_amax_goes_where_it_is_told_to(device: str) -> None:
    x = values((64, 128), BF16, device)
    bound = bound_to(FORMATS["delayed"], device)
    blank = torch.zeros(1, device=device)
    made, amax = quantize(x, dataclasses.replace(bound, blank=blank))
    assert amax is blank
    assert_cast((made, amax), x, bound, BF16)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("shape", [(0, 130), (130, 0), (2, 0, 3), (0,)])
def test_no_elements(shape: tuple[int, ...], name: str, device: str) -> None:
    x = torch.empty(shape, device=device)
    bound = bound_to(FORMATS[name], device)
    assert_cast(quantize(x, bound), x, bound, x.dtype)


@pytest.mark.parametrize("special", [0.0, math.inf, -math.inf, math.nan, 3e38, 1e-40])
@pytest.mark.parametrize("name", FORMATS)
def test_special_values(name: str, special: float, device: str) -> None:
    alone = torch.full((9, 130), special, device=device)
    among = values((9, 130), torch.float32, device)
    among[3, 5] = special
    bound = bound_to(FORMATS[name], device)
    for x in (alone, among):
        assert_cast(quantize(x, bound), x, bound, x.dtype)


@pytest.mark.parametrize("dtype", [E4M3, torch.float8_e5m2])
def test_rounding_at_every_boundary(dtype: torch.dtype, device: str) -> None:
    """All FP8 values, the midpoints between neighbours, and the float32 values next to those."""
    numbers = torch.arange(128, dtype=torch.uint8).view(dtype).float()
    numbers = numbers[numbers.isfinite()].sort().values
    middle = (numbers[1:] + numbers[:-1]) / 2
    up, down = torch.nextafter(middle, torch.tensor(math.inf)), torch.nextafter(middle, torch.tensor(0.0))
    x = torch.cat((numbers, middle, up, down))
    x = torch.cat((x, -x))[None].to(device)
    bound = bound_to(dataclasses.replace(FORMATS["delayed"], dtype=dtype), device, scale=1.0)
    assert_cast(quantize(x, bound), x, bound, x.dtype)


@pytest.mark.parametrize("name", ENDS)
def test_strides(name: str, device: str) -> None:
    x = values((4, 30, 50), torch.bfloat16, device)
    bound = bound_to(FORMATS[name], device)
    for view in (x.transpose(0, 2), x[::2, 5:, ::3], x[:1].expand(4, 30, 50), x[0].t()):
        assert_cast(quantize(view, bound), view, bound, x.dtype)


@pytest.mark.parametrize("copies", [(True, False), (False, True)])
@pytest.mark.parametrize("name", ENDS)
def test_one_copy(name: str, copies: tuple[bool, bool], device: str) -> None:
    x = values((33, 140), torch.float32, device)
    bound = bound_to(FORMATS[name].with_usage(*copies), device)
    assert_cast(quantize(x, bound), x, bound, x.dtype)


@pytest.mark.parametrize("name", ENDS)
def test_nominal_dtype_rounds_nothing(name: str, device: str) -> None:
    x = values((33, 140), torch.float32, device)
    bound = bound_to(FORMATS[name], device)
    assert_cast(quantize(x, bound, torch.bfloat16), x, bound, torch.bfloat16)


def test_formats_without_a_kernel(device: str) -> None:
    x = values((64, 64), torch.float32, device)
    bound = BoundQuantizer(quantizer=MXFP8Quantizer(E4M3))
    made, wanted = quantize(x, bound)[0], quantize_bound(x, bound)[0]
    assert torch.equal(made.rowwise_data.view(torch.uint8), wanted.rowwise_data.view(torch.uint8))
    assert cast_bias(x, bound, dtype=x.dtype) is None
    nothing = bound_to(Float8CurrentScalingQuantizer(E4M3, rowwise=False), device)
    assert_cast(quantize(x, nothing), x, nothing, x.dtype)


@pytest.mark.parametrize("name", ENDS)
@pytest.mark.parametrize(("shape", "dtype"), [*CASES, ((0, 9), F32), ((9, 0), BF16)])
def test_bias_gradient(shape: tuple[int, ...], name: str, dtype: torch.dtype, device: str) -> None:
    dy = values(shape, dtype, device)
    bound = bound_to(FORMATS[name], device)
    made, amax, bias = cast_bias(dy, bound, dtype=dtype)
    assert_cast((made, amax), dy, bound, dtype)
    flat = dy.double().flatten(0, -2) if len(shape) > 1 else dy.double().reshape(1, -1)
    assert bias.dtype is dtype
    assert bias.shape == flat.shape[1:]
    # of float32 sums in any order, rounded once
    unit = torch.finfo(dtype).eps * flat.sum(0).abs() + 1e-6 * flat.abs().sum(0)
    assert ((bias.double() - flat.sum(0)).abs() <= unit).all()
    again = cast_bias(dy, bound, dtype=dtype)[2]
    assert torch.equal(bias, again)


@pytest.mark.parametrize("name", ENDS)
def test_bias_gradient_rounds_first(name: str, device: str) -> None:
    dy = values((33, 140), torch.float32, device)
    bound = bound_to(FORMATS[name], device)
    rounded = dy.to(torch.bfloat16)
    made, amax, bias = cast_bias(dy, bound, dtype=torch.bfloat16)
    assert_cast((made, amax), rounded, bound, torch.bfloat16)
    assert torch.equal(bias, cast_bias(rounded, bound, dtype=torch.bfloat16)[2])
    made, amax, bias = cast_bias(dy, bound, dtype=torch.float32, needs_bias=False)
    assert bias is None
    assert_cast((made, amax), dy, bound, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32])
def test_other_dtypes_are_cast_by_the_reference(dtype: torch.dtype, device: str) -> None:
    x = torch.arange(-8, 8, device=device).reshape(2, 8).to(dtype)
    bound = BoundQuantizer(quantizer=Float8CurrentScalingQuantizer(dtype=torch.float8_e4m3fn, columnwise=True))
    made, wanted = quantize(x, bound)[0], quantize_bound(x, bound)[0]
    assert torch.equal(made.dequantize(torch.float32), wanted.dequantize(torch.float32))


@pytest.mark.parametrize("dtype", [F32, BF16, torch.float16])
@pytest.mark.parametrize("element", [E4M3, E5M2])
def test_scales_of_every_exponent(element: torch.dtype, dtype: torch.dtype, device: str) -> None:
    """Powers of two that come from bits are those of the quotient: at its edges, of subnormal numbers, of specials."""
    mantissas = torch.tensor([0, 1, 0x5FFFFF, 0x600000, 0x600001, 0x7FFFFF], dtype=torch.int32)
    # the interpreter reads subnormal numbers in bfloat16 wrongly
    exponents = torch.arange(1 if dtype is BF16 and device == "cpu" else 0, 256, dtype=torch.int32)
    peaks = ((exponents[:, None] << 23) | mantissas).flatten().view(F32).to(dtype)
    x = torch.zeros((len(peaks), 4), dtype=dtype, device=device)
    x[:, 2] = peaks.to(device)
    bound = bound_to(Float8BlockQuantizer(element, columnwise=True, block_scaling_dim=1), device)
    assert_cast(quantize(x, bound), x, bound, dtype)


@pytest.mark.parametrize("shape", [(4, 1), (64, 128), (72, 33), (132, 260), (0, 5), (8, 0)])
@pytest.mark.parametrize("dtype", [E4M3, E5M2, torch.uint8])
def test_transpose(shape: tuple[int, int], dtype: torch.dtype, device: str) -> None:
    x = torch.randint(0, 256, shape, dtype=torch.uint8, device=device).view(dtype)
    made, out = transpose(x), torch.empty(shape[::-1], dtype=dtype, device=device)
    assert made.is_contiguous()
    assert transpose(x, out) is out
    for found in (made, out):
        assert torch.equal(found.view(torch.uint8), x.view(torch.uint8).t())


def test_transpose_of_other_rows(device: str) -> None:
    """Words of four rows need a multiple of four; a backend copies others."""
    x = torch.randint(0, 256, (6, 5), dtype=torch.uint8, device=device)
    assert transpose(x) is None
    backend = kernels("triton")
    assert torch.equal(backend.transpose(x), x.t())
    assert torch.equal(backend.transpose(x[:4].t(), torch.empty(4, 5, dtype=x.dtype, device=device)), x[:4])
