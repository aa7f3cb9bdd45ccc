"""What a recipe is: a frozen value that gives every tensor role of an op its quantizer."""

from __future__ import annotations

import dataclasses
from typing import Any

from functional_te._errors import type_error, value_error
from functional_te._value import Value
from functional_te.quantization.formats import Format
from functional_te.quantization.quantizer import IdentityQuantizer, Quantizer

__all__ = ["MMParams", "QParams", "Recipe", "Role", "check_bools", "check_format", "check_override", "check_products"]

_TENSORS = ("input", "weight", "output", "grad_output", "grad_input")
# how other libraries call the ops that own quantizers
_MODULE_TYPES = {"BasicLinear": "linear", "GroupedLinear": "grouped_linear"}


@dataclasses.dataclass(frozen=True, eq=False)
class Role(Value):
    """What a tensor is to an op.

    Attributes:
        op: class name of the op, for example ``"BasicLinear"``.
        tensor: ``"input"``, ``"weight"``, ``"output"``, ``"grad_output"`` or ``"grad_input"``.
        name: the op's own name, or an empty string.

    Raises:
        ValueError: another tensor.
    """

    op: str
    tensor: str
    name: str = ""

    def __post_init__(self) -> None:
        if self.tensor not in _TENSORS:
            raise value_error("Role", "tensor", f"one of {_TENSORS}", repr(self.tensor))

    @property
    def module_type(self) -> str:
        """``"linear"``, ``"grouped_linear"``, or the class name in lower case: as in Transformer Engine's roles."""
        return _MODULE_TYPES.get(self.op, self.op.lower())

    @property
    def tensor_type(self) -> str:
        """:attr:`tensor`, under Transformer Engine's name."""
        return self.tensor

    @property
    def is_gradient(self) -> bool:
        """Whether the tensor belongs to the backward."""
        return self.tensor.startswith("grad_")


@dataclasses.dataclass(frozen=True, eq=False)
class MMParams(Value):
    """Settings of one matrix product.

    Args:
        use_split_accumulator: whether an FP8 product on a GPU accumulates in float32; the reference always does.
    """

    use_split_accumulator: bool = True

    def __post_init__(self) -> None:
        check_bools("MMParams", self, "use_split_accumulator")


@dataclasses.dataclass(frozen=True, eq=False)
class QParams(Value):
    """Settings of one tensor role.

    Args:
        power_2_scale: round scales down to powers of two.
        amax_epsilon: floor of an amax.
        random_hadamard_transform: transform the columnwise copy (NVFP4).
        stochastic_rounding: round stochastically (NVFP4).
        fp4_2d_quantization: square tiles (NVFP4).
    """

    power_2_scale: bool = False
    amax_epsilon: float = 0.0
    random_hadamard_transform: bool = False
    stochastic_rounding: bool = False
    fp4_2d_quantization: bool = False

    def __post_init__(self) -> None:
        check_bools("QParams", self, "power_2_scale", "random_hadamard_transform", "stochastic_rounding")
        check_bools("QParams", self, "fp4_2d_quantization")
        if type(self.amax_epsilon) not in (int, float):
            raise type_error("QParams", "amax_epsilon", "a number", repr(self.amax_epsilon))
        if not 0 <= self.amax_epsilon < float("inf"):
            raise value_error("QParams", "amax_epsilon", "a finite number of at least 0", self.amax_epsilon)


@dataclasses.dataclass(frozen=True, eq=False)
class Recipe(Value):
    """Base of recipes. Fields and defaults of the subclasses are those of ``transformer_engine.common.recipe``.

    No field has an environment variable as its default, and an unknown field is an error.
    """

    def quantizer(self, role: Role) -> Quantizer | IdentityQuantizer | None:
        """The quantizer of a tensor role; None or an :class:`IdentityQuantizer` for high precision."""
        raise NotImplementedError

    @property
    def override(self) -> str | None:
        """How the backward departs from the recipe: None, ``"high_precision"`` or ``"dequantized"``."""
        return getattr(self, "backward_override", None)

    @property
    def fast_accumulation(self) -> tuple[bool, bool, bool]:
        """Whether the forward, input-gradient and weight-gradient products may accumulate fast on a GPU.

        What ``use_split_accumulator`` of :class:`MMParams` denies; without such fields Transformer Engine's choice.
        """
        products = [getattr(self, f"fp8_gemm_{name}", None) for name in ("fprop", "dgrad", "wgrad")]
        first, second, third = (
            default if own is None else not own.use_split_accumulator
            for own, default in zip(products, (True, False, False), strict=True)
        )
        return first, second, third


def check_format(where: str, value: Any, allowed: tuple[Format, ...] = (Format.HYBRID, Format.E4M3)) -> None:
    """Raise unless ``value`` is one of the allowed formats."""
    if not isinstance(value, Format):
        raise type_error(where, "fp8_format", "a Format", value)
    if value not in allowed:
        raise value_error(where, "fp8_format", " or ".join(item.name for item in allowed), value.name)


def check_bools(where: str, recipe: Any, *names: str) -> None:
    """Raise unless the fields are bools."""
    for name in names:
        if not isinstance(getattr(recipe, name), bool):
            raise type_error(where, name, "a bool", repr(getattr(recipe, name)))


def check_override(where: str, value: Any) -> None:
    """Raise unless ``value`` is a backward override."""
    if value not in (None, "high_precision", "dequantized"):
        raise value_error(where, "backward_override", "None, 'high_precision' or 'dequantized'", repr(value))


def check_products(where: str, recipe: Any) -> None:
    """Raise unless the settings of the three products are :class:`MMParams`."""
    for name in ("fp8_gemm_fprop", "fp8_gemm_dgrad", "fp8_gemm_wgrad"):
        if not isinstance(getattr(recipe, name), MMParams):
            raise type_error(where, name, "MMParams", repr(getattr(recipe, name)))


def check_role_settings(where: str, recipe: Any) -> None:
    """Raise unless the settings of the three roles are None or :class:`QParams`."""
    for name in ROLE_SETTINGS.values():
        own = getattr(recipe, name)
        if own is not None and not isinstance(own, QParams):
            raise type_error(where, name, "None or QParams", repr(own))


ROLE_SETTINGS = {"input": "fp8_quant_fwd_inp", "weight": "fp8_quant_fwd_weight", "grad_output": "fp8_quant_bwd_grad"}


def role_settings(recipe: Any, role: Role, default: QParams) -> QParams:
    """The settings of a role: the recipe's own field if it was given, else ``default``."""
    own = getattr(recipe, ROLE_SETTINGS.get(role.tensor, ""), None)
    return default if own is None else own
