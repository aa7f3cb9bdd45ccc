"""Kernels: one interface, several backends. The reference backend is specification, oracle and fallback."""

from functional_te.kernels.backend import Backend, Fused
from functional_te.kernels.registry import BACKENDS, backends, check_device, kernels, resolve_backend, with_accumulation

__all__ = [
    "BACKENDS",
    "Backend",
    "Fused",
    "backends",
    "check_device",
    "kernels",
    "resolve_backend",
    "with_accumulation",
]
