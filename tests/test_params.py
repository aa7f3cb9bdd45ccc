"""Parameters in any container; gradients come back in the containers that were given."""

import collections
import dataclasses
import types
from typing import Any, NamedTuple

import optree
import pytest
import torch
from torch.utils import _pytree as torch_pytree

import functional_te as fte
from tests.bridge.compiled import graph_count
from tests.helpers import assert_same, random_params, uniform

BLOCK = fte.chain(fte.RMSNorm(32), fte.BasicLinear(32, 64), fte.SwiGLU(), fte.Linear(32, 32))  # 5 basic ops


class Weight(NamedTuple):
    weight: Any
    bias: Any = None


class Bias(NamedTuple):
    bias: Any


class Mlp(NamedTuple):
    norm: Any
    up: Any
    act: Any
    down: Any
    shift: Any


@dataclasses.dataclass(frozen=True)
class PlainMlp:
    norm: Any
    up: Any
    act: Any
    down: Any
    shift: Any


@optree.dataclasses.dataclass(frozen=True, namespace="tests.params")
class TreeMlp:
    norm: Any
    up: Any
    act: Any
    down: Any
    shift: Any
    name: str = optree.dataclasses.field(pytree_node=False, default="mlp")


@dataclasses.dataclass
class PlainWeight:
    weight: Any
    bias: Any = None


for kind in (PlainMlp, PlainWeight):
    torch_pytree.register_dataclass(kind)


def _weights(params: Any) -> list[torch.Tensor]:
    return [value for own in params for value in own.values()]


def _nested(params: Any, outer: Any, inner: Any, empty: Any) -> Any:
    return outer([inner(own) if own else empty for own in params])


def _by_key(params: Any, key: Any) -> dict[Any, Any]:
    return {key(index): dict(own) for index, own in enumerate(params) if own}


def _weight_or_bias(own: dict[str, Any]) -> Any:
    return Weight(**own) if "weight" in own else Bias(**own)


CONTAINERS = {
    "lists of dicts": lambda p: _nested(p, list, dict, {}),
    "nested lists": lambda p: _nested(p, list, lambda own: list(own.values()), []),
    "nested tuples": lambda p: _nested(p, tuple, lambda own: tuple(own.values()), ()),
    "None without parameters": lambda p: _nested(p, tuple, dict, None),
    "ordered dicts": lambda p: _nested(p, tuple, collections.OrderedDict, collections.OrderedDict()),
    "by index": lambda p: _by_key(p, int),
    "by decimal": lambda p: collections.OrderedDict(_by_key(p, str)),
    "named tuples": lambda p: Mlp(*_nested(p, list, _weight_or_bias, None)),
    "dataclasses": lambda p: PlainMlp(
        *_nested(p, list, lambda own: PlainWeight(**own) if "weight" in own else Bias(**own), None)
    ),
    "optree": lambda p: TreeMlp(*_nested(p, list, _weight_or_bias, ())),
}
every_container = pytest.mark.parametrize("name", CONTAINERS)


def _flat(name: str, tree: Any) -> tuple[list[torch.Tensor], Any]:
    """Leaves and structure by the library that knows the container: optree or PyTorch, which counts None as a leaf."""
    if name == "optree":
        return optree.tree_flatten(tree, namespace="tests.params")
    leaves, structure = torch_pytree.tree_flatten(tree)
    return [leaf for leaf in leaves if leaf is not None], structure


X, DY = uniform((4, 32), seed=1), uniform((4, 32), seed=2)


def _vjp(params: Any) -> tuple[torch.Tensor, Any]:
    out, pullback = fte.vjp(BLOCK, params, X)
    return out.output, pullback(DY).params


@every_container
def test_gradients_have_the_structure_of_the_parameters(name: str) -> None:
    params = random_params(BLOCK)
    given = CONTAINERS[name](params)
    output, grads = _vjp(given)
    expected_output, expected = _vjp(params)
    assert_same(output, expected_output)
    assert type(expected) is tuple
    leaves, structure = _flat(name, grads)
    assert structure == _flat(name, given)[1]
    assert_same(leaves, _weights(expected))
    assert type(grads) is type(given)


@every_container
def test_compiled(name: str, dynamo: Any) -> None:
    given = CONTAINERS[name](random_params(BLOCK))
    compiled = torch.compile(_vjp, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        output, grads = compiled(given)
    expected_output, expected = _vjp(given)
    assert_same(output, expected_output)
    assert_same(_flat(name, grads)[0], _flat(name, expected)[0])
    assert type(grads) is type(given)
    assert graph_count(dynamo) == 1


@every_container
def test_every_function_takes_them(name: str) -> None:
    recipe, x = fte.recipes.Float8CurrentScaling(), uniform((16, 32), seed=1)
    params = random_params(BLOCK)
    given = CONTAINERS[name](params)
    assert_same(fte.apply(BLOCK, given, x, recipe=recipe).output, fte.apply(BLOCK, params, x, recipe=recipe).output)
    assert fte.eval_shape(BLOCK, given, x) == fte.eval_shape(BLOCK, params, x)
    assert str(fte.numerics(BLOCK, given, x, recipe=recipe)) == str(fte.numerics(BLOCK, params, x, recipe=recipe))
    cast = fte.quantize_params(BLOCK, given, recipe).params
    assert type(cast) is type(given)
    assert_same(fte.apply(BLOCK, cast, x, recipe=recipe).output, fte.apply(BLOCK, params, x, recipe=recipe).output)


def test_a_read_only_mapping() -> None:
    params = random_params(BLOCK)
    _, grads = _vjp(tuple(types.MappingProxyType(own) for own in params))
    assert_same(grads, _vjp(params)[1])


def test_only_some_gradients() -> None:
    params = CONTAINERS["named tuples"](random_params(BLOCK))
    wanted = (False, ((False,), (True,), (), (False,), (True,)), ())
    _, pullback = fte.vjp(BLOCK, params, uniform((4, 32)), requires_grad=wanted)
    grads = pullback(uniform((4, 32))).params
    assert grads.norm == grads.down == Weight(None)
    assert grads.up.weight.shape == (64, 32)
    assert grads.act is None
    assert grads.shift.bias.shape == (32,)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda p: {"up": p[1]}, TypeError, r"a tuple of 5 dicts, one per op, or a mapping .* key 'up'"),
        (lambda p: {5: p[1]}, TypeError, "the key 5"),
        (lambda p: {True: p[1]}, TypeError, "the key True"),
        (lambda p: {1: p[1]}, TypeError, r"op 0 \(RMSNorm\): params: expected a dict, got NoneType"),
        (lambda p: [[*own.values()] for own in p][:-1], ValueError, "expected 5 entries, one per op, got 4 entries"),
        (lambda p: [[1, 2], *p[1:]], ValueError, r"op 0 \(RMSNorm\): params: expected 1 entries, \['weight'\], got 2"),
        (
            lambda p: PlainMlp(Bias(p[0]["weight"]), *p[1:]),
            ValueError,
            r"op 0 .*keys \['weight'\], got keys \['bias'\]",
        ),
        (lambda p: (p[0]["weight"], *p[1:]), TypeError, r"op 0 \(RMSNorm\): params: expected a dict, got Tensor"),
        (lambda p: iter(p), TypeError, "expected a tuple of 5 dicts, one per op, got tuple_iterator"),
        (lambda p: PlainMlp, TypeError, "expected a tuple of 5 dicts, one per op, got type"),
    ],
    ids=["name", "index", "bool", "absent", "short", "long", "field", "tensor", "iterator", "class"],
)
def test_what_does_not_fit(change: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        fte.apply(BLOCK, change(random_params(BLOCK)), uniform((4, 32)))
