"""Dropout against the reference, the mask bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from functional_te.kernels import reference
from functional_te.quantization.random import make_key

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*")

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


def kernel(*args, **kwargs):
    from functional_te.kernels.triton import dropout

    return dropout.dropout(*args, **kwargs)


def random(*shape: int, dtype: torch.dtype = F32, device: str = "cpu", seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 63, 64, 1000, 8192, 9001])
def test_mask(count: int, device: str) -> None:
    for seed, p in ((0, 0.1), ((1 << 63) + 12345, 0.5), (3, 0.99999)):
        key, ones = make_key(seed, device=device), torch.ones(count, device=device)
        assert torch.equal(kernel(ones, key, p=p, dtype=F32), reference.dropout(ones, key, p=p))


@pytest.mark.parametrize(("dtype", "out_dtype"), [(F32, F32), (BF16, BF16), (F16, F32), (F32, BF16)])
@pytest.mark.parametrize("shape", [(37, 13), (3, 5, 40), (64, 128), (1, 1), (11,), (), (0, 4), (2, 300)])
def test_bias_and_residual(shape: tuple[int, ...], dtype: torch.dtype, out_dtype: torch.dtype, device: str) -> None:
    x, add = random(*shape, dtype=dtype, device=device), random(*shape, dtype=BF16, device=device, seed=1)
    bias = random(shape[-1] if shape else 1, dtype=F16, device=device, seed=2)
    for key in (make_key(7, device=device), None):
        for own in (dict(), dict(bias=bias), dict(add=add), dict(bias=bias, add=add)):
            if not shape and "bias" in own:
                continue
            y = kernel(x, key, p=0.25, dtype=out_dtype, **own)
            expected = reference.dropout(x, key, p=0.25, **own).to(out_dtype)
            assert y.dtype is out_dtype
            assert y.shape == x.shape
            if device == "cpu":
                assert torch.equal(y, expected)
            else:
                # A GPU adds the residual without rounding the product first.
                torch.testing.assert_close(y, expected, rtol=torch.finfo(out_dtype).eps * 1.01, atol=1e-6)


def test_layouts(device: str) -> None:
    x, bias = random(40, 24, device=device).t(), random(80, device=device)[::2]
    add = random(24, 80, device=device)[:, ::2]
    key = make_key(1, device=device)
    expected = reference.dropout(x, key, p=0.5, bias=bias, add=add)
    y = kernel(x, key, p=0.5, dtype=F32, bias=bias, add=add)
    torch.testing.assert_close(y, expected, rtol=1e-6, atol=1e-6)
    assert y.is_contiguous()


def test_dropped_specials(device: str) -> None:
    x = torch.tensor([float("nan"), float("inf"), -float("inf"), -1.0] * 50, device=device)
    key = make_key(2, device=device)
    expected = reference.dropout(x, key, p=0.5)
    torch.testing.assert_close(kernel(x, key, p=0.5, dtype=F32), expected, rtol=0, atol=0, equal_nan=True)
