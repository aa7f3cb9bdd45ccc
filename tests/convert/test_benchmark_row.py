"""The row of the GPU benchmark that trains converted models, tiny and on the CPU."""

import pytest
import torch

from tests.benchmarks.gpu import converted
from tests.benchmarks.gpu.rows import ROWS
from tests.convert.models import transformers


@pytest.mark.parametrize("kind", ["torch", "delayed", "none"])
def test_a_step_trains(kind):
    transformers()
    step = converted.build(kind, "cpu", compiled=False)
    before = [own.detach().clone() for own in step.tensors]
    step.run()
    assert any(not torch.equal(own, old) for own, old in zip(step.tensors, before, strict=True))
    step.clear()
    assert all(own.grad is None for own in step.tensors)


def test_the_row_has_its_contestants():
    names = [one.name for one in converted.contestants("cpu")]
    assert names[:4] == [
        "torch bf16, compiled",
        "torchao, compiled",
        "converted, delayed, compiled",
        "converted, current, compiled",
    ]
    assert ROWS["hf-llama"].unit == "ms"
    assert converted.tokens_per_second(32.0, "cpu") == 1000
