"""Delayed scaling against an independent simulation in numpy, step by step."""

import math

import numpy as np
import pytest
import torch

import functional_te as fte
from tests.helpers import assert_same, unchanged

FLOAT32_MAX = np.finfo(np.float32).max
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


class Simulation:
    """One quantizer's scale and history, as a list of steps: newest last, the running step apart."""

    def __init__(self, length: int, limit: float, margin: int, algorithm: str) -> None:
        self.scale = np.float32(1)
        self.past = [np.float32(0)] * (length - 1)  # oldest first
        self.now = np.float32(0)
        self.limit, self.margin, self.algorithm = np.float32(limit), margin, algorithm

    def observe(self, amax: float) -> None:
        amax = np.float32(amax)
        self.now = np.float32(math.nan) if np.isnan(amax) or np.isnan(self.now) else max(self.now, amax)

    def close(self) -> None:
        if self.now == 0:
            return
        remembered = [self.now, *self.past]
        if self.algorithm == "most_recent":
            amax = self.now
        else:
            amax = np.float32(math.nan) if np.isnan(remembered).any() else max(remembered)
        if self.algorithm == "double":
            amax = np.float32(2) * amax
        if np.isfinite(amax) and amax > 0:
            with np.errstate(over="ignore"):
                scale = self.limit / amax * np.float32(2.0**-self.margin)
            self.scale = scale if np.isfinite(scale) else FLOAT32_MAX
        self.past = ([*self.past, self.now])[1:] if self.past else []
        self.now = np.float32(0)

    @property
    def history(self) -> np.ndarray:
        return np.array([self.now, *self.past], dtype=np.float32)


def doubled(history: torch.Tensor) -> torch.Tensor:
    return 2 * history.amax()


ALGORITHMS = {"max": "max", "most_recent": "most_recent", "double": doubled}


def observations(rng: np.random.Generator) -> list[float]:
    """What one step's casts see: several casts, none, zeros, tiny and unusable values."""
    kind = rng.integers(0, 20)
    if kind == 0:
        return []
    if kind == 1:
        return [0.0]
    if kind == 2:
        return [float(rng.choice([math.inf, math.nan]))]
    if kind == 3:
        return [1e-40]  # the quotient overflows
    return [float(np.float32(math.exp(rng.uniform(-9, 9)))) for _ in range(rng.integers(1, 4))]


def tensor_with(amax: float) -> torch.Tensor:
    return torch.tensor([[0.0, amax / 2], [-amax, amax / 4]], dtype=torch.float32)


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("margin", [0, 3])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("length", [1, 2, 5])
def test_forty_random_steps(length: int, algorithm: str, margin: int, dtype: torch.dtype) -> None:
    quantizer = fte.Float8DelayedScalingQuantizer(
        dtype=dtype, margin=margin, amax_history_len=length, amax_compute_algo=ALGORITHMS[algorithm]
    )
    state = fte.init_quantizer_state(quantizer)
    expected = Simulation(length, 448.0 if dtype is E4M3 else 57344.0, margin, algorithm)
    rng = np.random.default_rng(length + 10 * margin)
    scales = set()
    for _ in range(40):
        for amax in observations(rng):
            x = tensor_with(amax)
            before = state.scale
            quantized, state = fte.quantize(x, quantizer, state)
            assert torch.equal(quantized.scale_inv, 1 / before)  # the running step casts with the old scale
            expected.observe(x.abs().max().item())
        with unchanged(state):
            state = fte.update_scale(quantizer, state)
        expected.close()
        assert state.scale.dtype is state.amax_history.dtype is torch.float32
        assert state.scale.shape == (1,)
        np.testing.assert_array_equal(state.amax_history.numpy(), expected.history)
        assert state.scale.item() == float(expected.scale)
        scales.add(state.scale.item())
    assert len(scales) > 5


def test_history_in_words() -> None:
    """Three steps by hand: the maximum of the last three, the oldest forgotten."""
    quantizer = fte.Float8DelayedScalingQuantizer(dtype=E4M3, amax_history_len=3)
    state = fte.init_quantizer_state(quantizer)
    seen = []
    for amax in (8.0, 2.0, 1.0, 4.0):
        _, state = fte.quantize(torch.tensor([amax]), quantizer, state)
        state = fte.update_scale(quantizer, state)
        seen.append((state.scale.item(), state.amax_history.tolist()))
    assert seen == [
        (56.0, [0.0, 0.0, 8.0]),
        (56.0, [0.0, 8.0, 2.0]),
        (56.0, [0.0, 2.0, 1.0]),
        (112.0, [0.0, 1.0, 4.0]),
    ]


def test_overflow_gives_the_largest_float32() -> None:
    quantizer = fte.Float8DelayedScalingQuantizer(dtype=E5M2, amax_history_len=1)
    _, state = fte.quantize(torch.tensor([1e-38]), quantizer, fte.init_quantizer_state(quantizer))
    assert fte.update_scale(quantizer, state).scale.item() == float(FLOAT32_MAX)


def halved(amax, old_scale, fp8_max, recipe):
    return torch.full_like(old_scale, 0.5) * fp8_max / amax * 2.0**-recipe.margin + 0 * old_scale


def test_scaling_factor_function() -> None:
    quantizer = fte.Float8DelayedScalingQuantizer(
        dtype=E4M3, margin=1, amax_history_len=2, scaling_factor_compute_algo=halved
    )
    _, state = fte.quantize(torch.tensor([4.0]), quantizer, fte.init_quantizer_state(quantizer))
    assert fte.update_scale(quantizer, state).scale.item() == 448 / 4 / 2 / 2


def test_repeated_observation_changes_nothing() -> None:
    """Recomputing a forward observes the same values again."""
    quantizer = fte.Float8DelayedScalingQuantizer(dtype=E4M3, amax_history_len=3)
    x = torch.randn(4, 4)
    _, once = fte.quantize(x, quantizer, fte.init_quantizer_state(quantizer))
    _, twice = fte.quantize(x, quantizer, once)
    assert_same(twice, once)
    assert_same(fte.update_amax(once, once.amax_history[:1] / 2), once)


def test_a_stateless_quantizer_has_no_state() -> None:
    quantizer = fte.Float8CurrentScalingQuantizer(dtype=E4M3)
    assert fte.init_quantizer_state(quantizer) is None
    assert fte.update_scale(quantizer, None) is None


# ---- the state of a chain --------------------------------------------------------------------------------------

BLOCK = fte.chain(fte.RMSNorm(8), fte.Linear(8, 16), fte.SwiGLU(), fte.BasicLinear(8, 8))
RECIPE = fte.recipes.DelayedScaling(amax_history_len=4)


def test_structure_of_chain_state() -> None:
    state = fte.init_state(BLOCK, RECIPE)
    assert [list(own) for own in state] == [
        [],
        ["input", "weight", "grad_output"],
        [],
        [],
        ["input", "weight", "grad_output"],
    ]
    for own in state:
        for entry in own.values():
            assert type(entry) is fte.DelayedScalingState
            assert torch.equal(entry.scale, torch.ones(1))
            assert torch.equal(entry.amax_history, torch.zeros(4))
    pointers = [t.data_ptr() for own in state for e in own.values() for t in (e.scale, e.amax_history)]
    assert len(set(pointers)) == 12
    assert all(p % 16 == 0 for p in pointers)  # FP8 products read scales through 16-byte aligned pointers
    for stateless in (None, fte.recipes.Float8CurrentScaling()):
        assert fte.init_state(BLOCK, stateless) == ({},) * 5
    assert all(
        t.is_meta for own in fte.init_state(BLOCK, RECIPE, device="meta") for e in own.values() for t in [e.scale]
    )


def test_chain_state_observes_what_is_cast() -> None:
    """Slot 0 of every quantizer holds the largest magnitude of the very tensor it cast."""
    block = fte.chain(fte.BasicLinear(8, 16), fte.Bias(16), fte.BasicLinear(16, 4))
    params, x, dy = fte.init(block, seed=1), torch.randn(5, 8), torch.randn(5, 4)
    state = fte.init_state(block, RECIPE)
    with unchanged((state, params, x, dy)):
        result, pullback = fte.vjp(block, params, x, recipe=RECIPE, state=state)
        grads = pullback(dy)
    seen = lambda i, role: grads.state[i][role].amax_history[0].item()  # noqa: E731
    assert seen(0, "input") == x.abs().max().item()
    assert seen(0, "weight") == params[0]["weight"].abs().max().item()
    assert seen(2, "weight") == params[2]["weight"].abs().max().item()
    assert seen(2, "grad_output") == dy.abs().max().item()
    hidden = fte.apply(fte.chain(*block.ops[:2]), params[:2], x, recipe=RECIPE, state=state[:2]).output
    assert math.isclose(seen(2, "input"), hidden.abs().max().item(), rel_tol=1e-6)
    assert grads.state[0]["grad_output"].amax_history[0] > 0
    # forward roles only, after the forward
    assert result.state[2]["grad_output"].amax_history[0] == 0
    after = fte.update_state(block, RECIPE, grads.state)
    assert after[0]["input"].scale.item() == (torch.tensor(448.0) / x.abs().max()).item()
    assert after[2]["grad_output"].scale.item() == (torch.tensor(57344.0) / dy.abs().max()).item()
    assert fte.update_state(block, None, ({},) * 3) == ({},) * 3


def test_chain_state_several_microbatches() -> None:
    """Observations before one update combine by their maximum; a skipped backward leaves its roles alone."""
    block, params = fte.chain(fte.BasicLinear(8, 8)), fte.init(fte.BasicLinear(8, 8))
    state = fte.init_state(block, RECIPE)
    small, large = torch.randn(4, 8), 100 * torch.randn(4, 8)
    for x in (small, large, small):
        state = fte.apply(block, params, x, recipe=RECIPE, state=state).state
    state = fte.update_state(block, RECIPE, state)
    assert state[0]["input"].scale.item() == (torch.tensor(448.0) / large.abs().max()).item()
    assert torch.equal(state[0]["grad_output"].amax_history, torch.zeros(4))
    assert torch.equal(state[0]["grad_output"].scale, torch.ones(1))
