"""Products of FP8 data with one scale per tensor, at any sizes; on the CPU through torch's own product for the CPU."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

import functional_te as fte
from functional_te.kernels import reference
from functional_te.kernels.triton import compat, gemm
from functional_te.quantization.cast import quantize_bound
from functional_te.quantization.tensor import BoundQuantizer, QuantizedTensor

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
CURRENT = fte.Float8CurrentScalingQuantizer(dtype=E4M3, columnwise=True)
DELAYED = fte.Float8DelayedScalingQuantizer(dtype=E4M3, columnwise=True)
GRADIENT = fte.Float8CurrentScalingQuantizer(dtype=E5M2, columnwise=True)
ROWS = fte.Float8BlockQuantizer(dtype=E4M3, columnwise=True, block_scaling_dim=1)
TILES = fte.Float8BlockQuantizer(dtype=E4M3, columnwise=True)
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
KINDS = ("nt", "nn", "tn")
# rows of the output, reduced, columns of the output
SIZES = ((32, 48, 64), (17, 16, 16), (5, 33, 47), (1, 130, 1), (130, 1, 3), (64, 32, 15))


@pytest.fixture(autouse=True)
def _supported(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    if device == "cpu":  # torch multiplies FP8 data there too
        monkeypatch.setattr(compat, "can_scale", lambda device: True)
    elif not compat.can_scale(torch.device("cuda", 0)):
        pytest.skip("needs a GPU with FP8 tensor cores")


def cast(x: torch.Tensor, quantizer: Any) -> QuantizedTensor:
    scale = torch.full((1,), 37.5, device=x.device) if quantizer.stateful else None
    return quantize_bound(x, BoundQuantizer(quantizer=quantizer, scale=scale))[0]


def operands(kind: str, sizes: tuple[int, int, int], device: str, one: Any = CURRENT, other: Any = CURRENT) -> Any:
    rows, reduced, columns = sizes
    generator = torch.Generator().manual_seed(sum(sizes))
    left = torch.randn(rows, reduced, generator=generator)
    right = torch.randn(columns, reduced, generator=generator)
    a, b = left.t() if kind == "tn" else left, right if kind == "nt" else right.t()
    return cast(a.contiguous().to(device), one), cast(b.contiguous().to(device), other)


def ours(kind: str) -> Any:
    return getattr(gemm, f"gemm_{kind}")


def wanted(kind: str, *args: Any, **kwargs: Any) -> torch.Tensor:
    return getattr(reference, f"gemm_{kind}")(*args, **kwargs)


def assert_close(y: torch.Tensor, other: torch.Tensor, scale: float = 1.0) -> None:
    """Equal but for one rounding, and for the sums of the tensor core."""
    assert y.dtype is other.dtype
    assert y.shape == other.shape
    assert y.is_contiguous()
    ulp = torch.finfo(y.dtype).eps
    torch.testing.assert_close(y.double(), other.double(), rtol=1.01 * ulp, atol=scale * (2e-3 if y.is_cuda else 2e-5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("formats", [(CURRENT, CURRENT), (GRADIENT, DELAYED)], ids=["e4m3", "e5m2"])
def test_equals_the_reference(kind: str, dtype: str, formats: Any, device: str) -> None:
    for sizes in SIZES:
        a, b = operands(kind, sizes, device, *formats)
        y = ours(kind)(a, b, dtype=DTYPES[dtype])
        assert_close(y, wanted(kind, a, b, dtype=DTYPES[dtype]), sizes[1] ** 0.5)


@pytest.mark.parametrize("kind", KINDS)
def test_no_elements(kind: str, device: str) -> None:
    for sizes in itertools.product((0, 3), repeat=3):
        if 0 in sizes:
            a, b = operands(kind, sizes, device, DELAYED, DELAYED)
            y = ours(kind)(a, b, dtype=torch.bfloat16)
            assert y.shape == (sizes[0], sizes[2])
            assert y.abs().sum() == 0
    a, b = operands("nt", (3, 0, 5), device, DELAYED, DELAYED)
    bias = torch.arange(5.0, device=device).to(torch.bfloat16)
    assert torch.equal(gemm.gemm_nt(a, b, dtype=torch.bfloat16, bias=bias), bias.expand(3, 5))


@pytest.mark.parametrize("columns", [16, 21])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("own", DTYPES)
def test_bias_and_add(dtype: str, own: str, columns: int, device: str) -> None:
    """Results have the dtype of the reference, whatever is added."""
    a, b = operands("nt", (6, 32, columns), device)
    bias = torch.randn(columns, device=device).to(DTYPES[own])
    add = torch.randn(2, 3, columns, device=device).to(DTYPES[own])
    a = a.reshape(2, 3, 32).with_usage(rowwise=True, columnwise=False)
    coarse = max(torch.finfo(DTYPES[dtype]).eps, torch.finfo(DTYPES[own]).eps)

    def check(y: torch.Tensor, other: torch.Tensor) -> None:
        assert y.dtype is other.dtype
        assert y.shape == other.shape
        # what is added may cancel the product, whose rounding stays
        torch.testing.assert_close(y.double(), other.double(), rtol=2 * coarse, atol=max(20 * coarse, 2e-2 * y.is_cuda))

    for extra in ({"bias": bias}, {"add": add}, {"bias": bias, "add": add}):
        check(gemm.gemm_nt(a, b, dtype=DTYPES[dtype], **extra), reference.gemm_nt(a, b, dtype=DTYPES[dtype], **extra))
    a, b = operands("nn", (6, 32, columns), device)
    add = add.reshape(6, columns)
    check(gemm.gemm_nn(a, b, dtype=DTYPES[dtype], add=add), reference.gemm_nn(a, b, dtype=DTYPES[dtype], add=add))


@pytest.mark.parametrize("kind", KINDS)
def test_factor_is_rounded_once(kind: str, device: str) -> None:
    a, b = operands(kind, (20, 40, 24), device)
    for alpha in (0.5, -3.0, 1 / 3):
        y = ours(kind)(a, b, dtype=torch.float32, alpha=alpha)
        assert_close(y, wanted(kind, a, b, dtype=torch.float32, alpha=alpha), 40)
        narrow = ours(kind)(a, b, dtype=torch.bfloat16, alpha=alpha)
        assert torch.equal(narrow, y.to(torch.bfloat16))


@pytest.mark.parametrize("kind", KINDS)
def test_one_copy_serves(kind: str, device: str) -> None:
    a, b = operands(kind, (20, 32, 24), device)
    both = ours(kind)(a, b, dtype=torch.float32)
    for rowwise in (True, False):
        one, other = (x.with_usage(rowwise=rowwise, columnwise=not rowwise) for x in (a, b))
        assert torch.equal(ours(kind)(one, other, dtype=torch.float32), both)


@pytest.mark.parametrize("kind", KINDS)
def test_any_strides_and_addresses(kind: str, device: str) -> None:
    a, b = operands(kind, (32, 32, 48), device)
    both = ours(kind)(a, b, dtype=torch.float32)

    def strided(x: torch.Tensor) -> torch.Tensor:
        wide = x.new_zeros(x.shape[0], x.shape[1] + 3)
        wide[:, 3:] = x
        return wide[:, 3:]

    def shifted(x: torch.Tensor) -> torch.Tensor:
        flat = x.new_zeros(x.numel() + 1)
        flat[1:] = x.flatten()
        return flat[1:].view(x.shape)

    for move in (strided, shifted):
        one, other = (
            fte.tree_map(
                lambda t, move=move: (move if t.dim() == 2 else shifted)(
                    t.view(torch.uint8 if t.element_size() == 1 else t.dtype)
                ).view(t.dtype),
                x,
            )
            for x in (a, b)
        )
        assert torch.equal(ours(kind)(one, other, dtype=torch.float32), both)


def test_high_precision_and_mixes_are_the_reference(device: str) -> None:
    x, w = torch.randn(6, 32, device=device), torch.randn(16, 32, device=device)
    add = torch.randn(6, 16, device=device)
    for a, b in ((x, w), (cast(x, CURRENT), w), (x, cast(w, CURRENT))):
        for extra in ({}, {"add": add}, {"bias": add[0]}, {"alpha": 0.5}):
            y = gemm.gemm_nt(a, b, dtype=torch.float32, **extra)
            assert torch.equal(y, reference.gemm_nt(a, b, dtype=torch.float32, **extra))


def test_other_formats_are_the_reference(device: str) -> None:
    for quantizer in (fte.MXFP8Quantizer(dtype=E4M3, columnwise=True), GRADIENT):
        a, b = operands("nt", (32, 64, 32), device, quantizer, quantizer)
        y = gemm.gemm_nt(a, b, dtype=torch.float32)
        assert torch.equal(y, reference.gemm_nt(a, b, dtype=torch.float32))


def test_a_missing_copy_is_an_error(device: str) -> None:
    rows = fte.Float8BlockQuantizer(dtype=E4M3, block_scaling_dim=1)
    a, b = operands("tn", (128, 128, 128), device, rows, rows)
    with pytest.raises(ValueError, match="a columnwise copy"):
        gemm.gemm_tn(a, b, dtype=torch.float32)


def test_operands_on_different_devices_are_an_error(device: str) -> None:
    a, b = operands("nt", (16, 16, 16), device)
    with pytest.raises(ValueError, match=f"gemm_nt: b: expected a tensor on {device}.*, where a is, got meta"):
        gemm.gemm_nt(a, b.to("meta"), dtype=torch.float32)


def test_tensors_on_the_cpu_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm, "INTERPRETED", False)
    a, b = torch.ones(2, 2), torch.ones(2, 2)
    for product in (gemm.gemm_nt, gemm.gemm_nn, gemm.gemm_tn):
        with pytest.raises(ValueError, match="a: expected a tensor on a CUDA device, got cpu"):
            product(a, b, dtype=torch.float32)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("blocks", [False, True], ids=["tensor", "block"])
def test_trace_for_any_number_of_rows(kind: str, blocks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake tensors on a GPU, with a symbolic number of tokens: one product, and nothing is assumed of that number."""
    monkeypatch.setattr(compat, "can_scale", lambda device: True)
    monkeypatch.setattr(compat, "can_scale_blocks", lambda device: True)
    environment = ShapeEnv()
    mode = FakeTensorMode(shape_env=environment)
    context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC, DimDynamic.STATIC])
    tokens = mode.from_tensor(torch.empty(40, 1), symbolic_context=context).shape[0]
    assert isinstance(tokens, torch.SymInt)
    shapes = {"nt": ((tokens, 512), (48, 512)), "nn": ((tokens, 512), (512, 32)), "tn": ((tokens, 48), (tokens, 32))}
    formats = (ROWS, ROWS if kind == "tn" else TILES) if blocks else (CURRENT, CURRENT)

    def run(*flat: torch.Tensor) -> torch.Tensor:
        names = ("rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv")
        a, b = (
            QuantizedTensor(**dict(zip(names, own, strict=True)), dtype=torch.bfloat16, quantizer=quantizer)
            for own, quantizer in zip((flat[:4], flat[4:]), formats, strict=True)
        )
        return ours(kind)(a, b, dtype=torch.bfloat16)

    with mode, enable_python_dispatcher():
        flat = []
        for shape, quantizer in zip(shapes[kind], formats, strict=True):
            for columnwise in (False, True):
                spec = quantizer.copy_spec(shape, columnwise)
                flat += [torch.empty(size, dtype=dtype, device="cuda") for size, dtype in spec[:2]]
        before = len(environment.guards)
        graph = make_fx(run)(*flat)
    called = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    assert called.count("aten._scaled_mm.default") == 1
    padded = [name for name in called if "pad" in name or "fill" in name]
    assert bool(padded) == (blocks or kind == "tn"), called
    guards = [str(guard.expr) for guard in environment.guards[before:]]
    # a matrix with one block of tokens is contiguous whichever way it lies
    assert not [guard for guard in guards if ("Mod" in guard or "Eq(" in guard) and "//128), 1)" not in guard], guards
