"""Collectives and sharded linear layers: two gloo ranks run the cases of ``distributed_cases`` once."""

import pytest
import torch

import functional_te as fte
from bridge import ops
from tests.bridge.distributed_cases import CASES, SIZE
from tests.helpers import assert_same, uniform
from tests.ranks import reports_of

LIMIT = 400


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """What became of every case on every rank."""
    folder = tmp_path_factory.mktemp("ranks")
    own = (str(SIZE), str(folder / "rendezvous"), str(folder / "{rank}.json"))
    return reports_of("tests.bridge.distributed_cases", folder, SIZE, LIMIT, *own)


@pytest.mark.parametrize("case", CASES)
def test_two_ranks(reports, case):
    for rank, (found, log) in enumerate(reports):
        assert found.get(case, f"not reached: {list(found.values())[-1:]}\n{log}") == "ok", f"rank {rank}"


COLLECTIVES = {
    "all_reduce": "(Tensor input, str reduce_op, Any group_name) -> Tensor",
    "all_to_all_single": "(Tensor input, SymInt[] output_split_sizes, SymInt[] input_split_sizes, Any group_name) "
    "-> Tensor",
    "all_gather_into_tensor": "(Tensor input, int group_size, Any group_name) -> Tensor",
    "reduce_scatter_tensor": "(Tensor input, str reduce_op, int group_size, Any group_name) -> Tensor",
    "wait_tensor": "(Tensor tensor) -> Tensor",
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_the_private_ops_are_what_they_were(name):
    """``functional_te.kernels.collectives`` has to follow if this fails."""
    schema = str(getattr(torch.ops._c10d_functional, name).default._schema).replace("str group_name", "Any group_name")
    assert schema == f"_c10d_functional::{name}{COLLECTIVES[name]}"
    assert callable(torch.distributed.distributed_c10d._resolve_process_group)


# ---- one process, without torch.distributed


@pytest.mark.parametrize("kind", ["AllReduce", "AllGather", "ReduceScatter"])
def test_one_rank_needs_no_process_group(kind):
    x = uniform((3, 4))
    module = getattr(ops, kind)()
    assert module(x) is x
    assert (module.process_group, module.process_group_size) == (None, 1)
    op = getattr(fte, kind)()
    result, pullback = fte.vjp(op, ({},), x)
    assert_same(result.output, x)
    assert result.output.data_ptr() != x.data_ptr()
    assert_same(pullback(x).input, x)


@pytest.mark.parametrize("kind", ["AllReduce", "AllGather", "ReduceScatter"])
def test_more_ranks_need_one(kind):
    with pytest.raises(RuntimeError, match=r"torch.distributed to be initialized with 2 ranks"):
        fte.apply(getattr(fte, kind)("", 2), ({},), uniform((4, 4)))
    with pytest.raises(ValueError, match="size: expected at least 1"):
        getattr(fte, kind)("", 0)
    with pytest.raises(TypeError, match="group: expected the registry name"):
        getattr(fte, kind)(None, 2)
    with pytest.raises(TypeError, match=r"process_group: expected None or a torch\.distributed.ProcessGroup"):
        getattr(ops, kind)(object())


@pytest.mark.parametrize("mode", ["column", "row", "nonsense"])
def test_one_rank_resets_the_mode(mode):
    layer = ops.Linear(8, 7, tensor_parallel_mode=mode, sequence_parallel=True)
    linear, bias = layer.basic_ops
    assert (linear.tensor_parallel_mode, linear.tensor_parallel_group, linear.tensor_parallel_size) == (None, None, 1)
    assert not linear.sequence_parallel
    assert (linear.local_in_features, linear.local_out_features) == (8, 7)
    assert not bias.tensor_parallel
    assert layer(torch.zeros(3, 8)).shape == (3, 7)


def test_wrong_shardings():
    with pytest.raises(ValueError, match="mode: expected 'column' or 'row'"):
        fte.TensorParallel("diagonal", "", 2)
    with pytest.raises(ValueError, match="in_features: expected a multiple of the 2 ranks, got 7"):
        fte.BasicLinear(7, 8, fte.TensorParallel("row", "", 2))
    with pytest.raises(TypeError, match="tensor_parallel"):
        fte.BasicLinear(8, 8, "row")


# ---- plans


def sharded(mode, sequence=False):
    return fte.BasicLinear(8, 8, fte.TensorParallel(mode, "", 2, sequence))


def layout(ops_, kind, **options):
    plan = fte.plan(fte.chain(*ops_), **options)
    made = [type(step.op).__name__ for step in getattr(plan, kind) if step.fused]
    return made, [refusal.reason for refusal in plan.refusals if refusal.rule.startswith(kind)]


BIAS, NORM = fte.Bias(8), fte.RMSNorm(8)
ADD, FORK, SCALE = fte.AddExtraInput(), fte.MakeExtraOutput(), fte.ConstantScale(2.0)
# (rest of the chain, with None for the linear; direction; fused op; mode whose product is summed over ranks)
FUSIONS = [
    ((None, BIAS, ADD), "forward", "ForwardLinearBiasAdd", "row"),
    ((None, SCALE, ADD), "forward", "ForwardLinearScaleAdd", "row"),
    ((None, fte.GELU()), "forward", "ForwardLinearBiasActivation", "row"),
    ((FORK, None), "backward", "BackwardLinearAdd", "column"),
    ((None, SCALE), "backward", "BackwardLinearScale", "column"),
    ((FORK, NORM, None), "backward", "BackwardRMSNormLinear", "column"),
]


@pytest.mark.parametrize(("ops_", "kind", "name", "summed"), FUSIONS, ids=[f[2] for f in FUSIONS])
def test_fusions_stop_at_a_sum_over_ranks(ops_, kind, name, summed):
    for mode in ("column", "row"):
        made, reasons = layout([op or sharded(mode) for op in ops_], kind)
        assert (name in made) == (mode != summed)
        assert any(f"{mode}-parallel" in reason for reason in reasons) == (mode == summed)


def test_neighbours_do_not_cast_what_is_gathered_first():
    recipe = fte.recipes.Float8CurrentScaling()

    def casts(*chain):
        plan = fte.plan(fte.chain(*chain), recipe=recipe, fusions=fte.Fusions())
        return plan.forward[0].next_quantizer is not None, plan.backward[0].prev_quantizer is not None

    for mode in ("column", "row"):
        assert casts(NORM, sharded(mode))[0]
        assert casts(sharded(mode), BIAS)[1]
        assert casts(NORM, sharded(mode, True))[0] == (mode == "row")
        assert casts(sharded(mode, True), BIAS)[1] == (mode == "column")


def test_shapes_without_ranks():
    for mode, sequence, shape, expected in [
        ("column", False, (6, 8), (6, 4)),
        ("column", True, (3, 8), (6, 4)),
        ("row", False, (6, 4), (6, 8)),
        ("row", True, (6, 4), (3, 8)),
    ]:
        op = sharded(mode, sequence)
        assert (
            fte.eval_shape(
                op, (op.param_specs(torch.float32, "cpu"),), fte.TensorSpec(shape, torch.float32)
            ).output.shape
            == expected
        )
