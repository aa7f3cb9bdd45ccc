"""Pipelines and experts: two gloo ranks run the cases of ``stage_cases`` once."""

import pytest
import torch

from bridge import distributed, ops
from tests.distributed import stage_cases
from tests.distributed.common import cases_of, run


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """What became of every case on every rank."""
    return run("tests.distributed.stage_cases", tmp_path_factory.mktemp("stages"), 2, 100)


@pytest.mark.parametrize("case", cases_of(vars(stage_cases)))
def test_two_ranks(reports, case):
    for rank, (found, log) in enumerate(reports):
        assert found.get(case, f"not reached\n{log}") == "ok", f"rank {rank}"


def test_experts_of_one_rank():
    layer = ops.GroupedLinear(2, 16, 16)
    rows, counts = torch.ones(5, 16), torch.tensor([2, 3])
    assert torch.equal(distributed.ExpertParallel(layer, 2)(rows, counts), layer(rows, counts))
