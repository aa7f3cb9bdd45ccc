"""torch.amp: dtypes under autocast are those of torch.nn, and GradScaler scales."""

import copy

import pytest
import torch

from bridge import ops
from tests.bridge.compiled import assert_close, break_count
from tests.habits.models import as_mode, batch, every_mode, every_recipe_and_mode, gradients, mlp, precision, twin


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@every_mode
def test_results_under_autocast_are_those_of_torch_nn(dynamo, mode, dtype):
    model = ops.Sequential(*list(mlp())[:1], ops.Linear(32, 64, bias=False), ops.GELU())
    plain = torch.nn.Sequential(*list(twin(mlp()))[:1], torch.nn.Linear(32, 64, bias=False), torch.nn.GELU("tanh"))
    with torch.no_grad():
        plain[1].weight.copy_(model[1].weight)
    x = batch(0).requires_grad_()

    def run(x):
        with torch.amp.autocast("cpu", dtype=dtype):
            return model(x)

    with torch.amp.autocast("cpu", dtype=dtype):
        expected = plain(x)
    y = as_mode(mode, run)(x)
    assert y.dtype is expected.dtype is dtype
    y.float().square().sum().backward()
    found, x.grad = x.grad, None
    expected.float().square().sum().backward()
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
    assert_close(y.detach().float(), expected.detach().float(), rtol=0.02, atol=0.02)
    assert_close([found, *gradients(model)], [x.grad, *gradients(plain)], rtol=0.05, atol=0.05)
    assert break_count(dynamo) == 0


@every_mode
def test_a_region_without_autocast_inside_of_one(dynamo, mode):
    first, second, x = mlp()[:3], mlp(1), batch(0)

    def run(x):
        with torch.amp.autocast("cpu", dtype=torch.bfloat16):
            y = first(x)[:, :32]
            with torch.amp.autocast("cpu", enabled=False):
                return y, second(y.float())

    y, z = as_mode(mode, run)(x)
    with torch.amp.autocast("cpu", dtype=torch.bfloat16):
        expected = first(x)[:, :32]
    assert y.dtype is expected.dtype
    assert_close(z, second(y.float()))


@every_mode
def test_the_cache_of_autocast_is_not_needed(dynamo, mode):
    """A weight that is written between two forwards under one autocast is read anew."""
    model, x = mlp(), batch(0)
    run = as_mode(mode, model)
    with torch.no_grad(), torch.amp.autocast("cpu", dtype=torch.bfloat16):
        before = run(x).clone()
        for own in model.parameters():
            own.mul_(2)
        assert not torch.equal(run(x), before)


@every_recipe_and_mode
def test_grad_scaler(dynamo, mode, recipe):
    """Scaling by a power of two changes no gradient once it is taken back, and a step with infinities is skipped."""
    model = mlp()
    other = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (model, other)]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    run, scales = as_mode(mode, model), []
    for step in range(4):
        with precision(recipe):
            loss, expected = run(batch(step)).square().mean(), other(batch(step)).square().mean()
        scaler.scale(loss * float("inf") if step == 2 else loss).backward()
        scaler.unscale_(optimizers[0])
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=False)
        scaler.step(optimizers[0])
        scaler.update()
        optimizers[0].zero_grad()
        scales.append(scaler.get_scale())
        if step != 2:  # the twin leaves the step out
            expected.backward()
            torch.nn.utils.clip_grad_norm_(other.parameters(), 1.0)
            optimizers[1].step()
            optimizers[1].zero_grad()
        # delayed scaling observes scaled gradients here and others there, so its roundings differ
        tolerance = {"rtol": 0.1, "atol": 0.02} if recipe == "delayed" else {}
        assert_close(list(model.parameters()), list(other.parameters()), **tolerance)
    assert scales == [2.0**10, 2.0**11, 2.0**10, 2.0**10]
    assert all(torch.isfinite(own).all() for name, own in model.named_buffers() if name.endswith("scale"))
