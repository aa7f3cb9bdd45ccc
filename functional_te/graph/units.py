"""Numbers and tensors in short words, for text and drawings."""

from __future__ import annotations

from functional_te.graph.value import Tensor

__all__ = ["bytes_text", "dtype_text", "flops_text", "shape_text", "tensor_text", "time_text"]

_SHORT = {"bfloat16": "bf16", "float16": "f16", "float32": "f32", "float64": "f64"}


def _scaled(value: float, units: tuple[str, ...], step: float = 1000.0) -> str:
    place = 0
    while value >= step * 0.9995 and place < len(units) - 1:
        value /= step
        place += 1
    whole = value == int(value) and place == 0
    digits = f"{value:.0f}" if whole or value >= 99.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"
    return f"{digits} {units[place]}"


def bytes_text(count: int) -> str:
    """``"470 MB"``; in powers of 1000."""
    return _scaled(float(count), ("B", "kB", "MB", "GB", "TB"))


def flops_text(count: int | None) -> str:
    """``"1.92 TFLOP"``; ``"? FLOP"`` if nobody knows."""
    return "? FLOP" if count is None else _scaled(float(count), ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP"))


def time_text(seconds: float) -> str:
    """``"1.39 ms"``, in microseconds below a tenth of that."""
    if seconds == 0:
        return "0"
    return f"{seconds * 1e6:.1f} µs" if seconds < 99.95e-6 else _scaled(seconds * 1e3, ("ms", "s"))


def dtype_text(dtype: str) -> str:
    """``"bf16"`` for ``"bfloat16"``."""
    return _SHORT.get(dtype, dtype)


def shape_text(tensor: Tensor) -> str:
    """``"[8, 256]"``."""
    return f"[{', '.join(map(str, tensor.shape))}]"


def tensor_text(tensor: Tensor) -> str:
    """``"[8, 256] bf16"``, or with the format of a cast and how many copies of it there are."""
    kind = tensor.format if tensor.quantizer else dtype_text(tensor.format)
    return f"{shape_text(tensor)} {kind}" + (" ×2" if len(tensor.copies) == 2 else "")
