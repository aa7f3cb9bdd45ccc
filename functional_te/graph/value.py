"""The op graph as a value: ops, steps of both directions, the tensors between them, what is kept and what it costs."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from functional_te.graph.devices import Device
    from functional_te.graph.diff import GraphDiff
    from functional_te.graph.scale import Scaled

__all__ = ["Cast", "Edge", "ExtraInput", "ExtraOutput", "Graph", "Kernel", "OpNode", "Saved", "Step", "Tensor"]


@dataclasses.dataclass(frozen=True)
class Tensor:
    """What is known of a tensor before it exists.

    Attributes:
        shape: the dimensions.
        dtype: element type of the values, ``"bfloat16"``; nominal if the tensor is cast.
        format: how it is stored: the same, or the format of its cast, ``"E4M3 per tensor"``.
        quantizer: class of the quantizer that made the cast, or an empty string.
        copies: the copies of a cast that are there, of ``"rowwise"`` and ``"columnwise"``.
        nbytes: bytes of all copies and their scales.
    """

    shape: tuple[int, ...]
    dtype: str
    format: str
    quantizer: str
    copies: tuple[str, ...]
    nbytes: int


@dataclasses.dataclass(frozen=True)
class Cast:
    """A quantizer of an op and what it does.

    Attributes:
        role: ``"input"``, ``"weight"``, ``"grad_output"``, ...
        quantizer: class of the quantizer.
        format: the format of its elements and scales.
        copies: the copies that it makes.
        state: what it remembers between steps: ``"scale"``, ``"key"`` or an empty string.
        by: where the cast runs: ``"op 3"`` itself, or the step of the op before or behind, which ends in the cast.
            An empty string if nothing is cast, because the tensor comes in cast.
    """

    role: str
    quantizer: str
    format: str
    copies: tuple[str, ...]
    state: str
    by: str


@dataclasses.dataclass(frozen=True)
class ExtraInput:
    """A side branch that comes in.

    Attributes:
        slot: position among the op's extra inputs.
        source: index of the op that makes it, or -1 if the caller does.
        position: position among the extra inputs of the chain, or the producer's slot.
        channel: name of its channel, or None.
        tensor: the tensor.
    """

    slot: int
    source: int
    position: int
    channel: str | None
    tensor: Tensor


@dataclasses.dataclass(frozen=True)
class ExtraOutput:
    """A side branch that goes out.

    Attributes:
        slot: position among the op's extra outputs.
        channel: name of its channel, or None.
        to_caller: whether the chain returns it.
        tensor: the tensor.
    """

    slot: int
    channel: str | None
    to_caller: bool
    tensor: Tensor


@dataclasses.dataclass(frozen=True)
class Saved:
    """A tensor that a forward keeps for the backward.

    Attributes:
        name: where it is in what the op keeps.
        tensor: the tensor.
        origin: ``"made"`` by a step, ``"input"`` of the chain, ``"parameter"``, or ``"shared"`` with an op before that
            keeps it anyway. The last two cost nothing.
        nbytes: what keeping it costs.
    """

    name: str
    tensor: Tensor
    origin: str
    nbytes: int


@dataclasses.dataclass(frozen=True)
class OpNode:
    """A basic op of the chain.

    Attributes:
        index: its place.
        kind: its class.
        name: its own name, or an empty string.
        config: how it is written.
        input: what comes in, if it was a step of its own.
        output: what goes out, likewise.
        params: parameters by name.
        casts: its quantizers.
        extra_inputs: side branches that come in.
        extra_outputs: side branches that go out.
        saved: what is kept for its backward.
        state: ``"ok"``, ``"assumed"`` (it has no fake, so its output is taken to be like its input), ``"error"`` or
            ``"not reached"``.
        error: what is wrong with it, or an empty string.
    """

    index: int
    kind: str
    name: str
    config: str
    input: Tensor | None = None
    output: Tensor | None = None
    params: tuple[tuple[str, Tensor], ...] = ()
    casts: tuple[Cast, ...] = ()
    extra_inputs: tuple[ExtraInput, ...] = ()
    extra_outputs: tuple[ExtraOutput, ...] = ()
    saved: tuple[Saved, ...] = ()
    state: str = "ok"
    error: str = ""


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A part of a step that runs on its own: a product, a cast, or the pass over all the rest.

    Attributes:
        kind: ``"product"``, ``"cast"``, ``"elementwise"`` or ``"rows"`` (a pass that reduces over rows first).
        flops: operations; None if the op does not say.
        read: bytes that it reads at least.
        written: bytes that it writes at least.
        sizes: of a product, rows and columns of the result and the size that is summed over.
        layout: of a product, ``"nt"`` (forward), ``"nn"`` (input gradient) or ``"tn"`` (weight gradient).
        math: of a product, what the tensor cores multiply: ``"fp8"``, ``"fp8-block"``, ``"mxfp8"``, ``"fp4"``,
            ``"bf16"``, ``"fp32"``.
        fast: of a product, whether it leaves its partial sums in the tensor cores.
        groups: of a product, how many share its rows.
        scaling: of others, how the result is cast: ``"delayed"``, ``"current"``, ``"blocks"`` (of one row or column),
            ``"tiles"`` (of several), or an empty string for a result in high precision.
    """

    kind: str
    flops: int | None
    read: int
    written: int
    sizes: tuple[int, int, int] = (0, 0, 0)
    layout: str = ""
    math: str = ""
    fast: bool = False
    groups: int = 1
    scaling: str = ""


@dataclasses.dataclass(frozen=True)
class Step:
    """A launch of the plan.

    Attributes:
        direction: ``"forward"`` or ``"backward"``.
        position: its place in the order in which the direction runs.
        indices: the basic ops it covers.
        kind: class of the basic or fused op that runs.
        rule: whether it is a fusion.
        inline: whether it launches nothing: it hands on its input or a view of it.
        custom_op: name of its custom op in a compiled graph, or an empty string.
        gate: why a compiled graph does not hold a transparent custom op, or an empty string.
        input: what comes in.
        output: what goes out.
        kernels: what runs.
    """

    direction: str
    position: int
    indices: tuple[int, ...]
    kind: str
    rule: bool
    inline: bool
    custom_op: str
    gate: str
    input: Tensor
    output: Tensor
    kernels: tuple[Kernel, ...] = ()

    @property
    def flops(self) -> int | None:
        """Operations of all kernels; None if some kernel's are unknown."""
        counts = [kernel.flops for kernel in self.kernels]
        return None if None in counts else sum(count or 0 for count in counts)

    @property
    def read(self) -> int:
        """Bytes that its kernels read."""
        return sum(kernel.read for kernel in self.kernels)

    @property
    def written(self) -> int:
        """Bytes that its kernels write."""
        return sum(kernel.written for kernel in self.kernels)


@dataclasses.dataclass(frozen=True)
class Edge:
    """The main tensor, or its gradient, between two neighbours.

    Attributes:
        direction: ``"forward"`` or ``"backward"``.
        source: op it leaves; -1 is the caller, and so is the number of ops in the backward.
        target: op it reaches; the number of ops is the caller, and so is -1 in the backward.
        tensor: the tensor.
        inside: whether it is inside of a fusion, so that no step hands it to another; its kernels may not store it.
        role: role of the target's quantizer for it, or an empty string.
        cast_by: ``"source"`` or ``"target"`` for the step that casts it, or an empty string.
    """

    direction: str
    source: int
    target: int
    tensor: Tensor
    inside: bool
    role: str
    cast_by: str


@dataclasses.dataclass(frozen=True, repr=False)
class Graph:
    """What a chain does, forward and backward, without data: :func:`functional_te.graph` makes it.

    Prints as text, and draws itself in notebooks.

    Attributes:
        ops: the basic ops.
        forward: the steps in the order they run.
        backward: likewise: the last ops first.
        edges: the main tensors between ops, forward then backward.
        recipe: the recipe as it is written, or an empty string.
        backend: name of the kernel backend.
        device: the device that times are estimated for.
        refusals: matches of fusions that were not applied: (rule, first op, reason).
        outputs: the main output and the extra outputs that the caller gets.
        error: what is wrong with the chain, or an empty string; then the graph ends before the op that is marked.
    """

    ops: tuple[OpNode, ...]
    forward: tuple[Step, ...]
    backward: tuple[Step, ...]
    edges: tuple[Edge, ...]
    recipe: str
    backend: str
    device: Device
    refusals: tuple[tuple[str, int, str], ...] = ()
    outputs: tuple[Tensor, ...] = ()
    error: str = ""

    @property
    def steps(self) -> tuple[Step, ...]:
        """The steps of both directions."""
        return (*self.forward, *self.backward)

    @property
    def saved_bytes(self) -> int:
        """Bytes kept from the forward to the backward, parameters aside; each tensor counts once."""
        return sum(saved.nbytes for op in self.ops for saved in op.saved)

    @property
    def flops(self) -> int:
        """Operations of both directions, as far as they are known."""
        return sum(kernel.flops or 0 for step in self.steps for kernel in step.kernels)

    def time(self, direction: str | None = None) -> float:
        """Estimated seconds of one direction, or of both; see :mod:`functional_te.graph.roofline`."""
        from functional_te.graph.roofline import estimate

        steps = self.steps if direction is None else getattr(self, direction)
        return sum(estimate(step, self.device).seconds for step in steps)

    def on(self, device: Any) -> Graph:
        """The same graph with times for another device: a name, or a :class:`functional_te.graph.devices.Device`."""
        from functional_te.graph.devices import device_of

        return dataclasses.replace(self, device=device_of(device))

    def scale(self, *, tp: int = 1, dp: int = 1, layers: int = 1, **options: Any) -> Scaled:
        """The estimate for ``tp * dp`` devices, messages included; see :func:`functional_te.graph.scale.scale`.

        Args:
            tp: ranks that share every linear layer.
            dp: ranks that share the batch.
            layers: how many such blocks follow each other.
            options: more arguments of that function.
        """
        from functional_te.graph.scale import scale

        return scale(self, tp=tp, dp=dp, layers=layers, **options)

    def diff(self, other: Graph) -> GraphDiff:
        """What is different in ``other``; prints as text and draws itself with the differences marked."""
        from functional_te.graph.diff import diff

        return diff(self, other)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain Python values that ``json.dumps`` takes; docs/graph.md describes the fields."""
        from functional_te.graph.serialize import to_dict

        return to_dict(self)

    def to_mermaid(self, *, collapse: bool = True) -> str:
        """A flowchart for Mermaid, which GitHub and many editors draw."""
        from functional_te.graph.mermaid import to_mermaid

        return to_mermaid(self, collapse=collapse)

    def to_svg(self, *, collapse: bool = True, theme: str = "auto") -> str:
        """A drawing.

        Args:
            collapse: whether blocks that repeat are drawn once.
            theme: ``"light"``, ``"dark"``, or ``"auto"`` for what the viewer prefers.
        """
        from functional_te.graph.svg import to_svg

        return to_svg(self, collapse=collapse, theme=theme)

    def to_networkx(self) -> Any:
        """A ``networkx.MultiDiGraph`` of the basic ops, with the fields of :meth:`to_dict` as attributes.

        Raises:
            ImportError: networkx is not installed.
        """
        from functional_te.graph.networkx import to_networkx

        return to_networkx(self)

    def __repr__(self) -> str:
        from functional_te.graph.text import to_text

        return to_text(self)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        """HTML for notebooks, a drawing for viewers that drop drawings from HTML, text for terminals."""
        from functional_te.graph.html import mimebundle

        return mimebundle(self, include, exclude)
