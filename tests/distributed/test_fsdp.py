"""FSDP2 over converted models: gloo ranks run the cases of ``fsdp_cases`` once."""

import pytest
import torch

import bridge
from bridge import distributed
from tests.distributed import four_cases, fsdp_cases
from tests.distributed.common import cases_of, run
from tests.distributed.tp_cases import llama
from tests.helpers import DELAYED, assert_same

pytest.importorskip("transformers", reason="needs transformers (the `dev` extra)")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("fsdp")


@pytest.fixture(scope="module")
def reports(folder):
    """What became of every case on every rank."""
    return run("tests.distributed.fsdp_cases", folder, 2, 280)


@pytest.mark.parametrize("case", cases_of(vars(fsdp_cases)))
def test_two_ranks(reports, case):
    for rank, (found, log) in enumerate(reports):
        assert found.get(case, f"not reached\n{log}") == "ok", f"rank {rank}"


def test_one_process_reads_what_two_wrote(reports, folder):
    """Parameters, optimizer and quantizer state, bit for bit; and without ``torch.distributed``."""
    assert reports[0][0].get("saved_and_resumed") == "ok"
    values, states, moments = torch.load(folder / "expected-0.pt")
    model = bridge.convert(llama(), DELAYED, exclude="lm_head")
    optimizer = fsdp_cases.optimizer_of(model)
    assert distributed.load_checkpoint(folder / "checkpoints", model, optimizer) == {"step": 2}
    assert_same(dict(model.named_parameters()), values)
    assert_same({name: op.get_extra_state() for name, op in distributed.groups.operations_of(model)}, states)
    assert_same([optimizer.state[own]["exp_avg"] for own in model.parameters()], moments)
    again = folder / "again"
    distributed.save_checkpoint(again, model, optimizer)
    other = bridge.convert(llama(), DELAYED, exclude="lm_head")
    assert distributed.load_checkpoint(again, other) is None
    assert_same(dict(other.named_parameters()), values)


@pytest.mark.slow
@pytest.mark.parametrize("case", cases_of(vars(fsdp_cases), "slow_case_"))
def test_two_ranks_slow(tmp_path, case):
    for rank, (found, log) in enumerate(run("tests.distributed.fsdp_cases", tmp_path, 2, 280, case)):
        assert found == {case: "ok"}, f"rank {rank}\n{log}"


@pytest.mark.slow
@pytest.mark.parametrize("cases", [fsdp_cases, four_cases], ids=["fsdp", "two dimensions"])
def test_four_ranks(tmp_path, cases):
    for rank, (found, log) in enumerate(run(cases.__name__, tmp_path, 4, 500)):
        assert found == dict.fromkeys(cases_of(vars(cases)), "ok"), f"rank {rank}\n{log}"
