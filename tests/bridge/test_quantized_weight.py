"""Weights stored in low precision only: what reads and writes them, files, optimizers, and one compiled graph."""

import copy
import io
import pickle

import pytest
import torch

import functional_te as fte
from bridge import quantized_weight
from bridge.quantized_weight import QuantizedWeight, quantized_of
from functional_te import pytree
from functional_te.quantization import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8DelayedScalingQuantizer,
    HybridQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    QuantizedTensor,
    init_quantizer_state,
)

from .compiled import break_count, graph_count

PLAIN = Float8CurrentScalingQuantizer(dtype=torch.float8_e4m3fn)
BOTH = Float8CurrentScalingQuantizer(dtype=torch.float8_e4m3fn, columnwise=True)
ROUNDED = Float8CurrentScalingQuantizer(dtype=torch.float8_e5m2, power_2_scale=True, amax_epsilon=0.25)
COLUMNS = Float8CurrentScalingQuantizer(dtype=torch.float8_e4m3fn, rowwise=False, columnwise=True)
QUANTIZERS = {
    "rowwise": PLAIN,
    "both": BOTH,
    "power of 2": ROUNDED,
    "columnwise": COLUMNS,
    "block": Float8BlockQuantizer(dtype=torch.float8_e4m3fn, columnwise=True),
    "mxfp8": MXFP8Quantizer(dtype=torch.float8_e4m3fn, columnwise=True),
    "nvfp4": NVFP4Quantizer(with_2d_quantization=True, columnwise=True),
    "hybrid": HybridQuantizer(rowwise_quantizer=PLAIN, columnwise_quantizer=COLUMNS, columnwise=True),
}
SHAPE = (8, 32)

every_quantizer = pytest.mark.parametrize("quantizer", QUANTIZERS.values(), ids=QUANTIZERS.keys())


def values_of(seed=0, shape=SHAPE, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def weight_of(quantizer=BOTH, seed=0, shape=SHAPE, dtype=torch.float32):
    return QuantizedWeight.from_quantized(fte.quantize(values_of(seed, shape, dtype), quantizer))


def parameter_of(quantizer=BOTH, seed=0, shape=SHAPE, dtype=torch.float32):
    return torch.nn.Parameter(weight_of(quantizer, seed, shape, dtype))


def bits(holder):
    """The inner tensors of a weight or of a quantized tensor as bytes, by name."""
    if isinstance(holder, QuantizedWeight):
        holder = holder.quantized()
    children = {name: getattr(holder, name) for name in QuantizedTensor._tree_children}
    return {name: value.view(torch.uint8).flatten().tolist() for name, value in children.items() if value is not None}


def addresses(weight):
    return [tensor.data_ptr() for tensor in pytree.leaves(weight.quantized())]


# ---------------------------------------------------------------------------- what it is


@every_quantizer
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_is_a_parameter_of_the_nominal_shape_and_dtype(quantizer, dtype):
    q = fte.quantize(values_of(dtype=dtype), quantizer)
    weight = torch.nn.Parameter(QuantizedWeight.from_quantized(q))
    assert isinstance(weight, torch.nn.Parameter)
    assert isinstance(weight, QuantizedWeight)
    assert (tuple(weight.shape), weight.dtype, weight.device.type) == ((8, 32), dtype, "cpu")
    assert (weight.requires_grad, weight.is_leaf, weight.is_contiguous()) == (True, True, True)
    assert weight.quantizer is quantizer
    inner = weight.quantized()
    assert inner.quantizer is quantizer
    assert inner.dtype is dtype
    assert addresses(weight) == [tensor.data_ptr() for tensor in pytree.leaves(q)]
    assert "8, 32" in repr(weight)
    assert type(quantizer).__name__ in repr(weight)
    assert str(dtype) in repr(weight)


@pytest.mark.parametrize(
    ("made", "error", "words"),
    [
        (lambda: torch.zeros(2, 2), TypeError, r"from_quantized: q: expected a QuantizedTensor, got Tensor"),
        (
            lambda: QuantizedTensor(rowwise_data=torch.zeros(2), rowwise_scale_inv=torch.ones(1), dtype=torch.float32),
            ValueError,
            r"q\.quantizer: expected a quantizer without state",
        ),
        (
            lambda: fte.quantize(values_of(), *_delayed())[0],
            ValueError,
            r"q\.quantizer: expected a quantizer without state, got Float8Delayed",
        ),
        (
            lambda: pytree.replace(fte.quantize(values_of(), PLAIN), dtype=torch.float64),
            ValueError,
            r"q\.dtype: expected float32, float16 or bfloat16",
        ),
    ],
)
def test_the_factory_refuses(made, error, words):
    with pytest.raises(error, match=words):
        QuantizedWeight.from_quantized(made())


def _delayed():
    quantizer = Float8DelayedScalingQuantizer(dtype=torch.float8_e4m3fn, amax_history_len=2)
    return quantizer, init_quantizer_state(quantizer)


# ---------------------------------------------------------------------------- reading


READS = {
    "mul": lambda w: w * 2,
    "t": lambda w: w.t(),
    "view": lambda w: w.view(-1),
    "index": lambda w: w[1],
    "split": lambda w: torch.cat(w.split(4)),
    "stack": lambda w: torch.stack([w, w]),
    "where": lambda w: torch.where(w > 0, w, torch.zeros(())),
    "linear": lambda w: torch.nn.functional.linear(torch.ones(3, 32), w),
    "norm": lambda w: torch.linalg.vector_norm(w),
    "to double": lambda w: w.double(),
    "foreach": lambda w: torch._foreach_mul([w, w], 3.0)[1],
    "out": lambda w: torch.add(w, 1, out=torch.empty(8, 32)),
    "copy to plain": lambda w: torch.empty(8, 32).copy_(w),
}


@every_quantizer
@pytest.mark.parametrize("read", READS.values(), ids=READS.keys())
def test_any_operation_reads_dequantized_values(quantizer, read):
    weight = weight_of(quantizer)
    plain = fte.dequantize(fte.quantize(values_of(), quantizer)).contiguous()
    got = read(weight)
    assert type(got) is torch.Tensor
    torch.testing.assert_close(got, read(plain), rtol=0, atol=0)


def test_dequantize_passes_the_gradient_in_the_nominal_dtype():
    weight = parameter_of(dtype=torch.bfloat16)
    out = weight.dequantize(torch.float32)
    torch.testing.assert_close(out, weight.quantized().dequantize(torch.float32), rtol=0, atol=0)
    grad = values_of(seed=5)
    out.backward(grad)
    assert weight.grad.dtype is torch.bfloat16
    torch.testing.assert_close(weight.grad, grad.bfloat16(), rtol=0, atol=0)
    assert not weight.detach().dequantize().requires_grad
    with torch.no_grad():
        assert not weight.dequantize().requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_are_dense_and_accumulate(dtype):
    weight = parameter_of(dtype=dtype)
    x = values_of(1, (4, 32), dtype)
    plain = weight.quantized().dequantize().requires_grad_()
    for _ in range(2):
        torch.nn.functional.linear(x, weight).square().sum().backward()
        torch.nn.functional.linear(x, plain).square().sum().backward()
    assert type(weight.grad) is torch.Tensor
    assert weight.grad.dtype is dtype
    torch.testing.assert_close(weight.grad, plain.grad, rtol=0, atol=0)


def test_optimizer_state_is_plain(monkeypatch):
    weight = weight_of(dtype=torch.bfloat16)
    monkeypatch.setattr(quantized_weight, "_plain", None)  # no values are made on the way
    made = {
        "zeros_like": torch.zeros_like(weight, memory_format=torch.preserve_format),
        "empty_like": torch.empty_like(weight, dtype=torch.float32),
        "ones_like": torch.ones_like(weight),
        "full_like": torch.full_like(weight, 3.0),
        "new_zeros": weight.new_zeros(2, 3),
        "new_empty": weight.new_empty((2, 3)),
    }
    assert all(type(value) is torch.Tensor and value.is_contiguous() for value in made.values())
    assert [tuple(value.shape) for value in made.values()] == [(8, 32)] * 4 + [(2, 3)] * 2
    assert [value.dtype for value in made.values()].count(torch.bfloat16) == 5
    assert made["empty_like"].dtype is torch.float32
    assert (made["zeros_like"] == 0).all()
    assert (made["ones_like"] == 1).all()
    assert (made["full_like"] == 3).all()


# ---------------------------------------------------------------------------- writing


def _expected(plain, write, quantizer):
    """What a write has to leave: the write on plain values, cast."""
    write(plain)
    return bits(fte.quantize(plain, quantizer))


WRITES = {
    "add_": lambda w: w.add_(values_of(2), alpha=0.3),
    "mul_": lambda w: w.mul_(0.7),
    "sub_ itself": lambda w: w.sub_(w * 0.5),
    "mul_ by itself": lambda w: w.mul_(w),
    "addcdiv_": lambda w: w.addcdiv_(values_of(2), values_of(3).abs() + 1, value=-0.1),
    "lerp_": lambda w: w.lerp_(values_of(2), 0.25),
    "fill_": lambda w: w.fill_(1.25),
    "zero_": lambda w: w.zero_(),
    "out": lambda w: torch.mul(values_of(2), 2, out=w),
    "copy_": lambda w: w.copy_(values_of(4)),
    "copy_ of one row": lambda w: w.copy_(values_of(4, (32,))),
    "init": lambda w: torch.nn.init.uniform_(w, generator=torch.Generator().manual_seed(3)),
    "+=": lambda w: w.__iadd__(1.0),
}


@every_quantizer
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES.keys())
def test_a_write_is_cast_into_the_same_tensors(quantizer, write):
    weight = parameter_of(quantizer)
    before, version = addresses(weight), weight._version
    with torch.no_grad():
        result = write(weight)
    assert result is weight
    assert addresses(weight) == before
    assert weight._version > version
    assert bits(weight) == _expected(weight_of(quantizer).dequantize(), write, quantizer)


FOREACH_WRITES = {
    "_foreach_add_": lambda ws: torch._foreach_add_(ws, [values_of(5), values_of(6)], alpha=-0.1),
    "_foreach_mul_": lambda ws: torch._foreach_mul_(ws, 0.9),
    "_foreach_addcdiv_": lambda ws: torch._foreach_addcdiv_(ws, [values_of(5)] * 2, [values_of(6).exp()] * 2, 0.1),
    "_foreach_copy_": lambda ws: torch._foreach_copy_(ws, [values_of(5), values_of(6)]),
}


@pytest.mark.parametrize("write", FOREACH_WRITES.values(), ids=FOREACH_WRITES.keys())
def test_a_write_to_a_list_is_cast(write):
    weights = [weight_of(BOTH, 0), weight_of(ROUNDED, 1)]
    plains = [weight.dequantize() for weight in weights]
    write(weights)
    write(plains)
    assert [bits(weight) for weight in weights] == [
        bits(fte.quantize(plain, quantizer)) for plain, quantizer in zip(plains, (BOTH, ROUNDED), strict=True)
    ]


def _unusual(dtype=torch.float32):
    """A weight that a cast of its own values would not give: their largest is not the format's largest."""
    return QuantizedWeight.from_quantized(
        QuantizedTensor(
            rowwise_data=values_of(7).clamp(-1, 1).to(torch.float8_e4m3fn),
            rowwise_scale_inv=torch.tensor([0.37]),
            dtype=dtype,
            quantizer=PLAIN,
        )
    )


def test_foreach_copy_to_mixed_targets():
    weight, plain = weight_of(PLAIN, 0), torch.zeros(8, 32)
    torch._foreach_copy_([weight, plain], [_unusual(), weight_of(PLAIN, 2)])
    assert bits(weight) == bits(_unusual())
    torch.testing.assert_close(plain, weight_of(PLAIN, 2).dequantize(), rtol=0, atol=0)


def test_copies_of_a_weight_keep_the_bits_and_others_are_cast_again():
    source = _unusual(torch.bfloat16)
    same, other = weight_of(PLAIN), weight_of(BOTH, dtype=torch.bfloat16)
    assert bits(same.quantize_(source)) == bits(source)
    assert bits(fte.quantize(source.dequantize(), PLAIN)) != bits(source)
    # from the exact values, not from those rounded to the nominal dtype
    other.quantize_(source)
    assert bits(other) == bits(fte.quantize(source.dequantize(torch.float32), BOTH))
    assert bits(other) != bits(fte.quantize(source.dequantize(), BOTH))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int32, torch.float16], ids=str)
def test_values_are_cast_from_their_own_dtype(dtype):
    values = (values_of(3) * 10).to(dtype)
    weight = parameter_of(PLAIN, dtype=torch.bfloat16)
    assert weight.quantize_(values) is weight
    exact = values if dtype is torch.float16 else values.to(torch.float32)
    assert bits(weight) == bits(fte.quantize(exact, PLAIN))
    assert weight.dtype is torch.bfloat16


def test_bad_writes_change_nothing():
    weight = parameter_of()
    before = bits(weight)
    with pytest.raises(ValueError, match=r"quantize_: values: expected a tensor of shape \(8, 32\), got \(32, 8\)"):
        weight.quantize_(torch.zeros(32, 8))
    with pytest.raises(ValueError, match=r"quantize_: values: expected a tensor .*, got float"):
        weight.quantize_(1.0)
    with torch.no_grad(), pytest.raises(RuntimeError):
        weight.copy_(torch.zeros(3, 32))
    with torch.no_grad(), pytest.raises(ValueError, match=r"keeps the shape \(8, 32\), got \(32, 8\)"):
        weight.t_()
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        weight.add_(1.0)
    assert bits(weight) == before


def test_a_backward_notices_that_what_it_saved_was_written():
    for change in (lambda w: w.add_(1.0), lambda w: w.quantize_(values_of(9))):
        weight = parameter_of()
        out = linear(values_of(1, (4, 32)), weight)
        with torch.no_grad():
            change(weight)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


def test_inference_mode():
    weight = parameter_of()
    with torch.inference_mode():
        own = weight_of()
        own.mul_(0.5)
        assert bits(own) == bits(fte.quantize(weight_of().dequantize() * 0.5, BOTH))
        out = torch.nn.functional.linear(torch.ones(2, 32), weight)
    assert out.is_inference()


def test_a_stream_is_told_of_every_inner_tensor():
    weight, seen = weight_of(), []
    record = quantized_weight._SPECIAL[torch.ops.aten.record_stream.default]
    record(lambda tensor, stream: seen.append((tensor.data_ptr(), stream)), (weight, "stream"), {})
    assert seen == [(address, "stream") for address in addresses(weight)]


# ---------------------------------------------------------------------------- copies


@every_quantizer
def test_detach_shares_and_clone_does_not(quantizer):
    weight = parameter_of(quantizer)
    shared, own = weight.detach(), weight.detach().clone()
    assert type(shared) is type(own) is QuantizedWeight
    assert addresses(shared) == addresses(weight)
    assert not set(addresses(own)) & set(addresses(weight))
    assert bits(own) == bits(weight)
    shared.zero_()
    assert bits(shared) == bits(weight) != bits(own)
    assert type(weight.data) is QuantizedWeight


def test_a_cast_changes_the_nominal_dtype_only():
    weight = weight_of()
    half = weight.to(torch.bfloat16)
    assert (type(half), half.dtype, half.quantizer) == (QuantizedWeight, torch.bfloat16, BOTH)
    assert bits(half) == bits(weight)
    assert not set(addresses(half)) & set(addresses(weight))
    assert half.dequantize().dtype is torch.bfloat16
    assert weight.to(torch.float32) is weight
    moved = weight.to("meta")
    assert type(moved) is QuantizedWeight
    assert moved.device.type == moved.quantized().device.type == "meta"


def test_a_cast_passes_the_gradient():
    weight = parameter_of()
    weight.to(torch.bfloat16).sum().backward()
    assert weight.grad.dtype is torch.float32
    assert (weight.grad == 1).all()


class Model(torch.nn.Module):
    def __init__(self, seed=0, quantizer=BOTH):
        super().__init__()
        self.weight = parameter_of(quantizer, seed)

    def forward(self, x):
        return linear(x, self.weight)


def test_a_module_is_cast_and_moved_with_it():
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(values_of(1, (4, 32))).sum().backward()
    before = bits(model.weight)
    model.to(torch.bfloat16)
    assert isinstance(model.weight, torch.nn.Parameter)
    assert optimizer.param_groups[0]["params"][0] is model.weight
    assert (model.weight.dtype, model.weight.grad.dtype) == (torch.bfloat16, torch.bfloat16)
    assert bits(model.weight) == before
    model.float().to("meta")
    assert (model.weight.device.type, model.weight.dtype) == ("meta", torch.float32)


def _saved(value, **kwargs):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, **kwargs)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda w: pickle.loads(pickle.dumps(w)),
    "torch.save": lambda w: _saved(w, weights_only=True),
}


@every_quantizer
@pytest.mark.parametrize("duplicate", COPIES.values(), ids=COPIES.keys())
@pytest.mark.parametrize("is_parameter", [False, True], ids=["tensor", "parameter"])
def test_copies_and_files(quantizer, duplicate, is_parameter):
    weight = weight_of(quantizer, dtype=torch.bfloat16)
    if is_parameter:
        weight = torch.nn.Parameter(weight, requires_grad=False)
        weight.tensor_parallel = {"dim": 0}
    found = duplicate(weight)
    assert type(found) is QuantizedWeight
    assert isinstance(found, torch.nn.Parameter) is is_parameter
    assert (found.dtype, found.quantizer, found.requires_grad) == (torch.bfloat16, quantizer, False)
    assert bits(found) == bits(weight)
    assert not set(addresses(found)) & set(addresses(weight))
    assert getattr(found, "tensor_parallel", None) == ({"dim": 0} if is_parameter else None)
    assert duplicate(weight.requires_grad_()).requires_grad


def test_deepcopy_takes_the_gradient_along():
    model = Model()
    model(values_of(1, (4, 32))).sum().backward()
    twin = copy.deepcopy(model)
    torch.testing.assert_close(twin.weight.grad, model.weight.grad, rtol=0, atol=0)
    with torch.no_grad():
        twin.weight.zero_()
    assert bits(model.weight) == bits(parameter_of())


def test_a_file_with_another_content_is_refused():
    weight = weight_of()
    function, (content, tensors, *rest) = weight.__reduce_ex__(4)
    assert bits(function(content, tensors, *rest)) == bits(weight)
    for old, new, words in (
        ("Float8CurrentScalingQuantizer", "Format", "quantizer: expected"),
        ('"amax_epsilon"', '"unknown"', "unknown"),
        ("Float8CurrentScalingQuantizer", "Float8DelayedScalingQuantizer", "quantizer"),
        ("float8_e4m3fn", "load", "expected .*got .*load"),
        ('"name": "float32"', '"name": "float64"', "float64"),
        ("rowwise_scale_inv", "columnwise_scale_inv", "saved tensors: expected some of"),
    ):
        assert old in content
        with pytest.raises(ValueError, match=words):
            function(content.replace(old, new), tensors, *rest)
    for wrong in ({}, {**tensors, "other": torch.zeros(1)}):
        with pytest.raises(ValueError, match="saved tensors: expected some of"):
            function(content, wrong, *rest)
    kept = function(content, tensors, False, False, {"quantizer": None, "_own": 1, "label": 2})
    assert (kept.quantizer, hasattr(kept, "_own"), kept.label) == (BOTH, False, 2)


def test_a_quantizer_that_no_file_can_name_is_refused():
    class Own(Float8CurrentScalingQuantizer):
        pass

    weight = weight_of(Own(dtype=torch.float8_e4m3fn))
    with pytest.raises(TypeError, match=r"expected .*a quantizer among .*got Own"):
        pickle.dumps(weight)


def test_state_dict_round_trip():
    model, other = Model(0), Model(1)
    saved = _saved(model.state_dict(), weights_only=True)
    assert type(saved["weight"]) is QuantizedWeight
    before = addresses(other.weight)
    other.load_state_dict(saved)
    assert bits(other.weight) == bits(model.weight)
    assert addresses(other.weight) == before
    assert isinstance(other.weight, torch.nn.Parameter)
    assigned = Model(2)
    assigned.load_state_dict(saved, assign=True)
    assert isinstance(assigned.weight, torch.nn.Parameter)
    assert bits(assigned.weight) == bits(model.weight)


def test_load_state_dict_casts_plain_values_and_other_formats():
    model = Model(0)
    model.load_state_dict({"weight": values_of(4)})
    assert bits(model.weight) == bits(weight_of(BOTH, 4))
    source = Model(5, ROUNDED)
    model.load_state_dict(source.state_dict())
    assert bits(model.weight) == bits(fte.quantize(source.weight.detach().dequantize(), BOTH))
    plain = torch.nn.Linear(32, 8, bias=False)
    plain.load_state_dict(model.state_dict())
    assert type(plain.weight) is torch.nn.Parameter
    torch.testing.assert_close(plain.weight.data, model.weight.detach().dequantize(), rtol=0, atol=0)


# ---------------------------------------------------------------------------- optimizers

LR, DECAY = 0.05, 0.1


def _sgd(weight, **kwargs):
    return torch.optim.SGD([weight], lr=LR, momentum=0.9, **kwargs)


def _adamw(weight, decay=0.0, **kwargs):
    return torch.optim.AdamW([weight], lr=LR, weight_decay=decay, **kwargs)


@every_quantizer
@pytest.mark.parametrize("foreach", [False, True], ids=["loop", "foreach"])
@pytest.mark.parametrize("make", [_sgd, _adamw])
def test_optimizers_cast_what_they_write(quantizer, foreach, make):
    weight = parameter_of(quantizer)
    plain = weight.quantized().dequantize().requires_grad_()
    optimizers = make(weight, foreach=foreach), make(plain, foreach=foreach)
    for step in range(4):
        weight.grad, plain.grad = values_of(step), values_of(step)
        for optimizer in optimizers:
            optimizer.step()
        with torch.no_grad():
            plain.copy_(fte.dequantize(fte.quantize(plain.detach(), quantizer)))
        torch.testing.assert_close(weight.detach().dequantize(), plain.detach(), rtol=0, atol=0)
    assert all(type(value) is torch.Tensor for value in optimizers[0].state[weight].values())
    assert not torch.equal(plain, weight_of(quantizer).dequantize())


@pytest.mark.parametrize("foreach", [False, True], ids=["loop", "foreach"])
def test_every_write_of_an_optimizer_is_a_cast(foreach):
    # weight decay is a write of its own
    weight = parameter_of(PLAIN)
    decayed = fte.quantize(weight.quantized().dequantize() * (1 - LR * DECAY), PLAIN)
    plain = fte.dequantize(decayed).requires_grad_()
    weight.grad, plain.grad = values_of(3), values_of(3)
    _adamw(weight, DECAY, foreach=foreach).step()
    _adamw(plain, foreach=foreach).step()
    assert bits(weight) == bits(fte.quantize(plain.detach(), PLAIN))


def test_optimizer_state_dict_round_trip():
    first, second = parameter_of(), parameter_of()
    optimizers = _adamw(first), _adamw(second)
    first.grad = values_of(1)
    optimizers[0].step()
    second.quantize_(first)
    optimizers[1].load_state_dict(_saved(optimizers[0].state_dict(), weights_only=True))
    for weight, optimizer in zip((first, second), optimizers, strict=True):
        weight.grad = values_of(2)
        optimizer.step()
    assert bits(first) == bits(second)


# ---------------------------------------------------------------------------- one autograd function, one graph


class Product(torch.autograd.Function):
    """``x @ w.T``. The weight itself is there for its gradient; the values come from its inner tensors."""

    @staticmethod
    def forward(ctx, spec, x, anchor, *inner):
        q = pytree.tree_unflatten(spec, inner)
        ctx.save_for_backward(x, *inner)
        ctx.spec, ctx.dtype = spec, anchor.dtype
        return x @ q.dequantize(x.dtype).t()

    @staticmethod
    def backward(ctx, grad):
        x, *inner = ctx.saved_tensors
        q = pytree.tree_unflatten(ctx.spec, inner)
        grad_weight = (grad.t() @ x).to(ctx.dtype)
        return (None, grad @ q.dequantize(grad.dtype), grad_weight, *([None] * len(inner)))


def linear(x, weight):
    leaves, spec = pytree.tree_flatten(quantized_of(weight))
    return Product.apply(spec, x, weight, *leaves)


def _call(x, weight):
    return linear(x, weight)


def _checkpointed(x, weight):
    return torch.utils.checkpoint.checkpoint(linear, x, weight, use_reentrant=False)


def _in_a_module(x, weight):
    raise NotImplementedError  # replaced by a module in _train


WAYS = {"argument": _call, "checkpoint": _checkpointed, "module": _in_a_module}


def _train(way, backend, quantizer=BOTH, steps=5):
    """Outputs, gradients and bits of a few steps, with an optimizer in between; ``backend`` None is eager."""
    model = Model(quantizer=quantizer)
    weight = model.weight
    call = model if way is _in_a_module else way
    if backend is not None:
        call = torch.compile(call, fullgraph=True, backend=backend)
    optimizer = _adamw(weight, DECAY)
    record = []
    for step in range(steps):
        x = values_of(step, (4, 32)).requires_grad_()
        out = call(x) if way is _in_a_module else call(x, weight)
        out.square().sum().backward()
        assert type(weight.grad) is torch.Tensor
        record += [out.detach(), x.grad, weight.grad]
        optimizer.step()
        optimizer.zero_grad()
        record.append(weight.detach().dequantize())
    return record


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_training_is_one_graph(dynamo, way, backend):
    expected = _train(_call, None)
    got = _train(way, backend)
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if backend == "inductor" else {"rtol": 0, "atol": 0}
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, theirs, **tolerance)
    assert graph_count(dynamo) == 1
    assert break_count(dynamo) == 0


@every_quantizer
def test_every_quantizer_trains_in_one_graph(dynamo, quantizer):
    for mine, theirs in zip(_train(_call, "aot_eager", quantizer), _train(_call, None, quantizer), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
    assert graph_count(dynamo) == 1


def test_eager_checkpointing():
    for mine, theirs in zip(_train(_checkpointed, None), _train(_call, None), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_evaluation_compiled(dynamo, mode, backend):
    x, weight = values_of(1, (4, 32)), parameter_of()
    compiled = torch.compile(linear, fullgraph=True, backend=backend)
    with mode():
        torch.testing.assert_close(compiled(x, weight), linear(x, weight))
    assert graph_count(dynamo) == 1
    assert compiled(x, weight).requires_grad


def _written_first(x, weight):
    with torch.no_grad():
        weight.mul_(0.5)
    return linear(x, weight)


def _detached(x, weight):
    return linear(x, weight.detach())


def _cast_first(x, weight):
    return linear(x.bfloat16(), weight.to(torch.bfloat16))


def _twice(x, weight):
    return linear(x, weight) + linear(x + 1, weight)


def _plain_product(x, weight):
    return torch.nn.functional.linear(x, weight)


def _dequantized(x, weight):
    return x @ weight.dequantize().t()


def _asked(x, weight):
    is_ours = isinstance(weight, QuantizedWeight) and isinstance(weight, torch.nn.Parameter) and weight.requires_grad
    return linear(x, weight) if is_ours else x


CALLS = (_written_first, _detached, _cast_first, _twice, _plain_product, _dequantized, _asked)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_what_traced_code_may_do(dynamo, call, backend):
    results = []
    for run in (call, torch.compile(call, fullgraph=True, backend=backend)):
        weight = parameter_of()
        x = values_of(1, (4, 32)).requires_grad_()
        out = run(x, weight)
        out.float().square().sum().backward()
        results.append((out.detach(), x.grad, weight.grad, weight.detach().dequantize()))
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if backend == "inductor" else {"rtol": 0, "atol": 0}
    for mine, theirs in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(mine, theirs, **tolerance)
    assert graph_count(dynamo) == 1


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_weight_written_in_a_graph(dynamo, backend):
    def write(weight, values):
        with torch.no_grad():
            weight.add_(1.0).lerp_(values, 0.25)
        return values * 2

    weights = parameter_of(), parameter_of()
    before, version = addresses(weights[1]), weights[1]._version
    write(weights[0], values_of(3))
    torch.compile(write, fullgraph=True, backend=backend)(weights[1], values_of(3))
    assert bits(weights[1]) == bits(weights[0])
    assert addresses(weights[1]) == before
    assert weights[1]._version > version


def test_a_graph_makes_and_returns_weights(dynamo):
    def make(values, weight):
        return QuantizedWeight.from_quantized(fte.quantize(values, BOTH)), weight, weight.detach()

    weight = parameter_of()
    made, same, shared = torch.compile(make, fullgraph=True, backend="aot_eager")(values_of(3), weight)
    assert type(made) is type(shared) is QuantizedWeight
    assert bits(made) == bits(weight_of(BOTH, 3))
    assert made.quantizer is BOTH
    assert same is weight
    assert addresses(shared) == addresses(weight)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_backward_never_reads_the_weight_of_another_step(dynamo, backend):
    x, weight = values_of(1, (4, 32)).requires_grad_(), parameter_of()
    compiled = torch.compile(linear, fullgraph=True, backend=backend)
    (expected,) = torch.autograd.grad(compiled(x, weight).sum(), x)
    out = compiled(x, weight)
    with torch.no_grad():
        weight.add_(1.0)
    try:
        (found,) = torch.autograd.grad(out.sum(), x)
    except RuntimeError as error:  # the inner tensors were saved
        if "modified by an inplace operation" not in str(error):
            raise
    else:  # dequantized values were
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_recompiles_are_for_what_changed(dynamo):
    model = Model()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    x = values_of(1, (4, 32))
    compiled(x)
    model.load_state_dict(Model(1).state_dict())
    model.load_state_dict({"weight": values_of(3)})
    torch.testing.assert_close(compiled(x), model(x), rtol=0, atol=0)
    model.load_state_dict(Model(2).state_dict(), assign=True)
    torch.testing.assert_close(compiled(x), model(x), rtol=0, atol=0)
    assert graph_count(dynamo) == 1
    model.to(torch.bfloat16)
    torch.testing.assert_close(compiled(x), model(x), rtol=0, atol=0)
    assert graph_count(dynamo) == 2
    model.weight = parameter_of(ROUNDED)
    torch.testing.assert_close(compiled(x), model(x), rtol=0, atol=0)
    assert graph_count(dynamo) == 3


def test_batches_of_changing_size(dynamo):
    weight = parameter_of()
    compiled = torch.compile(linear, fullgraph=True, backend="aot_eager")
    for size in (4, 5, 6, 7):
        x = values_of(size, (size, 32))
        torch.testing.assert_close(compiled(x, weight), linear(x, weight), rtol=0, atol=0)
    assert graph_count(dynamo) == 2


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_optimizer(dynamo, backend):
    weights = parameter_of(), parameter_of()
    optimizers = [_sgd(weight) for weight in weights]
    step = torch.compile(lambda: optimizers[0].step(), backend=backend)
    for index in range(3):
        for weight in weights:
            weight.grad = values_of(index)
        step()
        optimizers[1].step()
    torch.testing.assert_close(weights[0].detach().dequantize(), weights[1].detach().dequantize(), rtol=0.07, atol=1e-4)


def test_the_compiler_caches_by_everything_but_the_values():
    key = parameter_of()._stable_hash_for_caching()
    assert parameter_of(seed=1)._stable_hash_for_caching() == key
    others = (weight_of(), parameter_of(dtype=torch.bfloat16), parameter_of(shape=(16, 32)), parameter_of(PLAIN))
    rounded = parameter_of(Float8CurrentScalingQuantizer(BOTH.dtype, columnwise=True, power_2_scale=True))
    assert len({key, *[other._stable_hash_for_caching() for other in (*others, rounded)]}) == 6


def test_export():
    model, x = Model(), values_of(1, (4, 32))
    torch.testing.assert_close(torch.export.export(model, (x,)).module()(x), model(x), rtol=0, atol=0)
