"""Bundles and pieces of a grouped linear layer; they serve its fusions too."""

from __future__ import annotations

from typing import Any

import torch

from functional_te import pytree
from functional_te.kernels import kernels
from functional_te.ops.common import TensorOrQuantized, one_copy, quantized_spec
from functional_te.ops.op import Amaxes, BwdResult, FwdResult
from functional_te.quantization.groups import Groups, padded_rows
from functional_te.quantization.quantizer import as_matrix, rows_of
from functional_te.quantization.tensor import BoundQuantizer, QuantizedTensor
from functional_te.tensor_spec import TensorSpec

__all__ = ["GroupedBackwardArgs", "GroupedForwardArgs", "GroupedSaved"]


@pytree.bundle
class GroupedForwardArgs:
    """Bundle of the forward.

    Attributes:
        input_: ``[..., in_features]``; None inside of the bundle of a fusion that makes it.
        splits: rows of each group, integers ``[G]``.
        weights: ``[out_features, in_features]`` of each group, or one ``[G, out_features, in_features]``.
        biases: ``[out_features]`` of each group, one ``[G, out_features]``, or nothing.
        scales: one factor of the bias per row, or None.
        input_quantizers: how to cast the rows of each group, or nothing.
        weight_quantizers: how to cast the weight of each group, if it is not quantized yet, or nothing.
        dense_weights: the weights before their casts, if they came in cast and the backward reads them.
        dtype: the compute dtype.
        save_input: whether the backward needs the input.
        save_weights: whether the backward needs the weights.
        save_biases: whether the backward needs the biases.
        override: as in :class:`LinearForwardArgs`.
        backend: name of the kernel backend.
    """

    input_: torch.Tensor | None
    splits: torch.Tensor
    weights: tuple[TensorOrQuantized, ...]
    biases: tuple[torch.Tensor, ...] = ()
    scales: torch.Tensor | None = None
    input_quantizers: tuple[BoundQuantizer, ...] = ()
    weight_quantizers: tuple[BoundQuantizer, ...] = ()
    dense_weights: tuple[TensorOrQuantized, ...] = ()
    dtype: torch.dtype = pytree.static(default=torch.float32)
    save_input: bool = pytree.static(default=False)
    save_weights: bool = pytree.static(default=False)
    save_biases: bool = pytree.static(default=False)
    override: str = pytree.static(default="")
    backend: str = pytree.static(default="reference")


@pytree.node
class GroupedSaved:
    """Kept for the backward: operands (padded casts in low precision), sizes, biases and their factors.

    ``recast`` and ``override`` are for a fusion that makes the input again: how it is cast, and which copy is read.
    """

    input_: TensorOrQuantized | None
    splits: torch.Tensor
    weights: tuple[TensorOrQuantized, ...]
    biases: tuple[torch.Tensor, ...]
    scales: torch.Tensor | None
    recast: tuple[BoundQuantizer, ...] = ()
    dtype: torch.dtype = pytree.static(default=torch.float32)
    override: str = pytree.static(default="")


@pytree.bundle
class GroupedBackwardArgs:
    """Bundle of the backward.

    Attributes:
        grad_output: ``[..., out_features]``; None inside of the bundle of a fusion that makes it.
        input_: the saved input, None if no weight needs a gradient.
        splits: rows of each group.
        weights: the saved weights; nothing if the input needs no gradient.
        biases: the saved biases; nothing if the scales need no gradient.
        scales: one factor of the bias per row, or None.
        grad_output_quantizers: how to cast the gradient rows of each group, or nothing.
        wants_weights: which weights need a gradient.
        wants_biases: which biases need a gradient.
        single_weight: whether one parameter holds all weights.
        single_bias: whether one parameter holds all biases.
        dtype: the compute dtype.
        grad_weight_dtype: the dtype of weight gradients.
        backend: name of the kernel backend.
    """

    grad_output: torch.Tensor | None
    input_: TensorOrQuantized | None
    splits: torch.Tensor
    weights: tuple[TensorOrQuantized, ...] = ()
    biases: tuple[torch.Tensor, ...] = ()
    scales: torch.Tensor | None = None
    grad_output_quantizers: tuple[BoundQuantizer, ...] = ()
    wants_weights: tuple[bool, ...] = pytree.static(default=())
    wants_biases: tuple[bool, ...] = pytree.static(default=())
    single_weight: bool = pytree.static(default=False)
    single_bias: bool = pytree.static(default=False)
    dtype: torch.dtype = pytree.static(default=torch.float32)
    grad_weight_dtype: torch.dtype = pytree.static(default=torch.float32)
    backend: str = pytree.static(default="reference")


# ---- casts ----


def _cast_rows(
    k: Any, x: torch.Tensor, quantizers: tuple[BoundQuantizer, ...], groups: Groups, dtype: torch.dtype
) -> tuple[QuantizedTensor, list[torch.Tensor]]:
    """Cast the rows of every group with its own quantizer; the casts, padded, and the observed amaxes."""
    quantizer = quantizers[0].quantizer
    bound = BoundQuantizer(
        quantizer=quantizer,
        scale=None if quantizers[0].scale is None else torch.cat([own.scale for own in quantizers]),  # type: ignore[misc]
        key=None if quantizers[0].key is None else torch.stack([own.key for own in quantizers], 1),  # type: ignore[misc]
    )
    layout = groups.layout(quantizer.row_multiple)
    cast, amax = k.quantize(layout.pad(x), bound, dtype, layout)
    return cast, [] if amax is None else [amax[g : g + 1].clone() for g in range(groups.count)]


def rows_spec(
    spec: Any, quantizers: tuple[BoundQuantizer, ...], dtype: torch.dtype
) -> tuple[QuantizedTensor, list[TensorSpec]]:
    """The twin of :func:`_cast_rows`. The number of groups is that of quantizers: structure comes from no size."""
    bound, groups = quantizers[0], len(quantizers)
    shape = (padded_rows(rows_of(tuple(spec.shape)), groups, bound.quantizer.row_multiple), spec.shape[-1])
    cast, amax = quantized_spec(TensorSpec(shape, dtype, spec.device), bound)
    each = {}
    for name in ("rowwise_scale_inv", "columnwise_scale_inv", "rowwise_amax", "columnwise_amax"):
        own = getattr(cast, name)
        if own is not None and tuple(own.shape) == (1,) and not _per_row(bound, name):
            each[name] = own.with_(shape=(groups,))
    return pytree.replace(cast, **each), [] if amax is None else [amax] * groups


def _per_row(bound: BoundQuantizer, name: str) -> bool:
    """Whether there is one of each row even if that is one row."""
    return name == "rowwise_amax" and getattr(bound.quantizer.of(False), "row_scaled", False)


def _observed(role: str, amaxes: Any, known: Amaxes | None) -> Amaxes | None:
    if not amaxes:
        return known
    roles, values = ((), ()) if known is None else (known.roles, known.values)
    return Amaxes(roles=(*roles, *(f"{role}{g}" for g in range(len(amaxes)))), values=(*values, *amaxes))


def grouped_operands(args: Any, x: torch.Tensor, groups: Groups) -> tuple[Any, Any, Any, Amaxes | None]:
    """Cast rows and weights of a forward bundle.

    Returns:
        The two operands; what of them is fresh and to be saved, as a pair; and the observed amaxes.
    """
    k = kernels(args.backend)
    rows: Any = x
    weights, observed, fresh = args.weights, None, None
    reads = args.override != "high_precision"
    if args.input_quantizers:
        rows, seen = _cast_rows(k, x, args.input_quantizers, groups, args.dtype)
        observed = _observed("input", seen, observed)
        fresh = one_copy(rows, args.override) if args.save_input and reads else None
    fresh_weights: tuple[Any, ...] = ()
    if args.weight_quantizers:
        each = weights[0].unbind() if len(weights) == 1 and weights[0].dim() == 3 else weights
        casts: list[Any] = []
        amaxes: list[Any] = []
        for weight, bound in zip(each, args.weight_quantizers, strict=True):
            cast, amax = (
                (weight, None) if isinstance(weight, QuantizedTensor) else k.quantize(weight, bound, args.dtype)
            )
            casts.append(cast)
            amaxes.append(amax)
        if all(amax is not None for amax in amaxes):
            observed = _observed("weight", amaxes, observed)
        weights = tuple(casts)
        if args.save_weights and reads:
            fresh_weights = tuple(
                None if isinstance(old, QuantizedTensor) else one_copy(cast, args.override)
                for old, cast in zip(each, casts, strict=True)
            )
    return rows, weights, (fresh, fresh_weights), observed


def grouped_operand_specs(args: Any) -> tuple[Any, Amaxes | None]:
    """The twin of :func:`grouped_operands`: what is fresh and saved, and what is observed."""
    observed, fresh = None, None
    reads = args.override != "high_precision"
    if args.input_quantizers:
        cast, seen = rows_spec(args.input_, args.input_quantizers, args.dtype)
        observed = _observed("input", seen, observed)
        fresh = one_copy(cast, args.override) if args.save_input and reads else None
    fresh_weights: tuple[Any, ...] = ()
    if args.weight_quantizers:
        first: Any = args.weights[0]
        single = len(args.weights) == 1 and len(first.shape) == 3
        each = [first.with_(shape=first.shape[1:])] * len(args.weight_quantizers) if single else args.weights
        casts: list[Any] = []
        amaxes: list[Any] = []
        for weight, bound in zip(each, args.weight_quantizers, strict=True):
            cast, amax = weight, None
            if not isinstance(weight, QuantizedTensor):
                cast, amax = quantized_spec(weight.with_(dtype=args.dtype), bound)
            casts.append(cast)
            amaxes.append(amax)
        if all(amax is not None for amax in amaxes):
            observed = _observed("weight", amaxes, observed)
        if args.save_weights and reads:
            fresh_weights = tuple(
                None if isinstance(old, QuantizedTensor) else one_copy(cast, args.override)
                for old, cast in zip(each, casts, strict=True)
            )
    return (fresh, fresh_weights), observed


def saved_operands(args: Any, aux: Any) -> GroupedSaved:
    """What the backward needs: the fresh casts of ``aux``, else the bundle's own tensors."""
    fresh, fresh_weights = aux
    weights: Any = ()
    if args.save_weights:
        own = [one_copy(weight, args.override) if args.override else weight for weight in args.weights]
        weights = args.dense_weights or own
        if fresh_weights and not args.dense_weights:
            weights = [own[g] if new is None else new for g, new in enumerate(fresh_weights)]
    return GroupedSaved(
        input_=(args.input_ if fresh is None else fresh) if args.save_input else None,
        splits=args.splits,
        weights=tuple(weights),
        biases=args.biases if args.save_biases else (),
        scales=args.scales,
        dtype=args.dtype,
        override=args.override,
    )


def cast_again(k: Any, x: torch.Tensor, quantizers: tuple[BoundQuantizer, ...], args: Any, override: str) -> Any:
    """The cast that a forward made of ``x`` and did not save; ``args`` is the layer's backward bundle."""
    rows = as_matrix(x)
    cast, _ = _cast_rows(k, rows, quantizers, Groups(args.splits, rows.shape[0], rows.device), args.dtype)
    return one_copy(cast, override)


def recast_spec(spec: TensorSpec, quantizers: tuple[BoundQuantizer, ...], args: Any, override: str) -> Any:
    """The twin of :func:`cast_again`."""
    return one_copy(rows_spec(spec, quantizers, args.dtype)[0], override)


# ---- forward ----


def _stacked(values: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """One row per group."""
    return values[0] if len(values) == 1 and values[0].dim() == 2 else torch.stack(values)


def add_biases(y: torch.Tensor, args: Any, groups: Groups) -> torch.Tensor:
    """``y + s b_g`` for the rows ``[T, N]`` of a product, with one rounding."""
    if not args.biases:
        return y
    layout = groups.layout()
    bias = layout.per_tile(_stacked(args.biases), 1)
    if args.scales is not None:
        bias = bias.to(torch.float32) * args.scales.to(torch.float32).reshape(-1, 1)
    return torch.where(layout.used[:, None], y + bias, 0.0).to(args.dtype)


def grouped_output(args: Any) -> tuple[torch.Tensor, Any, Amaxes | None]:
    """Output of a forward bundle, what is fresh and saved, and the observed amaxes."""
    x = as_matrix(args.input_)
    groups = Groups(args.splits, x.shape[0], x.device)
    rows, weights, aux, observed = grouped_operands(args, x, groups)
    y = kernels(args.backend).grouped_nt(rows, weights, groups, dtype=args.dtype)
    y = add_biases(y, args, groups)
    return y.reshape(*args.input_.shape[:-1], y.shape[1]), aux, observed


def grouped_forward(args: GroupedForwardArgs) -> FwdResult:
    """The implementation of the forward."""
    y, aux, observed = grouped_output(args)
    return FwdResult(y, aux, (), observed)


def grouped_output_spec(args: Any) -> TensorSpec:
    """Spec of the output of a forward bundle."""
    weight = args.weights[0]
    return TensorSpec((*args.input_.shape[:-1], weight.shape[-2]), args.dtype, args.input_.device)


def grouped_forward_fake(args: GroupedForwardArgs) -> FwdResult:
    """The twin of :func:`grouped_forward`."""
    aux, observed = grouped_operand_specs(args)
    return FwdResult(grouped_output_spec(args), aux, (), observed)


# ---- backward ----


def grouped_grads(args: Any) -> BwdResult:
    """All gradients of a backward bundle."""
    k = kernels(args.backend)
    dy = as_matrix(args.grad_output)
    groups = Groups(args.splits, dy.shape[0], dy.device)
    rows: Any = dy
    observed: Amaxes | None = None
    if args.grad_output_quantizers and (args.weights or args.input_ is not None):
        rows, amaxes = _cast_rows(k, dy, args.grad_output_quantizers, groups, args.dtype)
        observed = _observed("grad_output", amaxes, observed)
    dx = dw = db = None
    if args.weights:
        dx = k.grouped_nn(rows, args.weights, groups, dtype=args.dtype)
        dx = dx.reshape(*args.grad_output.shape[:-1], dx.shape[1])
    if args.input_ is not None:
        x = args.input_ if isinstance(args.input_, QuantizedTensor) else as_matrix(args.input_)
        dw = k.grouped_tn(rows, x, groups, dtype=args.grad_weight_dtype)
    if any(args.wants_biases):
        weighted = dy.to(torch.float32)
        if args.scales is not None:
            weighted = weighted * args.scales.to(torch.float32).reshape(-1, 1)
        db = k.grouped_sum(weighted, groups).to(args.dtype)
    grads = (*_each(dw, args.wants_weights, args.single_weight), *_each(db, args.wants_biases, args.single_bias))
    return BwdResult(dx, grads, (None, *_scale_grad(args, dy, groups)), observed)


def _each(grads: torch.Tensor | None, wants: tuple[bool, ...], single: bool) -> tuple[torch.Tensor | None, ...]:
    """Fresh gradients of the parameters that need one, from those of all groups."""
    if grads is None:
        return (None,) * len(wants)
    if single:
        return (grads,)
    return tuple(grads[g].clone() if want else None for g, want in enumerate(wants))


def _scale_grad(args: Any, dy: torch.Tensor, groups: Groups) -> tuple[torch.Tensor | None, ...]:
    """``ds = dy . b_g``; nothing for a layer without scales."""
    if args.scales is None:
        return ()
    if not args.biases:
        return (None,)
    layout = groups.layout()
    bias = layout.per_tile(_stacked(args.biases).to(torch.float32), 1)
    ds = torch.where(layout.used, (dy.to(torch.float32) * bias).sum(-1), 0.0)
    return (ds.to(args.scales.dtype).reshape(args.scales.shape),)


def grouped_grad_specs(args: Any) -> BwdResult:
    """The twin of :func:`grouped_grads`."""
    dy: Any = args.grad_output
    count, features = args.splits.shape[0], dy.shape[-1]
    observed: Amaxes | None = None
    if args.grad_output_quantizers and (args.weights or args.input_ is not None):
        _, seen = rows_spec(dy, args.grad_output_quantizers, args.dtype)
        observed = _observed("grad_output", seen, observed)
    dx: Any = None
    dw: Any = None
    if args.weights:
        dx = TensorSpec((*dy.shape[:-1], args.weights[0].shape[-1]), args.dtype, dy.device)
    lead = (count,) if args.single_weight else ()
    if args.input_ is not None:
        dw = TensorSpec((*lead, features, args.input_.shape[-1]), args.grad_weight_dtype, dy.device)
    lead = (count,) if args.single_bias else ()
    db = TensorSpec((*lead, features), args.dtype, dy.device)
    grads = (
        *(dw if want else None for want in args.wants_weights),
        *(db if want else None for want in args.wants_biases),
    )
    scales: Any = args.scales
    extra: tuple[Any, ...] = ()
    if scales is not None:
        extra = (TensorSpec(tuple(scales.shape), scales.dtype, scales.device) if args.biases else None,)
    return BwdResult(dx, grads, (None, *extra), observed)
