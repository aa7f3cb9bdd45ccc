"""What users of te.ops and its tests reach into: names, steps of groups, quantizers, channels, lazy parameters."""

import copy
import subprocess
import sys

import pytest
import torch

import bridge
import functional_te as fte
from bridge import ops
from bridge.ops import fused

from .compiled import CURRENT, SMALL_HISTORY, assert_close, assert_same_bits, backward, break_count, graph_count, leaf

TE_NAMES = """
AddExtraInput AllGather AllReduce BasicLinear Bias ClampedSwiGLU ConstantScale Dropout GEGLU GELU GLU Identity
L2Normalization LayerNorm Linear MakeExtraOutput QGEGLU QGELU Quantize ReGLU ReLU ReduceScatter Reshape
RMSNorm SReGLU SReLU ScaledClampedQGeGLU ScaledSReLU ScaledSiTUGLU ScaledSwiGLU ScaledTanhSReLU SiLU SiTUGLU
SwiGLU Sequential BasicOperation FusedOperation FusibleOperation register_forward_fusion
register_backward_fusion register_forward_backward_fusion is_op_fuser_grouped_tensor_path_supported fused
"""


def test_names():
    assert set(TE_NAMES.split()) <= set(ops.__all__)
    assert all(hasattr(ops, name) for name in ops.__all__)
    assert ops.is_op_fuser_grouped_tensor_path_supported() is False
    assert ops.is_op_fuser_grouped_tensor_path_supported(CURRENT, torch.bfloat16) is False
    for name in fused.__all__:
        assert issubclass(getattr(fused, name), fte.FusedOp)


def test_a_suite_can_import_it_under_te_names():
    code = """
import sys, types
import bridge
te = types.ModuleType("transformer_engine")
te.pytorch = types.ModuleType("transformer_engine.pytorch")
sys.modules["transformer_engine"], sys.modules["transformer_engine.pytorch"] = te, te.pytorch
sys.modules["transformer_engine.pytorch.ops"] = te.pytorch.ops = bridge.ops
sys.modules["transformer_engine.pytorch.ops.fused"] = bridge.ops.fused
import transformer_engine.pytorch.ops as te_ops
from transformer_engine.pytorch.ops.fused import ForwardLinearBiasActivation, BackwardAddRMSNorm
from transformer_engine.pytorch.ops import Sequential, register_forward_fusion
import torch
y = te_ops.Sequential(te_ops.Linear(4, 4), te_ops.GELU())(torch.ones(2, 4))
assert y.shape == (2, 4)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


# ---------------------------------------------------------------------------- groups


def _group(*modules):
    return ops.Sequential(*modules)._module_groups[0]


PATTERNS = {
    "ForwardLinearBiasActivation": (lambda: [ops.Linear(8, 8)], "forward", [0, 1]),
    "ForwardLinearBiasAdd": (lambda: [ops.Linear(8, 8), ops.AddExtraInput(in_place=True)], "forward", [0, 1, 2]),
    "ForwardLinearScaleAdd": (
        lambda: [ops.BasicLinear(8, 8), ops.ConstantScale(2.0), ops.AddExtraInput(in_place=True)],
        "forward",
        [0, 1, 2],
    ),
    "BackwardLinearAdd": (lambda: [ops.MakeExtraOutput(in_place=True), ops.BasicLinear(8, 8)], "backward", [0, 1]),
    "BackwardLinearScale": (lambda: [ops.BasicLinear(8, 8), ops.ConstantScale(2.0)], "backward", [0, 1]),
    "BackwardActivationBias": (lambda: [ops.Linear(8, 8), ops.GELU()], "backward", [1, 2]),
    "BackwardAddRMSNorm": (lambda: [ops.MakeExtraOutput(), ops.RMSNorm(8)], "backward", [0, 1]),
}


@pytest.mark.parametrize("name", PATTERNS)
def test_steps_of_a_group(name):
    make, direction, covered = PATTERNS[name]
    model = ops.Sequential(*make())
    group = model._module_groups[0]
    model(leaf(4, 8), *[leaf(4, 8, seed=1) for _ in range(group.num_extra_inputs)])
    steps = group._forward_ops if direction == "forward" else group._backward_ops
    assert any(isinstance(op, getattr(fused, name)) and indices == covered for op, indices in steps)
    for own in (group._forward_ops, group._backward_ops):
        assert [index for _, indices in own for index in indices] == list(range(len(group._basic_ops)))
        assert all(group._basic_ops[i[0]] is op for op, i in own if isinstance(op, ops.BasicOperation))


def test_steps_follow_the_last_call():
    model = ops.Sequential(ops.MakeExtraOutput(), ops.RMSNorm(8), ops.ConstantScale(2.0))
    group = model._module_groups[0]
    model(leaf(4, 8))
    assert len(group._backward_ops) == 2
    model(leaf(4, 8, requires_grad=False))
    assert len(group._backward_ops) == 3  # the norm's input needs no gradient, so nothing is fused
    group.maybe_fuse_ops(True, None, leaf(4, 8), ())
    assert len(group._backward_ops) == 2
    group.maybe_fuse_ops(False, CURRENT, leaf(4, 8), ())
    assert len(group._backward_ops) == 3
    assert group._backward_ops[0] == (model[0], [0])


def test_extra_inputs_of_a_group():
    group = _group(
        ops.AddExtraInput(),
        ops.MakeExtraOutput().set_extra_output_channel(0, "x", output_to_caller=False),
        ops.AddExtraInput().set_extra_input_channel(0, "x"),
        ops.AddExtraInput(),
    )
    assert group._basic_op_extra_input_sources == [[None], [], [(1, 0)], [None]]
    assert group.num_extra_inputs == group._num_extra_inputs == 2


def test_groups_of_a_mixed_list():
    model = ops.Sequential(
        ops.Linear(8, 8),
        torch.nn.Identity(),
        ops.GELU(),
        ops.Linear(8, 8),
        ops.Sequential(ops.Bias(8)),
        torch.nn.ReLU(),
        ops.RMSNorm(8),
        ops.FusedOperation([ops.Bias(8), ops.ReLU()]),
    )
    model(leaf(4, 8))
    assert len(model._module_groups) == 6
    assert [len(group._basic_ops) for group in model._module_groups if hasattr(group, "_basic_ops")] == [2, 3, 3]


def test_fused_operations_take_any_iterable():
    linear, gelu = ops.BasicLinear(8, 8), ops.GELU()
    for own in ((linear, gelu), [linear, gelu], iter([linear, gelu])):
        made = ops.FusedOperation(own)
        assert list(made.basic_ops) == [linear, gelu]
        assert (made.is_fused_op, linear.is_fused_op) == (True, False)
    assert_close(made(leaf(4, 8)), gelu(linear(leaf(4, 8))))


# ---------------------------------------------------------------------------- quantizers


def test_quantizers_of_ops():
    linear, gelu = ops.BasicLinear(16, 16), ops.GELU()
    assert [op.num_quantizers(mode) for op in (linear, gelu) for mode in ("forward", "backward")] == [2, 1, 0, 0]
    assert gelu.get_input_quantizer() is gelu.get_grad_output_quantizer() is None
    assert linear.get_quantizer("forward", 0) is None  # no recipe yet
    with pytest.raises(IndexError, match="out of range"):
        linear.get_quantizer("backward", 1)
    with pytest.raises(ValueError, match="'forward' or 'backward'"):
        linear.get_quantizer("sideways", 0)
    x = leaf(16, 16)
    with bridge.autocast(recipe=CURRENT):
        linear(x).sum().backward()
        assert linear.get_quantizer("backward", 0).dtype is torch.float8_e5m2
    made = linear.get_quantizer("forward", 0)  # of the recipe it ran last
    assert (made.dtype, made.scale, made.amax) == (torch.float8_e4m3fn, None, None)
    made.set_usage(columnwise=True)
    assert (made.rowwise_usage, made.columnwise_usage) == (True, True)
    cast = made(x.detach())
    assert isinstance(cast, fte.QuantizedTensor)
    assert made(cast) is cast
    expected = fte.quantize(x.detach(), CURRENT.quantizer(fte.recipes.Role("BasicLinear", "input", "")))
    assert_same_bits(cast.dequantize(), expected.dequantize())


def test_scales_follow_the_amaxes():
    """As te.ops' own test of delayed scaling: scales of every step from the largest amax so far."""
    recipe = fte.recipes.DelayedScaling(margin=2, fp8_format=fte.recipes.Format.HYBRID, amax_history_len=8)
    model = ops.Sequential(ops.BasicLinear(16, 16, dtype=torch.float32))
    amaxes = {("forward", 0): [], ("forward", 1): [], ("backward", 0): []}
    for number in range(3):
        x, dy = torch.full((16, 16), number + 1.0), torch.full((16, 16), 3.0 * (number + 1))
        with torch.no_grad():
            model[0].weight.fill_(2.0 / (number + 1))
        with bridge.autocast(recipe=recipe):
            y = model(x.requires_grad_())
            for (mode, index), seen in amaxes.items():
                if seen:
                    limit = 448 if mode == "forward" else 57344
                    scale = model[0].get_quantizer(mode, index).scale
                    torch.testing.assert_close(scale, torch.tensor([limit / max(seen) / 4]))
        y.backward(dy)
        for key, value in zip(amaxes, (number + 1.0, 2.0 / (number + 1), 3.0 * (number + 1)), strict=True):
            amaxes[key].append(value)
            torch.testing.assert_close(model[0].get_quantizer(*key).amax, torch.tensor([value]))


def test_casting_with_a_modules_quantizer_is_observed():
    linear = ops.BasicLinear(16, 16)
    with bridge.autocast(recipe=SMALL_HISTORY):
        linear(leaf(16, 16))
        quantizer = linear.get_input_quantizer()
        quantizer(torch.full((2, 16), 100.0))
    assert linear.get_quantizer("forward", 0).amax.item() == 100.0


# ---------------------------------------------------------------------------- channels


def test_messages_of_channels():
    add, fork = ops.AddExtraInput(), ops.MakeExtraOutput()
    for index in (1, -1):
        with pytest.raises(IndexError, match="out of range"):
            add.set_extra_input_channel(index, "x")
        with pytest.raises(IndexError, match="out of range"):
            fork.set_extra_output_channel(index, "x")
    for channel in ("", 3):
        with pytest.raises(ValueError, match="non-empty string"):
            add.set_extra_input_channel(0, channel)
        with pytest.raises(ValueError, match="non-empty string"):
            fork.set_extra_output_channel(0, channel)
    with pytest.raises(TypeError, match="output_to_caller must be a bool"):
        fork.set_extra_output_channel(0, "x", output_to_caller=1)

    def named(*channels):
        made = [
            (
                ops.AddExtraInput().set_extra_input_channel
                if kind == "add"
                else ops.MakeExtraOutput().set_extra_output_channel
            )(0, channel)
            for kind, channel in channels
        ]
        return ops.Sequential(*made)

    x = leaf(4, 8)
    for channels, message in (
        ([("add", "x")], "has no producer"),
        ([("add", "x"), ("fork", "x")], "has no earlier producer"),
        ([("fork", "x"), ("fork", "x"), ("add", "x")], "multiple producers"),
    ):
        with pytest.raises(ValueError, match=message):
            named(*channels)(x)
    model = named(("fork", "x"), ("add", "x"))
    assert not model[0]._extra_tensor_channels_locked
    model(x)
    assert model[0]._extra_tensor_channels_locked
    with pytest.raises(RuntimeError, match="already captured its channel routing"):
        model[0].set_extra_output_channel(0, "y")


# ---------------------------------------------------------------------------- parameters on meta


def test_parameters_on_meta_are_made_at_the_first_call():
    model = ops.Sequential(
        ops.RMSNorm(16, device="meta"), ops.Linear(16, 16, device="meta", dtype=torch.bfloat16), ops.GELU()
    )
    torch.manual_seed(11)
    y = model(leaf(4, 16, dtype=torch.bfloat16))
    backward(y)
    assert {p.device.type for p in model.parameters()} == {"cpu"}
    assert model[1].weight.dtype is torch.bfloat16
    assert 0.2 < model[1].weight.abs().max() <= 0.25
    assert model[1].bias.eq(0).all()
    assert model[0].weight.eq(1).all()
    assert all(p.grad is not None for p in model.parameters())
    kept = [p.detach().clone() for p in model.parameters()]
    model(leaf(4, 16, dtype=torch.bfloat16))
    assert_same_bits(kept, [p.detach() for p in model.parameters()])
    alone = ops.Linear(8, 8, device="meta")
    alone(leaf(2, 8))
    assert alone.weight.device.type == "cpu"


def test_a_copy_of_a_module_on_meta():
    model = copy.deepcopy(ops.Sequential(ops.Linear(8, 8, device="meta")))
    assert model(torch.empty(2, 8, device="meta")).shape == (2, 8)
    assert model[0].weight.device.type == "meta"
    with bridge.autocast(recipe=SMALL_HISTORY):
        ops.Sequential(ops.Linear(16, 16, device="meta"))(leaf(16, 16)).sum().backward()


# ---------------------------------------------------------------------------- interleaved weights


def test_interleaved_weights():
    rows = torch.arange(12).reshape(12, 1).expand(12, 3)
    wanted = [0, 1, 6, 7, 2, 3, 8, 9, 4, 5, 10, 11]
    made = bridge.interleave_glu_tensor(rows, 2)
    assert made[:, 0].tolist() == wanted
    assert bridge.interleave_glu_tensor(torch.arange(12), 2).tolist() == wanted
    assert_same_bits(bridge.deinterleave_glu_tensor(made, 2), rows)
    whole = torch.arange(12)
    assert bridge.interleave_glu_tensor(whole, 6).data_ptr() != whole.data_ptr()
    for function in (bridge.interleave_glu_tensor, bridge.deinterleave_glu_tensor):
        with pytest.raises(ValueError, match=function.__name__):
            function(whole, 4)
        with pytest.raises(ValueError, match="a positive int"):
            function(whole, 0)


@pytest.mark.parametrize("size", [2, 4])
def test_interleaved_weights_give_the_same_layer(size):
    plain, mixed = ops.Linear(6, 16), ops.Linear(6, 16)
    torch.nn.init.normal_(plain.bias)
    with torch.no_grad():
        mixed.weight.copy_(bridge.interleave_glu_tensor(plain.weight, size))
        mixed.bias.copy_(bridge.interleave_glu_tensor(plain.bias, size))
    x = leaf(4, 6)
    assert_close(ops.Sequential(mixed, ops.SwiGLU(glu_interleave_size=size))(x), ops.Sequential(plain, ops.SwiGLU())(x))


# ---------------------------------------------------------------------------- compiled


def test_steps_of_a_group_that_only_ran_compiled(dynamo):
    model, x = ops.Sequential(ops.Linear(8, 8), ops.GELU()), leaf(4, 8)
    torch.compile(model, fullgraph=True, backend="aot_eager")(x).sum().backward()
    group = model._module_groups[0]
    assert isinstance(group._forward_ops[0][0], fused.ForwardLinearBiasActivation)
    assert not model[0].basic_ops[0]._extra_tensor_channels_locked
    assert (graph_count(dynamo), break_count(dynamo)) == (1, 0)
