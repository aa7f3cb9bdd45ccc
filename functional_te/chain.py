"""Chains: frozen values that hold ops in order and say where every extra tensor comes from."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from functional_te._errors import kind_of, type_error, value_error
from functional_te._value import Table, Value, value_of
from functional_te.ops import BasicLinear, Bias, Op
from functional_te.torch_compat import assume_constant_result

__all__ = ["Chain", "ExtraSource", "Linear", "as_chain", "chain", "where"]


@dataclasses.dataclass(frozen=True, eq=False)
class ExtraSource(Value):
    """Where an extra input comes from: an input of the chain, or an extra output of an earlier op.

    Attributes:
        public: position among the chain's extra inputs, or -1.
        op: index of the producer, or -1.
        slot: extra-output slot of the producer.
    """

    public: int = -1
    op: int = -1
    slot: int = 0


@dataclasses.dataclass(frozen=True, eq=False)
class Chain(Value):
    """Ops in order. Build with :func:`chain`; equal chains are one object.

    Attributes:
        ops: the basic ops.
        extra_sources: for every op, the :class:`ExtraSource` of each of its extra inputs.
        num_extra_inputs: how many extra inputs the caller passes, in (op, slot) order.
        extra_outputs: the (op, slot) pairs returned to the caller, in that order.
    """

    ops: tuple[Op, ...]

    extra_sources: tuple[tuple[ExtraSource, ...], ...] = dataclasses.field(init=False, default=())
    num_extra_inputs: int = dataclasses.field(init=False, default=0)
    extra_outputs: tuple[tuple[int, int], ...] = dataclasses.field(init=False, default=())

    def __post_init__(self) -> None:
        sources, count = _resolve_channels(self.ops)
        object.__setattr__(self, "extra_sources", sources)
        object.__setattr__(self, "num_extra_inputs", count)
        returned = tuple(
            (index, slot)
            for index, op in enumerate(self.ops)
            for slot, to_caller in enumerate(op.extra_outputs_to_caller)
            if to_caller
        )
        object.__setattr__(self, "extra_outputs", returned)
        # the ops that take forward kwargs
        object.__setattr__(self, "kwarg_ops", tuple(i for i, op in enumerate(self.ops) if op.fwd_kwarg_names))
        # caches of what is derived from this value; see fuser.plan and pipeline.check
        object.__setattr__(self, "plans", {})
        object.__setattr__(self, "checked", {})

    def __len__(self) -> int:
        return len(self.ops)

    def __repr__(self) -> str:
        return "chain(\n" + "".join(f"    {op!r},  # {index}\n" for index, op in enumerate(self.ops)) + ")"

    def __reduce__(self) -> tuple[Any, ...]:
        return Chain, (self.ops,)


def where(ops: tuple[Op, ...], index: int) -> str:
    """How messages name an op: index, class, and its own name if it has one."""
    op = ops[index]
    return f"op {index} ({type(op).__name__}{f' {op.name!r}' if op.name else ''})"


def _producers(ops: tuple[Op, ...]) -> dict[str, tuple[int, int]]:
    producers: dict[str, tuple[int, int]] = {}
    for index, op in enumerate(ops):
        for slot, channel in enumerate(op.extra_output_channels):
            if channel is None:
                continue
            if channel in producers:
                first = where(ops, producers[channel][0])
                raise ValueError(
                    f"{where(ops, index)}: channel {channel!r} has multiple producers: {first} and this op."
                )
            producers[channel] = (index, slot)
    return producers


def _resolve_channels(ops: tuple[Op, ...]) -> tuple[tuple[tuple[ExtraSource, ...], ...], int]:
    producers = _producers(ops)
    count, sources = 0, []
    for index, op in enumerate(ops):
        mine = []
        for channel in op.extra_input_channels:
            if channel is None:
                mine.append(ExtraSource(public=count))
                count += 1
                continue
            if channel not in producers:
                known = f"one of {sorted(producers)}" if producers else "a channel that some op produces"
                raise ValueError(f"{where(ops, index)}: channel {channel!r} has no producer: expected {known}.")
            producer, slot = producers[channel]
            if producer >= index:
                raise ValueError(
                    f"{where(ops, index)}: channel {channel!r} has no earlier producer: "
                    f"{where(ops, producer)} comes {'later' if producer > index else 'from the op itself'}."
                )
            mine.append(ExtraSource(op=producer, slot=slot))
        sources.append(tuple(mine))
    return tuple(sources), count


def chain(*ops: Op | Chain) -> Chain:
    """Compose ops; nested chains are flattened into their basic ops.

    Args:
        ops: ops and chains in the order they run.

    Raises:
        TypeError: an argument is neither an op nor a chain.
        ValueError: no ops, a channel without an (earlier) producer, or with two producers.
    """
    if not ops:
        raise value_error("chain", "ops", "at least one op", "none")
    flat: list[Op] = []
    for index, op in enumerate(ops):
        if isinstance(op, Chain):
            flat.extend(op.ops)
        elif isinstance(op, Op):
            flat.append(op)
        else:
            got = op.__name__ + " (a class; call it)" if isinstance(op, type) else type(op).__name__
            raise type_error("chain", f"argument {index}", "an op or a chain", got)
    return Chain(tuple(flat))


def as_chain(block: Any) -> Chain:
    """``block`` as a chain: a chain as it is, an op as a chain of one.

    Raises:
        TypeError: anything else.
    """
    if isinstance(block, (Chain, Op)) and not hasattr(block, "uid"):
        raise value_error("chain", "block", "an op or chain made outside of the compiled function", "one made inside")
    if isinstance(block, Chain):
        return block
    if isinstance(block, Op):
        if torch.compiler.is_compiling():
            return getattr(_traced, _chain_of(block.uid))
        return Chain((block,))
    raise type_error("chain", "block", "a chain or an op", kind_of(block))


_traced = Table()


@assume_constant_result
def _chain_of(op: str) -> str:
    """Make the chain of one op, for real while a caller is traced: a traced constructor does not intern."""
    name = f"chain_{op}"
    setattr(_traced, name, Chain((value_of(op),)))
    return name


def Linear(in_features: int, out_features: int, *, bias: bool = True, name: str = "") -> Chain:
    """A linear layer: :class:`BasicLinear`, followed by :class:`Bias` if ``bias``.

    Args:
        in_features: size of the last input dimension.
        out_features: size of the last output dimension.
        bias: whether a bias is added. Note that a new bias is zero.
        name: name of both ops.

    Returns:
        A chain of one or two basic ops, with one entry each in ``params``.
    """
    linear = BasicLinear(in_features, out_features, name=name)
    return chain(linear, Bias(out_features, name=name)) if bias else chain(linear)
