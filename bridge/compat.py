"""Every private PyTorch interface this project touches, each with its reason.

``tests/bridge/test_compat.py`` fails when one of them changes its meaning.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

__all__ = ["functorch_active", "in_backward", "no_torch_function", "preserved_versions", "wrapper", "written_arguments"]

# ``__torch_function__`` of a subclass whose functions are those of a plain tensor.
# Reason: torch.overrides has no public name for it.
no_torch_function = torch._C._disabled_torch_function_impl


def in_backward() -> bool:
    """Whether the autograd engine is running a backward on this thread (activation recomputation does).

    Reason: a recomputed forward must not close a step of delayed scaling, and no public function tells.
    """
    return torch._C._current_graph_task_id() != -1


def functorch_active() -> bool:
    """Whether a ``torch.func`` transform is active.

    Reason: those need the variant of the autograd function whose saved tensors are outputs.
    """
    return torch._C._are_functorch_transforms_active()


def wrapper(
    cls: type[torch.Tensor], size: Any, stride: Any, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """A tensor of class ``cls`` without storage.

    Reason: the documentation of tensor subclasses names this function only.
    """
    made: torch.Tensor = torch.Tensor._make_wrapper_subclass(cls, size, strides=stride, dtype=dtype, device=device)
    return made


def written_arguments(op: Any) -> tuple[tuple[int, str], ...]:
    """Position and name of the arguments that an ATen op writes to; none for an op that writes to nothing.

    Reason: a subclass has to cast what optimizers write, and schemas are not public.
    """
    if not op._schema.is_mutable:
        return ()
    return tuple(
        (index, argument.name)
        for index, argument in enumerate(op._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def preserved_versions(tensors: tuple[torch.Tensor, ...]) -> AbstractContextManager[None]:
    """Write to ``tensors`` inside without autograd taking them for changed.

    Reason: a compiled backward reads the gradient quantizers' scales as they are when it runs, which is what is wanted,
    and autograd would refuse it after a step was closed.
    """
    return torch.autograd._unsafe_preserve_version_counter(tensors)  # type: ignore[attr-defined]
