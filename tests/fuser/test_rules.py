"""The built-in rules: what they match, what they refuse and why, priority, and who casts for whom."""

import pytest

import functional_te as fte
from functional_te.fuser.rules import BACKWARD, FORWARD, JOINT
from tests.helpers import CURRENT, DELAYED, RECIPES, recipe_id

RULES = {rule.name: rule for rule in (*JOINT, *FORWARD, *BACKWARD)}
LINEAR, BIAS, NORM = fte.BasicLinear(8, 8), fte.Bias(8), fte.RMSNorm(8)
ADD, FORK, SCALE = fte.AddExtraInput(), fte.MakeExtraOutput(), fte.ConstantScale(2.0)


def layout(block: fte.Chain, **options) -> tuple[list, list]:
    """Forward and backward as lists of (class name, op indices)."""
    plan = fte.plan(block, **options)
    return tuple([(type(step.op).__name__, step.indices) for step in steps] for steps in (plan.forward, plan.backward))


def fused(block: fte.Chain, **options) -> tuple[list, list]:
    """The fused steps of both layouts."""
    return tuple([step for step in steps if len(step[1]) > 1] for steps in layout(block, **options))


def test_the_rules_of_this_version() -> None:
    assert [r.name for r in FORWARD] == [
        "forward_linear_bias_add",
        "forward_linear_scale_add",
        "forward_linear_bias_activation",
        "forward_add_rms_norm",
        "forward_bias_dropout_add",
        "forward_norm_quantize",
        "forward_activation_quantize",
    ]
    assert [r.name for r in BACKWARD] == [
        "backward_rms_norm_linear",
        "backward_linear_add",
        "backward_linear_scale",
        "backward_activation_bias",
        "backward_bias_dropout",
        "backward_add_rms_norm",
    ]
    assert fte.default_fusions() is fte.Fusions(joint=JOINT, forward=FORWARD, backward=BACKWARD)


MATCHES = [
    ((LINEAR, BIAS, fte.GELU()), [("ForwardLinearBiasActivation", (0, 1, 2))], [("BackwardActivationBias", (1, 2))]),
    ((LINEAR, fte.SwiGLU()), [("ForwardLinearBiasActivation", (0, 1))], []),
    ((LINEAR, BIAS), [("ForwardLinearBiasActivation", (0, 1))], []),
    ((LINEAR, BIAS, ADD), [("ForwardLinearBiasAdd", (0, 1, 2))], []),
    ((LINEAR, ADD), [("ForwardLinearBiasAdd", (0, 1))], []),
    ((LINEAR, fte.AddExtraInput(in_place=True)), [("ForwardLinearBiasAdd", (0, 1))], []),
    ((FORK, LINEAR), [], [("BackwardLinearAdd", (0, 1))]),
    ((fte.MakeExtraOutput(in_place=True), LINEAR), [], [("BackwardLinearAdd", (0, 1))]),
    ((FORK, NORM), [], [("BackwardAddRMSNorm", (0, 1))]),
    ((LINEAR, SCALE, ADD), [("ForwardLinearScaleAdd", (0, 1, 2))], [("BackwardLinearScale", (0, 1))]),
    ((LINEAR, SCALE), [], [("BackwardLinearScale", (0, 1))]),
    ((FORK, LINEAR, SCALE), [], [("BackwardLinearAdd", (0, 1))]),
    ((NORM, LINEAR), [], [("BackwardRMSNormLinear", (0, 1))]),
    ((NORM, LINEAR, SCALE), [], [("BackwardRMSNormLinear", (0, 1))]),
    ((FORK, NORM, LINEAR), [], [("BackwardRMSNormLinear", (0, 1, 2))]),
    ((ADD, FORK, NORM), [("ForwardAddRMSNorm", (0, 1, 2))], [("BackwardAddRMSNorm", (1, 2))]),
    ((ADD, FORK, NORM, LINEAR), [("ForwardAddRMSNorm", (0, 1, 2))], [("BackwardRMSNormLinear", (1, 2, 3))]),
    ((LINEAR, ADD, FORK, NORM), [("ForwardLinearBiasAdd", (0, 1))], [("BackwardAddRMSNorm", (2, 3))]),
    ((BIAS, fte.ReLU()), [], [("BackwardActivationBias", (0, 1))]),
    # nothing: a place between, another norm, the wrong order
    ((LINEAR, fte.Identity(), BIAS), [], []),
    ((FORK, fte.LayerNorm(8)), [], []),
    ((ADD, FORK, fte.LayerNorm(8)), [], []),
    ((ADD, NORM), [], []),
    ((SCALE, LINEAR), [], []),
    ((NORM, BIAS, LINEAR), [], []),
    ((FORK, fte.Identity(), NORM), [], []),
    ((fte.GELU(), BIAS), [], []),
    ((NORM, FORK), [], []),
    ((LINEAR,), [], []),
]


@pytest.mark.parametrize("recipe", RECIPES, ids=recipe_id)
@pytest.mark.parametrize(("ops", "forward", "backward"), MATCHES)
def test_patterns(ops, forward, backward, recipe) -> None:
    assert fused(fte.chain(*ops), recipe=recipe) == (forward, backward)


@pytest.mark.parametrize("name", RULES)
def test_a_rule_alone(name: str) -> None:
    """Each rule works without the others, and only where it is listed."""
    block = fte.chain(FORK, LINEAR, BIAS, fte.GELU(), LINEAR, BIAS, ADD, FORK, NORM, BIAS, fte.Dropout(0.5), ADD)
    block = fte.chain(block, NORM, LINEAR, SCALE, ADD)
    kind = name.split("_")[0] if name.startswith(("forward", "backward")) else "joint"
    forward, backward = fused(block, fusions=fte.Fusions(**{kind: (RULES[name],)}))
    expected = {
        "forward_linear_bias_add": ([("ForwardLinearBiasAdd", (4, 5, 6))], []),
        "forward_linear_bias_activation": (
            [("ForwardLinearBiasActivation", (1, 2, 3)), ("ForwardLinearBiasActivation", (4, 5))],
            [],
        ),
        "forward_linear_scale_add": ([("ForwardLinearScaleAdd", (13, 14, 15))], []),
        "forward_add_rms_norm": ([("ForwardAddRMSNorm", (6, 7, 8))], []),
        "backward_rms_norm_linear": ([], [("BackwardRMSNormLinear", (12, 13))]),
        "backward_linear_scale": ([], [("BackwardLinearScale", (13, 14))]),
        "forward_bias_dropout_add": ([("ForwardBiasDropoutAdd", (9, 10, 11))], []),
        # both need a Quantize and a recipe
        "forward_norm_quantize": ([], []),
        "forward_activation_quantize": ([], []),
        "backward_bias_dropout": ([], [("BackwardBiasDropout", (9, 10))]),
        "backward_linear_add": ([], [("BackwardLinearAdd", (0, 1))]),
        "backward_activation_bias": ([], [("BackwardActivationBias", (2, 3))]),
        "backward_add_rms_norm": ([], [("BackwardAddRMSNorm", (7, 8))]),
        "grouped_mlp": ([], []),  # see test_grouped_mlp.py
    }[name]
    assert (forward, backward) == expected


def test_forward_and_backward_layouts_are_independent() -> None:
    block = fte.chain(FORK, NORM, LINEAR, BIAS, fte.GELU(), LINEAR, BIAS, ADD)
    forward, backward = layout(block)
    assert forward == [
        ("MakeExtraOutput", (0,)),
        ("RMSNorm", (1,)),
        ("ForwardLinearBiasActivation", (2, 3, 4)),
        ("ForwardLinearBiasAdd", (5, 6, 7)),
    ]
    assert backward == [
        ("AddExtraInput", (7,)),
        ("Bias", (6,)),
        ("BasicLinear", (5,)),
        ("BackwardActivationBias", (3, 4)),
        ("BackwardRMSNormLinear", (0, 1, 2)),
    ]


def test_priority_is_the_order_of_the_rules() -> None:
    add, act = RULES["forward_linear_bias_add"], RULES["forward_linear_bias_activation"]
    block = fte.chain(LINEAR, BIAS, ADD)
    assert fused(block, fusions=fte.Fusions(forward=(add, act)))[0] == [("ForwardLinearBiasAdd", (0, 1, 2))]
    assert fused(block, fusions=fte.Fusions(forward=(act, add)))[0] == [("ForwardLinearBiasActivation", (0, 1))]


def test_refusals_have_a_reason() -> None:
    plan = fte.plan(fte.chain(FORK, NORM), requires_grad=(False, ((), (True,)), ()))
    assert [step.indices for step in plan.backward] == [(1,)]
    (refusal,) = plan.refusals
    assert (refusal.rule, refusal.start) == ("backward_add_rms_norm", 0)
    assert "input" in refusal.reason
    assert refusal.reason in repr(plan)

    plan = fte.plan(fte.chain(NORM, FORK, LINEAR), requires_grad=(False, ((False,), (), (True,)), ()))
    assert [(r.rule, r.start) for r in plan.refusals if r.rule == "backward_linear_add"] == [("backward_linear_add", 1)]
    assert [step.indices for step in plan.backward] == [(2,)]

    # a forked norm whose input needs no gradient is left out of the window, a linear whose input needs none refuses it
    plan = fte.plan(fte.chain(FORK, NORM, LINEAR), requires_grad=(False, ((), (True,), (True,)), ()))
    assert [step.indices for step in plan.backward] == [(1, 2)]
    assert [(r.rule, r.start) for r in plan.refusals if "backward" in r.rule] == [("backward_rms_norm_linear", 0)]
    plan = fte.plan(fte.chain(NORM, LINEAR), requires_grad=(False, ((False,), (True,)), ()))
    assert [step.indices for step in plan.backward] == [(1,)]
    assert "the linear's input needs no gradient" in repr(plan)

    for factor, reason in ((0.0, "hide inf and nan"), (float("inf"), "not finite")):
        plan = fte.plan(fte.chain(LINEAR, fte.ConstantScale(factor), ADD))
        rules = [(r.rule, r.start) for r in plan.refusals if reason in r.reason]
        assert rules == [("forward_linear_scale_add", 0), ("backward_linear_scale", 0)]

    plan = fte.plan(fte.chain(NORM, LINEAR))
    assert [(r.rule, r.start) for r in plan.refusals] == [("forward_linear_bias_activation", 1)]
    assert fte.plan(fte.chain(FORK, NORM)).refusals == ()


def casts(block: fte.Chain, recipe, **options) -> tuple[list, list]:
    """Indices of the steps that cast their output for the next op, and their input gradient for the previous one."""
    plan = fte.plan(block, recipe=recipe, **options)
    return (
        [step.indices for step in plan.forward if step.next_quantizer is not None],
        [step.indices for step in plan.backward if step.prev_quantizer is not None],
    )


NONE = fte.Fusions()


@pytest.mark.parametrize("recipe", [CURRENT, DELAYED], ids=recipe_id)
@pytest.mark.parametrize(
    ("ops", "forward", "backward"),
    [
        # norms and activations cast for a linear right behind them; gradients only for a linear right before
        ((NORM, LINEAR), [(0,)], []),
        ((fte.LayerNorm(8), LINEAR), [(0,)], []),
        ((fte.GELU(), LINEAR), [(0,)], []),
        ((LINEAR, fte.GELU()), [], [(1,)]),
        ((LINEAR, BIAS), [], [(1,)]),
        ((LINEAR, LINEAR), [(0,)], [(1,)]),
        ((LINEAR, NORM), [], []),
        # look-ahead and look-behind are exactly one op, and only some ops cast
        ((NORM, fte.Identity(), LINEAR), [], []),
        ((NORM, FORK, LINEAR), [], []),
        ((fte.GELU(), fte.Reshape((-1, 8)), LINEAR), [], []),
        ((BIAS, LINEAR), [], []),
        ((ADD, LINEAR), [], []),
        ((fte.ConstantScale(2.0), LINEAR), [], []),
        ((LINEAR, fte.Identity(), fte.GELU()), [], []),
        ((LINEAR, ADD), [], []),
        ((LINEAR, BIAS, fte.GELU()), [], [(1,)]),
        ((LINEAR, BIAS, LINEAR), [], [(1,)]),
    ],
)
def test_hand_over_of_quantizers(ops, forward, backward, recipe) -> None:
    block = fte.chain(*ops)
    assert casts(block, recipe, fusions=NONE) == (forward, list(reversed(backward)))
    assert casts(block, None, fusions=NONE) == ([], [])


@pytest.mark.parametrize("recipe", [CURRENT, DELAYED], ids=recipe_id)
def test_hand_over_of_fused_ops(recipe) -> None:
    # an activation's fused forward casts; the fused add never does; the fused bias casts for the linear before it
    assert casts(fte.chain(LINEAR, BIAS, fte.GELU(), LINEAR), recipe) == ([(0, 1, 2)], [(1, 2)])
    assert casts(fte.chain(LINEAR, BIAS, ADD, LINEAR), recipe)[0] == []
    assert casts(fte.chain(LINEAR, BIAS, LINEAR), recipe) == ([(0, 1)], [(1,)])
    assert casts(fte.chain(LINEAR, FORK, LINEAR), recipe) == ([], [])
    assert casts(fte.chain(LINEAR, FORK, NORM), recipe) == ([], [])


@pytest.mark.parametrize("recipe", [CURRENT, DELAYED], ids=recipe_id)
def test_the_quantizer_is_that_of_the_neighbour(recipe) -> None:
    plan = fte.plan(fte.chain(NORM, LINEAR, fte.GELU()), recipe=recipe)
    own = dict(plan.forward[1].quantizers[0])
    assert plan.forward[0].next_quantizer is own["input"]
    by_index = {step.indices: step for step in plan.backward}
    assert by_index[2,].prev_quantizer is dict(by_index[0, 1].quantizers[1])["grad_output"]


def test_no_gradient_cast_for_an_op_outside_the_backward() -> None:
    plan = fte.plan(fte.chain(LINEAR, BIAS), recipe=DELAYED, requires_grad=(False, ((False,), (True,)), ()))
    assert [(step.indices, step.prev_quantizer) for step in plan.backward] == [((1,), None)]
