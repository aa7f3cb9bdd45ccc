"""Per-tensor FP8 with scales computed from the tensor being cast."""

from __future__ import annotations

import dataclasses

from functional_te._errors import type_error, value_error
from functional_te._value import Value
from functional_te.quantization.formats import Format
from functional_te.quantization.quantizer import Float8CurrentScalingQuantizer
from functional_te.quantization.recipes.recipe import Recipe, Role

__all__ = ["Float8CurrentScaling", "MMParams"]


@dataclasses.dataclass(frozen=True, eq=False)
class MMParams(Value):
    """Settings of one matrix product.

    Args:
        use_split_accumulator: whether a GPU kernel accumulates in full precision; the reference always does.
    """

    use_split_accumulator: bool = True


@dataclasses.dataclass(frozen=True, eq=False)
class Float8CurrentScaling(Recipe):
    """Current scaling: ``scale = fp8_max / amax`` of the very tensor, no state.

    Fields and defaults are those of ``transformer_engine.common.recipe``, except that ``use_power_2_scales`` is
    honoured by every op (te.ops linears ignore it).

    Args:
        use_power_2_scales: round scales down to powers of two.
        fp8_format: ``Format.HYBRID`` or ``Format.E4M3``.
        fp8_gemm_fprop: settings of the forward product.
        fp8_gemm_dgrad: settings of the input-gradient product.
        fp8_gemm_wgrad: settings of the weight-gradient product.
        fp8_dpa: FP8 dot-product attention; no op here reads it.
        fp8_mha: FP8 multi-head attention; no op here reads it.
        backward_override: must be None.

    Raises:
        ValueError: a pure E5M2 format or an override.
        TypeError: a field of the wrong kind.
    """

    use_power_2_scales: bool = False
    fp8_format: Format = Format.HYBRID
    fp8_gemm_fprop: MMParams = MMParams(use_split_accumulator=False)
    fp8_gemm_dgrad: MMParams = MMParams(use_split_accumulator=True)
    fp8_gemm_wgrad: MMParams = MMParams(use_split_accumulator=True)
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: None = None

    def __post_init__(self) -> None:
        where = "Float8CurrentScaling"
        if not isinstance(self.fp8_format, Format):
            raise type_error(where, "fp8_format", "a Format", self.fp8_format)
        if self.fp8_format is Format.E5M2:
            raise value_error(where, "fp8_format", "HYBRID or E4M3", "E5M2")
        if not isinstance(self.use_power_2_scales, bool):
            raise type_error(where, "use_power_2_scales", "a bool", repr(self.use_power_2_scales))
        for name in ("fp8_gemm_fprop", "fp8_gemm_dgrad", "fp8_gemm_wgrad"):
            if not isinstance(getattr(self, name), MMParams):
                raise type_error(where, name, "MMParams", repr(getattr(self, name)))
        if self.backward_override is not None:
            raise value_error(where, "backward_override", "None", self.backward_override)

    def quantizer(self, role: Role) -> Float8CurrentScalingQuantizer:
        """E4M3 for inputs and weights, the format's gradient type for gradients."""
        backward = role.tensor == "grad_output"
        return Float8CurrentScalingQuantizer(
            dtype=self.fp8_format.backward_dtype if backward else self.fp8_format.forward_dtype,
            power_2_scale=self.use_power_2_scales,
        )
