"""Plans: caching, where the backward starts, and fusions that a user registers on ops of their own."""

import dataclasses
import sys
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import bridge
import functional_te as fte
from functional_te import pytree
from functional_te.fuser import full_pattern, registry
from tests import oracles
from tests.helpers import CURRENT, DELAYED, RECIPES, double, random_params, recipe_id, require_grad, uniform

BLOCK = fte.chain(fte.RMSNorm(8), fte.Linear(8, 16), fte.SwiGLU(), fte.AddExtraInput(), fte.Linear(8, 8))


@pytest.fixture
def planned(monkeypatch) -> list:
    """Every planning that really happens."""
    module, calls = sys.modules["functional_te.fuser.plan"], []
    make = module._make

    def counted(*args):
        calls.append(args)
        return make(*args)

    monkeypatch.setattr(module, "_make", counted)
    return calls


@pytest.fixture
def rules():
    """Restores the registry."""
    before = registry._current
    yield
    registry._current = before


def fresh(name: str) -> fte.Chain:
    """A chain that no test with another name has planned."""
    return fte.chain(fte.Linear(8, 16, name=name), fte.SwiGLU(), fte.ConstantScale(0.123))


@pytest.mark.parametrize("recipe", RECIPES, ids=recipe_id)
def test_equal_values_are_planned_once(planned, recipe) -> None:
    name = recipe_id(recipe)
    block = fresh(name)
    params, x, state = random_params(block), uniform((3, 8)), fte.init_state(block, recipe)
    fte.apply(block, params, x, recipe=recipe, state=state)
    fte.vjp(block, params, x, recipe=recipe, state=state)
    count = len(planned)
    assert count >= 2
    again = None if recipe is None else dataclasses.replace(recipe)
    twin = fresh(name)
    fte.apply(twin, params, uniform((5, 2, 8)), recipe=again, state=state)
    fte.vjp(twin, params, x, recipe=again, state=state)
    assert fte.plan(twin, recipe=again) is fte.plan(block, recipe=recipe)
    assert len(planned) == count


def test_bridge_plans_once_per_pattern(planned) -> None:
    block = fresh("bridge")
    params, x = require_grad((random_params(block), uniform((3, 8))))
    for _ in range(3):
        bridge.apply(block, params, x)[0].sum().backward()
    assert len(planned) == 1
    with torch.no_grad():
        bridge.apply(block, params, x)
        bridge.apply(block, params, x)
    assert len(planned) == 2


def test_everything_that_matters_is_in_the_key() -> None:
    plans = {
        id(fte.plan(BLOCK, **options))
        for options in (
            {},
            {"requires_grad": False},
            {"recipe": CURRENT},
            {"recipe": DELAYED},
            {"recipe": dataclasses.replace(DELAYED, margin=1)},
            {"fusions": fte.Fusions()},
            {"compute_dtype": torch.bfloat16},
        )
    }
    assert len(plans) == 7
    assert fte.plan(BLOCK, requires_grad=True) is fte.plan(BLOCK)


def test_plans_hold_no_tensors() -> None:
    def tensors(value: Any, seen: set[int]) -> list[Any]:
        if id(value) in seen:
            return []
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            return [value]
        if isinstance(value, dict):
            return [t for item in (*value.keys(), *value.values()) for t in tensors(item, seen)]
        if isinstance(value, (tuple, list)):
            return [t for item in value for t in tensors(item, seen)]
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return [t for item in vars(value).values() for t in tensors(item, seen)]
        return []

    assert tensors({"a": (torch.ones(1),)}, set())
    params, x = random_params(BLOCK), uniform((3, 8))
    fte.vjp(BLOCK, params, x, x, recipe=DELAYED, state=fte.init_state(BLOCK, DELAYED))
    assert tensors(fte.plan(BLOCK, recipe=DELAYED), set()) == []


def test_gradients_land_on_the_parameters_of_the_call() -> None:
    """A plan made for other tensors (another dtype, replaced parameters) is not in the way."""
    x = uniform((3, 8))
    for dtype in (torch.float32, torch.bfloat16, torch.float32):
        params = require_grad(random_params(BLOCK, dtype))
        bridge.apply(BLOCK, params, x, x)[0].sum().backward()
        assert all(p.grad is not None and p.grad.dtype is dtype for p in pytree.leaves(params))


@given(x=st.booleans(), flags=st.lists(st.booleans(), min_size=6, max_size=6), fuse=st.booleans())
def test_where_the_backward_starts(x: bool, flags: list[bool], fuse: bool) -> None:
    """Backward steps cover exactly the ops at or after the first that needs a gradient; gradients are right."""
    norm, w1, b1, extra, w2, b2 = flags
    pattern = (x, ((norm,), (w1,), (b1,), (), (), (w2,), (b2,)), (extra,))
    plan = fte.plan(BLOCK, requires_grad=pattern, fusions=None if fuse else fte.Fusions())
    needs = [x or norm, w1, b1, False, extra, w2, b2]
    first = needs.index(True) if any(needs) else 7
    assert sorted(i for step in plan.backward for i in step.indices) == list(range(first, 7))
    assert [step.indices for step in plan.backward] == sorted((s.indices for s in plan.backward), reverse=True)
    assert plan.output_requires_grad == any(needs)
    assert [i for i, own in enumerate(plan.op_requires_grad) if own.input] == list(range(first + (not x), 7)) or x
    if not any(needs):
        return

    params, data, added = random_params(BLOCK), uniform((3, 8)), uniform((3, 8), seed=3)
    result, pullback = fte.vjp(BLOCK, params, data, added, requires_grad=pattern, fusions=plan.fusions)
    grads = pullback(torch.ones_like(result.output))
    params64, data64, added64 = double((params, data, added))
    oracles.run(BLOCK, params64, data64, (added64,))[0].sum().backward()
    found = [grads.input, *[g for own in grads.params for g in own.values()]]
    wanted = [data64, *pytree.leaves(params64)]
    for want, grad, reference in zip([x, *flags[:3], *flags[4:]], found, wanted, strict=True):
        if want:
            assert oracles.snr(grad, reference.grad) > 100
        else:
            assert grad is None


def test_malformed_patterns() -> None:
    with pytest.raises(TypeError, match="requires_grad"):
        fte.plan(BLOCK, requires_grad=(True, ()))
    with pytest.raises(ValueError, match=r"requires_grad.*parameter flags"):
        fte.plan(BLOCK, requires_grad=(True, ((),) * 7, (True,)))
    with pytest.raises(ValueError, match=r"requires_grad.*1 extra-input flags"):
        fte.plan(BLOCK, requires_grad=(True, full_pattern(BLOCK, True)[1], ()))


# ---- fusions that a user registers -----------------------------------------------------------------------------


@pytree.node
class ScaleArgs:
    input_: torch.Tensor
    factor: float = pytree.static(default=1.0)


def _scale(args: ScaleArgs) -> fte.FwdResult:
    CALLS.append("scale")
    return fte.FwdResult(args.input_ * args.factor)


def _scale_backward(args: ScaleArgs) -> fte.BwdResult:
    CALLS.append("scale_backward")
    return fte.BwdResult(args.input_ * args.factor)


CALLS: list[str] = []


@dataclasses.dataclass(frozen=True, eq=False)
class Times(fte.Op):
    """A test-only op."""

    factor: float = 2.0

    forward_impl = staticmethod(_scale)
    backward_impl = staticmethod(_scale_backward)
    forward_fake = staticmethod(lambda args: fte.FwdResult(args.input_))

    def resolve_fwd_args(self, input_, *, params, state, requires_grad) -> ScaleArgs:
        return ScaleArgs(input_=input_, factor=self.factor)

    def resolve_bwd_args(self, ctx, grad_output) -> ScaleArgs:
        return ScaleArgs(input_=grad_output, factor=self.factor)


def _twice(args: ScaleArgs) -> fte.FwdResult:
    CALLS.append("twice")
    return fte.FwdResult(args.input_ * args.factor, (), ((), ()))


def _twice_backward(args: ScaleArgs) -> fte.BwdResult:
    CALLS.append("twice_backward")
    return fte.BwdResult(args.input_ * args.factor, ((), ()), ((), ()))


@dataclasses.dataclass(frozen=True, eq=False)
class Twice(fte.FusedOp):
    """Two factors multiplied into one: a fusion of either direction, or of both."""

    forward_impl = staticmethod(_twice)
    backward_impl = staticmethod(_twice_backward)
    setup_context: ClassVar = staticmethod(lambda args, aux: ((), ()))

    def _args(self, tensor: torch.Tensor) -> ScaleArgs:
        return ScaleArgs(input_=tensor, factor=self.ops[0].factor * self.ops[1].factor)

    def resolve_fwd_args(self, input_, *, params, state, requires_grad) -> ScaleArgs:
        return self._args(input_)

    def resolve_bwd_args(self, ctxs, grad_output) -> ScaleArgs:
        return self._args(grad_output)


class Other(Twice):
    """The same, by another rule."""


def _build(ops) -> Twice:
    return Twice(ops)


def _build_other(ops) -> Other:
    return Other(ops)


def _only_small(window) -> str | None:
    return "the factors are too large" if window.ops[0].factor > 10 else None


PAIR = (fte.Slot((Times,)), fte.Slot((Times,)))
TWICE = fte.FusionRule("twice", PAIR, _build, _only_small)
OTHER = fte.FusionRule("other", PAIR, _build_other)
TIMES = fte.chain(Times(2.0), Times(3.0), Times(5.0))


def run_times() -> list[str]:
    """What ran; the results are those of the unfused ops whatever did."""
    CALLS.clear()
    x = uniform((3, 8))
    result, pullback = fte.vjp(TIMES, ({}, {}, {}), x)
    torch.testing.assert_close(result.output, 30 * x)
    torch.testing.assert_close(pullback(x).input, 30 * x)
    return list(CALLS)


@pytest.mark.parametrize(
    ("register", "expected"),
    [
        (None, ["scale"] * 3 + ["scale_backward"] * 3),
        (fte.register_forward_fusion, ["twice", "scale"] + ["scale_backward"] * 3),
        (fte.register_backward_fusion, ["scale"] * 3 + ["scale_backward", "twice_backward"]),
        (fte.register_forward_backward_fusion, ["twice", "scale", "scale_backward", "twice_backward"]),
    ],
)
def test_registered_fusions_run_in_their_directions(rules, register, expected) -> None:
    unfused = fte.plan(TIMES)
    if register is not None:
        register(TWICE)
    assert run_times() == expected
    assert (fte.plan(TIMES) is unfused) == (register is None)


def test_registered_fusions_in_the_bridge(rules) -> None:
    fte.register_forward_backward_fusion(TWICE)
    CALLS.clear()
    x = uniform((3, 8)).requires_grad_()
    bridge.apply(TIMES, ({}, {}, {}), x)[0].sum().backward()
    torch.testing.assert_close(x.grad, torch.full_like(x, 30.0))
    assert CALLS == ["twice", "scale", "scale_backward", "twice_backward"]


@pytest.mark.parametrize("prepend", [False, True])
def test_priority_of_registered_fusions(rules, prepend: bool) -> None:
    fte.register_forward_fusion(TWICE)
    fte.register_forward_fusion(OTHER, prepend=prepend)
    assert [type(step.op) for step in fte.plan(TIMES).forward] == [Other if prepend else Twice, Times]
    fte.register_forward_fusion(TWICE, prepend=True)  # registering again moves it
    assert [rule.name for rule in fte.default_fusions().forward].count("twice") == 1
    assert [type(step.op) for step in fte.plan(TIMES).forward] == [Twice, Times]


def test_a_joint_fusion_comes_before_the_others(rules) -> None:
    fte.register_forward_fusion(OTHER, prepend=True)
    fte.register_forward_backward_fusion(TWICE)
    plan = fte.plan(TIMES)
    assert [type(step.op) for step in plan.forward] == [Twice, Times]
    assert [type(step.op) for step in plan.backward] == [Times, Twice]


def test_a_refused_window_goes_to_the_next_rule(rules) -> None:
    fte.register_forward_fusion(TWICE)
    fte.register_forward_fusion(OTHER)
    plan = fte.plan(fte.chain(Times(11.0), Times(3.0), fte.Identity(), Times(3.0), Times(11.0)))
    assert [type(step.op) for step in plan.forward] == [Other, fte.Identity, Twice]
    assert [(r.rule, r.start, r.reason) for r in plan.refusals] == [("twice", 0, "the factors are too large")]


def test_registration_takes_rules_only(rules) -> None:
    for register in (
        fte.register_forward_fusion,
        fte.register_backward_fusion,
        fte.register_forward_backward_fusion,
    ):
        with pytest.raises(TypeError, match="rule: expected a FusionRule, got function"):
            register(_build)
    with pytest.raises(TypeError, match="forward: expected FusionRule entries"):
        fte.Fusions(forward=("twice",))


def test_a_builder_must_cover_the_match() -> None:
    broken = fte.FusionRule("broken", PAIR, lambda ops: Twice((ops[1], ops[0])))
    with pytest.raises(RuntimeError, match="fusion 'broken' at op 0: build: expected a FusedOp that covers"):
        fte.plan(TIMES, fusions=fte.Fusions(forward=(broken,)))


@pytest.mark.parametrize(
    "make",
    [
        lambda: fte.Slot(fte.GELU),
        lambda: fte.Slot((torch.nn.GELU,)),
        lambda: fte.FusionRule("x", (fte.GELU,), lambda ops: None),
        lambda: fte.FusionRule("x", (), lambda ops: None),
        lambda: fte.FusionRule("", (fte.Slot((fte.GELU,)),), lambda ops: None),
        lambda: fte.FusionRule("x", (fte.Slot((fte.GELU,)),), None),
    ],
)
def test_malformed_rules_are_refused(make) -> None:
    with pytest.raises(TypeError, match=r"(Slot|FusionRule): (types|pattern|name|build): expected"):
        make()
