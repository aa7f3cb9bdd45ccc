"""The numerics view: what every cast of a chain does to its tensor, for one batch.

The chain runs as it always does, with its fusions, forward and backward; only the ``quantize`` kernel is watched.
"""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Iterator
from typing import Any

import torch

from functional_te import pytree
from functional_te.api import Block, State, bind_kwargs, check_grads
from functional_te.chain import Chain, as_chain
from functional_te.check import check_call, check_state
from functional_te.fuser.plan import Plan
from functional_te.fuser.plan import plan as make_plan
from functional_te.fuser.rule import Fusions
from functional_te.kernels.registry import observing
from functional_te.ops.activation import INPUT_CACHE
from functional_te.params import by_op
from functional_te.pipeline import backward_pass, forward_pass
from functional_te.quantization.formats import ELEMENT_NAMES
from functional_te.quantization.hadamard import hadamard, hadamard_inverse
from functional_te.quantization.quantizer import Copy, Quantizer, as_matrix
from functional_te.quantization.recipes import Recipe
from functional_te.quantization.scaling import FLOAT32_MAX, amax_of
from functional_te.quantization.tensor import BoundQuantizer, QuantizedTensor

__all__ = ["Numerics", "TensorNumerics", "numerics"]

MEASURES = ("amax", "scale_min", "scale_max", "saturated", "underflow", "snr_db")
_TWO_FP4_ONES = 0x22
# an amax times its own scale may exceed the limit by rounding alone
_ROUNDING = 2.0**-20


@pytree.node
class TensorNumerics:
    """What one cast did to one tensor, for one of the copies that it made.

    The measures are float32 tensors without dimensions, where the tensor was.

    Attributes:
        index: index of the op that the tensor belongs to, static.
        op: class name of the op, static.
        name: the op's own name or an empty string, static.
        role: ``"input"``, ``"weight"``, ``"grad_output"``, ...; ``"cached_input"`` is what an activation with
            ``cache_quantized_input`` keeps, ``"other"`` any other cast that no recipe asked for. Static.
        copy: ``"rowwise"`` or ``"columnwise"``, static.
        quantizer: the quantizer that made the copy, static.
        amax: largest magnitude of the tensor before the cast; NaN if it holds one, 0 without elements.
        scale_min: smallest factor into low precision over the blocks: ``1 / scale_inv``, in NVFP4 with the factor of
            the whole tensor. Blocks that are multiplied by 0 on the way out are left out; NaN if there are no others.
        scale_max: the largest, likewise.
        saturated: share of the elements that are beyond the largest value their block can hold, by more than float32
            rounding (2**-20 of it). An infinity is, a NaN is not, nor is what a block that is multiplied by 0 lost.
        underflow: share of the nonzero elements that became zero.
        snr_db: ``10 log10(sum x**2 / sum (x - dequantized)**2)``: infinite if the cast was exact (as of zeros, or of
            no elements), NaN if ``x`` or the result is not finite.
    """

    index: int = pytree.static()
    op: str = pytree.static()
    name: str = pytree.static(default="")
    role: str = pytree.static()
    copy: str = pytree.static()
    quantizer: Quantizer = pytree.static()
    amax: torch.Tensor
    scale_min: torch.Tensor
    scale_max: torch.Tensor
    saturated: torch.Tensor
    underflow: torch.Tensor
    snr_db: torch.Tensor

    @property
    def format(self) -> str:
        """Class name of the quantizer."""
        return type(self.quantizer).__name__

    @property
    def dtype(self) -> torch.dtype:
        """Element type."""
        return self.quantizer.dtype

    def row(self) -> dict[str, Any]:
        """Every attribute as a plain Python value: int, str or float."""
        measures = torch.stack([getattr(self, name) for name in MEASURES]).tolist()
        return {
            "index": self.index,
            "op": self.op,
            "name": self.name,
            "role": self.role,
            "copy": self.copy,
            "format": self.format,
            "dtype": str(self.dtype).removeprefix("torch."),
            **dict(zip(MEASURES, measures, strict=True)),
        }


@pytree.node
class Numerics:
    """What :func:`numerics` gives: a pytree of measures that prints as a table.

    Attributes:
        entries: one :class:`TensorNumerics` per cast and copy, in the order of ops, roles and copies.
    """

    entries: tuple[TensorNumerics, ...] = ()

    def __len__(self) -> int:
        return len(self.entries)

    def __iter__(self) -> Iterator[TensorNumerics]:
        return iter(self.entries)

    def __getitem__(self, key: Any) -> Any:
        """Entries by op index, by ``(index, role)`` or by ``(index, role, copy)``.

        Returns:
            The one :class:`TensorNumerics` for a key of three parts, else a :class:`Numerics` of those that fit.

        Raises:
            KeyError: nothing fits.
        """
        wanted = key if isinstance(key, tuple) else (key,)
        found = [e for e in self.entries if wanted and (e.index, e.role, e.copy)[: len(wanted)] == wanted]
        if not found:
            places = sorted({(e.index, e.role) for e in self.entries})
            raise KeyError(f"no cast at {key!r}; there are casts at {places}")
        return found[0] if len(wanted) == 3 else Numerics(entries=tuple(found))

    def rows(self) -> list[dict[str, Any]]:
        """One dict of plain Python values per entry, see :meth:`TensorNumerics.row`."""
        return [entry.row() for entry in self.entries]

    def to_dict(self) -> dict[str, Any]:
        """``{"entries": rows}``, of plain Python values."""
        return {"entries": self.rows()}

    def __str__(self) -> str:
        if not self.entries:
            return "no casts"
        lines = [_HEADER, *(_cells(row) for row in self.rows())]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        texts = [
            "  ".join(
                cell.ljust(width) if place < _TEXT_COLUMNS else cell.rjust(width)
                for place, (cell, width) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in lines
        ]
        return "\n".join((texts[0], "  ".join("-" * width for width in widths), *texts[1:]))

    def _repr_html_(self) -> str:
        if not self.entries:
            return "<p>no casts</p>"
        head = "".join(f"<th>{html.escape(cell)}</th>" for cell in _HEADER)
        body = "".join(
            "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in _cells(row)) + "</tr>" for row in self.rows()
        )
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


_HEADER = ("op", "role", "copy", "format", "amax", "scale", "saturated", "underflow", "SNR dB")
_TEXT_COLUMNS = 4  # the others are numbers, aligned to the right


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    """A line of the table, in the order of ``_HEADER``."""
    low, high = f"{row['scale_min']:.4g}", f"{row['scale_max']:.4g}"
    return (
        f"{row['index']} {row['op']}" + (f" {row['name']!r}" if row["name"] else ""),
        row["role"],
        row["copy"],
        f"{row['format'].removesuffix('Quantizer')} {ELEMENT_NAMES.get(row['dtype'], row['dtype'])}",
        f"{row['amax']:.4g}",
        low if low == high else f"{low} to {high}",
        f"{100 * row['saturated']:.3g}%",
        f"{100 * row['underflow']:.3g}%",
        f"{row['snr_db']:.1f}",
    )


def numerics(
    block: Block,
    params: Any,
    x: Any,
    *extra_inputs: torch.Tensor,
    recipe: Recipe | None,
    state: State | None = None,
    grad_output: Any = None,
    kwargs: Any = None,
    backend: str = "auto",
    fusions: Fusions | None = None,
    compute_dtype: torch.dtype | None = None,
) -> Numerics:
    """Measure every cast that :func:`functional_te.vjp` makes for a batch: amax, scale, saturation, underflow, SNR.

    Each cast is compared with the very tensor it was given, so that errors of the casts before it do not count. There
    is one entry for each copy that was made: the copies of 1-D block formats differ, while one copy of a per-tensor
    format may serve all products. Saturated and underflow of a columnwise copy that is rotated by a Hadamard matrix
    are those of the rotated elements, which are what the format holds; its SNR is taken after rotating back.

    Tensors that the caller quantized (inputs, weights, :class:`functional_te.CachedWeight`) are not cast, and have no
    entry. In high precision there are no entries, unless an activation caches its input in FP8. Pure: scales and keys
    are read from ``state`` as they are, and the observations are dropped.

    Args:
        block: a chain or an op.
        params: see :func:`functional_te.apply`, like ``x``, ``extra_inputs``, ``state``, ``kwargs``, ``backend``,
            ``fusions`` and ``compute_dtype``.
        recipe: a recipe, or None for high precision.
        grad_output: the gradient of the output, or a tuple of it and the gradients of the extra outputs. None takes
            the gradient of the mean of the squared output, ``2 * output / output.numel()``: unlike a gradient of ones,
            it has the spread and the small magnitudes of training. False measures the forward alone, with the copies
            that :func:`functional_te.apply` makes.

    Raises:
        ValueError: as :func:`functional_te.vjp`.
        TypeError: likewise.
    """
    block = as_chain(block)
    backward = grad_output is not False
    plan = make_plan(
        block,
        recipe=recipe,
        requires_grad=backward,
        backend=backend,
        compute_dtype=compute_dtype,
        fusions=fusions,
        device=getattr(x, "device", None),
    )
    params = by_op(block, params)
    check_call(plan, params, x, extra_inputs)
    check_state(plan, state, x.device)
    bound = bind_kwargs(block, kwargs)
    watch = _Watch(block)
    with torch.no_grad(), observing(plan.backend, watch.on_cast) as name:
        watched = _watched(plan, name, watch)
        outcome = forward_pass(watched, x, params, state, extra_inputs, bound)
        if backward:
            grad, *extras = (grad_output or (None,)) if isinstance(grad_output, tuple) else (grad_output,)
            grad = _default_gradient(outcome.output) if grad is None else grad
            check_grads(block, outcome, grad, tuple(extras))
            backward_pass(watched, outcome.saved, state, grad, tuple(extras))
    return Numerics(entries=watch.entries())


def _default_gradient(output: Any) -> torch.Tensor:
    """The gradient of the mean of the squared output."""
    output = output.dequantize() if isinstance(output, QuantizedTensor) else output
    return (output.to(torch.float32) * (2.0 / max(output.numel(), 1))).to(output.dtype)


class _Watch:
    """Collects the casts of a run, each with the op and the role it is for."""

    def __init__(self, block: Chain) -> None:
        self.block = block
        self.step: tuple[int, ...] = (0,)
        # by id; the objects are kept so that no id is used twice
        self.places: dict[int, tuple[BoundQuantizer, int, str]] = {}
        self.found: list[TensorNumerics] = []

    def know(self, bound: BoundQuantizer | None, index: int, role: str) -> None:
        """``bound`` casts the tensor ``role`` of op ``index``."""
        if bound is not None:
            self.places[id(bound)] = (bound, index, role)

    def on_cast(self, x: torch.Tensor, bound: BoundQuantizer, quantized: QuantizedTensor) -> None:
        """Measure the copies of one cast."""
        # a cast that the plan does not know of is the running op's own; the last op of a fusion makes it
        own = self.step[-1], "cached_input" if bound is INPUT_CACHE else "other"
        index, role = self.places[id(bound)][1:] if id(bound) in self.places else own
        op = self.block.ops[index]
        for columnwise in (False, True):
            copy = quantized.copy(columnwise)
            if copy is not None:
                entry = TensorNumerics(
                    index=index,
                    op=type(op).__name__,
                    name=op.name,
                    role=role,
                    copy="columnwise" if columnwise else "rowwise",
                    quantizer=quantized.quantizer.of(columnwise),
                    **_measure(x, copy, quantized.quantizer.of(columnwise), columnwise, bound.scale),
                )
                self.found.append(entry)

    def entries(self) -> tuple[TensorNumerics, ...]:
        """What was found, in the order of ops, roles and copies."""

        def order(entry: TensorNumerics) -> tuple[int, int]:
            op = self.block.ops[entry.index]
            roles = (*op.forward_quantizers, *op.backward_quantizers)
            return entry.index, roles.index(entry.role) if entry.role in roles else len(roles)

        return tuple(sorted(self.found, key=order))


class _Watched:
    """The op of a step, telling a watch which quantizers the step gets. All else is the op's."""

    def __init__(self, step: Any, watch: _Watch) -> None:
        self.op, self.indices, self.fused, self.watch = step.op, step.indices, step.fused, watch

    def __getattr__(self, name: str) -> Any:
        return getattr(self.op, name)

    def resolve_fwd_args(self, input_: Any, **call: Any) -> Any:
        """The op's, after noting whose quantizers ``call`` holds."""
        self.watch.step = self.indices
        for index, own in zip(self.indices, call["state"] if self.fused else (call["state"],), strict=True):
            for role, bound in own.items():
                self.watch.know(bound, index, role)
        self.watch.know(call.get("next_op_input_quantizer"), self.indices[-1] + 1, "input")
        return self.op.resolve_fwd_args(input_, **call)

    def resolve_bwd_args(self, contexts: Any, grad_output: Any) -> Any:
        """The op's, after noting whose quantizers ``contexts`` hold."""
        self.watch.step = self.indices
        for index, context in zip(self.indices, contexts if self.fused else (contexts,), strict=True):
            for role, bound in context.quantizers.items():
                self.watch.know(bound, index, role)
            self.watch.know(context.prev_op_grad_output_quantizer, index - 1, "grad_output")
        return self.op.resolve_bwd_args(contexts, grad_output)


def _watched(plan: Plan, backend: str, watch: _Watch) -> Plan:
    """The plan on another backend, its ops watched. It is in no cache."""
    forward = []
    for step in plan.forward:
        static = dict(step.static_kwargs)
        if "backend" in static:
            static["backend"] = backend
        op: Any = _Watched(step, watch)
        forward.append(dataclasses.replace(step, op=op, static_kwargs=static))
    back = [dataclasses.replace(step, op=_Watched(step, watch)) for step in plan.backward]  # type: ignore[arg-type]
    return dataclasses.replace(plan, backend=backend, forward=tuple(forward), backward=tuple(back))


def _measure(
    x: torch.Tensor, copy: Copy, quantizer: Quantizer, columnwise: bool, scale: torch.Tensor | None
) -> dict[str, torch.Tensor]:
    """The measures of one copy; sums are in float64.

    Args:
        x: what was cast.
        copy: the copy.
        quantizer: the quantizer of that copy.
        columnwise: which copy it is.
        scale: the scale that the cast was given, or None.
    """
    source = as_matrix(x).t() if columnwise else as_matrix(x)
    size = source.shape[1]
    values = _decode(copy, quantizer, columnwise)
    factor = _decode(copy._replace(data=_ones(copy.data, quantizer)), quantizer, columnwise)  # out of low precision
    if columnwise and quantizer.rotates:
        held = hadamard(torch.constant_pad_nd(source, [0, values.shape[1] - size])).double()
        restored = hadamard_inverse(values)[:, :size].double()
        values, factor = values.double(), factor.double()
    else:  # what a format appends is no part of the tensor
        values, factor = values[:, :size].double(), factor[:, :size].double()
        held, restored = source.double(), values
    exact = source.double()
    signal, noise = exact.square().sum(), (exact - restored).square().sum()
    nonzero = held != 0
    low, high = _extremes(factor) if scale is None else (scale, scale)
    measures = {
        "amax": amax_of(x),
        "scale_min": low,
        "scale_max": high,
        "saturated": _share((held.abs() > factor * (quantizer.limit * (1 + _ROUNDING))) & (factor > 0), held.numel()),
        "underflow": _share(nonzero & (values == 0), nonzero.sum()),
        "snr_db": torch.where(noise == 0, torch.inf, 10 * torch.log10(signal / noise)),
    }
    return {name: value.to(torch.float32, copy=True).reshape(()) for name, value in measures.items()}


def _decode(copy: Copy, quantizer: Quantizer, columnwise: bool) -> torch.Tensor:
    """Float32 values in the layout of the copy, all factors included."""
    values, factor = quantizer.decode(copy, columnwise)
    return values if factor is None else values * factor


def _ones(data: torch.Tensor, quantizer: Quantizer) -> torch.Tensor:
    """Elements like ``data`` that all hold 1: decoding them gives the factors of a copy, whatever its scales are."""
    if quantizer.packing == 2:
        return torch.full_like(data, _TWO_FP4_ONES)
    return torch.ones(data.shape, device=data.device).to(data.dtype)


def _extremes(factor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Smallest and largest ``1 / factor``, without the factors that are 0."""
    used = factor[factor != 0]
    if used.numel() == 0:
        nan = factor.new_full((), torch.nan)
        return nan, nan
    low, high = torch.aminmax(used.reciprocal().clamp(max=FLOAT32_MAX))
    return low, high


def _share(marked: torch.Tensor, total: Any) -> torch.Tensor:
    """The share of the marked elements; 0 of none."""
    return marked.sum().double() / (total.clamp(min=1) if isinstance(total, torch.Tensor) else max(total, 1))
