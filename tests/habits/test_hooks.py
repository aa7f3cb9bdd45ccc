"""Hooks of tensors and modules. (Those of containers: tests/bridge/test_modules.py.)"""

import pytest
import torch

from bridge import ops
from tests.bridge.compiled import assert_close, assert_same_bits, break_count
from tests.habits.models import as_mode, batch, every_mode, every_recipe_and_mode, gradients, mlp, precision, twin


@every_mode
def test_hooks_of_tensors_change_gradients(dynamo, mode):
    model, x = mlp(), batch(0).requires_grad_()
    plain, other_x = twin(model), batch(0).requires_grad_()
    seen = []
    for own, leaf, run in ((model, x, as_mode(mode, model)), (plain, other_x, plain)):
        handles = [leaf.register_hook(lambda grad: 2 * grad)]
        handles.append(own[3].weight.register_hook(lambda grad: grad.clamp(-0.5, 0.5)))
        y = run(leaf)
        y.register_hook(lambda grad: seen.append(grad.shape))
        y.sin().sum().backward()
        for handle in handles:
            handle.remove()
    assert seen == [(16, 32), (16, 32)]
    assert model[3].weight.grad.abs().max() == 0.5
    assert_close([x.grad, *gradients(model)], [other_x.grad, *gradients(plain)], rtol=1e-4, atol=1e-4)


@every_recipe_and_mode
def test_an_optimizer_step_inside_of_the_backward(dynamo, mode, recipe):
    """``register_post_accumulate_grad_hook``: every parameter is updated as soon as its gradient is there."""
    model, plain = mlp(), mlp()

    def update(own):
        with torch.no_grad():
            own.sub_(own.grad, alpha=0.1)
        own.grad = None

    for own in model.parameters():
        own.register_post_accumulate_grad_hook(update)
    run, optimizer = as_mode(mode, model), torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(2):
        with precision(recipe):
            loss, expected = run(batch(step)).square().sum(), plain(batch(step)).square().sum()
        loss.backward()
        expected.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert all(own.grad is None for own in model.parameters())
    assert_same_bits(list(model.parameters()), list(plain.parameters()))


# the compiler's own look at an input that is no leaf
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@every_mode
def test_hooks_of_a_module_change_what_goes_in_and_out(dynamo, mode):
    model, x = mlp(), batch(0)
    plain = twin(model)
    for own in (model, plain):
        own.register_forward_pre_hook(lambda module, args: (2 * args[0],))
        own.register_forward_hook(lambda module, args, kwargs, output: output + args[0], with_kwargs=True)
        own.register_full_backward_hook(lambda module, grad_input, grad_output: (3 * grad_input[0],))
    leaves = [x.clone().requires_grad_() for _ in range(2)]
    y, expected = as_mode(mode, model)(leaves[0]), plain(leaves[1])
    assert_close(y.detach(), expected.detach())
    y.sin().sum().backward()
    expected.sin().sum().backward()
    found, wanted = [leaf.grad for leaf in leaves]
    assert_close([found, *gradients(model)], [wanted, *gradients(plain)], rtol=1e-4, atol=1e-4)
    assert break_count(dynamo) == 0


def test_hooks_for_all_modules():
    """``register_module_forward_hook`` sees the modules that are called: containers, not the ops that they fuse."""
    model, seen = ops.Sequential(mlp(), torch.nn.Tanh()), []
    handle = torch.nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(type(module).__name__))
    model(batch(0))
    handle.remove()
    model(batch(0))
    assert seen == ["Sequential", "Tanh", "Sequential"]


def test_hooks_that_are_removed_leave_nothing():
    model, x = mlp(), batch(0)
    expected = model(x)
    handle = model.register_forward_hook(lambda module, args, output: output + 1)
    assert not torch.equal(model(x), expected)
    handle.remove()
    assert_same_bits(model(x).detach(), expected.detach())


@pytest.mark.parametrize("multi", ["all", "any"])
def test_multi_grad_hooks(multi):
    model, seen = mlp(), []
    torch.autograd.graph.register_multi_grad_hook(
        tuple(model.parameters()), lambda grads: seen.append(1 if multi == "any" else len(grads)), mode=multi
    )
    model(batch(0)).sum().backward()
    assert seen == [1 if multi == "any" else 6]


def test_nodes_of_the_graph_have_names_and_hooks():
    model, seen = mlp(), []
    y = model(batch(0))
    assert y.grad_fn.name() == "ChainFunctionBackward"
    y.grad_fn.register_prehook(lambda grads: seen.append("before"))
    y.grad_fn.register_hook(lambda grad_inputs, grad_outputs: seen.append("after"))
    y.sum().backward()
    assert seen == ["before", "after"]


@every_mode
def test_ops_of_a_chain_are_not_called_and_containers_are(dynamo, mode):
    """As in te.ops, ops inside of a container run as one chain; a container of one's own has hooks that run."""
    seen = []
    for wrapped in (False, True):
        parts = list(mlp())
        model = ops.Sequential(parts[0], ops.Sequential(parts[1]) if wrapped else parts[1], *parts[2:])
        model[1].register_forward_hook(lambda module, args, output: seen.append(tuple(output.shape)))
        assert_close(as_mode(mode, model)(batch(0)).detach(), mlp()(batch(0)).detach())
    assert seen == [(16, 64)]
