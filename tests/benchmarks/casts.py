"""Speed and memory of FP8 casts on the CPU under torch.compile, next to torchao's compiled casts of the same formats.

``python -m tests.benchmarks.casts`` prints a line per format and number of copies, and exits non-zero if a ratio is
above 1 or if a cast allocates more than 1.1 results and 4 bytes per element. Both sides run alternately in one process.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import importlib.util
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

import functional_te as fte
from functional_te import pytree
from functional_te.quantization.cast import quantize_bound
from functional_te.quantization.fp8_block import block_cast
from functional_te.quantization.mxfp8 import mx_cast
from functional_te.quantization.tensor import BoundQuantizer

DTYPE = torch.float8_e4m3fn
Cast = Callable[[torch.Tensor], Any]


@dataclasses.dataclass(frozen=True)
class Row:
    """Two functions of a matrix that make the same copies of it; ``theirs`` is None without a counterpart."""

    title: str
    ours: Cast
    theirs: Cast | None


@dataclasses.dataclass(frozen=True)
class Result:
    """Milliseconds of both sides, the median of the ratios of their rounds, peak bytes and bytes of our result."""

    ours: float
    theirs: float | None
    ratio: float | None
    peak: int
    result: int
    elements: int

    @property
    def within_limits(self) -> bool:
        """Whether the cast is as fast as its counterpart and no larger than it may be."""
        return (self.ratio is None or self.ratio <= 1.0) and self.peak <= 1.1 * self.result + 4 * self.elements


def rows() -> list[Row]:
    """Every format, row copy alone and both copies; without torchao nothing is compared."""
    tensorwise, block, mx_up, mx_down = torchao_casts()
    return [
        *_pair("current scaling, per tensor", _tensorwise(False), _tensorwise(True), tensorwise),
        *_tiled("block scaling, 1 x 128", block_cast, (1, 128), block((1, 128))),
        *_tiled("block scaling, 128 x 128", block_cast, (128, 128), block((128, 128))),
        *_tiled("MXFP8", mx_cast, (1, 32), mx_up),
        *_tiled("MXFP8 (torchao: FLOOR, without scales)", mx_cast, (1, 32), mx_down),
        *_tiled("MXFP8, 32 x 32", mx_cast, (32, 32), None),
    ]


def torchao_casts() -> tuple[Any, ...]:
    """Torchao's cast of one matrix: per tensor, a function of the tile, and MX rounding scales up and down.

    Block scaling has no eager cast for the CPU with power-of-two scales; the nearest is the granularity ``PerBlock`` of
    ``torchao.quantization`` with float32 scales. The scales of MX's FLOOR mode do not compile for the CPU.
    """
    if importlib.util.find_spec("torchao") is None:
        return None, lambda tile: None, None, None
    from torchao.float8.float8_utils import tensor_to_scale, to_fp8_saturated
    from torchao.prototype.mx_formats.mx_tensor import ScaleCalculationMode, to_mx
    from torchao.quantization.quant_primitives import _choose_scale_float8, _quantize_affine_float8

    def tensorwise(x: torch.Tensor) -> Any:
        scale = tensor_to_scale(x, DTYPE)
        return to_fp8_saturated(x.to(torch.float32) * scale, DTYPE), scale.reciprocal()

    def block(tile: tuple[int, int]) -> Cast:
        def cast(x: torch.Tensor) -> Any:
            scale = _choose_scale_float8(x, list(tile), DTYPE)
            return _quantize_affine_float8(x, scale, DTYPE), scale

        return cast

    def mx_up(x: torch.Tensor) -> Any:
        return to_mx(x, DTYPE, 32, ScaleCalculationMode.RCEIL)

    def mx_down(x: torch.Tensor) -> Any:
        return to_mx(x, DTYPE, 32, ScaleCalculationMode.FLOOR)[1]

    return tensorwise, block, mx_up, mx_down


def measure(row: Row, x: torch.Tensor, rounds: int = 25) -> Result:
    """Compile both sides of ``row`` and call them in turn."""
    torch._dynamo.reset()
    sides = [torch.compile(side, fullgraph=True, dynamic=False) for side in (row.ours, row.theirs) if side is not None]
    for side in (*sides, *sides):
        side(x)
    result = sum(t.numel() * t.element_size() for t in tree_leaves(sides[0](x)))
    taken = [[_seconds(side, x) for side in sides] for _ in range(rounds)]
    milliseconds = [statistics.median(column) * 1e3 for column in zip(*taken, strict=True)]
    ratio = statistics.median(pair[0] / pair[1] for pair in taken) if row.theirs is not None else None
    theirs = milliseconds[1] if row.theirs is not None else None
    return Result(milliseconds[0], theirs, ratio, peak_bytes(sides[0], x), result, x.numel())


def peak_bytes(function: Cast, x: torch.Tensor) -> int:
    """The most bytes that one call of ``function`` holds at a time, its result included."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        result = function(x)
    held = peak = 0
    for event in sorted(profile.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    del result
    return peak


def keep_freed_memory() -> None:
    """Let the C library keep what is freed, so that page faults of fresh results do not decide the times."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(-4, 0)  # M_MMAP_MAX: nothing is mapped apart
        mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: nothing is given back


def main() -> int:
    """Print the table; 1 if a limit is exceeded."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--size", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=25)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    keep_freed_memory()
    x = torch.randn(options.size, options.size, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    print(f"torch {torch.__version__}, {options.threads} thread(s), {options.size} x {options.size} bfloat16, compiled")
    if importlib.util.find_spec("torchao") is None:
        print("torchao is not installed: nothing to compare with")
    print("    ms  torchao  ratio  peak/result")
    over = 0
    for row in rows():
        measured = measure(row, x, options.rounds)
        compared = f"{'':7}  {'':5}" if measured.ratio is None else f"{measured.theirs:7.1f}  {measured.ratio:5.2f}"
        verdict = "ok  " if measured.within_limits else "OVER"
        share = measured.peak / measured.result
        print(f"{measured.ours:6.1f}  {compared}  {share:11.2f}  {verdict}  {row.title}", flush=True)
        over |= not measured.within_limits
    return int(over)


def _seconds(function: Cast, x: torch.Tensor) -> float:
    # the processor's time where one thread runs: other work on a busy machine does not count
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    start = clock()
    function(x)
    return clock() - start


def _tensorwise(columnwise: bool) -> Cast:
    quantizer = fte.Float8CurrentScalingQuantizer(dtype=DTYPE, columnwise=columnwise)
    return lambda x: pytree.leaves(quantize_bound(x, BoundQuantizer(quantizer=quantizer))[0])


def _tiled(title: str, cast: Callable[..., Any], tile: tuple[int, int], theirs: Cast | None) -> list[Row]:
    def row(x: torch.Tensor) -> Any:
        return cast(x, DTYPE, tile=tile)

    def both(x: torch.Tensor) -> Any:
        return cast(x, DTYPE, tile=tile), cast(x, DTYPE, tile=tile, transpose=True)

    return _pair(title, row, both, theirs)


def _pair(title: str, row: Cast, both: Cast, theirs: Cast | None) -> list[Row]:
    """The row copy alone, and both copies; torchao's second copy is the cast of the transpose."""
    twice = None if theirs is None else lambda x: (theirs(x), theirs(x.t().contiguous()))
    return [Row(f"{title}, row copy", row, theirs), Row(f"{title}, both copies", both, twice)]


if __name__ == "__main__":
    raise SystemExit(main())
