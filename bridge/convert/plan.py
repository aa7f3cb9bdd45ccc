"""From a model to a plan of its conversion, and applying it: everything is made before anything is changed."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from bridge.convert import rules_transformers_blocks as blocks
from bridge.convert.chains import BoundChain
from bridge.convert.report import ALONE, CONVERTED, FUSED, Report, Row
from bridge.convert.rule import Fused, Leaf, Site, refusal
from bridge.convert.rules_te import te_leaf, te_sequential
from bridge.convert.rules_torch import run_leaf, sequential, torch_leaf
from bridge.convert.rules_torch_attention import multihead_attention
from bridge.convert.rules_torch_layers import decoder_layer, encoder_layer
from bridge.convert.rules_transformers import transformers_leaf
from bridge.convert.select import Selection
from bridge.convert.swap import ATTRIBUTE, Record, base_class, converted_class, is_converted, original
from functional_te.recipes import Recipe

__all__ = ["CONTAINER_RULES", "LEAF_RULES", "Plan", "apply_plan", "make_plan", "unset"]

LEAF_RULES: tuple[Any, ...] = (torch_leaf, transformers_leaf, te_leaf)
CONTAINER_RULES: tuple[Any, ...] = (
    sequential,
    multihead_attention,
    encoder_layer,
    decoder_layer,
    te_sequential,
    blocks.attention,
    blocks.gated_mlp,
    blocks.plain_mlp,
    blocks.post_norm,
    blocks.bert_layer,
    blocks.layer,
)

Path = list[tuple[str, torch.nn.Module]]


@dataclasses.dataclass
class Plan:
    """What is to be changed.

    Attributes:
        records: for every module that is converted, its record.
        report: what will be reported.
    """

    records: list[tuple[torch.nn.Module, Record]]
    report: Report


def _paths(model: torch.nn.Module) -> list[Path]:
    """For every module, under each of its names, itself and what it is in, the model first."""
    modules = dict(model.named_modules(remove_duplicate=False))
    paths = []
    for name in modules:
        parts = name.split(".") if name else []
        names = ["", *[".".join(parts[: end + 1]) for end in range(len(parts))]]
        paths.append([(own, modules[own]) for own in names])
    return paths


def _leaf(module: torch.nn.Module, recipe: Recipe | None) -> Leaf | str | None:
    for rule in LEAF_RULES:
        found: Leaf | str | None = rule(module)
        if found is not None:
            return found if isinstance(found, str) else refusal(found.ops, recipe) or found
    return None


def _excuse(module: torch.nn.Module) -> str:
    """Why a module without rule is left alone."""
    if "forward" in module.__dict__:
        return "its forward was replaced on the instance"
    for kind in (torch.nn.Linear, torch.nn.LayerNorm, torch.nn.RMSNorm):
        if isinstance(module, kind):
            return f"a subclass of {kind.__name__} with a forward of its own"
    return f"no operation for {type(module).__name__}"


def _survey(
    paths: list[Path], include: Selection, exclude: Selection
) -> tuple[dict[int, str], dict[int, torch.nn.Module], dict[int, str]]:
    """By id: the first name of every module, the module, and why it is not looked at.

    A module with several names is excluded if it is under one of them.
    """
    names: dict[int, str] = {}
    modules: dict[int, torch.nn.Module] = {}
    reasons: dict[int, str] = {}
    for path in paths:
        name, module = path[-1]
        first = id(module) not in names
        if first:
            names[id(module)], modules[id(module)] = name, module
        if any(is_converted(own) for _, own in path):
            reasons[id(module)] = "converted before"
        elif exclude.covers(path):
            reasons[id(module)] = "excluded"
        elif first and include and not include.covers(path):
            reasons[id(module)] = "not included"
    return names, modules, reasons


def _fuse(modules: dict[int, torch.nn.Module], site: Site, reasons: dict[int, str]) -> None:
    """Try the rules for containers, parts before what they are parts of."""
    for key, module in reversed(modules.items()):
        if key in reasons or site.leaf(module) is not None:
            continue
        for rule in CONTAINER_RULES:
            found: Fused | str | None = rule(module, site)
            if isinstance(found, Fused):
                site.fused[key] = found
            elif found is not None:
                reasons[key] = found
            if found is not None:
                break


def make_plan(
    model: torch.nn.Module, recipe: Recipe | None, include: Selection, exclude: Selection, fuse: bool
) -> Plan:
    """Decide for every module what becomes of it. Changes nothing."""
    names, modules, reasons = _survey(_paths(model), include, exclude)
    leaves: dict[int, Leaf] = {}
    for key, module in modules.items():
        leaf = None if key in reasons else _leaf(module, recipe)
        if isinstance(leaf, str):
            reasons[key] = leaf
        elif leaf is not None:
            leaves[key] = leaf
    # what a leaf holds is the leaf's
    for key in {id(part) for own in leaves for part in modules[own].modules() if id(part) != own}:
        del modules[key]
        leaves.pop(key, None)
    site = Site(leaves, recipe)
    if fuse:
        _fuse(modules, site, reasons)
    return Plan(_records(modules, leaves, site, recipe), _report(names, modules, leaves, site, reasons))


def _records(
    modules: dict[int, torch.nn.Module], leaves: dict[int, Leaf], site: Site, recipe: Recipe | None
) -> list[tuple[torch.nn.Module, Record]]:
    records: list[tuple[torch.nn.Module, Record]] = []
    in_chains = {id(part) for fused in site.fused.values() for part in fused.parts}
    for fused in site.fused.values():
        for op in fused.covered:
            op.covered = True
    for key, module in modules.items():
        if key in site.fused:
            fused = site.fused[key]
            record = Record(fused.rule, fused.call, fused.data, fused.ops, fused.changed)
        elif key in leaves and (not leaves[key].only_inside or key in in_chains):
            leaf = leaves[key]
            data = BoundChain(*leaf.ops) if leaf.data is None else leaf.data
            # what may only be a part of a chain owns its operations, but runs as it did
            call = original if leaf.only_inside else leaf.call or run_leaf
            record = Record(leaf.rule, call, data, leaf.ops)
        else:
            continue
        record.recipe = recipe
        converted_class(base_class(module))  # raises here, not when half of the model is changed
        records.append((module, record))
    return records


def _report(
    names: dict[int, str],
    modules: dict[int, torch.nn.Module],
    leaves: dict[int, Leaf],
    site: Site,
    reasons: dict[int, str],
) -> Report:
    inside = {id(part): names[key] for key, fused in site.fused.items() for part in fused.parts}
    rows = []
    for key, module in modules.items():
        name, kind = names[key], type(module).__name__
        if key in site.fused:
            rows.append(Row(name, kind, FUSED, site.fused[key].rule, site.fused[key].why))
        elif key in leaves and key in inside:
            where = f"in the chain of {inside[key] or 'the model'}"
            rows.append(Row(name, kind, FUSED, leaves[key].rule, f"{leaves[key].why}; {where}"))
        elif key in leaves and leaves[key].only_inside:
            rows.append(Row(name, kind, ALONE, "", leaves[key].only_inside))
        elif key in leaves:
            rows.append(Row(name, kind, CONVERTED, leaves[key].rule, leaves[key].why))
        elif key in reasons:
            if module._parameters or reasons[key] not in ("excluded", "not included", "converted before"):
                rows.append(Row(name, kind, ALONE, "", reasons[key]))
        elif module._parameters:
            rows.append(Row(name, kind, ALONE, "", _excuse(module)))
    return Report(tuple(rows))


def _set(module: Any, record: Record) -> None:
    """Convert one module. The values before of attributes that change are kept in the record."""
    changed, record.kept = record.kept, {name: getattr(module, name) for name in record.kept}
    for name, value in changed.items():
        setattr(module, name, value)
    module.__dict__[ATTRIBUTE] = record
    module.__class__ = converted_class(base_class(module))


def unset(module: Any) -> None:
    """Undo :func:`_set`."""
    record: Record = module.__dict__.pop(ATTRIBUTE)
    module.__class__ = type(module).__mro__[1]
    for name, value in record.kept.items():
        setattr(module, name, value)


def apply_plan(model: torch.nn.Module, plan: Plan, recipe: Recipe | None) -> None:
    """Convert every module of a plan, or none if one cannot be."""
    records = plan.records
    if not any(module is model for module, _ in records):
        record = Record("model", original, None, ())
        record.recipe = recipe
        records = [(model, record), *records]
    done: list[Any] = []
    try:
        for module, record in records:
            _set(module, record)
            done.append(module)
    except BaseException:
        for module in done:
            unset(module)
        raise
    model.__dict__[ATTRIBUTE].report = plan.report
    if recipe is not None:
        for _, record in records:
            for op in record.ops:
                op.prepare_state(recipe)
