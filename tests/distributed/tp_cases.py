"""Tensor and sequence parallel: casts before the message, and converted models."""

import copy

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

import bridge
import functional_te as fte
from bridge import distributed
from tests import oracles
from tests.bridge.compiled import GraphLog
from tests.convert.models import VOCABULARY, decoder
from tests.distributed.common import main, messages, same_on_all_ranks
from tests.helpers import CURRENT, DELAYED, assert_same, uniform

IN, OUT, TOKENS = 32, 64, 8
BATCH, CONTEXT = 4, 16
BLOCK = fte.recipes.MXFP8BlockScaling()
# decibels between a result in FP8 and the one in high precision
FLOOR = 20


def _layer(mode, size, recipe, rank, x, dy, weight):
    """What one rank sends, and the results, of a sequence-parallel linear."""
    op = fte.BasicLinear(IN, OUT, fte.TensorParallel(mode, "", size, True))
    state = fte.init_state(op, recipe)
    with messages() as sent:
        result, pullback = fte.vjp(op, ({"weight": weight},), x, state=state, recipe=recipe)
        forward = list(sent)
        sent.clear()
        grads = pullback(dy)
    return forward, list(sent), result, grads


def case_casts_before_messages(rank, size, folder):
    """FP8 bytes travel, and a number for the amax; bits are those of a cast of the whole tensor."""
    x = uniform((TOKENS, IN), seed=1) * torch.arange(1, TOKENS + 1)[:, None]
    dy = uniform((TOKENS, OUT), seed=2) * torch.arange(TOKENS, 0, -1)[:, None]
    weight = uniform((OUT, IN), seed=3)
    rows = TOKENS // size
    for recipe in (CURRENT, DELAYED):
        # column: all ranks have the same part of the weight, so that its scale is that of one process
        half = weight[: OUT // size]
        forward, _, found, grads = _layer("column", size, recipe, rank, x.chunk(size)[rank], dy[:, : OUT // size], half)
        assert [name for name, *_ in forward] in (
            ["all_reduce", "all_gather_into_tensor"], ["all_gather_into_tensor", "all_reduce"]
        )  # fmt: skip
        assert ("all_gather_into_tensor", torch.uint8, rows * IN) in forward
        assert ("all_reduce", torch.int32, 1) in forward
        whole = fte.BasicLinear(IN, OUT // size)
        expected, pullback = fte.vjp(whole, ({"weight": half},), x, state=fte.init_state(whole, recipe), recipe=recipe)
        own = pullback(dy[:, : OUT // size])
        assert_same(found.output, expected.output)
        assert_same(grads.params, own.params)
        assert_same(grads.state, own.state)
        torch.testing.assert_close(grads.input, size * own.input.chunk(size)[rank])
        # row: the gradient is what is gathered
        _, backward, _, grads = _layer(
            "row", size, recipe, rank, x[:, : IN // size], dy.chunk(size)[rank], weight[:, : IN // size]
        )
        assert ("all_gather_into_tensor", torch.uint8, rows * OUT) in backward
        assert all(kind in (torch.uint8, torch.int32) for _, kind, _ in backward)
        whole = fte.BasicLinear(IN // size, OUT)
        _, pullback = fte.vjp(
            whole,
            ({"weight": weight[:, : IN // size]},),
            x[:, : IN // size],
            state=fte.init_state(whole, recipe),
            recipe=recipe,
        )
        own = pullback(dy)
        assert_same((grads.input, grads.params, grads.state), (own.input, own.params, own.state))
    # blocks of rows would be others: what is sent is in high precision, as without a recipe
    for recipe in (None, BLOCK):
        forward, *_ = _layer("column", size, recipe, rank, x.chunk(size)[rank], dy[:, : OUT // size], half)
        assert ("all_gather_into_tensor", torch.float32, rows * IN) in forward


def llama(**options):
    torch.manual_seed(0)
    options = {"attention_bias": True, "mlp_bias": True, **options}
    model = decoder("Llama", use_cache=False, **options)
    with torch.no_grad():
        for own in model.parameters():  # no bias at zero
            own.add_(0.02 * torch.randn(own.shape, generator=torch.Generator().manual_seed(own.numel())))
    return model


def batch(seed=1):
    return torch.randint(1, VOCABULARY, (BATCH, CONTEXT), generator=torch.Generator().manual_seed(seed))


def loss_of(model, ids):
    return model(ids, labels=ids).loss


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gradients(model, run=None):
    model.zero_grad()
    loss = loss_of(model if run is None else run, batch())
    loss.backward()
    return loss.detach(), {name: whole(own.grad).clone() for name, own in model.named_parameters()}


def sharded(model, sequence_parallel, size):
    mesh = init_device_mesh("cpu", (size,))
    return distributed.tensor_parallel(model, mesh, sequence_parallel=sequence_parallel)


def case_llama(rank, size, folder):
    """A converted Llama is one process's in high precision, gradients included, and near it in FP8."""
    for recipe in (None, CURRENT, DELAYED):
        one = bridge.convert(llama(), recipe, exclude="lm_head")
        loss, grads = gradients(one)
        for sequence_parallel in (False, True):
            model = sharded(bridge.convert(llama(), recipe, exclude="lm_head"), sequence_parallel, size)
            found, own = gradients(model)
            if recipe is None:
                torch.testing.assert_close(found, loss, rtol=1e-5, atol=1e-5)
                torch.testing.assert_close(own, grads, rtol=1e-4, atol=1e-6)
                continue
            torch.testing.assert_close(found, loss, rtol=0.01, atol=0)
            for name, grad in grads.items():
                assert oracles.snr(own[name], grad.double()) > FLOOR - 6, (name, sequence_parallel)
            same_on_all_ranks([own[name] for name in own])


def slow_case_llama_compiled(rank, size, folder):
    """A layer is one graph, with the same bits as in eager mode."""
    model = sharded(bridge.convert(llama(), CURRENT, exclude="lm_head"), True, size)
    loss, eager = gradients(model)
    log = GraphLog()
    model.model.layers[1] = torch.compile(model.model.layers[1], fullgraph=True, backend=log)
    found, own = gradients(model)
    assert_same(found, loss)
    assert_same(list(own.values()), list(eager.values()))
    assert len(log.graphs) == 1


def case_training(rank, size, folder):
    """AdamW over sharded and whole parameters: all ranks stay equal, and near one process."""
    one, model = (bridge.convert(llama(), DELAYED, exclude="lm_head") for _ in range(2))
    model = sharded(model, True, size)
    with distributed.agree_amaxes(model):
        curves = []
        for own in (one, model):
            optimizer = torch.optim.AdamW(own.parameters(), lr=1e-3)
            losses = []
            for step in range(4):
                loss = loss_of(own, batch(step))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
            curves.append(torch.tensor(losses))
    torch.testing.assert_close(curves[1], curves[0], rtol=0.02, atol=0)
    same_on_all_ranks([curves[1], *[whole(own) for own in model.parameters()]])


def case_plan(rank, size, folder):
    """The plan is one of PyTorch's; parameters are DTensors; a deep copy is the same model."""
    model = bridge.convert(llama(), exclude="lm_head")
    plan = distributed.parallelize_plan(model)
    assert list(plan) == ["model.layers.0", "model.layers.1"]
    parallelize_module(model, init_device_mesh("cpu", (size,)), plan)
    layer = model.model.layers[0]
    assert layer.mlp.gate_proj.weight.placements == (torch.distributed.tensor.Shard(0),)
    assert layer.mlp.down_proj.weight.placements == (torch.distributed.tensor.Shard(1),)
    assert layer.mlp.down_proj.weight.to_local().shape == (64, 128 // size)
    assert not isinstance(layer.mlp.down_proj.bias, DTensor)
    twin = copy.deepcopy(model)
    assert_same(gradients(twin), gradients(model))
    with pytest.raises(ValueError, match="not sharded yet"):
        parallelize_module(model, init_device_mesh("cpu", (size,)), plan)


def case_refusals(rank, size, folder):
    mesh = init_device_mesh("cpu", (size,))
    model = bridge.convert(llama(), exclude="lm_head")
    model.model.layers[0].self_attn.head_dim = 64
    with pytest.raises(ValueError, match=r"self_attn.q_proj: expected heads that 2 ranks can share out, got 1 heads"):
        distributed.tensor_parallel(model, mesh)
    with pytest.raises(ValueError, match="converted decoder layers"):
        distributed.parallelize_plan(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"sequence_parallel: expected .* True on rank 0; False on rank 1"):
        distributed.tensor_parallel(bridge.convert(llama()), mesh, sequence_parallel=rank == 0)
    split = sharded(bridge.convert(llama(), exclude="lm_head"), True, size)
    with pytest.raises(RuntimeError, match="divisible by 2 ranks, got shape"):
        split(batch()[:3])


if __name__ == "__main__":
    main(globals())
