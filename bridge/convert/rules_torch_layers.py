"""torch.nn.TransformerEncoderLayer and TransformerDecoderLayer, norms first or last."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

import functional_te as fte
from bridge.convert.borrowed import Borrowed
from bridge.convert.chains import BoundChain, Parts, add, fork, runs_recipe
from bridge.convert.halves import Tail
from bridge.convert.rule import Fused, Site, plain
from bridge.convert.rules_torch_attention import Attention
from bridge.convert.swap import original

__all__ = ["decoder_layer", "encoder_layer"]


class Layer:
    """Chains of a layer.

    Attributes:
        head: what precedes the self-attention: the norm, if it comes first, and the projections.
        middle: of a decoder: first sum, norm, and the query of the cross-attention; None in an encoder.
        tail: last sums, norms and the MLP.
        parts: modules that the chains run.
        op: an operation that tells whether a recipe runs.
    """

    def __init__(self, head: BoundChain, middle: BoundChain | None, tail: Tail, parts: Parts, op: Borrowed) -> None:
        self.head, self.middle, self.tail, self.parts, self.op = head, middle, tail, parts, op

    def may_run(self, *tensors: torch.Tensor) -> bool:
        """Whether the chains may run in this call."""
        for tensor in tensors:
            if tensor.is_nested:
                return False
        return runs_recipe(self.op) and self.parts.intact()


def _activation(module: Any, site: Site) -> Any:
    """Operations of the activation, or itself."""
    act = module.activation
    if act is functional.relu or act is torch.relu:
        return (Borrowed(fte.ReLU()),)
    if act is functional.gelu:
        return (Borrowed(fte.ErfGELU()),)
    return (site.ops(act) if isinstance(act, nn.Module) else None) or act


def _layer(module: Any, site: Site, norms: tuple[str, ...], outer: str) -> Layer | str:
    """The chains of a layer with these norms in order; ``outer`` is the dropout behind its MLP."""
    attention = site.fused.get(id(module.self_attn))
    up, down = site.ops(module.linear1, fte.BasicLinear), site.ops(module.linear2, fte.BasicLinear)
    normed = [site.ops(module._modules[name], fte.LayerNorm) for name in norms]
    if attention is None or up is None or down is None or any(one is None for one in normed):
        return "its attention, norms and linears are not all converted"
    own: Attention = attention.data
    first = normed[0] or ()
    second, *third = [one or () for one in normed[1:]]
    middle = None
    if third:
        crossing = site.fused.get(id(module.multihead_attn))
        if crossing is None:
            return "its cross-attention is not converted"
        query = crossing.data.query
        chain = [fork(None), *second, *query] if module.norm_first else [*first, fork(None), *query]
        middle = BoundChain(add(None), *chain)
        first, second = second, third[0]
    head = BoundChain(*(normed[0] or ()), *own.inputs) if module.norm_first else own.project["qkv"]
    act = _activation(module, site)
    how: dict[str, Any] = {"inner": (module.dropout,), "outer": (module._modules[outer],)}
    if module.norm_first:
        tail = Tail(second, up, act, down, **how)
    else:
        tail = Tail((), up, act, down, before=first, after=second, **how)
    names = [*norms, "linear1", "linear2"]
    if isinstance(module.activation, nn.Module) and isinstance(act, tuple):
        names.append("activation")
    return Layer(head, middle, tail, Parts(*[(module, name, module._modules[name]) for name in names]), own.inputs[0])


def _fused(rule: str, run: Any, layer: Layer | str) -> Fused | str:
    if isinstance(layer, str):
        return layer
    parts = tuple(part for _, _, part in layer.parts.members)
    return Fused(rule, run, layer, (), parts, "norms, projections, MLP and residual sums in chains, with a recipe")


def encoder_layer(module: Any, site: Site) -> Fused | str | None:
    """An encoder layer."""
    if not plain(module, nn.TransformerEncoderLayer.forward):
        return None
    return _fused("encoder layer", _run_encoder, _layer(module, site, ("norm1", "norm2"), "dropout2"))


def decoder_layer(module: Any, site: Site) -> Fused | str | None:
    """A decoder layer."""
    if not plain(module, nn.TransformerDecoderLayer.forward):
        return None
    return _fused("decoder layer", _run_decoder, _layer(module, site, ("norm1", "norm2", "norm3"), "dropout3"))


def _attend(attention: Any, x: Any, memory: Any, projected: Any, mask: Any, padding: Any, causal: bool) -> Any:
    how = {"attn_mask": mask, "key_padding_mask": padding, "is_causal": causal}
    return attention(x, memory, memory, need_weights=False, _projected=projected, **how)[0]


def _watched(attention: Any) -> bool:
    """Whether hooks look at the input of an attention, which would not be normalized."""
    return bool(attention._forward_pre_hooks or attention._backward_hooks or attention._backward_pre_hooks)


def _run_encoder(
    module: Any,
    src: torch.Tensor,
    src_mask: torch.Tensor | None = None,
    src_key_padding_mask: torch.Tensor | None = None,
    is_causal: bool = False,
) -> Any:
    """The forward of nn.TransformerEncoderLayer; without a recipe torch's, with its fast path."""
    layer: Layer = module._functional_te.data
    if not layer.may_run(src) or _watched(module.self_attn):
        return original(module, src, src_mask, src_key_padding_mask, is_causal)
    projected = layer.head(src)
    mixed = _attend(module.self_attn, src, src, projected, src_mask, src_key_padding_mask, is_causal)
    return layer.tail(module.dropout1(mixed), src)


def _run_decoder(  # noqa: PLR0913 - the arguments of nn.TransformerDecoderLayer
    module: Any,
    tgt: torch.Tensor,
    memory: torch.Tensor,
    tgt_mask: torch.Tensor | None = None,
    memory_mask: torch.Tensor | None = None,
    tgt_key_padding_mask: torch.Tensor | None = None,
    memory_key_padding_mask: torch.Tensor | None = None,
    tgt_is_causal: bool = False,
    memory_is_causal: bool = False,
) -> Any:
    """The forward of nn.TransformerDecoderLayer."""
    layer: Layer = module._functional_te.data
    if not layer.may_run(tgt, memory) or _watched(module.self_attn) or _watched(module.multihead_attn):
        how = (tgt_mask, memory_mask, tgt_key_padding_mask, memory_key_padding_mask, tgt_is_causal, memory_is_causal)
        return original(module, tgt, memory, *how)
    assert layer.middle is not None
    mixed = _attend(module.self_attn, tgt, tgt, layer.head(tgt), tgt_mask, tgt_key_padding_mask, tgt_is_causal)
    query, x = layer.middle(module.dropout1(mixed), tgt)
    # x has the shape of the query's input, and an attention reads no more of it
    crossing = module.multihead_attn
    mixed = _attend(crossing, x, memory, query, memory_mask, memory_key_padding_mask, memory_is_causal)
    return layer.tail(module.dropout2(mixed), x)
