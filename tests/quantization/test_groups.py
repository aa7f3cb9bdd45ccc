"""Rows in groups and where they go, against a loop over the groups."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from functional_te.quantization.groups import Groups, padded_rows
from tests.helpers import assert_same, uniform

CPU = torch.device("cpu")


def padded_by_hand(x, sizes, multiple, rows):
    """Padded rows and their groups, -1 for those after the last group."""
    blocks, owners, start = [], [], 0
    for group, size in enumerate(sizes):
        whole = -(-size // multiple) * multiple
        blocks.append(torch.cat((x[start : start + size], x.new_zeros(whole - size, x.shape[1]))))
        owners += [group] * whole
        start += size
    rest = rows - len(owners)
    assert rest >= 0
    return torch.cat((*blocks, x.new_zeros(rest, x.shape[1]))), owners + [-1] * rest


@given(sizes=st.lists(st.integers(0, 40), min_size=1, max_size=5), multiple=st.sampled_from((1, 16, 32, 128)))
def test_layout(sizes, multiple) -> None:
    x = uniform((sum(sizes), 3))
    layout = Groups(torch.tensor(sizes), len(x), CPU).layout(multiple)
    rows = padded_rows(len(x), len(sizes), multiple)
    want, owners = padded_by_hand(x, sizes, multiple, rows)
    padded = layout.pad(x)
    assert padded.shape == (rows, 3)
    assert_same(padded, want)
    assert_same(layout.unpad(padded), x)
    assert layout.sizes.tolist() == sizes
    assert layout.used.all()
    assert layout.held.tolist() == [owner >= 0 for owner in owners]
    assert [group for group, owner in zip(layout.group.tolist(), owners, strict=True) if owner >= 0] == [
        owner for owner in owners if owner >= 0
    ]
    assert_same(layout.real, want.any(1))
    parts = x.split(sizes)
    assert layout.amax(padded).tolist() == [part.abs().max().item() if len(part) else 0.0 for part in parts]


@pytest.mark.parametrize("multiple", [1, 16])
def test_amax_is_nan_for_the_group_that_holds_one(multiple) -> None:
    x = uniform((9, 4))
    x[5, 2] = float("nan")
    layout = Groups(torch.tensor([4, 0, 3, 2]), 9, CPU).layout(multiple)
    assert layout.amax(layout.pad(x)).isnan().tolist() == [False, False, True, False]


@pytest.mark.parametrize(
    ("sizes", "want"),
    [((4, 4, 4), (4, 4, 2)), ((20, 1, 1), (10, 0, 0)), ((-5, 3, 2), (0, 3, 2)), ((0, 0, 0), (0, 0, 0))],
    ids=str,
)
@pytest.mark.parametrize("multiple", [1, 32])
def test_sizes_that_do_not_fit(sizes, want, multiple) -> None:
    """Every index stays in bounds."""
    x = uniform((10, 2))
    layout = Groups(torch.tensor(sizes), 10, CPU).layout(multiple)
    assert layout.sizes.tolist() == list(want)
    assert layout.used.tolist() == [row < sum(want) for row in range(10)]
    padded = layout.pad(x)
    assert_same(layout.unpad(padded)[: sum(want)], x[: sum(want)])
    assert layout.place.max() < len(padded)
