"""The `te` backend against the reference on a GPU: casts bit for bit, math within one step of the stored format."""

import pytest
import torch

from functional_te import pytree
from functional_te import quantization as qz
from functional_te.kernels import reference
from functional_te.kernels import te as own
from functional_te.kernels.backend import REFERENCE
from functional_te.kernels.reference.activation import ACTIVATIONS
from functional_te.quantization.tensor import BoundQuantizer
from tests.gpu import te
from tests.gpu.inputs import DTYPES, FP8, SHAPES
from tests.gpu.stored import (
    BF16,
    DEVICE,
    E4M3,
    E5M2,
    QUANTIZERS,
    assert_amax,
    assert_near,
    assert_same_bits,
    bind,
    data,
)

te.require()
pytestmark = te.MARKS

USAGES = ((True, False), (True, True), (False, True))
every_dtype = pytest.mark.parametrize("dtype", DTYPES)
every_quantizer = pytest.mark.parametrize("name", QUANTIZERS)
every_output = pytest.mark.parametrize("name", [None, "delayed", "current", "block-1d", "block-2d"])
every_kind = pytest.mark.parametrize("kind", [kind for kind in ACTIVATIONS if kind not in ("tanh_srelu", "erf_gelu")])


# ---------------------------------------------------------------------------- casts


@every_dtype
@every_quantizer
@pytest.mark.parametrize("fp8", FP8)
def test_quantize(fp8, name, dtype):
    for shape in (*SHAPES, (0, 64), (3, 0)):
        x = data(*shape, dtype=DTYPES[dtype], spread=True)
        for rowwise, columnwise in USAGES:
            bound = bind(name, rowwise, columnwise, FP8[fp8])
            assert_same_bits(own.quantize(x, bound), reference.quantize(x, bound))


@every_quantizer
def test_quantize_takes_strides_and_a_nominal_dtype(name):
    x = data(272, 144, dtype=torch.float32, spread=True).t()
    bound = bind(name)
    assert_same_bits(own.quantize(x, bound, BF16), reference.quantize(x, bound, BF16))


@every_quantizer
def test_quantize_by_a_kernel(name, monkeypatch):
    """The comparison above would pass if everything fell back."""
    monkeypatch.setattr("functional_te.kernels.te.cast.reference", None)
    x = data(144, 272)
    for rowwise, columnwise in USAGES:
        own.quantize(x, bind(name, rowwise, columnwise))


def test_nothing_is_remembered_and_nothing_is_changed():
    x, bound = data(96, 160), bind("delayed")
    before = x.clone()
    first, amax = own.quantize(x, bound)
    assert bound.scale.item() == pytest.approx(13.7)
    kept = [leaf.clone() for leaf in pytree.leaves((first, amax))]
    # another scale and smaller values right after
    other = BoundQuantizer(quantizer=bound.quantizer, scale=torch.full((1,), 0.25, device=DEVICE))
    second, smaller = own.quantize(x / 8, other)
    assert second.scale_inv.item() == 4.0
    assert smaller.item() < amax.item()
    assert_same_bits(kept, pytree.leaves((first, amax)))
    assert_same_bits(own.quantize(x, bound), (first, amax))
    assert torch.equal(x, before)
    pointers = [leaf.untyped_storage().data_ptr() for leaf in pytree.leaves((first, amax))]
    assert len(set(pointers)) == len(pointers)


@every_dtype
@every_quantizer
def test_cast_bias(name, dtype):
    for shape in ((256, 384), (3, 40, 96), (303, 300)):
        dy = data(*shape, dtype=DTYPES[dtype])
        for columnwise in (False, True):
            bound = bind(name, True, columnwise, E5M2)
            done = own.cast_bias(dy, bound, dtype=dy.dtype)
            assert (done is not None) == (name == "delayed" and columnwise and shape != (303, 300))
            if done is not None:
                q, amax, dbias = REFERENCE.cast_bias(dy, bound)
                assert_same_bits(done[:2], (q, amax))
                torch.testing.assert_close(done[2], dbias, rtol=2.0**-7, atol=2e-2 if dtype == "bf16" else 2e-3)


# ---------------------------------------------------------------------------- normalization


NORM_SHAPES = (((4, 96, 256), 1), ((303, 300), 1), ((5, 1), 1), ((64, 5120), 1), ((6, 4, 40), 2), ((1, 16), 1))


@every_dtype
@every_output
@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("op", ["rms_norm", "layer_norm"])
def test_norms(op, zero_centered, name, dtype):
    how = {"eps": 1e-5, "zero_centered_gamma": zero_centered, "dtype": DTYPES[dtype]}
    for shape, dims in NORM_SHAPES:
        x = data(*shape, dtype=how["dtype"], spread=True)
        weights = [data(*shape[-dims:], dtype=how["dtype"], seed=seed) for seed in range(1, 2 + (op == "layer_norm"))]
        for columnwise in (False, True):
            bound = bind(name, True, columnwise)
            actual = getattr(own, op)(x, *weights, **how, bound=bound)
            expected = getattr(REFERENCE, op)(x, *weights, **how, bound=bound)
            assert actual is not None
            # where terms cancel, float32 sums in another order differ by more than one step
            assert_near(actual[0], expected[0], 1e-5)
            assert_amax(actual[1], expected[1])
            for one, other in zip(actual[2:], expected[2:], strict=True):
                assert (one is None) == (other is None)
                if one is not None:
                    assert one.shape == other.shape
                    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@every_dtype
@pytest.mark.parametrize("name", [None, "delayed"])
def test_rms_norm_of_a_sum(name, dtype):
    dtype = DTYPES[dtype]
    x, add, weight = data(33, 272, dtype=dtype), data(33, 272, dtype=dtype, seed=1), data(272, dtype=dtype, seed=2)
    how = {"eps": 1e-5, "zero_centered_gamma": False, "dtype": dtype, "bound": bind(name), "add": add}
    actual, expected = own.rms_norm(x, weight, **how), REFERENCE.rms_norm(x, weight, **how)
    assert_near(actual[0], expected[0], 1e-5)
    assert torch.equal(actual[3], expected[3])


@every_dtype
@pytest.mark.parametrize("zero_centered", [False, True])
def test_gradients_of_norms(zero_centered, dtype):
    tolerance = {"f32": (1e-4, 1e-4), "f16": (2.0**-9, 2e-3), "bf16": (2.0**-6, 2e-2)}[dtype]
    dtype = DTYPES[dtype]
    how = {"zero_centered_gamma": zero_centered, "dtype": dtype}
    for shape, dims in NORM_SHAPES:
        x, dy, add = (data(*shape, dtype=dtype, seed=seed) for seed in range(3))
        weight = data(*shape[-dims:], dtype=dtype, seed=4)
        _, mean, rstd = reference.layer_norm_forward(x, weight, weight, eps=1e-3, zero_centered_gamma=zero_centered)
        found = [
            (own.layer_norm_grad, REFERENCE.layer_norm_grad, (dy, x, weight, mean, rstd), {}),
            (own.layer_norm_grad, REFERENCE.layer_norm_grad, (dy, x, weight, mean, rstd), {"needs_affine": False}),
        ]
        _, rstd = reference.rms_norm_forward(x, weight, eps=1e-3, zero_centered_gamma=zero_centered)
        for options in ({}, {"add": add}, {"needs_input": False}, {"needs_weight": False, "add": add}):
            found.append((own.rms_norm_grad, REFERENCE.rms_norm_grad, (dy, x, weight, rstd), options))
        for run, oracle, given, options in found:
            actual, expected = run(*given, **how, **options), oracle(*given, **how, **options)
            assert_same_bits(actual, run(*given, **how, **options))
            for one, other in zip(actual, expected, strict=True):
                assert (one is None) == (other is None)
                if one is not None:
                    assert (one.dtype, one.shape) == (other.dtype, other.shape)
                    size = max(1.0, other.float().abs().max().item())
                    torch.testing.assert_close(one, other, rtol=tolerance[0], atol=tolerance[1] * size / 4)


# ---------------------------------------------------------------------------- activations


@every_dtype
@every_output
@every_kind
def test_activations(kind, name, dtype):
    for shape in ((4, 96, 256), (303, 300), (5, 2), (33, 48)):
        x = data(*shape, dtype=DTYPES[dtype])
        for columnwise in (False, True):
            how = {"dtype": x.dtype, "bound": bind(name, True, columnwise)}
            actual, expected = own.activation(x, kind, **how), REFERENCE.activation(x, kind, **how)
            assert actual is not None
            assert_near(actual[0], expected[0], 2e-5)
            assert_amax(actual[1], expected[1])


@every_dtype
@every_output
@every_kind
def test_gradients_of_activations(kind, name, dtype):
    for shape in ((4, 96, 256), (303, 300), (33, 48)):
        x = data(*shape, dtype=DTYPES[dtype])
        dy = data(*shape[:-1], shape[-1] // (1 + ACTIVATIONS[kind].gated), dtype=x.dtype, seed=1)
        for columnwise in (False, True):
            how = {"dtype": x.dtype, "bound": bind(name, True, columnwise, E5M2)}
            for needs_bias in (None, False, True):
                actual = own.activation_grad(dy, x, kind, **how, needs_bias=needs_bias)
                expected = REFERENCE.activation_grad(dy, x, kind, **how, needs_bias=needs_bias)
                assert actual is not None
                assert_near(actual[0], expected[0], 5e-5)
                assert_amax(actual[1], expected[1])
                assert (actual[2] is None) == (expected[2] is None)
                if actual[2] is not None:
                    assert actual[2].dtype is expected[2].dtype
                    torch.testing.assert_close(
                        actual[2], expected[2], rtol=2.0**-6, atol=0.15 if dtype == "bf16" else 2e-2
                    )


def test_constants_of_activations():
    x, dy = data(64, 96), data(64, 48, seed=1)
    for kind, config in (("situglu", (2.0, 3.0)), ("clamped_swiglu", (1.0, 1.5, 0.25))):
        assert_near(
            own.activation(x, kind, config, dtype=BF16)[0], REFERENCE.activation(x, kind, config, dtype=BF16)[0], 1e-6
        )
        actual = own.activation_grad(dy, x, kind, config, dtype=BF16)[0]
        assert_near(actual, REFERENCE.activation_grad(dy, x, kind, config, dtype=BF16)[0], 5e-5)


# ---------------------------------------------------------------------------- cases without a kernel


def test_cases_that_are_not_taken():
    x, weight = data(64, 96), data(96)
    how = {"eps": 1e-5, "zero_centered_gamma": False, "dtype": BF16}
    assert own.available() is None
    assert own.activation(x, "tanh_srelu", dtype=BF16) is None
    assert own.activation(x, "swiglu", (), 16, dtype=BF16) is None
    assert own.activation(x, "gelu", dtype=torch.float32) is None
    assert own.activation(x.cpu(), "gelu", dtype=BF16) is None
    assert own.activation(x[:0], "gelu", dtype=BF16) is None
    assert own.activation_grad(x.float(), x, "gelu", dtype=BF16) is None
    assert own.rms_norm(x, weight.float(), **how) is None
    assert own.layer_norm(x, weight, weight.float(), **how) is None
    assert own.cast_bias(x, bind("current"), dtype=BF16) is None
    assert own.cast_bias(x, bind("delayed"), dtype=BF16, needs_bias=False) is None
    squares = BoundQuantizer(quantizer=qz.MXFP8Quantizer(dtype=E4M3, with_2d_quantization=True))
    assert_same_bits(own.quantize(x, squares), reference.quantize(x, squares))
