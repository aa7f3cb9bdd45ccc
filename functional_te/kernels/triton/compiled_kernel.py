"""Running a kernel that Triton compiled before, past what Triton does on every launch.

``compiled[grid](*args)`` makes a function, asks for the device and the stream, and describes the launch for the hooks
of a profiler, which are nearly never there; and it asks CUDA for the address of every tensor. A kernel takes addresses
as well, and the last line of that function, with nothing to describe, launches it. That is what PyTorch's compiler
calls too, and not documented; so it is called here alone.
"""

from __future__ import annotations

from typing import Any

from triton import knobs
from triton.runtime import driver

__all__ = ["run_compiled"]


def run_compiled(compiled: Any, grid: tuple[int, ...], args: tuple[Any, ...]) -> None:
    """Launch on the current device and stream.

    Args:
        compiled: what a launch of a kernel gives, a ``triton.compiler.CompiledKernel``.
        grid: number of programs along three axes.
        args: all arguments in order, ``tl.constexpr`` ones too; for tensors their addresses, which the caller knows to
            be aligned as they were when the kernel was compiled.
    """
    runtime = knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    if getattr(enter, "calls", enter) or getattr(leave, "calls", leave):
        compiled[grid](*args)
        return
    active = driver.active
    stream = active.get_current_stream(active.get_current_device())
    compiled.run(*grid, stream, compiled.function, compiled.packed_metadata, None, None, None, *args)
