"""Kernels: one interface, several backends. The reference backend is specification, oracle and fallback."""

from functional_te.kernels.backend import BACKENDS, Backend, kernels, resolve_backend

__all__ = ["BACKENDS", "Backend", "kernels", "resolve_backend"]
