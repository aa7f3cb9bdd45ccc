"""torch.func inside of compiled code, and what is refused, with the way out."""

import copy

import pytest
import torch
from torch.func import functional_call, grad, jvp, stack_module_state, vmap

import bridge
import functional_te as fte
from bridge import ops
from tests.bridge.compiled import assert_close, break_count
from tests.habits.models import RECIPES, batch, mlp, precision
from tests.helpers import uniform

TRANSFORMS = {"grad": grad, "vmap": lambda f: vmap(grad(f), in_dims=(None, 0))}
every_transform = pytest.mark.parametrize("name", TRANSFORMS)


def _values(model):
    return {name: own.detach() for name, own in model.named_parameters()}


def _loss(model, recipe="none"):
    def loss(params, x):
        with precision(recipe):
            return functional_call(model, params, (x,)).square().mean()

    return loss


def test_a_compiled_ensemble(dynamo):
    models = [mlp(seed) for seed in range(3)]
    params, _ = stack_module_state(models)
    base, x = copy.deepcopy(models[0]).to("meta"), batch(0)
    run = vmap(lambda own, x: functional_call(base, own, (x,)), in_dims=(0, None))
    found = torch.compile(run, fullgraph=True, backend="aot_eager")(params, x)
    assert_close(found.detach(), torch.stack([model(x) for model in models]).detach())
    assert break_count(dynamo) == 0


@every_transform
@pytest.mark.parametrize("recipe", ["current", "delayed"])
def test_casts_are_not_differentiated_through(dynamo, name, recipe):
    """A tracer drops the backward of a chain; a gradient through its casts would be wrong by its own size."""
    model = mlp()
    with precision(recipe):
        model(batch(0)).sum().backward()
    run = torch.compile(TRANSFORMS[name](_loss(model, recipe)), fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match=r"(?s)functional_te.*functional_te\.vjp"):
        run(_values(model), batch(0).unsqueeze(1))


@pytest.mark.filterwarnings("ignore::bridge.CompileEagerFallbackWarning")
def test_hooks_are_not_replaced_by_derivatives(dynamo):
    class Through(ops.BasicOperation):
        """Rounds, and passes the gradient."""

        def op_forward(self, ctx, input_, *, prev_op_grad_output_quantizer, next_op_input_quantizer):
            return input_.round()

        def op_backward(self, ctx, grad_output):
            return grad_output, ()

    model = ops.Sequential(ops.Linear(32, 32, device="cpu"), Through())
    found = grad(_loss(model))(_values(model), batch(0))
    assert found["0.basic_ops.0.weight"].abs().sum() > 0
    with pytest.raises(Exception, match=r"(?s)functional_te.*functional_te\.vjp"):
        torch.compile(grad(_loss(model)), fullgraph=True, backend="aot_eager")(_values(model), batch(0))


@every_transform
def test_recipes_with_state_are_refused(name):
    model = mlp()
    with pytest.raises(RuntimeError, match=r"functional_te\.vjp"):
        TRANSFORMS[name](_loss(model, "delayed"))(_values(model), batch(0).unsqueeze(1))


def test_a_context_inside_of_a_transform_closes_no_step():
    """Of another model in the same process: a transform may not write to what it did not make."""
    other, model = mlp(), mlp(1)
    with precision("delayed"):
        other(batch(0)).sum().backward()
    scale = other[1].basic_ops[0].input_scale.clone()
    grad(_loss(model, "current"))(_values(model), batch(0))
    assert torch.equal(other[1].basic_ops[0].input_scale, scale)
    with precision("delayed"):
        assert not torch.equal(other[1].basic_ops[0].input_scale, scale)


def _dual(model, x):
    with torch.autograd.forward_ad.dual_level():
        return model(torch.autograd.forward_ad.make_dual(x, x))


FORWARD_MODE = {
    "transform": lambda model, x: jvp(model, (x,), (x,)),
    "hessian": lambda model, x: torch.func.hessian(lambda x: model(x).sum())(x[0]),
    "dual": _dual,
}


@pytest.mark.parametrize("way", FORWARD_MODE)
def test_forward_mode_is_refused_and_loses_no_tangent(way):
    with pytest.raises(NotImplementedError, match=r"functional_te: .*torch\.no_grad"):
        FORWARD_MODE[way](mlp(), batch(0))


def test_apply_takes_the_containers_that_vjp_takes():
    block = fte.chain(fte.RMSNorm(32), fte.Linear(32, 16))
    params = fte.tree_map(lambda t: t.requires_grad_(), fte.init(block))
    lists = [[*own.values()] for own in params]
    y, _ = bridge.apply(block, lists, batch(0), recipe=RECIPES["current"])
    expected, _ = bridge.apply(block, params, batch(0), recipe=RECIPES["current"])
    assert torch.equal(y, expected)
    y.backward(uniform(y.shape))
    assert all(own.grad is not None for entry in lists for own in entry)
