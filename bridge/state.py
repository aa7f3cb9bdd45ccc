"""Writing quantizer state back: mutable custom ops, correct in eager mode, compiled graphs and CUDA graphs."""

from __future__ import annotations

from typing import Any

import torch

from bridge.library import NAMESPACE
from functional_te.fuser.plan import Plan
from functional_te.quantization.scaling import fold_amax
from functional_te.quantization.state import update_amax, update_scale

__all__ = ["close_", "fold_amaxes_", "keep_scales", "write_", "write_state_"]

_library = torch.library.Library(NAMESPACE, "FRAGMENT")
_library.define("fold_amax_(Tensor(a!) amax_history, Tensor amax) -> ()")
_library.define("keep(Tensor[] scales) -> Tensor[]")
_library.define("write_(Tensor(a!) target, Tensor value) -> ()")


def _fold_amax(amax_history: torch.Tensor, amax: torch.Tensor) -> None:
    amax_history[:1].copy_(fold_amax(amax_history[:1], amax))


def _write(target: torch.Tensor, value: torch.Tensor) -> None:
    target.copy_(value)


def _keep(scales: list[torch.Tensor]) -> list[torch.Tensor]:
    return [scale.clone() for scale in scales]


_library.impl("keep", _keep, "CompositeExplicitAutograd")
torch.library.register_fake(f"{NAMESPACE}::keep", lambda scales: [torch.empty_like(s) for s in scales], lib=_library)
_library.impl("fold_amax_", _fold_amax, "CompositeExplicitAutograd")
_library.impl("write_", _write, "CompositeExplicitAutograd")
torch.library.register_fake(f"{NAMESPACE}::fold_amax_", lambda amax_history, amax: None, lib=_library)
torch.library.register_fake(f"{NAMESPACE}::write_", lambda target, value: None, lib=_library)


def keep_scales(plan: Plan, state: Any) -> Any:
    """``state`` with copies of the forward scales and keys, for use inside a compiled graph.

    Which intermediate a compiler saves for the backward is its choice, and ``scale`` may stand for ``1 / scale``. A
    copy made by an op it cannot look into is what it has to save, so that the live scale may change before the
    backward runs.
    """
    if not plan.observes:
        return state
    kept = torch.ops.functional_te.keep([state[index][role].read for index, role in plan.observes])
    copies = [dict(own) for own in state]
    for (index, role), own in zip(plan.observes, kept, strict=True):
        copies[index][role] = copies[index][role].reading(own)
    return tuple(copies)


def write_(target: torch.Tensor, value: torch.Tensor) -> None:
    """``target.copy_(value)`` as one op that a compiled graph keeps."""
    torch.ops.functional_te.write_(target, value)


def fold_amaxes_(state: Any, amaxes: dict[tuple[int, str], torch.Tensor]) -> None:
    """Fold observations into slot 0 of the histories of ``state``, in place.

    A direct kernel call in eager mode, where the dispatcher would cost more than the work.
    """
    if torch.compiler.is_compiling():
        for (index, role), amax in amaxes.items():
            torch.ops.functional_te.fold_amax_(state[index][role].amax_history, amax)
    else:
        for (index, role), amax in amaxes.items():
            _fold_amax(state[index][role].amax_history, amax)


def write_state_(state: Any, new: Any) -> None:
    """Write the tensors of ``new`` into those of ``state``."""
    write_(state.read, new.read)
    write_(state.amax_history, new.amax_history)


def close_(plan: Plan, state: Any, amaxes: dict[tuple[int, str], torch.Tensor]) -> None:
    """Fold observations in and close the step of the quantizers that observed, in place: one write per tensor."""
    for (index, role), amax in amaxes.items():
        quantizer = dict(plan.state_roles[index])[role]
        old = state[index][role]
        write_state_(old, update_scale(quantizer, update_amax(old, amax)))
