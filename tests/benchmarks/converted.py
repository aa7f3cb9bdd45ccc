"""Speed of converted models on the CPU over the models they were made from, both compiled, in high precision.

``python -m tests.benchmarks.converted [MODEL...]`` prints ratios of forward and backward and exits non-zero if one is
above its limit. Needs transformers. The two sides alternate, so that a busy machine disturbs both alike.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn

import bridge
from tests.benchmarks.run import ratio

LIMIT = 1.05
WIDTH, LAYERS, VOCABULARY, BATCH, CONTEXT = 256, 2, 256, 8, 64


def _llama() -> nn.Module:
    sizes = {"hidden_size": WIDTH, "intermediate_size": 4 * WIDTH, "num_hidden_layers": LAYERS}
    heads = {"num_attention_heads": WIDTH // 32, "num_key_value_heads": WIDTH // 64}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=VOCABULARY, **sizes, **heads))


def _gpt2() -> nn.Module:
    sizes = {"n_embd": WIDTH, "n_layer": LAYERS, "n_head": WIDTH // 32, "n_positions": CONTEXT}
    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 2}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=VOCABULARY, **sizes, **none))


class _Encoder(nn.Module):
    """An encoder that takes what the language models take."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, WIDTH // 32, 4 * WIDTH, 0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)

    def forward(self, tokens: torch.Tensor, labels: Any, use_cache: bool) -> Any:
        del labels, use_cache
        return {"loss": self.encoder(self.embedding(tokens)).square().mean()}


MODELS: dict[str, Callable[[], nn.Module]] = {"llama": _llama, "gpt2": _gpt2, "encoder": _Encoder}


def _step(model: nn.Module, tokens: torch.Tensor) -> Callable[[], Any]:
    compiled = torch.compile(lambda: model(tokens, labels=tokens, use_cache=False)["loss"], dynamic=False)

    def step() -> None:
        model.zero_grad()
        compiled().backward()

    return step


def measure(name: str, rounds: int = 11) -> float:
    """The ratio of one model."""
    torch.manual_seed(0)
    original = MODELS[name]()
    tokens = torch.randint(VOCABULARY, (BATCH, CONTEXT))
    converted = bridge.convert(copy.deepcopy(original), inplace=True)
    return ratio(_step(converted, tokens), _step(original, tokens), calls=4, rounds=rounds)


def main(names: list[str]) -> int:
    """Print the ratios; 1 if one is too large."""
    failed = 0
    for name in names or list(MODELS):
        found = measure(name)
        failed |= found > LIMIT
        print(f"{name}: converted and compiled over original and compiled: {found:.3f} (at most {LIMIT})", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
