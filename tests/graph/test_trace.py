"""Launches that are alike are described once, and only those."""

import itertools

import torch

import functional_te as fte
from functional_te.graph.trace import _signature
from tests.graph.blocks import spec, stack


def _words(tree):
    words, flat = [], []
    _signature(tree, words, flat)
    return tuple(words), flat


def test_signatures_tell_bundles_apart() -> None:
    a, b, c = (torch.empty(2, size, device="meta") for size in (3, 3, 4))
    quantizer = fte.Float8CurrentScalingQuantizer(dtype=torch.float8_e4m3fn)
    trees = [
        ((a, b), c),
        (a, (b, c)),
        (a, b, c),
        [a, b, c],
        (a, None, b, c),
        (a, b, c, None),
        {"a": a, "b": b, "c": c},
        {"a": a, "b": b, "d": c},
        (a.to(torch.bfloat16), b, c),
        (a, b, c, 1.0),
        (a, b, c, 2.0),
        (a, b, c, "x"),
        fte.BoundQuantizer(quantizer=quantizer),
        fte.BoundQuantizer(quantizer=quantizer, scale=a),
        fte.BoundQuantizer(quantizer=quantizer, key=a),
        fte.BoundQuantizer(quantizer=quantizer.with_usage(True, True)),
    ]
    for one, other in itertools.combinations(trees, 2):
        assert _words(one)[0] != _words(other)[0]
    assert _words((a, c)) == (_words((b, c))[0], [a, c])  # tensors that look alike are alike


def test_a_chain_that_repeats_asks_each_fake_once(monkeypatch) -> None:
    calls = []
    real = fte.Bias.backward_fake
    monkeypatch.setattr(fte.Bias, "backward_fake", staticmethod(lambda args: calls.append(1) or real(args)))
    block, x = stack(25), spec(32, 64)
    graph = fte.graph(block, None, x, fusions=fte.Fusions())
    assert [step.kind for step in graph.backward].count("Bias") == 25
    assert len(calls) == 1
    assert graph.saved_bytes == 25 * fte.graph(stack(1), None, x, fusions=fte.Fusions()).saved_bytes
