"""Modules over ops: parameters, channels and quantizer state."""

from __future__ import annotations

import dataclasses
import itertools
import operator
import weakref
from collections.abc import Iterable
from typing import Any, ClassVar

import torch

from bridge import compat
from bridge.call import Takeover
from bridge.closing import register_holder
from bridge.model_init import stored, stored_weight
from bridge.ops import extra_state
from bridge.ops.custom import Channels, HookedOp, channels_of, hooked_op
from bridge.ops.group import Group, StateRoles, modules_by_serial, state_key
from bridge.ops.hooks import BasicHooks, FusedHooks
from bridge.ops.quantizer_view import QuantizerView
from bridge.quantized_weight import QuantizedWeight
from bridge.recipe_context import active_recipe
from bridge.weight_cache import WeightCast
from functional_te._errors import type_error, value_error
from functional_te.fuser.plan import quantizer_of, state_roles_of
from functional_te.ops import Op
from functional_te.ops.op import FLOAT_DTYPES
from functional_te.quantization.quantizers import Quantizer
from functional_te.quantization.state import (
    DelayedScalingState,
    StochasticRoundingState,
    init_quantizer_state,
    state_type,
)
from functional_te.recipes import Recipe

__all__ = ["BasicOperation", "FusedOperation", "FusibleOperation", "resolve_device"]

_serials = itertools.count(1)
# what BasicOperation.pending() has remembered at first: roles, tensors and its result
_NOTHING_PENDING: tuple[Any, tuple[Any, ...], list[Any]] = (None, (), [])


def resolve_device(device: Any) -> torch.device:
    """None means the current CUDA device if there is one, as in te.ops, else torch's default device."""
    if device is None:
        default = torch.get_default_device()
        return torch.device("cuda") if torch.cuda.is_available() and default.type == "cpu" else default
    return torch.device(device)


class FusibleOperation(torch.nn.Module):
    """Base of what a :class:`~bridge.ops.Sequential` may compose into one chain."""

    def basic_operations(self) -> list[BasicOperation]:
        """The basic ops this one stands for, in order."""
        raise NotImplementedError

    def forward(self, input: torch.Tensor, *extra_inputs: torch.Tensor, **kwargs: Any) -> Any:
        """Run the op alone. Returns the output, or a tuple of it and the extra outputs."""
        group = self.__dict__["_alone"]
        if group is None:  # broken channels: says which
            group = Group(self.basic_operations())
        given = {0: kwargs} if kwargs else None
        outputs = group(input, extra_inputs, given)
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def regroup(self) -> None:
        """Make the chain of the op alone again. Never while a graph is traced, where no value can be made."""
        try:
            self.__dict__["_alone"] = Group(self.basic_operations())
        except ValueError:  # an open channel; a call raises
            self.__dict__["_alone"] = None

    def __getstate__(self) -> dict[str, Any]:
        """Everything but what is rebuilt when needed."""
        state = dict(self.__dict__)
        state.pop("_alone", None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.regroup()


class BasicOperation(BasicHooks, FusibleOperation):
    """A module over one op, or over hooks in the style of te.ops (see :class:`~bridge.ops.hooks.BasicHooks`).

    A subclass with hooks calls ``super().__init__()`` and registers its parameters then. If it also gives a functional
    op with bundles, eager code runs the hooks and compiled code the op's custom op.

    Attributes:
        op: the op's value.
        provides_kwargs: whether :meth:`forward_kwargs` gives anything.

    Quantizer state of a recipe that has some is kept in non-persistent buffers ``<role>_scale`` (or ``<role>_key``)
    and ``<role>_amax_history`` and travels in ``state_dict`` as extra state.
    """

    provides_kwargs: ClassVar[bool] = False
    # whether gradients of weights are added to ``weight.main_grad``
    accumulate_into_main_grad: bool = False
    # gives an object with a context manager ``fork()``, inside of which parameters are drawn
    _rng_state_tracker_function: Any = None
    # whether :meth:`takeover` may give anything
    may_take_over: ClassVar[bool] = False

    def __init__(self, op: Op | None = None, *, device: Any = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self._owners: list[Any] = []
        self._serial = f"m{next(_serials)}"
        if op is None:
            op = hooked_op(self, self._serial, Channels())
        else:
            self.num_extra_inputs = op.num_extra_inputs
            self.num_extra_outputs = op.num_extra_outputs
        self.op = op
        self._captured = False
        # recipe under which the op ran last; a recomputed forward outside of any autocast runs it again
        self._last_recipe: Recipe | None = None
        self._state_roles: StateRoles = ()
        self._pending = _NOTHING_PENDING
        self._state_key = ""
        self._loaded = False
        # of the keys of stochastic rounding; drawn with the parameters
        self._seed, self._keys_made = 0, 0
        # forward scales and keys as they were before a step was closed, until the next forward: for a recomputed one
        self.scales_before_close: dict[str, torch.Tensor] = {}
        # whether an eager forward that is no recomputation observed something that is not closed yet
        self.observed = False
        # casts of weights kept between microbatches, and the quantizers of weights that are stored as casts
        self.weight_casts: dict[str, WeightCast] = {}
        self.wants_casts = False
        self.stored_quantizers: dict[str, Quantizer] = {}
        if op.param_names:
            self._init_parameters(resolve_device(device), dtype)
        self._register()
        self.regroup()

    # hooks

    def register_parameter(self, name: str, param: torch.nn.Parameter | None) -> None:
        """Register a parameter; those of an op with hooks are the parameters of the op."""
        super().register_parameter(name, param)
        op = self.__dict__.get("op")
        if isinstance(op, HookedOp) and op.own_params != tuple(own for own, _ in self.named_parameters()):
            self._set_op(hooked_op(self, self._serial, channels_of(op)))

    def refresh_op(self) -> None:
        """Bring the op up to date with what a module with hooks has registered or set since it was made."""
        if isinstance(self.op, HookedOp):
            self.op = hooked_op(self, self._serial, channels_of(self.op))
        self._register()

    @property
    def eager_op(self) -> Op:
        """What runs in eager mode: the hooks, for a module that has both."""
        if isinstance(self.op, HookedOp) or not self.has_hooks():
            return self.op
        return hooked_op(self, self._serial, channels_of(self.op), self.op)

    @property
    def compiled_op(self) -> Op:
        """What runs in compiled code: the functional op, unless a subclass has changed a built-in op by hooks."""
        built_in = any(
            issubclass(kind, BasicOperation)
            and kind is not BasicOperation
            and kind.__module__.startswith("bridge.ops.")
            for kind in type(self).__mro__
        )
        return self.eager_op if built_in else self.op

    def pre_first_fuser_forward(self) -> None:
        """Give parameters without storage theirs."""
        if any(own.device.type == "meta" for own in self.parameters(recurse=False)):
            self.reset_parameters()

    def _quantizer_view(self, role: str) -> QuantizerView | None:
        recipe = active_recipe() or self._last_recipe
        quantizer = None if recipe is None else quantizer_of(self.op, role, recipe)
        if recipe is None or quantizer is None:
            return None
        if not quantizer.stateful:
            return QuantizerView(quantizer)
        self.ensure_state(state_roles_of(self.op, recipe))
        return QuantizerView(quantizer, {own: state for own, _, state in self.named_states()}[role])

    def _register(self) -> None:
        if self.op.forward_quantizers or self.op.backward_quantizers:
            modules_by_serial[self._serial] = self
            register_holder(self)

    def _init_parameters(self, device: torch.device, dtype: torch.dtype | None) -> None:
        dtype = torch.get_default_dtype() if dtype is None else dtype
        if dtype not in FLOAT_DTYPES:
            raise value_error(type(self).__name__, "dtype", "float32, float16 or bfloat16", dtype)
        self._seed = self._draw_seed(device)
        generator = torch.Generator().manual_seed(self._seed)
        for name, value in self.op.init_params(generator, dtype, device).items():
            setattr(self, name, stored_weight(self, name, value))

    def _draw_seed(self, device: torch.device) -> int:
        """The seed of fresh parameters on ``device``: from torch's default generator, inside the tracker's fork."""
        if self._rng_state_tracker_function is None:
            return int(torch.randint(2**31, (), device="cpu").item())
        with self._rng_state_tracker_function().fork():
            # a tracker of CUDA's random state does not change the CPU's
            return int(torch.randint(2**31, (), device=device if device.type == "cuda" else "cpu").item())

    def reset_parameters(self) -> None:
        """Draw fresh parameters, on the current CUDA device (or CPU) if they had no storage."""
        for own in self.parameters(recurse=False):
            if own.device.type == "meta":
                self._init_parameters(resolve_device(None), own.dtype)
                return
        with torch.no_grad():
            for name, own in self.named_parameters(recurse=False):
                generator = torch.Generator().manual_seed(self._draw_seed(own.device))
                own.copy_(self.op.init_params(generator, own.dtype, own.device)[name])

    def basic_operations(self) -> list[BasicOperation]:
        """This op."""
        return [self]

    @property
    def evaluation_op(self) -> Op:
        """What runs in the place of the op while the module is in evaluation mode."""
        return self.op

    def takeover(self, kwargs: dict[str, Any]) -> tuple[Takeover | None, dict[str, Any]]:
        """What the module runs in the place of its op's implementation in this call, and the kwargs left for the op."""
        return None, kwargs

    def forward_kwargs(self, x: Any, given: dict[str, Any]) -> dict[str, Any]:
        """Forward kwargs that the module itself gives to a call; those of the caller come first.

        Args:
            x: main input of the chain that the op runs in.
            given: those of the caller.
        """
        del x, given
        return {}

    # channels

    def set_extra_input_channel(self, index: int, channel: str | None) -> BasicOperation:
        """Take extra input ``index`` from a channel; None takes it from the caller. Returns the op."""
        self._check_channel("input", index, channel, self.num_extra_inputs)
        self._set_op(self.op.with_extra_input_channel(index, channel))
        return self

    def set_extra_output_channel(
        self, index: int, channel: str | None, *, output_to_caller: bool = True
    ) -> BasicOperation:
        """Send extra output ``index`` into a channel; None returns it to the caller only. Returns the op."""
        self._check_channel("output", index, channel, self.num_extra_outputs)
        if not isinstance(output_to_caller, bool):
            raise type_error(
                type(self).__name__, "output_to_caller", "output_to_caller must be a bool", output_to_caller
            )
        self._set_op(self.op.with_extra_output_channel(index, channel, output_to_caller or channel is None))
        return self

    def _check_channel(self, kind: str, index: int, channel: Any, count: int) -> None:
        where = type(self).__name__
        if self._is_captured():
            raise RuntimeError(f"{where}: a Sequential or a call already captured its channel routing.")
        if not isinstance(index, int) or not 0 <= index < count:
            raise IndexError(f"{where}: extra {kind} {index!r} is out of range; the op has {count}.")
        if channel is not None and not (isinstance(channel, str) and channel):
            raise value_error(where, "channel", "None or a non-empty string", repr(channel))

    @property
    def _extra_tensor_channels_locked(self) -> bool:
        """te.ops' name for whether channels can no longer be set."""
        return self._is_captured()

    def _is_captured(self) -> bool:
        groups = [self.__dict__.get("_alone")]
        for owner in self._owners:
            container = owner()
            if container is not None:
                groups.extend(container.__dict__.get("_module_groups", (container.__dict__.get("_alone"),)))
        # `_captured` outlives the groups
        self._captured = self._captured or any(
            isinstance(group, Group) and group.ran and any(own is self for own in group.modules) for group in groups
        )
        return self._captured

    def _set_op(self, op: Op) -> None:
        self.op = op
        self.regroup()
        for owner in self._owners:
            container = owner()
            if container is not None:
                container.regroup()

    # quantizer state

    def _state_device(self) -> torch.device:
        for own in self.parameters(recurse=False):
            return own.device
        return resolve_device(None)

    def has_state(self, roles: StateRoles) -> bool:
        """Whether the state is the one that ``roles`` need."""
        return len(roles) == len(self._state_roles) and all(
            new[1] is old[1] for new, old in zip(roles, self._state_roles, strict=True)
        )

    def ensure_state(self, roles: StateRoles) -> None:
        """Make the state that ``roles`` need.

        What the quantizer of a role remembers stays if the new one remembers the same and has its element type; a
        history of another length is cut, or padded with zeros. Else the role starts afresh, and so do all roles after
        a recipe without their state.
        """
        if self.has_state(roles):
            return
        known, device = dict(self._state_roles), self._state_device()
        # ordinary tensors even if the first call is an evaluation, and no part of autograd's graph
        with compat.real_tensors(), torch.inference_mode(False), torch.no_grad():
            for role, quantizer in roles:
                place = (*self.op.forward_quantizers, *self.op.backward_quantizers).index(role)
                # a key that is made again, after another recipe, is another one
                path = (place, self._keys_made) if self._keys_made else (place,)
                self._keys_made += quantizer.stochastic
                fresh = init_quantizer_state(quantizer, device, seed=self._seed, path=path)
                old = known.get(role)
                if old is not None and old.dtype is quantizer.dtype and state_type(old) is state_type(quantizer):
                    own = self._state_of(role, old)
                    kept = min(len(own.amax_history), len(fresh.amax_history))
                    fresh.amax_history[:kept] = own.amax_history[:kept]
                    fresh.read.copy_(own.read)
                self._register_state(role, fresh)
        self._set_roles(roles)

    def _set_roles(self, roles: StateRoles) -> None:
        self._state_roles = roles
        self._state_key = state_key(roles)

    def _register_state(self, role: str, state: Any) -> None:
        for field in dataclasses.fields(state):
            self.register_buffer(f"{role}_{field.name}", getattr(state, field.name), persistent=False)

    def _restore_state(self, role: str, state: Any) -> None:
        """Into the tensors that there are, if they are such: compiled and captured graphs may write to them."""
        for field in dataclasses.fields(state):
            name, value = f"{role}_{field.name}", getattr(state, field.name)
            known = self._buffers.get(name)
            kinds = [(own.shape, own.dtype, own.device) for own in (known, value) if own is not None]
            if len(kinds) == 2 and kinds[0] == kinds[1]:
                with torch.no_grad():
                    known.copy_(value)  # type: ignore[union-attr]
            else:
                self.register_buffer(name, value, persistent=False)

    def _state_of(self, role: str, quantizer: Quantizer) -> Any:
        if quantizer.stochastic:
            return StochasticRoundingState(
                key=self._buffers[f"{role}_key"],  # type: ignore[arg-type]
                amax_history=self._buffers[f"{role}_amax_history"],  # type: ignore[arg-type]
            )
        return DelayedScalingState(
            scale=self._buffers[f"{role}_scale"],  # type: ignore[arg-type]
            amax_history=self._buffers[f"{role}_amax_history"],  # type: ignore[arg-type]
        )

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Move or cast the module; quantizer state moves with it and stays float32."""
        kept = self.named_states()
        super()._apply(fn, recurse)
        self.weight_casts = {}
        for name, quantizer in self.stored_quantizers.items():
            parameter = self._parameters[name]
            if parameter is not None and not isinstance(parameter, QuantizedWeight):  # to_empty() made it anew
                setattr(self, name, torch.nn.Parameter(stored(parameter.detach(), quantizer), parameter.requires_grad))
        for role, _, old in kept:
            for field in dataclasses.fields(old):
                name, tensor = f"{role}_{field.name}", getattr(old, field.name)
                moved = getattr(self, name)
                if moved.dtype is not tensor.dtype:
                    self._buffers[name] = tensor.to(moved.device)
        return self

    def states(self, roles: StateRoles) -> dict[str, Any]:
        """The state by role, over the buffers as they are now."""
        return {role: self._state_of(role, quantizer) for role, quantizer in roles}

    def prepare_state(self, recipe: Recipe | None) -> None:
        """Give an op that has no state yet the state that ``recipe`` needs, while no graph is being traced."""
        if recipe is None or (self._state_roles and not self._loaded) or self._state_device().type == "meta":
            return
        try:
            roles = state_roles_of(self.op, recipe)
        except (ValueError, TypeError):  # the recipe does not fit; a forward, if there is one, says why
            return
        shapes = [
            [(role, state_type(q), getattr(q, "amax_history_len", 1)) for role, q in pairs]
            for pairs in (roles, self._state_roles)
        ]
        if not self._state_roles:
            self.ensure_state(roles)
        elif roles and shapes[0] == shapes[1]:
            self._set_roles(roles)  # what was loaded is closed by the recipe's own functions
        self._loaded = False

    def named_states(self) -> list[tuple[str, Quantizer, Any]]:
        """Role, quantizer and state of everything that has state."""
        states = self.states(self._state_roles)
        return [(role, quantizer, states[role]) for role, quantizer in self._state_roles]

    def pending(self) -> list[tuple[str, Quantizer, Any]]:
        """:meth:`named_states`, remembered as long as the tensors stay the same: then the same list."""
        tensors = tuple(self._buffers.values())
        roles, known, found = self._pending
        if roles is not self._state_roles or len(known) != len(tensors) or not all(map(operator.is_, known, tensors)):
            found = self.named_states()
            vars(self)["_pending"] = self._state_roles, tensors, found
        return found

    def get_extra_state(self) -> torch.Tensor:
        """Quantizer state as bytes: what ``torch.save`` writes for a dict of tensors; empty if there is none."""
        return extra_state.encode(self.named_states())

    def set_extra_state(self, state: torch.Tensor | None) -> None:
        """Restore quantizer state; loads tensors only, never code."""
        if state is None or state.numel() == 0:
            return
        loaded = extra_state.decode(self.op, state, self._state_device())
        if not loaded:  # what te.ops keeps of a recipe without state
            return
        for role, _, own in loaded:
            self._restore_state(role, own)
        self._set_roles(tuple((role, quantizer) for role, quantizer, _ in loaded))
        self._loaded = True

    def __getstate__(self) -> dict[str, Any]:
        """Without the containers, which register themselves again."""
        state = super().__getstate__()
        if isinstance(self.op, HookedOp):  # names this very module
            state["op"] = tuple(channels_of(self.op))
        return {
            **state,
            "_owners": [],
            "_captured": self._is_captured(),
            "_pending": _NOTHING_PENDING,
            "weight_casts": {},
            "wants_casts": False,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Register the copy too."""
        # uids are of this process
        state = {**state, "_serial": f"m{next(_serials)}", "_state_key": state_key(state["_state_roles"])}
        if isinstance(state["op"], tuple):
            self.__dict__.update(state)
            state["op"] = hooked_op(self, state["_serial"], Channels(*state["op"]))
        super().__setstate__(state)
        self._register()

    def extra_repr(self) -> str:
        """The op's value."""
        return "" if isinstance(self.op, HookedOp) else repr(self.op)


class FusedOperation(FusedHooks, FusibleOperation):
    """A module over several basic ops, held in ``basic_ops``. Called, it runs them and whatever fusions match.

    A subclass that overrides ``fuser_forward`` or ``fuser_backward`` is what a registered fusion returns; see
    :mod:`bridge.ops.fusions`.
    """

    def __init__(self, basic_ops: Iterable[BasicOperation]) -> None:
        super().__init__()
        self.basic_ops = torch.nn.ModuleList(basic_ops)
        self.regroup()

    def basic_operations(self) -> list[BasicOperation]:
        """The ops of ``basic_ops``."""
        return list(self.basic_ops)  # type: ignore[arg-type]

    def regroup(self) -> None:
        """Also when a channel of a contained op is set."""
        for module in self.basic_operations():
            if not any(owner() is self for owner in module._owners):
                module._owners.append(weakref.ref(self))
        super().regroup()
