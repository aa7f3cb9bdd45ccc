"""Modules whose weights are stored only in low precision."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from bridge.quantized_weight import QuantizedWeight
from bridge.recipe_context import default_recipe
from bridge.weight_cache import weight_quantizers
from functional_te._errors import type_error
from functional_te.quantization.cast import quantize
from functional_te.quantization.quantizers import (
    Float8CurrentScalingQuantizer,
    Float8DelayedScalingQuantizer,
    Quantizer,
)
from functional_te.recipes import Recipe, as_recipe

if TYPE_CHECKING:
    from bridge.ops.operation import BasicOperation

__all__ = ["quantized_model_init", "stored", "stored_weight"]


class _Init:
    """How the weights of modules are made.

    Attributes:
        recipe: the recipe of stored weights, or None for weights in high precision.
        keeps_values: whether a stored weight keeps its initial values.
    """

    def __init__(self) -> None:
        self.recipe: Recipe | None = None
        self.keeps_values = False


_init = _Init()


class quantized_model_init:
    """Weights of linear modules that are made inside are stored only in low precision.

    Such a weight is a :class:`QuantizedWeight`: forwards with a recipe read its data without casting, forwards without
    one read its values; its gradient is an ordinary tensor, and an optimizer that writes to it casts again. A
    recipe with delayed scaling stores weights with the scale of their own amax. The context does not enable quantized
    computation; :class:`bridge.autocast` does.

    Args:
        enabled: False makes ordinary weights inside.
        recipe: a recipe, also one of Transformer Engine; None means :func:`bridge.recipe_context.default_recipe`.
        preserve_high_precision_init_val: keep the initial values on the CPU, for the master weights of an optimizer:
            ``weight.get_high_precision_init_val()``.

    Raises:
        TypeError: ``recipe`` is no recipe, or ``enabled`` no bool.
    """

    def __init__(
        self, enabled: bool = True, recipe: Any = None, preserve_high_precision_init_val: bool = False
    ) -> None:
        if not isinstance(enabled, bool):
            raise type_error("quantized_model_init", "enabled", "a bool", repr(enabled), "Pass a recipe as recipe=.")
        self.recipe = (default_recipe() if recipe is None else as_recipe(recipe)) if enabled else None
        self.keeps_values = preserve_high_precision_init_val
        self._outer: list[tuple[Recipe | None, bool]] = []

    def __enter__(self) -> quantized_model_init:
        self._outer.append((_init.recipe, _init.keeps_values))
        _init.recipe, _init.keeps_values = self.recipe, self.keeps_values
        return self

    def __exit__(self, *exception: object) -> None:
        _init.recipe, _init.keeps_values = self._outer.pop()


def stored_weight(module: BasicOperation, name: str, value: torch.Tensor) -> torch.nn.Parameter:
    """A fresh parameter as it is to be stored: ``value``, or its cast inside of :class:`quantized_model_init`.

    Parameters that are made again (materialized, reset) are stored as they were.
    """
    quantizers = module.stored_quantizers
    if name not in quantizers and _init.recipe is not None:
        quantizer = weight_quantizers(module, _init.recipe, value.device).get(name)
        if quantizer is not None:
            quantizers[name] = _without_state(quantizer)
    if name not in quantizers:
        return torch.nn.Parameter(value)
    weight = torch.nn.Parameter(stored(value, quantizers[name]))
    if _init.keeps_values:
        assert isinstance(weight, QuantizedWeight)
        weight.set_high_precision_init_val(value.detach().to("cpu", copy=True))
    return weight


def stored(value: torch.Tensor, quantizer: Quantizer) -> QuantizedWeight:
    """The cast of ``value`` as a weight."""
    return QuantizedWeight.from_quantized(quantize(value, quantizer))


def _without_state(quantizer: Quantizer) -> Quantizer:
    """A quantizer for weights that outlive every state."""
    if isinstance(quantizer, Float8DelayedScalingQuantizer):
        own = Float8CurrentScalingQuantizer(dtype=quantizer.dtype)
        return own.with_usage(quantizer.rowwise, quantizer.columnwise)
    if quantizer.stochastic:
        return dataclasses.replace(quantizer, stochastic_rounding=False)  # type: ignore[call-arg]
    return quantizer
