"""Selective activation checkpointing by op: PyTorch's policies, asked about a chain's custom ops.

In eager mode a chain runs the implementations of its ops, and in compiled code the compiler sees through its custom
ops, so that a policy would be asked about ATen ops alone. Inside of the contexts made here both run custom ops with
closed bodies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

__all__ = ["closed", "selective_checkpoint_contexts"]

Policy = Callable[..., CheckpointPolicy]
# opaque op -> the op under whose name it is known
public_names: dict[Any, Any] = {}


class _Closed:
    """Whether custom ops run with closed bodies.

    Attributes:
        depth: how many contexts are open.
    """

    def __init__(self) -> None:
        self.depth = 0


closed = _Closed()


def _closing(kind: Any) -> Any:
    """The class of a mode, with closed bodies inside of it.

    A subclass and no context around the mode, because the compiler takes modes only and writes to their attributes.
    """

    class Closing(kind):
        def __enter__(self) -> Any:
            closed.depth += 1
            return super().__enter__()

        def __exit__(self, *exception: Any) -> Any:
            closed.depth -= 1
            return super().__exit__(*exception)

    return Closing


def selective_checkpoint_contexts(
    policy: Policy | Sequence[Any], allow_cache_entry_mutation: bool = False
) -> tuple[TorchDispatchMode, TorchDispatchMode]:
    """What ``torch.utils.checkpoint.create_selective_checkpoint_contexts`` gives, with policies that see our ops.

    Use it as ``checkpoint(f, x, use_reentrant=False, context_fn=partial(bridge.selective_checkpoint_contexts,
    policy))``, eager or compiled. ``functional_te::basiclinear_forward`` is the op that runs ``fte.BasicLinear``, and
    ``bridge.register_custom_op(fte.BasicLinear)[0].op`` the object; a fusion runs under its own name, which
    ``fte.plan`` shows. Ops of PyTorch between chains are asked for as well; those inside of our ops are not.

    A closed op is a node of its own below the compiler too, which then fuses nothing into it.

    Args:
        policy: from ``(ctx, op, *args, **kwargs)`` to a ``CheckpointPolicy``; or the ops whose results are kept.
        allow_cache_entry_mutation: as in PyTorch.

    Returns:
        The context of the forward and that of the recomputation.
    """
    if callable(policy):
        wanted: Any = _by_public_name(policy)
    else:
        kept = list(policy)
        wanted = [*kept, *(opaque for opaque, public in public_names.items() if public in kept)]
    forward, recomputation = create_selective_checkpoint_contexts(wanted, allow_cache_entry_mutation)
    for mode in (forward, recomputation):
        mode.__class__ = _closing(type(mode))
    return forward, recomputation


def _by_public_name(policy: Policy) -> Policy:
    def asked(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return policy(ctx, public_names.get(op, op), *args, **kwargs)

    return asked
