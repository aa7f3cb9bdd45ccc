"""Tensors of torchao and of Transformer Engine: the same bits here and there.

torchao itself is the oracle for its tensors. Transformer Engine needs a GPU, so its tensors are stand-ins that have the
attributes and layouts of the real ones and dequantize by their index formulas; ``tests/gpu`` has the real ones.
"""

import dataclasses
import enum
import importlib
import math
import sys
import types
from typing import Any, ClassVar

import pytest
import torch

import functional_te as fte
from bridge.interop import from_torchao, from_transformer_engine, to_torchao, to_transformer_engine
from bridge.interop.torchao import unswizzled
from functional_te import pytree
from functional_te import quantization as qz
from tests.helpers import uniform

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BF16 = torch.bfloat16


def bits(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8)


def same_bits(one, other):
    return one.dtype is other.dtype and one.shape == other.shape and torch.equal(bits(one), bits(other))


def assert_same_bits(actual, expected):
    left, spec = pytree.tree_flatten(actual)
    right, wanted = pytree.tree_flatten(expected)
    assert spec == wanted
    for one, other in zip(left, right, strict=True):
        assert same_bits(one, other)


def same_values(one, other):
    """Bit for bit, where NaN is NaN."""
    nan = one.isnan()
    return torch.equal(nan, other.isnan()) and same_bits(one.masked_fill(nan, 0), other.masked_fill(nan, 0))


def values(shape, dtype=torch.float32, special=True):
    """Blocks of very different size; one is zero, one holds an infinity and one a NaN."""
    x = uniform(shape)
    rows = x.view(-1, shape[-1])
    rows.mul_(torch.exp2(torch.arange(len(rows)) % 24 - 12.0)[:, None])
    if special:
        rows[0] = 0
        rows[1, 3] = math.inf
        rows[2, -1] = math.nan
    return x.to(dtype)


def quantized(quantizer, x):
    state = qz.init_quantizer_state(quantizer)
    return fte.quantize(x, quantizer) if state is None else fte.quantize(x, quantizer, state)[0]


def rowwise_of(q):
    return q.with_usage(rowwise=True, columnwise=False)


# ---------------------------------------------------------------------------- torchao


@pytest.fixture(scope="module")
def ao():
    """The classes of torchao."""
    pytest.importorskip("torchao", reason="torchao is an optional peer")
    names = {
        "float8.float8_training_tensor": ("hp_tensor_and_scale_to_float8",),
        "prototype.mx_formats.config": ("ScaleCalculationMode",),
        "prototype.mx_formats.mx_tensor": ("MXTensor",),
        "prototype.mx_formats.nvfp4_tensor": ("NVFP4Tensor", "per_tensor_amax_to_scale"),
        "quantization": ("Float8Tensor",),
        "quantization.granularity": ("PerBlock", "PerRow", "PerTensor"),
    }
    found = {}
    for module, members in names.items():
        found.update({name: getattr(importlib.import_module(f"torchao.{module}"), name) for name in members})
    return types.SimpleNamespace(**found)


FP8_EXAMPLES = (
    (qz.Float8CurrentScalingQuantizer(dtype=E4M3, columnwise=True), (5, 7)),
    (qz.Float8CurrentScalingQuantizer(dtype=E5M2, power_2_scale=True), (2, 3, 4)),
    (qz.Float8CurrentScalingQuantizer(dtype=E4M3), (6,)),
    (qz.Float8DelayedScalingQuantizer(dtype=E5M2, amax_history_len=4), (5, 7)),
    (qz.Float8BlockQuantizer(dtype=E4M3, columnwise=True), (256, 384)),
    (qz.Float8BlockQuantizer(dtype=E4M3), (128, 128)),
    (qz.Float8BlockQuantizer(dtype=E5M2, block_scaling_dim=1, power_2_scale=False), (7, 256)),
    (qz.Float8BlockQuantizer(dtype=E4M3, block_scaling_dim=1), (2, 3, 128)),
    (qz.MXFP8Quantizer(dtype=E4M3, columnwise=True), (5, 96)),
    (qz.MXFP8Quantizer(dtype=E5M2), (2, 3, 64)),
    (qz.MXFP8Quantizer(dtype=E4M3, with_2d_quantization=True), (40, 64)),
    (
        qz.HybridQuantizer(
            columnwise=True,
            rowwise_quantizer=qz.MXFP8Quantizer(dtype=E4M3),
            columnwise_quantizer=qz.Float8CurrentScalingQuantizer(dtype=E5M2),
        ),
        (4, 64),
    ),
)
FP4_EXAMPLES = (
    (qz.NVFP4Quantizer(columnwise=True, with_rht=True), (6, 64)),
    (qz.NVFP4Quantizer(with_2d_quantization=True), (40, 32)),
    (qz.NVFP4Quantizer(four_over_six="MAE", e4m3_max=256), (2, 3, 48)),
)


def named(examples):
    return pytest.mark.parametrize(
        ("quantizer", "shape"), examples, ids=[f"{type(q).__name__}-{'x'.join(map(str, s))}" for q, s in examples]
    )


@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
@named(FP8_EXAMPLES)
def test_fp8_to_torchao_and_back(ao, quantizer, shape, dtype):
    q = quantized(quantizer, values(shape, dtype, special=len(shape) > 1))
    with_special = q.dequantize().isnan().any() or len(shape) == 1
    assert with_special
    there = to_torchao(q)
    assert type(there).__name__ == (
        "MXTensor" if isinstance(quantizer.of(False), qz.MXFP8Quantizer) else "Float8Tensor"
    )
    assert there.shape == shape
    assert there.dtype is dtype
    assert same_bits(there.qdata, q.rowwise_data)
    assert same_values(there.dequantize(), q.dequantize())
    assert same_values(there.dequantize(torch.float32), q.dequantize(torch.float32))
    assert_same_bits(from_torchao(there, quantizer), rowwise_of(q))
    back = from_torchao(there)
    assert same_values(back.dequantize(), q.dequantize())
    assert back.dtype is dtype
    assert back.quantizer.dtype is quantizer.of(False).dtype


def ulps(one, other):
    """The largest distance in float32 units in the last place."""
    return (one.view(torch.int32).long() - other.view(torch.int32).long()).abs().max()


@named(FP4_EXAMPLES)
def test_nvfp4_to_torchao_and_back(ao, quantizer, shape):
    q = quantized(quantizer, values(shape, BF16, special=False))
    there = to_torchao(q)
    assert type(there) is ao.NVFP4Tensor
    assert there.shape == shape
    assert same_bits(there.qdata, q.rowwise_data)
    # torchao rounds the product of its two scales, which is not rounded here
    assert ulps(there.dequantize(torch.float32), q.dequantize(torch.float32)) <= 1
    back = from_torchao(there, quantizer)
    assert same_bits(back.rowwise_data, q.rowwise_data)
    assert same_bits(back.rowwise_scale_inv, q.rowwise_scale_inv)
    assert ulps(back.rowwise_amax, q.rowwise_amax) <= 1
    assert same_bits(back.dequantize(torch.float32), q.dequantize(torch.float32))
    assert same_bits(to_torchao(back).per_tensor_scale, there.per_tensor_scale)
    default = from_torchao(there)
    assert default.quantizer is qz.NVFP4Quantizer()
    assert ulps(default.dequantize(torch.float32), q.dequantize(torch.float32)) <= 1


def test_nvfp4_with_a_power_of_two_is_exact(ao):
    x = values((6, 64), torch.float32, special=False)
    x = x / x.abs().max() * (6 * 448) * 2.0**-5
    q = quantized(qz.NVFP4Quantizer(), x)
    assert q.rowwise_amax.item() == 6 * 448 * 2.0**-5
    there = to_torchao(q)
    assert there.per_tensor_scale.item() == 2.0**-5
    assert same_bits(there.dequantize(), q.dequantize())


def float8_granularities(ao):
    return {
        "tensor": (ao.PerTensor(), (64, 96), qz.Float8CurrentScalingQuantizer),
        "row": (ao.PerRow(), (7, 200), qz.Float8BlockQuantizer),
        "short row": (ao.PerRow(), (7, 100), qz.Float8BlockQuantizer),
        "row of three": (ao.PerRow(), (2, 3, 200), qz.Float8BlockQuantizer),
        "1x128": (ao.PerBlock((1, 128)), (7, 256), qz.Float8BlockQuantizer),
        "128x128": (ao.PerBlock((128, 128)), (256, 128), qz.Float8BlockQuantizer),
    }


@pytest.mark.parametrize("name", ["tensor", "row", "short row", "row of three", "1x128", "128x128"])
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
def test_float8_of_torchao(ao, name, dtype):
    granularity, shape, kind = float8_granularities(ao)[name]
    x = values(shape, BF16, special=False)
    there = ao.Float8Tensor.from_hp(x, float8_dtype=dtype, granularity=granularity)
    q = from_torchao(there)
    assert type(q.quantizer) is kind
    assert q.quantizer.dtype is dtype
    assert q.shape == shape
    assert q.dtype is BF16
    assert same_bits(q.dequantize(), there.dequantize())
    assert same_bits(q.dequantize(torch.float32), there.dequantize(torch.float32))
    if name in ("tensor", "1x128", "128x128"):
        again = to_torchao(q)
        assert same_bits(again.qdata, there.qdata)
        assert same_bits(again.scale.flatten(), there.scale.flatten())
        assert list(again.block_size) == list(there.block_size)


@pytest.mark.parametrize("axis", [None, -1])
@pytest.mark.parametrize("power_of_2", [False, True])
def test_float8_training_tensor(ao, axis, power_of_2):
    x = values((5, 130), torch.float32, special=False)
    amax = x.abs().max() if axis is None else x.abs().amax(-1, keepdim=True)
    scale = torch.exp2((448 / amax).log2().floor()) if power_of_2 else 448 / amax
    there = ao.hp_tensor_and_scale_to_float8(x, scale, E4M3, axiswise_dim=axis)
    q = from_torchao(there)
    assert same_bits(q.rowwise_data, there._data)
    # it divides by the scale, where 1 / scale is rounded here
    assert ulps(q.dequantize(), there.to_original_precision()) <= (0 if power_of_2 else 2)


@pytest.mark.parametrize("swizzled", [False, True])
@pytest.mark.parametrize("shape", [(5, 96), (130, 160), (256, 128), (2, 128, 64)])
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
def test_mx_of_torchao(ao, dtype, shape, swizzled):
    x = values(shape, BF16, special=False)
    there = ao.MXTensor.to_mx(x, dtype, 32, ao.ScaleCalculationMode.RCEIL, is_swizzled_scales=swizzled)
    q = from_torchao(there)
    assert same_values(q.dequantize(), there.dequantize())
    assert q.quantizer is qz.MXFP8Quantizer(dtype=dtype)
    # no block here is so small that torchao clamps its scale, so the casts agree too
    assert_same_bits(q, fte.quantize(x, q.quantizer))


@pytest.mark.parametrize("swizzled", [False, True])
@pytest.mark.parametrize("global_scale", [False, True])
@pytest.mark.parametrize("shape", [(5, 96), (130, 80), (2, 128, 64)])
def test_nvfp4_of_torchao(ao, shape, global_scale, swizzled):
    x = values(shape, BF16, special=False)
    scale = ao.per_tensor_amax_to_scale(x.abs().max()) if global_scale else None
    there = ao.NVFP4Tensor.to_nvfp4(x, per_tensor_scale=scale, is_swizzled_scales=swizzled)
    q = from_torchao(there)
    assert q.quantizer is qz.NVFP4Quantizer()
    assert q.shape == shape
    assert ulps(q.dequantize(torch.float32), there.dequantize(torch.float32)) <= (2 if global_scale else 0)


def test_swizzle_by_index():
    """The layout by its formula: 128x4 tiles in order, each 32 rows of 16."""
    rows, cols = 150, 6
    grid = torch.arange(rows * cols).reshape(rows, cols)
    flat = torch.full((2 * 2 * 512,), -1)
    for row in range(rows):
        for col in range(cols):
            tile, r, c = (row // 128) * 2 + col // 4, row % 128, col % 4
            flat[tile * 512 + (r % 32) * 16 + (r // 32) * 4 + c] = grid[row, col]
    assert torch.equal(unswizzled(flat, rows, cols), grid)


def test_what_torchao_cannot_hold(ao):
    x = values((4, 64), special=False)
    columnwise = fte.quantize(x, qz.MXFP8Quantizer(dtype=E4M3, rowwise=False, columnwise=True))
    with pytest.raises(ValueError, match="to_torchao: q: expected a rowwise copy, got a columnwise copy only"):
        to_torchao(columnwise)
    with pytest.raises(TypeError, match="to_torchao: q: expected a QuantizedTensor, got Tensor"):
        to_torchao(x)
    one, two = qz.Float8BlockQuantizer(dtype=E4M3, block_scaling_dim=1), qz.Float8BlockQuantizer(dtype=E4M3)
    for shape, quantizer in (((4, 100), one), ((100, 128), two), ((128, 100), two)):
        with pytest.raises(ValueError, match=r"to_torchao: q: expected a shape that 1.*x128 divides"):
            to_torchao(fte.quantize(uniform(shape), quantizer))
    for shape, quantizer in (((2, 128, 128), two), ((128,), one)):
        with pytest.raises(ValueError, match="to_torchao: q: expected two dimensions, got shape"):
            to_torchao(fte.quantize(uniform(shape), quantizer))
    with pytest.raises(ValueError, match="to_torchao: q: expected one amax for the tensor, got one per row"):
        to_torchao(fte.quantize(x, qz.NVFP4Quantizer(row_scaled=True)))
    with pytest.raises(ValueError, match="to_torchao: q: expected 2 or 3 dimensions"):
        to_torchao(fte.quantize(x[0], qz.NVFP4Quantizer()))


def test_what_cannot_come_from_torchao(ao):
    x = values((64, 64), BF16, special=False)
    mx = ao.MXTensor.to_mx(x, E4M3, 32)
    with pytest.raises(TypeError, match=r"from_torchao: tensor: expected a tensor of torchao among .*, got Tensor"):
        from_torchao(x)
    for bad in (mx.t(), ao.Float8Tensor.from_hp(x, granularity=ao.PerTensor()).t(), ao.NVFP4Tensor.to_nvfp4(x).t()):
        with pytest.raises(ValueError, match="from_torchao: tensor: expected contiguous data"):
            from_torchao(bad)
    with pytest.raises(ValueError, match="from_torchao: tensor: expected elements of float8_e4m3fn or float8_e5m2"):
        from_torchao(ao.MXTensor.to_mx(x, torch.float4_e2m1fn_x2, 32))
    with pytest.raises(ValueError, match="from_torchao: tensor: expected blocks of 32, got 16"):
        from_torchao(ao.MXTensor.to_mx(x, E4M3, 16))
    with pytest.raises(ValueError, match="expected one scale, a scale per row, or blocks of 1x128 or 128x128"):
        from_torchao(ao.Float8Tensor.from_hp(x, granularity=ao.PerBlock((1, 32))))
    scale = 448 / x.float().abs().amax(0, keepdim=True)
    with pytest.raises(ValueError, match="expected a scale of the tensor or of each row"):
        from_torchao(ao.hp_tensor_and_scale_to_float8(x, scale, E4M3, axiswise_dim=0))
    experts = ao.NVFP4Tensor.to_nvfp4(x.expand(2, 64, 64).contiguous(), per_tensor_scale=torch.ones(2, 1, 1))
    with pytest.raises(ValueError, match="expected one scale for the tensor, got 2 scales"):
        from_torchao(experts)
    for other in (qz.MXFP8Quantizer(dtype=E5M2), qz.Float8CurrentScalingQuantizer(dtype=E4M3), qz.NVFP4Quantizer()):
        with pytest.raises(ValueError, match="from_torchao: quantizer: expected a quantizer like MXFP8Quantizer"):
            from_torchao(mx, other)
    with pytest.raises(ValueError, match="from_torchao: scales: expected the same scales in 32 rows"):
        from_torchao(mx, qz.MXFP8Quantizer(dtype=E4M3, with_2d_quantization=True))


def test_torchao_is_not_needed_to_import(monkeypatch):
    q = fte.quantize(uniform((4, 64)), qz.MXFP8Quantizer(dtype=E4M3))
    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.setitem(sys.modules, "torchao.prototype.mx_formats.mx_tensor", None)
    with pytest.raises(ImportError, match=r"to_torchao: .*MXTensor is missing; pip install 'torchao"):
        to_torchao(q)


# ---------------------------------------------------------------------------- Transformer Engine: stand-ins

DType = enum.Enum("DType", ["kFloat8E4M3", "kFloat8E5M2", "kFloat4E2M1"])
_TORCH = {DType.kFloat8E4M3: E4M3, DType.kFloat8E5M2: E5M2}
_FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def up(number, multiple):
    return -(-number // multiple) * multiple


def noise(*shape):
    """Uninitialized memory as it may be: bytes that are NaN in every format used as a scale."""
    return torch.full(shape, 255, dtype=torch.uint8)


def float_noise(*shape):
    return torch.full(shape, math.nan)


class _Standin:
    """Attributes of a tensor of Transformer Engine; ``values`` reads a copy by the formula of its layout."""

    def __init__(self, shape, dtype, quantizer, **fields):
        self.shape, self.dtype, self._quantizer = tuple(shape), dtype, quantizer
        for name, value in fields.items():
            setattr(self, name, value)

    def values(self, columnwise=False):
        rows, cols = math.prod(self.shape[:-1]), self.shape[-1]
        m, k = torch.arange(rows)[:, None].expand(rows, cols), torch.arange(cols).expand(rows, cols)
        return self.at(m, k, columnwise).reshape(self.shape).to(self.dtype)


class Float8TensorStorage(_Standin):
    def at(self, m, k, columnwise):
        data = self._transpose.reshape(self.shape[-1], -1)[k, m] if columnwise else self._data.view(m.shape)
        return data.view(_TORCH[self._fp8_dtype]).float() * self._scale_inv


class Float8Tensor(Float8TensorStorage):
    pass


class Float8BlockwiseQTensor(_Standin):
    def at(self, m, k, columnwise):
        data = (
            self._columnwise_data.reshape(self.shape[-1], -1)[k, m] if columnwise else self._rowwise_data.view(m.shape)
        )
        row, col = (k, m) if columnwise else (m, k)
        scale = self._columnwise_scale_inv if columnwise else self._rowwise_scale_inv
        scale = scale[row // 128, col // 128] if self._is_2D_scaled else scale[col // 128, row]
        return data.view(_TORCH[self._fp8_dtype]).float() * scale


class MXFP8Tensor(_Standin):
    def at(self, m, k, columnwise):
        data = (self._columnwise_data if columnwise else self._rowwise_data).view(m.shape)
        byte = self._columnwise_scale_inv[m // 32, k] if columnwise else self._rowwise_scale_inv[m, k // 32]
        return (data.view(_TORCH[self._fp8_dtype]).double() * torch.exp2(byte.double() - 127)).float()


class NVFP4Tensor(_Standin):
    def at(self, m, k, columnwise):
        data = self._columnwise_data if columnwise else self._rowwise_data
        scale = self._columnwise_scale_inv if columnwise else self._rowwise_scale_inv
        amax = self._amax_columnwise if columnwise else self._amax_rowwise
        row, col = (k, m) if columnwise else (m, k)
        packed = data.reshape(-1, data.shape[-1])[row, col // 2]
        four = torch.where(col % 2 == 0, packed & 15, packed >> 4).long()
        block = scale[row, col // 16].view(E4M3).float()
        factor = amax / (6 * getattr(self._quantizer, "nvfp4_e4m3_max", 448))
        return _FP4[four] * block * (factor[row] if len(amax) > 1 else factor)


class _TEQuantizer:
    defaults: ClassVar[dict[str, Any]] = {}

    def __init__(self, dtype, *, rowwise=True, columnwise=True, **options):
        assert options.keys() <= self.defaults.keys() | {"with_post_rht_amax"}
        vars(self).update(self.defaults, **options)
        self.dtype, self.rowwise_usage, self.columnwise_usage = dtype, rowwise, columnwise


class _PerTensor(_TEQuantizer):
    def make_empty(self, shape, *, dtype, device):
        return Float8Tensor(
            shape,
            dtype,
            self,
            _fp8_dtype=self.dtype,
            _data=noise(*shape) if self.rowwise_usage else None,
            _transpose=noise(shape[-1], *shape[:-1]) if self.columnwise_usage else None,
            _transpose_invalid=True,
            _scale_inv=float_noise(1),
        )


class Float8CurrentScalingQuantizer(_PerTensor):
    defaults: ClassVar[dict[str, Any]] = {"force_pow_2_scales": False, "amax_epsilon": 0.0}

    def __init__(self, dtype, device, **options):
        super().__init__(dtype, **options)


class Float8Quantizer(_PerTensor):
    def __init__(self, scale, amax, dtype, **options):
        super().__init__(dtype, **options)
        self.scale, self.amax = scale, amax


class Float8BlockQuantizer(_TEQuantizer):
    defaults: ClassVar[dict[str, Any]] = {"force_pow_2_scales": True, "amax_epsilon": 0.0, "block_scaling_dim": 2}

    def make_empty(self, shape, *, dtype, device):
        rows, cols, two = math.prod(shape[:-1]), shape[-1], self.block_scaling_dim == 2
        grid = (-(-rows // 128), up(-(-cols // 128), 4)) if two else (-(-cols // 128), up(rows, 4))
        column_grid = (-(-cols // 128), up(-(-rows // 128), 4)) if two else (-(-rows // 128), up(cols, 4))
        row, column = self.rowwise_usage, self.columnwise_usage
        return Float8BlockwiseQTensor(
            shape,
            dtype,
            self,
            _fp8_dtype=self.dtype,
            _is_2D_scaled=two,
            _rowwise_data=noise(*shape) if row else None,
            _rowwise_scale_inv=float_noise(*grid) if row else None,
            _columnwise_data=noise(shape[-1], *shape[:-1]) if column else None,
            _columnwise_scale_inv=float_noise(*column_grid) if column else None,
        )


class MXFP8Quantizer(_TEQuantizer):
    defaults: ClassVar[dict[str, Any]] = {"with_2d_quantization": False}

    def make_empty(self, shape, *, dtype, device):
        rows, cols = math.prod(shape[:-1]), shape[-1]
        assert rows % 32 == cols % 32 == 0
        row, column = self.rowwise_usage, self.columnwise_usage
        return MXFP8Tensor(
            shape,
            dtype,
            self,
            _fp8_dtype=self.dtype,
            _with_gemm_swizzled_scales=False,
            _rowwise_data=noise(*shape) if row else None,
            _rowwise_scale_inv=noise(up(rows, 128), up(cols // 32, 4)) if row else None,
            _columnwise_data=noise(*shape) if column else None,
            _columnwise_scale_inv=noise(up(rows // 32, 4), up(cols, 128)) if column else None,
        )


class NVFP4Quantizer(_TEQuantizer):
    defaults: ClassVar[dict[str, Any]] = {
        "with_rht": False,
        "with_2d_quantization": False,
        "stochastic_rounding": False,
        "row_scaled_nvfp4": False,
        "nvfp4_use_4over6": False,
        "nvfp4_e4m3_max": 448,
        "nvfp4_4over6_err_mode": "MAE",
        "rht_matrix_random_sign_mask_t": 1,
    }

    def __init__(self, dtype=DType.kFloat4E2M1, **options):
        super().__init__(dtype, **options)

    def make_empty(self, shape, *, dtype, device):
        rows, cols = math.prod(shape[:-1]), shape[-1]
        assert rows % 16 == cols % 16 == 0
        row, column = self.rowwise_usage, self.columnwise_usage
        return NVFP4Tensor(
            shape,
            dtype,
            self,
            _fp4_dtype=self.dtype,
            _with_gemm_swizzled_scales=False,
            _rowwise_data=noise(*shape[:-1], cols // 2) if row else None,
            _rowwise_scale_inv=noise(up(rows, 128), up(cols // 16, 4)) if row else None,
            _amax_rowwise=float_noise(rows if self.row_scaled_nvfp4 else 1) if row else None,
            _columnwise_data=noise(cols, rows // 2) if column else None,
            _columnwise_scale_inv=noise(up(cols, 128), up(rows // 16, 4)) if column else None,
            _amax_columnwise=float_noise(1) if column else None,
        )


@pytest.fixture
def te(monkeypatch):
    """Stand-ins in the place of Transformer Engine's modules."""
    package = "transformer_engine.pytorch.tensor"
    contents = {
        "transformer_engine_torch": {"DType": DType},
        "transformer_engine": {},
        "transformer_engine.pytorch": {},
        package: {},
        f"{package}.float8_tensor": {
            "Float8Quantizer": Float8Quantizer,
            "Float8CurrentScalingQuantizer": Float8CurrentScalingQuantizer,
        },
        f"{package}.float8_blockwise_tensor": {"Float8BlockQuantizer": Float8BlockQuantizer},
        f"{package}.mxfp8_tensor": {"MXFP8Quantizer": MXFP8Quantizer},
        f"{package}.nvfp4_tensor": {"NVFP4Quantizer": NVFP4Quantizer},
    }
    for name, members in contents.items():
        module = types.ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)


TE_FP8_EXAMPLES = (
    (qz.Float8CurrentScalingQuantizer(dtype=E4M3, columnwise=True), (2, 5, 7)),
    (qz.Float8CurrentScalingQuantizer(dtype=E5M2, power_2_scale=True, amax_epsilon=0.5), (5, 7)),
    (qz.Float8DelayedScalingQuantizer(dtype=E4M3, rowwise=False, columnwise=True), (5, 7)),
    (qz.Float8BlockQuantizer(dtype=E4M3, columnwise=True), (2, 150, 260)),
    (qz.Float8BlockQuantizer(dtype=E5M2, columnwise=True, block_scaling_dim=1, power_2_scale=False), (2, 75, 130)),
    (qz.Float8BlockQuantizer(dtype=E4M3, rowwise=False, columnwise=True, block_scaling_dim=1), (75, 130)),
    (qz.MXFP8Quantizer(dtype=E4M3, columnwise=True), (2, 80, 96)),
    (qz.MXFP8Quantizer(dtype=E5M2, rowwise=False, columnwise=True), (160, 32)),
    (qz.MXFP8Quantizer(dtype=E4M3, columnwise=True, with_2d_quantization=True), (96, 64)),
)
TE_FP4_EXAMPLES = (
    (qz.NVFP4Quantizer(columnwise=True), (2, 40, 48)),
    (qz.NVFP4Quantizer(columnwise=True, with_2d_quantization=True), (80, 48)),
    (qz.NVFP4Quantizer(row_scaled=True), (48, 32)),
    (qz.NVFP4Quantizer(columnwise=True, four_over_six="MSE", e4m3_max=256), (48, 32)),
    (qz.NVFP4Quantizer(columnwise=True, with_rht=True, stochastic_rounding=True), (48, 32)),
)


@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
@named(TE_FP8_EXAMPLES + TE_FP4_EXAMPLES)
def test_transformer_engine_and_back(te, quantizer, shape, dtype):
    q = quantized(quantizer, values(shape, dtype, special=quantizer.packing == 1))
    there = to_transformer_engine(q)
    exact = quantizer.packing == 1  # else the three factors round in another order
    for columnwise in (False, True):
        if q.copy(columnwise) is None or quantizer.rotates:
            continue
        own = q.with_usage(rowwise=not columnwise, columnwise=columnwise).dequantize().reshape(shape)
        read = there.values(columnwise)
        assert same_values(read, own) if exact else torch.allclose(read, own, rtol=2**-22 if dtype != BF16 else 2**-7)
    back = from_transformer_engine(there)
    if isinstance(quantizer, qz.Float8DelayedScalingQuantizer):
        assert back.quantizer is dataclasses.replace(quantizer, amax_history_len=1024)
        back = from_transformer_engine(there, quantizer)
    assert_same_bits(back, q)
    assert_same_bits(from_transformer_engine(there, quantizer), q)


def test_padding_of_transformer_engine_is_zero(te):
    q = quantized(qz.MXFP8Quantizer(dtype=E4M3, columnwise=True), uniform((32, 64)))
    there = to_transformer_engine(q)
    assert there._rowwise_scale_inv.shape == (128, 4)
    assert not there._rowwise_scale_inv[32:].any()
    assert not there._rowwise_scale_inv[:, 2:].any()
    assert not there._columnwise_scale_inv[1:].any()


def test_storages_without_a_quantizer():
    """Bare storages, and tensors that nobody knows the quantizer of."""
    x = uniform((4, 6))
    current = qz.Float8CurrentScalingQuantizer(dtype=E5M2)
    data = fte.quantize(x, current)
    storage = Float8TensorStorage(
        (4, 6),
        None,
        None,
        _fp8_dtype=DType.kFloat8E5M2,
        _data=data.rowwise_data.view(torch.uint8),
        _transpose=noise(6, 4),
        _transpose_invalid=True,
        _scale_inv=data.rowwise_scale_inv.reshape(()),
    )
    assert_same_bits(from_transformer_engine(storage), data)
    storage._dtype = BF16
    assert from_transformer_engine(storage).dtype is BF16
    storage._data = None
    with pytest.raises(ValueError, match="from_transformer_engine: tensor: expected a tensor with data, got none"):
        from_transformer_engine(storage)
    one = qz.Float8BlockQuantizer(dtype=E4M3, block_scaling_dim=1)
    made = Float8BlockQuantizer(DType.kFloat8E4M3, columnwise=False, block_scaling_dim=1).make_empty(
        (4, 128), dtype=BF16, device="cpu"
    )
    made._quantizer = None
    assert from_transformer_engine(made).quantizer is one
    made._data_format = types.SimpleNamespace(name="COMPACT")
    with pytest.raises(ValueError, match="expected the format GEMM_READY"):
        from_transformer_engine(made)


def test_what_cannot_come_from_transformer_engine(te):
    x = uniform((32, 64), BF16)
    mx = to_transformer_engine(fte.quantize(x, qz.MXFP8Quantizer(dtype=E4M3)))
    with pytest.raises(TypeError, match=r"from_transformer_engine: tensor: expected one of .*, got Tensor"):
        from_transformer_engine(x)
    with pytest.raises(ValueError, match="from_transformer_engine: quantizer: expected a quantizer of a MXFP8Tensor"):
        from_transformer_engine(mx, qz.NVFP4Quantizer())
    with pytest.raises(ValueError, match="from_transformer_engine: tensor: expected rowwise_data"):
        from_transformer_engine(mx, qz.MXFP8Quantizer(dtype=E5M2))
    with pytest.raises(ValueError, match="scales: expected the same scales in 32 rows"):
        from_transformer_engine(mx, qz.MXFP8Quantizer(dtype=E4M3, with_2d_quantization=True))
    mx._with_gemm_swizzled_scales = True
    with pytest.raises(ValueError, match="expected scales in order, got swizzled ones"):
        from_transformer_engine(mx)
    block = to_transformer_engine(fte.quantize(x, qz.Float8BlockQuantizer(dtype=E4M3)))
    with pytest.raises(ValueError, match="from_transformer_engine: quantizer: expected block_scaling_dim 2"):
        from_transformer_engine(block, qz.Float8BlockQuantizer(dtype=E4M3, block_scaling_dim=1))
    fp4 = to_transformer_engine(quantized(qz.NVFP4Quantizer(columnwise=True, with_rht=True), x))
    fp4._quantizer.rht_matrix_random_sign_mask_t = 0
    with pytest.raises(ValueError, match="expected a Hadamard transform with its signs, got none"):
        from_transformer_engine(fp4)


def test_what_transformer_engine_cannot_hold(te):
    x = uniform((20, 64), BF16)
    with pytest.raises(TypeError, match="to_transformer_engine: q: expected a QuantizedTensor, got Tensor"):
        to_transformer_engine(x)
    with pytest.raises(ValueError, match="expected one format for both copies"):
        to_transformer_engine(
            fte.quantize(
                x,
                qz.HybridQuantizer(
                    rowwise_quantizer=qz.MXFP8Quantizer(dtype=E4M3), columnwise_quantizer=qz.MXFP8Quantizer(dtype=E5M2)
                ),
            )
        )
    with pytest.raises(ValueError, match=r"sizes are multiples of 32, got shape \(20, 64\)"):
        to_transformer_engine(fte.quantize(x, qz.MXFP8Quantizer(dtype=E4M3)))
    with pytest.raises(ValueError, match=r"sizes are multiples of 16, got shape \(20, 64\)"):
        to_transformer_engine(fte.quantize(x, qz.NVFP4Quantizer()))


def test_transformer_engine_is_not_needed_to_import(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch.tensor.float8_tensor", None)
    with pytest.raises(ImportError, match=r"to_transformer_engine: .* is missing; pip install 'transformer_engine\["):
        to_transformer_engine(fte.quantize(uniform((4, 4)), qz.Float8CurrentScalingQuantizer(dtype=E4M3)))
