"""The table of kernel backends and how a name is resolved.

A backend is a record of functions. A plan resolves ``"auto"`` once, to the name that ends up in every argument
bundle; an op then reads its functions from the record of that name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from functional_te._errors import value_error
from functional_te.kernels import reference

__all__ = ["BACKENDS", "Backend", "kernels", "resolve_backend"]


@dataclasses.dataclass(frozen=True)
class Backend:
    """The kernels every backend provides, by the math they do. :mod:`functional_te.kernels.reference` documents each.

    Attributes:
        name: how the user asks for it.
    """

    name: str
    quantize: Callable[..., Any]
    gemm_nt: Callable[..., Any]
    gemm_nn: Callable[..., Any]
    gemm_tn: Callable[..., Any]
    rms_norm_forward: Callable[..., Any]
    rms_norm_backward: Callable[..., Any]
    layer_norm_forward: Callable[..., Any]
    layer_norm_backward: Callable[..., Any]
    activation_forward: Callable[..., Any]
    activation_backward: Callable[..., Any]


REFERENCE = Backend(
    name="reference",
    quantize=reference.quantize,
    gemm_nt=reference.gemm_nt,
    gemm_nn=reference.gemm_nn,
    gemm_tn=reference.gemm_tn,
    rms_norm_forward=reference.rms_norm_forward,
    rms_norm_backward=reference.rms_norm_backward,
    layer_norm_forward=reference.layer_norm_forward,
    layer_norm_backward=reference.layer_norm_backward,
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
    if name not in _BY_NAME:
        raise value_error("plan", "backend", f"'auto' or one of {sorted(_BY_NAME)}", repr(name))
    return name


def kernels(name: str) -> Backend:
    """The functions of the backend called ``name``."""
    return _BY_NAME[name]
