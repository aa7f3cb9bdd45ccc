"""Casts of weights that are kept between the microbatches of an optimizer step.

``autocast(cache_weights=True)`` casts every weight once, on entry of the outermost context, if it has changed since;
the forwards inside read that cast. So it works in compiled code too, whose graphs then cast no weights at all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from bridge.quantized_weight import QuantizedWeight, quantized_of
from functional_te.kernels import kernels, resolve_backend
from functional_te.quantization.quantizers import Quantizer
from functional_te.quantization.tensor import CachedWeight, QuantizedTensor, bind
from functional_te.recipes import Recipe, Role

if TYPE_CHECKING:
    from bridge.ops.operation import BasicOperation

__all__ = ["WeightCast", "cached_params", "refresh_weights", "weight_quantizers"]


class WeightCast:
    """The cast of one parameter of a module.

    Attributes:
        quantized: the cast.
        quantizer: what it was made with.
        version: how often the parameter had been written to.
    """

    __slots__ = ("parameter", "quantized", "quantizer", "version")

    def __init__(self, parameter: torch.Tensor, quantizer: Quantizer, quantized: QuantizedTensor) -> None:
        self.parameter = parameter
        self.version = parameter._version
        self.quantizer = quantizer
        self.quantized = quantized

    def is_of(self, parameter: torch.Tensor, quantizer: Quantizer) -> bool:
        """Whether it is the cast of what the parameter holds now."""
        own = self.parameter
        return own is parameter and self.version == parameter._version and self.quantizer is quantizer


def _both_copies(quantizer: Quantizer) -> Quantizer:
    """Forward and backward read the weight in both directions."""
    transposed = kernels(resolve_backend("auto")).transposed_copies
    return quantizer.with_usage(True, transposed or not quantizer.transposable)


def weight_quantizers(module: BasicOperation, recipe: Recipe) -> dict[str, Quantizer]:
    """By name, the quantizers of those parameters of a module that a recipe casts, making the copies that are read."""
    op, found = module.op, {}
    for name in op.param_names:
        if name in op.forward_quantizers:
            quantizer = recipe.quantizer(Role(type(op).__name__, name, op.name))
            if isinstance(quantizer, Quantizer):
                found[name] = _both_copies(quantizer)
    return found


def refresh_weights(module: BasicOperation, recipe: Recipe | None) -> None:
    """Cast the weights of a module that have changed since they were cast; with no recipe, forget the casts.

    A cast of delayed scaling is observed like one in a forward.
    """
    if recipe is None:
        module.weight_casts = {}
        return
    casts: dict[str, WeightCast] = {}
    states = {role: state for role, _, state in module.named_states()}
    for name, quantizer in weight_quantizers(module, recipe).items():
        parameter = getattr(module, name)
        known = module.weight_casts.get(name)
        if isinstance(parameter, QuantizedWeight) or parameter.device.type == "meta":
            continue
        if known is not None and known.is_of(parameter, quantizer):
            casts[name] = known
            continue
        state = states.get(name)
        with torch.inference_mode(False), torch.no_grad():
            quantized, amax = kernels(resolve_backend("auto")).quantize(parameter.detach(), bind(quantizer, state))
            if amax is not None and state is not None:
                state.amax_history[:1].copy_(torch.maximum(state.amax_history[:1], amax))
        casts[name] = WeightCast(parameter, quantizer, quantized)
    module.weight_casts = casts


def cached_params(module: BasicOperation, params: Any, reads_casts: bool) -> Any:
    """The parameters of a module as its op takes them: with casts in the place of the weights that have one.

    Args:
        module: the module.
        params: its parameters by name.
        reads_casts: whether casts kept between microbatches may be read.
    """
    changed: dict[str, Any] = {}
    for name in module.op.param_names:
        value = params[name]
        if isinstance(value, QuantizedWeight):
            changed[name] = CachedWeight(value=value, quantized=quantized_of(value), stored=True)
        elif reads_casts:
            cast = module.weight_casts.get(name)
            if cast is not None and (torch.compiler.is_compiling() or cast.version == value._version):
                changed[name] = CachedWeight(value=value, quantized=cast.quantized)
    return {**params, **changed} if changed else params
