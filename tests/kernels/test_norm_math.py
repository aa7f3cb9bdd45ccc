"""The reference norms against float64 formulas and autograd, written here independently."""

import math

import pytest
import torch
import torch._dynamo
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from functional_te.kernels.reference.norm import (
    layer_norm_backward,
    layer_norm_forward,
    rms_norm_backward,
    rms_norm_forward,
)

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
EPS = 1e-5
# Shape of x and number of normalized dims.
SHAPES = [((64,), 1), ((8, 64), 1), ((3, 5, 32), 1), ((2, 3, 4, 16), 1), ((6, 4, 8), 2), ((4, 8), 2), ((2, 3, 4, 8), 3)]


def rms_oracle(x: Tensor, weight: Tensor, zero_centered: bool, eps: float = EPS) -> tuple[Tensor, Tensor]:
    dims = tuple(range(x.dim() - weight.dim(), x.dim()))
    rstd = 1 / torch.sqrt((x**2).mean(dims, keepdim=True) + eps)
    return x * rstd * (1 + weight if zero_centered else weight), rstd


def layer_oracle(
    x: Tensor, weight: Tensor, bias: Tensor, zero_centered: bool, eps: float = EPS
) -> tuple[Tensor, Tensor, Tensor]:
    dims = tuple(range(x.dim() - weight.dim(), x.dim()))
    mean = x.mean(dims, keepdim=True)
    rstd = 1 / torch.sqrt(((x - mean) ** 2).mean(dims, keepdim=True) + eps)
    return (x - mean) * rstd * (1 + weight if zero_centered else weight) + bias, mean, rstd


def double(*tensors: Tensor) -> list[Tensor]:
    return [tensor.detach().double().requires_grad_() for tensor in tensors]


def assert_close(actual: Tensor | None, expected: Tensor, tol: float = 5e-6) -> None:
    assert actual is not None
    assert actual.dtype is torch.float32
    torch.testing.assert_close(actual.double(), expected.detach(), rtol=tol, atol=tol, equal_nan=True)


def check_rms(x: Tensor, weight: Tensor, dy: Tensor, zero_centered: bool, add: Tensor | None = None) -> None:
    y, rstd = rms_norm_forward(x, weight, eps=EPS, zero_centered_gamma=zero_centered)
    leading = x.shape[: x.dim() - weight.dim()]
    x64, w64 = double(x, weight)
    y64, rstd64 = rms_oracle(x64, w64, zero_centered)
    assert_close(y, y64)
    assert_close(rstd, rstd64.reshape(leading))
    dx64, dw64 = torch.autograd.grad(y64, (x64, w64), dy.double())
    dx, dw = rms_norm_backward(dy, x, weight, rstd, zero_centered_gamma=zero_centered, add=add)
    assert_close(dx, dx64 if add is None else dx64 + add.double())
    assert_close(dw, dw64, 2e-5)


def check_layer(x: Tensor, weight: Tensor, bias: Tensor, dy: Tensor, zero_centered: bool) -> None:
    y, mean, rstd = layer_norm_forward(x, weight, bias, eps=EPS, zero_centered_gamma=zero_centered)
    leading = x.shape[: x.dim() - weight.dim()]
    x64, w64, b64 = double(x, weight, bias)
    y64, mean64, rstd64 = layer_oracle(x64, w64, b64, zero_centered)
    assert_close(y, y64)
    assert_close(mean, mean64.reshape(leading))
    assert_close(rstd, rstd64.reshape(leading))
    expected = torch.autograd.grad(y64, (x64, w64, b64), dy.double())
    actual = layer_norm_backward(dy, x, weight, mean, rstd, zero_centered_gamma=zero_centered)
    for one, other in zip(actual, expected, strict=True):
        assert_close(one, other, 2e-5)


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "dims"), SHAPES)
def test_matches_float64(shape: tuple[int, ...], dims: int, dtype: torch.dtype, zero_centered: bool) -> None:
    torch.manual_seed(0)
    x, dy, add = ((2 * torch.randn(shape) + 0.3).to(dtype) for _ in range(3))
    weight, bias = (torch.randn(shape[len(shape) - dims :]).to(dtype) for _ in range(2))
    given_tensors = (x, dy, add, weight, bias)
    before = [tensor.clone() for tensor in given_tensors]
    check_rms(x, weight, dy, zero_centered)
    check_rms(x, weight, dy, zero_centered, add)
    check_layer(x, weight, bias, dy, zero_centered)
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(given_tensors, before, strict=True))


@pytest.mark.parametrize("weight_dtype", DTYPES)
@pytest.mark.parametrize("zero_centered", [False, True])
def test_mixed_dtypes(weight_dtype: torch.dtype, zero_centered: bool) -> None:
    x, dy, add = torch.randn(5, 32).bfloat16(), torch.randn(5, 32).half(), torch.randn(5, 32).bfloat16()
    weight, bias = torch.randn(32).to(weight_dtype), torch.randn(32)
    check_rms(x, weight, dy, zero_centered, add)
    check_layer(x, weight, bias, dy, zero_centered)


def test_zero_centered_gain_is_not_rounded_to_the_weights_dtype() -> None:
    x, weight = torch.ones(2, 16), torch.full((16,), 2.0**-12, dtype=torch.bfloat16)
    y, _ = rms_norm_forward(x, weight, eps=0.0, zero_centered_gamma=True)
    assert torch.equal(y, torch.full((2, 16), 1 + 2.0**-12))
    x = torch.tensor([[1.0, -1.0]])
    y, *_ = layer_norm_forward(x, weight[:2], torch.zeros(2), eps=0.0, zero_centered_gamma=True)
    torch.testing.assert_close(y, x * (1 + 2.0**-12), rtol=1e-7, atol=0)


@settings(max_examples=150, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 4), max_size=3),
    normalized=st.lists(st.integers(2, 5), min_size=1, max_size=2),
    zero_centered=st.booleans(),
    data=st.data(),
)
def test_any_strides_and_empty_batches(
    sizes: list[int], normalized: list[int], zero_centered: bool, data: st.DataObject
) -> None:
    shape = (sizes + normalized)[-4:]
    normalized = shape[-len(normalized) :]
    order = data.draw(st.permutations(range(len(shape))))
    seed = torch.Generator().manual_seed(len(shape))

    def tensor() -> Tensor:
        base = torch.randn([2 * shape[i] for i in order], generator=seed)
        return base.permute([order.index(i) for i in range(len(shape))])[tuple(slice(None, None, 2) for _ in shape)]

    x, dy, add = tensor(), tensor(), tensor()
    weight, bias = torch.randn(*normalized, 2, generator=seed).unbind(-1)
    check_rms(x, weight, dy, zero_centered, add)
    # A row with almost no variance makes 1 / sqrt(eps) amplify rounding beyond any tolerance: spread the values out.
    spread = 10.0 * torch.arange(math.prod(normalized)).view(normalized)
    x.copy_(x + spread)  # keeps the strides
    check_layer(x, weight, bias, dy, zero_centered)


@pytest.mark.parametrize("shape", [(0, 8), (0, 3, 8), (3, 0, 8)])
def test_empty_batch_gives_zero_parameter_gradients(shape: tuple[int, ...]) -> None:
    x, weight, bias = torch.randn(shape), torch.randn(8), torch.randn(8)
    y, rstd = rms_norm_forward(x, weight, eps=EPS, zero_centered_gamma=False)
    dx, dw = rms_norm_backward(y, x, weight, rstd, zero_centered_gamma=False)
    assert y.shape == dx.shape == shape
    assert rstd.shape == shape[:-1]
    assert torch.equal(dw, torch.zeros(8))
    y, mean, rstd = layer_norm_forward(x, weight, bias, eps=EPS, zero_centered_gamma=False)
    dx, dw, db = layer_norm_backward(y, x, weight, mean, rstd, zero_centered_gamma=False)
    assert y.shape == dx.shape == shape
    assert mean.shape == rstd.shape == shape[:-1]
    assert torch.equal(dw, torch.zeros(8))
    assert torch.equal(db, torch.zeros(8))


def test_zero_rows() -> None:
    x, weight, bias, dy = torch.zeros(3, 8), torch.randn(8), torch.randn(8), torch.randn(3, 8)
    check_rms(x, weight, dy, False)
    y, mean, rstd = layer_norm_forward(x, weight, bias, eps=EPS, zero_centered_gamma=False)
    assert torch.equal(y, bias.expand(3, 8))
    assert torch.equal(mean, torch.zeros(3))
    torch.testing.assert_close(rstd, torch.full((3,), EPS**-0.5))
    # eps = 0: the formula itself is 0 * inf.
    assert rms_norm_forward(x, weight, eps=0.0, zero_centered_gamma=False)[0].isnan().all()


def test_nan_and_inf_stay_in_their_row() -> None:
    x = torch.randn(4, 8)
    x[1, 3], x[2, 5] = math.nan, math.inf
    for y in (
        rms_norm_forward(x, torch.ones(8), eps=EPS, zero_centered_gamma=False)[0],
        layer_norm_forward(x, torch.ones(8), torch.zeros(8), eps=EPS, zero_centered_gamma=False)[0],
    ):
        assert y[[0, 3]].isfinite().all()
        assert y[1].isnan().all()
        assert y[2, 5].isnan()


@pytest.mark.parametrize("value", [0.1, 0.7, 1.3])
def test_statistics_of_long_constant_rows(value: float) -> None:
    """Sums that do not cascade are wrong by 1e-5 here."""
    x, weight = torch.full((2, 16384), value), torch.ones(16384)
    _, rstd = rms_norm_forward(x, weight, eps=EPS, zero_centered_gamma=False)
    expected = rms_oracle(x.double(), weight.double(), False)[1].reshape(2)
    torch.testing.assert_close(rstd.double(), expected, rtol=5e-7, atol=0)


@pytest.mark.parametrize("dims", [1, 2])
@pytest.mark.parametrize("needs_input", [False, True])
@pytest.mark.parametrize("needs_params", [False, True])
def test_only_what_is_needed(dims: int, needs_input: bool, needs_params: bool) -> None:
    x, dy = torch.randn(2, 3, 4, 8), torch.randn(2, 3, 4, 8)
    weight, bias = torch.randn(x.shape[-dims:]), torch.randn(x.shape[-dims:])
    _, rstd = rms_norm_forward(x, weight, eps=EPS, zero_centered_gamma=True)
    everything = rms_norm_backward(dy, x, weight, rstd, zero_centered_gamma=True)
    some = rms_norm_backward(
        dy, x, weight, rstd, zero_centered_gamma=True, needs_input=needs_input, needs_weight=needs_params
    )
    _, mean, rstd = layer_norm_forward(x, weight, bias, eps=EPS, zero_centered_gamma=True)
    everything += layer_norm_backward(dy, x, weight, mean, rstd, zero_centered_gamma=True)
    some += layer_norm_backward(
        dy, x, weight, mean, rstd, zero_centered_gamma=True, needs_input=needs_input, needs_affine=needs_params
    )
    wanted = (needs_input, needs_params, needs_input, needs_params, needs_params)
    for want, one, full in zip(wanted, some, everything, strict=True):
        if want:
            torch.testing.assert_close(one, full)
        else:
            assert one is None


def rms_both(dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor | None, ...]:
    y, rstd = rms_norm_forward(x, weight, eps=EPS, zero_centered_gamma=True)
    return y, rstd, *rms_norm_backward(dy, x, weight, rstd, zero_centered_gamma=True, add=dy)


def layer_both(dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor | None, ...]:
    y, mean, rstd = layer_norm_forward(x, weight, bias, eps=EPS, zero_centered_gamma=True)
    return y, mean, rstd, *layer_norm_backward(dy, x, weight, mean, rstd, zero_centered_gamma=True)


@pytest.mark.parametrize("both", [rms_both, layer_both])
@pytest.mark.parametrize("normalized", [(16,), (4, 4)])
def test_compiled_with_a_dynamic_leading_dim(both, normalized: tuple[int, ...]) -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(both, fullgraph=True, backend=counter, dynamic=False)
    weight, bias = torch.randn(normalized), torch.randn(normalized)
    for rows in (8, 3, 5):
        x, dy = torch.randn(rows, *normalized), torch.randn(rows, *normalized)
        torch._dynamo.mark_dynamic(x, 0)
        torch._dynamo.mark_dynamic(dy, 0)
        for actual, expected in zip(compiled(dy, x, weight, bias), both(dy, x, weight, bias), strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)
    assert counter.frame_count == 1
