"""BasicLinear: ``y = x @ W.T``, in high precision or low. Its bundles and pieces serve the linear fusions too."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

import torch

from functional_te import pytree
from functional_te._errors import type_error, value_error
from functional_te.kernels import kernels
from functional_te.ops.collectives import check_rows
from functional_te.ops.common import (
    TensorOrQuantized,
    amaxes,
    check_last_dim,
    check_param,
    check_size,
    quantized_spec,
    spec_store,
    store,
)
from functional_te.ops.op import (
    FLOAT_DTYPES,
    Amaxes,
    BackwardContext,
    BwdResult,
    FwdResult,
    Op,
    OpRequiresGrad,
)
from functional_te.ops.tensor_parallel import (
    TensorParallel,
    gather_spec,
    gathers,
    reduce_spec,
    reduces,
    tp_gather,
    tp_reduce,
)
from functional_te.quantization.tensor import BoundQuantizer, CachedWeight, QuantizedTensor
from functional_te.tensor_spec import TensorSpec

__all__ = ["BasicLinear", "LinearBackwardArgs", "LinearForwardArgs", "LinearSaved"]


@pytree.bundle
class LinearForwardArgs:
    """Bundle of the forward.

    Attributes:
        input_: ``[..., in_features]``.
        weight: ``[out_features, in_features]``.
        input_quantizer: how to cast the input, if it is not quantized yet.
        weight_quantizer: how to cast the weight, if it is not quantized yet.
        output_quantizer: the next op's input quantizer.
        dtype: the compute dtype.
        save_input: whether the backward needs the input.
        save_weight: whether the backward needs the weight.
        override: what the backward reads instead of the copies for low-precision products: an empty string (those
            copies), ``"high_precision"`` (the operands before the casts) or ``"dequantized"`` (the rowwise copies).
        dense_weight: the weight before its cast, if it came in cast and the backward reads it.
        tensor_parallel: how the layer is sharded, or None.
        backend: name of the kernel backend.
    """

    input_: TensorOrQuantized
    weight: TensorOrQuantized
    input_quantizer: BoundQuantizer | None = None
    weight_quantizer: BoundQuantizer | None = None
    output_quantizer: BoundQuantizer | None = None
    dtype: torch.dtype = pytree.static(default=torch.float32)
    save_input: bool = pytree.static(default=False)
    save_weight: bool = pytree.static(default=False)
    override: str = pytree.static(default="")
    dense_weight: torch.Tensor | None = None
    tensor_parallel: TensorParallel | None = pytree.static(default=None)
    backend: str = pytree.static(default="reference")


@pytree.node
class LinearSaved:
    """Operands kept for the backward (quantized copies in low precision, else the tensors), and the compute dtype."""

    input_: TensorOrQuantized | None
    weight: TensorOrQuantized | None
    dtype: torch.dtype = pytree.static(default=torch.float32)


@pytree.bundle
class LinearBackwardArgs:
    """Bundle of the backward.

    Attributes:
        grad_output: ``[..., out_features]``.
        input_: the saved input, None if the weight needs no gradient.
        weight: the saved weight, None if the input needs no gradient.
        grad_output_quantizer: how to cast the gradient, if it is not quantized yet.
        grad_input_quantizer: the previous op's gradient quantizer.
        dtype: the compute dtype.
        grad_weight_dtype: dtype of the weight gradient, None for the compute dtype.
        tensor_parallel: how the layer is sharded, or None.
        backend: name of the kernel backend.
    """

    grad_output: TensorOrQuantized
    input_: TensorOrQuantized | None
    weight: TensorOrQuantized | None
    grad_output_quantizer: BoundQuantizer | None = None
    grad_input_quantizer: BoundQuantizer | None = None
    dtype: torch.dtype = pytree.static(default=torch.float32)
    grad_weight_dtype: torch.dtype | None = pytree.static(default=None)
    tensor_parallel: TensorParallel | None = pytree.static(default=None)
    backend: str = pytree.static(default="reference")


_NOTHING_FRESH = {dtype: LinearSaved(input_=None, weight=None, dtype=dtype) for dtype in FLOAT_DTYPES}


def operands(args: Any) -> tuple[TensorOrQuantized, TensorOrQuantized, LinearSaved, Amaxes | None]:
    """Gather the input of a forward bundle if the sequence is sharded, then cast input and weight.

    Returns:
        The two operands, those of them that are fresh and to be saved, and the observed amaxes.
    """
    x, w = args.input_, args.weight
    if gathers(args.tensor_parallel, "column"):
        x = tp_gather(x, args.tensor_parallel)
    if args.input_quantizer is None and args.weight_quantizer is None:
        return x, w, _NOTHING_FRESH[args.dtype], None
    k = kernels(args.backend)
    amax_x = amax_w = fresh_x = fresh_w = None
    if args.input_quantizer is not None and not isinstance(x, QuantizedTensor):
        x, amax_x = k.quantize(x, args.input_quantizer, args.dtype)
        fresh_x = x
    if args.weight_quantizer is not None and not isinstance(w, QuantizedTensor):
        w, amax_w = k.quantize(w, args.weight_quantizer, args.dtype)
        fresh_w = w
    aux = LinearSaved(
        input_=_for_backward(fresh_x, args.override) if args.save_input else None,
        weight=_for_backward(fresh_w, args.override) if args.save_weight else None,
        dtype=args.dtype,
    )
    return x, w, aux, amaxes(input=amax_x, weight=amax_w)


def _for_backward(x: Any, override: str) -> Any:
    """What of a fresh cast the backward reads: nothing if it reads high precision, else one of two copies."""
    return None if override == "high_precision" else _one_copy(x, override)


def _one_copy(x: Any, override: str) -> Any:
    """Of two copies the one that the backward reads."""
    if isinstance(x, QuantizedTensor) and x.rowwise_data is not None and x.columnwise_data is not None:
        return x.with_usage(rowwise=override != "", columnwise=override == "")
    return x


def operand_specs(args: Any) -> tuple[LinearSaved, Amaxes | None]:
    """The twin of :func:`operands` over :class:`TensorSpec`: what is saved and observed."""
    saved: dict[str, Any] = {"input_": None, "weight": None}
    observed: dict[str, Any] = {}
    for name, role, save in (("input_", "input", args.save_input), ("weight", "weight", args.save_weight)):
        value = _gathered_input(args) if name == "input_" else args.weight
        bound = getattr(args, f"{role}_quantizer")
        if bound is not None and not isinstance(value, QuantizedTensor):
            quantized, observed[role] = quantized_spec(value.with_(dtype=args.dtype), bound)
            saved[name] = _for_backward(quantized, args.override) if save else None
    return LinearSaved(**saved, dtype=args.dtype), amaxes(**observed)


def _gathered_input(args: Any) -> Any:
    """Spec of the input that the product reads."""
    tp = args.tensor_parallel
    return gather_spec(args.input_, tp) if gathers(tp, "column") else args.input_


def saved_operands(args: Any, aux: LinearSaved) -> LinearSaved:
    """What the backward needs: the fresh copies of ``aux``, else the bundle's own tensors."""
    if not args.save_input and not args.save_weight:
        return _NOTHING_FRESH[args.dtype]
    return LinearSaved(
        input_=(_one_copy(args.input_, args.override) if aux.input_ is None else aux.input_)
        if args.save_input
        else None,
        weight=_saved_weight(args, aux) if args.save_weight else None,
        dtype=args.dtype,
    )


def _saved_weight(args: Any, aux: LinearSaved) -> Any:
    if args.dense_weight is not None:
        return args.dense_weight
    if aux.weight is not None:
        return aux.weight
    return _one_copy(args.weight, args.override) if args.override else args.weight


def _forward(args: LinearForwardArgs) -> FwdResult:
    k = kernels(args.backend)
    x, w, aux, observed = operands(args)
    y = k.gemm_nt(x, w, dtype=args.dtype)
    if reduces(args.tensor_parallel, "row"):
        y = tp_reduce(y, args.tensor_parallel)  # type: ignore[arg-type]
    if args.output_quantizer is not None:
        y, amax = store(k, y, args.dtype, args.output_quantizer)
        observed = amaxes(observed, output=amax)
    return FwdResult(y, aux, (), observed)


def _forward_fake(args: LinearForwardArgs) -> FwdResult:
    aux, observed = operand_specs(args)
    spec = linear_output_spec(args)
    if reduces(args.tensor_parallel, "row"):
        spec = reduce_spec(spec, args.tensor_parallel)  # type: ignore[arg-type]
    y, amax = spec_store(spec, args.dtype, args.output_quantizer)
    return FwdResult(y, aux, (), amaxes(observed, output=amax))


def linear_output_spec(args: Any) -> TensorSpec:
    """Spec of the product of a forward bundle."""
    x, w = _gathered_input(args), args.weight
    return TensorSpec((*x.shape[:-1], w.shape[0]), args.dtype, x.device)


def grads(args: Any, add: torch.Tensor | None = None, alpha: float | None = None) -> BwdResult:
    """Both gradients of a backward bundle, times ``alpha``; ``add`` is summed into the input's before its cast."""
    k = kernels(args.backend)
    dy: Any = args.grad_output
    tp = args.tensor_parallel
    observed: Amaxes | None = None
    if gathers(tp, "row"):
        dy = tp_gather(dy, tp)
    if args.grad_output_quantizer is not None and not isinstance(dy, QuantizedTensor):
        dy, amax = k.quantize(dy, args.grad_output_quantizer, args.dtype)
        observed = amaxes(observed, grad_output=amax)
    dx = dw = None
    if args.weight is not None:
        dx = k.gemm_nn(dy, args.weight, dtype=args.dtype, add=add, alpha=alpha)
        if reduces(tp, "column"):
            dx = tp_reduce(dx, tp)
        if args.grad_input_quantizer is not None:
            dx, amax = store(k, dx, args.dtype, args.grad_input_quantizer)
            observed = amaxes(observed, grad_input=amax)
    if args.input_ is not None:
        x = args.input_
        if gathers(tp, "column") and not isinstance(x, QuantizedTensor):  # a cast was made of the gathered input
            x = tp_gather(x, tp)
        dw = k.gemm_tn(dy, x, dtype=args.grad_weight_dtype or args.dtype, alpha=alpha)
    return BwdResult(dx, (dw,), (), observed)


def grad_specs(args: Any) -> BwdResult:
    """The twin of :func:`grads` over :class:`TensorSpec`."""
    dy: Any = args.grad_output
    dx: Any = None
    dw: Any = None
    observed: Amaxes | None = None
    device = dy.device
    tp = args.tensor_parallel
    if gathers(tp, "row"):
        dy = gather_spec(dy, tp)
    if args.grad_output_quantizer is not None and not isinstance(dy, QuantizedTensor):
        _, amax = quantized_spec(dy, args.grad_output_quantizer)
        observed = amaxes(observed, grad_output=amax)
    if args.weight is not None:
        spec = TensorSpec((*dy.shape[:-1], args.weight.shape[1]), args.dtype, device)
        if reduces(tp, "column"):
            spec = reduce_spec(spec, tp)
        dx, amax = spec_store(spec, args.dtype, args.grad_input_quantizer)
        observed = amaxes(observed, grad_input=amax)
    if args.input_ is not None:
        dw = TensorSpec((dy.shape[-1], args.input_.shape[-1]), args.grad_weight_dtype or args.dtype, device)
    return BwdResult(dx, (dw,), (), observed)


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

    What is gathered is cast when it is whole, so with a scale per tensor all ranks cast it alike: the input of a
    column-parallel layer with ``sequence_parallel``, the output gradient of a row-parallel one (without it these are
    the same on all ranks anyway). Nothing else is agreed between ranks: parts of weights, inputs of row-parallel and
    output gradients of column-parallel layers have a scale per rank. Histories of delayed scaling are not reduced.
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
        weight = torch.rand(rows, columns, generator=generator) * (2 * bound) - bound
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


def linear_backward_fields(op: Op, ctx: BackwardContext, grad_output: TensorOrQuantized) -> dict[str, Any]:
    """The fields of a linear backward bundle, from the linear and its own context."""
    assert isinstance(op, BasicLinear)
    return {
        "grad_output": grad_output,
        "input_": ctx.saved.input_,
        "weight": ctx.saved.weight,
        "grad_output_quantizer": ctx.quantizers.get("grad_output"),
        "grad_input_quantizer": ctx.prev_op_grad_output_quantizer,
        "dtype": ctx.saved.dtype,
        "grad_weight_dtype": ctx.grad_dtypes[0] if ctx.grad_dtypes else None,
        "tensor_parallel": op.tensor_parallel,
        "backend": ctx.backend,
    }


def refuse_parallel(op: Op, mode: str) -> str | None:
    """None, or why a fusion cannot go on with the product of a linear that is sharded in ``mode``."""
    assert isinstance(op, BasicLinear)
    return (
        f"the product of a {mode}-parallel linear is summed over ranks" if reduces(op.tensor_parallel, mode) else None
    )
