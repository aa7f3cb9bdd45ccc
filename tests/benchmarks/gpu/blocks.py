"""The models that are compared, each in plain PyTorch, as ``bridge.ops`` and in Transformer Engine's modules.

Two kinds: an MLP block, RMSNorm -> Linear(h, 2f) -> SwiGLU -> Linear(f, h) -> + residual; and a Llama-like layer,
RMSNorm -> QKV -> rotary -> causal attention with grouped heads -> projection -> + residual -> MLP block.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import bridge
import functional_te as fte

EPS = 1e-5


@dataclasses.dataclass(frozen=True)
class Mlp:
    """Sizes of MLP blocks: ``tokens`` rows of ``width`` features, ``hidden`` features after the gate."""

    tokens: int
    width: int
    hidden: int
    layers: int = 1

    @property
    def input_shape(self) -> tuple[int, ...]:
        return (self.tokens, self.width)


@dataclasses.dataclass(frozen=True)
class Llama:
    """Sizes of Llama-like layers. ``groups`` is the number of key and value heads."""

    batch: int
    context: int
    width: int
    heads: int
    groups: int
    hidden: int
    layers: int = 1

    @property
    def input_shape(self) -> tuple[int, ...]:
        return (self.batch, self.context, self.width)

    @property
    def head_width(self) -> int:
        return self.width // self.heads

    @property
    def qkv_width(self) -> int:
        return (self.heads + 2 * self.groups) * self.head_width


Shape = Mlp | Llama


# ---------------------------------------------------------------------------- attention, shared by torch and bridge


def rotary_tables(shape: Llama, device: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines ``[context, 1, head width]`` (Su et al. 2021, halves rotated against each other)."""
    half = torch.arange(0, shape.head_width, 2, device=device, dtype=torch.float32) / shape.head_width
    angles = torch.outer(torch.arange(shape.context, device=device, dtype=torch.float32), 10000.0**-half)
    angles = torch.cat((angles, angles), -1).unsqueeze(1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    one, other = x.chunk(2, -1)
    return x * cos + torch.cat((-other, one), -1) * sin


class Attention(torch.nn.Module):
    """From QKV ``[batch, context, qkv width]`` to the mixed values ``[batch, context, width]``; no parameters."""

    def __init__(self, shape: Llama, device: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.shape = shape
        cos, sin = rotary_tables(shape, device, dtype)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, qkv: Tensor) -> Tensor:
        shape = self.shape
        heads = qkv.view(shape.batch, shape.context, shape.heads + 2 * shape.groups, shape.head_width)
        query, key, value = heads.split((shape.heads, shape.groups, shape.groups), 2)
        query, key = _rotate(query, self.cos, self.sin), _rotate(key, self.cos, self.sin)
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        mixed = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=shape.groups != shape.heads
        )
        return mixed.transpose(1, 2).reshape(shape.input_shape)


# ---------------------------------------------------------------------------- plain PyTorch


class TorchMlp(torch.nn.Module):
    def __init__(self, width: int, hidden: int, device: str, dtype: torch.dtype) -> None:
        super().__init__()
        where = {"device": device, "dtype": dtype}
        self.norm = torch.nn.RMSNorm(width, eps=EPS, **where)
        self.up = torch.nn.Linear(width, 2 * hidden, bias=False, **where)
        self.down = torch.nn.Linear(hidden, width, bias=False, **where)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.up(self.norm(x)).chunk(2, -1)
        return self.down(functional.silu(gate) * up) + x


class TorchLlama(torch.nn.Module):
    def __init__(self, shape: Llama, device: str, dtype: torch.dtype) -> None:
        super().__init__()
        where = {"device": device, "dtype": dtype}
        self.norm = torch.nn.RMSNorm(shape.width, eps=EPS, **where)
        self.qkv = torch.nn.Linear(shape.width, shape.qkv_width, bias=False, **where)
        self.attention = Attention(shape, device, dtype)
        self.out = torch.nn.Linear(shape.width, shape.width, bias=False, **where)
        self.mlp = TorchMlp(shape.width, shape.hidden, device, dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.out(self.attention(self.qkv(self.norm(x)))) + x)


def torch_model(shape: Shape, device: str, dtype: torch.dtype) -> torch.nn.Module:
    """``shape.layers`` layers of torch.nn."""
    return torch.nn.Sequential(
        *(
            TorchLlama(shape, device, dtype)
            if isinstance(shape, Llama)
            else TorchMlp(shape.width, shape.hidden, device, dtype)
            for _ in range(shape.layers)
        )
    )


# ---------------------------------------------------------------------------- bridge.ops, and te.ops alike


def mlp_ops(ops: Any, width: int, hidden: int, **where: Any) -> list[Any]:
    """The MLP block in the ops of ``ops``: ``bridge.ops`` or ``transformer_engine.pytorch.ops``."""
    return [
        ops.MakeExtraOutput().set_extra_output_channel(0, "residual", output_to_caller=False),
        ops.RMSNorm(width, eps=EPS, **where),
        ops.Linear(width, 2 * hidden, bias=False, **where),
        ops.SwiGLU(),
        ops.Linear(hidden, width, bias=False, **where),
        ops.AddExtraInput().set_extra_input_channel(0, "residual"),
    ]


def mlp_chain(width: int, hidden: int) -> fte.Chain:
    """The MLP block as functions."""
    return fte.chain(
        fte.MakeExtraOutput(channel="residual", output_to_caller=False),
        fte.RMSNorm(width, eps=EPS),
        fte.Linear(width, 2 * hidden, bias=False),
        fte.SwiGLU(),
        fte.Linear(hidden, width, bias=False),
        fte.AddExtraInput(channel="residual"),
    )


class BridgeLlama(torch.nn.Module):
    """Two chains around attention: norm and QKV; projection, residual sum and the MLP block."""

    def __init__(self, shape: Llama, device: str, dtype: torch.dtype) -> None:
        super().__init__()
        ops, where = bridge.ops, {"device": device, "dtype": dtype}
        self.before = ops.Sequential(
            ops.MakeExtraOutput(),
            ops.RMSNorm(shape.width, eps=EPS, **where),
            ops.Linear(shape.width, shape.qkv_width, bias=False, **where),
        )
        self.attention = Attention(shape, device, dtype)
        self.after = ops.Sequential(
            ops.Linear(shape.width, shape.width, bias=False, **where),
            ops.AddExtraInput(),
            *mlp_ops(ops, shape.width, shape.hidden, **where),
        )

    def forward(self, x: Tensor) -> Tensor:
        qkv, residual = self.before(x)
        return self.after(self.attention(qkv), residual)


def bridge_model(shape: Shape, device: str, dtype: torch.dtype) -> torch.nn.Module:
    """``shape.layers`` layers of ``bridge.ops``; MLP blocks are a chain each."""
    if isinstance(shape, Llama):
        return torch.nn.Sequential(*(BridgeLlama(shape, device, dtype) for _ in range(shape.layers)))
    where = {"device": device, "dtype": dtype}
    blocks = [
        bridge.ops.Sequential(*mlp_ops(bridge.ops, shape.width, shape.hidden, **where)) for _ in range(shape.layers)
    ]
    return blocks[0] if len(blocks) == 1 else torch.nn.Sequential(*blocks)


# ---------------------------------------------------------------------------- Transformer Engine


class TeLayerNormMlp(torch.nn.Module):
    """``te.LayerNormMLP`` and the residual sum, which it does not have."""

    def __init__(self, te: Any, shape: Mlp, dtype: torch.dtype) -> None:
        super().__init__()
        self.mlp = te.LayerNormMLP(
            shape.width,
            shape.hidden,
            eps=EPS,
            bias=False,
            normalization="RMSNorm",
            activation="swiglu",
            params_dtype=dtype,
            device="cuda",
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x) + x


class TeLayers(torch.nn.Module):
    """``te.TransformerLayer``, causal, with rotary embeddings, RMSNorm, SwiGLU and without biases."""

    def __init__(self, te: Any, shape: Llama, dtype: torch.dtype) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(
            te.TransformerLayer(
                shape.width,
                shape.hidden,
                shape.heads,
                num_gqa_groups=shape.groups,
                layernorm_epsilon=EPS,
                hidden_dropout=0.0,
                attention_dropout=0.0,
                self_attn_mask_type="causal",
                fuse_qkv_params=True,
                bias=False,
                activation="swiglu",
                normalization="RMSNorm",
                attn_input_format="bshd",
                params_dtype=dtype,
                device="cuda",
            )
            for _ in range(shape.layers)
        )
        self.angles = te.RotaryPositionEmbedding(shape.head_width)(shape.context).to("cuda")

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, rotary_pos_emb=self.angles)
        return x


def te_model(te: Any, shape: Shape, dtype: torch.dtype, module: str) -> torch.nn.Module:
    """Layers of Transformer Engine: ``module`` is "ops", "LayerNormMLP" or "TransformerLayer"."""
    if module == "TransformerLayer":
        return TeLayers(te, shape, dtype)
    if module == "LayerNormMLP":
        blocks = [TeLayerNormMlp(te, shape, dtype) for _ in range(shape.layers)]
    else:
        where = {"device": "cuda", "dtype": dtype}
        blocks = [te.ops.Sequential(*mlp_ops(te.ops, shape.width, shape.hidden, **where)) for _ in range(shape.layers)]
    return blocks[0] if len(blocks) == 1 else torch.nn.Sequential(*blocks)
