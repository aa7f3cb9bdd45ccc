"""Casting to low precision and back: the pure functions, which are also the reference kernels."""

from __future__ import annotations

from typing import Any

import torch

from functional_te._errors import type_error, value_error
from functional_te.quantization.formats import saturating_cast
from functional_te.quantization.quantizer import (
    Float8CurrentScalingQuantizer,
    Float8DelayedScalingQuantizer,
    Quantizer,
)
from functional_te.quantization.scaling import amax_of, current_scale
from functional_te.quantization.state import update_amax
from functional_te.quantization.tensor import BoundQuantizer, QuantizedTensor

__all__ = ["dequantize", "quantize", "quantize_bound"]


def quantize_bound(
    x: torch.Tensor, bound: BoundQuantizer, dtype: torch.dtype | None = None
) -> tuple[QuantizedTensor, torch.Tensor | None]:
    """Cast ``x`` and report the amax that a stateful quantizer observed.

    Args:
        x: high precision values of any shape.
        bound: the quantizer and its scale.
        dtype: nominal dtype of the result (default: of ``x``).

    Returns:
        The quantized tensor, and the observed amax (float32 ``[1]``) or None for a quantizer without state.
    """
    quantizer = bound.quantizer
    amax = amax_of(x)
    if isinstance(quantizer, Float8DelayedScalingQuantizer):
        assert bound.scale is not None
        scale, observed = bound.scale, amax
    elif isinstance(quantizer, Float8CurrentScalingQuantizer):
        scale = current_scale(amax, quantizer.limit, epsilon=quantizer.amax_epsilon, power_of_2=quantizer.power_2_scale)
        observed = None
    else:
        raise TypeError(f"quantize: expected a known quantizer, got {quantizer!r}.")
    data = saturating_cast(x.to(torch.float32) * scale.reshape(()), quantizer.dtype)
    # reciprocal() makes a new tensor: saved context never aliases live state
    scale_inv = scale.reciprocal()
    return (
        QuantizedTensor(
            rowwise_data=data if quantizer.rowwise else None,
            rowwise_scale_inv=scale_inv if quantizer.rowwise else None,
            columnwise_data=data.movedim(-1, 0).contiguous() if quantizer.columnwise else None,
            columnwise_scale_inv=(scale_inv.clone() if quantizer.rowwise else scale_inv)
            if quantizer.columnwise
            else None,
            dtype=x.dtype if dtype is None else dtype,
            quantizer=quantizer,
        ),
        observed,
    )


def quantize(x: torch.Tensor, quantizer: Quantizer, state: Any = None) -> Any:
    """Cast a tensor to low precision.

    Args:
        x: float32, float16 or bfloat16 values of any shape, zero-size included.
        quantizer: how to cast.
        state: the quantizer's state; needed by, and only by, a stateful quantizer.

    Returns:
        A :class:`QuantizedTensor`, or the pair of it and the new state if ``state`` was given.

    Raises:
        TypeError: ``x`` is not a floating tensor, or ``quantizer`` is no quantizer.
        ValueError: ``state`` is missing, or given to a quantizer without state.
    """
    where = "quantize"
    if not isinstance(quantizer, Quantizer):
        raise type_error(where, "quantizer", "a Quantizer", type(quantizer).__name__)
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
    scale = None if state is None else state.scale
    quantized, amax = quantize_bound(x, BoundQuantizer(quantizer=quantizer, scale=scale))
    if state is None:
        return quantized
    assert amax is not None  # a stateful quantizer observes
    return quantized, update_amax(state, amax)


def dequantize(x: QuantizedTensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """High precision values of ``x`` in ``dtype`` (default: its nominal dtype)."""
    if not isinstance(x, QuantizedTensor):
        raise type_error("dequantize", "x", "a QuantizedTensor", type(x).__name__)
    return x.dequantize(dtype)
