"""Checkpoints of ``transformer_engine.pytorch.ops``: the extra state of delayed scaling, read and written.

Everything that is known of the format is here:

* every basic op has a key ``_extra_state``, a uint8 CPU tensor; empty if there is nothing to keep;
* else it holds a pickled dict ``{"forward": {...}, "backward": {...}}``, either of which may be absent;
* each has ``"recipe"`` (an object of ``transformer_engine.common.recipe``), ``"scale_fwd"`` float32 ``[n]`` and
  ``"amax_history_fwd"`` float32 ``[L, n]`` (``_bwd`` in the backward), and ``"extra_fp8_variables"``, a dict of
  scalars;
* the ``n`` slots are the op's quantizers in order: ``[input, weight]`` and ``[grad_output]``; row 0 is the running
  step;
* recipes without state, and custom ones, keep at most the recipe.

Reading also takes ``torch.save``'s bytes, a dict without the two levels, and plain ``"scale"`` and ``"amax_history"``.

A pickle is a program. The reader runs none of it: it admits tensors and plain containers, makes records without
behaviour of the recipe's classes, and refuses every other name.
"""

from __future__ import annotations

import collections
import io
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from functional_te._errors import type_error, value_error
from functional_te.ops import Op
from functional_te.quantization.quantizers import Float8DelayedScalingQuantizer, Quantizer
from functional_te.quantization.state import DelayedScalingState

__all__ = ["decode_te", "encode_te", "is_te", "read", "te_state_dict"]

_RECIPES = "transformer_engine.common.recipe"
_DIRECTIONS = (("forward", "fwd"), ("backward", "bwd"))
_FORMATS = {
    "E4M3": (torch.float8_e4m3fn, torch.float8_e4m3fn),
    "HYBRID": (torch.float8_e4m3fn, torch.float8_e5m2),
}
# largest values by which an enum member may be named instead
_FORMATS_BY_LIMITS = {(448.0, 448.0): "E4M3", (448.0, 57344.0): "HYBRID"}

NamedState = tuple[str, Quantizer, Any]


# ---------------------------------------------------------------------------- reading


class Record:
    """An object of a class that is not here: its constructor arguments and its attributes, and no behaviour."""

    kind = ""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args = args
        self.fields: dict[str, Any] = dict(kwargs)

    def __new__(cls, *args: Any, **kwargs: Any) -> Record:
        made = super().__new__(cls)
        made.args, made.fields = args, dict(kwargs)
        return made

    def __setstate__(self, state: Any) -> None:
        parts = state if isinstance(state, tuple) else (state,)
        for part in parts:
            if isinstance(part, dict):
                self.fields.update(part)


def _storage_from_bytes(data: Any) -> Any:
    """What a tensor's pickle holds its storage in; the original would run that as a program of its own."""
    return torch.load(io.BytesIO(data), weights_only=True)


def _member(owner: Any, name: Any) -> Any:
    """``getattr`` as pickles of enum members use it."""
    if not (isinstance(owner, type) and issubclass(owner, Record) and isinstance(name, str)):
        raise pickle.UnpicklingError("te.ops extra state: expected the name of an enum member.")
    return owner(name)


def _latin1(text: Any, encoding: Any) -> bytes:
    """How the older protocols keep bytes."""
    if not isinstance(text, str) or encoding != "latin1":
        raise pickle.UnpicklingError("te.ops extra state: expected bytes.")
    return text.encode("latin1")


class _Function:
    """A function that a pickle may call, and not write to."""

    __slots__ = ("_call",)

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *args: Any) -> Any:
        return self._call(*args)

    def __setstate__(self, state: Any) -> None:
        raise pickle.UnpicklingError("te.ops extra state: expected no state of a function.")


_ADMITTED: dict[tuple[str, str], Any] = {
    ("builtins", "getattr"): _Function(_member),
    ("_codecs", "encode"): _Function(_latin1),
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("torch", "Size"): torch.Size,
    ("torch", "device"): torch.device,
    ("torch._utils", "_rebuild_tensor_v2"): _Function(torch._utils._rebuild_tensor_v2),
    ("torch.storage", "_load_from_bytes"): _Function(_storage_from_bytes),
}


# what the older protocols call modules of the standard library
_RENAMED = {"__builtin__": "builtins"}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        module = _RENAMED.get(module, module)
        if (module, name) in _ADMITTED:
            return _ADMITTED[module, name]
        dtype = getattr(torch, name, None) if module == "torch" else None
        if isinstance(dtype, torch.dtype):
            return dtype
        if (module == _RECIPES or module.startswith(f"{_RECIPES}.")) and name.isidentifier():
            return type(name, (Record,), {"kind": name})
        raise pickle.UnpicklingError(
            f"te.ops extra state: expected tensors, plain containers and recipes of {_RECIPES}, got {module}.{name}, "
            "which is not loaded because that could run its code."
        )


class _PickleModule:
    """The part of the :mod:`pickle` module that ``torch.load`` asks for."""

    Unpickler = _Unpickler
    UnpicklingError = pickle.UnpicklingError

    @staticmethod
    def load(file: Any, **kwargs: Any) -> Any:
        """As :func:`pickle.load`."""
        return _Unpickler(file, **kwargs).load()


def read(data: bytes, where: str) -> Any:
    """The content of an extra state, as a pickle or as ``torch.save`` writes it, without running it.

    Args:
        data: the bytes.
        where: the op, for messages.

    Raises:
        ValueError: no pickle, or one that names anything but tensors, plain containers and recipes.
    """
    try:
        if b"constants.pkl" in data:
            raise pickle.UnpicklingError("te.ops extra state: expected no TorchScript archive.")
        if data.startswith(b"PK"):
            return torch.load(io.BytesIO(data), weights_only=False, map_location="cpu", pickle_module=_PickleModule)
        return _Unpickler(io.BytesIO(data)).load()
    except pickle.UnpicklingError as error:
        raise value_error(
            where, "extra state", "tensors, containers and recipes", "something else", str(error)
        ) from error
    except (AttributeError, EOFError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise value_error(where, "extra state", "a pickled dict", f"{type(error).__name__}: {error}") from error


def is_te(content: dict[Any, Any]) -> bool:
    """Whether the content of an extra state is that of te.ops."""
    return bool({"forward", "backward", "recipe", "scale_fwd", "scale_bwd"} & content.keys())


def decode_te(op: Op, content: dict[Any, Any], device: torch.device) -> list[NamedState]:
    """Role, quantizer and state of every slot of the content of a te.ops extra state.

    Raises:
        ValueError: another number of slots than ``op`` has quantizers, or another shape.
        TypeError: tensors of another dtype, or no tensors.
    """
    where = type(op).__name__
    found: list[NamedState] = []
    for direction, suffix in _DIRECTIONS:
        own = content.get(direction, content)
        if not isinstance(own, dict):
            raise value_error(where, f"extra state {direction!r}", "a dict", type(own).__name__)
        nested = own is not content
        scale, history = (
            own.get(f"{name}_{suffix}", own.get(name) if nested else None) for name in ("scale", "amax_history")
        )
        if scale is None or history is None:
            continue
        roles = op.forward_quantizers if direction == "forward" else op.backward_quantizers
        _check(where, direction, scale, history, len(roles))
        settings = _settings(own.get("recipe", content.get("recipe")), len(history))
        for slot, role in enumerate(roles):
            quantizer = settings.quantizer(direction == "backward")
            state = DelayedScalingState(
                scale=scale[slot : slot + 1].to(device, copy=True),
                amax_history=history[:, slot].to(device, copy=True).contiguous(),
            )
            found.append((role, quantizer, state))
    return found


def _check(where: str, direction: str, scale: Any, history: Any, slots: int) -> None:
    for name, tensor, dims in (("scale", scale, 1), ("amax_history", history, 2)):
        argument = f"extra state {direction!r}: {name}"
        if not isinstance(tensor, torch.Tensor) or tensor.dtype is not torch.float32:
            raise type_error(where, argument, "a float32 tensor", getattr(tensor, "dtype", type(tensor).__name__))
        if tensor.dim() != dims or tensor.shape[-1] != slots or 0 in tensor.shape:
            wanted = f"{slots} slots" if dims == 1 else f"[length, {slots}]"
            raise value_error(where, argument, wanted, f"shape {tuple(tensor.shape)}")


class _Settings(NamedTuple):
    """What of a recipe makes its quantizers."""

    dtypes: tuple[torch.dtype, torch.dtype]
    margin: int
    length: int
    algorithm: str

    def quantizer(self, is_gradient: bool) -> Quantizer:
        return Float8DelayedScalingQuantizer(
            dtype=self.dtypes[is_gradient],
            margin=self.margin,
            amax_history_len=self.length,
            amax_compute_algo=self.algorithm,
        )


def _settings(recipe: Any, length: int) -> _Settings:
    """Of the recipe that was saved, as far as it says; a function is given again by the next step's recipe."""
    fields = recipe.fields if isinstance(recipe, Record) else {}
    margin, algorithm = fields.get("margin", 0), fields.get("amax_compute_algo", "max")
    return _Settings(
        _FORMATS[_format(fields.get("fp8_format"))],
        int(margin) if isinstance(margin, (int, float)) else 0,
        length,
        algorithm if algorithm in ("max", "most_recent") else "max",
    )


def _format(value: Any) -> str:
    """The name of a format's record: made of its name, of its value, or of a record of its value."""
    if isinstance(value, Record):
        inner = value.args[0] if len(value.args) == 1 else value.args
        if isinstance(inner, Record):
            inner = inner.args or tuple(inner.fields.values())
        if isinstance(inner, str):
            return inner if inner in _FORMATS else "HYBRID"
        if isinstance(inner, (tuple, list)) and len(inner) == 2:
            return _FORMATS_BY_LIMITS.get((float(inner[0]), float(inner[1])), "HYBRID")
    return "HYBRID"


# ---------------------------------------------------------------------------- writing


class DelayedScaling:
    """Stands for te.ops' recipe while it is pickled."""

    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)


class Format:
    """Stands for te.ops' enum of formats while it is pickled."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return getattr, (Format, self.name)


def encode_te(op: Op, states: list[NamedState]) -> torch.Tensor:
    """The extra state of te.ops, uint8; none at all unless every quantizer of the op has delayed scaling."""
    by_role = {role: (quantizer, state) for role, quantizer, state in states}
    content: dict[str, Any] = {}
    for (direction, suffix), roles in zip(_DIRECTIONS, (op.forward_quantizers, op.backward_quantizers), strict=True):
        own = [by_role.get(role) for role in roles]
        known = [pair for pair in own if pair is not None and isinstance(pair[1], DelayedScalingState)]
        if not known or len(known) != len(own):
            continue
        content[direction] = {
            "recipe": _recipe(by_role),
            f"scale_{suffix}": torch.cat([state.scale.detach().cpu() for _, state in known]),
            f"amax_history_{suffix}": torch.stack([state.amax_history.detach().cpu() for _, state in known], dim=1),
            "extra_fp8_variables": {},
        }
    if not content:
        return torch.empty(0, dtype=torch.uint8)
    # Protocol 2 names a class as text, without a length, so that the module can be exchanged for one that is not here.
    data = pickle.dumps(content, protocol=2, fix_imports=False)
    for kind in (DelayedScaling, Format):
        own_name, te_name = (f"c{module}\n{kind.__name__}\n".encode() for module in (__name__, _RECIPES))
        data = data.replace(own_name, te_name)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).clone()


def _recipe(by_role: dict[str, tuple[Quantizer, Any]]) -> DelayedScaling:
    quantizers = [quantizer for quantizer, _ in by_role.values()]
    first = next(q for q in quantizers if isinstance(q, Float8DelayedScalingQuantizer))
    hybrid = any(quantizer.dtype is torch.float8_e5m2 for quantizer in quantizers)
    algorithm = first.amax_compute_algo
    return DelayedScaling(
        margin=first.margin,
        fp8_format=Format("HYBRID" if hybrid else "E4M3"),
        amax_history_len=first.amax_history_len,
        amax_compute_algo=algorithm if isinstance(algorithm, str) else "max",
        scaling_factor_compute_algo=None,
        reduce_amax=True,
        fp8_dpa=False,
        fp8_mha=False,
        backward_override=None,
    )


def te_state_dict(module: torch.nn.Module) -> dict[str, Any]:
    """``module.state_dict()`` with quantizer state as te.ops keeps it, for a te.ops model of the same structure.

    te.ops loads the state of delayed scaling only with ``NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE=1``. Functions of a
    recipe are not written.

    Args:
        module: any module with modules of :mod:`bridge.ops` in it.
    """
    from bridge.ops.operation import BasicOperation

    state: dict[str, Any] = dict(module.state_dict())
    for name, own in module.named_modules(remove_duplicate=False):
        key = f"{name}._extra_state" if name else "_extra_state"
        if isinstance(own, BasicOperation) and key in state:
            state[key] = encode_te(own.op, own.named_states())
    return state
