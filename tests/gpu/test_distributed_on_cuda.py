"""Two GPUs, through NCCL: the cases of ``distributed_cases``."""

import pytest
import torch

from tests.gpu.distributed_cases import CASES
from tests.ranks import reports_of

SIZE, LIMIT = 2, 500

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < SIZE, reason="needs two GPUs")


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """What became of every case on every rank."""
    folder = tmp_path_factory.mktemp("gpus")
    return reports_of("tests.gpu.distributed_cases", folder, SIZE, LIMIT, str(SIZE), str(folder), "cuda")


@pytest.mark.parametrize("case", CASES)
def test_two_gpus(reports, case):
    if case.startswith("llama"):
        pytest.importorskip("transformers", reason="needs transformers (the `dev` extra)")
    for rank, (found, log) in enumerate(reports):
        assert found.get(case, f"not reached\n{log}") == "ok", f"rank {rank}"
