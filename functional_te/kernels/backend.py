"""The table of kernel backends and how a name is resolved.

A backend is a record of functions. A plan resolves ``"auto"`` once, to the name that ends up in every argument
bundle; an op then reads its functions from the record of that name.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from functional_te._errors import value_error
from functional_te.kernels import reference

__all__ = ["BACKENDS", "Backend", "kernels", "observing", "resolve_backend"]


@dataclasses.dataclass(frozen=True)
class Backend:
    """The kernels every backend provides, by the math they do. :mod:`functional_te.kernels.reference` documents each.

    Attributes:
        name: how the user asks for it.
        transposed_copies: whether products read transposed copies that are mere transposes, as a GPU without other
            FP8 layouts must.
    """

    name: str
    quantize: Callable[..., Any]
    gemm_nt: Callable[..., Any]
    gemm_nn: Callable[..., Any]
    gemm_tn: Callable[..., Any]
    grouped_nt: Callable[..., Any]
    grouped_nn: Callable[..., Any]
    grouped_tn: Callable[..., Any]
    grouped_sum: Callable[..., Any]
    rms_norm_forward: Callable[..., Any]
    rms_norm_backward: Callable[..., Any]
    add_rms_norm_forward: Callable[..., Any]
    layer_norm_forward: Callable[..., Any]
    layer_norm_backward: Callable[..., Any]
    adaptive_layer_norm_forward: Callable[..., Any]
    adaptive_layer_norm_backward: Callable[..., Any]
    l2_norm_forward: Callable[..., Any]
    l2_norm_backward: Callable[..., Any]
    dropout: Callable[..., Any]
    activation_forward: Callable[..., Any]
    activation_backward: Callable[..., Any]
    transposed_copies: bool = False


REFERENCE = Backend(
    name="reference",
    quantize=reference.quantize,
    gemm_nt=reference.gemm_nt,
    gemm_nn=reference.gemm_nn,
    gemm_tn=reference.gemm_tn,
    grouped_nt=reference.grouped_nt,
    grouped_nn=reference.grouped_nn,
    grouped_tn=reference.grouped_tn,
    grouped_sum=reference.grouped_sum,
    rms_norm_forward=reference.rms_norm_forward,
    rms_norm_backward=reference.rms_norm_backward,
    add_rms_norm_forward=reference.add_rms_norm_forward,
    layer_norm_forward=reference.layer_norm_forward,
    layer_norm_backward=reference.layer_norm_backward,
    adaptive_layer_norm_forward=reference.adaptive_layer_norm_forward,
    adaptive_layer_norm_backward=reference.adaptive_layer_norm_backward,
    l2_norm_forward=reference.l2_norm_forward,
    l2_norm_backward=reference.l2_norm_backward,
    dropout=reference.dropout,
    activation_forward=reference.activation_forward,
    activation_backward=reference.activation_backward,
)

BACKENDS: tuple[Backend, ...] = (REFERENCE,)

_BY_NAME = {backend.name: backend for backend in BACKENDS}


def resolve_backend(name: str) -> str:
    """The backend that ``name`` (or ``"auto"``) means.

    Raises:
        ValueError: no such backend.
    """
    if name == "auto":
        return BACKENDS[-1].name
    known = sorted(backend.name for backend in BACKENDS)
    if name not in known:
        raise value_error("plan", "backend", f"'auto' or one of {known}", repr(name))
    return name


def kernels(name: str) -> Backend:
    """The functions of the backend called ``name``."""
    return _BY_NAME[name]


@contextlib.contextmanager
def observing(name: str, on_cast: Callable[[Any, Any, Any], None]) -> Iterator[str]:
    """A backend like ``name`` that reports every cast of a tensor that is not in groups, for the time of the context.

    Args:
        name: name of a backend.
        on_cast: called with the values, the bound quantizer and the quantized tensor after every cast.

    Yields:
        The name of the new backend. No other context uses it, and :func:`resolve_backend` does not know it.
    """
    source = kernels(name)

    def quantize(x: Any, bound: Any, *args: Any, **kwargs: Any) -> Any:
        result = source.quantize(x, bound, *args, **kwargs)
        if len(args) < 2 and kwargs.get("groups") is None:  # casts of grouped rows are no plain tensors
            on_cast(x, bound, result[0])
        return result

    observed = f"{name}, observed by {id(quantize):#x}"
    _BY_NAME[observed] = dataclasses.replace(source, name=observed, quantize=quantize)
    try:
        yield observed
    finally:
        del _BY_NAME[observed]
