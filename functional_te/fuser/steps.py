"""Steps of a plan: one launch each, of a basic or a fused op."""

from __future__ import annotations

import dataclasses
from typing import Any

from functional_te.chain import ExtraSource
from functional_te.ops import FusedOp, Op, OpRequiresGrad
from functional_te.quantization.quantizers import Quantizer

__all__ = ["BackwardStep", "ForwardStep"]


@dataclasses.dataclass(frozen=True, eq=False)
class ForwardStep:
    """One launch of the forward.

    Attributes:
        op: the basic or fused op.
        indices: the basic ops it covers.
        fused: whether ``op`` is a :class:`FusedOp`.
        static_kwargs: what ``resolve_fwd_args`` gets that does not change between calls.
        quantizers: for every covered op, its forward quantizers as (role, quantizer).
        next_quantizer: the next op's input quantizer if this step casts its output, else None.
        extra_sources: for every covered op, where its extra inputs come from.
        dense_input: whether a quantized main input is dequantized first.
        saves: for every covered op, whether the backward needs its saved context.
        saves_any: whether any of them does.
        simple: whether nothing but parameters has to be added to ``static_kwargs``.
        quantized: whether any covered op has forward quantizers.
        takes_extra_inputs: whether ``resolve_fwd_args`` takes extra inputs.
        takes_kwargs: whether it takes the forward kwargs of all covered ops.
        owners: by role, the covered op whose quantizer casts that tensor.
    """

    op: Op | FusedOp
    indices: tuple[int, ...]
    fused: bool
    static_kwargs: dict[str, Any]
    quantizers: tuple[tuple[tuple[str, Quantizer], ...], ...]
    next_quantizer: Quantizer | None
    extra_sources: tuple[tuple[ExtraSource, ...], ...]
    dense_input: bool
    saves: tuple[bool, ...]
    saves_any: bool
    simple: bool
    quantized: bool
    takes_extra_inputs: bool
    takes_kwargs: bool
    owners: dict[str, int]


@dataclasses.dataclass(frozen=True, eq=False)
class BackwardStep:
    """One launch of the backward.

    Attributes:
        op: the basic or fused op.
        indices: the basic ops it covers.
        fused: whether ``op`` is a :class:`FusedOp`.
        requires_grad: what has to be produced for every covered op.
        quantizers: for every covered op, its gradient quantizers as (role, quantizer).
        prev_quantizer: the previous op's gradient quantizer if this step casts its input gradient, else None.
        dense_grad: whether a quantized gradient is dequantized first.
    """

    op: Op | FusedOp
    indices: tuple[int, ...]
    fused: bool
    requires_grad: tuple[OpRequiresGrad, ...]
    quantizers: tuple[tuple[tuple[str, Quantizer], ...], ...]
    prev_quantizer: Quantizer | None
    dense_grad: bool
