"""FSDP2 over converted models."""

import io

import pytest
import torch
import torch.distributed.checkpoint
from torch._dynamo.utils import counters
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import bridge
import functional_te as fte
from bridge import distributed
from tests.distributed.common import main, messages
from tests.distributed.tp_cases import batch, llama, loss_of, whole
from tests.helpers import CURRENT, DELAYED, assert_same

STEPS = 3


def optimizer_of(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def train(model, rank, size, steps=STEPS, optimizer=None, start=0):
    """Losses of training; every rank sees its rows of each batch."""
    optimizer = optimizer or optimizer_of(model)
    losses = []
    for step in range(start, start + steps):
        loss = loss_of(model, batch(step).chunk(size)[rank])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss = loss.detach()
        if size > 1:
            torch.distributed.all_reduce(loss)
        losses.append(loss / size)
    return torch.stack(losses)


def sharded(recipe, *, fp8=False, dtype=None, compiled=None, checkpointed=False, **options):
    """A converted Llama, sharded layer by layer."""
    model = bridge.convert(llama(**options), recipe, exclude="lm_head")
    if fp8:
        distributed.gather_in_fp8(model, recipe, dtype)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32) if dtype else MixedPrecisionPolicy()
    layers = model.model.layers
    for index, layer in enumerate(layers):
        if checkpointed:
            layer = checkpoint_wrapper(layer)
        if compiled:
            layer = torch.compile(layer, fullgraph=True, backend=compiled)
        layers[index] = layer
        fully_shard(layers[index], mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


def case_one_process(rank, size, folder):
    """Losses are those of one process with the whole batch."""
    for recipe, fp8, tolerance in ((None, False, 1e-5), (CURRENT, True, 2e-3), (DELAYED, False, 2e-3)):
        expected = train(bridge.convert(llama(), recipe, exclude="lm_head"), 0, 1)
        model = sharded(recipe, fp8=fp8)
        with distributed.agree_amaxes(model):
            found = train(model, rank, size)
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=0)


def case_gathered_in_fp8(rank, size, folder):
    """A byte per weight travels, cast once a step with scales of one message, and nothing changes but that."""
    for dtype in (None, torch.bfloat16):
        plain = sharded(CURRENT, dtype=dtype)
        expected = train(plain, rank, size)
        model = sharded(CURRENT, fp8=True, dtype=dtype)
        weights = distributed.sharded_weight.sharded_weights(model)
        assert len(weights) == 2 * 7
        group, casts = weights[0].weights, []
        cast = group.cast
        group.cast = lambda own, casts=casts, cast=cast: casts.append(own.key) or cast(own)
        with messages() as sent:
            found = train(model, rank, size)
        assert len(casts) == STEPS * len(weights)  # each is gathered twice, for forward and backward
        assert_same(found, expected)
        assert_same([whole_value(own) for own in model.parameters()], [whole(own) for own in plain.parameters()])
        assert sent.count(("all_reduce", torch.int32, len(weights))) == STEPS
        assert not [kind for _, kind, _ in sent if kind not in KINDS[dtype]]


# weights in FP8 travel with the other parameters of their layer, as bytes; the embedding and the head do not
KINDS = {
    None: {torch.uint8, torch.int32, torch.float32},
    torch.bfloat16: {torch.uint8, torch.int32, torch.float32, torch.bfloat16},
}


def whole_value(parameter):
    return distributed.checkpoint._plain(parameter).full_tensor()


def case_bits_of_the_gathered_weight(rank, size, folder):
    """Those of the cast of the whole weight, whatever its rows; weights that are packed have one scale."""
    torch.manual_seed(1)
    layers = torch.nn.Sequential(*[bridge.ops.Linear(16, rows, bias=False) for rows in (32, 16, 48)])
    layers[1].basic_ops[0].weight.data *= 3
    odd = torch.nn.Linear(16, 2 * size + 1, bias=False)
    model = torch.nn.Sequential(layers, bridge.convert(torch.nn.Sequential(odd), CURRENT))
    values = [own.detach().clone() for own in model.parameters()]
    distributed.gather_in_fp8(model, CURRENT)
    fully_shard(model, reshard_after_forward=False)
    distributed.precompute_scales(model)
    model.unshard()
    quantizer = fte.Float8CurrentScalingQuantizer(dtype=torch.float8_e4m3fn)
    for own, value in zip(model.parameters(), values, strict=True):
        expected = fte.quantize(value, quantizer)
        assert isinstance(own, bridge.QuantizedWeight)
        assert_same(own.rowwise_data.view(torch.uint8), expected.rowwise_data.view(torch.uint8))
        assert_same(own.rowwise_scale_inv, expected.rowwise_scale_inv)
    model.reshard()
    # a write makes the scales anew, for all weights
    with torch.no_grad():
        for own in model.parameters():
            own.mul_(2.5)
    model.unshard()
    for own, value in zip(model.parameters(), values, strict=True):
        expected = fte.quantize(value * 2.5, quantizer)
        assert_same(own.rowwise_data.view(torch.uint8), expected.rowwise_data.view(torch.uint8))


@torch.compile(backend="aot_eager")
def _scale_compiled(own):
    own.mul_(0.5)


WRITES = {
    "in place": lambda own: own.mul_(0.5),
    "data": lambda own: own.data.mul_(0.5),
    "detached": lambda own: own.detach().mul_(0.5),
    "local": lambda own: own.to_local().mul_(0.5),
    "view": lambda own: own.data.view(-1).mul_(0.5),
    "transposed": lambda own: own.data.t().mul_(0.5),
    "foreach": lambda own: torch._foreach_mul_([own], 0.5),
    "copy": lambda own: own.copy_(own * 0.5),
    "compiled": _scale_compiled,
}


def case_every_write_is_seen(rank, size, folder):
    """What is gathered after a write is the cast of what was written, however that was done."""
    torch.manual_seed(2)
    model = bridge.ops.Sequential(bridge.ops.Linear(16, 32, bias=False))
    distributed.gather_in_fp8(model, CURRENT)
    expected = next(model.parameters()).detach().clone()
    fully_shard(model)
    quantizer = fte.Float8CurrentScalingQuantizer(dtype=torch.float8_e4m3fn)
    for write in WRITES.values():
        distributed.precompute_scales(model)
        with torch.no_grad():
            write(next(model.parameters()))
        expected = expected * 0.5
        model.unshard()
        found = next(model.parameters())
        assert_same(found.dequantize(), fte.quantize(expected, quantizer).dequantize())
        model.reshard()


def case_trained_after_an_evaluation(rank, size, folder):
    """An evaluation in inference mode may be what computes the scales of a step."""
    losses = []
    for evaluates in (False, True):
        model = sharded(CURRENT, fp8=True, num_hidden_layers=1)
        found = [train(model, rank, size, steps=1)]
        if evaluates:
            with torch.inference_mode():
                loss_of(model, batch(0).chunk(size)[rank])
        losses.append(torch.cat([*found, train(model, rank, size, steps=1, start=1)]))
    assert_same(*losses)


def case_checkpointed_and_compiled(rank, size, folder):
    """Layers in one graph each, with FP8 messages and recomputed activations: the bits of eager mode without."""
    counters.clear()
    model = sharded(CURRENT, fp8=True, compiled="aot_eager", checkpointed=True, num_hidden_layers=1)
    found = train(model, rank, size)
    assert sum(counters["graph_break"].values()) == 0
    assert counters["stats"]["unique_graphs"] == 1
    assert_same(found, train(sharded(CURRENT, num_hidden_layers=1), rank, size))


def slow_case_compiled_with_delayed_scaling(rank, size, folder):
    """No layer is compiled again; scales are those of eager mode."""
    losses, scales = [], []
    for compiled in (None, "aot_eager"):
        counters.clear()
        model = sharded(DELAYED, fp8=True, compiled=compiled)
        with distributed.agree_amaxes(model):
            losses.append(train(model, rank, size, 4))
            with bridge.autocast(recipe=DELAYED):
                pass
        scales.append(
            {
                f"{name} {role}": (own.scale.clone(), own.amax_history.clone())
                for name, op in distributed.groups.operations_of(model)
                for role, _, own in op.named_states()
            }
        )
    assert counters["stats"]["unique_graphs"] <= 2  # layers that are alike may share one
    assert sum(counters["graph_break"].values()) == 0
    assert_same(losses[1], losses[0])
    assert_same(scales[1], scales[0])


def case_delayed_and_checkpointed(rank, size, folder):
    plain, model = sharded(DELAYED, fp8=True), sharded(DELAYED, fp8=True, checkpointed=True)
    losses = []
    for own in (plain, model):
        with distributed.agree_amaxes(own):
            losses.append(train(own, rank, size))
    assert_same(losses[0], losses[1])


def case_saved_and_resumed(rank, size, folder):
    """Bit for bit, quantizer state and optimizer included; one process reads what several wrote."""
    path = folder / "checkpoints"
    model = sharded(DELAYED, fp8=True)
    optimizer = optimizer_of(model)
    with distributed.agree_amaxes(model):
        train(model, rank, size, 2, optimizer)
        distributed.save_checkpoint(path, model, optimizer, {"step": 2})
        values = {name: whole_value(own) for name, own in model.named_parameters()}
        states = {name: op.get_extra_state() for name, op in distributed.groups.operations_of(model)}
        moments = [whole(optimizer.state[own]["exp_avg"]) for own in model.parameters()]
        torch.save((values, states, moments), folder / f"expected-{rank}.pt")
        expected = train(model, rank, size, 2, optimizer, 2)
    for fp8 in (True, False):  # how weights are gathered is nothing that a file says
        other = sharded(DELAYED, fp8=fp8, checkpointed=not fp8)
        fresh = optimizer_of(other)
        with torch.no_grad():
            for own in other.parameters():
                own.mul_(0.5)
        with distributed.agree_amaxes(other):
            assert distributed.load_checkpoint(path, other, fresh) == {"step": 2}
            loaded = [op.get_extra_state() for _, op in distributed.groups.operations_of(other)]
            assert_same(loaded, list(states.values()))
            found = train(other, rank, size, 2, fresh, 2)
        if fp8:
            assert_same(found, expected)
            assert_same(
                [whole_value(own) for own in other.parameters()], [whole_value(own) for own in model.parameters()]
            )
    assert distributed.latest_checkpoint(path) == path / "0"


def case_a_checkpoint_takes_the_place_of_the_one_before(rank, size, folder):
    """Also if one before was left half written; and one that fails changes nothing."""
    path = folder / "replaced"
    model = torch.nn.Linear(8, 8)
    if rank == 0:
        (path / ".writing-0").mkdir(parents=True)
        (path / ".writing-0" / "rubbish").write_text("half")
    assert distributed.latest_checkpoint(path) is None
    for step in range(3):
        with torch.no_grad():
            model.weight.fill_(step)
        distributed.save_checkpoint(path, model, extra=step)
    torch.distributed.barrier()
    assert sorted(own.name for own in path.iterdir()) == ["2", "latest"]
    with torch.no_grad():
        model.weight.fill_(7)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.distributed.checkpoint, "save", _fails)
        with pytest.raises(OSError, match="no space"):
            distributed.save_checkpoint(path, model, extra=7)
    assert distributed.load_checkpoint(path, model) == 2
    assert (model.weight == 2).all()
    with pytest.raises(ValueError, match="a folder with a complete checkpoint"):
        distributed.load_checkpoint(folder / "nowhere", model)
    stateful = bridge.convert(torch.nn.Sequential(torch.nn.Linear(16, 16)), DELAYED)
    with pytest.raises(ValueError, match="agree_amaxes"):
        distributed.save_checkpoint(path, stateful)


def _fails(*args, **kwargs):
    raise OSError("no space left")


def case_refusals(rank, size, folder):
    with pytest.raises(ValueError, match="recipe: expected one scale for every weight, got MXFP8Quantizer"):
        distributed.gather_in_fp8(llama_converted(), fte.recipes.MXFP8BlockScaling())
    with pytest.raises(ValueError, match="linear layers whose weights the recipe casts"):
        distributed.gather_in_fp8(torch.nn.Linear(2, 2), CURRENT)
    with pytest.raises(ValueError, match=r"gather_in_fp8: dtype: .* None on rank 0; torch.bfloat16 on rank 1"):
        distributed.gather_in_fp8(llama_converted(), CURRENT, [None, *[torch.bfloat16] * (size - 1)][rank])
    model = distributed.gather_in_fp8(llama_converted(), CURRENT)
    mesh = init_device_mesh("cpu", (size,))
    with pytest.raises(ValueError, match="expected weights that are not gathered in FP8"):
        distributed.tensor_parallel(model, mesh)
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=r"parameter dtype torch\.bfloat16 of the mixed precision policy, got None"):
        loss_of(model, batch())
    (folder / "file").touch()
    with pytest.raises(OSError, match=r"exists|directory"):  # on every rank
        distributed.save_checkpoint(folder / "file" / "inside", model)


def case_state_dicts_hold_high_precision(rank, size, folder):
    """Of plain files and of PyTorch's own checkpoints."""
    model = torch.nn.Sequential(bridge.ops.Linear(16, 32))
    values = {name: own.clone() for name, own in model.state_dict().items() if isinstance(own, torch.Tensor)}
    distributed.gather_in_fp8(model, CURRENT)
    stream = io.BytesIO()
    torch.save({name: model.state_dict()[name] for name in values}, stream)
    stream.seek(0)
    found = torch.load(stream, weights_only=True)
    assert {name: type(own) for name, own in found.items()} == dict.fromkeys(values, torch.Tensor)
    assert_same(list(found.values()), list(values.values()))
    fully_shard(model)
    torch.distributed.checkpoint.save({"model": get_model_state_dict(model)}, checkpoint_id=folder / "plain")
    target = {"model": {name: torch.zeros_like(own) for name, own in values.items()}}
    torch.distributed.checkpoint.load(target, checkpoint_id=folder / "plain")
    assert_same(target["model"], values)


def case_recipes_with_functions(rank, size, folder):
    """Equal functions are equal, whatever their addresses."""
    recipe = fte.recipes.CustomRecipe(lambda role: fte.Float8CurrentScalingQuantizer(dtype=torch.float8_e4m3fn))
    distributed.check_same_on_all_ranks({"recipe": recipe})


def llama_converted():
    return bridge.convert(llama(), CURRENT, exclude="lm_head")


if __name__ == "__main__":
    main(globals())
