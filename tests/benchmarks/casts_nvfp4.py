"""Speed and memory of the NVFP4 casts on the CPU under torch.compile, next to torchao's compiled cast.

``python -m tests.benchmarks.casts_nvfp4`` prints a line for each variant and exits non-zero if a ratio is above its
limit. Both sides run alternately in one process; times are medians. Memory is the peak of what the compiled function
allocates, over the bytes of its result, and what is beyond 1.1 results in bytes per element.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from functional_te.quantization.hadamard import hadamard
from functional_te.quantization.nvfp4 import nvfp4_cast, nvfp4_decode, tensor_factor
from functional_te.quantization.random import make_key, random_bits
from functional_te.quantization.scaling import amax_of
from tests.benchmarks.casts import peak_bytes

SQUARE = (16, 16)


def both(x: torch.Tensor, amax: torch.Tensor, **options: Any) -> tuple[torch.Tensor, ...]:
    """The rowwise and the columnwise copy."""
    return *nvfp4_cast(x, amax, **options), *nvfp4_cast(x, amax, transpose=True, **options)


def hadamard_columns(x: torch.Tensor, key: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
    """The columnwise copy of the transformed tensor."""
    transformed = hadamard(x, dim=0)
    bits = None if key is None else random_bits(key, x.numel()).view(x.shape[1], x.shape[0])
    return nvfp4_cast(transformed, amax_of(transformed), bits=bits, transpose=True)


def torchao_cast() -> Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, ...]]:
    """Torchao's cast with a tensor scale."""
    from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize, per_tensor_amax_to_scale

    def cast(x: torch.Tensor, amax: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return nvfp4_quantize(x, 16, per_tensor_amax_to_scale(amax.reshape(())))

    return cast


def torchao_decode() -> Callable[..., tuple[torch.Tensor]]:
    """Torchao's way back to bfloat16."""
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale

    def decode(data: torch.Tensor, scale: torch.Tensor, amax: torch.Tensor) -> tuple[torch.Tensor]:
        tensor = NVFP4Tensor(data, scale, 16, torch.bfloat16, per_tensor_amax_to_scale(amax.reshape(())))
        return (tensor.dequantize(torch.bfloat16),)

    return decode


def rows(x: torch.Tensor) -> list[tuple[str, Callable[..., Any], tuple[Any, ...], Callable[..., Any] | None]]:
    """Title, function, arguments, and what it is compared with."""
    amax, key = amax_of(x), make_key(0)
    data, scale = nvfp4_cast(x, amax)
    cast = torchao_cast()
    return [
        ("row copy", nvfp4_cast, (x, amax), cast),
        ("both copies", both, (x, amax), lambda x, amax: (*cast(x, amax), *cast(x.t().contiguous(), amax))),
        (
            "dequantize to bfloat16",
            lambda data, scale, amax: ((nvfp4_decode(data, scale) * tensor_factor(amax)).to(torch.bfloat16),),
            (data, scale, amax),
            torchao_decode(),
        ),
        ("column copy", lambda x, amax: nvfp4_cast(x, amax, transpose=True), (x, amax), None),
        ("both copies, tiles of 16 x 16", lambda x, amax: both(x, amax, tile=SQUARE), (x, amax), None),
        (
            "row copy, stochastic",
            lambda x, amax, key: nvfp4_cast(x, amax, bits=random_bits(key, x.numel()).view(x.shape)),
            (x, amax, key),
            None,
        ),
        ("column copy, Hadamard", hadamard_columns, (x,), None),
        ("column copy, Hadamard, stochastic", hadamard_columns, (x, key), None),
        (
            "row copy, four over six",
            lambda x, amax: nvfp4_cast(x, amax, e4m3_max=256.0, four_over_six="MAE"),
            (x, amax),
            None,
        ),
        ("random bits, one per element", lambda key: (random_bits(key, x.numel()),), (key,), None),
    ]


def times(functions: list[Callable[[], Any]], rounds: int) -> list[list[float]]:
    """Seconds of ``rounds`` alternating calls of each function."""
    taken: list[list[float]] = [[] for _ in functions]
    for _ in range(2):
        for function in functions:
            function()
    for _ in range(rounds):
        for function, seconds in zip(functions, taken, strict=True):
            start = time.perf_counter()
            function()
            seconds.append(time.perf_counter() - start)
    return taken


def main() -> int:
    """Print the table; 1 if a ratio to torchao is above 1."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--size", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    x = torch.randn(options.size, options.size, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    print(f"torch {torch.__version__}, {options.threads} thread(s), {options.size} x {options.size} bfloat16, compiled")
    print("   ms  torchao  ratio          peak/result  scratch B/element")
    worst = 0
    for title, function, arguments, reference in rows(x):
        sides = [torch.compile(side, fullgraph=True, dynamic=False) for side in (function, reference) if side]
        calls = [functools.partial(side, *arguments) for side in sides]
        taken = times(calls, options.rounds)
        ms = [statistics.median(seconds) * 1e3 for seconds in taken]
        result = sum(t.numel() * t.element_size() for t in calls[0]())
        peak = peak_bytes(lambda _, call=calls[0]: call(), x)
        compared = f"{'':7}  {'':5}          "
        if reference is not None:
            ratio = statistics.median(ours / theirs for ours, theirs in zip(*taken, strict=True))
            worst |= ratio > 1.0
            compared = f"{ms[1]:7.1f}  {ratio:5.2f}  {'ok' if ratio <= 1.0 else 'OVER':8}"
        print(
            f"{ms[0]:5.1f}  {compared} {peak / result:10.2f}  {max(peak - 1.1 * result, 0) / x.numel():17.2f}  {title}",
            flush=True,
        )
    return int(worst)


if __name__ == "__main__":
    raise SystemExit(main())
