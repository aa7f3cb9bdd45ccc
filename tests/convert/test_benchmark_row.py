"""The row of the GPU benchmark that trains converted models, tiny and on the CPU."""

import pytest
import torch

from tests.benchmarks.gpu import converted
from tests.benchmarks.gpu.rows import ROWS
from tests.convert.models import transformers


@pytest.mark.parametrize("kind", ["torch", "delayed", "none"])
def test_a_step_trains(kind):
    transformers()
    step = converted.build(kind, "cpu", mode=None)
    before = [own.detach().clone() for own in step.tensors]
    step.run()
    assert any(not torch.equal(own, old) for own, old in zip(step.tensors, before, strict=True))
    step.clear()
    assert all(own.grad is None for own in step.tensors)


def test_the_row_has_its_contestants():
    contestants = converted.contestants("cpu")
    kinds = ("torch bf16", "torchao", "converted, delayed", "converted, current")
    assert [one.name for one in contestants[:12]] == [
        f"{kind}, {mode}" for kind in kinds for mode in ("compiled", "compiled, cpp wrapper", "reduce-overhead")
    ]
    assert [one.who for one in contestants if one.peer] == ["torch bf16"] * 3 + ["torchao"] * 3
    assert ROWS["hf-llama"].unit == "ms"
    assert converted.tokens_per_second(32.0, "cpu") == 1000
    assert ROWS["hf-llama-t32768"].unit == "ms"
    assert converted.tokens_per_second(32.0, "cpu", 16) == 8000
