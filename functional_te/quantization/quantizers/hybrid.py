"""Two quantizers for one tensor: one for each of its copies."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from functional_te._errors import type_error, value_error
from functional_te.quantization.groups import GroupLayout
from functional_te.quantization.quantizer import Cast, Copy, Quantizer

__all__ = ["HybridQuantizer"]


@dataclasses.dataclass(frozen=True, eq=False)
class HybridQuantizer(Quantizer):
    """Forward products in one format, weight-gradient products in another.

    Attributes:
        dtype: ignored; each copy has the type of its own quantizer.
        rowwise_quantizer: makes the rowwise copy. Without state.
        columnwise_quantizer: makes the columnwise copy. Without state.
        columnwise_source: ``"original"``, or ``"rowwise_dequantized"`` to cast what the rowwise copy holds.

    Raises:
        TypeError: one of them is no quantizer.
        ValueError: one of them has state or is hybrid itself, or an unknown source.
    """

    dtype: torch.dtype = torch.float8_e4m3fn
    rowwise_quantizer: Quantizer | None = None
    columnwise_quantizer: Quantizer | None = None
    columnwise_source: str = "original"

    def __post_init__(self) -> None:
        where = "HybridQuantizer"
        for name in ("rowwise_quantizer", "columnwise_quantizer"):
            own = getattr(self, name)
            if not isinstance(own, Quantizer):
                raise type_error(where, name, "a Quantizer", type(own).__name__)
            if own.stateful or isinstance(own, HybridQuantizer):
                raise value_error(where, name, "a plain quantizer without state", type(own).__name__)
        if self.columnwise_source not in ("original", "rowwise_dequantized"):
            wanted = "'original' or 'rowwise_dequantized'"
            raise value_error(where, "columnwise_source", wanted, repr(self.columnwise_source))

    @property
    def transposable(self) -> bool:
        """The copies differ."""
        return False

    @property
    def rotates(self) -> bool:
        """Whether the columnwise quantizer does."""
        return self.of(True).rotates

    @property
    def row_multiple(self) -> int:
        """Also of a rowwise copy that is only made for the columnwise one."""
        if self.columnwise and self.columnwise_source == "rowwise_dequantized" and not self.rowwise:
            return self.with_usage(True, True).row_multiple
        return super().row_multiple

    def of(self, columnwise: bool) -> Quantizer:
        """The quantizer of one of the copies."""
        own = self.columnwise_quantizer if columnwise else self.rowwise_quantizer
        assert own is not None
        return own

    def cast(
        self,
        x: torch.Tensor,
        *,
        scale: torch.Tensor | None = None,
        key: torch.Tensor | None = None,
        groups: GroupLayout | None = None,
    ) -> Cast:
        """Each copy by its own quantizer."""
        del scale, key
        rowwise, source = None, x
        if self.rowwise or self.columnwise_source == "rowwise_dequantized":
            own = self.of(False).with_usage(True, False)
            rowwise = own.cast(x, groups=groups).rowwise
            assert rowwise is not None
            if self.columnwise and self.columnwise_source == "rowwise_dequantized":
                values, factor = own.decode(rowwise, False)
                if factor is not None and groups is not None:
                    factor = groups.per_tile(factor, 1)[:, None]
                # in float32: a compiler may drop a rounding to bfloat16 between two float32 steps
                source = (values if factor is None else values * factor).reshape(x.shape)
        columnwise = None
        if self.columnwise:
            columnwise = self.of(True).with_usage(False, True).cast(source, groups=groups).columnwise
        return Cast(rowwise if self.rowwise else None, columnwise)

    def decode(self, copy: Copy, columnwise: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As its own quantizer does."""
        return self.of(columnwise).decode(copy, columnwise)

    def copy_spec(self, shape: tuple[Any, ...], columnwise: bool) -> Copy:
        """As its own quantizer does."""
        return self.of(columnwise).copy_spec(shape, columnwise)
