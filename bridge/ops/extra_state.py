"""Quantizer state as the bytes of ``torch.save`` over plain tensors, for checkpoints; loading runs no code."""

from __future__ import annotations

import io
from typing import Any

import torch

from functional_te._errors import value_error
from functional_te.ops import Op
from functional_te.quantization.quantizer import Float8DelayedScalingQuantizer, Quantizer
from functional_te.quantization.state import DelayedScalingState

__all__ = ["decode", "encode"]

_FP8_DTYPES = {"torch.float8_e4m3fn": torch.float8_e4m3fn, "torch.float8_e5m2": torch.float8_e5m2}

NamedState = tuple[str, Quantizer, DelayedScalingState]


def encode(states: list[NamedState]) -> torch.Tensor:
    """The bytes, uint8; none at all if there is no state."""
    if not states:
        return torch.empty(0, dtype=torch.uint8)
    content = {}
    for role, quantizer, state in states:
        assert isinstance(quantizer, Float8DelayedScalingQuantizer)
        algorithm = quantizer.amax_compute_algo
        content[role] = {
            "scale": state.scale.cpu(),
            "amax_history": state.amax_history.cpu(),
            "dtype": str(quantizer.dtype),
            "margin": quantizer.margin,
            # a function is not saved: the recipe of the next step gives it again
            "algorithm": algorithm if isinstance(algorithm, str) else "",
        }
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8).clone()


def decode(op: Op, data: torch.Tensor, device: torch.device) -> list[NamedState]:
    """Role, quantizer and state of every entry, all of them checked first.

    Raises:
        ValueError: entries that ``op`` has no use for, or that hold something else than a state.
    """
    buffer = io.BytesIO(data.detach().cpu().numpy().tobytes())
    content = torch.load(buffer, weights_only=True, map_location=device)
    where, known = type(op).__name__, (*op.forward_quantizers, *op.backward_quantizers)
    if not isinstance(content, dict) or not set(content) <= set(known):
        got = sorted(map(str, content)) if isinstance(content, dict) else type(content).__name__
        raise value_error(where, "extra state", f"entries among {list(known)}", got)
    for role, entry in content.items():
        if not _fits(entry):
            wanted = "a float32 scale [1], a float32 history [L] and an FP8 dtype"
            raise value_error(where, f"extra state {role!r}", wanted, entry)
    return [(role, _quantizer(entry), _state(entry)) for role, entry in content.items()]


def _fits(entry: Any) -> bool:
    if not isinstance(entry, dict) or entry.get("dtype") not in _FP8_DTYPES:
        return False
    scale, history = entry.get("scale"), entry.get("amax_history")
    for tensor in (scale, history):
        if not isinstance(tensor, torch.Tensor) or tensor.dtype is not torch.float32 or tensor.dim() != 1:
            return False
    assert scale is not None
    assert history is not None
    return len(scale) == 1 and len(history) >= 1


def _quantizer(entry: dict[str, Any]) -> Float8DelayedScalingQuantizer:
    return Float8DelayedScalingQuantizer(
        dtype=_FP8_DTYPES[entry["dtype"]],
        margin=int(entry.get("margin", 0)),
        amax_history_len=len(entry["amax_history"]),
        amax_compute_algo=entry.get("algorithm") or "max",
    )


def _state(entry: dict[str, Any]) -> DelayedScalingState:
    return DelayedScalingState(scale=entry["scale"], amax_history=entry["amax_history"])
