"""What a quantizer is: a frozen value that says how one tensor becomes low precision, and the math that does it.

A quantizer holds no tensors. What it must remember between steps is its *state*, a pytree of tensors that goes in
and comes out of pure functions; a quantizer without memory has state None.

Every format makes up to two *copies* of a tensor, which is looked at as a matrix ``[M, K]`` (leading dimensions
flattened). The rowwise copy feeds products that reduce over ``K``; the columnwise copy feeds products that reduce over
``M`` and is the cast of the transposed matrix ``[K, M]``. So every product reduces over the last dimension of both of
its operands' copies, which is also the one layout that FP8 and FP4 tensor cores take.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar, NamedTuple

import torch

from functional_te._errors import value_error
from functional_te._value import Value
from functional_te.quantization.formats import max_value
from functional_te.quantization.groups import GroupLayout

__all__ = ["Cast", "Copy", "IdentityQuantizer", "Quantizer", "as_matrix"]


class Copy(NamedTuple):
    """One copy of a quantized tensor: its tensors, or (in a fake) their ``(shape, dtype)``.

    Attributes:
        data: the elements.
        scale_inv: dequantization factors of the blocks, or of the tensor.
        amax: the amax that a two-level format needs to dequantize, else None.
    """

    data: Any
    scale_inv: Any
    amax: Any = None


class Cast(NamedTuple):
    """What casting gives.

    Attributes:
        rowwise: the rowwise copy, if the quantizer wants it.
        columnwise: the transposed copy, if the quantizer wants it.
        amax: the observed amax, float32 ``[1]``, of a quantizer with state, else None.
    """

    rowwise: Copy | None
    columnwise: Copy | None
    amax: torch.Tensor | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Quantizer(Value):
    """Base of quantizers.

    Attributes:
        dtype: the element type.
        rowwise: whether the rowwise copy is wanted.
        columnwise: whether a separate transposed copy is wanted.
        from_float32: whether a producer hands over its float32 result without rounding it to its dtype first.
        packing: elements per stored element (2 for 4-bit data).
        feature_multiple: what the last dimension must be a multiple of.
        token_multiple: what the last dimension of a columnwise copy is padded to.
    """

    dtype: torch.dtype
    rowwise: bool = True
    columnwise: bool = False

    from_float32: ClassVar[bool] = False
    packing: ClassVar[int] = 1
    feature_multiple: ClassVar[int] = 1
    token_multiple: ClassVar[int] = 1

    def __post_init__(self) -> None:
        if self.dtype not in (torch.float8_e4m3fn, torch.float8_e5m2):
            raise value_error(type(self).__name__, "dtype", "torch.float8_e4m3fn or torch.float8_e5m2", self.dtype)

    @property
    def stateful(self) -> bool:
        """Whether the quantizer has state between steps. Casting then reports the amax, for the state to remember."""
        return self.stochastic

    @property
    def stochastic(self) -> bool:
        """Whether casting takes random bits, whose key is the quantizer's state."""
        return False

    @property
    def transposable(self) -> bool:
        """Whether the columnwise copy is the transposed rowwise copy, so that one serves all products."""
        return True

    @property
    def tile(self) -> tuple[int, int] | None:
        """Rows and columns of a copy that share a scale; None if the whole tensor does."""
        return None

    @property
    def rotates(self) -> bool:
        """Whether the columnwise copy is of values rotated by a Hadamard matrix."""
        return False

    @property
    def limit(self) -> float:
        """Largest finite value of the element format."""
        return max_value(self.dtype)

    def of(self, columnwise: bool) -> Quantizer:
        """The quantizer that makes one of the copies: itself, unless the copies differ in format."""
        del columnwise
        return self

    def with_usage(self, rowwise: bool, columnwise: bool) -> Quantizer:
        """The same quantizer making these copies."""
        if rowwise == self.rowwise and columnwise == self.columnwise:
            return self
        return dataclasses.replace(self, rowwise=rowwise, columnwise=columnwise)

    @property
    def row_multiple(self) -> int:
        """What every group of rows has to start at a multiple of, so that no block holds rows of two."""
        own, other = self.of(False), self.of(True)
        height = own.tile[0] if self.rowwise and own.tile is not None else 1
        if not self.columnwise:
            return height
        return max(height, other.token_multiple, other.tile[1] if other.tile is not None else 1)

    def cast(
        self,
        x: torch.Tensor,
        *,
        scale: torch.Tensor | None = None,
        key: torch.Tensor | None = None,
        groups: GroupLayout | None = None,
    ) -> Cast:
        """Cast ``x`` (any shape) to the wanted copies.

        Args:
            x: high precision values.
            scale: float32 ``[1]``, for a quantizer whose scale is state.
            key: int64 ``[2]``, for a stochastic quantizer.
            groups: groups of the rows of ``x [P, K]``, padded to :attr:`row_multiple`. Each is cast as a tensor of its
                own: ``scale`` is ``[G]`` and ``key`` ``[2, G]`` then, and so is what there is one of per tensor: the
                factors, amaxes and observations are ``[G]``.
        """
        raise NotImplementedError

    def decode(self, copy: Copy, columnwise: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Float32 values of a copy as a matrix in the copy's own layout, and the factor they still need (or None)."""
        raise NotImplementedError

    def copy_spec(self, shape: tuple[Any, ...], columnwise: bool) -> Copy:
        """The twin of :meth:`cast` for one copy of a tensor of ``shape``: (shape, dtype) of each of its tensors."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, eq=False)
class IdentityQuantizer(Value):
    """No quantizer: a tensor role that stays in high precision. What a custom recipe returns for such a role."""


def rows_of(shape: tuple[Any, ...]) -> Any:
    """Number of rows of a tensor of ``shape`` looked at as a matrix."""
    return math.prod(shape[:-1])


def as_matrix(x: torch.Tensor) -> torch.Tensor:
    """``x`` with its leading dimensions flattened: ``[M, K]``; a tensor without dimensions is ``[1, 1]``."""
    if x.dim() == 2:
        return x
    return x.reshape(rows_of(tuple(x.shape)), x.shape[-1] if x.dim() else 1)
