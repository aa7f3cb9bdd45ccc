"""A rank that is killed in the middle of a step: ``python -m tests.distributed.killed_rank RANK SIZE FOLDER``."""

import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
from torch.distributed.fsdp import fully_shard

import bridge
from bridge import distributed
from tests.bridge.delayed import mlp
from tests.helpers import DELAYED, uniform

TIMEOUT = 20  # seconds
SAVED = 2  # steps


def model_of():
    return mlp()


def main(rank: int, size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    distributed.initialize(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=TIMEOUT),
    )
    model = fully_shard(model_of())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    distributed.agree_amaxes(model)
    began, report = time.monotonic(), {}
    try:
        for step in range(5):
            with bridge.autocast(recipe=DELAYED):
                loss = model(uniform((8, 16), seed=step * size + rank)).square().mean()
            if step == SAVED + 1 and rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            began = time.monotonic()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step + 1 == SAVED:
                distributed.save_checkpoint(folder / "checkpoints", model, optimizer, step + 1)
                torch.save([own.full_tensor() for own in model.parameters()], folder / f"parameters-{rank}.pt")
        report["error"] = ""
    except RuntimeError as error:
        report["error"] = str(error)
    report["seconds"] = time.monotonic() - began
    (folder / f"{rank}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
