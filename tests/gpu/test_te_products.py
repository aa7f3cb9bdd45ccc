"""Products of the `te` backend on a GPU, within the accuracy of tensor cores."""

import pytest
import torch
from torch import Tensor

from functional_te.kernels import reference
from functional_te.kernels import te as own
from functional_te.kernels.te import gemm as gemm_module
from functional_te.quantization.tensor import QuantizedTensor
from tests.gpu import te
from tests.gpu.inputs import DTYPES
from tests.gpu.stored import BF16, E4M3, E5M2, assert_same_bits, assert_steps, bind, data

te.require()
pytestmark = te.MARKS


def quantized(x: Tensor, name: str, rowwise: bool, columnwise: bool, fp8: torch.dtype = E4M3) -> QuantizedTensor:
    return reference.quantize(x, bind(name, rowwise, columnwise, fp8))[0]


# Errors of tensor cores relative to the sum of the magnitudes of the products: of FP8 with and without partial sums in
# float32 (seen: 1.8e-4 and 4.6e-4), and of 16 bits, where cuBLAS may round sums over parts of K to the dtype.
EXACT, FAST, HALF = 2.0**-11, 2.0**-10, 2.0**-15


def error_of_product(actual: Tensor, expected: Tensor, magnitude: Tensor, accumulated: float) -> float:
    """Largest error against a float32 result, 1 if allowed; ``magnitude`` is the sum of the products' magnitudes."""
    assert actual.shape == expected.shape
    unit = {torch.float32: 2.0**-23, BF16: 2.0**-8, torch.float16: 2.0**-10}[actual.dtype]
    allowed = 1.01 * unit * expected.abs() + accumulated * magnitude + 1e-6
    return ((actual.float() - expected).abs() / allowed).max().item()


def check_product(actual: Tensor, expected: Tensor, magnitude: Tensor, accumulated: float) -> None:
    worst = error_of_product(actual, expected, magnitude, accumulated)
    assert worst <= 1, worst


PAIRS = {  # input, weight, gradient of the output
    "delayed": ("delayed", "delayed", "delayed"),
    "current": ("current", "current", "current"),
    "block": ("block-1d", "block-2d", "block-1d"),
    "block-f32": ("block-f32", "block-2d", "block-f32"),
}


@pytest.fixture
def no_reference(monkeypatch):
    """Every product has to come from a kernel."""
    monkeypatch.setattr(gemm_module, "reference", None)


def products(pair: str, tokens: int, n: int, k: int, dtype: torch.dtype, grad: torch.dtype = E5M2):
    """Each of the three products, with what it should be and the sum of magnitudes."""
    names = PAIRS[pair]
    x = quantized(data(tokens, k, seed=1), names[0], True, True)
    w = quantized(data(n, k, seed=2), names[1], True, True)
    dy = quantized(data(tokens, n, seed=3), names[2], True, True, E4M3 if pair.startswith("block") else grad)
    for function, one, other in (("gemm_nt", x, w), ("gemm_nn", dy, w), ("gemm_tn", dy, x)):
        run, oracle = getattr(own, function), getattr(reference, function)
        magnitude = oracle(
            one.dequantize(torch.float32).abs(), other.dequantize(torch.float32).abs(), dtype=torch.float32
        )
        yield function, run(one, other, dtype=dtype), oracle(one, other, dtype=torch.float32), magnitude


@pytest.mark.usefixtures("no_reference")
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("pair", PAIRS)
def test_products(pair, dtype):
    for tokens, n, k in ((256, 384, 512), (64, 144, 272), (16, 16, 16), (1024, 208, 80)):
        for function, actual, expected, magnitude in products(pair, tokens, n, k, DTYPES[dtype]):
            assert actual.dtype is DTYPES[dtype]
            check_product(actual, expected, magnitude, FAST if function == "gemm_nt" else EXACT)


@pytest.mark.parametrize("pair", PAIRS)
def test_products_of_any_size(pair):
    for tokens, n, k in ((303, 300, 301), (1, 128, 128), (7, 24, 48), (40, 24, 56), (16, 1, 16), (20, 32, 32)):
        for function, actual, expected, magnitude in products(pair, tokens, n, k, BF16):
            check_product(actual, expected, magnitude, FAST if function == "gemm_nt" else EXACT)


@pytest.mark.usefixtures("no_reference")
@pytest.mark.parametrize("pair", PAIRS)
def test_bias_add_and_factor(pair):
    x = quantized(data(6, 32, 256, seed=1), PAIRS[pair][0], True, False)
    w = quantized(data(384, 256, seed=2), PAIRS[pair][1], True, True)
    dy = quantized(data(6, 32, 384, seed=3), PAIRS[pair][2], True, False)
    bias, add, more = data(384, seed=4), data(6, 32, 384, seed=5), data(6, 32, 256, seed=6)
    size = reference.gemm_nt(x.dequantize(torch.float32).abs(), w.dequantize(torch.float32).abs(), dtype=torch.float32)
    plain = reference.gemm_nt(x, w, dtype=torch.float32)
    kept = add.clone()
    for given, expected in (
        ({"bias": bias}, plain + bias),
        ({"add": add}, plain + add),
        ({"bias": bias, "add": add}, plain + bias + add),
        ({"alpha": -0.75}, plain * -0.75),
        ({"alpha": 3.0, "add": add}, plain * 3.0 + add),
    ):
        check_product(own.gemm_nt(x, w, dtype=BF16, **given), expected, 4 * size, FAST)
    assert torch.equal(add, kept)
    # terms in another dtype promote the sum
    for given, expected in (({"bias": bias.float()}, plain + bias), ({"add": add.float()}, plain + add)):
        y = own.gemm_nt(x, w, dtype=BF16, **given)
        assert y.dtype is torch.float32
        torch.testing.assert_close(y, expected, rtol=2.0**-6, atol=2.0**-2)
    size = reference.gemm_nn(dy.dequantize(torch.float32).abs(), w.dequantize(torch.float32).abs(), dtype=torch.float32)
    plain = reference.gemm_nn(dy, w, dtype=torch.float32)
    check_product(own.gemm_nn(dy, w, dtype=BF16, add=more), plain + more, 2 * size, EXACT)
    check_product(own.gemm_nn(dy, w, dtype=BF16, alpha=0.5), plain * 0.5, size, EXACT)


@pytest.mark.usefixtures("no_reference")
@pytest.mark.parametrize("name", ["delayed", "current", "block-2d"])
def test_a_copy_that_is_missing_is_transposed(name):
    x, w = data(128, 256, seed=1), data(384, 256, seed=2)
    dy = quantized(data(128, 384, seed=3), "block-1d" if name == "block-2d" else name, True, True)
    both, row = quantized(w, name, True, True), quantized(w, name, True, False)
    assert_same_bits(own.gemm_nn(dy, row, dtype=BF16), own.gemm_nn(dy, both, dtype=BF16))
    if name != "block-2d":
        column = quantized(x, name, False, True)
        assert_same_bits(
            own.gemm_nt(column, both, dtype=BF16), own.gemm_nt(quantized(x, name, True, False), both, dtype=BF16)
        )


def test_products_that_the_reference_computes():
    """Two squares, two gradients in E5M2, two families, float32: no kernel, but a result."""
    x, w = data(64, 256, seed=1), data(384, 256, seed=2)
    pairs = [
        (quantized(x, "block-2d", True, False), quantized(w, "block-2d", True, False)),
        (quantized(x, "current", True, False, E5M2), quantized(w, "current", True, False, E5M2)),
        (quantized(x, "current", True, False), quantized(w, "block-1d", True, False)),
        (x.float(), w.float()),
        (x.float().cpu(), w.float().cpu()),
    ]
    for one, other in pairs:
        assert_same_bits(
            own.gemm_nt(one, other, dtype=torch.float32), reference.gemm_nt(one, other, dtype=torch.float32)
        )


@pytest.mark.usefixtures("no_reference")
@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_high_precision_products(dtype):
    half = DTYPES[dtype]
    for tokens, n, k in ((256, 384, 512), (303, 300, 301), (1, 7, 9)):
        x, w, dy = (data(*shape, dtype=half, seed=i) for i, shape in enumerate(((tokens, k), (n, k), (tokens, n))))
        bias, add = data(n, dtype=half), data(tokens, n, dtype=half, seed=9)
        full, wide, grad = x.float().double(), w.float().double(), dy.float().double()
        cases = [
            (own.gemm_nt(x, w, dtype=half), full @ wide.T, full.abs() @ wide.abs().T, HALF),
            (own.gemm_nn(dy, w, dtype=half), grad @ wide, grad.abs() @ wide.abs(), HALF),
            (own.gemm_tn(dy, x, dtype=half), grad.T @ full, grad.abs().T @ full.abs(), HALF),
            (own.gemm_tn(dy, x, dtype=torch.float32), grad.T @ full, grad.abs().T @ full.abs(), HALF),
            # each of the three sums is rounded, in whichever order
            (
                own.gemm_nt(x, w, dtype=half, bias=bias, add=add),
                full @ wide.T + bias + add,
                (full @ wide.T).abs() + torch.maximum((full @ wide.T + bias).abs(), (full @ wide.T + add).abs()),
                {torch.float16: 2.0**-10, BF16: 2.0**-7}[half],
            ),
        ]
        for case, (actual, expected, magnitude, accumulated) in enumerate(cases):
            worst = error_of_product(actual, expected.float(), magnitude.abs().float(), accumulated)
            assert worst <= 1, (tokens, n, k, case, worst)


def test_one_operand_in_low_precision():
    x, w = data(64, 256, seed=1), data(384, 256, seed=2)
    q = quantized(w, "current", True, True)
    assert_steps(own.gemm_nt(x, q, dtype=BF16), reference.gemm_nt(x, q, dtype=BF16), 1, 1e-2)
