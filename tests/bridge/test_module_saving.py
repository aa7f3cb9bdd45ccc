"""Quantizer state of modules in state dicts and extra state, in copies, and when the module is moved or cast."""

import copy
import io
import pickle

import pytest
import torch

import bridge
import functional_te as fte
from bridge import ops

from .compiled import SMALL_HISTORY, assert_same_bits
from .delayed import SIZE, inputs_of, mlp, state_of

DelayedScaling = fte.recipes.DelayedScaling


RESUMABLE = {
    "max": SMALL_HISTORY,
    "margin": DelayedScaling(amax_history_len=4, margin=2),
    "most_recent": DelayedScaling(amax_history_len=4, amax_compute_algo="most_recent"),
    "function": DelayedScaling(amax_history_len=4, amax_compute_algo=torch.mean),
}


def _steps(model, recipe, steps):
    seen = []
    for step in steps:
        x, dy = inputs_of(step)
        model.zero_grad()
        with bridge.autocast(recipe=recipe):
            y = model(x)
        y.backward(dy)
        seen.append([y.detach(), x.grad, *[p.grad.clone() for p in model.parameters()]])
    return seen


@pytest.mark.parametrize("recipe", RESUMABLE.values(), ids=RESUMABLE)
@pytest.mark.parametrize("used", [False, True], ids=["fresh", "used"])
def test_resuming_from_a_state_dict_continues_bit_for_bit(recipe, used):
    model = mlp()
    _steps(model, recipe, range(3))
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    expected = _steps(model, recipe, range(3, 6))
    buffer.seek(0)
    resumed = mlp(1)
    if used:
        _steps(resumed, recipe, range(6, 8))
    resumed.load_state_dict(torch.load(buffer, weights_only=True))
    assert_same_bits(_steps(resumed, recipe, range(3, 6)), expected)


def test_loading_a_history_of_another_length():
    source, target = ops.BasicLinear(SIZE, SIZE), ops.BasicLinear(SIZE, SIZE)
    long = DelayedScaling(amax_history_len=6)
    _steps(source, long, range(4))
    _steps(target, SMALL_HISTORY, range(2))
    target.load_state_dict(source.state_dict())
    _steps(source, SMALL_HISTORY, [4])
    _steps(target, SMALL_HISTORY, [4])
    with bridge.autocast(recipe=SMALL_HISTORY):
        assert_same_bits(state_of(target), state_of(source))


def test_loading_without_state_keeps_fresh_state():
    target = ops.BasicLinear(SIZE, SIZE)
    target.load_state_dict(ops.BasicLinear(SIZE, SIZE).state_dict())
    assert state_of(target) == {}
    twin = copy.deepcopy(target)
    assert_same_bits(_steps(target, SMALL_HISTORY, range(3)), _steps(twin, SMALL_HISTORY, range(3)))


def _payload(content):
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8).clone()


class _Evil:
    touched = False

    def __reduce__(self):
        return (setattr, (_Evil, "touched", True))


_ENTRY = {"scale": torch.ones(1), "amax_history": torch.zeros(4), "dtype": "torch.float8_e4m3fn"}
BAD_PAYLOADS = {
    "code": lambda: _payload(_Evil()),
    "pickle": lambda: torch.frombuffer(bytearray(pickle.dumps({"a": 1}, protocol=2)), dtype=torch.uint8).clone(),
    "noise": lambda: torch.arange(100, dtype=torch.uint8),
    "list": lambda: _payload([1, 2]),
    "unknown role": lambda: _payload({"input": _ENTRY, "nonsense": _ENTRY}),
    "missing field": lambda: _payload({"input": {"scale": torch.ones(1)}}),
    "no tensor": lambda: _payload({"input": {**_ENTRY, "scale": 1.0}}),
    "shape of the scale": lambda: _payload({"input": {**_ENTRY, "scale": torch.ones(3)}}),
    "shape of the history": lambda: _payload({"input": {**_ENTRY, "amax_history": torch.ones(2, 2)}}),
    "dtype of the history": lambda: _payload({"input": {**_ENTRY, "amax_history": torch.ones(4).double()}}),
    "a module as dtype": lambda: _payload({"input": {**_ENTRY, "dtype": "torch.nn"}}),
    "another dtype": lambda: _payload({"input": {**_ENTRY, "dtype": "torch.float32"}}),
}


@pytest.mark.parametrize("bad", BAD_PAYLOADS)
def test_other_payloads_are_refused_and_nothing_is_half_loaded(bad):
    linear = ops.BasicLinear(SIZE, SIZE)
    _steps(linear, SMALL_HISTORY, range(2))
    before = state_of(linear)
    payload = BAD_PAYLOADS[bad]()
    with pytest.raises((ValueError, TypeError, RuntimeError, pickle.UnpicklingError)):
        linear.set_extra_state(payload)
    assert not _Evil.touched
    assert_same_bits(state_of(linear), before)
    _steps(linear, SMALL_HISTORY, [2])


def test_deepcopied_and_pickled_modules_have_their_own_state():
    model = mlp()
    _steps(model, SMALL_HISTORY, range(3))
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    assert len(state_of(model)) == 12
    for other in copies:
        assert_same_bits(state_of(other), state_of(model))
    before = state_of(model)
    with bridge.autocast(recipe=SMALL_HISTORY):
        before = state_of(model)
        copies[0](100 * torch.ones(SIZE, SIZE))
        assert_same_bits(state_of(model), before)
    expected = _steps(model, SMALL_HISTORY, range(3, 5))
    assert_same_bits(_steps(copies[1], SMALL_HISTORY, range(3, 5)), expected)


@pytest.mark.parametrize(
    "move",
    [lambda m: m.to(torch.bfloat16), lambda m: m.half(), lambda m: m.bfloat16().float()],
    ids=["to", "half", "back"],
)
def test_casting_the_parameters_leaves_the_state_in_float32(move):
    model = mlp()
    _steps(model, SMALL_HISTORY, range(3))
    before = state_of(model)
    move(model)
    assert_same_bits(state_of(model), before)
    with bridge.autocast(recipe=SMALL_HISTORY):
        model(torch.ones(SIZE, SIZE, dtype=model[0].weight.dtype)).sum().backward()


def test_moving_to_another_device_moves_the_state():
    model = ops.BasicLinear(SIZE, SIZE)
    _steps(model, SMALL_HISTORY, range(2))
    assert len(state_of(model)) == 6
    model.to("meta")
    assert {b.device.type for b in state_of(model).values()} == {"meta"}


def test_state_is_in_no_state_dict_entry_of_its_own():
    model = mlp()
    keys = list(model.state_dict())
    _steps(model, SMALL_HISTORY, range(2))
    assert list(model.state_dict()) == keys
    assert model.state_dict()["0.basic_ops.0._extra_state"].numel() > 0
    assert model.state_dict()["1._extra_state"].numel() == 0
