"""Recipes: one file each, one line each here."""

from functional_te.quantization.formats import Format
from functional_te.quantization.recipes.current import Float8CurrentScaling, MMParams
from functional_te.quantization.recipes.delayed import DelayedScaling
from functional_te.quantization.recipes.recipe import Recipe, Role

__all__ = ["RECIPES", "DelayedScaling", "Float8CurrentScaling", "Format", "MMParams", "Recipe", "Role"]

RECIPES: tuple[type[Recipe], ...] = (
    Float8CurrentScaling,
    DelayedScaling,
)
