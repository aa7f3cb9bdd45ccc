"""Two GPUs against one: ``torchrun --nproc-per-node 2 -m tests.benchmarks.gpu.two_gpus [--out FILE]``.

Rows: messages alone and beside products; an MLP block in tensor parallel; and steps of a Llama of about a billion
parameters under FSDP2, ours and torchao's, each as a ratio to one GPU in the same run. Beside the block stands what
``graph.scale`` predicts for it. Without GPUs everything is tiny, which shows that it runs, and means nothing.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import bridge
import functional_te as fte
from bridge import distributed, ops
from functional_te.kernels import collectives
from tests.benchmarks.gpu.blocks import mlp_chain
from tests.benchmarks.gpu.contestants import RECIPES
from tests.benchmarks.gpu.converted import HEAD, llama
from tests.benchmarks.gpu.measure import durations, release

RECIPE = "delayed"


def median(run: Callable[[], Any], device: str, count: int) -> float:
    """Milliseconds of a call, the slower rank's."""
    for _ in range(3):
        run()
    dist.barrier()
    time = torch.tensor(statistics.median(durations(run, count, device)), device=device)
    dist.all_reduce(time, dist.ReduceOp.MAX)
    return time.item()


def _compiled(model: torch.nn.Module, device: str) -> Any:
    backend = "inductor" if device == "cuda" else "aot_eager"  # C++ for FP8 compiles for minutes
    return torch.compile(model, fullgraph=True, dynamic=False, backend=backend)


# ---- messages


def link_rows(device: str, count: int) -> list[dict[str, Any]]:
    """Rates and latencies of messages, as :class:`functional_te.graph.Link` counts them."""
    size, found = dist.get_world_size(), []
    rank = (size - 1) / size
    for megabytes in (0.001, 32, 256) if device == "cuda" else (0.001,):
        gathered = torch.zeros(int(megabytes * 2**20) // size * size, dtype=torch.uint8, device=device)
        part = torch.empty(gathered.numel() // size, dtype=torch.uint8, device=device)
        sums = gathered.view(torch.bfloat16)
        calls: dict[str, Callable[[], Any]] = {
            "all-gather": lambda part=part: collectives.all_gather(part, "", size),
            "reduce-scatter": lambda sums=sums: collectives.reduce_scatter(sums, "", size),
            "all-reduce": lambda sums=sums: collectives.all_reduce(sums, "", size),
        }
        for kind, call in calls.items():
            ms = median(call, device, count)
            sent = gathered.numel() * rank * (2 if kind == "all-reduce" else 1)
            found.append({"row": f"{kind} of {megabytes} MiB", "ms": ms, "GB/s": sent / ms / 1e6})
    return found


def overlap_rows(device: str, count: int) -> list[dict[str, Any]]:
    """The products of the block beside their messages: one after the other, and as PyTorch pipelines them.

    The pipelined ones copy between GPUs through symmetric memory, without multicast.
    """
    if device != "cuda":
        return []
    memory = importlib.import_module("torch.distributed._symmetric_memory")
    group, size = dist.group.WORLD, dist.get_world_size()
    assert group is not None
    name = group.group_name
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        memory.enable_symm_mem_for_group(name)
    tokens, hidden, inner = 8192, 4096, 14336
    one, fp8 = torch.ones((), device=device), torch.float8_e4m3fn
    part = torch.randn(tokens // size, hidden, device=device).to(fp8)
    column = torch.randn(2 * inner // size, hidden, device=device).to(fp8)
    wide = torch.randn(tokens, inner // size, device=device).to(fp8)
    row = torch.randn(hidden, inner // size, device=device).to(fp8)
    whole = torch.randn(tokens, hidden, device=device).to(fp8)

    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True)

    def gather_apart() -> None:
        product(collectives.all_gather(part, "", size), column)

    def gather_pipelined() -> None:
        torch.ops.symm_mem.fused_all_gather_scaled_matmul(
            part, [column.t()], one, [one], 0, name, [None], [None], [torch.bfloat16], [True]
        )

    def scatter_apart() -> None:
        collectives.reduce_scatter(product(wide, row), "", size)

    def scatter_pipelined() -> None:
        torch.ops.symm_mem.fused_scaled_matmul_reduce_scatter(
            wide, row.t(), one, one, "sum", 0, 0, name, [tokens, hidden], None, None, torch.bfloat16, True
        )

    cases: dict[str, Callable[[], Any]] = {
        "product of the gathered": lambda: product(whole, column),
        "all-gather, then product": gather_apart,
        "all-gather and product pipelined": gather_pipelined,
        "product of the summed": lambda: product(wide, row),
        "product, then reduce-scatter": scatter_apart,
        "product and reduce-scatter pipelined": scatter_pipelined,
    }
    return [{"row": name, "ms": median(case, device, count)} for name, case in cases.items()]


# ---- an MLP block


def _block(hidden: int, inner: int, device: str, parallel: bool) -> torch.nn.Module:
    options: dict[str, Any] = {"device": device, "dtype": torch.bfloat16, "bias": False}
    fork, join = ops.MakeExtraOutput(), ops.AddExtraInput()
    fork.set_extra_output_channel(0, "residual", output_to_caller=False)
    join.set_extra_input_channel(0, "residual")
    column, row = (
        {"tensor_parallel_mode": mode, "sequence_parallel": True} if parallel else {} for mode in ("column", "row")
    )
    linear = ops.BasicLinear(inner, hidden, **{k: v for k, v in options.items() if k != "bias"}, **row)
    return ops.Sequential(
        fork,
        ops.RMSNorm(hidden, device=device, dtype=torch.bfloat16),
        ops.Linear(hidden, 2 * inner, **options, **column),
        ops.SwiGLU(),
        linear,
        join,
    )


def mlp_rows(device: str, count: int) -> list[dict[str, Any]]:
    """Forward and backward of one block."""
    tokens, hidden, inner = (8192, 4096, 14336) if device == "cuda" else (64, 64, 128)
    size, found = dist.get_world_size(), []
    for parallel in (False, True):
        release(device, compiled=True)
        model = _compiled(_block(hidden, inner, device, parallel), device)
        rows = tokens // size if parallel else tokens
        x = torch.randn(rows, hidden, device=device, dtype=torch.bfloat16, requires_grad=True)
        dy = torch.randn_like(x)

        def run(model: Any = model, x: torch.Tensor = x, dy: torch.Tensor = dy) -> None:
            with bridge.autocast(recipe=RECIPES[RECIPE]):
                y = model(x)
            y.backward(dy)

        name = f"MLP t{tokens} h{hidden} f{inner}, tp={size if parallel else 1}"
        found.append({"row": name, "ms": median(run, device, count)})
    graph = fte.graph(
        mlp_chain(hidden, inner),
        None,
        fte.TensorSpec((tokens, hidden), torch.bfloat16),
        recipe=RECIPES[RECIPE],
        device="H200",
    )
    for row, ranks in zip(found, (1, size), strict=True):
        row["predicted ms"] = 1e3 * graph.scale(tp=ranks).seconds
    found[1]["of one GPU"] = found[1]["ms"] / found[0]["ms"]
    return found


# ---- a Llama


def _step(kind: str, device: str, shards: bool, batch: int | None) -> tuple[Callable[[], None], int, Callable[[], Any]]:
    """A training step at the same batch per GPU, its tokens, and what ends it."""
    model, tokens = llama(device, batch)
    end: Callable[[], Any] = lambda: None  # noqa: E731
    after: Callable[[], Any] = lambda: None  # noqa: E731
    if kind == "torchao":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            library = importlib.import_module("torchao.float8")
            config = library.Float8LinearConfig(enable_fsdp_float8_all_gather=shards, emulate=device != "cuda")
            library.convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name: name != HEAD)
        if shards:
            after = lambda: library.precompute_float8_dynamic_scale_for_fsdp(model)  # noqa: E731
    elif kind != "torch":
        model = bridge.convert(model, RECIPES[kind], exclude=HEAD, inplace=True)
        if shards:
            distributed.gather_in_fp8(model, RECIPES[kind])
            end = distributed.agree_amaxes(model).remove
            after = lambda: distributed.precompute_scales(model)  # noqa: E731
    for index, layer in enumerate(model.model.layers):
        model.model.layers[index] = _compiled(layer, device)
        if shards:
            fully_shard(model.model.layers[index])
    model.loss_function = _compiled(model.loss_function, device)  # without copies of the logits
    if shards:
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def run() -> None:
        model(tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        after()

    return run, tokens.numel(), end


def llama_rows(device: str, count: int, kinds: Sequence[str], batch: int | None) -> list[dict[str, Any]]:
    """Tokens per second of one GPU and of all of them."""
    found: list[dict[str, Any]] = []
    for kind in kinds:
        rates = []
        for shards in (False, True):
            release(device, compiled=True)
            run, tokens, end = _step(kind, device, shards, batch)
            ms = median(run, device, count)
            end()
            rates.append((dist.get_world_size() if shards else 1) * tokens / ms * 1e3)
            del run, end
        found.append({"row": f"Llama, {kind}", "tokens/s of one": rates[0], "tokens/s of all": rates[1]})
        found[-1]["of one GPU"] = rates[1] / rates[0]
    return found


PARTS: dict[str, Callable[..., list[dict[str, Any]]]] = {
    "links": link_rows,
    "overlap": overlap_rows,
    "mlp": mlp_rows,
    "llama": llama_rows,
}


def main() -> None:
    """Measure, and print the rows on the first rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="a file for the rows, as JSON")
    parser.add_argument("--count", type=int, default=20, help="calls that are timed")
    parser.add_argument("--only", default="", help=f"parts, separated by commas: {', '.join(PARTS)}; default: all")
    parser.add_argument("--llama", default="delayed,current,torchao,torch", help="contestants of the Llama")
    parser.add_argument("--batch", type=int, help="sequences of the Llama for each GPU")
    arguments = parser.parse_args()
    rank, _ = distributed.initialize()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows: list[dict[str, Any]] = []
    for name, measure in PARTS.items():
        if arguments.only and name not in arguments.only.split(","):
            continue
        more = measure(
            device,
            arguments.count,
            **({"kinds": arguments.llama.split(","), "batch": arguments.batch} if name == "llama" else {}),
        )
        rows += more
        for row in more if rank == 0 else ():
            shown = {key: round(value, 3) if isinstance(value, float) else value for key, value in row.items()}
            print(shown, flush=True)
        if rank == 0 and arguments.out is not None:
            arguments.out.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
