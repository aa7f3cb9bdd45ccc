"""Per-tensor FP8: one scale for the whole tensor, from the tensor itself or from the amaxes of earlier steps.

Formulas: Micikevicius et al., "FP8 Formats for Deep Learning", 2022; scales as in Transformer Engine.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch

from functional_te.quantization.formats import saturating_cast
from functional_te.quantization.groups import GroupLayout
from functional_te.quantization.quantizer import Cast, Copy, Quantizer, as_matrix, rows_of
from functional_te.quantization.scaling import amax_of, current_scale, reciprocal

__all__ = ["Float8CurrentScalingQuantizer", "Float8DelayedScalingQuantizer"]


def _cast(
    quantizer: Quantizer,
    x: torch.Tensor,
    scale: torch.Tensor,
    amax: torch.Tensor | None,
    groups: GroupLayout | None,
) -> Cast:
    # as_strided keeps Inductor from computing the scale again for every vector of elements
    factor = scale.as_strided((), ()) if groups is None else groups.per_tile(scale, 1)[:, None]
    data = saturating_cast(x.to(torch.float32) * factor, quantizer.dtype)
    # a new tensor: saved context never aliases live state
    scale_inv = reciprocal(scale)
    row = Copy(data, scale_inv) if quantizer.rowwise else None
    if not quantizer.columnwise:
        return Cast(row, None, amax)
    return Cast(row, Copy(as_matrix(data).t().contiguous(), scale_inv.clone()), amax)


class _PerTensor(Quantizer):
    """What both per-tensor quantizers share."""

    def decode(self, copy: Copy, columnwise: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The FP8 values, exactly; the scale is the factor."""
        del columnwise
        return as_matrix(copy.data).to(torch.float32), copy.scale_inv

    def copy_spec(self, shape: tuple[Any, ...], columnwise: bool) -> Copy:
        """Data of the logical shape or ``[K, M]``; one scale."""
        data = (shape[-1] if shape else 1, rows_of(shape)) if columnwise else shape
        return Copy((data, self.dtype), ((1,), torch.float32))


@dataclasses.dataclass(frozen=True, eq=False)
class Float8CurrentScalingQuantizer(_PerTensor):
    """Per-tensor FP8 whose scale comes from the tensor being cast.

    Attributes:
        amax_epsilon: floor of the amax.
        power_2_scale: whether scales are rounded down to powers of two.
    """

    amax_epsilon: float = 0.0
    power_2_scale: bool = False

    def cast(
        self,
        x: torch.Tensor,
        *,
        scale: torch.Tensor | None = None,
        key: torch.Tensor | None = None,
        groups: GroupLayout | None = None,
    ) -> Cast:
        """``scale = limit / amax``."""
        del scale, key
        amax = amax_of(x) if groups is None else groups.amax(x)
        own = current_scale(amax, self.limit, epsilon=self.amax_epsilon, power_of_2=self.power_2_scale)
        return _cast(self, x, own, None, groups)


@dataclasses.dataclass(frozen=True, eq=False)
class Float8DelayedScalingQuantizer(_PerTensor):
    """Per-tensor FP8 whose scale comes from the amaxes of earlier steps.

    Attributes:
        margin: the scale is divided by ``2**margin``.
        amax_history_len: number of steps remembered, the running one included.
        amax_compute_algo: ``"max"`` over the history, ``"most_recent"``, or a function of the history ``[L]`` that
            returns the amax.
        scaling_factor_compute_algo: None for the built-in formula, or a function
            ``(amax, old_scale, fp8_max, recipe) -> scale``; ``recipe`` is this quantizer.
    """

    margin: int = 0
    amax_history_len: int = 1024
    amax_compute_algo: Any = "max"
    scaling_factor_compute_algo: Any = None

    from_float32: ClassVar[bool] = True

    @property
    def stateful(self) -> bool:
        """Always."""
        return True

    def cast(
        self,
        x: torch.Tensor,
        *,
        scale: torch.Tensor | None = None,
        key: torch.Tensor | None = None,
        groups: GroupLayout | None = None,
    ) -> Cast:
        """The given scale; observes the amax of ``x``."""
        del key
        assert scale is not None
        return _cast(self, x, scale, amax_of(x) if groups is None else groups.amax(x), groups)
