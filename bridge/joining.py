"""Tensors beside or below each other, and back apart, as models do whose projections run as one.

PyTorch's own functions do the same and are what runs eagerly. In a compiled graph on a GPU a kernel of the backend
copies, because Inductor's own concatenation takes twice the time: it asks for every element which tensor it is from,
and computes in the same kernel what all of them come from.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from bridge import compat
from bridge.call import distinct
from bridge.checkpointing import closed, public_names
from bridge.library import NAMESPACE
from functional_te.kernels import kernels, resolve_backend

__all__ = ["join", "split"]

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_library = torch.library.Library(NAMESPACE, "FRAGMENT")


def _kernel(device: str) -> Any:
    """The kernel that copies matrices on a device type, or None."""
    return kernels(resolve_backend("auto", device)).fused.concatenate


@torch.compiler.assume_constant_result
def _has_kernel(device: str) -> bool:
    """Whether there is one. Runs for real even while a caller is traced."""
    return _kernel(device) is not None


def _copy(parts: list[torch.Tensor], dim: int) -> torch.Tensor:
    made: torch.Tensor = _kernel(parts[0].device.type)(parts, dim)
    return made


def _transparent(parts: list[torch.Tensor], dim: int) -> torch.Tensor:
    # closed in a region whose policy of selective checkpointing names custom ops
    return torch.ops.functional_te.concatenate_opaque(parts, dim) if closed.depth else _copy(parts, dim)


_library.define("concatenate(Tensor[] parts, int dim) -> Tensor")
_library.define("concatenate_opaque(Tensor[] parts, int dim) -> Tensor")
_library.impl("concatenate", _transparent, "CompositeImplicitAutograd")
_library.impl("concatenate_opaque", _copy, "CompositeExplicitAutograd")
torch.library.register_fake(f"{NAMESPACE}::concatenate_opaque", torch.cat, lib=_library)
public_names[torch.ops.functional_te.concatenate_opaque.default] = torch.ops.functional_te.concatenate.default


class _Join(torch.autograd.Function):
    """Matrices as one along an axis: the axis and the matrices."""

    # not (ctx, dim, *parts): where no gradient is needed Dynamo takes a forward of as many parameters as it is given
    # arguments for one without a context
    @staticmethod
    def forward(ctx: Any, *given: Any) -> torch.Tensor:
        dim, parts = given[0], given[1:]
        ctx.dim, ctx.sizes = dim, [part.shape[dim] for part in parts]
        made: torch.Tensor = torch.ops.functional_te.concatenate(list(parts), dim)
        return made

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return (None, *grads[0].split(ctx.sizes, ctx.dim))


class _Split(torch.autograd.Function):
    """A tensor in parts along its last axis, whose gradients are joined."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, sizes: tuple[int, ...]) -> Any:
        return y.split(sizes, -1)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        made = _Join.apply(1, *[grad.flatten(0, -2) for grad in grads])
        return made.unflatten(0, grads[0].shape[:-1]), None


def _copies(tensor: Any) -> bool:
    """Whether the kernel joins tensors like this in this call."""
    if not torch.compiler.is_dynamo_compiling() or compat.functorch_active():
        return False
    return type(tensor) in _PLAIN and tensor.dim() > 1 and _has_kernel(tensor.device.type)


def _alike(parts: Sequence[torch.Tensor], dim: int) -> bool:
    """Whether they are matrices that differ along ``dim`` at most; others are PyTorch's to join, or to refuse."""
    first = parts[0]
    if len(distinct(list(parts))[0]) < len(parts):  # Dynamo takes no tensor twice
        return False
    for part in parts:
        if type(part) not in _PLAIN or part.dim() != 2 or part.dtype is not first.dtype or part.device != first.device:
            return False
        if part.shape[1 - dim] != first.shape[1 - dim]:
            return False
    return True


def join(parts: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    """``torch.cat`` of matrices of one dtype, differentiable."""
    if _copies(parts[0]) and _alike(parts, dim):
        made: torch.Tensor = _Join.apply(dim, *parts)
        return made
    return torch.cat(list(parts), dim)


def split(y: torch.Tensor, sizes: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
    """``y.split(sizes, -1)``: views, differentiable."""
    parts: tuple[torch.Tensor, ...] = _Split.apply(y, sizes) if _copies(y) else y.split(sizes, -1)
    return parts
