"""Real tensors of Transformer Engine, made by its quantizers, to this library and back."""

import dataclasses

import pytest
import torch

import functional_te as fte
from bridge.interop import from_transformer_engine, to_transformer_engine
from functional_te import pytree
from functional_te import quantization as qz
from tests.gpu import te
from tests.helpers import uniform

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
te.require()

pytestmark = [
    pytest.mark.te,
    # Transformer Engine and what it imports use what others deprecated
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BF16 = torch.bfloat16
SHAPES = [(128, 256), (2, 96, 160), (16, 16)]


def delayed(dtype):
    scale = torch.full((1,), 3.0, device="cuda")
    return te.modules()[0].Float8Quantizer(scale, torch.zeros_like(scale), te.element(dtype))


def current(dtype):
    return te.modules()[0].Float8CurrentScalingQuantizer(te.element(dtype), device="cuda", force_pow_2_scales=True)


def block(dim):
    def make(dtype):
        options = {"rowwise": True, "columnwise": True, "force_pow_2_scales": False, "block_scaling_dim": dim}
        return te.modules()[0].Float8BlockQuantizer(te.element(dtype), **options)

    return make


# a quantizer of Transformer Engine, and the value that it is here
FORMATS = {
    "delayed": (delayed, qz.Float8DelayedScalingQuantizer(dtype=E4M3, columnwise=True)),
    "current": (current, qz.Float8CurrentScalingQuantizer(dtype=E4M3, columnwise=True, power_2_scale=True)),
    "block 1-D": (
        block(1),
        qz.Float8BlockQuantizer(dtype=E4M3, columnwise=True, power_2_scale=False, block_scaling_dim=1),
    ),
    "block 2-D": (block(2), qz.Float8BlockQuantizer(dtype=E4M3, columnwise=True, power_2_scale=False)),
}
every_format = pytest.mark.parametrize("name", FORMATS)
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


def data(shape):
    """Rows of very different size, on the GPU."""
    x = uniform(shape)
    x.view(-1, shape[-1]).mul_(torch.exp2(torch.arange(x[..., 0].numel()) % 24 - 12.0)[:, None])
    return x.to(BF16).cuda()


def assert_same_bits(actual, expected):
    left, spec = pytree.tree_flatten(actual)
    right, wanted = pytree.tree_flatten(expected)
    assert spec == wanted
    for one, other in zip(left, right, strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert torch.equal(one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8))


def assert_same_tensor(actual, expected):
    """Every tensor attribute of two tensors of Transformer Engine is the same, but for the padding of grids."""
    rows, cols = expected.shape[:-1].numel(), expected.shape[-1]
    known = ["_data", "_transpose", "_scale_inv", "_rowwise_data", "_rowwise_scale_inv"]
    known += ["_columnwise_data", "_columnwise_scale_inv"]
    names = [name for name in known if getattr(expected, name, None) is not None]
    assert len(names) in (3, 4)
    for name in names:
        one, other = getattr(actual, name), getattr(expected, name)
        assert one.shape == other.shape, name
        if name.endswith("wise_scale_inv"):
            narrow = {
                (True, False): (-(-rows // 128), -(-cols // 128)),
                (True, True): (-(-cols // 128), -(-rows // 128)),
                (False, False): (-(-cols // 128), rows),
                (False, True): (-(-rows // 128), cols),
            }[expected._is_2D_scaled, name.startswith("_col")]
            one, other = one[: narrow[0], : narrow[1]], other[: narrow[0], : narrow[1]]
        assert torch.equal(one, other), name


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
@every_shape
@every_format
def test_from_transformer_engine_and_back(name, shape, dtype):
    make, value = FORMATS[name]
    value = dataclasses.replace(value, dtype=dtype)
    there = make(dtype)(data(shape))
    q = from_transformer_engine(there)
    assert q.quantizer is value
    assert q.dtype is BF16
    assert q.shape == shape
    assert torch.equal(q.dequantize(), there.dequantize())
    assert torch.equal(q.dequantize(torch.float32), there.dequantize(dtype=torch.float32))
    if q.columnwise_data is not None and name != "block 1-D":
        columnwise = q.with_usage(rowwise=False, columnwise=True)
        assert torch.equal(columnwise.dequantize().reshape(shape), there.dequantize())
    again = to_transformer_engine(q)
    assert type(again) is type(there)
    assert_same_tensor(again, there)
    assert torch.equal(again.dequantize(), there.dequantize())
    assert_same_bits(from_transformer_engine(again), q)


@every_shape
@every_format
def test_to_transformer_engine(name, shape):
    """What this library casts is what Transformer Engine reads."""
    _, quantizer = FORMATS[name]
    state = qz.init_quantizer_state(quantizer, "cuda")
    x = data(shape)
    q = fte.quantize(x, quantizer) if state is None else fte.quantize(x, quantizer, state)[0]
    there = to_transformer_engine(q)
    assert there.shape == shape
    assert torch.equal(there.dequantize(), q.dequantize())
    assert_same_bits(from_transformer_engine(there, quantizer), q)


@every_format
def test_one_copy(name):
    make, _ = FORMATS[name]
    maker = make(E4M3)
    # Transformer Engine makes no columnwise copy alone of per-tensor formats
    directions = ((True, False),) if name in ("current", "delayed") else ((True, False), (False, True))
    for rowwise, columnwise in directions:
        maker.set_usage(rowwise=rowwise, columnwise=columnwise)
        q = from_transformer_engine(maker(data((128, 256))))
        assert (q.rowwise_data is not None, q.columnwise_data is not None) == (rowwise, columnwise)
        assert_same_bits(from_transformer_engine(to_transformer_engine(q)), q)


@every_format
def test_bare_storage(name):
    make, _ = FORMATS[name]
    maker = make(E4M3)
    x = data((128, 256))
    whole = from_transformer_engine(maker(x))
    maker.internal = True
    storage = maker(x)
    assert not isinstance(storage, torch.Tensor)
    assert_same_bits(pytree.leaves(from_transformer_engine(storage)), pytree.leaves(whole))


@pytest.mark.parametrize(
    "quantizer",
    [
        qz.MXFP8Quantizer(dtype=E4M3, columnwise=True),
        qz.MXFP8Quantizer(dtype=E5M2, columnwise=True, with_2d_quantization=True),
        qz.NVFP4Quantizer(columnwise=True, with_2d_quantization=True),
    ],
    ids=str,
)
def test_formats_that_this_gpu_cannot_cast(quantizer):
    """Only storage: tensors that were cast here travel to Transformer Engine's classes and back."""
    q = fte.quantize(data((128, 256)), quantizer)
    there = to_transformer_engine(q)
    assert there.shape == (128, 256)
    assert_same_bits(from_transformer_engine(there), q)
