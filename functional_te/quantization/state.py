"""Quantizer state as values: pytrees of tensors, and the pure functions over them.

A training step with delayed scaling has three parts. Casting reads ``scale``. Casting *observes* an amax, which is
folded into slot 0 of the history. Once per step :func:`update_scale` closes the step: it computes the next scale
from the history and rolls it. A quantizer that observed nothing (its branch was skipped, the model was evaluated, a
gradient was zero) is left as it is, history and scale, as Transformer Engine's fused kernel does.

The state of a stochastic quantizer is the key of its random bits. Every cast of a step uses it (and mixes the amax of
the data in), so a recomputed forward rounds as the first one did; closing the step gives the next key.
"""

from __future__ import annotations

from typing import Any

import torch

from functional_te import pytree
from functional_te.quantization.quantizer import Quantizer
from functional_te.quantization.quantizers.per_tensor import Float8DelayedScalingQuantizer
from functional_te.quantization.random import make_key, next_key
from functional_te.quantization.scaling import delayed_scale, fold_amax, roll_history

__all__ = [
    "DelayedScalingState",
    "StochasticRoundingState",
    "init_quantizer_state",
    "state_type",
    "update_amax",
    "update_scale",
]


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

    @property
    def read(self) -> torch.Tensor:
        """What a cast reads."""
        return self.scale

    def reading(self, scale: torch.Tensor) -> DelayedScalingState:
        """The state with another tensor for casts to read."""
        return DelayedScalingState(scale=scale, amax_history=self.amax_history)


@pytree.node
class StochasticRoundingState:
    """State of one stochastic quantizer.

    Attributes:
        key: int64 ``[2]``, two words of 32 bits.
        amax_history: float32 ``[1]``: what the running step observed. A key that rounded nothing is used again.
    """

    key: torch.Tensor
    amax_history: torch.Tensor

    @property
    def read(self) -> torch.Tensor:
        """What a cast reads."""
        return self.key

    def reading(self, key: torch.Tensor) -> StochasticRoundingState:
        """The state with another tensor for casts to read."""
        return StochasticRoundingState(key=key, amax_history=self.amax_history)


def state_type(quantizer: Quantizer) -> type[Any] | None:
    """The class of a quantizer's state; None if it has none."""
    if quantizer.stochastic:
        return StochasticRoundingState
    return DelayedScalingState if quantizer.stateful else None


def init_quantizer_state(
    quantizer: Quantizer, device: torch.device | str = "cpu", *, seed: int = 0, path: tuple[int, ...] = ()
) -> Any:
    """Fresh state of a quantizer.

    Args:
        quantizer: the quantizer.
        device: where the state lives.
        seed: seed of the random bits of a stochastic quantizer.
        path: more integers that tell its key from those of other quantizers.

    Returns:
        Scale 1 and an empty history for delayed scaling, a key for stochastic rounding, None where there is no state.
    """
    if isinstance(quantizer, Float8DelayedScalingQuantizer):
        return DelayedScalingState(
            scale=torch.ones(1, dtype=torch.float32, device=device),
            amax_history=torch.zeros(quantizer.amax_history_len, dtype=torch.float32, device=device),
        )
    if not quantizer.stochastic:
        return None
    return StochasticRoundingState(
        key=make_key(seed, *path, device=device), amax_history=torch.zeros(1, dtype=torch.float32, device=device)
    )


def update_amax(state: Any, amax: torch.Tensor) -> Any:
    """The state after observing ``amax`` (float32 ``[1]``). Repeating an observation changes nothing."""
    return pytree.replace(state, amax_history=fold_amax(state.amax_history, amax))


def update_scale(quantizer: Quantizer, state: Any) -> Any:
    """The state after closing a step.

    Delayed scaling: next scale and rolled history. Stochastic rounding: the next key. Unchanged if nothing was
    observed.

    States of one quantizer may be stacked: scale ``[n, 1]`` and history ``[n, L]`` give the same bits as one by one
    (with the built-in algorithms).
    """
    if quantizer.stochastic:
        key = torch.where(state.amax_history != 0, next_key(state.key), state.key)
        return StochasticRoundingState(key=key, amax_history=torch.zeros_like(state.amax_history))
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
