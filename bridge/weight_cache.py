"""Casts of weights that are kept between the microbatches of an optimizer step.

A module that runs inside of ``autocast(cache_weights=True)`` has its weights cast then, and again on entry of every
later outermost context if they have changed since; its forwards read those casts. So it works in compiled code too,
whose graphs then cast no weights at all.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from bridge.quantized_weight import QuantizedWeight, quantized_of
from functional_te._value import value_of
from functional_te.fuser.plan import quantizer_of, state_roles_of
from functional_te.kernels import kernels, resolve_backend
from functional_te.quantization.quantizers import Quantizer
from functional_te.quantization.tensor import CachedWeight, QuantizedTensor, bind
from functional_te.recipes import Recipe

if TYPE_CHECKING:
    from bridge.ops.operation import BasicOperation

__all__ = [
    "WeightCast",
    "cached_params",
    "count_optimizer_steps",
    "modules_by_serial",
    "refresh_known_weights",
    "refresh_weights",
    "weight_quantizers",
]

# modules with quantizers, by a name that traced code can pass
modules_by_serial: weakref.WeakValueDictionary[str, BasicOperation] = weakref.WeakValueDictionary()


class WeightCast:
    """The cast of one parameter of a module.

    Attributes:
        quantized: the cast.
        quantizer: what it was made with.
        version: what counted the writes to the parameter.
        address: where its data were.
    """

    __slots__ = ("address", "parameter", "quantized", "quantizer", "version")

    def __init__(self, parameter: torch.Tensor, quantizer: Quantizer, quantized: QuantizedTensor) -> None:
        self.parameter = parameter
        self.version = _written(parameter)
        self.address = parameter.data_ptr()
        self.quantizer = quantizer
        self.quantized = quantized

    def is_of(self, parameter: torch.Tensor) -> bool:
        """Whether it is the cast of what the parameter holds now."""
        own, written = self.parameter, self.version != _written(parameter)
        return own is parameter and not written and self.address == parameter.data_ptr()


# steps of any optimizer: fused ones write to parameters without counting
_steps = [0]


def count_optimizer_steps() -> None:
    """From now on a step of any optimizer counts as a write to every parameter."""
    if _steps[0] == 0:
        _steps[0] = 1
        register_optimizer_step_post_hook(_count_step)


def _count_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    del optimizer, args, kwargs
    _steps[0] += 1


def _written(parameter: torch.Tensor) -> tuple[int, int]:
    """Changes when the parameter is written to; not by a write through ``.data``."""
    # an inference tensor counts nothing, and only inference mode writes to it
    return _steps[0], -1 if parameter.is_inference() else parameter._version


def _both_copies(quantizer: Quantizer, device: str) -> Quantizer:
    """Forward and backward read the weight in both directions."""
    transposed = kernels(resolve_backend("auto", device)).transposed_copies
    return quantizer.with_usage(True, transposed or not quantizer.transposable)


def weight_quantizers(module: BasicOperation, recipe: Recipe, device: torch.device) -> dict[str, Quantizer]:
    """By name, the quantizers of those parameters of a module that a recipe casts, making the copies that are read."""
    op, found = module.op, {}
    for name in op.param_names:
        if name in op.forward_quantizers:
            quantizer = quantizer_of(op, name, recipe)
            if quantizer is not None:
                found[name] = _both_copies(quantizer, device.type)
    return found


def refresh_weights(module: BasicOperation, recipe: Recipe | None) -> None:
    """Cast the weights of a module that have changed since they were cast; with no recipe, forget the casts.

    A cast of delayed scaling is observed like one in a forward.
    """
    if recipe is None:
        module.weight_casts = {}
        return
    module.ensure_state(state_roles_of(module.op, recipe))
    casts: dict[str, WeightCast] = {}
    states = {role: state for role, _, state in module.named_states()}
    device = next(module.parameters(), torch.empty(0)).device
    k = kernels(resolve_backend("auto", device.type))
    for name, quantizer in weight_quantizers(module, recipe, device).items():
        parameter = getattr(module, name)
        known = module.weight_casts.get(name)
        if isinstance(parameter, (QuantizedWeight, CachedWeight)) or parameter.device.type == "meta":
            continue
        if known is not None and known.quantizer is quantizer and known.is_of(parameter):
            casts[name] = known
            continue
        state = states.get(name)
        with torch.inference_mode(False), torch.no_grad():
            quantized, amax = k.quantize(parameter.detach(), bind(quantizer, state))
            if amax is not None and state is not None:
                state.amax_history[:1].copy_(torch.maximum(state.amax_history[:1], amax))
        casts[name] = WeightCast(parameter, quantizer, quantized)
    module.weight_casts = casts


def refresh_known_weights(module: BasicOperation, recipe: Recipe | None) -> None:
    """On entry of an outermost context: cast what has changed in a module that has run in such a context before."""
    try:
        refresh_weights(module, recipe if module.wants_casts else None)
    except (ValueError, TypeError):  # the recipe does not fit; a forward, if there is one, says why
        module.weight_casts = {}


def _want(module: BasicOperation, recipe: Recipe) -> None:
    if not module.wants_casts:
        module.wants_casts = True
        refresh_weights(module, recipe)


@torch.compiler.assume_constant_result
def _want_while_traced(names: str) -> bool:
    """Cast the weights of a module that runs in such a context for the first time, for real, while a caller is traced.

    Args:
        names: ``module/recipe``: the module's serial and the recipe's uid.
    """
    serial, recipe = names.split("/")
    _want(modules_by_serial[serial], value_of(recipe))
    return True


def cached_params(module: BasicOperation, params: Any, recipe: Recipe | None) -> Any:
    """The parameters of a module as its op takes them: with casts in the place of the weights that have one.

    Args:
        module: the module.
        params: its parameters by name.
        recipe: the recipe whose casts, kept between microbatches, may be read, or None.
    """
    compiling = torch.compiler.is_compiling()
    if recipe is not None:
        if compiling:
            _want_while_traced(f"{module._serial}/{recipe.uid}")
        else:
            _want(module, recipe)
    changed: dict[str, Any] = {}
    for name in module.op.param_names:
        value = params[name]
        if isinstance(value, QuantizedWeight):
            changed[name] = CachedWeight(value=value, quantized=quantized_of(value), stored=True)
        elif recipe is not None:
            cast = module.weight_casts.get(name)
            if cast is not None and (compiling or cast.is_of(value)):
                changed[name] = CachedWeight(value=value, quantized=cast.quantized)
    return {**params, **changed} if changed else params
