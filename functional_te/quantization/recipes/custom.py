"""A recipe that is a function."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from functional_te._errors import kind_of, type_error, value_error
from functional_te.quantization.formats import Format
from functional_te.quantization.quantizers import Float8DelayedScalingQuantizer, IdentityQuantizer, Quantizer
from functional_te.quantization.recipes.recipe import Recipe, Role, check_bools, check_override

__all__ = ["CustomRecipe"]


@dataclasses.dataclass(frozen=True, eq=False)
class CustomRecipe(Recipe):
    """Any mix of formats: a pure function decides for every tensor role.

    Args:
        qfactory: from a :class:`Role` to a :class:`Quantizer` (with or without state), or an
            :class:`IdentityQuantizer` for a role that stays in high precision. A function of a module, because recipes
            are compared by their fields, and called when a plan is made.
        fp8_format: informational.
        fp8_dpa: FP8 dot-product attention; no op here reads it.
        fp8_mha: FP8 multi-head attention; no op here reads it.
        backward_override: None, ``"high_precision"`` or ``"dequantized"``; see :class:`Float8CurrentScaling`. Must be
            None if the function gives quantizers of delayed scaling.
        quantization_alignment: what grouped ops pad the tokens of a group to.

    Raises:
        TypeError: ``qfactory`` is no function, or it returned something else than a quantizer.
        ValueError: it returned None, an unknown override, or an alignment below 1.
    """

    qfactory: Callable[[Role], Quantizer | IdentityQuantizer] = None  # type: ignore[assignment]
    fp8_format: Format = Format.HYBRID
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None
    quantization_alignment: int = 128

    def __post_init__(self) -> None:
        where = "CustomRecipe"
        if not callable(self.qfactory):
            raise type_error(where, "qfactory", "a function of a Role", repr(self.qfactory))
        if not isinstance(self.fp8_format, Format):
            raise type_error(where, "fp8_format", "a Format", repr(self.fp8_format))
        check_bools(where, self, "fp8_dpa", "fp8_mha")
        check_override(where, self.backward_override)
        if not isinstance(self.quantization_alignment, int) or isinstance(self.quantization_alignment, bool):
            raise type_error(where, "quantization_alignment", "an int", repr(self.quantization_alignment))
        if self.quantization_alignment < 1:
            raise value_error(where, "quantization_alignment", "at least 1", self.quantization_alignment)

    def quantizer(self, role: Role) -> Quantizer | IdentityQuantizer:
        """What the function returns, checked."""
        made = self.qfactory(role)
        if made is None:
            wanted = "a quantizer (IdentityQuantizer() keeps a role in high precision)"
            raise value_error("CustomRecipe", "qfactory", wanted, f"None for {role!r}")
        if not isinstance(made, (Quantizer, IdentityQuantizer)):
            raise type_error("CustomRecipe", "qfactory", "a quantizer", f"{kind_of(made)} for {role!r}")
        if self.backward_override is not None and isinstance(made, Float8DelayedScalingQuantizer):
            raise value_error("CustomRecipe", "backward_override", "None with delayed scaling", self.backward_override)
        return made
