"""Quantized tensors and states as flat dicts of tensors, through files, and back: bit for bit, and nothing else."""

import copy
import copyreg
import dataclasses
import io
import json
import pickle

import pytest
import safetensors.torch
import torch

import functional_te as fte
from functional_te import pytree
from functional_te import quantization as qz
from functional_te.quantization.serialization import (
    STRUCTURE,
    from_tensors,
    quantizer_from_json,
    quantizer_to_json,
    to_tensors,
)
from tests.helpers import uniform

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
CURRENT = qz.Float8CurrentScalingQuantizer(dtype=E4M3, columnwise=True)
MX = qz.MXFP8Quantizer(dtype=E4M3, columnwise=True)
DELAYED = qz.Float8DelayedScalingQuantizer(
    dtype=E5M2, columnwise=True, margin=1, amax_history_len=3, amax_compute_algo="most_recent"
)
EXAMPLES = (
    CURRENT,
    qz.Float8CurrentScalingQuantizer(dtype=E5M2, rowwise=False, columnwise=True, amax_epsilon=1e-3, power_2_scale=True),
    DELAYED,
    qz.Float8BlockQuantizer(dtype=E4M3, columnwise=True),
    qz.Float8BlockQuantizer(dtype=E5M2, columnwise=True, amax_epsilon=0.1, power_2_scale=False, block_scaling_dim=1),
    MX,
    qz.MXFP8Quantizer(dtype=E5M2, columnwise=True, with_2d_quantization=True),
    qz.NVFP4Quantizer(columnwise=True, with_2d_quantization=True),
    qz.NVFP4Quantizer(columnwise=True, with_rht=True, stochastic_rounding=True),
    qz.NVFP4Quantizer(columnwise=True, row_scaled=True, four_over_six="MSE", e4m3_max=256),
    qz.HybridQuantizer(
        columnwise=True,
        rowwise_quantizer=qz.MXFP8Quantizer(dtype=E4M3),
        columnwise_quantizer=qz.NVFP4Quantizer(with_rht=True),
        columnwise_source="rowwise_dequantized",
    ),
)
every_quantizer = pytest.mark.parametrize("quantizer", EXAMPLES, ids=lambda quantizer: type(quantizer).__name__)


def quantized(quantizer, shape=(2, 20, 64), dtype=torch.bfloat16):
    """A quantized tensor whose columnwise copy has partial blocks, and the state that it was made with."""
    state = qz.init_quantizer_state(quantizer, seed=3)
    made = fte.quantize(uniform(shape, dtype), quantizer, *(() if state is None else (state,)))
    return (made, None) if state is None else made


def assert_same_bits(actual, expected):
    """The same structure, static fields and classes included, and the same bytes."""
    left, spec = pytree.tree_flatten(actual)
    right, wanted = pytree.tree_flatten(expected)
    assert spec == wanted
    for one, other in zip(left, right, strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert torch.equal(one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8))


def by_torch(tensors):
    file = io.BytesIO()
    torch.save(tensors, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def by_safetensors(tensors):
    return safetensors.torch.load(safetensors.torch.save(tensors))


def by_state_dict(tensors):
    module = torch.nn.Linear(2, 2)
    return {**module.state_dict(prefix="other."), **tensors}


def test_there_is_an_example_of_every_quantizer():
    assert {type(quantizer) for quantizer in EXAMPLES} == set(qz.QUANTIZERS)


@pytest.mark.parametrize("through", [by_torch, by_safetensors, by_state_dict])
@every_quantizer
def test_round_trip(quantizer, through):
    tree = quantized(quantizer)
    tensors = to_tensors(tree, "layer.")
    assert all(name.startswith("layer.") and type(tensor) is torch.Tensor for name, tensor in tensors.items())
    again = from_tensors(through(tensors), "layer.")
    assert_same_bits(again, tree)
    assert again[0].quantizer is quantizer
    assert again[0].dtype is torch.bfloat16


def test_names_and_kinds():
    q, state = quantized(DELAYED, (3, 5), torch.float32)
    value = torch.nn.Parameter(uniform((3, 5)))
    cached = qz.CachedWeight(value=value, quantized=q.with_usage(rowwise=True, columnwise=False))
    tree = {"w": cached, "rest": [(state, None), torch.arange(3)], "none": {}, "b.c": ()}
    tensors = to_tensors(tree, "m.")
    assert list(tensors) == [
        "m.w.value",
        "m.w.quantized.rowwise_data",
        "m.w.quantized.rowwise_scale_inv",
        "m.rest.0.0.scale",
        "m.rest.0.0.amax_history",
        "m.rest.1",
        "m._structure",
    ]
    assert tensors["m.w.value"].data_ptr() == value.data_ptr()
    assert not any(tensor.requires_grad for tensor in tensors.values())
    again = from_tensors(tensors, "m.")
    assert_same_bits(again, tree)
    assert list(again) == list(tree)
    assert type(again["rest"]) is list
    assert type(again["rest"][0]) is tuple
    assert again["w"].stored is False
    assert from_tensors(to_tensors(None)) is None
    assert torch.equal(from_tensors(to_tensors(torch.ones(2))), torch.ones(2))


def test_state_of_a_chain():
    block = fte.chain(fte.RMSNorm(16), fte.Linear(16, 8))
    recipe = fte.recipes.DelayedScaling(amax_history_len=4)
    tree = {"params": fte.init(block, seed=0), "state": fte.init_state(block, recipe)}
    assert_same_bits(from_tensors(by_safetensors(to_tensors(tree)), like=tree), tree)
    assert_same_bits(by_torch(tree), tree)


def test_a_weight_stored_in_low_precision_only():
    q, _ = quantized(MX, (3, 64))
    cached = qz.CachedWeight(value=torch.zeros(()).expand(3, 64), quantized=q, stored=True)
    tensors = to_tensors(cached)
    assert "value" not in tensors
    again = from_tensors(tensors)
    assert again.stored
    assert again.shape == (3, 64)
    assert again.dtype is torch.bfloat16
    assert again.value.untyped_storage().nbytes() <= 4
    assert_same_bits(again.quantized, q)


def test_one_tensor_in_two_places_and_views():
    q, _ = quantized(MX, (64, 64))
    part = q[32:]
    assert not part.columnwise_data.is_contiguous()
    other = uniform((3,))
    tensors = to_tensors([part, (part, other, other)])
    assert len(tensors) == 4 + 1 + 1
    again = from_tensors(by_safetensors(tensors))
    assert_same_bits(again[0], part)
    assert again[0].rowwise_data is again[1][0].rowwise_data
    assert again[1][1] is again[1][2]


def test_like():
    q, _ = quantized(MX, (4, 64))
    tensors = to_tensors((q,))
    from_tensors(tensors, like=(q,))
    other, _ = quantized(CURRENT, (4, 64))
    longer, _ = quantized(MX, (5, 64))
    for like in ((other,), [q], (q, None), (longer,), q):
        with pytest.raises(ValueError, match=r"from_tensors: _structure: expected .* of `like`"):
            from_tensors(tensors, like=like)


# ---------------------------------------------------------------------------- quantizers


@every_quantizer
def test_quantizer_json(quantizer):
    text = quantizer_to_json(quantizer)
    assert quantizer_from_json(text) is quantizer
    assert json.loads(text)["kind"] == type(quantizer).__name__


def test_integers_stay_integers():
    quantizer = qz.Float8CurrentScalingQuantizer(dtype=E4M3, amax_epsilon=0)
    assert quantizer is not qz.Float8CurrentScalingQuantizer(dtype=E4M3)
    assert quantizer_from_json(quantizer_to_json(quantizer)) is quantizer


@dataclasses.dataclass(frozen=True, eq=False)
class OwnQuantizer(qz.MXFP8Quantizer):
    pass


def largest(history):
    return history.amax()


def own_scale(amax, scale, limit, recipe):
    return scale


def test_what_cannot_be_saved():
    q, _ = quantized(MX, (2, 32))
    with pytest.raises(TypeError, match=r"to_tensors: a\.0: expected tensors, tuples.*, got int"):
        to_tensors({"a": [1]})
    with pytest.raises(TypeError, match=r"to_tensors: tree: expected .* dicts with string keys.*, got dict"):
        to_tensors({0: q})
    with pytest.raises(ValueError, match=r"one tensor of a name, got another one of the name 'a\.b'"):
        to_tensors({"a": {"b": torch.ones(1)}, "a.b": torch.ones(1)})
    with pytest.raises(ValueError, match="one tensor of a name"):
        to_tensors({STRUCTURE: torch.ones(1)})
    with pytest.raises(TypeError, match="to_tensors: 0: expected a plain tensor, got OwnTensor"):
        to_tensors([torch.ones(1).as_subclass(OwnTensor)])
    with pytest.raises(TypeError, match=r"expected a plain value, or a quantizer among .*, got OwnQuantizer"):
        quantizer_to_json(OwnQuantizer(dtype=E4M3))
    with pytest.raises(TypeError, match="quantizer_to_json: quantizer: expected a Quantizer, got str"):
        quantizer_to_json("fp8")
    with pytest.raises(TypeError, match="to_tensors: quantizer"):
        to_tensors(pytree.replace(q, quantizer=OwnQuantizer(dtype=E4M3)))
    for field in ({"amax_compute_algo": largest}, {"scaling_factor_compute_algo": own_scale}):
        (name,) = field
        with pytest.raises(ValueError, match=rf"{name}: expected .*A function cannot be saved"):
            quantizer_to_json(dataclasses.replace(DELAYED, **field))


class OwnTensor(torch.Tensor):
    pass


# ---------------------------------------------------------------------------- content that nobody should trust


def quantizer_data(kind="MXFP8Quantizer", **fields):
    return {"kind": kind, "fields": {"dtype": {"kind": "dtype", "name": "float8_e4m3fn"}, **fields}}


HYBRID = {"rowwise_quantizer": quantizer_data(), "columnwise_quantizer": quantizer_data()}


@pytest.mark.parametrize(
    "data",
    [
        None,
        1,
        "eval",
        [],
        {},
        {"kind": "eval", "fields": {}},
        {"kind": ["MXFP8Quantizer"], "fields": {}},
        {"kind": "Quantizer", "fields": {}},
        {"kind": "IdentityQuantizer", "fields": {}},
        {"kind": "MXFP8Quantizer"},
        {"kind": "MXFP8Quantizer", "fields": {}},
        {"kind": "MXFP8Quantizer", "fields": []},
        {"kind": "dtype", "name": "float8_e4m3fn"},
        quantizer_data(dtype={"kind": "dtype", "name": "load"}),
        quantizer_data(dtype={"kind": "dtype", "name": "float32"}),
        quantizer_data(dtype="float8_e4m3fn"),
        quantizer_data(rowwise=1),
        quantizer_data(rowwise=None),
        quantizer_data(rowwise={"kind": "os.system", "fields": {}}),
        quantizer_data(unknown=True),
        quantizer_data(__class__="x"),
        quantizer_data(limit=1.0),
        quantizer_data("Float8CurrentScalingQuantizer", amax_epsilon="0"),
        quantizer_data("Float8CurrentScalingQuantizer", amax_epsilon=True),
        quantizer_data("Float8DelayedScalingQuantizer", amax_compute_algo="os.system"),
        quantizer_data("Float8DelayedScalingQuantizer", scaling_factor_compute_algo="max"),
        quantizer_data("Float8DelayedScalingQuantizer", amax_history_len=2.0),
        quantizer_data("Float8BlockQuantizer", block_scaling_dim=3),
        quantizer_data("NVFP4Quantizer"),
        quantizer_data("HybridQuantizer", **{**HYBRID, "rowwise_quantizer": None}),
        quantizer_data(
            "HybridQuantizer", **{**HYBRID, "rowwise_quantizer": quantizer_data("HybridQuantizer", **HYBRID)}
        ),
        quantizer_data("HybridQuantizer", **HYBRID, columnwise_source="eval"),
    ],
    ids=str,
)
def test_malformed_quantizers(data):
    with pytest.raises(ValueError, match="quantizer_from_json: text: expected"):
        quantizer_from_json(json.dumps(data))


@pytest.mark.parametrize("text", ["", "{", "NaN", "[" * 100_000, '{"kind": "MXFP8Quantizer"} x', None, 3])
def test_text_that_is_no_quantizer(text):
    with pytest.raises(ValueError, match="quantizer_from_json: text: expected"):
        quantizer_from_json(text)


def saved():
    """What is saved of one quantized tensor, and its description."""
    tensors = to_tensors((quantized(MX, (4, 64))[0],), "p.")
    return tensors, json.loads(bytes(tensors["p._structure"].tolist()))


def encoded(description):
    return torch.tensor(list(json.dumps(description).encode()), dtype=torch.uint8)


@pytest.mark.parametrize(
    "description",
    [
        "x",
        3,
        [None],
        {"kind": "tuple"},
        {"kind": "tuple", "items": {"a": None}},
        {"kind": "dict", "items": []},
        {"kind": "set", "items": []},
        {"kind": "os.system", "fields": {"command": "true"}},
        {"kind": "MXFP8Quantizer", "fields": {}},
        {"kind": "QuantizedTensor", "fields": {}},
        {"kind": "QuantizedTensor", "fields": None},
        {"kind": "DelayedScalingState", "fields": {"scale": "0.rowwise_data"}},
        {"kind": "tuple", "items": [{"kind": "CachedWeight", "fields": {"stored": True}}]},
    ],
    ids=str,
)
def test_malformed_structure(description):
    tensors, _ = saved()
    tensors["p._structure"] = encoded(description)
    with pytest.raises(ValueError, match=r"from_tensors: p\.\S+: expected"):
        from_tensors(tensors, "p.")


@pytest.mark.parametrize(
    "change",
    [
        lambda fields: fields.pop("quantizer"),
        lambda fields: fields.pop("rowwise_data"),
        lambda fields: fields.update(extra=None),
        lambda fields: fields.update(dtype={"kind": "dtype", "name": "float8_e4m3fn"}),
        lambda fields: fields.update(rowwise_data="0.absent"),
        lambda fields: fields.update(rowwise_data="_structure"),
        lambda fields: fields.update(rowwise_data={"kind": "tuple", "items": []}),
        lambda fields: fields.update(rowwise_data="0.columnwise_data"),
        lambda fields: fields.update(rowwise_scale_inv="0.columnwise_scale_inv"),
        lambda fields: fields.update(columnwise_data=None),
        lambda fields: fields.update(rowwise_amax="0.rowwise_scale_inv"),
        lambda fields: fields["quantizer"].update(kind="Float8BlockQuantizer"),
        lambda fields: fields["quantizer"]["fields"].update(with_2d_quantization=True),
        lambda fields: fields["quantizer"]["fields"].update(dtype={"kind": "dtype", "name": "float8_e5m2"}),
    ],
)
def test_malformed_quantized_tensors(change):
    tensors, description = saved()
    change(description["items"][0]["fields"])
    tensors["p._structure"] = encoded(description)
    with pytest.raises(ValueError, match=r"from_tensors: p\.\S+: expected"):
        from_tensors(tensors, "p.")


def test_malformed_tensors():
    for name in saved()[0]:
        for change in (lambda t: t[..., :-1], lambda t: t.float(), lambda t: None, lambda t: "x"):
            tensors, _ = saved()
            tensors[name] = change(tensors[name])
            with pytest.raises(ValueError, match=r"from_tensors: p\.\S+: expected"):
                from_tensors(tensors, "p.")
        tensors, _ = saved()
        del tensors[name]
        with pytest.raises(ValueError, match=r"from_tensors: p\.\S+: expected"):
            from_tensors(tensors, "p.")
    with pytest.raises(ValueError, match=r"from_tensors: q\._structure: expected"):
        from_tensors(saved()[0], "q.")


# ---------------------------------------------------------------------------- pickle


def by_pickle(value):
    return pickle.loads(pickle.dumps(value))


@pytest.mark.parametrize("through", [copy.copy, copy.deepcopy, by_pickle, by_torch])
@every_quantizer
def test_copies_and_pickles(quantizer, through):
    tree = quantized(quantizer)
    again = through(tree)
    assert_same_bits(again, tree)
    assert again[0].quantizer is quantizer
    if through is not copy.copy:
        assert not {t.data_ptr() for t in pytree.leaves(again)} & {t.data_ptr() for t in pytree.leaves(tree)}


def test_plain_pickle_of_torch_cannot_hold_fp8():
    """Why bytes are pickled. If this fails, the detour is no longer needed."""
    with pytest.raises(AttributeError):
        by_pickle(torch.zeros(2, dtype=E4M3))


def test_pickle_of_a_quantizer_with_a_function():
    quantizer = dataclasses.replace(DELAYED, amax_compute_algo=largest)
    q, _ = quantized(quantizer, (2, 32))
    for through in (copy.deepcopy, by_pickle):
        assert through(q).quantizer is quantizer
        assert_same_bits(through(q), q)
    with pytest.raises(pickle.UnpicklingError):
        by_torch(q)


def test_pickled_content_is_checked():
    q, _ = quantized(MX, (2, 32))
    rebuild, (tensors, dtype, quantizer) = copyreg.dispatch_table[type(q)](q)
    assert_same_bits(rebuild(tensors, dtype, quantizer), q)
    for bad in (
        (tensors, dtype, quantizer.replace("MXFP8Quantizer", "eval")),
        (tensors, dtype, None),
        (tensors, "float32", quantizer),
        ({}, dtype, quantizer),
        ({**tensors, "rowwise_data": (torch.ones(2, 32), "")}, dtype, quantizer),
        ({**tensors, "extra": (torch.ones(2, 32), "")}, dtype, quantizer),
    ):
        with pytest.raises(ValueError, match="expected"):
            rebuild(*bad)


def test_trees_of_something_else_are_copied():
    q, _ = quantized(MX, (2, 32))
    specs = pytree.tree_map(lambda tensor: fte.TensorSpec(tuple(tensor.shape), tensor.dtype), q)
    assert copy.deepcopy(specs) == specs
