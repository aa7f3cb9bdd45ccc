"""Casts to FP8: every bf16 value against ml_dtypes, scales against float64, quantized tensors as values."""

import copy
import io
import math

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import functional_te as fte
from functional_te import pytree
from functional_te.quantization.scaling import current_scale
from tests.helpers import assert_same, recorded_kernels, unchanged, uniform

FORMATS = {
    torch.float8_e4m3fn: (ml_dtypes.float8_e4m3fn, 448.0),
    torch.float8_e5m2: (ml_dtypes.float8_e5m2, 57344.0),
}
FLOAT32_MAX = float(np.finfo(np.float32).max)
E4M3, E5M2 = FORMATS
every_format = pytest.mark.parametrize("dtype", FORMATS, ids=str)


def expected_bits(x: torch.Tensor, scale: float, dtype: torch.dtype) -> np.ndarray:
    """The bytes that numpy and ml_dtypes give: multiply in float32, clamp, round to nearest even."""
    target, limit = FORMATS[dtype]
    with np.errstate(invalid="ignore"):
        scaled = x.float().numpy() * np.float32(scale)
        return np.clip(scaled, -limit, limit).astype(target).view(np.uint8)


def all_bf16() -> torch.Tensor:
    return torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


@every_format
def test_every_bf16_value(dtype: torch.dtype) -> None:
    """Scale 1: a fresh delayed state, and current scaling of a tensor whose amax is not usable."""
    x = all_bf16()
    finite_or_inf = ~x.isnan()
    delayed = fte.Float8DelayedScalingQuantizer(dtype=dtype, amax_history_len=2)
    by_state, state = fte.quantize(x, delayed, fte.init_quantizer_state(delayed))
    by_amax = fte.quantize(x, fte.Float8CurrentScalingQuantizer(dtype=dtype))
    want = expected_bits(x, 1.0, dtype)
    for quantized in (by_state, by_amax):
        assert torch.equal(quantized.scale_inv, torch.ones(1))
        bits = quantized.data.view(torch.uint8).numpy()
        assert (bits == want)[finite_or_inf.numpy()].all()
        assert quantized.data.float()[~finite_or_inf].isnan().all()
        assert not quantized.data.float()[finite_or_inf].isnan().any()
    limit = FORMATS[dtype][1]
    back = fte.dequantize(by_state, torch.float32)
    assert back[x == math.inf].item() == limit
    assert back[x == -math.inf].item() == -limit
    assert back[finite_or_inf].abs().max() == limit
    assert state.amax_history[0].isnan()
    assert torch.equal(state.scale, torch.ones(1))


@every_format
@given(amax=st.floats(2.0**-20, 2.0**20), seed=st.integers(0, 100))
def test_current_scaling_data(dtype: torch.dtype, amax: float, seed: int) -> None:
    x = uniform((5, 7), seed=seed)
    x = x / x.abs().max() * amax
    quantized = fte.quantize(x, fte.Float8CurrentScalingQuantizer(dtype=dtype))
    limit = FORMATS[dtype][1]
    scale = np.float32(limit) / x.abs().max().numpy()
    assert quantized.scale_inv.numpy()[0] == np.float32(1) / scale
    assert (quantized.data.view(torch.uint8).numpy() == expected_bits(x, scale, dtype)).all()
    error = (fte.dequantize(quantized) - x).abs()
    step = 2.0 ** (-4 if dtype is E4M3 else -3)  # half a unit in the last place, relative
    smallest = 2.0 ** (-10 if dtype is E4M3 else -17) / scale
    assert (error <= step * x.abs() * (1 + 1e-5) + float(smallest)).all()


def formula(amax: float, limit: float, epsilon: float, power_of_2: bool) -> float:
    """The scale of current scaling in exact arithmetic, rounded once to float32."""
    if not math.isfinite(amax):
        return 1.0
    amax = max(amax, float(np.float32(epsilon)))
    if amax == 0:
        return 1.0
    exact = limit / amax  # float64
    scale = min(exact, FLOAT32_MAX)
    scale = float(np.float32(scale))
    return 2.0 ** math.floor(math.log2(scale)) if power_of_2 else scale


AMAXES = [0.0, 1e-45, 1e-38, 2.0**-120, 1e-6, 0.5, 1.0, 3.0, 447.0, 448.0, 449.0, 6e4, 1e30, FLOAT32_MAX]


@every_format
@pytest.mark.parametrize("power_of_2", [False, True])
@pytest.mark.parametrize("epsilon", [0.0, 1e-3])
@pytest.mark.parametrize("amax", [*AMAXES, math.inf, math.nan])
def test_scale_of_current_scaling(amax: float, epsilon: float, power_of_2: bool, dtype: torch.dtype) -> None:
    given_amax = torch.tensor([amax], dtype=torch.float32)
    scale = current_scale(given_amax, FORMATS[dtype][1], epsilon=epsilon, power_of_2=power_of_2)
    assert scale.dtype is torch.float32
    assert scale.item() == formula(given_amax.item(), FORMATS[dtype][1], epsilon, power_of_2)


@given(amax=st.floats(2.0**-126, FLOAT32_MAX, width=32), power_of_2=st.booleans())
def test_scale_of_current_scaling_anywhere(amax: float, power_of_2: bool) -> None:
    scale = current_scale(torch.tensor([amax]), 448.0, power_of_2=power_of_2)
    assert scale.item() == formula(amax, 448.0, 0.0, power_of_2)


@pytest.mark.parametrize("shape", [(), (0,), (7,), (3, 5), (2, 3, 4), (2, 0, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("columnwise", [False, True])
def test_shapes_and_copies(shape, dtype: torch.dtype, columnwise: bool) -> None:
    if columnwise and not shape:
        shape = (1,)
    x = uniform(shape, dtype)
    quantizer = fte.Float8CurrentScalingQuantizer(dtype=E4M3, columnwise=columnwise)
    with unchanged((x,)):
        quantized = fte.quantize(x, quantizer)
    assert quantized.shape == tuple(shape)
    assert quantized.dim() == len(shape)
    assert quantized.dtype is dtype
    assert fte.dequantize(quantized).dtype is dtype
    assert fte.dequantize(quantized, torch.float32).dtype is torch.float32
    if not columnwise:
        assert quantized.columnwise_data is None
        return
    assert quantized.columnwise_data.shape == (shape[-1], math.prod(shape[:-1]))
    assert quantized.columnwise_data.is_contiguous()
    rows, columns = quantized.rowwise_data.view(torch.uint8), quantized.columnwise_data.view(torch.uint8)
    assert torch.equal(columns.t().reshape(shape), rows)
    only = fte.quantize(x, fte.Float8CurrentScalingQuantizer(dtype=E4M3, rowwise=False, columnwise=True))
    assert only.rowwise_data is None
    assert only.shape == (math.prod(shape[:-1]), shape[-1])
    assert_same(fte.dequantize(only).reshape(shape), fte.dequantize(quantized))


def test_quantized_tensors_are_trees() -> None:
    quantizer = fte.Float8CurrentScalingQuantizer(dtype=E4M3, columnwise=True)
    quantized = fte.quantize(uniform((3, 5), torch.bfloat16), quantizer)
    leaves, spec = pytree.tree_flatten(quantized)
    assert [leaf.dtype for leaf in leaves] == [E4M3, torch.float32, E4M3, torch.float32]
    rebuilt = pytree.tree_unflatten(spec, leaves)
    assert type(rebuilt) is fte.QuantizedTensor
    assert rebuilt.quantizer is quantizer
    assert rebuilt.dtype is torch.bfloat16
    assert_same(rebuilt.dequantize(), quantized.dequantize())
    rowwise = fte.quantize(uniform((3, 5)), fte.Float8CurrentScalingQuantizer(dtype=E4M3))
    assert len(pytree.leaves(rowwise)) == 2
    assert pytree.tree_flatten(rowwise)[1] != spec
    with pytest.raises(AttributeError):
        quantized.dtype = torch.float32


def saved_and_loaded(value):
    """Through torch.save, which pickles; plain pickle cannot hold an FP8 tensor."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, saved_and_loaded])
def test_copies_of_quantized_tensors(copied) -> None:
    quantizer = fte.Float8DelayedScalingQuantizer(dtype=E5M2, amax_history_len=3)
    quantized, state = fte.quantize(uniform((3, 5)), quantizer, fte.init_quantizer_state(quantizer))
    again, again_state = copied((quantized, state))
    assert again.quantizer is quantizer
    assert again.data.data_ptr() != quantized.data.data_ptr()
    assert_same(again.dequantize(), quantized.dequantize())
    assert_same(again_state, state)


def test_saved_scales_never_alias_the_state() -> None:
    quantizer = fte.Float8DelayedScalingQuantizer(dtype=E4M3, amax_history_len=2)
    state = fte.init_quantizer_state(quantizer)
    quantized, after = fte.quantize(uniform((4,)), quantizer, state)
    assert quantized.scale_inv.data_ptr() != state.scale.data_ptr()
    assert after.amax_history.data_ptr() != state.amax_history.data_ptr()
    assert torch.equal(state.amax_history, torch.zeros(2))


def test_arguments_of_quantize() -> None:
    current = fte.Float8CurrentScalingQuantizer(dtype=E4M3)
    delayed = fte.Float8DelayedScalingQuantizer(dtype=E4M3)
    x, integers = uniform((4,)), torch.zeros(4, dtype=torch.int64)
    with recorded_kernels() as kernels:
        with pytest.raises(TypeError, match="quantize: quantizer: expected a Quantizer, got str"):
            fte.quantize(x, "fp8")
        with pytest.raises(TypeError, match="quantize: x: expected a tensor, got list"):
            fte.quantize([1.0], current)
        with pytest.raises(TypeError, match=r"quantize: x: expected float32.*torch\.int64"):
            fte.quantize(integers, current)
        with pytest.raises(ValueError, match="quantize: state: expected the state of Float8DelayedScalingQuantizer"):
            fte.quantize(x, delayed)
        with pytest.raises(ValueError, match="quantize: state: expected None"):
            fte.quantize(x, current, object())
        with pytest.raises(TypeError, match="dequantize: x: expected a QuantizedTensor, got Tensor"):
            fte.dequantize(x)
    assert kernels == []
