"""FP8 with float32 scales per block of 128."""

from __future__ import annotations

import dataclasses

from functional_te._errors import value_error
from functional_te.quantization.formats import Format
from functional_te.quantization.quantizers import Float8BlockQuantizer
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

__all__ = ["Float8BlockScaling"]


@dataclasses.dataclass(frozen=True, eq=False)
class Float8BlockScaling(Recipe):
    """Block scaling: inputs and gradients in blocks of 1x128, weights in tiles of 128x128.

    Fields and defaults are those of ``transformer_engine.common.recipe``, except that ``use_f32_scales`` is honoured by
    every op (te.ops linears ignore it). Any number of features and tokens: edge blocks are partial, which is exact.

    Args:
        use_f32_scales: scales are float32 numbers, else powers of two.
        fp8_format: ``Format.E4M3`` or ``Format.HYBRID``.
        x_block_scaling_dim: 1 or 2: dimensions of an input's blocks.
        w_block_scaling_dim: the same of a weight's.
        grad_block_scaling_dim: the same of a gradient's.
        fp8_gemm_fprop: settings of the forward product; the split accumulator is mandatory.
        fp8_gemm_dgrad: settings of the input-gradient product, likewise.
        fp8_gemm_wgrad: settings of the weight-gradient product, likewise.
        fp8_dpa: must be False.
        fp8_mha: must be False.
        backward_override: None, ``"high_precision"`` or ``"dequantized"``; see :class:`Float8CurrentScaling`.
        fp8_quant_fwd_inp: settings of inputs; None follows ``use_f32_scales``.
        fp8_quant_fwd_weight: settings of weights, likewise.
        fp8_quant_bwd_grad: settings of gradients, likewise.

    Raises:
        ValueError: a value that is not allowed, or both operands of one product in 2-D tiles.
        TypeError: a field of the wrong kind.
    """

    use_f32_scales: bool = False
    fp8_format: Format = Format.E4M3
    x_block_scaling_dim: int = 1
    w_block_scaling_dim: int = 2
    grad_block_scaling_dim: int = 1
    fp8_gemm_fprop: MMParams = MMParams(use_split_accumulator=True)
    fp8_gemm_dgrad: MMParams = MMParams(use_split_accumulator=True)
    fp8_gemm_wgrad: MMParams = MMParams(use_split_accumulator=True)
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None
    fp8_quant_fwd_inp: QParams | None = None
    fp8_quant_fwd_weight: QParams | None = None
    fp8_quant_bwd_grad: QParams | None = None

    def __post_init__(self) -> None:
        where = "Float8BlockScaling"
        check_format(where, self.fp8_format)
        check_bools(where, self, "use_f32_scales", "fp8_dpa", "fp8_mha")
        check_products(where, self)
        check_role_settings(where, self)
        check_override(where, self.backward_override)
        for name in ("x_block_scaling_dim", "w_block_scaling_dim", "grad_block_scaling_dim"):
            if type(getattr(self, name)) is not int or getattr(self, name) not in (1, 2):
                raise value_error(where, name, "1 or 2", getattr(self, name))
        x, w, grad = self.x_block_scaling_dim, self.w_block_scaling_dim, self.grad_block_scaling_dim
        for one, other, product in ((x, w, "x and w"), (grad, w, "grad and w"), (x, grad, "x and grad")):
            if one == other == 2:
                raise value_error(
                    where, "block_scaling_dim", "1 for at least one operand of a product", f"2, {product}"
                )
        for name in ("fp8_gemm_fprop", "fp8_gemm_dgrad", "fp8_gemm_wgrad"):
            if not getattr(self, name).use_split_accumulator:
                raise value_error(where, name, "use_split_accumulator=True", False)
        for name in ("fp8_dpa", "fp8_mha"):
            if getattr(self, name):
                raise value_error(where, name, "False", True)

    def quantizer(self, role: Role) -> Float8BlockQuantizer:
        """Blocks and settings by role."""
        dims = {"weight": self.w_block_scaling_dim}
        settings = role_settings(self, role, QParams(power_2_scale=not self.use_f32_scales))
        return Float8BlockQuantizer(
            dtype=self.fp8_format.backward_dtype if role.is_gradient else self.fp8_format.forward_dtype,
            power_2_scale=settings.power_2_scale,
            amax_epsilon=settings.amax_epsilon,
            block_scaling_dim=dims.get(
                role.tensor, self.grad_block_scaling_dim if role.is_gradient else self.x_block_scaling_dim
            ),
        )
