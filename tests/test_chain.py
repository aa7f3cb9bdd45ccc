"""Chains: values, channels, flattening; channels against a float64 interpreter."""

import copy
import pickle

import pytest
import torch

import bridge
import functional_te as fte
from functional_te import pytree
from tests import oracles
from tests.helpers import assert_same, double, random_params, require_grad, uniform

ADD, FORK = fte.AddExtraInput, fte.MakeExtraOutput


def hidden(channel: str) -> fte.MakeExtraOutput:
    return FORK(channel=channel, output_to_caller=False)


# ---- values ----------------------------------------------------------------------------------------------------


def build() -> fte.Chain:
    return fte.chain(fte.RMSNorm(8), hidden("r"), fte.Linear(8, 8), ADD(channel="r"))


def test_equal_chains_are_one_object() -> None:
    block = build()
    assert build() is block
    assert hash(build()) == hash(block)
    assert fte.chain(fte.RMSNorm(8), hidden("r"), fte.Linear(8, 8), ADD()) != block
    assert fte.chain(fte.RMSNorm(8, eps=1e-6), *block.ops[1:]) is not block


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda block: pickle.loads(pickle.dumps(block))])
def test_copies_are_the_same_value(copied) -> None:
    block = build()
    fte.plan(block)  # caches do not travel
    assert copied(block) is block
    assert copied((block, {"a": block}))[1]["a"] is block if copied is not copy.copy else True


def test_frozen() -> None:
    with pytest.raises(AttributeError):
        build().ops = ()


def test_repr_lists_the_ops_with_their_indices() -> None:
    block = build()
    assert eval(repr(block), {**vars(fte), "chain": fte.chain}) is block
    for index, op in enumerate(block.ops):
        assert f"{op!r},  # {index}\n" in repr(block)


def test_nested_chains_are_flattened() -> None:
    inner = fte.chain(fte.Linear(8, 8), fte.GELU())
    block = fte.chain(fte.RMSNorm(8), fte.chain(inner, fte.chain(inner)))
    assert block is fte.chain(fte.RMSNorm(8), *inner.ops, *inner.ops)
    assert len(block) == 7
    assert [type(op).__name__ for op in fte.Linear(8, 8).ops] == ["BasicLinear", "Bias"]
    assert [type(op).__name__ for op in fte.Linear(8, 8, bias=False).ops] == ["BasicLinear"]


# ---- channels --------------------------------------------------------------------------------------------------


def check(block: fte.Chain, x: torch.Tensor, extras: tuple[torch.Tensor, ...] = (), floor: float = 100.0) -> None:
    """Outputs and all gradients, functional and eager bridge, against the float64 interpreter."""
    params = random_params(block)
    params64, x64, extras64 = double((params, x, extras))
    want = oracles.run(block, params64, x64, extras64)
    cotangents = [uniform(out.shape, seed=40 + i) for i, out in enumerate(want)]
    leaves64 = pytree.leaves((x64, params64, extras64))
    want_grads = torch.autograd.grad(want, leaves64, [c.double() for c in cotangents])

    result, pullback = fte.vjp(block, params, x, *extras)
    grads = pullback(*cotangents)
    outputs = (result.output, *result.extra_outputs)
    assert_same(outputs, (lambda r: (r.output, *r.extra_outputs))(fte.apply(block, params, x, *extras)))
    compare(outputs, want, floor)
    compare(pytree.leaves((grads.input, grads.params, grads.extra_inputs)), want_grads, floor)

    params, x, extras = require_grad((params, x, extras))
    found, state = bridge.apply(block, params, x, *extras)
    assert state is None
    found = found if isinstance(found, tuple) else (found,)
    assert_same(tuple(out.detach() for out in found), outputs)
    torch.autograd.backward(found, cotangents)
    compare([leaf.grad for leaf in pytree.leaves((x, params, extras))], want_grads, floor)


def compare(actual, expected, floor: float) -> None:
    assert len(actual) == len(expected)
    for one, other in zip(actual, expected, strict=True):
        assert one.shape == other.shape
        if other.abs().max() > 1e-6 if other.numel() else False:
            # what is left of sums that cancel has the error of their terms, which are about 1
            error = (one.double() - other.detach()).abs().max()
            assert error < 1e-7 or oracles.snr(one, other.detach()) > floor
        else:
            torch.testing.assert_close(one.double(), other.detach(), rtol=0, atol=1e-5)


X = uniform((3, 8))
RESIDUAL = fte.chain(hidden("res"), fte.RMSNorm(8), fte.Linear(8, 8), ADD(channel="res"))


@pytest.mark.parametrize(
    "block",
    [
        RESIDUAL,
        fte.chain(RESIDUAL, fte.GELU(), hidden("res2"), fte.Linear(8, 8), ADD(channel="res2")),
        # one producer, several consumers; nested and crossing branches
        fte.chain(hidden("a"), fte.Linear(8, 8), ADD(channel="a"), fte.GELU(), ADD(channel="a"), ADD(channel="a")),
        fte.chain(hidden("a"), fte.GELU(), hidden("b"), fte.Linear(8, 8), ADD(channel="a"), ADD(channel="b")),
        fte.chain(hidden("a"), fte.GELU(), hidden("b"), fte.Linear(8, 8), ADD(channel="b"), ADD(channel="a")),
        # a channel nobody reads; one that is also an output
        fte.chain(hidden("unused"), fte.Linear(8, 8)),
        fte.chain(FORK(channel="seen"), fte.Linear(8, 8), ADD(channel="seen")),
        # two forks of one tensor, added twice
        fte.chain(hidden("a"), hidden("b"), ADD(channel="a"), ADD(channel="b")),
        fte.chain(hidden("a"), ADD(channel="a")),
    ],
    ids=range(9),
)
def test_channels_match_the_interpreter(block: fte.Chain) -> None:
    assert block.num_extra_inputs == 0
    check(block, X)


def test_order_of_public_extra_tensors() -> None:
    """(op, slot) order, channels left out."""
    block = fte.chain(
        FORK(), ADD(), hidden("h"), fte.GELU(), FORK(channel="v"), ADD(channel="h"), ADD(), ADD(channel="v"), FORK()
    )
    assert block.num_extra_inputs == 2
    assert block.extra_outputs == ((0, 0), (4, 0), (8, 0))
    first, second = uniform((3, 8), seed=4), uniform((3, 8), seed=5)
    result = fte.apply(block, ({},) * 9, X, first, second)
    assert_same(result.extra_outputs[0], X)
    gelu = fte.functional.gelu(first + X)
    assert_same(result.extra_outputs[1], gelu)
    torch.testing.assert_close(result.output, 2 * gelu + (first + X) + second)
    assert_same(result.extra_outputs[2], result.output)
    check(block, X, (first, second))


def test_a_hidden_branch_without_gradient_counts_as_zeros() -> None:
    block = fte.chain(hidden("unused"), FORK(), fte.Linear(8, 8))
    _, pullback = fte.vjp(block, random_params(block), X)
    dy = uniform((3, 8), seed=9)
    assert_same(pullback(dy).input, pullback(dy, torch.zeros(3, 8)).input)


@pytest.mark.parametrize(
    ("ops", "message"),
    [
        ((fte.GELU(), ADD(channel="x")), r"op 1 \(AddExtraInput\): channel 'x' has no producer"),
        ((hidden("y"), ADD(channel="x")), r"op 1 \(AddExtraInput\): channel 'x' has no producer.*\['y'\]"),
        ((ADD(channel="x"), hidden("x")), r"op 0 \(AddExtraInput\).*no earlier producer: op 1 \(MakeExtraOutput\)"),
        ((hidden("x"), fte.GELU(), hidden("x")), r"op 2 \(MakeExtraOutput\).*multiple producers: op 0"),
        ((ADD(channel="x", name="mine"), hidden("x")), r"op 0 \(AddExtraInput 'mine'\)"),
    ],
)
def test_wrong_channels(ops, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fte.chain(*ops)


def test_an_op_may_not_consume_its_own_output() -> None:
    import dataclasses

    @dataclasses.dataclass(frozen=True, eq=False)
    class Loop(fte.Op):
        num_extra_inputs = 1
        num_extra_outputs = 1
        extra_input_channels = ("loop",)
        extra_output_channels = ("loop",)

    with pytest.raises(ValueError, match=r"op 1 \(Loop\): channel 'loop' has no earlier producer.*the op itself"):
        fte.chain(fte.GELU(), Loop())


@pytest.mark.parametrize("channel", ["", 3, b"x"])
def test_channel_names_are_non_empty_strings(channel) -> None:
    with pytest.raises(ValueError, match="channel: expected None or a non-empty string"):
        ADD(channel=channel)
    with pytest.raises(ValueError, match="channel: expected None or a non-empty string"):
        FORK(channel=channel)


def test_output_to_caller() -> None:
    with pytest.raises(TypeError, match="output_to_caller: expected a bool"):
        FORK(channel="x", output_to_caller=1)
    with pytest.raises(ValueError, match="output_to_caller"):
        FORK(output_to_caller=False)


@pytest.mark.parametrize("argument", [fte.GELU, torch.nn.GELU(), None, "GELU", (fte.GELU(),)], ids=str)
def test_chain_takes_ops_and_chains(argument) -> None:
    with pytest.raises(TypeError, match="argument 1: expected an op or a chain, got"):
        fte.chain(fte.GELU(), argument)


def test_an_empty_chain() -> None:
    with pytest.raises(ValueError, match="at least one op"):
        fte.chain()
