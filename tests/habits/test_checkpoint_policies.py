"""Selective activation checkpointing with policies over ATen ops. (Checkpoints of a whole: test_module_state.py.)"""

import functools

import pytest
import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

from tests.bridge.compiled import assert_same_bits, break_count
from tests.habits.models import as_mode, batch, every_recipe_and_mode, gradients, mlp, precision, train
from tests.helpers import recorded_kernels

PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)


def keep_products(ctx, op, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if op in PRODUCTS else CheckpointPolicy.PREFER_RECOMPUTE


def _kept(policy):
    return functools.partial(create_selective_checkpoint_contexts, policy)


@every_recipe_and_mode
def test_policies_over_aten_ops_change_nothing(dynamo, mode, recipe):
    plain = mlp()
    expected = train(plain, plain, recipe)
    del plain
    model = mlp()
    run = as_mode(mode, lambda x: checkpoint(model, x, use_reentrant=False, context_fn=_kept(keep_products)))
    assert_same_bits(train(model, run, recipe), expected)
    assert break_count(dynamo) == 0


def _products(recipe, **how):
    model, x = mlp(), batch(0).requires_grad_()
    with precision(recipe):
        y = checkpoint(model, x, use_reentrant=False, **how)
    with recorded_kernels() as kernels:
        y.sum().backward()
    return sum(name in ("aten.mm.default", "aten.addmm.default") for name in kernels)


@pytest.mark.parametrize("recipe", ["none", "current"])
def test_products_that_are_kept_are_not_computed_again(recipe):
    assert _products(recipe) - _products(recipe, context_fn=_kept(keep_products)) == 2
    assert _products(recipe, context_fn=_kept(list(PRODUCTS))) == _products(recipe, context_fn=_kept(keep_products))


def test_checkpoint_sequential():
    model, plain = torch.nn.Sequential(mlp(), mlp(1), mlp(2)), torch.nn.Sequential(mlp(), mlp(1), mlp(2))
    x = batch(0).requires_grad_()
    checkpoint_sequential(model, 2, x, use_reentrant=False).sum().backward()
    plain(batch(0)).sum().backward()
    assert_same_bits(gradients(model), gradients(plain))
