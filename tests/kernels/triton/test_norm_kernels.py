"""RMSNorm, LayerNorm and their gradients against the reference; casts bit for bit."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from functional_te.kernels.reference.norm import (
    layer_norm_backward,
    layer_norm_forward,
    rms_norm_backward,
    rms_norm_forward,
)
from functional_te.quantization.quantizers import MXFP8Quantizer
from functional_te.quantization.tensor import QuantizedTensor

from .casting import E4M3, ENDS, FORMATS, assert_cast, bound_to

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*")

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
EPS = 1e-5
# of x, and how many dims are normalized; rows that split their columns over programs among them
SHAPES = [((21, 300), 1), ((3, 5, 64), 1), ((1, 1), 1), ((70, 1), 1), ((130,), 1), ((2, 3, 4, 17), 2), ((0, 48), 1)]
DTYPES = [(F32, F32), (BF16, BF16), (F16, F32), (F32, BF16)]


def norms():
    from functional_te.kernels.triton import norm

    return norm


def gradients():
    from functional_te.kernels.triton import norm_grad

    return norm_grad


def random(*shape: int, dtype: torch.dtype = F32, device: str = "cpu", seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(dtype).to(device)


def assert_near(actual: Tensor | None, expected: Tensor | None, dtype: torch.dtype, tol: float = 4e-6) -> None:
    """Equal to a float32 result up to the order of additions (``tol``) and one unit in the last place of ``dtype``."""
    assert actual is not None
    assert expected is not None
    assert actual.dtype is dtype
    assert actual.shape == expected.shape
    assert actual.is_contiguous()
    unit = 0.0 if dtype is F32 else torch.finfo(dtype).eps
    rounded = expected.to(dtype).double()
    torch.testing.assert_close(actual.double(), rounded, rtol=unit * 1.01 + tol, atol=tol, equal_nan=True)


def gain(weight: Tensor, zero_centered: bool) -> Tensor:
    return weight.float() + 1 if zero_centered else weight.float()


@pytest.mark.parametrize(("dtype", "weight_dtype"), DTYPES)
@pytest.mark.parametrize(("shape", "dims"), SHAPES)
def test_forward(shape: tuple[int, ...], dims: int, dtype: torch.dtype, weight_dtype: torch.dtype, device: str) -> None:
    x = random(*shape, dtype=dtype, device=device)
    weight, bias = (random(*shape[-dims:], dtype=weight_dtype, device=device, seed=seed) for seed in (1, 2))
    how = dict(eps=EPS, zero_centered_gamma=dtype is weight_dtype)
    y, amax, rstd, total = norms().rms_norm(x, weight, **how, dtype=weight_dtype, bound=None)
    y_ref, rstd_ref = rms_norm_forward(x, weight, **how)
    assert amax is None
    assert total is None
    assert_near(y, y_ref, weight_dtype)
    assert_near(rstd, rstd_ref, F32)
    y, amax, mean, rstd = norms().layer_norm(x, weight, bias, **how, dtype=weight_dtype, bound=None)
    y_ref, mean_ref, rstd_ref = layer_norm_forward(x, weight, bias, **how)
    assert amax is None
    assert_near(mean, mean_ref, F32)
    # a deviation of 0 is a matter of rounding, and rstd of its 1 / sqrt(eps)
    assert_near(rstd, rstd_ref, F32, 1e-5)
    assert_near(y, y_ref, weight_dtype, 1e-5)


# every format, and every way to end a tile at other sizes
@pytest.mark.parametrize(
    ("name", "dtype", "shape"),
    [(name, dtype, (37, 200)) for name in FORMATS for dtype in (F32, BF16)]
    + [(name, BF16, shape) for name in ENDS for shape in ((2, 65, 130), (5, 300), (1, 1), (0, 48))]
    + [("delayed", BF16, (8, 1100))],  # statistics of fewer rows at a time than a word of a transposed copy has
)
def test_rms_norm_cast(shape: tuple[int, ...], dtype: torch.dtype, name: str, device: str) -> None:
    check_rms_norm_cast(shape, dtype, name, device)


def check_rms_norm_cast(shape: tuple[int, ...], dtype: torch.dtype, name: str, device: str) -> None:
    x, add = random(*shape, dtype=dtype, device=device), random(*shape, dtype=dtype, device=device, seed=1)
    weight = random(shape[-1], dtype=BF16, device=device, seed=2)
    bound = bound_to(FORMATS[name], device)
    for extra in (None, add):
        made, amax, rstd, total = norms().rms_norm(
            x, weight, eps=EPS, zero_centered_gamma=True, dtype=dtype, bound=bound, add=extra
        )
        if extra is None:
            total = x
        else:
            assert torch.equal(total, add + x)
        assert_near(rstd, rms_norm_forward(total, weight, eps=EPS, zero_centered_gamma=True)[1], F32)
        y = (total.float() * gain(weight, True)) * rstd[..., None]
        if not bound.quantizer.from_float32:
            y = y.to(dtype)
        assert_cast((made, amax), y, bound, dtype)


@pytest.mark.parametrize("name", ENDS)
@pytest.mark.parametrize(
    ("dtype", "shape"), [(F32, (37, 200)), (F16, (37, 200)), (F16, (5, 300)), (F16, (2, 1)), (F32, (0, 48))]
)
def test_layer_norm_cast(shape: tuple[int, ...], dtype: torch.dtype, name: str, device: str) -> None:
    check_layer_norm_cast(shape, dtype, name, device)


def check_layer_norm_cast(shape: tuple[int, ...], dtype: torch.dtype, name: str, device: str) -> None:
    x = random(*shape, dtype=BF16, device=device)
    weight, bias = (random(shape[-1], dtype=dtype, device=device, seed=seed) for seed in (1, 2))
    bound = bound_to(FORMATS[name], device)
    made, amax, mean, rstd = norms().layer_norm(
        x, weight, bias, eps=EPS, zero_centered_gamma=False, dtype=dtype, bound=bound
    )
    y_ref, mean_ref, rstd_ref = layer_norm_forward(x, weight, bias, eps=EPS, zero_centered_gamma=False)
    assert_near(mean, mean_ref, F32)
    assert_near(rstd, rstd_ref, F32, 1e-5)
    y = (x.float() - mean[..., None]) * rstd[..., None] * gain(weight, False) + bias.float()
    if not bound.quantizer.from_float32:
        y = y.to(dtype)
    if device == "cpu":
        assert_cast((made, amax), y, bound, dtype)
    else:
        # A GPU adds the bias without rounding the product first, so an element may be a step of FP8 off.
        assert isinstance(made, QuantizedTensor)
        step = 0.26 if made.data.dtype is torch.float8_e5m2 else 0.13
        least = made.scale_inv.max().item() if made.scale_inv.numel() else 0.0
        for columnwise in (False, True):
            values = made.dequantize(F32, columnwise=columnwise)
            torch.testing.assert_close(values, y_ref, rtol=step, atol=max(least, 1e-3))


@pytest.mark.parametrize("shape", [(64, 1024), (70, 1100)])
def test_programs_that_read_whole_rows_twice(
    shape: tuple[int, ...], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from functional_te.kernels.triton import sizes

    monkeypatch.setattr(sizes, "FILL", 1)  # as many rows as fill a GPU
    (only,) = sizes.norm_passes(*shape, bound_to(FORMATS["delayed"], device))
    assert (only.rows, only.whole) == (32, False)
    check_rms_norm_cast(shape, BF16, "delayed", device)
    check_layer_norm_cast(shape, F16, "delayed", device)


@pytest.mark.parametrize("copies", [(True, False), (False, True)])
@pytest.mark.parametrize("name", ENDS)
def test_one_copy(name: str, copies: tuple[bool, bool], device: str) -> None:
    x, weight = random(37, 140, device=device), random(140, device=device, seed=1)
    quantizer = dataclasses.replace(FORMATS[name], rowwise=copies[0], columnwise=copies[1])
    bound = bound_to(quantizer, device)
    made, amax, rstd, _ = norms().rms_norm(x, weight, eps=EPS, zero_centered_gamma=False, dtype=F32, bound=bound)
    assert_cast((made, amax), (x * weight) * rstd[:, None], bound, F32)


def test_add_in_mixed_dtypes(device: str) -> None:
    weight = random(200, device=device)
    for one, other in ((BF16, F16), (F32, BF16), (BF16, BF16), (F16, F16)):
        x, add = random(9, 200, dtype=one, device=device), random(9, 200, dtype=other, device=device, seed=1)
        y, _, rstd, total = norms().rms_norm(
            x, weight, eps=EPS, zero_centered_gamma=False, dtype=F32, bound=None, add=add
        )
        assert total.dtype is (add + x).dtype
        assert torch.equal(total, add + x)
        assert torch.equal(y, (total.float() * weight) * rstd[:, None])


def test_layouts(device: str) -> None:
    x, weight = random(300, 37, device=device).t(), random(600, device=device)[::2]
    y, _, rstd, _ = norms().rms_norm(x, weight, eps=EPS, zero_centered_gamma=False, dtype=F32, bound=None)
    assert_near(y, rms_norm_forward(x, weight, eps=EPS, zero_centered_gamma=False)[0], F32)
    dy = random(300, 37, device=device, seed=1).t()
    dx, dweight = gradients().rms_norm_grad(dy, x, weight, rstd, zero_centered_gamma=False, dtype=F32)
    dx_ref, dweight_ref = rms_norm_backward(dy, x, weight, rstd, zero_centered_gamma=False)
    assert_near(dx, dx_ref, F32)
    assert_near(dweight, dweight_ref, F32, 2e-5)


def test_rows_far_from_zero(device: str) -> None:
    """The variance of a row with a large mean, of a constant row and of a row that starts with an outlier."""
    x = random(4, 300, device=device)
    x[0] += 1e4
    x[1] = 1234.5
    x[2, 0] = 1e5
    ones, zeros = torch.ones(300, device=device), torch.zeros(300, device=device)
    y, _, mean, rstd = norms().layer_norm(x, ones, zeros, eps=EPS, zero_centered_gamma=False, dtype=F32, bound=None)
    wide = x.double()
    exact = ((wide - wide.mean(1, keepdim=True)).square().mean(1) + EPS).rsqrt()
    torch.testing.assert_close(rstd.double(), exact, rtol=1e-4, atol=0)
    torch.testing.assert_close(mean.double(), wide.mean(1), rtol=1e-6, atol=1e-6)
    assert torch.equal(y[1], zeros)


def test_special_values(device: str) -> None:
    x = random(5, 150, device=device)
    x[0, 3], x[1, 4], x[2] = math.nan, math.inf, 0.0
    weight = random(150, device=device, seed=1)
    for name in ENDS:
        bound = bound_to(FORMATS[name], device)
        made, amax, rstd, _ = norms().rms_norm(x, weight, eps=EPS, zero_centered_gamma=False, dtype=F32, bound=bound)
        assert_cast((made, amax), (x * weight) * rstd[:, None], bound, F32)
    y = norms().layer_norm(x, weight, weight, eps=EPS, zero_centered_gamma=False, dtype=F32, bound=None)[0]
    y_ref = layer_norm_forward(x, weight, weight, eps=EPS, zero_centered_gamma=False)[0]
    assert torch.equal(y.isnan(), y_ref.isnan())
    assert_near(y[2:], y_ref[2:], F32, 1e-5)


def test_cases_without_a_kernel(device: str) -> None:
    x, weight = random(4, 8, 32, device=device), random(8, 32, device=device)
    how = dict(eps=EPS, zero_centered_gamma=False, dtype=F32)
    bound = bound_to(FORMATS["current"], device)
    assert norms().rms_norm(x, weight, **how, bound=bound) is None
    assert norms().layer_norm(x, weight, weight, **how, bound=bound) is None
    other = bound_to(MXFP8Quantizer(E4M3), device)
    assert norms().rms_norm(x, weight[0], **how, bound=other) is None


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize(("dtype", "weight_dtype"), DTYPES)
@pytest.mark.parametrize(("shape", "dims"), SHAPES)
def test_gradients(
    shape: tuple[int, ...],
    dims: int,
    dtype: torch.dtype,
    weight_dtype: torch.dtype,
    whole: bool,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from functional_te.kernels.triton import sizes

    # so that a program has more than one tile of rows
    monkeypatch.setattr(sizes, "FILL", 1)
    if not whole:
        monkeypatch.setattr(sizes, "WHOLE_ROW", 0)
    x, dy = random(*shape, dtype=dtype, device=device), random(*shape, dtype=weight_dtype, device=device, seed=1)
    add = random(*shape, dtype=BF16, device=device, seed=2)
    weight = random(*shape[-dims:], dtype=weight_dtype, device=device, seed=3)
    rstd = rms_norm_forward(x, weight, eps=EPS, zero_centered_gamma=False)[1]
    _, mean, spread = layer_norm_forward(x, weight, weight, eps=EPS, zero_centered_gamma=False)
    for zero_centered, extra in ((False, None), (True, add)):
        how = dict(zero_centered_gamma=zero_centered)
        dx, dweight = gradients().rms_norm_grad(dy, x, weight, rstd, **how, add=extra, dtype=dtype)
        dx_ref, dweight_ref = rms_norm_backward(dy, x, weight, rstd, **how, add=extra)
        assert_near(dx, dx_ref, dtype, 2e-5)
        assert_near(dweight, dweight_ref, weight_dtype, 2e-5)
    got = gradients().layer_norm_grad(dy, x, weight, mean, spread, zero_centered_gamma=True, dtype=dtype)
    want = layer_norm_backward(dy, x, weight, mean, spread, zero_centered_gamma=True)
    # one element is normalized to 0 or so, times 1 / sqrt(eps)
    for mine, theirs, kind in zip(got, want, (dtype, weight_dtype, weight_dtype), strict=True):
        assert_near(mine, theirs, kind, 2e-5 if shape[-1] > 1 else 2e-3)


@pytest.mark.parametrize("needs", [(True, False), (False, True), (False, False)])
@pytest.mark.parametrize("whole", [True, False])
def test_gradients_that_are_not_needed(
    needs: tuple[bool, bool], whole: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not whole:
        from functional_te.kernels.triton import sizes

        monkeypatch.setattr(sizes, "WHOLE_ROW", 0)
    x, dy, weight = random(20, 70, device=device), random(20, 70, device=device, seed=1), random(70, device=device)
    rstd = rms_norm_forward(x, weight, eps=EPS, zero_centered_gamma=False)[1]
    how = dict(zero_centered_gamma=False, dtype=F32)
    grads = gradients().rms_norm_grad(dy, x, weight, rstd, **how, needs_input=needs[0], needs_weight=needs[1])
    every = gradients().rms_norm_grad(dy, x, weight, rstd, **how)
    for one, full, needed in zip(grads, every, needs, strict=True):
        assert torch.equal(one, full) if needed else one is None
    mean = x.mean(1)
    grads = gradients().layer_norm_grad(dy, x, weight, mean, rstd, **how, needs_input=needs[0], needs_affine=needs[1])
    every = gradients().layer_norm_grad(dy, x, weight, mean, rstd, **how)
    for one, full, needed in zip(grads, every, (*needs, needs[1]), strict=True):
        assert torch.equal(one, full) if needed else one is None


def test_two_runs_give_the_same_bits(device: str) -> None:
    x, dy, weight = random(40, 260, device=device), random(40, 260, device=device, seed=1), random(260, device=device)
    runs = []
    for _ in range(2):
        y, _, mean, rstd = norms().layer_norm(
            x, weight, weight, eps=EPS, zero_centered_gamma=False, dtype=F32, bound=None
        )
        grads = gradients().layer_norm_grad(dy, x, weight, mean, rstd, zero_centered_gamma=False, dtype=F32)
        runs.append((y, mean, rstd, *grads))
    for one, other in zip(*runs, strict=True):
        assert torch.equal(one, other)
