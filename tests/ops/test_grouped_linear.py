"""GroupedLinear in high precision: formulas, sizes of groups as data, what is refused, modules, compiled calls."""

import pytest
import torch
from hypothesis import given

import bridge
import functional_te as fte
from functional_te.pipeline import backward_pass, forward_pass
from tests.bridge.compiled import graph_count
from tests.every_recipe import WHOLE
from tests.helpers import DTYPES, assert_close, assert_same, double, require_grad, unchanged, uniform
from tests.ops.grouped import formula, grouped_params, sizes_of_groups, slices
from tests.ops.test_fakes import Checked

OPS = (
    fte.GroupedLinear(3, 16, 24),
    fte.GroupedLinear(3, 5, 3),  # features that no grouped kernel takes
    fte.GroupedLinear(3, 16, 8, bias=False),
    fte.GroupedLinear(3, 16, 8, scale_bias=True),
    fte.GroupedLinear(3, 8, 16, single_weight=True, single_bias=True),
    fte.GroupedLinear(1, 8, 16, single_weight=True, scale_bias=True),
    fte.GroupedLinear(3, 5, 3, scale_bias=True, single_bias=True),
)
every_op = pytest.mark.parametrize("op", OPS, ids=range(len(OPS)))


def arguments(op, sizes, dtype=torch.float32, index=torch.int64):
    """Parameters, rows, sizes and scales."""
    rows = sum(sizes)
    scales = (positive((rows,), dtype, 3),) if op.num_extra_inputs == 2 else ()
    params = {name: positive(tuple(p.shape), dtype, i) for i, (name, p) in enumerate(grouped_params(op).items())}
    return params, positive((rows, op.in_features), dtype, 1), torch.tensor(sizes, dtype=index), scales


def positive(shape, dtype=torch.float32, seed=0):
    """Values in [0.25, 1.25), whose sums do not cancel."""
    return (uniform(shape, seed=seed) / 2 + 0.75).to(dtype)


def expected(op, params, x, scales, sizes, dy):
    """Output and gradients in float64: y, dx, {name: grad}, (ds,)."""
    params, x, scales = double((params, x, scales))
    y = formula(op, x, params, sizes, *scales)
    inputs = [x, *params.values(), *scales]
    grads = torch.autograd.grad(y, inputs, dy.double(), allow_unused=True, materialize_grads=True)
    return y, grads[0], dict(zip(params, grads[1 : 1 + len(params)], strict=True)), grads[1 + len(params) :]


def check(op, sizes, dtype, index=torch.int64) -> None:
    params, x, splits, scales = arguments(op, sizes, dtype, index)
    dy = positive((sum(sizes), op.out_features), dtype, 2)
    y, dx, dparams, dscales = expected(op, params, x, scales, sizes, dy)

    def compare(output, grad, grads, extras):
        assert output.dtype is dtype
        assert_close(output, y, dtype, "output")
        assert_close(grad, dx, dtype, "dx")
        for name, want in dparams.items():
            assert grads[name].dtype is dtype
            assert_close(grads[name], want, dtype, f"d{name}")
        for own, want in zip(extras, dscales, strict=True):
            assert own.dtype is dtype
            assert_close(own, want, dtype, "ds")

    with unchanged((params, x, splits, scales, dy)):
        result, pullback = fte.vjp(op, (params,), x, splits, *scales)
        grads = pullback(dy)
    assert grads.extra_inputs[0] is None
    compare(result.output, grads.input, grads.params[0], grads.extra_inputs[1:])
    params, x, scales = require_grad((params, x, scales))
    output, _ = bridge.apply(op, (params,), x, splits, *scales)
    output.backward(dy)
    compare(output.detach(), x.grad, {n: p.grad for n, p in params.items()}, [s.grad for s in scales])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@every_op
def test_formula(op, dtype) -> None:
    check(op, (5, 0, 7)[: op.num_groups], dtype)


@given(sizes=sizes_of_groups())
def test_any_sizes(sizes) -> None:
    for op in (OPS[0], OPS[6]):
        check(op, sizes, torch.float32)


@pytest.mark.parametrize("index", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64], ids=str)
def test_sizes_of_any_integer_dtype(index) -> None:
    check(OPS[0], (40, 100, 3), torch.float32, index)


def test_many_rows_in_one_group() -> None:
    """Sums over more rows than are added up at once."""
    check(fte.GroupedLinear(4, 8, 8), (300, 1, 0, 127), torch.float32)


@every_op
def test_leading_dimensions(op) -> None:
    sizes = (3, 9, 0) if op.num_groups == 3 else (12,)
    params, x, splits, scales = arguments(op, sizes)
    flat, pullback = fte.vjp(op, (params,), x, splits, *scales)
    shaped, shaped_pullback = fte.vjp(op, (params,), x.reshape(2, 6, -1), splits, *[s.reshape(2, 6) for s in scales])
    assert shaped.output.shape == (2, 6, op.out_features)
    assert_same(shaped.output.flatten(0, 1), flat.output)
    dy = uniform(flat.output.shape, seed=2)
    one, other = pullback(dy), shaped_pullback(dy.reshape(shaped.output.shape))
    assert_same(other.input.flatten(0, 1), one.input)
    assert_same(other.params, one.params)
    for left, right in zip(other.extra_inputs[1:], one.extra_inputs[1:], strict=True):
        assert_same(left.flatten(), right)


def test_empty_groups_give_zero_gradients() -> None:
    op = OPS[0]
    params, x, splits, _ = arguments(op, (4, 0, 2))
    _, pullback = fte.vjp(op, (params,), x, splits)
    grads = pullback(torch.full((6, 24), float("nan"))).params[0]
    assert not grads["weight1"].any()
    assert not grads["bias1"].any()
    assert grads["weight0"].isnan().all()


@pytest.mark.parametrize("sizes", [(0, 0, 0), (6, 0, 0), (0, 0, 6)], ids=str)
def test_no_rows_and_one_group(sizes) -> None:
    for op in OPS:
        if op.num_groups == 3:
            check(op, sizes, torch.float32)


@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=str)
@pytest.mark.parametrize("where", ["x", "weight", "dy"])
@pytest.mark.parametrize("op", [OPS[0], OPS[1]], ids=["grouped kernel", "masked"])
def test_what_is_not_finite_stays_in_its_group(op, where, value) -> None:
    sizes, bad = (4, 5, 3), 1
    params, x, splits, _ = arguments(op, sizes)
    dy = uniform((12, op.out_features), seed=2)
    clean, pullback = fte.vjp(op, (params,), x, splits)
    grads = pullback(dy)
    if where == "weight":
        params[f"weight{bad}"][0, 0] = value
    else:
        (x if where == "x" else dy)[slices(sizes)[bad]] = value
    result, pullback = fte.vjp(op, (params,), x, splits)
    found = pullback(dy)
    for g, rows in enumerate(slices(sizes)):
        if g == bad:
            continue
        assert_same(result.output[rows], clean.output[rows])
        assert_same(found.input[rows], grads.input[rows])
        for name in (f"weight{g}", f"bias{g}"):
            assert_same(found.params[0][name], grads.params[0][name])


def test_only_requested_gradients() -> None:
    op = OPS[3]
    params, x, splits, scales = arguments(op, (4, 0, 2))
    dy = uniform((6, 8), seed=2)
    _, pullback = fte.vjp(op, (params,), x, splits, *scales)
    full = pullback(dy)
    for wants in range(4):
        flags = tuple(i % 4 == wants for i in range(6))
        pattern = (wants % 2 == 0, (flags,), (False, wants == 1))
        _, pullback = fte.vjp(op, (params,), x, splits, *scales, requires_grad=pattern)
        grads = pullback(dy)
        for name, flag in zip(op.param_names, flags, strict=True):
            assert (grads.params[0][name] is not None) is flag
            if flag:
                assert_same(grads.params[0][name], full.params[0][name])
        assert (grads.input is not None) is pattern[0]
        assert (grads.extra_inputs[1] is not None) is pattern[2][1]


@pytest.mark.parametrize("sizes", [(4, 0, 3), (9, 9, 9), (-3, 4, 2)], ids=["fewer", "more", "negative"])
def test_sizes_that_do_not_add_up_inside_a_graph(sizes) -> None:
    """Where they cannot be checked: groups end with the rows, and rows after the last group give zeros."""
    op = OPS[0]
    params, x, _, _ = arguments(op, (10, 0, 0))
    dy = uniform((10, 24), seed=2)
    compiled = torch.compile(lambda p, x, s: bridge.apply(op, (p,), x, s)[0], fullgraph=True, backend="aot_eager")
    params, x = require_grad((params, x))
    y = compiled(params, x, torch.tensor(sizes))
    y.backward(dy)
    fits, left = [], 10
    for size in sizes:
        fits.append(min(max(size, 0), left))
        left -= fits[-1]
    used = sum(fits)
    want, dx, dparams, _ = expected(op, params, x[:used], (), fits, dy[:used])
    assert_close(y[:used], want, torch.float32)
    assert not y[used:].any()
    assert_close(x.grad[:used], dx, torch.float32)
    assert not x.grad[used:].any()
    for name, grad in dparams.items():
        assert_close(params[name].grad, grad, torch.float32, name)


@pytest.mark.parametrize(
    ("splits", "error", "message"),
    [
        (torch.tensor([1, 2]), ValueError, r"op 0 \(GroupedLinear\): extra input 0: .*3 groups"),
        (torch.tensor([[1, 2, 3]]), ValueError, "extra input 0"),
        (torch.tensor([1.0, 2.0, 3.0]), TypeError, "extra input 0.*integers"),
        (torch.tensor([True, True, True]), TypeError, "extra input 0.*integers"),
        (torch.tensor([1, 2, 2]), ValueError, r"GroupedLinear 'experts': extra input 0: .*6 rows.*sum 5"),
        (torch.tensor([4, 3, -1]), ValueError, "extra input 0.*at least 0"),
        ([1, 2, 3], TypeError, "extra input 0.*a tensor"),
    ],
    ids=range(7),
)
def test_refused_sizes(splits, error, message) -> None:
    op = fte.GroupedLinear(3, 4, 8, name="experts" if "experts" in message else "")
    with pytest.raises(error, match=message):
        fte.apply(op, (grouped_params(op),), torch.ones(6, 4), splits)


def test_refused_arguments() -> None:
    op = fte.GroupedLinear(2, 4, 8, scale_bias=True)
    params, splits = grouped_params(op), torch.tensor([3, 3])
    with pytest.raises(ValueError, match=r"extra input 1.*6 rows"):
        fte.apply(op, (params,), torch.ones(6, 4), splits, torch.ones(5))
    with pytest.raises(ValueError, match=r"input.*last dimension 4"):
        fte.apply(op, (params,), torch.ones(6, 5), splits, torch.ones(6))
    with pytest.raises(ValueError, match=r"weight1.*shape"):
        fte.apply(op, ({**params, "weight1": torch.ones(4, 8)},), torch.ones(6, 4), splits, torch.ones(6))
    mixed = {**params, "weight1": params["weight1"].half()}
    with pytest.raises(TypeError, match="one dtype"):
        fte.apply(op, (mixed,), torch.ones(6, 4), splits, torch.ones(6))
    for sizes in ((0, 4, 8), (2, -1, 8), (2, 4, 0)):
        with pytest.raises(ValueError, match="at least 1"):
            fte.GroupedLinear(*sizes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("recipe", [None, *WHOLE.values()], ids=["none", *WHOLE])
def test_nothing_waits_for_a_device(dtype, recipe) -> None:
    """Tensors without data, which take the way of a GPU: whatever reads data on the host raises."""
    op = fte.GroupedLinear(3, 128, 256, scale_bias=True)
    params = fte.init(op, dtype=dtype, device="meta")
    x = torch.empty(50, 128, dtype=dtype, device="meta")
    splits = torch.empty(3, dtype=torch.int32, device="meta")
    scales = torch.empty(50, dtype=dtype, device="meta")
    state = None if recipe is None else fte.init_state(op, recipe, device="meta")
    result, pullback = fte.vjp(op, params, x, splits, scales, recipe=recipe, state=state)
    grads = pullback(torch.empty_like(result.output))
    assert result.output.shape == (50, 256)
    assert grads.params[0]["weight2"].shape == (256, 128)
    assert grads.extra_inputs[1].shape == (50,)


def test_fakes_agree() -> None:
    for op in OPS:
        sizes = (3, 0, 4) if op.num_groups == 3 else (7,)
        params, x, splits, scales = arguments(op, sizes)
        plan, launch = fte.plan(op), Checked()
        forward = forward_pass(plan, x, (params,), fte.init_state(op, None), (splits, *scales), None, launch)
        backward_pass(plan, forward.saved, ({},), torch.randn_like(forward.output), (), launch)
        assert len(launch.seen) == 2


def test_one_graph_for_all_sizes(dynamo) -> None:
    op = OPS[3]
    compiled = torch.compile(lambda p, x, s, f: bridge.apply(op, (p,), x, s, f)[0], fullgraph=True, backend="aot_eager")
    for sizes in ((4, 0, 8), (0, 0, 12), (5, 6, 1), (12, 0, 0)):
        params, x, splits, scales = arguments(op, sizes)
        dy = uniform((12, 8), seed=2)
        eager, pullback = fte.vjp(op, (params,), x, splits, *scales)
        grads = pullback(dy)
        params, x, scales = require_grad((params, x, scales))
        y = compiled(params, x, splits, *scales)
        y.backward(dy)
        assert_same((y.detach(), x.grad, scales[0].grad), (eager.output, grads.input, grads.extra_inputs[1]))
        assert_same({n: p.grad for n, p in params.items()}, grads.params[0])
    assert graph_count(dynamo) == 1


def test_scales_from_a_channel() -> None:
    """Both extra inputs may come from an earlier op."""
    op = fte.GroupedLinear(2, 1, 4, scale_bias=True, scales_channel="s")
    block = fte.chain(fte.MakeExtraOutput(channel="s", output_to_caller=False), op)
    assert block.num_extra_inputs == 1
    params, x, splits, _ = arguments(op, (2, 3))
    got = fte.apply(block, ({}, params), x, splits).output
    assert_same(got, fte.apply(fte.GroupedLinear(2, 1, 4, scale_bias=True), (params,), x, splits, x).output)
    with pytest.raises(ValueError, match="channel 'sizes' has no producer"):
        fte.chain(fte.GroupedLinear(2, 4, 4, splits_channel="sizes"))


def test_functional() -> None:
    op = OPS[3]
    params, x, splits, scales = arguments(op, (4, 0, 2))
    weights = [params[f"weight{g}"] for g in range(3)]
    biases = [params[f"bias{g}"] for g in range(3)]
    want = fte.apply(op, (params,), x, splits, *scales).output
    assert_same(fte.functional.grouped_linear(x, weights, splits, biases, scales=scales[0]), want)
    assert_same(
        fte.functional.grouped_linear(x, torch.stack(weights), splits, torch.stack(biases), scales=scales[0]), want
    )
    plain = fte.functional.grouped_linear(x, weights, splits)
    assert_same(plain, fte.apply(OPS[2], ({f"weight{g}": w for g, w in enumerate(weights)},), x, splits).output)


# ---- the module ----


def module_and_rows(**options):
    torch.manual_seed(0)
    module = bridge.ops.GroupedLinear(3, 16, 8, **options)
    return module, uniform((9, 16), seed=1), torch.tensor([4, 0, 5])


def test_module_parameters() -> None:
    names = [f"{kind}{g}" for kind in ("weight", "bias") for g in range(3)]
    module, x, splits = module_and_rows()
    assert [name for name, _ in module.named_parameters()] == names
    assert set(module.state_dict()) == {*names, "_extra_state"}
    assert (module.num_groups, module.in_features, module.out_features) == (3, 16, 8)
    bound = 1 / 16**0.5
    for g in range(3):
        weight = getattr(module, f"weight{g}")
        assert weight.shape == (8, 16)
        assert 0.9 * bound < weight.abs().max() <= bound
        assert not getattr(module, f"bias{g}").any()
    assert not torch.equal(module.weight0, module.weight1)
    params = dict(module.named_parameters())
    assert_same(module(x, splits), fte.apply(module.op, (params,), x, splits).output)
    single, _, _ = module_and_rows(single_grouped_weight=True, single_grouped_bias=True)
    assert {n: tuple(p.shape) for n, p in single.named_parameters()} == {"weight": (3, 8, 16), "bias": (3, 8)}
    without, _, _ = module_and_rows(bias=False)
    assert without.bias0 is None
    assert not module.need_backward_dw()


def test_module_refuses() -> None:
    with pytest.raises(ValueError, match="num_groups"):
        bridge.ops.GroupedLinear(0, 8, 8)


def test_buffers_of_the_caller() -> None:
    module, x, splits = module_and_rows()
    want_x = x.clone().requires_grad_()
    want = module(want_x, splits)
    dy = uniform((9, 8), seed=2)
    want.backward(dy)
    grads = {n: p.grad.clone() for n, p in module.named_parameters()}
    module.zero_grad()
    x = x.requires_grad_()
    output, grad_input = torch.empty(9, 8), torch.empty(9, 16)
    y = module(x, splits, output=output, grad_input=grad_input)
    assert y.data_ptr() == output.data_ptr()
    assert_same(y.detach(), want.detach())
    y.backward(dy)
    assert_same(grad_input, want_x.grad)
    assert_same(x.grad, want_x.grad)
    assert_same({n: p.grad for n, p in module.named_parameters()}, grads)


@pytest.mark.parametrize("name", ["output", "grad_input"])
@pytest.mark.parametrize(
    "change",
    [
        lambda t: t[:-1],
        lambda t: t.double(),
        lambda t: t.to("meta"),
        lambda t: t.t().contiguous().t(),
        lambda t: t.requires_grad_(),
    ],
    ids=["shape", "dtype", "device", "strides", "requires_grad"],
)
def test_buffers_that_do_not_fit(name, change) -> None:
    module, x, splits = module_and_rows()
    buffer = torch.empty(9, 8 if name == "output" else 16)
    with pytest.raises(ValueError, match=f"GroupedLinear: {name}: "):
        module(x, splits, **{name: change(buffer)})


def test_main_grad() -> None:
    module, x, splits = module_and_rows(accumulate_into_main_grad=True, dtype=torch.bfloat16)
    for name, parameter in module.named_parameters():
        if name.startswith("weight"):
            parameter.main_grad = torch.full(parameter.shape, 0.5)
    module(x.bfloat16(), splits).sum().backward()
    assert module.weight0.grad is None
    want = x.bfloat16().double()[:4].sum(0).expand(8, 16)
    torch.testing.assert_close(module.weight0.main_grad.double() - 0.5, want, rtol=1e-5, atol=1e-5)
    assert (module.weight1.main_grad == 0.5).all()
    assert module.bias0.grad is not None


def test_autocast_gives_its_dtype() -> None:
    module, x, splits = module_and_rows()
    with torch.autocast("cpu", torch.bfloat16):
        y = module(x, splits)
    assert y.dtype is torch.bfloat16
    y.sum().backward()
    assert module.weight0.grad.dtype is torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_no_tokens_and_an_expanded_gradient(dtype) -> None:
    """What the loss of a rank without tokens gives."""
    module = bridge.ops.GroupedLinear(2, 64, 64, dtype=dtype)
    x = torch.randn(0, 64, dtype=dtype, requires_grad=True)
    module(x, torch.tensor([0, 0])).sum().backward()
    assert x.grad.shape == (0, 64)
    assert all(own.grad.abs().max() == 0 for own in module.parameters())
