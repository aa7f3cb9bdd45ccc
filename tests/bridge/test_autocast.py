"""``bridge.autocast``: which recipe is active where, what may go wrong, and what happens when it changes."""

import copy
import inspect

import pytest
import torch

import bridge
import functional_te as fte
from bridge import ops
from bridge.recipe_context import active_recipe

from .compiled import CURRENT, SMALL_HISTORY, assert_same_bits
from .delayed import LinearRules, state_of


@pytest.fixture
def linear():
    return ops.Linear(16, 16, bias=False)


@pytest.fixture
def x():
    return torch.randn(16, 16)


def _twin(linear, x, recipe):
    """The functional result with fresh state."""
    block = fte.BasicLinear(16, 16)
    params = ({"weight": linear.weight.detach()},)
    return fte.apply(block, params, x, state=fte.init_state(block, recipe), recipe=recipe).output


def _step(model, recipe, x):
    """One training step without an update; output and gradients."""
    model.zero_grad()
    with bridge.autocast(recipe=recipe):
        y = model(x)
    y.square().sum().backward()
    return [y.detach(), *[p.grad.clone() for p in model.parameters()]]


# ---------------------------------------------------------------------------- which recipe


def test_signature_is_te_autocasts_and_one_more():
    parameters = [p for p in inspect.signature(bridge.autocast).parameters.values() if p.name != "cache_weights"]
    assert [(p.name, p.default, p.kind) for p in parameters] == [
        (name, default, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        for name, default in (
            ("enabled", True), ("calibrating", False), ("recipe", None), ("amax_reduction_group", None),
            ("_graph", False),
        )
    ]  # fmt: skip


@pytest.mark.parametrize("recipe", [CURRENT, SMALL_HISTORY], ids=["current", "delayed"])
def test_enabled_and_disabled(linear, x, recipe):
    exact = x @ linear.weight.detach().T
    torch.testing.assert_close(linear(x).detach(), exact)
    with bridge.autocast(enabled=True, recipe=recipe):
        low = linear(x).detach()
    assert_same_bits(low, _twin(linear, x, recipe))
    assert not torch.equal(low, exact)
    with bridge.autocast(enabled=False, recipe=recipe):
        torch.testing.assert_close(linear(x).detach(), exact)
    assert active_recipe() is None


def test_default_recipe_is_delayed_scaling(linear, x):
    default = fte.recipes.DelayedScaling()
    assert (default.margin, default.amax_history_len, default.amax_compute_algo) == (0, 1024, "max")
    with bridge.autocast():
        assert active_recipe() == default
        assert_same_bits(linear(x).detach(), _twin(linear, x, default))
    with bridge.autocast(False):
        assert active_recipe() is None


def test_calibrating_changes_nothing(linear, x):
    with bridge.autocast(calibrating=True, recipe=CURRENT):
        assert_same_bits(linear(x).detach(), _twin(linear, x, CURRENT))


def test_nesting(linear, x):
    plain = linear(x).detach()
    with bridge.autocast(recipe=CURRENT):
        with bridge.autocast(enabled=False):
            assert active_recipe() is None
            assert_same_bits(linear(x).detach(), plain)
            with bridge.autocast(recipe=SMALL_HISTORY):
                assert active_recipe() is SMALL_HISTORY
                assert_same_bits(linear(x).detach(), _twin(linear, x, SMALL_HISTORY))
            assert active_recipe() is None
        assert active_recipe() is CURRENT
        assert_same_bits(linear(x).detach(), _twin(linear, x, CURRENT))
    assert active_recipe() is None


def test_inner_contexts_do_not_close_a_step(linear, x):
    with bridge.autocast(recipe=SMALL_HISTORY):
        linear(x)
        with bridge.autocast(enabled=False):
            pass
        with bridge.autocast(recipe=SMALL_HISTORY):
            linear(2 * x)
        observed = linear.basic_ops[0].input_amax_history[0].item()
        assert linear.basic_ops[0].input_scale.item() == 1
    assert observed == 2 * x.abs().max().item()


def test_torch_autocast_and_this_one_in_either_order(linear, x):
    with bridge.autocast(recipe=CURRENT), torch.autocast("cpu", torch.bfloat16):
        one = linear(x)
    with torch.autocast("cpu", torch.bfloat16), bridge.autocast(recipe=CURRENT):
        other = linear(x)
    assert one.dtype is torch.bfloat16
    assert_same_bits(one.detach(), other.detach())
    one.sum().backward()
    assert linear.weight.grad.dtype is torch.float32


# ---------------------------------------------------------------------------- misuse


def test_a_context_is_reusable_but_not_reentrant(linear, x):
    context = bridge.autocast(recipe=CURRENT)
    for _ in range(2):
        with context:
            assert_same_bits(linear(x).detach(), _twin(linear, x, CURRENT))
        assert active_recipe() is None
    with context:
        with pytest.raises(RuntimeError, match="already open"):
            context.__enter__()
        assert active_recipe() is CURRENT
    assert active_recipe() is None
    with context:
        assert active_recipe() is CURRENT


@pytest.mark.parametrize(
    "recipe", ["delayed", 1, fte.recipes.DelayedScaling, object(), {"margin": 0}], ids=lambda r: type(r).__name__
)
@pytest.mark.parametrize("enabled", [True, False])
def test_bad_recipes(recipe, enabled):
    with pytest.raises(TypeError, match=r"recipe.*expected.*recipe"):
        bridge.autocast(enabled=enabled, recipe=recipe)
    assert active_recipe() is None


def test_amax_reduction_group_is_refused_by_name():
    with pytest.raises(NotImplementedError, match="amax_reduction_group"):
        bridge.autocast(amax_reduction_group=object())


def test_exceptions_restore_the_outer_context(linear, x):
    with bridge.autocast(recipe=CURRENT):
        with pytest.raises(ZeroDivisionError), bridge.autocast(recipe=SMALL_HISTORY):
            raise ZeroDivisionError
        assert active_recipe() is CURRENT
        with pytest.raises(ValueError, match="last dimension"), bridge.autocast(enabled=False):
            linear(x[:, :3])
        assert active_recipe() is CURRENT
    with pytest.raises(ZeroDivisionError), bridge.autocast(recipe=CURRENT), bridge.autocast(enabled=False):
        raise ZeroDivisionError
    assert active_recipe() is None
    before = _step(linear, SMALL_HISTORY, x)
    fresh = ops.Linear(16, 16, bias=False)
    fresh.load_state_dict({"basic_ops.0.weight": linear.weight.detach()}, strict=False)
    assert_same_bits(before, _step(fresh, SMALL_HISTORY, x))


def test_a_failed_forward_leaves_the_state_alone(linear, x):
    _step(linear, SMALL_HISTORY, x)
    with bridge.autocast(recipe=SMALL_HISTORY):
        before = state_of(linear)
        with pytest.raises(ValueError, match="last dimension"):
            linear(x[:, :3])
        assert_same_bits(state_of(linear), before)


# ---------------------------------------------------------------------------- changes between steps


def test_switching_between_current_and_delayed(linear, x):
    """Steps of another recipe neither see nor touch the state of delayed scaling."""
    only_delayed = copy.deepcopy(linear)
    for scale in (1.0, 3.0, 0.5):
        expected = _step(only_delayed, SMALL_HISTORY, scale * x)
        got = _step(linear, SMALL_HISTORY, scale * x)
        assert_same_bits(got, expected)
        current = _step(linear, CURRENT, 7 * x)
        assert_same_bits(current[0], _twin(linear, 7 * x, CURRENT))
        plain = linear(x).detach()
        torch.testing.assert_close(plain, x @ linear.weight.detach().T)
    with bridge.autocast(recipe=SMALL_HISTORY):
        assert_same_bits(state_of(linear), state_of(only_delayed))


@pytest.mark.parametrize(
    ("mode", "lengths"),
    [
        ("eager", (4, 2)),
        ("eager", (2, 5)),
        ("eager", (4, 1)),
        ("eager", (1, 3)),
        ("eager", (4, 2, 4)),
        ("compiled", (2, 4)),
    ],
    ids=str,
)
def test_another_history_length(dynamo, linear, x, mode, lengths):
    """As in Transformer Engine the history is cut at its end, or padded with zeros there."""
    run = torch.compile(linear, fullgraph=True, backend="aot_eager") if mode == "compiled" else linear
    rules = LinearRules(length=lengths[0])
    magnitudes = iter([1.0, 5.0, 2.0, 0.25, 3.0, 0.125, 2.5, 1.5, 0.75])
    basic = linear.basic_ops[0]
    for length in lengths:
        recipe = fte.recipes.DelayedScaling(amax_history_len=length)
        for step in range(3):
            inputs, dy = next(magnitudes) * x, torch.full((16, 16), 2.0**-step)
            with bridge.autocast(recipe=recipe):
                y = run(inputs)
                rules.close()
                rules.resize(length)
                rules.observe(input=inputs.abs().max(), weight=linear.weight.abs().max().item())
                rules.check(basic)
            y.backward(dy)
            rules.observe(grad_output=dy.max())
            rules.check(basic)


def test_another_margin_takes_effect_at_the_next_close(linear, x):
    _step(linear, SMALL_HISTORY, x)
    wide = fte.recipes.DelayedScaling(amax_history_len=4, margin=3)
    scale = (448 / x.abs().max()).reshape(1)
    _step(linear, wide, x)  # the first step was closed with the margin it ran with
    assert_same_bits(linear.basic_ops[0].input_scale, scale)
    with bridge.autocast(recipe=wide):
        assert_same_bits(linear.basic_ops[0].input_scale, scale / 8)


# ---------------------------------------------------------------------------- evaluation, several models


def _train(model, x, between=None):
    """Three steps with another function in between: everything that came out, and the state at the end."""
    seen = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for scale in (1.0, 4.0, 0.5):
        seen.append(_step(model, SMALL_HISTORY, scale * x))
        if between is not None:
            between(model, 100 * x)
        optimizer.step()
    with bridge.autocast(recipe=SMALL_HISTORY):
        return seen, state_of(model)


@pytest.mark.parametrize("no_grad", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("recipe", [SMALL_HISTORY, CURRENT, None], ids=["delayed", "current", "none"])
def test_evaluation_leaves_the_state_alone(linear, x, no_grad, recipe):
    def evaluate(model, x):
        model.eval()
        with no_grad(), bridge.autocast(enabled=recipe is not None, recipe=recipe):
            before = state_of(model)
            for _ in range(2):
                model(x)
            assert_same_bits(state_of(model), before)
        assert_same_bits(state_of(model), before)
        model.train()

    other = copy.deepcopy(linear)
    expected = _train(other, x)
    assert_same_bits(_train(linear, x, evaluate), expected)


@pytest.mark.parametrize("no_grad", [torch.no_grad, torch.inference_mode])
def test_evaluation_before_the_first_step(linear, x, no_grad):
    other = copy.deepcopy(linear)
    with no_grad(), bridge.autocast(recipe=SMALL_HISTORY):
        linear(x)
    assert_same_bits(_train(linear, x), _train(other, x))


def test_evaluation_uses_what_the_last_step_observed(linear, x):
    """Transformer Engine closes a training step when its context ends, so an evaluation after it has the new scale."""
    block, params = fte.BasicLinear(16, 16), ({"weight": linear.weight.detach()},)
    _step(linear, SMALL_HISTORY, x)
    trained = fte.apply(block, params, x, state=fte.init_state(block, SMALL_HISTORY), recipe=SMALL_HISTORY).state
    closed = fte.update_state(block, SMALL_HISTORY, trained)
    with torch.no_grad(), bridge.autocast(recipe=SMALL_HISTORY):
        y = linear(x)
    assert_same_bits(y, fte.apply(block, params, x, state=closed, recipe=SMALL_HISTORY).output)


def test_two_models_under_one_context(x):
    models = [ops.Linear(16, 16), ops.Sequential(ops.RMSNorm(16), ops.Linear(16, 16), ops.GELU(), ops.Linear(16, 16))]
    alone = [_train(copy.deepcopy(model), x) for model in models]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    together = [[], []]
    for scale in (1.0, 4.0, 0.5):
        with bridge.autocast(recipe=SMALL_HISTORY):
            outputs = [model(scale * x) for model in models]
        for model, y, optimizer, seen in zip(models, outputs, optimizers, together, strict=True):
            model.zero_grad()
            y.square().sum().backward()
            seen.append([y.detach(), *[p.grad.clone() for p in model.parameters()]])
            optimizer.step()
    with bridge.autocast(recipe=SMALL_HISTORY):
        for model, seen, expected in zip(models, together, alone, strict=True):
            assert_same_bits((seen, state_of(model)), expected)
