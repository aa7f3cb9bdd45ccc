"""Speed and error of the matrix products of a linear layer: ``python -m tests.benchmarks.gpu.gemms``.

For the products of a linear layer with ``f`` outputs and ``h`` inputs, one line each: nt (output), nn (input gradient),
tn (weight gradient). Columns are TFLOP/s of bfloat16, of one scale per tensor with fast and with split accumulation,
and of block scaling; then the relative error (root mean square) of the bfloat16 result against the float64 product of
the decoded operands, and of the float32 result for one scale per tensor. Times are medians of replays of a CUDA graph,
so those of the device alone; the last table has the time that the host takes for a call.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import functional_te as fte
from functional_te.kernels.triton import gemm
from functional_te.quantization.cast import quantize_bound
from functional_te.quantization.tensor import BoundQuantizer

# tokens, h, f
SIZES = ((8192, 4096, 28672), (8192, 14336, 4096), (2048, 2048, 11264), (512, 1024, 8192))
TENSOR = fte.Float8CurrentScalingQuantizer(dtype=torch.float8_e4m3fn, columnwise=True)
ROWS = fte.Float8BlockQuantizer(dtype=torch.float8_e4m3fn, columnwise=True, block_scaling_dim=1)
TILES = fte.Float8BlockQuantizer(dtype=torch.float8_e4m3fn, columnwise=True)
PRODUCTS = {"nt": gemm.gemm_nt, "nn": gemm.gemm_nn, "tn": gemm.gemm_tn}


def cast(x: torch.Tensor, quantizer: Any) -> Any:
    return quantize_bound(x, BoundQuantizer(quantizer=quantizer))[0]


def device_ms(run: Callable[[], Any], repeats: int = 9) -> float:
    """Median milliseconds of a call: of replays of a graph of several."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record(stream)
        run()
        end.record(stream)
        end.synchronize()
        count = max(2, min(40, int(4 / start.elapsed_time(end))))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(count):
                run()
    times = []
    for _ in range(repeats + 1):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / count)
    return statistics.median(times[1:])


def host_us(run: Callable[[], Any], count: int = 300) -> float:
    """Median microseconds until a call returns."""
    times = []
    for _ in range(count):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    torch.cuda.synchronize()
    return 1e6 * statistics.median(times)


def operands(kind: str, tokens: int, h: int, f: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of ``kind``: input and weight, output gradient and weight, output gradient and input."""
    shapes = {"x": (tokens, h), "w": (f, h), "dy": (tokens, f)}
    one, other = {"nt": ("x", "w"), "nn": ("dy", "w"), "tn": ("dy", "x")}[kind]
    return tuple(torch.randn(shapes[name], device="cuda", dtype=torch.bfloat16) for name in (one, other))  # type: ignore[return-value]


def exact(kind: str, a: Any, b: Any) -> torch.Tensor:
    """The float64 product of what was cast."""
    one, other = (
        x.dequantize(torch.float32, columnwise=wise).double() for x, wise in ((a, kind == "tn"), (b, kind != "nt"))
    )
    return one @ other.t() if kind == "nt" else one @ other if kind == "nn" else one.t() @ other


def error(y: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((y.double() - wanted).norm() / wanted.norm())


def row(kind: str, tokens: int, h: int, f: int) -> str:
    """One line of the table."""
    product = PRODUCTS[kind]
    flops = 2 * tokens * h * f
    a, b = operands(kind, tokens, h, f)
    tensor = cast(a, TENSOR), cast(b, TENSOR)
    block = cast(a, ROWS), cast(b, ROWS if kind == "tn" else TILES)

    def rate(pair: tuple[Any, Any], fast: bool = False) -> float:
        return flops / device_ms(lambda: product(*pair, dtype=torch.bfloat16, fast=fast)) / 1e9

    rates = [rate((a, b)), rate(tensor, True), rate(tensor), rate(block)]
    errors = []
    for dtype, pairs in ((torch.bfloat16, (tensor, tensor, block)), (torch.float32, (tensor, tensor))):
        for place, pair in enumerate(pairs):
            wanted = exact(kind, *pair)
            errors.append(error(product(*pair, dtype=dtype, fast=place == 0), wanted))
            del wanted
    numbers = "".join(f"{value:9.0f}" for value in rates) + " " + "".join(f"{value:9.1e}" for value in errors)
    return f"{tokens:6} {h:6} {f:6} {kind}{numbers}"


def main() -> None:
    """Print the table."""
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}")
    print("                            TFLOP/s                    error, bfloat16            error, float32")
    print("tokens      h      f       bf16     fast    split    block      fast    split    block    fast    split")
    for size in SIZES:
        for kind in PRODUCTS:
            print(row(kind, *size), flush=True)
    print("microseconds of the host for a call (64 x 64 x 64): ", end="")
    for name, quantizer in (("bf16", None), ("tensor", TENSOR), ("block", ROWS)):
        pair = operands("nt", 64, 64, 64)
        pair = pair if quantizer is None else tuple(cast(x, quantizer) for x in pair)
        print(f"{name} {host_us(lambda pair=pair: gemm.gemm_nt(*pair, dtype=torch.bfloat16)):.1f}", end="  ")
    print()


if __name__ == "__main__":
    main()
