"""ONNX: a model's forward in standard operators.

Custom ops are decomposed: high precision becomes LayerNormalization, Gemm, Gelu, ... A per-tensor FP8 recipe becomes
the arithmetic of its casts, ``Mul, Clip, Cast(FLOAT8E4M3FN), Cast, MatMul, Mul``, and not QuantizeLinear and
DequantizeLinear, whose scales are constants and divide where these multiply: results are those of eager mode.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

from bridge.recipe_context import autocast
from functional_te._errors import value_error
from functional_te.recipes import DelayedScaling, Float8CurrentScaling, as_recipe

__all__ = ["to_onnx"]

PER_TENSOR = (DelayedScaling, Float8CurrentScaling)


def to_onnx(
    model: torch.nn.Module, args: tuple[Any, ...], path: Any = None, *, recipe: Any = None, **options: Any
) -> Any:
    """Export the forward of a model with ``torch.onnx.export(dynamo=True)``. Needs the extra ``onnx``.

    Args:
        model: a model with modules of :mod:`bridge.ops`. Call ``model.eval()`` first if it has dropout.
        args: example inputs.
        path: where to write the model, or None.
        recipe: None, ``DelayedScaling`` (with the scales that the model has now) or ``Float8CurrentScaling``.
        options: further arguments of ``torch.onnx.export``: ``dynamic_shapes``, ``opset_version``, names, ...

    Returns:
        The ``torch.onnx.ONNXProgram``.

    Raises:
        ValueError: another recipe; its casts read and write the bits of numbers, for which ONNX has no operators.
        ModuleNotFoundError: a package is missing.
    """
    recipe = None if recipe is None else as_recipe(recipe)
    if recipe is not None and not isinstance(recipe, PER_TENSOR):
        wanted = "None or a per-tensor recipe (DelayedScaling, Float8CurrentScaling)"
        raise value_error("to_onnx", "recipe", wanted, type(recipe).__name__, "Export in high precision: recipe=None.")
    table = {torch.ops.aten.amax.default: _reduce_max(), **options.pop("custom_translation_table", {})}
    # entering makes the state of a model that has not run yet, before anything is traced
    with torch.no_grad(), autocast(enabled=recipe is not None, recipe=recipe):
        return torch.onnx.export(model, args, path, dynamo=True, custom_translation_table=table, **options)


def _reduce_max() -> Any:
    """``amax``, which the exporter's own table takes with dimensions only."""
    try:
        importlib.import_module("onnx")
        op = importlib.import_module("onnxscript").opset18
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"to_onnx: {error.name} is missing: pip install 'functional_te[onnx]'") from error

    def amax(x: Any, dim: tuple[int, ...] = (), keepdim: bool = False) -> Any:
        if not dim:
            return op.ReduceMax(x, keepdims=int(keepdim))
        return op.ReduceMax(x, op.Constant(value_ints=list(dim)), keepdims=int(keepdim))

    return amax
