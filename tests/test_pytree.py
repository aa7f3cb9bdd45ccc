"""Nodes: frozen keyword-only dataclasses whose children are leaves and whose static fields are structure."""

import dataclasses
import enum

import optree
import pytest
import torch

import functional_te as fte
from functional_te import pytree


@pytree.node
class Pair:
    left: torch.Tensor
    right: torch.Tensor | None = None
    scale: float = pytree.static(default=1.0)


def test_flatten_and_rebuild() -> None:
    pair = Pair(left=torch.ones(2), right=torch.zeros(3), scale=2.0)
    leaves, spec = pytree.tree_flatten({"a": pair, "b": (pair, None)})
    assert [leaf.shape[0] for leaf in leaves] == [2, 3, 2, 3]
    rebuilt = pytree.tree_unflatten(spec, leaves)
    assert rebuilt["b"][1] is None
    assert rebuilt["a"].left is pair.left
    assert rebuilt["a"].scale == 2.0
    assert [leaf.shape for leaf in pytree.leaves(pair)] == [(2,), (3,)]


def test_structure_sees_none_and_static_fields() -> None:
    def spec(**fields):
        return pytree.tree_flatten(Pair(**fields))[1]

    x = torch.ones(1)
    assert spec(left=x) == spec(left=torch.zeros(5))
    assert spec(left=x) != spec(left=x, right=x)
    assert spec(left=x, scale=2.0) != spec(left=x)


def test_nodes_are_frozen_and_keyword_only() -> None:
    pair = Pair(left=torch.ones(2))
    with pytest.raises(dataclasses.FrozenInstanceError):
        pair.left = torch.zeros(2)
    with pytest.raises(TypeError):
        Pair(torch.ones(2))
    with pytest.raises((AttributeError, TypeError)):
        pair.more = 1
    assert pytree.replace(pair, scale=3.0).scale == 3.0
    assert pair.scale == 1.0


def test_map_over_several_trees() -> None:
    one = Pair(left=torch.ones(2), right=torch.ones(2), scale=4.0)
    summed = fte.tree_map(torch.add, one, one)
    assert torch.equal(summed.right, torch.full((2,), 2.0))
    assert summed.scale == 4.0
    with pytest.raises(ValueError, match="None"):
        fte.tree_map(torch.add, one, Pair(left=torch.ones(2)))


def test_nodes_live_in_one_namespace() -> None:
    pair = Pair(left=torch.ones(2))
    assert optree.tree_leaves(pair) == [pair]
    assert len(optree.tree_leaves(pair, namespace=fte.NAMESPACE)) == 1


def test_results_of_the_library_are_trees() -> None:
    block = fte.Linear(4, 4)
    params = fte.init(block)
    result, pullback = fte.vjp(block, params, torch.ones(2, 4))
    assert len(pytree.leaves(result)) == 1
    assert len(pytree.leaves(pullback(torch.ones(2, 4)))) == 3
    state = fte.init_state(block, fte.recipes.DelayedScaling(amax_history_len=2))
    leaves, spec = pytree.tree_flatten(state)
    assert len(leaves) == 6
    assert type(pytree.tree_unflatten(spec, leaves)[0]["input"]) is fte.DelayedScalingState
    updated = tuple({n: p - 0.1 * g for (n, p), g in zip(own.items(), grads.values(), strict=True)}
                    for own, grads in zip(params, pullback(torch.ones(2, 4)).params, strict=True))  # fmt: skip
    mapped = fte.tree_map(lambda p, g: p - 0.1 * g, params, pullback(torch.ones(2, 4)).params)
    assert all(torch.equal(a, b) for a, b in zip(pytree.leaves(updated), pytree.leaves(mapped), strict=True))


def test_a_rebuilder_makes_what_rebuild_makes() -> None:
    quantized = fte.quantize(torch.randn(4, 32), fte.MXFP8Quantizer(dtype=torch.float8_e4m3fn))
    tree = fte.FwdResult(quantized, {"b": torch.ones(1), "a": None}, ([torch.zeros(2)], (torch.ones(3),), ()), None)
    flat: list[torch.Tensor] = []
    spec = pytree.structure(tree, flat)
    build = pytree.rebuilder(spec)
    for made in (build(flat), pytree.rebuild(spec, flat)):
        assert type(made) is fte.FwdResult
        assert made.output.quantizer is quantized.quantizer
        assert pytree.structure(made) == spec
        assert all(one is other for one, other in zip(pytree.leaves(made), pytree.leaves(tree), strict=True))
    for wrong in (flat[:-1], [*flat, torch.ones(1)]):
        with pytest.raises(ValueError, match=f"expected {len(flat)} leaves, got {len(wrong)}"):
            build(wrong)


class Level(enum.IntEnum):
    LOW = 1


@pytree.node
class Odd:
    values: dict
    function: object = pytree.static()
    level: Level = pytree.static()


def test_a_rebuilder_takes_any_static_value() -> None:
    tree = Odd(values={Level.LOW: torch.ones(1)}, function=lambda: 1, level=Level.LOW)
    flat: list[torch.Tensor] = []
    made = pytree.rebuilder(pytree.structure(tree, flat))(flat)
    assert made.function is tree.function
    assert made.level is Level.LOW
    assert made.values[Level.LOW] is flat[0]
