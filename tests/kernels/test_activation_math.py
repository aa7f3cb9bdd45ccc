"""The reference activations against float64 formulas and autograd, written here independently."""

import math

import pytest
import torch
import torch._dynamo
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from functional_te.kernels.reference.activation import (
    ACTIVATIONS,
    activation_backward,
    activation_forward,
    deinterleave,
    interleave,
    is_gated,
)

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
INF, NAN = math.inf, math.nan


def logistic(x: Tensor) -> Tensor:
    return 0.5 * (1 + torch.tanh(0.5 * x))  # 1 / (1 + exp(-x)) has NaN gradients where exp overflows


def gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(0.7978845608028654 * (x + 0.044715 * x**3)))


def positive(x: Tensor) -> Tensor:
    return torch.where(x > 0, x, 0 * x)


UNARY = {
    "gelu": gelu,
    "erf_gelu": lambda x: 0.5 * x * torch.erfc(-x / 2**0.5),
    "qgelu": lambda x: x * logistic(1.702 * x),
    "silu": lambda x: x * logistic(x),
    "relu": positive,
    "srelu": lambda x: positive(x) ** 2,
    "tanh_srelu": lambda x, s=1.0: (s * torch.tanh(positive(x) / s)) ** 2,
}


def situglu(a: Tensor, b: Tensor, beta1: float = 4.0, beta2: float = 25.0) -> Tensor:
    return beta1 * torch.tanh(a / beta1) * logistic(a) * beta2 * torch.tanh(b / beta2)


def clamped_swiglu(a: Tensor, b: Tensor, limit: float = 7.0, alpha: float = 1.702, offset: float = 1.0) -> Tensor:
    a = torch.where(a <= limit, a, torch.full_like(a, limit))
    b = torch.where(b <= limit, b, torch.full_like(b, limit))
    b = torch.where(b >= -limit, b, torch.full_like(b, -limit))
    return a * logistic(alpha * a) * (b + offset)


GATED = {
    "glu": lambda a, b: logistic(a) * b,
    "geglu": lambda a, b: gelu(a) * b,
    "qgeglu": lambda a, b: UNARY["qgelu"](a) * b,
    "reglu": lambda a, b: positive(a) * b,
    "sreglu": lambda a, b: positive(a) ** 2 * b,
    "swiglu": lambda a, b: UNARY["silu"](a) * b,
    "situglu": situglu,
    "clamped_swiglu": clamped_swiglu,
}
CONFIGS = [
    *((kind, ()) for kind in (*UNARY, *GATED)),
    ("tanh_srelu", (0.5,)),
    ("situglu", (1.5, 3.0)),
    ("clamped_swiglu", (0.75, 0.5, 0.0)),
    ("clamped_swiglu", (2.0, 1.0, -0.25)),
]


def oracle(x: Tensor, kind: str, config: tuple[float, ...] = (), dy: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Output and gradient in float64; dy defaults to ones."""
    x = x.detach().double().requires_grad_()
    if kind in UNARY:
        y = UNARY[kind](x, *config)
    else:
        half = x.shape[-1] // 2
        y = GATED[kind](x[..., :half], x[..., half:], *config)
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y) if dy is None else dy.double())
    return y.detach(), dx


def assert_close(actual: Tensor, expected: Tensor) -> None:
    assert actual.dtype is torch.float32
    torch.testing.assert_close(actual.double(), expected, rtol=3e-6, atol=3e-6, equal_nan=True)


def out_shape(x: Tensor, kind: str) -> tuple[int, ...]:
    return (*x.shape[:-1], x.shape[-1] // 2) if is_gated(kind) else tuple(x.shape)


def test_table_lists_every_activation() -> None:
    assert set(ACTIVATIONS) == {*UNARY, *GATED}
    assert {kind for kind in ACTIVATIONS if is_gated(kind)} == set(GATED)
    assert all(activation.name == kind for kind, activation in ACTIVATIONS.items())
    assert hash(ACTIVATIONS["swiglu"]) == hash(ACTIVATIONS["swiglu"])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(64,), (8, 64), (3, 5, 16), (2, 3, 4, 6)])
@pytest.mark.parametrize(("kind", "config"), CONFIGS)
def test_matches_float64(kind: str, config: tuple[float, ...], shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = (3 * torch.randn(shape)).to(dtype)
    dy = torch.randn(out_shape(x, kind)).to(dtype)
    x_before, dy_before = x.clone(), dy.clone()
    y, dx = oracle(x, kind, config, dy)
    assert_close(activation_forward(x, kind, config), y)
    assert_close(activation_backward(dy, x, kind, config), dx)
    assert torch.equal(x, x_before)
    assert torch.equal(dy, dy_before)


@st.composite
def strided(draw: st.DrawFn) -> Tensor:
    """A float32 tensor of 1 to 4 dims, even last dim: permuted, with steps, cut out of a larger one, or expanded."""
    shape = [*draw(st.lists(st.integers(0, 4), max_size=3)), 2 * draw(st.integers(0, 4))]
    order = draw(st.permutations(range(len(shape))))
    steps = [draw(st.integers(1, 2)) for _ in shape]
    base = torch.randn([shape[i] * steps[i] + 1 for i in order], generator=torch.Generator().manual_seed(0))
    view = base.permute([order.index(i) for i in range(len(shape))])
    for dim, (size, step) in enumerate(zip(shape, steps, strict=True)):
        view = view.narrow(dim, 1, size * step)[(slice(None),) * dim + (slice(None, None, step),)]
    if len(shape) > 1 and draw(st.booleans()):
        view = view[:1].expand(view.shape)
    return view


@settings(max_examples=150, deadline=None)
@given(x=strided(), case=st.sampled_from(CONFIGS))
def test_any_strides_and_empty_dims(x: Tensor, case: tuple[str, tuple[float, ...]]) -> None:
    kind, config = case
    dy = torch.randn(out_shape(x, kind)[::-1]).permute(*reversed(range(x.dim())))
    y, dx = oracle(x, kind, config, dy)
    assert_close(activation_forward(x, kind, config), y)
    assert_close(activation_backward(dy, x, kind, config), dx)


@settings(max_examples=100, deadline=None)
@given(x=strided(), data=st.data())
def test_interleaved_equals_manual_permutation(x: Tensor, data: st.DataObject) -> None:
    half = x.shape[-1] // 2
    s = data.draw(st.sampled_from([s for s in range(1, max(half, 1) + 1) if half % s == 0]))
    order = [
        i for block in range(0, half, s) for i in (*range(block, block + s), *range(half + block, half + block + s))
    ]
    index = torch.tensor(order, dtype=torch.long)
    mixed = x.index_select(-1, index)
    assert torch.equal(interleave(x, s), mixed)
    assert torch.equal(deinterleave(mixed, s), x)
    assert torch.equal(interleave(deinterleave(x, s), s), x)
    kind = data.draw(st.sampled_from(list(GATED)))
    dy = torch.randn(out_shape(x, kind))
    # The halves of a contiguous and of a blocked layout may take vector code paths that differ in the last bit.
    close = {"rtol": 1e-6, "atol": 1e-6}
    torch.testing.assert_close(
        activation_forward(mixed, kind, interleave=s), activation_forward(x, kind).contiguous(), **close
    )
    expected = activation_backward(dy, x, kind).index_select(-1, index)
    torch.testing.assert_close(activation_backward(dy, mixed, kind, interleave=s), expected, **close)


def test_interleaved_layout_written_out() -> None:
    x = torch.tensor([1.0, 2.0, 10.0, 20.0, 3.0, 4.0, 30.0, 40.0])
    assert deinterleave(x, 2).tolist() == [1, 2, 3, 4, 10, 20, 30, 40]
    assert activation_forward(x, "reglu", interleave=2).tolist() == [10, 40, 90, 160]
    assert activation_backward(torch.ones(4), x, "reglu", interleave=2).tolist() == [10, 20, 1, 2, 30, 40, 3, 4]


def test_clamps_are_inclusive_and_the_gate_is_clamped_from_above_only() -> None:
    limit = 7.0
    up = torch.nextafter(torch.tensor(limit), torch.tensor(INF)).item()
    gate = torch.tensor([limit, up, -limit, -50.0, 0.0, 0.0, 0.0, 0.0, 1.0])
    lin = torch.tensor([1.0, 1.0, 1.0, 1.0, limit, up, -limit, -up, 100.0])
    x = torch.cat((gate, lin))
    dx = activation_backward(torch.ones(9), x, "clamped_swiglu")
    assert_close(dx, oracle(x, "clamped_swiglu")[1])
    dgate, dlin = dx.chunk(2)
    assert dgate[0] > 1.9  # at the limit the gradient flows
    assert dgate[1] == 0  # one float above it does not
    assert dgate[2] < 0  # no lower clamp
    x = torch.cat((torch.full((4,), 2.0), torch.tensor([limit, up, -limit, -up])))
    dlin = activation_backward(torch.ones(4), x, "clamped_swiglu").chunk(2)[1]
    assert [value != 0 for value in dlin.tolist()] == [True, False, True, False]
    lower = torch.tensor([-8.0, 2.0])
    assert_close(activation_forward(lower, "clamped_swiglu"), oracle(lower, "clamped_swiglu")[0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", UNARY)
def test_extreme_values(kind: str, dtype: torch.dtype) -> None:
    """Finite wherever the float64 result fits float32; otherwise inf and NaN as the formula has them."""
    big = torch.finfo(dtype).max / (4 if kind == "erf_gelu" else 1)  # PyTorch's kernel doubles it on some CPUs
    tiny = torch.finfo(dtype).tiny
    values = [0.0, -0.0, tiny, -tiny, 20.0, -20.0, 88.0, -88.0, 104.0, -104.0, 6e4, -6e4, big, -big]
    x = torch.tensor(values * 5, dtype=dtype)  # long enough for the vectorized path, with a remainder
    y, dx = oracle(x, kind)
    torch.testing.assert_close(activation_forward(x, kind), y.float(), rtol=1e-5, atol=1e-6)
    actual = activation_backward(torch.ones_like(x), x, kind)
    torch.testing.assert_close(actual, dx.float(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", GATED)
def test_extreme_gates(kind: str) -> None:
    big = torch.finfo(torch.float32).max
    gate = torch.tensor([104.0, -104.0, 1e20, -1e20, big, -big] * 5)
    x = torch.cat((gate, torch.full_like(gate, 0.5)))
    y, dx = oracle(x, kind)
    torch.testing.assert_close(activation_forward(x, kind), y.float(), rtol=1e-5, atol=1e-6)
    actual = activation_backward(torch.ones_like(gate), x, kind)
    torch.testing.assert_close(actual, dx.float(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["gelu", "erf_gelu", "qgelu", "silu"])
def test_infinity_and_nan_follow_the_formula(kind: str) -> None:
    # The derivatives at infinity hold infinity * 0; the literal formula in float64 (no autograd) says which are NaN.
    x = torch.tensor([INF, -INF, NAN] * 9)
    y, dx = activation_forward(x, kind), activation_backward(torch.ones_like(x), x, kind)
    assert y[0] == INF or kind == "erf_gelu"  # NaN of PyTorch's kernel on some CPUs
    assert y[1].isnan()
    assert y[2].isnan()
    assert dx.isnan().all()


def test_nan_propagates_everywhere() -> None:
    for kind in ACTIVATIONS:
        x = torch.full((6,), NAN)
        assert activation_forward(x, kind).isnan().all(), kind
    for kind in GATED:
        # NaN in one half reaches the output and the gradient of the other half.
        for first in (True, False):
            half, other = torch.full((3,), NAN), torch.full((3,), 0.5)
            x = torch.cat((half, other) if first else (other, half))
            assert activation_forward(x, kind).isnan().all(), kind
            dgate, dlin = activation_backward(torch.ones(3), x, kind).chunk(2)
            assert (dlin if first else dgate).isnan().all(), kind
    assert activation_forward(torch.tensor([INF, -INF]), "relu").tolist() == [INF, 0.0]
    assert activation_backward(torch.ones(2), torch.tensor([INF, -INF]), "relu").tolist() == [1.0, 0.0]


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_results_are_new_tensors(kind: str) -> None:
    x = torch.randn(4, 8)
    dy = torch.randn(out_shape(x, kind))
    for result in (activation_forward(x, kind), activation_backward(dy, x, kind)):
        assert result.untyped_storage().data_ptr() not in (
            x.untyped_storage().data_ptr(),
            dy.untyped_storage().data_ptr(),
        )


@pytest.mark.parametrize(("kind", "s"), [("clamped_swiglu", 0), ("situglu", 4), ("geglu", 0), ("swiglu", 2)])
def test_compiled_with_a_dynamic_leading_dim(kind: str, s: int) -> None:
    def both(dy: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return activation_forward(x, kind, interleave=s), activation_backward(dy, x, kind, interleave=s)

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(both, fullgraph=True, backend=counter, dynamic=False)
    for rows in (8, 3, 5):
        x, dy = 4 * torch.randn(rows, 16), torch.randn(rows, 8)
        torch._dynamo.mark_dynamic(x, 0)
        torch._dynamo.mark_dynamic(dy, 0)
        for actual, expected in zip(compiled(dy, x), both(dy, x), strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)
    assert counter.frame_count == 1
