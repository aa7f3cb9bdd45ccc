"""A graph on many devices: what each of them computes and sends, and how long a step takes at best.

Tensor parallel shards the linear layers of the chain in turns: the first by output features (column), the next by input
features (row), with rows sharded in between (sequence parallel); see :class:`functional_te.TensorParallel`. Data
parallel shards parameters as FSDP2 does, or copies them as DistributedDataParallel does.

A message of ``n`` ranks takes ``(n - 1) / n`` of the gathered bytes through the link of one rank, and a latency: what a
ring needs, and what no algorithm without sums in the network beats (Patarasuk and Yuan, "Bandwidth optimal all-reduce
algorithms for clusters of workstations", 2009). Messages of tensor parallel count as waited for, though the sum of
an input gradient runs beside the product of the weight's. Those of data parallel run beside the computation of the same
direction, so the longer of both counts.

Computation is that of :mod:`functional_te.graph.roofline`, with the sizes of one rank. Where a kernel is not a product,
rank and rank share its bytes evenly.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from functional_te._errors import value_error
from functional_te.graph.roofline import estimate
from functional_te.graph.units import bytes_text, time_text
from functional_te.graph.value import Graph, Kernel, OpNode, Step, Tensor
from functional_te.ops.common import check_size

__all__ = ["LINKS", "Link", "Message", "Scaled", "scale"]

_WHERE = "graph.scale"
_SHARDINGS = ("fsdp", "fsdp-fp8", "ddp")
_PER_TENSOR = ("Float8CurrentScalingQuantizer", "Float8DelayedScalingQuantizer")


@dataclasses.dataclass(frozen=True)
class Link:
    """What connects devices.

    Attributes:
        name: how it is called.
        bandwidth: GB/s that one device sends while it receives as much, in large messages.
        latency: seconds that a message takes at least.
        source: where the numbers come from.
    """

    name: str
    bandwidth: float
    latency: float
    source: str


_ASSUMED = "the data sheet's rate of one direction, times 0.8; latency assumed. Not measured here"
_MEASURED = "all-gathers of 32 and 256 MiB by NCCL between two H200s, a ring without sums in the network"
LINKS: Mapping[str, Link] = MappingProxyType(
    {
        link.name: link
        for link in (
            Link("NVLink 3", 0.8 * 300, 10e-6, _ASSUMED),  # A100
            Link("NVLink 4", 244, 23e-6, _MEASURED),  # H100, H200
            Link("NVLink 5", 0.8 * 900, 10e-6, _ASSUMED),  # B200
            Link("InfiniBand NDR", 0.8 * 50, 20e-6, _ASSUMED),  # 400 Gbit/s for each device
        )
    }
)
_NODE_LINKS = {"A100": "NVLink 3", "H100": "NVLink 4", "H200": "NVLink 4", "B200": "NVLink 5"}


@dataclasses.dataclass(frozen=True)
class Message:
    """A collective of one block.

    Attributes:
        axis: ``"tp"`` or ``"dp"``.
        direction: ``"forward"`` or ``"backward"``.
        kind: ``"all-gather"``, ``"reduce-scatter"`` or ``"all-reduce"``.
        what: what is sent, ``"op 2 input"``.
        nbytes: bytes of the gathered tensor, or of the one that is summed.
        seconds: the time.
    """

    axis: str
    direction: str
    kind: str
    what: str
    nbytes: int
    seconds: float


@dataclasses.dataclass(frozen=True, repr=False)
class Scaled:
    """A graph on ``tp * dp`` devices. Prints as text.

    Attributes:
        graph: the graph on one device, with the rows that one data-parallel rank has.
        tp: ranks that share every linear layer.
        dp: ranks that share the batch.
        layers: how many such blocks follow each other.
        forward: seconds that one block computes, forward.
        backward: likewise, backward.
        messages: what one block sends.
        links: names of the links of tensor and of data parallel.
    """

    graph: Graph
    tp: int
    dp: int
    layers: int
    forward: float
    backward: float
    messages: tuple[Message, ...]
    links: tuple[str, str]

    def message_seconds(self, axis: str, direction: str) -> float:
        """Seconds of the messages of one axis and direction, of one block."""
        own = (message.seconds for message in self.messages if (message.axis, message.direction) == (axis, direction))
        return sum(own)

    @property
    def seconds(self) -> float:
        """A step, forward and backward, of all blocks."""
        total = 0.0
        for direction, computed in (("forward", self.forward), ("backward", self.backward)):
            waited = computed + self.message_seconds("tp", direction)
            total += max(waited, self.message_seconds("dp", direction))
        return self.layers * total

    @property
    def efficiency(self) -> float:
        """Rows per second and device, as a share of one device's that has no others."""
        return self.layers * self.graph.time() / (self.tp * self.seconds) if self.seconds else 1.0

    def __repr__(self) -> str:
        computed = self.layers * (self.forward + self.backward)
        head = f"{self.tp * self.dp} x {self.graph.device.name}: tp={self.tp}, dp={self.dp}, layers={self.layers}"
        rate = f"{time_text(self.seconds)} a step, {100 * self.efficiency:.0f} % of one device's rate"
        lines = [f"{head}: {rate}", f"  computation {time_text(computed)}"]
        for axis, link in zip(("tp", "dp"), self.links, strict=True):
            own = [message for message in self.messages if message.axis == axis]
            if own:
                sent, spent = sum(message.nbytes for message in own), sum(message.seconds for message in own)
                how = "waited for" if axis == "tp" else "beside computation"
                lines.append(
                    f"  {axis} messages over {link}: {self.layers * len(own)}, {bytes_text(self.layers * sent)}, "
                    f"{time_text(self.layers * spent)}, {how}"
                )
        return "\n".join(lines)


def scale(
    graph: Graph,
    *,
    tp: int = 1,
    dp: int = 1,
    layers: int = 1,
    first: str = "column",
    sharding: str = "fsdp",
    links: tuple[Link | None, Link | None] = (None, None),
    node: int = 8,
) -> Scaled:
    """Estimate a graph on ``tp * dp`` devices.

    Args:
        graph: of one block, with the rows of one data-parallel rank, forward and backward.
        tp: ranks that share every linear layer.
        dp: ranks that share the batch.
        layers: how many such blocks follow each other.
        first: how the first linear layer is sharded: ``"column"``, or ``"row"`` in a chain that begins with the second
            half of a pair.
        sharding: of data parallel: ``"fsdp"``, ``"fsdp-fp8"`` (weights that are cast per tensor are gathered in FP8),
            or ``"ddp"`` (every rank has all parameters).
        links: between the devices of a node, None for that of the graph's device; and between nodes, None for
            InfiniBand of 400 Gbit/s for each device.
        node: devices of a node. Ranks of tensor parallel come first in one.

    Raises:
        TypeError: a number that is none.
        ValueError: a number below 1, another ``first`` or ``sharding``, a graph with an error, a device whose link is
            not known, or layers that ``tp`` cannot share.
    """
    for name, value in (("tp", tp), ("dp", dp), ("layers", layers), ("node", node)):
        check_size(value, _WHERE, name)
    if graph.error:
        raise value_error(_WHERE, "graph", "one of a chain without error", graph.error)
    for name, choice, known in (("first", first, ("column", "row")), ("sharding", sharding, _SHARDINGS)):
        if choice not in known:
            raise value_error(_WHERE, name, f"one of {known}", repr(choice))
    near = links[0] if links[0] is not None else _link_of(graph)
    far = links[1] if links[1] is not None else LINKS["InfiniBand NDR"]
    modes = _modes(graph, tp, first)
    times = [
        sum(estimate(_shared(step, modes, tp), graph.device).seconds for step in steps)
        for steps in (graph.forward, graph.backward)
    ]
    between = near if tp * dp <= node else far
    inside = near if tp <= node else far
    messages = _tensor_parallel(graph, modes, tp, inside)
    messages += _data_parallel(graph, modes, (tp, dp), between, sharding)
    return Scaled(graph, tp, dp, layers, times[0], times[1], tuple(messages), (inside.name, between.name))


def _link_of(graph: Graph) -> Link:
    name = _NODE_LINKS.get(graph.device.name)
    if name is None:
        raise value_error(_WHERE, "links", "a Link", None, f"That of {graph.device.name} is not known.")
    return LINKS[name]


def _modes(graph: Graph, tp: int, first: str) -> dict[int, str]:
    """For every linear layer, by index of its op, how it is sharded."""
    modes: dict[int, str] = {}
    turns = ("column", "row") if first == "column" else ("row", "column")
    for op in graph.ops:
        if op.kind == "GroupedLinear" and tp > 1:
            raise value_error(_WHERE, "tp", "1 for a graph with grouped linear layers", tp)
        if op.kind != "BasicLinear":
            continue
        modes[op.index] = turns[len(modes) % 2]
        (rows, columns) = dict(op.params)["weight"].shape
        features = rows if modes[op.index] == "column" else columns
        if features % tp:
            raise value_error(_WHERE, "tp", f"a divisor of the {features} features of op {op.index}", tp)
    return modes


def _shared(step: Step, modes: dict[int, str], tp: int) -> Step:
    """A step with the kernels of one rank."""
    if tp == 1:
        return step
    mode = next((modes[index] for index in step.indices if index in modes), "")
    return dataclasses.replace(step, kernels=tuple(_shared_kernel(kernel, mode, tp) for kernel in step.kernels))


# which of (rows, columns, summed) of a product a rank has a part of
_PARTS = {
    ("column", "nt"): 1,
    ("column", "nn"): 2,
    ("column", "tn"): 0,
    ("row", "nt"): 2,
    ("row", "nn"): 1,
    ("row", "tn"): 1,
}


def _shared_kernel(kernel: Kernel, mode: str, tp: int) -> Kernel:
    flops = None if kernel.flops is None else kernel.flops // tp
    if kernel.kind != "product" or not mode:
        return dataclasses.replace(kernel, flops=flops, read=kernel.read // tp, written=kernel.written // tp)
    old = kernel.sizes
    place = _PARTS[mode, kernel.layout]
    new: Any = tuple(size // tp if index == place else size for index, size in enumerate(old))
    read = kernel.read * ((new[0] + new[1]) * new[2]) // max(1, (old[0] + old[1]) * old[2])
    written = kernel.written * new[0] * new[1] // max(1, old[0] * old[1])
    return dataclasses.replace(kernel, flops=flops, read=read, written=written, sizes=new)


def _message(axis: str, direction: str, kind: str, what: str, nbytes: int, ranks: int, link: Link) -> Message:
    share = (ranks - 1) / ranks * (2 if kind == "all-reduce" else 1)
    return Message(axis, direction, kind, what, nbytes, link.latency + share * nbytes / (link.bandwidth * 1e9))


def _item(dtype: str) -> int:
    found: Any = getattr(torch, dtype)
    return int(found.itemsize)


def _values(tensor: Tensor) -> int:
    return math.prod(tensor.shape)


def _casts_per_tensor(op: OpNode, role: str) -> bool:
    return any(cast.role == role and cast.quantizer in _PER_TENSOR for cast in op.casts)


def _tensor_parallel(graph: Graph, modes: dict[int, str], tp: int, link: Link) -> list[Message]:
    """Gathered inputs and summed gradients of column-parallel layers; the reverse of row-parallel ones."""
    found: list[Message] = []
    if tp == 1:
        return found
    for op in graph.ops:
        mode = modes.get(op.index)
        if mode is None or op.input is None or op.output is None:
            continue
        column = mode == "column"
        whole, gathered, role = (op.input, "forward", "input") if column else (op.output, "backward", "grad_output")
        summed = "backward" if column else "forward"
        dense = _values(whole) * _item(whole.dtype)
        cast = _values(whole) if _casts_per_tensor(op, role) else dense
        what = f"op {op.index} {role}"
        found.append(_message("tp", gathered, "all-gather", what, cast, tp, link))
        result = "grad_input" if column else "output"
        found.append(_message("tp", summed, "reduce-scatter", f"op {op.index} {result}", dense, tp, link))
        if column and cast == dense and graph.backward:  # the backward gathers again what is not kept cast
            found.append(_message("tp", "backward", "all-gather", what, dense, tp, link))
    return [message for message in found if message.direction == "forward" or graph.backward]


def _data_parallel(
    graph: Graph, modes: dict[int, str], ranks: tuple[int, int], link: Link, sharding: str
) -> list[Message]:
    """Gathered parameters and summed gradients of one block, as one message each."""
    (tp, dp), sharded, fp8 = ranks, sharding != "ddp", sharding == "fsdp-fp8"
    if dp == 1:
        return []
    gathered = summed = 0
    for op in graph.ops:
        for name, tensor in op.params:
            count = _values(tensor) // (tp if op.index in modes else 1)
            size = _item(tensor.dtype)
            gathered += count * (1 if fp8 and _casts_per_tensor(op, name) else size)
            summed += count * size
    if gathered == 0:
        return []
    found = []
    if sharded:
        found.append(_message("dp", "forward", "all-gather", "parameters", gathered, dp, link))
    if graph.backward:
        if sharded:
            found.append(_message("dp", "backward", "all-gather", "parameters", gathered, dp, link))
        kind = "reduce-scatter" if sharded else "all-reduce"
        found.append(_message("dp", "backward", kind, "gradients", summed, dp, link))
    return found
