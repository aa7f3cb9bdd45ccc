"""What autograd and the compiler get wrong when a design does not answer it; each trap eager and compiled."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import bridge
import functional_te as fte
from bridge.state import write_

from .compiled import (
    SMALL_HISTORY,
    assert_close,
    assert_same_bits,
    backward,
    copy_of,
    grads_of,
    graph_count,
    leaf,
    leaves_of,
)

MODES = pytest.mark.parametrize("mode", ["eager", "compiled"])


def _as(mode, function):
    return torch.compile(function, fullgraph=True, backend="aot_eager") if mode == "compiled" else function


def _two_linears():
    return fte.chain(fte.BasicLinear(8, 8), fte.SiLU(), fte.BasicLinear(8, 8))


def _wide(*values):
    return [value.detach().double().requires_grad_() for value in values]


def _close_to_wide(wide, values):
    assert_close([w.grad.float() for w in wide], [v.grad for v in values])


# ---------------------------------------------------------------------------- one tensor in several places


@MODES
def test_tied_weights_get_the_sum_of_both_gradients(dynamo, mode):
    weight, x = leaf(8, 8, seed=1), leaf(4, 8)
    block = _two_linears()
    run = _as(mode, lambda x, weight: bridge.apply(block, ({"weight": weight}, {}, {"weight": weight}), x)[0])
    backward(run(x, weight))
    wide_x, wide_weight = wide = _wide(x, weight)
    backward(torch.nn.functional.silu(wide_x @ wide_weight.T) @ wide_weight.T)
    _close_to_wide(wide, (x, weight))


@MODES
def test_residual_that_is_the_input(dynamo, mode):
    block = fte.chain(fte.BasicLinear(8, 8), fte.AddExtraInput())
    x, params = leaf(4, 8), leaves_of(block)
    run = _as(mode, lambda x, params: bridge.apply(block, params, x, x)[0])
    backward(run(x, params))
    wide_x, wide_weight = wide = _wide(x, params[0]["weight"])
    backward(wide_x @ wide_weight.T + wide_x)
    _close_to_wide(wide, (x, params[0]["weight"]))


@MODES
def test_input_that_is_also_a_parameter(dynamo, mode):
    block = fte.chain(fte.BasicLinear(8, 8), fte.SiLU())
    weight = leaf(8, 8, seed=1)
    run = _as(mode, lambda weight: bridge.apply(block, ({"weight": weight}, {}), weight)[0])
    backward(run(weight))
    (wide,) = _wide(weight)
    backward(torch.nn.functional.silu(wide @ wide.T))
    _close_to_wide([wide], [weight])


@MODES
def test_one_chain_called_twice_with_the_same_parameters(dynamo, mode):
    block = fte.chain(fte.BasicLinear(8, 8), fte.SiLU())
    x, params = leaf(4, 8), leaves_of(block)

    def twice(x, params):
        return bridge.apply(block, params, bridge.apply(block, params, x)[0])[0]

    backward(_as(mode, twice)(x, params))
    wide_x, wide_weight = wide = _wide(x, params[0]["weight"])
    silu = torch.nn.functional.silu
    backward(silu(silu(wide_x @ wide_weight.T) @ wide_weight.T))
    _close_to_wide(wide, (x, params[0]["weight"]))


# ---------------------------------------------------------------------------- state between forward and backward


@MODES
def test_backward_uses_the_scales_of_its_own_forward(dynamo, mode):
    block = fte.chain(fte.BasicLinear(8, 8))
    x, params = leaf(4, 8), leaves_of(block)
    state = fte.init_state(block, SMALL_HISTORY)
    for role, scale in (("input", 64.0), ("weight", 128.0)):
        state[0][role].scale.fill_(scale)
    expected, pullback = fte.vjp(block, params, x.detach(), state=copy_of(state), recipe=SMALL_HISTORY)
    run = _as(mode, lambda x, params, state: bridge.apply(block, params, x, state=state, recipe=SMALL_HISTORY))
    y, _ = run(x, params, state)
    for role in ("input", "weight"):
        write_(state[0][role].scale, torch.full((1,), 0.001))  # another step was closed in between
    dy = leaf(4, 8, seed=4, requires_grad=False)
    y.backward(dy)
    grads = pullback(dy)
    assert_same_bits(
        (expected.output, grads.input, grads.params[0]["weight"]), (y.detach(), x.grad, params[0]["weight"].grad)
    )
    assert_same_bits(grads.state[0]["grad_output"].amax_history, state[0]["grad_output"].amax_history)


@MODES
def test_two_forwards_with_an_update_in_between_and_one_backward(dynamo, mode):
    block = fte.chain(fte.BasicLinear(8, 8))
    x1, x2, params = leaf(4, 8), leaf(4, 8, seed=1), leaves_of(block)
    state = fte.init_state(block, SMALL_HISTORY)

    second = fte.update_state(
        block, SMALL_HISTORY, fte.apply(block, params, x1.detach(), state=state, recipe=SMALL_HISTORY).state
    )
    assert second[0]["input"].scale.item() != 1.0

    def two(x1, x2, params, state):
        y1, after = bridge.apply(block, params, x1, state=state, recipe=SMALL_HISTORY)
        closed = fte.update_state(block, SMALL_HISTORY, after)
        y2, _ = bridge.apply(block, params, x2, state=closed, recipe=SMALL_HISTORY)
        return y1, y2

    backward(_as(mode, two)(x1, x2, params, copy_of(state)))
    results = []
    grads = torch.Generator().manual_seed(7)
    for x, own in ((x1, state), (x2, second)):
        _, pullback = fte.vjp(block, params, x.detach(), state=own, recipe=SMALL_HISTORY)
        results.append(pullback(torch.randn(4, 8, generator=grads)))
    assert_same_bits([r.input for r in results], [x1.grad, x2.grad])
    torch.testing.assert_close(
        results[0].params[0]["weight"] + results[1].params[0]["weight"], params[0]["weight"].grad
    )


def test_returning_a_state_made_inside_a_graph_whose_backward_writes_to_it_is_refused(dynamo):
    block = fte.chain(fte.BasicLinear(8, 8))
    params, state = leaves_of(block), fte.init_state(block, SMALL_HISTORY)

    def run(x, state):
        y, after = bridge.apply(block, params, x, state=state, recipe=SMALL_HISTORY)
        closed = fte.update_state(block, SMALL_HISTORY, after)
        return bridge.apply(block, params, y, state=closed, recipe=SMALL_HISTORY)[0], closed

    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed):
        torch.compile(run, fullgraph=True, backend="aot_eager")(leaf(4, 8), state)


@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "non-reentrant"])
@MODES
def test_checkpointing_changes_nothing(dynamo, mode, use_reentrant):
    block = fte.chain(fte.SiLU(), fte.BasicLinear(8, 8))
    results = []
    for recompute in (False, True):
        x, params = leaf(4, 8), leaves_of(block)
        state = fte.init_state(block, SMALL_HISTORY)

        def forward(x, params, state):
            return bridge.apply(block, params, x, state=state, recipe=SMALL_HISTORY)

        def run(x, params, state, recompute=recompute, forward=forward):
            if recompute:
                return checkpoint(forward, x, params, state, use_reentrant=use_reentrant)
            return forward(x, params, state)

        torch._dynamo.reset()
        function = _as(mode, run)
        for step in range(3):
            y, after = function(x, params, state)
            backward(y, seed=step)
            state = fte.update_state(block, SMALL_HISTORY, copy_of(after))
        # a reentrant checkpoint gives no gradients to tensors inside of containers; those of the input are enough
        results.append((y.detach(), x.grad, state) if use_reentrant else (y.detach(), x.grad, grads_of(params), state))
    assert_same_bits(*results)


# ---------------------------------------------------------------------------- ops that do nothing

NOTHING = {
    "identity": fte.chain(fte.Identity()),
    "reshape": fte.chain(fte.Reshape((-1, 8))),
    "reshape to itself": fte.chain(fte.Reshape((4, 8))),
    "scale by one": fte.chain(fte.ConstantScale(1.0)),
    "identity twice, reshape": fte.chain(fte.Identity(), fte.Reshape((2, 16)), fte.Identity()),
    "fork": fte.chain(fte.MakeExtraOutput()),
    "fork twice": fte.chain(fte.MakeExtraOutput(), fte.MakeExtraOutput()),
    "inside": fte.chain(fte.SiLU(), fte.Identity(), fte.MakeExtraOutput(), fte.Reshape((-1,))),
}


@pytest.mark.parametrize("name", NOTHING)
@MODES
def test_ops_that_return_their_input_or_a_view(dynamo, mode, name):
    block = NOTHING[name]
    x, params = leaf(4, 8), tuple({} for _ in block.ops)
    kept = x.detach().clone()
    outputs = _as(mode, lambda x: bridge.apply(block, params, x * 1.0)[0])(x)
    (wide,) = _wide(x)
    flat = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
    base = torch.nn.functional.silu(wide) if name == "inside" else wide
    expected = [base.reshape(out.shape) for out in flat]
    backward(outputs)
    backward(expected)
    assert_close([e.float() for e in expected], flat)
    _close_to_wide([wide], [x])
    assert torch.equal(x, kept)
    assert len({out.untyped_storage().data_ptr() for out in flat}) == len(flat)


def test_leaf_input_of_a_chain_that_does_nothing(dynamo):
    for mode in ("eager", "compiled"):
        x = leaf(4, 8)
        y, _ = _as(mode, lambda x: bridge.apply(NOTHING["identity"], ({},), x))(x)
        y.sum().backward()
        assert torch.equal(x.grad, torch.ones(4, 8))


# ---------------------------------------------------------------------------- state is tensors


def test_state_is_tensors_only_and_its_structure_never_changes():
    block = _two_linears()
    params, state = leaves_of(block), fte.init_state(block, SMALL_HISTORY)
    leaves, spec = fte.pytree.tree_flatten(state)
    assert leaves
    for _ in range(SMALL_HISTORY.amax_history_len + 2):
        y, after = bridge.apply(block, params, leaf(4, 8), state=state, recipe=SMALL_HISTORY)
        y.sum().backward()
        state = fte.update_state(block, SMALL_HISTORY, after)
        leaves, now = fte.pytree.tree_flatten(state)
        assert now == spec
        assert all(isinstance(value, torch.Tensor) for value in leaves)
        storages = {value.untyped_storage().data_ptr() for value in leaves}
        assert len(storages) == len(leaves)


def _overlapping(block):
    """A state of three quantizers whose histories are views of one buffer."""
    buffer = torch.zeros(3, 4)
    views = iter(buffer)
    return tuple(
        {role: fte.DelayedScalingState(scale=one.scale, amax_history=next(views)) for role, one in own.items()}
        for own in fte.init_state(block, SMALL_HISTORY)
    )


@MODES
def test_state_of_overlapping_views_is_refused(dynamo, mode):
    block = fte.chain(fte.BasicLinear(8, 8))
    params, x, state = leaves_of(block), leaf(4, 8), _overlapping(fte.chain(fte.BasicLinear(8, 8)))
    run = _as(mode, lambda x, params, state: bridge.apply(block, params, x, state=state, recipe=SMALL_HISTORY)[0])
    with pytest.raises(Exception, match="a view of another tensor"):
        run(x, params, state)


@MODES
def test_state_made_inside_by_update_is_accepted(dynamo, mode):
    block = fte.chain(fte.BasicLinear(8, 8))
    x, params, state = leaf(4, 8), leaves_of(block), fte.init_state(block, SMALL_HISTORY)

    def run(x, params, state):
        _, after = bridge.apply(block, params, x, state=state, recipe=SMALL_HISTORY)
        after = fte.update_state(block, SMALL_HISTORY, after)
        return bridge.apply(block, params, x, state=after, recipe=SMALL_HISTORY)[0]

    y = _as(mode, run)(x, params, state)
    torch.testing.assert_close(y, x @ params[0]["weight"].T, rtol=0.2, atol=0.2)


# ---------------------------------------------------------------------------- outputs the loss does not use


@MODES
def test_output_that_the_loss_does_not_use_counts_as_zeros(dynamo, mode):
    block = fte.chain(fte.MakeExtraOutput(), fte.BasicLinear(8, 8))
    x, params, state = leaf(4, 8), leaves_of(block), fte.init_state(block, SMALL_HISTORY)
    run = _as(mode, lambda x, params, state: bridge.apply(block, params, x, state=state, recipe=SMALL_HISTORY)[0])
    _, extra = run(x, params, state)
    extra.sum().backward()
    assert torch.equal(x.grad, torch.ones(4, 8))
    assert torch.equal(params[1]["weight"].grad, torch.zeros(8, 8))
    assert not state[1]["grad_output"].amax_history.any()  # zeros are not observed
    x.grad = None
    main, _ = run(x, params, state)
    main.sum().backward()
    assert state[1]["grad_output"].amax_history[0] == 1.0


@MODES
def test_unused_branch_records_no_amax_in_the_backward(dynamo, mode):
    block = fte.chain(fte.BasicLinear(8, 8))
    x, params = leaf(4, 8), [leaves_of(block, seed=i) for i in range(2)]
    states = [fte.init_state(block, SMALL_HISTORY) for _ in range(2)]

    def run(x, params, states):
        return [
            bridge.apply(block, own, x, state=state, recipe=SMALL_HISTORY)[0]
            for own, state in zip(params, states, strict=True)
        ]

    used, _ = _as(mode, run)(x, params, states)
    used.sum().backward()
    assert states[0][0]["grad_output"].amax_history[0] == 1.0
    assert not states[1][0]["grad_output"].amax_history.any()
    unused = params[1][0]["weight"].grad
    assert unused is None or not unused.any()


# ---------------------------------------------------------------------------- saturation


@pytest.mark.parametrize(("mode", "value"), [("eager", 1e30), ("eager", float("inf")), ("compiled", float("inf"))])
def test_casts_saturate_in_both_formats(dynamo, mode, value):
    """Scale 1 and values beyond both formats: E4M3 gives 448, E5M2 gives 57344, nothing gives inf or NaN."""
    block = fte.chain(fte.BasicLinear(8, 8))
    state = fte.init_state(block, SMALL_HISTORY)
    x, params = torch.full((4, 8), value, requires_grad=True), ({"weight": torch.eye(8).requires_grad_()},)
    run = _as(mode, lambda x, params, state: bridge.apply(block, params, x, state=state, recipe=SMALL_HISTORY)[0])
    y = run(x, params, state)
    assert torch.equal(y, torch.full((4, 8), 448.0))
    y.backward(torch.full((4, 8), -value))
    assert torch.equal(x.grad, torch.full((4, 8), -57344.0))
    assert torch.equal(params[0]["weight"].grad, torch.full((8, 8), -57344.0 * 448.0 * 4))


# ---------------------------------------------------------------------------- parameters that were replaced


@MODES
def test_gradients_land_on_the_parameters_of_this_call(dynamo, mode):
    block = fte.chain(fte.BasicLinear(8, 8))
    run = _as(mode, lambda x, params: bridge.apply(block, params, x)[0])
    old = leaves_of(block)
    run(leaf(4, 8), old)
    for new in (
        copy_of(old),
        leaves_of(block, dtype=torch.bfloat16),
        fte.tree_map(lambda p: p.detach().double().float().requires_grad_(), old),
    ):
        x = leaf(4, 8)
        y = run(x, new)
        y.sum().backward()
        weight = new[0]["weight"]
        assert weight.grad.dtype is weight.dtype
        wanted = x.detach().to(weight.dtype).sum(0).expand(8, 8)
        torch.testing.assert_close(weight.grad, wanted, rtol=1e-2, atol=1e-2)
    assert old[0]["weight"].grad is None


# ---------------------------------------------------------------------------- torch.func


def _loss(block):
    def loss(params, x):
        return (bridge.apply(block, params, x)[0] ** 2).sum()

    return loss


def _plain_loss(weights, x):
    return ((torch.nn.functional.silu(x @ weights[0].T) @ weights[1].T) ** 2).sum()


def test_func_grad_and_vjp():
    block, x = _two_linears(), leaf(4, 8, requires_grad=False)
    params = fte.init(block)
    got = torch.func.grad(_loss(block))(params, x)
    wanted = torch.func.grad(_plain_loss)((params[0]["weight"], params[2]["weight"]), x)
    assert_close(wanted, got)
    value, pullback = torch.func.vjp(lambda x: _loss(block)(params, x), x)
    (dx,) = pullback(torch.tensor(2.0))
    wide = leaf(4, 8)
    expected = _plain_loss((params[0]["weight"], params[2]["weight"]), wide)
    (2.0 * expected).backward()
    assert_close((expected.detach(), wide.grad), (value, dx))


def test_func_grad_inside_compile_agrees_or_is_refused(dynamo):
    block, x = _two_linears(), leaf(4, 8, requires_grad=False)
    params = fte.init(block)
    wanted = torch.func.grad(_plain_loss)((params[0]["weight"], params[2]["weight"]), x)

    def run(params, x):
        return torch.func.grad(_loss(block))(params, x)

    try:
        got = torch.compile(run, fullgraph=True, backend="aot_eager")(params, x)
    except Exception as error:
        message = str(error)
        assert "functional_te" in message  # a refusal says what to use instead
        assert "vjp" in message
    else:
        assert_close(wanted, got)


# ---------------------------------------------------------------------------- autograd's other features


@MODES
def test_retained_graph_gives_equal_gradients(dynamo, mode):
    block, x = fte.chain(fte.SiLU(), fte.BasicLinear(8, 8)), leaf(4, 8)
    params, state = leaves_of(block), fte.init_state(block, SMALL_HISTORY)
    run = _as(mode, lambda x, params, state: bridge.apply(block, params, x, state=state, recipe=SMALL_HISTORY)[0])
    y = run(x, params, state)
    inputs = (x, params[1]["weight"])
    first = torch.autograd.grad(y.sum(), inputs, retain_graph=True)
    observed = copy_of(state)
    second = torch.autograd.grad(y.sum(), inputs)
    assert_same_bits(first, second)
    assert_same_bits(observed, state)


def test_second_derivatives_are_refused_clearly():
    x = leaf(4, 8)
    y, _ = bridge.apply(fte.chain(fte.SiLU()), ({},), x)
    with pytest.raises(RuntimeError, match="create_graph"):
        torch.autograd.grad(y.sum(), x, create_graph=True)


@MODES
def test_autocast(dynamo, mode):
    block = fte.chain(fte.RMSNorm(8), fte.Linear(8, 8), fte.SiLU(), fte.Linear(8, 8, bias=False))
    x, params = leaf(4, 8), leaves_of(block)

    def run(x, params):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return bridge.apply(block, params, x)[0]

    y = _as(mode, run)(x, params)
    assert y.dtype is torch.bfloat16
    y.backward(torch.ones_like(y))
    for value in (x, *fte.pytree.leaves(params)):
        assert value.grad.dtype is torch.float32
    norm, weight, bias, last = _wide(*fte.pytree.leaves(params))
    (wide,) = _wide(x)
    hidden = torch.nn.functional.rms_norm(wide, (8,), norm, 1e-5) @ weight.T + bias
    (torch.nn.functional.silu(hidden) @ last.T).sum().backward()
    assert_close(
        [w.grad.float() for w in (wide, norm, weight, bias, last)],
        [x.grad, *[value.grad for value in fte.pytree.leaves(params)]],
        rtol=0.05,
        atol=0.05,
    )


@pytest.mark.parametrize("bias", [False, True])
def test_autocast_dtypes_of_a_linear_follow_promotion(bias):
    block = fte.Linear(8, 8, bias=bias)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, _ = bridge.apply(block, leaves_of(block), leaf(4, 8))
    assert y.dtype is (torch.float32 if bias else torch.bfloat16)  # a float32 bias is added outside the product


def test_saved_tensor_hooks_see_what_is_saved_and_may_move_it():
    block, x = _two_linears(), leaf(4, 8)
    params = leaves_of(block)
    packed = []

    def pack(value):
        packed.append(value.shape)
        return value.detach().clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        y, _ = bridge.apply(block, params, x)
    backward(y)
    assert packed
    other_x, other = leaf(4, 8), leaves_of(block)
    backward(bridge.apply(block, other, other_x)[0])
    assert_same_bits((other_x.grad, grads_of(other)), (x.grad, grads_of(params)))


@pytest.mark.parametrize(("mode", "kind"), [("eager", "expanded"), ("eager", "transposed"), ("compiled", "expanded")])
def test_gradients_and_inputs_of_any_stride(dynamo, mode, kind):
    block = fte.chain(fte.RMSNorm(8), fte.BasicLinear(8, 8), fte.SiLU())
    params = leaves_of(block)
    x = leaf(8, 8)
    given = leaf(8, seed=3).detach().expand(8, 8) if kind == "expanded" else leaf(8, 8, seed=3).detach().t()

    def run(x, params):
        return bridge.apply(block, params, x.t())[0]

    _as(mode, run)(x, params).backward(given)
    wide = _wide(x, *fte.pytree.leaves(params))
    hidden = torch.nn.functional.rms_norm(wide[0].t(), (8,), wide[1], 1e-5) @ wide[2].T
    torch.nn.functional.silu(hidden).backward(given.double())
    _close_to_wide(wide, (x, *fte.pytree.leaves(params)))


def test_a_parameter_changed_in_place_before_the_backward_is_an_error():
    block = fte.chain(fte.BasicLinear(8, 8))
    x, params = leaf(4, 8), leaves_of(block)
    y, _ = bridge.apply(block, params, x)
    with torch.no_grad():
        params[0]["weight"].add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_inference_needs_no_gradient_graph(dynamo):
    block = _two_linears()
    params = fte.init(block)
    y, _ = bridge.apply(block, params, leaf(4, 8, requires_grad=False))
    assert not y.requires_grad
    assert graph_count(dynamo) == 0
