"""Joining matrices against ``torch.cat``, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.triton.conftest import DEVICE

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*")


def kernel(*args: Any) -> torch.Tensor:
    from functional_te.kernels.triton.concatenate import concatenate

    return concatenate(*args)


@st.composite
def matrices(draw: Any) -> tuple[list[torch.Tensor], int]:
    """Two to seven matrices that differ along one axis, some transposed or with gaps between rows; and the axis."""
    dim = draw(st.integers(0, 1))
    common = draw(st.sampled_from([1, 2, 31, 40, 300]))
    own = draw(st.lists(st.sampled_from([0, 1, 7, 32, 33, 256, 270]), min_size=2, max_size=7))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.uint8]))
    parts = []
    for size in own:
        rows, cols = (size, common) if dim == 0 else (common, size)
        layout = draw(st.sampled_from(["contiguous", "transposed", "gaps"]))
        data = torch.randint(0, 200, (rows, 2 * cols), dtype=dtype, device=DEVICE)
        parts.append(data[:, cols:] if layout == "gaps" else data[:, :cols].contiguous())
        if layout == "transposed":
            parts[-1] = parts[-1].t().contiguous().t()
    return parts, dim


@settings(max_examples=60 if DEVICE == "cpu" else 12, deadline=None)  # a GPU's kernel is compiled for most of them
@given(matrices())
def test_any_sizes_and_layouts(case: tuple[list[torch.Tensor], int]) -> None:
    parts, dim = case
    made = kernel(parts, dim)
    assert made.is_contiguous()
    assert made.dtype is parts[0].dtype
    assert torch.equal(made, torch.cat(parts, dim))


def test_nothing_between_and_around_is_written(device: str) -> None:
    parts = [torch.full((33, 3), 1.0, device=device), torch.full((33, 257), 2.0, device=device)]
    for dim, own in ((1, parts), (0, [part.t() for part in parts])):
        assert torch.equal(kernel(own, dim), torch.cat(own, dim))
