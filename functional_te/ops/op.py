"""The operation contract: what an op declares, and the records that pass between ops and the pipeline.

An op is a frozen value plus static functions. The *traced part* (``resolve_fwd_args``, ``setup_context``,
``resolve_bwd_args``) may look at parameters, state and saved context; it builds argument bundles and launches
nothing. The *implementation* (``forward_impl``, ``backward_impl``) reads nothing but its bundle and mutates nothing.
The same implementation runs in eager mode and as the body of the op's custom op, so a bundle's fields are the
schema of that custom op.

Rules an implementation keeps, because a custom op must: it returns fresh tensors only (never an input, a view of
one, or one tensor twice), and whether an output is None or quantized depends on the static fields of the bundle and
on which of its tensors are None or quantized, never on data.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import torch

from functional_te import pytree
from functional_te._value import Value
from functional_te.quantization.tensor import BoundQuantizer
from functional_te.tensor_spec import TensorSpec

__all__ = ["Amaxes", "BackwardContext", "BwdResult", "FusedOp", "FwdResult", "Op", "OpRequiresGrad"]

FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)

# keyword-only parameters of resolve_fwd_args that the pipeline provides; every other one is a forward kwarg
_PROVIDED = frozenset(
    {
        "params",
        "state",
        "requires_grad",
        "prev_op_grad_output_quantizer",
        "next_op_input_quantizer",
        "extra_inputs",
        "kwargs",
        "backend",
        "backward_override",
        "compute_dtype",
    }
)


@pytree.node
class Amaxes:
    """Observed amaxes by role, as a tree whose structure holds the roles.

    Attributes:
        roles: names, static.
        values: float32 ``[1]`` each.
    """

    roles: tuple[str, ...] = pytree.static(default=())
    values: tuple[torch.Tensor, ...] = ()

    def items(self) -> Any:
        """Pairs of role and amax."""
        return zip(self.roles, self.values, strict=True)


class FwdResult(NamedTuple):
    """What a forward returns. A plain ``(output, aux)`` means the same with the other fields empty.

    Attributes:
        output: the main output; None means "the main input, unchanged", which an op with :attr:`Op.passes_input` may
            give.
        aux: fresh tensors that the backward needs, any pytree.
        extra_outputs: one per extra-output slot (for a fused op: one tuple per covered op).
        amaxes: observed amaxes by role; ``"output"`` is what the next op's input quantizer observed.
    """

    output: Any
    aux: Any = ()
    extra_outputs: tuple[Any, ...] = ()
    amaxes: Amaxes | None = None


class BwdResult(NamedTuple):
    """What a backward returns. A plain ``(grad_input, *grad_params)`` means the same with the other fields empty.

    Attributes:
        grad_input: gradient of the main input; None means "the incoming gradient, unchanged".
        grad_params: one per parameter, in the order of ``param_names`` (for a fused op: one tuple per covered op).
        grad_extra_inputs: one per extra-input slot (for a fused op: one tuple per covered op).
        amaxes: observed amaxes by role; ``"grad_input"`` is what the previous op's gradient quantizer observed.
    """

    grad_input: Any
    grad_params: tuple[Any, ...] = ()
    grad_extra_inputs: tuple[Any, ...] = ()
    amaxes: Amaxes | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class OpRequiresGrad(Value):
    """What the backward of one op has to produce.

    Attributes:
        any: whether the op takes part in the backward at all.
        input: whether the gradient of its main input is needed.
        params: one flag per parameter.
        extra_inputs: one flag per extra input.
    """

    any: bool
    input: bool
    params: tuple[bool, ...] = ()
    extra_inputs: tuple[bool, ...] = ()


class BackwardContext:
    """What an op's backward can read: nothing made in the forward is written to.

    Attributes:
        saved: the pytree that ``setup_context`` returned.
        requires_grad: an :class:`OpRequiresGrad`.
        quantizers: the op's own gradient quantizers, bound, by role.
        prev_op_grad_output_quantizer: what to cast the input gradient with, bound, or None.
        grad_extra_outputs: one gradient or None per extra-output slot; None counts as zeros.
        backend: name of the kernel backend.
        compute_dtype: the dtype that autocast asks for, or None.
        grad_dtypes: the dtype that the gradient of each parameter is wanted in, None for the op's own choice; empty if
            no dtype is asked for.
    """

    __slots__ = (
        "backend",
        "compute_dtype",
        "grad_dtypes",
        "grad_extra_outputs",
        "prev_op_grad_output_quantizer",
        "quantizers",
        "requires_grad",
        "saved",
    )

    def __init__(
        self,
        saved: Any,
        requires_grad: OpRequiresGrad,
        quantizers: dict[str, BoundQuantizer],
        prev_op_grad_output_quantizer: BoundQuantizer | None,
        grad_extra_outputs: tuple[torch.Tensor | None, ...],
        backend: str,
        compute_dtype: torch.dtype | None,
        grad_dtypes: tuple[torch.dtype | None, ...] = (),
    ) -> None:
        self.grad_dtypes = grad_dtypes
        self.saved = saved
        self.requires_grad = requires_grad
        self.quantizers = quantizers
        self.prev_op_grad_output_quantizer = prev_op_grad_output_quantizer
        self.grad_extra_outputs = grad_extra_outputs
        self.backend = backend
        self.compute_dtype = compute_dtype


class _Step(Value):
    """What basic and fused ops have in common."""

    # the bundles; their fields are the schemas of the custom ops. None: the op has no custom op.
    fwd_args_type: ClassVar[type[Any] | None] = None
    bwd_args_type: ClassVar[type[Any] | None] = None
    # filled in by the bridge when it registers the class
    compile_ops: ClassVar[tuple[Any, Any] | None] = None
    # names of the keyword-only forward kwargs, and which provided keywords the signature takes
    fwd_kwarg_names: ClassVar[frozenset[str]] = frozenset()
    provided_names: ClassVar[frozenset[str]] = frozenset()
    # an inline direction returns its input or a view of it, so it stays outside custom ops by design
    inline_forward: ClassVar[bool] = False
    inline_backward: ClassVar[bool] = False
    quantizes_output: ClassVar[bool] = False
    quantizes_grad_input: ClassVar[bool] = False
    # whether ``setup_context`` takes the extra outputs as a third argument, to save what is returned already
    saves_extra_outputs: ClassVar[bool] = False
    # what a launch costs, for the op graph: functions of the bundle and the result of the fake, see ops/work.py. None:
    # one pass over both, with an unknown number of operations; of a fused op, what the covered ops do.
    forward_work: ClassVar[Any] = None
    backward_work: ClassVar[Any] = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.compile_ops = None
        resolve = getattr(cls, "resolve_fwd_args", None)
        if resolve is None:
            return
        keywords = {
            name: parameter
            for name, parameter in inspect.signature(resolve).parameters.items()
            if parameter.kind is inspect.Parameter.KEYWORD_ONLY
        }
        for name in keywords.keys() - _PROVIDED:
            if keywords[name].default is inspect.Parameter.empty:
                raise TypeError(f"{cls.__name__}.resolve_fwd_args: forward kwarg {name!r} needs a default.")
        cls.fwd_kwarg_names = frozenset(keywords.keys() - _PROVIDED)
        cls.provided_names = frozenset(keywords.keys() & _PROVIDED)

    @classmethod
    def compile_unsupported_reason(cls) -> str | None:
        """None, or why a compiled graph traces the eager implementation instead of a custom op.

        Only the directions that the class implements and that are not inline need a bundle and a fake.
        """
        for direction, inline, bundle in (
            ("forward", cls.inline_forward, cls.fwd_args_type),
            ("backward", cls.inline_backward, cls.bwd_args_type),
        ):
            if inline or not hasattr(cls, f"{direction}_impl"):
                continue
            if bundle is None:
                return f"{cls.__name__} declares no {direction} argument bundle"
            if not hasattr(cls, f"{direction}_fake"):
                return f"{cls.__name__} has no {direction}_fake"
        return None

    @classmethod
    def custom_op_name(cls, direction: str) -> str | None:
        """Name of the custom op of one direction, without its namespace, or None if there is none.

        A class that is registered under the name of another (a notebook cell that ran twice) has a numbered one.

        Args:
            direction: ``"forward"`` or ``"backward"``.
        """
        if cls.__dict__.get("compile_ops") is not None:
            registered = cls.compile_ops[direction == "backward"]  # type: ignore[index]
            return None if registered is None else registered.name.rpartition(":")[2]
        inline = cls.inline_forward if direction == "forward" else cls.inline_backward
        if inline or not hasattr(cls, f"{direction}_impl") or cls.compile_unsupported_reason() is not None:
            return None
        return f"{cls.__name__.lower()}_{direction}"

    @staticmethod
    def setup_context(args: Any, aux: Any) -> Any:
        """The pytree to keep for the backward. The default keeps ``aux``; inputs are kept from ``args`` here."""
        del args
        return aux


@dataclasses.dataclass(frozen=True, eq=False)
class Op(_Step):
    """Base of basic ops. Subclasses are frozen dataclasses whose fields are the op's static configuration.

    Attributes:
        name: a name for recipes and messages; not part of the math.
    """

    name: str = dataclasses.field(default="", kw_only=True)

    param_names: ClassVar[tuple[str, ...]] = ()
    forward_quantizers: ClassVar[tuple[str, ...]] = ()
    backward_quantizers: ClassVar[tuple[str, ...]] = ()
    num_extra_inputs: ClassVar[int] = 0
    num_extra_outputs: ClassVar[int] = 0
    # names of the fields that hold the channel of each slot
    extra_input_fields: ClassVar[tuple[str, ...]] = ()
    extra_output_fields: ClassVar[tuple[str, ...]] = ()
    # extra-input slots whose tensor may live on another device than the main input
    free_device_slots: ClassVar[tuple[int, ...]] = ()
    # False: nothing is known of the op's results before it ran, so the check of a chain's arguments ends with it
    describes_output: ClassVar[bool] = True
    accepts_quantized_input: ClassVar[bool] = False
    accepts_quantized_grad: ClassVar[bool] = False
    # whether the op gives its main input unchanged (output None) where it has no forward quantizer
    passes_input: ClassVar[bool] = False
    # whether neighbours cast for this op with its quantizers, instead of handing over high precision
    shares_quantizers: ClassVar[bool] = True

    @property
    def extra_input_channels(self) -> tuple[str | None, ...]:
        """Channel of every extra input; None is an input of the chain."""
        if not self.extra_input_fields:
            return (None,) * self.num_extra_inputs
        return tuple(getattr(self, name) for name in self.extra_input_fields[: self.num_extra_inputs])

    @property
    def extra_output_channels(self) -> tuple[str | None, ...]:
        """Channel of every extra output, or None."""
        if not self.extra_output_fields:
            return (None,) * self.num_extra_outputs
        return tuple(getattr(self, name) for name in self.extra_output_fields)

    def with_extra_input_channel(self, slot: int, channel: str | None) -> Op:
        """The same op taking extra input ``slot`` from ``channel``, or from the caller if it is None."""
        changes: dict[str, Any] = {self.extra_input_fields[slot]: channel}
        return dataclasses.replace(self, **changes)

    def with_extra_output_channel(self, slot: int, channel: str | None, to_caller: bool) -> Op:
        """The same op sending extra output ``slot`` into ``channel``, to the caller too if ``to_caller``."""
        changes: dict[str, Any] = {self.extra_output_fields[slot]: channel, "output_to_caller": to_caller}
        return dataclasses.replace(self, **changes)

    @property
    def extra_outputs_to_caller(self) -> tuple[bool, ...]:
        """Whether each extra output is also an output of the chain."""
        return (True,) * self.num_extra_outputs

    def copies(self, role: str, requires_grad: OpRequiresGrad) -> tuple[bool, bool]:
        """Which copies of a quantized tensor the op reads: (rowwise, columnwise).

        Args:
            role: one of ``forward_quantizers`` or ``backward_quantizers``.
            requires_grad: what the backward has to produce.
        """
        del role, requires_grad
        return True, False

    def quantized_sizes(self, role: str) -> dict[str, int]:
        """The sizes of a quantized tensor that are features, by the name of the constructor argument."""
        del role
        return {}

    def param_specs(self, dtype: torch.dtype, device: torch.device | str) -> dict[str, TensorSpec]:
        """Shape and dtype of every parameter, in the order of ``param_names``."""
        del dtype, device
        return {}

    def init_params(
        self, generator: torch.Generator, dtype: torch.dtype, device: torch.device | str
    ) -> dict[str, torch.Tensor]:
        """Fresh parameters."""
        del generator, dtype, device
        return {}

    def check(self, input_: TensorSpec, params: Any, extra_inputs: tuple[Any, ...], where: str) -> None:
        """Raise a ``ValueError`` or ``TypeError`` unless the arguments fit the op. Runs before any kernel."""

    def check_kwargs(self, kwargs: Mapping[str, Any], where: str) -> None:
        """Raise likewise unless the forward kwargs of a call fit. Runs for an op that takes some, also if none came."""


@dataclasses.dataclass(frozen=True, eq=False)
class FusedOp(_Step):
    """Base of fused ops: the same contract over tuples, with one entry per covered basic op.

    A role of an observed amax may name the covered op by its position: ``"2:input"``.

    ``resolve_fwd_args`` gets ``params``, ``state``, ``requires_grad`` and ``extra_inputs`` as tuples. So it gets the
    forward kwargs of the covered ops if it declares a keyword ``kwargs``; without it, a call that has some is refused.
    ``setup_context`` returns one saved pytree per covered op. ``resolve_bwd_args`` gets a tuple of contexts.
    A forward-only fusion must save exactly what the unfused backwards read, a backward-only one must read what the
    unfused forwards save.

    Attributes:
        ops: the covered basic ops in chain order.
    """

    ops: tuple[Op, ...]
