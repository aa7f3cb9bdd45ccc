"""The Dropout module: torch's generator, train and eval, activation checkpointing, compiled."""

import math

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import functional_te as fte
from bridge import ops

from .compiled import GraphLog, assert_same_bits, graph_count


def _model(p=0.5):
    torch.manual_seed(0)
    return ops.Sequential(ops.Linear(16, 16), ops.Dropout(p), ops.GELU(), ops.Dropout(p))


def _step(call, x, seed=5):
    """Output and input gradient of a call from a known state of the generator, and the state it leaves."""
    x = x.detach().clone().requires_grad_()
    torch.manual_seed(seed)
    y = call(x)
    y.square().sum().backward()
    return y.detach(), x.grad, torch.get_rng_state()


X = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("p", [0.0625, 0.5, 0.75])
@pytest.mark.parametrize("shape", [(101,), (2, 4, 16), (128, 128)])
def test_training(p, shape):
    torch.manual_seed(2)
    module, x = ops.Dropout(p), torch.rand(shape).add_(0.5).requires_grad_()
    y = module(x)
    kept = (y != 0).float()
    torch.testing.assert_close(y, x * kept / (1 - p))
    y.backward(torch.ones_like(y))
    torch.testing.assert_close(x.grad, kept / (1 - p))
    z = (1 - kept.mean().item() - p) / math.sqrt(p * (1 - p) / kept.numel())
    assert abs(z) < 2.5758


def test_manual_seed_and_fresh_masks():
    model = _model()
    first, again = _step(model, X), _step(model, X)
    assert_same_bits(first, again)
    assert not torch.equal(first[0], _step(model, X, seed=6)[0])
    torch.manual_seed(5)
    assert not torch.equal(model(X), model(X))


def test_evaluation_is_the_identity_and_draws_nothing():
    module = ops.Dropout(0.5).eval()
    before = torch.get_rng_state()
    assert_same_bits(module(X), X)
    assert torch.equal(torch.get_rng_state(), before)
    (group,) = ops.Sequential(ops.GELU(), module).__dict__["_module_groups"]
    assert [type(op).__name__ for op in group.evaluation_block.ops] == ["GELU", "Identity"]
    half = X.half()
    with torch.autocast("cpu", torch.bfloat16):
        assert module(half).dtype is torch.float16


def test_no_grad_still_drops():
    with torch.no_grad():
        assert (ops.Dropout(0.5)(X) == 0).any()
    assert_same_bits(ops.Dropout(0.0)(X), X)


def test_training_and_evaluating_ones_in_one_group():
    model = ops.Sequential(ops.Dropout(0.5), ops.MakeExtraOutput(), ops.Dropout(0.9))
    model[2].eval()
    y, between = model(X)
    assert_same_bits(y, between)
    assert 0.3 < (y == 0).float().mean() < 0.7
    model[0].eval()
    model[2].train()
    y, between = model(X)
    assert_same_bits(between, X)
    assert (y == 0).float().mean() > 0.7
    model.eval()
    assert_same_bits(model(X), (X, X))
    # in one dtype with and without others in training
    mixed = ops.Sequential(ops.Dropout(0.5).eval(), ops.Dropout(0.0))
    with torch.autocast("cpu", torch.bfloat16):
        assert model(X)[0].dtype is torch.float32
        assert mixed(X).dtype is torch.bfloat16  # of the one in training


def test_the_callers_key_comes_first():
    model, key = ops.Sequential(ops.GELU(), ops.Dropout(0.5)), fte.make_key(4)
    wanted = fte.apply(fte.chain(fte.GELU(), fte.Dropout(0.5)), ({}, {}), X, kwargs={1: {"key": key}}).output
    assert_same_bits(model(X, op_kwargs={1: {"key": key}}), wanted)
    assert_same_bits(model[1](X, key=key), fte.functional.dropout(X, key, p=0.5))
    model.eval()
    assert_same_bits(model(X, op_kwargs={1: {"key": key}}), torch.nn.Identity()(fte.functional.gelu(X)))
    assert_same_bits(model(X, op_kwargs={1: {"key": key, "training": True}}), wanted)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing(reentrant):
    model = _model()
    expected = _step(model, X)
    expected_grads = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    assert_same_bits(_step(lambda x: checkpoint(model, x, use_reentrant=reentrant), X)[:2], expected[:2])
    assert_same_bits([p.grad for p in model.parameters()], expected_grads)


def test_compiled_backward_has_the_mask_of_its_forward(dynamo):
    """Inductor draws from a generator of its own; forward and backward agree all the same."""
    compiled = torch.compile(ops.Dropout(0.5), fullgraph=True)
    masks = []
    for _ in range(2):
        x = torch.ones(64, 64, requires_grad=True)
        y = compiled(x)
        y.sum().backward()
        assert_same_bits(x.grad, y.detach())
        masks.append(y.detach())
    assert not torch.equal(*masks)
    assert graph_count(dynamo) == 1


@pytest.mark.parametrize(("reentrant", "backend"), [(True, "aot_eager"), (False, "aot_eager"), (False, "inductor")])
def test_checkpoint_around_compiled(dynamo, reentrant, backend):
    compiled = torch.compile(ops.Dropout(0.5), fullgraph=True, backend=backend)
    x = torch.ones(64, 64, requires_grad=True)
    y = checkpoint(compiled, x, use_reentrant=reentrant)
    y.sum().backward()
    assert_same_bits(x.grad, y.detach())


def test_checkpoint_inside_of_compiled(dynamo):
    model = ops.Sequential(ops.Linear(16, 16), ops.GELU(), ops.Dropout(0.5))
    log = GraphLog("inductor")
    compiled = torch.compile(lambda x: checkpoint(model, x, use_reentrant=False), fullgraph=True, backend=log)
    x = X.clone().requires_grad_()
    torch.manual_seed(5)
    y = compiled(x)
    y.sum().backward()
    kept = (y != 0).float()
    wide = X.clone().requires_grad_()
    expected = torch.nn.functional.gelu(
        torch.nn.functional.linear(wide, model[0].weight, model[0].bias), approximate="tanh"
    )
    torch.testing.assert_close(y, expected * kept * 2, rtol=1e-5, atol=1e-6)
    (expected * kept * 2).sum().backward()
    torch.testing.assert_close(x.grad, wide.grad, rtol=1e-5, atol=1e-6)
    assert 0.3 < kept.mean() < 0.7
    assert "dropout_forward" in log.custom_ops()


def test_train_and_eval_compiled(dynamo):
    model = _model()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for seed in range(2):
        assert_same_bits(_step(compiled, X, seed), _step(model, X, seed))
        compiled.eval()
        assert_same_bits(compiled(X), model(X))
        assert not (compiled(X) == 0).any()
        compiled.train()
    assert graph_count(dynamo) <= 3


def test_a_key_of_the_caller_draws_nothing():
    module, key = ops.Dropout(0.5), fte.make_key(3)
    before = torch.get_rng_state()
    module(torch.ones(8, 8), key=key)
    module(torch.ones(8, 8), training=False)
    assert torch.equal(torch.get_rng_state(), before)
    module(torch.ones(8, 8))
    assert not torch.equal(torch.get_rng_state(), before)
