"""Weights that are stored transposed: their gradients come as they are stored, so that nothing is copied."""

import pytest
import torch
from torch import nn

import bridge
import functional_te as fte
from bridge.library import ensure_registered
from functional_te.ops.products import LinearBackwardArgs
from tests.convert.models import data, transformers


def _model():
    library = transformers().pytorch_utils
    torch.manual_seed(0)
    return nn.Sequential(library.Conv1D(48, 32), nn.SiLU(), library.Conv1D(32, 48))


def _layouts(model):
    """Strides of what reaches each parameter, before it is accumulated."""
    seen = {}
    for name, own in model.named_parameters():
        own.register_hook(lambda grad, name=name: seen.__setitem__(name, grad.stride()))
    return seen


@pytest.mark.parametrize("backend", [None, "aot_eager", "inductor"], ids=["eager", "aot", "inductor"])
def test_gradients_have_the_layout_of_the_parameters(backend):
    model, x, grad = _model(), data(8, 32).requires_grad_(), data(8, 32)
    expected = torch.autograd.grad(model(x), (x, *model.parameters()), grad)
    converted = bridge.convert(model)
    seen = _layouts(converted)
    call = converted if backend is None else torch.compile(converted, backend=backend, fullgraph=True)
    call(x).backward(grad)
    assert seen == {name: own.stride() for name, own in converted.named_parameters()}
    actual = (x.grad, *[own.grad for own in converted.parameters()])
    for one, other in zip(expected, actual, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-5)


def test_closed_ops_have_the_layout_that_they_are_described_with():
    ensure_registered(fte.BasicLinear)
    _, backward = fte.BasicLinear.compile_ops
    args = LinearBackwardArgs(grad_output=data(8, 48), input_=data(8, 32), weight=data(32, 48).t())
    wanted = (data(8, 48).t() @ data(8, 32)).contiguous()
    for opaque, strides in ((False, (1, 48)), (True, (32, 1))):
        (made,) = backward(args, opaque=opaque).grad_params
        assert made.stride() == strides
        torch.testing.assert_close(made, wanted)
