"""Recipes under the name users type: ``fte.recipes.DelayedScaling()``."""

from functional_te.quantization.recipes import (
    RECIPES,
    DelayedScaling,
    Float8CurrentScaling,
    Format,
    MMParams,
    Recipe,
    Role,
)

__all__ = ["RECIPES", "DelayedScaling", "Float8CurrentScaling", "Format", "MMParams", "Recipe", "Role"]
