"""Modules over ops: parameters and quantizer state of one op, and groups that run as one chain."""

from __future__ import annotations

import dataclasses
import io
import itertools
import weakref
from typing import Any

import torch

from bridge.autograd import run
from bridge.compat import in_backward
from bridge.recipe_context import active_recipe, close_in_graph, closes_in_graph, register_holder
from bridge.state import fold_amaxes_
from functional_te._errors import type_error, value_error
from functional_te._value import Table, value_of
from functional_te.chain import Chain
from functional_te.fuser.plan import plan as make_plan
from functional_te.ops import Op
from functional_te.quantization.quantizer import Float8DelayedScalingQuantizer, Quantizer
from functional_te.quantization.state import DelayedScalingState, init_quantizer_state
from functional_te.recipes import Recipe

StateRoles = tuple[tuple[str, Quantizer], ...]

__all__ = ["BasicOperation", "FusedOperation", "FusibleOperation", "Group", "resolve_device"]


def resolve_device(device: Any) -> torch.device:
    """None means the current CUDA device if there is one, as in te.ops, else torch's default device."""
    if device is None:
        default = torch.get_default_device()
        return torch.device("cuda") if torch.cuda.is_available() and default.type == "cpu" else default
    return torch.device(device)


def state_roles(block: Chain, recipe: Recipe) -> tuple[StateRoles, ...]:
    """For every op of a chain, the (role, quantizer) pairs that have state under ``recipe``."""
    return make_plan(block, recipe=recipe).state_roles


_serials = itertools.count(1)
_by_serial: weakref.WeakValueDictionary[str, BasicOperation] = weakref.WeakValueDictionary()


# states made while a graph was traced
_made = Table()


@torch.compiler.assume_constant_result
def _make_state(names: str) -> str:
    """Make a module's state, for real, while a caller is traced: a graph must not create what outlives it.

    Args:
        names: ``module/chain/recipe/index``: the module's serial, two uids, and the op's index in the chain.

    Returns:
        The name of the state in the table.
    """
    serial, block, recipe, index = names.split("/")
    roles = make_plan(value_of(block), recipe=value_of(recipe)).state_roles[int(index)]
    module = _by_serial[serial]
    module.ensure_state(roles)
    key = f"state_{serial}"
    setattr(_made, key, module.states(roles))
    return key


class FusibleOperation(torch.nn.Module):
    """Base of what a :class:`~bridge.ops.Sequential` may compose into one chain."""

    def basic_operations(self) -> list[BasicOperation]:
        """The basic ops this one stands for, in order."""
        raise NotImplementedError

    def forward(self, input: torch.Tensor, *extra_inputs: torch.Tensor, **kwargs: Any) -> Any:
        """Run the op alone. Returns the output, or a tuple of it and the extra outputs."""
        group = self.__dict__.get("_alone")
        if group is None:
            group = Group(self.basic_operations())
            self.__dict__["_alone"] = group
        given = {0: kwargs} if kwargs else None
        outputs = group(input, extra_inputs, given)
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def __getstate__(self) -> dict[str, Any]:
        """Everything but what is rebuilt when needed."""
        state = dict(self.__dict__)
        state.pop("_alone", None)
        return state


class BasicOperation(FusibleOperation):
    """A module over one op.

    Attributes:
        op: the op's value.

    Quantizer state of a recipe that has some is kept in non-persistent buffers ``<role>_scale`` and
    ``<role>_amax_history`` and travels in ``state_dict`` as extra state.
    """

    def __init__(self, op: Op, *, device: Any = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.op = op
        self.num_extra_inputs = op.num_extra_inputs
        self.num_extra_outputs = op.num_extra_outputs
        self._owners: list[Any] = []
        self._serial = f"m{next(_serials)}"
        self._captured = False
        # recipe under which the op ran last; a recomputed forward outside of any autocast runs it again
        self._last_recipe: Recipe | None = None
        self._state_roles: StateRoles = ()
        if op.param_names:
            self._init_parameters(resolve_device(device), dtype)
        self._register()

    def _register(self) -> None:
        if self.op.forward_quantizers or self.op.backward_quantizers:
            _by_serial[self._serial] = self
            register_holder(self)

    def _init_parameters(self, device: torch.device, dtype: torch.dtype | None) -> None:
        dtype = torch.get_default_dtype() if dtype is None else dtype
        if dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise value_error(type(self).__name__, "dtype", "float32, float16 or bfloat16", dtype)
        generator = torch.Generator().manual_seed(int(torch.randint(2**31, ()).item()))
        for name, value in self.op.init_params(generator, dtype, device).items():
            setattr(self, name, torch.nn.Parameter(value))

    def reset_parameters(self) -> None:
        """Draw fresh parameters, on the current CUDA device (or CPU) if they had no storage."""
        for own in self.parameters(recurse=False):
            device = resolve_device(None) if own.device.type == "meta" else own.device
            self._init_parameters(device, own.dtype)
            return

    def basic_operations(self) -> list[BasicOperation]:
        """This op."""
        return [self]

    # channels

    def set_extra_input_channel(self, index: int, channel: str | None) -> BasicOperation:
        """Take extra input ``index`` from a channel; None takes it from the caller. Returns the op."""
        self._check_channel("input", index, channel, self.num_extra_inputs)
        self._set_op(channel=channel)
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
        self._set_op(channel=channel, output_to_caller=output_to_caller or channel is None)
        return self

    def _check_channel(self, kind: str, index: int, channel: Any, count: int) -> None:
        where = type(self).__name__
        if self._captured:
            raise RuntimeError(f"{where}: a Sequential or a call already captured its channel routing.")
        if not isinstance(index, int) or not 0 <= index < count:
            raise IndexError(f"{where}: extra {kind} {index!r} is out of range; the op has {count}.")
        if channel is not None and not (isinstance(channel, str) and channel):
            raise value_error(where, "channel", "None or a non-empty string", repr(channel))

    def _set_op(self, **changes: Any) -> None:
        self.op = dataclasses.replace(self.op, **changes)
        self.__dict__.pop("_alone", None)
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
        """Make the state that ``roles`` need; a history of another length is cut, or padded with zeros."""
        if self.has_state(roles):
            return
        known, device = dict(self._state_roles), self._state_device()
        for role, quantizer in roles:
            fresh = init_quantizer_state(quantizer, device)
            assert fresh is not None
            old = known.get(role)
            if isinstance(old, Float8DelayedScalingQuantizer) and old.dtype is quantizer.dtype:
                history = getattr(self, f"{role}_amax_history")
                kept = min(len(history), len(fresh.amax_history))
                fresh.amax_history[:kept] = history[:kept]
                fresh.scale.copy_(getattr(self, f"{role}_scale"))
            self.register_buffer(f"{role}_scale", fresh.scale, persistent=False)
            self.register_buffer(f"{role}_amax_history", fresh.amax_history, persistent=False)
        self._state_roles = roles

    def states(self, roles: StateRoles) -> dict[str, DelayedScalingState]:
        """The state by role, over the buffers as they are now."""
        buffers = self._buffers
        return {
            role: DelayedScalingState(scale=buffers[f"{role}_scale"], amax_history=buffers[f"{role}_amax_history"])  # type: ignore[arg-type]
            for role, _ in roles
        }

    def prepare_state(self, recipe: Recipe | None) -> None:
        """Give an op that has no state yet the state that ``recipe`` needs, while no graph is being traced."""
        if not self._state_roles and recipe is not None and self._state_device().type != "meta":
            self.ensure_state(state_roles(Chain((self.op,)), recipe)[0])

    def named_states(self) -> list[tuple[str, Quantizer, DelayedScalingState]]:
        """Role, quantizer and state of everything that has state."""
        states = self.states(self._state_roles)
        return [(role, quantizer, states[role]) for role, quantizer in self._state_roles]

    def get_extra_state(self) -> torch.Tensor:
        """Quantizer state as bytes: what ``torch.save`` writes for a dict of tensors; empty if there is none."""
        if not self._state_roles:
            return torch.empty(0, dtype=torch.uint8)
        content = {
            role: {"scale": state.scale.cpu(), "amax_history": state.amax_history.cpu(), "dtype": str(quantizer.dtype)}
            for (role, quantizer), state in zip(self._state_roles, self.states(self._state_roles).values(), strict=True)
        }
        buffer = io.BytesIO()
        torch.save(content, buffer)
        return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8).clone()

    def set_extra_state(self, state: torch.Tensor | None) -> None:
        """Restore quantizer state; loads tensors only, never code."""
        if state is None or state.numel() == 0:
            return
        buffer = io.BytesIO(state.detach().cpu().numpy().tobytes())
        content = torch.load(buffer, weights_only=True, map_location=self._state_device())
        roles = []
        for role, entry in content.items():
            dtype = getattr(torch, entry["dtype"].removeprefix("torch."))
            quantizer = Float8DelayedScalingQuantizer(dtype=dtype, amax_history_len=len(entry["amax_history"]))
            roles.append((role, dict(self._state_roles).get(role, quantizer)))
            self.register_buffer(f"{role}_scale", entry["scale"], persistent=False)
            self.register_buffer(f"{role}_amax_history", entry["amax_history"], persistent=False)
        self._state_roles = tuple(roles)

    def __getstate__(self) -> dict[str, Any]:
        """Without the containers, which register themselves again."""
        return {**super().__getstate__(), "_owners": []}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Register the copy too."""
        super().__setstate__({**state, "_serial": f"m{next(_serials)}"})
        self._register()

    def extra_repr(self) -> str:
        """The op's value."""
        return repr(self.op)


class FusedOperation(FusibleOperation):
    """A module over several basic ops, held in ``basic_ops``."""

    def __init__(self, basic_ops: list[BasicOperation]) -> None:
        super().__init__()
        self.basic_ops = torch.nn.ModuleList(basic_ops)

    def basic_operations(self) -> list[BasicOperation]:
        """The ops of ``basic_ops``."""
        return list(self.basic_ops)  # type: ignore[arg-type]


class Group:
    """Consecutive ops of a container, run as one chain.

    Attributes:
        modules: the basic ops.
        block: their chain.
    """

    def __init__(self, modules: list[BasicOperation]) -> None:
        self.modules = modules
        self.block = Chain(tuple(module.op for module in modules))
        self.num_extra_inputs = self.block.num_extra_inputs
        self.quantized = [m for m in modules if m.op.forward_quantizers or m.op.backward_quantizers]

    def __call__(self, x: Any, extra_inputs: tuple[Any, ...], kwargs: Any = None) -> list[torch.Tensor]:
        modules = self.modules
        params = tuple([_params(module) for module in modules])
        recipe = self._recipe()
        if recipe is None:
            return run(self.block, params, x, extra_inputs, None, None, kwargs)[0]
        state = self._state(recipe)
        outputs, amaxes = run(self.block, params, x, extra_inputs, state, recipe, kwargs, closes=closes_in_graph())
        if amaxes and torch.is_grad_enabled():
            fold_amaxes_(state, amaxes)
        return outputs

    def _recipe(self) -> Recipe | None:
        """The active recipe. A forward recomputed by a backward outside of any context runs the recipe it ran first."""
        recipe = active_recipe()
        if not self.quantized:
            return recipe
        if recipe is None and not torch.compiler.is_compiling() and in_backward():
            return self.quantized[0]._last_recipe
        if self.quantized[0]._last_recipe is not recipe:
            for module in self.quantized:
                module._last_recipe = recipe
        return recipe

    def _state(self, recipe: Recipe) -> Any:
        state: list[dict[str, DelayedScalingState]] = []
        for index, (module, roles) in enumerate(zip(self.modules, state_roles(self.block, recipe), strict=True)):
            if not roles:
                state.append({})
                continue
            if torch.compiler.is_compiling() and not module.has_state(roles):
                own = getattr(_made, _make_state(f"{module._serial}/{self.block.uid}/{recipe.uid}/{index}"))
            else:
                module.ensure_state(roles)
                own = module.states(roles)
            close_in_graph(module, roles, own)
            state.append(own)
        return tuple(state)


def _params(module: BasicOperation) -> Any:
    """The op's parameters by name; attributes for those that a parametrization has replaced."""
    own = module._parameters
    names = module.op.param_names
    return own if len(own) == len(names) else {name: getattr(module, name) for name in names}
