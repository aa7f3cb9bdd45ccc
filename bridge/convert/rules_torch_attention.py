"""torch.nn.MultiheadAttention: its projections as linears with a recipe, around torch's attention."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import functional_te as fte
from bridge.convert.borrowed import Borrowed, Slice
from bridge.convert.chains import BoundChain, Parts, runs_recipe
from bridge.convert.rule import Fused, Site, plain, refusal
from bridge.convert.rules_torch import tensor_reason
from bridge.convert.swap import original

__all__ = ["Attention", "multihead_attention"]


class Attention:
    """The projections of an attention.

    Attributes:
        inputs: operations of the projection of a self-attention's input to q, k and v.
        query: of the query alone, for cross-attention.
        project: chains by what they give: "qkv", "q", "kv", and "out".
        parts: the module of the output projection.
    """

    def __init__(self, module: nn.MultiheadAttention, out: tuple[Borrowed, ...]) -> None:
        width = module.embed_dim
        self.inputs = _projection(module, 0, 3 * width)
        self.query = _projection(module, 0, width)
        memory = _projection(module, width, 3 * width)
        self.ops = (*self.inputs, *self.query, *memory)
        self.project = {
            "qkv": BoundChain(*self.inputs),
            "q": BoundChain(*self.query),
            "kv": BoundChain(*memory),
            "out": BoundChain(*out),
        }
        self.parts = Parts((module, "out_proj", module.out_proj))


def _projection(module: nn.MultiheadAttention, start: int, end: int) -> tuple[Borrowed, ...]:
    rows = None if end - start == 3 * module.embed_dim else (start, end)
    linear = Slice(fte.BasicLinear(module.embed_dim, end - start), module, weight="in_proj_weight", rows=rows)
    if module.in_proj_bias is None:
        return (linear,)
    return linear, Slice(fte.Bias(end - start), module, bias="in_proj_bias", rows=rows)


def multihead_attention(module: Any, site: Site) -> Fused | str | None:
    """The projections of nn.MultiheadAttention."""
    if not plain(module, nn.MultiheadAttention.forward):
        return None
    if not module._qkv_same_embed_dim:
        return "k and v have widths of their own"
    if module.bias_k is not None or module.add_zero_attn:
        return "it adds rows to k and v"
    out = site.ops(module.out_proj, fte.BasicLinear)
    reason = tensor_reason(module, "in_proj_weight")
    if reason is not None or out is None:
        return reason or "out_proj is not converted"
    data = Attention(module, out)
    unfit = refusal(data.ops, site.recipe)
    if unfit is not None:
        return unfit
    why = "projections as linears, with a recipe"
    return Fused("multihead attention", _run, data, data.ops, (module.out_proj,), why)


def _run(  # noqa: PLR0913 - the arguments of nn.MultiheadAttention
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_padding_mask: torch.Tensor | None = None,
    need_weights: bool = True,
    attn_mask: torch.Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
    _projected: torch.Tensor | None = None,
) -> Any:
    """The forward of nn.MultiheadAttention.

    A layer passes as ``_projected`` what it has computed already: q, k and v of a self-attention, else q.
    """
    own: Attention = module._functional_te.data
    known = key is value and query.dim() == 3 and not (query.is_nested or key.is_nested)
    if not known or not runs_recipe(own.inputs[0]) or not own.parts.intact():
        return original(
            module,
            query,
            key,
            value,
            key_padding_mask=key_padding_mask,
            need_weights=need_weights,
            attn_mask=attn_mask,
            average_attn_weights=average_attn_weights,
            is_causal=is_causal,
        )
    if is_causal and attn_mask is None:
        raise RuntimeError("MultiheadAttention: is_causal is a hint about attn_mask, which is missing.")
    if query is key:
        projected = own.project["qkv"](query) if _projected is None else _projected
        q, k, v = projected.chunk(3, -1)
    else:
        q = own.project["q"](query) if _projected is None else _projected
        k, v = own.project["kv"](key).chunk(2, -1)
    q, k, v = (_heads(module, one) for one in (q, k, v))
    is_causal = is_causal and key_padding_mask is None and not need_weights
    mask = None if is_causal else _mask(module, q, attn_mask, key_padding_mask)
    dropout = module.dropout if module.training else 0.0
    if not need_weights:
        mixed, weights = functional.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal), None
    else:
        scores = q @ k.transpose(-2, -1) / math.sqrt(module.head_dim)
        weights = torch.softmax(scores if mask is None else scores + mask, -1)
        weights = functional.dropout(weights, dropout) if dropout > 0 else weights
        mixed = weights @ v
        weights = weights.mean(1) if average_attn_weights else weights
    mixed = mixed.permute(0, 2, 1, 3) if module.batch_first else mixed.permute(2, 0, 1, 3)
    return own.project["out"](mixed.flatten(2)), weights


def _heads(module: Any, x: torch.Tensor) -> torch.Tensor:
    """``[batch, heads, length, head_dim]``."""
    x = x.unflatten(-1, (module.num_heads, module.head_dim))
    return x.permute(0, 2, 1, 3) if module.batch_first else x.permute(1, 2, 0, 3)


def _additive(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A mask to add to scores; True means "not allowed"."""
    if mask.dtype is torch.bool:
        return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, float("-inf"))
    return mask.to(dtype)


def _mask(module: Any, q: torch.Tensor, attn: Any, padding: Any) -> Any:
    """Both masks as one, to broadcast over ``[batch, heads, length, source length]``."""
    if attn is not None:
        attn = _additive(attn, q.dtype)
        if attn.dim() == 3:
            attn = attn.unflatten(0, (q.shape[0], module.num_heads))
    if padding is None:
        return attn
    padding = _additive(padding, q.dtype)[:, None, None, :]
    return padding if attn is None else attn + padding
