"""Tile sizes of the fused kernels by bandwidth, to choose those in :mod:`functional_te.kernels.triton.sizes`.

``python -m tests.benchmarks.gpu.sweep`` prints every case with its configurations, best first. Bandwidth counts what
has to be read and written once; the device's copy is measured the same way. Only the kernels are timed: the launches of
one call are recorded and replayed, without what the host does around them, with a cold cache.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import statistics
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch

from functional_te.quantization.quantizers import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8DelayedScalingQuantizer,
)
from functional_te.quantization.tensor import BoundQuantizer
from tests.benchmarks.gpu.measure import durations

E4M3, E5M2, BF16 = torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16
RUNS, WARMUPS = 20, 5
FLUSH = 1 << 29  # bytes written between two runs: ten times the cache of an H200
MODULES = ("activation", "cast", "column_sums", "norm", "norm_grad", "dropout")  # of kernels, each with its launch()

Config = tuple[int, ...]
Run = Callable[[], Any]


@dataclasses.dataclass(frozen=True)
class Case:
    """A kernel to measure.

    Attributes:
        name: what is printed.
        sizes: key of :data:`~functional_te.kernels.triton.sizes.TILES`; kernels of blocks have keys of their own.
        element: FP8 type of the result.
        build: from (rows, columns, bound quantizer, device) to the call and its least bytes.
        shapes: rows and columns that ``build`` gets.
        configs: rows, columns and warps of a tile, and optionally stages.
        using: a context in which the call uses a configuration; None sets the entry of TILES.
    """

    name: str
    sizes: str
    element: torch.dtype
    build: Callable[[int, int, BoundQuantizer, str], tuple[Run, int]]
    shapes: tuple[tuple[int, int], ...]
    configs: tuple[Config, ...]
    using: Callable[[Config], contextlib.AbstractContextManager[Any]] | None = None


def kernel(module: str, function: str) -> Callable[..., Any]:
    return getattr(importlib.import_module(f"functional_te.kernels.triton.{module}"), function)


def randn(*shape: int, device: str) -> torch.Tensor:
    return torch.randn(shape, device=device, dtype=BF16)


def swiglu(rows: int, cols: int, bound: BoundQuantizer, device: str) -> tuple[Run, int]:
    x, call = randn(rows, 2 * cols, device=device), kernel("activation", "activation")
    return lambda: call(x, "swiglu", (), 0, dtype=BF16, bound=bound), 6 * rows * cols


def swiglu_grad(rows: int, cols: int, bound: BoundQuantizer, device: str) -> tuple[Run, int]:
    x, dy = randn(rows, 2 * cols, device=device), randn(rows, cols, device=device)
    call = kernel("activation", "activation_grad")
    return lambda: call(dy, x, "swiglu", (), 0, dtype=BF16, bound=bound), 10 * rows * cols


def gelu_grad_bias(rows: int, cols: int, bound: BoundQuantizer, device: str) -> tuple[Run, int]:
    x, dy, call = (
        randn(rows, cols, device=device),
        randn(rows, cols, device=device),
        kernel("activation", "activation_grad"),
    )
    return lambda: call(dy, x, "gelu", (), 0, dtype=BF16, bound=bound, needs_bias=True), 6 * rows * cols


def cast(rows: int, cols: int, bound: BoundQuantizer, device: str) -> tuple[Run, int]:
    x, call = randn(rows, cols, device=device), kernel("cast", "quantize")
    return lambda: call(x, bound), 4 * rows * cols


def cast_bias(rows: int, cols: int, bound: BoundQuantizer, device: str) -> tuple[Run, int]:
    x, call = randn(rows, cols, device=device), kernel("cast", "cast_bias")
    return lambda: call(x, bound, dtype=BF16), 4 * rows * cols


def rms_norm(rows: int, cols: int, bound: BoundQuantizer, device: str) -> tuple[Run, int]:
    x, weight, call = randn(rows, cols, device=device), randn(cols, device=device), kernel("norm", "rms_norm")
    how = {"eps": 1e-5, "zero_centered_gamma": False, "dtype": BF16, "bound": bound}
    return lambda: call(x, weight, **how), 4 * rows * cols + 4 * rows


def norm_config(config: Config) -> contextlib.AbstractContextManager[Any]:
    """Rows of a program, columns of a tile, warps, for the last pass of a norm."""
    norm = importlib.import_module("functional_te.kernels.triton.norm")
    chosen = norm.norm_passes

    def passes(*args: Any) -> Any:
        *before, last = chosen(*args)
        return (*before, last._replace(rows=config[0], cols=config[1], warps=config[2]))

    return patch.object(norm, "norm_passes", passes)


TOKENS = ((8192, 14336), (2048, 5632))
# the last four pack words of four rows; see functional_te.kernels.triton.rounding
TILES: tuple[Config, ...] = (
    (32, 128, 4),
    (64, 128, 8),
    (32, 128, 2),
    (64, 64, 2),
    (64, 128, 4),
    (128, 64, 4),
)
WIDE = ((64, 128, 8), (64, 256, 8), (128, 128, 8), (32, 128, 2), (64, 128, 4), (128, 64, 4))
# two tiles of results: more of them are too many registers
NARROW: tuple[Config, ...] = ((32, 128, 4), (32, 128, 8), (32, 128, 2), (64, 64, 2), (64, 128, 4), (128, 32, 2))

# A new case is a function above and one row.
CASES: tuple[Case, ...] = (
    Case("SwiGLU", "gated", E4M3, swiglu, TOKENS, TILES),
    Case("dSwiGLU", "gated_grad", E5M2, swiglu_grad, TOKENS, NARROW),
    Case("cast", "cast", E4M3, cast, ((8192, 4096), (28672, 4096)), WIDE),
    Case("cast + bias", "cast_bias", E5M2, cast_bias, ((8192, 4096),), TILES[:4]),
    Case("dGELU + bias", "activation_grad", E5M2, gelu_grad_bias, ((8192, 14336),), TILES[:4]),
    Case(
        "RMSNorm",
        "",
        E4M3,
        rms_norm,
        ((8192, 4096), (2048, 2048)),
        ((64, 128, 4), (32, 128, 2), (128, 64, 4), (128, 128, 8)),
        norm_config,
    ),
)


def quantizers(element: torch.dtype, device: str) -> dict[str, BoundQuantizer]:
    """By name, each making both copies."""
    delayed = Float8DelayedScalingQuantizer(element, columnwise=True)
    return {
        "delayed": BoundQuantizer(quantizer=delayed, scale=torch.ones(1, device=device)),
        "current": BoundQuantizer(quantizer=Float8CurrentScalingQuantizer(element, columnwise=True)),
        "block-1d": BoundQuantizer(quantizer=Float8BlockQuantizer(element, columnwise=True, block_scaling_dim=1)),
        "block-2d": BoundQuantizer(quantizer=Float8BlockQuantizer(element, columnwise=True, block_scaling_dim=2)),
    }


def recorded(run: Run, stages: int | None = None) -> Run:
    """A function that repeats the kernel launches that one call of ``run`` made, and nothing else of it."""
    from functional_te.kernels.triton.launch import launch

    launches: list[tuple[Any, ...]] = []

    def record(target: Any, grid: Any, probe: torch.Tensor, /, *args: Any, **constants: Any) -> None:
        if stages is not None:
            constants["num_stages"] = stages
        launches.append((target, grid, args, constants))
        launch(target, grid, probe, *args, **constants)

    with contextlib.ExitStack() as stack:
        for module in MODULES:
            stack.enter_context(patch(f"functional_te.kernels.triton.{module}.launch", record))
        result = run()
    if result is None or not launches:
        raise ValueError("no kernel takes this case")

    def replay() -> None:
        for target, grid, args, constants in launches:
            target[grid](*args, **constants)

    return replay


def terabytes(run: Run, count: int, device: str) -> float:
    """Median TB/s of ``run``, which moves ``count`` bytes, with a cold cache."""
    spill = torch.empty(FLUSH if device == "cuda" else 16, dtype=torch.uint8, device=device)
    for _ in range(WARMUPS):
        run()
    return count / statistics.median(durations(run, RUNS, device, spill.zero_)) / 1e9


def copy_terabytes(device: str) -> float:
    """TB/s, read and written, of copying 1 GiB."""
    source = torch.empty(1 << (30 if device == "cuda" else 10), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return terabytes(lambda: target.copy_(source), 2 * source.nbytes, device)


def tile_config(case: Case, form: str, config: Config) -> contextlib.AbstractContextManager[Any]:
    """The context in which kernels of ``case`` that cast to a ``form`` use ``config``."""
    if case.using is not None:
        return case.using(config)
    from functional_te.kernels.triton import sizes

    suffix = {"block-1d": "_block_1d", "block-2d": "_block"}.get(form, "")
    return patch.dict(sizes.TILES, {f"{case.sizes}{suffix}": config[:3]})


def sweep(case: Case, shape: tuple[int, int], form: str, device: str) -> Iterator[tuple[Config, float | str]]:
    """TB/s of every configuration, best first, then those that failed with why. Blocks fix the tile: warps vary."""
    of_blocks = form.startswith("block")
    configs = case.configs
    if of_blocks and case.using is None:
        configs = tuple((128, 128, warps) for warps in (4, 8, 16, 32))
    run, count = case.build(*shape, quantizers(case.element, device)[form], device)
    found: list[tuple[Config, float | str]] = []
    for config in configs:
        try:
            with tile_config(case, form, config):
                only = recorded(run, config[3] if len(config) > 3 else None)
            found.append((config, terabytes(only, count, device)))
        except Exception as error:  # too many registers or too much shared memory: the next one may fit
            found.append((config, f"{type(error).__name__}: {error}"[:120]))
    return iter(sorted(found, key=lambda one: -one[1] if isinstance(one[1], float) else 1.0))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--cases", nargs="*", default=["SwiGLU", "dSwiGLU", "cast"], help="names, or 'all'")
    parser.add_argument("--format", default="delayed", choices=["delayed", "current", "block-1d", "block-2d"])
    chosen = parser.parse_args(argv)
    if not torch.cuda.is_available():
        raise SystemExit("the sweep needs a CUDA device")
    ceiling = copy_terabytes("cuda")
    print(f"{torch.cuda.get_device_name()}: copy {ceiling:.2f} TB/s; {chosen.format}, both copies")
    for case in CASES:
        if case.name not in chosen.cases and "all" not in chosen.cases:
            continue
        for shape in case.shapes:
            print(f"{case.name} {shape[0]} x {shape[1]}", flush=True)
            for config, rate in sweep(case, shape, chosen.format, "cuda"):
                text = rate if isinstance(rate, str) else f"{rate:.2f} TB/s  {rate / ceiling:4.0%} of copy"
                print(f"  {config!s:18} {text}", flush=True)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
