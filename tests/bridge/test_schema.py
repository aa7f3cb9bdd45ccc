"""Schemas derived from bundles, the round trip of arguments, and the registered ops themselves."""

import dataclasses
import enum
from typing import Any, ClassVar

import pytest
import torch

import bridge
import functional_te as fte
from bridge.library import ensure_registered
from bridge.schema import Schema
from functional_te import pytree
from functional_te.fuser.rules.forward_linear_bias_activation import (
    ForwardLinearBiasActivation,
    LinearBiasActivationArgs,
)
from functional_te.ops.activation import ActivationBackwardArgs
from functional_te.ops.products import LinearBackwardArgs, LinearForwardArgs
from functional_te.ops.rms_norm import RMSNormBackwardArgs, RMSNormForwardArgs

from .compiled import GraphLog, assert_close, graph_count, leaf
from .testing_ops import Cube, Gain, GainForwardArgs, NumpyTanh, OneTensor, TwoTensors

E4M3 = fte.Float8CurrentScalingQuantizer(dtype=torch.float8_e4m3fn)
E5M2 = fte.Float8CurrentScalingQuantizer(dtype=torch.float8_e5m2)
DELAYED = fte.Float8DelayedScalingQuantizer(dtype=torch.float8_e4m3fn, amax_history_len=4)


class Mode(enum.Enum):
    """Some enum."""

    FAST = 1
    EXACT = 2


@pytree.node
class Inner:
    first: torch.Tensor
    second: torch.Tensor | None = None
    flag: bool = pytree.static(default=False)


@pytree.node
class Few:
    tensors: tuple[torch.Tensor, ...] = ()


@pytree.node
class Everything:
    """One field of every kind."""

    tensor: torch.Tensor
    optional: torch.Tensor | None = None
    nested: Inner | None = None
    quantized: fte.QuantizedTensor | None = None
    either: torch.Tensor | fte.QuantizedTensor | None = None
    quantizer: fte.BoundQuantizer | None = None
    count: int = pytree.static(default=1)
    maybe_count: int | None = pytree.static(default=None)
    factor: float = pytree.static(default=1.0)
    maybe_factor: float | None = pytree.static(default=None)
    flag: bool = pytree.static(default=True)
    text: str = pytree.static(default="")
    maybe_text: str | None = pytree.static(default=None)
    dtype: torch.dtype = pytree.static(default=torch.float32)
    device: torch.device | None = pytree.static(default=None)
    mode: Mode = pytree.static(default=Mode.FAST)
    sizes: tuple[int, ...] = pytree.static(default=())
    value: fte.Quantizer | None = pytree.static(default=None)


@pytree.node
class Many:
    """Tuples of any length: of tensors, of nodes, of either; one inside of a node; and plain ones."""

    tensors: tuple[torch.Tensor, ...]
    quantizers: tuple[fte.BoundQuantizer, ...] = ()
    either: tuple[torch.Tensor | fte.QuantizedTensor, ...] = ()
    nested: Few | None = None
    sizes: tuple[int, ...] = pytree.static(default=())


def _slots(schema):
    return schema.arguments.split(", ")


def test_schema_has_one_slot_per_tensor_and_plain_value():
    slots = _slots(Schema(Everything))
    assert slots[:2] == ["Tensor tensor", "Tensor? optional"]
    assert {"Tensor? nested_first", "Tensor? nested_second", "bool? nested_flag"} <= set(slots)
    assert {"Tensor? quantized_rowwise_data", "Tensor? quantized_rowwise_scale_inv"} <= set(slots)
    assert {"Tensor? either", "Tensor? either_rowwise_data", "ScalarType? either_dtype"} <= set(slots)
    assert "Tensor? quantizer_scale" in slots
    assert {"SymInt count", "SymInt? maybe_count", "Scalar factor", "Scalar? maybe_factor"} <= set(slots)
    assert {"bool flag", "str text", "str? maybe_text", "ScalarType dtype", "Device? device"} <= set(slots)
    assert slots[-1] == "str constants"
    assert not any(slot.split()[-1] in ("mode", "sizes", "value") for slot in slots)  # those are constants
    names = [slot.split()[-1] for slot in slots]
    assert len(names) == len(set(names))


def test_schema_is_accepted_by_the_dispatcher():
    parsed = torch._C.parse_schema(f"everything({Schema(Everything).arguments}) -> Tensor[]")
    assert len(parsed.arguments) == len(_slots(Schema(Everything)))


def _same(left, right):
    """Equal structure, static fields and constants included, and the very same tensors."""
    left_leaves, left_spec = pytree.tree_flatten(left)
    right_leaves, right_spec = pytree.tree_flatten(right)
    return left_spec == right_spec and all(a is b for a, b in zip(left_leaves, right_leaves, strict=True))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"optional": torch.ones(2), "nested": Inner(first=torch.zeros(1))},
        {"nested": Inner(first=torch.zeros(1), second=torch.ones(1), flag=True)},
        {"quantized": fte.quantize(torch.ones(3, 2), E4M3)},
        {"either": torch.ones(4)},
        {"either": fte.quantize(torch.ones(3, 2, dtype=torch.bfloat16), E5M2)},
        {"quantizer": fte.BoundQuantizer(quantizer=E4M3)},
        {"quantizer": fte.BoundQuantizer(quantizer=DELAYED, scale=torch.ones(1))},
        {"count": 7, "maybe_count": 0, "factor": -0.5, "maybe_factor": 0.0, "flag": False, "text": "a, 'b'"},
        {"maybe_text": "", "dtype": torch.bfloat16, "device": torch.device("cpu")},
        {"mode": Mode.EXACT, "sizes": (3, -1), "value": E5M2},
    ],
    ids=lambda fields: "+".join(fields) or "defaults",
)
def test_encode_then_decode_gives_the_same_bundle(fields):
    schema = Schema(Everything)
    args = Everything(tensor=torch.ones(1), **fields)
    flat = schema.encode(args)
    assert len(flat) == len(_slots(schema))
    assert _same(schema.decode(flat), args)


def test_tuples_of_tensors_and_nodes_are_lists():
    schema = Schema(Many)
    assert _slots(schema) == [
        "Tensor[] tensors",
        "Tensor[] quantizers",
        "Tensor[] either",
        "Tensor[] nested_tensors",
        "str constants",
    ]
    x = torch.ones(2, 32)
    bound = fte.BoundQuantizer(quantizer=DELAYED, scale=torch.ones(1))
    for bundle in (
        Many(tensors=(x,)),
        Many(tensors=(), either=(x, fte.quantize(x, E4M3), x), sizes=(1, 2)),
        Many(tensors=(x, x + 1), quantizers=(bound, bound), nested=Few(tensors=(x,))),
    ):
        again = schema.decode(schema.encode(bundle))
        assert pytree.structure(again) == pytree.structure(bundle)
        assert all(one is other for one, other in zip(pytree.leaves(again), pytree.leaves(bundle), strict=True))
        placeholder = schema.placeholder(schema.summary(schema.encode(bundle)))
        assert pytree.structure(placeholder) == pytree.structure(bundle)
        assert [spec.dtype for spec in pytree.leaves(placeholder)] == [leaf.dtype for leaf in pytree.leaves(bundle)]


def test_constants_of_equal_text_stay_apart():
    # 1 and True are equal in Python, and two classes may print alike
    schema = Schema(Everything)
    for sizes in ((1, 0), (True, False), (1.0, 0.0), (0.0,), (-0.0,)):
        decoded = schema.decode(schema.encode(Everything(tensor=torch.ones(1), sizes=sizes)))
        assert [repr(size) for size in decoded.sizes] == [repr(size) for size in sizes]


def test_fields_that_mix_tensors_and_plain_values_are_refused():
    @pytree.node
    class Mixed:
        field: Any

    for annotation in (torch.Tensor | int, torch.Tensor | float | None, fte.QuantizedTensor | str):
        Mixed.__annotations__["field"] = annotation
        with pytest.raises(TypeError, match=r"Mixed\.field"):
            Schema(Mixed)


def test_value_of_the_wrong_kind_is_refused_by_field():
    with pytest.raises(TypeError, match=r"GainForwardArgs\.offset.*list"):
        Schema(GainForwardArgs).encode(GainForwardArgs(input_=torch.ones(1), gain=torch.ones(1), offset=[1.0]))


def test_op_with_a_field_no_schema_can_express_falls_back_with_the_reason():
    @pytree.node
    class Mixed:
        input_: torch.Tensor | int

    @dataclasses.dataclass(frozen=True, eq=False)
    class MixedOp(Cube):
        fwd_args_type: ClassVar[type[Any]] = Mixed

    assert "Mixed.input_" in ensure_registered(MixedOp)
    with pytest.raises(TypeError, match=r"Mixed\.input_"):
        bridge.register_custom_op(MixedOp)


# ---------------------------------------------------------------------------- the registered ops


def _x(*shape, seed=0, dtype=torch.float32):
    return leaf(*shape, seed=seed, dtype=dtype, requires_grad=False)


def _bound(quantizer, scale=None):
    return fte.BoundQuantizer(quantizer=quantizer, scale=None if scale is None else torch.tensor([scale]))


LINEAR_FP8 = LinearForwardArgs(
    input_=_x(4, 8),
    weight=_x(6, 8, seed=1),
    input_quantizer=_bound(DELAYED, 8.0),
    weight_quantizer=_bound(E4M3),
    output_quantizer=_bound(DELAYED, 2.0),
    save_input=True,
    save_weight=True,
)

CALLS = {
    "rmsnorm_forward": (fte.RMSNorm, 0, RMSNormForwardArgs(input_=_x(4, 8), weight=_x(8, seed=1))),
    "rmsnorm_forward_cast": (
        fte.RMSNorm,
        0,
        RMSNormForwardArgs(input_=_x(4, 8), weight=_x(8, seed=1), output_quantizer=_bound(DELAYED, 4.0)),
    ),
    "rmsnorm_backward": (
        fte.RMSNorm,
        1,
        RMSNormBackwardArgs(
            grad_output=_x(4, 8, seed=2), input_=_x(4, 8), weight=_x(8, seed=1), rstd=torch.ones(4), add=_x(4, 8)
        ),
    ),
    "basiclinear_forward": (fte.BasicLinear, 0, LINEAR_FP8),
    "basiclinear_forward_quantized": (
        fte.BasicLinear,
        0,
        LinearForwardArgs(input_=fte.quantize(_x(4, 8), E4M3), weight=_x(6, 8), weight_quantizer=_bound(E4M3)),
    ),
    "basiclinear_backward": (
        fte.BasicLinear,
        1,
        LinearBackwardArgs(
            grad_output=_x(4, 6),
            input_=fte.quantize(_x(4, 8), E4M3),
            weight=fte.quantize(_x(6, 8), E4M3),
            grad_output_quantizer=_bound(E5M2),
        ),
    ),
    "forwardlinearbiasactivation_forward": (
        ForwardLinearBiasActivation,
        0,
        LinearBiasActivationArgs(linear=LINEAR_FP8, bias=_x(6), activation="swiglu", gated=True, saves_activation=True),
    ),
    "gelu_backward": (
        fte.GELU,
        1,
        ActivationBackwardArgs(
            grad_output=_x(4, 8), input_=_x(4, 8, seed=3), grad_input_quantizer=_bound(DELAYED, 4.0), kind="gelu"
        ),
    ),
    "numpytanh_forward": (NumpyTanh, 0, OneTensor(input_=_x(4, 8))),
    "numpytanh_backward": (NumpyTanh, 1, TwoTensors(grad_output=_x(4, 8), input_=_x(4, 8, seed=1))),
}


OPCHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
HOLDS_FP8 = {name for name in CALLS if "linear" in name}


@pytest.mark.parametrize("name", CALLS)
def test_opcheck(name):
    op_class, direction, args = CALLS[name]
    registered = bridge.register_custom_op(op_class)[direction]
    assert registered.name.startswith("functional_te::")
    flat = registered.schema.encode(args)
    before = [value.clone() if isinstance(value, torch.Tensor) else value for value in flat]
    # test_schema compares tensors with allclose, which has no FP8 kernel: where FP8 data occur inside, the two
    # things it looks for (a mutated argument, an output that shares storage) are looked for below instead
    torch.library.opcheck(
        registered.op, flat, test_utils=[check for check in OPCHECKS if check != "test_schema" or name not in HOLDS_FP8]
    )
    given = [value for value in flat if isinstance(value, torch.Tensor)]
    for value, kept in zip(given, [value for value in before if isinstance(value, torch.Tensor)], strict=True):
        torch.testing.assert_close(value.float(), kept.float(), rtol=0, atol=0)
    storages = [value.untyped_storage().data_ptr() for value in (*given, *registered.op(*flat))]
    shared_arguments = len(given) - len(set(storages[: len(given)]))
    assert len(set(storages)) == len(storages) - shared_arguments


@pytest.mark.parametrize("name", CALLS)
def test_custom_op_gives_what_the_implementation_gives(name):
    op_class, direction, args = CALLS[name]
    got = bridge.register_custom_op(op_class)[direction](args)
    impl = op_class.backward_impl if direction else op_class.forward_impl
    wanted = impl(args)
    if not isinstance(wanted, (fte.FwdResult, fte.BwdResult)):
        wanted = fte.BwdResult(wanted[0], tuple(wanted[1:])) if direction else fte.FwdResult(*wanted)
    assert type(got) is type(wanted)
    got_leaves, got_spec = pytree.tree_flatten(got)
    wanted_leaves, wanted_spec = pytree.tree_flatten(wanted)
    assert got_spec == wanted_spec
    for a, b in zip(got_leaves, wanted_leaves, strict=True):
        assert a.dtype is b.dtype
        torch.testing.assert_close(a.float(), b.float(), rtol=0, atol=0)


def test_opaque_op_runs_its_fake_on_meta_tensors_and_never_its_body():
    forward, _ = bridge.register_custom_op(NumpyTanh)
    with torch._subclasses.FakeTensorMode() as mode:
        (fake,) = forward.op(*forward.schema.encode(OneTensor(input_=mode.from_tensor(_x(4, 8)))))
    assert fake.shape == (4, 8)


def test_registration_happens_once_per_class_and_under_the_lower_cased_name():
    first = bridge.register_custom_op(fte.RMSNorm)
    assert bridge.register_custom_op(fte.RMSNorm) is first
    assert fte.RMSNorm.compile_ops is first
    assert [op.name for op in first] == ["functional_te::rmsnorm_forward", "functional_te::rmsnorm_backward"]


def test_subclass_gets_ops_of_its_own():
    assert bridge.register_custom_op(fte.ReLU)[0].name == "functional_te::relu_forward"
    assert bridge.register_custom_op(fte.SReLU)[0].name == "functional_te::srelu_forward"


def _class_named_twin(offset):
    @dataclasses.dataclass(frozen=True, eq=False)
    class Twin(Cube):
        forward_impl = staticmethod(lambda args: (args.input_ + offset, None))

    return Twin


def test_two_classes_of_one_name_get_different_ops():
    first, second = _class_named_twin(1.0), _class_named_twin(2.0)
    ops = [bridge.register_custom_op(twin)[0] for twin in (first, second)]
    assert ops[0].name != ops[1].name
    x = OneTensor(input_=torch.zeros(3))
    assert [op(x).output[0].item() for op in ops] == [1.0, 2.0]
    chains = [fte.chain(first()), fte.chain(second())]
    assert chains[0] != chains[1]


def test_forward_only_op_and_missing_pieces():
    @dataclasses.dataclass(frozen=True, eq=False)
    class ForwardOnly(fte.Op):
        fwd_args_type: ClassVar[type[Any]] = OneTensor
        forward_impl = staticmethod(lambda args: (args.input_ + 1.0, None))
        forward_fake = staticmethod(lambda args: (args.input_, None))

    class NoFake(ForwardOnly):
        forward_fake = None

    forward, backward = bridge.register_custom_op(ForwardOnly)
    assert backward is None
    result = forward(OneTensor(input_=torch.zeros(2)))
    output, aux, *_ = result
    assert output.tolist() == [1.0, 1.0]
    assert aux is None
    with pytest.raises(TypeError, match="NoFake: the forward needs an argument bundle and a fake"):
        bridge.register_custom_op(NoFake)
    with pytest.raises(TypeError, match="both directions"):
        bridge.register_custom_op_with_autograd(ForwardOnly, inputs=("input_",), resolve_bwd_args=lambda saved, dy: dy)


def test_inline_directions_get_no_custom_op():
    assert bridge.register_custom_op(fte.Identity) == (None, None)
    assert fte.Identity.compile_unsupported_reason() is None


# ---------------------------------------------------------------------------- stand-alone differentiable ops


def _resolve_gain(saved, grad_output):
    return Gain.bwd_args_type(
        grad_output=grad_output,
        input_=saved.input_,
        gain=saved.gain,
        temperature=saved.temperature,
        factor=saved.factor,
    )


def _resolve_pointwise(saved, grad_output):
    return TwoTensors(grad_output=grad_output, input_=saved)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_stand_alone_op_with_autograd(dynamo, compiled):
    gain_op = bridge.register_custom_op_with_autograd(Gain, inputs=("input_", "gain"), resolve_bwd_args=_resolve_gain)
    tanh = bridge.register_custom_op_with_autograd(NumpyTanh, inputs=("input_",), resolve_bwd_args=_resolve_pointwise)

    def run(x, gain):
        return tanh(OneTensor(input_=gain_op(GainForwardArgs(input_=x * 1.0, gain=gain, factor=0.5))))

    x, gain = leaf(4, 6), leaf(6, seed=1)
    log = GraphLog()
    y = (torch.compile(run, fullgraph=True, backend=log) if compiled else run)(x, gain)
    dy = leaf(4, 6, seed=2, requires_grad=False)
    grads = torch.autograd.grad(y, (x, gain), dy)
    wide_x, wide_gain = x.detach().double().requires_grad_(), gain.detach().double().requires_grad_()
    wide = torch.tanh(wide_x * wide_gain * 0.5 + 1)
    expected = torch.autograd.grad(wide, (wide_x, wide_gain), dy.double())
    assert_close((wide.float(), *[grad.float() for grad in expected]), (y, *grads))
    if compiled:
        assert graph_count(dynamo) == 1
        assert log.custom_ops("fwd") == ["gain_forward", "numpytanh_forward"]


def test_stand_alone_op_gives_gradients_only_where_they_are_wanted():
    gain_op = bridge.register_custom_op_with_autograd(Gain, inputs=("input_", "gain"), resolve_bwd_args=_resolve_gain)
    x, gain = leaf(4, 6, requires_grad=False), leaf(6, seed=1)
    gain_op(GainForwardArgs(input_=x, gain=gain)).sum().backward()
    torch.testing.assert_close(gain.grad, x.sum(0))
    assert x.grad is None
    assert not gain_op(GainForwardArgs(input_=x, gain=gain.detach())).requires_grad
