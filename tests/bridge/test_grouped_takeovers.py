"""What GroupedLinear runs itself: weight gradients on request, and buffers of the caller inside of a container."""

import copy

import pytest
import torch

from bridge import autocast, ops

from .compiled import CURRENT, SMALL_HISTORY

SPLITS = torch.tensor([3, 0, 13])
X = torch.randn(16, 32, generator=torch.Generator().manual_seed(3))


def _models(**options):
    torch.manual_seed(1)
    plain = ops.Sequential(
        ops.GroupedLinear(3, 32, 64, **options), ops.ScaledSwiGLU(), ops.GroupedLinear(3, 32, 32, **options)
    )
    torch.manual_seed(1)
    delayed = ops.Sequential(
        ops.GroupedLinear(3, 32, 64, delay_wgrad_compute=True, **options),
        ops.ScaledSwiGLU(),
        ops.GroupedLinear(3, 32, 32, delay_wgrad_compute=True, **options),
    )
    delayed.load_state_dict(plain.state_dict())
    return plain, delayed


def _backward(model, recipe, x=X):
    x = x.clone().requires_grad_()
    with autocast(enabled=recipe is not None, recipe=recipe):
        y = model(x, SPLITS, torch.linspace(0.5, 1, 16), SPLITS)
    y.square().sum().backward()
    return x.grad


def _later(model):
    for index in (2, 0):
        assert model[index].need_backward_dw()
        model[index].backward_dw()


@pytest.mark.parametrize("recipe", [None, CURRENT, SMALL_HISTORY], ids=["none", "current", "delayed"])
def test_gradients_come_on_request(recipe):
    plain, delayed = _models()
    wanted = _backward(plain, recipe)
    torch.testing.assert_close(_backward(delayed, recipe), wanted, rtol=0, atol=0)
    named = dict(plain.named_parameters())
    for name, own in delayed.named_parameters():
        if "weight" in name:
            assert own.grad is None
            assert own.skip_backward_post_hook is True
        else:
            torch.testing.assert_close(own.grad, named[name].grad, rtol=0, atol=0)
    _later(delayed)
    for name, own in delayed.named_parameters():
        torch.testing.assert_close(own.grad, named[name].grad, rtol=0, atol=0)


def test_backwards_wait_in_order_and_hooks_are_called():
    plain, delayed = _models()
    called = []
    delayed[0].register_wgrad_accumulation_and_reduce_hooks(lambda: called.append(delayed[0].weight2.grad.clone()))
    _backward(delayed, None)
    _backward(delayed, None, 2 * X)
    _later(delayed)
    _backward(plain, None)
    torch.testing.assert_close(called[0], plain[0].weight2.grad)
    _later(delayed)
    _backward(plain, None, 2 * X)
    torch.testing.assert_close(called[1], plain[0].weight2.grad)
    with pytest.raises(RuntimeError, match="backward_dw: expected a backward that waits"):
        delayed[0].backward_dw()


def test_into_main_grad():
    plain, delayed = _models(accumulate_into_main_grad=True)
    for model in (plain, delayed):
        for name, own in model.named_parameters():
            if "weight" in name:
                own.main_grad = torch.full(own.shape, 0.5)
        _backward(model, None)
    assert (delayed[0].weight0.main_grad == 0.5).all()
    _later(delayed)
    for own, other in zip(delayed.parameters(), plain.parameters(), strict=True):
        if own.dim() == 2:
            assert own.grad is None
            torch.testing.assert_close(own.main_grad, other.main_grad, rtol=0, atol=0)


def test_frozen_inputs_and_weights():
    model = ops.GroupedLinear(3, 32, 8, delay_wgrad_compute=True)
    model.weight1.requires_grad_(False)
    model(X, SPLITS).sum().backward()
    model.backward_dw()
    assert model.weight1.grad is None
    torch.testing.assert_close(model.weight0.grad, X[:3].sum(0).expand(8, 32))


def test_copies_do_not_wait_and_other_modules_ignore_it():
    model = ops.GroupedLinear(3, 32, 8, delay_wgrad_compute=True)
    model(X, SPLITS).sum().backward()
    with pytest.raises(RuntimeError, match="got none"):
        copy.deepcopy(model).backward_dw()
    plain = ops.GroupedLinear(3, 32, 8)
    assert not plain.need_backward_dw()
    plain.backward_dw()


@pytest.mark.parametrize("enabled", [True, False])
def test_buffers_in_a_container(enabled):
    torch.manual_seed(0)
    first, second = ops.GroupedLinear(3, 32, 64), ops.GroupedLinear(3, 64, 16)
    model = ops.Sequential(first, second)
    out, grad = torch.empty(16, 16), torch.empty(16, 32)
    x, other = (X.clone().requires_grad_() for _ in range(2))
    with torch.set_grad_enabled(enabled):
        y = model(x, SPLITS, SPLITS, op_kwargs={first: {"grad_input": grad}, 1: {"output": out}})
        plain = model(other, SPLITS, SPLITS)
    assert y.data_ptr() == out.data_ptr()
    assert torch.equal(out, plain)
    if enabled:
        y.square().sum().backward()
        plain.square().sum().backward()
        assert torch.equal(grad, other.grad)
        assert torch.equal(x.grad, other.grad)
    with pytest.raises(ValueError, match=r"GroupedLinear: output: expected shape \(16, 16\), got shape \(16, 8\)"):
        model(x, SPLITS, SPLITS, op_kwargs={second: {"output": torch.empty(16, 8)}})


def test_compiled_code_refuses(dynamo):
    model = torch.compile(ops.GroupedLinear(3, 32, 8, delay_wgrad_compute=True), backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="delay_wgrad_compute: not supported in a compiled call"):
        model(X, SPLITS)
