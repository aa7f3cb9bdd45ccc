"""Names of the steps of a chain in a profile.

A step of a plan that runs while a profiler is on is labelled with the name of its custom op,
``functional_te::<op class in lower case>_forward`` or ``..._backward``. Compiled code has no labels: its kernels carry
the compiler's names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["labelled", "labels", "profiling"]

Launch = Callable[[Any, str, Any], Any]


def profiling() -> bool:
    """Whether a profiler (``torch.profiler``, ``emit_nvtx``, ``emit_itt``) is on.

    Reason for reading a private name of PyTorch: ``record_function`` costs microseconds with no profiler on, and no
    public function tells. ``tests/habits/test_profiler.py`` fails when the name changes its meaning.
    """
    return torch.autograd.profiler._is_profiler_enabled


def labels() -> Launch | None:
    """How :func:`functional_te.apply` launches steps: labelled under a profiler, else None, directly."""
    return labelled(None) if not torch.compiler.is_compiling() and profiling() else None


def labelled(launch: Launch | None) -> Launch:
    """``launch`` (None: the op's implementation) inside of a label."""

    def run(op: Any, direction: str, args: Any) -> Any:
        with torch.profiler.record_function(f"functional_te::{type(op).__name__.lower()}_{direction}"):
            return getattr(op, f"{direction}_impl")(args) if launch is None else launch(op, direction, args)

    return run
