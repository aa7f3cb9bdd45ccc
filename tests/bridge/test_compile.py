"""Whole chains in one compiled graph: what they compute, how many graphs they cost, and the state they keep."""

import dataclasses

import pytest
import torch

import bridge
import functional_te as fte

from .compiled import (
    CURRENT,
    RECIPES,
    SMALL_HISTORY,
    GraphLog,
    assert_close,
    assert_same_bits,
    backward,
    break_count,
    copy_of,
    grads_of,
    graph_count,
    leaf,
    leaves_of,
)
from .random_chains import arguments, random_chain


def _block():
    """A feed-forward block with a residual branch."""
    return fte.chain(
        fte.MakeExtraOutput(channel="residual", output_to_caller=False),
        fte.RMSNorm(16),
        fte.Linear(16, 32, bias=False),
        fte.SwiGLU(),
        fte.Linear(16, 16, bias=False),
        fte.AddExtraInput(channel="residual"),
    )


def _small():
    """A small chain whose ops hand quantized tensors to each other in both directions."""
    return fte.chain(fte.BasicLinear(16, 16), fte.GELU(), fte.BasicLinear(16, 16))


def _tiny():
    """A chain of two ops that are not fused."""
    return fte.chain(fte.RMSNorm(16), fte.BasicLinear(16, 16))


def _step(run, block, x, params, extras, state, recipe):
    """One forward and backward on copies: outputs, gradients, and the state that both passes leave."""
    x, params, extras, state = copy_of(x), copy_of(params), copy_of(extras), copy_of(state)
    outputs, after = run(block, params, x, extras, state, recipe)
    backward(outputs)
    return outputs, (x.grad, grads_of(params), tuple(extra.grad for extra in extras)), after, state


def _apply(block, params, x, extras, state, recipe):
    return bridge.apply(block, params, x, *extras, state=state, recipe=recipe)


def _check_one_graph(counters, block, x, params, extras, recipe, backend="aot_eager", **tolerance):
    state = fte.init_state(block, recipe)
    compiled = torch.compile(_apply, fullgraph=True, backend=backend)
    eager = _step(_apply, block, x, params, extras, state, recipe)
    assert_close(eager, _step(compiled, block, x, params, extras, state, recipe), **tolerance)
    assert graph_count(counters) == 1
    assert break_count(counters) == 0


# ---------------------------------------------------------------------------- random chains


LENGTHS = [pytest.param(n, marks=() if n in (1, 2, 3, 5, 8, 12) else pytest.mark.slow) for n in range(1, 13)]


@pytest.mark.parametrize("length", LENGTHS)
def test_random_chain_is_one_graph(dynamo, length):
    block, size = random_chain(length, seed=0)
    assert len(block) == length
    x, params, extras = arguments(block, size)
    recipe = list(RECIPES.values())[length % 3]
    _check_one_graph(dynamo, block, x, params, extras, recipe, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 6))
@pytest.mark.parametrize("length", range(1, 13))
def test_more_random_chains_are_one_graph(dynamo, length, seed):
    block, size = random_chain(length, seed)
    x, params, extras = arguments(block, size, seed)
    recipe = list(RECIPES.values())[(length + seed) % 3]
    _check_one_graph(dynamo, block, x, params, extras, recipe, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("length", [2, 5, 9, 12])
def test_random_chain_through_inductor(dynamo, length):
    block, size = random_chain(length, seed=11)
    x, params, extras = arguments(block, size)
    _check_one_graph(dynamo, block, x, params, extras, None, backend="inductor", rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("block", [_tiny(), pytest.param(_block(), marks=pytest.mark.slow)], ids=["tiny", "block"])
def test_chain_through_inductor(dynamo, block):
    _check_one_graph(dynamo, block, leaf(8, 16), leaves_of(block), (), None, backend="inductor", rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------------------- extra tensors


def _extras_block():
    return fte.chain(
        fte.MakeExtraOutput(),
        fte.Linear(16, 16, bias=False),
        fte.AddExtraInput(),
        fte.MakeExtraOutput(channel="c"),
        fte.GELU(),
        fte.AddExtraInput(channel="c"),
    )


def _extras_formula(x, weight, extra):
    first = x
    second = x @ weight.T + extra
    return second + torch.nn.functional.gelu(second, approximate="tanh"), first, second


USED = [
    ("eager", (0, 1, 2)),
    ("eager", (0,)),
    ("eager", (1, 2)),
    ("eager", (2,)),
    ("compiled", (0, 2)),
    ("compiled", (1,)),
]


@pytest.mark.parametrize(("mode", "used"), USED, ids=str)
def test_extra_inputs_outputs_and_channels(dynamo, mode, used):
    block = _extras_block()
    x, params, extra = leaf(4, 16), leaves_of(block), leaf(4, 16, seed=3)

    def run(params, x, extra):
        outputs, _ = bridge.apply(block, params, x, extra)
        return tuple(outputs[i] for i in used)

    function = torch.compile(run, fullgraph=True, backend="aot_eager") if mode == "compiled" else run
    outputs = function(params, x, extra)
    backward(outputs)
    wide = [t.detach().double().requires_grad_() for t in (x, params[1]["weight"], extra)]
    expected = tuple(_extras_formula(*wide)[i] for i in used)
    backward(expected)
    assert_close([t.float() for t in expected], outputs)
    zero = torch.zeros(())
    for value, exact in zip((x, params[1]["weight"], extra), wide, strict=True):
        wanted = zero.expand_as(value) if exact.grad is None else exact.grad.float()
        torch.testing.assert_close(zero.expand_as(value) if value.grad is None else value.grad, wanted)
    if mode == "compiled":
        assert graph_count(dynamo) == 1


@pytest.mark.parametrize("mode", ["eager", "compiled"])
def test_all_outputs_returned_and_only_an_extra_one_used(dynamo, mode):
    block = _extras_block()
    x, params, extra = leaf(4, 16), leaves_of(block), leaf(4, 16, seed=3)

    def run(params, x, extra):
        return bridge.apply(block, params, x, extra)[0]

    function = torch.compile(run, fullgraph=True, backend="aot_eager") if mode == "compiled" else run
    outputs = function(params, x, extra)
    assert len(outputs) == 3
    outputs[2].sum().backward()
    torch.testing.assert_close(extra.grad, torch.ones(4, 16))
    torch.testing.assert_close(params[1]["weight"].grad, x.detach().sum(0).expand(16, 16))
    torch.testing.assert_close(x.grad, params[1]["weight"].detach().sum(0).expand(4, 16))


# ---------------------------------------------------------------------------- recompilation


def test_batch_sizes_cost_at_most_two_graphs(dynamo):
    block = _tiny()
    compiled = torch.compile(_apply, fullgraph=True, backend="aot_eager")
    params = leaves_of(block)
    for rows in (4, 8, 16, 31, 33):
        x = leaf(rows, 16, seed=rows)
        assert_close(
            _step(_apply, block, x, params, (), None, CURRENT),
            _step(compiled, block, x, params, (), None, CURRENT),
        )
    assert graph_count(dynamo) <= 2


def _train(run, recipe, steps, counters=None, compile_update=None):
    """SGD with state updates; returns everything that was seen, and the graph count after every step."""
    block = _small()
    params, state = leaves_of(block), fte.init_state(block, recipe)
    update = compile_update or fte.update_state
    seen, counts = [], []
    for step in range(steps):
        x = leaf(8, 16, seed=step % 3)
        outputs, state_after = run(block, params, x, (), state, recipe)
        backward(outputs, seed=step)
        seen.append(copy_of((outputs.detach(), x.grad, grads_of(params), state_after)))
        state = update(block, recipe, state_after)
        with torch.no_grad():
            for value in fte.pytree.leaves(params):
                value -= 0.5 * value.grad
                value.grad = None
        if counters is not None:
            counts.append(graph_count(counters))
    return seen, state, counts


def test_delayed_scaling_is_bitwise_that_of_eager_and_costs_no_graph_after_the_third_step(dynamo):
    compiled = torch.compile(_apply, fullgraph=True, backend="aot_eager")
    seen, state, _ = _train(_apply, SMALL_HISTORY, 12)
    other_seen, other_state, counts = _train(compiled, SMALL_HISTORY, 12, dynamo)
    assert counts[0] == 1
    assert counts[2] == counts[-1]
    assert break_count(dynamo) == 0
    assert_same_bits(seen, other_seen)
    assert_same_bits(state, other_state)
    grad_state = state[0]["grad_output"]
    assert grad_state.scale.item() != 1.0
    assert grad_state.amax_history[1:].count_nonzero() == 3  # the backward was observed at every step


@pytest.mark.slow
def test_delayed_scaling_state_through_inductor(dynamo):
    """Not bitwise: Inductor evaluates GELU and sums in another order and with fused multiply-adds, so amaxes move by
    a few units in the last place. One step only: afterwards a moved rounding of FP8 would be a real difference.
    """
    compiled = torch.compile(_apply, fullgraph=True, backend="inductor")
    (eager,), eager_state, _ = _train(_apply, SMALL_HISTORY, 1)
    (other,), other_state, _ = _train(compiled, SMALL_HISTORY, 1)
    eps = torch.finfo(torch.float32).eps
    assert_close(eager[3], other[3], rtol=8 * eps, atol=0)
    assert_close(eager_state, other_state, rtol=8 * eps, atol=0)


def test_update_state_compiles_once_and_agrees(dynamo):
    update = torch.compile(fte.update_state, fullgraph=True, backend="aot_eager")
    _, state, _ = _train(_apply, SMALL_HISTORY, 6)
    _, other, counts = _train(_apply, SMALL_HISTORY, 6, dynamo, update)
    assert_same_bits(state, other)
    assert counts[-1] == 1
    assert break_count(dynamo) == 0


def test_equal_but_rebuilt_values_do_not_recompile(dynamo):
    compiled = torch.compile(_apply, fullgraph=True, backend="aot_eager")
    for _ in range(3):
        block, recipe = _tiny(), fte.recipes.DelayedScaling(amax_history_len=4)
        compiled(block, leaves_of(block), leaf(8, 16), (), fte.init_state(block, recipe), recipe)
    assert graph_count(dynamo) == 1


def test_another_value_recompiles_and_the_results_follow_it(dynamo):
    compiled = torch.compile(_apply, fullgraph=True, backend="aot_eager")
    x = leaf(8, 16, requires_grad=False)
    for scale in (2.0, 3.0):
        block = fte.chain(fte.ConstantScale(scale), fte.SiLU())
        y, _ = compiled(block, ({}, {}), x, (), None, None)
        torch.testing.assert_close(y, torch.nn.functional.silu(x * scale))
    assert graph_count(dynamo) == 2
    recipe = dataclasses.replace(CURRENT, use_power_2_scales=True)
    block = fte.chain(fte.BasicLinear(16, 16))
    params = fte.init(block)
    results = [compiled(block, params, x, (), None, r)[0] for r in (CURRENT, recipe)]
    assert not torch.equal(*results)


def test_frozen_parameters_get_no_gradient_and_no_backward_op(dynamo):
    block = _small()
    params = leaves_of(block)
    params[0]["weight"].requires_grad_(False)
    log = GraphLog()
    compiled = torch.compile(_apply, fullgraph=True, backend=log)
    y, _ = compiled(block, params, leaf(8, 16, requires_grad=False), (), None, None)
    backward(y)
    assert params[0]["weight"].grad is None
    assert log.custom_ops("bwd") == ["basiclinear_backward"]  # only the last linear has anything to do


# ---------------------------------------------------------------------------- inference and export


@pytest.mark.parametrize(
    ("guard", "inside"),
    [(torch.no_grad, True), (torch.inference_mode, False)],
    ids=["no_grad inside", "inference_mode outside"],
)
def test_no_gradients_inside_compile(dynamo, guard, inside):
    block = _block()
    params, x = leaves_of(block), leaf(8, 16)

    def run(params, x):
        if not inside:
            return bridge.apply(block, params, x)[0]
        with guard():
            return bridge.apply(block, params, x)[0]

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    if inside:
        y = compiled(params, x)
    else:
        with guard():
            y = compiled(params, x)
    assert not y.requires_grad
    with torch.no_grad():
        torch.testing.assert_close(y, fte.apply(block, params, x).output)
    assert graph_count(dynamo) == 1


def test_pure_apply_and_vjp_compile(dynamo):
    block = _small()
    params, x, state = leaves_of(block), leaf(8, 16), fte.init_state(_small(), SMALL_HISTORY)
    dy = leaf(8, 16, seed=5, requires_grad=False)

    def run(params, x, state, dy):
        out, pullback = fte.vjp(block, params, x, state=state, recipe=SMALL_HISTORY)
        return out.output, out.state, tuple(pullback(dy))

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    assert_same_bits(run(params, x, state, dy), compiled(params, x, state, dy))
    assert graph_count(dynamo) == 1


class _Exportable(torch.nn.Module):
    def __init__(self, block, recipe, state):
        super().__init__()
        self.block, self.recipe = block, recipe
        self.names = []
        self.params = torch.nn.ParameterList()
        for index, own in enumerate(fte.init(block)):
            for name, value in own.items():
                self.names.append((index, name))
                self.params.append(torch.nn.Parameter(value, requires_grad=False))
        self.state = state

    def forward(self, x):
        params = tuple({} for _ in self.block.ops)
        for (index, name), value in zip(self.names, self.params, strict=True):
            params[index][name] = value
        with torch.no_grad():
            return bridge.apply(self.block, params, x, state=self.state, recipe=self.recipe)[0]


@pytest.mark.parametrize("name", RECIPES)
def test_export_of_an_inference_chain(dynamo, name):
    block, recipe = _block(), RECIPES[name]
    module = _Exportable(block, recipe, fte.init_state(block, recipe))
    x = leaf(8, 16, requires_grad=False)
    program = torch.export.export(module, (x,), dynamic_shapes=({0: torch.export.Dim("rows", min=2)},))
    for rows in (8, 5):
        x = leaf(rows, 16, seed=rows, requires_grad=False)
        torch.testing.assert_close(program.module()(x), module(x))


def test_export_with_parameters_as_arguments(dynamo):
    block = _small()

    class Functional(torch.nn.Module):
        def forward(self, params, x):
            return bridge.apply(block, params, x)[0]

    params = fte.init(block)
    x = leaf(8, 16, requires_grad=False)
    program = torch.export.export(Functional(), (params, x))
    other = fte.init(block, seed=4)
    torch.testing.assert_close(program.module()(other, x), fte.apply(block, other, x).output)
