"""The backends there are, and which one ``"auto"`` means.

A plan holds the name of its backend, never ``"auto"``; an op reads its functions from the record of that name. Records
are made when they are first used, so that nothing imports Triton or Transformer Engine before that.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import torch

from functional_te._errors import value_error
from functional_te.kernels.backend import REFERENCE, Backend, Fused
from functional_te.kernels.measured import MEASURED, MEASURED_ON, fastest_first
from functional_te.torch_compat import assume_constant_result

__all__ = [
    "BACKENDS",
    "BackendTable",
    "Source",
    "backends",
    "check_device",
    "kernels",
    "observing",
    "resolve_backend",
    "with_accumulation",
]


@dataclasses.dataclass(frozen=True)
class Source:
    """Where a backend comes from.

    Attributes:
        name: how the user asks for it.
        load: makes the record.
        missing: None if the backend can run on a device type, else what it lacks there, with what helps.
        summary: what it is, for :func:`backends`.
    """

    name: str
    load: Callable[[], Backend]
    missing: Callable[[str], str | None]
    summary: str


def _load_triton() -> Backend:
    from functional_te.kernels.triton.record import TRITON

    return TRITON


def _load_te() -> Backend:
    from functional_te.kernels.te.record import TRANSFORMER_ENGINE

    return TRANSFORMER_ENGINE


@functools.cache
def _old_gpu() -> str | None:
    """None, or why the GPU cannot multiply FP8 matrices."""
    if not torch.cuda.is_available():
        return "no CUDA device is there"
    major, minor = torch.cuda.get_device_capability()
    if (major, minor) < (8, 9):
        name = torch.cuda.get_device_name()
        return f"FP8 needs compute capability 8.9 or later, {name} has {major}.{minor}; use backend='reference'"
    return None


def _missing_triton(device: str) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed: pip install 'functional_te[triton]'"
    from functional_te.kernels.triton.launch import INTERPRETED

    if device == "cpu" and INTERPRETED:
        return None
    return _old_gpu() if device == "cuda" else f"it runs on CUDA tensors, not on {device}"


def _missing_te(device: str) -> str | None:
    if device != "cuda":
        return f"it runs on CUDA tensors, not on {device}"
    from functional_te.kernels import te

    return te.available() or _old_gpu()


BACKENDS: tuple[Source, ...] = (
    Source(
        "reference", lambda: REFERENCE, lambda device: None, "plain PyTorch on any device, the oracle of the others"
    ),
    Source("triton", _load_triton, _missing_triton, "fused Triton kernels and cuBLASLt FP8 products"),
    Source("te", _load_te, _missing_te, "Transformer Engine's kernels"),
)

# ``"auto"``: by device type, the backends to take, the first that can run
_ORDER: dict[str, tuple[str, ...]] = {"cuda": fastest_first(), "cpu": ("reference",)}

_BY_NAME: dict[str, Backend] = {"reference": REFERENCE}


def _source(name: str) -> Source:
    for source in BACKENDS:
        if source.name == name:
            return source
    known = sorted(source.name for source in BACKENDS)
    raise value_error("plan", "backend", f"'auto' or one of {known}", repr(name))


_found: dict[str, str] = {}


@assume_constant_result
def _first(device: str) -> str:
    """What ``"auto"`` means. Runs for real even while a caller is traced."""
    if device not in _found:
        _found[device] = _fastest(device)
    return _found[device]


def _fastest(device: str) -> str:
    for name in _ORDER.get(device, ("reference",)):
        if _source(name).missing(device) is None:
            return name
    return "reference"


def resolve_backend(name: str, device: str | None = None) -> str:
    """The backend that ``name`` (or ``"auto"``) means for tensors of a device type.

    Args:
        name: ``"auto"``, or the name of a backend.
        device: a device type; None is the CPU for ``"auto"``, and wherever a named backend can run.

    Raises:
        ValueError: no such backend, or it cannot run there.
    """
    if name == "auto":
        return "reference" if device is None or device == "cpu" else _first(device)
    if name != "reference" and (device is not None or _source(name).missing("cpu") is not None):
        check_device(name, device or "cuda")
    return name


def check_device(name: str, device: str) -> None:
    """Raise unless the backend called ``name`` can run on tensors of a device type."""
    missing = _source(name).missing(device)
    if missing is not None:
        fix = missing[0].upper() + missing[1:]
        raise value_error("plan", "backend", f"one that can run on {device}", repr(name), fix)


def with_accumulation(name: str, fast: tuple[bool, bool, bool]) -> str:
    """The name of a backend like ``name`` whose forward, input-gradient and weight-gradient products accumulate so."""
    record = kernels(name)
    if record.fast_accumulation is None or record.fast_accumulation == fast:
        return name
    other = f"{name}, fast accumulation {fast}"
    if other not in _BY_NAME:
        _BY_NAME[other] = record.accumulating(fast, other)
    return other


def kernels(name: str) -> Backend:
    """The record of the backend called ``name``."""
    found = _BY_NAME.get(name)
    if found is None:
        found = _BY_NAME[name] = _source(name).load()
    return found


@dataclasses.dataclass(frozen=True)
class BackendTable:
    """What :func:`backends` gives: printable, and a table in notebooks.

    Attributes:
        rows: (name, summary, "yes" or what is missing) for every backend on the device.
        auto: what ``"auto"`` means there.
        device: the device type.
    """

    rows: tuple[tuple[str, str, str], ...]
    auto: str
    device: str

    def __repr__(self) -> str:
        lines = [f"backends on {self.device} (auto: {self.auto})"]
        lines.extend(f"  {name:<10} {summary}; {usable}" for name, summary, usable in self.rows)
        if self.device == "cuda":
            names = [name for name, *_ in self.rows]
            lines.append(f"  why: milliseconds of a training step of an MLP block ({MEASURED_ON})")
            lines.append(f"    {'':<22}" + "".join(f"{name:>10}" for name in names))
            for recipe, times in MEASURED.items():
                lines.append(f"    {recipe:<22}" + "".join(f"{times.get(name, '-'):>10}" for name in names))
        return "\n".join(lines)


def backends(device: torch.device | str | None = None) -> BackendTable:
    """Which backends there are, which of them can run, and which one ``backend="auto"`` takes.

    Args:
        device: a device or device type; None is CUDA where there is some, else the CPU.
    """
    kind = ("cuda" if torch.cuda.is_available() else "cpu") if device is None else torch.device(device).type
    rows = []
    for source in BACKENDS:
        missing = source.missing(kind)
        rows.append((source.name, source.summary, "usable" if missing is None else missing))
    return BackendTable(tuple(rows), resolve_backend("auto", kind), kind)


@contextlib.contextmanager
def observing(name: str, on_cast: Callable[[Any, Any, Any], None]) -> Iterator[str]:
    """A backend like ``name`` that reports every cast of a tensor that is not in groups, for the time of the context.

    It runs no fused kernels, whose casts could not be seen.

    Args:
        name: name of a backend.
        on_cast: called with the values, the bound quantizer and the quantized tensor after every cast.

    Yields:
        The name of the new backend. No other context uses it, and :func:`resolve_backend` does not know it.
    """
    source = kernels(name)

    def quantize(x: Any, bound: Any, *args: Any, **kwargs: Any) -> Any:
        result = source.quantize(x, bound, *args, **kwargs)
        if len(args) < 2 and kwargs.get("groups") is None:  # casts of grouped rows are no plain tensors
            on_cast(x, bound, result[0])
        return result

    observed = f"{name}, observed by {id(quantize):#x}"
    _BY_NAME[observed] = dataclasses.replace(source, name=observed, repeatable=False, quantize=quantize, fused=Fused())
    try:
        yield observed
    finally:
        del _BY_NAME[observed]
