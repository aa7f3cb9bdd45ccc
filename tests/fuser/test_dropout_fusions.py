"""Bias, Dropout and AddExtraInput in one forward step, Bias and Dropout in one backward step; kwargs in fused steps."""

import dataclasses
from typing import Any, ClassVar

import pytest
import torch

import bridge
import functional_te as fte
from bridge import ops
from functional_te import pytree
from functional_te.pipeline import backward_pass, forward_pass
from tests import oracles
from tests.helpers import CURRENT, DELAYED, RECIPES, assert_same, random_params, recipe_id, require_grad, uniform
from tests.ops.test_fakes import Checked

NONE = fte.Fusions()
KEY = fte.make_key(5)
BIAS, DROP, ADD, LINEAR = fte.Bias(16), fte.Dropout(0.4), fte.AddExtraInput(), fte.BasicLinear(16, 16)
# ops, index of the dropout, fused forward and backward steps
BLOCKS = {
    "all_three": ((BIAS, DROP, ADD), 1, [(0, 1, 2)], [(0, 1)]),
    "without_bias": ((fte.GELU(), DROP, ADD), 1, [(1, 2)], []),
    "without_add": ((LINEAR, fte.Identity(), BIAS, DROP, LINEAR), 3, [], [(2, 3)]),
    "after_a_linear": ((LINEAR, BIAS, DROP, ADD, LINEAR), 2, [(2, 3)], [(1, 2)]),
    "channel": (
        (
            fte.MakeExtraOutput(channel="r", output_to_caller=False),
            LINEAR,
            fte.Identity(),
            BIAS,
            DROP,
            fte.AddExtraInput(channel="r"),
        ),
        4,
        [(3, 4, 5)],
        [(3, 4)],
    ),
}
# a key, a recomputed one, no mask
KWARGS = ({"key": KEY}, {"training": False})


def arguments(block: fte.Chain, dtype: torch.dtype = torch.float32, seed: int = 1):
    x = uniform((4, 3, 16), dtype, seed)
    extras = tuple(uniform((4, 3, 16), dtype, seed + 50) for _ in range(block.num_extra_inputs))
    return pytree.tree_map(lambda p: p.to(dtype), random_params(block)), x, extras


@pytest.mark.parametrize("recipe", RECIPES, ids=recipe_id)
@pytest.mark.parametrize("name", BLOCKS)
def test_layouts(name: str, recipe) -> None:
    chain, _, forward, backward = BLOCKS[name]
    plan = fte.plan(fte.chain(*chain), recipe=recipe)
    assert [s.indices for s in plan.forward if type(s.op).__name__ == "ForwardBiasDropoutAdd"] == forward
    assert [s.indices for s in plan.backward if type(s.op).__name__ == "BackwardBiasDropout"] == backward
    if recipe is not None:  # the cast for a linear right before
        casting = [s.indices for s in plan.backward if s.prev_quantizer is not None and len(s.indices) == 2]
        assert casting == ([(1, 2)] if name == "after_a_linear" else [])


@pytest.mark.parametrize("kwargs", KWARGS, ids=["training", "evaluation"])
@pytest.mark.parametrize("recipe", RECIPES, ids=recipe_id)
@pytest.mark.parametrize("name", BLOCKS)
def test_same_bits_as_single_steps(name: str, recipe, kwargs) -> None:
    chain, place, _, _ = BLOCKS[name]
    block = fte.chain(*chain)
    states = [fte.init_state(block, recipe)] * 2
    for seed in range(2):
        params, x, extras = arguments(block, seed=seed)
        results = []
        for i, fusions in enumerate((None, NONE)):
            result, pullback = fte.vjp(
                block, params, x, *extras, recipe=recipe, state=states[i], kwargs={place: kwargs}, fusions=fusions
            )
            grads = pullback(uniform(result.output.shape, seed=seed + 9))
            states[i] = fte.update_state(block, recipe, grads.state) if recipe is DELAYED else states[i]
            results.append((result.output, grads.input, grads.params, grads.extra_inputs, states[i]))
        assert_same(*results)


def test_the_formula() -> None:
    block = fte.chain(BIAS, DROP, ADD)
    params, x, extras = arguments(block)
    y, pullback = fte.vjp(block, params, x, *extras, kwargs={1: {"key": KEY}})
    factor = fte.functional.dropout(torch.ones_like(x), KEY, p=0.4)
    dy = uniform(x.shape, seed=8)
    grads = pullback(dy)
    torch.testing.assert_close(y.output, extras[0] + (x + params[0]["bias"]) * factor)
    torch.testing.assert_close(grads.input, dy * factor)
    torch.testing.assert_close(grads.params[0]["bias"], (dy * factor).sum((0, 1)))
    assert_same(grads.extra_inputs[0], dy)


@pytest.mark.parametrize("kwargs", KWARGS, ids=["training", "evaluation"])
@pytest.mark.parametrize("compute", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtypes", ["float32", "mixed", "wide_extra", "narrow"])
def test_dtypes_are_those_of_single_steps(dtypes: str, compute, kwargs) -> None:
    """One rounding less, in the same dtypes."""
    of_x, of_bias, of_extra = {
        "float32": (torch.float32,) * 3,
        "mixed": (torch.bfloat16, torch.float32, torch.float16),
        "wide_extra": (torch.float16, torch.float16, torch.float32),
        "narrow": (torch.bfloat16,) * 3,
    }[dtypes]
    block = fte.chain(BIAS, DROP, ADD)
    params, x, extras = arguments(block)
    params = pytree.tree_map(lambda p: p.to(of_bias), params)
    x, extras = x.to(of_x), tuple(e.to(of_extra) for e in extras)
    found = []
    for fusions in (None, NONE):
        result, pullback = fte.vjp(
            block, params, x, *extras, kwargs={1: kwargs}, fusions=fusions, compute_dtype=compute
        )
        grads = pullback(uniform(x.shape, result.output.dtype, 8))
        found.append((result.output, grads.input, grads.params[0]["bias"], grads.extra_inputs[0]))
    for one, other in zip(*found, strict=True):
        assert one.dtype is other.dtype
        assert oracles.snr(one, other) > 45


@pytest.mark.parametrize(
    ("name", "recipe"),
    [("all_three", None), ("after_a_linear", CURRENT), ("after_a_linear", DELAYED)],
    ids=["all_three-none", "after_a_linear-current", "after_a_linear-delayed"],
)
def test_compiled(name: str, recipe, dynamo) -> None:
    chain, place, _, _ = BLOCKS[name]
    block = fte.chain(*chain)

    def step(call, fusions, seed: int):
        params, x, extras = require_grad(arguments(block, seed=seed))
        y, state = call(params, x, extras, fte.init_state(block, recipe), fte.make_key(seed), fusions)
        y.square().sum().backward()
        return y.detach(), [t.grad for t in pytree.leaves((params, x, extras))], state

    def call(params, x, extras, state, key, fusions):
        kwargs = {place: {"key": key}}
        return bridge.apply(block, params, x, *extras, recipe=recipe, state=state, kwargs=kwargs, fusions=fusions)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for seed in (1, 2):
        expected = step(call, NONE, seed)
        assert_same(step(call, None, seed), expected)
        assert_same(step(compiled, None, seed), expected)
    assert dynamo["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("recipe", RECIPES, ids=recipe_id)
@pytest.mark.parametrize("kwargs", KWARGS, ids=["training", "evaluation"])
@pytest.mark.parametrize("name", BLOCKS)
def test_fakes(name: str, kwargs, recipe) -> None:
    chain, place, forward, backward = BLOCKS[name]
    block = fte.chain(*chain)
    for dtype in (torch.float32, torch.bfloat16):
        params, x, extras = arguments(block, dtype)
        plan, state, launch = fte.plan(block, recipe=recipe), fte.init_state(block, recipe), Checked()
        out = forward_pass(plan, x, params, state, extras, {place: kwargs}, launch)
        backward_pass(plan, out.saved, state, torch.zeros_like(out.output), (), launch)
        assert (("ForwardBiasDropoutAdd", "forward") in launch.seen) is bool(forward)
        assert (("BackwardBiasDropout", "backward") in launch.seen) is bool(backward)


def test_bias_without_gradient() -> None:
    block = fte.chain(LINEAR, fte.Identity(), BIAS, DROP)
    params, x, _ = arguments(block)
    pattern = (True, ((True,), (), (False,), ()), ())
    found = []
    for fusions in (None, NONE):
        result, pullback = fte.vjp(block, params, x, kwargs={3: {"key": KEY}}, requires_grad=pattern, fusions=fusions)
        grads = pullback(uniform(result.output.shape, seed=3))
        assert grads.params[2]["bias"] is None
        found.append((grads.input, grads.params[0]))
    assert_same(*found)


# ---------------------------------------------------------------------------- kwargs of fused steps


def test_a_missing_key_is_refused_in_a_fused_step_too() -> None:
    block = fte.chain(BIAS, DROP, ADD)
    params, x, extras = arguments(block)
    for entry in (fte.apply, fte.vjp, bridge.apply):
        with pytest.raises(ValueError, match=r"op 1 \(Dropout\): key"):
            entry(block, params, x, *extras)


@pytree.bundle
class PairArgs:
    """One tensor and a factor."""

    input_: torch.Tensor
    factor: float = pytree.static(default=1.0)


def _scaled(args: PairArgs) -> fte.FwdResult:
    return fte.FwdResult(args.input_ * args.factor)


@dataclasses.dataclass(frozen=True, eq=False)
class Deaf(fte.FusedOp):
    """Two dropouts, without their kwargs."""

    fwd_args_type: ClassVar[type[Any]] = PairArgs
    forward_impl = staticmethod(_scaled)
    forward_fake = staticmethod(lambda args: fte.FwdResult(args.input_))

    def resolve_fwd_args(self, input_, *, params, state, requires_grad) -> PairArgs:
        return PairArgs(input_=input_)


@dataclasses.dataclass(frozen=True, eq=False)
class Hearing(Deaf):
    """Two dropouts, whose kwargs give a factor."""

    def resolve_fwd_args(self, input_, *, params, state, requires_grad, kwargs) -> PairArgs:
        first, second = kwargs
        return PairArgs(input_=input_, factor=10.0 * ("key" in first) + 1.0 * ("key" in second))


def _deaf(ops_) -> Deaf:
    return Deaf(ops_)


def _hearing(ops_) -> Hearing:
    return Hearing(ops_)


PATTERN = (fte.Slot((fte.Dropout,)), fte.Slot((fte.Dropout,)))
BY_NAME = {
    "deaf": fte.Fusions(forward=(fte.FusionRule("deaf", PATTERN, _deaf),)),
    "hearing": fte.Fusions(forward=(fte.FusionRule("hearing", PATTERN, _hearing),)),
}


@pytest.mark.parametrize("places", [(1,), (2,), (1, 2)])
def test_a_fused_op_gets_the_kwargs_of_all_its_ops_or_refuses(places: tuple[int, ...]) -> None:
    block, x = fte.chain(fte.ConstantScale(1.0), fte.Dropout(0.0), fte.Dropout(0.0)), uniform((2, 4))
    kwargs = {place: {"key": KEY} for place in places}
    y = fte.apply(block, ({}, {}, {}), x, kwargs=kwargs, fusions=BY_NAME["hearing"]).output
    assert_same(y, x * (10.0 * (1 in places) + 1.0 * (2 in places)))
    with pytest.raises(ValueError, match=rf"op {places[0]} \(Dropout\): kwargs: expected none, because Deaf.*'key'"):
        fte.apply(block, ({}, {}, {}), x, kwargs=kwargs, fusions=BY_NAME["deaf"])
    assert_same(fte.apply(block, ({}, {}, {}), x, kwargs={1: {}}, fusions=BY_NAME["deaf"]).output, x)
    assert_same(fte.apply(block, ({}, {}, {}), x, fusions=BY_NAME["deaf"]).output, x)


def test_modules_fuse_in_training_and_not_in_evaluation() -> None:
    torch.manual_seed(0)
    model = ops.Sequential(ops.Bias(16), ops.Dropout(0.5), ops.AddExtraInput())
    x, extra = uniform((4, 16)).requires_grad_(), uniform((4, 16), seed=1)
    (group,) = model.__dict__["_module_groups"]
    names = [[type(s.op).__name__ for s in fte.plan(b).forward] for b in (group.block, group.evaluation_block)]
    assert names == [["ForwardBiasDropoutAdd"], ["Bias", "Identity", "AddExtraInput"]]
    y = model(x, extra)
    kept = (y != extra).float()
    assert 0.2 < kept.mean() < 0.8
    torch.testing.assert_close(y, extra + x * kept * 2)
    y.sum().backward()
    torch.testing.assert_close(x.grad, kept * 2)
    torch.testing.assert_close(model.eval()(x, extra), extra + x)
    with bridge.autocast(recipe=CURRENT):
        torch.testing.assert_close(model(x, extra), extra + x)
