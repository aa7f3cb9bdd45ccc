"""What a recipe is: a frozen value that gives every tensor role of an op its quantizer."""

from __future__ import annotations

import dataclasses

from functional_te._value import Value
from functional_te.quantization.quantizer import Quantizer

__all__ = ["Recipe", "Role"]


@dataclasses.dataclass(frozen=True, eq=False)
class Role(Value):
    """What a tensor is to an op.

    Attributes:
        op: class name of the op, for example ``"BasicLinear"``.
        tensor: ``"input"``, ``"weight"`` or ``"grad_output"``.
        name: the op's own name, or an empty string.
    """

    op: str
    tensor: str
    name: str = ""


@dataclasses.dataclass(frozen=True, eq=False)
class Recipe(Value):
    """Base of recipes."""

    def quantizer(self, role: Role) -> Quantizer | None:
        """The quantizer of a tensor role, or None for high precision."""
        raise NotImplementedError
