"""Launching Triton kernels: directly in eager mode, as a node that the compiler sees while an op's body is traced.

A launch through :func:`torch.library.wrap_triton` is transparent to Inductor, which then calls the compiled kernel with
no Python in between, but costs an eager caller four times a plain launch. So an eager call is a plain launch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.library import wrap_triton  # noqa: TID251 - a way to call a kernel, no registration

__all__ = ["INTERPRETED", "PLAIN_TYPES", "blocks", "interpreted", "launch"]


def interpreted() -> bool:
    """Whether Triton was told to run kernels in its interpreter, on the CPU (``TRITON_INTERPRET=1``)."""
    import triton

    return bool(triton.knobs.runtime.interpret)


INTERPRETED = interpreted()

# Everything else (fake and functional tensors) stands for a tensor while an op's body is traced.
PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)  # noqa: TID251 - for its type


def launch(kernel: Any, grid: tuple[Any, ...], probe: torch.Tensor, /, *args: Any, **constants: Any) -> None:
    """Run ``kernel`` over ``grid``.

    Args:
        kernel: a function decorated with ``triton.jit``.
        grid: number of programs along up to three axes; ints, symbolic while traced.
        probe: one of the kernel's tensors; its type tells whether a body is being traced.
        args: the kernel's arguments in order.
        constants: its ``tl.constexpr`` arguments, ``num_warps`` and ``num_stages``.
    """
    if type(probe) in PLAIN_TYPES:
        if probe.is_cuda and probe.device.index != torch.cuda.current_device():
            with torch.cuda.device(probe.device):  # Triton launches on the current device
                kernel[grid](*args, **constants)
        else:
            kernel[grid](*args, **constants)
    else:
        wrap_triton(kernel)[grid](*args, **constants)


def blocks(size: Any, block: int) -> Any:
    """How many blocks cover ``size``; 1 at least, so that kernels which also write a scale run for empty tensors."""
    count = (size + block - 1) // block
    return max(count, 1) if isinstance(count, int) else torch.sym_max(count, 1)
