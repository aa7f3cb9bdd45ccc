"""Labels of steps in a profile; none, and no cost, where no profiler runs."""

import pytest
import torch

import functional_te as fte
from functional_te import labels
from tests.bridge.compiled import GraphLog
from tests.habits.models import RECIPES, batch, every_recipe, gradients, mlp, precision
from tests.helpers import assert_same, uniform


def _named(profile):
    names = [
        event.name.removeprefix("functional_te::") for event in profile.events() if "functional_te::" in event.name
    ]
    return [name for name in names if name.endswith(("_forward", "_backward"))]


def _profiled(run):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run()
    return _named(profile)


@every_recipe
def test_every_step_of_a_module_has_a_label(recipe):
    model, plain, x = mlp(), mlp(), batch(0)

    def step(own):
        with precision(recipe):
            own(x).sum().backward()

    found = _profiled(lambda: step(model))
    step(plain)
    assert_same(gradients(model), gradients(plain))
    needed = (False, tuple((True,) * len(op.param_names) for op in model._module_groups[0].block.ops), ())
    plan = fte.plan(model._module_groups[0].block, recipe=RECIPES[recipe], requires_grad=needed)
    expected = [f"{type(own.op).__name__.lower()}_forward" for own in plan.forward]
    expected += [f"{type(own.op).__name__.lower()}_backward" for own in plan.backward]
    assert found == expected


def test_functions_have_labels():
    block = fte.chain(fte.RMSNorm(8), fte.SiLU())
    params, x = fte.init(block), uniform((4, 8))
    assert _profiled(lambda: fte.apply(block, params, x)) == ["rmsnorm_forward", "silu_forward"]
    out, pullback = fte.vjp(block, params, x)
    assert _profiled(lambda: pullback(out.output)) == ["silu_backward", "rmsnorm_backward"]


def test_the_kernels_of_a_step_are_inside_of_its_label():
    model, x = mlp(), batch(0)
    with torch.profiler.profile() as profile:
        model(x)
    (label, *_) = [event for event in profile.events() if event.name == "functional_te::layernorm_forward"]
    assert any(child.name == "aten::native_layer_norm" for child in label.cpu_children)


@pytest.mark.parametrize("what", ["module", "functions"])
def test_nothing_is_asked_of_the_profiler_without_one(monkeypatch, what):
    def refuse(*args):
        raise AssertionError("a label without a profiler")

    monkeypatch.setattr(torch.profiler, "record_function", refuse)
    if what == "module":
        mlp()(batch(0)).sum().backward()
    else:
        block = fte.chain(fte.SiLU())
        fte.vjp(block, ({},), batch(0))[1](batch(0))


def test_profiling__is_what_the_profiler_says():
    assert not labels.profiling()
    with torch.profiler.profile():
        assert labels.profiling()
    assert not labels.profiling()


def test_compiled_code_has_no_labels_and_no_guard(dynamo):
    """A profiler that comes and goes compiles nothing again, and graphs are the same with one."""
    model, log = mlp(), GraphLog()
    run = torch.compile(model, fullgraph=True, backend=log)
    run(batch(0)).sum().backward()
    names = _profiled(lambda: run(batch(1)).sum().backward())
    assert names == []
    assert len(log.graphs) == 1
    assert not any("record_function" in str(name) for name in log.functions())
