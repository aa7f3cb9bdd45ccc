"""Several weights that are stored in low precision, with one scale, as one."""

from __future__ import annotations

from typing import Any

import torch

from bridge.joining import join
from bridge.quantized_weight import QuantizedWeight, quantized_of
from functional_te import pytree
from functional_te.quantization.tensor import CachedWeight

__all__ = ["packed"]


class _StandIn(torch.autograd.Function):
    """A tensor without memory that stands for the weights one above the other and passes each its gradient."""

    # the number of weights comes first so that there are never two arguments: where no gradient is needed Dynamo takes
    # a forward of as many parameters as it is given arguments for one without a context
    @staticmethod
    def forward(ctx: Any, *given: Any) -> torch.Tensor:
        weights = given[1:]
        ctx.rows = [weight.shape[0] for weight in weights]
        first = weights[0]
        one = torch.zeros((), dtype=first.dtype, device=first.device)
        return one.expand(sum(ctx.rows), first.shape[1])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return (None, *grads[0].split(ctx.rows))


def packed(weights: list[QuantizedWeight]) -> CachedWeight:
    """Weights ``[rows, columns]`` of one scale, one above the other. Copies their data, one byte each."""
    parts = [quantized_of(weight) for weight in weights]
    first = parts[0]
    rows = [part.rowwise_data.view(torch.uint8) for part in parts]  # type: ignore[union-attr]
    changes: dict[str, Any] = {"rowwise_data": join(rows, 0).view(first.rowwise_data.dtype)}  # type: ignore[union-attr]
    if first.columnwise_data is not None:
        columns = [part.columnwise_data.view(torch.uint8) for part in parts]  # type: ignore[union-attr]
        changes["columnwise_data"] = join(columns, 1).view(first.columnwise_data.dtype)
    value = _StandIn.apply(len(weights), *weights)
    return CachedWeight(value=value, quantized=pytree.replace(first, **changes), stored=True)
