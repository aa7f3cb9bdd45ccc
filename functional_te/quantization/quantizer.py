"""Quantizers: frozen values that say how one tensor becomes low precision.

A quantizer holds no tensors. What it must remember between steps is its *state*, a pytree of tensors that goes in
and comes out of pure functions; a quantizer without memory has state None.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch

from functional_te._value import Value
from functional_te.quantization.formats import max_value

__all__ = ["Float8CurrentScalingQuantizer", "Float8DelayedScalingQuantizer", "Quantizer"]


@dataclasses.dataclass(frozen=True, eq=False)
class Quantizer(Value):
    """Base of quantizers.

    Attributes:
        dtype: the element type.
        rowwise: whether the rowwise copy is wanted.
        columnwise: whether a separate transposed copy is wanted.
        stateful: whether the quantizer has state between steps.
        from_float32: whether a producer hands over its float32 result without rounding it to its dtype first.
    """

    dtype: torch.dtype
    rowwise: bool = True
    columnwise: bool = False

    stateful: ClassVar[bool] = False
    from_float32: ClassVar[bool] = False

    @property
    def limit(self) -> float:
        """Largest finite value of the element format."""
        return max_value(self.dtype)


@dataclasses.dataclass(frozen=True, eq=False)
class Float8CurrentScalingQuantizer(Quantizer):
    """Per-tensor FP8 whose scale comes from the tensor being cast.

    Attributes:
        amax_epsilon: floor of the amax.
        power_2_scale: whether scales are rounded down to powers of two.
    """

    amax_epsilon: float = 0.0
    power_2_scale: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class Float8DelayedScalingQuantizer(Quantizer):
    """Per-tensor FP8 whose scale comes from the amaxes of earlier steps.

    Attributes:
        margin: the scale is divided by ``2**margin``.
        amax_history_len: number of steps remembered, the running one included.
        amax_compute_algo: ``"max"`` over the history, ``"most_recent"``, or a function of the history ``[L]`` that
            returns the amax.
        scaling_factor_compute_algo: None for the built-in formula, or a function
            ``(amax, old_scale, fp8_max, recipe) -> scale``; ``recipe`` is this quantizer.
    """

    margin: int = 0
    amax_history_len: int = 1024
    amax_compute_algo: Any = "max"
    scaling_factor_compute_algo: Any = None

    stateful: ClassVar[bool] = True
    from_float32: ClassVar[bool] = True
