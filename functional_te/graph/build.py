"""From a chain and descriptions of its arguments to the graph: two traces, one with fusions and one without.

The trace with fusions says what runs; the one without says what every basic op does, which fusions do not change.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch

from functional_te.chain import Chain
from functional_te.fuser.plan import Plan
from functional_te.fuser.rule import Fusions
from functional_te.graph.costs import kernels_of, work_of
from functional_te.graph.devices import Device
from functional_te.graph.tensors import format_of, tensor_of
from functional_te.graph.trace import Launch, Trace, described_by_fakes
from functional_te.graph.value import Cast, Edge, ExtraInput, ExtraOutput, Graph, OpNode, Saved, Step, Tensor
from functional_te.kernels import kernels
from functional_te.pytree import structure
from functional_te.quantization.quantizers import Quantizer
from functional_te.quantization.tensor import CachedWeight, QuantizedTensor

__all__ = ["graph_of"]

_DIGITS = "0123456789"


def leaves(tree: Any) -> list[Any]:
    """The leaves of a tree, without optree's overhead for small ones."""
    flat: list[Any] = []
    structure(tree, flat)
    return flat


class _Facts(NamedTuple):
    """What a graph is made of.

    Attributes:
        plan: the plan.
        run: its trace.
        alone: the trace without fusions.
        forward: by op, the launch of ``run`` that covers it.
        backward: likewise; ops that take no part in the backward have none.
        forward_alone: by op, its own launch.
        backward_alone: likewise.
        described: descriptions of tensors that were asked for, by identity.
    """

    plan: Plan
    run: Trace
    alone: Trace
    forward: dict[int, Launch]
    backward: dict[int, Launch]
    forward_alone: dict[int, Launch]
    backward_alone: dict[int, Launch]
    described: dict[int, Tensor]

    def tensor(self, value: Any) -> Tensor:
        """The description of a tensor of one of the traces."""
        found = self.described.get(id(value))
        if found is None:
            found = self.described[id(value)] = tensor_of(value)
        return found


def _by_op(launches: tuple[Launch, ...]) -> dict[int, Launch]:
    return {index: launch for launch in launches for index in launch.step.indices}


def graph_of(plan: Plan, run: Trace, alone: Trace, device: Device) -> Graph:
    """The graph of a plan.

    Args:
        plan: the plan.
        run: its trace.
        alone: the trace of the same chain without fusions; ``run`` itself if the plan has none.
        device: the device that times are for.
    """
    facts = _Facts(
        plan,
        run,
        alone,
        _by_op(run.forward),
        _by_op(run.backward),
        _by_op(alone.forward),
        _by_op(alone.backward),
        {},
    )
    block = plan.chain
    outputs = (run.forward[-1].output, *(run.extra_outputs[place] for place in block.extra_outputs))
    return Graph(
        ops=_ops(facts),
        forward=_steps(facts, "forward"),
        backward=_steps(facts, "backward"),
        edges=(*_forward_edges(facts), *_backward_edges(facts)),
        recipe="" if plan.recipe is None else repr(plan.recipe),
        backend=plan.backend,
        device=device,
        refusals=tuple(dict.fromkeys((refusal.rule, refusal.start, refusal.reason) for refusal in plan.refusals)),
        outputs=tuple(facts.tensor(output) for output in outputs),
    )


# ---- ops ----


def _ops(facts: _Facts) -> tuple[OpNode, ...]:
    owned = _Owners(facts)
    nodes = []
    for index, op in enumerate(facts.plan.chain.ops):
        own = facts.forward_alone[index]
        nodes.append(
            OpNode(
                index=index,
                kind=type(op).__name__,
                name=op.name,
                config=repr(op),
                input=facts.tensor(own.input),
                output=facts.tensor(own.output),
                params=tuple((name, facts.tensor(facts.run.params[index][name])) for name in op.param_names),
                casts=(*_casts(facts, index, "forward"), *_casts(facts, index, "backward")),
                extra_inputs=_extra_inputs(facts, facts.plan.chain, index),
                extra_outputs=_extra_outputs(facts, op, index),
                saved=owned.saved(index),
                state="ok" if described_by_fakes(op, "forward") else "assumed",
            )
        )
    return tuple(nodes)


def _extra_inputs(facts: _Facts, block: Chain, index: int) -> tuple[ExtraInput, ...]:
    found = []
    channels = block.ops[index].extra_input_channels
    for slot, source in enumerate(block.extra_sources[index]):
        public = source.public >= 0
        # a fusion may make and read a tensor that is never there: then what it would be without the fusion
        made = facts.run.extra_outputs if (source.op, source.slot) in facts.run.extra_outputs else None
        made = made or facts.alone.extra_outputs
        tensor = facts.run.extra_inputs[source.public] if public else made[source.op, source.slot]
        position = source.public if public else source.slot
        found.append(ExtraInput(slot, source.op, position, channels[slot], facts.tensor(tensor)))
    return tuple(found)


def _extra_outputs(facts: _Facts, op: Any, index: int) -> tuple[ExtraOutput, ...]:
    channels, returned = op.extra_output_channels, op.extra_outputs_to_caller
    return tuple(
        ExtraOutput(slot, channels[slot], returned[slot], facts.tensor(facts.alone.extra_outputs[index, slot]))
        for slot in range(op.num_extra_outputs)
    )


def _casts(facts: _Facts, index: int, direction: str) -> list[Cast]:
    """The quantizers of an op for one direction; those of a grouped op are alike, and stand there once."""
    launch = (facts.forward if direction == "forward" else facts.backward).get(index)
    if launch is None:
        return []
    step = launch.step
    found: dict[str, Cast] = {}
    for role, quantizer in step.quantizers[step.indices.index(index)]:
        short = role.rstrip(_DIGITS)
        if short not in found:
            by = _cast_by(facts, index, role, direction)
            found[short] = Cast(
                short, type(quantizer).__name__, format_of(quantizer), _copies(quantizer), _state(quantizer), by
            )
    return list(found.values())


def _copies(quantizer: Quantizer) -> tuple[str, ...]:
    return tuple(name for name in ("rowwise", "columnwise") if getattr(quantizer, name))


def _state(quantizer: Quantizer) -> str:
    if not quantizer.stateful:
        return ""
    return "key" if quantizer.stochastic else "scale"


def _cast_by(facts: _Facts, index: int, role: str, direction: str) -> str:
    """Which op runs a cast with the quantizer of this role, or an empty string if the tensor comes in cast."""
    forward = direction == "forward"
    if role not in ("input", "grad_output"):
        given = facts.run.params[index].get(role)
        return "" if isinstance(given, (QuantizedTensor, CachedWeight)) else f"op {index}"
    launch = (facts.forward if forward else facts.backward)[index]
    first = launch.step.indices[0 if forward else -1]
    if index != first or not isinstance(launch.input, QuantizedTensor):
        return f"op {index}"
    before = index - 1 if forward else index + 1
    neighbour = (facts.forward if forward else facts.backward).get(before)
    if neighbour is None:
        return ""
    # a neighbour that casts for itself, as a Quantize does, leaves this quantizer nothing to do
    lent = neighbour.step.next_quantizer if forward else neighbour.step.prev_quantizer  # type: ignore[union-attr]
    return "" if lent is None else f"op {before}"


class _Owners:
    """Who holds a tensor already, so that keeping it costs nothing more."""

    def __init__(self, facts: _Facts) -> None:
        self.facts = facts
        self.params = {_owner(leaf) for leaf in leaves(facts.run.params)}
        self.inputs = {_owner(leaf) for leaf in leaves((facts.run.x, facts.run.extra_inputs))}
        self.kept: set[int] = set()

    def saved(self, index: int) -> tuple[Saved, ...]:
        """What one op keeps."""
        found: list[tuple[str, Any]] = []
        _walk(self.facts.run.saved[index], "", found)
        return tuple(self._saved(name, value) for name, value in found)

    def _saved(self, name: str, value: Any) -> Saved:
        own = [value] if isinstance(value, torch.Tensor) else leaves(value)
        parts = {_owner(leaf): leaf for leaf in own}
        held = self.kept, self.params
        new = {owner: leaf for owner, leaf in parts.items() if not any(owner in owners for owners in held)}
        if self.params.issuperset(parts):
            origin = "parameter"
        elif not new:
            origin = "shared"
        else:
            origin = "input" if self.inputs.issuperset(parts) else "made"
        self.kept.update(new)
        # a view keeps all that it is a view of
        cost = sum(leaf.untyped_storage().nbytes() for leaf in new.values())
        return Saved(name, self.facts.tensor(value), origin, cost)


def _owner(tensor: Any) -> int:
    """Whose memory a tensor is."""
    return id(tensor if tensor._base is None else tensor._base)


def _walk(value: Any, path: str, found: list[tuple[str, Any]]) -> None:
    """Tensors of a saved tree with the names of the fields that lead to them."""
    if value is None or isinstance(value, QuantizedTensor) or hasattr(value, "element_size"):
        if value is not None:
            found.append((path.rstrip("_") or "tensor", value))
        return
    names = getattr(type(value), "_tree_children", None)
    if names is not None:
        pairs = [(name, getattr(value, name)) for name in names]
    elif isinstance(value, dict):
        pairs = [(str(key), value[key]) for key in sorted(value)]
    elif isinstance(value, (tuple, list)):
        pairs = [(str(place), child) for place, child in enumerate(value)]
    else:
        return
    for name, child in pairs:
        _walk(child, f"{path}.{name}" if path else name, found)


# ---- steps ----


def _steps(facts: _Facts, direction: str) -> tuple[Step, ...]:
    launches = facts.run.forward if direction == "forward" else facts.run.backward
    alone = facts.forward_alone if direction == "forward" else facts.backward_alone
    # launches that are alike share their specs
    known: dict[Any, dict[str, Any]] = {}
    found = []
    for position, launch in enumerate(launches):
        step = launch.step
        op: Any = step.op
        own = [launch]
        if step.fused and getattr(op, f"{direction}_work") is None:
            order = step.indices if direction == "forward" else tuple(reversed(step.indices))
            own = [alone[index] for index in order if index in alone]
        key = (op, id(launch.specs), *[id(one.specs) for one in own])
        if key not in known or launch.specs is None:
            known[key] = _described_step(facts.plan, launch, own, direction)
        ends = facts.tensor(launch.input), facts.tensor(launch.output)
        found.append(Step(direction, position, step.indices, input=ends[0], output=ends[1], **known[key]))
    return tuple(found)


def _described_step(plan: Plan, launch: Launch, own: list[Launch], direction: str) -> dict[str, Any]:
    """The fields of a step that launches which are alike share.

    Args:
        plan: the plan.
        launch: the launch.
        own: whose work it does: its own, or the launches of the ops that it covers.
        direction: ``"forward"`` or ``"backward"``.
    """
    op: Any = launch.step.op
    inline = op.inline_forward if direction == "forward" else op.inline_backward
    fast = kernels(plan.backend).fast_accumulation
    works = [work_of(one, direction) for one in own]
    return {
        "kind": type(op).__name__,
        "rule": launch.step.fused,
        "inline": inline,
        "custom_op": op.custom_op_name(direction) or "",
        "gate": _gate(op, inline, plan.traceable),
        "kernels": () if inline else kernels_of(launch, works, direction, fast),
    }


def _gate(op: Any, inline: bool, traceable: bool) -> str:
    """Why a compiled graph does not hold a custom op that the compiler sees through, or an empty string."""
    if inline:
        return "hands on its input or a view of it, which a custom op may not"
    reason: str | None = op.compile_unsupported_reason()
    if reason is not None:
        return f"{reason}: the compiled graph traces its implementation"
    if not traceable:
        return "the backend's kernels are closed to the compiler"
    return "declared opaque: closed to the compiler" if getattr(op, "opaque", False) else ""


# ---- edges ----


def _forward_edges(facts: _Facts) -> list[Edge]:
    count = len(facts.plan.chain.ops)
    edges = []
    for target in range(count):
        launch = facts.forward[target]
        inside = launch.step.indices[0] != target
        tensor = facts.tensor(facts.forward_alone[target].input if inside else launch.input)
        edges.append(_edge(facts, "forward", (target - 1, target), tensor, inside))
    last = facts.tensor(facts.run.forward[-1].output)
    return [*edges, Edge("forward", count - 1, count, last, False, "", "")]


def _backward_edges(facts: _Facts) -> list[Edge]:
    edges = []
    first = None
    for target in reversed(range(len(facts.plan.chain.ops))):
        launch = facts.backward.get(target)
        if launch is None:
            break
        first = target
        inside = launch.step.indices[-1] != target
        tensor = facts.tensor(facts.backward_alone[target].input if inside else launch.input)
        edges.append(_edge(facts, "backward", (target + 1, target), tensor, inside))
    if first == 0 and facts.plan.requires_grad[0]:
        edges.append(Edge("backward", 0, -1, facts.tensor(facts.run.backward[-1].output), False, "", ""))
    return edges


def _edge(facts: _Facts, direction: str, ends: tuple[int, int], tensor: Tensor, inside: bool) -> Edge:
    role = "input" if direction == "forward" else "grad_output"
    source, target = ends
    launch = (facts.forward if direction == "forward" else facts.backward)[target]
    step = launch.step
    roles = [own.rstrip(_DIGITS) for own, _ in step.quantizers[step.indices.index(target)]]
    if role not in roles:
        return Edge(direction, source, target, tensor, inside, "", "")
    by = _cast_by(facts, target, role, direction)
    return Edge(
        direction, source, target, tensor, inside, role, "target" if by == f"op {target}" else "source" if by else ""
    )


def without_fusions(plan: Plan) -> bool:
    """Whether a plan has no fused step."""
    return not (any(step.fused for step in plan.forward) or any(step.fused for step in plan.backward))


NO_FUSIONS = Fusions()


def with_unreached(graph: Graph, ops: tuple[Any, ...], error: str) -> Graph:
    """The graph of the ops before a fault, with the op that is at fault and those behind it as nodes without more."""
    nodes = list(graph.ops)
    for index in range(len(nodes), len(ops)):
        op = ops[index]
        fault = index == len(graph.ops) and not graph.error
        state, own = ("error", error) if fault else ("not reached", "")
        kind, name = type(op).__name__, getattr(op, "name", "")
        nodes.append(OpNode(index=index, kind=kind, name=name, config=repr(op), state=state, error=own))
    return dataclasses.replace(graph, ops=tuple(nodes), error=graph.error or error)
