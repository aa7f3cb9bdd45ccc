"""A decoder-only transformer whose norms, projections, MLPs and residual sums are chains of functional_te.

Attention itself is torch's ``scaled_dot_product_attention``, between two chains. The model knows no recipe: the
caller's ``bridge.autocast`` decides. The last projection stays in high precision, as is usual for FP8 training.
"""

from __future__ import annotations

import torch
from torch.nn import functional

import bridge
from bridge import ops
from bridge.demo.data import VOCABULARY
from bridge.demo.settings import HEAD_WIDTH, Settings

__all__ = ["Block", "LanguageModel", "held_out_loss", "train_loss"]


class Block(torch.nn.Module):
    """Attention and a SwiGLU MLP, each with a norm before and a residual sum after: three chains.

    Args:
        width: model width.
        device: where the parameters live.
    """

    def __init__(self, width: int, device: str) -> None:
        super().__init__()
        hidden = 2 * width
        self.attention_in = ops.Sequential(
            ops.RMSNorm(width, device=device),
            ops.Linear(width, 3 * width, bias=False, device=device),
        )
        self.attention_out = ops.Sequential(
            ops.Linear(width, width, device=device),
            ops.AddExtraInput(),
        )
        fork, join = ops.MakeExtraOutput(), ops.AddExtraInput()
        fork.set_extra_output_channel(0, "residual", output_to_caller=False)
        join.set_extra_input_channel(0, "residual")
        self.mlp = ops.Sequential(
            fork,
            ops.RMSNorm(width, device=device),
            ops.Linear(width, 2 * hidden, device=device),
            ops.SwiGLU(),
            ops.Linear(hidden, width, device=device),
            join,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map ``[batch, context, width]`` to the same shape."""
        batch, context, width = x.shape
        heads = self.attention_in(x).view(batch, context, 3, width // HEAD_WIDTH, HEAD_WIDTH)
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = self.attention_out(mixed.transpose(1, 2).reshape(batch, context, width), x)
        return self.mlp(x)


class LanguageModel(torch.nn.Module):
    """Bytes in, logits of the next byte out.

    Args:
        settings: sizes and device. Parameters are drawn from torch's global generator.
    """

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        width, device = settings.width, settings.device
        self.embedding = torch.nn.Embedding(VOCABULARY, width)
        self.position = torch.nn.Embedding(settings.context, width)
        for table in (self.embedding, self.position):
            torch.nn.init.normal_(table.weight, std=0.1)
            table.to(device)
        self.blocks = torch.nn.ModuleList(Block(width, device) for _ in range(settings.layers))
        self.head = ops.Sequential(
            ops.RMSNorm(width, device=device),
            ops.Linear(width, VOCABULARY, bias=False, device=device),
        )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map int64 ``[batch, context]`` to ``[batch, context, VOCABULARY]``."""
        x = self.embedding(tokens) + self.position.weight
        for block in self.blocks:
            x = block(x)
        with bridge.autocast(enabled=False):
            return self.head(x)


def _loss(model: torch.nn.Module, windows: torch.Tensor) -> torch.Tensor:
    logits = model(windows[:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


def train_loss(model: torch.nn.Module, windows: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy per byte over windows of ``context + 1`` bytes; what a training step differentiates."""
    return _loss(model, windows)


def held_out_loss(model: torch.nn.Module, windows: torch.Tensor) -> torch.Tensor:
    """The same under another name: one function per graph, so that a second graph of one means a recompilation."""
    return _loss(model, windows)
