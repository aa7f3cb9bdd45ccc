"""Recipes: one file each, one line each here."""

from functional_te.quantization.formats import Format
from functional_te.quantization.quantizer import IdentityQuantizer
from functional_te.quantization.recipes.current import Float8CurrentScaling
from functional_te.quantization.recipes.custom import CustomRecipe
from functional_te.quantization.recipes.delayed import DelayedScaling
from functional_te.quantization.recipes.float8_block import Float8BlockScaling
from functional_te.quantization.recipes.foreign import as_recipe
from functional_te.quantization.recipes.mxfp8 import MXFP8BlockScaling
from functional_te.quantization.recipes.nvfp4 import NVFP4BlockScaling
from functional_te.quantization.recipes.recipe import MMParams, QParams, Recipe, Role

__all__ = [
    "RECIPES",
    "CustomRecipe",
    "DelayedScaling",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "Format",
    "IdentityQuantizer",
    "MMParams",
    "MXFP8BlockScaling",
    "NVFP4BlockScaling",
    "QParams",
    "Recipe",
    "Role",
    "as_recipe",
]

# every recipe that can be made without arguments
RECIPES: tuple[type[Recipe], ...] = (
    Float8CurrentScaling,
    DelayedScaling,
    Float8BlockScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)
