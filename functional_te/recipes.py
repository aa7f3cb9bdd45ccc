"""Recipes under the name users type: ``fte.recipes.DelayedScaling()``."""

from functional_te.quantization.recipes import *  # noqa: F403 - the same names, declared there
from functional_te.quantization.recipes import __all__ as __all__
