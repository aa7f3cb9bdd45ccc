"""Bandwidth of the fused kernels and rate of the FP8 products of the large MLP block, alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

import functional_te as fte
from functional_te.kernels import kernels
from functional_te.quantization import BoundQuantizer
from tests.benchmarks.gpu.blocks import Mlp
from tests.benchmarks.gpu.measure import kernel_ms

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
Measure = Callable[[], dict[str, Any]]


def _bound(recipe: str, dtype: torch.dtype, device: str, tile: int = 1) -> BoundQuantizer:
    """A quantizer that makes both copies."""
    both: dict[str, Any] = {"rowwise": True, "columnwise": True}
    if recipe == "delayed":
        quantizer = fte.Float8DelayedScalingQuantizer(dtype=dtype, **both)
        return BoundQuantizer(quantizer=quantizer, scale=torch.ones(1, device=device))
    if recipe == "current":
        return BoundQuantizer(quantizer=fte.Float8CurrentScalingQuantizer(dtype=dtype, **both))
    return BoundQuantizer(quantizer=fte.Float8BlockQuantizer(dtype=E4M3, block_scaling_dim=tile, **both))


def bandwidth(shape: Mlp, backend: str, device: str, dtype: torch.dtype) -> Iterator[tuple[str, str, Measure]]:
    """Kernel, recipe and measurement, in TB/s of the least bytes: inputs read once, both copies written once.

    With current scaling the input has to be read twice (amax first), which the least bytes do not count.
    """
    t, h, f = shape.tokens, shape.width, shape.hidden

    def random(*size: int) -> torch.Tensor:
        return torch.randn(size, device=device, dtype=dtype)

    def timed(run: Callable[[], Any], count: int) -> dict[str, Any]:
        ms = kernel_ms(run, device)
        return {"value": count / ms / 1e9, "ms": ms, "bytes": count}

    def swiglu(bound: BoundQuantizer) -> dict[str, Any]:
        x = random(t, 2 * f)
        return timed(lambda: kernels(backend).activation(x, "swiglu", (), 0, dtype=dtype, bound=bound), 6 * t * f)

    def swiglu_grad(bound: BoundQuantizer) -> dict[str, Any]:
        x, dy = random(t, 2 * f), random(t, f)
        return timed(
            lambda: kernels(backend).activation_grad(dy, x, "swiglu", (), 0, dtype=dtype, bound=bound), 10 * t * f
        )

    def rms_norm(bound: BoundQuantizer) -> dict[str, Any]:
        x, weight, how = random(t, h), random(h), {"eps": 1e-5, "zero_centered_gamma": False}
        return timed(lambda: kernels(backend).rms_norm(x, weight, **how, dtype=dtype, bound=bound), 4 * t * h + 4 * t)

    def cast(bound: BoundQuantizer) -> dict[str, Any]:
        x = random(t, 2 * f)
        return timed(lambda: kernels(backend).quantize(x, bound), 8 * t * f)

    def rms_norm_grad() -> dict[str, Any]:
        x, dy, add, weight = random(t, h), random(t, h), random(t, h), random(h)
        rstd = kernels(backend).rms_norm(x, weight, eps=1e-5, zero_centered_gamma=False, dtype=dtype)[2]
        how = {"zero_centered_gamma": False, "dtype": dtype, "add": add}
        return timed(lambda: kernels(backend).rms_norm_grad(dy, x, weight, rstd, **how), 8 * t * h)

    for recipe in ("delayed", "current", "block"):
        yield "SwiGLU+quantize+transpose", recipe, lambda r=recipe: swiglu(_bound(r, E4M3, device))
        yield "dSwiGLU+quantize+transpose", recipe, lambda r=recipe: swiglu_grad(_bound(r, E5M2, device))
        yield "RMSNorm+quantize+transpose", recipe, lambda r=recipe: rms_norm(_bound(r, E4M3, device))
        yield "cast+transpose", recipe, lambda r=recipe: cast(_bound(r, E4M3, device))
    yield "cast+transpose", "block 128x128", lambda: cast(_bound("block", E4M3, device, 2))
    yield "dRMSNorm+add", "none", rms_norm_grad


def products(shape: Mlp, backend: str, device: str, dtype: torch.dtype) -> Iterator[tuple[str, str, Measure]]:
    """Product, recipe and measurement, in TFLOP/s: the three products of both linears."""
    t, h, f = shape.tokens, shape.width, shape.hidden

    def one(recipe: str, kind: str, inner: int, outer: int) -> dict[str, Any]:
        def cast(rows: int, columns: int, element: torch.dtype, tile: int = 1) -> Any:
            values = torch.randn(rows, columns, device=device, dtype=dtype)
            return kernels(backend).quantize(values, _bound(recipe, element, device, tile))[0]

        record = kernels(backend)
        x, weight, dy = cast(t, inner, E4M3), cast(outer, inner, E4M3, 2), cast(t, outer, E5M2)
        run = {
            "forward": lambda: record.gemm_nt(x, weight, dtype=dtype),
            "input gradient": lambda: record.gemm_nn(dy, weight, dtype=dtype),
            "weight gradient": lambda: record.gemm_tn(dy, x, dtype=dtype),
        }[kind]
        ms = kernel_ms(run, device)
        return {"value": 2 * t * inner * outer / ms / 1e9, "ms": ms}

    for recipe in ("delayed", "block"):
        for layer, inner, outer in (("up", h, 2 * f), ("down", f, h)):
            for kind in ("forward", "input gradient", "weight gradient"):
                yield (
                    f"{layer}, {kind}",
                    recipe,
                    lambda r=recipe, k=kind, i=inner, o=outer: one(r, k, i, o),
                )
