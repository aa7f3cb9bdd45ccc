"""What needs four ranks: a mesh of two dimensions."""

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import bridge
from bridge import distributed
from tests.distributed.common import main
from tests.distributed.fsdp_cases import optimizer_of, train
from tests.distributed.tp_cases import llama, whole
from tests.helpers import CURRENT, DELAYED, assert_same


def _sharded(recipe, mesh):
    model = bridge.convert(llama(), recipe, exclude="lm_head")
    distributed.tensor_parallel(model, mesh["tp"], sequence_parallel=True)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


def case_tensor_parallel_and_fsdp(rank, size, folder):
    """Losses are those of one process; a checkpoint of one mesh loads on another."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    place = mesh["dp"].get_local_rank()
    for recipe, tolerance in ((None, 1e-5), (CURRENT, 5e-3), (DELAYED, 5e-3)):
        expected = train(bridge.convert(llama(), recipe, exclude="lm_head"), 0, 1)
        model = _sharded(recipe, mesh)
        optimizer = optimizer_of(model)
        with distributed.agree_amaxes(model):
            losses = train(model, place, 2, optimizer=optimizer)
            torch.testing.assert_close(losses / 2, expected, rtol=tolerance, atol=0)
            distributed.save_checkpoint(folder / "two-dimensions", model, optimizer, 3)
        other = bridge.convert(llama(), recipe, exclude="lm_head")
        for layer in other.model.layers:
            fully_shard(layer)
        fully_shard(other)
        assert distributed.load_checkpoint(folder / "two-dimensions", other, optimizer_of(other)) == 3
        values = [whole(own) for own in model.parameters()]
        assert_same([whole(own) for own in other.parameters()], values)


if __name__ == "__main__":
    main(globals())
