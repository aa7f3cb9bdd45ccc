"""Activations and their gradients: values against float64 and the reference, casts bit for bit."""

from __future__ import annotations

import math

import pytest
import torch

from functional_te.kernels.reference.activation import (
    ACTIVATIONS,
    activation_backward,
    activation_forward,
    deinterleave,
    interleave,
    is_gated,
)
from functional_te.quantization.quantizers import MXFP8Quantizer
from functional_te.quantization.tensor import BoundQuantizer
from tests.kernels.test_activation_math import CONFIGS, oracle, out_shape

from .casting import E4M3, ENDS, FORMATS, assert_cast, bound_to

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*")

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
SPECIAL = (math.inf, -math.inf, math.nan, 0.0, -0.0, 7.0, -7.0, 1e-30, -1e-30, 90.0, -90.0, 1e19, -1e19, 3e38, -3e38)


def forward(x, kind, config=(), block=0, *, dtype=None, bound=None):
    from functional_te.kernels.triton import activation

    return activation.activation(x, kind, config, block, dtype=dtype or x.dtype, bound=bound)


def backward(dy, x, kind, config=(), block=0, *, dtype=None, bound=None, needs_bias=False):
    from functional_te.kernels.triton import activation

    return activation.activation_grad(
        dy, x, kind, config, block, dtype=dtype or x.dtype, bound=bound, needs_bias=needs_bias
    )


def inputs(kind: str, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """x and dy; ``shape`` is that of the output."""
    generator = torch.Generator().manual_seed(len(kind) + sum(shape))
    x = 3 * torch.randn((*shape[:-1], shape[-1] * (2 if is_gated(kind) else 1)), generator=generator)
    return x.to(dtype).to(device), torch.randn(shape, generator=generator).to(dtype).to(device)


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Within a unit in the last place of the dtype and a few of float32, of values of ordinary size."""
    rounding = torch.finfo(actual.dtype).eps if actual.dtype is not F32 else 0.0
    torch.testing.assert_close(actual.double(), expected, rtol=rounding + 4e-6, atol=4e-6, equal_nan=True)


def test_every_kind_has_a_kernel() -> None:
    pytest.importorskip("triton")
    from functional_te.kernels.triton.formulas import FORMULAS

    assert {kind: linear != "" for kind, (_, linear) in FORMULAS.items()} == {
        kind: is_gated(kind) for kind in ACTIVATIONS
    }


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize(("kind", "config"), CONFIGS)
def test_matches_float64(kind: str, config: tuple[float, ...], dtype: torch.dtype, device: str) -> None:
    x, dy = inputs(kind, (3, 23, 30), dtype, device)
    y, dx = oracle(x, kind, config, dy)
    assert_close(forward(x, kind, config)[0], y)
    assert_close(backward(dy, x, kind, config)[0], dx)


@pytest.mark.parametrize("kind", [*ACTIVATIONS])
def test_small_values(kind: str, device: str) -> None:
    """Relative to the result, also where a formula with an exponential would cancel."""
    x, dy = inputs(kind, (20, 31), F32, device)
    x = x * torch.exp2(-torch.arange(20.0, device=device))[:, None]
    y, dx = activation_forward(x, kind), activation_backward(dy, x, kind)
    torch.testing.assert_close(forward(x, kind)[0], y, rtol=1e-5, atol=2e-6 if "ge" in kind else 1e-30)
    torch.testing.assert_close(backward(dy, x, kind)[0], dx, rtol=1e-5, atol=4e-6)


@pytest.mark.parametrize("kind", [*ACTIVATIONS])
def test_special_values(kind: str, device: str) -> None:
    """Infinities, NaN, saturation and the boundaries of clamps come out as in the reference."""
    special = torch.tensor(SPECIAL, device=device)
    # the reference's GELU of -7 is 0, for it subtracts from 1; the kernel's is -2e-15, as it should be
    a, b, dy = torch.meshgrid(special[special.abs() != 7] if "ge" in kind else special, special, special, indexing="ij")
    x = torch.cat((a, b), -1) if is_gated(kind) else a
    for got, want in (
        (forward(x, kind)[0], activation_forward(x, kind)),
        (backward(dy, x, kind)[0], activation_backward(dy, x, kind)),
    ):
        # products that are zero or not for being below float32's smallest number may differ
        torch.testing.assert_close(got, want, rtol=3e-5, atol=1e-30, equal_nan=True)


@pytest.mark.parametrize("shape", [(1, 1), (65, 129), (2, 0, 5), (4, 0), (7,), (64, 256)])
@pytest.mark.parametrize("kind", ["silu", "swiglu", "clamped_swiglu"])
def test_shapes(kind: str, shape: tuple[int, ...], device: str) -> None:
    x, dy = inputs(kind, shape, F32, device)
    y, dx = oracle(x, kind, (), dy)
    made, amax = forward(x, kind)
    assert amax is None
    assert made.shape == out_shape(x, kind)
    assert_close(made, y)
    made, amax, bias = backward(dy, x, kind, needs_bias=True)
    assert amax is None
    assert_close(made, dx)
    sums = dx[None] if dx.dim() == 1 else dx.flatten(0, -2)
    assert bias.shape == sums.shape[1:]
    assert ((bias - sums.sum(0)).abs() <= 4e-6 * (1 + sums.abs().sum(0))).all()


def test_mixed_dtypes_and_strides(device: str) -> None:
    x, dy = inputs("swiglu", (33, 50), F32, device)
    x, dy = x.to(BF16), dy.to(F16)
    wanted = oracle(x, "swiglu", (), dy)[1]
    assert_close(backward(dy.t().contiguous().t(), x.t().contiguous().t(), "swiglu", dtype=F32)[0], wanted)
    spread = torch.ones((), device=device).expand(33, 50)
    assert_close(backward(spread, x[:, :100], "swiglu", dtype=F32)[0], oracle(x, "swiglu")[1])
    assert_close(forward(x[::2], "swiglu", dtype=F32)[0], oracle(x[::2], "swiglu")[0])


@pytest.mark.parametrize(("kind", "block"), [("swiglu", 1), ("clamped_swiglu", 8), ("swiglu", 32)])
def test_interleaved(kind: str, block: int, device: str) -> None:
    """The same bits as of two halves, in the other order; also cast."""
    x, dy = inputs(kind, (2, 20, 160), BF16, device)
    mixed = interleave(x, block)
    assert torch.equal(forward(mixed, kind, (), block)[0], forward(x, kind)[0])
    made, _, bias = backward(dy, mixed, kind, (), block, needs_bias=True)
    wanted, _, wanted_bias = backward(dy, x, kind, needs_bias=True)
    assert torch.equal(deinterleave(made, block), wanted)
    assert torch.equal(deinterleave(bias, block), wanted_bias)
    bound = bound_to(FORMATS["current"], device)
    assert_cast(forward(mixed, kind, (), block, bound=bound), forward(x, kind)[0], bound, BF16)
    assert backward(dy, mixed, kind, (), block, bound=bound) is None


@pytest.mark.parametrize(
    ("kind", "shape"), [("gelu", (70, 100)), ("swiglu", (70, 256)), ("clamped_swiglu", (3, 5, 128))]
)
@pytest.mark.parametrize("name", ENDS)
def test_casts(kind: str, name: str, shape: tuple[int, ...], device: str) -> None:
    """What is cast is what the same kernel stores plainly: in float32, or rounded first where the format says so."""
    x, dy = inputs(kind, shape, BF16, device)
    bound = bound_to(FORMATS[name], device)
    stored = F32 if bound.quantizer.from_float32 else BF16
    assert_cast(forward(x, kind, bound=bound), forward(x, kind, dtype=stored)[0], bound, BF16)
    plain = backward(dy, x, kind, dtype=stored)[0]
    made, amax, bias = backward(dy, x, kind, bound=bound)
    assert bias is None
    assert_cast((made, amax), plain, bound, BF16)


@pytest.mark.parametrize(("kind", "shape"), [("relu", (70, 100)), ("swiglu", (3, 33, 128))])
@pytest.mark.parametrize("name", ENDS)
def test_bias_gradient(kind: str, name: str, shape: tuple[int, ...], device: str) -> None:
    """With a bias gradient every format casts the rounded value, which is also what is summed."""
    x, dy = inputs(kind, shape, BF16, device)
    bound = bound_to(FORMATS[name], device)
    plain, _, plain_bias = backward(dy, x, kind, needs_bias=True)
    assert torch.equal(plain, backward(dy, x, kind)[0])
    made, amax, bias = backward(dy, x, kind, bound=bound, needs_bias=True)
    assert_cast((made, amax), plain, bound, BF16)
    flat = plain.double().flatten(0, -2)
    assert bias.dtype is BF16
    for sums in (bias, plain_bias):
        error = (sums.double() - flat.sum(0)).abs()
        assert (error <= torch.finfo(BF16).eps / 2 * flat.sum(0).abs() + 1e-6 * flat.abs().sum(0)).all()
    assert torch.equal(bias, backward(dy, x, kind, bound=bound, needs_bias=True)[2])


@pytest.mark.parametrize("cols", [40, 136])
@pytest.mark.parametrize("name", ENDS)
def test_ragged_halves(name: str, cols: int, device: str) -> None:
    """The first half ends inside of a tile; blocks that would straddle the halves are left to the caller."""
    x, dy = inputs("swiglu", (66, cols), BF16, device)
    bound = bound_to(FORMATS[name], device)
    stored = F32 if bound.quantizer.from_float32 else BF16
    assert_cast(forward(x, "swiglu", bound=bound), forward(x, "swiglu", dtype=stored)[0], bound, BF16)
    made = backward(dy, x, "swiglu", bound=bound)
    if "block" in name:
        assert made is None
    else:
        assert_cast(made[:2], backward(dy, x, "swiglu", dtype=stored)[0], bound, BF16)


@pytest.mark.parametrize("shape", [(0, 128), (5, 0)])
@pytest.mark.parametrize("name", ENDS)
def test_no_elements(name: str, shape: tuple[int, ...], device: str) -> None:
    x, dy = inputs("swiglu", shape, F32, device)
    bound = bound_to(FORMATS[name], device)
    assert_cast(forward(x, "swiglu", bound=bound), dy, bound, F32)
    made, amax, bias = backward(dy, x, "swiglu", bound=bound, needs_bias=True)
    assert_cast((made, amax), x, bound, F32)
    assert torch.equal(bias, torch.zeros_like(x[:1].sum(0)))


@pytest.mark.parametrize("special", [math.inf, math.nan])
@pytest.mark.parametrize("name", ENDS)
def test_special_values_are_cast(name: str, special: float, device: str) -> None:
    x, dy = inputs("swiglu", (20, 128), F32, device)
    x[3, 5], dy[4, 7] = special, special
    bound = bound_to(FORMATS[name], device)
    assert_cast(forward(x, "swiglu", bound=bound), forward(x, "swiglu")[0], bound, F32)
    assert_cast(backward(dy, x, "swiglu", bound=bound)[:2], backward(dy, x, "swiglu")[0], bound, F32)


def test_no_kernel(device: str) -> None:
    x, dy = inputs("swiglu", (32, 64), F32, device)
    bound = BoundQuantizer(quantizer=MXFP8Quantizer(E4M3))
    assert forward(x, "swiglu", bound=bound) is None
    assert backward(dy, x, "swiglu", bound=bound) is None
    assert forward(x, "another") is None
    assert backward(dy, x, "another") is None
