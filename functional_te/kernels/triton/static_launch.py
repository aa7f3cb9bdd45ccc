"""Compiled code launches the kernels of this backend through PyTorch's own launcher, as it does those it generates.

For a kernel that it did not generate, PyTorch has Triton write a launcher in C, and calls it through Triton's Python
layers. Its own launcher is in PyTorch's library and takes half of the time: eight MLP blocks of 2,048 tokens, which
wait for the host, took 7.9 milliseconds a step through the one and 5.6 through the other on an H200, and eight layers
of a Llama compiled in 30 and 23 seconds. PyTorch has an option to launch all kernels so
(``TORCHINDUCTOR_STATIC_LAUNCH_USER_DEFINED_TRITON_KERNELS``), which is off because that launcher knows fewer types of
arguments than Triton does, and fails to compile others' kernels that have them. Those of this package have pointers and
numbers only.

The classes that make launchers are private. What makes one for a kernel of Triton's is replaced by what asks PyTorch's
first, for the kernels of this package; where it cannot, and where PyTorch has no such classes, launchers are as before.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

__all__ = ["launch_statically", "static_launcher"]

_log = logging.getLogger("functional_te")
# Source texts of kernels of this package. A compiled kernel that comes from another process knows its text alone.
_ours: set[str] = set()


def static_launcher(result: Any) -> Any:
    """A launcher of PyTorch's for a kernel that was compiled.

    Args:
        result: a ``TritonCompileResult`` of Inductor's.

    Returns:
        The launcher; None for a kernel of somebody else's, or one that PyTorch's launcher cannot take, or that it is
        told not to (``torch._inductor.config.use_static_triton_launcher``).
    """
    from torch._inductor.runtime import hints, triton_heuristics

    if _text(result.kernel.src.fn) not in _ours:
        return None
    static = triton_heuristics.StaticTritonCompileResult
    # a kernel of Inductor's is what PyTorch's launcher always takes
    kernel = static.can_statically_launch(
        result.kernel, result.inductor_meta, result.compile_meta, hints.HeuristicType.FIXED
    )
    if kernel is None:
        return None
    return static(kernel, result.config, result.compile_meta, result.inductor_meta).make_launcher()


def launch_statically(kernel: Any) -> None:
    """Have compiled code launch ``kernel``, a function of this package that is decorated with ``triton.jit``, so."""
    _replace()
    if text := _text(kernel):
        _ours.add(text)


def _text(kernel: Any) -> str:
    """The source of a kernel; empty in Triton's interpreter, which compiles nothing."""
    return str(getattr(kernel, "src", "")).strip()


@functools.cache
def _replace() -> None:
    from torch._inductor.runtime import triton_heuristics

    own = getattr(triton_heuristics, "TritonCompileResult", None)
    if own is None or not hasattr(triton_heuristics, "StaticTritonCompileResult"):
        return
    make = own.make_launcher

    @functools.wraps(make)
    def make_launcher(self: Any) -> Any:
        try:
            found = static_launcher(self)
        except Exception as error:  # it is private: whatever has changed, Triton's launcher is there
            _log.info("PyTorch's launcher does not take a kernel: %s: %s", type(error).__name__, error)
            found = None
        return make(self) if found is None else found

    own.make_launcher = make_launcher
