"""Small pieces shared by ops: operands, checks, the store that ends a producer."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable
from typing import Any

import torch

from functional_te._errors import type_error, value_error
from functional_te.ops.op import FLOAT_DTYPES, Amaxes
from functional_te.quantization.tensor import BoundQuantizer, QuantizedTensor
from functional_te.tensor_spec import TensorSpec

__all__ = [
    "amaxes",
    "check_channel",
    "check_float",
    "check_last_dim",
    "check_normalized",
    "check_number",
    "check_param",
    "check_size",
    "dense",
    "normalized_shape_of",
    "one_copy",
    "quantized_spec",
    "spec_store",
]

TensorOrQuantized = torch.Tensor | QuantizedTensor


def dense(x: TensorOrQuantized, dtype: torch.dtype | None = None) -> torch.Tensor:
    """``x`` in high precision."""
    return x.dequantize(dtype) if isinstance(x, QuantizedTensor) else x


def spec_store(spec: TensorSpec, dtype: torch.dtype, quantizer: BoundQuantizer | None) -> tuple[Any, TensorSpec | None]:
    """The twin of :meth:`functional_te.kernels.Backend.store` over :class:`TensorSpec`."""
    if quantizer is None:
        return spec.with_(dtype=dtype), None
    return quantized_spec(spec.with_(dtype=dtype), quantizer)


def quantized_spec(spec: TensorSpec, bound: BoundQuantizer) -> tuple[QuantizedTensor, TensorSpec | None]:
    """The twin of the quantize kernel over :class:`TensorSpec`."""
    quantizer = bound.quantizer
    fields: dict[str, Any] = {}
    for wanted, columnwise, name in (
        (quantizer.rowwise, False, "rowwise"),
        (quantizer.columnwise, True, "columnwise"),
    ):
        if not wanted:
            continue
        for part, described in quantizer.copy_spec(tuple(spec.shape), columnwise)._asdict().items():
            if described is not None:
                fields[f"{name}_{part}"] = TensorSpec(described[0], described[1], spec.device)
    amax: Any = TensorSpec((1,), torch.float32, spec.device) if quantizer.stateful else None
    return QuantizedTensor(**fields, dtype=spec.dtype, quantizer=quantizer), amax


def one_copy(x: Any, override: str) -> Any:
    """Of a cast with two copies the one that a backward reads: with an override the rowwise, else the columnwise."""
    if isinstance(x, QuantizedTensor) and x.rowwise_data is not None and x.columnwise_data is not None:
        return x.with_usage(rowwise=override != "", columnwise=override == "")
    return x


def amaxes(known: Amaxes | None = None, **observed: Any) -> Amaxes | None:
    """``known`` and the observations that are not None, by role; None if there are none."""
    for amax in observed.values():
        if amax is not None:
            break
    else:
        return known
    new = {role: amax for role, amax in observed.items() if amax is not None}
    if known is None:
        return Amaxes(roles=tuple(new), values=tuple(new.values()))
    return Amaxes(roles=(*known.roles, *new), values=(*known.values, *new.values()))


def check_channel(channel: Any, where: str, argument: str = "channel") -> None:
    """Raise unless ``channel`` is None or a name."""
    if channel is not None and not (isinstance(channel, str) and channel):
        raise value_error(where, argument, "None or a non-empty string", repr(channel))


def check_number(value: Any, where: str, argument: str, *, least: float | None = None, positive: bool = False) -> float:
    """A constructor argument that is a finite real number, as a float.

    Args:
        value: the argument.
        where: the class, for messages.
        argument: its name.
        least: the smallest number allowed.
        positive: whether it has to exceed 0.
    """
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        raise type_error(where, argument, "a number", repr(value))
    number = float(value)
    wanted = "a finite number" if least is None else f"a finite number of at least {least}"
    low = (least is not None and number < least) or (positive and number <= 0)
    if not math.isfinite(number) or low:
        raise value_error(where, argument, "a finite positive number" if positive else wanted, number)
    return number


def check_float(x: Any, argument: str, where: str) -> None:
    """Raise unless ``x`` is float32, float16 or bfloat16."""
    if x.dtype not in FLOAT_DTYPES:
        raise type_error(where, argument, "float32, float16 or bfloat16", x.dtype)


def check_last_dim(x: Any, size: int, where: str) -> None:
    """Raise unless ``x`` is a floating tensor with last dimension ``size``."""
    check_float(x, "input", where)
    if len(x.shape) == 0 or x.shape[-1] != size:
        raise value_error(where, "input", f"last dimension {size}", f"shape {tuple(x.shape)}")


def check_param(params: Any, name: str, shape: tuple[int, ...], where: str) -> None:
    """Raise unless parameter ``name`` is a floating tensor of ``shape``."""
    param = params[name]
    check_float(param, name, where)
    if tuple(param.shape) != shape:
        raise value_error(where, name, f"shape {shape}", f"shape {tuple(param.shape)}")


def check_size(size: Any, where: str, argument: str) -> None:
    """Raise unless a constructor argument is a positive int."""
    if not isinstance(size, int) or isinstance(size, bool):
        raise type_error(where, argument, "an int", repr(size))
    if size < 1:
        raise value_error(where, argument, "at least 1", size)


def normalized_shape_of(shape: Any, where: str) -> tuple[int, ...]:
    """A normalized shape given as an int or an iterable of ints, as a tuple."""
    if not isinstance(shape, (int, Iterable)):
        raise type_error(where, "normalized_shape", "an int or an iterable of ints", repr(shape))
    sizes = (shape,) if isinstance(shape, int) else tuple(shape)
    if not sizes:
        raise value_error(where, "normalized_shape", "at least one dimension", "()")
    for size in sizes:
        check_size(size, where, "normalized_shape")
    return sizes


def check_normalized(x: Any, shape: tuple[int, ...], where: str) -> None:
    """Raise unless the trailing dimensions of ``x`` are ``shape``."""
    check_float(x, "input", where)
    if len(x.shape) < len(shape) or tuple(x.shape[len(x.shape) - len(shape) :]) != shape:
        raise value_error(where, "input", f"trailing dimensions {shape}", f"shape {tuple(x.shape)}")
