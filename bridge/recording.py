"""Writing down what the pipeline does for one kind of call, as functions of tensors; see :mod:`bridge.program`.

The pipeline runs once on tensors without storage, under :func:`torch.fx.experimental.proxy_tensor.make_fx`, with every
custom op as one closed call. Leading dimensions are symbols, and a recording that had to assume anything about them is
given up.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from bridge import compat
from bridge import state as states
from bridge.call import grads_by_argument, merge_saved, returned, split_saved
from bridge.gate import launch_opaque
from bridge.library import NAMESPACE, ensure_registered
from bridge.tape import Unwritable, record_tape
from functional_te import pytree
from functional_te._value import value_of
from functional_te.api import bind_kwargs
from functional_te.check import check_call, check_state
from functional_te.fuser.plan import Plan, find_plan, full_pattern
from functional_te.ops import GroupedLinear
from functional_te.pipeline import backward_pass, forward_pass
from functional_te.quantization.state import DelayedScalingState, StochasticRoundingState, init_quantizer_state

__all__ = ["AsMade", "Key", "Kind", "Recording", "Unsupported", "kinds_as_made", "plan_of", "record", "record_tapes"]


# sizes that stand for any number are large in examples, so that numbers of blocks are not 1
_EXAMPLE = 1 << 20
_one_at_a_time = threading.Lock()


class Unsupported(Exception):
    """The pipeline does something that no function of tensors does, or not the same for all numbers of tokens."""


class Kind(NamedTuple):
    """What a function depends on of a tensor.

    Attributes:
        sizes: an int for a definite size, a string that names a size that may differ from call to call.
        dtype: element type.
        device: type and index.
    """

    sizes: tuple[int | str, ...]
    dtype: torch.dtype
    device: tuple[str, int | None]


class AsMade(NamedTuple):
    """The kinds of a state as modules make it.

    Attributes:
        device: type and index.
    """

    device: tuple[str, int | None]


def kinds_as_made(plan: Plan, device: tuple[str, int | None]) -> tuple[Kind, ...]:
    """The kinds of all entries of a state as modules make it: what casts read, and the history."""
    states = [init_quantizer_state(quantizer, "meta") for own in plan.state_roles for _, quantizer in own]
    tensors = [tensor for own in states for tensor in (own.read, own.amax_history)]
    return tuple(Kind(tuple(tensor.shape), tensor.dtype, device) for tensor in tensors)


class Key(NamedTuple):
    """What decides which functions a call runs.

    Attributes:
        block, recipe, fusions: uids.
        backend: the name asked for.
        compute_dtype: the dtype that autocast asks for, or None.
        opens: for every op with state, whether its forward quantizers close their step before the call; empty if
            none does.
        closes: whether the backward closes the step of its quantizers.
        flags: for the input, every parameter and every extra input, whether it needs a gradient.
        kinds: of the same tensors.
        places: which argument each of them is; one that stands in several places is passed once.
        entries: kinds of the state's tensors, two for every entry; or :class:`AsMade`.
    """

    block: str
    recipe: str
    fusions: str
    backend: str
    compute_dtype: torch.dtype | None
    opens: tuple[bool, ...]
    closes: bool
    flags: tuple[bool, ...]
    kinds: tuple[Kind, ...]
    places: tuple[int, ...]
    entries: tuple[Kind, ...] | AsMade


@dataclasses.dataclass
class Recording:
    """What was written down.

    Attributes:
        outputs: number of main and extra outputs of the forward.
        observes: number of amaxes that follow them. What the backward needs comes last.
        differentiable: whether there is a backward.
        functions: ``begin`` (from the forward's entries to what casts read and observe into), ``forward`` (from
            distinct arguments and those), ``fold`` (from the forward's histories and amaxes to nothing), ``backward``
            (from what was saved, the backward's entries and gradients of the outputs to gradients of the distinct
            arguments).
        arguments: number of distinct tensors.
        begun: number of tensors that ``begin`` gives, or the forward takes in their place where nothing is to begin.
        forward, backward: which entries of the state are the forward's and the backward's.
        entries: op and role of all of them.
        contiguous: for every tensor that is saved, whether it is contiguous.
        takes_blanks: whether the forward of a tape also takes what its casts observe into, which are its amaxes then.
    """

    outputs: int
    observes: int
    differentiable: bool
    functions: dict[str, Callable[..., Any]]
    arguments: int
    begun: int
    forward: tuple[int, ...]
    backward: tuple[int, ...]
    entries: tuple[tuple[int, str], ...] = ()
    contiguous: tuple[bool, ...] = ()
    takes_blanks: bool = False


class _Recorder:
    """Runs the parts of one call on tensors without storage.

    Args:
        key: the kind of call.
        plan: its plan.
        launch: how steps are launched; None for their implementations.
    """

    def __init__(self, key: Key, plan: Plan, launch: Any) -> None:
        self.key = key
        self.plan = plan
        self.launch = launch
        self.outputs = self.saved_count = 0
        self.saved_spec: Any = None
        self.saved_values: list[Any] | None = None
        self.mode, self.environment = compat.storage_free_mode()
        named: dict[Any, Any] = {}
        leaves = [self._tensor(kind, named) for kind in key.kinds]
        self.unique: list[Any] = [None] * (max(key.places) + 1)
        for leaf, place in zip(leaves, key.places, strict=True):
            if self.unique[place] is None:
                self.unique[place] = leaf
        kinds = kinds_as_made(plan, key.entries.device) if isinstance(key.entries, AsMade) else key.entries
        tensors = [self._tensor(kind, named) for kind in kinds]
        roles = [(i, role, quantizer) for i, own in enumerate(plan.state_roles) for role, quantizer in own]
        if len(tensors) != 2 * len(roles):
            raise Unsupported("the state does not fit the recipe")
        self.entries = {
            (index, role): (quantizer, tensors[2 * place], tensors[2 * place + 1])
            for place, (index, role, quantizer) in enumerate(roles)
        }
        owners = sorted({index for index, _, _ in roles})
        self.opens = {index for index, due in zip(owners, key.opens, strict=False) if due}
        self.forward_entries = [key for key in self.entries if key in set(plan.observes)]
        self.backward_entries = [key for key in self.entries if key not in set(plan.observes)]

    def takes_blanks(self, entries: Sequence[tuple[int, str]]) -> bool:
        """Whether the casts of some entries observe into tensors that they are given.

        Not if they are closed ops, nor if they are PyTorch's operators, as those of grouped rows are, which also read
        live scales when the compiler sees fit.
        """
        device = self.unique[0].device
        if not (self.launch is None or self.plan.traceable) or any(isinstance(op, GroupedLinear) for op in self._ops):
            return False
        return all(states.has_closing_kernel(self.entries[own][0], device) for own in entries)

    @property
    def _ops(self) -> list[Any]:
        steps: list[Any] = [*self.plan.forward, *self.plan.backward]
        return [*self.plan.chain.ops, *(step.op for step in steps)]

    def _tensor(self, kind: Kind, named: dict[Any, Any]) -> Any:
        """A tensor of a kind; one dict of named sizes for all."""
        own = [size for size in kind.sizes if isinstance(size, str)]
        for size in own:
            if size not in named:
                named[size] = compat.symbolic_size(self.mode, _EXAMPLE + 2 * len(named))
        sizes = [named[size] if isinstance(size, str) else size for size in kind.sizes]
        with self.mode:
            return torch.empty(sizes, dtype=kind.dtype, device=_device(kind))

    def _arguments(self, unique: Sequence[Any]) -> tuple[Any, tuple[dict[str, Any], ...], tuple[Any, ...]]:
        leaves = iter([unique[place] for place in self.key.places])
        x = next(leaves)
        params = tuple([{name: next(leaves) for name in op.param_names} for op in self.plan.chain.ops])
        return x, params, tuple(leaves)

    def _state(self, values: dict[tuple[int, str], tuple[Any, Any]], blanks: Sequence[Any] = ()) -> Any:
        """The state of an op and role, of what casts read and histories, or of tensors to observe into if given."""
        state: list[dict[str, Any]] = [{} for _ in self.plan.chain.ops]
        for place, ((index, role), (read, history)) in enumerate(values.items()):
            if self.entries[index, role][0].stochastic:
                state[index][role] = StochasticRoundingState(key=read, amax_history=history)
            elif blanks:
                state[index][role] = _Reads(read, blanks[place])
            else:
                state[index][role] = DelayedScalingState(scale=read, amax_history=history)
        return tuple(state)

    def check(self) -> None:
        """Raise what a call raises whose arguments do not fit."""
        x, params, extra_inputs = self._arguments(self.unique)
        check_call(self.plan, params, x, extra_inputs)
        bind_kwargs(self.plan.chain, None)
        whole = self._state({key: own[1:] for key, own in self.entries.items()})
        check_state(self.plan, whole if self.plan.recipe is not None else None, x.device)

    def begin(self, *tensors: Any) -> list[Any]:
        """Close the steps that are to be closed, and copy what casts read."""
        values = dict(zip(self.forward_entries, zip(tensors[::2], tensors[1::2], strict=True), strict=True))
        state = self._state(values)
        entries = [(self.entries[index, role][0], state[index][role]) for index, role in self.forward_entries]
        reads, blanks = states.open_(
            entries, [index in self.opens for index, _ in self.forward_entries], self.plan.traceable
        )
        return [*reads, *blanks]

    def forward(self, *tensors: Any) -> list[Any]:
        """Outputs, amaxes and what is saved; tells the rest by attributes."""
        plan, count = self.plan, len(self.unique)
        x, params, extra_inputs = self._arguments(tensors[:count])
        begun = tensors[count:]
        reads, blanks = begun[: len(self.forward_entries)], begun[len(self.forward_entries) :]
        state = self._state({key: (read, None) for key, read in zip(self.forward_entries, reads, strict=True)}, blanks)
        outcome = forward_pass(plan, x, params, state, extra_inputs, {}, self.launch)
        outputs = returned(plan, outcome)
        self.outputs = len(outputs) - len(plan.observes)
        leaves, self.saved_spec = pytree.tree_flatten(outcome.saved)
        saved, self.saved_values = split_saved(leaves)
        if any(isinstance(value, (torch.SymInt, torch.SymFloat)) for value in self.saved_values or ()):
            raise Unsupported("a size is saved for the backward")
        return [*outputs, *saved]

    def fold(self, *tensors: Any) -> list[Any]:
        """Fold amaxes into the forward's histories."""
        count = len(self.forward_entries)
        state = self._state(
            {key: (history, history) for key, history in zip(self.forward_entries, tensors[:count], strict=True)}
        )
        states.fold_amaxes_(state, dict(zip(self.plan.observes, tensors[count:], strict=True)))
        return []

    def backward(self, *tensors: Any) -> list[Any]:
        """Gradients of the distinct arguments, None where none is needed."""
        plan, saved_count = self.plan, self.saved_count
        entries = tensors[saved_count : saved_count + 2 * len(self.backward_entries)]
        grads = tensors[saved_count + len(entries) :]
        saved = pytree.tree_unflatten(self.saved_spec, merge_saved(self.saved_values, tensors[:saved_count]))
        own = dict(zip(self.backward_entries, zip(entries[::2], entries[1::2], strict=True), strict=True))
        state = self._state(own)
        if self.takes_blanks(self.backward_entries):
            # an op that is closed after all leaves the history alone, and what it gives instead is folded in
            casts = self._state(own, entries[1::2])
        else:
            casts = states.keep_gradient_scales(plan, state) if self.key.closes else state
        outcome = backward_pass(plan, saved, casts, grads[0], grads[1:], self.launch)
        states.observe_(plan, state, outcome.amaxes, self.key.closes)
        slots = [place if needed else -1 for place, needed in zip(self.key.places, self.key.flags, strict=True)]
        return grads_by_argument(outcome, outcome.grad_params, slots, len(self.unique))

    def trace(self, function: Callable[..., Any], tensors: Sequence[Any]) -> tuple[Callable[..., Any], list[Any]]:
        """``function`` written down, and what it gives."""
        graph = compat.record(function, tensors)
        made = compat.results(graph)
        if compat.assumed(self.environment):
            raise Unsupported("it depends on the number of tokens")
        return compat.straight_line(graph, self._rename), made

    def _rename(self, op: Any) -> Any:
        """The custom op that stands in the function for one that was recorded closed."""
        namespace, _, name = op.name().partition("::")
        if namespace != NAMESPACE or not name.endswith("_opaque") or not self.plan.traceable:
            return op
        return getattr(getattr(torch.ops, NAMESPACE), name.removesuffix("_opaque")).default


class _Reads(NamedTuple):
    """What a cast of delayed scaling sees of its state in a forward."""

    scale: Any
    blank: Any


def _device(kind: Kind) -> torch.device:
    name, index = kind.device
    return torch.device(name) if index is None else torch.device(name, index)


def _check_ops(plan: Plan) -> None:
    """Raise for an op that runs other Python than the project's, or has no custom op."""
    for op in [step.op for step in plan.forward] + [step.op for step in plan.backward]:
        kind = type(op)
        reason = ensure_registered(kind)
        if reason is not None:
            raise Unsupported(reason)
        inline = getattr(kind, "inline_forward", False) or getattr(kind, "inline_backward", False)
        if inline and not kind.__module__.startswith("functional_te."):
            raise Unsupported(f"{kind.__name__} is inline")


def plan_of(key: Key) -> Plan:
    """The plan of a kind of call."""
    block, recipe, fusions = value_of(key.block), value_of(key.recipe), value_of(key.fusions)
    flags = iter(key.flags)
    pattern: Any = (next(flags), tuple(tuple(next(flags) for _ in op.param_names) for op in block.ops), tuple(flags))
    if not any(key.flags):
        pattern = full_pattern(block, False)
    return find_plan(block, recipe, pattern, (key.backend, key.kinds[0].device[0]), key.compute_dtype, fusions)


def _write(recorder: _Recorder, write: Callable[..., Any], eager: bool) -> Recording:
    """Have ``write`` write down the parts of a call, without ``begin`` and ``fold`` for ``eager`` callers."""
    plan = recorder.plan
    recorder.check()
    functions: dict[str, Callable[..., Any]] = {}
    own = [tensor for entry in recorder.forward_entries for tensor in recorder.entries[entry][1:]]
    begun, histories = own[::2], own[1::2]
    takes_blanks = eager and bool(own) and recorder.takes_blanks(recorder.forward_entries)
    if takes_blanks:
        begun = [*begun, *histories]
    if own and not eager and (plan.output_requires_grad or recorder.opens):
        functions["begin"], begun = write(recorder.begin, own)
    functions["forward"], made = write(recorder.forward, [*recorder.unique, *begun])
    observes = len(plan.observes)
    if takes_blanks:
        seen = dict(zip(plan.observes, made[recorder.outputs : recorder.outputs + observes], strict=True))
        given = dict(zip(recorder.forward_entries, histories, strict=True))
        if any(seen[entry] is not given[entry] for entry in given):  # a cast that makes its own
            takes_blanks, begun = False, own[::2]
            functions["forward"], made = write(recorder.forward, [*recorder.unique, *begun])
    saved = made[recorder.outputs + observes :]
    if observes and not eager:
        amaxes = made[recorder.outputs : recorder.outputs + observes]
        functions["fold"], _ = write(recorder.fold, [*histories, *amaxes])
    if plan.output_requires_grad:
        recorder.saved_count = len(saved)
        with recorder.mode:
            grads = [torch.empty(out.shape, dtype=out.dtype, device=out.device) for out in made[: recorder.outputs]]
        backward_own = [t for entry in recorder.backward_entries for t in recorder.entries[entry][1:]]
        functions["backward"], _ = write(recorder.backward, [*saved, *backward_own, *grads])
    order = list(recorder.entries)
    return Recording(
        outputs=recorder.outputs,
        observes=observes,
        differentiable=plan.output_requires_grad,
        functions=functions,
        arguments=len(recorder.unique),
        begun=len(begun),
        forward=tuple(order.index(entry) for entry in recorder.forward_entries),
        backward=tuple(order.index(entry) for entry in recorder.backward_entries),
        entries=tuple(order),
        contiguous=tuple(tensor.is_contiguous() for tensor in saved) if eager else (),
        takes_blanks=takes_blanks,
    )


def _record(key: Key) -> Recording:
    plan = plan_of(key)
    _check_ops(plan)
    recorder = _Recorder(key, plan, launch_opaque)
    with states.recording():
        return _write(recorder, recorder.trace, eager=False)


def _foreign(plan: Plan) -> list[str]:
    """The user's own classes among the ops, fusions and quantizers of a plan."""
    steps: list[Any] = [*plan.forward, *plan.backward]
    quantizers = [quantizer for step in steps for own in step.quantizers for _, quantizer in own]
    used: list[Any] = [*plan.chain.ops, *(step.op for step in steps), *quantizers]
    used.extend(quantizer.of(columnwise) for quantizer in quantizers for columnwise in (False, True))
    return [type(own).__name__ for own in used if not type(own).__module__.startswith("functional_te.")]


def record_tapes(key: Key) -> Recording:
    """Record an eager call, down to its launches; see :mod:`bridge.replay`. All sizes of the key are definite.

    Raises:
        Unsupported: the call cannot be written down.
    """
    plan = plan_of(key)
    foreign = _foreign(plan)
    if foreign:
        raise Unsupported(f"{foreign[0]} is not of the library")
    if any(getattr(op, name, None) is not None for op in plan.chain.ops for name in ("group", "tensor_parallel")):
        raise Unsupported("it runs over a process group, whose ranks may be others at the next call")
    recorder = _Recorder(key, plan, None)
    try:
        # not while another thread records what a compiler traces, for which the whole process says that it compiles
        with _one_at_a_time, torch.no_grad():
            return _write(recorder, functools.partial(record_tape, recorder.mode), eager=True)
    except Unwritable as error:
        raise Unsupported(str(error)) from error


def record(key: Key) -> Recording:
    """Record the functions of a key.

    In a thread of its own, because the caller's is tracing: what is active there must not see this.

    Raises:
        Unsupported: the call cannot be written down.
        ValueError, TypeError: arguments that do not fit, as in eager mode.
    """
    outcome: list[Any] = []

    def work() -> None:
        try:
            with torch.no_grad(), compat.compiling():
                outcome.append(_record(key))
        except BaseException as error:  # handed to the caller
            outcome.append(error)

    with _one_at_a_time:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    (made,) = outcome
    if isinstance(made, BaseException):
        raise made
    return made
