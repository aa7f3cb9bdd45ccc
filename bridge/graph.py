"""The op graph of a module; see :func:`functional_te.graph`."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from bridge.convert.chains import chains_in
from bridge.convert.swap import ATTRIBUTE
from bridge.ops.group import Group, _params
from bridge.ops.operation import FusibleOperation
from bridge.ops.sequential import Sequential
from bridge.recipe_context import active_recipe
from bridge.schema import Schema
from functional_te._errors import kind_of, type_error, value_error
from functional_te.graph import Graph
from functional_te.graph import graph as graph_of_chain
from functional_te.graph.make import plan_of_call
from functional_te.graph.value import Step
from functional_te.recipes import as_recipe
from functional_te.tensor_spec import TensorSpec

__all__ = ["graph"]

_ACTIVE = object()


def graph(
    module: Any, x: Any, *extra_inputs: Any, recipe: Any = _ACTIVE, backend: str = "auto", device: Any = None
) -> Graph:
    """What a module of :mod:`bridge.ops` does forward and backward: the chain that a compiled call runs.

    Nothing runs and nothing is written: casts of weights that are kept between microbatches are left out. Gradients are
    those that parameters (and ``x``, if it is a tensor) ask for.

    Args:
        module: an op, a fused one, a ``Sequential`` whose ops make one chain, or a converted module that runs one.
        x: the main input, or its :class:`functional_te.TensorSpec`, which is taken to be where the parameters are.
        extra_inputs: the extra inputs, or specs.
        recipe: a recipe, or None for high precision; left out it is that of the ``autocast`` around the call, or else
            the one that the module was converted with.
        backend: see :func:`functional_te.graph`.
        device: likewise.

    Raises:
        TypeError: no such module, or arguments of the wrong kind.
        ValueError: a module of several chains, broken channels, or an unknown backend or device.
    """
    group = _group(module)
    evaluates = bool(group.switching) and not any(own.training for own in group.switching)
    block = group.evaluation_block if evaluates else group.block
    if recipe is _ACTIVE:
        record = module.__dict__.get(ATTRIBUTE)
        recipe = active_recipe() or (None if record is None else record.recipe)
    elif recipe is not None:
        recipe = as_recipe(recipe)
    params = tuple(_params(own, None) for own in group.modules)
    where = next((value.device for own in params for value in own.values()), None)
    if where is not None:
        x, *extra_inputs = (_moved(value, where) for value in (x, *extra_inputs))  # type: ignore[assignment]
    options = {
        "recipe": recipe,
        "backend": backend,
        "requires_grad": _pattern(block, params, x, extra_inputs),
        "fusions": group.fusions(block, recipe),
    }
    found = graph_of_chain(block, params, x, *extra_inputs, device=device, **options)
    return found if found.error else _with_schemas(found, plan_of_call(block, x, **options))


def _group(module: Any) -> Group:
    """The one chain of a module."""
    if isinstance(module, Sequential):
        if module._group_error is not None:
            raise module._group_error
        groups = module.__dict__["_module_groups"]
        if len(groups) == 1 and isinstance(groups[0], Group):
            return groups[0]
        names = [
            ", ".join(type(own).__name__ for own in g.modules) if isinstance(g, Group) else type(g).__name__
            for g in groups
        ]
        raise value_error("graph", "module", "ops that make one chain", names or "no ops", "Ask for a part: model[:3].")
    if isinstance(module, FusibleOperation):
        return Group(module.basic_operations())
    if isinstance(module, torch.nn.Module) and ATTRIBUTE in module.__dict__:
        return _converted_group(module)
    raise type_error("graph", "module", "a module of bridge.ops or a converted one", kind_of(module))


def _converted_group(module: torch.nn.Module) -> Group:
    """The one chain of a converted module."""
    chains = chains_in(module.__dict__[ATTRIBUTE].data)
    if len(chains) == 1:
        return chains[0]._group
    inside = {
        name: len(found[0].ops)
        for name, own in module.named_modules()
        if name and ATTRIBUTE in own.__dict__ and len(found := chains_in(own.__dict__[ATTRIBUTE].data)) == 1
    }
    longest = sorted(inside, key=lambda name: -inside[name])[:3]
    hint = f"Ask for a part that makes one, such as {' or '.join(longest)}." if longest else ""
    raise value_error("graph", "module", "a converted module that runs one chain", f"{len(chains)} chains", hint)


def _moved(value: Any, device: Any) -> Any:
    return dataclasses.replace(value, device=device) if isinstance(value, TensorSpec) else value


def _pattern(block: Any, params: Any, x: Any, extra_inputs: Any) -> Any:
    """What asks for gradients; specs do."""
    flags = [value.requires_grad if isinstance(value, torch.Tensor) else True for value in (x, *extra_inputs)]
    asked = tuple(
        tuple(getattr(own[name], "requires_grad", True) for name in op.param_names)
        for own, op in zip(params, block.ops, strict=True)
    )
    return flags[0], asked, tuple(flags[1:])


def _with_schemas(found: Graph, plan: Any) -> Graph:
    """The graph with what only a registration finds out: bundles that no schema of a custom op can express."""
    return dataclasses.replace(
        found,
        forward=tuple(_checked(own, type(step.op)) for own, step in zip(found.forward, plan.forward, strict=True)),
        backward=tuple(_checked(own, type(step.op)) for own, step in zip(found.backward, plan.backward, strict=True)),
    )


def _checked(step: Step, op_class: type[Any]) -> Step:
    if not step.custom_op:
        return step
    for bundle in (op_class.fwd_args_type, op_class.bwd_args_type):
        try:
            if bundle is not None:
                Schema(bundle)
        except TypeError as error:
            return dataclasses.replace(
                step, custom_op="", gate=f"{error}: the compiled graph traces its implementation"
            )
    return step
