"""State of delayed scaling in modules: the scales of every step, recomputation, compiled steps, saving and moving."""

import copy
import gc
import io
import pickle

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import bridge
import functional_te as fte
from bridge import ops

from .compiled import SMALL_HISTORY, assert_same_bits, graph_count
from .delayed import E4M3_MAX, E5M2_MAX, LinearRules, state_of

DelayedScaling = fte.recipes.DelayedScaling
E4M3 = fte.recipes.Format.E4M3
SIZE = 16


def _with_amax(amax, seed):
    """A matrix whose largest magnitude is exactly ``amax``."""
    values = 2 * torch.rand(SIZE, SIZE, generator=torch.Generator().manual_seed(seed)) - 1
    values = values * amax * 0.75
    values[seed % SIZE, 3] = -amax
    return values


def _linear(recipe=SMALL_HISTORY, **settings):
    grad_limit = E4M3_MAX if recipe.fp8_format is E4M3 else E5M2_MAX
    rules = LinearRules(
        grad_limit=grad_limit,
        length=recipe.amax_history_len,
        margin=recipe.margin,
        algorithm=recipe.amax_compute_algo,
    )
    return ops.BasicLinear(SIZE, SIZE), rules


def _cast(x, scale, dtype):
    """What FP8 with this scale makes of ``x``."""
    limit = torch.finfo(dtype).max
    scale = torch.tensor(scale)
    return (x * scale).clamp(-limit, limit).to(dtype).float() * (1 / scale)


# ---------------------------------------------------------------------------- Transformer Engine's rule

# per step the amaxes of input, weight and output gradient; zeros must change nothing
STEPS = [
    (1.0, 0.5, 1.0), (5.0, 0.75, 0.25), (0.3, 0.7, 0.0), (0.0, 0.9, 3.0),
    (2.5, 0.9, 0.0), (2.5, 1.1, 7.0), (0.01, 1.3, 0.001), (300.0, 0.1, 100.0),
]  # fmt: skip


@pytest.mark.parametrize(
    "recipe",
    [
        SMALL_HISTORY,
        DelayedScaling(amax_history_len=3, margin=2),
        DelayedScaling(amax_history_len=3, amax_compute_algo="most_recent"),
        DelayedScaling(amax_history_len=1, fp8_format=E4M3),
    ],
    ids=["max", "margin", "most_recent", "length_1_e4m3"],
)
def test_scales_of_every_step_follow_transformer_engine(recipe):
    linear, rules = _linear(recipe)
    for step, (input_amax, weight_amax, grad_amax) in enumerate(STEPS):
        x, dy = _with_amax(input_amax, step).requires_grad_(), _with_amax(grad_amax, step + 50)
        with torch.no_grad():
            linear.weight.copy_(_with_amax(weight_amax, step + 100))
        linear.weight.grad = None
        with bridge.autocast(recipe=recipe):
            if step == 0:  # state appears on entry, or at the latest when the module runs
                linear.prepare_state(recipe)
            rules.check(linear)
            y = linear(x)
            # what the backward will dequantize with is the inverse of the scale that was used
            used = [t.item() for t in y.grad_fn.saved_tensors if t.dtype is torch.float32 and t.numel() == 1]
            scales = [rules.rules[role].scale for role in ("input", "weight")]
            assert used == [torch.tensor(scale).reciprocal().item() for scale in scales]
            rules.observe(input=input_amax, weight=weight_amax)
            rules.check(linear)
        rules.close("input", "weight")  # Transformer Engine: when the context ends
        y.backward(dy)
        grad_scale = rules.rules["grad_output"].scale
        rules.observe(grad_output=grad_amax)
        rules.close("grad_output")  # Transformer Engine: when the backward ends
        grad_dtype = torch.float8_e4m3fn if recipe.fp8_format is E4M3 else torch.float8_e5m2
        low_x, low_w = (
            _cast(t.detach(), scale, torch.float8_e4m3fn) for t, scale in zip((x, linear.weight), scales, strict=True)
        )
        low_dy = _cast(dy, grad_scale, grad_dtype)
        for got, wanted in ((y, low_x @ low_w.T), (x.grad, low_dy @ low_w), (linear.weight.grad, low_dy.T @ low_x)):
            size = wanted.abs().max().item()
            torch.testing.assert_close(got.detach(), wanted, rtol=1e-4, atol=1e-5 * size)
    with bridge.autocast(recipe=recipe):
        rules.check(linear)


def _run(linear, x, dy=None, recipe=SMALL_HISTORY):
    with bridge.autocast(recipe=recipe):
        y = linear(x)
    if dy is not None:
        y.backward(dy)


def _check_next(linear, rules):
    """The state that the next step would use."""
    with bridge.autocast(recipe=SMALL_HISTORY):
        rules.check(linear)


def test_module_called_twice_in_one_context():
    linear, rules = _linear()
    weight_amax = linear.weight.abs().max().item()
    for step, (one, other) in enumerate([(1.0, 3.0), (4.0, 0.5), (0.25, 0.125)]):
        with bridge.autocast(recipe=SMALL_HISTORY):
            y = linear(_with_amax(one, step))
            z = linear(_with_amax(other, step + 50))
        y.backward(_with_amax(other, step))
        z.backward(_with_amax(one, step))
        rules.observe(input=max(one, other), weight=weight_amax, grad_output=max(one, other))
        rules.close()
        _check_next(linear, rules)


def test_gradient_accumulation_closes_once_per_context():
    linear, rules = _linear()
    weight_amax = linear.weight.abs().max().item()
    for step in range(3):
        for microbatch in range(2):
            amax = 1.0 + 3 * step + 7 * microbatch
            _run(linear, _with_amax(amax, step), _with_amax(1 / amax, step))
            rules.observe(input=amax, weight=weight_amax, grad_output=1 / amax)
            rules.close()
            _check_next(linear, rules)
        linear.weight.grad = None


def test_skipped_backward_leaves_the_gradient_quantizer_alone():
    linear, rules = _linear()
    weight_amax = linear.weight.abs().max().item()
    for step, backward in enumerate([True, False, False, True, True]):
        amax = 2.0**step
        _run(linear, _with_amax(amax, step), _with_amax(3 * amax, step) if backward else None)
        rules.observe(input=amax, weight=weight_amax, **({"grad_output": 3 * amax} if backward else {}))
        rules.close()
        _check_next(linear, rules)


def test_frozen_weight_and_input_still_observe_the_forward():
    linear, rules = _linear()
    linear.requires_grad_(False)
    weight_amax = linear.weight.abs().max().item()
    for step in range(3):
        _run(linear, _with_amax(1.0 + step, step))
        rules.observe(input=1.0 + step, weight=weight_amax)
        rules.close()
        _check_next(linear, rules)


def test_nan_and_inf_keep_the_scale():
    linear, rules = _linear()
    weight_amax = linear.weight.abs().max().item()
    _run(linear, _with_amax(2.0, 0))
    rules.observe(input=2.0, weight=weight_amax)
    rules.close()
    for bad in (float("inf"), float("nan")):
        x = _with_amax(1.0, 1)
        x[0, 0] = bad
        _run(linear, x)
        rules.observe(weight=weight_amax)
        rules.close("weight")
        with bridge.autocast(recipe=SMALL_HISTORY):
            assert linear.input_scale.item() == rules.rules["input"].scale
            assert linear.weight_scale.item() == rules.rules["weight"].scale


# ---------------------------------------------------------------------------- recomputation and compiled steps


def _mlp(seed=0):
    torch.manual_seed(seed)
    return ops.Sequential(ops.RMSNorm(SIZE), ops.Linear(SIZE, SIZE), ops.GELU(), ops.Linear(SIZE, SIZE))


def _inputs(step):
    return _with_amax(1.0 + 2 * step, step).requires_grad_(), _with_amax(0.5 + step, step + 50)


def _train(model, run, steps=4, outside=True):
    """Steps of SGD: outputs and gradients of every step, and the state that the step after them would use.

    Args:
        model: what is trained.
        run: what is called.
        steps: how many.
        outside: whether the context is entered here, or by ``run``.
    """
    seen = []
    for step in range(steps):
        x, dy = _inputs(step)
        model.zero_grad()
        if outside:
            with bridge.autocast(recipe=SMALL_HISTORY):
                y = run(x)
        else:
            y = run(x)
        y.backward(dy)
        seen.append([y.detach().clone(), x.grad, *[p.grad.clone() for p in model.parameters()]])
        with torch.no_grad():
            for own in model.parameters():
                own -= 0.05 * own.grad
    with bridge.autocast(recipe=SMALL_HISTORY):
        return seen, state_of(model)


def _expected(steps=4):
    model = _mlp()
    result = _train(model, model, steps)
    assert len(result[1]) == 12
    del model
    gc.collect()  # a context closes the steps of every living module
    return result


def _recomputed(model, reentrant, where):
    if where == "outside":
        return lambda x: checkpoint(model, x, use_reentrant=reentrant)

    def inside(x):
        with bridge.autocast(recipe=SMALL_HISTORY):
            return model(x)

    return lambda x: checkpoint(inside, x, use_reentrant=reentrant)


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "saved_tensor_hooks"])
@pytest.mark.parametrize("where", ["outside", "inside"])
def test_checkpointing_changes_nothing(reentrant, where):
    expected, model = _expected(), _mlp()
    assert_same_bits(_train(model, _recomputed(model, reentrant, where), outside=where == "outside"), expected)


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "saved_tensor_hooks"])
@pytest.mark.parametrize("where", ["outside", "inside"])
def test_checkpointing_layer_by_layer_changes_nothing(reentrant, where):
    expected, model = _expected(), _mlp()
    parts = [_recomputed(part, reentrant, where) for part in (model[:2], model[2:])]
    assert_same_bits(_train(model, lambda x: parts[1](parts[0](x)), outside=where == "outside"), expected)


@pytest.mark.parametrize("pattern", ["context outside", "context inside", "checkpoint inside the context"])
def test_compiled_steps_are_eager_steps(dynamo, pattern):
    expected, model = _expected(6), _mlp()

    def function(x):
        if pattern == "context inside":
            with bridge.autocast(recipe=SMALL_HISTORY):
                return model(x)
        if pattern == "checkpoint inside the context":
            return checkpoint(model, x, use_reentrant=False)
        return model(x)

    compiled, graphs = torch.compile(function, fullgraph=True, backend="aot_eager"), []

    def run(x):
        y = compiled(x)
        graphs.append(graph_count(dynamo))
        return y

    result = _train(model, run, 6, outside=pattern != "context inside")
    assert_same_bits(result, expected)
    assert graphs[-1] <= 2
    assert graphs[2:] == graphs[2:3] * 4


def test_compiled_module_in_an_eager_checkpoint(dynamo):
    expected, model = _expected(), _mlp()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert_same_bits(_train(model, _recomputed(compiled, False, "inside"), outside=False), expected)


def _two_forwards_before_the_backwards(model, run, outside):
    seen = []
    for step in range(3):
        inputs = [_inputs(step), _inputs(step + 5)]
        outputs = []
        for x, _ in inputs:
            if outside:
                with bridge.autocast(recipe=SMALL_HISTORY):
                    outputs.append(run(x))
            else:
                outputs.append(run(x))
        for y, (_, dy) in zip(outputs, inputs, strict=True):
            y.backward(dy)
        seen.append([*[y.detach() for y in outputs], *[x.grad for x, _ in inputs], model[1].weight.grad.clone()])
        model.zero_grad()
    with bridge.autocast(recipe=SMALL_HISTORY):
        return seen, state_of(model)


def test_step_closed_between_a_compiled_forward_and_its_backward(dynamo):
    """Also where the partitioner may recompute cheap results in the backward, as Inductor's does."""
    model = _mlp()
    expected = _two_forwards_before_the_backwards(model, model, True)
    del model
    gc.collect()
    model = _mlp()
    run = torch.compile(model, fullgraph=True, backend="aot_eager_decomp_partition")
    got = _two_forwards_before_the_backwards(model, run, True)
    # this backend decomposes torch's functions, which may round differently; the scales are what matters here
    for one, other in zip(got[0], expected[0], strict=True):
        torch.testing.assert_close(one, other, rtol=0.05, atol=0.05)
    torch.testing.assert_close(got[1], expected[1], rtol=1e-3, atol=1e-5)


def test_compiled_module_and_eager_calls_share_the_state(dynamo):
    expected, model = _expected(), _mlp()
    compiled, calls = torch.compile(model, fullgraph=True, backend="aot_eager"), []

    def alternate(x):
        calls.append(None)
        return (compiled if len(calls) % 2 else model)(x)

    assert_same_bits(_train(model, alternate), expected)


# ---------------------------------------------------------------------------- saving, copying, moving

RESUMABLE = {
    "max": SMALL_HISTORY,
    "margin": DelayedScaling(amax_history_len=4, margin=2),
    "most_recent": DelayedScaling(amax_history_len=4, amax_compute_algo="most_recent"),
    "function": DelayedScaling(amax_history_len=4, amax_compute_algo=torch.mean),
}


def _steps(model, recipe, steps):
    seen = []
    for step in steps:
        x, dy = _inputs(step)
        model.zero_grad()
        with bridge.autocast(recipe=recipe):
            y = model(x)
        y.backward(dy)
        seen.append([y.detach(), x.grad, *[p.grad.clone() for p in model.parameters()]])
    return seen


@pytest.mark.parametrize("recipe", RESUMABLE.values(), ids=RESUMABLE)
@pytest.mark.parametrize("used", [False, True], ids=["fresh", "used"])
def test_resuming_from_a_state_dict_continues_bit_for_bit(recipe, used):
    model = _mlp()
    _steps(model, recipe, range(3))
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    expected = _steps(model, recipe, range(3, 6))
    buffer.seek(0)
    resumed = _mlp(1)
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
    model = _mlp()
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
    model = _mlp()
    _steps(model, SMALL_HISTORY, range(3))
    before = state_of(model)
    move(model)
    assert_same_bits(state_of(model), before)
    with bridge.autocast(recipe=SMALL_HISTORY):
        model(torch.ones(SIZE, SIZE, dtype=model[1].weight.dtype)).sum().backward()


def test_moving_to_another_device_moves_the_state():
    model = ops.BasicLinear(SIZE, SIZE)
    _steps(model, SMALL_HISTORY, range(2))
    assert len(state_of(model)) == 6
    model.to("meta")
    assert {b.device.type for b in state_of(model).values()} == {"meta"}


def test_state_is_in_no_state_dict_entry_of_its_own():
    model = _mlp()
    keys = list(model.state_dict())
    _steps(model, SMALL_HISTORY, range(2))
    assert list(model.state_dict()) == keys
    assert model.state_dict()["1.basic_ops.0._extra_state"].numel() > 0
    assert model.state_dict()["0._extra_state"].numel() == 0
