"""Plans: what runs, in which order, forward and backward. A pure function of whole values, cached on the chain."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from functional_te._errors import kind_of, type_error, value_error
from functional_te._value import Table, uid_of, value_of
from functional_te.chain import Chain, as_chain, where
from functional_te.fuser.match import Refusal, fuse
from functional_te.fuser.registry import default_fusions
from functional_te.fuser.rule import Fusions
from functional_te.fuser.steps import BackwardStep, ForwardStep
from functional_te.kernels import kernels, resolve_backend, with_accumulation
from functional_te.ops import FusedOp, Op, OpRequiresGrad
from functional_te.quantization.cast import features_multiple
from functional_te.quantization.quantizers import Quantizer
from functional_te.quantization.recipes import Recipe, Role, as_recipe
from functional_te.torch_compat import assume_constant_result

__all__ = ["BackwardStep", "ForwardStep", "GradPattern", "Plan", "plan", "traced_plan"]

# name or "auto", alone or with the device type
BackendChoice = str | tuple[str, str]
# (main input, parameters of each op in the order of param_names, public extra inputs)
GradPattern = tuple[bool, tuple[tuple[bool, ...], ...], tuple[bool, ...]]


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """A chain made ready to run. Holds no tensors.

    Attributes:
        chain: the chain.
        recipe: the recipe, or None for high precision.
        requires_grad: the pattern it was made for.
        backend: name of the kernel backend; a variant of it where the recipe wants products to accumulate otherwise.
        traceable: whether a compiler can trace through its kernels.
        compute_dtype: the dtype that autocast asks for, or None.
        fusions: the rules it was made with.
        forward: steps in the order they run.
        backward: steps in the order they run (the last ops first); ops before the first that needs a gradient have
            none.
        op_requires_grad: what has to be produced for every basic op.
        output_requires_grad: whether the main output takes part in the backward.
        state_roles: for every basic op, the (role, quantizer) pairs that have state.
        observes: the (op index, role) pairs of forward quantizers with state.
        aliases: for the main output and every returned extra output, whether it shares storage with the main input
            or with an output before it.
        any_alias: whether any of them does.
        param_slots: (op index, name) of every parameter, in order.
        input_multiples: for every op, what the last dimension of its input must be a multiple of to be cast, if the op
            declares no size; else 1.
        refusals: candidates that matched a rule and were not fused, with the reason.
    """

    chain: Chain
    recipe: Recipe | None
    requires_grad: GradPattern
    backend: str
    traceable: bool
    compute_dtype: torch.dtype | None
    fusions: Fusions
    forward: tuple[ForwardStep, ...]
    backward: tuple[BackwardStep, ...]
    op_requires_grad: tuple[OpRequiresGrad, ...]
    output_requires_grad: bool
    state_roles: tuple[tuple[tuple[str, Quantizer], ...], ...]
    observes: tuple[tuple[int, str], ...]
    aliases: tuple[bool, ...]
    any_alias: bool
    param_slots: tuple[tuple[int, str], ...]
    input_multiples: tuple[int, ...]
    refusals: tuple[Refusal, ...]

    def __repr__(self) -> str:
        lines = [f"plan(recipe={self.recipe!r}, backend={self.backend!r})"]
        for title, steps in (("forward", self.forward), ("backward", self.backward)):
            lines.append(f"  {title}:")
            lines.extend(f"    {list(step.indices)} {type(step.op).__name__}" for step in steps)
        lines.extend(f"  not fused: {refusal.rule} at {refusal.start}: {refusal.reason}" for refusal in self.refusals)
        return "\n".join(lines)


def plan(
    block: Chain | Op,
    *,
    recipe: Recipe | None = None,
    requires_grad: bool | GradPattern = True,
    backend: str = "auto",
    compute_dtype: torch.dtype | None = None,
    fusions: Fusions | None = None,
    device: torch.device | str | None = None,
) -> Plan:
    """The plan of a chain. Cached: a second call with equal values is a dictionary look-up.

    Args:
        block: a chain or an op.
        recipe: a recipe, or None for high precision.
        requires_grad: True (everything), False (inference), or ``(input, per-op parameter flags, extra inputs)``.
        backend: ``"auto"`` or the name of a kernel backend.
        compute_dtype: dtype of products, norms and activations under autocast; None follows the parameters.
        fusions: the rules to use; None means :func:`default_fusions`, ``Fusions()`` means none.
        device: where the chain will run, which ``"auto"`` depends on; None is the CPU.

    Raises:
        TypeError: ``recipe`` is no recipe, or the pattern is malformed.
        ValueError: an unknown backend or one that cannot run there, or a pattern that does not fit the chain.
    """
    block = as_chain(block)
    if fusions is not None and not isinstance(fusions, Fusions):
        raise type_error("plan", "fusions", "None or a Fusions", type(fusions).__name__)
    if device is None:
        kind = None
    else:
        kind = device.type if type(device) is torch.device else torch.device(device).type
    if torch.compiler.is_compiling():
        return traced_plan(block, recipe, requires_grad, (backend, kind), compute_dtype, fusions)
    if kind == "cpu" and backend == "auto":
        backend, kind = "reference", None  # what it means there
    recipe = recipe if recipe is None or isinstance(recipe, Recipe) else as_recipe(recipe)
    choice = backend if kind is None else (backend, kind)
    return find_plan(block, recipe, requires_grad, choice, compute_dtype, fusions)


def find_plan(
    block: Chain,
    recipe: Recipe | None,
    requires_grad: bool | GradPattern,
    backend: BackendChoice,
    compute_dtype: torch.dtype | None,
    fusions: Fusions | None,
) -> Plan:
    """:func:`plan` of arguments that are what they should be; ``backend`` may come with a device type."""
    rules = default_fusions() if fusions is None else fusions
    key = (recipe, requires_grad, backend, compute_dtype, rules)
    found: Plan | None = block.plans.get(key)  # type: ignore[attr-defined]
    if found is None:
        if isinstance(requires_grad, bool):
            found = find_plan(block, recipe, full_pattern(block, requires_grad), backend, compute_dtype, rules)
        else:
            found = _make(block, recipe, requires_grad, backend, compute_dtype, rules)
        block.plans[key] = found  # type: ignore[attr-defined]
    return found


_traced = Table()
# called with every plan that a traced caller asks for; the bridge registers custom ops here
on_traced_plan: list[Callable[[Plan], None]] = []


@assume_constant_result
def _find_while_traced(uids: str, requires_grad: Any, compute_dtype: Any) -> str:
    """Find or make a plan, for real while a caller is traced.

    Args:
        uids: ``chain/recipe/fusions/backend/device type``, the first three by :attr:`Value.uid`.
        requires_grad: the pattern.
        compute_dtype: the dtype that autocast asks for, or None.

    Returns:
        The name of the plan in the table.
    """
    block, recipe, fusions, backend, device = uids.split("/")
    choice = (backend, device) if device else backend
    plan = find_plan(value_of(block), value_of(recipe), requires_grad, choice, compute_dtype, value_of(fusions))
    for function in on_traced_plan:
        function(plan)
    name = f"plan_{uids}_{requires_grad}_{compute_dtype}".replace(".", "_")
    setattr(_traced, name, plan)
    return name


def traced_plan(
    block: Chain,
    recipe: Recipe | None,
    requires_grad: bool | GradPattern,
    backend: tuple[str, str | None],
    compute_dtype: torch.dtype | None,
    fusions: Fusions | None,
) -> Plan:
    """The plan of a call that Dynamo is tracing. The graph is guarded by the uids of the values."""
    if recipe is not None and not isinstance(recipe, Recipe):
        fix = "Inside compiled code translate other recipes first: fte.recipes.as_recipe()."
        raise type_error("plan", "recipe", "None or a recipe of functional_te.recipes", kind_of(recipe), fix)
    uids = f"{block.uid}/{uid_of(recipe)}/{uid_of(fusions)}/{backend[0]}/{backend[1] or ''}"
    return getattr(_traced, _find_while_traced(uids, requires_grad, compute_dtype))


def full_pattern(block: Chain, value: bool) -> GradPattern:
    """The pattern in which everything needs a gradient, or nothing."""
    return (value, tuple((value,) * len(op.param_names) for op in block.ops), (value,) * block.num_extra_inputs)


def _check_pattern(block: Chain, pattern: Any) -> None:
    if not (isinstance(pattern, tuple) and len(pattern) == 3):
        raise type_error("plan", "requires_grad", "a bool or (input, params, extra_inputs)", repr(pattern))
    expected = full_pattern(block, True)
    _, params, extras = pattern
    if tuple(len(flags) for flags in params) != tuple(len(flags) for flags in expected[1]):
        raise value_error("plan", "requires_grad", f"parameter flags like {expected[1]}", params)
    if len(extras) != block.num_extra_inputs:
        raise value_error("plan", "requires_grad", f"{block.num_extra_inputs} extra-input flags", extras)


def _grad_flow(block: Chain, pattern: GradPattern) -> tuple[OpRequiresGrad, ...]:
    """What each op has to produce: an input gradient only if something before it needs one."""
    flowing = pattern[0]
    flow: list[OpRequiresGrad] = []
    for index in range(len(block.ops)):
        extras = tuple(
            pattern[2][source.public] if source.public >= 0 else flow[source.op].any
            for source in block.extra_sources[index]
        )
        reaches = flowing or any(pattern[1][index]) or any(extras)
        flow.append(OpRequiresGrad(any=reaches, input=flowing, params=tuple(pattern[1][index]), extra_inputs=extras))
        flowing = reaches
    return tuple(flow)


Quantizers = tuple[tuple[tuple[str, Quantizer], ...], ...]


def _quantizers(block: Chain, recipe: Recipe | None, kind: str) -> Quantizers:
    """The (role, quantizer) pairs of every op; ``kind`` is ``"forward"`` or ``"backward"``."""
    if recipe is None or (kind == "backward" and recipe.override is not None):
        return ((),) * len(block.ops)
    result = []
    for op in block.ops:
        roles = op.forward_quantizers if kind == "forward" else op.backward_quantizers
        pairs = [(role, quantizer_of(op, role, recipe)) for role in roles]
        result.append(tuple((role, quantizer) for role, quantizer in pairs if quantizer is not None))
    return tuple(result)


def quantizer_of(op: Op, role: str, recipe: Recipe) -> Quantizer | None:
    """The quantizer of one role of an op, or None if the role stays in high precision."""
    # roles of a grouped op are numbered by group
    quantizer = recipe.quantizer(Role(type(op).__name__, role.rstrip("0123456789"), op.name))
    return quantizer if isinstance(quantizer, Quantizer) else None


def state_roles_of(op: Op, recipe: Recipe) -> tuple[tuple[str, Quantizer], ...]:
    """The (role, quantizer) pairs of an op that have state under a recipe, as in :attr:`Plan.state_roles`."""
    block = as_chain(op)
    pairs = (*_quantizers(block, recipe, "forward")[0], *_quantizers(block, recipe, "backward")[0])
    return tuple(pair for pair in pairs if pair[1].stateful)


def _check_sizes(block: Chain, quantizers: Quantizers) -> None:
    """Raise for features that no block divides."""
    for index, pairs in enumerate(quantizers):
        for role, quantizer in pairs:
            multiple = features_multiple(quantizer)
            for name, size in block.ops[index].quantized_sizes(role).items():
                if size % multiple:
                    wanted = f"a multiple of {multiple} to cast the {role} with {type(quantizer).__name__}"
                    raise value_error(where(block.ops, index), name, wanted, size)


def _with_copies(
    block: Chain, quantizers: Quantizers, flow: tuple[OpRequiresGrad, ...], recipe: Recipe | None, backend: str
) -> Quantizers:
    """The quantizers making the copies that are read, and no others."""
    transposed = kernels(backend).transposed_copies
    forward_only = recipe is not None and recipe.override is not None
    result = []
    for index, pairs in enumerate(quantizers):
        own = []
        for role, quantizer in pairs:
            rowwise, columnwise = block.ops[index].copies(role, flow[index])
            columnwise = columnwise and not forward_only
            if quantizer.transposable and not transposed:
                rowwise, columnwise = True, False
            own.append((role, quantizer.with_usage(rowwise or not columnwise, columnwise)))
        result.append(tuple(own))
    return tuple(result)


def _make(
    block: Chain,
    recipe: Recipe | None,
    pattern: GradPattern,
    choice: BackendChoice,
    compute_dtype: torch.dtype | None,
    rules: Fusions,
) -> Plan:
    _check_pattern(block, pattern)
    backend = resolve_backend(choice) if isinstance(choice, str) else resolve_backend(*choice)
    if recipe is not None:
        backend = with_accumulation(backend, recipe.fast_accumulation)
    flow = _grad_flow(block, pattern)
    forward_quantizers = _quantizers(block, recipe, "forward")
    backward_quantizers = _quantizers(block, recipe, "backward")
    _check_sizes(block, forward_quantizers)
    _check_sizes(block, backward_quantizers)
    forward_casts = _with_copies(block, forward_quantizers, flow, recipe, backend)
    backward_casts = _with_copies(block, backward_quantizers, flow, recipe, backend)
    forward, backward, refusals = fuse(block.ops, rules, recipe, flow)
    state_roles = tuple(
        tuple(pair for pair in (*forward_quantizers[i], *backward_quantizers[i]) if pair[1].stateful)
        for i in range(len(block.ops))
    )
    aliases = _aliases(block, forward_quantizers)
    override = None if recipe is None else recipe.override
    static = {"backend": backend, "compute_dtype": compute_dtype, "backward_override": override}
    return Plan(
        chain=block,
        recipe=recipe,
        requires_grad=pattern,
        backend=backend,
        traceable=kernels(backend).traceable,
        compute_dtype=compute_dtype,
        fusions=rules,
        forward=tuple(_forward_step(block, op, indices, flow, forward_casts, static) for op, indices in forward),
        backward=tuple(
            _backward_step(block, op, indices, flow, backward_casts)
            for op, indices in reversed(backward)
            if any(flow[i].any for i in indices)
        ),
        op_requires_grad=flow,
        output_requires_grad=flow[-1].any,
        state_roles=state_roles,
        observes=tuple(
            (i, role) for i, pairs in enumerate(forward_quantizers) for role, quantizer in pairs if quantizer.stateful
        ),
        aliases=aliases,
        any_alias=any(aliases),
        param_slots=tuple((i, name) for i, op in enumerate(block.ops) for name in op.param_names),
        input_multiples=_input_multiples(block, forward_quantizers, backward_quantizers),
        refusals=refusals,
    )


def _input_multiples(block: Chain, *quantizers: Quantizers) -> tuple[int, ...]:
    return tuple(
        max(
            (features_multiple(q) for pairs in quantizers for role, q in pairs[i] if not op.quantized_sizes(role)),
            default=1,
        )
        for i, op in enumerate(block.ops)
    )


def _aliases(block: Chain, quantizers: Quantizers) -> tuple[bool, ...]:
    """Which outputs share storage: some ops pass on the storage of their input, every other op makes its own."""
    storage, produced = 0, {}
    for index, op in enumerate(block.ops):
        # what a cast gives is quantized, and outputs that are tensors are dequantized from it
        passes = op.inline_forward or (op.passes_input and not quantizers[index])
        storage = storage if passes else index + 1
        for slot in range(op.num_extra_outputs):
            produced[index, slot] = storage if op.inline_forward else (index, slot)
    seen: set[Any] = {0}
    result = []
    for place in (storage, *(produced[place] for place in block.extra_outputs)):
        result.append(place in seen)
        seen.add(place)
    return tuple(result)


def _forward_step(
    block: Chain,
    op: Op | FusedOp,
    indices: tuple[int, ...],
    flow: tuple[OpRequiresGrad, ...],
    quantizers: Quantizers,
    static: dict[str, Any],
) -> ForwardStep:
    fused = isinstance(op, FusedOp)
    following = _shared_quantizers(block, quantizers, indices[-1] + 1, "accepts_quantized_input")
    provided = {**static, "requires_grad": tuple(flow[i] for i in indices) if fused else flow[indices[0]]}
    provided["prev_op_grad_output_quantizer"] = None
    names = op.provided_names
    if not {"params", "state", "requires_grad"} <= names:
        raise type_error(
            where(block.ops, indices[0]),
            "resolve_fwd_args",
            "keyword-only params, state and requires_grad",
            sorted(names),
        )
    quantized = any(quantizers[i] for i in indices)
    if not quantized:
        provided["state"] = ({},) * len(indices) if fused else {}
    # a backward in high precision needs the input as it was before the cast, so its consumer casts it
    casts = op.quantizes_output and static["backward_override"] != "high_precision"
    next_quantizer = following.get("input") if casts else None
    return ForwardStep(
        op=op,
        indices=indices,
        fused=fused,
        static_kwargs={name: value for name, value in provided.items() if name in names},
        quantizers=tuple(quantizers[i] for i in indices),
        next_quantizer=next_quantizer,
        extra_sources=tuple(block.extra_sources[i] for i in indices),
        dense_input=not block.ops[indices[0]].accepts_quantized_input,
        saves=tuple(flow[i].any for i in indices),
        saves_any=any(flow[i].any for i in indices),
        simple=not quantized and next_quantizer is None and not names & {"extra_inputs", "kwargs"},
        quantized=quantized,
        takes_extra_inputs="extra_inputs" in names,
        takes_kwargs="kwargs" in names,
        # of several ops with one role the first is meant, as its input is the step's
        owners={role: i for i in reversed(indices) for role, _ in quantizers[i]},
    )


def _backward_step(
    block: Chain,
    op: Op | FusedOp,
    indices: tuple[int, ...],
    flow: tuple[OpRequiresGrad, ...],
    quantizers: Quantizers,
) -> BackwardStep:
    before = indices[0] - 1
    casts = before >= 0 and flow[before].any and op.quantizes_grad_input
    return BackwardStep(
        op=op,
        indices=indices,
        fused=isinstance(op, FusedOp),
        requires_grad=tuple(flow[i] for i in indices),
        quantizers=tuple(quantizers[i] for i in indices),
        prev_quantizer=_shared_quantizers(block, quantizers, before, "accepts_quantized_grad").get("grad_output")
        if casts
        else None,
        dense_grad=not block.ops[indices[-1]].accepts_quantized_grad,
    )


def _shared_quantizers(block: Chain, quantizers: Quantizers, index: int, accepts: str) -> dict[str, Quantizer]:
    """The quantizers of an op that its neighbours may cast with; ``accepts`` is what the op says of such casts."""
    if not 0 <= index < len(block.ops):
        return {}
    op = block.ops[index]
    if not (op.shares_quantizers and getattr(op, accepts)):
        return {}
    return dict(quantizers[index])
