"""What a kernel backend is: one record of functions, and how a producer ends.

Every backend provides the unfused parts: float32 math, casts, products. It may also have *fused* kernels that do in one
step what a producer does: the math, the rounding, the cast with both copies, the amax, a bias gradient. Ops call the
methods of the record; a method uses the fused kernel where there is one that takes the case, and composes the same from
the parts otherwise. So a backend grows kernel by kernel, and the parts stay the specification.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch

from functional_te.kernels import reference
from functional_te.quantization.tensor import BoundQuantizer

__all__ = ["FAST_ACCUMULATION", "REFERENCE", "Backend", "Fused"]

Stored = tuple[Any, torch.Tensor | None]

# Which FP8 products with one scale per tensor leave partial sums in the tensor core's accumulator of about 14 bits,
# where a recipe does not say: as in Transformer Engine the forward's do, those of input and weight gradients do not.
# On an H200 the former are off by 1e-3 to 4e-3 (root mean square), the others by 1e-4, and 4 to 10 % slower.
FAST_ACCUMULATION = (True, False, False)


@dataclasses.dataclass(frozen=True)
class Fused:
    """Fused kernels of a backend: functions with the arguments of the method of :class:`Backend` of the same name.

    None: there is none. A function that returns None does not take the case. ``activation_grad`` gets ``needs_bias`` as
    a bool. :mod:`bridge.state` calls ``close_step``, which closes steps of delayed scaling in place, ``closing``, which
    gives what closes those of the same quantizers again and again (both or none), and ``copies``, which copies many
    scales; :mod:`bridge.joining` calls ``concatenate``.
    """

    activation: Callable[..., Any] | None = None
    activation_grad: Callable[..., Any] | None = None
    cast_bias: Callable[..., Any] | None = None
    rms_norm: Callable[..., Any] | None = None
    rms_norm_grad: Callable[..., Any] | None = None
    layer_norm: Callable[..., Any] | None = None
    layer_norm_grad: Callable[..., Any] | None = None
    dropout: Callable[..., Any] | None = None
    close_step: Callable[..., Any] | None = None
    closing: Callable[..., Any] | None = None
    copies: Callable[..., Any] | None = None
    transpose: Callable[..., Any] | None = None
    concatenate: Callable[..., Any] | None = None


@dataclasses.dataclass(frozen=True)
class Backend:
    """The kernels of one backend. :mod:`functional_te.kernels.reference` documents the functions that are fields.

    In the methods ``bound`` is the quantizer that a result is cast with, or None; ``dtype`` is the dtype that it is
    rounded to, nominally if it is cast; a *stored* result is a tensor of ``dtype`` or a quantized tensor; an amax is
    float32 ``[1]``, or None where nothing is observed.

    Attributes:
        name: how the user asks for it.
        transposed_copies: whether products read transposed copies that are mere transposes, as a GPU without other
            FP8 layouts must.
        traceable: whether a compiler can trace through the kernels. If not, ops that run them are opaque to it.
        repeatable: whether launches of kernels and ATen operators, with numbers that follow from shapes, are all that
            the functions do.
        fast_accumulation: whether ``gemm_nt``, ``gemm_nn`` and ``gemm_tn`` accumulate fast; None if they cannot.
        fused: the fused kernels.
    """

    name: str
    quantize: Callable[..., Any]
    gemm_nt: Callable[..., Any]
    gemm_nn: Callable[..., Any]
    gemm_tn: Callable[..., Any]
    grouped_nt: Callable[..., Any]
    grouped_nn: Callable[..., Any]
    grouped_tn: Callable[..., Any]
    grouped_sum: Callable[..., Any]
    rms_norm_forward: Callable[..., Any]
    rms_norm_backward: Callable[..., Any]
    add_rms_norm_forward: Callable[..., Any]
    layer_norm_forward: Callable[..., Any]
    layer_norm_backward: Callable[..., Any]
    adaptive_layer_norm_forward: Callable[..., Any]
    adaptive_layer_norm_backward: Callable[..., Any]
    l2_norm_forward: Callable[..., Any]
    l2_norm_backward: Callable[..., Any]
    dropout_forward: Callable[..., Any]
    activation_forward: Callable[..., Any]
    activation_backward: Callable[..., Any]
    bias_grad: Callable[..., Any]
    transposed_copies: bool = False
    traceable: bool = True
    repeatable: bool = False
    fast_accumulation: tuple[bool, bool, bool] | None = None
    fused: Fused = Fused()

    def accumulating(self, fast: tuple[bool, bool, bool], name: str) -> Backend:
        """The same backend under another name, with products that accumulate as ``fast`` says."""
        return dataclasses.replace(
            self,
            name=name,
            fast_accumulation=fast,
            gemm_nt=functools.partial(self.gemm_nt, fast=fast[0]),
            gemm_nn=functools.partial(self.gemm_nn, fast=fast[1]),
            gemm_tn=functools.partial(self.gemm_tn, fast=fast[2]),
        )

    def store(self, y: torch.Tensor, dtype: torch.dtype, bound: BoundQuantizer | None) -> Stored:
        """End a producer: round ``y`` to ``dtype``, or cast it for its consumer.

        A delayed-scaling cast takes the float32 result as it is; other quantizers see the value rounded to ``dtype``
        (as Transformer Engine's kernels do).

        Returns:
            The stored tensor and the observed amax.
        """
        if bound is None:
            return (y if y.dtype is dtype else y.to(dtype)), None
        if not bound.quantizer.from_float32 and y.dtype is not dtype:
            y = y.to(dtype)
        stored: Stored = self.quantize(y, bound, dtype)
        return stored

    def activation(
        self,
        x: torch.Tensor,
        kind: str,
        config: tuple[float, ...] = (),
        interleave: int = 0,
        *,
        dtype: torch.dtype,
        bound: BoundQuantizer | None = None,
    ) -> Stored:
        """The stored activation of ``x``, and the observed amax."""
        fused = self.fused.activation
        if fused is not None:
            done: Any = fused(x, kind, config, interleave, dtype=dtype, bound=bound)
            if done is not None:
                return done
        y = self.activation_forward(x, kind, config, interleave)
        return (y, None) if bound is None and y.dtype is dtype else self.store(y, dtype, bound)

    def activation_grad(
        self,
        dy: torch.Tensor,
        x: torch.Tensor,
        kind: str,
        config: tuple[float, ...] = (),
        interleave: int = 0,
        *,
        dtype: torch.dtype,
        bound: BoundQuantizer | None = None,
        needs_bias: bool | None = None,
    ) -> tuple[Any, torch.Tensor | None, torch.Tensor | None]:
        """The stored gradient of ``x``, the observed amax, and the gradient of a bias that was added to ``x``.

        ``needs_bias`` is None if there was no such bias. If there was, the gradient is rounded to ``dtype`` before it
        is cast, because it is a tensor of its own in an unfused chain.
        """
        how = (dy, x, kind, config, interleave)
        if needs_bias is False:
            return *self.store(self.activation_grad(*how, dtype=dtype)[0], dtype, bound), None
        if self.fused.activation_grad is not None:
            done: Any = self.fused.activation_grad(*how, dtype=dtype, bound=bound, needs_bias=needs_bias is True)
            if done is not None:
                return done
        dx: torch.Tensor = self.activation_backward(*how)
        if needs_bias is None:
            return *self.store(dx, dtype, bound), None
        dx = dx if dx.dtype is dtype else dx.to(dtype)
        return *self.store(dx, dtype, bound), self.bias_grad(dx)

    def cast_bias(
        self, dy: torch.Tensor, bound: BoundQuantizer, *, needs_bias: bool = True
    ) -> tuple[Any, torch.Tensor | None, torch.Tensor | None]:
        """The cast of ``dy``, the observed amax, and the gradient of a bias whose output's gradient ``dy`` is."""
        if self.fused.cast_bias is not None:
            done: Any = self.fused.cast_bias(dy, bound, dtype=dy.dtype, needs_bias=needs_bias)
            if done is not None:
                return done
        return *self.quantize(dy, bound), self.bias_grad(dy) if needs_bias else None

    def rms_norm(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        *,
        eps: float,
        zero_centered_gamma: bool,
        dtype: torch.dtype,
        bound: BoundQuantizer | None = None,
        add: torch.Tensor | None = None,
    ) -> tuple[Any, torch.Tensor | None, torch.Tensor, torch.Tensor | None]:
        """The stored RMSNorm of ``x`` or of ``add + x``, the observed amax, ``rstd``, and the sum or None."""
        fused = self.fused.rms_norm
        if fused is not None:
            done: Any = fused(
                x, weight, eps=eps, zero_centered_gamma=zero_centered_gamma, dtype=dtype, bound=bound, add=add
            )
            if done is not None:
                return done
        total = None
        if add is None:
            y, rstd = self.rms_norm_forward(x, weight, eps=eps, zero_centered_gamma=zero_centered_gamma)
        else:
            total, y, rstd = self.add_rms_norm_forward(x, add, weight, eps=eps, zero_centered_gamma=zero_centered_gamma)
        if bound is None and y.dtype is dtype:
            return y, None, rstd, total
        return *self.store(y, dtype, bound), rstd, total

    def rms_norm_grad(
        self,
        dy: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor,
        rstd: torch.Tensor,
        *,
        zero_centered_gamma: bool,
        dtype: torch.dtype,
        add: torch.Tensor | None = None,
        needs_input: bool = True,
        needs_weight: bool = True,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """``dx`` in ``dtype`` and ``dweight`` in the weight's dtype."""
        how: dict[str, Any] = {
            "zero_centered_gamma": zero_centered_gamma,
            "add": add,
            "needs_input": needs_input,
            "needs_weight": needs_weight,
        }
        if self.fused.rms_norm_grad is not None:
            done: Any = self.fused.rms_norm_grad(dy, x, weight, rstd, **how, dtype=dtype)
            if done is not None:
                return done
        dx, dweight = self.rms_norm_backward(dy, x, weight, rstd, **how)
        return _rounded(dx, dtype), _rounded(dweight, weight.dtype)

    def layer_norm(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor,
        *,
        eps: float,
        zero_centered_gamma: bool,
        dtype: torch.dtype,
        bound: BoundQuantizer | None = None,
    ) -> tuple[Any, torch.Tensor | None, torch.Tensor, torch.Tensor]:
        """The stored LayerNorm of ``x``, the observed amax, ``mean`` and ``rstd``."""
        how: dict[str, Any] = {"eps": eps, "zero_centered_gamma": zero_centered_gamma}
        if self.fused.layer_norm is not None:
            done: Any = self.fused.layer_norm(x, weight, bias, **how, dtype=dtype, bound=bound)
            if done is not None:
                return done
        y, mean, rstd = self.layer_norm_forward(x, weight, bias, **how)
        return *self.store(y, dtype, bound), mean, rstd

    def layer_norm_grad(
        self,
        dy: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor,
        mean: torch.Tensor,
        rstd: torch.Tensor,
        *,
        zero_centered_gamma: bool,
        dtype: torch.dtype,
        needs_input: bool = True,
        needs_affine: bool = True,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """``dx`` in ``dtype``, ``dweight`` and ``dbias`` in the weight's dtype."""
        how: dict[str, Any] = {
            "zero_centered_gamma": zero_centered_gamma,
            "needs_input": needs_input,
            "needs_affine": needs_affine,
        }
        if self.fused.layer_norm_grad is not None:
            done: Any = self.fused.layer_norm_grad(dy, x, weight, mean, rstd, **how, dtype=dtype)
            if done is not None:
                return done
        dx, dweight, dbias = self.layer_norm_backward(dy, x, weight, mean, rstd, **how)
        return _rounded(dx, dtype), _rounded(dweight, weight.dtype), _rounded(dbias, weight.dtype)

    def transpose(self, data: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """The transposed copy ``[n, m]`` of data ``[m, n]``, written to ``out`` if it is given."""
        if self.fused.transpose is not None and data.is_contiguous() and (out is None or out.is_contiguous()):
            done: Any = self.fused.transpose(data, out)
            if done is not None:
                return done
        return data.t().contiguous() if out is None else out.copy_(data.t())

    def dropout(
        self,
        x: torch.Tensor,
        key: torch.Tensor | None,
        *,
        p: float,
        dtype: torch.dtype,
        bias: torch.Tensor | None = None,
        add: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """``(x + bias) * keep / (1 - p) + add`` in ``dtype``."""
        if self.fused.dropout is not None:
            done: Any = self.fused.dropout(x, key, p=p, bias=bias, add=add, dtype=dtype)
            if done is not None:
                return done
        y: torch.Tensor = self.dropout_forward(x, key, p=p, bias=bias, add=add)
        return y if y.dtype is dtype else y.to(dtype)


def _rounded(x: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    return x if x is None or x.dtype is dtype else x.to(dtype)


REFERENCE = Backend(
    name="reference",
    quantize=reference.quantize,
    gemm_nt=reference.gemm_nt,
    gemm_nn=reference.gemm_nn,
    gemm_tn=reference.gemm_tn,
    grouped_nt=reference.grouped_nt,
    grouped_nn=reference.grouped_nn,
    grouped_tn=reference.grouped_tn,
    grouped_sum=reference.grouped_sum,
    rms_norm_forward=reference.rms_norm_forward,
    rms_norm_backward=reference.rms_norm_backward,
    add_rms_norm_forward=reference.add_rms_norm_forward,
    layer_norm_forward=reference.layer_norm_forward,
    layer_norm_backward=reference.layer_norm_backward,
    adaptive_layer_norm_forward=reference.adaptive_layer_norm_forward,
    adaptive_layer_norm_backward=reference.adaptive_layer_norm_backward,
    l2_norm_forward=reference.l2_norm_forward,
    l2_norm_backward=reference.l2_norm_backward,
    dropout_forward=reference.dropout,
    activation_forward=reference.activation_forward,
    activation_backward=reference.activation_backward,
    bias_grad=reference.bias_grad,
)
