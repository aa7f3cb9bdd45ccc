"""Weight gradients that are summed into ``weight.main_grad`` instead of being returned, as Megatron-style loops want.

The weight gradient is computed in the dtype of ``main_grad`` (float32, as a rule) and added there by the backward, with
a mutable custom op that a compiled graph keeps. Attributes of the parameter have their names in Transformer Engine:

``main_grad``
    the buffer; with ``__fsdp_param__`` set, what ``get_main_grad()`` returns.
``overwrite_main_grad``
    True writes instead of adding.
``grad_added_to_main_grad``
    where the attribute exists it is set to True by an eager backward, and the parameter gets a gradient of no meaning
    (so that its hooks run): zeros if ``zero_out_wgrad`` is set or the call is compiled, else uninitialized memory.
    Where it does not exist, the parameter gets no gradient.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from bridge.library import NAMESPACE
from functional_te._errors import type_error, value_error

__all__ = ["MainGrad", "check_one_dtype", "main_grad_of", "overwriting_once"]

_library = torch.library.Library(NAMESPACE, "FRAGMENT")
_library.define("accumulate_(Tensor(a!) target, Tensor value, bool overwrite) -> ()")


def _accumulate(target: torch.Tensor, value: torch.Tensor, overwrite: bool) -> None:
    if overwrite:
        target.copy_(value)
    else:
        target.add_(value)


_library.impl("accumulate_", _accumulate, "CompositeExplicitAutograd")
torch.library.register_fake(f"{NAMESPACE}::accumulate_", lambda target, value, overwrite: None, lib=_library)


class MainGrad(NamedTuple):
    """Where the gradient of one parameter goes.

    Attributes:
        op: index of the op in its chain.
        param: position among the op's parameters.
        target: the buffer.
        overwrite: whether it is written to instead of added to.
        dtype: dtype of what the parameter gets as its gradient, or None if it gets none.
        zeros: whether that has to be zeros.
        weight: the parameter, if the backward is to set its ``grad_added_to_main_grad``, else None.
    """

    op: int
    param: int
    target: torch.Tensor
    overwrite: bool
    dtype: torch.dtype | None
    zeros: bool
    weight: Any

    def add(self, target: torch.Tensor, grad: torch.Tensor) -> torch.Tensor | None:
        """Add ``grad`` to the buffer (``target``, as the backward has it); what the parameter gets as its gradient."""
        if torch.compiler.is_compiling():
            torch.ops.functional_te.accumulate_(target, grad, self.overwrite)
        else:
            _accumulate(target, grad, self.overwrite)
        if self.weight is not None:
            self.weight.grad_added_to_main_grad = True
        if self.dtype is None:
            return None
        return (torch.zeros if self.zeros else torch.empty)(grad.shape, dtype=self.dtype, device=grad.device)


def check_one_dtype(found: list[MainGrad], where: str) -> None:
    """Raise unless the buffers of one op have one dtype: one product computes the gradients for all of them."""
    dtypes = sorted({str(own.target.dtype) for own in found})
    if len(dtypes) > 1:
        raise value_error(where, "main_grad", "one dtype for all weights", ", ".join(dtypes))


def overwriting_once(found: list[MainGrad]) -> tuple[MainGrad, ...]:
    """A buffer of tied weights is overwritten by the first gradient, which the others are added to."""
    result: list[MainGrad] = []
    for own in found:
        again = any(own.target is other.target for other in result)
        result.append(own._replace(overwrite=False) if again else own)
    return tuple(result)


def main_grad_of(op: int, param: int, name: str, weight: torch.Tensor, where: str) -> MainGrad:
    """The destination of the gradient of ``weight``.

    Raises:
        RuntimeError: it has no buffer.
        TypeError: the buffer is no tensor, or not of floating numbers.
        ValueError: it has another shape or device, requires a gradient, or is the weight.
    """
    target = weight.get_main_grad() if hasattr(weight, "__fsdp_param__") else getattr(weight, "main_grad", None)  # type: ignore[attr-defined]
    if target is None:
        raise RuntimeError(
            f"{where}: {name}: accumulate_into_main_grad: expected a tensor in {name}.main_grad, got None."
        )
    if not isinstance(target, torch.Tensor):
        raise type_error(where, f"{name}.main_grad", "a tensor", type(target).__name__)
    if not target.is_floating_point():
        raise type_error(where, f"{name}.main_grad", "a floating dtype", target.dtype)
    if target.requires_grad or target is weight:
        raise value_error(where, f"{name}.main_grad", "a tensor of its own that requires no gradient", "another")
    if target.shape != weight.shape or target.device != weight.device:
        raise ValueError(
            f"{where}: {name}.main_grad: expected shape {tuple(weight.shape)} on {weight.device}, "
            f"got shape {tuple(target.shape)} on {target.device}."
        )
    compiling, gets_grad = torch.compiler.is_compiling(), hasattr(weight, "grad_added_to_main_grad")
    return MainGrad(
        op,
        param,
        target,
        bool(getattr(weight, "overwrite_main_grad", False)),
        weight.dtype if gets_grad else None,
        compiling or bool(getattr(weight, "zero_out_wgrad", False)),
        weight if gets_grad and not compiling else None,
    )
