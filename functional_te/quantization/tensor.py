"""Quantized data as a pytree, and a quantizer bound to the tensors it needs.

The definition of the two copies is in :mod:`functional_te.quantization.quantizer`.
"""

from __future__ import annotations

from typing import Any

import torch

from functional_te import pytree
from functional_te._errors import type_error, value_error
from functional_te.quantization.hadamard import hadamard_inverse
from functional_te.quantization.quantizer import Copy, Quantizer, rows_of

__all__ = ["BoundQuantizer", "CachedWeight", "QuantizedTensor"]


@pytree.node
class QuantizedTensor:
    """A tensor in low precision: ``value = data * scale_inv`` (times a factor of ``amax`` in NVFP4).

    Scales have the logical layout of blocks, without the padding or swizzling of a GPU kernel: ``[1]`` per tensor, else
    ``[ceil(R / tile rows), ceil(C / tile columns)]`` for a copy looked at as a matrix ``[R, C]``.

    Attributes:
        rowwise_data: data of the logical shape (4-bit data: uint8, two along the last dimension), or None.
        rowwise_scale_inv: dequantization factors (float32; uint8 E8M0 in MXFP8; E4M3 in NVFP4), or None.
        rowwise_amax: float32 amax ``[1]`` or per row ``[M]`` in NVFP4, else None.
        columnwise_data: the transposed copy ``[K, M]``, leading dimensions flattened, or None.
        columnwise_scale_inv: its factors, or None.
        columnwise_amax: its amax ``[1]``, or None.
        dtype: the nominal (high precision) dtype, static.
        quantizer: the value that made it, static.
    """

    rowwise_data: torch.Tensor | None = None
    rowwise_scale_inv: torch.Tensor | None = None
    rowwise_amax: torch.Tensor | None = None
    columnwise_data: torch.Tensor | None = None
    columnwise_scale_inv: torch.Tensor | None = None
    columnwise_amax: torch.Tensor | None = None
    dtype: torch.dtype = pytree.static(default=torch.float32)
    quantizer: Quantizer = pytree.static(default=None)

    @property
    def data(self) -> torch.Tensor:
        """The rowwise data, or a rowwise view of the columnwise data."""
        if self.rowwise_data is not None:
            return self.rowwise_data
        assert self.columnwise_data is not None
        return self.columnwise_data.t()

    @property
    def scale_inv(self) -> torch.Tensor:
        """The factors of the rowwise copy, else of the columnwise copy."""
        found = self.rowwise_scale_inv if self.rowwise_data is not None else self.columnwise_scale_inv
        assert found is not None
        return found

    @property
    def shape(self) -> tuple[Any, ...]:
        """The logical shape; without a rowwise copy ``(M, K)``, with ``M`` as padded by the format."""
        if self.rowwise_data is not None:
            return _unpacked(tuple(self.rowwise_data.shape), self.quantizer.of(False).packing)
        assert self.columnwise_data is not None
        features, tokens = _unpacked(tuple(self.columnwise_data.shape), self.quantizer.of(True).packing)
        return tokens, features

    @property
    def device(self) -> torch.device:
        """Where the data live."""
        data = self.columnwise_data if self.rowwise_data is None else self.rowwise_data
        assert data is not None
        return data.device

    @property
    def nbytes(self) -> int:
        """Bytes of all copies and scales."""
        return sum(tensor.nbytes for tensor in pytree.leaves(self))

    def dim(self) -> int:
        """Number of logical dimensions."""
        return len(self.shape)

    def copy(self, columnwise: bool) -> Copy | None:
        """One of the copies, or None if it is not there."""
        if columnwise:
            if self.columnwise_data is None:
                return None
            return Copy(self.columnwise_data, self.columnwise_scale_inv, self.columnwise_amax)
        if self.rowwise_data is None:
            return None
        return Copy(self.rowwise_data, self.rowwise_scale_inv, self.rowwise_amax)

    def serves(self, columnwise: bool) -> bool:
        """Whether products in that direction can read this tensor."""
        return self.copy(columnwise) is not None or (
            self.quantizer.transposable and self.copy(not columnwise) is not None
        )

    def decoded(self, columnwise: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Float32 values for products in one direction, and the factor they still need (or None).

        Args:
            columnwise: False for a matrix ``[M, K]``, True for ``[K, M]``. A copy that is not there is read from the
                other one where both hold the same values.

        Raises:
            ValueError: the copy is not there, and the format cannot make it from the other one.
        """
        own = self.copy(columnwise)
        if own is not None:
            return self.quantizer.decode(own, columnwise)
        other = self.copy(not columnwise)
        if other is None or not self.quantizer.transposable:
            wanted = f"a {'columnwise' if columnwise else 'rowwise'} copy"
            raise value_error("QuantizedTensor", "copies", wanted, f"none, from {self.quantizer!r}")
        values, factor = self.quantizer.decode(other, not columnwise)
        return values.t(), factor

    def dequantize(self, dtype: torch.dtype | None = None, *, columnwise: bool = False) -> torch.Tensor:
        """High precision values, computed in float32 and rounded once to ``dtype`` (default: the nominal dtype).

        A columnwise copy of transformed values is transformed back.

        Args:
            dtype: dtype of the result.
            columnwise: which copy to read, if both are there; the result has the logical shape and layout either way.
        """
        if self.rowwise_data is None or self.columnwise_data is None:
            columnwise = self.rowwise_data is None
        own = self.copy(columnwise)
        assert own is not None
        values, factor = self.quantizer.decode(own, columnwise)
        if columnwise:
            values = (hadamard_inverse(values) if self.quantizer.rotates else values).t()
        if factor is not None:
            values = values * factor
        shape = self.shape
        if columnwise and values.shape[0] != rows_of(shape):
            values = values[: rows_of(shape)]
        return values.to(self.dtype if dtype is None else dtype).reshape(shape)

    def with_usage(self, *, rowwise: bool, columnwise: bool) -> QuantizedTensor:
        """The tensor with these copies only; nothing is computed, and the quantizer stays.

        Raises:
            ValueError: a copy that is not there, or none at all; see :meth:`requantize`.
        """
        if not (rowwise or columnwise):
            raise value_error("QuantizedTensor", "with_usage", "at least one copy", "none")
        for wanted, name, data in (
            (rowwise, "rowwise", self.rowwise_data),
            (columnwise, "columnwise", self.columnwise_data),
        ):
            if wanted and data is None:
                raise value_error("QuantizedTensor", name, "a copy that is there", "none", "See requantize().")
        changes: dict[str, Any] = {} if rowwise else dict.fromkeys(_ROWWISE)
        changes |= {} if columnwise else dict.fromkeys(_COLUMNWISE)
        return pytree.replace(self, **changes)

    def requantize(self, quantizer: Quantizer | None = None, state: Any = None) -> Any:
        """Dequantize and cast again: to another format, or to copies that are not there (of the rounded values).

        Args:
            quantizer: how to cast; default: this tensor's, with both copies.
            state: the quantizer's state, if it has one.

        Returns:
            As :func:`functional_te.quantize`.
        """
        from functional_te.quantization.cast import quantize

        target = self.quantizer.with_usage(True, True) if quantizer is None else quantizer
        return quantize(self.dequantize(), target, state)

    def to(self, device: torch.device | str) -> QuantizedTensor:
        """The tensor on another device."""
        return pytree.tree_map(lambda tensor: tensor.to(device), self)

    def reshape(self, *shape: Any) -> QuantizedTensor:
        """Other leading dimensions; the last dimension, along which blocks and packing run, has to stay.

        Raises:
            ValueError: another last dimension or number of elements.
        """
        wanted = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else tuple(shape)
        own = self.shape
        if not wanted or wanted[-1] not in (own[-1], -1):
            raise value_error("QuantizedTensor", "reshape", f"last dimension {own[-1]}", f"shape {wanted}")
        known = [size for size in wanted[:-1] if size != -1]
        rows, given = rows_of(own), rows_of((*known, 1))
        fits = rows == given if len(known) == len(wanted) - 1 else given > 0 and rows % given == 0
        if not fits or len(known) + 1 < len(wanted) - 1 or (wanted[-1] == -1 and len(known) < len(wanted) - 1):
            raise value_error("QuantizedTensor", "reshape", f"{rows} rows of {own[-1]}", f"shape {wanted}")
        if self.rowwise_data is None:
            if len(wanted) != 2:
                raise value_error("QuantizedTensor", "reshape", "two dimensions without a rowwise copy", wanted)
            return self
        last = self.rowwise_data.shape[-1]
        return pytree.replace(self, rowwise_data=self.rowwise_data.reshape(*wanted[:-1], last))

    def __getitem__(self, index: Any) -> QuantizedTensor:
        """Slice the first dimension, on block boundaries: ``x[start:stop]``.

        Raises:
            TypeError: the index is no slice.
            ValueError: a step, or bounds inside of a block that shares a scale.
        """
        if not isinstance(index, slice):
            raise type_error("QuantizedTensor", "index", "a slice of the first dimension", repr(index))
        shape = self.shape
        if len(shape) < 2:
            raise value_error("QuantizedTensor", "index", "at least two dimensions to slice the first", shape)
        start, stop, step = index.indices(shape[0])
        if step != 1:
            raise value_error("QuantizedTensor", "index", "step 1", step)
        per = rows_of(shape[1:])
        first, last, rows = start * per, max(start, stop) * per, shape[0] * per
        changes: dict[str, Any] = {}
        row, column = self.copy(False), self.copy(True)
        if row is not None:
            tile = self.quantizer.of(False).tile
            _check_bounds(first, last, rows, 1 if tile is None else tile[0])
            changes["rowwise_data"] = row.data[start : max(start, stop)]
            if tile is not None:
                changes["rowwise_scale_inv"] = row.scale_inv[_blocks(first, last, tile[0])]
            if row.amax is not None and len(row.amax) == rows != 1:
                changes["rowwise_amax"] = row.amax[first:last]
        if column is not None:
            own = self.quantizer.of(True)
            width = 1 if own.tile is None else own.tile[1]
            _check_bounds(first, last, rows, width)
            padded = own.token_multiple * (-(-last // own.token_multiple)) if first < last == rows else last
            changes["columnwise_data"] = column.data[:, first // own.packing : padded // own.packing]
            if own.tile is not None:
                changes["columnwise_scale_inv"] = column.scale_inv[:, _blocks(first, last, width)]
        return pytree.replace(self, **changes)


_ROWWISE = ("rowwise_data", "rowwise_scale_inv", "rowwise_amax")
_COLUMNWISE = ("columnwise_data", "columnwise_scale_inv", "columnwise_amax")


def _unpacked(shape: tuple[Any, ...], packing: int) -> tuple[Any, ...]:
    return shape if packing == 1 else (*shape[:-1], shape[-1] * packing)


def _blocks(first: int, last: int, size: int) -> slice:
    return slice(first // size, -(-last // size)) if first < last else slice(0, 0)


def _check_bounds(first: int, last: int, rows: int, size: int) -> None:
    for bound in (first, last):
        if bound % size and bound != rows:
            raise value_error("QuantizedTensor", "index", f"bounds at multiples of {size} rows", f"row {bound}")


@pytree.node
class CachedWeight:
    """A parameter together with its cast: products read ``quantized``, the gradient belongs to ``value``.

    Passed in the place of a weight, it saves casting the weight again in every microbatch of a step.

    Attributes:
        value: the parameter.
        quantized: its cast, with the copies that forward and backward need.
        stored: whether the cast is all there is: ``value`` only stands for it and is never read. Static.
    """

    value: torch.Tensor
    quantized: QuantizedTensor
    stored: bool = pytree.static(default=False)

    @property
    def shape(self) -> tuple[Any, ...]:
        """Shape of the parameter."""
        return tuple(self.value.shape)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the parameter."""
        return self.value.dtype

    @property
    def device(self) -> torch.device:
        """Where the parameter lives."""
        return self.value.device

    def read(self, quantized: bool) -> torch.Tensor | QuantizedTensor:
        """What a product reads, in low precision or in high precision."""
        return self.quantized if quantized or self.stored else self.value


@pytree.node
class BoundQuantizer:
    """A quantizer together with the tensors it reads while casting.

    Attributes:
        quantizer: the frozen quantizer, static.
        scale: float32 ``[1]`` for delayed scaling, None for quantizers that compute their scale.
        key: int64 ``[2]`` for stochastic rounding, else None.
        blank: float32 ``[n]`` whose first element the cast observes into, and which it returns as the amax: zero, of
            which a step makes those of all its casts by one kernel, or an amax history, of which the first element is
            that of the current step. None: the cast makes its own zero.
    """

    quantizer: Quantizer = pytree.static()
    scale: torch.Tensor | None = None
    key: torch.Tensor | None = None
    blank: torch.Tensor | None = None


def bind(quantizer: Quantizer, state: Any) -> BoundQuantizer:
    """A quantizer with its state (None for a quantizer without)."""
    if not quantizer.stateful:
        return BoundQuantizer(quantizer=quantizer)
    if quantizer.stochastic:
        return BoundQuantizer(quantizer=quantizer, key=state.key)
    return BoundQuantizer(quantizer=quantizer, scale=state.scale, blank=getattr(state, "blank", None))
