"""Operations in the style of te.ops: modules whose math is hooks, alone and in chains, eager and compiled."""

import copy
import gc
import pickle
import warnings
import weakref

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import bridge
import functional_te as fte
from bridge import ops
from tests import helpers

from .compiled import CURRENT, SMALL_HISTORY, GraphLog, assert_same_bits, backward, break_count, graph_count, leaf
from .testing_ops import Gain


class Affine(ops.BasicOperation):
    """``y = x * scale**power + shift``."""

    def __init__(self, size=8, *, device=None, dtype=None):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.full((), 1.5, device=device, dtype=dtype))
        self.shift = torch.nn.Parameter(torch.linspace(-1, 1, size, device=device, dtype=dtype))
        self.calls = 0

    def reset_parameters(self):
        self.scale = torch.nn.Parameter(torch.full((), 1.5))
        self.shift = torch.nn.Parameter(torch.linspace(-1, 1, self.shift.numel()))

    def op_forward(self, ctx, input_, *, prev_op_grad_output_quantizer, next_op_input_quantizer, power=1):
        factor = self.scale**power
        if ctx.requires_grad:
            ctx.save_for_backward(input_, self.scale)
            ctx.power = power
            ctx.factor = factor  # a tensor as an attribute
        return input_ * factor + self.shift

    def op_backward(self, ctx, grad_output):
        x, scale = ctx.saved_tensors
        grad_scale = (grad_output * x).sum() * ctx.power * scale ** (ctx.power - 1)
        return grad_output * ctx.factor, (grad_scale, grad_output.reshape(-1, grad_output.shape[-1]).sum(0))


class Counting(Affine):
    """Counts its calls; traced code would see them as side effects."""

    def op_forward(self, ctx, input_, **kwargs):
        self.calls += 1
        return super().op_forward(ctx, input_, **kwargs)


class Mix(ops.BasicOperation):
    """``y = x * extra``, with ``x + extra`` as an extra output."""

    num_extra_inputs = 1
    num_extra_outputs = 1

    def fuser_forward(self, basic_op_ctxs, input_, *, basic_op_extra_inputs, **unused):
        (extra,) = basic_op_extra_inputs[0]
        basic_op_ctxs[0].save_for_backward(input_, extra)
        return input_ * extra, [(input_ + extra,)]

    def fuser_backward(self, basic_op_ctxs, grad_output, *, basic_op_grad_extra_outputs):
        x, extra = basic_op_ctxs[0].saved_tensors
        (grad_sum,) = basic_op_grad_extra_outputs[0]
        both = 0 if grad_sum is None else grad_sum
        return grad_output * extra + both, [()], [(grad_output * x + both,)]


class Halve(ops.BasicOperation):
    """``y = x[..., ::2]``: another shape, and nothing else."""

    def op_forward(self, ctx, input_, **unused):
        ctx.shape = tuple(input_.shape)
        return input_[..., ::2].contiguous()

    def op_backward(self, ctx, grad_output):
        grad = grad_output.new_zeros(ctx.shape)
        grad[..., ::2] = grad_output
        return grad, ()


def _affine(x, scale, shift, power=1):
    return x * scale**power + shift


def _check(outputs, leaves, expected, expected_leaves, dtype, seed=7):
    """Outputs and gradients against a float64 graph of plain tensor functions."""
    for got, want in zip(outputs, expected, strict=True):
        assert got.dtype is dtype
        helpers.assert_close(got, want, dtype)
    backward(outputs, seed)
    generator = torch.Generator().manual_seed(seed)
    grads = [torch.randn(out.shape, generator=generator).to(dtype).double() for out in outputs]
    torch.autograd.backward(list(expected), grads)
    for got, want in zip(leaves, expected_leaves, strict=True):
        helpers.assert_close(got.grad, want.grad, dtype)


# ---------------------------------------------------------------------------- eager


@pytest.mark.parametrize("dtype", helpers.DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(8,), (4, 8), (2, 3, 8)], ids=str)
def test_alone(shape, dtype):
    op, x = Affine(dtype=dtype), leaf(*shape, dtype=dtype)
    y = op(x)
    ref = helpers.double((x, op.scale, op.shift))
    tolerance = torch.bfloat16 if dtype is torch.float16 else dtype  # sums of rounded products
    helpers.assert_close(y, _affine(*ref), tolerance)
    backward(y)
    generator = torch.Generator().manual_seed(7)
    _affine(*ref).backward(torch.randn(shape, generator=generator).to(dtype).double())
    scale = 8 if dtype is not torch.float32 else 1
    for got, want in zip((x, op.scale, op.shift), ref, strict=True):
        helpers.assert_close(got.grad / scale, want.grad / scale, tolerance)


def test_in_a_chain_with_built_in_ops():
    model, x = ops.Sequential(ops.Linear(8, 8), Affine(), ops.GELU(), ops.Linear(8, 8, bias=False)), leaf(4, 8)
    y = model(x, op_kwargs={1: {"power": 3}})
    assert type(y.grad_fn).__name__ == "ChainFunctionBackward"
    assert y.grad_fn.next_functions[0][0].variable is x  # one node of autograd's graph
    assert len(model._module_groups) == 1
    params = list(model.parameters())
    ref = helpers.double([x, *params])
    rx, weight, bias, scale, shift, last = ref
    hidden = _affine(rx @ weight.t() + bias, scale, shift, 3)
    expected = torch.nn.functional.gelu(hidden, approximate="tanh") @ last.t()
    _check([y], [x, *params], [expected], ref, torch.float32)


def test_extra_tensors_of_the_caller():
    op, x, extra = Mix(), leaf(4, 8), leaf(4, 8, seed=1)
    ref = helpers.double([x, extra])
    _check(op(x, extra), [x, extra], [ref[0] * ref[1], ref[0] + ref[1]], ref, torch.float32)
    x.grad = extra.grad = None
    op(x, extra)[0].sum().backward()  # the extra output is not used
    assert_same_bits([x.grad, extra.grad], [extra.detach(), x.detach()])
    with pytest.raises(ValueError, match="extra inputs"):
        op(x)


def test_channels():
    model = ops.Sequential(
        ops.MakeExtraOutput().set_extra_output_channel(0, "residual", output_to_caller=False),
        ops.Linear(8, 8, bias=False),
        Mix().set_extra_input_channel(0, "residual").set_extra_output_channel(0, "sum", output_to_caller=False),
        ops.AddExtraInput().set_extra_input_channel(0, "sum"),
    )
    x = leaf(4, 8)
    ref = helpers.double([x, model[1].weight])
    hidden = ref[0] @ ref[1].t()
    _check([model(x)], [x, model[1].weight], [hidden * ref[0] + hidden + ref[0]], ref, torch.float32)
    assert model[2]._extra_tensor_channels_locked
    with pytest.raises(RuntimeError, match="already captured its channel routing"):
        model[2].set_extra_input_channel(0, None)
    with pytest.raises(IndexError, match="out of range"):
        Mix().set_extra_output_channel(1, "sum")


def test_another_shape_before_a_linear():
    model, x = ops.Sequential(ops.Linear(8, 8, bias=False), Halve(), ops.Linear(4, 6, bias=False)), leaf(4, 8)
    ref = helpers.double([x, *model.parameters()])
    expected = (ref[0] @ ref[1].t())[:, ::2] @ ref[2].t()
    _check([model(x)], [x, *model.parameters()], [expected], ref, torch.float32)


def test_forward_kwargs():
    op, x = Affine(), leaf(4, 8)
    torch.testing.assert_close(op(x, power=2), x * 2.25 + op.shift)
    with pytest.raises(TypeError, match="nonsense"):
        op(x, nonsense=1)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode):
    seen = []

    class Watching(Affine):
        def op_forward(self, ctx, input_, **kwargs):
            seen.append((ctx.requires_grad, torch.is_grad_enabled()))
            return super().op_forward(ctx, input_, **kwargs)

    op, x = Watching(), leaf(4, 8)
    with mode():
        y = op(x)
    assert not y.requires_grad
    op(x)
    assert seen == [(False, False), (True, False)]


def test_activation_checkpointing():
    model, x = ops.Sequential(ops.Linear(8, 8), Counting(), ops.SiLU()), leaf(4, 8)
    model(x).square().sum().backward()
    expected = [p.grad.clone() for p in (x, *model.parameters())]
    x.grad = None
    model.zero_grad()
    model[1].calls = 0
    checkpoint(model, x, use_reentrant=False).square().sum().backward()
    assert model[1].calls == 2
    assert_same_bits([p.grad for p in (x, *model.parameters())], expected)


def test_a_graph_can_be_walked_twice():
    op, x = Affine(), leaf(4, 8)
    y = op(x).sum()
    y.backward(retain_graph=True)
    first = x.grad.clone()
    y.backward()
    assert_same_bits(x.grad, 2 * first)


def test_what_is_saved_is_watched_by_autograd():
    op, x = Affine(), leaf(4, 8)
    y = op(x)
    with torch.no_grad():
        x.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_torch_autocast_is_on_inside():
    seen = []

    class Products(ops.BasicOperation):
        def op_forward(self, ctx, input_, **unused):
            y = input_ @ input_.t()
            seen.append(y.dtype)
            return y

        def op_backward(self, ctx, grad_output):
            return None, ()

    with torch.autocast("cpu", dtype=torch.bfloat16):
        Products()(leaf(4, 4, requires_grad=False))
    assert seen == [torch.bfloat16]


def test_returned_inputs_become_tensors_of_their_own():
    class Same(ops.BasicOperation):
        num_extra_outputs = 2

        def fuser_forward(self, basic_op_ctxs, input_, **unused):
            return input_, [(input_, input_)]

        def fuser_backward(self, basic_op_ctxs, grad_output, *, basic_op_grad_extra_outputs):
            return grad_output + sum(g for g in basic_op_grad_extra_outputs[0] if g is not None), [()], [()]

    x = leaf(4, 8)
    outputs = Same()(x)
    assert len({out.data_ptr() for out in (x, *outputs)}) == 4
    sum(out.sum() * (i + 1) for i, out in enumerate(outputs)).backward()
    assert x.grad.eq(6).all()


@pytest.mark.parametrize("recipe", [CURRENT, SMALL_HISTORY], ids=helpers.recipe_id)
def test_casting_for_the_next_op_changes_nothing(recipe):
    class Casting(Affine):
        def op_forward(self, ctx, input_, *, next_op_input_quantizer=None, **kwargs):
            y = super().op_forward(ctx, input_, next_op_input_quantizer=None, **kwargs)
            return y if next_op_input_quantizer is None else next_op_input_quantizer(y)

    torch.manual_seed(1)
    plain = ops.Sequential(Affine(16), ops.Linear(16, 16))
    casting = ops.Sequential(Casting(16), copy.deepcopy(plain[1]))
    results = []
    for model in (plain, casting):
        x, own = leaf(16, 16), []
        for _ in range(3):
            with bridge.autocast(recipe=recipe):
                y = model(x)
            y.square().sum().backward()
            own += [y.detach(), x.grad.clone()]
        results.append([*own, *[state.amax_history.clone() for _, _, state in model[1].basic_ops[0].named_states()]])
    assert_same_bits(*results)


class Louder(ops.SwiGLU):
    """A built-in op with a change, by the hooks of its base."""

    def op_forward(self, ctx, input_, **kwargs):
        return 2 * super().op_forward(ctx, input_, **kwargs)

    def op_backward(self, ctx, grad_output):
        grad_input, grad_params = super().op_backward(ctx, grad_output)
        return 2 * grad_input, grad_params


class Wrapped(ops.RMSNorm):
    def op_forward(self, ctx, input_, **kwargs):
        return super().op_forward(ctx, input_, **kwargs)

    def op_backward(self, ctx, grad_output):
        return super().op_backward(ctx, grad_output)


class WrappedLinear(ops.BasicLinear):
    def op_forward(self, ctx, input_, **kwargs):
        return super().op_forward(ctx, input_, **kwargs)

    def op_backward(self, ctx, grad_output):
        return super().op_backward(ctx, grad_output)


def test_subclasses_of_built_in_ops():
    model, x = ops.Sequential(WrappedLinear(8, 8), Wrapped(8), ops.ConstantScale(1.0), Louder()), leaf(2, 3, 8)
    plain = ops.Sequential(ops.BasicLinear(8, 8), ops.RMSNorm(8), ops.SwiGLU(), ops.ConstantScale(2.0))
    plain[0].weight, plain[1].weight = model[0].weight, model[1].weight
    results = []
    for own in (model, plain):
        x.grad = None
        plain.zero_grad()
        y = own(x)
        backward(y)
        results.append([y, x.grad, *[p.grad.clone() for p in plain.parameters()]])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want)
    with bridge.autocast(recipe=CURRENT), pytest.raises(NotImplementedError, match=r"WrappedLinear: .* high precision"):
        ops.Sequential(WrappedLinear(16, 16))(leaf(16, 16))


# ---------------------------------------------------------------------------- as a module


def test_state_dict_and_copies():
    model = ops.Sequential(Affine(), ops.Linear(8, 8))
    assert list(model.state_dict()) == [
        "0.scale",
        "0.shift",
        "0._extra_state",
        "1.basic_ops.0.weight",
        "1.basic_ops.0._extra_state",
        "1.basic_ops.1.bias",
        "1.basic_ops.1._extra_state",
    ]
    x = leaf(4, 8)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_same_bits(other(x), model(x))
        with torch.no_grad():
            other[0].shift.add_(1)
        assert not torch.equal(other(x), model(x))
        other(x).sum().backward()
        assert model[0].shift.grad is None
        other.load_state_dict(model.state_dict())
        assert_same_bits(other(x), model(x))


def test_copies_keep_their_channels():
    model = ops.Sequential(
        ops.MakeExtraOutput().set_extra_output_channel(0, "r", output_to_caller=False),
        Mix().set_extra_input_channel(0, "r"),
    )
    x = leaf(4, 8)
    assert_same_bits(copy.deepcopy(model)(x), model(x))


def test_parameters_and_modules_registered_after_init():
    class Nested(ops.BasicOperation):
        def __init__(self):
            super().__init__()
            self.register_parameter("nothing", None)
            self.first = torch.nn.Parameter(torch.ones(8))
            self.inner = torch.nn.Linear(8, 8)

        def op_forward(self, ctx, input_, **unused):
            ctx.save_for_backward(input_)
            return self.inner(input_) * self.first

        def op_backward(self, ctx, grad_output):
            (x,) = ctx.saved_tensors
            scaled = grad_output * self.first
            return scaled @ self.inner.weight, [(grad_output * self.inner(x)).sum(0), scaled.t() @ x, scaled.sum(0)]

    op, x = Nested(), leaf(4, 8)
    ref = helpers.double([x, *op.parameters()])
    _check([op(x)], [x, *op.parameters()], [(ref[0] @ ref[2].t() + ref[3]) * ref[1]], ref, torch.float32)
    affine = Affine()
    affine(x)
    affine.extra = torch.nn.Parameter(torch.ones(1))
    with pytest.raises(RuntimeError, match="Affine: parameter gradients of basic op 0: expected 3, got 2"):
        affine(x).sum().backward()


def test_parameters_on_meta_are_made_at_the_first_call():
    model = ops.Sequential(ops.Linear(8, 8, device="meta"), Affine(device="meta"))
    assert model(torch.empty(2, 8, device="meta")).device.type == "meta"
    y = model(leaf(4, 8))
    assert {p.device.type for p in model.parameters()} == {"cpu"}
    y.sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_modules_are_freed():
    op = Affine()
    op(leaf(4, 8)).sum().backward()
    ops.Sequential(op, ops.GELU())(leaf(4, 8))
    alive = weakref.ref(op)
    del op
    gc.collect()
    assert alive() is None


# ---------------------------------------------------------------------------- mistakes


class _Returns(ops.BasicOperation):
    num_extra_inputs = 1
    num_extra_outputs = 1

    def __init__(self, forward, backward):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(8))
        self.results = forward, backward

    def fuser_forward(self, basic_op_ctxs, input_, **unused):
        return self.results[0](input_.clone())

    def fuser_backward(self, basic_op_ctxs, grad_output, **unused):
        return self.results[1](grad_output)


def _right_forward(y):
    return y, [(y.clone(),)]


def _right_backward(g):
    return g, [(g.sum(0),)], [(g,)]


MISTAKES = {
    "no pair": (lambda y: y, _right_backward, "fuser_forward: expected 2 results"),
    "no output": (lambda y: (None, [(y,)]), _right_backward, "output"),
    "extra outputs": (lambda y: (y, [()]), _right_backward, "extra outputs of basic op 0: expected 1, got 0"),
    "entries": (lambda y: (y, []), _right_backward, "extra outputs: expected 1 entries"),
    "no extra output": (lambda y: (y, [(None,)]), _right_backward, "is public"),
    "parameter gradients": (
        _right_forward,
        lambda g: (g, [(g, g)], [(g,)]),
        "parameter gradients of basic op 0: expected 1, got 2",
    ),
    "extra gradients": (
        _right_forward,
        lambda g: (g, [(g.sum(0),)], [()]),
        "extra input gradients of basic op 0: expected 1, got 0",
    ),
    "no input gradient": (_right_forward, lambda g: (None, None, None), "input gradient"),
    "no triple": (_right_forward, lambda g: (g, [(g,)]), "fuser_backward: expected 3 results"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_wrong_results_are_named(mistake):
    forward, own_backward, message = MISTAKES[mistake]
    with pytest.raises(RuntimeError, match=f"_Returns: {message}|_Returns: .*{message}"):
        _Returns(forward, own_backward)(leaf(4, 8), leaf(4, 8))[0].sum().backward()
    y, extra = _Returns(_right_forward, _right_backward)(leaf(4, 8), leaf(4, 8))
    (y.sum() + extra.sum()).backward()


def test_missing_hooks():
    class Nothing(ops.BasicOperation):
        pass

    class WithExtra(Affine):
        num_extra_inputs = 1

    with pytest.raises(NotImplementedError, match="Nothing: op_forward"):
        Nothing()(leaf(4, 8))
    with pytest.raises(RuntimeError, match="override fuser_forward"):
        WithExtra()(leaf(4, 8), leaf(4, 8))


# ---------------------------------------------------------------------------- compiled


def test_hooks_are_traced(dynamo):
    class TracedAffine(Affine):
        pass

    class TracedMix(Mix):
        pass

    model = ops.Sequential(
        ops.MakeExtraOutput().set_extra_output_channel(0, "r", output_to_caller=False),
        ops.Linear(16, 16, bias=False),
        TracedAffine(16),
        TracedMix().set_extra_input_channel(0, "r"),
        ops.Linear(16, 16),
    )
    x, log = leaf(16, 16), GraphLog()
    compiled = torch.compile(model, fullgraph=True, backend=log)

    def step(call):
        model.zero_grad()
        x.grad = None
        with bridge.autocast(recipe=CURRENT):
            outputs = call(x, op_kwargs={2: {"power": 3}})
        backward(outputs)
        return [*outputs, x.grad, *[p.grad.clone() for p in model.parameters()]]

    expected = step(model)
    warning = bridge.CompileEagerFallbackWarning
    with pytest.warns(warning, match="TracedMix"), pytest.warns(warning, match="TracedAffine"):
        got = step(compiled)
    assert_same_bits(got, expected)
    assert (graph_count(dynamo), break_count(dynamo)) == (1, 0)
    assert "basiclinear_forward" in " ".join(log.custom_ops())


def test_hooks_alone_are_traced(dynamo):
    class AloneAffine(Affine):
        pass

    op, x = AloneAffine(), leaf(4, 8)
    with pytest.warns(bridge.CompileEagerFallbackWarning, match="AloneAffine"):
        y = torch.compile(op, fullgraph=True, backend="aot_eager")(x, power=2)
    backward(y)
    got = [y, x.grad.clone(), op.scale.grad.clone()]
    op.zero_grad()
    x.grad = None
    y = op(x, power=2)
    backward(y)
    assert_same_bits(got, [y, x.grad, op.scale.grad])
    assert (graph_count(dynamo), break_count(dynamo)) == (1, 0)


def test_changed_built_in_ops_are_traced(dynamo):
    model, x = ops.Sequential(ops.BasicLinear(8, 8), Louder()), leaf(4, 8)
    expected = model(x)
    with pytest.warns(bridge.CompileEagerFallbackWarning, match="Louder"):
        y = torch.compile(model, fullgraph=True, backend="aot_eager")(x)
    assert_same_bits(y, expected)
    y.sum().backward()
    got, x.grad = x.grad, None
    expected.sum().backward()
    assert_same_bits(got, x.grad)
    assert (graph_count(dynamo), break_count(dynamo)) == (1, 0)


def test_hooks_that_cannot_be_traced(dynamo):
    class Untraceable(Affine):
        def op_forward(self, ctx, input_, **kwargs):
            torch._dynamo.graph_break()
            return super().op_forward(ctx, input_, **kwargs)

    model, x = ops.Sequential(Untraceable(), ops.GELU()), leaf(4, 8)
    unsupported = pytest.raises(torch._dynamo.exc.Unsupported)
    with pytest.warns(bridge.CompileEagerFallbackWarning, match="pass one to BasicOperation.__init__"), unsupported:
        torch.compile(model, fullgraph=True, backend="aot_eager")(x)


class GainModule(ops.BasicOperation):
    """Has a functional op with bundles, and hooks of the same math that eager code runs."""

    def __init__(self):
        super().__init__(op=Gain(8))
        self.calls = []

    def op_forward(self, ctx, input_, **unused):
        self.calls.append("forward")
        ctx.save_for_backward(input_)
        return input_ * self.gain + 1

    def op_backward(self, ctx, grad_output):
        self.calls.append("backward")
        (x,) = ctx.saved_tensors
        return grad_output * self.gain, ((grad_output * x).sum(0),)


def test_an_op_with_bundles_runs_its_custom_op_when_compiled(dynamo):
    model, x, log = ops.Sequential(ops.Linear(8, 8, bias=False), GainModule(), ops.GELU()), leaf(4, 8), GraphLog()
    y = model(x)
    backward(y)
    expected = [y, x.grad, *[p.grad.clone() for p in model.parameters()]]
    assert model[1].calls == ["forward", "backward"]
    model.zero_grad()
    x.grad = None
    y = torch.compile(model, fullgraph=True, backend=log)(x)
    backward(y)
    for got, want in zip([y, x.grad, *[p.grad for p in model.parameters()]], expected, strict=True):
        torch.testing.assert_close(got, want)
    assert model[1].calls == ["forward", "backward"]
    assert {"gain_forward", "gain_backward"} <= set(log.custom_ops())
    assert (graph_count(dynamo), break_count(dynamo)) == (1, 0)
    assert isinstance(model[1].op, fte.ops.Op)


class _Prints(ops.BasicOperation):
    """A hook that Dynamo leaves the graph for."""

    def op_forward(self, ctx, input_, **kwargs):
        torch._dynamo.graph_break()
        ctx.save_for_backward(input_)
        return input_ * 2

    def op_backward(self, ctx, grad_output):
        (x,) = ctx.saved_tensors
        assert x.shape == grad_output.shape
        return grad_output * 2, ()


def test_a_graph_may_be_broken_inside_of_a_hook(dynamo):
    x = torch.randn(4, 4, requires_grad=True)
    model = ops.Sequential(ops.Identity(), _Prints(), ops.ReLU())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        y = torch.compile(model, backend="eager")(x)
        y.sum().backward()
    torch.testing.assert_close(x.grad, 2.0 * (x > 0))


@pytest.mark.parametrize(
    ("forward", "backward", "said"),
    [
        (lambda x: 5, None, "output: expected a tensor, got a int"),
        (lambda x: (x, x), None, "output: expected a tensor, got a tuple of 2"),
        (lambda x: x * 2, lambda g: g, "op_backward: expected .*, got a Tensor"),
        (lambda x: x * 2, lambda g: (1.0, ()), "input gradient: expected a tensor, got a float"),
        (lambda x: x * 2, lambda g: (g, g), "parameter gradients of basic op 0: expected a list, got a Tensor"),
    ],
    ids=["number", "tuple", "bare gradient", "number as gradient", "tensor as list"],
)
def test_results_of_the_wrong_kind(forward, backward, said):
    class Odd(ops.BasicOperation):
        def op_forward(self, ctx, input_, **kwargs):
            return forward(input_)

        def op_backward(self, ctx, grad_output):
            return backward(grad_output)

    with pytest.raises(RuntimeError, match=f"Odd: {said}"):
        Odd()(torch.ones(2, 2, requires_grad=True)).sum().backward()
