"""Every private PyTorch interface this project touches, each with its reason.

``tests/bridge/test_compat.py`` fails when one of them changes its meaning.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

__all__ = ["functorch_active", "in_backward", "preserved_versions"]


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


def preserved_versions(tensors: tuple[torch.Tensor, ...]) -> AbstractContextManager[None]:
    """Write to ``tensors`` inside without autograd taking them for changed.

    Reason: a compiled backward reads the gradient quantizers' scales as they are when it runs, which is what is wanted,
    and autograd would refuse it after a step was closed.
    """
    return torch.autograd._unsafe_preserve_version_counter(tensors)  # type: ignore[attr-defined]
