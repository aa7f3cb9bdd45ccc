"""Rules for attentions, MLPs and layers of Hugging Face transformers, by class name and package.

Keyed by the names of the known classes. What their forward has to look like is checked too, so that another version
whose forward calls its parts otherwise is left alone.
"""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import torch

import functional_te as fte
from bridge.convert.borrowed import Borrowed
from bridge.convert.chains import BoundChain, Parts, add, fork, inert, runs_recipe
from bridge.convert.halves import Projections, Tail, run_attention
from bridge.convert.rule import GATED, Fused, Site, is_from, pack
from bridge.convert.swap import base_class, original

__all__ = ["attention", "bert_layer", "gated_mlp", "layer", "plain_mlp", "post_norm"]

_DECODERS = ("Llama", "Mistral", "Qwen2", "Qwen3", "Gemma")
_QKV = ("q_proj", "k_proj", "v_proj")
_ATTENTIONS: dict[str, tuple[str, ...]] = {
    **{f"{family}Attention": _QKV for family in _DECODERS},
    "ViTAttention": _QKV,
    "BertSelfAttention": ("query", "key", "value"),
    "GPT2Attention": ("c_attn",),
}
_GATED_MLPS = tuple(f"{family}MLP" for family in _DECODERS)
# names of the first linear, the activation, the second linear, and the dropouts behind it
_PLAIN_MLPS: dict[str, tuple[str, str, str, tuple[str, ...]]] = {
    "GPT2MLP": ("c_fc", "act", "c_proj", ("dropout",)),
    "ViTMLP": ("fc1", "activation_fn", "fc2", ()),
}
_POST_NORMS = ("BertSelfOutput", "BertOutput")


class LayerNames(NamedTuple):
    """Names of the parts of a layer with norms first, in the order in which its forward calls them."""

    norm: str
    attention: str
    second_norm: str
    mlp: str = "mlp"
    dropout: str | None = None
    # arguments of the layer that its attention is not given; the layer runs unfused if one is there
    unless: tuple[str, ...] = ()


_LAYERS = {
    **{
        f"{family}DecoderLayer": LayerNames("input_layernorm", "self_attn", "post_attention_layernorm")
        for family in _DECODERS
    },
    "GPT2Block": LayerNames("ln_1", "attn", "ln_2", unless=("encoder_hidden_states", "encoder_attention_mask")),
    "ViTLayer": LayerNames("layernorm_before", "attention", "layernorm_after", dropout="dropout"),
}
_OTHER_FORWARD = "its forward is not the one that the rule is for"


def _calls(module: Any, *names: str) -> bool:
    """Whether the forward of a module's class uses these children, in this order, and no others but optional ones."""
    return _uses(base_class(module).forward, module, *names)


def _uses(function: Any, module: Any, *names: str) -> bool:
    """:func:`_calls` of another method."""
    code = inspect.unwrap(function).__code__
    optional = {"crossattention", "ln_cross_attn"}
    return [name for name in code.co_names if name in module._modules and name not in optional] == list(names)


# -------------------------------------------------------------------------------------- attention


def attention(module: Any, site: Site) -> Fused | str | None:
    """q, k and v as one linear."""
    if not is_from(module, _ATTENTIONS):
        return None
    names = _ATTENTIONS[base_class(module).__name__]
    if getattr(module, "is_cross_attention", False):
        return "cross attention projects two inputs"
    leaves = [site.leaf(module._modules.get(name)) for name in names]
    known = [leaf for leaf in leaves if leaf is not None and leaf.ops]
    if len(known) < len(names):
        return f"{', '.join(names)} are not all converted"
    if len(names) == 1:
        ops, covered = known[0].ops, ()
    else:
        packed = pack(known, site.recipe)
        if isinstance(packed, str):
            return packed
        ops, covered = packed, tuple(op for leaf in known for op in leaf.ops)  # type: ignore[assignment]
    sizes = tuple(leaf.ops[0].op.out_features for leaf in known)  # type: ignore[attr-defined]
    data = Projections(module, names, ops, sizes)
    parts = tuple(module._modules[name] for name in names)
    why = f"{', '.join(names)}: one linear over packed weights" if len(names) > 1 else f"{names[0]} may follow a norm"
    return Fused("attention", run_attention, data, ops if len(names) > 1 else (), parts, why, covered)


# -------------------------------------------------------------------------------------------- MLPs


class Mlp:
    """Operations of an MLP by place, and its chain.

    Attributes:
        up: the first linear: of a gated MLP gate and up packed, which then runs with a recipe only.
        act: the activation, or its module if there is no operation.
        down: the second linear.
        dropouts: modules behind it.
        gated: whether it is gated.
        parts: the modules.
    """

    def __init__(self, up: Any, act: Any, down: Any, dropouts: tuple[Any, ...], gated: bool, parts: Parts) -> None:
        self.up, self.act, self.down = up, act, down
        self.dropouts, self.gated, self.parts = dropouts, gated, parts
        self.chain = BoundChain(*up, *act, *down) if isinstance(act, tuple) else None


def _run_mlp(module: Any, x: torch.Tensor) -> Any:
    mlp: Mlp = module._functional_te.data
    if mlp.chain is None or (mlp.gated and not runs_recipe(mlp.up[0])) or not mlp.parts.intact():
        return original(module, x)
    x = mlp.chain(x)
    for dropout in mlp.dropouts:
        x = dropout(x)
    return x


def gated_mlp(module: Any, site: Site) -> Fused | str | None:
    """``down(act(gate(x)) * up(x))`` with gate and up as one linear."""
    if not is_from(module, _GATED_MLPS):
        return None
    children = module._modules
    if not _calls(module, "down_proj", "act_fn", "gate_proj", "up_proj"):
        return _OTHER_FORWARD
    act = site.ops(children["act_fn"], *GATED)
    if act is None:
        return f"{type(children['act_fn']).__name__} has no gated operation"
    down = site.ops(children["down_proj"], fte.BasicLinear)
    halves = [site.leaf(children[name]) for name in ("gate_proj", "up_proj")]
    known = [leaf for leaf in halves if leaf is not None]
    if down is None or len(known) < 2:
        return "gate_proj, up_proj, down_proj are not all converted"
    up = pack(known, site.recipe)
    if isinstance(up, str):
        return up
    gate = (Borrowed(GATED[type(act[0].op)]),)
    names = ("gate_proj", "up_proj", "act_fn", "down_proj")
    data = Mlp(up, gate, down, (), True, Parts(*[(module, name, children[name]) for name in names]))
    covered = tuple(op for leaf in known for op in leaf.ops)
    why = f"gate_proj and up_proj as one linear over packed weights, {type(gate[0].op).__name__}, down_proj"
    parts = tuple(children[name] for name in names)
    return Fused("gated mlp", _run_mlp, data, (*up, *gate), parts, why, covered)


def plain_mlp(module: Any, site: Site) -> Fused | str | None:
    """Linear, activation, linear."""
    if not is_from(module, _PLAIN_MLPS):
        return None
    first, act, second, dropouts = _PLAIN_MLPS[base_class(module).__name__]
    children = module._modules
    if not _calls(module, first, act, second, *dropouts):
        return _OTHER_FORWARD
    up, down = site.ops(children[first], fte.BasicLinear), site.ops(children[second], fte.BasicLinear)
    if up is None or down is None:
        return f"{first}, {second} are not all converted"
    ops = site.ops(children[act])
    names = (first, second) if ops is None else (first, act, second)
    parts = Parts(*[(module, name, children[name]) for name in names])
    data = Mlp(up, children[act] if ops is None else ops, down, tuple(children[d] for d in dropouts), False, parts)
    if ops is None:
        return Fused("mlp", _run_mlp, data, (), (), f"{type(children[act]).__name__} has no operation; for layers only")
    return Fused("mlp", _run_mlp, data, (), tuple(children[name] for name in names), ", ".join(names))


# -------------------------------------------------------------------------------- norms that follow


def _run_post_norm(module: Any, hidden_states: torch.Tensor, input_tensor: torch.Tensor) -> Any:
    chain, parts = module._functional_te.data
    if not inert((module.dropout,)) or not parts.intact():
        return original(module, hidden_states, input_tensor)
    return chain(hidden_states, input_tensor)


def post_norm(module: Any, site: Site) -> Fused | str | None:
    """``norm(dense(x) + residual)``, unless dropout is active between them."""
    if not is_from(module, _POST_NORMS):
        return None
    if not _calls(module, "dense", "dropout", "LayerNorm"):
        return _OTHER_FORWARD
    dense, norm = site.ops(module.dense, fte.BasicLinear), site.ops(module.LayerNorm, fte.LayerNorm)
    if dense is None or norm is None:
        return "dense, LayerNorm are not all converted"
    parts = Parts((module, "dense", module.dense), (module, "LayerNorm", module.LayerNorm))
    data = (BoundChain(*dense, add(None), *norm), parts)
    why = "dense, residual sum, LayerNorm in one chain while dropout is inactive"
    return Fused("post norm", _run_post_norm, data, (), (module.dense, module.LayerNorm), why)


# ---------------------------------------------------------------------------------- MLP of BERT


class FeedForward:
    """The MLP of a layer of BERT, which two modules share: linear, activation, linear, residual sum, norm.

    Attributes:
        whole: the chain.
        mlp: what precedes an active dropout.
        last: what follows it.
        dropout: the module between second linear and sum.
        parts: the modules that are not called.
    """

    def __init__(self, mlp: tuple[Borrowed, ...], norm: tuple[Borrowed, ...], dropout: Any, parts: Parts) -> None:
        self.whole = BoundChain(fork(), *mlp, add(), *norm)
        self.mlp, self.last = BoundChain(*mlp), BoundChain(add(None), *norm)
        self.dropout, self.parts = dropout, parts

    def run(self, x: torch.Tensor) -> torch.Tensor:
        """The output of the layer."""
        if inert((self.dropout,)):
            whole: torch.Tensor = self.whole(x)
            return whole
        last: torch.Tensor = self.last(self.dropout(self.mlp(x)), x)
        return last


class _WithFeedForward:
    """Stands for a layer in its own forward, with another MLP."""

    def __init__(self, module: Any, mlp: FeedForward) -> None:
        # a method of what the module holds: the library asks for its signature, which traced code has to find
        self._module, self.feed_forward_chunk = module, mlp.run

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._module._functional_te_base.forward(self, *args, **kwargs)


def _run_bert_layer(module: Any, *args: Any, **kwargs: Any) -> Any:
    mlp: FeedForward = module._functional_te.data
    if not mlp.parts.intact():
        return original(module, *args, **kwargs)
    return _WithFeedForward(module, mlp).forward(*args, **kwargs)


def bert_layer(module: Any, site: Site) -> Fused | str | None:
    """Linear, activation, linear, residual sum and norm as one chain."""
    if not is_from(module, ("BertLayer",)):
        return None
    first, second = module.intermediate, module.output
    known = is_from(first, ("BertIntermediate",)) and _calls(first, "dense", "intermediate_act_fn")
    kind: Any = base_class(module)
    if (
        not known
        or not _uses(kind.feed_forward_chunk, module, "intermediate", "output")
        or "feed_forward_chunk" in module.__dict__
    ):
        return _OTHER_FORWARD
    up, act = site.ops(first.dense, fte.BasicLinear), site.ops(first.intermediate_act_fn)
    if up is None or act is None or id(second) not in site.fused:
        return "its linears, activation and norm are not all converted"
    down, norm = site.ops(second.dense), site.ops(second.LayerNorm)
    assert down is not None
    assert norm is not None
    members = [(module, "intermediate", first), (module, "output", second)]
    members += [(first, name, first._modules[name]) for name in ("dense", "intermediate_act_fn")]
    members += [(second, name, second._modules[name]) for name in ("dense", "LayerNorm")]
    mlp = FeedForward((*up, *act, *down), norm, second.dropout, Parts(*members))
    why = "intermediate and output in one chain, in two while dropout is active"
    return Fused("bert layer", _run_bert_layer, mlp, (), tuple(part for _, _, part in members), why)


# ------------------------------------------------------------------------------------------ layers


class Layer:
    """A layer with norms first.

    Attributes:
        names: of its parts.
        head: norm and projections.
        projections: of the attention.
        tail: sum, norm, MLP and sum.
        parts: the modules that are not called.
        arguments: of its forward, without the first, with their defaults.
        packed: the operations that run with a recipe only.
    """

    def __init__(self, names: LayerNames, head: BoundChain, projections: Projections, tail: Tail, parts: Parts) -> None:
        self.names, self.head, self.projections, self.tail, self.parts = names, head, projections, tail, parts
        self.arguments: dict[str, Any] = {}
        self.packed: tuple[Any, ...] = ()


def _run_layer(module: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    layer: Layer = module._functional_te.data
    given = {**layer.arguments, **dict(zip(layer.arguments, args, strict=False)), **kwargs}
    attending = module._modules[layer.names.attention]
    for name in layer.names.unless:
        if given.pop(name) is not None:
            return original(module, hidden_states, *args, **kwargs)
    runs = True
    for op in layer.packed:
        runs = runs_recipe(op) and runs
    # hooks that look at the input of the attention would see one that is not normalized
    if attending._forward_pre_hooks or attending._backward_hooks or attending._backward_pre_hooks:
        runs = False
    if not runs or not layer.parts.intact():
        return original(module, hidden_states, *args, **kwargs)
    projections = layer.projections.split(layer.head(hidden_states))
    # the attention asks its input for the sizes in front; of a layer that shards its rows those of the projections
    whole = projections[0].shape[:-1] != hidden_states.shape[:-1]
    attended, _ = attending(hidden_states=projections[0] if whole else hidden_states, _projections=projections, **given)
    if layer.names.dropout is not None:
        attended = module._modules[layer.names.dropout](attended)
    return layer.tail(attended, hidden_states)


def _arguments(module: Any) -> dict[str, Any] | None:
    """Arguments of a layer's forward behind ``hidden_states``, with their defaults."""
    parameters = list(inspect.signature(base_class(module).forward).parameters.values())[1:]
    if not parameters or parameters[0].name != "hidden_states":
        return None
    own = [one for one in parameters[1:] if one.kind is one.POSITIONAL_OR_KEYWORD]
    return {one.name: one.default for one in own} if all(one.default is not one.empty for one in own) else None


def layer(module: Any, site: Site) -> Fused | str | None:
    """norm -> projections, and sum -> norm -> MLP -> sum, around the attention."""
    if not is_from(module, _LAYERS):
        return None
    names = _LAYERS[base_class(module).__name__]
    children, arguments = module._modules, _arguments(module)
    expected = [names.norm, names.attention, *[names.dropout] * (names.dropout is not None), names.second_norm]
    if arguments is None or not _calls(module, *[name for name in (*expected, names.mlp) if name]):
        return _OTHER_FORWARD
    heads, mlps = site.fused.get(id(children[names.attention])), site.fused.get(id(children[names.mlp]))
    norm, second = site.ops(children[names.norm]), site.ops(children[names.second_norm])
    if heads is None or mlps is None or norm is None or second is None:
        return "its norms, attention and MLP are not all converted or fused"
    projections: Projections = heads.data
    mlp: Mlp = mlps.data
    dropouts = (*mlp.dropouts, *[children[name] for name in [names.dropout] if name is not None])
    members = [(module, name, children[name]) for name in (names.norm, names.second_norm, names.mlp)]
    parts = Parts(*members, *projections.parts.members, *mlp.parts.members)
    head = BoundChain(*norm, *projections.ops)
    data = Layer(names, head, projections, Tail(second, mlp.up, mlp.act, mlp.down, outer=dropouts), parts)
    data.arguments = arguments
    data.packed = (*projections.ops[:1] * projections.packed, *mlp.up[:1] * mlp.gated)
    why = f"{names.norm} with the projections; residual sums, {names.second_norm} and {names.mlp} in one chain"
    if data.packed:
        why += ", with a recipe"
    return Fused("layer", _run_layer, data, (), tuple(part for _, _, part in members), why)
