"""An op may save plain values beside tensors: they come back in the backward, and new values compile nothing new."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import pytest
import torch

import bridge
import functional_te as fte

from .compiled import graph_count


@fte.node
class TimesArgs:
    """A tensor and a factor."""

    x: torch.Tensor
    factor: float


@dataclasses.dataclass(frozen=True, eq=False)
class Times(fte.Op):
    """``y = x * factor`` with the factor a forward kwarg."""

    fwd_args_type: ClassVar[type[Any]] = TimesArgs
    bwd_args_type: ClassVar[type[Any]] = TimesArgs

    def resolve_fwd_args(self, input_, *, params, state, requires_grad, factor: float = 1.0):
        return TimesArgs(x=input_, factor=factor)

    @staticmethod
    def setup_context(args, aux):
        return args.factor, args.x

    def resolve_bwd_args(self, ctx, grad_output):
        return TimesArgs(x=grad_output, factor=ctx.saved[0])

    @staticmethod
    def forward_impl(args):
        return args.x * args.factor, ()

    @staticmethod
    def forward_fake(args):
        return args.x, ()

    @staticmethod
    def backward_impl(args):
        return (args.x * args.factor,)

    @staticmethod
    def backward_fake(args):
        return (args.x,)


BLOCK = fte.chain(Times(), fte.SReLU())


def run(x: torch.Tensor, factor: float) -> torch.Tensor:
    return bridge.apply(BLOCK, ({}, {}), x, kwargs={0: {"factor": factor}})[0]


def expected_grad(x: torch.Tensor, factor: float) -> torch.Tensor:
    return (2 * torch.relu(x * factor) * factor).detach()


@pytest.mark.parametrize("mode", ["eager", "compiled"])
def test_values_an_op_saves_reach_its_backward(dynamo, mode) -> None:
    function = torch.compile(run, fullgraph=True, backend="aot_eager") if mode == "compiled" else run
    for factor in (1.5, 2.0, 3.0, 0.5):
        x = torch.randn(5, requires_grad=True)
        function(x, factor).sum().backward()
        torch.testing.assert_close(x.grad, expected_grad(x, factor))
    if mode == "compiled":
        assert graph_count(dynamo) == 2


def test_values_an_op_saves_under_func_transforms() -> None:
    x = torch.randn(5)
    torch.testing.assert_close(torch.func.grad(lambda x: run(x, 2.5).sum())(x), expected_grad(x, 2.5))


@fte.node
class SliceArgs:
    """A tensor and the (start, length) to keep of its last dimension."""

    x: torch.Tensor
    span: tuple[int, ...] = fte.static(default=())


@dataclasses.dataclass(frozen=True, eq=False)
class Masked(fte.Op):
    """Zero everything outside of ``span``, a tuple-valued forward kwarg."""

    fwd_args_type: ClassVar[type[Any]] = SliceArgs
    bwd_args_type: ClassVar[type[Any]] = SliceArgs

    def resolve_fwd_args(self, input_, *, params, state, requires_grad, span: tuple[int, ...] = (0, 1)):
        return SliceArgs(x=input_, span=span)

    @staticmethod
    def setup_context(args, aux):
        return SliceArgs(x=args.x.new_empty(0), span=args.span)

    def resolve_bwd_args(self, ctx, grad_output):
        return SliceArgs(x=grad_output, span=ctx.saved.span)

    @staticmethod
    def forward_impl(args):
        start, length = args.span
        kept = args.x.narrow(-1, start, length)
        return torch.nn.functional.pad(kept, (start, args.x.shape[-1] - start - length)), ()

    @staticmethod
    def forward_fake(args):
        return args.x, ()

    @staticmethod
    def backward_impl(args):
        return (Masked.forward_impl(args)[0],)

    @staticmethod
    def backward_fake(args):
        return (args.x,)


def test_a_tuple_kwarg_may_change(dynamo) -> None:
    block = fte.chain(Masked())

    def masked(x, span):
        return bridge.apply(block, ({},), x, kwargs={0: {"span": span}})[0]

    compiled = torch.compile(masked, fullgraph=True, backend="aot_eager")
    for span in ((1, 2), (1, 3), (0, 4), (1, 2)):
        x = torch.randn(2, 6, requires_grad=True)
        compiled(x, span).sum().backward()
        expected = torch.zeros(2, 6)
        expected[:, span[0] : sum(span)] = 1.0
        assert torch.equal(x.grad, expected)
