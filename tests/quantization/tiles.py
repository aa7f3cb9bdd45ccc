"""What the tests of block-scaled casts share: data, an element oracle by ml_dtypes, and compilation."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import strategies as st

FORMATS = {
    torch.float8_e4m3fn: (ml_dtypes.float8_e4m3fn, 448.0),
    torch.float8_e5m2: (ml_dtypes.float8_e5m2, 57344.0),
}
every_format = pytest.mark.parametrize("dtype", FORMATS, ids=str)


def all_bf16() -> torch.Tensor:
    """Every bit pattern once."""
    return torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def numpy_cast(values: np.ndarray, factor: Any, dtype: torch.dtype) -> np.ndarray:
    """Bytes of ``values * factor`` in float32, clamped, rounded to nearest even by ml_dtypes."""
    target, limit = FORMATS[dtype]
    with np.errstate(all="ignore"):
        scaled = values.astype(np.float32) * factor
        assert scaled.dtype == np.float32
        return np.clip(scaled, -limit, limit).astype(target).view(np.uint8)


def assert_bits(one: Any, other: Any) -> None:
    """Equal shapes, dtypes and bits; any NaN equals any NaN. Bytes may stand for an FP8 tensor."""
    one, other = (torch.from_numpy(np.ascontiguousarray(x)) if isinstance(x, np.ndarray) else x for x in (one, other))
    assert one.shape == other.shape
    if one.dtype is not other.dtype:
        assert other.dtype is torch.uint8
        other = other.view(one.dtype)
    if one.dtype in FORMATS:
        both_nan = one.float().isnan() & other.float().isnan()
        one, other = one.view(torch.uint8), other.contiguous().view(torch.uint8)
    else:
        both_nan = one.isnan() & other.isnan() if one.is_floating_point() else torch.zeros_like(one, dtype=torch.bool)
    assert ((one == other) | both_nan).all()


def data_cases(rows: int, cols: int) -> dict[str, torch.Tensor]:
    """Float32 matrices of the kinds that scaling must get right."""
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(rows, cols, generator=generator)
    one_hot = torch.zeros(rows, cols)
    one_hot[torch.arange(rows), torch.arange(rows) * 7 % max(cols, 1)] = torch.randn(rows, generator=generator)
    steps = torch.linspace(-120, 120, rows)[:, None].round()
    infinite, missing = normal.clone(), normal.clone()
    infinite[::3, ::41], infinite[::5, ::37] = math.inf, -math.inf
    missing[::3, ::41] = math.nan
    return {
        "random": normal,
        "one-hot": one_hot,
        "zeros": torch.zeros(rows, cols),
        "denormal": normal * torch.ldexp(torch.ones(rows, 1), -torch.arange(rows)[:, None] % 24 - 115),
        "tiny": normal * 2.0**-132,
        "huge": normal * 2.0**124,
        "spread": normal * torch.exp2(steps),
        "inf": infinite,
        "nan": missing,
    }


EDGES = {32: (1, 2, 31, 32, 33, 63, 65), 128: (1, 31, 127, 128, 129, 257)}


@st.composite
def matrices(draw: Any, edge: int) -> torch.Tensor:
    """Matrices of every dtype and stride whose sizes are around multiples of ``edge``, now and then with inf or NaN."""
    rows, cols = draw(st.sampled_from(EDGES[edge])), draw(st.sampled_from(EDGES[edge]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    x = torch.randn(rows, 2 * cols, generator=generator) * torch.exp2(
        torch.randint(-30, 15, (rows, 1), generator=generator).float()
    )
    x = x.to(draw(st.sampled_from((torch.float32, torch.float16, torch.bfloat16))))
    special = draw(st.sampled_from((None, None, math.inf, -math.inf, math.nan, 0.0)))
    if special is not None:
        x[rows // 2, cols // 3] = special
    layout = draw(st.sampled_from(("contiguous", "every other", "transposed", "expanded")))
    if layout == "every other":
        return x[:, ::2]
    if layout == "transposed":
        return x[:, :cols].t().contiguous().t()
    if layout == "expanded":
        return x[:1, :cols].expand(rows, cols)
    return x[:, :cols].contiguous()


def mixed(rows: int, cols: int) -> torch.Tensor:
    """Rows of every kind of data in turn."""
    cases = list(data_cases(rows, cols).values())
    return torch.cat(cases)[:: len(cases)].bfloat16()


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """``function`` compiled by Inductor into one graph."""
    return torch.compile(function, fullgraph=True, **options)


def graphs_of(function: Callable[[torch.Tensor], Sequence[torch.Tensor]], cases: Sequence[torch.Tensor]) -> int:
    """How many graphs ``function`` takes with a dynamic number of rows; compared with eager bit for bit."""
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("inductor")
    traced = torch.compile(function, fullgraph=True, backend=counter)
    for x in cases:
        torch._dynamo.mark_dynamic(x, 0)
        for one, other in zip(traced(x), function(x), strict=True):
            assert_bits(one, other)
    return counter.frame_count
