"""Per-tensor FP8 with scales from the amaxes of earlier steps."""

from __future__ import annotations

import dataclasses
from typing import Any

from functional_te._errors import type_error, value_error
from functional_te.quantization.formats import Format
from functional_te.quantization.quantizers import Float8DelayedScalingQuantizer
from functional_te.quantization.recipes.recipe import Recipe, Role, check_bools, check_format

__all__ = ["DelayedScaling"]


@dataclasses.dataclass(frozen=True, eq=False)
class DelayedScaling(Recipe):
    """Delayed scaling: ``scale = fp8_max / amax * 2**-margin`` with the amax of a history of steps.

    The first step runs with scale 1. Fields and defaults are those of ``transformer_engine.common.recipe``.

    Args:
        margin: the scale is divided by ``2**margin``.
        fp8_format: ``Format.HYBRID`` (E4M3 forward, E5M2 gradients) or ``Format.E4M3``.
        amax_history_len: number of steps remembered, the running one included.
        amax_compute_algo: ``"max"``, ``"most_recent"`` or a function of the history ``[L]``.
        scaling_factor_compute_algo: None or a function ``(amax, old_scale, fp8_max, recipe) -> scale``.
        reduce_amax: whether amaxes are agreed between ranks.
        fp8_dpa: FP8 dot-product attention; no op here reads it.
        fp8_mha: FP8 multi-head attention; no op here reads it.
        backward_override: must be None for this recipe.

    Raises:
        ValueError: a length below 1, a pure E5M2 format, an unknown algorithm or an override.
        TypeError: a field of the wrong kind.
    """

    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: Any = "max"
    scaling_factor_compute_algo: Any = None
    reduce_amax: bool = True
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: None = None

    def __post_init__(self) -> None:
        where = "DelayedScaling"
        check_format(where, self.fp8_format)
        check_bools(where, self, "reduce_amax", "fp8_dpa", "fp8_mha")
        if not isinstance(self.amax_history_len, int) or isinstance(self.amax_history_len, bool):
            raise type_error(where, "amax_history_len", "an int", self.amax_history_len)
        if self.amax_history_len < 1:
            raise value_error(where, "amax_history_len", "at least 1", self.amax_history_len)
        if not isinstance(self.margin, int):
            raise type_error(where, "margin", "an int", self.margin)
        if self.amax_compute_algo not in ("max", "most_recent") and not callable(self.amax_compute_algo):
            raise value_error(where, "amax_compute_algo", "'max', 'most_recent' or a function", self.amax_compute_algo)
        if self.scaling_factor_compute_algo is not None and not callable(self.scaling_factor_compute_algo):
            raise type_error(
                where, "scaling_factor_compute_algo", "None or a function", self.scaling_factor_compute_algo
            )
        if self.backward_override is not None:
            raise value_error(where, "backward_override", "None", self.backward_override)

    def quantizer(self, role: Role) -> Float8DelayedScalingQuantizer:
        """E4M3 for inputs and weights, the format's gradient type for gradients; all roles share the settings."""
        return Float8DelayedScalingQuantizer(
            dtype=self.fp8_format.backward_dtype if role.is_gradient else self.fp8_format.forward_dtype,
            margin=self.margin,
            amax_history_len=self.amax_history_len,
            amax_compute_algo=self.amax_compute_algo,
            scaling_factor_compute_algo=self.scaling_factor_compute_algo,
        )
