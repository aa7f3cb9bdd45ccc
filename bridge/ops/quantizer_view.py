"""A module's quantizers as te.ops hands them out: callable, with the scale and amax of the module's own state."""

from __future__ import annotations

from typing import Any

import torch

from functional_te.kernels import kernels, resolve_backend
from functional_te.quantization.quantizers import Quantizer
from functional_te.quantization.scaling import fold_amax
from functional_te.quantization.tensor import BoundQuantizer, QuantizedTensor, bind

__all__ = ["QuantizerView"]


class QuantizerView:
    """A quantizer together with its state.

    Calling it casts a tensor. With delayed scaling the amax is folded into the state's history, or, for a quantizer of
    a neighbouring op, left in :attr:`observed` for the chain to fold in.

    Attributes:
        quantizer: the functional quantizer.
        observed: the last observed amax, or None.
    """

    def __init__(self, quantizer: Quantizer, state: Any = None, bound: BoundQuantizer | None = None) -> None:
        self.quantizer = quantizer
        self.state = state
        self.bound = bind(quantizer, state) if bound is None else bound
        self.observed: torch.Tensor | None = None

    @property
    def scale(self) -> torch.Tensor | None:
        """Delayed scaling: the live scale, float32 ``[1]``."""
        return self.bound.scale if self.state is None else getattr(self.state, "scale", None)

    @property
    def amax(self) -> torch.Tensor | None:
        """Delayed scaling: the running amax, a float32 ``[1]`` view of slot 0 of the history."""
        return None if self.state is None else self.state.amax_history[:1]

    @property
    def dtype(self) -> torch.dtype:
        """The element type."""
        return self.quantizer.dtype

    @property
    def rowwise_usage(self) -> bool:
        """Whether casts have a rowwise copy."""
        return self.quantizer.rowwise

    @property
    def columnwise_usage(self) -> bool:
        """Whether casts have a columnwise copy."""
        return self.quantizer.columnwise

    def set_usage(self, *, rowwise: bool | None = None, columnwise: bool | None = None) -> None:
        """Choose the copies that casts have; None keeps a choice."""
        usage = (
            self.rowwise_usage if rowwise is None else rowwise,
            self.columnwise_usage if columnwise is None else columnwise,
        )
        self.quantizer = self.quantizer.with_usage(*usage)
        self.bound = BoundQuantizer(quantizer=self.quantizer, scale=self.bound.scale, key=self.bound.key)

    def __call__(self, tensor: torch.Tensor) -> QuantizedTensor:
        """Cast a tensor; one that is cast already is returned as it is."""
        if isinstance(tensor, QuantizedTensor):
            return tensor
        cast: QuantizedTensor
        with torch.no_grad():
            cast, amax = kernels(resolve_backend("auto", tensor.device.type)).quantize(tensor, self.bound)
            if amax is not None:
                self._observe(amax)
        return cast

    quantize = __call__

    def _observe(self, amax: torch.Tensor) -> None:
        if self.state is None:
            self.observed = amax if self.observed is None else torch.maximum(self.observed, amax)
        elif torch.compiler.is_compiling():
            torch.ops.functional_te.fold_amax_(self.state.amax_history, amax)
        else:
            running = self.state.amax_history[:1]
            running.copy_(fold_amax(running, amax))
