"""Training steps of a Hugging Face Llama of about a billion parameters: as it is, in torchao's FP8, and converted.

Needs transformers. A step is forward, loss, backward and a fused AdamW step on one batch of 8,192 tokens, or of as
many sequences as asked for. Everybody compiles every decoder layer, and the last projection with the loss; a graph of
all layers would compile for minutes.
"""

from __future__ import annotations

import importlib
import warnings
from typing import Any

import torch

import bridge
from tests.benchmarks.gpu.contestants import COMPILE, RECIPES, Contestant, Step

# the last projection stays in high precision for everybody, as is usual for FP8 training
HEAD = "lm_head"


def sizes(device: str) -> dict[str, int]:
    """The configuration, and ``batch`` and ``context``; tiny where there is no GPU."""
    if device != "cuda":
        names = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4}
        return {**names, "num_key_value_heads": 2, "vocab_size": 128, "batch": 2, "context": 16}
    names = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_attention_heads": 32}
    return {**names, "num_key_value_heads": 4, "vocab_size": 32000, "batch": 4, "context": 2048}


def llama(device: str, batch: int | None = None) -> tuple[Any, torch.Tensor]:
    """A random Llama in bfloat16, and a batch of tokens: of the usual size, or of some sequences."""
    chosen = sizes(device)
    usual, context = chosen.pop("batch"), chosen.pop("context")
    library = importlib.import_module("transformers")
    config = library.LlamaConfig(**chosen, max_position_embeddings=context, use_cache=False, tie_word_embeddings=False)
    torch.manual_seed(0)
    with torch.device(device):
        model = library.LlamaForCausalLM(config).to(torch.bfloat16)
        tokens = torch.randint(chosen["vocab_size"], (batch or usual, context))
    return model, tokens


def build(kind: str, device: str, mode: str | None = "compiled", batch: int | None = None) -> Step:
    """One training step.

    Args:
        kind: "torch", "torchao", or the name of a recipe of the converted model.
        device: "cuda" or "cpu".
        mode: a way to compile of :data:`COMPILE <tests.benchmarks.gpu.contestants.COMPILE>`; None for an eager step.
        batch: sequences, or None for the usual number.
    """
    model, tokens = llama(device, batch)
    if kind == "torchao":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            library = importlib.import_module("torchao.float8")
            config = library.Float8LinearConfig.from_recipe_name("tensorwise")
            library.convert_to_float8_training(model, config=config, module_filter_fn=lambda m, name: name != HEAD)
    elif kind != "torch":
        model = bridge.convert(model, RECIPES[kind], exclude=HEAD, inplace=True)

    def loss(hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        logits = model.lm_head(hidden[:, :-1]).flatten(0, 1).float()
        return torch.nn.functional.cross_entropy(logits, tokens[:, 1:].flatten())

    if mode is not None:
        options: dict[str, Any] = {"fullgraph": True, "dynamic": False, **COMPILE[mode]}
        for layer in model.model.layers:
            layer.compile(**options)
        loss = torch.compile(loss, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def run() -> None:
        torch.compiler.cudagraph_mark_step_begin()
        hidden = model.model(input_ids=tokens, use_cache=False).last_hidden_state
        loss(hidden, tokens).backward()
        optimizer.step()

    def clear() -> None:
        optimizer.zero_grad()

    return Step(run, clear, tuple(model.parameters()))


def contestants(device: str, batch: int | None = None) -> list[Contestant]:
    """The original, torchao's and the converted model in every recipe, in three modes of compilation, and eager."""
    kinds = {"torch bf16": "torch", "torchao": "torchao"}
    kinds |= {f"converted, {recipe}": recipe for recipe in ("delayed", "current", "none")}
    found = []
    for name, kind in kinds.items():
        for mode in COMPILE:

            def make(kind: str = kind, mode: str = mode) -> Step:
                return build(kind, device, mode, batch)

            found.append(Contestant(name, mode, make, peer=kind in ("torch", "torchao"), extra=kind == "none"))
    found.append(Contestant("converted, delayed", "eager", lambda: build("delayed", device, None, batch), extra=True))
    return found


def tokens_per_second(ms: float, device: str, batch: int | None = None) -> float:
    """Tokens of a batch over the time of a step."""
    chosen = sizes(device)
    return 1e3 * (batch or chosen["batch"]) * chosen["context"] / ms
