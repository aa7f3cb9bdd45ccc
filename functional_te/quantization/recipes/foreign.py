"""Recipe objects of Transformer Engine as recipes of this library. Nothing of it is imported: classes go by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from functional_te._errors import kind_of, type_error, value_error
from functional_te._value import Value
from functional_te.quantization.formats import Format
from functional_te.quantization.quantizer import IdentityQuantizer, Quantizer
from functional_te.quantization.quantizers import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8DelayedScalingQuantizer,
    HybridQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
)
from functional_te.quantization.recipes.current import Float8CurrentScaling
from functional_te.quantization.recipes.custom import CustomRecipe
from functional_te.quantization.recipes.delayed import DelayedScaling
from functional_te.quantization.recipes.float8_block import Float8BlockScaling
from functional_te.quantization.recipes.mxfp8 import MXFP8BlockScaling
from functional_te.quantization.recipes.nvfp4 import NVFP4BlockScaling
from functional_te.quantization.recipes.recipe import MMParams, QParams, Recipe, Role

__all__ = ["as_quantizer", "as_recipe"]

_RECIPES: dict[str, type[Recipe]] = {
    kind.__name__: kind
    for kind in (
        CustomRecipe,
        DelayedScaling,
        Float8BlockScaling,
        Float8CurrentScaling,
        MXFP8BlockScaling,
        NVFP4BlockScaling,
    )
}
_ELEMENT_TYPES = {
    "kFloat8E4M3": torch.float8_e4m3fn,
    "kFloat8E5M2": torch.float8_e5m2,
    "kFloat4E2M1": torch.float4_e2m1fn_x2,
}


def is_foreign(value: Any) -> bool:
    """Whether ``value`` is an object of Transformer Engine."""
    return any(kind.__module__.partition(".")[0].startswith("transformer_engine") for kind in type(value).__mro__)


def as_recipe(recipe: Any) -> Recipe | None:
    """A recipe of this library; one of Transformer Engine is translated field by field.

    Settings per role (``fp8_quant_fwd_inp``, ...) count if they were set on the object itself; a flag of the recipe,
    ``use_power_2_scales`` say, is honoured, where te.ops ignores it.

    Args:
        recipe: None, a :class:`Recipe`, or a recipe object of Transformer Engine.

    Raises:
        TypeError: something else.
    """
    if recipe is None or isinstance(recipe, Recipe):
        return recipe
    kind = _RECIPES.get(type(recipe).__name__)
    if kind is None or not is_foreign(recipe):
        wanted = "None or a recipe of functional_te.recipes or of transformer_engine.common.recipe"
        raise type_error("plan", "recipe", wanted, kind_of(recipe))
    fields = {}
    for field in dataclasses.fields(kind):
        present = field.name in vars(recipe) if field.name.startswith("fp8_quant_") else hasattr(recipe, field.name)
        if present:
            fields[field.name] = _field(field.name, getattr(recipe, field.name))
    return kind(**fields)


def _field(name: str, value: Any) -> Any:
    if name == "qfactory":
        return _ForeignFactory(value)
    if name.startswith("fp8_gemm_"):
        return MMParams(use_split_accumulator=bool(value.use_split_accumulator))
    if name.startswith("fp8_quant_"):
        return QParams(
            **{f.name: getattr(value, f.name) for f in dataclasses.fields(QParams) if hasattr(value, f.name)}
        )
    if name.endswith("_format"):
        return Format[value.name]
    return value


@dataclasses.dataclass(frozen=True, eq=False)
class _ForeignFactory(Value):
    """A factory whose results may be quantizers of Transformer Engine. A value, so that equal ones compare equal."""

    function: Callable[[Any], Any]

    def __call__(self, role: Role) -> Quantizer | IdentityQuantizer | None:
        made = self.function(role)
        return as_quantizer(made, role) if is_foreign(made) else made


def as_quantizer(value: Any, role: Role | None = None) -> Quantizer | IdentityQuantizer:
    """A quantizer (or a request for delayed scaling) of Transformer Engine as a value of this library.

    Args:
        value: the object.
        role: what it is for; a request names a format, whose types depend on that.

    Raises:
        TypeError: an unknown class.
    """
    name = type(value).__name__
    if name not in _QUANTIZERS:
        raise type_error("recipe", "quantizer", f"one of {sorted(_QUANTIZERS)}", name)
    if name == "DelayedScalingRequest":
        return _delayed(value, role)
    return _QUANTIZERS[name](value)


def _element(value: Any) -> torch.dtype:
    name = getattr(value, "name", str(value)).rpartition(".")[-1]
    if name not in _ELEMENT_TYPES:
        raise value_error("recipe", "quantizer", f"an element type among {sorted(_ELEMENT_TYPES)}", name)
    return _ELEMENT_TYPES[name]


def _current(value: Any) -> Quantizer:
    return Float8CurrentScalingQuantizer(
        dtype=_element(value.dtype),
        amax_epsilon=float(value.amax_epsilon),
        power_2_scale=bool(value.force_pow_2_scales),
    )


def _delayed(value: Any, role: Role | None = None) -> Quantizer:
    fmt = Format[value.fp8_format.name]
    return Float8DelayedScalingQuantizer(
        dtype=fmt.backward_dtype if role is not None and role.is_gradient else fmt.forward_dtype,
        margin=value.margin,
        amax_history_len=value.amax_history_len,
        amax_compute_algo=value.amax_compute_algo,
        scaling_factor_compute_algo=value.scaling_factor_compute_algo,
    )


def _block(value: Any) -> Quantizer:
    return Float8BlockQuantizer(
        dtype=_element(value.dtype),
        amax_epsilon=float(value.amax_epsilon),
        power_2_scale=bool(value.force_pow_2_scales),
        block_scaling_dim=int(value.block_scaling_dim),
    )


def _mxfp8(value: Any) -> Quantizer:
    return MXFP8Quantizer(
        dtype=_element(value.dtype), with_2d_quantization=bool(getattr(value, "with_2d_quantization", False))
    )


def _nvfp4(value: Any) -> Quantizer:
    over = getattr(value, "nvfp4_use_4over6", False)
    return NVFP4Quantizer(
        with_rht=bool(value.with_rht),
        with_2d_quantization=bool(value.with_2d_quantization),
        stochastic_rounding=bool(value.stochastic_rounding),
        row_scaled=bool(getattr(value, "row_scaled_nvfp4", False)),
        four_over_six=value.nvfp4_4over6_err_mode if over else None,
        e4m3_max=int(getattr(value, "nvfp4_e4m3_max", 448)),
    )


def _hybrid(value: Any) -> Quantizer:
    row, column = as_quantizer(value.rowwise_quantizer), as_quantizer(value.columnwise_quantizer)
    assert isinstance(row, Quantizer)
    assert isinstance(column, Quantizer)
    return HybridQuantizer(
        rowwise_quantizer=row, columnwise_quantizer=column, columnwise_source=value.columnwise_source
    )


def _identity(value: Any) -> IdentityQuantizer:
    del value
    return IdentityQuantizer()


_QUANTIZERS: dict[str, Callable[[Any], Quantizer | IdentityQuantizer]] = {
    "DelayedScalingRequest": _delayed,
    "Float8BlockQuantizer": _block,
    "Float8CurrentScalingQuantizer": _current,
    "HybridQuantizer": _hybrid,
    "IdentityQuantizer": _identity,
    "MXFP8Quantizer": _mxfp8,
    "NVFP4Quantizer": _nvfp4,
}
