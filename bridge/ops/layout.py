"""What te.ops' users and tests read off a group: the steps of its plan over modules."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from bridge.ops.custom import HookedFusedOp
from bridge.ops.hook_calls import module_of
from functional_te.chain import Chain
from functional_te.fuser.plan import Plan, full_pattern
from functional_te.fuser.plan import plan as make_plan
from functional_te.recipes import Recipe, as_recipe

if TYPE_CHECKING:
    from bridge.ops.operation import BasicOperation

__all__ = ["Layout"]

Step = tuple[Any, list[int]]


def _requires_grad(tensor: Any) -> bool:
    return bool(getattr(tensor, "requires_grad", False))


class Layout:
    """The part of :class:`~bridge.ops.group.Group` that follows te.ops.

    Attributes:
        last_call: recipe, grad mode, whether the main input and each extra input needed a gradient, of the last eager
            call or of :meth:`maybe_fuse_ops`; None before.
    """

    modules: list[BasicOperation]
    eager_block: Chain
    num_extra_inputs: int
    last_call: tuple[Recipe | None, bool, bool, tuple[bool, ...]] | None

    def fusions(self, block: Chain, recipe: Recipe | None) -> Any:
        """The fusions to plan a call with, or None for the default ones."""
        raise NotImplementedError

    def remember_call(self, recipe: Recipe | None, input_: Any, extra_inputs: Any) -> None:
        """Note what the plan of a call depends on."""
        extras = tuple([_requires_grad(extra) for extra in extra_inputs]) if extra_inputs else ()
        self.last_call = (recipe, torch.is_grad_enabled(), _requires_grad(input_), extras)

    def maybe_fuse_ops(self, is_grad_enabled: bool, recipe: Any, input_: Any, extra_inputs: Any = ()) -> None:
        """Plan a call without running it.

        Args:
            is_grad_enabled: the grad mode of the call.
            recipe: its recipe, or None.
            input_: its main input.
            extra_inputs: its extra inputs.
        """
        recipe = recipe if recipe is None or isinstance(recipe, Recipe) else as_recipe(recipe)
        with torch.set_grad_enabled(is_grad_enabled):
            self.remember_call(recipe, input_, extra_inputs)
        self._plan()

    def _plan(self) -> Plan:
        """The plan of the last call; before one, of a call in which everything needs a gradient."""
        block = self.eager_block
        known = self.last_call or (None, True, True, (True,) * block.num_extra_inputs)
        recipe, enabled, needs_input, needs_extras = known
        pattern = full_pattern(block, False)
        if enabled and len(needs_extras) == block.num_extra_inputs:
            params = tuple(
                tuple(module.get_parameter(name).requires_grad for name in op.param_names)
                for op, module in zip(block.ops, self.modules, strict=True)
            )
            pattern = (needs_input, params, needs_extras)
        return make_plan(block, recipe=recipe, requires_grad=pattern, fusions=self.fusions(block, recipe))

    def _steps(self, steps: Any) -> list[Step]:
        result: list[Step] = []
        for step in steps:
            if isinstance(step.op, HookedFusedOp):
                op: Any = module_of(step.op.serial)
            else:
                op = step.op if step.fused else self.modules[step.indices[0]]
            result.append((op, list(step.indices)))
        return result

    @property
    def _forward_ops(self) -> list[Step]:
        """The forward steps: each a module or a fused op, and the indices of the basic ops it covers."""
        return self._steps(self._plan().forward)

    @property
    def _backward_ops(self) -> list[Step]:
        """The backward steps in chain order; as in te.ops also those before the first op that needs a gradient."""
        plan = self._plan()
        steps = self._steps(plan.backward)[::-1]
        covered = {index for _, indices in steps for index in indices}
        before: list[Step] = [(m, [i]) for i, m in enumerate(self.modules) if i not in covered]
        return [*before, *steps]

    @property
    def _basic_ops(self) -> list[BasicOperation]:
        return self.modules

    @property
    def _num_extra_inputs(self) -> int:
        return self.num_extra_inputs

    @property
    def _basic_op_extra_input_sources(self) -> list[list[tuple[int, int] | None]]:
        """For every basic op and extra input: the (op, slot) that produces it, or None if the caller does."""
        return [
            [None if source.public >= 0 else (source.op, source.slot) for source in sources]
            for sources in self.eager_block.extra_sources
        ]
