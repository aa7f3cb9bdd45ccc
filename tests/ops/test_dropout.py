"""Dropout as a pure function of a key: formula, statistics, resolution, errors, compiled."""

import math

import pytest
import torch

import bridge
import functional_te as fte
from functional_te import pytree
from functional_te.pipeline import forward_pass
from functional_te.quantization.random import random_bits
from tests.helpers import DTYPES, assert_close, assert_same, recorded_kernels, unchanged, uniform

KEY = fte.make_key(11, 3)
ONES = torch.ones(1 << 18)


def mask(key: torch.Tensor, shape: tuple[int, ...], p: float) -> torch.Tensor:
    """What is kept, float64: element ``i`` in row-major order is dropped by the lowest ``p`` of the 16-bit values."""
    bits = random_bits(key, math.prod(shape)).double()
    return (bits >= torch.tensor(p * 65536, dtype=torch.float64).round()).double().reshape(shape)


def run(p: float, x: torch.Tensor, key: torch.Tensor | None = KEY, **kwargs) -> torch.Tensor:
    return fte.apply(fte.Dropout(p), ({},), x, kwargs={0: {"key": key, **kwargs}}).output


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("p", [0.0625, 0.1, 0.5, 0.75])
def test_formula_and_gradient(p: float, dtype: torch.dtype) -> None:
    for shape in [(101,), (2, 4, 16), (128, 128), (), (0, 8)]:
        x, dy = uniform(shape, dtype, 1), uniform(shape, dtype, 2)
        with unchanged((x, dy, KEY)):
            result, pullback = fte.vjp(fte.Dropout(p), ({},), x, kwargs={0: {"key": KEY}})
            dx = pullback(dy).input
        keep = mask(KEY, shape, p)
        assert result.output.dtype is dx.dtype is dtype
        assert_close(result.output, x.double() * keep / (1 - p), dtype)
        assert_close(dx, dy.double() * keep / (1 - p), dtype)
        assert_same(fte.functional.dropout(x, KEY, p=p), result.output)


def test_the_mask_depends_on_key_and_position_alone() -> None:
    x = uniform((64, 48))
    kept = run(0.3, x) != 0
    for other in (x.t().contiguous().t(), x.bfloat16(), x.reshape(32, 2, 48), uniform((64, 48), seed=5)):
        assert torch.equal((run(0.3, other) != 0).reshape(64, 48), kept)
    assert not torch.equal(run(0.3, x, fte.next_key(KEY)) != 0, kept)
    assert not torch.equal(run(0.3, x, fte.make_key(11, 4)) != 0, kept)
    # a larger share drops more of the same elements
    assert not (run(0.6, x) != 0)[~kept].any()


@pytest.mark.parametrize("p", [2.0**-12, 0.0625, 0.3, 0.5, 0.75, 0.999])
def test_share_of_zeros(p: float) -> None:
    n, found = ONES.numel(), []
    for seed in range(8):
        zeros = int((run(p, ONES, fte.make_key(seed, 1)) == 0).sum())
        found.append((zeros - n * p) / math.sqrt(n * p * (1 - p)))
    assert max(map(abs, found)) < 3.5  # one in 270 for eight draws
    assert abs(sum(found)) / math.sqrt(8) < 2.5758


def test_masks_are_independent() -> None:
    """Neighbours, distant elements of one block of the generator, and successive keys are uncorrelated."""
    kept = (run(0.5, ONES) != 0).double() - 0.5
    other = (run(0.5, ONES, fte.next_key(KEY)) != 0).double() - 0.5
    n = kept.numel()
    for left, right in ((kept[1:], kept[:-1]), (kept[n // 8 :], kept[: -n // 8]), (kept, other)):
        assert abs((left * right).sum()) / (0.25 * math.sqrt(left.numel())) < 3.5


@pytest.mark.parametrize("p", [1e-6, 0.4 * 2.0**-16, 1 - 2.0**-16, 1 - 1e-6, 1 / 3])
def test_probability_is_rounded_and_the_scale_is_not(p: float) -> None:
    y = run(p, ONES)
    kept = y[y != 0]
    assert abs(1 - kept.numel() / ONES.numel() - p) < 2.0**-16 + 4 * math.sqrt(p * (1 - p) / ONES.numel())
    assert torch.equal(kept, torch.full_like(kept, 1 / (1 - p)))


def test_nothing_is_dropped_in_evaluation_or_without_probability() -> None:
    x = uniform((4, 8), torch.bfloat16)
    for p, kwargs in (
        (0.5, {"training": False}),
        (0.5, {"training": False, "key": KEY}),
        (0.0, {}),
        (0.0, {"key": KEY}),
    ):
        result, pullback = fte.vjp(fte.Dropout(p), ({},), x, kwargs={0: kwargs})
        assert_same(result.output, x)
        assert result.output.data_ptr() != x.data_ptr()
        dy = uniform((4, 8), torch.bfloat16, 2)
        assert_same(pullback(dy).input, dy)
    assert_same(fte.apply(fte.Dropout(0.0), ({},), x).output, x)


def test_dtypes_under_autocast() -> None:
    op, x = fte.Dropout(0.5), uniform((4, 8))
    kwargs = {0: {"key": KEY}}
    result, pullback = fte.vjp(op, ({},), x, kwargs=kwargs, compute_dtype=torch.bfloat16)
    assert_close(result.output, x * mask(KEY, (4, 8), 0.5) * 2, torch.bfloat16)
    assert result.output.dtype is torch.bfloat16
    assert pullback(uniform((4, 8), torch.bfloat16, 1)).input.dtype is torch.bfloat16
    shaped = fte.eval_shape(op, ({},), fte.TensorSpec((4, 8), torch.float32), compute_dtype=torch.bfloat16)
    assert shaped.output.dtype is torch.bfloat16
    off = fte.apply(op, ({},), x, kwargs={0: {"training": False}}, compute_dtype=torch.bfloat16).output
    assert_same(off, x)
    with torch.autocast("cpu", torch.bfloat16):
        assert_same(bridge.apply(op, ({},), x, kwargs=kwargs)[0], result.output)


def test_only_the_key_is_saved() -> None:
    plan = fte.plan(fte.chain(fte.Dropout(0.5)))
    x = uniform((64, 64))
    outcome = forward_pass(plan, x, ({},), None, (), {0: {"key": KEY}})
    (saved,) = pytree.leaves(outcome.saved)
    assert saved is KEY


def test_not_a_number_and_infinity_are_not_hidden() -> None:
    x = torch.tensor([math.nan, math.inf, -math.inf]).repeat(64)
    y, keep = run(0.5, x), mask(KEY, (192,), 0.5).bool()
    assert_same(y[keep], x[keep])
    assert y[~keep].isnan().all()


BLOCK = fte.chain(fte.GELU(), fte.Dropout(0.25, name="hidden"))


def refused(error: type[Exception], words: tuple[str, ...], kwargs) -> None:
    """``fte.apply``, ``fte.vjp`` and ``bridge.apply`` refuse before any kernel runs."""
    x = uniform((2, 8))
    for entry in (fte.apply, fte.vjp, bridge.apply):
        with recorded_kernels() as seen, pytest.raises(error) as caught:
            entry(BLOCK, ({}, {}), x, kwargs=kwargs)
        assert seen == []
        for word in ("op 1 (Dropout 'hidden')", *words):
            assert word in str(caught.value)


def test_a_missing_key_says_how_to_make_one() -> None:
    for kwargs in (None, {}, {1: {}}, {1: {"key": None}}, {1: {"training": True}}):
        refused(ValueError, ("key", "fte.make_key(seed)"), kwargs)
    assert fte.eval_shape(BLOCK, ({}, {}), fte.TensorSpec((2, 8), torch.float32)).output.shape == (2, 8)


def test_bad_keys() -> None:
    refused(TypeError, ("key", "int64", "int"), {1: {"key": 7}})
    refused(TypeError, ("key", "int64", "torch.int32"), {1: {"key": KEY.int()}})
    refused(ValueError, ("key", "(2,)", "(3,)"), {1: {"key": torch.zeros(3, dtype=torch.int64)}})
    with pytest.raises(ValueError, match="Dropout: key: expected device cpu, where the input is, got device meta"):
        run(0.5, uniform((2, 8)), torch.zeros(2, dtype=torch.int64, device="meta"))
    refused(TypeError, ("training", "1"), {1: {"key": KEY, "training": 1}})
    refused(ValueError, ("kwargs", "'seed'"), {1: {"seed": 1}})


@pytest.mark.parametrize(
    ("p", "error"),
    [(1.0, ValueError), (-0.1, ValueError), (math.nan, ValueError), ("0.5", TypeError), (True, TypeError)],
)
def test_bad_probabilities(p, error) -> None:
    with pytest.raises(error, match=r"Dropout: p: expected"):
        fte.Dropout(p)


def test_compiled_equals_eager_and_keys_do_not_recompile(dynamo) -> None:
    block = fte.chain(fte.ConstantScale(2.0), fte.Dropout(0.3))

    def forward(x: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return bridge.apply(block, ({}, {}), x, kwargs={1: {"key": key}})[0]

    def step(call, x: torch.Tensor, key: torch.Tensor):
        y = call(x, key)
        (dx,) = torch.autograd.grad(y.square().sum(), x)
        return y.detach(), dx

    compiled = torch.compile(forward, fullgraph=True)
    for seed in range(3):
        x, key = uniform((16, 40), seed=seed).requires_grad_(), fte.make_key(seed, 9)
        assert_same(step(compiled, x, key), step(forward, x, key))
    assert dynamo["stats"]["unique_graphs"] == 1


def test_the_next_key_can_be_made_inside_of_a_compiled_function() -> None:
    op = fte.Dropout(0.5)

    def call(x: torch.Tensor, key: torch.Tensor):
        for _ in range(2):
            key = fte.next_key(key)
            x = bridge.apply(op, ({},), x, kwargs={0: {"key": key}})[0]
        return x, key

    x = uniform((8, 8))
    assert_same(torch.compile(call, fullgraph=True, backend="aot_eager")(x, KEY), call(x, KEY))


def test_torch_func_grad_agrees() -> None:
    x = uniform((4, 8))
    found = torch.func.grad(lambda t: bridge.apply(fte.Dropout(0.5), ({},), t, kwargs={0: {"key": KEY}})[0].sum())(x)
    assert_same(found, (mask(KEY, (4, 8), 0.5) * 2).float())
