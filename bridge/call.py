"""How the arguments of one chain call travel through the autograd function.

Two ways. In eager mode only the tensors that need gradients are handed to autograd, each once; everything else waits
in the record of the call. While Dynamo traces, and under ``torch.func`` transforms, every tensor has to be an argument,
each distinct one once, and the bundle of the call is rebuilt from them inside.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch

from functional_te import pytree
from functional_te.fuser.plan import Plan
from functional_te.quantization.tensor import CachedWeight, QuantizedTensor

if TYPE_CHECKING:
    from bridge.main_grad import MainGrad

__all__ = [
    "Call",
    "Takeover",
    "dense",
    "distinct",
    "eager_call",
    "flat_call",
    "grads_by_argument",
    "launch_taken_over",
    "merge_saved",
    "refuse_second_derivatives",
    "returned",
    "split_saved",
]


def split_saved(leaves: list[Any]) -> tuple[list[torch.Tensor], list[Any] | None]:
    """The tensors among saved leaves, and the plain values with None in the place of tensors (None: no values)."""
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    if len(tensors) == len(leaves):
        return tensors, None
    return tensors, [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]


def merge_saved(values: list[Any] | None, tensors: Any) -> Any:
    """The saved leaves again."""
    if values is None:
        return tensors
    rest = iter(tensors)
    return [next(rest) if value is None else value for value in values]


def dense(output: Any) -> Any:
    """A chain that ends in a cast gives the rounded values: autograd differentiates tensors of values."""
    return output.dequantize() if isinstance(output, QuantizedTensor) else output


def returned(plan: Plan, outcome: Any) -> list[torch.Tensor]:
    """What the forward of an autograd function returns: main and extra outputs, and an amax for each observer."""
    outputs = [dense(outcome.output), *outcome.extra_outputs]
    if plan.any_alias and plan.output_requires_grad:
        # an autograd function may not return its input, nor one storage twice
        outputs = [out.clone() if alias else out for out, alias in zip(outputs, plan.aliases, strict=True)]
    for key in plan.observes:
        amax = outcome.amaxes.get(key)
        # a tensor that came in quantized was not observed, which an amax of 0 means
        outputs.append(outputs[0].new_zeros(1, dtype=torch.float32) if amax is None else amax)
    return outputs


def refuse_second_derivatives() -> NoReturn:
    """Raise what a backward raises that would itself be recorded."""
    raise RuntimeError(
        "functional_te: the backward of a chain cannot be differentiated again (create_graph=True). "
        "Use functional_te.vjp and plain tensors, or torch's own modules, for second derivatives."
    )


def grads_by_argument(outcome: Any, grad_params: Any, slots: Any, count: int) -> list[Any]:
    """One gradient or None for each of ``count`` arguments, summed over the slots that an argument fills.

    Args:
        outcome: of the backward pass.
        grad_params: gradients of parameters by op.
        slots: for the input, every parameter and every extra input, which argument it is, or -1.
        count: number of arguments.
    """
    found: list[Any] = [outcome.grad_input]
    for own in grad_params:
        found.extend(own)
    found.extend(outcome.grad_extra_inputs)
    result: list[Any] = [None] * count
    for grad, slot in zip(found, slots, strict=True):
        if grad is not None and slot >= 0:
            result[slot] = grad if result[slot] is None else result[slot] + grad
    return result


class Takeover(NamedTuple):
    """What an eager call runs in the place of an op's implementation.

    Attributes:
        forward: from the op and its bundle to its result, or None for the implementation.
        backward: likewise.
    """

    forward: Callable[[Any, Any], Any] | None = None
    backward: Callable[[Any, Any], Any] | None = None


def launch_taken_over(plan: Plan, direction: str, takeovers: dict[int, Takeover] | None) -> Any:
    """How the steps of one pass are launched if some are taken over; None if none is."""
    if not takeovers:
        return None
    steps: Any = iter(plan.forward if direction == "forward" else plan.backward)

    def launch(op: Any, _: str, args: Any) -> Any:
        step = next(steps)
        taken = takeovers.get(step.indices[0])
        own = None if step.fused or taken is None else getattr(taken, direction)
        return getattr(op, f"{direction}_impl")(args) if own is None else own(op, args)

    return launch


class Call:
    """What one call passes besides its tensors.

    Attributes:
        plan: the plan.
        closes: whether the backward also closes the step of its quantizers (see :mod:`bridge.recipe_context`).
        grad_slots: for x, every parameter and every extra input in order: which argument it is, or -1.
        bundle: what :meth:`arguments` gives until the forward takes it, or None if it is rebuilt.
        main_grads: destinations of parameter gradients that are not returned; see :mod:`bridge.main_grad`.
        takeovers: by op index, the :class:`Takeover` of its steps (eager mode only), or None.
        spec: tree definition of that bundle, with tuples in the place of dicts.
        slots: for every leaf of that tree, which argument it is.
        kwarg_names: for every op with forward kwargs, its index and their names.
        saved_spec: tree definition of what the forward saved (set by the forward under ``torch.func``).
        saved_values: the plain values that were saved; see :func:`split_saved` (likewise).
        saved_places: for every saved tensor, ``(True, argument)`` or ``(False, output)`` (likewise).
    """

    __slots__ = (
        "bundle",
        "closes",
        "grad_slots",
        "kwarg_names",
        "main_grads",
        "plan",
        "saved_places",
        "saved_spec",
        "saved_values",
        "slots",
        "spec",
        "takeovers",
    )

    def __init__(self, plan: Plan, closes: bool, grad_slots: tuple[int, ...], bundle: Any) -> None:
        self.plan = plan
        self.closes = closes
        self.grad_slots = grad_slots
        self.bundle = bundle
        self.main_grads: tuple[MainGrad, ...] = ()
        self.takeovers: dict[int, Takeover] | None = None
        self.spec: Any = None
        self.slots: tuple[int, ...] = ()
        self.kwarg_names: tuple[tuple[int, tuple[str, ...]], ...] = ()
        self.saved_spec: Any = None
        self.saved_values: list[Any] | None = None
        self.saved_places: tuple[tuple[bool, int], ...] = ()

    def arguments(self, unique: Any) -> Any:
        """``(x, params, extra_inputs, kwargs, state, targets)``. The record keeps no tensor alive after that.

        ``targets`` are the buffers of :attr:`main_grads`.
        """
        if self.bundle is not None:
            bundle, self.bundle = self.bundle, None
            return bundle
        plan = self.plan
        leaves = [unique[slot] for slot in self.slots]
        x, params, extra_inputs, kwarg_values, state_values, targets = pytree.tree_unflatten(self.spec, leaves)
        named = [dict(zip(op.param_names, own, strict=True)) for op, own in zip(plan.chain.ops, params, strict=True)]
        kwargs = {
            index: dict(zip(names, values, strict=True))
            for (index, names), values in zip(self.kwarg_names, kwarg_values, strict=True)
        }
        state = tuple(
            [
                {role: value for (role, _), value in zip(roles, own, strict=True)}
                for roles, own in zip(plan.state_roles, state_values, strict=True)
            ]
        )
        return x, named, extra_inputs, kwargs, state, targets


def eager_call(
    plan: Plan, bundle: Any, closes: bool, main_grads: tuple[MainGrad, ...] = ()
) -> tuple[Call, list[torch.Tensor]]:
    """The record of an eager call, and the distinct tensors that need gradients."""
    x, params, extra_inputs, *_ = bundle
    needs_x, needs_params, needs_extras = plan.requires_grad
    unique: list[torch.Tensor] = []
    places: dict[int, int] = {}
    slots: list[int] = []

    def add(value: Any, needed: bool) -> None:
        if not needed:
            slots.append(-1)
            return
        value = value.value if isinstance(value, CachedWeight) else value
        slot = places.setdefault(id(value), len(unique))
        if slot == len(unique):
            unique.append(value)
        slots.append(slot)

    add(x, needs_x)
    for op, own, needed in zip(plan.chain.ops, params, needs_params, strict=True):
        for name, need in zip(op.param_names, needed, strict=True):
            add(own[name], need)
    for extra, need in zip(extra_inputs, needs_extras, strict=True):
        add(extra, need)
    call = Call(plan, closes, tuple(slots), bundle)
    call.main_grads = main_grads
    return call, unique


def flat_call(plan: Plan, bundle: Any, closes: bool, main_grads: tuple[MainGrad, ...] = ()) -> tuple[Call, list[Any]]:
    """The record of a call whose arguments are all passed, and the distinct ones."""
    x, params, extra_inputs, kwargs, state, targets = bundle
    own = tuple(
        [tuple([given[name] for name in op.param_names]) for op, given in zip(plan.chain.ops, params, strict=True)]
    )
    kwarg_values = tuple([tuple(given.values()) for given in kwargs.values()])
    state_values = tuple(
        [tuple([state[i][role] for role, _ in roles]) if roles else () for i, roles in enumerate(plan.state_roles)]
    )
    leaves, spec = pytree.tree_flatten((x, own, tuple(extra_inputs), kwarg_values, state_values, targets))
    unique, slots = distinct(leaves)
    grad_slots, position = [], 0
    for value in (x, *[param for given in own for param in given], *extra_inputs):
        if isinstance(value, torch.Tensor):
            grad_slots.append(slots[position])
            position += 1
            continue
        # the first leaf of a cached weight is the parameter
        grad_slots.append(slots[position] if isinstance(value, CachedWeight) else -1)
        position += len(pytree.leaves(value))
    call = Call(plan, closes, tuple(grad_slots), None)
    call.spec, call.slots = spec, slots
    call.main_grads = main_grads
    call.kwarg_names = tuple([(index, tuple(given)) for index, given in kwargs.items()])
    return call, unique


def distinct(leaves: list[Any]) -> tuple[list[Any], tuple[int, ...]]:
    """The distinct objects among ``leaves``, and for every leaf which of them it is. Compares by ``is``: traceable."""
    unique: list[Any] = []
    slots = []
    for leaf in leaves:
        slot = 0  # counted by hand: a tracer walks through enumerate()
        for known in unique:
            if known is leaf:
                break
            slot += 1
        if slot == len(unique):
            unique.append(leaf)
        slots.append(slot)
    return unique, tuple(slots)
