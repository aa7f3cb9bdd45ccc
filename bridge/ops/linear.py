"""Linear layers and bias as modules, with te.ops' names and constructor signatures."""

from __future__ import annotations

from typing import Any

import torch

import functional_te as fte
from bridge.ops.collectives import AllReduce, ReduceScatter, group_of
from bridge.ops.operation import BasicOperation, FusedOperation
from functional_te._errors import value_error
from functional_te.kernels import collectives

__all__ = ["BasicLinear", "Bias", "Linear"]


def _sharding(where: str, mode: Any, group: Any, sequence_parallel: bool) -> fte.TensorParallel | None:
    """How a layer is sharded; None without a mode, and by a group of one rank."""
    if mode is None:
        return None
    name, size = group_of(group, where, "tensor_parallel_group")
    if size == 1:
        return None
    if mode not in ("column", "row"):
        raise value_error(where, "tensor_parallel_mode", "None, 'column' or 'row'", repr(mode))
    return fte.TensorParallel(mode, name, size, bool(sequence_parallel))


class BasicLinear(BasicOperation):
    """``y = x @ W.T``, on one rank or sharded over a process group. See :class:`functional_te.BasicLinear`.

    Args:
        in_features: size of the last input dimension, on all ranks together.
        out_features: size of the last output dimension, likewise.
        device: None is the current CUDA device if there is one.
        dtype: of the weight; None is torch's default.
        tensor_parallel_mode: ``"column"``: every rank has a part of the output features; ``"row"``: of the input
            features. A group of one rank resets it to None.
        tensor_parallel_group: a process group; None is the default group.
        sequence_parallel: whether dim 0 is sharded where the features are not.
        rng_state_tracker_function: gives an object with a context manager ``fork()``, inside of which the weight is
            drawn: with the device's random numbers if it is CUDA, else the CPU's.
        accumulate_into_main_grad: see :mod:`bridge.main_grad`.
        userbuffers_options: communication overlapped by user buffers; not supported.

    Attributes:
        tensor_parallel_size: ranks that share the layer.
        local_in_features: size of the last input dimension on one rank.
        local_out_features: size of the last output dimension on one rank.

    Raises:
        ValueError: another mode, or features that cannot be shared out evenly.
        NotImplementedError: ``userbuffers_options``.
    """

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
        if userbuffers_options is not None:
            raise NotImplementedError(
                f"BasicLinear: userbuffers_options: not supported, got {userbuffers_options!r}. "
                "Leave it out: communication then is not overlapped with the products."
            )
        self.accumulate_into_main_grad = accumulate_into_main_grad
        tp = _sharding("BasicLinear", tensor_parallel_mode, tensor_parallel_group, sequence_parallel)
        op = fte.BasicLinear(in_features, out_features, tp)
        self.in_features, self.out_features = in_features, out_features
        self.local_in_features, self.local_out_features = op.local_in_features, op.local_out_features
        self.tensor_parallel_mode = None if tp is None else tp.mode
        self.tensor_parallel_size = 1 if tp is None else tp.size
        self.sequence_parallel = tp is not None and tp.sequence_parallel
        self._rng_state_tracker_function = rng_state_tracker_function
        super().__init__(op, device=device, dtype=dtype)

    @property
    def tensor_parallel_group(self) -> Any:
        """The process group, or None."""
        tp = self.op.tensor_parallel  # type: ignore[attr-defined]
        return None if tp is None else collectives.process_group(tp.group)


class Bias(BasicOperation):
    """``y = x + b``. See :class:`functional_te.Bias`.

    Args:
        size: size of the last dimension, on all ranks together.
        device: None is the current CUDA device if there is one.
        dtype: None is torch's default.
        tensor_parallel: whether every rank has a part of the last dimension.
        tensor_parallel_group: a process group; None is the default group.

    Raises:
        ValueError: a size that cannot be shared out evenly.
    """

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
        name, ranks = group_of(tensor_parallel_group, "Bias", "tensor_parallel_group") if tensor_parallel else ("", 1)
        if isinstance(size, int) and size % ranks:
            raise value_error("Bias", "size", f"a multiple of the {ranks} ranks", size)
        self._group_name, self.tensor_parallel_size = name, ranks
        self.tensor_parallel = ranks > 1
        super().__init__(fte.Bias(size // ranks if ranks > 1 else size), device=device, dtype=dtype)

    @property
    def tensor_parallel_group(self) -> Any:
        """The process group, or None."""
        return collectives.process_group(self._group_name) if self.tensor_parallel else None


class Linear(FusedOperation):
    """``y = x @ W.T + b``: a :class:`BasicLinear` and a :class:`Bias` in ``basic_ops``.

    Arguments are those of :class:`BasicLinear`. In column mode both are sharded. In row mode they stand before an
    :class:`AllReduce` or, with ``sequence_parallel``, a :class:`ReduceScatter`, and every rank has a bias of the full
    size that is added before the sum: the layer's bias is the sum of the ranks' biases.
    """

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
        tp = _sharding("Linear", tensor_parallel_mode, tensor_parallel_group, sequence_parallel)
        row = tp is not None and tp.mode == "row"
        # the sharded op's own check says what does not divide
        local_in = fte.BasicLinear(in_features, out_features, tp).local_in_features if row else in_features
        linear = BasicLinear(
            local_in,
            out_features,
            device=device,
            dtype=dtype,
            tensor_parallel_mode=None if row else tensor_parallel_mode,
            tensor_parallel_group=None if row else tensor_parallel_group,
            sequence_parallel=sequence_parallel and not row,
            rng_state_tracker_function=rng_state_tracker_function,
            accumulate_into_main_grad=accumulate_into_main_grad,
        )
        ops: list[BasicOperation] = [linear]
        if bias:
            column = tp is not None and not row
            group = tensor_parallel_group if column else None
            ops.append(
                Bias(out_features, device=device, dtype=dtype, tensor_parallel=column, tensor_parallel_group=group)
            )
        if row:
            ops.append((ReduceScatter if sequence_parallel else AllReduce)(tensor_parallel_group))
        super().__init__(ops)
        self.in_features, self.out_features = in_features, out_features
        self.local_in_features, self.local_out_features = linear.local_in_features, linear.local_out_features
        self.tensor_parallel_mode = None if tp is None else tp.mode
        self.tensor_parallel_size = 1 if tp is None else tp.size
        self.sequence_parallel = tp is not None and tp.sequence_parallel
        self._group_name = None if tp is None else tp.group

    @property
    def tensor_parallel_group(self) -> Any:
        """The process group, or None."""
        return None if self._group_name is None else collectives.process_group(self._group_name)

    @property
    def weight(self) -> torch.nn.Parameter:
        """The weight of the BasicLinear."""
        return self.basic_ops[0].weight  # type: ignore[return-value]

    @property
    def bias(self) -> torch.nn.Parameter | None:
        """The bias of the Bias, or None."""
        owner = self._bias_owner()
        return None if owner is None else owner.bias

    def _bias_owner(self) -> Bias | None:
        second = self.basic_ops[1] if len(self.basic_ops) > 1 else None
        return second if isinstance(second, Bias) else None

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        """Also take ``weight`` and ``bias`` without the ops' prefixes, as te.ops does."""
        for index, module in enumerate(self.basic_ops):
            for name in ("weight", "bias"):
                inner = f"{prefix}basic_ops.{index}.{name}"
                if module._parameters.get(name) is not None and inner not in state_dict and prefix + name in state_dict:
                    state_dict[inner] = state_dict.pop(prefix + name)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight":
            self.basic_ops[0].weight = value
        elif name == "bias":
            owner = self._bias_owner()
            if owner is not None:
                owner.bias = value
            elif value is not None:
                raise ValueError("Linear: bias: expected None for a layer without bias.")
        else:
            super().__setattr__(name, value)
