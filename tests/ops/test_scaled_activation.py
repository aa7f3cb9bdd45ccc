"""Activations times a scale per row: what the contract tests of all ops do not say."""

import pytest
import torch

import bridge
import functional_te as fte
from functional_te.quantization.recipes import Float8CurrentScaling
from tests import oracles
from tests.helpers import DTYPES, assert_close, assert_same, double, recorded_kernels, uniform

PLAIN = {
    fte.ScaledSwiGLU(): fte.SwiGLU(),
    fte.ScaledSwiGLU(32): fte.SwiGLU(glu_interleave_size=32),
    fte.ScaledSiTUGLU(beta1=2.0): fte.SiTUGLU(beta1=2.0),
    fte.ScaledClampedQGeGLU(limit=0.5): fte.ClampedSwiGLU(limit=0.5),
    fte.ScaledSReLU(): fte.SReLU(),
}
every_op = pytest.mark.parametrize("op", PLAIN, ids=[f"{i}-{type(op).__name__}" for i, op in enumerate(PLAIN)])


@every_op
def test_a_scale_of_one_is_the_plain_activation(op) -> None:
    x, dy = uniform((5, 7, 128)), uniform((5, 7, 64 if op.gated else 128), seed=1)
    result, pullback = fte.vjp(op, ({},), x, torch.ones(5, 7))
    plain, plain_pullback = fte.vjp(PLAIN[op], ({},), x)
    assert_same(result.output, plain.output)
    assert_same(pullback(dy).input, plain_pullback(dy).input)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scales_of_any_shape_with_as_many_elements(dtype) -> None:
    op, x, dy = fte.ScaledSwiGLU(), uniform((5, 7, 16), dtype), uniform((5, 7, 8), dtype, 1)
    scale = uniform((35, 1), torch.float32, 2)
    result, pullback = fte.vjp(op, ({},), x, scale)
    # a scale is rounded to the compute dtype; its gradient is, too, and comes in the scale's own
    rounded = scale.to(dtype)
    x64, p64 = double((x, rounded.reshape(5, 7)))
    want = oracles.reference(op, x64, {}, (p64,))[0]
    dx, dp = torch.autograd.grad(want, (x64, p64), dy.double())
    assert_close(result.output, want, dtype)
    grads = pullback(dy)
    assert_close(grads.input, dx, dtype)
    assert grads.extra_inputs[0].shape == (35, 1)
    assert grads.extra_inputs[0].dtype is torch.float32
    assert_close(grads.extra_inputs[0].reshape(5, 7), dp, dtype)
    assert_same(grads.extra_inputs[0].to(dtype).float(), grads.extra_inputs[0])


FUNCTIONS = {
    "scaled_swiglu": (fte.ScaledSwiGLU(32), {"glu_interleave_size": 32}),
    "scaled_situglu": (fte.ScaledSiTUGLU(beta1=0.5, beta2=0.6), {"beta1": 0.5, "beta2": 0.6}),
    "scaled_clamped_qgeglu": (
        fte.ScaledClampedQGeGLU(limit=0.5, alpha=1.2, glu_linear_offset=0.1),
        {"limit": 0.5, "alpha": 1.2, "glu_linear_offset": 0.1},
    ),
    "scaled_srelu": (fte.ScaledSReLU(), {}),
    "scaled_tanh_srelu": (fte.ScaledTanhSReLU(0.5), {"tanh_clamp_scale": 0.5}),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name) -> None:
    op, keywords = FUNCTIONS[name]
    x, scale = uniform((3, 64)), uniform((3,), seed=1)
    want, _ = oracles.reference(op, x.double(), {}, (scale.double(),))
    assert_close(getattr(fte.functional, name)(x, scale, **keywords), want, torch.float32)


def test_one_rounding() -> None:
    """Rounding the activation before scaling it would give other bits."""
    x, scale = uniform((64, 32), torch.bfloat16), uniform((64,), torch.bfloat16, 1)
    got = fte.functional.scaled_srelu(x, scale)
    exact = (x.double().clamp(min=0).square() * scale.double()[:, None]).to(torch.bfloat16)
    twice = fte.functional.srelu(x) * scale[:, None]
    assert_same(got, exact)
    assert not torch.equal(twice, exact)


def test_tanh_srelu_is_bounded_and_near_srelu_for_a_large_scale() -> None:
    x, scale = uniform((8, 32)) * 10, uniform((8,), seed=1)
    bounded = fte.functional.scaled_tanh_srelu(x, torch.ones(8), tanh_clamp_scale=0.5)
    assert bounded.max() <= 0.25
    near = fte.functional.scaled_tanh_srelu(x, scale, tanh_clamp_scale=1e4)
    torch.testing.assert_close(near, fte.functional.scaled_srelu(x, scale), rtol=1e-5, atol=1e-5)


def test_the_gradient_of_the_scale_is_only_computed_if_needed() -> None:
    x, scale, dy = uniform((4, 16)), uniform((4,), seed=1), uniform((4, 8), seed=2)
    counts = []
    for wants in (True, False):
        _, pullback = fte.vjp(fte.ScaledSwiGLU(), ({},), x, scale, requires_grad=(True, ((),), (wants,)))
        with recorded_kernels() as seen:
            grads = pullback(dy)
        assert (grads.extra_inputs[0] is not None) is wants
        counts.append(len(seen))
    assert counts[1] < counts[0]


def test_neighbours_do_not_cast_for_it_and_it_does_not_cast_for_them() -> None:
    block = fte.chain(fte.BasicLinear(16, 32), fte.ScaledSwiGLU(), fte.BasicLinear(16, 16))
    plan = fte.plan(block, recipe=Float8CurrentScaling(), fusions=fte.Fusions())
    assert all(step.next_quantizer is None for step in plan.forward)
    assert [step.prev_quantizer is None for step in plan.backward] == [True, True, True]


def test_a_scale_from_a_channel() -> None:
    """The scale is what an earlier op sent there."""
    x = uniform((6, 1)).abs() + 0.5
    block = fte.chain(fte.MakeExtraOutput(channel="p", output_to_caller=False), fte.ScaledSReLU(channel="p"))
    result, pullback = fte.vjp(block, ({}, {}), x)
    assert_close(result.output, x.double() ** 3, torch.float32)
    assert_close(pullback(torch.ones(6, 1)).input, 3 * x.double() ** 2, torch.float32)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: fte.ScaledSwiGLU(16), "glu_interleave_size.*multiple of 32"),
        (lambda: fte.ScaledSiTUGLU(0), "glu_interleave_size.*multiple of 32"),
        (lambda: fte.ScaledSwiGLU(activation_recompute_in_mlp=True), "activation_recompute_in_mlp"),
        (lambda: fte.ScaledClampedQGeGLU(activation_recompute_in_mlp=True), "activation_recompute_in_mlp"),
        (lambda: fte.ScaledSiTUGLU(beta2=float("nan")), "beta2"),
        (lambda: fte.ScaledTanhSReLU(0.0), "tanh_clamp_scale"),
        (lambda: fte.ScaledTanhSReLU(float("inf")), "tanh_clamp_scale"),
        (lambda: fte.ScaledSReLU(channel=""), "channel"),
        (lambda: fte.functional.scaled_swiglu(torch.ones(2, 96), torch.ones(2), glu_interleave_size=32), "64"),
        (lambda: fte.functional.scaled_srelu(torch.ones(3, 4), torch.ones(4)), "extra input 0.*3 rows"),
        (lambda: fte.functional.scaled_srelu(torch.ones(3, 4), torch.ones(3, 4)), "extra input 0.*3 rows"),
    ],
)
def test_refused(make, message) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_an_integer_scale_is_refused() -> None:
    with pytest.raises(TypeError, match="extra input 0"):
        fte.functional.scaled_srelu(torch.ones(3, 4), torch.ones(3, dtype=torch.int32))


@pytest.mark.parametrize(
    ("make", "op"),
    [
        (lambda: bridge.ops.ScaledSwiGLU(32), fte.ScaledSwiGLU(32)),
        (lambda: bridge.ops.ScaledSiTUGLU(beta1=2.0), fte.ScaledSiTUGLU(beta1=2.0)),
        (lambda: bridge.ops.ScaledClampedQGeGLU(None, alpha=1.0), fte.ScaledClampedQGeGLU(None, alpha=1.0)),
        (
            lambda: bridge.ops.ScaledSReLU(activation_recompute_in_mlp=True),
            fte.ScaledSReLU(activation_recompute_in_mlp=True),
        ),
        (lambda: bridge.ops.ScaledTanhSReLU(tanh_clamp_scale=2), fte.ScaledTanhSReLU(2.0)),
    ],
    ids=["swiglu", "situglu", "clamped", "srelu", "tanh"],
)
def test_modules(make, op) -> None:
    module = make()
    assert module.op is op
    x, scale = uniform((3, 64)), uniform((3,), seed=1)
    assert_same(module(x, scale), fte.apply(op, ({},), x, scale).output)
    assert not module.state_dict().get("_extra_state", torch.empty(0)).numel()


def test_autocast_gives_its_dtype() -> None:
    module = bridge.ops.ScaledSwiGLU()
    x, scale = uniform((3, 16)).requires_grad_(), uniform((3,), seed=1).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = module(x, scale)
    assert y.dtype is torch.bfloat16
    y.sum().backward()
    assert (x.grad.dtype, scale.grad.dtype) == (torch.float32, torch.float32)


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: fte.ClampedSwiGLU(limit=float("nan")), ValueError),
        (lambda: fte.ScaledClampedQGeGLU(limit=-1.0), ValueError),
        (lambda: fte.ScaledClampedQGeGLU(alpha="a"), TypeError),
        (lambda: fte.ScaledSiTUGLU(beta1=None), TypeError),
        (lambda: fte.ScaledTanhSReLU(tanh_clamp_scale=True), TypeError),
        (lambda: fte.L2Normalization(eps="a"), TypeError),
        (lambda: fte.L2Normalization(eps=float("inf")), ValueError),
    ],
)
def test_numbers_are_checked(make, error) -> None:
    with pytest.raises(error, match=r"^\w+: \w+: expected a (finite )?(positive )?number"):
        make()
