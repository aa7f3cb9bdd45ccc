"""DistributedDataParallel on two gloo ranks. (Sharded layers: tests/bridge/test_distributed.py.)"""

import pytest

from tests.habits.ddp_ranks import CASES, SIZE
from tests.ranks import reports_of

LIMIT = 240


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """What became of every case on every rank."""
    folder = tmp_path_factory.mktemp("ddp")
    return reports_of("tests.habits.ddp_ranks", folder, SIZE, LIMIT, str(folder))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_two_ranks(reports, case):
    for rank, (found, log) in enumerate(reports):
        assert found.get(case, f"not reached\n{log}") == "ok", f"rank {rank}"
