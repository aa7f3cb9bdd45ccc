"""Fusions in the style of te.ops: functions over modules, and their hooks next to built-in forwards and backwards."""

import dataclasses
from typing import Any, ClassVar

import pytest
import torch

import bridge
import functional_te as fte
from bridge import ops
from bridge.ops import fusions, te_context
from bridge.ops.context import OperationContext
from functional_te import pytree
from functional_te.fuser import registry
from functional_te.pipeline import backward_pass, forward_pass
from tests import helpers

from .compiled import (
    CURRENT,
    SMALL_HISTORY,
    GraphLog,
    assert_close,
    assert_same_bits,
    backward,
    break_count,
    graph_count,
    leaf,
)
from .test_custom_operations import Affine, Mix
from .testing_ops import BACKWARD_GAIN_CUBE, Cube, Gain, GainForwardArgs, GainSaved


@pytest.fixture(autouse=True)
def _registry():
    """Restores what is registered."""
    before, rules = (list(fusions.registered.joint), list(fusions.registered.forward)), registry._current
    backward_before = list(fusions.registered.backward)
    yield
    fusions.registered.joint, fusions.registered.forward = before
    fusions.registered.backward = backward_before
    fusions.registered.changed()
    registry._current = rules


def replacing(fused, *kinds):
    """A fusion function that puts ``fused(*ops)`` in the place of consecutive ops of these classes."""

    def fuse(own, *, recipe, **unused):
        result, start = [], 0
        while start < len(own):
            window = own[start : start + len(kinds)]
            if len(window) == len(kinds) and all(isinstance(op, kind) for op, kind in zip(window, kinds, strict=True)):
                result.append(fused(window))
                start += len(kinds)
            else:
                result.append(own[start])
                start += 1
        return result

    return fuse


def layout(model, index=0):
    """Class names and indices of the forward and backward steps."""
    group = model._module_groups[index]
    return [
        [(type(op).__name__, indices) for op, indices in steps] for steps in (group._forward_ops, group._backward_ops)
    ]


def step(call, model, x, recipe=None, seed=7, **kwargs):
    """Outputs and gradients of one training step."""
    model.zero_grad()
    x.grad = None
    with bridge.autocast(enabled=recipe is not None, recipe=recipe):
        outputs = call(x, **kwargs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    backward(outputs, seed)
    return [*(out.detach() for out in outputs), x.grad, *(p.grad for p in model.parameters())]


class ForwardLinearSiLU(ops.FusedOperation):
    """Computes on its own and saves what te.ops' unfused backwards read."""

    calls = 0

    def fuser_forward(self, basic_op_ctxs, input_, *, basic_op_kwargs, **unused):
        type(self).calls += 1
        weight = self.basic_ops[0].weight
        pre = torch.nn.functional.linear(input_, weight)
        linear_ctx, silu_ctx = basic_op_ctxs
        if linear_ctx.requires_grad:
            linear_ctx.save_for_backward(input_, weight)
            linear_ctx.with_quantized_compute = False
            linear_ctx.dtype = weight.dtype
        if silu_ctx.requires_grad:
            silu_ctx.save_for_backward(pre)
            silu_ctx.dtype = weight.dtype
        return pre * torch.sigmoid(pre), [(), ()]


class BackwardScaleLinear(ops.FusedOperation):
    """Reads what te.ops' unfused forwards save."""

    seen: ClassVar[list[Any]] = []

    def fuser_backward(self, basic_op_ctxs, grad_output, *, basic_op_grad_extra_outputs):
        scale = self.basic_ops[0]
        ctx = basic_op_ctxs[1]
        x, w = ctx.saved_tensors
        assert basic_op_grad_extra_outputs == [[], []]
        self.seen.append((ctx.dtype, ctx.input_requires_grad, ctx.weight_requires_grad, ctx.with_quantized_compute))
        dw = grad_output.reshape(-1, w.shape[0]).t() @ x.reshape(-1, w.shape[1])
        return (grad_output @ w) * scale.scale, [(), (dw,)], [(), ()]


class JointScaleAffine(ops.FusedOperation):
    """Saves what it likes."""

    def fuser_forward(self, basic_op_ctxs, input_, *, basic_op_kwargs, **unused):
        scale, affine = self.basic_ops
        basic_op_ctxs[0].save_for_backward(input_)
        basic_op_ctxs[0].factor = scale.scale
        basic_op_ctxs[1].power = basic_op_kwargs[1].get("power", 1)
        return input_ * scale.scale * affine.scale ** basic_op_ctxs[1].power + affine.shift, [(), ()]

    def fuser_backward(self, basic_op_ctxs, grad_output, **unused):
        (x,) = basic_op_ctxs[0].saved_tensors
        factor, power = basic_op_ctxs[0].factor, basic_op_ctxs[1].power
        scale = self.basic_ops[1].scale
        grad_scale = (grad_output * x).sum() * factor * power * scale ** (power - 1)
        return grad_output * factor * scale**power, [(), (grad_scale, grad_output.sum(0))], [None, None]


def _mlp(size=16):
    torch.manual_seed(3)
    return ops.Sequential(
        ops.ConstantScale(2.0),
        ops.Linear(size, size, bias=False),
        ops.SiLU(),
        ops.Linear(size, size),
        ops.GELU(),
    )


# ---------------------------------------------------------------------------- one direction


@pytest.mark.parametrize("dtype", helpers.DTYPES, ids=str)
def test_fused_forward_before_built_in_backwards(dtype):
    ops.register_forward_fusion(replacing(ForwardLinearSiLU, ops.BasicLinear, ops.SiLU))
    model, x = _mlp().to(dtype), leaf(4, 16, dtype=dtype)
    got = step(model, model, x)
    assert layout(model)[0] == [
        ("ConstantScale", [0]),
        ("ForwardLinearSiLU", [1, 2]),
        ("ForwardLinearBiasActivation", [3, 4, 5]),
    ]
    assert ("SiLU", [2]) in layout(model)[1]
    ref = helpers.double([x, *model.parameters()])
    hidden = torch.nn.functional.silu(2 * ref[0] @ ref[1].t())
    expected = torch.nn.functional.gelu(hidden @ ref[2].t() + ref[3], approximate="tanh")
    generator = torch.Generator().manual_seed(7)
    expected.backward(torch.randn(expected.shape, generator=generator).to(dtype).double())
    factor = 1 if dtype is torch.float32 else 20  # several roundings
    rtol, atol = helpers.TOLERANCES[dtype]
    for mine, want in zip(got, [expected, *[r.grad for r in ref]], strict=True):
        torch.testing.assert_close(mine.double(), want.detach(), rtol=factor * rtol, atol=factor * rtol + atol)


@pytest.mark.parametrize("recipe", [None, CURRENT, SMALL_HISTORY], ids=helpers.recipe_id)
def test_fused_backward_after_built_in_forwards(recipe):
    model, x = _mlp(), leaf(16, 16)
    expected = [t.clone() for t in step(model, model, x, recipe)]
    ops.register_backward_fusion(replacing(BackwardScaleLinear, ops.ConstantScale, ops.BasicLinear), prepend=True)
    BackwardScaleLinear.seen.clear()
    model = _mlp()  # whose quantizers have seen nothing
    got = step(model, model, x, recipe)
    assert layout(model)[1][0] == ("BackwardScaleLinear", [0, 1])
    assert BackwardScaleLinear.seen == [(torch.float32, True, True, recipe is not None)]
    assert_same_bits(got[0], expected[0])
    # its operands are the saved ones, its gradient is not cast
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if recipe is None else {"rtol": 0.25, "atol": 0.5}
    assert_close(got, expected, **tolerance)
    if recipe is SMALL_HISTORY:  # built-in ops of the same chain went on observing
        assert model[3].basic_ops[0].get_quantizer("backward", 0).amax > 0


def test_both_directions_by_different_functions():
    model, x = _mlp(), leaf(4, 16)
    expected = step(model, model, x)
    ops.register_forward_fusion(replacing(ForwardLinearSiLU, ops.BasicLinear, ops.SiLU))
    ops.register_backward_fusion(replacing(BackwardScaleLinear, ops.ConstantScale, ops.BasicLinear))
    assert_close(step(model, model, x), expected)
    forward, backward_steps = layout(model)
    assert forward[1] == ("ForwardLinearSiLU", [1, 2])
    assert backward_steps[0] == ("BackwardScaleLinear", [0, 1])


def test_without_gradients_nothing_is_saved():
    ops.register_forward_fusion(replacing(ForwardLinearSiLU, ops.BasicLinear, ops.SiLU))
    model, x = _mlp(), leaf(4, 16)
    with torch.no_grad():
        y = model(x)
    assert_close(y, model(x).detach())
    model[1].weight.requires_grad_(False)
    x.requires_grad_(False)
    model(x).sum().backward()
    assert model[1].weight.grad is None
    assert model[3].weight.grad is not None


# ---------------------------------------------------------------------------- both directions, custom ops, kwargs


def test_joint_fusion_of_built_in_and_custom_ops():
    model, x = ops.Sequential(ops.Linear(8, 8), ops.ConstantScale(3.0), Affine(), ops.GELU()), leaf(4, 8)
    kwargs = {"op_kwargs": {2: {"power": 2}}}
    expected = step(model, model, x, **kwargs)
    ops.register_forward_backward_fusion(replacing(JointScaleAffine, ops.ConstantScale, Affine))
    assert_close(step(model, model, x, **kwargs), expected)
    forward, backward_steps = layout(model)
    assert ("JointScaleAffine", [2, 3]) in forward
    assert ("JointScaleAffine", [2, 3]) in backward_steps
    assert isinstance(model._module_groups[0]._forward_ops[1][0], JointScaleAffine)


def test_fused_custom_ops_keep_their_contexts():
    class ForwardAffineGELU(ops.FusedOperation):
        """Runs the hook of the custom op and saves for GELU's built-in backward."""

        def fuser_forward(self, basic_op_ctxs, input_, *, basic_op_kwargs, **unused):
            affine = self.basic_ops[0]
            pre = affine.op_forward(
                basic_op_ctxs[0],
                input_,
                prev_op_grad_output_quantizer=None,
                next_op_input_quantizer=None,
                **basic_op_kwargs[0],
            )
            basic_op_ctxs[1].save_for_backward(pre)
            return torch.nn.functional.gelu(pre, approximate="tanh"), [(), ()]

    model, x = ops.Sequential(ops.Linear(8, 8), Affine(), ops.GELU()), leaf(4, 8)
    expected = step(model, model, x)
    ops.register_forward_fusion(replacing(ForwardAffineGELU, Affine, ops.GELU))
    assert_close(step(model, model, x), expected)
    assert layout(model)[0][-1] == ("ForwardAffineGELU", [2, 3])
    assert layout(model)[1][-1] == ("GELU", [3])


def test_calling_a_fused_operation_runs_its_ops():
    fused, x = ForwardLinearSiLU([ops.BasicLinear(8, 8), ops.SiLU()]), leaf(4, 8)
    before = ForwardLinearSiLU.calls
    assert_close(fused(x), ops.Sequential(*fused.basic_ops)(x))
    assert ForwardLinearSiLU.calls == before  # te.ops takes fused ops apart
    assert fused.is_fused_op
    assert not fused.basic_ops[0].is_fused_op


# ---------------------------------------------------------------------------- registration


def test_order_and_time_of_registration():
    class Second(ForwardLinearSiLU):
        pass

    class Third(ForwardLinearSiLU):
        pass

    recipes = []

    def watching(own, *, recipe, **unused):
        recipes.append((recipe, [type(op).__name__ for op in own]))
        return own

    model, x = _mlp(), leaf(16, 16)
    model(x)
    assert fusions.registered.version == ""
    assert model._module_groups[0].custom_fusions.made == {}  # no work unless there is something to do
    ops.register_forward_fusion(replacing(Second, ops.BasicLinear, ops.SiLU))
    model(x)
    assert ("Second", [1, 2]) in layout(model)[0]
    ops.register_forward_fusion(replacing(Third, ops.BasicLinear, ops.SiLU), prepend=True)
    ops.register_forward_fusion(watching)
    for _ in range(2):
        model(x)
        with bridge.autocast(recipe=CURRENT):
            model(x)
    assert ("Third", [1, 2]) in layout(model)[0]
    seen = ["ConstantScale", "Third", "BasicLinear", "Bias", "GELU"]
    assert recipes == [(None, seen), (CURRENT, seen)]  # once per recipe


def test_functional_rules_are_registered_as_such():
    ops.register_backward_fusion(BACKWARD_GAIN_CUBE, prepend=True)
    assert fte.default_fusions().backward[0] is BACKWARD_GAIN_CUBE
    assert fusions.registered.version == ""
    with pytest.raises(TypeError, match="a function or a FusionRule"):
        ops.register_forward_fusion(3)


class Empty(ops.FusedOperation):
    """Overrides nothing."""


BAD_FUNCTIONS = {
    "dropped": (lambda own, **_: own[1:], "mismatch"),
    "reordered": (lambda own, **_: own[::-1], "mismatch"),
    "copied": (lambda own, **_: [*own[:-1], ops.GELU()], "mismatch"),
    "no list": (lambda own, **_: None, "expected a list"),
    "no ops": (lambda own, **_: [1], "expected operations"),
    "no hooks": (lambda own, **_: [Empty(own[:2]), *own[2:]], "Empty: a forward fusion has to override fuser_forward"),
    "other hook": (
        lambda own, **_: [BackwardScaleLinear(own[:2]), *own[2:]],
        "BackwardScaleLinear: a forward fusion has to override fuser_forward",
    ),
}


@pytest.mark.parametrize("bad", BAD_FUNCTIONS)
def test_bad_fusion_functions(bad):
    function, message = BAD_FUNCTIONS[bad]
    ops.register_forward_fusion(function)
    with pytest.raises(RuntimeError, match=message):
        _mlp()(leaf(4, 16))


def test_a_joint_fusion_is_not_taken_apart():
    ops.register_forward_backward_fusion(replacing(JointScaleAffine, ops.ConstantScale, Affine))

    def apart(own, **_):
        return [basic for op in own for basic in (op.basic_ops if op.is_fused_op else [op])]

    ops.register_forward_fusion(apart)
    with pytest.raises(RuntimeError, match=r"JointScaleAffine: .*took apart"):
        ops.Sequential(ops.ConstantScale(2.0), Affine())(leaf(4, 8))


# ---------------------------------------------------------------------------- extra tensors


class ForkMix(ops.FusedOperation):
    """MakeExtraOutput, Mix, with the branch between them inside."""

    give = (False, True)

    def fuser_forward(self, basic_op_ctxs, input_, *, basic_op_extra_inputs, **unused):
        assert basic_op_extra_inputs == [(), (None,)]  # wired by the fused op itself
        basic_op_ctxs[0].save_for_backward(input_)
        extras = [input_.clone() if self.give[0] else None, 2 * input_ if self.give[1] else None]
        return input_ * input_, [(extras[0],), (extras[1],)]

    def fuser_backward(self, basic_op_ctxs, grad_output, *, basic_op_grad_extra_outputs):
        (x,) = basic_op_ctxs[0].saved_tensors
        (own,), (sums,) = basic_op_grad_extra_outputs
        grad = 2 * x * grad_output + (0 if own is None else own) + (0 if sums is None else 2 * sums)
        return grad, [(), ()], [(), (None,)]


def _fork(public=False, outside=False):
    model = ops.Sequential(
        ops.MakeExtraOutput().set_extra_output_channel(0, "x", output_to_caller=public),
        Mix().set_extra_input_channel(0, "x").set_extra_output_channel(0, "sum", output_to_caller=True),
        ops.Linear(8, 8, bias=False),
    )
    if outside:
        model.append(ops.AddExtraInput().set_extra_input_channel(0, "x"))
    return model


@pytest.mark.parametrize(("public", "outside"), [(False, False), (True, False), (False, True)])
def test_extra_outputs_of_fused_ops(public, outside):
    model, x = _fork(public, outside), leaf(4, 8)
    expected = step(model, model, x)

    class Fused(ForkMix):
        give = (public or outside, True)

    ops.register_forward_backward_fusion(replacing(Fused, ops.MakeExtraOutput, Mix))
    assert_close(step(model, model, x), expected)
    assert layout(model)[0][0] == ("Fused", [0, 1])


@pytest.mark.parametrize(
    ("public", "outside", "give", "message"),
    [
        (True, False, (False, True), "extra output 0 of basic op 0: .* is public"),
        (False, True, (False, True), "extra output 0 of basic op 0: .* outside its forward fusion"),
        (False, False, (False, False), "extra output 0 of basic op 1: .* is public"),
    ],
)
def test_missing_extra_outputs_of_fused_ops(public, outside, give, message):
    class Fused(ForkMix):
        pass

    Fused.give = give
    ops.register_forward_backward_fusion(replacing(Fused, ops.MakeExtraOutput, Mix))
    with pytest.raises(RuntimeError, match=f"Fused: {message}"):
        _fork(public, outside)(leaf(4, 8))


# ---------------------------------------------------------------------------- contexts

CONTEXTS = {
    "basic_linear": (lambda: ops.BasicLinear(8, 6), (2, 3, 8)),
    "bias": (lambda: ops.Bias(8), (4, 8)),
    "gelu": (lambda: ops.GELU(), (4, 8)),
    "swiglu": (lambda: ops.SwiGLU(), (4, 8)),
    "scaled_swiglu": (lambda: ops.ScaledSwiGLU(), (4, 8)),
    "rms_norm": (lambda: ops.RMSNorm((2, 4)), (3, 5, 2, 4)),
    "layer_norm": (lambda: ops.LayerNorm(8), (2, 3, 8)),
    "l2": (lambda: ops.L2Normalization(), (2, 3, 8)),
    "reshape": (lambda: ops.Reshape((4, -1)), (2, 4, 3)),
    "constant_scale": (lambda: ops.ConstantScale(2.0), (4, 8)),
    "add": (lambda: ops.AddExtraInput(), (4, 8)),
    "fork": (lambda: ops.MakeExtraOutput(), (4, 8)),
    "quantize": (lambda: ops.Quantize(), (4, 8)),
    "identity": (lambda: ops.Identity(), (4, 8)),
}


def test_every_translator_is_tested():
    kinds = {type(make().op) for make, _ in CONTEXTS.values()}
    assert all(any(issubclass(kind, known) for kind in kinds) for known in te_context.TRANSLATORS)


@pytest.mark.parametrize("case", CONTEXTS)
def test_contexts_go_to_te_and_back(case, monkeypatch):
    make, shape = CONTEXTS[case]
    module = make()
    for own in module.parameters():
        torch.nn.init.uniform_(own, 0.5, 1.5)
    x = helpers.uniform(shape)
    extras = {"scaled_swiglu": (helpers.uniform(shape[:-1]),), "add": (helpers.uniform(shape),)}.get(case, ())
    block = fte.chain(module.op)
    params = ({name: p.detach() for name, p in module.named_parameters()},)
    plan = fte.plan(block)
    outcome = forward_pass(plan, x, params, None, extras)
    dy = helpers.uniform(tuple(outcome.output.shape), seed=1)
    expected = backward_pass(plan, outcome.saved, None, dy, (None,) * len(outcome.extra_outputs))
    kept = {}

    def watching(op, direction, args):
        return op.backward_impl(args)

    original = fte.ops.BackwardContext

    def capturing(*args):
        kept["ctx"] = original(*args)
        return kept["ctx"]

    monkeypatch.setattr("functional_te.pipeline.BackwardContext", capturing)
    backward_pass(plan, outcome.saved, None, dy, (None,) * len(outcome.extra_outputs), watching)
    ctx = te_context.te_from_native(module.op, module, kept["ctx"])
    assert all(tensor is None or isinstance(tensor, torch.Tensor) for tensor in ctx.saved_tensors)
    forward_ctx = OperationContext(True)
    for name, value in vars(ctx).items():
        if name not in ("requires_grad", "to_save", "loaded"):
            setattr(forward_ctx, name, value)
    forward_ctx.save_for_backward(*ctx.saved_tensors)
    native = te_context.native_from_te(module.op, module, params[0], forward_ctx, x)
    monkeypatch.undo()
    again = backward_pass(plan, (native,), None, dy, (None,) * len(outcome.extra_outputs))
    assert_same_bits(list(again[:3]), list(expected[:3]))
    assert fte.pytree.structure(native) == fte.pytree.structure(outcome.saved[0])


def test_contexts_that_do_not_fit():
    class Forgetful(ForwardLinearSiLU):
        def fuser_forward(self, basic_op_ctxs, input_, **kwargs):
            result = super().fuser_forward(basic_op_ctxs, input_, **kwargs)
            basic_op_ctxs[0].save_for_backward(input_)
            return result

    class LinearDropout(ForwardLinearSiLU):
        pass

    model = _mlp()
    ops.register_forward_fusion(replacing(Forgetful, ops.BasicLinear, ops.SiLU))
    with pytest.raises(RuntimeError, match=r"BasicLinear: .* saved 1 tensors .* reads 2"):
        model(leaf(4, 16))
    ops.register_forward_fusion(replacing(LinearDropout, ops.BasicLinear, ops.Dropout))
    with pytest.raises(RuntimeError, match=r"Dropout: its context has no form in te.ops"):
        ops.Sequential(ops.BasicLinear(8, 8), ops.Dropout(0.5))(leaf(4, 8))


# ---------------------------------------------------------------------------- compiled


def test_hooks_of_fusions_are_traced(dynamo):
    class TracedForward(ForwardLinearSiLU):
        pass

    class TracedBackward(BackwardScaleLinear):
        def fuser_backward(self, basic_op_ctxs, grad_output, **unused):
            x, w = basic_op_ctxs[1].saved_tensors
            return (grad_output @ w) * self.basic_ops[0].scale, [(), (grad_output.t() @ x,)], [(), ()]

    ops.register_forward_fusion(replacing(TracedForward, ops.BasicLinear, ops.SiLU))
    ops.register_backward_fusion(replacing(TracedBackward, ops.ConstantScale, ops.BasicLinear))
    model, x, log = _mlp(), leaf(16, 16), GraphLog()
    expected = [t.clone() for t in step(model, model, x, CURRENT)]
    warning = bridge.CompileEagerFallbackWarning
    with pytest.warns(warning, match="TracedForward"), pytest.warns(warning, match="TracedBackward"):
        got = step(torch.compile(model, fullgraph=True, backend=log), model, x, CURRENT)
    assert_same_bits(got, expected)
    assert (graph_count(dynamo), break_count(dynamo)) == (1, 0)
    assert {"forwardlinearbiasactivation_forward", "gelu_backward"} & set(log.custom_ops())
    assert not any("silu" in name for name in log.custom_ops("fwd"))


@pytree.bundle
class GainCubeForwardArgs:
    gain: GainForwardArgs


def _gain_cube(args):
    pre = args.gain.gain * args.gain.input_ + 1
    return pre * pre * pre, pre


def _gain_cube_fake(args):
    return args.gain.input_, args.gain.input_


def _gain_cube_context(args, aux):
    return GainSaved(input_=args.gain.input_, gain=args.gain.gain, factor=args.gain.factor), aux


@dataclasses.dataclass(frozen=True, eq=False)
class ForwardGainCube(fte.FusedOp):
    """Forward of Gain, Cube in one step."""

    fwd_args_type: ClassVar[type[Any]] = GainCubeForwardArgs

    forward_impl = staticmethod(_gain_cube)
    forward_fake = staticmethod(_gain_cube_fake)
    setup_context = staticmethod(_gain_cube_context)

    def resolve_fwd_args(self, input_, *, params, state, requires_grad):
        gain = self.ops[0].resolve_fwd_args(input_, params=params[0], state={}, requires_grad=requires_grad[0])
        return GainCubeForwardArgs(gain=gain)


@pytree.bundle
class NinthForwardArgs:
    input_: torch.Tensor


@pytree.bundle
class NinthBackwardArgs:
    grad_output: torch.Tensor
    input_: torch.Tensor


@dataclasses.dataclass(frozen=True, eq=False)
class JointNinth(fte.FusedOp):
    """Cube, Cube in one step, both directions, with one saved tensor."""

    fwd_args_type: ClassVar[type[Any]] = NinthForwardArgs
    bwd_args_type: ClassVar[type[Any]] = NinthBackwardArgs

    forward_impl = staticmethod(lambda args: (args.input_**9, None))
    forward_fake = staticmethod(lambda args: (args.input_, None))
    setup_context = staticmethod(lambda args, aux: (args.input_, None))
    backward_impl = staticmethod(lambda args: fte.BwdResult(9 * args.input_**8 * args.grad_output, ((), ())))
    backward_fake = staticmethod(lambda args: fte.BwdResult(args.input_, ((), ())))

    def resolve_fwd_args(self, input_, *, params, state, requires_grad):
        return NinthForwardArgs(input_=input_)

    def resolve_bwd_args(self, ctxs, grad_output):
        return NinthBackwardArgs(grad_output=grad_output, input_=ctxs[0].saved)


def _build_forward(own):
    return ForwardGainCube(own)


def _build_joint(own):
    return JointNinth(own)


GAIN_CUBE = (fte.Slot((Gain,)), fte.Slot((Cube,)))
FORWARD_GAIN_CUBE = fte.FusionRule("forward_gain_cube", GAIN_CUBE, _build_forward)
JOINT_NINTH = fte.FusionRule("joint_ninth", (fte.Slot((Cube,)), fte.Slot((Cube,))), _build_joint)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_rules_with_bundles_in_one_compiled_graph(dynamo, backend):
    def model_of():
        torch.manual_seed(5)
        return ops.Sequential(
            ops.BasicOperation(Gain(8)),
            ops.BasicOperation(Cube()),
            ops.Linear(8, 8, bias=False),
            ops.BasicOperation(Cube()),
            ops.BasicOperation(Cube()),
        )

    model, x = model_of(), (0.5 * leaf(4, 8)).detach().requires_grad_()
    plain = [t.clone() for t in step(model, model, x)]
    ops.register_forward_fusion(FORWARD_GAIN_CUBE)
    ops.register_backward_fusion(BACKWARD_GAIN_CUBE)
    ops.register_forward_backward_fusion(JOINT_NINTH)
    eager = [t.clone() for t in step(model, model, x)]
    tolerance = {"rtol": 1e-4, "atol": 1e-5}
    assert_close(eager, plain, **tolerance)
    forward, backward_steps = layout(model)
    assert forward == [("ForwardGainCube", [0, 1]), ("BasicLinear", [2]), ("JointNinth", [3, 4])]
    assert backward_steps == [("BackwardGainCube", [0, 1]), ("BasicLinear", [2]), ("JointNinth", [3, 4])]
    log = GraphLog(backend)
    compiled = step(torch.compile(model, fullgraph=True, backend=log), model, x)
    assert_close(compiled, eager, **tolerance)
    assert (graph_count(dynamo), break_count(dynamo)) == (1, 0)
    assert len(log.graphs) == 1
    wanted = {"forwardgaincube_forward", "backwardgaincube_backward", "jointninth_forward", "jointninth_backward"}
    assert wanted <= set(log.custom_ops())
