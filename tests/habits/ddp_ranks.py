"""What every rank of ``test_ddp.py`` runs: ``python -m tests.habits.ddp_ranks RANK FOLDER``."""

import json
import sys
import traceback
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.bridge.compiled import assert_close, assert_same_bits
from tests.habits.models import as_mode, batch, gradients, mlp, precision

SIZE = 2


def _mine(x, rank):
    return x.chunk(SIZE)[rank]


def _reference(steps, rows=16):
    """One process with the whole batch, in high precision: parameters after each step, and gradients."""
    model = mlp()
    optimizer, seen = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(steps):
        optimizer.zero_grad()
        model(batch(step, rows)).square().mean().backward()
        optimizer.step()
        seen.append([own.detach().clone() for own in model.parameters()])
    return seen


def _train(rank, mode, recipe, wrap=None, steps=3):
    model = mlp()
    ddp = (wrap or DistributedDataParallel)(model)
    run = as_mode(mode, ddp) if mode == "eager" else torch.compile(ddp, backend="aot_eager")
    optimizer, seen = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(steps):
        optimizer.zero_grad()
        with precision(recipe):
            loss = run(_mine(batch(step), rank)).square().mean()
        loss.backward()
        optimizer.step()
        seen.append([own.detach().clone() for own in model.parameters()])
    return model, seen


def _same_on_all_ranks(tensors):
    for own in tensors:
        both = [torch.empty_like(own) for _ in range(SIZE)]
        dist.all_gather(both, own)
        assert_same_bits(both[0], both[1])


def case_high_precision_is_one_process(rank):
    _, seen = _train(rank, "eager", "none")
    assert_close(seen, _reference(3), rtol=1e-4, atol=1e-6)


def case_compiled(rank):
    _, seen = _train(rank, "compiled", "none")
    assert_close(seen, _reference(3), rtol=1e-4, atol=1e-6)


def case_views_and_static_graph(rank):
    wrap = lambda model: DistributedDataParallel(model, gradient_as_bucket_view=True, static_graph=True)  # noqa: E731
    _, seen = _train(rank, "eager", "none", wrap)
    assert_close(seen, _reference(3), rtol=1e-4, atol=1e-6)


def case_low_precision(rank):
    for recipe in ("current", "delayed"):
        model, seen = _train(rank, "eager", recipe)
        _same_on_all_ranks(seen[-1])
        assert_close(seen, _reference(3), rtol=0.1, atol=0.02)
        del model


def case_no_sync_accumulates(rank):
    model, plain = mlp(), mlp()
    ddp = DistributedDataParallel(model)
    for part in range(2):
        with ddp.no_sync() if part == 0 else nullcontext():
            ddp(_mine(batch(part), rank)).square().sum().backward()
    for part in range(2):
        plain(batch(part)).square().sum().backward()
    assert_close(gradients(model), [grad / SIZE for grad in gradients(plain)], rtol=1e-4, atol=1e-4)


def case_parameters_that_some_ranks_do_not_use(rank):
    model = torch.nn.ModuleList([mlp(), mlp(1)])

    class Chosen(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.both = model

        def forward(self, x):
            return self.both[rank](x)

    ddp = DistributedDataParallel(Chosen(), find_unused_parameters=True)
    ddp(batch(0)).sum().backward()
    _same_on_all_ranks([own.grad for own in model.parameters()])
    assert all(own.grad.abs().sum() > 0 for own in model.parameters())


def case_a_hook_that_compresses(rank):
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    model = mlp()
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(None, fp16_compress_hook)
    ddp(_mine(batch(0), rank)).square().mean().backward()
    plain = mlp()
    plain(batch(0)).square().mean().backward()
    assert_close(gradients(model), gradients(plain), rtol=0.01, atol=1e-4)


CASES = {name.removeprefix("case_"): case for name, case in list(globals().items()) if name.startswith("case_")}


def main(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=SIZE, timeout=timedelta(seconds=120)
    )
    report = {}
    for name, case in CASES.items():
        try:
            case(rank)
            report[name] = "ok"
        except Exception:
            report[name] = traceback.format_exc()
        (folder / f"{rank}.json").write_text(json.dumps(report))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
