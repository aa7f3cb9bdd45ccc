"""Quantized data as a pytree, and a quantizer bound to the tensors it needs.

The definition of the two copies (as in Transformer Engine): the *rowwise* copy feeds products that reduce over the
last dimension, the *columnwise* copy feeds products that reduce over the flattened leading dimensions and is stored
transposed. A per-tensor format needs no second copy where the GEMM can read either layout.
"""

from __future__ import annotations

import torch

from functional_te import pytree
from functional_te.quantization.quantizer import Quantizer

__all__ = ["BoundQuantizer", "QuantizedTensor"]


@pytree.node
class QuantizedTensor:
    """A tensor in low precision: ``value = data * scale_inv``.

    Attributes:
        rowwise_data: FP8 data of the logical shape, or None.
        rowwise_scale_inv: float32 ``[1]`` dequantization factor, or None.
        columnwise_data: the transposed copy ``[last, leading...]``, or None.
        columnwise_scale_inv: its factor, or None.
        dtype: the nominal (high precision) dtype, static.
        quantizer: the value that made it, static.
    """

    rowwise_data: torch.Tensor | None
    rowwise_scale_inv: torch.Tensor | None
    columnwise_data: torch.Tensor | None = None
    columnwise_scale_inv: torch.Tensor | None = None
    dtype: torch.dtype = pytree.static(default=torch.float32)
    quantizer: Quantizer = pytree.static(default=None)

    @property
    def data(self) -> torch.Tensor:
        """The rowwise data, or a rowwise view of the columnwise data."""
        if self.rowwise_data is not None:
            return self.rowwise_data
        assert self.columnwise_data is not None
        return self.columnwise_data.movedim(0, -1)

    @property
    def scale_inv(self) -> torch.Tensor:
        """The factor that belongs to :attr:`data`."""
        found = self.rowwise_scale_inv if self.rowwise_data is not None else self.columnwise_scale_inv
        assert found is not None
        return found

    @property
    def shape(self) -> tuple[int, ...]:
        """The logical shape."""
        return tuple(self.data.shape)

    @property
    def device(self) -> torch.device:
        """Where the data live."""
        return self.data.device

    def dim(self) -> int:
        """Number of logical dimensions."""
        return self.data.dim()

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """High precision values, computed in float32 and rounded once to ``dtype`` (default: the nominal dtype)."""
        return (self.data.to(torch.float32) * self.scale_inv.reshape(())).to(self.dtype if dtype is None else dtype)


@pytree.node
class BoundQuantizer:
    """A quantizer together with the tensors it reads while casting.

    Attributes:
        quantizer: the frozen quantizer, static.
        scale: float32 ``[1]`` for delayed scaling, None for quantizers that compute their scale.
    """

    quantizer: Quantizer = pytree.static()
    scale: torch.Tensor | None = None
