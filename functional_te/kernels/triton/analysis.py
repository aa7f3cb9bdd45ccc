"""What the compiler finds out about the kernels of this backend, found out once.

PyTorch has to know which of its arguments a kernel writes to. It has Triton translate the kernel, and looks at the
result: four times for every launch in a graph, from 20 milliseconds for a small kernel to 85 for the one that closes
steps, and remembers nothing. Eight layers of a Llama took 62 seconds to compile on an H200's host, and 35 without. The
answer depends on the kernel, on the kinds of its arguments and on its constants alone, which are the same in every
layer.

That function of PyTorch is private. It is replaced by one that remembers its answers about kernels of this package,
and passes on every other question; where PyTorch has no such function, nothing is replaced.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["ANALYSES", "remember_analyses", "remembering"]

# as PyTorch 2.11 and 2.13 call it
ANALYSES = ("identify_mutated_tensors", "identify_accessed_tensors")
_OURS = __name__.partition(".")[0] + "."
# sizes are part of what is remembered; who compiles for many sizes starts over now and then
_MOST = 4096


class _Unknown(Exception):
    """An argument whose kind does not tell what the analysis finds."""


def _kind(value: Any) -> Any:
    """What the analysis sees of an argument.

    Raises:
        _Unknown: that is not known.
    """
    import sympy  # type: ignore[import-untyped]
    from torch._subclasses.fake_tensor import FakeTensor

    if isinstance(value, (bool, int, float, str, type(None), torch.dtype)):
        return type(value), value
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool, sympy.Expr)):
        return "symbol"
    inductors = type(value).__module__ == "torch._inductor.ir" and type(value).__name__ == "TensorBox"
    if inductors or isinstance(value, FakeTensor):  # of a real one the address matters too
        return "tensor", value.dtype
    raise _Unknown


def remembering(analyze: Callable[..., Any]) -> Callable[..., Any]:
    """``analyze(kernel, kwargs, tma_descriptor_metadata)`` with a memory for kernels of this package."""
    known: dict[Any, Any] = {}

    @functools.wraps(analyze)
    def analysis(kernel: Any, kwargs: dict[str, Any], tma_descriptor_metadata: Any) -> Any:
        own, arguments = kernel, kwargs
        if hasattr(kernel, "configs"):  # PyTorch wraps a kernel anew for every launch with a number of warps
            own, chosen = kernel.fn, kernel.configs[:1]
            arguments = {**kwargs, **chosen[0].kwargs} if chosen else kwargs
        module = getattr(own, "__module__", None) or ""
        if tma_descriptor_metadata or not module.startswith(_OURS):
            return analyze(kernel, kwargs, tma_descriptor_metadata)
        try:
            key = (own, *[(name, _kind(value)) for name, value in arguments.items()])
        except _Unknown:
            return analyze(kernel, kwargs, tma_descriptor_metadata)
        found = known.get(key)
        if found is None:
            if len(known) >= _MOST:
                known.clear()
            found = known[key] = analyze(kernel, kwargs, tma_descriptor_metadata)
        return found.copy() if isinstance(found, list) else found

    return analysis


@functools.cache
def remember_analyses() -> None:
    """Have PyTorch analyze every kernel of this package once for arguments of one kind. Called before the first one."""
    from torch._higher_order_ops import triton_kernel_wrap

    for name in ANALYSES:
        analyze = getattr(triton_kernel_wrap, name, None)
        if analyze is not None:
            setattr(triton_kernel_wrap, name, remembering(analyze))
