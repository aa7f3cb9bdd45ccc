"""FP8 with a power-of-two scale per block of 32."""

from __future__ import annotations

import dataclasses

from functional_te._errors import type_error
from functional_te.quantization.formats import Format
from functional_te.quantization.quantizers import MXFP8Quantizer
from functional_te.quantization.recipes.recipe import Recipe, Role, check_bools, check_format, check_override

__all__ = ["MXFP8BlockScaling"]


@dataclasses.dataclass(frozen=True, eq=False)
class MXFP8BlockScaling(Recipe):
    """MXFP8: E8M0 scales, rounded up so that nothing saturates.

    Numbers of features must be multiples of 32; any number of tokens (the last block of the copies that reduce over
    tokens is partial, which is exact). Fields and defaults are those of ``transformer_engine.common.recipe``.

    Args:
        margin: unused, as in Transformer Engine.
        fp8_format: ``Format.E4M3`` or ``Format.HYBRID``.
        fp8_dpa: FP8 dot-product attention; no op here reads it.
        fp8_mha: FP8 multi-head attention; no op here reads it.
        backward_override: None, ``"high_precision"`` or ``"dequantized"``; see :class:`Float8CurrentScaling`.
        enable_2d_quantization: tiles of 32x32 for the weights of linear ops.

    Raises:
        ValueError: a pure E5M2 format or an unknown override.
        TypeError: a field of the wrong kind.
    """

    margin: int = 0
    fp8_format: Format = Format.E4M3
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None
    enable_2d_quantization: bool = False

    def __post_init__(self) -> None:
        where = "MXFP8BlockScaling"
        if not isinstance(self.margin, int):
            raise type_error(where, "margin", "an int", repr(self.margin))
        check_format(where, self.fp8_format)
        check_bools(where, self, "fp8_dpa", "fp8_mha", "enable_2d_quantization")
        check_override(where, self.backward_override)

    def quantizer(self, role: Role) -> MXFP8Quantizer:
        """The same for every role, but for tiles and the type of gradients."""
        return MXFP8Quantizer(
            dtype=self.fp8_format.backward_dtype if role.is_gradient else self.fp8_format.forward_dtype,
            with_2d_quantization=self.enable_2d_quantization
            and role.tensor == "weight"
            and role.module_type in ("linear", "grouped_linear"),
        )
