"""Per-tensor FP8 with scales computed from the tensor being cast."""

from __future__ import annotations

import dataclasses

from functional_te.quantization.formats import Format
from functional_te.quantization.quantizers import Float8CurrentScalingQuantizer
from functional_te.quantization.recipes.recipe import (
    MMParams,
    QParams,
    Recipe,
    Role,
    check_bools,
    check_format,
    check_override,
    check_products,
    check_role_settings,
    role_settings,
)

__all__ = ["Float8CurrentScaling"]


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
        backward_override: None, ``"high_precision"`` (the backward uses the original operands) or ``"dequantized"``
            (it uses the dequantized rowwise copies); gradients are then never cast.
        fp8_quant_fwd_inp: settings of inputs; None follows ``use_power_2_scales``.
        fp8_quant_fwd_weight: settings of weights, likewise.
        fp8_quant_bwd_grad: settings of gradients, likewise.

    Raises:
        ValueError: a pure E5M2 format or an unknown override.
        TypeError: a field of the wrong kind.
    """

    use_power_2_scales: bool = False
    fp8_format: Format = Format.HYBRID
    fp8_gemm_fprop: MMParams = MMParams(use_split_accumulator=False)
    fp8_gemm_dgrad: MMParams = MMParams(use_split_accumulator=True)
    fp8_gemm_wgrad: MMParams = MMParams(use_split_accumulator=True)
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None
    fp8_quant_fwd_inp: QParams | None = None
    fp8_quant_fwd_weight: QParams | None = None
    fp8_quant_bwd_grad: QParams | None = None

    def __post_init__(self) -> None:
        where = "Float8CurrentScaling"
        check_format(where, self.fp8_format)
        check_bools(where, self, "use_power_2_scales", "fp8_dpa", "fp8_mha")
        check_products(where, self)
        check_role_settings(where, self)
        check_override(where, self.backward_override)

    def quantizer(self, role: Role) -> Float8CurrentScalingQuantizer:
        """E4M3 for inputs and weights, the format's gradient type for gradients."""
        settings = role_settings(self, role, QParams(power_2_scale=self.use_power_2_scales))
        return Float8CurrentScalingQuantizer(
            dtype=self.fp8_format.backward_dtype if role.is_gradient else self.fp8_format.forward_dtype,
            power_2_scale=settings.power_2_scale,
            amax_epsilon=settings.amax_epsilon,
        )
