"""Every private PyTorch interface this project touches, each with its reason.

``tests/bridge/test_compat.py`` fails when one of them changes its meaning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.utils import _python_dispatch, _pytree

__all__ = [
    "assumed",
    "compiling",
    "copy_all",
    "dispatch_modes_active",
    "forward_ad_active",
    "functorch_active",
    "in_backward",
    "is_torch_pytree",
    "local_tensor",
    "mark_static",
    "no_torch_function",
    "preserved_versions",
    "real_tensors",
    "record",
    "register_torch_pytree",
    "results",
    "storage_free_mode",
    "straight_line",
    "symbolic_size",
    "wrapper",
    "written_arguments",
]

# ``__torch_function__`` of a subclass whose functions are those of a plain tensor.
# Reason: torch.overrides has no public name for it.
no_torch_function = torch._C._disabled_torch_function_impl


def in_backward() -> bool:
    """Whether the autograd engine is running a backward on this thread (activation recomputation does).

    Reason: a recomputed forward must not close a step of delayed scaling, and no public function tells.
    """
    return torch._C._current_graph_task_id() != -1


def functorch_active() -> bool:
    """Whether a ``torch.func`` transform is active.

    Reason: those need the variant of the autograd function whose saved tensors are outputs.
    """
    return torch._C._are_functorch_transforms_active()


def forward_ad_active() -> bool:
    """Whether forward-mode differentiation is on (``torch.func.jvp``, ``torch.autograd.forward_ad``).

    Reason: an input that needs no gradient does not pass through the autograd function, which would drop its tangent
    in silence, and no public function tells.
    """
    return torch.autograd.forward_ad._current_level >= 0


def dispatch_modes_active() -> bool:
    """Whether a ``TorchDispatchMode`` of the caller's sees every operator (it counts, logs or replaces them).

    Reason: such a mode must see the operators of the pipeline and nothing else, and no public function tells.
    """
    return torch._C._len_torch_dispatch_stack() > 0


@contextmanager
def real_tensors() -> Iterator[None]:
    """Make ordinary tensors inside, and record nothing, also while ``torch.export`` traces with fake ones.

    Reason: what outlives the trace may not be fake, and no public function leaves the modes of a tracer.
    """
    with torch._C.DisableTorchFunction(), _python_dispatch._disable_current_modes():
        yield


def is_torch_pytree(kind: type[Any]) -> bool:
    """Whether ``kind`` is a node of PyTorch's own pytrees."""
    return kind in _pytree.SUPPORTED_NODES


def register_torch_pytree(kind: type[Any], children: tuple[str, ...], functions: Any, json_functions: Any) -> None:
    """Make ``kind`` a node of PyTorch's own pytrees, for inputs and outputs of exported programs.

    Reason: the public ``torch.export.register_dataclass`` knows no static fields.

    Args:
        kind: the class.
        children: names of its children.
        functions: from a node to (children, context), and back from children and context.
        json_functions: from a context to what JSON holds, and back.
    """

    def flatten_with_keys(node: Any) -> tuple[list[Any], Any]:
        values, context = functions[0](node)
        return [(_pytree.GetAttrKey(name), value) for name, value in zip(children, values, strict=True)], context

    _pytree.register_pytree_node(
        kind,
        *functions,
        serialized_type_name=f"functional_te.{kind.__name__}",
        flatten_with_keys_fn=flatten_with_keys,
        to_dumpable_context=json_functions[0],
        from_dumpable_context=json_functions[1],
    )


def wrapper(cls: type[torch.Tensor], size: Any, stride: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of class ``cls`` without storage.

    Reason: the documentation of tensor subclasses names this function only.
    """
    made: torch.Tensor = torch.Tensor._make_wrapper_subclass(cls, size, strides=stride, dtype=dtype, device=device)
    return made


def mark_static(tensor: torch.Tensor) -> None:
    """Tell the compiler that a tensor that is an input of a graph stays where it is, as a module's buffers do.

    Reason: state that was made while a graph was traced does not reach the graph as a buffer, and CUDA graphs of
    ``mode="reduce-overhead"`` refuse to write to an input that may move.
    """
    torch._dynamo.mark_static_address(tensor)


def copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy every source into its target, with few launches for many small tensors.

    Reason: no public function does that.
    """
    torch._foreach_copy_(list(targets), list(sources))


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The very tensor that a ``DTensor`` holds; another tensor itself.

    Reason: the public ``to_local()`` gives an alias, on which nothing can be remembered.
    """
    found: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return found


def written_arguments(op: Any) -> tuple[tuple[int, str], ...]:
    """Position and name of the arguments that an ATen op writes to; none for an op that writes to nothing.

    Reason: a subclass has to cast what optimizers write, and schemas are not public.
    """
    if not op._schema.is_mutable:
        return ()
    return tuple(
        (index, argument.name)
        for index, argument in enumerate(op._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def preserved_versions(tensors: tuple[torch.Tensor, ...]) -> AbstractContextManager[None]:
    """Write to ``tensors`` inside without autograd taking them for changed.

    Reason: a compiled backward reads the gradient quantizers' scales as they are when it runs, which is what is wanted,
    and autograd would refuse it after a step was closed.
    """
    return torch.autograd._unsafe_preserve_version_counter(tensors)  # type: ignore[attr-defined]


def storage_free_mode() -> tuple[Any, Any]:
    """A mode in which tensors have no storage and sizes may be symbols, and what knows the symbols.

    Reason: what the pipeline does is written down without data, and fake tensors have no public module.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    environment = ShapeEnv(duck_shape=False)
    return FakeTensorMode(shape_env=environment), environment


def symbolic_size(mode: Any, hint: int) -> Any:
    """A size that stands for any number; ``hint`` is an example.

    Reason: as for :func:`storage_free_mode`.
    """
    from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

    context: Any = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])
    return mode.from_tensor(torch.empty(hint, device="meta"), symbolic_context=context).shape[0]


def assumed(environment: Any) -> bool:
    """Whether anything was assumed about a symbolic size, but that numbers which depend on it are not 1.

    Those are asked for when strides are looked at, which mean nothing for a size of 1.

    Reason: as for :func:`storage_free_mode`.
    """
    known = any(guard.expr.func.__name__ != "Unequality" or guard.expr.rhs != 1 for guard in environment.guards)
    return bool(known or environment.replacements or environment.deferred_runtime_asserts)


@contextmanager
def compiling() -> Iterator[None]:
    """Inside, :func:`torch.compiler.is_compiling` says so.

    Reason: what a compiler calls for real while it traces is not told alike by all versions of PyTorch, and what is
    written down has to be what a traced call does. The flag is the process's: one that is set already is left alone,
    and callers hold a lock.
    """
    if torch.compiler._is_compiling_flag:
        yield
        return
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = False


def record(function: Callable[..., Any], tensors: Sequence[torch.Tensor]) -> Any:
    """The calls of a function of tensors without storage, as a graph module.

    Reason: ``make_fx`` has no stable home yet.
    """
    from torch.fx.experimental.proxy_tensor import make_fx

    return make_fx(function, tracing_mode="fake")(*tensors)


def results(graph: Any) -> list[Any]:
    """The tensors without storage that a recorded graph gave; None and plain values as they are."""
    (output,) = graph.graph.find_nodes(op="output")
    return [value.meta["val"] if isinstance(value, torch.fx.Node) else value for value in output.args[0]]


def straight_line(graph: Any, rename: Callable[[Any], Any]) -> Callable[..., Any]:
    """A recorded graph as a plain function of its tensors, with other ops in the place of some.

    A view of a contiguous tensor was recorded; the function takes tensors of any strides.

    Reason: ``python_code`` of a graph is meant for graph modules, whose calls a compiler would guard.
    """
    views = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)
    # Dynamo of torch 2.11 takes no op that returns a number
    sizes = {torch.ops.aten.sym_size.int: "size", torch.ops.aten.sym_numel.default: "numel"}
    for node in graph.graph.nodes:
        if node.op == "get_attr":
            raise NotImplementedError(f"a constant tensor, {node.target}")
        if node.op != "call_function":
            continue
        if node.target in views:
            node.target = torch.ops.aten.reshape.default
        elif node.target in sizes:
            node.op, node.target = "call_method", sizes[node.target]
        elif isinstance(node.target, torch._ops.OpOverload):
            node.target = rename(node.target)
    code = graph.graph.python_code("self")
    namespace = dict(code.globals)
    exec(compile(code.src.replace("def forward(self, ", "def forward("), "<functional_te program>", "exec"), namespace)
    function: Callable[..., Any] = namespace["forward"]
    return function
