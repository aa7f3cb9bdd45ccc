"""Linear layers and bias as modules, with te.ops" names and constructor signatures."""

from __future__ import annotations

from typing import Any

import torch

import functional_te as fte
from bridge.ops.operation import BasicOperation, FusedOperation

__all__ = ["BasicLinear", "Bias", "Linear"]


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
            userbuffers_options=userbuffers_options,
        )
        self.accumulate_into_main_grad = accumulate_into_main_grad
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
