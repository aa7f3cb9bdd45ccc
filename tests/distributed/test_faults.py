"""What goes wrong is named: a rank that dies, ranks that were told different worlds."""

import pytest
import torch

from bridge import distributed
from tests.distributed import killed_rank
from tests.distributed.common import run
from tests.helpers import assert_same


def test_a_rank_is_killed_in_the_middle_of_a_step(tmp_path):
    """The others end within the timeout, and the checkpoint loads."""
    (survivor, log), (killed, _) = run("tests.distributed.killed_rank", tmp_path, 2, 150)
    assert killed == {}
    assert "by peer" in survivor.get("error", log)
    assert survivor["seconds"] < killed_rank.TIMEOUT + 5
    model = killed_rank.model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert distributed.load_checkpoint(tmp_path / "checkpoints", model, optimizer) == killed_rank.SAVED
    assert_same([own.detach() for own in model.parameters()], torch.load(tmp_path / "parameters-0.pt"))


def test_ranks_that_were_told_different_worlds(tmp_path):
    first = torch.distributed.FileStore(str(tmp_path / "store"), 3)
    first.compare_set("functional_te/world", "", "3")
    with pytest.raises(ValueError, match="world_size: expected 3, as another rank was told, got 2 on rank 1"):
        distributed.initialize("gloo", init_method=f"file://{tmp_path}/store", rank=1, world_size=2)
    assert not torch.distributed.is_initialized()
