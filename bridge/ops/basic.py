"""The basic ops as modules, with te.ops' names and constructor signatures."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch

import functional_te as fte
from bridge.ops.operation import BasicOperation, FusedOperation

__all__ = [
    "GEGLU",
    "GELU",
    "GLU",
    "QGEGLU",
    "QGELU",
    "AddExtraInput",
    "BasicLinear",
    "Bias",
    "ClampedSwiGLU",
    "ConstantScale",
    "Identity",
    "LayerNorm",
    "Linear",
    "MakeExtraOutput",
    "RMSNorm",
    "ReGLU",
    "ReLU",
    "Reshape",
    "SReGLU",
    "SReLU",
    "SiLU",
    "SiTUGLU",
    "SwiGLU",
]


def _refuse(where: str, **arguments: Any) -> None:
    """Raise for arguments of te.ops that are not supported, unless they have their neutral value."""
    for name, value in arguments.items():
        if value not in (None, False):
            raise NotImplementedError(f"{where}: {name}: not supported, got {value!r}. Leave it at its default.")


class BasicLinear(BasicOperation):
    """``y = x @ W.T``. See :class:`functional_te.BasicLinear`; te.ops' distributed options are refused."""

    weight: torch.nn.Parameter

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        device: Any = None,
        dtype: torch.dtype | None = None,
        tensor_parallel_mode: str | None = None,
        tensor_parallel_group: Any = None,
        sequence_parallel: bool = False,
        rng_state_tracker_function: Any = None,
        accumulate_into_main_grad: bool = False,
        userbuffers_options: Any = None,
    ) -> None:
        _refuse(
            "BasicLinear",
            tensor_parallel_mode=tensor_parallel_mode,
            tensor_parallel_group=tensor_parallel_group,
            sequence_parallel=sequence_parallel,
            rng_state_tracker_function=rng_state_tracker_function,
            accumulate_into_main_grad=accumulate_into_main_grad,
            userbuffers_options=userbuffers_options,
        )
        self.in_features, self.out_features = in_features, out_features
        super().__init__(fte.BasicLinear(in_features, out_features), device=device, dtype=dtype)


class Bias(BasicOperation):
    """``y = x + b``. See :class:`functional_te.Bias`."""

    bias: torch.nn.Parameter

    def __init__(
        self,
        size: int,
        *,
        device: Any = None,
        dtype: torch.dtype | None = None,
        tensor_parallel: bool = False,
        tensor_parallel_group: Any = None,
    ) -> None:
        _refuse("Bias", tensor_parallel=tensor_parallel, tensor_parallel_group=tensor_parallel_group)
        super().__init__(fte.Bias(size), device=device, dtype=dtype)


class Linear(FusedOperation):
    """``y = x @ W.T + b``: a :class:`BasicLinear` and a :class:`Bias` in ``basic_ops``."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        tensor_parallel_mode: str | None = None,
        tensor_parallel_group: Any = None,
        sequence_parallel: bool = False,
        rng_state_tracker_function: Any = None,
        accumulate_into_main_grad: bool = False,
    ) -> None:
        linear = BasicLinear(
            in_features,
            out_features,
            device=device,
            dtype=dtype,
            tensor_parallel_mode=tensor_parallel_mode,
            tensor_parallel_group=tensor_parallel_group,
            sequence_parallel=sequence_parallel,
            rng_state_tracker_function=rng_state_tracker_function,
            accumulate_into_main_grad=accumulate_into_main_grad,
        )
        ops: list[BasicOperation] = [linear]
        if bias:
            ops.append(Bias(out_features, device=device, dtype=dtype))
        super().__init__(ops)
        self.in_features, self.out_features = in_features, out_features

    @property
    def weight(self) -> torch.nn.Parameter:
        """The weight of the BasicLinear."""
        return self.basic_ops[0].weight  # type: ignore[return-value]

    @property
    def bias(self) -> torch.nn.Parameter | None:
        """The bias of the Bias, or None."""
        return self.basic_ops[1].bias if len(self.basic_ops) > 1 else None  # type: ignore[return-value]

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight":
            self.basic_ops[0].weight = value
        elif name == "bias":
            if len(self.basic_ops) < 2:
                raise ValueError("Linear: bias: expected None for a layer without bias.")
            self.basic_ops[1].bias = value
        else:
            super().__setattr__(name, value)


class _Norm(BasicOperation):
    op_class: ClassVar[Any]
    weight: torch.nn.Parameter

    def __init__(
        self,
        normalized_shape: int | Iterable[int],
        *,
        eps: float = 1e-5,
        device: Any = None,
        dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        sm_margin: int | dict[str, int] = 0,
    ) -> None:
        del sm_margin  # a tuning hint for kernels that share the GPU with communication; no effect here
        shape = normalized_shape if isinstance(normalized_shape, int) else tuple(normalized_shape)
        super().__init__(self.op_class(shape, float(eps), bool(zero_centered_gamma)), device=device, dtype=dtype)
        self.eps, self.zero_centered_gamma = float(eps), bool(zero_centered_gamma)


class LayerNorm(_Norm):
    """Layer normalization. See :class:`functional_te.LayerNorm`; ``sm_margin`` is accepted without effect."""

    op_class = fte.LayerNorm
    bias: torch.nn.Parameter


class RMSNorm(_Norm):
    """Root-mean-square normalization. See :class:`functional_te.RMSNorm`; ``sm_margin`` is accepted without effect."""

    op_class = fte.RMSNorm


class _Activation(BasicOperation):
    op_class: ClassVar[Any]

    def __init__(self, *, cache_quantized_input: bool = False) -> None:
        self._configure(cache_quantized_input=cache_quantized_input)

    def _configure(self, *, cache_quantized_input: bool, **config: Any) -> None:
        BasicOperation.__init__(self, self.op_class(cache_quantized_input=cache_quantized_input, **config))
        self.cache_quantized_input = cache_quantized_input


class GELU(_Activation):
    """See :class:`functional_te.GELU`."""

    op_class = fte.GELU


class QGELU(_Activation):
    """See :class:`functional_te.QGELU`."""

    op_class = fte.QGELU


class SiLU(_Activation):
    """See :class:`functional_te.SiLU`."""

    op_class = fte.SiLU


class ReLU(_Activation):
    """See :class:`functional_te.ReLU`."""

    op_class = fte.ReLU


class SReLU(_Activation):
    """See :class:`functional_te.SReLU`."""

    op_class = fte.SReLU


class GLU(_Activation):
    """See :class:`functional_te.GLU`."""

    op_class = fte.GLU


class GEGLU(_Activation):
    """See :class:`functional_te.GEGLU`."""

    op_class = fte.GEGLU


class QGEGLU(_Activation):
    """See :class:`functional_te.QGEGLU`."""

    op_class = fte.QGEGLU


class ReGLU(_Activation):
    """See :class:`functional_te.ReGLU`."""

    op_class = fte.ReGLU


class SReGLU(_Activation):
    """See :class:`functional_te.SReGLU`."""

    op_class = fte.SReGLU


class SwiGLU(_Activation):
    """See :class:`functional_te.SwiGLU`."""

    op_class = fte.SwiGLU

    def __init__(self, *, cache_quantized_input: bool = False, glu_interleave_size: int | None = None) -> None:
        self._configure(cache_quantized_input=cache_quantized_input, glu_interleave_size=glu_interleave_size)


class SiTUGLU(_Activation):
    """See :class:`functional_te.SiTUGLU`."""

    op_class = fte.SiTUGLU

    def __init__(
        self,
        *,
        beta1: float = 4.0,
        beta2: float = 25.0,
        cache_quantized_input: bool = False,
        glu_interleave_size: int | None = None,
    ) -> None:
        self._configure(
            cache_quantized_input=cache_quantized_input,
            glu_interleave_size=glu_interleave_size,
            beta1=beta1,
            beta2=beta2,
        )


class ClampedSwiGLU(_Activation):
    """See :class:`functional_te.ClampedSwiGLU`."""

    op_class = fte.ClampedSwiGLU

    def __init__(
        self,
        *,
        limit: float = 7.0,
        alpha: float = 1.702,
        glu_linear_offset: float = 1.0,
        cache_quantized_input: bool = False,
        glu_interleave_size: int | None = None,
    ) -> None:
        self._configure(
            cache_quantized_input=cache_quantized_input,
            glu_interleave_size=glu_interleave_size,
            limit=limit,
            alpha=alpha,
            glu_linear_offset=glu_linear_offset,
        )


class Identity(BasicOperation):
    """``y = x``."""

    def __init__(self) -> None:
        super().__init__(fte.Identity())


class Reshape(BasicOperation):
    """``y = x.reshape(shape)``; one size may be -1."""

    def __init__(self, shape: Iterable[int]) -> None:
        super().__init__(fte.Reshape(tuple(shape)))


class ConstantScale(BasicOperation):
    """``y = x * scale``."""

    def __init__(self, scale: float) -> None:
        super().__init__(fte.ConstantScale(scale))
        self.scale = scale


class AddExtraInput(BasicOperation):
    """``y = extra + x``. ``in_place`` is accepted; arguments are never written to."""

    def __init__(self, *, in_place: bool = False) -> None:
        super().__init__(fte.AddExtraInput(in_place=in_place))


class MakeExtraOutput(BasicOperation):
    """``y = x`` and ``x`` as an extra output. ``in_place`` is accepted; gradients are never written to."""

    def __init__(self, *, in_place: bool = False) -> None:
        super().__init__(fte.MakeExtraOutput(in_place=in_place))
