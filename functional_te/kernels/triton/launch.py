"""Launching Triton kernels: directly in eager mode, as a node that the compiler sees while an op's body is traced.

A launch through :func:`torch.library.wrap_triton` is transparent to Inductor, which then calls the compiled kernel with
no Python in between, but costs an eager caller four times a plain launch. So an eager call is a plain launch; and where
the same kernel was launched before with arguments of the same kind, a launch of the kernel as it was compiled then,
with the addresses of its tensors, which spares most of the time in which Triton looks at every argument.

What launches the same kernels over and over may have them written down (:func:`recording_launches`) and repeat them.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.library import wrap_triton  # noqa: TID251 - a way to call a kernel, no registration

from functional_te.kernels.triton.analysis import remember_analyses
from functional_te.kernels.triton.compiled_kernel import run_compiled
from functional_te.kernels.triton.static_launch import launch_statically

__all__ = [
    "INTERPRETED",
    "PLAIN_TYPES",
    "Launch",
    "blocks",
    "interpreted",
    "launch",
    "launch_alike",
    "recording_launches",
]


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
    if type(probe) not in PLAIN_TYPES:
        record = getattr(_recorder, "record", None)
        if record is None:
            remember_analyses()
            launch_statically(kernel)
            wrap_triton(kernel)[grid](*args, **constants)
        else:
            record(Launch(kernel, grid, args, constants), [arg for arg in args if isinstance(arg, torch.Tensor)])
    elif INTERPRETED or not probe.is_cuda:
        kernel[grid](*args, **constants)
    elif probe.device.index == torch.cuda.current_device():
        _launch(kernel, grid, probe.device.index, args, constants)
    else:
        with torch.cuda.device(probe.device):  # Triton launches on the current device
            _launch(kernel, grid, probe.device.index, args, constants)


_recorder = threading.local()


@contextlib.contextmanager
def recording_launches(record: Callable[[Launch, list[torch.Tensor]], None]) -> Iterator[None]:
    """Inside, on this thread, launches on tensors without storage are handed to ``record``, with their tensors."""
    _recorder.record = record
    try:
        yield
    finally:
        del _recorder.record


class Launch:
    """A launch to be repeated on other tensors of the same dtypes. Call it with the tensors, in order.

    Args:
        kernel, grid, args, constants: as given to :func:`launch`; of tensors among ``args`` only the places matter.
    """

    def __init__(self, kernel: Any, grid: tuple[int, ...], args: Any, constants: dict[str, Any]) -> None:
        self.kernel, self.grid, self.constants = kernel, grid, constants
        self.places = [place for place, arg in enumerate(args) if isinstance(arg, torch.Tensor)]
        self.args = [None if isinstance(arg, torch.Tensor) else arg for arg in args]
        self.full_grid = (*grid, 1, 1)[:3]
        self.rest = tuple([constants[name] for name in kernel.arg_names[len(args) :]])
        # compiled kernels by where the tensors lie between multiples of 16 bytes; 0 if all lie at such
        self.compiled: dict[Any, Any] = {}

    def __call__(self, *tensors: torch.Tensor) -> None:
        """Launch on the current device."""
        pointers = [tensor.data_ptr() for tensor in tensors]
        every = functools.reduce(operator.or_, pointers, 0) & 15
        kind = tuple([pointer & 15 for pointer in pointers]) if every else 0
        args = self.args.copy()
        known = self.compiled.get(kind)
        if known is not None:
            for place, pointer in zip(self.places, pointers, strict=True):
                args[place] = pointer
            run_compiled(known, self.full_grid, (*args, *self.rest))
            return
        for place, tensor in zip(self.places, tensors, strict=True):
            args[place] = tensor
        made = self.kernel[self.grid](*args, **self.constants)
        if not INTERPRETED:
            self.compiled[kind] = made


# By kernel, device, kinds of arguments, and constants: the compiled kernel, and constants in the order of parameters.
_compiled: dict[Any, tuple[Any, tuple[Any, ...]]] = {}
# sizes are part of what is remembered; who runs many sizes starts over now and then
_MOST = 4096


def _launch(kernel: Any, grid: tuple[int, ...], device: int, args: Any, constants: dict[str, Any]) -> None:
    """Launch on the current device, by the kernel that an earlier launch compiled if there is one.

    A kernel is compiled for the dtypes of its pointers, whether they are aligned to 16 bytes, and divisibility of its
    integers; a key of the integers themselves tells more apart than need be.
    """
    plain = [arg.data_ptr() if isinstance(arg, torch.Tensor) else arg for arg in args]
    kinds = [
        (arg.dtype, own & 15) if isinstance(arg, torch.Tensor) else arg if type(arg) is int else type(arg)
        for arg, own in zip(args, plain, strict=True)
    ]
    key = (kernel, device, *kinds, *constants.items())
    known = _compiled.get(key)
    if known is None:
        made = kernel[grid](*args, **constants)
        if len(_compiled) >= _MOST:
            _compiled.clear()
        _compiled[key] = made, tuple([constants[name] for name in kernel.arg_names[len(args) :]])
        return
    compiled, rest = known
    run_compiled(compiled, (*grid, 1, 1)[:3], (*plain, *rest))


_launches: dict[Any, Launch] = {}


def launch_alike(
    key: Any, kernel: Any, grid: tuple[Any, ...], probe: torch.Tensor, /, *args: Any, **constants: Any
) -> None:
    """:func:`launch` of a kernel whose many arguments take longer to look at than it runs.

    Args:
        key: tells launches of the kernel apart that differ in anything but their tensors: grid, numbers, constants,
            dtypes.
        kernel, grid, probe, args, constants: as for :func:`launch`.
    """
    if type(probe) not in PLAIN_TYPES or not probe.is_cuda or probe.device.index != torch.cuda.current_device():
        launch(kernel, grid, probe, *args, **constants)
        return
    own = (kernel, key, probe.device.index)
    known = _launches.get(own)
    if known is None:
        if len(_launches) >= _MOST:
            _launches.clear()
        known = _launches[own] = Launch(kernel, grid, args, constants)
    known(*[arg for arg in args if isinstance(arg, torch.Tensor)])


def blocks(size: Any, block: int) -> Any:
    """How many blocks cover ``size``; 1 at least, so that kernels which also write a scale run for empty tensors."""
    count = (size + block - 1) // block
    return max(count, 1) if isinstance(count, int) else torch.sym_max(count, 1)
