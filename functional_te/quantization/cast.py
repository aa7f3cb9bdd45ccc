"""Casting to low precision and back: the pure functions, which are also the reference kernels."""

from __future__ import annotations

from typing import Any

import torch

from functional_te._errors import kind_of, type_error, value_error
from functional_te.quantization.groups import GroupLayout
from functional_te.quantization.quantizer import Quantizer
from functional_te.quantization.state import state_type, update_amax
from functional_te.quantization.tensor import BoundQuantizer, QuantizedTensor, bind

__all__ = ["dequantize", "quantize", "quantize_bound"]


def quantize_bound(
    x: torch.Tensor, bound: BoundQuantizer, dtype: torch.dtype | None = None, groups: GroupLayout | None = None
) -> tuple[QuantizedTensor, torch.Tensor | None]:
    """Cast ``x`` and report the amax that a quantizer observed.

    Args:
        x: high precision values of any shape.
        bound: the quantizer and the tensors it reads.
        dtype: nominal dtype of the result (default: of ``x``).
        groups: groups of rows to cast as tensors of their own; see :meth:`Quantizer.cast`.

    Returns:
        The quantized tensor, and the observed amax (float32 ``[1]``, or ``[G]`` of the groups) or None for a quantizer
        that observes nothing.
    """
    quantizer = bound.quantizer
    if groups is None:
        row, column, amax = quantizer.cast(x, scale=bound.scale, key=bound.key)
    else:
        row, column, amax = quantizer.cast(x, scale=bound.scale, key=bound.key, groups=groups)
    return (
        QuantizedTensor(
            rowwise_data=None if row is None else row.data,
            rowwise_scale_inv=None if row is None else row.scale_inv,
            rowwise_amax=None if row is None else row.amax,
            columnwise_data=None if column is None else column.data,
            columnwise_scale_inv=None if column is None else column.scale_inv,
            columnwise_amax=None if column is None else column.amax,
            dtype=x.dtype if dtype is None else dtype,
            quantizer=quantizer,
        ),
        amax,
    )


def quantize(x: torch.Tensor, quantizer: Quantizer, state: Any = None) -> Any:
    """Cast a tensor to low precision.

    Args:
        x: float32, float16 or bfloat16 values of any shape, zero-size included.
        quantizer: how to cast.
        state: the quantizer's state; needed by, and only by, a stateful quantizer.

    Returns:
        A :class:`QuantizedTensor`, or the pair of it and the new state if ``state`` was given. With stochastic rounding
        the new state keeps its key until :func:`update_scale` closes the step: the same values give the same bits.

    Raises:
        TypeError: ``x`` is not a floating tensor, or ``quantizer`` is no quantizer.
        ValueError: ``state`` is missing, or given to a quantizer without state; the last dimension is no multiple of
            what the format needs.
    """
    where = "quantize"
    if not isinstance(quantizer, Quantizer):
        raise type_error(where, "quantizer", "a Quantizer", kind_of(quantizer))
    if not isinstance(x, torch.Tensor):
        raise type_error(where, "x", "a tensor", type(x).__name__)
    if x.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise type_error(where, "x", "float32, float16 or bfloat16", x.dtype)
    if quantizer.stateful and state is None:
        raise value_error(
            where, "state", f"the state of {type(quantizer).__name__}", None, "See init_quantizer_state()."
        )
    if not quantizer.stateful and state is not None:
        raise value_error(where, "state", "None for a quantizer without state", type(state).__name__)
    kind = state_type(quantizer)
    if kind is not None and not isinstance(state, kind):
        raise type_error(where, "state", f"a {kind.__name__}", type(state).__name__)
    if not (quantizer.rowwise or quantizer.columnwise):
        raise value_error(where, "quantizer", "a rowwise or a columnwise copy", "none")
    multiple = features_multiple(quantizer)
    if multiple > 1 and (x.dim() == 0 or x.shape[-1] % multiple):
        wanted = f"a last dimension that is a multiple of {multiple} for {type(quantizer).__name__}"
        raise value_error(where, "x", wanted, f"shape {tuple(x.shape)}")
    quantized, amax = quantize_bound(x, bind(quantizer, state))
    return quantized if amax is None else (quantized, update_amax(state, amax))


def features_multiple(quantizer: Quantizer) -> int:
    """What the number of features must be a multiple of, for both copies."""
    return max(quantizer.of(False).feature_multiple, quantizer.of(True).feature_multiple)


def dequantize(x: QuantizedTensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """High precision values of ``x`` in ``dtype`` (default: its nominal dtype)."""
    if not isinstance(x, QuantizedTensor):
        raise type_error("dequantize", "x", "a QuantizedTensor", type(x).__name__)
    return x.dequantize(dtype)
