"""The one sweep that turns ops and rules into steps. It knows no op and no rule."""

from __future__ import annotations

import dataclasses

from functional_te.fuser.rule import FusionRule, Fusions, Window
from functional_te.ops import FusedOp, Op, OpRequiresGrad
from functional_te.quantization.recipes import Recipe

__all__ = ["Refusal", "fuse"]

Item = tuple[Op | FusedOp, tuple[int, ...]]


@dataclasses.dataclass(frozen=True)
class Refusal:
    """A rule that matched and was not applied.

    Attributes:
        rule: its name.
        start: index of the first matched op.
        reason: why.
    """

    rule: str
    start: int
    reason: str


def fuse(
    ops: tuple[Op, ...], rules: Fusions, recipe: Recipe | None, flow: tuple[OpRequiresGrad, ...]
) -> tuple[list[Item], list[Item], tuple[Refusal, ...]]:
    """Apply joint rules, then forward and backward rules independently of each other.

    Returns:
        Forward items and backward items, both in chain order, and the refusals.
    """
    refusals: list[Refusal] = []
    items: list[Item] = [(op, (index,)) for index, op in enumerate(ops)]
    items = _sweep(items, rules.joint, recipe, flow, refusals)
    forward = _sweep(items, rules.forward, recipe, flow, refusals)
    backward = _sweep(items, rules.backward, recipe, flow, refusals)
    return forward, backward, tuple(refusals)


def _sweep(
    items: list[Item],
    rules: tuple[FusionRule, ...],
    recipe: Recipe | None,
    flow: tuple[OpRequiresGrad, ...],
    refusals: list[Refusal],
) -> list[Item]:
    for rule in rules:
        result: list[Item] = []
        position = 0
        while position < len(items):
            fused = _try(rule, items, position, recipe, flow, refusals)
            if fused is None:
                result.append(items[position])
                position += 1
            else:
                result.append(fused)
                position += len(fused[1])
        items = result
    return items


def _try(
    rule: FusionRule,
    items: list[Item],
    start: int,
    recipe: Recipe | None,
    flow: tuple[OpRequiresGrad, ...],
    refusals: list[Refusal],
) -> Item | None:
    count = rule.match([op for op, _ in items], start)
    if count == 0:
        return None
    matched = items[start : start + count]
    covered = tuple(op for op, _ in matched if isinstance(op, Op))
    indices = tuple(index for _, covers in matched for index in covers)
    window = Window(covered, indices[0], recipe, tuple(flow[i] for i in indices))
    reason = rule.refuse(window)
    if reason is not None:
        refusals.append(Refusal(rule.name, indices[0], reason))
        return None
    fused = rule.build(covered)
    if not isinstance(fused, FusedOp) or fused.ops != covered:
        raise RuntimeError(
            f"fusion {rule.name!r} at op {indices[0]}: build: expected a FusedOp that covers {covered}, got {fused!r}."
        )
    return fused, indices
