"""Comparing results bit for bit, and showing where and how they differ."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

import functional_te as fte

_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_LOW = {torch.float8_e4m3fn: (0x7F, 0x7E), torch.float8_e5m2: (0x7F, 0x7C)}


class Bits(NamedTuple):
    """One cast, on the CPU, in the logical layout of :class:`functional_te.QuantizedTensor`.

    Attributes:
        row: rowwise data as a matrix ``[M, K]``.
        row_scale: factors ``[1]`` or ``[ceil(M / tile), ceil(K / tile)]``.
        column: columnwise data ``[K, M]``, or None.
        column_scale: its factors, or None.
        row_amax: observed amax (delayed scaling) or amax of a two-level format, or None.
        column_amax: likewise.
    """

    row: Tensor | None
    row_scale: Tensor | None
    column: Tensor | None = None
    column_scale: Tensor | None = None
    row_amax: Tensor | None = None
    column_amax: Tensor | None = None


def matrix(x: Tensor) -> Tensor:
    """Leading dimensions flattened."""
    return x.reshape(-1, x.shape[-1])


def of(quantized: fte.QuantizedTensor, amax: Tensor | None = None) -> Bits:
    """The bits of a quantized tensor of this library; ``amax`` is what a state observed."""
    row = quantized.rowwise_data
    parts = (
        None if row is None else matrix(row),
        quantized.rowwise_scale_inv,
        quantized.columnwise_data,
        quantized.columnwise_scale_inv,
        quantized.rowwise_amax if amax is None else amax,
        quantized.columnwise_amax,
    )
    return Bits(*(None if part is None else part.cpu() for part in parts))


def cast(x: Tensor, quantizer: fte.Quantizer, device: str, scale: float | None = None) -> Bits:
    """Our cast on a device; for delayed scaling with a given scale."""
    x = x.to(device)
    if scale is None:
        return of(fte.quantize(x, quantizer))
    state = dataclasses.replace(fte.init_quantizer_state(quantizer, device), scale=torch.tensor([scale], device=device))
    quantized, state = fte.quantize(x, quantizer, state)
    return of(quantized, state.amax_history[:1])


def integers(x: Tensor) -> Tensor:
    """The bits of a tensor. All NaNs are one: their sign and payload are no result, and machines differ in them."""
    plain = x.contiguous().view(_INTEGER[x.element_size()]) if x.dtype.is_floating_point else x
    if x.dtype in _LOW:
        nan, largest = _LOW[x.dtype]
        return torch.where((plain & 0x7F) > largest, nan, plain)
    if x.dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        nan = torch.full((), float("nan"), dtype=x.dtype).view(plain.dtype)
        return torch.where(x.isnan(), nan.to(x.device), plain)
    return plain


def _shown(value: Tensor) -> str:
    width = 2 * value.element_size()
    bits = int(integers(value.reshape(1))[0]) & ((1 << (4 * width)) - 1)
    number = f"{value.float().item():.9g}" if value.dtype.is_floating_point else str(value.item())
    return f"{number} (0x{bits:0{width}x})"


def differences(
    what: str, theirs: Tensor | None, ours: Tensor | None, source: Callable[[], Tensor] | None = None
) -> list[str]:
    """Empty if two tensors are bitwise the same, else one text: how many elements differ, and the first of them.

    Args:
        what: names the comparison.
        theirs: the reference.
        ours: what is tested.
        source: gives values of the same shape, shown beside as x.
    """
    if theirs is None or ours is None:
        return [] if theirs is ours else [f"{what}: reference {_kind(theirs)}, ours {_kind(ours)}"]
    theirs, ours = theirs.detach().cpu(), ours.detach().cpu()
    if theirs.shape != ours.shape or theirs.dtype is not ours.dtype:
        return [f"{what}: reference {_kind(theirs)}, ours {_kind(ours)}"]
    wrong = integers(theirs) != integers(ours)
    if not wrong.any():
        return []
    text = [f"{what}: {int(wrong.sum())} of {wrong.numel()} differ"]
    beside = None if source is None else source().detach().cpu()
    for index in wrong.nonzero()[:4].tolist():
        place = tuple(index)
        x = f"x {_shown(beside[place])}, " if beside is not None and beside.shape == ours.shape else ""
        text.append(f"    at {place}: {x}reference {_shown(theirs[place])}, ours {_shown(ours[place])}")
    return ["\n".join(text)]


def _kind(x: Tensor | None) -> str:
    return "nothing" if x is None else f"{x.dtype} {tuple(x.shape)}"


def of_casts(what: str, theirs: Bits, ours: Bits, x: Tensor, tile: tuple[int, int] | None = None) -> list[str]:
    """Differences of two casts of ``x``. Data are shown with what was cast, scales with the amax of their tile."""
    rows = matrix(x.detach().cpu())
    found = []
    for name, theirs_of, ours_of, source in (
        ("rowwise scale_inv", theirs.row_scale, ours.row_scale, lambda: _amaxes(rows, tile)),
        ("rowwise data", theirs.row, ours.row, lambda: rows),
        ("rowwise amax", theirs.row_amax, ours.row_amax, None),
        ("columnwise scale_inv", theirs.column_scale, ours.column_scale, lambda: _amaxes(rows.t(), tile)),
        ("columnwise data", theirs.column, ours.column, lambda: rows.t()),
        ("columnwise amax", theirs.column_amax, ours.column_amax, None),
    ):
        found += differences(f"{what}: {name}", theirs_of, ours_of, source)
    return found


def _amaxes(rows: Tensor, tile: tuple[int, int] | None) -> Tensor:
    """Amax of the tensor ``[1]`` or of every tile."""
    if tile is None:
        return rows.abs().amax().reshape(1)
    down, across = -rows.shape[0] % tile[0], -rows.shape[1] % tile[1]
    padded = torch.nn.functional.pad(rows, (0, across, 0, down))
    return padded.reshape(padded.shape[0] // tile[0], tile[0], -1, tile[1]).abs().amax((1, 3))


def assert_none(found: list[str], limit: int = 6) -> None:
    """Fail with the first of the differences found."""
    if found:
        rest = "" if len(found) <= limit else f"\n... and {len(found) - limit} more"
        raise AssertionError(f"{len(found)} comparisons differ\n" + "\n".join(found[:limit]) + rest)


def assert_same(what: str, reference: object, ours: object) -> None:
    """Fail unless two trees hold bitwise the same tensors."""
    one, other = _tensors(reference), _tensors(ours)
    assert len(one) == len(other), what
    found = []
    for place, (theirs, own) in enumerate(zip(one, other, strict=True)):
        found += differences(f"{what}: tensor {place}", theirs, own)
    assert_none(found)


def _tensors(tree: object) -> list[Tensor]:
    return [leaf for leaf in fte.pytree.leaves(tree) if isinstance(leaf, Tensor)]
