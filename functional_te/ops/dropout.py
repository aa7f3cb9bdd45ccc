"""Dropout from an explicit key: ``y = x * keep(key) / (1 - p)``."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from functional_te import pytree
from functional_te._errors import kind_of, type_error, value_error
from functional_te.kernels import kernels
from functional_te.ops.common import check_float, check_number
from functional_te.ops.op import BackwardContext, BwdResult, FwdResult, Op, OpRequiresGrad
from functional_te.ops.work import per_element
from functional_te.tensor_spec import TensorSpec

__all__ = ["Dropout", "DropoutBackwardArgs", "DropoutForwardArgs", "DropoutSaved"]


@pytree.bundle
class DropoutForwardArgs:
    """Bundle of the forward.

    Attributes:
        input_: a tensor of any shape.
        key: int64 ``[2]``, or None to pass the values on.
        p: probability to drop.
        dtype: the dtype of the output.
        backend: name of the kernel backend.
    """

    input_: torch.Tensor
    key: torch.Tensor | None = None
    p: float = pytree.static(default=0.0)
    dtype: torch.dtype = pytree.static(default=torch.float32)
    backend: str = pytree.static(default="reference")


@pytree.node
class DropoutSaved:
    """Kept for the backward: the key (None if nothing was dropped), and the dtype of the output."""

    key: torch.Tensor | None
    dtype: torch.dtype = pytree.static(default=torch.float32)


@pytree.bundle
class DropoutBackwardArgs:
    """Bundle of the backward.

    Attributes:
        grad_output: gradient of the output.
        key: the saved key.
        p: probability to drop.
        dtype: the dtype of the input gradient.
        backend: name of the kernel backend.
    """

    grad_output: torch.Tensor
    key: torch.Tensor | None = None
    p: float = pytree.static(default=0.0)
    dtype: torch.dtype = pytree.static(default=torch.float32)
    backend: str = pytree.static(default="reference")


def _forward(args: DropoutForwardArgs) -> FwdResult:
    if args.key is None:
        return FwdResult(args.input_.to(args.dtype, copy=True))
    return FwdResult(kernels(args.backend).dropout(args.input_, args.key, p=args.p, dtype=args.dtype))


def _forward_fake(args: Any) -> FwdResult:
    return FwdResult(args.input_.with_(dtype=args.dtype))


def dropout_context(args: DropoutForwardArgs, aux: Any) -> DropoutSaved:
    """What the backward needs: the mask is made again from the key."""
    del aux
    return DropoutSaved(key=args.key, dtype=args.dtype)


def dropout_grad(args: DropoutBackwardArgs) -> torch.Tensor:
    """Input gradient of a backward bundle with a key, in the dtype of the bundle."""
    return kernels(args.backend).dropout(args.grad_output, args.key, p=args.p, dtype=args.dtype)


def _backward(args: DropoutBackwardArgs) -> BwdResult:
    return BwdResult(None if args.key is None else dropout_grad(args))


def _backward_fake(args: Any) -> BwdResult:
    return BwdResult(None if args.key is None else args.grad_output.with_(dtype=args.dtype))


def check_key(kwargs: Mapping[str, Any], p: float, where: str) -> None:
    """Raise unless the forward kwargs of a dropout fit: a key where one is needed, and of the right kind."""
    training, key = kwargs.get("training", True), kwargs.get("key")
    if not isinstance(training, bool):
        raise type_error(where, "training", "a bool", repr(training))
    if key is None:
        if training and p > 0:
            fix = "Pass kwargs={INDEX: {'key': fte.make_key(seed)}}, a new key for every call, or {'training': False}."
            raise value_error(where, "key", "the key of the random mask", None, fix)
        return
    if not isinstance(key, torch.Tensor):
        raise type_error(where, "key", "an int64 tensor", kind_of(key), "See fte.make_key().")
    if key.dtype is not torch.int64:
        raise type_error(where, "key", "an int64 tensor", key.dtype, "See fte.make_key().")
    if tuple(key.shape) != (2,):
        raise value_error(where, "key", "shape (2,)", f"shape {tuple(key.shape)}", "See fte.make_key().")


@dataclasses.dataclass(frozen=True, eq=False)
class Dropout(Op):
    """``y = x * keep / (1 - p)`` with ``keep`` 0 with probability ``p``, else 1 (Srivastava et al., 2014).

    Pure: the mask is a function of a key and of the position of an element. The backward makes it again from the key,
    which is all that is kept. ``p`` is honoured to the nearest multiple of ``2**-16``; the scale ``1 / (1 - p)`` is
    exact. Arithmetic is float32 with one rounding. Output dtype: autocast's, else the input's.

    Args:
        p: probability to drop, in [0, 1).

    Forward kwargs: ``key``, int64 ``[2]``, see :func:`functional_te.make_key` and :func:`functional_te.next_key`;
    needed unless ``p`` is 0 or ``training`` False. ``training`` (True): False gives the values unchanged, in the
    input's dtype, and takes no key.

    Raises:
        ValueError: ``p`` out of range; in a call, a missing key.
    """

    p: float

    fwd_args_type: ClassVar[type[Any]] = DropoutForwardArgs
    bwd_args_type: ClassVar[type[Any]] = DropoutBackwardArgs

    forward_impl = staticmethod(_forward)
    forward_fake = staticmethod(_forward_fake)
    backward_impl = staticmethod(_backward)
    backward_fake = staticmethod(_backward_fake)
    setup_context = staticmethod(dropout_context)
    forward_work = staticmethod(per_element(2))
    backward_work = staticmethod(per_element(2))

    def __post_init__(self) -> None:
        p = check_number(self.p, "Dropout", "p")
        if not 0 <= p < 1:
            raise value_error("Dropout", "p", "a probability in [0, 1)", p)
        object.__setattr__(self, "p", p)

    def check(self, input_: TensorSpec, params: Any, extra_inputs: tuple[Any, ...], where: str) -> None:
        """A floating input."""
        del params, extra_inputs
        check_float(input_, "input", where)

    def check_kwargs(self, kwargs: Mapping[str, Any], where: str) -> None:
        """A key of the right kind, if one is needed."""
        check_key(kwargs, self.p, where)

    def resolve_fwd_args(
        self,
        input_: torch.Tensor,
        *,
        params: Any,
        state: Any,
        requires_grad: OpRequiresGrad,
        compute_dtype: torch.dtype | None = None,
        backend: str = "reference",
        key: torch.Tensor | None = None,
        training: bool = True,
    ) -> DropoutForwardArgs:
        """The forward bundle."""
        del params, state, requires_grad
        key = key if training and self.p > 0 else None
        if key is not None and key.device != input_.device:
            raise value_error("Dropout", "key", f"device {input_.device}, where the input is", f"device {key.device}")
        return DropoutForwardArgs(
            input_=input_,
            key=key,
            p=self.p,
            dtype=input_.dtype if compute_dtype is None or not training else compute_dtype,
            backend=backend,
        )

    def resolve_bwd_args(self, ctx: BackwardContext, grad_output: torch.Tensor) -> DropoutBackwardArgs:
        """The backward bundle."""
        return DropoutBackwardArgs(
            grad_output=grad_output, key=ctx.saved.key, p=self.p, dtype=ctx.saved.dtype, backend=ctx.backend
        )
