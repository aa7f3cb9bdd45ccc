"""A linear layer in every recipe, forward and backward, against float64 products of independently decoded copies."""

import dataclasses

import pytest
import torch

import bridge
import functional_te as fte
from functional_te import pytree
from functional_te.quantization import QuantizedTensor
from tests.every_recipe import (
    OVERRIDES,
    VARIANTS,
    feed_forward,
    quantized,
    quantizer_of,
    values64,
    with_biases,
    with_state,
)
from tests.helpers import assert_same, clone, unchanged
from tests.oracles import snr

IN, OUT = 160, 96  # multiples of 32, none of 128
LINEAR = fte.BasicLinear(IN, OUT)
STATELESS = {name: recipe for name, recipe in VARIANTS.items() if "delayed" not in name}
every_recipe = pytest.mark.parametrize("recipe", VARIANTS.values(), ids=VARIANTS)


every_override = pytest.mark.parametrize("override", OVERRIDES)
both_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def data(shape, dtype=torch.float32, seed=0):
    """Normal values with a few large ones, so that blocks differ."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    return (x * torch.exp(torch.randn(shape, generator=generator))).to(dtype)


def arguments(leading, dtype=torch.float32):
    params = ({"weight": data((OUT, IN), dtype, 1) / 12},)
    return params, data((*leading, IN), dtype, 2), 0.01 * data((*leading, OUT), dtype, 3)


def rows(x):
    return x.reshape(-1, x.shape[-1])


def operand(x, recipe, role, state, columnwise):
    """Float64 matrix of what a product reads, and whether it was cast."""
    quantizer = quantizer_of(recipe, role)
    if quantizer is None:
        return rows(x).double(), False
    own = state[0].get(role) if state is not None else None
    return values64(quantized(x, quantizer, own), columnwise), True


def assert_product(found, left, right, dtype, what):
    """``found`` is ``left @ right`` but for float32 accumulation and one rounding to ``dtype``.

    If only one operand was cast, the product runs on operands in ``dtype``.
    """
    (left, left_cast), (right, right_cast) = left, right
    allowed = 1e-5
    if left_cast != right_cast:
        left, right = left.to(dtype).double(), right.to(dtype).double()
        allowed = max(allowed, torch.finfo(dtype).eps / 2)  # some are rounded to the other neighbour
    if left.shape[1] != right.shape[0]:  # a format pads tokens with zeros
        missing = left.shape[1] - right.shape[0]
        left = torch.nn.functional.pad(left, (0, max(0, -missing)))
        right = torch.nn.functional.pad(right, (0, 0, 0, max(0, missing)))
    exact = left @ right
    bound = allowed * (left.abs() @ right.abs()) + torch.finfo(dtype).eps * exact.abs() + 1e-30
    assert found.dtype is dtype, what
    error = (rows(found).double() - exact).abs()
    assert rows(found).shape == exact.shape, what
    assert (error <= bound).all(), (what, (error / bound).max())


def check_linear(recipe, params, x, dy, dtype, state):
    with unchanged((params, x, dy, state)):
        result, pullback = fte.vjp(LINEAR, params, x, recipe=recipe, state=state)
        grads = pullback(dy)
    w = params[0]["weight"]
    assert result.output.shape == dy.shape
    assert grads.input.shape == x.shape

    def read(role, value, columnwise):
        matrix, cast = operand(value, recipe, role, state, columnwise)
        return matrix, cast

    def turned(pair):
        return pair[0].t(), pair[1]

    assert_product(result.output, read("input", x, False), turned(read("weight", w, False)), dtype, "y")
    assert_product(grads.input, read("grad_output", dy, False), read("weight", w, True), dtype, "dx")
    gradient = grads.params[0]["weight"]
    assert_product(gradient, turned(read("grad_output", dy, True)), read("input", x, True), dtype, "dw")


PRODUCTS = [
    pytest.param(
        recipe,
        dtype,
        id=f"{name}-{dtype}",
    )
    for name, recipe in VARIANTS.items()
    for dtype in (torch.float32, torch.bfloat16)
]


@pytest.mark.parametrize(("recipe", "dtype"), PRODUCTS)
def test_products(recipe, dtype) -> None:
    """Tokens that no block divides: all products are of the copies that reduce over their last dimension."""
    state = with_state(LINEAR, recipe, *arguments((64,), dtype))
    for tokens in (1, 17, 33, 130):
        check_linear(recipe, *arguments((tokens,), dtype), dtype, state)


@every_recipe
def test_leading_dimensions(recipe) -> None:
    """The result is that of the matrix of all tokens, reshaped."""
    params, x, dy = arguments((66,))
    state = with_state(LINEAR, recipe, params, x, dy)
    flat, pullback = fte.vjp(LINEAR, params, x, recipe=recipe, state=state)
    flat_grads = pullback(dy)
    for leading in ((2, 3, 11), (1, 66), (66, 1)):
        result, pullback = fte.vjp(LINEAR, params, x.reshape(*leading, IN), recipe=recipe, state=state)
        grads = pullback(dy.reshape(*leading, OUT))
        assert_same(result.output, flat.output.reshape(*leading, OUT))
        assert_same(grads.input, flat_grads.input.reshape(*leading, IN))
        assert_same((grads.params, grads.state), (flat_grads.params, flat_grads.state))
    one, pullback = fte.vjp(LINEAR, params, x[0], recipe=recipe, state=state)
    row, row_pullback = fte.vjp(LINEAR, params, x[:1], recipe=recipe, state=state)
    assert_same(one.output, row.output[0])
    assert_same(pullback(dy[0]).params, row_pullback(dy[:1]).params)


@every_recipe
def test_strides_do_not_matter(recipe) -> None:
    params, x, dy = arguments((32,))
    state = with_state(LINEAR, recipe, params, x, dy)
    w = params[0]["weight"]
    turned = [t.t().contiguous().t() for t in (w, x, dy)]
    assert not any(t.is_contiguous() for t in turned)
    result, pullback = fte.vjp(LINEAR, params, x, recipe=recipe, state=state)
    found, found_pullback = fte.vjp(LINEAR, ({"weight": turned[0]},), turned[1], recipe=recipe, state=state)
    assert_same(found, result)
    assert_same(found_pullback(turned[2]), pullback(dy))


@every_recipe
@pytest.mark.parametrize("leading", [(0,), (2, 0, 3)], ids=str)
def test_no_tokens(recipe, leading) -> None:
    params, x, dy = arguments(leading)
    state = fte.init_state(LINEAR, recipe)
    result, pullback = fte.vjp(LINEAR, params, x, recipe=recipe, state=state)
    grads = pullback(dy)
    assert result.output.shape == (*leading, OUT)
    assert grads.input.shape == (*leading, IN)
    assert_same(grads.params[0]["weight"], torch.zeros(OUT, IN))
    after = fte.update_state(LINEAR, recipe, grads.state)
    for role in ("input", "grad_output"):
        assert_same(after[0].get(role), state[0].get(role))  # nothing was observed


@every_recipe
def test_what_needs_no_gradient_changes_nothing_else(recipe) -> None:
    """Fewer copies are made; those that are made hold the same bits."""
    params, x, dy = arguments((17,))
    state = with_state(LINEAR, recipe, params, x, dy)
    full, pullback = fte.vjp(LINEAR, params, x, recipe=recipe, state=state)
    full_grads = pullback(dy)
    for needs_x, needs_w in ((True, False), (False, True)):
        pattern = (needs_x, ((needs_w,),), ())
        result, pullback = fte.vjp(LINEAR, params, x, recipe=recipe, state=state, requires_grad=pattern)
        grads = pullback(dy)
        assert_same(result.output, full.output)
        assert_same(grads.input, full_grads.input if needs_x else None)
        assert_same(grads.params[0]["weight"], full_grads.params[0]["weight"] if needs_w else None)
    assert_same(fte.apply(LINEAR, params, x, recipe=recipe, state=state).output, full.output)


@every_recipe
def test_fused_and_not(recipe) -> None:
    """Bias, activation and residual beside the product, in one launch or in several."""
    block = with_biases()
    params = fte.init(block, seed=4)
    x, dy = data((24, 32), seed=5), data((24, 32), seed=6)
    state = with_state(block, recipe, params, x, dy)
    results = []
    for fusions in (None, fte.Fusions()):
        result, pullback = fte.vjp(block, params, x, recipe=recipe, state=state, fusions=fusions)
        results.append((result.output, pullback(dy)))
    assert results[0][0].shape == (24, 32)
    for one, other in zip(pytree.leaves(results[0]), pytree.leaves(results[1]), strict=True):
        if one.dtype is not torch.int64:  # a key
            # where a fusion casts a value that it has not rounded first, some elements differ by a step of the format
            assert snr(one, other) > 25


# ---- operands that come in quantized -----------------------------------------------------------------------------


STATELESS_CASES = [pytest.param(recipe, id=name) for name, recipe in STATELESS.items()]


@pytest.mark.parametrize("recipe", STATELESS_CASES)
def test_operands_that_are_quantized_already(recipe) -> None:
    """They are used as they are, and give the same bits."""
    check_given(recipe)


def check_given(recipe):
    params, x, dy = arguments((33,))
    w = params[0]["weight"]
    state = fte.init_state(LINEAR, recipe)
    expected, pullback = fte.vjp(LINEAR, params, x, recipe=recipe, state=state)
    expected_grads = pullback(dy)
    of_x, of_w = quantizer_of(recipe, "input"), quantizer_of(recipe, "weight")
    given_x = x if of_x is None else quantized(x, of_x)
    given_w = w if of_w is None else quantized(w, of_w)
    result, pullback = fte.vjp(LINEAR, ({"weight": given_w},), given_x, recipe=recipe, state=state)
    grads = pullback(dy)
    assert_same(result.output, expected.output)
    assert_same((grads.input, grads.params), (expected_grads.input, expected_grads.params))


@pytest.mark.parametrize("name", ["current", "block", "mxfp8", "nvfp4", "mixed"])
def test_operands_that_are_quantized_already_and_an_override(name) -> None:
    """The backward reads the values of the rowwise copies, whichever copies there are."""
    check_given(dataclasses.replace(VARIANTS[name], backward_override="dequantized"))


def test_without_a_recipe_quantized_operands_are_read_as_values() -> None:
    params, x, dy = arguments((17,))
    recipe = VARIANTS["mxfp8"]
    q = quantized(params[0]["weight"], quantizer_of(recipe, "weight", both=False))
    result, pullback = fte.vjp(LINEAR, ({"weight": q},), x)
    expected, expected_pullback = fte.vjp(LINEAR, ({"weight": q.dequantize()},), x)
    assert_same(result.output, expected.output)
    assert_same(pullback(dy).input, expected_pullback(dy).input)


# ---- backward_override -------------------------------------------------------------------------------------------

OVERRIDABLE = {name: recipe for name, recipe in STATELESS.items() if name != "hybrid"}
every_overridable = pytest.mark.parametrize("recipe", OVERRIDABLE.values(), ids=OVERRIDABLE)


@every_overridable
@every_override
@both_dtypes
def test_override_keeps_the_forward(recipe, override, dtype) -> None:
    for block, leading in ((LINEAR, (33, IN)), (feed_forward(), (17, 32)), (with_biases(), (17, 32))):
        params, x = fte.init(block, seed=1, dtype=dtype), data(leading, dtype)
        expected = fte.apply(block, params, x, recipe=recipe, state=fte.init_state(block, recipe)).output
        changed = dataclasses.replace(recipe, backward_override=override)
        state = fte.init_state(block, changed)
        assert not any(state)  # gradients are never cast, so nothing is rounded stochastically
        result, _ = fte.vjp(block, params, x, recipe=changed, state=state)
        assert_same(result.output, expected)


@every_overridable
@both_dtypes
def test_override_high_precision(recipe, dtype) -> None:
    """The gradients of a plain linear layer."""
    params, x, dy = arguments((2, 17), dtype)
    _, pullback = fte.vjp(LINEAR, params, x, recipe=dataclasses.replace(recipe, backward_override="high_precision"))
    grads = pullback(dy)
    plain_x, plain_w = clone((x, params[0]["weight"]))
    torch.nn.functional.linear(plain_x.requires_grad_(), plain_w.requires_grad_()).backward(dy)
    torch.testing.assert_close(grads.input, plain_x.grad, rtol=0, atol=0)
    torch.testing.assert_close(grads.params[0]["weight"], plain_w.grad, rtol=0, atol=0)


@every_overridable
@both_dtypes
def test_override_dequantized(recipe, dtype) -> None:
    """``dx = dy @ w`` and ``dw = dy.T @ x`` in the compute dtype, with the values of the rowwise copies."""
    params, x, dy = arguments((2, 17), dtype)
    _, pullback = fte.vjp(LINEAR, params, x, recipe=dataclasses.replace(recipe, backward_override="dequantized"))
    grads = pullback(dy)
    read = {}
    for role, value in (("input", x), ("weight", params[0]["weight"])):
        matrix, cast = operand(value, recipe, role, None, False)
        read[role] = matrix.float().to(dtype).double(), cast  # rounded once from float32
    gradient = rows(dy).double(), False
    assert_product(grads.input, gradient, (read["weight"][0], False), dtype, "dx")
    turned = gradient[0].t(), False
    assert_product(grads.params[0]["weight"], turned, (read["input"][0], False), dtype, "dw")


@every_override
@pytest.mark.parametrize("name", ["current", "block", "mxfp8", "nvfp4"])
def test_override_in_a_chain(name, override) -> None:
    """Gradients of a block are nearer to those in high precision than with casts in the backward."""
    block, recipe = feed_forward(), VARIANTS[name]
    params, x, dy = fte.init(block, seed=3), data((32, 32)), data((32, 32), seed=4)
    _, pullback = fte.vjp(block, params, x)
    exact = pullback(dy)
    found = {}
    for changed in (None, override):
        own = dataclasses.replace(recipe, backward_override=changed)
        _, pullback = fte.vjp(block, params, x, recipe=own, state=fte.init_state(block, own))
        grads = pullback(dy)
        found[changed] = snr(grads.params[2]["weight"], exact.params[2]["weight"])
    assert found[override] > found[None] + 1


# ---- what is kept for the backward ---------------------------------------------------------------------------------

TOKENS = 48
# bytes of the copies that the backward reads of input and weight: data, scales, amax
SAVED = {
    "current": (TOKENS * IN + 4, OUT * IN + 4),
    "block": (IN * TOKENS + 4 * IN * 1, OUT * IN + 4 * 1 * 2),
    "block x 2-D": (TOKENS * IN + 4 * 1 * 2, IN * OUT + 4 * IN * 1),
    "mxfp8": (IN * TOKENS + IN * 2, IN * OUT + IN * 3),
    "mxfp8 2-D": (IN * TOKENS + IN * 2, OUT * IN + 3 * 5),
    "nvfp4": (IN * TOKENS // 2 + IN * 3 + 4, OUT * IN // 2 + 6 * 10 + 4),
    "nvfp4 1-D": (IN * TOKENS // 2 + IN * 3 + 4, IN * OUT // 2 + IN * 6 + 4),
    "delayed": (TOKENS * IN + 4, OUT * IN + 4),
    "mixed": (TOKENS * IN + 4, IN * OUT + IN * 3),
    "hybrid": (IN * TOKENS + 4 * IN, IN * OUT // 2 + IN * 6 + 4),
}
ROWWISE = {
    "block": (TOKENS * IN + 4 * TOKENS * 2, OUT * IN + 4 * 1 * 2),
    "mxfp8": (TOKENS * IN + TOKENS * 5, OUT * IN + OUT * 5),
    "nvfp4": (TOKENS * IN // 2 + TOKENS * 10 + 4, OUT * IN // 2 + 6 * 10 + 4),
}


def saved_bytes(recipe, needs_x=True, needs_w=True):
    """Bytes that autograd keeps beside the operands themselves, and which of those it keeps."""
    params, x, _ = arguments((TOKENS,))
    w = params[0]["weight"]
    x.requires_grad_(needs_x)
    w.requires_grad_(needs_w)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        bridge.apply(LINEAR, params, x, recipe=recipe, state=fte.init_state(LINEAR, recipe))
    operands = {x.data_ptr(): "x", w.data_ptr(): "w"}
    fresh = {t.data_ptr(): t for t in kept if t.data_ptr() not in operands}
    assert all(t.untyped_storage().nbytes() == t.nbytes for t in fresh.values())  # nothing larger is kept alive
    return sum(t.nbytes for t in fresh.values()), sorted(
        operands[t.data_ptr()] for t in kept if t.data_ptr() in operands
    )


@pytest.mark.parametrize("name", SAVED)
def test_saved_bytes(name) -> None:
    """The copies that the two products of the backward read, and nothing in high precision."""
    of_x, of_w = SAVED[name]
    assert saved_bytes(VARIANTS[name]) == (of_x + of_w, [])
    assert saved_bytes(VARIANTS[name], needs_x=False) == (of_x, [])
    assert saved_bytes(VARIANTS[name], needs_w=False) == (of_w, [])


@pytest.mark.parametrize("name", ["plain input", "plain weight"])
def test_saved_bytes_beside_a_role_in_high_precision(name) -> None:
    kept, operands = saved_bytes(VARIANTS[name])
    assert operands == ["x" if name == "plain input" else "w"]
    assert kept == (IN * OUT + IN * 3 if name == "plain input" else IN * TOKENS // 2 + IN * 3 + 4)


@pytest.mark.parametrize("name", ROWWISE)
def test_saved_bytes_with_an_override(name) -> None:
    recipe = dataclasses.replace(VARIANTS[name], backward_override="high_precision")
    assert saved_bytes(recipe) == (0, ["w", "x"])
    recipe = dataclasses.replace(VARIANTS[name], backward_override="dequantized")
    assert saved_bytes(recipe) == (sum(ROWWISE[name]), [])


@every_recipe
def test_fakes_describe_what_is_made(recipe) -> None:
    """Shapes, dtypes and structure of results, without storage: what the compiler is told."""
    from functional_te.ops import OpRequiresGrad
    from functional_te.quantization.tensor import bind

    params, x, _ = arguments((17,))
    state = fte.init_state(LINEAR, recipe)
    quantizers = {}
    for role in ("input", "weight"):
        quantizer = quantizer_of(recipe, role)
        if quantizer is not None:
            quantizers[role] = bind(quantizer, state[0].get(role))
    args = LINEAR.resolve_fwd_args(
        x,
        params=params[0],
        state=quantizers,
        requires_grad=OpRequiresGrad(any=True, input=True, params=(True,)),
    )
    made = LINEAR.forward_impl(args)
    described = LINEAR.forward_fake(pytree.tree_map(lambda t: fte.TensorSpec(tuple(t.shape), t.dtype, t.device), args))
    one, spec = pytree.tree_flatten(made)
    other, described_spec = pytree.tree_flatten(described)
    assert spec == described_spec
    assert [(tuple(t.shape), t.dtype) for t in one] == [(tuple(t.shape), t.dtype) for t in other]
    assert any(isinstance(own, QuantizedTensor) for own in (made.aux.input_, made.aux.weight))
