"""Tensor and sequence parallel: gloo ranks run the cases of ``tp_cases`` once."""

import pytest

from tests.distributed import tp_cases
from tests.distributed.common import cases_of, run

pytest.importorskip("transformers", reason="needs transformers (the `dev` extra)")


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """What became of every case on every rank."""
    return run("tests.distributed.tp_cases", tmp_path_factory.mktemp("tp"), 2, 280)


@pytest.mark.parametrize("case", cases_of(vars(tp_cases)))
def test_two_ranks(reports, case):
    for rank, (found, log) in enumerate(reports):
        assert found.get(case, f"not reached\n{log}") == "ok", f"rank {rank}"


@pytest.mark.slow
@pytest.mark.parametrize("case", cases_of(vars(tp_cases), "slow_case_"))
def test_two_ranks_slow(tmp_path, case):
    for rank, (found, log) in enumerate(run("tests.distributed.tp_cases", tmp_path, 2, 280, case)):
        assert found == {case: "ok"}, f"rank {rank}\n{log}"
