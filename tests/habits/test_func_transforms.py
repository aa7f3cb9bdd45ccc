"""torch.func outside of compiled code and inside: gradients, vmap, ensembles, forward mode."""

import copy

import pytest
import torch
from torch.func import functional_call, grad, jacrev, jvp, stack_module_state, vjp, vmap

import bridge
import functional_te as fte
from tests.bridge.compiled import assert_close, break_count, graph_count, leaf
from tests.habits.models import RECIPES, as_mode, batch, every_mode, mlp, precision, twin

stateless = pytest.mark.parametrize("recipe", ["none", "current"])


def _values(model):
    return {name: own.detach() for name, own in model.named_parameters()}


def _loss(model):
    return lambda params, x: functional_call(model, params, (x,)).square().mean()


@every_mode
def test_grad_of_a_functional_call(dynamo, mode):
    model, x = mlp(), batch(0)
    found = as_mode(mode, grad(_loss(model)))(_values(model), x)
    model(x).square().mean().backward()
    assert_close(found, {name: own.grad for name, own in model.named_parameters()})
    assert break_count(dynamo) == 0


@stateless
def test_vjp_of_a_functional_call(recipe):
    model, x = mlp(), batch(0).requires_grad_()
    with precision(recipe):
        value, pullback = vjp(_loss(model), _values(model), x.detach())
        params, dx = pullback(torch.tensor(2.0))
    with precision(recipe):
        expected = model(x).square().mean()
    (2 * expected).backward()
    assert_close(value, expected.detach())
    tolerance = {} if recipe == "none" else {"rtol": 0.1, "atol": 5e-3}
    assert_close((params, dx), ({name: own.grad for name, own in model.named_parameters()}, x.grad), **tolerance)


@pytest.mark.parametrize(("recipe", "mode"), [("none", "eager"), ("current", "eager"), ("none", "compiled")])
def test_per_sample_gradients(dynamo, mode, recipe):
    """vmap of grad: with a scale per sample under a recipe, as if every sample came alone."""
    model, x = mlp(), batch(0, rows=5)
    one = grad(lambda params, row: _loss(model)(params, row.unsqueeze(0)))
    params = _values(model)
    with precision(recipe):
        found = as_mode(mode, vmap(one, in_dims=(None, 0)))(params, x)
        expected = [one(params, row) for row in x]
    # products of several rows may round elsewhere, which moves a cast to the next value
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if recipe == "none" else {"rtol": 0.1, "atol": 5e-3}
    for index, own in enumerate(expected):
        assert_close({name: value[index] for name, value in found.items()}, own, **tolerance)
    assert graph_count(dynamo) == (mode == "compiled")


def test_per_sample_gradients_of_a_chain():
    block = fte.chain(fte.RMSNorm(8), fte.Linear(8, 16, bias=False), fte.SwiGLU())
    params, x = fte.init(block), leaf(3, 4, 8, requires_grad=False)
    one = grad(lambda params, x: bridge.apply(block, params, x)[0].square().sum())
    found = vmap(one, in_dims=(None, 0))(params, x)
    for index, own in enumerate(x):
        expected = fte.vjp(block, params, own)[1](2 * fte.apply(block, params, own).output).params
        assert_close(fte.tree_map(lambda t, i=index: t[i], found), expected)


def test_an_ensemble():
    models = [mlp(seed) for seed in range(3)]
    params, _ = stack_module_state(models)
    base, x = copy.deepcopy(models[0]).to("meta"), batch(0)
    found = vmap(lambda own, x: functional_call(base, own, (x,)), in_dims=(0, None))(params, x)
    assert_close(found.detach(), torch.stack([model(x) for model in models]).detach())


def test_jacobians():
    model, x = mlp(), batch(0)[0]
    found = jacrev(model)(x)
    assert found.shape == (32, 32)
    assert_close(found, jacrev(twin(model))(x), rtol=1e-4, atol=1e-5)
    rows = vmap(jacrev(model))(batch(0, rows=3))
    assert_close(rows[1], jacrev(model)(batch(0, rows=3)[1]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("frozen", [True, False])
def test_forward_mode_without_a_graph(frozen):
    """In high precision the kernels are differentiable by themselves; nothing may be recorded for autograd."""
    model, x, v = mlp().requires_grad_(not frozen), batch(0), batch(1)
    with torch.no_grad():
        found = jvp(model, (x,), (v,))
    expected = jvp(twin(model), (x,), (v,))
    assert_close(found, [value.detach() for value in expected], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("way", ["jvp", "hessian"])
def test_forward_mode_through_a_recorded_chain_is_refused(way):
    model, x = mlp(), batch(0)
    with pytest.raises(NotImplementedError, match="forward"):
        jvp(model, (x,), (x,)) if way == "jvp" else torch.func.hessian(lambda x: model(x).sum())(x[0])


def test_the_way_out():
    """fte.vjp returns what a stateful recipe observes as values."""
    block, recipe = fte.chain(fte.Linear(32, 32)), RECIPES["delayed"]
    params, state, x = fte.init(block), fte.init_state(block, recipe), batch(0)
    out, pullback = fte.vjp(block, params, x, state=state, recipe=recipe)
    grads = pullback(torch.ones_like(out.output))
    assert grads.state[0]["grad_output"].amax_history[0] == 1
    assert grads.params[0]["weight"].shape == (32, 32)
