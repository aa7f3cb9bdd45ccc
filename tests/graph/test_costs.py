"""Operations, bytes and times."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import functional_te as fte
from functional_te.graph.devices import DEVICES, Device, device_of, this_cpu
from functional_te.graph.roofline import estimate, kernel_estimate
from functional_te.graph.value import Kernel
from tests.graph.blocks import BF16, RECIPES, mlp, spec
from tests.helpers import random_params


def _products(graph):
    return [kernel for step in graph.steps for kernel in step.kernels if kernel.kind == "product"]


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("recipe", ["none", "current"])
def test_operations_of_products_are_those_that_torch_counts(recipe, fused) -> None:
    block = mlp(64, 96)
    params, x = random_params(block), torch.randn(32, 64)
    fusions = None if fused else fte.Fusions()
    with FlopCounterMode(display=False) as counter:
        out, pullback = fte.vjp(block, params, x, recipe=RECIPES[recipe], fusions=fusions)
        pullback(torch.ones_like(out.output))
    graph = fte.graph(block, params, x, recipe=RECIPES[recipe], fusions=fusions)
    assert sum(kernel.flops for kernel in _products(graph)) == counter.get_total_flops()


def test_groups_of_rows_are_multiplied_once() -> None:
    block = fte.chain(fte.GroupedLinear(4, 64, 96, bias=False))
    graph = fte.graph(block, None, spec(128, 64), fte.TensorSpec((4,), torch.int64), recipe=RECIPES["mxfp8"])
    assert [kernel.flops for kernel in _products(graph)] == [2 * 128 * 64 * 96] * 3
    assert [kernel.layout for kernel in _products(graph)] == ["nt", "nn", "tn"]
    assert [kernel.math for kernel in _products(graph)] == ["mxfp8"] * 3


MATH = {"none": "bf16", "delayed": "fp8", "current": "fp8", "block": "fp8-block", "mxfp8": "mxfp8", "nvfp4": "fp4"}


@pytest.mark.parametrize("recipe", MATH)
def test_what_is_multiplied(recipe) -> None:
    graph = fte.graph(mlp(64, 96), None, spec(32, 64), recipe=RECIPES[recipe])
    assert {kernel.math for kernel in _products(graph)} == {MATH[recipe]}


def test_an_operand_in_high_precision_makes_a_product_in_high_precision() -> None:
    graph = fte.graph(mlp(64, 96), None, spec(32, 64), recipe=RECIPES["high_precision_backward"])
    assert {kernel.math for step in graph.forward for kernel in step.kernels if kernel.math} == {"fp8"}
    assert {kernel.math for step in graph.backward for kernel in step.kernels if kernel.math} == {"bf16"}


def test_bytes_of_a_block_by_hand() -> None:
    """Delayed scaling with transposed copies: ``T`` rows, ``H`` features, ``F`` inner features, BF16 weights."""
    pytest.importorskip("triton", reason="the plan of the Triton backend asks for its record")
    t, h, f = 512, 256, 384
    graph = fte.graph(mlp(h, f), None, spec(t, h), recipe=RECIPES["delayed"], backend="triton")
    by = {(step.direction, step.indices): step for step in graph.steps}
    small = 64  # scales, amaxes
    norm = by["forward", (1,)]
    assert norm.read == pytest.approx(2 * t * h + 2 * h, abs=small)
    assert norm.written == pytest.approx(2 * t * h + 4 * t, abs=small)  # two copies in FP8, and rstd
    cast, product, activation = by["forward", (2, 3)].kernels
    assert (cast.kind, cast.read) == ("cast", 2 * 2 * f * h)
    assert cast.written == pytest.approx(2 * 2 * f * h, abs=small)
    assert product.read == pytest.approx(t * h + 2 * f * h, abs=small)
    assert product.written == 2 * t * 2 * f
    assert activation.read == pytest.approx(2 * t * 2 * f, abs=small)
    assert activation.written == pytest.approx(2 * t * f, abs=small)
    last = by["forward", (4, 5, 6)].kernels[-1]
    assert last.kind == "elementwise"
    assert last.read == pytest.approx(2 * 2 * t * h + 2 * h, abs=small)
    assert last.written == pytest.approx(2 * t * h, abs=small)
    gate = by["backward", (3,)]
    assert gate.read == pytest.approx(2 * t * f + 2 * t * 2 * f, abs=small)
    assert gate.written == pytest.approx(2 * t * 2 * f, abs=small)
    norm = by["backward", (0, 1, 2)].kernels[-1]
    # the gradient from the linear, the input, the residual's gradient; what goes on
    assert norm.kind == "rows"
    assert norm.read == pytest.approx(3 * 2 * t * h + 4 * t + 2 * h, abs=small)
    assert norm.written == pytest.approx(2 * t * h + 2 * h, abs=small)


# rows, features, inner features, milliseconds in a CUDA graph on an H200 (a hand-fused probe; without the bias)
MEASURED = {"large": (8192, 4096, 14336, 7.75, 0.15), "middle": (2048, 2048, 5632, 0.49, 0.15)}
MEASURED["small"] = (512, 1024, 4096, 0.12, 0.30)


@pytest.mark.parametrize("size", MEASURED)
def test_an_h200_takes_as_long_as_was_measured(size) -> None:
    pytest.importorskip("triton", reason="the plan of the Triton backend asks for its record")
    rows, hidden, inner, milliseconds, tolerance = MEASURED[size]
    ops = [op for op in mlp(hidden, inner).ops if not isinstance(op, fte.Bias)]
    graph = fte.graph(
        fte.chain(*ops), None, spec(rows, hidden), recipe=RECIPES["delayed"], backend="triton", device="H200"
    )
    assert graph.time() * 1e3 == pytest.approx(milliseconds, rel=tolerance)
    assert graph.time() == pytest.approx(graph.time("forward") + graph.time("backward"))
    if size == "large":
        bounds = [estimate(step, graph.device).bound for step in graph.steps]
        assert bounds == ["", "memory", "compute", "compute", "", "compute", "memory", "compute"]


def _product(rows: int, columns: int, reduced: int, math: str = "fp8", fast: bool = False) -> Kernel:
    return Kernel(
        "product",
        2 * rows * columns * reduced,
        rows * reduced + columns * reduced,
        2 * rows * columns,
        sizes=(rows, columns, reduced),
        layout="nt",
        math=math,
        fast=fast,
    )


def test_one_tile_more_than_a_wave_costs_a_wave() -> None:
    h200 = DEVICES["H200"]
    full = kernel_estimate(_product(128 * 12, 256 * 11, 8192), h200, "forward").seconds - h200.launch
    more = kernel_estimate(_product(128 * 12 + 1, 256 * 11, 8192), h200, "forward").seconds - h200.launch
    assert 1.3 < more / full < 2.01
    large = _product(8192, 8192, 8192, fast=True)
    seconds = kernel_estimate(large, h200, "forward").seconds
    assert large.flops / seconds / 1e12 == pytest.approx(1386, rel=0.04)


def test_what_bounds_a_kernel() -> None:
    h200 = DEVICES["H200"]
    assert kernel_estimate(_product(8192, 8192, 8192), h200, "forward").bound == "compute"
    assert kernel_estimate(_product(8192, 8192, 16), h200, "forward").bound == "memory"
    assert kernel_estimate(Kernel("elementwise", 1, 10**9, 10**9), h200, "forward").bound == "memory"
    tiny = kernel_estimate(Kernel("elementwise", 1, 10, 10), h200, "forward")
    assert (tiny.bound, round(tiny.seconds / h200.launch, 2)) == ("launch", 1.0)


def test_a_format_that_a_device_lacks_is_estimated_as_bf16() -> None:
    graph = fte.graph(mlp(1024, 1024), None, spec(4096, 1024), recipe=RECIPES["nvfp4"], device="A100")
    plain = fte.graph(mlp(1024, 1024), None, spec(4096, 1024), device="A100")
    pairs = zip(_products(graph), _products(plain), strict=True)
    for low, high in pairs:
        assert kernel_estimate(low, DEVICES["A100"], "forward").seconds == pytest.approx(
            kernel_estimate(high, DEVICES["A100"], "forward").seconds, rel=0.2
        )
    assert "A100 multiplies no fp4: estimated as bf16" in repr(graph)
    assert "multiplies no" not in repr(graph.on("B200"))
    assert graph.on("B200").time() < graph.time()


def test_devices() -> None:
    assert device_of("h100 sxm") is DEVICES["H100"]
    assert device_of(DEVICES["B200"]) is DEVICES["B200"]
    cpu = this_cpu()
    assert device_of("cpu") is cpu
    assert 0 < cpu.bandwidth < 2
    assert 0 < cpu.products["fp32"][0] < 20
    graph = fte.graph(mlp(64, 96), None, spec(32, 64), device="cpu")
    assert 0 < graph.time() < 60
    assert math.isfinite(graph.time("backward"))
    with pytest.raises(ValueError, match=r"graph: device: expected one of \['H200', .*'cpu'\], got 'TPU'"):
        graph.on("TPU")
    with pytest.raises(TypeError, match="graph: device: expected a Device"):
        graph.on(3)
    for device in DEVICES.values():
        assert isinstance(device, Device)
        assert device.source
        assert {"bf16", "fp32"} <= set(device.products)
    assert BF16.itemsize == 2
