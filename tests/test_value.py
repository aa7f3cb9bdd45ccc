"""Interned values: equal by value is the same object, and what Python's ``==`` mixes up stays apart."""

import copy
import dataclasses
import gc
import inspect
import pickle
import threading

import pytest
import torch

import functional_te as fte
from functional_te._value import Value, value_of
from functional_te.ops import OPS


@dataclasses.dataclass(frozen=True, eq=False)
class Point(Value):
    x: object
    y: object = 0


@dataclasses.dataclass(frozen=True, eq=False)
class Other(Value):
    x: object
    y: object = 0


def test_equal_fields_are_one_object() -> None:
    assert Point(1) is Point(1, 0) is Point(y=0, x=1)
    assert hash(Point(1)) == hash(Point(1))
    assert Point(1) is not Point(2)
    assert Point(1) != Other(1)


@pytest.mark.parametrize(
    ("one", "other"),
    [(1, 1.0), (1, True), (0.0, -0.0), ((1, 2), (1, 2.0)), ((0.0,), (-0.0,)), (((1,),), ((True,),)), ("", None)],
)
def test_values_of_different_kinds_stay_apart(one, other) -> None:
    assert Point(one) is not Point(other)
    assert Point(one) is Point(one)


def test_nan_is_itself() -> None:
    assert Point(float("nan")) is Point(float("nan"))


@pytest.mark.parametrize(
    "field", [[1], {"a": 1}, torch.ones(1).numpy(), (1, [2])], ids=["list", "dict", "array", "nested"]
)
def test_fields_must_be_hashable(field) -> None:
    with pytest.raises(TypeError, match="Point: every field must be hashable"):
        Point(field)


def test_copies_and_pickles() -> None:
    point = Point(1, (2.0, "a"))
    assert copy.copy(point) is copy.deepcopy(point) is pickle.loads(pickle.dumps(point)) is point
    assert copy.deepcopy([point])[0] is point
    assert dataclasses.replace(point, x=1) is point


def test_uids_identify_living_values() -> None:
    point = Point("uid")
    assert value_of(point.uid) is point
    assert Point("uid").uid == point.uid
    assert Point("another").uid != point.uid
    assert value_of(None) is None
    uid, old = point.uid, id(point)
    del point
    gc.collect()
    again = Point("uid")
    assert again.uid != uid  # never used twice, unlike ids
    assert old


def test_threads_agree() -> None:
    made, start = [], threading.Barrier(8)

    def make() -> None:
        start.wait()
        made.append([Point(("thread", i)) for i in range(50)])

    threads = [threading.Thread(target=make) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(one is other for row in made for one, other in zip(row, made[0], strict=True))


@pytest.mark.parametrize("op", [op for op, _ in OPS], ids=lambda op: type(op).__name__)
def test_every_op_is_a_value(op: fte.Op) -> None:
    assert dataclasses.replace(op) is op
    assert copy.deepcopy(op) is pickle.loads(pickle.dumps(op)) is op
    named = dataclasses.replace(op, name="mine")
    assert named is not op
    assert named.name == "mine"
    assert eval(repr(op), vars(fte)) is op
    with pytest.raises(dataclasses.FrozenInstanceError):
        op.name = "x"


def test_equivalent_configurations_are_one_value() -> None:
    assert fte.RMSNorm(8) is fte.RMSNorm((8,)) is fte.RMSNorm([8]) is fte.RMSNorm(torch.Size([8]))
    assert fte.Reshape(8) is fte.Reshape((8,))
    assert fte.ConstantScale(2) is fte.ConstantScale(2.0)
    assert fte.SiTUGLU(beta1=4) is fte.SiTUGLU()


def test_signatures_are_those_of_constructors() -> None:
    names = list(inspect.signature(fte.GroupedLinear).parameters)
    assert names[:3] == ["num_groups", "in_features", "out_features"]
    assert list(inspect.signature(fte.FusionRule).parameters) == ["name", "pattern", "build", "refuse"]
