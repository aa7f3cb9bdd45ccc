"""Products of FP8 data on a GPU: block scaling, mixes of formats, accumulation, groups, compiled, in CUDA graphs."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import functional_te as fte
from functional_te.quantization.cast import quantize_bound
from functional_te.quantization.groups import Groups
from functional_te.quantization.tensor import BoundQuantizer, QuantizedTensor

pytest.importorskip("triton")

from functional_te.kernels import reference
from functional_te.kernels.backend import FAST_ACCUMULATION
from functional_te.kernels.triton import compat, gemm, grouped

# Inductor warns that float32 products could run in TF32
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch.*")

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
CURRENT = fte.Float8CurrentScalingQuantizer(dtype=E4M3, columnwise=True)
GRADIENT = fte.Float8CurrentScalingQuantizer(dtype=E5M2, columnwise=True)
ROWS = fte.Float8BlockQuantizer(dtype=E4M3, columnwise=True, block_scaling_dim=1, power_2_scale=False)
TILES = fte.Float8BlockQuantizer(dtype=E4M3, columnwise=True, power_2_scale=False)
ROWS_E5M2 = fte.Float8BlockQuantizer(dtype=E5M2, columnwise=True, block_scaling_dim=1)
PAIRS = {
    "tensor": (CURRENT, CURRENT),
    "tensor-e5m2": (GRADIENT, CURRENT),
    "rows-tiles": (ROWS, TILES),
    "tiles-rows": (TILES, ROWS),
    "rows-rows": (ROWS, ROWS),
    "rows-e5m2-tiles": (ROWS_E5M2, TILES),
    "rows-e5m2-rows": (ROWS_E5M2, ROWS),
    "tiles-tiles": (TILES, TILES),
    "tensor-both-e5m2": (GRADIENT, GRADIENT),
}
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
KINDS = ("nt", "nn", "tn")
# rows, reduced, columns
SIZES = (
    (256, 512, 128),
    (384, 640, 272),
    (128, 128, 128),
    (99, 144, 47),
    (1, 700, 1),
    (300, 1, 129),
    (1024, 4096, 512),
)


def cast(x: torch.Tensor, quantizer: Any, groups: Any = None) -> QuantizedTensor:
    return quantize_bound(x, BoundQuantizer(quantizer=quantizer), groups=groups)[0]


def operands(kind: str, sizes: tuple[int, int, int], one: Any, other: Any) -> Any:
    """Of values whose magnitude differs from block to block."""
    rows, reduced, columns = sizes
    generator = torch.Generator(device="cuda").manual_seed(sum(sizes))

    def values(height: int) -> torch.Tensor:
        x = torch.randn(height, reduced, generator=generator, device="cuda")
        down, across = (torch.arange(size, device="cuda") // 64 % 5 for size in x.shape)
        return x * torch.exp2(down[:, None] - across[None, :] + 0.0)

    left, right = values(rows), values(columns)
    a, b = left.t() if kind == "tn" else left, right if kind == "nt" else right.t()
    return cast(a.contiguous(), one), cast(b.contiguous(), other)


def exact(kind: str, a: Any, b: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The float64 product, and that of the magnitudes."""
    left, right = (
        x.dequantize(torch.float32, columnwise=wise).double() for x, wise in ((a, kind == "tn"), (b, kind != "nt"))
    )
    left, right = left.t() if kind == "tn" else left, right.t() if kind == "nt" else right
    return left @ right, left.abs() @ right.abs()


def relative_error(kind: str, y: torch.Tensor, a: Any, b: Any) -> float:
    """The largest error over the product of the magnitudes, besides one rounding of the result."""
    wanted, size = exact(kind, a, b)
    rounding = torch.finfo(y.dtype).eps * (wanted.abs() + torch.finfo(y.dtype).tiny)
    return float((((y.double() - wanted).abs() - rounding) / size.clamp(min=1e-30)).max())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pair", PAIRS)
def test_products(pair: str, kind: str, dtype: str, record_property: Any) -> None:
    """A tensor core keeps about 13 bits below the largest of the products of one instruction, or of the fast sum."""
    errors = []
    for sizes in SIZES:
        a, b = operands(kind, sizes, *PAIRS[pair])
        y = getattr(gemm, f"gemm_{kind}")(a, b, dtype=DTYPES[dtype])
        assert y.dtype is DTYPES[dtype]
        assert y.shape == (sizes[0], sizes[2])
        assert y.is_contiguous()
        errors.append(relative_error(kind, y, a, b))
    record_property("largest error of a sum", f"{max(errors):.1e}")
    assert max(errors) < (3e-3 if FAST_ACCUMULATION[("nt", "nn", "tn").index(kind)] else 1e-3), errors


@pytest.mark.parametrize("pair", PAIRS)
def test_bias_add_and_factor(pair: str) -> None:
    for sizes in ((64, 256, 48), (65, 200, 41)):
        a, b = operands("nt", sizes, *PAIRS[pair])
        bias, add = torch.randn(sizes[2], device="cuda"), torch.randn(sizes[0], sizes[2], device="cuda")
        for dtype, own in itertools.product(DTYPES.values(), repeat=2):
            for extra in (
                {"bias": bias.to(own)},
                {"bias": bias.to(own), "add": add.to(own)},
                {"add": add.to(own)},
                {"alpha": 0.3},
            ):
                y = gemm.gemm_nt(a, b, dtype=dtype, **extra)
                wanted = reference.gemm_nt(a, b, dtype=dtype, **extra)
                assert y.dtype is wanted.dtype
                coarse = max(torch.finfo(dtype).eps, torch.finfo(own).eps)
                near = 2e-3 * float(exact("nt", a, b)[1].max()) + 4 * coarse
                torch.testing.assert_close(y.double(), wanted.double(), rtol=2 * coarse, atol=near)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pair", PAIRS)
def test_same_bits_twice(pair: str, kind: str) -> None:
    a, b = operands(kind, (1024, 2048, 512), *PAIRS[pair])
    first, second = (getattr(gemm, f"gemm_{kind}")(a, b, dtype=torch.bfloat16) for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize("pair", ["rows-tiles", "tiles-rows", "rows-rows", "tensor"])
def test_scaled_kernels_run(pair: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference, which is as right, does not do it."""
    for name in ("gemm_nt", "gemm_nn", "gemm_tn"):
        monkeypatch.setattr(reference, name, None)
    for kind, sizes in itertools.product(KINDS, SIZES):
        getattr(gemm, f"gemm_{kind}")(*operands(kind, sizes, *PAIRS[pair]), dtype=torch.bfloat16)


def test_zero_sizes() -> None:
    for pair, kind, sizes in itertools.product(PAIRS, KINDS, itertools.product((0, 128), repeat=3)):
        if 0 in sizes and pair != "tensor-both-e5m2":
            one, other = PAIRS[pair]
            rows, reduced, columns = sizes
            a = torch.ones((reduced, rows) if kind == "tn" else (rows, reduced), device="cuda")
            b = torch.ones((columns, reduced) if kind == "nt" else (reduced, columns), device="cuda")
            y = getattr(gemm, f"gemm_{kind}")(cast(a, one), cast(b, other), dtype=torch.bfloat16)
            assert y.shape == (rows, columns)
            assert y.abs().sum() == 0


def test_devices() -> None:
    a, b = operands("nt", (16, 16, 16), CURRENT, CURRENT)
    with pytest.raises(ValueError, match="gemm_nt: b: expected a tensor on cuda:0, where a is, got cpu"):
        gemm.gemm_nt(a, b.to("cpu"), dtype=torch.float32)
    with pytest.raises(ValueError, match="gemm_tn: a: expected a tensor on a CUDA device, got cpu"):
        gemm.gemm_tn(a.to("cpu"), b, dtype=torch.float32)
    groups = Groups(torch.tensor([8, 8]), 16, torch.device("cuda"))
    with pytest.raises(ValueError, match=r"grouped_nt: weights\[1\]: expected a tensor on cuda:0"):
        grouped.grouped_nt(a, (b, b.to("cpu")), groups, dtype=torch.bfloat16)


_library = torch.library.Library("fte_test_gemm", "FRAGMENT")
_library.define("multiply(str pair, str kind, Tensor[] a, Tensor[] b) -> Tensor")


def _multiply(pair: str, kind: str, a: list[torch.Tensor], b: list[torch.Tensor]) -> torch.Tensor:
    one, other = (
        QuantizedTensor(
            rowwise_data=own[0],
            rowwise_scale_inv=own[1],
            columnwise_data=own[2],
            columnwise_scale_inv=own[3],
            dtype=torch.bfloat16,
            quantizer=quantizer,
        )
        for own, quantizer in zip((a, b), PAIRS[pair], strict=True)
    )
    return getattr(gemm, f"gemm_{kind}")(one, other, dtype=torch.bfloat16)


_library.impl("multiply", _multiply, "CompositeImplicitAutograd")


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pair", ["tensor", "tensor-e5m2", "rows-tiles", "rows-rows", "tiles-tiles"])
def test_compiled(pair: str, kind: str, dynamic: bool) -> None:
    """The bits of the eager call; one graph for all numbers of tokens."""

    def run(a: list[torch.Tensor], b: list[torch.Tensor]) -> torch.Tensor:
        return torch.ops.fte_test_gemm.multiply(pair, kind, a, b)

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(run, backend=counter, fullgraph=True)
    for tokens in (256, 272, 301) if dynamic else (256,):
        sizes = (512, tokens, 256) if kind == "tn" else (tokens, 512, 256)
        pair_of = operands(kind, sizes, *PAIRS[pair])
        flat = [[x.rowwise_data, x.rowwise_scale_inv, x.columnwise_data, x.columnwise_scale_inv] for x in pair_of]
        if dynamic:
            for own in flat if kind == "tn" else flat[:1]:
                torch._dynamo.mark_dynamic(own[0], 0)
                torch._dynamo.mark_dynamic(own[2], 1)
                for scale, place in ((own[1], 0), (own[3], 1)):
                    if scale.dim() == 2 and scale.shape[place] > 1:
                        torch._dynamo.maybe_mark_dynamic(scale, place)
        y, wanted = compiled(*flat), run(*flat)
        if pair == "tiles-tiles":
            torch.testing.assert_close(y, wanted, rtol=1e-2, atol=1e-2 * float(wanted.abs().max()))
        else:
            assert torch.equal(y, wanted)
    assert counter.frame_count == 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pair", ["tensor", "rows-rows", "rows-tiles"])
def test_cuda_graph(pair: str, kind: str) -> None:
    a, b = operands(kind, (256, 300, 128), *PAIRS[pair])
    run = getattr(gemm, f"gemm_{kind}")
    wanted = run(a, b, dtype=torch.bfloat16)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run(a, b, dtype=torch.bfloat16)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = run(a, b, dtype=torch.bfloat16)
    graph.replay()
    assert torch.equal(y, wanted)


SPLITS = ((40, 0, 88, 64), (0, 0, 192, 0), (64, 64, 64, 0), (1, 2, 3, 100), (0, 0, 0, 0))


@pytest.mark.parametrize("dtype", ["bf16", "f32"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pair", ["tensor", "tensor-e5m2", "dense"])
def test_groups(pair: str, kind: str, dtype: str, record_property: Any) -> None:
    """As the reference, without synchronization, and with NaN in rows of no group left alone."""
    one, other = PAIRS.get(pair, (None, None))
    generator = torch.Generator(device="cuda").manual_seed(3)
    largest = 0.0
    for splits in SPLITS:
        groups = Groups(torch.tensor(splits, device="cuda"), 192, torch.device("cuda"))
        x, dy = (torch.randn(192, size, device="cuda", generator=generator) for size in (64, 96))
        weights: list[Any] = list(torch.randn(4, 96, 64, device="cuda", generator=generator).unbind(0))
        if one is not None:
            layout = groups.layout(one.row_multiple)
            x, dy = cast(x, CURRENT, layout), cast(dy, one, layout)
            weights = [cast(weight, other) for weight in weights]
        args: Any = {"nt": (x, tuple(weights)), "nn": (dy, tuple(weights)), "tn": (dy, x)}[kind]
        run = getattr(grouped, f"grouped_{kind}")
        run(*args, groups, dtype=DTYPES[dtype])
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            y = run(*args, groups, dtype=DTYPES[dtype])
        finally:
            torch.cuda.set_sync_debug_mode("default")
        wanted = getattr(reference, f"grouped_{kind}")(*args, groups, dtype=DTYPES[dtype])
        assert y.dtype is wanted.dtype
        assert y.shape == wanted.shape
        largest = max(largest, float((y - wanted).norm() / wanted.norm().clamp(min=1e-30)))
        torch.testing.assert_close(y.double(), wanted.double(), rtol=8e-3, atol=2e-2)
    record_property("relative error", f"{largest:.1e}")


def test_grouped_kernels_run(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("grouped_nt", "grouped_nn", "grouped_tn"):
        monkeypatch.setattr(reference, name, None)
    groups = Groups(torch.tensor(SPLITS[0], device="cuda"), 192, torch.device("cuda"))
    x, dy = cast(torch.randn(192, 64, device="cuda"), CURRENT, groups.layout()), None
    dy = cast(torch.randn(192, 96, device="cuda"), GRADIENT, groups.layout())
    weights = tuple(cast(torch.randn(96, 64, device="cuda"), CURRENT) for _ in range(4))
    grouped.grouped_nt(x, weights, groups, dtype=torch.bfloat16)
    grouped.grouped_nn(dy, weights, groups, dtype=torch.bfloat16)
    grouped.grouped_tn(dy, x, groups, dtype=torch.bfloat16)


def test_support() -> None:
    """What this GPU has; an H100 or H200 has all."""
    device = torch.device("cuda", 0)
    if torch.cuda.get_device_capability(device) == (9, 0):
        assert compat.can_scale(device)
        assert compat.can_scale_groups(device)
        assert compat.can_scale_blocks(device)
