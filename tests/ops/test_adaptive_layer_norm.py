"""AdaptiveLayerNorm beyond the contract: layouts and dtypes of scale and shift, channels, errors, casts. And L2Norm."""

import math

import pytest
import torch

import bridge
import functional_te as fte
from bridge import ops
from tests import oracles
from tests.helpers import (
    CURRENT,
    DELAYED,
    DTYPES,
    assert_close,
    assert_same,
    double,
    random_params,
    recipe_id,
    recorded_kernels,
    uniform,
)


def expected(op, x, scale, shift, dy):
    """Output and the three gradients in float64."""
    x, scale, shift = double((x, scale, shift))
    y = oracles.reference(op, x, {}, (scale, shift))[0]
    return (y, *torch.autograd.grad(y, (x, scale, shift), dy.double()))


CASES = [
    ((4, 8), 0, (4, 8)),
    ((4, 3, 8), 0, (4, 8)),
    ((4, 3, 8), 0, (4, 1, 8)),
    ((4, 3, 8), 1, (3, 8)),
    ((4, 3, 8), 1, (1, 3, 8)),
    ((2, 3, 4, 8), 2, (1, 1, 4, 8)),
    ((2, 3, 4, 8), 0, (2, 1, 1, 8)),
    ((1, 5, 8), 0, (1, 8)),
]


@pytest.mark.parametrize(("dtype", "other"), [*zip(DTYPES, DTYPES, strict=True), (torch.bfloat16, torch.float32)])
@pytest.mark.parametrize(("shape", "batch_dim", "modulation"), CASES)
def test_layouts_and_dtypes(shape, batch_dim, modulation, dtype, other) -> None:
    op = fte.AdaptiveLayerNorm(8, 0.1, batch_dim)
    x, dy = uniform(shape, dtype, 1), uniform(shape, dtype, 4)
    scale, shift = uniform(modulation, other, 2), uniform(modulation, dtype, 3)
    y, dx, dscale, dshift = expected(op, x, scale, shift, dy)
    result, pullback = fte.vjp(op, ({},), x, scale, shift)
    grads = pullback(dy)
    assert_close(result.output, y, dtype)
    assert_close(grads.input, dx, dtype)
    assert_close(grads.extra_inputs[0], dscale, other)
    assert_close(grads.extra_inputs[1], dshift, dtype)
    assert (result.output.dtype, grads.input.dtype) == (dtype, dtype)
    assert [g.dtype for g in grads.extra_inputs] == [other, dtype]
    assert [g.shape for g in grads.extra_inputs] == [scale.shape, shift.shape]
    assert_same(fte.functional.adaptive_layer_norm(x, scale, shift, eps=0.1, batch_dim=batch_dim), result.output)


def test_the_output_has_the_input_dtype_under_autocast() -> None:
    module = ops.AdaptiveLayerNorm(8)
    x, scale, shift = (uniform((4, 8), torch.float32, i).requires_grad_() for i in range(3))
    with torch.autocast("cpu", torch.bfloat16):
        y = module(x, scale, shift)
    assert_same(y.detach(), fte.functional.adaptive_layer_norm(x.detach(), scale.detach(), shift.detach()))
    y.sum().backward()
    assert {t.grad.dtype for t in (x, scale, shift)} == {torch.float32}


def test_a_large_mean_is_centered_first() -> None:
    """mean(x**2) - mean(x)**2 would lose everything here."""
    x = uniform((4, 256)) + 1000
    zeros = torch.zeros(4, 256)
    dy = uniform((4, 256), seed=1) + 10
    y, dx, *_ = expected(fte.AdaptiveLayerNorm(256), x, zeros, zeros, dy)
    result, pullback = fte.vjp(fte.AdaptiveLayerNorm(256), ({},), x, zeros, zeros)
    torch.testing.assert_close(result.output.double(), y, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(pullback(dy).input.double(), dx, rtol=1e-3, atol=1e-3)


def test_channels() -> None:
    block = fte.chain(
        fte.MakeExtraOutput(channel="s", output_to_caller=False),
        fte.MakeExtraOutput(channel="t", output_to_caller=False),
        fte.Linear(8, 8),
        fte.AdaptiveLayerNorm(8, scale_channel="s", shift_channel="t"),
    )
    params, x = random_params(block), uniform((4, 8), seed=1)
    result, pullback = fte.vjp(block, params, x)
    wide, wide_x = double(params), double(x)
    (want,) = oracles.run(block, wide, wide_x)
    dy = uniform((4, 8), seed=2)
    want.backward(dy.double())
    grads = pullback(dy)
    torch.testing.assert_close(result.output.double(), want.detach(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(grads.input.double(), wide_x.grad, rtol=1e-4, atol=1e-4)

    model = ops.Sequential(ops.MakeExtraOutput(), ops.AdaptiveLayerNorm(8))
    model[0].set_extra_output_channel(0, "s", output_to_caller=False)
    model[1].set_extra_input_channel(0, "s")
    shift = uniform((4, 8), seed=5)
    assert_same(model(x, shift), fte.functional.adaptive_layer_norm(x, x, shift))
    assert model[1].op is fte.AdaptiveLayerNorm(8, scale_channel="s")
    assert fte.AdaptiveLayerNorm(8).with_extra_input_channel(1, "t") is fte.AdaptiveLayerNorm(8, shift_channel="t")


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        *[((size,), "hidden_size") for size in (0, 16385, -1, 8.0, True, "8")],
        *[((8, eps), "eps") for eps in (-1e-5, math.inf, math.nan)],
        *[((8, 1e-5, dim), "batch_dim") for dim in (-1, 1.0, None, True)],
        ((8, 1e-5, 0, ""), "scale_channel"),
        ((8, 1e-5, 0, None, 3), "shift_channel"),
    ],
)
def test_bad_configuration(arguments, name: str) -> None:
    with pytest.raises(ValueError, match=f"AdaptiveLayerNorm: {name}: expected"):
        fte.AdaptiveLayerNorm(*arguments)
    fte.AdaptiveLayerNorm(16384, 0, 5)


@pytest.mark.parametrize(
    ("x", "scale", "shift", "error", "words"),
    [
        ((8,), (1, 8), (1, 8), ValueError, "input: expected at least two dimensions"),
        ((4, 7), (4, 7), (4, 7), ValueError, "input: expected last dimension 8"),
        ((4, 3, 8), (3, 8), (4, 8), ValueError, r"extra input 0 \(scale\): expected shape \(4, 8\) or \(4, 1, 8\)"),
        ((4, 3, 8), (4, 8), (1, 4, 8), ValueError, r"extra input 1 \(shift\)"),
        ((4, 3, 8), (4, 3, 8), (4, 8), ValueError, r"extra input 0 \(scale\)"),
        ((4, 8), (8,), (4, 8), ValueError, r"extra input 0 \(scale\): expected shape \(4, 8\), got shape \(8,\)"),
    ],
)
def test_bad_tensors(x, scale, shift, error, words: str) -> None:
    op = fte.AdaptiveLayerNorm(8)
    for entry in (fte.apply, fte.vjp, bridge.apply):
        with recorded_kernels() as seen:
            x_, scale_, shift_ = torch.empty(x), torch.empty(scale), torch.empty(shift)
            seen.clear()
            with pytest.raises(error, match=r"op 0 \(AdaptiveLayerNorm\): " + words):
                entry(op, ({},), x_, scale_, shift_)
        assert seen == []
    with pytest.raises(ValueError, match=r"dimension 1 \(batch_dim\) before the last"):
        fte.apply(fte.AdaptiveLayerNorm(8, batch_dim=1), ({},), *(torch.empty(4, 8) for _ in range(3)))
    with pytest.raises(TypeError, match="float32, float16 or bfloat16"):
        fte.apply(op, ({},), torch.empty(4, 8), torch.empty(4, 8, dtype=torch.int64), torch.empty(4, 8))


@pytest.mark.parametrize("recipe", [CURRENT, DELAYED], ids=recipe_id)
def test_it_casts_for_a_linear(recipe) -> None:
    block = fte.chain(fte.AdaptiveLayerNorm(16, batch_dim=1), fte.BasicLinear(16, 16))
    plan = fte.plan(block, recipe=recipe)
    assert plan.forward[0].next_quantizer is not None
    state, params = fte.init_state(block, recipe), random_params(block)
    x, scale, shift = uniform((6, 4, 16)), uniform((4, 16), seed=1), uniform((1, 4, 16), seed=2)
    found = fte.apply(block, params, x, scale, shift, recipe=recipe, state=state)
    alone = fte.chain(block.ops[1])
    y = fte.functional.adaptive_layer_norm(x, scale, shift, batch_dim=1)
    want = fte.apply(alone, params[1:], y, recipe=recipe, state=state[1:])
    assert_same(found.output, want.output)
    assert_same(found.state[1:], want.state)


def test_compiled_with_another_batch(dynamo) -> None:
    block = fte.chain(fte.AdaptiveLayerNorm(8))

    def step(call, rows: int):
        x, scale, shift = (uniform(s, seed=rows + i) for i, s in enumerate([(rows, 3, 8), (rows, 8), (rows, 1, 8)]))
        tensors = [t.requires_grad_() for t in (x, scale, shift)]
        y = call(*tensors)
        return y.detach(), torch.autograd.grad(y.square().sum(), tensors)

    def call(*tensors):
        return bridge.apply(block, ({},), *tensors)[0]

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for rows in (4, 5, 7, 6):
        assert_same(step(compiled, rows), step(call, rows))
    assert dynamo["stats"]["unique_graphs"] == 2


def test_l2_normalization_of_large_and_tiny_rows() -> None:
    """``x * x`` leaves float16 at 256, but the arithmetic is float32."""
    op = fte.L2Normalization()
    x = torch.tensor([[300.0, 400.0], [1e-4, 0.0], [0.0, 0.0]], dtype=torch.float16)
    y = fte.apply(op, ({},), x).output
    assert_close(y, x.double() / torch.sqrt(x.double().square().sum(-1, keepdim=True) + 1e-6), torch.float16)
    with torch.autocast("cpu", torch.bfloat16):
        assert ops.L2Normalization(seq_length=3, micro_batch_size=1)(x.float()).dtype is torch.float32
    assert_same(fte.functional.l2_normalization(x), y)
    for eps in (-1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="L2Normalization: eps"):
            fte.L2Normalization(eps)
    with pytest.raises(ValueError, match="at least one dimension"):
        fte.apply(op, ({},), torch.ones(()))
