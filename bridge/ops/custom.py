"""Operations written with te.ops' hooks, as ops of a functional chain.

A module whose class overrides ``op_forward`` and ``op_backward``, or the list-shaped ``fuser_forward`` and
``fuser_backward``, runs through an adapter: an op value that holds the module's serial and whose implementations call
the hooks. So such modules and built-in ones are steps of one plan, under one autograd function.

Compiled code traces the hooks into the graph where Dynamo can. An op that also has a functional op with bundles (it
passed one to ``BasicOperation.__init__``) runs that op's custom op there, and its hooks in eager mode.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from bridge.ops.context import HookSaved, OperationContext, reopened, saved_by
from bridge.ops.hook_calls import HookCall, contexts_of, module_of, remember, run_backward, run_forward
from bridge.ops.te_context import native_from_te, te_from_native
from functional_te.ops import BackwardContext, BwdResult, FusedOp, FwdResult, Op, OpRequiresGrad
from functional_te.ops.common import amaxes, dense
from functional_te.quantization.tensor import BoundQuantizer

__all__ = [
    "Channels",
    "HookedFusedOp",
    "HookedOp",
    "channels_of",
    "hooked_fused_op",
    "hooked_op",
]


class _AnyName(frozenset[str]):
    """Hooks check the names of forward kwargs themselves."""

    def __contains__(self, name: object) -> bool:
        return True


_ANY_NAME = _AnyName()


def _basic_forward(call: HookCall) -> FwdResult:
    output, extras, contexts, observed = run_forward(call)
    return FwdResult(output, contexts[0], extras[0], amaxes(output=observed))


def _basic_setup(args: HookCall, aux: OperationContext) -> HookSaved:
    del args
    return saved_by(aux)


def _basic_backward(call: HookCall) -> BwdResult:
    grad_input, params, extras = run_backward(call, contexts_of(call))
    return BwdResult(grad_input, params[0], extras[0])


@dataclasses.dataclass(frozen=True, eq=False)
class HookedOp(Op):
    """A module's hooks as an op. For every class of modules there is a subclass with its name.

    Attributes:
        serial: names the module.
        own_params: names of its parameters in the order of registration.
        input_channels: channel of every extra input, or None.
        output_channels: channel of every extra output, or None.
        to_caller: whether each extra output is an output of the chain.
        twin: the functional op that compiled code runs, or None.
    """

    serial: str
    own_params: tuple[str, ...] = ()
    input_channels: tuple[str | None, ...] = ()
    output_channels: tuple[str | None, ...] = ()
    to_caller: tuple[bool, ...] = ()
    twin: Op | None = None

    describes_output = False
    quantizes_output = True
    forward_impl = staticmethod(_basic_forward)
    backward_impl = staticmethod(_basic_backward)
    setup_context = staticmethod(_basic_setup)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.fwd_kwarg_names = _ANY_NAME

    @classmethod
    def compile_unsupported_reason(cls) -> str | None:
        """A compiled graph traces the hooks."""
        return (
            f"{cls.__name__} has hooks and no functional op with argument bundles (pass one to "
            "BasicOperation.__init__ if the hooks cannot be traced)"
        )

    @property
    def param_names(self) -> tuple[str, ...]:  # type: ignore[override]
        """Names of the module's parameters."""
        return self.own_params

    @property
    def num_extra_inputs(self) -> int:  # type: ignore[override]
        """How many the module declares."""
        return len(self.input_channels)

    @property
    def num_extra_outputs(self) -> int:  # type: ignore[override]
        """How many the module declares."""
        return len(self.output_channels)

    @property
    def free_device_slots(self) -> tuple[int, ...]:  # type: ignore[override]
        """The hooks judge their extra inputs."""
        return tuple(range(len(self.input_channels)))

    @property
    def forward_quantizers(self) -> tuple[str, ...]:  # type: ignore[override]
        """Those of the functional op."""
        return () if self.twin is None else self.twin.forward_quantizers

    @property
    def backward_quantizers(self) -> tuple[str, ...]:  # type: ignore[override]
        """Those of the functional op."""
        return () if self.twin is None else self.twin.backward_quantizers

    @property
    def shares_quantizers(self) -> bool:  # type: ignore[override]
        """Hooks get high precision."""
        return False

    @property
    def extra_input_channels(self) -> tuple[str | None, ...]:
        """Channel of every extra input."""
        return self.input_channels

    @property
    def extra_output_channels(self) -> tuple[str | None, ...]:
        """Channel of every extra output."""
        return self.output_channels

    @property
    def extra_outputs_to_caller(self) -> tuple[bool, ...]:
        """Whether the chain returns each extra output."""
        return self.to_caller

    @property
    def extra_output_counts(self) -> tuple[int, ...]:
        """For the checks of a hook's results."""
        return (len(self.output_channels),)

    @property
    def extra_input_counts(self) -> tuple[int, ...]:
        """For the checks of a hook's results."""
        return (len(self.input_channels),)

    @property
    def param_counts(self) -> tuple[int, ...]:
        """For the checks of a hook's results."""
        return (len(self.own_params),)

    @property
    def needed_extra_outputs(self) -> tuple[tuple[str, ...], ...]:
        """An op alone has to give every extra output."""
        return (tuple("is public" if public else "feeds a channel" for public in self.to_caller),)

    def with_extra_input_channel(self, slot: int, channel: str | None) -> Op:
        """The same op taking extra input ``slot`` from ``channel``, or from the caller if it is None."""
        own = tuple(channel if i == slot else known for i, known in enumerate(self.input_channels))
        return dataclasses.replace(self, input_channels=own)

    def with_extra_output_channel(self, slot: int, channel: str | None, to_caller: bool) -> Op:
        """The same op sending extra output ``slot`` into ``channel``, to the caller too if ``to_caller``."""
        own = tuple(channel if i == slot else known for i, known in enumerate(self.output_channels))
        public = tuple(to_caller if i == slot else known for i, known in enumerate(self.to_caller))
        return dataclasses.replace(self, output_channels=own, to_caller=public)

    def copies(self, role: str, requires_grad: OpRequiresGrad) -> tuple[bool, bool]:
        """Those of the functional op."""
        return super().copies(role, requires_grad) if self.twin is None else self.twin.copies(role, requires_grad)

    def quantized_sizes(self, role: str) -> dict[str, int]:
        """Those of the functional op."""
        return super().quantized_sizes(role) if self.twin is None else self.twin.quantized_sizes(role)

    def resolve_fwd_args(
        self,
        input_: Any,
        *,
        params: Any,
        state: Any,
        requires_grad: OpRequiresGrad,
        extra_inputs: tuple[Any, ...] = (),
        next_op_input_quantizer: BoundQuantizer | None = None,
        compute_dtype: torch.dtype | None = None,
        **kwargs: Any,
    ) -> HookCall:
        """The call of the forward hook."""
        del params, state
        return HookCall(
            self,
            input_,
            requires_grad=(requires_grad.any,),
            extra_inputs=(extra_inputs,),
            kwargs=[kwargs],
            next_quantizer=next_op_input_quantizer,
            compute_dtype=compute_dtype,
        )

    def resolve_bwd_args(self, ctx: BackwardContext, grad_output: Any) -> HookCall:
        """The call of the backward hook."""
        return HookCall(self, grad_output, contexts=(ctx,))


def _fused_forward(call: HookCall) -> FwdResult:
    output, extras, contexts, observed = run_forward(call)
    return FwdResult(output, contexts, extras, amaxes(output=observed))


def _fused_setup(args: HookCall, aux: list[OperationContext]) -> tuple[Any, ...]:
    op, module = args.op, module_of(args.op.serial)
    if op.direction == "joint":
        return tuple([saved_by(ctx) for ctx in aux])
    saved: list[Any] = []
    for basic, own, params, ctx in zip(op.ops, module.basic_ops, args.params, aux, strict=True):
        if isinstance(basic, HookedOp):
            saved.append(saved_by(ctx))
        else:
            saved.append(native_from_te(basic, own, params, ctx, args.tensor) if ctx.requires_grad else None)
    return tuple(saved)


def _fused_backward(call: HookCall) -> BwdResult:
    op, module = call.op, module_of(call.op.serial)
    if op.direction == "joint":
        contexts = contexts_of(call)
    else:
        contexts = [
            reopened(own.saved, own.requires_grad.any)
            if isinstance(basic, HookedOp)
            else te_from_native(basic, member, own)
            for basic, member, own in zip(op.ops, module.basic_ops, call.contexts, strict=True)
        ]
    return BwdResult(*run_backward(call, contexts))


@dataclasses.dataclass(frozen=True, eq=False)
class HookedFusedOp(FusedOp):
    """The hooks of a :class:`~bridge.ops.FusedOperation` of the user's as a fused op.

    Attributes:
        serial: names the module.
        direction: ``"forward"``, ``"backward"`` or ``"joint"``.
        needed_extra_outputs: for every covered op and extra output, why the output has to be given, or an empty string.
    """

    serial: str
    direction: str
    needed_extra_outputs: tuple[tuple[str, ...], ...]

    quantizes_output = True
    forward_impl = staticmethod(_fused_forward)
    backward_impl = staticmethod(_fused_backward)
    setup_context = staticmethod(_fused_setup)

    @classmethod
    def compile_unsupported_reason(cls) -> str | None:
        """A compiled graph traces the hooks."""
        return (
            f"{cls.__name__} has hooks and no argument bundles (register a FusionRule with a FusedOp that has them if "
            "the hooks cannot be traced)"
        )

    @property
    def extra_output_counts(self) -> tuple[int, ...]:
        """For the checks of a hook's results."""
        return tuple(op.num_extra_outputs for op in self.ops)

    @property
    def extra_input_counts(self) -> tuple[int, ...]:
        """For the checks of a hook's results."""
        return tuple(op.num_extra_inputs for op in self.ops)

    @property
    def param_counts(self) -> tuple[int, ...]:
        """For the checks of a hook's results."""
        return tuple(len(op.param_names) for op in self.ops)

    def resolve_fwd_args(
        self,
        input_: Any,
        *,
        params: tuple[Any, ...],
        state: tuple[Any, ...],
        requires_grad: tuple[OpRequiresGrad, ...],
        extra_inputs: tuple[tuple[Any, ...], ...] = (),
        next_op_input_quantizer: BoundQuantizer | None = None,
        compute_dtype: torch.dtype | None = None,
        kwargs: tuple[Mapping[str, Any], ...] = (),
    ) -> HookCall:
        """The call of the forward hook."""
        del state
        return HookCall(
            self,
            dense(input_),
            requires_grad=tuple(own.any for own in requires_grad),
            extra_inputs=extra_inputs,
            kwargs=[dict(own) for own in kwargs] or [{} for _ in self.ops],
            next_quantizer=next_op_input_quantizer,
            compute_dtype=compute_dtype,
            params=params,
        )

    def resolve_bwd_args(self, ctxs: tuple[BackwardContext, ...], grad_output: Any) -> HookCall:
        """The call of the backward hook."""
        return HookCall(self, dense(grad_output), contexts=ctxs)


_classes: dict[tuple[type[Any], type[Any]], type[Any]] = {}


def _class_for(base: type[Any], module: Any) -> type[Any]:
    """A subclass of an adapter that is called like the module's class, for messages and plans."""
    key = (base, type(module))
    if key not in _classes:
        _classes[key] = type(type(module).__name__, (base,), {"__doc__": base.__doc__, "__module__": __name__})
    return _classes[key]


class Channels(NamedTuple):
    """The channels of a module with hooks, named as those of an op."""

    extra_input_channels: tuple[str | None, ...] = ()
    extra_output_channels: tuple[str | None, ...] = ()
    extra_outputs_to_caller: tuple[bool, ...] = ()


def channels_of(op: Op) -> Channels:
    """The channels of an op."""
    return Channels(op.extra_input_channels, op.extra_output_channels, op.extra_outputs_to_caller)


def hooked_op(module: Any, serial: str, channels: Channels, twin: Op | None = None) -> HookedOp:
    """The adapter of a basic module.

    Args:
        module: the module.
        serial: its serial.
        channels: its channels, as far as they fit the slots that it declares.
        twin: its functional op, if it has one.
    """
    remember(serial, module)
    inputs, outputs = module.num_extra_inputs, module.num_extra_outputs
    if len(channels.extra_input_channels) != inputs:
        channels = channels._replace(extra_input_channels=(None,) * inputs)
    if len(channels.extra_output_channels) != outputs:
        channels = Channels(channels.extra_input_channels, (None,) * outputs, (True,) * outputs)
    names = tuple(name for name, _ in module.named_parameters()) if twin is None else twin.param_names
    made: HookedOp = _class_for(HookedOp, module)(
        serial=serial,
        own_params=names,
        input_channels=channels.extra_input_channels,
        output_channels=channels.extra_output_channels,
        to_caller=channels.extra_outputs_to_caller,
        twin=twin,
    )
    return made


def hooked_fused_op(
    module: Any, serial: str, ops: tuple[Op, ...], direction: str, needed: tuple[tuple[str, ...], ...]
) -> HookedFusedOp:
    """The adapter of a fused module."""
    remember(serial, module)
    made: HookedFusedOp = _class_for(HookedFusedOp, module)(ops, serial, direction, needed)
    return made
