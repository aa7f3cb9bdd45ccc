"""State of delayed scaling in modules: the scales of every step, recomputation, compiled steps."""

import gc

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import bridge
import functional_te as fte
from bridge import ops

from .compiled import SMALL_HISTORY, assert_same_bits, graph_count
from .delayed import E4M3_MAX, E5M2_MAX, SIZE, LinearRules, inputs_of, mlp, state_of, with_amax

DelayedScaling = fte.recipes.DelayedScaling
E4M3 = fte.recipes.Format.E4M3


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
        x, dy = with_amax(input_amax, step).requires_grad_(), with_amax(grad_amax, step + 50)
        with torch.no_grad():
            linear.weight.copy_(with_amax(weight_amax, step + 100))
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
            y = linear(with_amax(one, step))
            z = linear(with_amax(other, step + 50))
        y.backward(with_amax(other, step))
        z.backward(with_amax(one, step))
        rules.observe(input=max(one, other), weight=weight_amax, grad_output=max(one, other))
        rules.close()
        _check_next(linear, rules)


def test_gradient_accumulation_closes_once_per_context():
    linear, rules = _linear()
    weight_amax = linear.weight.abs().max().item()
    for step in range(3):
        for microbatch in range(2):
            amax = 1.0 + 3 * step + 7 * microbatch
            _run(linear, with_amax(amax, step), with_amax(1 / amax, step))
            rules.observe(input=amax, weight=weight_amax, grad_output=1 / amax)
            rules.close()
            _check_next(linear, rules)
        linear.weight.grad = None


def test_skipped_backward_leaves_the_gradient_quantizer_alone():
    linear, rules = _linear()
    weight_amax = linear.weight.abs().max().item()
    for step, backward in enumerate([True, False, False, True, True]):
        amax = 2.0**step
        _run(linear, with_amax(amax, step), with_amax(3 * amax, step) if backward else None)
        rules.observe(input=amax, weight=weight_amax, **({"grad_output": 3 * amax} if backward else {}))
        rules.close()
        _check_next(linear, rules)


def test_frozen_weight_and_input_still_observe_the_forward():
    linear, rules = _linear()
    linear.requires_grad_(False)
    weight_amax = linear.weight.abs().max().item()
    for step in range(3):
        _run(linear, with_amax(1.0 + step, step))
        rules.observe(input=1.0 + step, weight=weight_amax)
        rules.close()
        _check_next(linear, rules)


def test_nan_and_inf_keep_the_scale():
    linear, rules = _linear()
    weight_amax = linear.weight.abs().max().item()
    _run(linear, with_amax(2.0, 0))
    rules.observe(input=2.0, weight=weight_amax)
    rules.close()
    for bad in (float("inf"), float("nan")):
        x = with_amax(1.0, 1)
        x[0, 0] = bad
        _run(linear, x)
        rules.observe(weight=weight_amax)
        rules.close("weight")
        with bridge.autocast(recipe=SMALL_HISTORY):
            assert linear.input_scale.item() == rules.rules["input"].scale
            assert linear.weight_scale.item() == rules.rules["weight"].scale


# ---------------------------------------------------------------------------- recomputation and compiled steps


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
        x, dy = inputs_of(step)
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
    model = mlp()
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
    expected, model = _expected(), mlp()
    assert_same_bits(_train(model, _recomputed(model, reentrant, where), outside=where == "outside"), expected)


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "saved_tensor_hooks"])
@pytest.mark.parametrize("where", ["outside", "inside"])
def test_checkpointing_layer_by_layer_changes_nothing(reentrant, where):
    expected, model = _expected(), mlp()
    parts = [_recomputed(part, reentrant, where) for part in (model[:2], model[2:])]
    assert_same_bits(_train(model, lambda x: parts[1](parts[0](x)), outside=where == "outside"), expected)


@pytest.mark.parametrize("pattern", ["context outside", "context inside", "checkpoint inside the context"])
def test_compiled_steps_are_eager_steps(dynamo, pattern):
    expected, model = _expected(6), mlp()

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
    expected, model = _expected(), mlp()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert_same_bits(_train(model, _recomputed(compiled, False, "inside"), outside=False), expected)


def _two_forwards_before_the_backwards(model, run, outside):
    seen = []
    for step in range(3):
        inputs = [inputs_of(step), inputs_of(step + 5)]
        outputs = []
        for x, _ in inputs:
            if outside:
                with bridge.autocast(recipe=SMALL_HISTORY):
                    outputs.append(run(x))
            else:
                outputs.append(run(x))
        for y, (_, dy) in zip(outputs, inputs, strict=True):
            y.backward(dy)
        seen.append([*[y.detach() for y in outputs], *[x.grad for x, _ in inputs], model[0].weight.grad.clone()])
        model.zero_grad()
    with bridge.autocast(recipe=SMALL_HISTORY):
        return seen, state_of(model)


def test_step_closed_between_a_compiled_forward_and_its_backward(dynamo):
    """Also where the partitioner may recompute cheap results in the backward, as Inductor's does."""
    model = mlp()
    expected = _two_forwards_before_the_backwards(model, model, True)
    del model
    gc.collect()
    model = mlp()
    run = torch.compile(model, fullgraph=True, backend="aot_eager_decomp_partition")
    got = _two_forwards_before_the_backwards(model, run, True)
    # this backend decomposes torch's functions, which may round differently; the scales are what matters here
    for one, other in zip(got[0], expected[0], strict=True):
        torch.testing.assert_close(one, other, rtol=0.05, atol=0.05)
    torch.testing.assert_close(got[1], expected[1], rtol=1e-3, atol=1e-5)


def test_compiled_module_and_eager_calls_share_the_state(dynamo):
    expected, model = _expected(), mlp()
    compiled, calls = torch.compile(model, fullgraph=True, backend="aot_eager"), []

    def alternate(x):
        calls.append(None)
        return (compiled if len(calls) % 2 else model)(x)

    assert_same_bits(_train(model, alternate), expected)
