"""What two GPUs run together: ``python -m tests.gpu.distributed_cases RANK SIZE FOLDER DEVICE``."""

import json
import sys
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import bridge
import functional_te as fte
from bridge import distributed, ops
from tests import oracles
from tests.distributed.common import same_on_all_ranks
from tests.helpers import CURRENT, DELAYED, assert_same, uniform

WIDTH, HIDDEN, TOKENS, STEPS = 256, 512, 64, 3
# decibels between a result in FP8 and the one in high precision
FLOOR = 14


class Ranks:
    """This process: its rank, how many there are, its device, and where files go."""

    def __init__(self, rank: int, size: int, folder: Path, device: str) -> None:
        self.rank, self.size, self.folder = rank, size, folder
        self.device = torch.device(device, rank) if device == "cuda" else torch.device(device)

    def data(self, *shape, seed=0, dtype=torch.bfloat16):
        return uniform(shape, dtype, seed).to(self.device)


def block(ranks, seed=0, dtype=torch.bfloat16):
    torch.manual_seed(seed)
    options = {"device": ranks.device, "dtype": dtype}
    return ops.Sequential(
        ops.RMSNorm(WIDTH, **options),
        ops.Linear(WIDTH, HIDDEN, bias=False, **options),
        ops.SwiGLU(),
        ops.Linear(HIDDEN // 2, WIDTH, bias=False, **options),
    )


def train(model, ranks, recipe, mine):
    """Losses of steps in which this rank sees its rows, or (not ``mine``) all of them."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    for step in range(STEPS):
        x = ranks.data(ranks.size * TOKENS, WIDTH, seed=step)
        with bridge.autocast(recipe=recipe):
            y = model(x.chunk(ranks.size)[ranks.rank] if mine else x)
        loss = (y.float() - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss = loss.detach()
        if mine:
            dist.all_reduce(loss)
            loss = loss / ranks.size
        losses.append(loss)
    return torch.stack(losses)


def states(model):
    return {name: own.clone() for name, own in model.named_buffers() if own.numel()}


def case_agreed_amaxes(ranks):
    """Eager and compiled: scales are equal, and those of one process within rounding."""
    one = block(ranks)
    train(one, ranks, DELAYED, mine=False)
    expected = states(one)
    for compiled in (False, True):
        model = block(ranks)
        ddp = torch.nn.parallel.DistributedDataParallel(torch.compile(model, fullgraph=True) if compiled else model)
        with distributed.agree_amaxes(model):
            train(ddp, ranks, DELAYED, mine=True)
            with bridge.autocast(recipe=DELAYED):
                pass
        found = states(model)
        same_on_all_ranks(found.values())
        for name, own in found.items():
            if name.endswith("input_scale"):
                torch.testing.assert_close(own, expected[name], rtol=0.05, atol=0)


def case_values(ranks):
    """One all-reduce keeps a NaN, whatever the library of collectives thinks of it."""
    state = fte.init_state(fte.BasicLinear(16, 16), DELAYED, device=ranks.device)
    amax = torch.tensor([float(ranks.rank + 1), 0, 0, 0], device=ranks.device)
    state[0]["input"].amax_history.copy_(amax)
    state[0]["weight"].amax_history.copy_(amax * float("nan") if ranks.rank == 0 else amax)
    found = fte.agree_amaxes(state, "", ranks.size)[0]
    assert found["input"].amax_history.tolist() == [ranks.size, 0, 0, 0]
    assert found["weight"].amax_history[0].isnan()


def case_sequence_parallel_linears(ranks):
    """Casts before messages give the bits of a cast of the whole, forward and backward."""
    x, dy = ranks.data(TOKENS, WIDTH, seed=1), ranks.data(TOKENS, HIDDEN, seed=2)
    weight = ranks.data(HIDDEN, WIDTH, seed=3)
    for recipe in (CURRENT, DELAYED):
        op = fte.BasicLinear(WIDTH, ranks.size * HIDDEN, fte.TensorParallel("column", "", ranks.size, True))
        results = []
        for own, rows in ((op, x.chunk(ranks.size)[ranks.rank]), (fte.BasicLinear(WIDTH, HIDDEN), x)):
            state = fte.init_state(own, recipe, device=ranks.device)
            out, pullback = fte.vjp(own, ({"weight": weight},), rows, state=state, recipe=recipe)
            grads = pullback(dy)
            results.append((out.output, grads.params, grads.state))
        assert_same(*results)


def case_gathered_in_fp8(ranks):
    """FSDP2 with and without FP8 messages: the same bits; compiled layers too."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for compiled in (False, True):
        found = []
        for fp8 in (False, True):
            torch._dynamo.reset()
            model = torch.nn.Sequential(*[block(ranks, seed, torch.float32) for seed in range(2)])
            if fp8:
                distributed.gather_in_fp8(model, CURRENT, torch.bfloat16)
            for index, layer in enumerate(model):
                model[index] = torch.compile(layer, fullgraph=True) if compiled else layer
                fully_shard(model[index], mp_policy=policy)
            found.append(train(fully_shard(model, mp_policy=policy), ranks, CURRENT, mine=True))
        if compiled:  # Inductor may fuse casts with what is before them
            torch.testing.assert_close(found[1], found[0], rtol=1e-3, atol=0)
        else:
            assert_same(found[1], found[0])


def case_checkpoints(ranks):
    """Saved and resumed bit for bit."""
    model = distributed.gather_in_fp8(block(ranks, dtype=torch.float32), CURRENT)
    fully_shard(model)
    train(model, ranks, CURRENT, mine=True)
    distributed.save_checkpoint(ranks.folder / "checkpoints", model, extra=1)
    values = [own.detach().clone() for own in model.parameters()]
    with torch.no_grad():
        for own in model.parameters():
            own.mul_(0.5)
    assert distributed.load_checkpoint(ranks.folder / "checkpoints", model) == 1
    for own, value in zip(model.parameters(), values, strict=True):
        assert torch.equal(own.full_tensor(), value.full_tensor())


def case_llama_in_tensor_parallel(ranks):
    """Losses and gradients near one process's."""
    from tests.distributed.tp_cases import batch as ids
    from tests.distributed.tp_cases import llama, loss_of, whole

    def run(model):
        loss = loss_of(model, ids().to(ranks.device))
        loss.backward()
        return loss.detach(), {name: whole(own.grad) for name, own in model.named_parameters()}

    mesh = init_device_mesh(ranks.device.type, (ranks.size,))
    for recipe in (None, CURRENT):
        loss, grads = run(bridge.convert(llama().to(ranks.device), recipe, exclude="lm_head"))
        for sequence_parallel in (False, True):
            model = bridge.convert(llama().to(ranks.device), recipe, exclude="lm_head")
            distributed.tensor_parallel(model, mesh, sequence_parallel=sequence_parallel)
            found, own = run(model)
            torch.testing.assert_close(found, loss, rtol=0.01, atol=0)
            for name, grad in grads.items():
                assert oracles.snr(own[name].cpu(), grad.double().cpu()) > FLOOR, name


def case_experts(ranks):
    """Rows come back in their order, with their gradients."""
    count = 2 * ranks.size
    torch.manual_seed(0)
    options = {"device": ranks.device, "dtype": torch.bfloat16, "bias": False}
    one = ops.GroupedLinear(count, WIDTH, WIDTH, **options)
    part = ops.GroupedLinear(2, WIDTH, WIDTH, **options)
    for index in range(2):
        getattr(part, f"weight{index}").data.copy_(getattr(one, f"weight{2 * ranks.rank + index}").data)
    counts = torch.tensor([32, 0, 64, 32] if ranks.rank else [64, 32, 0, 32], device=ranks.device)
    x = ranks.data(128, WIDTH, seed=ranks.rank)
    mine, all_ = (x.clone().requires_grad_() for _ in range(2))
    y, z = distributed.ExpertParallel(part, count)(mine, counts), one(all_, counts)
    for out in (y, z):
        out.float().square().sum().backward()
    torch.testing.assert_close(y, z, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(mine.grad, all_.grad, rtol=5e-2, atol=5e-2)


CASES = {name.removeprefix("case_"): case for name, case in list(globals().items()) if name.startswith("case_")}


def main(rank: int, size: int, folder: Path, device: str) -> None:
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=120),
    )
    ranks, report = Ranks(rank, size, folder, device), {}
    for name, case in CASES.items():
        torch._dynamo.reset()
        try:
            case(ranks)
            report[name] = "ok"
        except BaseException:  # the other ranks wait for calls that do not come
            report[name] = traceback.format_exc()
        print(name, report[name], flush=True)
        (folder / f"{rank}.json").write_text(json.dumps(report))
        if report[name] != "ok":
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
