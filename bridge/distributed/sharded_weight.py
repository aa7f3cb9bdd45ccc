"""Weights that FSDP2 gathers in FP8: each rank keeps its rows in high precision and sends their cast.

A parameter becomes a :class:`ShardedWeight` before ``fully_shard``. FSDP2 then asks it what to send and what to make of
what came (``fsdp_pre_all_gather``, ``fsdp_post_all_gather``): the gathered parameter is a
:class:`~bridge.QuantizedWeight`, whose data chains read without another cast. Scales are those of whole weights. They
are computed for all weights at once, after an optimizer step: one all-reduce takes the largest amax over the ranks.

Bits are those of the cast of the whole weight in the parameter dtype of the mixed precision, so with
``Float8CurrentScaling`` a model trains as it does when weights are gathered in high precision.
"""

from __future__ import annotations

import inspect
import itertools
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from bridge import compat
from bridge.convert.borrowed import Borrowed, PackedWeight
from bridge.distributed.groups import check_model, operations_of, signature_of
from bridge.distributed.start import check_same_on_all_ranks
from bridge.quantized_weight import QuantizedWeight
from bridge.weight_cache import weight_quantizers
from functional_te._errors import runtime_error, type_error, value_error
from functional_te.kernels import collectives, kernels, resolve_backend
from functional_te.ops.linear import BasicLinear
from functional_te.quantization import QuantizedTensor
from functional_te.quantization.quantizers import (
    Float8CurrentScalingQuantizer,
    Float8DelayedScalingQuantizer,
    Quantizer,
)
from functional_te.quantization.scaling import current_scale, reciprocal
from functional_te.quantization.tensor import BoundQuantizer
from functional_te.recipes import Recipe, as_recipe

__all__ = ["ShardedWeight", "gather_in_fp8", "precompute_scales", "sharded_weights"]

_WHERE = "gather_in_fp8"
# cuBLASLt reads scales at multiples of 16 bytes
_ALIGNED = 4
_NUMBERS = itertools.count()


class _Weights:
    """The sharded weights of a model, which get their scales together.

    Whether scales are computed anew has to be the same decision on all ranks. So it is one for all weights, and FSDP2's
    own copies, which only some ranks make, do not count as writes.

    Attributes:
        model: the model; not kept alive.
        dtype: the dtype that weights are rounded to before they are cast, or None.
        quantizer: what a gathered weight says it was cast with.
        scales: by key of a weight its scale and the reciprocal, float32 ``[1]``.
        casts: by key of a weight its cast; FSDP2 gathers a weight twice in a step, and asks for one after the other,
            which kept the host busy for as long as the GPU.
        packs: for every weight what it is cast as one with.
        places: the number of that, for every weight.
        fresh: whether no weight was written to since they were computed.
        number: of the model.
    """

    def __init__(self, model: torch.nn.Module, dtype: torch.dtype | None, quantizer: Quantizer) -> None:
        self.model = weakref.ref(model)
        self.dtype, self.quantizer = dtype, quantizer
        self.scales: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self.casts: dict[str, _Cast] = {}
        self.packs: tuple[str, ...] = ()
        self.places = torch.empty(0, dtype=torch.int64)
        self.fresh = False
        self.number = next(_NUMBERS)

    def __eq__(self, other: object) -> bool:
        """A compiler guards a tensor by a copy of what it belongs to."""
        return isinstance(other, _Weights) and self.number == other.number

    def __hash__(self) -> int:
        return hash(self.number)

    def precompute(self) -> None:
        """Compute the scale of every weight. A collective."""
        model = self.model()
        found = [] if model is None else list(_sharded(model))
        if not found:
            return
        amaxes = torch.stack([_amax(own.value) for _, own in found])
        for group in _groups(found[0][0]):
            amaxes = collectives.greatest(amaxes, group.group_name, group.size())
        if self.dtype is not None:  # rounding keeps the order of numbers
            amaxes = amaxes.to(self.dtype).to(torch.float32)
        packs = tuple([own.pack for _, own in found])
        if packs != self.packs:  # the same in every step, so that the host need not send places again
            numbers = {pack: number for number, pack in enumerate(dict.fromkeys(packs))}
            self.packs = packs
            self.places = torch.tensor([numbers[pack] for pack in packs], device=amaxes.device)
        largest = torch.zeros_like(amaxes).scatter_reduce(0, self.places, amaxes, "amax")[self.places]
        quantizer: Any = self.quantizer
        scales = current_scale(
            largest, quantizer.limit, epsilon=quantizer.amax_epsilon, power_of_2=quantizer.power_2_scale
        )
        table = torch.stack((scales, reciprocal(scales)))[..., None].expand(-1, -1, _ALIGNED).contiguous()
        for index, (_, own) in enumerate(found):
            self.scales[own.key] = (table[0, index, :1], table[1, index, :1])
            own.known = True
        self.casts = {own.key: _Cast(own.value, _version(own.value), self.cast(own)) for _, own in found}
        self.fresh = True

    def cast(self, weight: ShardedWeight) -> torch.Tensor:
        """The bytes of a weight, cast with its scale."""
        value = weight.value if self.dtype is None else weight.value.to(self.dtype)
        given = Float8DelayedScalingQuantizer(dtype=self.quantizer.dtype)
        k = kernels(resolve_backend("auto", value.device.type))
        cast, _ = k.quantize(value, BoundQuantizer(quantizer=given, scale=self.scales[weight.key][0]))
        data: torch.Tensor = cast.data.view(torch.uint8)
        return data

    def cast_of(self, weight: ShardedWeight) -> torch.Tensor:
        """:meth:`cast`, as it was made with the scales if that was of the same tensor."""
        known = self.casts.get(weight.key)
        return self.cast(weight) if known is None or known.value is not weight.value else known.data

    def scale_of(self, weight: ShardedWeight) -> tuple[torch.Tensor, torch.Tensor]:
        """The scale of a weight and its reciprocal. A collective after a write to any weight."""
        known = self.casts.get(weight.key)
        # compiled code writes to values without dispatching
        written = known is not None and known.value is weight.value and known.version != _version(known.value)
        if written or not self.fresh:
            with torch.inference_mode(False):  # training may read them after an evaluation did so first
                self.precompute()
        if weight.key not in self.scales:
            raise runtime_error(_WHERE, "model", "a parameter of the model that was given", weight.key)
        weight.known = True
        return self.scales[weight.key]


class _Cast(NamedTuple):
    """A cast of a weight: of which tensor, in which version (None where it counts none), and the bytes."""

    value: torch.Tensor
    version: int | None
    data: torch.Tensor


def _version(value: torch.Tensor) -> int | None:
    return None if value.is_inference() else value._version


def _amax(value: torch.Tensor) -> torch.Tensor:
    """Largest magnitude as float32 ``[]``, in one pass; 0 without elements."""
    if value.numel() == 0:
        return torch.zeros((), device=value.device)
    return torch.linalg.vector_norm(value, float("inf")).to(torch.float32)


def _groups(parameter: torch.Tensor) -> list[Any]:
    """The process groups over which a parameter is sharded."""
    if not isinstance(parameter, DTensor):
        return []
    mesh = parameter.device_mesh
    return [mesh.get_group(axis) for axis in range(mesh.ndim)]


def _sharded(model: torch.nn.Module) -> Iterator[tuple[torch.Tensor, ShardedWeight]]:
    """Every parameter of a model that is a sharded weight, and the weight."""
    for own in model.parameters():
        local = compat.local_tensor(own)
        if isinstance(local, ShardedWeight):
            yield own, local


def sharded_weights(model: torch.nn.Module) -> list[ShardedWeight]:
    """This rank's parts of the weights of a model that are gathered in FP8."""
    return [own for _, own in _sharded(model)]


class ShardedWeight(torch.Tensor):
    """A part of a weight in high precision that is cast when it is gathered.

    Every operation runs on the values. Copies, views and slices are sharded weights again, other results are plain
    tensors.

    Attributes:
        value: the values.
        key: names the weight among those of the model.
        weights: those of the model.
        known: whether scales were computed of it, so that a write makes them obsolete.
    """

    value: torch.Tensor
    key: str
    weights: Any
    known: bool

    __torch_function__ = compat.no_torch_function  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, value: torch.Tensor, key: str, weights: Any) -> ShardedWeight:
        """Wrap ``value``."""
        made: Any = compat.wrapper(cls, value.shape, value.stride(), value.dtype, value.device)
        made.value, made.key, made.weights, made.known = value, key, weights, False
        return made

    @property
    def pack(self) -> str:
        """What weights that are cast as one have in common."""
        return self.key.rpartition("/")[0]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Shape, dtype and device; no values."""
        return f"ShardedWeight({tuple(self.shape)}, dtype={self.dtype}, device='{self.device}')"

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Files hold the values."""
        return self.value.__reduce_ex__(protocol)

    # the protocol of traceable wrapper subclasses

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        """The name of the inner tensor, and what else makes the weight."""
        return ["value"], (self.key, self.weights)

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], meta: Any, size: Any, stride: Any) -> ShardedWeight:
        """The weight again."""
        del size, stride
        return cls(inner["value"], *meta)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Run ``func`` on the values."""
        first: list[ShardedWeight] = []
        by_value: dict[int, ShardedWeight] = {}

        def plain(given: Any) -> Any:
            if isinstance(given, ShardedWeight):
                first.append(given)
                by_value[id(given.value)] = given
                return given.value
            if isinstance(given, (list, tuple)):
                return type(given)([plain(item) for item in given])
            return given

        plain_args, plain_kwargs = plain(args), {name: plain(value) for name, value in (kwargs or {}).items()}
        result = func(*plain_args, **plain_kwargs)
        for place, name in compat.written_arguments(func):
            written = plain_args[place] if place < len(plain_args) else plain_kwargs.get(name)
            for item in written if isinstance(written, (list, tuple)) else (written,):
                if id(item) in by_value and by_value[id(item)].known:
                    by_value[id(item)].weights.fresh = False

        def wrapped(made: Any) -> Any:
            if isinstance(made, (list, tuple)):
                return type(made)([wrapped(item) for item in made])
            if id(made) in by_value:
                return by_value[id(made)]
            if isinstance(made, torch.Tensor) and (func in _STAYS or func.is_view):
                own = ShardedWeight(made, first[0].key, first[0].weights)
                own.known = func.is_view and first[0].known  # a write to a view is one to the weight
                return own
            return made

        return wrapped(result)

    # what FSDP2 calls

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[torch.Tensor, ...], Any]:
        """The bytes that this rank sends, and what :meth:`fsdp_post_all_gather` has to know."""
        del outer_stride, module
        if mp_policy.param_dtype is not self.weights.dtype:
            wanted = f"the parameter dtype {mp_policy.param_dtype} of the mixed precision policy"
            raise value_error(_WHERE, "dtype", wanted, self.weights.dtype)
        _, scale_inv = self.weights.scale_of(self)
        data = self.weights.cast_of(self)
        rows = -(-outer_size[0] // mesh.size())
        if data.shape[0] < rows:  # the last ranks of an uneven sharding
            data = torch.cat((data, data.new_zeros(rows - data.shape[0], *data.shape[1:])))
        return (data,), (scale_inv, outer_size[0])

    # FSDP2 asks for it on every call
    fsdp_pre_all_gather.__signature__ = inspect.signature(fsdp_pre_all_gather)  # type: ignore[attr-defined]

    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None) -> Any:
        """The weight over the bytes that came, and what FSDP2 is to free with them; or the same in place of ``out``."""
        scale_inv, rows = metadata
        quantizer = self.weights.quantizer
        data = outputs[0].view(quantizer.dtype)[:rows]
        k = kernels(resolve_backend("auto", data.device.type))
        if out is not None:
            out.rowwise_scale_inv = scale_inv
            if k.transposed_copies:
                with compat.preserved_versions((out.columnwise_data,)):
                    k.transpose(data, out.columnwise_data)
                out.columnwise_scale_inv = scale_inv
            return None
        columnwise = {}
        if k.transposed_copies:
            columnwise = {"columnwise_data": k.transpose(data), "columnwise_scale_inv": scale_inv}
        whole = QuantizedTensor(
            rowwise_data=data,
            rowwise_scale_inv=scale_inv,
            **columnwise,
            dtype=param_dtype,
            quantizer=quantizer.with_usage(True, k.transposed_copies),
        )
        return QuantizedWeight.from_quantized(whole), tuple(columnwise.values())[:1]


_aten = torch.ops.aten
# Copies that are sharded weights again, as views are.
_STAYS = {
    _aten.clone.default,
    _aten.empty_like.default,
    _aten.new_zeros.default,
    _aten._pin_memory.default,
    _aten._to_copy.default,
}


def _owners(op: Any) -> tuple[Any, ...]:
    """The modules whose parameters ``weight`` an operation casts as one; none if it reads them otherwise."""
    if not isinstance(op.op, BasicLinear) or getattr(op, "covered", False):
        return ()
    if type(op) is Borrowed or isinstance(op, PackedWeight):
        return tuple(op.sources)
    return () if isinstance(op, Borrowed) else (op,)


def gather_in_fp8(
    model: torch.nn.Module, recipe: Any, dtype: torch.dtype | None = None, group: Any = None
) -> torch.nn.Module:
    """Make FSDP2 gather the weights of linear layers in FP8, half or a quarter of the bytes.

    Call it before ``fully_shard``. Optimizers, gradients and checkpoints see the weights in high precision. Without a
    recipe a forward reads the rounded values. Weights that several modules share are gathered as ever.

    Args:
        model: a module that has operations of :mod:`bridge.ops`, or was converted; changed in place.
        recipe: what the model runs, with one scale per tensor: ``Float8CurrentScaling`` or ``DelayedScaling``, whose
            gathered weights have scales of their own amaxes, as stored weights have.
        dtype: the parameter dtype of the mixed precision policy, None without.
        group: a process group with the ranks that have this model, which compare what they were given; None is the
            default group.

    Returns:
        ``model``.

    Raises:
        TypeError: ``model`` is no module, or ``recipe`` no recipe.
        ValueError: a recipe with other scales, a model without such weights, weights that are sharded already, or ranks
            that were given something else.
    """
    check_model(model, _WHERE)
    recipe = as_recipe(recipe)
    if not isinstance(recipe, Recipe):
        raise type_error(_WHERE, "recipe", "a recipe", recipe)
    check_same_on_all_ranks({**signature_of(model), "gathered": recipe, "dtype": dtype}, group, _WHERE)
    counts: dict[int, int] = {}
    for module in model.modules():
        for own in module._parameters.values():
            counts[id(own)] = counts.get(id(own), 0) + 1
    weights: _Weights | None = None
    for path, op in operations_of(model):
        owners = [own for own in _owners(op) if counts.get(id(own.weight)) == 1]
        cast = weight_quantizers(op, recipe, op._state_device()).get("weight") if owners else None
        if cast is None or len(owners) < len(_owners(op)):
            continue
        if any(isinstance(owner.weight, DTensor) for owner in owners):
            raise value_error(_WHERE, path, "weights that are not sharded yet", "a DTensor")
        quantizer = _without_state(cast)
        if weights is None:
            weights = _Weights(model, dtype, quantizer)
        for index, owner in enumerate(owners):
            old = owner.weight
            made = ShardedWeight(old.detach(), f"{path}/{index}", weights)
            owner._parameters["weight"] = torch.nn.Parameter(made, requires_grad=old.requires_grad)
    if weights is None:
        raise value_error(_WHERE, "model", "linear layers whose weights the recipe casts", type(model).__name__)
    return model


def _without_state(quantizer: Quantizer) -> Quantizer:
    if isinstance(quantizer, Float8DelayedScalingQuantizer):
        return Float8CurrentScalingQuantizer(dtype=quantizer.dtype)
    if not isinstance(quantizer, Float8CurrentScalingQuantizer):
        raise value_error(_WHERE, "recipe", "one scale for every weight", type(quantizer).__name__)
    return quantizer.with_usage(True, False)


def precompute_scales(model: torch.nn.Module) -> None:
    """Compute the scales of all weights that are gathered in FP8, by one all-reduce. A collective.

    Optional: call it after the optimizer's step to have them before the next forward needs them. Else the first weight
    that is gathered after a step does it.
    """
    check_model(model, "precompute_scales")
    for weights in {own.weights for _, own in _sharded(model)}:
        weights.precompute()
