"""Ranks that agree on amaxes: two gloo ranks run the cases of ``amax_cases`` once."""

import pytest
import torch

import bridge
from bridge import distributed
from tests.bridge.delayed import mlp, state_of
from tests.distributed import amax_cases
from tests.distributed.common import cases_of, run
from tests.helpers import DELAYED, assert_same


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """What became of every case on every rank."""
    return run("tests.distributed.amax_cases", tmp_path_factory.mktemp("amaxes"), 2, 200)


@pytest.mark.parametrize("case", cases_of(vars(amax_cases)))
def test_two_ranks(reports, case):
    for rank, (found, log) in enumerate(reports):
        assert found.get(case, f"not reached\n{log}") == "ok", f"rank {rank}"


def test_one_rank_is_no_group():
    """Nothing is sent, and evaluation closes a step as ever."""
    model, plain = mlp(), mlp()
    with distributed.agree_amaxes(model):
        for enabled in (True, False, True):
            with torch.set_grad_enabled(enabled), bridge.autocast(recipe=DELAYED):
                for own in (model, plain):
                    own(torch.ones(2, 16))
        assert model[0].basic_ops[0].input_scale.item() != 1
    assert_same(state_of(model), state_of(plain))
    distributed.check_same_on_all_ranks({"anything": 1})
