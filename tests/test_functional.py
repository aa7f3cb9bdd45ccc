"""One call per op, against the float64 formulas."""

import inspect

import pytest
import torch

import functional_te as fte
from functional_te import functional as F
from tests import oracles
from tests.helpers import DELAYED, DTYPES, assert_close, recorded_kernels, unchanged, uniform

W, B, G = uniform((5, 8), seed=2), uniform(5, seed=3), uniform(8, seed=4)
CASES = {
    "linear": ([(fte.BasicLinear(8, 5), {"weight": W}), (fte.Bias(5), {"bias": B})], 8, (W, B), {}),
    "bias": ([(fte.Bias(8), {"bias": G})], 8, (G,), {}),
    "rms_norm": (
        [(fte.RMSNorm(8, 0.1, True), {"weight": G})],
        8,
        (G,),
        {"eps": 0.1, "zero_centered_gamma": True},
    ),
    "layer_norm": (
        [(fte.LayerNorm(8, 0.1, True), {"weight": G, "bias": G})],
        8,
        (G, G),
        {"eps": 0.1, "zero_centered_gamma": True},
    ),
    "l2_normalization": ([(fte.L2Normalization(0.1), {})], 8, (), {"eps": 0.1}),
    "constant_scale": ([(fte.ConstantScale(-1.5), {})], 8, (-1.5,), {}),
    "gelu": ([(fte.GELU(), {})], 8, (), {}),
    "erf_gelu": ([(fte.ErfGELU(), {})], 8, (), {}),
    "qgelu": ([(fte.QGELU(), {})], 8, (), {}),
    "silu": ([(fte.SiLU(), {})], 8, (), {}),
    "relu": ([(fte.ReLU(), {})], 8, (), {}),
    "srelu": ([(fte.SReLU(), {})], 8, (), {}),
    "glu": ([(fte.GLU(), {})], 16, (), {}),
    "geglu": ([(fte.GEGLU(), {})], 16, (), {}),
    "qgeglu": ([(fte.QGEGLU(), {})], 16, (), {}),
    "reglu": ([(fte.ReGLU(), {})], 16, (), {}),
    "sreglu": ([(fte.SReGLU(), {})], 16, (), {}),
    "swiglu": ([(fte.SwiGLU(glu_interleave_size=4), {})], 16, (), {"glu_interleave_size": 4}),
    "situglu": (
        [(fte.SiTUGLU(beta1=0.5, beta2=0.6, glu_interleave_size=2), {})],
        16,
        (),
        {"beta1": 0.5, "beta2": 0.6, "glu_interleave_size": 2},
    ),
    "clamped_swiglu": (
        [(fte.ClampedSwiGLU(limit=0.5, alpha=1.2, glu_linear_offset=0.1), {})],
        16,
        (),
        {"limit": 0.5, "alpha": 1.2, "glu_linear_offset": 0.1},
    ),
}
# with several inputs or a key: beside the tests of their ops
ELSEWHERE = {"adaptive_layer_norm", "dropout", "grouped_linear"}
SCALED = {"scaled_clamped_qgeglu", "scaled_situglu", "scaled_srelu", "scaled_swiglu", "scaled_tanh_srelu"}


def test_every_function_is_tested() -> None:
    assert set(F.__all__) == set(CASES) | ELSEWHERE | SCALED
    for name in F.__all__:
        assert inspect.getdoc(getattr(F, name))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_matches_the_formula(name: str, dtype: torch.dtype) -> None:
    ops, last, arguments, keywords = CASES[name]
    arguments = [a.to(dtype) if isinstance(a, torch.Tensor) else a for a in arguments]
    for shape in ((last,), (3, last), (2, 1, last)):
        x = uniform(shape, dtype)
        with unchanged((x, *[a for a in arguments if isinstance(a, torch.Tensor)])):
            found = getattr(F, name)(x, *arguments, **keywords)
        expected = x.double()
        for op, params in ops:
            named = {n: p.to(dtype).double() for n, p in params.items()}
            expected, _ = oracles.reference(op, expected, named)
        assert found.dtype is dtype
        assert_close(found, expected, dtype, name)


def test_linear_without_bias_and_with_a_recipe() -> None:
    x = uniform((3, 8))
    assert_close(F.linear(x, W), x.double() @ W.double().T, torch.float32)
    current = fte.recipes.Float8CurrentScaling()
    exact = F.linear(x, W, B)
    assert 20 < oracles.snr(F.linear(x, W, B, recipe=current), exact) < 60
    block = fte.Linear(8, 5)
    state = fte.init_state(block, DELAYED)
    assert 15 < oracles.snr(F.linear(x, W, B, recipe=DELAYED, state=state), exact) < 60
    with pytest.raises(ValueError, match="state"):
        F.linear(x, W, B, recipe=DELAYED)


def test_multi_dimensional_norms() -> None:
    x, weight = uniform((2, 3, 4)), uniform((3, 4), seed=1)
    want, _ = oracles.reference(fte.RMSNorm((3, 4)), x.double(), {"weight": weight.double()})
    assert_close(F.rms_norm(x, weight), want, torch.float32)


def test_nothing_is_recorded_for_autograd() -> None:
    x = uniform((3, 8)).requires_grad_()
    assert not F.gelu(x).requires_grad


def test_errors_come_before_kernels() -> None:
    wide = uniform((3, 9))
    with recorded_kernels() as kernels:
        with pytest.raises(ValueError, match=r"op 0 \(BasicLinear\): input: expected last dimension 8"):
            F.linear(wide, W)
        with pytest.raises(TypeError, match=r"op 0 \(GELU\): input: expected a tensor"):
            F.gelu([1.0])
        with pytest.raises(ValueError, match=r"op 0 \(GLU\): input"):
            F.glu(wide)
    assert kernels == []
