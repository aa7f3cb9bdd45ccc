"""Loops as people write them: accumulation, frozen parts, evaluation in between, graphs that are kept."""

import copy

import pytest
import torch

from tests.bridge.compiled import assert_close, assert_same_bits, break_count, graph_count
from tests.habits.models import (
    as_mode,
    batch,
    every_mode,
    every_recipe_and_mode,
    gradients,
    mlp,
    precision,
    train,
    twin,
)


@every_mode
@pytest.mark.parametrize("set_to_none", [True, False], ids=["none", "zeros"])
def test_gradients_of_microbatches_add_up(dynamo, mode, set_to_none):
    model, x = mlp(), batch(0, rows=24)
    run, whole = as_mode(mode, model), twin(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad(set_to_none=set_to_none)
        for rows in x.chunk(3):
            run(rows).square().sum().backward()
        whole.zero_grad()
        whole(x).square().sum().backward()
        assert_close(gradients(model), gradients(whole), rtol=1e-4, atol=1e-4)
    assert graph_count(dynamo) == (mode == "compiled")


@every_mode
def test_one_backward_of_two_losses(dynamo, mode):
    model, x = mlp(), batch(0)
    run, plain = as_mode(mode, model), twin(model)
    for own, loop in ((model, run), (plain, plain)):
        (loop(x).square().sum() + own[0].weight.square().sum() + loop(2 * x).sin().sum()).backward()
    assert_close(gradients(model), gradients(plain), rtol=1e-4, atol=1e-4)


def _freeze(model, names, frozen):
    for name, own in model.named_parameters():
        own.requires_grad_(not (frozen and name in names))


@every_recipe_and_mode
def test_layers_thaw_and_freeze_while_training(dynamo, mode, recipe):
    """What is frozen gets no gradient and does not move; what is not gets the gradient that it gets anyway."""
    model = mlp()
    names = {"0.weight", "0.bias", "1.basic_ops.0.weight"}
    run = as_mode(mode, model)
    for step, frozen in enumerate((True, False)):
        _freeze(model, names, frozen)
        full = copy.deepcopy(model).requires_grad_(True)
        x = batch(step)
        with precision(recipe):
            run(x).square().mean().backward()
            full(x).square().mean().backward()
        for (name, own), other in zip(model.named_parameters(), full.parameters(), strict=True):
            assert (own.grad is None) == (frozen and name in names)
            if own.grad is not None:
                assert_same_bits(own.grad, other.grad)
        model.zero_grad()
    assert break_count(dynamo) == 0


@every_mode
@pytest.mark.parametrize("needed", [True, False])
def test_gradients_of_inputs_of_frozen_models(dynamo, mode, needed):
    model, x = mlp().requires_grad_(False), batch(0).requires_grad_(needed)
    y = as_mode(mode, model)(x)
    assert y.requires_grad == needed
    if needed:
        wide = x.detach().clone().requires_grad_()
        (found,) = torch.autograd.grad(y.square().sum(), x)
        (expected,) = torch.autograd.grad(twin(model)(wide).square().sum(), wide)
        assert_close(found, expected, rtol=1e-4, atol=1e-4)


@every_recipe_and_mode
@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
def test_evaluation_in_between_changes_nothing(dynamo, mode, recipe, guard):
    expected_model = mlp()
    expected = train(expected_model, expected_model, recipe)
    del expected_model
    model = mlp()
    run = as_mode(mode, model)

    def evaluate():
        model.eval()
        with guard(), precision(recipe):
            assert not run(batch(99)).requires_grad
        model.train()

    evaluate()  # before the first step, too
    assert_same_bits(train(model, run, recipe, between=evaluate), expected)


@every_recipe_and_mode
def test_a_graph_of_a_module_that_is_kept(dynamo, mode, recipe):
    model, x = mlp(), batch(0).requires_grad_()
    with precision(recipe):
        y = as_mode(mode, model)(x)
    inputs = [x, *model.parameters()]
    first = torch.autograd.grad(y.sum(), inputs, retain_graph=True)
    again = torch.autograd.grad(y.sum(), inputs, retain_graph=True)
    (part,) = torch.autograd.grad(y.sum(), model[3].weight)
    assert_same_bits(first, again)
    assert_same_bits(part, first[1 + list(dict(model.named_parameters())).index("3.basic_ops.0.weight")])
    with pytest.raises(RuntimeError, match="second time"):
        y.sum().backward()


@every_mode
def test_a_backward_for_some_inputs_only(dynamo, mode):
    model, x = mlp(), batch(0)
    as_mode(mode, model)(x).square().sum().backward(inputs=[model[1].weight])
    assert [name for name, own in model.named_parameters() if own.grad is not None] == ["1.basic_ops.0.weight"]
    plain = twin(model)
    plain(x).square().sum().backward()
    assert_close(model[1].weight.grad, plain[1].weight.grad, rtol=1e-4, atol=1e-4)


@every_mode
def test_anomaly_detection(dynamo, mode):
    model, x = mlp(), batch(0)
    run = as_mode(mode, model)
    with torch.autograd.set_detect_anomaly(True):
        run(x).sum().backward()
        with pytest.raises(RuntimeError, match="nan values"):
            (run(x) * float("nan")).sum().backward()
