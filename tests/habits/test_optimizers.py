"""Optimizers, averages of weights, schedules and clipping."""

import copy

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.bridge.compiled import assert_close, assert_same_bits, graph_count
from tests.habits.models import (
    as_mode,
    batch,
    every_mode,
    every_recipe,
    every_recipe_and_mode,
    mlp,
    precision,
    train,
    twin,
)

OPTIMIZERS = {
    "SGD": lambda params, **how: torch.optim.SGD(params, lr=0.1, momentum=0.9, **how),
    "Adam": lambda params, **how: torch.optim.Adam(params, lr=0.01, **how),
    "AdamW": lambda params, **how: torch.optim.AdamW(params, lr=0.01, **how),
    "Adagrad": lambda params, **how: torch.optim.Adagrad(params, lr=0.1, **how),
}


@pytest.mark.parametrize("how", [{"fused": True}, {"foreach": True}], ids=["fused", "foreach"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_fused_and_foreach(name, how):
    """Within rounding, what the loop over parameters gives to ``torch.nn``."""
    model = mlp()
    plain = twin(model)
    found = train(model, model, optimizer=lambda params: OPTIMIZERS[name](params, **how))
    expected = train(plain, plain, optimizer=lambda params: OPTIMIZERS[name](params, foreach=False))
    assert_close(found, expected, rtol=1e-3, atol=1e-4)


@every_recipe_and_mode
def test_a_fused_optimizer_under_a_recipe(dynamo, mode, recipe):
    model = mlp()
    losses = train(model, as_mode(mode, model), recipe, 6, optimizer=lambda p: OPTIMIZERS["AdamW"](p, fused=True))[:6]
    assert losses[-1] < losses[0]


def test_a_compiled_optimizer(dynamo):
    model, other = mlp(), mlp()

    def compiled(params):
        optimizer = OPTIMIZERS["AdamW"](params)
        optimizer.step = torch.compile(optimizer.step, backend="aot_eager")
        return optimizer

    assert_close(train(model, model, optimizer=compiled), train(other, other, optimizer=OPTIMIZERS["AdamW"]))


@every_recipe
@pytest.mark.parametrize("buffers", [True, False], ids=["buffers", "parameters"])
def test_an_exponential_average(recipe, buffers):
    model = mlp()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=buffers)
    expected = [own.detach().clone() for own in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        with precision(recipe):
            loss = model(batch(step)).square().mean()
        loss.backward()
        optimizer.step()
        average.update_parameters(model)
        own = [value.detach() for value in model.parameters()]
        expected = [mean if step else new for mean, new in zip(expected, own, strict=True)]
        expected = [new + (mean - new) * (0.5 if step else 0.0) for mean, new in zip(expected, own, strict=True)]
    assert_close([own.detach() for own in average.module.parameters()], expected)
    with torch.no_grad(), precision(recipe):
        assert torch.isfinite(average(batch(9))).all()
    other = AveragedModel(mlp(3), use_buffers=buffers)
    other.load_state_dict(average.state_dict())
    with torch.no_grad():
        assert_same_bits(other(batch(0)), average(batch(0)))


def test_an_average_made_before_the_state_of_a_recipe_keeps_buffers():
    """With ``use_buffers``, buffers that come into being during training have no partner in the average."""
    model = mlp()
    average = AveragedModel(model, use_buffers=True)
    with precision("delayed"):
        model(batch(0)).sum().backward()
    average.update_parameters(model)
    average.update_parameters(model)
    with torch.no_grad(), precision("delayed"):
        assert torch.isfinite(average(batch(1))).all()


@every_mode
def test_schedules_do_not_recompile(dynamo, mode):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    run, rates = as_mode(mode, model), []
    for step in range(5):
        run(batch(step)).square().mean().backward()
        torch.nn.utils.clip_grad_value_(model.parameters(), 1e-3)
        assert torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0) < 1
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        rates.append(schedule.get_last_lr()[0])
    assert rates == sorted(rates, reverse=True)
    assert graph_count(dynamo) == (mode == "compiled")


def test_parameters_as_one_vector():
    model = mlp()
    vector = torch.nn.utils.parameters_to_vector(model.parameters())
    other = copy.deepcopy(model)
    torch.nn.utils.vector_to_parameters(2 * vector, other.parameters())
    assert_same_bits(list(other.parameters()), [2 * own for own in model.parameters()])
    other(batch(0)).sum().backward()
