"""Graphs on many devices: bytes by hand, and how times add up."""

import json
from pathlib import Path

import pytest
import torch

import functional_te as fte
from functional_te.graph import LINKS, Link
from functional_te.graph.devices import DEVICES
from tests.benchmarks.gpu.blocks import mlp_chain
from tests.graph.blocks import RECIPES, mlp, spec

ROWS, HIDDEN, INNER = 8192, 4096, 14336
WIRE = Link("wire", 100.0, 0.0, "made up")
WIRES = (WIRE, WIRE)


def block(recipe="delayed", **options):
    pytest.importorskip("triton", reason="the plan of the Triton backend asks for its record")
    options = {"backend": "triton", "device": "H200", **options}
    return fte.graph(mlp(HIDDEN, INNER), None, spec(ROWS, HIDDEN), recipe=RECIPES[recipe], **options)


def sent(scaled, axis):
    own = [message for message in scaled.messages if message.axis == axis]
    return [(message.direction, message.kind, message.nbytes) for message in own]


def test_one_device_sends_nothing():
    graph = block()
    one = graph.scale(layers=3)
    assert one.messages == ()
    assert one.seconds == pytest.approx(3 * graph.time())
    assert one.efficiency == pytest.approx(1.0)


def test_bytes_of_tensor_parallel():
    """Casts per tensor are gathered in FP8; sums are sent in BF16; without a cast the backward gathers again."""
    values = ROWS * HIDDEN
    assert sent(block().scale(tp=2), "tp") == [
        ("forward", "all-gather", values),
        ("backward", "reduce-scatter", 2 * values),
        ("backward", "all-gather", values),
        ("forward", "reduce-scatter", 2 * values),
    ]
    for recipe in ("none", "mxfp8"):
        found = sent(block(recipe).scale(tp=2), "tp")
        assert [nbytes for _, _, nbytes in found] == [2 * values] * 5
        assert [direction for direction, *_ in found].count("backward") == 3


def test_bytes_of_data_parallel():
    weights = 3 * HIDDEN * INNER
    small = 2 * (HIDDEN + HIDDEN)  # gain and bias, BF16
    assert sent(block().scale(dp=4), "dp") == [
        ("forward", "all-gather", 2 * weights + small),
        ("backward", "all-gather", 2 * weights + small),
        ("backward", "reduce-scatter", 2 * weights + small),
    ]
    assert sent(block().scale(dp=4, sharding="fsdp-fp8"), "dp")[0] == ("forward", "all-gather", weights + small)
    assert sent(block().scale(dp=4, sharding="ddp"), "dp") == [("backward", "all-reduce", 2 * weights + small)]
    assert sent(block().scale(dp=4, tp=2), "dp")[0] == ("forward", "all-gather", weights + small)


def test_times_of_messages():
    """Of ``n`` ranks, ``(n - 1) / n`` of the bytes; twice that to sum and hand out."""
    graph = block()
    for ranks in (2, 4, 8):
        share = (ranks - 1) / ranks
        for message in graph.scale(tp=ranks, links=WIRES).messages:
            assert message.seconds == pytest.approx(share * message.nbytes / 100e9)
        (message,) = graph.scale(dp=ranks, sharding="ddp", links=WIRES).messages
        assert message.seconds == pytest.approx(2 * share * message.nbytes / 100e9)
    late = Link("late", 1e9, 1.0, "made up")
    assert graph.scale(tp=2, links=(late, late)).seconds == pytest.approx(4.0, rel=0.01)


def test_what_is_waited_for():
    graph = block()
    shared = graph.scale(tp=2, links=WIRES)
    waited = sum(message.seconds for message in shared.messages)
    assert shared.seconds == pytest.approx(shared.forward + shared.backward + waited)
    assert shared.forward + shared.backward < 0.55 * graph.time()
    fast, slow = (Link("link", rate, 0.0, "made up") for rate in (1e6, 1e-3))
    assert graph.scale(dp=2, links=(fast, fast)).seconds == pytest.approx(graph.time())
    crawling = graph.scale(dp=2, links=(slow, slow))
    assert crawling.seconds == pytest.approx(sum(message.seconds for message in crawling.messages))
    assert crawling.efficiency < 0.01


def test_the_link_between_nodes():
    graph = block()
    assert graph.scale(tp=8, dp=1).links == ("NVLink 4", "NVLink 4")
    assert graph.scale(tp=8, dp=2).links == ("NVLink 4", "InfiniBand NDR")
    assert graph.scale(tp=16).links == ("InfiniBand NDR", "InfiniBand NDR")
    assert graph.on("B200").scale(tp=2).links[0] == "NVLink 5"
    assert set(DEVICES) == {"A100", "B200", "H100", "H200"}
    assert {name for name, link in LINKS.items() if "Not measured" not in link.source} == {"NVLink 4"}


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_block_on_two_gpus_is_within_20_percent(ranks):
    """Beside times that were measured (``python -m tests.benchmarks.gpu.two_gpus``)."""
    found = json.loads(Path(__file__).with_name("h200_two_gpus.json").read_text())["rows"]
    (measured,) = [own["ms"] for own in found if own["row"] == f"MLP t8192 h4096 f14336, tp={ranks}"]
    graph = fte.graph(
        mlp_chain(4096, 14336), None, spec(8192, 4096), recipe=fte.recipes.DelayedScaling(), device="H200"
    )
    assert 1e3 * graph.scale(tp=ranks).seconds == pytest.approx(measured, rel=0.2)


def test_kernels_of_a_rank():
    """Two halves have the operations of the whole, and a half of the time of large products."""
    from functional_te.graph.scale import _modes, _shared

    graph = block()
    modes = _modes(graph, 2, "column")
    assert list(modes.values()) == ["column", "row"]
    for step in graph.steps:
        own = _shared(step, modes, 2)
        assert 2 * own.flops == step.flops
        for kernel, whole in zip(own.kernels, step.kernels, strict=True):
            if whole.kind == "product":
                assert 2 * kernel.sizes[0] * kernel.sizes[1] * kernel.sizes[2] == (
                    whole.sizes[0] * whole.sizes[1] * whole.sizes[2]
                )
            assert kernel.read < whole.read
    second = fte.graph(fte.chain(fte.Linear(INNER, HIDDEN, bias=False)), None, spec(ROWS, INNER))
    found = sent(second.scale(tp=2, first="row"), "tp")
    assert [own[:2] for own in found] == [("backward", "all-gather"), ("forward", "reduce-scatter")]


def test_text():
    text = repr(block().scale(tp=8, dp=128, layers=80, sharding="fsdp-fp8"))
    assert text.startswith("1024 x H200: tp=8, dp=128, layers=80: ")
    assert "tp messages over NVLink 4: 320, " in text
    assert "dp messages over InfiniBand NDR: 240, " in text


def test_refusals():
    graph = fte.graph(mlp(64, 96), None, spec(32, 64), device="H200")
    with pytest.raises(ValueError, match=r"graph.scale: tp: expected a divisor of the 192 features of op 2, got 5"):
        graph.scale(tp=5)
    with pytest.raises(ValueError, match=r"graph.scale: dp: expected at least 1, got 0"):
        graph.scale(dp=0)
    with pytest.raises(TypeError, match=r"graph.scale: tp: expected an int"):
        graph.scale(tp=2.0)
    with pytest.raises(ValueError, match=r"first: expected one of \('column', 'row'\), got 'diagonal'"):
        graph.scale(first="diagonal")
    with pytest.raises(ValueError, match=r"sharding: expected one of \('fsdp', 'fsdp-fp8', 'ddp'\), got 'zero'"):
        graph.scale(sharding="zero")
    with pytest.raises(ValueError, match=r"links: expected a Link, got None\. That of cpu is not known"):
        graph.on("cpu").scale(tp=2)
    with pytest.raises(ValueError, match="graph: expected one of a chain without error"):
        fte.graph([fte.Linear(64, 32), fte.Linear(64, 32)], None, spec(32, 64)).scale(tp=2)
    experts = fte.graph(fte.GroupedLinear(2, 64, 64), None, spec(32, 64), fte.TensorSpec((2,), torch.int64))
    with pytest.raises(ValueError, match="tp: expected 1 for a graph with grouped linear layers"):
        experts.scale(tp=2)
