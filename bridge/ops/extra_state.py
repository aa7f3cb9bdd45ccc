"""Quantizer state as the bytes of ``torch.save`` over plain tensors, for checkpoints; loading runs no code.

The extra state of te.ops, a pickle, is read too; see :mod:`bridge.interop.te_state_dict`.
"""

from __future__ import annotations

import dataclasses
import io
import pickle
from typing import Any

import torch

from bridge.interop.te_state_dict import decode_te, is_te, read
from functional_te._errors import value_error
from functional_te.ops import Op
from functional_te.quantization.quantizers import Float8DelayedScalingQuantizer, NVFP4Quantizer, Quantizer
from functional_te.quantization.state import DelayedScalingState, StochasticRoundingState

__all__ = ["decode", "encode"]

_DTYPES = {str(dtype): dtype for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.float4_e2m1fn_x2)}

NamedState = tuple[str, Quantizer, Any]


def encode(states: list[NamedState]) -> torch.Tensor:
    """The bytes, uint8; none at all if there is no state."""
    if not states:
        return torch.empty(0, dtype=torch.uint8)
    content = {}
    for role, quantizer, state in states:
        content[role] = _entry(quantizer, state)
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8).clone()


def _entry(quantizer: Quantizer, state: Any) -> dict[str, Any]:
    entry: dict[str, Any] = {field.name: getattr(state, field.name).cpu() for field in dataclasses.fields(state)}
    entry["dtype"] = str(quantizer.dtype)
    if isinstance(quantizer, Float8DelayedScalingQuantizer):
        algorithm = quantizer.amax_compute_algo
        entry["margin"] = quantizer.margin
        # a function is not saved: the recipe of the next step gives it again
        entry["algorithm"] = algorithm if isinstance(algorithm, str) else ""
    return entry


def decode(op: Op, data: torch.Tensor, device: torch.device) -> list[NamedState]:
    """Role, quantizer and state of every entry, all of them checked first.

    Raises:
        ValueError: entries that ``op`` has no use for, or that hold something else than a state.
    """
    content = _content(op, data.detach().cpu().numpy().tobytes(), device)
    if isinstance(content, dict) and is_te(content):
        return decode_te(op, content, device)
    where, known = type(op).__name__, (*op.forward_quantizers, *op.backward_quantizers)
    if not isinstance(content, dict) or not set(content) <= set(known):
        got = sorted(map(str, content)) if isinstance(content, dict) else type(content).__name__
        raise value_error(where, "extra state", f"entries among {list(known)}", got)
    for role, entry in content.items():
        if not _fits(entry):
            wanted = "a float32 scale [1] or an int64 key [2], a float32 history [L] and a dtype"
            raise value_error(where, f"extra state {role!r}", wanted, entry)
    return [(role, _quantizer(entry), _state(entry)) for role, entry in content.items()]


def _content(op: Op, data: bytes, device: torch.device) -> Any:
    if data.startswith(b"PK"):  # an archive, as torch.save writes
        try:
            return torch.load(io.BytesIO(data), weights_only=True, map_location=device)
        except pickle.UnpicklingError:
            pass
    return read(data, type(op).__name__)


def _fits(entry: Any) -> bool:
    if not isinstance(entry, dict) or entry.get("dtype") not in _DTYPES:
        return False
    read, history = entry.get("key", entry.get("scale")), entry.get("amax_history")
    for tensor in (read, history):
        if not isinstance(tensor, torch.Tensor) or tensor.dim() != 1:
            return False
    assert read is not None
    assert history is not None
    wanted = (2, torch.int64) if "key" in entry else (1, torch.float32)
    return (len(read), read.dtype) == wanted and len(history) >= 1 and history.dtype is torch.float32


def _quantizer(entry: dict[str, Any]) -> Quantizer:
    if "key" in entry:
        return NVFP4Quantizer(stochastic_rounding=True)
    return Float8DelayedScalingQuantizer(
        dtype=_DTYPES[entry["dtype"]],
        margin=int(entry.get("margin", 0)),
        amax_history_len=len(entry["amax_history"]),
        amax_compute_algo=entry.get("algorithm") or "max",
    )


def _state(entry: dict[str, Any]) -> Any:
    if "key" in entry:
        return StochasticRoundingState(key=entry["key"], amax_history=entry["amax_history"])
    return DelayedScalingState(scale=entry["scale"], amax_history=entry["amax_history"])
