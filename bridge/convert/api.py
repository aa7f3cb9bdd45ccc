"""``convert``, ``revert`` and ``conversion_report``."""

from __future__ import annotations

import copy
from typing import Any

import torch

from bridge.compat import functorch_active
from bridge.convert.plan import apply_plan, make_plan, unset
from bridge.convert.report import Report
from bridge.convert.select import Selection
from bridge.convert.swap import ATTRIBUTE, is_converted
from functional_te._errors import type_error, value_error
from functional_te.recipes import Recipe, as_recipe

__all__ = ["conversion_report", "convert", "revert"]


def _check_model(model: Any, where: str) -> None:
    if not isinstance(model, torch.nn.Module):
        raise type_error(where, "model", "a torch.nn.Module", type(model).__name__)
    if isinstance(model, (torch._dynamo.OptimizedModule, torch.jit.ScriptModule)):
        raise type_error(where, "model", "a module that is not compiled yet", type(model).__name__, f"First {where}.")


def _check_no_capture(where: str) -> None:
    """Raise while something records what runs: a model is converted between calls, not in one."""
    what = None
    if torch.compiler.is_compiling():
        what = "a compiler traces"
    elif torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        what = "a CUDA graph is captured"
    elif functorch_active():
        what = "a torch.func transform runs"
    if what is not None:
        raise RuntimeError(f"{where}: models cannot be converted while {what}. Do it before.")


def convert(
    model: torch.nn.Module,
    recipe: Recipe | None = None,
    *,
    include: Any = None,
    exclude: Any = None,
    fuse: bool = True,
    inplace: bool = False,
) -> Any:
    """Run the linear layers, norms, activations and larger patterns of a model as chains of operations.

    Modules stay where they are, with their names, hooks, parameters and buffers; only their class becomes a subclass
    with another ``forward``. So ``state_dict`` keys and their order, optimizers, tied weights and checkpoints are what
    they were. Quantizer state is not in ``state_dict``; it travels with copies and pickles of the model.

    Args:
        model: any module. What has no rule, or has one that does not fit, stays as it is and is in the report.
        recipe: the recipe outside of any :class:`~bridge.autocast`, None for high precision; an autocast comes first.
            It is entered by the model, or by a converted part that is called alone, for every call.
        include: what to convert: name patterns (``fnmatch``: ``"model.layers.*"``), module types or predicates
            ``(name, module) -> bool``, one or several; None is everything. What matches stands for all below it.
        exclude: likewise, what to leave alone; comes before ``include``.
        fuse: whether several modules may run as one chain.
        inplace: whether to convert ``model`` itself. Else a deep copy is, with parameters of its own.

    Returns:
        The converted model: ``model`` itself if ``inplace``. A model that is converted already is returned as it is.

    Raises:
        TypeError: ``model`` is no module, or a compiled one; an argument of the wrong kind.
        ValueError: a pattern that matches nothing, or another recipe for a model that is converted already.
        RuntimeError: while a graph is captured or traced, or a ``torch.func`` transform runs.
    """
    _check_no_capture("convert")
    _check_model(model, "convert")
    for name, value in (("fuse", fuse), ("inplace", inplace)):
        if not isinstance(value, bool):
            raise type_error("convert", name, "a bool", repr(value))
    recipe = recipe if recipe is None or isinstance(recipe, Recipe) else as_recipe(recipe)
    if is_converted(model):
        known = model.__dict__[ATTRIBUTE].recipe
        if recipe is not None and recipe is not known:
            raise value_error("convert", "recipe", f"{known!r}, which the model has", repr(recipe), "Revert it first.")
        return model
    selections = Selection(include, "include", model), Selection(exclude, "exclude", model)
    model = model if inplace else copy.deepcopy(model)
    apply_plan(model, make_plan(model, recipe, *selections, fuse), recipe)
    return model


def revert(model: torch.nn.Module) -> torch.nn.Module:
    """Give every module of ``model`` its own class back, in place. Modules that were not converted stay as they are.

    Returns:
        ``model``.

    Raises:
        TypeError: ``model`` is no module, or a compiled one.
        RuntimeError: a module's class was changed after it was converted (by sharding or a parametrization, say), or a
            graph is captured or traced. Nothing is changed then.
    """
    _check_no_capture("revert")
    _check_model(model, "revert")
    converted = [(name, module) for name, module in model.named_modules() if is_converted(module)]
    for name, module in converted:
        if "_functional_te_base" not in type(module).__dict__:
            raise RuntimeError(
                f"revert: {name or 'the model'} is a {type(module).__name__} made from the converted class. "
                "First undo what was done to it since."
            )
    for _, module in converted:
        unset(module)
    return model


def conversion_report(model: torch.nn.Module) -> Report:
    """What :func:`convert` did to ``model``: a :class:`Report` with a row per module.

    Raises:
        ValueError: a model that was not given to ``convert``.
    """
    record = model.__dict__.get(ATTRIBUTE) if isinstance(model, torch.nn.Module) else None
    if record is None or record.report is None:
        raise value_error("conversion_report", "model", "what convert() returned", type(model).__name__)
    report: Report = record.report
    return report
