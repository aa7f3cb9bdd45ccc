"""Chains that are traced as recorded functions: which are, what Dynamo sees of them, and that they compute the same."""

import logging

import pytest
import torch

import bridge
import functional_te as fte
from bridge import program

from .compiled import CURRENT, SMALL_HISTORY, assert_close, copy_of, graph_count, leaf, leaves_of
from .testing_ops import Sine

RECIPES = {
    "none": None,
    "current": CURRENT,
    "delayed": SMALL_HISTORY,
    "block": fte.recipes.Float8BlockScaling(),
    "mxfp8": fte.recipes.MXFP8BlockScaling(),
    "nvfp4": fte.recipes.NVFP4BlockScaling(),
}


@pytest.fixture
def recorded(monkeypatch):
    """What was found for every traced call of a test: the facts of a recording, or nothing."""
    texts = []
    find = program._make

    def make(key, name):
        texts.append(find(key, name))
        return texts[-1]

    monkeypatch.setattr(program, "_make", make)
    monkeypatch.setattr(program, "_found", {})
    return texts


def _block(width=32):
    return fte.chain(
        fte.MakeExtraOutput(channel="residual", output_to_caller=False),
        fte.RMSNorm(width),
        fte.Linear(width, 2 * width),
        fte.SwiGLU(),
        fte.Linear(width, width, bias=False),
        fte.AddExtraInput(channel="residual"),
    )


def _run(function, block, x, params, extras, recipe, seed=5):
    """Outputs, gradients and state after a forward and backward on copies."""
    x, params, extras = copy_of(x), copy_of(params), copy_of(extras)
    state = fte.init_state(block, recipe, seed=seed)
    y, after = function(block, params, x, extras, state, recipe)
    outputs = y if isinstance(y, tuple) else (y,)
    sum((out * out).sum() for out in outputs).backward()
    grads = [None if t.grad is None else t.grad for t in (x, *extras)]
    return outputs, grads, [own[name].grad for own in params for name in own], after, state


def _apply(block, params, x, extras, state, recipe):
    return bridge.apply(block, params, x, *extras, state=state, recipe=recipe)


def _same(block, x, params, extras, recipe, backend="aot_eager", **tolerance):
    compiled = torch.compile(_apply, fullgraph=True, backend=backend)
    expected = _run(_apply, block, x, params, extras, recipe)
    assert_close(expected, _run(compiled, block, x, params, extras, recipe), **tolerance)


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_every_recipe_is_recorded(dynamo, recorded, recipe):
    block = _block()
    # what AOTAutograd makes of the others is tested with their recipes, and takes long
    backend = "aot_eager" if recipe in (None, SMALL_HISTORY) else "eager"
    _same(block, leaf(32, 32), leaves_of(block), (), recipe, backend, rtol=1e-4, atol=1e-5)
    assert [bool(text) for text in recorded] == [True] * 1
    assert graph_count(dynamo) == 1


def test_one_recording_serves_every_number_of_tokens(dynamo, recorded):
    block, params = _block(), None
    params = leaves_of(block)
    for shape in ((32, 32), (1, 32), (0, 32), (8, 32), (33, 32)):
        torch._dynamo.reset()
        _same(block, leaf(*shape), params, (), CURRENT, "eager", rtol=1e-4, atol=1e-5)
    assert [bool(text) for text in recorded] == [True] * 1


def test_a_dynamic_number_of_tokens_is_one_graph(dynamo, recorded):
    block = _block()
    params = leaves_of(block)
    compiled = torch.compile(_apply, fullgraph=True, backend="aot_eager")
    for rows in (6, 8, 40):
        x = leaf(2, rows, 32)
        torch._dynamo.mark_dynamic(x, 1)
        y, _ = compiled(block, params, x, (), fte.init_state(block, SMALL_HISTORY), SMALL_HISTORY)
        expected, _ = _apply(block, params, x, (), fte.init_state(block, SMALL_HISTORY), SMALL_HISTORY)
        torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)
    assert graph_count(dynamo) == 1
    assert [bool(text) for text in recorded] == [True] * 1


@pytest.mark.parametrize("extra_shape", [(2, 4, 32), (2, 4)], ids=str)
def test_extra_inputs_follow_the_sizes_of_the_input(dynamo, recorded, extra_shape):
    ops = (fte.AddExtraInput(),) if len(extra_shape) == 3 else (fte.ScaledSwiGLU(),)
    block = fte.chain(fte.Linear(32, 32), *ops)
    for rows in (4, 6):
        extra = leaf(2, rows, *extra_shape[2:], seed=3)
        _same(block, leaf(2, rows, 32), leaves_of(block), (extra,), None, rtol=1e-4, atol=1e-5)
    assert [bool(text) for text in recorded] == [True] * 1


def test_strides_do_not_matter(dynamo, recorded):
    block = fte.chain(
        fte.MakeExtraOutput(channel="r", output_to_caller=False),
        fte.Reshape((-1, 8, 4)),
        fte.Reshape((-1, 32)),
        fte.Linear(32, 32),
        fte.AddExtraInput(channel="r"),
    )
    base = leaf(32, 16, requires_grad=False)
    x = base.t().requires_grad_()
    params = leaves_of(block)
    compiled = torch.compile(_apply, fullgraph=True, backend="aot_eager")

    def run(function, value):
        y, _ = function(block, params, value, (), None, None)
        (grad,) = torch.autograd.grad(y.sum(), value)  # an expanded gradient
        return y, grad

    assert_close(run(_apply, x), run(compiled, x))
    assert [bool(text) for text in recorded] == [True] * 1


def test_frozen_and_tied_parameters_are_other_recordings(dynamo, recorded):
    block = fte.chain(fte.Linear(32, 32, bias=False), fte.GELU(), fte.Linear(32, 32, bias=False))
    params = leaves_of(block)
    tied = (params[0], {}, params[0])
    frozen = ({"weight": params[0]["weight"].detach()}, {}, params[2])
    compiled = torch.compile(_apply, fullgraph=True, backend="aot_eager")
    for own in (tied, frozen):
        results = []
        for function in (_apply, compiled):
            x = leaf(8, 32)
            y, _ = function(block, own, x, (), None, CURRENT)
            leaves = [x, *{id(p["weight"]): p["weight"] for p in own if p and p["weight"].requires_grad}.values()]
            results.append((y, torch.autograd.grad(y.sum(), leaves)))
        assert_close(*results, rtol=1e-4, atol=1e-5)
    assert [bool(text) for text in recorded] == [True] * 2


def test_without_gradients(dynamo, recorded):
    block = _block()
    compiled = torch.compile(_apply, fullgraph=True, backend="aot_eager")
    arguments = (block, leaves_of(block), leaf(32, 32), ())
    with torch.no_grad():
        y, after = compiled(*arguments, fte.init_state(block, SMALL_HISTORY), SMALL_HISTORY)
        expected = _apply(*arguments, fte.init_state(block, SMALL_HISTORY), SMALL_HISTORY)
    assert_close(expected, (y, after), rtol=1e-4, atol=1e-5)
    assert [bool(text) for text in recorded] == [True] * 1


def test_what_cannot_be_recorded_is_traced_as_it_is(dynamo, recorded, caplog):
    block = fte.chain(fte.Linear(32, 32), Sine())
    with caplog.at_level(logging.INFO, "functional_te"), pytest.warns(bridge.CompileEagerFallbackWarning):
        _same(block, leaf(8, 32), leaves_of(block), (), None, rtol=1e-4, atol=1e-5)
    assert recorded == [""]
    assert "traced as it is" in caplog.text


def test_wrong_arguments_say_the_same_as_in_eager_mode(dynamo):
    block = fte.chain(fte.RMSNorm(32), fte.Linear(32, 32))
    compiled = torch.compile(_apply, fullgraph=True, backend="aot_eager")
    wrong = leaves_of(block)
    wrong[1]["weight"] = leaf(32, 16)
    with pytest.raises(ValueError, match="BasicLinear") as eager:
        _apply(block, wrong, leaf(8, 32), (), None, None)
    with pytest.raises(Exception, match="weight") as traced:
        compiled(block, wrong, leaf(8, 32), (), None, None)
    assert str(eager.value).splitlines()[0] in str(traced.value)


def test_guards_of_a_block_are_few(dynamo, recorded):
    """A block of modules with delayed scaling has 16 tensors; torch.nn has about ten lines of guards for each."""
    ops = bridge.ops
    model = ops.Sequential(
        ops.RMSNorm(32), ops.Linear(32, 64, bias=False), ops.SwiGLU(), ops.Linear(32, 32, bias=False)
    )
    logged = []

    class Handler(logging.Handler):
        def emit(self, record):
            logged.append(record.getMessage())

    handler = Handler()
    torch._logging.set_logs(guards=True)
    log = logging.getLogger("torch._dynamo.guards.__guards")
    log.addHandler(handler)
    try:
        with bridge.autocast(recipe=SMALL_HISTORY):
            torch.compile(model, fullgraph=True, backend="aot_eager")(leaf(8, 32)).sum().backward()
    finally:
        log.removeHandler(handler)
        torch._logging.set_logs()
    guards = [line for text in logged for line in text.splitlines() if "+- " in line and "GuardManager" not in line]
    assert 50 < len(guards) < 300
    assert [bool(text) for text in recorded] == [True] * 1


def test_a_module_that_first_runs_without_state_closes_its_step_later(dynamo):
    """Only modules that have state under the active recipe close it, inside of a compiled function too."""

    def train(compiled):
        torch.manual_seed(0)
        model = bridge.ops.Sequential(bridge.ops.Linear(16, 16, bias=False))

        def run(x):
            with bridge.autocast(recipe=SMALL_HISTORY):
                with bridge.autocast(recipe=CURRENT):
                    y = model(x)
                return model(y)

        call = torch.compile(run, fullgraph=True, backend="eager") if compiled else run
        for step in range(3):
            call(leaf(8, 16, seed=step)).sum().backward()
        return [own for name, own in model.named_buffers() if name.endswith("input_scale")]

    eager, compiled = train(False), train(True)
    assert_close(eager, compiled)
    assert eager[0].item() > 2.0


def test_meta_device(dynamo):
    model = bridge.ops.Sequential(bridge.ops.Linear(16, 16, device="meta"))
    x = torch.empty(4, 16, device="meta", requires_grad=True)
    assert torch.compile(model, fullgraph=True, backend="eager")(x).shape == (4, 16)


def test_an_unexpected_error_is_not_remembered(dynamo, monkeypatch, caplog):
    block = fte.chain(fte.Linear(32, 32, bias=False))
    record = program.recording.record
    monkeypatch.setattr(program, "_found", {})
    monkeypatch.setattr(program.recording, "record", lambda key: {}["broken"])
    with caplog.at_level(logging.WARNING, "functional_te"):
        _same(block, leaf(8, 32), leaves_of(block), (), None)
    assert "KeyError" in caplog.text
    assert not program._found
    monkeypatch.setattr(program.recording, "record", record)
    torch._dynamo.reset()
    _same(block, leaf(8, 32), leaves_of(block), (), None)
    assert len(program._found) == 1
