"""Rules for single modules of Hugging Face transformers, by class name and package: a look-alike is left alone."""

from __future__ import annotations

from typing import Any

import torch

import functional_te as fte
from bridge.convert.borrowed import Borrowed, TransposedWeight
from bridge.convert.rule import Leaf, is_from
from bridge.convert.rules_torch import tensor_reason

__all__ = ["transformers_leaf"]

_RMS_NORMS = ("LlamaRMSNorm", "MistralRMSNorm", "MixtralRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm")
# their gain is 1 + weight
_ZERO_CENTERED = ("GemmaRMSNorm", "Gemma2RMSNorm", "Gemma3RMSNorm")
_ACTIVATIONS: dict[str, Any] = {
    "GELUActivation": fte.ErfGELU(),
    "SiLUActivation": fte.SiLU(),
    "NewGELUActivation": fte.GELU(),
    "GELUTanh": fte.GELU(),
    "QuickGELUActivation": fte.QGELU(),
    "ReLUSquaredActivation": fte.SReLU(),
}


def _norm(module: Any, eps: float, zero_centered: bool) -> Leaf | str:
    reason = tensor_reason(module, "weight")
    if reason is not None:
        return reason
    op = fte.RMSNorm(tuple(module.weight.shape), eps, zero_centered)
    return Leaf("rms norm", (Borrowed(op, module),), "RMSNorm" + ", gain 1 + weight" * zero_centered)


def _conv1d(module: Any) -> Leaf | str:
    reason = tensor_reason(module, "weight") or tensor_reason(module, "bias")
    if reason is not None:
        return reason
    inputs, outputs = module.weight.shape
    linear = TransposedWeight(fte.BasicLinear(inputs, outputs), module)
    return Leaf("conv1d", (linear, Borrowed(fte.Bias(outputs), module)), "BasicLinear over the transposed weight, Bias")


def transformers_leaf(module: torch.nn.Module) -> Leaf | str | None:
    """The leaf of a module of transformers, why it is left alone, or None if there is no rule for it."""
    own: Any = module
    if is_from(module, _RMS_NORMS):
        return _norm(own, own.variance_epsilon, False)
    if is_from(module, _ZERO_CENTERED):
        return _norm(own, own.eps, True)
    if is_from(module, ("Conv1D",)):
        return _conv1d(own)
    if is_from(module, _ACTIVATIONS):
        op = _ACTIVATIONS[type(module).__name__]
        return Leaf("activation", (Borrowed(op),), type(op).__name__)
    return None
