"""From the largest magnitude of a tensor to its scale: the formulas shared by all per-tensor quantizers.

``scale`` multiplies into low precision, ``scale_inv = 1 / scale`` multiplies out of it. All values are float32.
"""

from __future__ import annotations

import torch

__all__ = [
    "FLOAT32_MAX",
    "amax_of",
    "amax_of_rows",
    "current_scale",
    "delayed_scale",
    "divide",
    "fold_amax",
    "reciprocal",
    "roll_history",
]

FLOAT32_MAX = torch.finfo(torch.float32).max


def divide(numerator: torch.Tensor | float, denominator: torch.Tensor) -> torch.Tensor:
    """Float32 quotient, rounded once.

    Computed in float64: compilers for GPUs divide float32 numbers approximately, and torch computes number / tensor as
    reciprocal times number. Rounding a float64 quotient of two float32 numbers to float32 is the same as rounding the
    exact quotient (Figueroa, "When is double rounding innocuous?", 1995).
    """
    wide = denominator.to(torch.float64)
    top = numerator.to(torch.float64) if isinstance(numerator, torch.Tensor) else torch.full_like(wide, numerator)
    return (top / wide).to(torch.float32)


def reciprocal(x: torch.Tensor) -> torch.Tensor:
    """Float32 ``1 / x``, rounded once; a new tensor."""
    return divide(1.0, x)


def amax_of(x: torch.Tensor) -> torch.Tensor:
    """Largest magnitude of ``x`` as a float32 tensor of shape ``[1]``; 0 for a tensor without elements.

    NaN anywhere gives NaN. The reduction runs in the dtype of ``x``, which is exact.
    """
    if x.numel() == 0:
        return torch.zeros(1, dtype=torch.float32, device=x.device)
    return x.abs().amax().to(torch.float32).reshape(1)


def amax_of_rows(x: torch.Tensor) -> torch.Tensor:
    """The same of every row of ``x [M, K]``: float32 ``[M]``."""
    if x.shape[1] == 0:
        return torch.zeros(x.shape[0], dtype=torch.float32, device=x.device)
    return x.abs().amax(-1).to(torch.float32)


def current_scale(
    amax: torch.Tensor,
    limit: float,
    *,
    epsilon: float = 0.0,
    power_of_2: bool = False,
    overflow: float = FLOAT32_MAX,
) -> torch.Tensor:
    """Scale of current and of block scaling: ``limit / max(amax, epsilon)``, rounded to nearest.

    An amax of 0, infinity or NaN gives scale 1; a quotient that overflows gives ``overflow``; with ``power_of_2`` the
    mantissa is cleared, which rounds the scale down.

    Args:
        amax: float32 of any shape.
        limit: largest finite value of the element format.
        epsilon: floor of the amax.
        power_of_2: whether scales are powers of two.
        overflow: what stands for an infinite quotient.
    """
    floored = amax.clamp(min=epsilon) if epsilon > 0.0 else amax
    scale = divide(limit, floored)
    scale = torch.where(torch.isinf(scale), overflow, scale)
    if power_of_2:
        scale = (scale.view(torch.int32) & 0x7F800000).view(torch.float32)
    return torch.where((floored > 0) & torch.isfinite(floored), scale, 1.0)


def delayed_scale(amax: torch.Tensor, previous: torch.Tensor, limit: float, *, margin: int = 0) -> torch.Tensor:
    """Scale of delayed scaling: ``limit / amax * 2**-margin``.

    An amax of 0, infinity or NaN keeps ``previous``; a quotient that overflows gives the largest float32.
    """
    scale = divide(limit * 2.0**-margin, amax)
    usable = (amax > 0) & torch.isfinite(amax)
    return torch.where(usable, scale.clamp(max=FLOAT32_MAX), previous)


def fold_amax(history: torch.Tensor, amax: torch.Tensor) -> torch.Tensor:
    """The history ``[L]`` with ``amax`` folded into its observation slot: ``slot 0 = max(slot 0, amax)``.

    Folding the same value twice changes nothing, so recomputing a forward does not change the state. NaN stays.
    """
    return torch.cat((torch.maximum(history[:1], amax), history[1:]))


def roll_history(history: torch.Tensor) -> torch.Tensor:
    """Close one step of a history ``[..., L]``.

    Slot ``i`` takes slot ``i + 1``, the last slot takes the observation, slot 0 becomes 0.
    """
    rolled = torch.cat((torch.zeros_like(history[..., :1]), history[..., 2:], history[..., :1]), dim=-1)
    return rolled[..., : history.shape[-1]]
