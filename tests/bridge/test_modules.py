"""Modules of ops against their functional twins and plain formulas; construction, parameters, torch.nn's machinery."""

import copy
import math
import pickle

import pytest
import torch
from torch.nn.utils import parametrizations

import bridge
import functional_te as fte
from bridge import ops
from tests import oracles

from .compiled import CURRENT, SMALL_HISTORY, assert_close, assert_same_bits, copy_of

# (module, functional twin, input shape)
CASES = {
    "basic_linear": (lambda: ops.BasicLinear(8, 6), fte.BasicLinear(8, 6), (4, 8)),
    "linear": (lambda: ops.Linear(8, 6), fte.Linear(8, 6), (2, 3, 8)),
    "linear_without_bias": (lambda: ops.Linear(8, 6, bias=False), fte.Linear(8, 6, bias=False), (4, 8)),
    "bias": (lambda: ops.Bias(8), fte.Bias(8), (4, 8)),
    "layer_norm": (lambda: ops.LayerNorm(8, eps=0.3), fte.LayerNorm(8, 0.3), (4, 8)),
    "layer_norm_2d": (lambda: ops.LayerNorm([2, 4]), fte.LayerNorm((2, 4)), (3, 2, 4)),
    "rms_norm": (lambda: ops.RMSNorm(8), fte.RMSNorm(8), (4, 8)),
    "rms_norm_zero_centered": (
        lambda: ops.RMSNorm((8,), eps=0.3, zero_centered_gamma=True, sm_margin={"forward": 1}),
        fte.RMSNorm(8, 0.3, True),
        (4, 8),
    ),
    "l2_normalization": (
        lambda: ops.L2Normalization(eps=0.3, seq_length=2, micro_batch_size=2),
        fte.L2Normalization(0.3),
        (2, 3, 8),
    ),
    "quantize_without_a_recipe": (lambda: ops.Quantize(backward=True), fte.Quantize(True, True), (4, 8)),
    "identity": (lambda: ops.Identity(), fte.Identity(), (4, 8)),
    "reshape": (lambda: ops.Reshape([2, -1]), fte.Reshape((2, -1)), (4, 8)),
    "constant_scale": (lambda: ops.ConstantScale(-2.5), fte.ConstantScale(-2.5), (4, 8)),
    "make_extra_output": (lambda: ops.MakeExtraOutput(), fte.MakeExtraOutput(), (4, 8)),
    **{
        name: (getattr(ops, name), getattr(fte, name)(), (4, 8))
        for name in ops.__all__
        if name.endswith("LU") and not name.startswith("Scaled")
    },
    "swiglu_interleaved": (
        lambda: ops.SwiGLU(glu_interleave_size=2),
        fte.SwiGLU(glu_interleave_size=2),
        (4, 8),
    ),
    "situglu": (lambda: ops.SiTUGLU(beta1=3.0, beta2=12.0), fte.SiTUGLU(beta1=3.0, beta2=12.0), (4, 8)),
    "clamped_swiglu": (
        lambda: ops.ClampedSwiGLU(limit=0.75, alpha=1.5, glu_linear_offset=0.5),
        fte.ClampedSwiGLU(limit=0.75, alpha=1.5, glu_linear_offset=0.5),
        (4, 8),
    ),
}


def _randomize(module):
    for own in module.parameters():
        torch.nn.init.uniform_(own, 0.25, 1.25)
    return module


def _named_params(module):
    return tuple({name: p.detach() for name, p in own.named_parameters()} for own in module.basic_operations())


# ---------------------------------------------------------------------------- parameters


def test_parameter_shapes_and_initial_values():
    linear = ops.Linear(64, 256)
    assert {name: tuple(p.shape) for name, p in linear.named_parameters()} == {
        "basic_ops.0.weight": (256, 64),
        "basic_ops.1.bias": (256,),
    }
    assert linear.bias.eq(0).all()
    bound = 1 / math.sqrt(64)
    weight = linear.weight.detach()
    assert weight.abs().max() <= bound
    assert weight.abs().max() > 0.99 * bound
    # mean and variance of the uniform distribution, within 5 standard errors
    assert abs(weight.mean()) < 5 * bound / math.sqrt(3 * weight.numel())
    assert abs(weight.var() / (bound**2 / 3) - 1) < 5 * math.sqrt(0.8 / weight.numel())
    for norm, gain in ((ops.RMSNorm(8), 1), (ops.RMSNorm(8, zero_centered_gamma=True), 0), (ops.LayerNorm(8), 1)):
        assert norm.weight.shape == (8,)
        assert norm.weight.eq(gain).all()
    assert ops.LayerNorm((2, 4)).bias.eq(torch.zeros(2, 4)).all()
    assert ops.Bias(5).bias.eq(torch.zeros(5)).all()
    assert all(isinstance(p, torch.nn.Parameter) and p.requires_grad for p in linear.parameters())


def test_manual_seed_reproduces_parameters():
    def make(seed):
        torch.manual_seed(seed)
        return ops.Sequential(ops.Linear(8, 8), ops.Linear(8, 8))

    one, same, other = make(3), make(3), make(4)
    assert_same_bits(one.state_dict(), same.state_dict())
    assert not torch.equal(one[0].weight, other[0].weight)
    assert not torch.equal(one[0].weight, one[1].weight)


def test_reset_parameters_draws_into_the_same_parameters():
    linear = ops.BasicLinear(8, 8)
    linear.weight.requires_grad_(False)
    kept, before = linear.weight, linear.weight.detach().clone()
    linear.reset_parameters()
    assert not torch.equal(linear.weight, before)
    assert not linear.weight.requires_grad
    assert linear.weight is kept  # an optimizer holds it


def test_meta_device_to_empty_and_reset():
    model = ops.Sequential(ops.RMSNorm(16, device="meta"), ops.Linear(16, 16, device="meta"))
    assert {p.device.type for p in model.parameters()} == {"meta"}
    model.to_empty(device="cpu")
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    assert model[0].weight.eq(1).all()
    assert model[1].bias.eq(0).all()
    assert model[1].weight.abs().max() <= 0.25
    with bridge.autocast(recipe=SMALL_HISTORY):
        model(torch.randn(16, 16)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_linear_forwards_assignments_of_weight_and_bias():
    linear = ops.Linear(4, 4)
    weight, bias = torch.nn.Parameter(torch.eye(4)), torch.nn.Parameter(torch.ones(4))
    linear.weight, linear.bias = weight, bias
    assert linear.basic_ops[0].weight is weight
    assert linear.basic_ops[1].bias is bias
    torch.testing.assert_close(linear(torch.zeros(1, 4)), torch.ones(1, 4))
    bare = ops.Linear(4, 4, bias=False)
    assert bare.bias is None
    with pytest.raises(ValueError, match="bias"):
        bare.bias = bias


# ---------------------------------------------------------------------------- the math


@pytest.mark.parametrize("case", CASES)
def test_module_agrees_with_twin_and_with_plain_torch(case):
    make, twin, shape = CASES[case]
    twin = twin if isinstance(twin, fte.Chain) else fte.chain(twin)
    module = _randomize(make())
    assert tuple(own.op for own in module.basic_operations()) == twin.ops
    params, x = _named_params(module), torch.randn(shape, requires_grad=True)
    outputs = module(x)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    pure = fte.apply(twin, params, x.detach())
    assert_same_bits([out.detach() for out in outputs], [pure.output, *pure.extra_outputs])

    wide = copy_of(tuple({name: p.double().requires_grad_() for name, p in own.items()} for own in params))
    wide_x = x.detach().double().requires_grad_()
    expected = oracles.run(twin, wide, wide_x)
    grads = [torch.randn(out.shape) for out in outputs]
    torch.autograd.backward(outputs, grads)
    torch.autograd.backward(expected, [grad.double() for grad in grads])
    assert_close([out.detach() for out in outputs], [out.detach().float() for out in expected])
    assert_close(x.grad, wide_x.grad.float())
    for own, wide_own in zip(module.basic_operations(), wide, strict=True):
        for name, value in wide_own.items():
            assert_close(getattr(own, name).grad, value.grad.float())


@pytest.mark.parametrize("case", ["linear", "make_extra_output", "swiglu_interleaved"])
def test_an_op_compiled_alone(dynamo, case):
    make, _, shape = CASES[case]
    module, x = _randomize(make()), torch.randn(shape)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")  # never called before
    assert_close(compiled(x), copy.deepcopy(module)(x))


def test_add_extra_input():
    x, extra = torch.randn(4, 8, requires_grad=True), torch.randn(4, 8, requires_grad=True)
    kept = extra.detach().clone()
    y = ops.AddExtraInput(in_place=True)(x, extra)
    assert torch.equal(y, x + extra)
    assert torch.equal(extra, kept)
    grad = torch.randn(4, 8)
    y.backward(grad)
    assert_same_bits([x.grad, extra.grad], [grad, grad])


@pytest.mark.parametrize("recipe", [CURRENT, SMALL_HISTORY], ids=["current", "delayed"])
def test_linear_with_a_recipe_is_its_twin(recipe):
    linear, block = _randomize(ops.Linear(16, 16)), fte.Linear(16, 16)
    x, dy = torch.randn(16, 16, requires_grad=True), torch.randn(16, 16)
    with bridge.autocast(recipe=recipe):
        y = linear(x)
    y.backward(dy)
    result, pullback = fte.vjp(
        block, _named_params(linear), x.detach(), state=fte.init_state(block, recipe), recipe=recipe
    )
    grads = pullback(dy)
    assert_same_bits(
        [y.detach(), x.grad, linear.weight.grad, linear.bias.grad],
        [result.output, grads.input, grads.params[0]["weight"], grads.params[1]["bias"]],
    )
    assert not torch.equal(y.detach(), linear(x.detach()).detach())


def test_cached_quantized_input_changes_the_gradient_only():
    x = torch.randn(4, 8)
    (a, b) = (x.clone().requires_grad_() for _ in range(2))
    exact, cached = ops.GELU()(a), ops.GELU(cache_quantized_input=True)(b)
    assert_same_bits(exact.detach(), cached.detach())
    exact.sum().backward()
    cached.sum().backward()
    assert not torch.equal(a.grad, b.grad)
    torch.testing.assert_close(a.grad, b.grad, rtol=0.1, atol=0.1)


# ---------------------------------------------------------------------------- torch.nn's machinery


def _mlp():
    return ops.Sequential(ops.LayerNorm(8), ops.Linear(8, 16), ops.SwiGLU(), ops.Linear(8, 8, bias=False))


def test_state_dict_keys_are_those_of_te_ops():
    assert list(_mlp().state_dict()) == [
        "0.weight", "0.bias", "0._extra_state",
        "1.basic_ops.0.weight", "1.basic_ops.0._extra_state", "1.basic_ops.1.bias", "1.basic_ops.1._extra_state",
        "2._extra_state",
        "3.basic_ops.0.weight", "3.basic_ops.0._extra_state",
    ]  # fmt: skip
    for name, value in _mlp().state_dict().items():
        if name.endswith("_extra_state"):
            assert (value.dtype, value.numel(), value.device.type) == (torch.uint8, 0, "cpu")


@pytest.mark.parametrize("assign", [False, True])
def test_load_state_dict_is_strict_and_complete(assign):
    source, target, x = _randomize(_mlp()), _mlp(), torch.randn(4, 8)
    target(x)
    target.load_state_dict(source.state_dict(), strict=True, assign=assign)
    assert_same_bits(target(x).detach(), source(x).detach())
    target(x).sum().backward()
    assert all(p.grad is not None for p in target.parameters())  # of the parameters that exist now
    partial = source.state_dict()
    del partial["1.basic_ops.1.bias"]
    with pytest.raises(RuntimeError, match=r"1\.basic_ops\.1\.bias"):
        target.load_state_dict(partial)


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "save"])
def test_copies_are_equal_and_independent(how, tmp_path):
    model, x = _randomize(_mlp()), torch.randn(4, 8)
    expected = model(x).detach()
    if how == "deepcopy":
        copied = copy.deepcopy(model)
    elif how == "pickle":
        copied = pickle.loads(pickle.dumps(model))
    else:
        torch.save(model, tmp_path / "model.pt")
        copied = torch.load(tmp_path / "model.pt", weights_only=False)
    assert_same_bits(copied(x).detach(), expected)
    with torch.no_grad():
        for own in copied.parameters():
            own.add_(1)
    assert_same_bits(model(x).detach(), expected)
    assert not torch.equal(copied(x), expected)
    copied.append(ops.ConstantScale(2.0))
    assert len(model) == 4
    torch.testing.assert_close(copied(x), 2 * copied[:4](x))


def test_casting_the_parameters():
    model, x = _randomize(_mlp()), torch.randn(4, 8)
    exact = model(x).detach()
    model.to(torch.bfloat16)
    y = model(x.bfloat16())
    assert y.dtype is torch.bfloat16
    torch.testing.assert_close(y.float(), exact, rtol=0.05, atol=0.05 * exact.abs().max().item())
    y.sum().backward()
    assert {p.grad.dtype for p in model.parameters()} == {torch.bfloat16}


def test_double_is_refused_when_called():
    with pytest.raises(TypeError, match=r"op 0 \(LayerNorm\).*float64"):
        _mlp().double()(torch.randn(4, 8, dtype=torch.float64))
    with pytest.raises(TypeError, match=r"BasicLinear.*weight.*float64"):
        ops.Linear(8, 8).double()(torch.randn(4, 8))


def test_frozen_parameters_get_no_gradient_and_change_no_other():
    full, x = _randomize(_mlp()), torch.randn(4, 8)
    part = copy.deepcopy(full)
    part[0].requires_grad_(False)
    part[1].weight.requires_grad_(False)
    full(x).sum().backward()
    part(x).sum().backward()
    frozen = {"0.weight", "0.bias", "1.basic_ops.0.weight"}
    for (name, one), other in zip(part.named_parameters(), full.parameters(), strict=True):
        assert (one.grad is None) == (name in frozen)
        if one.grad is not None:
            assert_same_bits(one.grad, other.grad)
    part.requires_grad_(False)
    assert not part(x).requires_grad


def test_functional_call_and_grad():
    model, x = _randomize(_mlp()), torch.randn(4, 8)
    given = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    loaded = copy.deepcopy(model)
    loaded.load_state_dict(given, strict=False)
    expected = loaded(x)
    expected.square().sum().backward()
    assert_same_bits(torch.func.functional_call(model, given, (x,)), expected.detach())
    grads = torch.func.grad(lambda p: torch.func.functional_call(model, p, (x,)).square().sum())(given)
    assert_close(grads, {name: p.grad for name, p in loaded.named_parameters()})
    assert all(p.grad is None for p in model.parameters())


def test_weight_norm_parametrization():
    linear, plain = ops.BasicLinear(8, 4), torch.nn.Linear(8, 4, bias=False)
    plain.weight.data.copy_(linear.weight.detach())
    linear, plain = (parametrizations.weight_norm(m) for m in (linear, plain))
    x = torch.randn(3, 8)
    for module in (linear, plain):
        module.parametrizations.weight.original0.data.mul_(2)
        module(x).square().sum().backward()
    assert_close(linear(x).detach(), plain(x).detach())
    for name, own in plain.named_parameters():
        assert_close(linear.get_parameter(name).grad, own.grad)


def test_hooks_of_containers_and_of_ops_called_alone():
    linear, model, seen = ops.Linear(8, 8), _mlp(), []
    for module in (linear, model):
        module.register_forward_pre_hook(lambda m, args: seen.append("pre"))
        module.register_forward_hook(lambda m, args, out: seen.append("post"))
        module.register_full_backward_hook(lambda m, grad_in, grad_out: seen.append("backward"))
    for module in (linear, model):
        seen.clear()
        module(torch.randn(4, 8, requires_grad=True)).sum().backward()
        assert seen == ["pre", "post", "backward"]
    seen.clear()
    model[1].weight.register_hook(lambda grad: seen.append("grad"))
    model(torch.randn(4, 8, requires_grad=True)).sum().backward()
    assert sorted(seen) == ["backward", "grad", "post", "pre"]


def test_train_and_eval_give_the_same_values():
    model, x = _mlp(), torch.randn(4, 8)
    assert model.training
    expected = model(x).detach()
    model.eval()
    assert not any(module.training for module in model.modules())
    assert_same_bits(model(x).detach(), expected)
    with torch.no_grad():
        assert_same_bits(model(x), expected)
    with torch.inference_mode():
        assert_same_bits(model(x).clone(), expected)


def test_repr_shows_the_configuration():
    text = repr(ops.Sequential(ops.Linear(8, 16), ops.GELU()))
    assert "8" in text
    assert "16" in text
    assert "GELU" in text
