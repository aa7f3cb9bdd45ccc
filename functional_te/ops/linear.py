"""BasicLinear: ``y = x @ W.T``, in high precision or low, whole or in parallel parts."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

import torch

from functional_te._errors import type_error, value_error
from functional_te.kernels import kernels
from functional_te.ops.collectives import check_rows
from functional_te.ops.common import (
    TensorOrQuantized,
    amaxes,
    check_last_dim,
    check_param,
    check_size,
    spec_store,
)
from functional_te.ops.op import (
    BackwardContext,
    FwdResult,
    Op,
    OpRequiresGrad,
)
from functional_te.ops.products import (
    LinearBackwardArgs,
    LinearForwardArgs,
    grad_specs,
    grads,
    grads_work,
    linear_backward_fields,
    linear_output_spec,
    operand_specs,
    operands,
    product_work,
    saved_operands,
)
from functional_te.ops.tensor_parallel import (
    TensorParallel,
    gathers,
    reduce_spec,
    reduces,
    tp_reduce,
)
from functional_te.quantization.tensor import BoundQuantizer, CachedWeight
from functional_te.tensor_spec import TensorSpec

__all__ = ["BasicLinear"]


def _forward(args: LinearForwardArgs) -> FwdResult:
    k = kernels(args.backend)
    x, w, aux, observed = operands(args)
    y = k.gemm_nt(x, w, dtype=args.dtype)
    if reduces(args.tensor_parallel, "row"):
        y = tp_reduce(y, args.tensor_parallel)  # type: ignore[arg-type]
    if args.output_quantizer is not None:
        y, amax = k.store(y, args.dtype, args.output_quantizer)
        observed = amaxes(observed, output=amax)
    return FwdResult(y, aux, (), observed)


def _forward_fake(args: LinearForwardArgs) -> FwdResult:
    aux, observed = operand_specs(args)
    spec = linear_output_spec(args)
    if reduces(args.tensor_parallel, "row"):
        spec = reduce_spec(spec, args.tensor_parallel)  # type: ignore[arg-type]
    y, amax = spec_store(spec, args.dtype, args.output_quantizer)
    return FwdResult(y, aux, (), amaxes(observed, output=amax))


def check_linear(op: BasicLinear, input_: TensorSpec, params: Any, where: str) -> None:
    """The argument check of a linear layer."""
    check_last_dim(input_, op.local_in_features, where)
    check_param(params, "weight", (op.local_out_features, op.local_in_features), where)
    tp = op.tensor_parallel
    if tp is not None and tp.sequence_parallel:
        if len(input_.shape) < 2:
            wanted = "a dimension before the features, to shard"
            raise value_error(where, "input", wanted, f"shape {tuple(input_.shape)}")
        check_rows(input_, where, tp.size if tp.mode == "row" else 1)


@dataclasses.dataclass(frozen=True, eq=False)
class BasicLinear(Op):
    """``y = x @ W.T`` without bias.

    Compute dtype: autocast's, else the weight's. With a recipe the input, the weight and the output gradient are
    cast and all three products run in low precision.

    Args:
        in_features: size of the last input dimension (on all ranks together).
        out_features: size of the last output dimension (likewise).
        tensor_parallel: how the layer is sharded over the ranks of a process group; None is not at all.

    Parameters: ``weight [local_out_features, local_in_features]``, Kaiming-uniform with ``a = sqrt(5)``, which is
    ``U(-1/sqrt(local_in_features), 1/sqrt(local_in_features))``. Every rank draws its own part.

    What is gathered is cast as the whole tensor is, on all ranks alike: the input of a column-parallel layer with
    ``sequence_parallel``, the output gradient of a row-parallel one (without it these are the same on all ranks
    anyway). With one scale per tensor it is cast before it is sent. Nothing else is agreed between ranks here: parts of
    weights, inputs of row-parallel and output gradients of column-parallel layers have a scale per rank, unless
    :func:`functional_te.agree_amaxes` makes those of delayed scaling equal.
    """

    in_features: int
    out_features: int
    tensor_parallel: TensorParallel | None = None

    param_names: ClassVar[tuple[str, ...]] = ("weight",)
    forward_quantizers: ClassVar[tuple[str, ...]] = ("input", "weight")
    backward_quantizers: ClassVar[tuple[str, ...]] = ("grad_output",)
    quantizes_output: ClassVar[bool] = True
    quantizes_grad_input: ClassVar[bool] = True
    fwd_args_type: ClassVar[type[Any]] = LinearForwardArgs
    bwd_args_type: ClassVar[type[Any]] = LinearBackwardArgs

    forward_impl = staticmethod(_forward)
    forward_fake = staticmethod(_forward_fake)
    backward_impl = staticmethod(grads)
    backward_fake = staticmethod(grad_specs)
    setup_context = staticmethod(saved_operands)
    forward_work = staticmethod(product_work)
    backward_work = staticmethod(grads_work)

    def __post_init__(self) -> None:
        check_size(self.in_features, "BasicLinear", "in_features")
        check_size(self.out_features, "BasicLinear", "out_features")
        tp = self.tensor_parallel
        if tp is None:
            return
        if not isinstance(tp, TensorParallel):
            raise type_error("BasicLinear", "tensor_parallel", "None or a TensorParallel", repr(tp))
        name = "out_features" if tp.mode == "column" else "in_features"
        if getattr(self, name) % tp.size:
            raise value_error("BasicLinear", name, f"a multiple of the {tp.size} ranks", getattr(self, name))

    @property
    def local_in_features(self) -> int:
        """Size of the last input dimension on one rank."""
        tp = self.tensor_parallel
        return self.in_features // tp.size if tp is not None and tp.mode == "row" else self.in_features

    @property
    def local_out_features(self) -> int:
        """Size of the last output dimension on one rank."""
        tp = self.tensor_parallel
        return self.out_features // tp.size if tp is not None and tp.mode == "column" else self.out_features

    @property
    def accepts_quantized_input(self) -> bool:  # type: ignore[override]
        """Not if the input has to be gathered before it is cast."""
        return not gathers(self.tensor_parallel, "column")

    @property
    def accepts_quantized_grad(self) -> bool:  # type: ignore[override]
        """Not if the output gradient has to be gathered before it is cast."""
        return not gathers(self.tensor_parallel, "row")

    def copies(self, role: str, requires_grad: OpRequiresGrad) -> tuple[bool, bool]:
        """Forward products reduce over features; so does the input gradient's over the rows of a transposed weight."""
        if role == "grad_output":
            return requires_grad.input, requires_grad.params[0]
        return True, requires_grad.params[0] if role == "input" else requires_grad.input

    def quantized_sizes(self, role: str) -> dict[str, int]:
        """Blocks run along both sizes of the weight."""
        sizes = {"in_features": self.local_in_features, "out_features": self.local_out_features}
        if role == "input":
            del sizes["out_features"]
        elif role == "grad_output":
            del sizes["in_features"]
        return sizes

    def param_specs(self, dtype: torch.dtype, device: torch.device | str) -> dict[str, TensorSpec]:
        """``weight [local_out_features, local_in_features]``."""
        return {"weight": TensorSpec((self.local_out_features, self.local_in_features), dtype, device)}

    def init_params(
        self, generator: torch.Generator, dtype: torch.dtype, device: torch.device | str
    ) -> dict[str, torch.Tensor]:
        """Kaiming-uniform weight."""
        rows, columns = self.local_out_features, self.local_in_features
        bound = 1.0 / math.sqrt(columns)
        weight = torch.rand(rows, columns, generator=generator, device=generator.device) * (2 * bound) - bound
        return {"weight": weight.to(device=device, dtype=dtype)}

    def check(self, input_: TensorSpec, params: Any, extra_inputs: tuple[Any, ...], where: str) -> None:
        """Last dimension and weight shape."""
        del extra_inputs
        check_linear(self, input_, params, where)

    def resolve_fwd_args(
        self,
        input_: TensorOrQuantized,
        *,
        params: Any,
        state: dict[str, BoundQuantizer],
        requires_grad: OpRequiresGrad,
        next_op_input_quantizer: BoundQuantizer | None = None,
        compute_dtype: torch.dtype | None = None,
        backward_override: str | None = None,
        backend: str = "reference",
    ) -> LinearForwardArgs:
        """The forward bundle."""
        weight, dense_weight = params["weight"], None
        if isinstance(weight, CachedWeight):
            if backward_override == "high_precision" and requires_grad.input and not weight.stored:
                dense_weight = weight.value
            weight = weight.read("weight" in state)
        return LinearForwardArgs(
            input_=input_,
            weight=weight,
            input_quantizer=state.get("input"),
            weight_quantizer=state.get("weight"),
            output_quantizer=next_op_input_quantizer,
            dtype=weight.dtype if compute_dtype is None else compute_dtype,
            save_input=requires_grad.params[0],
            save_weight=requires_grad.input,
            # without quantizers, operands that come in cast are values: those of their rowwise copies
            override=backward_override or ("" if state else "dequantized"),
            dense_weight=dense_weight,
            tensor_parallel=self.tensor_parallel,
            backend=backend,
        )

    def resolve_bwd_args(self, ctx: BackwardContext, grad_output: TensorOrQuantized) -> LinearBackwardArgs:
        """The backward bundle."""
        return LinearBackwardArgs(**linear_backward_fields(self, ctx, grad_output))
