"""Rows of a matrix in groups: where they are, and where they go when every group starts at a whole block.

The sizes of the groups are data: nothing here looks at them on the host, so the shapes depend on the number of rows and
groups only. With ``n`` groups and blocks of ``m`` rows, ``T`` rows fit ``m * floor((T + n (m - 1)) / m)`` padded ones.
Sizes that do not fit are made to: negative ones count as 0, and groups end with the last row. Rows after the last group
belong to none.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

__all__ = ["GroupLayout", "Groups", "padded_rows"]


def padded_rows(rows: Any, groups: int, multiple: int) -> Any:
    """How many rows hold ``rows`` in groups that start at multiples of ``multiple``, whatever the sizes."""
    return rows if multiple == 1 else multiple * ((rows + groups * (multiple - 1)) // multiple)


class GroupLayout(NamedTuple):
    """``T`` rows in ``G`` groups laid out in ``P`` padded rows. All index tensors are int64.

    Attributes:
        sizes: rows of each group, ``[G]``.
        ends: end of each group among the padded rows, ``[G]``.
        group: group of each padded row, ``[P]``; the last group's for rows that belong to none.
        row: number of each padded row in its group, ``[P]``.
        real: whether a padded row holds a row of its group, bool ``[P]``.
        held: whether a padded row lies within its group: real ones, and those that fill its last block, bool ``[P]``.
        source: which row a padded row holds, ``[P]``.
        place: which padded row holds a row, ``[T]``.
        used: whether a row belongs to a group, bool ``[T]``.
        multiple: what groups start at multiples of; 1 leaves rows as they are.
    """

    sizes: torch.Tensor
    ends: torch.Tensor
    group: torch.Tensor
    row: torch.Tensor
    real: torch.Tensor
    held: torch.Tensor
    source: torch.Tensor
    place: torch.Tensor
    used: torch.Tensor
    multiple: int

    def pad(self, x: torch.Tensor) -> torch.Tensor:
        """``x [T, K]`` as padded rows ``[P, K]``, with zeros between the groups; ``x`` itself if nothing is padded."""
        if self.multiple == 1:
            return x
        if x.shape[0] == 0:
            return x.new_zeros(self.group.shape[0], x.shape[1])
        return torch.where(self.real[:, None], x[self.source], 0.0)

    def unpad(self, x: torch.Tensor) -> torch.Tensor:
        """Undo :meth:`pad`; rows that belong to no group hold anything."""
        return x if self.multiple == 1 else x[self.place]

    def amax(self, x: torch.Tensor) -> torch.Tensor:
        """Largest magnitude of each group of ``x [P, K]``, float32 ``[G]``; NaN if it holds one, 0 if it is empty."""
        groups = self.sizes.shape[0]
        if x.numel() == 0:
            return torch.zeros(groups, dtype=torch.float32, device=x.device)
        rows = x.abs().amax(-1).to(torch.float32)
        # a rotation may have moved values to rows that fill a block
        own = (torch.arange(groups, device=x.device)[:, None] == self.group) & self.held
        return torch.where(own, rows, 0.0).amax(1)

    def per_tile(self, values: torch.Tensor, height: int) -> torch.Tensor:
        """``values [G]`` of the group that each run of ``height`` padded rows belongs to: ``[P / height]``."""
        return values[self.group[::height]]


class Groups:
    """The groups of a matrix with ``rows`` rows.

    Args:
        splits: sizes, ``[G]``, of any integer dtype and on any device.
        rows: number of rows.
        device: where the layouts live.
    """

    def __init__(self, splits: torch.Tensor, rows: Any, device: torch.device) -> None:
        self.count = splits.shape[0]
        self.rows = rows
        self._splits = splits.to(device=device, dtype=torch.int64)
        self._layouts: dict[int, GroupLayout] = {}

    def layout(self, multiple: int = 1) -> GroupLayout:
        """Where rows go if every group starts at a multiple of ``multiple``."""
        if multiple not in self._layouts:
            self._layouts[multiple] = self._compact() if multiple == 1 else self._padded(multiple)
        return self._layouts[multiple]

    def _compact(self) -> GroupLayout:
        ends = self._splits.clamp(min=0).cumsum(0).clamp(max=self.rows)
        starts = torch.cat((torch.zeros_like(ends[:1]), ends[:-1]))
        rows = torch.arange(self.rows, device=ends.device)
        group = torch.searchsorted(ends, rows, right=True)
        used = group < self.count
        group = group.clamp(max=self.count - 1)
        return GroupLayout(ends - starts, ends, group, rows - starts[group], used, used, rows, rows, used, 1)

    def _padded(self, multiple: int) -> GroupLayout:
        compact = self.layout(1)
        sizes, starts = compact.sizes, compact.ends - compact.sizes
        whole = (sizes + (multiple - 1)) // multiple * multiple
        ends = whole.cumsum(0)
        padded_starts = ends - whole
        place = compact.row + padded_starts[compact.group]
        padded = torch.arange(padded_rows(self.rows, self.count, multiple), device=ends.device)
        group = torch.searchsorted(ends, padded, right=True).clamp(max=self.count - 1)
        row = padded - padded_starts[group]
        source = (starts[group] + row).clamp(max=self.rows - 1)
        real, held = row < sizes[group], padded < ends[-1]
        return GroupLayout(sizes, ends, group, row, real, held, source, place, compact.used, multiple)
