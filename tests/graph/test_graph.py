"""What a graph says is what running the chain does."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import Any, ClassVar

import pytest
import torch

import functional_te as fte
from bridge.library import ensure_registered
from functional_te import pytree
from functional_te.fuser.plan import plan as make_plan
from functional_te.fuser.rules import BACKWARD, FORWARD, JOINT
from functional_te.ops import OPS
from functional_te.ops.work import Work, per_element
from functional_te.pipeline import backward_pass, forward_pass
from tests.graph.blocks import RECIPES, mlp, spec, stack
from tests.helpers import random_params

BLOCKS = {
    "mlp": mlp(64, 96),
    "cached": fte.chain(fte.Linear(64, 64), fte.GELU(cache_quantized_input=True), fte.Linear(64, 64, bias=False)),
    "views": fte.chain(fte.Linear(64, 64), fte.Reshape((-1, 2, 32)), fte.L2Normalization(), fte.Reshape((-1, 64))),
    "casts": fte.chain(fte.Quantize(backward=True), fte.Linear(64, 64), fte.LayerNorm(64), fte.Quantize()),
    "branches": fte.chain(fte.MakeExtraOutput(), fte.RMSNorm(64), fte.AddExtraInput(), fte.ConstantScale(0.5)),
}


def _run(block: fte.Chain, recipe: Any) -> tuple[Any, Any, Any, Any, list[Any]]:
    """The plan, the arguments and what every launch really gives."""
    params, x = random_params(block), torch.randn(32, 64)
    extras = tuple(torch.randn(32, 64) for _ in range(block.num_extra_inputs))
    state = fte.init_state(block, recipe)
    plan = make_plan(block, recipe=recipe)
    results: list[Any] = []

    def launch(op: Any, direction: str, args: Any) -> Any:
        result = getattr(op, f"{direction}_impl")(args)
        results.append(result)
        return result

    with torch.no_grad():
        outcome = forward_pass(plan, x, params, state, extras, launch=launch)
        grads = [torch.ones_like(out) if isinstance(out, torch.Tensor) else None for out in outcome.extra_outputs]
        output = outcome.output
        dy = torch.ones(tuple(output.shape), dtype=output.dtype)
        backward_pass(plan, outcome.saved, state, dy, tuple(grads), launch=launch)
    return plan, (params, x, extras), outcome, state, results


def _described(value: Any) -> Any:
    return tuple(value.shape), str(value.dtype).removeprefix("torch.")


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", BLOCKS)
def test_tensors_and_memory_are_those_of_a_run(name, recipe) -> None:
    block = BLOCKS[name]
    plan, (params, x, extras), outcome, _, results = _run(block, RECIPES[recipe])
    graph = fte.graph(block, params, x, *extras, recipe=RECIPES[recipe])
    assert graph.error == ""
    assert [step.indices for step in graph.forward] == [step.indices for step in plan.forward]
    assert [step.indices for step in graph.backward] == [step.indices for step in plan.backward]
    for step, result in zip(graph.steps, results, strict=True):
        main = result[0]
        if main is not None:
            assert (step.output.shape, step.output.dtype) == _described(main)
            assert step.output.nbytes == sum(leaf.nbytes for leaf in pytree.leaves(main))
            assert bool(step.output.quantizer) == isinstance(main, fte.QuantizedTensor)
    owned = {leaf.untyped_storage().data_ptr() for leaf in pytree.leaves(params)}
    kept = {leaf.untyped_storage().data_ptr(): leaf.untyped_storage().nbytes() for leaf in pytree.leaves(outcome.saved)}
    assert graph.saved_bytes == sum(size for storage, size in kept.items() if storage not in owned)


@pytest.mark.parametrize("recipe", [name for name in RECIPES if name != "none"])
@pytest.mark.parametrize("name", BLOCKS)
def test_casts_are_those_that_numerics_sees(name, recipe) -> None:
    block = BLOCKS[name]
    _, (params, x, extras), _, state, _ = _run(block, RECIPES[recipe])
    seen = fte.numerics(block, params, x, *extras, recipe=RECIPES[recipe], state=state)
    found = {(entry.index, entry.role, entry.copy) for entry in seen if entry.role not in ("cached_input", "other")}
    graph = fte.graph(block, params, x, *extras, recipe=RECIPES[recipe])
    said = {(op.index, cast.role, copy) for op in graph.ops for cast in op.casts if cast.by for copy in cast.copies}
    assert said == found


def test_a_view_is_of_the_memory_that_it_is_a_view_of() -> None:
    graph = fte.graph([fte.Reshape((-1, 2, 32)), fte.L2Normalization(), fte.SReLU()], None, spec(32, 64))
    assert [(saved.origin, saved.nbytes) for saved in graph.ops[1].saved] == [("input", 2 * 32 * 64), ("made", 4 * 64)]
    assert [saved.nbytes for saved in graph.ops[0].saved] == [2]  # an element that stands for a shape


def test_edges_tell_who_casts_and_what_is_inside_of_a_fusion() -> None:
    graph = fte.graph(mlp(64, 96), None, spec(32, 64), recipe=RECIPES["mxfp8"])
    edges = {(edge.direction, edge.source, edge.target): edge for edge in graph.edges}
    into_linear = edges["forward", 1, 2]
    assert (into_linear.role, into_linear.cast_by, into_linear.tensor.format) == ("input", "source", "E4M3 1x32")
    assert into_linear.tensor.copies == ("rowwise", "columnwise")
    inside = edges["forward", 2, 3]  # the linear and its activation are one step
    assert inside.inside
    assert inside.tensor.shape == (32, 192)
    assert edges["backward", 6, 5].tensor.shape == (32, 64)
    assert edges["backward", 0, -1].target == -1
    assert len(graph.edges) == 2 * (len(graph.ops) + 1)


def test_side_branches() -> None:
    graph = fte.graph(mlp(64, 96), None, spec(32, 64))
    (out,) = graph.ops[0].extra_outputs
    (extra,) = graph.ops[6].extra_inputs
    assert (out.channel, out.to_caller, extra.source, extra.channel) == ("residual", False, 0, "residual")
    public = fte.graph(BLOCKS["branches"], None, spec(32, 64), spec(32, 64))
    assert (public.ops[2].extra_inputs[0].source, public.ops[2].extra_inputs[0].position) == (-1, 0)
    assert [tensor.shape for tensor in public.outputs] == [(32, 64), (32, 64)]


def test_what_needs_no_gradient_has_no_backward() -> None:
    block = mlp(64, 96)
    assert fte.graph(block, None, spec(32, 64), requires_grad=False).backward == ()
    pattern = (False, ((), (), (True,), (), (False,), (False,), ()), ())
    with pytest.raises(ValueError, match="requires_grad"):
        fte.graph(block, None, spec(32, 64), requires_grad=pattern)
    pattern = (False, ((), (False,), (True,), (), (False,), (False,), ()), ())
    graph = fte.graph(block, None, spec(32, 64), requires_grad=pattern)
    assert min(index for step in graph.backward for index in step.indices) == 2
    assert all(edge.target >= 2 for edge in graph.edges if edge.direction == "backward")


@pytest.mark.parametrize("op_class", sorted({type(op) for op, _ in OPS}, key=lambda kind: kind.__name__))
def test_names_of_custom_ops_are_those_that_are_registered(op_class) -> None:
    said = [op_class.custom_op_name(direction) for direction in ("forward", "backward")]
    if ensure_registered(op_class) is not None:
        assert said == [None, None]
        return
    names = [None if op is None else op.name for op in op_class.compile_ops]
    assert [name and f"functional_te::{name}" for name in said] == names
    assert said == [op_class.custom_op_name(direction) for direction in ("forward", "backward")]


def test_names_of_the_custom_ops_of_fusions() -> None:
    assert len((*JOINT, *FORWARD, *BACKWARD)) > 10
    graph = fte.graph(mlp(64, 96), None, spec(32, 64), recipe=RECIPES["mxfp8"])
    plan = make_plan(mlp(64, 96), recipe=RECIPES["mxfp8"])
    for step, own in zip(graph.steps, (*plan.forward, *plan.backward), strict=True):
        ensure_registered(type(own.op))
        registered = type(own.op).compile_ops[step.direction == "backward"]
        assert step.custom_op == ("" if registered is None else registered.name.removeprefix("functional_te::"))
        assert bool(step.gate) == step.inline


def test_a_backend_that_cannot_run_here_is_planned_for() -> None:
    """In the interpreter it can run, so there the plan that is made for it is the real one."""
    pytest.importorskip("triton", reason="the plan of the Triton backend asks for its record")
    code = """
import functional_te as fte
from functional_te.fuser.plan import plan
from functional_te.graph.plans import _as_on
from tests.graph.blocks import RECIPES, mlp
import dataclasses
for recipe in RECIPES.values():
    real, made = plan(mlp(64, 96), recipe=recipe, backend="triton"), _as_on(plan(mlp(64, 96), recipe=recipe), "triton")
    for field in dataclasses.fields(real):
        if field.name not in ("forward", "backward"):
            assert getattr(real, field.name) == getattr(made, field.name), field.name
    for one, other in zip((*real.forward, *real.backward), (*made.forward, *made.backward), strict=True):
        assert dataclasses.asdict(one) == dataclasses.asdict(other)
"""
    import os

    env = {**os.environ, "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", code], check=True, env=env, timeout=200)
    here = fte.graph(mlp(64, 96), None, spec(32, 64), recipe=RECIPES["delayed"], backend="triton")
    assert here.ops[2].casts[0].copies == ("rowwise", "columnwise")  # the reference transposes nothing
    assert fte.graph(mlp(64, 96), None, spec(32, 64), recipe=RECIPES["delayed"]).ops[2].casts[0].copies == ("rowwise",)


# ---- ops of one's own ----


@pytree.bundle
class DoubleArgs:
    input_: torch.Tensor


def _double(args: DoubleArgs) -> fte.FwdResult:
    return fte.FwdResult(args.input_ * 2)


def _double_backward(args: DoubleArgs) -> fte.BwdResult:
    return fte.BwdResult(args.input_ * 2)


@dataclasses.dataclass(frozen=True, eq=False)
class Double(fte.Op):
    """An op that says nothing of itself."""

    forward_impl = staticmethod(_double)
    backward_impl = staticmethod(_double_backward)

    def resolve_fwd_args(self, input_, *, params, state, requires_grad):
        assert isinstance(input_, fte.TensorSpec), "called on tensors that are not there"
        return DoubleArgs(input_=input_)

    def resolve_bwd_args(self, ctx, grad_output):
        raise AssertionError("called on tensors that are not there")


def _double_fake(args: Any) -> fte.FwdResult:
    return fte.FwdResult(args.input_)


@dataclasses.dataclass(frozen=True, eq=False)
class Described(fte.Op):
    """An op with fakes, of which one direction says what it costs."""

    fwd_args_type: ClassVar[type[Any]] = DoubleArgs
    bwd_args_type: ClassVar[type[Any]] = DoubleArgs
    forward_impl = staticmethod(_double)
    forward_fake = staticmethod(_double_fake)
    backward_impl = staticmethod(_double_backward)
    backward_fake = staticmethod(lambda args: fte.BwdResult(args.input_))
    forward_work = staticmethod(per_element(3))

    def resolve_fwd_args(self, input_, *, params, state, requires_grad):
        return DoubleArgs(input_=input_)

    def resolve_bwd_args(self, ctx, grad_output):
        return DoubleArgs(input_=grad_output)


def test_an_op_that_describes_nothing() -> None:
    graph = fte.graph([fte.Linear(64, 32), Double(), fte.RMSNorm(32)], None, spec(8, 64))
    assert graph.error == ""
    assert graph.ops[2].state == "assumed"
    assert graph.ops[2].output.shape == (8, 32)
    forward, backward = graph.forward[-2], graph.backward[1]
    assert (forward.kind, forward.flops, forward.custom_op) == ("Double", None, "")
    assert "no forward argument bundle" in forward.gate
    assert (backward.kind, backward.flops) == ("Double", None)
    assert "taken to be like its input" in repr(graph)


def test_an_op_that_says_what_it_costs() -> None:
    graph = fte.graph(Described(), None, spec(8, 64))
    assert graph.forward[0].flops == 3 * 8 * 64
    assert (graph.forward[0].read, graph.forward[0].written) == (2 * 8 * 64, 2 * 8 * 64)
    assert graph.backward[0].flops is None
    assert graph.forward[0].custom_op == "described_forward"
    assert Work().flops is None


# ---- chains that do not fit ----

SOUND = fte.RMSNorm(64)
BROKEN = {
    "shape": (
        [SOUND, fte.Linear(32, 32), fte.GELU()],
        None,
        1,
        "op 1 (BasicLinear): input: expected last dimension 32",
    ),
    "first": ([fte.RMSNorm(32), fte.GELU()], None, 0, "op 0 (RMSNorm): input"),
    "channel": ([SOUND, fte.AddExtraInput(channel="r"), fte.GELU()], None, 1, "op 1 (AddExtraInput): channel 'r' has"),
    "twice": (
        [*[fte.MakeExtraOutput(channel="r", output_to_caller=False)] * 2, SOUND],
        None,
        1,
        "multiple producers",
    ),
    "recipe": ([SOUND, fte.Linear(64, 40), fte.GELU()], "mxfp8", 1, "out_features: expected a multiple of 32"),
    "last": ([SOUND, fte.GELU(), fte.RMSNorm(63)], None, 2, "op 2 (RMSNorm)"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_chain_is_shown_up_to_the_fault(name) -> None:
    ops, recipe, fault, message = BROKEN[name]
    graph = fte.graph(ops, None, spec(32, 64), recipe=RECIPES[recipe or "none"])
    flat = [op for block in ops for op in (block.ops if isinstance(block, fte.Chain) else (block,))]
    states = ["ok"] * fault + ["error"] + ["not reached"] * (len(flat) - fault - 1)
    assert [op.state for op in graph.ops] == states
    assert message in graph.error
    assert graph.ops[fault].error == graph.error
    assert {index for step in graph.steps for index in step.indices} == set(range(fault))
    for text in (repr(graph), graph.to_mermaid().replace("#lt;", "<").replace("#gt;", ">")):
        assert message.replace('"', "'") in text
    assert "fte-bad" in graph.to_svg()
    assert graph.to_dict()["ops"][fault]["state"] == "error"


def test_errors_that_belong_to_no_op_are_raised() -> None:
    with pytest.raises(TypeError, match="graph: x: expected a tensor or a TensorSpec, got list"):
        fte.graph(SOUND, None, [1])
    with pytest.raises(ValueError, match="chain: params"):
        fte.graph(SOUND, (), spec(8, 64))
    with pytest.raises(TypeError, match="chain: argument 1: expected an op or a chain, got str"):
        fte.graph([SOUND, "relu"], None, spec(8, 64))
    with pytest.raises(ValueError, match="chain: ops: expected at least one op"):
        fte.graph([], None, spec(8, 64))
    with pytest.raises(ValueError, match="backend: expected 'auto' or one of"):
        fte.graph(SOUND, None, spec(8, 64), backend="cuda")
    with pytest.raises(ValueError, match="1 extra inputs"):
        fte.graph(fte.AddExtraInput(), None, spec(8, 64))


def test_nothing_is_written_and_nothing_runs() -> None:
    block = stack(2)
    params, x = random_params(block), torch.randn(8, 64)
    versions = [leaf._version for leaf in pytree.leaves(params)]
    one = fte.graph(block, params, x, recipe=RECIPES["nvfp4"])
    assert [leaf._version for leaf in pytree.leaves(params)] == versions
    assert one == fte.graph(
        block, fte.init(block, device="meta"), fte.TensorSpec((8, 64), torch.float32, "meta"), recipe=RECIPES["nvfp4"]
    )
