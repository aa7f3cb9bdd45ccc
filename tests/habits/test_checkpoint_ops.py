"""Selective activation checkpointing with policies that name the library's own ops."""

import functools

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

import bridge
import functional_te as fte
from tests.bridge.compiled import assert_same_bits, break_count, graph_count
from tests.habits.models import as_mode, batch, every_recipe_and_mode, mlp, precision, train


def keep_linears(ctx, op, *args, **kwargs):
    keep = op.namespace == "functional_te" and "linear" in op.name()
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def keep_nothing(ctx, op, *args, **kwargs):
    return CheckpointPolicy.MUST_RECOMPUTE


def _contexts(policy):
    return functools.partial(bridge.selective_checkpoint_contexts, policy)


@every_recipe_and_mode
def test_policies_change_nothing(dynamo, mode, recipe):
    plain = mlp()
    expected = train(plain, plain, recipe)
    del plain
    model = mlp()
    run = as_mode(mode, lambda x: checkpoint(model, x, use_reentrant=False, context_fn=_contexts(keep_linears)))
    assert_same_bits(train(model, run, recipe), expected)
    assert break_count(dynamo) == 0
    assert graph_count(dynamo) == (mode == "compiled")


@pytest.mark.parametrize("mode", ["eager", "compiled"])
def test_a_policy_is_asked_about_every_op_of_the_plan(dynamo, mode):
    model, seen = mlp(), []

    def policy(ctx, op, *args, **kwargs):
        if op.namespace == "functional_te":
            seen.append(op)
        return CheckpointPolicy.PREFER_RECOMPUTE

    run = as_mode(mode, lambda x: checkpoint(model, x, use_reentrant=False, context_fn=_contexts(policy)))
    run(batch(0)).sum().backward()
    names = {op.name().removeprefix("functional_te::") for op in seen}
    assert names == {"layernorm_forward", "forwardlinearbiasactivation_forward"}
    # the objects are those that a compiled graph shows
    assert set(seen) == {getattr(torch.ops.functional_te, name).default for name in names}


def _launched(policy, monkeypatch):
    """Names of the ops whose forward runs during a backward in eager mode."""
    model, block = mlp(), []
    y = checkpoint(model, batch(0).requires_grad_(), use_reentrant=False, context_fn=_contexts(policy))
    for step in fte.plan(model._module_groups[0].block).forward:
        kind = type(step.op)
        run = kind.compile_ops[0].impl
        monkeypatch.setattr(
            kind.compile_ops[0], "impl", lambda args, run=run, kind=kind: (block.append(kind.__name__), run(args))[1]
        )
    y.sum().backward()
    return block


def test_what_is_kept_is_not_run_again(monkeypatch):
    with monkeypatch.context() as patch:
        # the last one is not needed for any gradient, but its recomputation ends the region
        assert _launched(keep_nothing, patch)[:2] == ["LayerNorm", "ForwardLinearBiasActivation"]
    with monkeypatch.context() as patch:
        assert _launched(keep_linears, patch) == ["LayerNorm"]
    forward, _ = bridge.register_custom_op(fte.LayerNorm)
    with monkeypatch.context() as patch:
        found = _launched([forward.op], patch)
        assert "LayerNorm" not in found
        assert found


def test_what_is_kept_is_not_in_the_compiled_backward(dynamo):
    counts = {}
    for name, policy in (("linears", keep_linears), ("nothing", keep_nothing)):
        torch._dynamo.reset()
        graphs = []

        def keep(graph, inputs, graphs=graphs):
            graphs.append(graph)
            return make_boxed_func(graph.forward)

        backend = aot_autograd(fw_compiler=keep, bw_compiler=keep, partition_fn=min_cut_rematerialization_partition)
        model = mlp()
        run = torch.compile(
            lambda x, model=model, policy=policy: checkpoint(
                model, x, use_reentrant=False, context_fn=_contexts(policy)
            ),
            fullgraph=True,
            backend=backend,
        )
        run(batch(0)).sum().backward()
        nodes = [node.target for node in graphs[-1].graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
        counts[name] = sum("forwardlinear" in target.name() for target in nodes)
    assert counts == {"linears": 0, "nothing": 1}


def test_outside_of_the_contexts_nothing_is_closed():
    assert bridge.checkpointing.closed.depth == 0
    model = mlp()
    with pytest.raises(RuntimeError, match="on purpose"):
        checkpoint(_fails, batch(0).requires_grad_(), use_reentrant=False, context_fn=_contexts(keep_nothing))
    assert bridge.checkpointing.closed.depth == 0
    with precision("current"):
        model(batch(0)).sum().backward()


def _fails(x):
    raise RuntimeError("on purpose")
