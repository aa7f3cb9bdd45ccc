"""Weight gradients summed into ``weight.main_grad``: dtypes, flags, fusions, eager and compiled."""

import pytest
import torch

import functional_te as fte
from bridge import autocast, ops

from .compiled import CURRENT, SMALL_HISTORY, GraphLog, assert_same_bits, break_count, graph_count

X = torch.randn(16, 32, generator=torch.Generator().manual_seed(3))


def _model(accumulate=True, dtype=torch.float32, **buffers):
    torch.manual_seed(1)
    options = {"accumulate_into_main_grad": accumulate, "dtype": dtype}
    model = ops.Sequential(
        ops.MakeExtraOutput().set_extra_output_channel(0, "r", output_to_caller=False),
        ops.BasicLinear(32, 32, **options),
        ops.GELU(),
        ops.Linear(32, 32, **options),
        ops.AddExtraInput().set_extra_input_channel(0, "r"),
    )
    for name, own in model.named_parameters():
        if accumulate and name.endswith("weight"):
            own.main_grad = torch.full(own.shape, 0.5, dtype=torch.float32)
            for flag, value in buffers.items():
                setattr(own, flag, value)
    return model


def _weights(model):
    return [own for name, own in model.named_parameters() if name.endswith("weight")]


def _step(model, recipe=None, run=None, times=1):
    for _ in range(times):
        with autocast(enabled=recipe is not None, recipe=recipe):
            y = (run or model)(X.to(_weights(model)[0].dtype))
        y.float().square().sum().backward()


@pytest.mark.parametrize("recipe", [None, CURRENT, SMALL_HISTORY], ids=["none", "current", "delayed"])
def test_gradients_are_added(recipe):
    expected, model = _model(False), _model()
    _step(expected, recipe)
    _step(model, recipe)
    for own, plain in zip(_weights(model), _weights(expected), strict=True):
        assert own.grad is None
        torch.testing.assert_close(own.main_grad, plain.grad + 0.5)
    biases = [[p.grad for n, p in m.named_parameters() if n.endswith("bias")] for m in (model, expected)]
    assert_same_bits(*biases)


def test_products_are_not_rounded_to_the_dtype_of_the_weight():
    model, plain = _model(dtype=torch.bfloat16), _model(False, dtype=torch.bfloat16)
    _step(model)
    _step(plain)
    for own, other in zip(_weights(model), _weights(plain), strict=True):
        added = own.main_grad - 0.5
        assert not torch.equal(added, added.bfloat16().float())
        torch.testing.assert_close(added, other.grad.float(), rtol=1e-2, atol=1e-1)


def test_overwriting():
    model, plain = _model(overwrite_main_grad=True), _model(False)
    _step(model, times=2)
    _step(plain)
    for own, other in zip(_weights(model), _weights(plain), strict=True):
        torch.testing.assert_close(own.main_grad, other.grad)


@pytest.mark.parametrize("zero", [False, True])
def test_flag_for_hooks(zero):
    model = _model(grad_added_to_main_grad=False, zero_out_wgrad=zero)
    _step(model)
    for own in _weights(model):
        assert own.grad_added_to_main_grad is True
        assert own.grad.shape == own.shape
        assert own.grad.dtype is own.dtype
        assert not zero or not own.grad.any()


def test_tied_weights_add_twice():
    torch.manual_seed(0)
    first = ops.BasicLinear(32, 32, accumulate_into_main_grad=True)
    second = ops.BasicLinear(32, 32, accumulate_into_main_grad=True)
    second.weight = first.weight
    first.weight.main_grad = torch.zeros(32, 32)
    ops.Sequential(first, second)(X).sum().backward()
    leaf = first.weight.detach().clone().requires_grad_()
    (X @ leaf.t() @ leaf.t()).sum().backward()
    torch.testing.assert_close(first.weight.main_grad, leaf.grad, rtol=1e-4, atol=1e-4)


def test_frozen_weights_and_evaluation_need_no_buffer():
    model = ops.BasicLinear(32, 8, accumulate_into_main_grad=True)
    with torch.no_grad():
        model(X)
    model.weight.requires_grad_(False)
    model(X.clone().requires_grad_()).sum().backward()


def test_a_missing_buffer_is_an_error_before_anything_runs():
    model = ops.Linear(32, 8, accumulate_into_main_grad=True)
    with pytest.raises(RuntimeError, match=r"BasicLinear: weight: accumulate_into_main_grad: .* got None"):
        model(X)
    model.weight.main_grad = torch.zeros(8, 31)
    with pytest.raises(ValueError, match=r"main_grad: expected shape \(8, 32\)"):
        model(X)


def test_fsdp_marker():
    model = ops.BasicLinear(32, 8, accumulate_into_main_grad=True)
    buffer = torch.zeros(8, 32)
    model.weight.__fsdp_param__ = True
    model.weight.get_main_grad = lambda: buffer
    model(X).sum().backward()
    torch.testing.assert_close(buffer, X.sum(0).expand(8, 32))


@pytest.mark.parametrize("flags", [{}, {"grad_added_to_main_grad": False}, {"overwrite_main_grad": True}], ids=str)
def test_compiled(dynamo, flags):
    eager, model = _model(**flags), _model(**flags)
    log = GraphLog()
    run = torch.compile(model, backend=log, fullgraph=True)
    for _ in range(3):
        _step(eager, SMALL_HISTORY)
        _step(model, SMALL_HISTORY, run)
    for own, other in zip(_weights(model), _weights(eager), strict=True):
        assert torch.equal(own.main_grad, other.main_grad)
    assert graph_count(dynamo) == 1
    assert break_count(dynamo) == 0


def test_every_linear_fusion_passes_the_dtype_on():
    rules = [rule for rule in fte.default_fusions().backward if "linear" in rule.name]
    assert rules
    model, plain = _model(dtype=torch.bfloat16), _model(dtype=torch.bfloat16)
    _step(model)
    old = fte.fuser.registry._current
    try:
        fte.fuser.registry._current = fte.Fusions()
        _step(plain)
    finally:
        fte.fuser.registry._current = old
    for own, other in zip(_weights(model), _weights(plain), strict=True):
        torch.testing.assert_close(own.main_grad, other.main_grad, rtol=1e-2, atol=1e-2)


def test_tied_weights_are_overwritten_once():
    torch.manual_seed(0)
    first, second = (ops.BasicLinear(32, 32, accumulate_into_main_grad=True) for _ in range(2))
    second.weight = first.weight
    first.weight.main_grad, first.weight.overwrite_main_grad = torch.full((32, 32), 7.0), True
    ops.Sequential(first, second)(X).sum().backward()
    leaf = first.weight.detach().clone().requires_grad_()
    (X @ leaf.t() @ leaf.t()).sum().backward()
    torch.testing.assert_close(first.weight.main_grad, leaf.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("buffer", "error", "said"),
    [
        (torch.zeros(8, 32, dtype=torch.int64), TypeError, "a floating dtype"),
        ("x", TypeError, "a tensor"),
        (torch.zeros(8, 32, requires_grad=True), ValueError, "requires no gradient"),
    ],
    ids=["integers", "no tensor", "requires grad"],
)
def test_buffers_that_take_no_gradient(buffer, error, said):
    model = ops.BasicLinear(32, 8, accumulate_into_main_grad=True)
    model.weight.main_grad = buffer
    with pytest.raises(error, match=rf"BasicLinear: weight.main_grad: expected .*{said}"):
        model(X)


def test_one_dtype_for_all_groups():
    model = ops.GroupedLinear(2, 32, 8, accumulate_into_main_grad=True)
    model.weight0.main_grad, model.weight1.main_grad = torch.zeros(8, 32), torch.zeros(8, 32, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="GroupedLinear: main_grad: expected one dtype"):
        model(X, torch.tensor([8, 8]))
