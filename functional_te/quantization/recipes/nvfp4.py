"""4-bit training: E2M1 data, E4M3 scales per 16 elements, one amax per tensor."""

from __future__ import annotations

import dataclasses
from typing import Any

from functional_te._errors import value_error
from functional_te.quantization.formats import Format
from functional_te.quantization.quantizers import NVFP4Quantizer
from functional_te.quantization.recipes.recipe import Recipe, Role, check_bools, check_format, check_override

__all__ = ["NVFP4BlockScaling"]

_SCOPES = ("none", "weights", "activations", "all")


@dataclasses.dataclass(frozen=True, eq=False)
class NVFP4BlockScaling(Recipe):
    """NVFP4 with the techniques of "Pretraining Large Language Models with NVFP4" (NVIDIA, 2025), each switchable.

    Inputs: blocks of 16, Hadamard transform of the copy for the weight gradient. Weights: tiles of 16x16. Gradients:
    blocks of 16, the transform, stochastic rounding, whose keys are quantizer state. Numbers of features must be
    multiples of 16; any number of tokens (padded inside with zeros, which is exact). Transformer Engine transforms
    bfloat16 only; here the transform is computed in float32, and rounded for bfloat16 as there. Magnitudes above 8e37,
    which no sum of 16 holds, are not defined under the transform.

    Args:
        disable_rht: no random Hadamard transform.
        disable_stochastic_rounding: round gradients to nearest; then the recipe has no state.
        disable_2d_quantization: blocks of 1x16 for weights too.
        row_scaled_activation: one amax per row of the rowwise copy of inputs.
        nvfp4_4over6: where each block takes the better of two scales: ``"none"``, ``"weights"``, ``"activations"`` or
            ``"all"``. Inputs need ``disable_rht`` for that; gradients never do it.
        nvfp4_4over6_e4m3_use_256: where its block scales are bounded by 256 instead of 448.
        nvfp4_4over6_err_mode: ``"MAE"`` or ``"MSE"``: what makes a scale better.
        fp4_format: ``Format.E2M1``.
        fp8_format: ``Format.E4M3``, the format of the block scales.
        fp8_dpa: FP8 dot-product attention; no op here reads it.
        fp8_mha: FP8 multi-head attention; no op here reads it.
        backward_override: None, ``"high_precision"`` or ``"dequantized"``; see :class:`Float8CurrentScaling`.

    Raises:
        ValueError: a value that is not allowed, or techniques that exclude each other.
        TypeError: a field of the wrong kind.
    """

    disable_rht: bool = False
    disable_stochastic_rounding: bool = False
    disable_2d_quantization: bool = False
    row_scaled_activation: bool = False
    nvfp4_4over6: str = "none"
    nvfp4_4over6_e4m3_use_256: str = "all"
    nvfp4_4over6_err_mode: str = "MAE"
    fp4_format: Format = Format.E2M1
    fp8_format: Format = Format.E4M3
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None

    def __post_init__(self) -> None:
        where = "NVFP4BlockScaling"
        check_bools(where, self, "disable_rht", "disable_stochastic_rounding", "disable_2d_quantization")
        check_bools(where, self, "row_scaled_activation", "fp8_dpa", "fp8_mha")
        check_format(where, self.fp8_format, (Format.E4M3,))
        if self.fp4_format is not Format.E2M1:
            raise value_error(where, "fp4_format", "Format.E2M1", self.fp4_format)
        for name in ("nvfp4_4over6", "nvfp4_4over6_e4m3_use_256"):
            if getattr(self, name) not in _SCOPES:
                raise value_error(where, name, f"one of {_SCOPES}", repr(getattr(self, name)))
        if self.nvfp4_4over6_err_mode not in ("MAE", "MSE"):
            raise value_error(where, "nvfp4_4over6_err_mode", "'MAE' or 'MSE'", repr(self.nvfp4_4over6_err_mode))
        if self.nvfp4_4over6 in ("activations", "all") and not self.disable_rht:
            raise value_error(where, "nvfp4_4over6", "'none' or 'weights' with the transform", self.nvfp4_4over6)
        check_override(where, self.backward_override)

    def quantizer(self, role: Role) -> NVFP4Quantizer:
        """The techniques of the role."""
        if role.is_gradient:
            return NVFP4Quantizer(
                with_rht=not self.disable_rht, stochastic_rounding=not self.disable_stochastic_rounding
            )
        if role.tensor == "weight":
            return NVFP4Quantizer(
                with_2d_quantization=not self.disable_2d_quantization, **self._four_over_six("weights")
            )
        return NVFP4Quantizer(
            with_rht=not self.disable_rht, row_scaled=self.row_scaled_activation, **self._four_over_six("activations")
        )

    def _four_over_six(self, scope: str) -> dict[str, Any]:
        if self.nvfp4_4over6 not in (scope, "all"):
            return {}
        bounded = self.nvfp4_4over6_e4m3_use_256 in (scope, "all")
        return {"four_over_six": self.nvfp4_4over6_err_mode, "e4m3_max": 256 if bounded else 448}
