"""Converted decoder layers sharded over ranks: a plan for ``torch.distributed.tensor.parallel.parallelize_module``.

The weights become ``DTensor`` parameters, so optimizers, FSDP2 and distributed checkpoints know how they are sharded.
The chains read this rank's part and send what has to be sent themselves, as :class:`functional_te.TensorParallel` says:
a ``DTensor`` does not pass through a chain, whose casts no sharding rule of PyTorch knows.

Projections of the input (q, k, v, gate, up) are sharded by output features, the others (o, down) by input features.
With ``sequence_parallel`` the rows between them, and the norms, are sharded along the first dimension, which in these
models is the batch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

import functional_te as fte
from bridge.convert.borrowed import read_local_parts
from bridge.convert.swap import ATTRIBUTE
from bridge.distributed.groups import check_model, operations_of, signature_of
from bridge.distributed.sharded_weight import ShardedWeight
from bridge.distributed.start import check_same_on_all_ranks
from functional_te._errors import runtime_error, value_error
from functional_te.kernels import collectives

__all__ = ["JoinedRows", "ShardedLayer", "parallelize_plan", "tensor_parallel"]

read_local_parts(DTensor)

_COLUMN = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
_ROW = ("self_attn.o_proj", "mlp.down_proj")
# norms of one attention head, where a model has them
_HEAD_NORMS = ("self_attn.q_norm", "self_attn.k_norm")
_NORMS = ("input_layernorm", "post_attention_layernorm")


class _Split(torch.autograd.Function):
    """This rank's rows of a tensor that all ranks have; the gradient is that of all rows."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, name: str, size: int, rank: int) -> torch.Tensor:
        ctx.group = (name, size)
        return x.chunk(size)[rank].clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return collectives.all_gather(grads[0], *ctx.group), None, None, None


class _Join(torch.autograd.Function):
    """The rows of all ranks; every rank goes on with all of them, so the gradient is that of its own rows."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, name: str, size: int, rank: int) -> torch.Tensor:
        ctx.size, ctx.rank = size, rank
        return collectives.all_gather(x, name, size)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0].chunk(ctx.size)[ctx.rank], None, None, None


class _Rows:
    """A hook before a module's forward that gives it this rank's rows (``splits``), or those of all ranks."""

    def __init__(self, splits: bool, mesh: Any) -> None:
        self.splits, self.size, self.rank = splits, mesh.size(), mesh.get_local_rank()
        self.name = mesh.get_group().group_name

    def __call__(self, module: Any, args: Any, kwargs: Any) -> Any:
        x = args[0] if len(args) > 0 else kwargs["hidden_states"]
        if not self.splits:
            x = _Join.apply(x, self.name, self.size, self.rank)
        elif x.shape[0] % self.size == 0:
            x = _Split.apply(x, self.name, self.size, self.rank)
        else:
            wanted = f"a first dimension divisible by {self.size} ranks"
            raise runtime_error("tensor_parallel", "hidden_states", wanted, f"shape {tuple(x.shape)}")
        return ((x, *args[1:]), kwargs) if len(args) > 0 else (args, {**kwargs, "hidden_states": x})


def _before(module: torch.nn.Module, splits: bool, mesh: Any) -> None:
    module.register_forward_pre_hook(_Rows(splits, mesh), with_kwargs=True)


class JoinedRows(ParallelStyle):
    """The module behind the last sharded layer: it gets the rows of all ranks."""

    def _apply(self, module: torch.nn.Module, device_mesh: Any) -> torch.nn.Module:
        _before(module, False, device_mesh)
        return module


class ShardedLayer(ParallelStyle):
    """A converted decoder layer.

    Args:
        sequence_parallel: whether rows are sharded where features are not.
        first: whether the layer gets the rows of all ranks and takes its own.
    """

    def __init__(self, sequence_parallel: bool = False, first: bool = False) -> None:
        self.sequence_parallel, self.first = sequence_parallel, first

    def _apply(self, module: torch.nn.Module, device_mesh: Any) -> torch.nn.Module:
        _check_layer(module, device_mesh.size(), self.sequence_parallel)
        modes: dict[int, str] = {}
        for names, mode in ((_COLUMN, "column"), (_ROW, "row")):
            for name in names:
                part = module.get_submodule(name)
                modes[id(part)] = mode
                self._shard(part, mode, device_mesh)
        norms = {id(part) for name, part in module.named_modules() if name in self._partial()}
        group, size = device_mesh.get_group().group_name, device_mesh.size()
        ops: list[Any] = [op for _, op in operations_of(module)]
        for op in ops:
            sources = {id(source) for source in getattr(op, "sources", ())}
            kinds = {modes.get(source) for source in sources}
            shared = kinds.pop() if len(kinds) == 1 else None
            added = isinstance(op.op, fte.Bias) and shared == "row" and self.sequence_parallel
            if added or sources & norms:
                op.gradient_group = (group, size)
            if shared is not None:
                op._set_op(_sharded(op.op, fte.TensorParallel(shared, group, size, self.sequence_parallel)))
        projections: Any = module.get_submodule("self_attn").__dict__[ATTRIBUTE].data
        if hasattr(projections, "sizes"):
            projections.sizes = tuple([size // device_mesh.size() for size in projections.sizes])
        if self.sequence_parallel:
            # the packed projections run in high precision too: the modules one by one would take the rows for whole
            module.__dict__[ATTRIBUTE].data.packed = ()
        if self.first:
            _before(module, True, device_mesh)
        return module

    def _shard(self, part: torch.nn.Module, mode: str, mesh: Any) -> None:
        for name, own in list(part.named_parameters(recurse=False)):
            if mode == "row" and name == "bias":  # added once, behind the sum over the ranks
                continue
            placement = Shard(0 if mode == "column" else 1)
            sharded = distribute_tensor(own.detach(), mesh, [placement], src_data_rank=self.src_data_rank)
            part.register_parameter(name, torch.nn.Parameter(sharded, requires_grad=own.requires_grad))

    def _partial(self) -> tuple[str, ...]:
        """Norms that all ranks have, and that see a part of the heads or of the rows only."""
        return (*_HEAD_NORMS, *_NORMS) if self.sequence_parallel else _HEAD_NORMS


def _sharded(op: Any, tp: fte.TensorParallel) -> Any:
    """The op of one rank."""
    if isinstance(op, fte.BasicLinear):
        return fte.BasicLinear(op.in_features, op.out_features, tp)
    if isinstance(op, fte.Bias) and tp.mode == "column":
        return fte.Bias(op.size // tp.size)
    return op


def _check_layer(layer: Any, size: int, sequence_parallel: bool) -> None:
    """Raise unless a layer can be shared out."""
    where = "tensor_parallel"
    if sequence_parallel and layer.__dict__[ATTRIBUTE].rule != "layer":
        raise value_error(where, "sequence_parallel", "layers whose norms are in chains (fuse=True)", "others")
    for name in (*_COLUMN, *_ROW):
        part = layer.get_submodule(name)
        if ATTRIBUTE not in part.__dict__:
            raise value_error(where, name, "a converted linear layer", f"a {type(part).__name__}")
        if isinstance(part.weight, DTensor):
            raise value_error(where, name, "a layer that is not sharded yet", "a DTensor")
        if isinstance(part.weight, ShardedWeight):
            raise value_error(where, name, "weights that are not gathered in FP8", "one given to gather_in_fp8")
    for name in ("q_proj", "k_proj"):
        heads = layer.self_attn.get_submodule(name).weight.shape[0] // layer.self_attn.head_dim
        if heads % size:
            raise value_error(where, f"self_attn.{name}", f"heads that {size} ranks can share out", f"{heads} heads")
    features = layer.mlp.gate_proj.weight.shape[0]
    if features % size:
        raise value_error(where, "mlp.gate_proj", f"features that {size} ranks can share out", f"{features} features")


def _is_layer(module: torch.nn.Module) -> bool:
    names = dict(module.named_modules())
    return ATTRIBUTE in module.__dict__ and all(name in names for name in (*_COLUMN, *_ROW, *_NORMS))


def parallelize_plan(model: torch.nn.Module, *, sequence_parallel: bool = False) -> dict[str, ParallelStyle]:
    """A plan for ``parallelize_module`` over a mesh of one dimension: every converted decoder layer, by name.

    Embeddings, the last norm and the head stay whole, the same on all ranks. Afterwards every rank gets the same batch
    and computes the same loss. Gradients of parameters that all ranks have are equal on all of them.

    Args:
        model: a converted Llama, Mistral, Qwen2, Qwen3 or Gemma of Hugging Face transformers.
        sequence_parallel: whether rows are sharded between the projections; the batch has to be divisible then. Costs
            no more messages, and saves the memory of the norms' inputs.

    Raises:
        TypeError: ``model`` is no module.
        ValueError: it has no such layers.
    """
    check_model(model, "parallelize_plan")
    names = [name for name, module in model.named_modules() if _is_layer(module)]
    if not names:
        raise value_error("parallelize_plan", "model", "converted decoder layers", type(model).__name__)
    plan: dict[str, ParallelStyle] = {
        name: ShardedLayer(sequence_parallel, sequence_parallel and name == names[0]) for name in names
    }
    if sequence_parallel:
        prefix = names[-1].rsplit(".", 2)[0] + "." if names[-1].count(".") > 1 else ""
        plan[f"{prefix}norm"] = JoinedRows()
    return plan


def tensor_parallel(model: torch.nn.Module, mesh: Any, *, sequence_parallel: bool = False) -> torch.nn.Module:
    """Shard a converted model over a mesh of one dimension, in place; see :func:`parallelize_plan`.

    Rank 0's parameters are taken. In a mesh of one rank nothing changes.

    Returns:
        ``model``.

    Raises:
        ValueError: layers that cannot be shared out, or models that differ between the ranks.
    """
    plan = parallelize_plan(model, sequence_parallel=sequence_parallel)
    if mesh.size() == 1:
        return model
    told = {**signature_of(model), "sequence_parallel": sequence_parallel, "ranks of the mesh": mesh.size()}
    check_same_on_all_ranks(told, mesh.get_group(), "tensor_parallel")
    parallelize_module(model, mesh, plan)
    return model
