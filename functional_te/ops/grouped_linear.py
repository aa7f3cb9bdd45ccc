"""GroupedLinear: rows in groups, one linear layer for each group, in high precision or low.

What the sizes of the groups are is data, and stays where it is: nothing is copied to the host, and every shape depends
on the number of rows and groups only. So one compiled graph serves all sizes, and a CUDA graph can hold the op if
the sizes are on the device. Sizes on the CPU are checked in eager mode; sizes on a device cannot be without waiting for
it. Then groups that would pass the last row end there, negative sizes count as 0, and rows after the last group give
zeros; nothing is read out of bounds.

In low precision every group is a tensor of its own: with its own quantizers, amaxes and scales, and with blocks that no
two groups share. Rows are copied to where every group starts at a whole block (see
:mod:`functional_te.quantization.groups`) and cast there, once. These padded casts are what is saved for the backward:
:class:`QuantizedTensor` with the rows of :class:`GroupLayout`, and one factor or amax per group where a plain tensor
has one. Results are those of a :class:`BasicLinear` on the rows of each group; only stochastic rounding has other bits.

``backward_override`` is honoured (te.ops does not).
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

import torch

from functional_te._errors import type_error, value_error
from functional_te.ops.common import check_channel, check_float, check_last_dim, check_param, check_size
from functional_te.ops.grouped import (
    GroupedBackwardArgs,
    GroupedForwardArgs,
    grouped_forward,
    grouped_forward_fake,
    grouped_grad_specs,
    grouped_grads,
    saved_operands,
)
from functional_te.ops.grouped_work import grouped_backward_work, grouped_forward_work
from functional_te.ops.op import BackwardContext, Op, OpRequiresGrad
from functional_te.quantization.quantizer import rows_of
from functional_te.quantization.tensor import BoundQuantizer, CachedWeight
from functional_te.tensor_spec import TensorSpec

__all__ = ["GroupedLinear"]

_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_DIGITS = "0123456789"


@dataclasses.dataclass(frozen=True, eq=False)
class GroupedLinear(Op):
    """``y_t = x_t @ W_g.T + s_t b_g`` for every row ``t`` of group ``g``: the experts of a mixture, one after another.

    Extra input 0 holds the number of rows of each group, ``[num_groups]`` integers of any dtype on any device. They
    have to add up to the number of rows; see the module for what is checked when. Extra input 1, with ``scale_bias``
    and ``bias``, is the factor ``s``, one per row. Compute dtype: autocast's, else the weights'.

    Args:
        num_groups: number of groups.
        in_features: size of the last input dimension.
        out_features: size of the last output dimension.
        bias: whether there are biases.
        scale_bias: whether biases are scaled per row.
        single_weight: one parameter ``weight [num_groups, out_features, in_features]`` instead of one per group.
        single_bias: one parameter ``bias [num_groups, out_features]`` instead of one per group.
        splits_channel: take the sizes from this channel instead of from the caller.
        scales_channel: take the factors from this channel instead of from the caller.

    Parameters: ``weight0 ..`` each ``[out_features, in_features]``, Kaiming-uniform with ``a = sqrt(5)``; ``bias0 ..``
    each ``[out_features]``, zeros.
    """

    num_groups: int
    in_features: int
    out_features: int
    bias: bool = True
    scale_bias: bool = False
    single_weight: bool = False
    single_bias: bool = False
    splits_channel: str | None = None
    scales_channel: str | None = None

    extra_input_fields: ClassVar[tuple[str, ...]] = ("splits_channel", "scales_channel")
    free_device_slots: ClassVar[tuple[int, ...]] = (0,)
    fwd_args_type: ClassVar[type[Any]] = GroupedForwardArgs
    bwd_args_type: ClassVar[type[Any]] = GroupedBackwardArgs
    # compilers know grouped_mm of bfloat16 only (2.13), and the masked products that would stand for it cost more
    opaque: ClassVar[bool] = True

    forward_impl = staticmethod(grouped_forward)
    forward_fake = staticmethod(grouped_forward_fake)
    backward_impl = staticmethod(grouped_grads)
    backward_fake = staticmethod(grouped_grad_specs)
    setup_context = staticmethod(saved_operands)
    forward_work = staticmethod(grouped_forward_work)
    backward_work = staticmethod(grouped_backward_work)

    def __post_init__(self) -> None:
        where = "GroupedLinear"
        for name in ("num_groups", "in_features", "out_features"):
            check_size(getattr(self, name), where, name)
        for name in ("bias", "scale_bias", "single_weight", "single_bias"):
            if not isinstance(getattr(self, name), bool):
                raise type_error(where, name, "a bool", repr(getattr(self, name)))
        check_channel(self.splits_channel, where, "splits_channel")
        check_channel(self.scales_channel, where, "scales_channel")

    def _numbered(self, name: str, single: bool = False) -> tuple[str, ...]:
        return (name,) if single else tuple(f"{name}{g}" for g in range(self.num_groups))

    @property
    def weight_names(self) -> tuple[str, ...]:
        """Names of the weights."""
        return self._numbered("weight", self.single_weight)

    @property
    def bias_names(self) -> tuple[str, ...]:
        """Names of the biases; empty without."""
        return self._numbered("bias", self.single_bias) if self.bias else ()

    @property
    def param_names(self) -> tuple[str, ...]:  # type: ignore[override]
        """Weights, then biases."""
        return (*self.weight_names, *self.bias_names)

    @property
    def forward_quantizers(self) -> tuple[str, ...]:  # type: ignore[override]
        """``input0, weight0, input1, ...``."""
        return tuple(f"{name}{g}" for g in range(self.num_groups) for name in ("input", "weight"))

    @property
    def backward_quantizers(self) -> tuple[str, ...]:  # type: ignore[override]
        """``grad_output0, ...``."""
        return self._numbered("grad_output")

    @property
    def num_extra_inputs(self) -> int:  # type: ignore[override]
        """The sizes, and the factors of the biases if there are any."""
        return 2 if self.scale_bias and self.bias else 1

    def copies(self, role: str, requires_grad: OpRequiresGrad) -> tuple[bool, bool]:
        """As of a linear layer, for the role of any group."""
        weights = any(requires_grad.params[: len(self.weight_names)])
        name = role.rstrip(_DIGITS)
        if name == "grad_output":
            return requires_grad.input, weights
        return True, weights if name == "input" else requires_grad.input

    def quantized_sizes(self, role: str) -> dict[str, int]:
        """Blocks run along both sizes of a weight."""
        sizes = {"in_features": self.in_features, "out_features": self.out_features}
        dropped = {"input": "out_features", "grad_output": "in_features"}.get(role.rstrip(_DIGITS))
        return {name: size for name, size in sizes.items() if name != dropped}

    def param_specs(self, dtype: torch.dtype, device: torch.device | str) -> dict[str, TensorSpec]:
        """Weights and biases."""
        weight, bias = self._param_shapes()
        specs = {name: TensorSpec(weight, dtype, device) for name in self.weight_names}
        return {**specs, **{name: TensorSpec(bias, dtype, device) for name in self.bias_names}}

    def _param_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        many = (self.num_groups,)
        weight, bias = (self.out_features, self.in_features), (self.out_features,)
        return many + weight if self.single_weight else weight, many + bias if self.single_bias else bias

    def init_params(
        self, generator: torch.Generator, dtype: torch.dtype, device: torch.device | str
    ) -> dict[str, torch.Tensor]:
        """Kaiming-uniform weights, zero biases."""
        bound = 1.0 / math.sqrt(self.in_features)
        weight, bias = self._param_shapes()
        params = {}
        for name in self.weight_names:
            value = torch.rand(weight, generator=generator, device=generator.device) * (2 * bound) - bound
            params[name] = value.to(device=device, dtype=dtype)
        return {**params, **{name: torch.zeros(bias, dtype=dtype, device=device) for name in self.bias_names}}

    def check(self, input_: TensorSpec, params: Any, extra_inputs: tuple[Any, ...], where: str) -> None:
        """Shapes and dtypes; the sizes as far as they can be seen without data."""
        check_last_dim(input_, self.in_features, where)
        weight, bias = self._param_shapes()
        for name in self.weight_names:
            check_param(params, name, weight, where)
        for name in self.bias_names:
            check_param(params, name, bias, where)
        if len({params[name].dtype for name in self.weight_names}) > 1:
            wanted, got = "weights of one dtype", [params[name].dtype for name in self.weight_names]
            raise type_error(where, self.weight_names[1], wanted, got)
        splits, *scales = extra_inputs
        if splits.dtype not in _INTEGERS:
            raise type_error(where, "extra input 0", "integers, the rows of each group", splits.dtype)
        if tuple(splits.shape) != (self.num_groups,):
            wanted = f"one size for each of {self.num_groups} groups, shape ({self.num_groups},)"
            raise value_error(where, "extra input 0", wanted, f"shape {tuple(splits.shape)}")
        if scales:
            check_float(scales[0], "extra input 1", where)
            rows = rows_of(tuple(input_.shape))
            if scales[0].numel() != rows:
                wanted = f"one factor for each of {rows} rows"
                raise value_error(where, "extra input 1", wanted, f"shape {tuple(scales[0].shape)}")

    def check_splits(self, splits: Any, input_: Any) -> None:
        """Raise for sizes on the CPU that do not add up, in eager mode."""
        if torch.compiler.is_compiling() or not isinstance(splits, torch.Tensor) or splits.device.type != "cpu":
            return
        if not isinstance(input_, torch.Tensor) or input_.device.type == "meta":
            return
        where = f"GroupedLinear{f' {self.name!r}' if self.name else ''}"
        sizes, rows = splits.tolist(), rows_of(tuple(input_.shape))
        if min(sizes) < 0:
            raise value_error(where, "extra input 0", "sizes of at least 0", sizes)
        if sum(sizes) != rows:
            raise value_error(where, "extra input 0", f"sizes that add up to {rows} rows", f"{sizes}, sum {sum(sizes)}")

    def resolve_fwd_args(
        self,
        input_: Any,
        *,
        params: Any,
        state: dict[str, BoundQuantizer],
        requires_grad: OpRequiresGrad,
        extra_inputs: tuple[torch.Tensor, ...],
        compute_dtype: torch.dtype | None = None,
        backward_override: str | None = None,
        backend: str = "reference",
    ) -> GroupedForwardArgs:
        """The forward bundle."""
        splits, *scales = extra_inputs
        self.check_splits(splits, input_)
        given = [params[name] for name in self.weight_names]
        weights = [
            weight.read(f"weight{g}" in state) if isinstance(weight, CachedWeight) else weight
            for g, weight in enumerate(given)
        ]
        dense: list[Any] = []
        if backward_override == "high_precision" and requires_grad.input:
            kept = [isinstance(weight, CachedWeight) and not weight.stored for weight in given]
            if any(kept):
                dense = [old.value if keep else new for old, new, keep in zip(given, weights, kept, strict=True)]
        each = range(self.num_groups)
        count = len(weights)
        return GroupedForwardArgs(
            input_=input_,
            splits=splits,
            weights=tuple(weights),
            biases=tuple([params[name] for name in self.bias_names]),
            scales=scales[0] if scales else None,
            input_quantizers=tuple([state[f"input{g}"] for g in each]) if "input0" in state else (),
            weight_quantizers=tuple([state[f"weight{g}"] for g in each]) if "weight0" in state else (),
            dense_weights=tuple(dense),
            dtype=weights[0].dtype if compute_dtype is None else compute_dtype,
            save_input=any(requires_grad.params[:count]),
            save_weights=requires_grad.input,
            save_biases=bool(scales) and requires_grad.extra_inputs[1],
            override=backward_override or ("" if state else "dequantized"),
            backend=backend,
        )

    def resolve_bwd_args(self, ctx: BackwardContext, grad_output: Any) -> GroupedBackwardArgs:
        """The backward bundle."""
        saved, own = ctx.saved, ctx.quantizers
        roles = self.backward_quantizers
        count = len(self.weight_names)
        dtypes = [dtype for dtype in ctx.grad_dtypes[:count] if dtype is not None]
        return GroupedBackwardArgs(
            grad_output=grad_output,
            input_=saved.input_,
            splits=saved.splits,
            weights=saved.weights,
            biases=saved.biases,
            scales=saved.scales,
            grad_output_quantizers=tuple([own[role] for role in roles]) if roles[0] in own else (),
            wants_weights=ctx.requires_grad.params[:count],
            wants_biases=ctx.requires_grad.params[count:],
            single_weight=self.single_weight,
            single_bias=self.single_bias,
            dtype=saved.dtype,
            grad_weight_dtype=dtypes[0] if dtypes else saved.dtype,
            backend=ctx.backend,
        )
