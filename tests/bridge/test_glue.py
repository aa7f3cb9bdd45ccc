"""What compiled calls of modules read of parameters and state, by code that is written for them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import bridge
from bridge import glue, ops, program

from .compiled import SMALL_HISTORY, graph_count

WIDTH = 32


def _model() -> ops.Sequential:
    torch.manual_seed(0)
    first, last = [ops.BasicLinear(WIDTH, WIDTH, device="cpu") for _ in range(2)]
    return ops.Sequential(first, ops.GELU(), last)


def _call(model: Any, recipe: Any) -> Any:
    def call(x: torch.Tensor) -> torch.Tensor:
        with bridge.autocast(enabled=recipe is not None, recipe=recipe):
            return model(x)

    return call


def _inputs(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return (torch.randn(16, WIDTH, generator=generator) * (step + 1)).requires_grad_()


def _outputs(call: Any, count: int, load: Any) -> list[torch.Tensor]:
    """Of training steps; ``load`` is called in the middle."""
    found = []
    for step in range(count):
        if step == count // 2:
            load()
        y = call(_inputs(step))
        y.square().sum().backward()
        found.append(y.detach())
    return found


def _forget(op: Any) -> None:
    """Take an op's state away, as if the op had been added later."""
    for name in list(op._buffers):
        del op._buffers[name]
    op._non_persistent_buffers_set.clear()
    op._set_roles(())


@pytest.mark.parametrize("missing", ["none", "one", "all"])
def test_loading_between_compiled_steps(missing: str, dynamo: Any) -> None:
    """A graph that made the state of some modules while it was traced sees what is loaded later."""
    donor = _model()
    _outputs(_call(donor, SMALL_HISTORY), 3, lambda: None)
    saved = {name: value.clone() for name, value in donor.state_dict().items()}

    def run(compiled: bool) -> list[torch.Tensor]:
        model = _model()
        call = _call(model, SMALL_HISTORY)
        if missing != "all":
            call(_inputs(9)).sum().backward()
        if missing == "one":
            _forget(list(model)[2].basic_operations()[0])
        fast = torch.compile(call, backend="eager", fullgraph=True) if compiled else call
        return _outputs(fast, 6, lambda: model.load_state_dict(saved))

    for own, wanted in zip(run(True), run(False), strict=True):
        torch.testing.assert_close(own, wanted)


def test_a_parametrization_runs_once_per_call(dynamo: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spectral norm changes its buffers whenever the weight is read, recorded call or not."""

    def run(compiled: bool, recorded: bool) -> tuple[torch.Tensor, torch.Tensor]:
        model = _model()
        linear = next(iter(model)).basic_operations()[0]
        torch.nn.utils.parametrizations.spectral_norm(linear)
        call = _call(model, None)
        if not recorded:
            monkeypatch.setattr(program, "_make", lambda key, name: "")
            monkeypatch.setattr(program, "_found", {})
        fast = torch.compile(call, backend="eager", fullgraph=True) if compiled else call
        for step in range(3):
            y = fast(_inputs(step))
        return y.detach(), linear.parametrizations.weight[0]._u

    for recorded in (True, False):
        torch._dynamo.reset()
        for own, wanted in zip(run(True, recorded), run(False, recorded), strict=True):
            torch.testing.assert_close(own, wanted)


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("input_amax_history", torch.zeros(7), "amax_history"),
        ("weight_amax_history", torch.zeros(7), "amax_history"),
        ("weight_scale", torch.ones(()), "scale"),
        ("input_scale", torch.ones(1, dtype=torch.float64), "scale: expected float32"),
    ],
)
def test_state_that_was_replaced_is_checked(
    name: str, value: torch.Tensor, wanted: str, dynamo: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = _model()
    call = _call(model, SMALL_HISTORY)
    call(_inputs(0)).sum().backward()
    op = list(model)[2].basic_operations()[0]
    monkeypatch.setitem(op._buffers, name, value)
    with pytest.raises(Exception, match=rf"op 2 \(BasicLinear\): state\['{name.partition('_')[0]}'\].*{wanted}"):
        torch.compile(call, backend="eager", fullgraph=True)(_inputs(1))


@pytest.mark.parametrize("name", ['q"q', "it's", "back\\n", "a:b", "a{b}", "ünï"])
def test_names_of_parameters_are_quoted(name: str) -> None:
    read = glue.define(glue.parameters_source([(0, name)], 1), __name__, {"_attribute": getattr})
    module = torch.nn.ParameterDict({name: torch.full((1,), 3.0)})
    assert read["parameters"]([module]) == [module[name]]
    assert read["bundles"]([5]) == ({name: 5},)


def test_borrowed_parameters_are_recorded(dynamo: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Converted models run recorded functions too, one for all layers of a kind."""
    monkeypatch.setattr(program, "_found", {})
    layers = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH) for _ in range(3)])
    model = bridge.convert(layers, SMALL_HISTORY)
    fast = torch.compile(model, backend="eager", fullgraph=True)
    for step in range(3):
        fast(_inputs(step)).sum().backward()
    assert graph_count(dynamo) == 1
    assert program._found
    assert all(program._found.values())
