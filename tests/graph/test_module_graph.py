"""Graphs of modules."""

from __future__ import annotations

import pytest
import torch

import bridge
import functional_te as fte
from bridge import ops
from tests.bridge.testing_ops import Cube
from tests.graph.blocks import RECIPES


def _model() -> ops.Sequential:
    return ops.Sequential(ops.RMSNorm(64), ops.Linear(64, 192, bias=False), ops.SwiGLU(), ops.Linear(96, 64))


X = fte.TensorSpec((32, 64), torch.float32)


@pytest.mark.parametrize("recipe", ["none", "delayed", "mxfp8"])
def test_a_model_is_its_chain(recipe) -> None:
    model = _model()
    block = fte.chain(fte.RMSNorm(64), fte.Linear(64, 192, bias=False), fte.SwiGLU(), fte.Linear(96, 64))
    expected = fte.graph(block, None, X, recipe=RECIPES[recipe])
    with bridge.autocast(enabled=recipe != "none", recipe=RECIPES["mxfp8"] if recipe == "none" else RECIPES[recipe]):
        found = bridge.graph(model, X)
    assert found == expected
    assert bridge.graph(model, X, recipe=RECIPES[recipe]) == expected


def test_looking_changes_nothing() -> None:
    model = _model()
    with bridge.autocast(recipe=RECIPES["delayed"], cache_weights=True):  # which makes the modules' state
        before = {name: value.clone() for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
        buffers = {name for name, _ in model.named_buffers()}
        bridge.graph(model, X)
    assert {name for name, _ in model.named_buffers()} == buffers
    after = {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_one_op_and_what_asks_for_gradients() -> None:
    linear = ops.Linear(64, 32)
    linear.weight.requires_grad_(False)
    graph = bridge.graph(linear, torch.randn(8, 64))
    assert [op.kind for op in graph.ops] == ["BasicLinear", "Bias"]
    assert [step.indices for step in graph.backward] == [(1,)]
    assert graph.saved_bytes == 0
    assert [step.indices for step in bridge.graph(linear, fte.TensorSpec((8, 64), torch.float32)).backward] == [
        (1,),
        (0,),
    ]


def test_stored_weights_are_not_cast() -> None:
    with bridge.quantized_model_init(recipe=RECIPES["current"]):
        linear = ops.Linear(64, 32, bias=False)
    graph = bridge.graph(linear, X, recipe=RECIPES["current"])
    by = {cast.role: cast.by for cast in graph.ops[0].casts}
    assert by == {"input": "op 0", "weight": "", "grad_output": "op 0"}
    assert dict(graph.ops[0].params)["weight"].format == "E4M3 per tensor"
    assert [kernel.kind for kernel in graph.forward[0].kernels] == ["cast", "product"]


def test_extra_inputs_and_evaluation() -> None:
    model = ops.Sequential(ops.Dropout(0.5), ops.AddExtraInput())
    assert [step.kind for step in bridge.graph(model, X, X).forward] == ["ForwardBiasDropoutAdd"]
    model.eval()
    assert [op.kind for op in bridge.graph(model, X, X).ops] == [type(op).__name__ for op in _evaluation(model)]


def _evaluation(model):
    return model.__dict__["_module_groups"][0].evaluation_block.ops


class Doubling(ops.BasicOperation):
    """Hooks, and nothing else."""

    def op_forward(self, ctx, x, **kwargs):
        raise AssertionError("ran")

    def op_backward(self, ctx, grad):
        raise AssertionError("ran")


def test_ops_with_hooks() -> None:
    graph = bridge.graph(ops.Sequential(ops.Linear(64, 32, bias=False), Doubling(), ops.GELU()), X)
    assert [op.state for op in graph.ops] == ["ok", "assumed", "ok"]
    assert graph.forward[1].custom_op == ""
    assert graph.forward[1].gate


class Schemaless(Cube):
    """An op whose bundle no schema expresses."""

    fwd_args_type = dict


def test_gates_say_what_only_a_registration_finds_out() -> None:
    op = Schemaless()
    reason = bridge.library.ensure_registered(type(op))
    graph = bridge.graph(ops.BasicOperation(op), fte.TensorSpec((4, 8), torch.float32))
    if reason is None:
        pytest.fail("the op was meant to have no schema")
    assert graph.forward[0].custom_op == ""
    assert "the compiled graph traces its implementation" in graph.forward[0].gate


def test_a_converted_module_is_its_chain() -> None:
    """With the recipe that it was converted with, or that of the context around."""
    plain = torch.nn.Sequential(torch.nn.LayerNorm(64), torch.nn.Linear(64, 96), torch.nn.GELU())
    model = bridge.convert(plain, RECIPES["current"])
    block = fte.chain(fte.LayerNorm(64), fte.Linear(64, 96), fte.ErfGELU())
    same = [bridge.graph(model, X), bridge.graph(model, X, recipe=RECIPES["current"])]
    assert all(found.to_dict() == fte.graph(block, None, X, recipe=RECIPES["current"]).to_dict() for found in same)
    for other in ("none", "block"):
        wanted = fte.graph(block, None, X, recipe=RECIPES[other]).to_dict()
        assert bridge.graph(model, X, recipe=RECIPES[other]).to_dict() == wanted
    with bridge.autocast(recipe=RECIPES["block"]):
        assert bridge.graph(model, X).to_dict() == wanted
    layers = torch.nn.ModuleList([torch.nn.GELU(), plain])
    with pytest.raises(
        ValueError, match=r"converted module that runs one chain, got 0 chains. Ask for a part .* as 1 or"
    ):
        bridge.graph(bridge.convert(layers), X)


def test_other_modules_are_refused() -> None:
    refusal = r"graph: module: expected a module of bridge\.ops or a converted one, got Linear"
    with pytest.raises(TypeError, match=refusal):
        bridge.graph(torch.nn.Linear(2, 2), X)
    model = ops.Sequential(ops.Linear(64, 64), torch.nn.GELU(), ops.Linear(64, 64))
    with pytest.raises(ValueError, match=r"ops that make one chain, got \['BasicLinear, Bias', 'GELU', .*model\[:3\]"):
        bridge.graph(model, X)
    with pytest.raises(ValueError, match="channel 'r' has no producer"):
        bridge.graph(ops.Sequential(ops.GELU(), ops.AddExtraInput().set_extra_input_channel(0, "r")), X)
    broken = bridge.graph(ops.Sequential(ops.Linear(64, 32), ops.Linear(16, 8)), X)
    assert broken.ops[2].state == "error"
