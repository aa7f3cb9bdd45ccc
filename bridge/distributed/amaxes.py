"""Delayed scaling on several ranks: one message per step makes their scales equal."""

from __future__ import annotations

from typing import Any

import torch

from bridge import compat
from bridge.distributed.groups import check_model, group_of, operations_of, signature_of
from bridge.distributed.groups import process_group as find_group
from bridge.distributed.start import check_same_on_all_ranks
from bridge.recipe_context import add_agreement, remove_agreement
from functional_te._errors import value_error
from functional_te.agreement import agreed
from functional_te.quantization.state import DelayedScalingState
from functional_te.recipes import Recipe

__all__ = ["AmaxAgreement", "agree_amaxes"]


class AmaxAgreement:
    """That the ranks of a group use the same scales for the modules of a model.

    Whenever the outermost :class:`bridge.autocast` of a training forward is entered, which closes the step before, one
    all-reduce takes the largest amax over the ranks, for every role of every operation at once. Its size depends on the
    model alone: a rank that skipped an expert, or had no rows, sends zeros, which change nothing, and takes what the
    others saw. Contexts that are entered without grad mode send nothing and close nothing: a rank may evaluate alone.

    Every rank has to enter as many outermost contexts with grad mode, one per microbatch or per step, also if it has
    nothing to run inside.

    Attributes:
        modules: the operations that have quantizers.
        group: registry name of the process group.
        size: how many ranks it has.
    """

    def __init__(self, modules: tuple[Any, ...], group: str, size: int) -> None:
        self.modules, self.group, self.size = modules, group, size

    def reduces(self, process_group: Any) -> bool:
        """Whether it is one of this process group."""
        return find_group(self.group) is process_group

    def agree(self, recipe: Recipe | None = None) -> None:
        """Take the largest of every running amax over the ranks. A collective: all ranks have to call it.

        Args:
            recipe: nothing is sent if it says ``reduce_amax=False``.
        """
        if not getattr(recipe, "reduce_amax", True):
            return
        found: list[torch.Tensor | None] = []
        for module in self.modules:
            states = {role: own for role, quantizer, own in module.named_states() if _is_shared(own)}
            for role in (*module.op.forward_quantizers, *module.op.backward_quantizers):
                found.append(states[role].amax_history[:1] if role in states else None)
        known = [amax for amax in found if amax is not None]
        device = known[0].device if known else _device(self.modules)
        zero = torch.zeros(1, dtype=torch.float32, device=device)
        with torch.no_grad(), compat.preserved_versions(tuple(known)):
            largest = agreed([zero if amax is None else amax.to(device) for amax in found], self.group, self.size)
            if known:
                new = [own for own, amax in zip(largest, found, strict=True) if amax is not None]
                compat.copy_all(known, new)

    def remove(self) -> None:
        """End it, on all ranks."""
        remove_agreement(self)

    def __enter__(self) -> AmaxAgreement:
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()


def _is_shared(state: Any) -> bool:
    return isinstance(state, DelayedScalingState)


def _device(modules: tuple[Any, ...]) -> torch.device:
    for module in modules:
        for own in module.parameters():
            return own.device
    return torch.device("cpu")


def agree_amaxes(model: torch.nn.Module, group: Any = None) -> AmaxAgreement:
    """Have the ranks of a group use the same scales for a model with delayed scaling; see :class:`AmaxAgreement`.

    Call it on all ranks, in the same order, after the model is made or converted. It holds until
    :meth:`AmaxAgreement.remove`, also as a context manager, and keeps the operations alive. In a group of one rank
    nothing is sent and nothing changes.

    Args:
        model: a module that has operations of :mod:`bridge.ops`, or was converted.
        group: a process group; None is the default group.

    Raises:
        TypeError: ``model`` is no module, or ``group`` no process group.
        ValueError: no operation of the model has quantizers, or the ranks' models differ.
    """
    check_model(model, "agree_amaxes")
    name, size = group_of(group, "agree_amaxes", "group")
    modules = tuple(
        module for _, module in operations_of(model) if module.op.forward_quantizers or module.op.backward_quantizers
    )
    if not modules:
        raise value_error("agree_amaxes", "model", "operations with quantizers", type(model).__name__)
    check_same_on_all_ranks(signature_of(model), group, "agree_amaxes")
    agreement = AmaxAgreement(modules, name, size)
    if size > 1:
        add_agreement(agreement)
    return agreement
