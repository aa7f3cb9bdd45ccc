"""Quantizer state as values: pytrees of tensors, and the pure functions over them.

A training step with delayed scaling has three parts. Casting reads ``scale``. Casting *observes* an amax, which is
folded into slot 0 of the history. Once per step :func:`update_scale` closes the step: it computes the next scale
from the history and rolls it. A quantizer that observed nothing (its branch was skipped, the model was evaluated, a
gradient was zero) is left as it is, history and scale, as Transformer Engine's fused kernel does.
"""

from __future__ import annotations

from typing import Any

import torch

from functional_te import pytree
from functional_te.quantization.quantizer import Float8DelayedScalingQuantizer, Quantizer
from functional_te.quantization.scaling import delayed_scale, fold_amax, roll_history

__all__ = ["DelayedScalingState", "init_quantizer_state", "update_amax", "update_scale"]


@pytree.node
class DelayedScalingState:
    """State of one delayed-scaling quantizer.

    Attributes:
        scale: float32 ``[1]``, multiplies into FP8.
        amax_history: float32 ``[L]``. Slot 0 holds what the running step observed; slots 1 to L-1 hold earlier
            steps, oldest first.
    """

    scale: torch.Tensor
    amax_history: torch.Tensor


def init_quantizer_state(quantizer: Quantizer, device: torch.device | str = "cpu") -> DelayedScalingState | None:
    """Fresh state of a quantizer: scale 1 and an empty history for delayed scaling, None where there is no state."""
    if not isinstance(quantizer, Float8DelayedScalingQuantizer):
        return None
    return DelayedScalingState(
        scale=torch.ones(1, dtype=torch.float32, device=device),
        amax_history=torch.zeros(quantizer.amax_history_len, dtype=torch.float32, device=device),
    )


def update_amax(state: DelayedScalingState, amax: torch.Tensor) -> DelayedScalingState:
    """The state after observing ``amax`` (float32 ``[1]``). Repeating an observation changes nothing."""
    return DelayedScalingState(scale=state.scale, amax_history=fold_amax(state.amax_history, amax))


def update_scale(quantizer: Quantizer, state: Any) -> Any:
    """The state after closing a step: next scale and rolled history. Unchanged if nothing was observed.

    States of one quantizer may be stacked: scale ``[n, 1]`` and history ``[n, L]`` give the same bits as one by one
    (with the built-in algorithms).
    """
    if not isinstance(quantizer, Float8DelayedScalingQuantizer):
        return state
    history = state.amax_history
    algorithm = quantizer.amax_compute_algo
    if algorithm == "max":
        amax = history.amax(dim=-1, keepdim=True)
    elif algorithm == "most_recent":
        amax = history[..., :1]
    else:
        amax = algorithm(history).reshape(1)
    if quantizer.scaling_factor_compute_algo is None:
        scale = delayed_scale(amax, state.scale, quantizer.limit, margin=quantizer.margin)
    else:
        scale = quantizer.scaling_factor_compute_algo(amax, state.scale, quantizer.limit, quantizer).reshape(1)
    observed = history[..., :1] != 0
    return DelayedScalingState(
        scale=torch.where(observed, scale, state.scale),
        amax_history=torch.where(observed, roll_history(history), history),
    )
