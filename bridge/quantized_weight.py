"""Parameters that are stored in low precision only.

:class:`QuantizedWeight` is a tensor of the nominal shape and dtype that holds the tensors of a
:class:`~functional_te.quantization.QuantizedTensor` and nothing in high precision. Any operation reads its dequantized
values. An operation that writes to it casts the result into the same inner tensors, so ordinary optimizers work.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch

from bridge import compat
from functional_te._errors import type_error, value_error
from functional_te._value import Table
from functional_te.quantization import QuantizedTensor, Quantizer, quantize
from functional_te.quantization.serialization import check_copies, describe, restore

__all__ = ["QuantizedWeight", "quantized_of"]

_NOMINAL = (torch.float32, torch.float16, torch.bfloat16)
_FIELDS: tuple[str, ...] = QuantizedTensor._tree_children  # type: ignore[attr-defined]
_WHERE = "QuantizedWeight"
# quantizers of weights by uid: traced code can read a string from any tensor, but not every object
_quantizers = Table()


def quantized_of(weight: QuantizedWeight) -> QuantizedTensor:
    """The quantized tensor over the inner tensors of ``weight``: shared, not copied. Made for traced code.

    There the tensors are read from a detached weight, which makes them part of the graph. Read from the weight itself
    they become inputs of their own: a write to the weight earlier in the graph would not show in them.
    """
    if torch.compiler.is_compiling():
        weight = weight.detach()  # type: ignore[assignment]
    return _quantized(weight, getattr(_quantizers, weight.quantizer_uid))


def _quantized(weight: QuantizedWeight, quantizer: Quantizer) -> QuantizedTensor:
    return QuantizedTensor(**{name: getattr(weight, name) for name in _FIELDS}, dtype=weight.dtype, quantizer=quantizer)


class QuantizedWeight(torch.Tensor):
    """A weight whose only storage is low precision. Make one with :meth:`from_quantized`.

    Views, slices and ``t()`` are plain copies of values: a write to one does not reach the weight.

    Attributes:
        quantizer: the value that casts what is written to the weight.
        quantizer_uid: its uid.

    The tensor fields of the quantized tensor are attributes of the same names.
    """

    quantizer: Quantizer
    quantizer_uid: str

    __torch_function__ = compat.no_torch_function  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls,
        inner: dict[str, torch.Tensor],
        quantizer: Quantizer,
        dtype: torch.dtype,
        size: Any,
        stride: Any = None,
    ) -> QuantizedWeight:
        """Wrap ``inner`` unchecked; see :meth:`from_quantized`."""
        device = next(iter(inner.values())).device
        made: Any = compat.wrapper(cls, size, stride, dtype, device)
        for name in _FIELDS:
            setattr(made, name, inner.get(name))
        made.quantizer = quantizer
        made.quantizer_uid = quantizer.uid
        setattr(_quantizers, quantizer.uid, quantizer)
        return made

    @classmethod
    def from_quantized(cls, q: QuantizedTensor) -> QuantizedWeight:
        """A weight over the tensors of ``q``: shared, not copied.

        Raises:
            TypeError: ``q`` is not a quantized tensor.
            ValueError: its quantizer has state, or its nominal dtype is none of float32, float16 and bfloat16.
        """
        where = f"{_WHERE}.from_quantized"
        if not isinstance(q, QuantizedTensor):
            raise type_error(where, "q", "a QuantizedTensor", type(q).__name__)
        if not isinstance(q.quantizer, Quantizer) or q.quantizer.stateful:
            raise value_error(where, "q.quantizer", "a quantizer without state", q.quantizer)
        if q.dtype not in _NOMINAL:
            raise value_error(where, "q.dtype", "float32, float16 or bfloat16", q.dtype)
        return cls(_inner(q), q.quantizer, q.dtype, q.shape)

    def quantized(self) -> QuantizedTensor:
        """The quantized tensor over the inner tensors: shared, not copied. Traced code calls :func:`quantized_of`."""
        return _quantized(self, self.quantizer)

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Plain values in ``dtype`` (default: the nominal dtype). Differentiable: the gradient passes unchanged."""
        if torch.is_grad_enabled() and self.requires_grad:
            return _Dequantize.apply(self, dtype)
        return _plain(self, dtype)

    def quantize_(self, values: torch.Tensor) -> QuantizedWeight:
        """Cast ``values`` of the same shape into the inner tensors, from their own dtype. Returns the weight.

        A weight of the same quantizer is copied bit for bit. ``copy_`` does the same, and broadcasts.
        """
        if not isinstance(values, torch.Tensor) or values.shape != self.shape:
            got = tuple(values.shape) if isinstance(values, torch.Tensor) else type(values).__name__
            raise value_error(f"{_WHERE}.quantize_", "values", f"a tensor of shape {tuple(self.shape)}", got)
        with torch.no_grad():
            self.copy_(values)
        return self

    def set_high_precision_init_val(self, values: torch.Tensor) -> None:
        """Remember what the weight was cast from, for the master weights of an optimizer."""
        self._high_precision_init_val: torch.Tensor | None = values

    def get_high_precision_init_val(self) -> torch.Tensor | None:
        """What the weight was cast from, on the CPU, if ``quantized_model_init`` was asked to keep it."""
        return getattr(self, "_high_precision_init_val", None)

    def clear_high_precision_init_val(self) -> None:
        """Forget it."""
        self._high_precision_init_val = None

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Shape, nominal dtype, device and quantizer; no values."""
        grad = ", requires_grad=True" if self.requires_grad else ""
        where = f"dtype={self.dtype}, device='{self.device}'"
        return f"QuantizedWeight({tuple(self.shape)}, {where}, quantizer={self.quantizer}{grad})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        """For pickle and ``torch.save``: the inner tensors, and everything else as plain data."""
        # as bytes, because plain pickle cannot read the 8-bit floating dtypes back
        tensors = {name: t.view(torch.uint8) if t.itemsize == 1 else t for name, t in _inner(self).items()}
        content = {
            "dtype": describe(self.dtype, _WHERE),
            "quantizer": describe(self.quantizer, _WHERE),
            "tensors": {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in _inner(self).items()},
        }
        extra = {name: value for name, value in self.__dict__.items() if _is_extra(name)}
        is_parameter = isinstance(self, torch.nn.Parameter)
        return _rebuild, (json.dumps(content), tensors, self.requires_grad, is_parameter, extra)

    # the protocol of traceable wrapper subclasses

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        """Names of the inner tensors, and what else makes the weight."""
        return list(_inner(self)), (self.quantizer, self.dtype)

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], meta: Any, size: Any, stride: Any) -> QuantizedWeight:
        """The weight again."""
        quantizer, dtype = meta
        return cls(inner, quantizer, dtype, size, stride)

    def _stable_hash_for_caching(self) -> str:
        """Names everything but the values, for the compiler's cache on disk."""
        inner = [(name, t.shape, t.stride(), t.dtype, t.device) for name, t in _inner(self).items()]
        content = (self.shape, self.stride(), self.dtype, self.requires_grad, self.quantizer, inner)
        return hashlib.sha256(repr(content).encode()).hexdigest()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Run ``func`` by its entry in the table, or on dequantized values."""
        return _SPECIAL.get(func, _on_values)(func, args, kwargs or {})


class _Dequantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: QuantizedWeight, dtype: torch.dtype | None) -> torch.Tensor:
        return _plain(weight, dtype)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0], None  # autograd casts it to the nominal dtype


def _inner(holder: Any) -> dict[str, torch.Tensor]:
    """The tensors of a weight or of a quantized tensor by field name."""
    return {name: value for name in _FIELDS if (value := getattr(holder, name)) is not None}


def _plain(weight: QuantizedWeight, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Dequantized values, contiguous as the weight says it is."""
    return weight.quantized().dequantize(dtype).contiguous()


# ---------------------------------------------------------------------------- files


def _dtype_of(name: Any) -> torch.dtype:
    found = getattr(torch, str(name), None)
    if not isinstance(found, torch.dtype):
        raise value_error(_WHERE, "saved dtype", "the name of a dtype", repr(name))
    return found


def _is_extra(name: str) -> bool:
    """Whether an attribute was added by the user, as sharding libraries do."""
    return name not in (*_FIELDS, "quantizer", "quantizer_uid") and not name.startswith("_")


def _rebuild(
    content: str, tensors: dict[str, torch.Tensor], requires_grad: bool, is_parameter: bool, extra: dict[str, Any]
) -> torch.Tensor:
    """What ``__reduce_ex__`` took apart. All of it is checked, since a file may hold anything."""
    read = json.loads(content)
    if not tensors or not tensors.keys() <= set(_FIELDS) or tensors.keys() != read["tensors"].keys():
        raise value_error(_WHERE, "saved tensors", f"some of {list(_FIELDS)}, with their dtypes", list(tensors))
    inner = {name: tensor.view(_dtype_of(read["tensors"][name])) for name, tensor in tensors.items()}
    dtype, quantizer = (restore(read[key], _WHERE, key) for key in ("dtype", "quantizer"))
    q = QuantizedTensor(**inner, dtype=dtype, quantizer=quantizer)
    check_copies(q, _WHERE, "saved tensors")
    made: torch.Tensor = QuantizedWeight.from_quantized(q)
    if is_parameter:
        made = torch.nn.Parameter(made)
    for name, value in extra.items():
        if _is_extra(name):
            setattr(made, name, value)
    return made.requires_grad_(requires_grad)


# loading with weights_only=True needs this one function and nothing else
torch.serialization.add_safe_globals([_rebuild])


# ---------------------------------------------------------------------------- operations


def _on_values(func: Any, args: Any, kwargs: Any) -> Any:
    """Run ``func`` on dequantized values; what it writes is cast into the weight that was given."""
    plains: dict[int, torch.Tensor] = {}

    def values(value: Any) -> Any:
        if isinstance(value, QuantizedWeight):
            if id(value) not in plains:
                plains[id(value)] = _plain(value)
            return plains[id(value)]
        if isinstance(value, (list, tuple)):
            return type(value)([values(item) for item in value])
        return value

    result = func(*values(args), **{name: values(value) for name, value in kwargs.items()})
    written = compat.written_arguments(func)
    if not written:
        return result
    targets = _written(written, args, kwargs)
    for weight in targets:
        plain = plains[id(weight)]
        if plain.shape != weight.shape:
            wanted = f"an operation that keeps the shape {tuple(weight.shape)}"
            raise value_error(_WHERE, str(func), wanted, tuple(plain.shape))
        _write(weight, plain)

    def returned(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)([returned(item) for item in value])
        return next((weight for weight in targets if plains[id(weight)] is value), value)

    return returned(result)


def _written(places: Any, args: Any, kwargs: Any) -> list[QuantizedWeight]:
    """The distinct weights among the arguments that are written to."""
    found: dict[int, QuantizedWeight] = {}
    for index, name in places:
        value = args[index] if index < len(args) else kwargs.get(name)
        for item in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(item, QuantizedWeight):
                found[id(item)] = item
    return list(found.values())


def _write(weight: QuantizedWeight, values: torch.Tensor) -> None:
    """Cast ``values`` into the inner tensors of ``weight``, or copy the bits of a weight that is made the same way."""
    own = _inner(weight)
    if isinstance(values, QuantizedWeight):
        given = _inner(values)
        if values.quantizer is weight.quantizer and values.shape == weight.shape and given.keys() == own.keys():
            return _copy_bits(own, given)
        values = _plain(values, torch.float32)
    if values.dtype not in _NOMINAL:
        values = values.to(torch.float32)
    values = values.to(weight.device).expand(weight.shape)
    return _copy_bits(own, _inner(quantize(values, weight.quantizer)))


def _copy_bits(own: dict[str, torch.Tensor], given: dict[str, torch.Tensor]) -> None:
    for name, tensor in own.items():
        tensor.copy_(given[name])
        # nothing counts versions below autograd, and a backward that saved the inner tensors has to notice
        if not torch.compiler.is_compiling():
            torch.autograd.graph.increment_version(tensor)


def _each(weight: QuantizedWeight, function: Any, dtype: torch.dtype | None = None) -> QuantizedWeight:
    """A weight of ``function`` of every inner tensor."""
    inner = {name: function(tensor) for name, tensor in _inner(weight).items()}
    return QuantizedWeight(inner, weight.quantizer, dtype or weight.dtype, weight.shape)


def _alias(func: Any, args: Any, kwargs: Any) -> Any:
    return _each(args[0], func)


def _clone(func: Any, args: Any, kwargs: Any) -> Any:
    return _each(args[0], torch.clone)


def _to_copy(func: Any, args: Any, kwargs: Any) -> Any:
    """A copy of another nominal dtype or on another device; plain in a dtype that no weight has."""
    dtype = kwargs.get("dtype") or args[0].dtype
    if dtype not in _NOMINAL:
        return _on_values(func, args, kwargs)
    moved = {"device": kwargs.get("device"), "non_blocking": kwargs.get("non_blocking", False), "copy": True}
    return _each(args[0], lambda tensor: tensor.to(**moved), dtype)


def _like(func: Any, args: Any, kwargs: Any) -> Any:
    """Plain tensors made after the weight, as optimizers make their state; its values are not needed."""
    weight = args[0]
    data = next(iter(_inner(weight).values()))
    return func(data.new_empty((), dtype=weight.dtype).expand(weight.shape), *args[1:], **kwargs)


def _copy_(func: Any, args: Any, kwargs: Any) -> Any:
    target, source = args[:2]
    if not isinstance(target, QuantizedWeight):
        return _on_values(func, args, kwargs)
    _write(target, source)
    return target


def _foreach_copy_(func: Any, args: Any, kwargs: Any) -> None:
    for target, source in zip(*args[:2], strict=True):
        target.copy_(source)


def _as_strided(func: Any, args: Any, kwargs: Any) -> Any:
    """The weight itself if it is asked for as it is (sharding libraries do), else a view of values."""
    weight, size, stride, *offset = args
    offset = kwargs.get("storage_offset", offset[0] if offset else None)
    if tuple(size) == tuple(weight.shape) and tuple(stride) == weight.stride() and not offset:
        return _each(weight, torch.Tensor.detach)
    return _on_values(func, args, kwargs)


def _record_stream(func: Any, args: Any, kwargs: Any) -> None:
    for tensor in _inner(args[0]).values():
        func(tensor, *args[1:], **kwargs)


_aten = torch.ops.aten
_SPECIAL = {
    _aten.detach.default: _alias,
    _aten.alias.default: _alias,
    _aten.as_strided.default: _as_strided,
    _aten.clone.default: _clone,
    _aten._to_copy.default: _to_copy,
    _aten.empty_like.default: _like,
    _aten.zeros_like.default: _like,
    _aten.ones_like.default: _like,
    _aten.full_like.default: _like,
    _aten.new_empty.default: _like,
    _aten.new_zeros.default: _like,
    _aten.copy_.default: _copy_,
    _aten._foreach_copy_.default: _foreach_copy_,
    _aten.record_stream.default: _record_stream,
}
