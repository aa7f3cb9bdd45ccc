"""Every basic op against its float64 formula and autograd of it: functional, eager bridge, compiled bridge."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import bridge
import functional_te as fte
from functional_te import pytree
from functional_te.ops import Activation
from tests import oracles
from tests.helpers import (
    DTYPES,
    FLOATING_OPS,
    assert_close,
    assert_same,
    double,
    extra_shape,
    random_params,
    require_grad,
    unchanged,
    uniform,
)

# configurations beyond the tiny examples of the table
VARIANTS = (
    (fte.LayerNorm(8, eps=0.3, zero_centered_gamma=True), 8),
    (fte.RMSNorm((2, 8), eps=0.3, zero_centered_gamma=True), 8),
    (fte.LayerNorm((2, 8)), 8),
    (fte.AdaptiveLayerNorm(8, eps=0.3, batch_dim=1), 8),
    (fte.L2Normalization(eps=0.3), 8),
    (fte.Quantize(forward=False, backward=True), 8),
    (fte.SwiGLU(glu_interleave_size=4), 16),
    (fte.SiTUGLU(beta1=0.5, beta2=0.75, glu_interleave_size=2), 16),
    (fte.ClampedSwiGLU(limit=0.5, alpha=1.1, glu_linear_offset=0.25, glu_interleave_size=8), 16),
    (fte.ConstantScale(0.0), 8),
    (fte.ConstantScale(-2.5), 8),
    (fte.Reshape((2, -1, 2)), 8),
    (fte.AddExtraInput(in_place=True), 8),
    (fte.MakeExtraOutput(in_place=True), 8),
    (fte.ScaledSwiGLU(32), 64),
    (fte.ScaledSiTUGLU(beta1=0.5, beta2=0.75), 16),
    (fte.ScaledClampedQGeGLU(32, 0.5, 1.1, 0.25), 128),
)
ALL = (*FLOATING_OPS, *VARIANTS)
IDS = [f"{i}-{type(op).__name__}" for i, (op, _) in enumerate(ALL)]
every_op = pytest.mark.parametrize(("op", "last"), ALL, ids=IDS)


def leading_shapes(op: fte.Op) -> list[tuple[int, ...]]:
    """1-D to 4-D, as far as the op takes them."""
    if len(getattr(op, "normalized_shape", ())) == 2:
        return [(2,), (3, 2), (2, 1, 2)]
    if isinstance(op, fte.AdaptiveLayerNorm):
        return [(3,), (2, 5), (2, 2, 3)][op.batch_dim :]
    return [(), (3,), (2, 5), (2, 1, 3)]


def arguments(op: fte.Op, shape: tuple[int, ...], dtype: torch.dtype):
    """Parameters, main input and extra inputs."""
    extras = tuple(uniform(extra_shape(op, shape), dtype, 7 + slot) for slot in range(op.num_extra_inputs))
    return random_params(op, dtype), uniform(shape, dtype, 1), extras


def expected_of(op: fte.Op, params, x, extras, cotangents_of):
    """Outputs and gradients of the float64 formula: (outputs, dx, dparams, dextras)."""
    params, x, extras = double((params, x, extras))
    output, made = oracles.reference(op, x, params[0], extras)
    outputs = (output, *made)
    cotangents = cotangents_of(outputs)
    inputs = [x, *params[0].values(), *extras]
    grads = torch.autograd.grad(outputs, inputs, [c.double() for c in cotangents])
    count = len(params[0])
    return outputs, grads[0], dict(zip(params[0], grads[1 : 1 + count], strict=True)), grads[1 + count :]


def cotangents_like(dtype: torch.dtype):
    return lambda outputs: [uniform(out.shape, dtype, 20 + i) for i, out in enumerate(outputs)]


def check(outputs, dx, dparams, dextras, expected, dtype: torch.dtype) -> None:
    want_outputs, want_dx, want_params, want_extras = expected
    for i, (out, want) in enumerate(zip(outputs, want_outputs, strict=True)):
        assert out.dtype is dtype
        assert_close(out, want, dtype, f"output {i}")
    assert dx.dtype is dtype
    assert_close(dx, want_dx, dtype, "dx")
    assert dparams.keys() == want_params.keys()
    for name, want in want_params.items():
        assert dparams[name].dtype is dtype
        assert_close(dparams[name], want, dtype, f"d{name}")
    for i, (grad, want) in enumerate(zip(dextras, want_extras, strict=True)):
        assert_close(grad, want, dtype, f"dextra {i}")


def through_vjp(op: fte.Op, params, x, extras, cotangents):
    with unchanged((params, x, extras, cotangents)):
        result = fte.apply(op, params, x, *extras)
        again, pullback = fte.vjp(op, params, x, *extras)
        grads = pullback(*cotangents)
    assert_same((result.output, result.extra_outputs), (again.output, again.extra_outputs))
    assert grads.state is None
    return (result.output, *result.extra_outputs), grads.input, grads.params[0], grads.extra_inputs


def bridged(op: fte.Op | fte.Chain):
    """The bridge's call as a function of tensors only; a tuple of outputs."""

    def call(params, x, *extras):
        out, _ = bridge.apply(op, params, x, *extras)
        return out if isinstance(out, tuple) else (out,)

    return call


def through_autograd(call, params, x, extras, cotangents):
    params, x, extras = require_grad((params, x, extras))
    with unchanged((params, x, extras, cotangents)):
        outputs = call(params, x, *extras)
        torch.autograd.backward(outputs, cotangents)
    return (
        tuple(out.detach() for out in outputs),
        x.grad,
        {name: p.grad for name, p in params[0].items()},
        tuple(extra.grad for extra in extras),
    )


@pytest.mark.parametrize("dtype", DTYPES)
@every_op
def test_functional_and_eager_match_the_formula(op: fte.Op, last: int, dtype: torch.dtype) -> None:
    for leading in leading_shapes(op):
        params, x, extras = arguments(op, (*leading, last), dtype)
        expected = expected_of(op, params, x, extras, cotangents_like(dtype))
        cotangents = cotangents_like(dtype)(expected[0])
        check(*through_vjp(op, params, x, extras, cotangents), expected, dtype)
        check(*through_autograd(bridged(op), params, x, extras, cotangents), expected, dtype)


# one op per implementation: the other activations differ in a constant of the bundle
DISTINCT = tuple(
    (op, last)
    for op, last in FLOATING_OPS
    if not isinstance(op, Activation) or isinstance(op, fte.GELU | fte.SwiGLU | fte.SiTUGLU)
)


@pytest.mark.parametrize(
    "table", [DISTINCT, pytest.param(FLOATING_OPS, marks=pytest.mark.slow)], ids=["distinct", "all"]
)
def test_compiled_equals_eager_bit_for_bit(table, dynamo) -> None:
    """Ops in one compiled function, which is cheaper than one compilation each."""
    chains = [fte.chain(op) for op, _ in table]
    inputs = tuple(arguments(op, (2, 1, 3, last), torch.float32) for op, last in table)

    def call(bundles):
        return [bridged(block)(params, x, *extras) for block, (params, x, extras) in zip(chains, bundles, strict=True)]

    def both_directions(function):
        bundles = require_grad(inputs)
        outputs = pytree.leaves(function(bundles))
        torch.autograd.backward(outputs, cotangents_like(torch.float32)(outputs))
        return [out.detach() for out in outputs], [leaf.grad for leaf in pytree.leaves(bundles)]

    eager = both_directions(call)
    compiled = both_directions(torch.compile(call, fullgraph=True, backend="aot_eager"))
    assert_same(compiled, eager)
    assert dynamo["stats"]["unique_graphs"] == 1


def test_one_compiled_function_takes_several_chains(dynamo) -> None:
    """Another chain is another graph, not an error."""
    compiled = torch.compile(lambda block, x: bridge.apply(block, ({},), x)[0], fullgraph=True, backend="aot_eager")
    x = uniform((3, 8))
    for op in (fte.GELU(), fte.SiLU(), fte.ReLU(), fte.GELU()):
        assert_same(compiled(fte.chain(op), x), fte.apply(op, ({},), x).output)
    assert dynamo["stats"]["unique_graphs"] == 3


def test_compiled_call_of_a_bare_op(dynamo) -> None:
    """``bridge.apply`` takes a chain or an op, compiled too."""
    op, x = fte.GELU(), uniform((3, 8))
    eager = through_autograd(bridged(op), ({},), x, (), [torch.ones(3, 8)])
    compiled = torch.compile(bridged(op), fullgraph=True, backend="aot_eager")
    assert_same(through_autograd(compiled, ({},), x, (), [torch.ones(3, 8)]), eager)


@pytest.mark.parametrize("leading", [(0,), (2, 0), (0, 3)])
@every_op
def test_no_rows(op: fte.Op, last: int, leading: tuple[int, ...]) -> None:
    if len(getattr(op, "normalized_shape", ())) == 2 or getattr(op, "batch_dim", 0) == 1:
        leading = (*leading, 2)
    if isinstance(op, fte.Reshape):
        op = fte.Reshape((0, -1, 4)) if leading[0] == 0 else fte.Reshape((-1, 4))
        if op.shape[0] == 0:  # -1 beside 0 has no meaning, in torch either
            with pytest.raises(ValueError, match=r"op 0 \(Reshape\): input"):
                fte.apply(op, ({},), torch.zeros(*leading, last))
            return
    params, x, extras = arguments(op, (*leading, last), torch.float32)
    expected = expected_of(op, params, x, extras, cotangents_like(torch.float32))
    cotangents = cotangents_like(torch.float32)(expected[0])
    check(*through_vjp(op, params, x, extras, cotangents), expected, torch.float32)
    check(*through_autograd(bridged(op), params, x, extras, cotangents), expected, torch.float32)


def strided(tensor: torch.Tensor, how: str) -> torch.Tensor:
    """A non-contiguous tensor: transposed storage, every second column of a wider one, or rows that are one row."""
    if how == "transposed":
        return tensor.transpose(0, -1).contiguous().transpose(0, -1)
    if how == "sliced":
        return torch.stack((tensor, tensor + 1), -1).flatten(-2)[..., ::2]
    return tensor[:1].expand(tensor.shape)


@pytest.mark.parametrize("how", ["transposed", "sliced", "expanded"])
@every_op
def test_strided_inputs_and_gradients(op: fte.Op, last: int, how: str) -> None:
    params, x, extras = arguments(op, (3, 2, last), torch.float32)
    x, *extras = (strided(t, how) for t in (x, *extras))
    assert not x.is_contiguous()

    def cotangents_of(outputs):
        return [strided(c, how) for c in cotangents_like(torch.float32)(outputs)]

    expected = expected_of(op, params, x, tuple(extras), cotangents_of)
    cotangents = cotangents_of(expected[0])
    check(*through_vjp(op, params, x, tuple(extras), cotangents), expected, torch.float32)
    leaves = require_grad((params, x.contiguous(), tuple(e.contiguous() for e in extras)))
    views = [t.detach().as_strided(s.shape, s.stride()) for t, s in zip((x, *extras), (x, *extras), strict=True)]
    views = [v.requires_grad_() for v in views]
    outputs = bridged(op)(leaves[0], *views)
    torch.autograd.backward(outputs, cotangents)
    check(
        tuple(out.detach() for out in outputs),
        views[0].grad,
        {name: p.grad for name, p in leaves[0][0].items()},
        tuple(v.grad for v in views[1:]),
        expected,
        torch.float32,
    )


@st.composite
def requests(draw):
    """An op and which of its inputs need a gradient: (op, last, input, params, extras)."""
    op, last = draw(st.sampled_from(ALL))
    return (
        op,
        last,
        draw(st.booleans()),
        tuple(draw(st.booleans()) for _ in op.param_names),
        tuple(draw(st.booleans()) for _ in range(op.num_extra_inputs)),
    )


@given(request=requests())
def test_only_requested_gradients(request) -> None:
    op, last, wants_x, wants_params, wants_extras = request
    params, x, extras = arguments(op, (3, 2, last), torch.float32)
    full = expected_of(op, params, x, extras, cotangents_like(torch.float32))
    cotangents = cotangents_like(torch.float32)(full[0])
    _, pullback = fte.vjp(op, params, x, *extras, requires_grad=(wants_x, (wants_params,), wants_extras))
    grads = pullback(*cotangents)
    found = [grads.input, *grads.params[0].values(), *grads.extra_inputs]
    wanted = [wants_x, *wants_params, *wants_extras]
    expected = [full[1], *full[2].values(), *full[3]]
    for want, grad, reference in zip(wanted, found, expected, strict=True):
        if want:
            assert_close(grad, reference, torch.float32)
        else:
            assert grad is None

    leaves = [
        t.detach().clone().requires_grad_(w) for t, w in zip((x, *params[0].values(), *extras), wanted, strict=True)
    ]
    named = (dict(zip(params[0], leaves[1 : 1 + len(params[0])], strict=True)),)
    outputs = bridged(op)(named, leaves[0], *leaves[1 + len(params[0]) :])
    assert [out.requires_grad for out in outputs] == [any(wanted)] * len(outputs)
    if any(wanted):
        torch.autograd.backward(outputs, cotangents)
    for want, leaf, reference in zip(wanted, leaves, expected, strict=True):
        if want:
            assert_close(leaf.grad, reference, torch.float32)
        else:
            assert leaf.grad is None


@every_op
def test_absent_gradient_of_an_extra_output_counts_as_zeros(op: fte.Op, last: int) -> None:
    if not op.num_extra_outputs:
        assert len(fte.chain(op).extra_outputs) == 0
        return
    params, x, extras = arguments(op, (3, last), torch.float32)
    result, pullback = fte.vjp(op, params, x, *extras)
    dy = torch.randn_like(result.output)
    zeros = [torch.zeros_like(out) for out in result.extra_outputs]
    assert_same(pullback(dy).input, pullback(dy, *zeros).input)
    assert_same(pullback(dy, None).input, pullback(dy, *zeros).input)


@every_op
def test_gradients_of_two_inputs_are_two_tensors(op: fte.Op, last: int) -> None:
    """Writing into one .grad may not change another, nor the incoming gradient."""
    params, x, extras = arguments(op, (3, 2, last), torch.float32)
    call = bridged(op)
    cotangents = cotangents_like(torch.float32)([o.detach() for o in call(params, x, *extras)])
    _, dx, dparams, dextras = through_autograd(call, params, x, extras, cotangents)
    tensors = [dx, *dparams.values(), *dextras]
    if not isinstance(op, fte.Reshape):  # torch's own reshape hands a view of the incoming gradient to .grad as well
        tensors.extend(cotangents)
    pointers = [t.untyped_storage().data_ptr() for t in tensors]
    assert len(set(pointers)) == len(pointers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "op",
    [op for op, _ in FLOATING_OPS if isinstance(op, fte.GELU | fte.SwiGLU | fte.ReGLU)],
    ids=lambda op: type(op).__name__,
)
def test_cached_quantized_input(op, dtype: torch.dtype) -> None:
    """The forward is exact; the backward sees the input through E4M3."""
    cached = type(op)(cache_quantized_input=True)
    x = uniform((4, 16), dtype)
    result, pullback = fte.vjp(cached, ({},), x)
    assert_same(result.output, fte.apply(op, ({},), x).output)
    dy = uniform(result.output.shape, dtype, 3)
    seen = fte.dequantize(fte.quantize(x, fte.Float8CurrentScalingQuantizer(dtype=torch.float8_e4m3fn)))
    assert not torch.equal(seen, x)
    x64 = double(seen)
    (want,) = torch.autograd.grad(oracles.reference(op, x64, {})[0], x64, dy.double())
    assert_close(pullback(dy).input, want, dtype)
