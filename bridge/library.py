"""Registration of custom ops: from an op's bundles, implementations and fakes to ``torch.ops.functional_te``.

Every op class gets two independent custom ops, ``<class name in lower case>_forward`` and ``..._backward``; autograd
is left to whoever calls them. An op is *transparent* by default: Dynamo keeps it as one node of its graph, and the
compiler traces through it below, because its body is plain PyTorch registered as ``CompositeImplicitAutograd``. An op
class with ``opaque = True`` keeps its body closed and is described to the compiler by its fake. Every op also has an
opaque twin, ``..._opaque``, for kernel backends that no compiler can trace through.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from bridge.call import merge_saved, split_saved
from bridge.checkpointing import closed, public_names
from bridge.schema import Schema
from functional_te import pytree
from functional_te._value import Table
from functional_te.ops import BwdResult, FwdResult
from functional_te.tensor_spec import TensorSpec, spec_of

__all__ = ["NAMESPACE", "RegisteredOp", "ensure_registered", "register_custom_op", "register_custom_op_with_autograd"]

NAMESPACE = "functional_te"
_library = torch.library.Library(NAMESPACE, "FRAGMENT")
_taken: dict[str, int] = {}


class RegisteredOp:
    """One custom op. Call it with a bundle; it returns what the implementation returns.

    Attributes:
        name: qualified name, ``functional_te::<name>``.
        op: the op of ``torch.ops``.
        opaque: the op whose body is closed: itself, or a twin for kernels that no compiler can trace.
    """

    def __init__(
        self,
        name: str,
        bundle: type[Any],
        impl: Callable[..., Any],
        fake: Callable[..., Any],
        result: Any,
        opaque: bool,
    ) -> None:
        self.name = f"{NAMESPACE}::{name}"
        self.schema = Schema(bundle)
        self.impl = impl
        self.fake = fake
        self.result = result
        self._blanks = frozenset(i for i, slot in enumerate(self.schema.names) if slot.endswith("_blank"))
        self.opaque = self._define(name if opaque else f"{name}_opaque", "CompositeExplicitAutograd")
        self.op = self.opaque if opaque else self._define(name, "CompositeImplicitAutograd")
        public_names[self.opaque] = self.op
        _by_name[self.name] = self

    def _define(self, name: str, key: str) -> Any:
        _library.define(f"{name}({self.schema.arguments}) -> Tensor[]")
        _library.impl(name, self._run_closed if key == "CompositeExplicitAutograd" else self._run_transparent, key)
        if key == "CompositeImplicitAutograd":  # torch.func.vmap sees through it, too
            _library.impl(name, self._run, "FuncTorchBatchedDecomposition")
        if key == "CompositeExplicitAutograd":
            torch.library.register_fake(f"{NAMESPACE}::{name}", self._run_fake, lib=_library)
        return getattr(getattr(torch.ops, NAMESPACE), name).default

    def __call__(self, args: Any, opaque: bool = False) -> Any:
        flat = self.schema.encode(args)
        build = getattr(_builders, _builder_of(self.name, self.schema.summary(flat)))
        return build(self.opaque(*flat) if opaque else self.op(*flat))

    def structure(self, summary: tuple[Any, ...]) -> Any:
        """Structure of the result, from the fake. It depends on what :meth:`Schema.summary` keeps, not on numbers."""
        return pytree.structure(self._normal(self.fake(self.schema.placeholder(summary))))

    def _normal(self, result: Any) -> Any:
        if isinstance(result, self.result):
            return result
        if self.result is FwdResult:
            return FwdResult(*result)
        return BwdResult(result[0], tuple(result[1:]))

    def _run(self, *flat: Any) -> list[torch.Tensor]:
        return pytree.leaves(self._normal(self.impl(self.schema.decode(flat))))

    def _run_closed(self, *flat: Any) -> list[torch.Tensor]:
        # what a cast may write to and give back, but a closed op may not
        own = [None if place in self._blanks else given for place, given in enumerate(flat)]
        return [result.contiguous() for result in self._run(*own)]  # as the fake says they are

    def _run_transparent(self, *flat: Any) -> list[torch.Tensor]:
        # while the compiler traces a region whose policy of selective checkpointing names custom ops
        result: list[torch.Tensor] = self.opaque(*flat) if closed.depth else self._run(*flat)
        return result

    def _run_fake(self, *flat: Any) -> list[torch.Tensor]:
        specs = pytree.leaves(self._normal(self.fake(pytree.tree_map(spec_of, self.schema.decode(flat)))))
        return [_empty(spec) for spec in specs]


_by_name: dict[str, RegisteredOp] = {}
_builders = Table()
_builder_names: dict[tuple[str, tuple[Any, ...]], str] = {}


@torch.compiler.assume_constant_result
def _builder_of(name: str, summary: tuple[Any, ...]) -> str:
    """Make the function that builds an op's result of its tensors, for real while a caller is traced.

    Returns:
        The name of the function in the table.
    """
    key = _builder_names.get((name, summary))
    if key is None:
        key = f"builder_{len(_builder_names)}"
        setattr(_builders, key, pytree.rebuilder(_by_name[name].structure(summary)))
        _builder_names[name, summary] = key
    return key


def _empty(spec: TensorSpec) -> torch.Tensor:
    return torch.empty(spec.shape, dtype=spec.dtype, device=spec.device)


def _free_name(name: str) -> str:
    """``name``, numbered when a class of the same name was registered before (a notebook cell run again)."""
    _taken[name] = _taken.get(name, 0) + 1
    return name if _taken[name] == 1 else f"{name}_{_taken[name]}"


def _register_op(
    name: str,
    bundle: type[Any],
    impl: Callable[..., Any],
    fake: Callable[..., Any],
    result: Any,
    *,
    opaque: bool = False,
) -> RegisteredOp:
    """The single-op primitive: define, implement and describe one custom op."""
    return RegisteredOp(_free_name(name), bundle, impl, fake, result, opaque)


def register_custom_op(op_class: type[Any]) -> tuple[RegisteredOp | None, RegisteredOp | None]:
    """Register an op class: its forward and its backward as two independent custom ops.

    Autograd is left to the caller. A class may implement one direction only (a forward-only op, a fusion of one
    direction), and a direction that is inline gets no custom op.

    Args:
        op_class: a class that declares ``fwd_args_type``, ``bwd_args_type``, the implementations and their fakes.

    Returns:
        The forward and the backward; each takes a bundle. The forward returns an
        :class:`~functional_te.FwdResult`, the backward a :class:`~functional_te.BwdResult`.

    Raises:
        TypeError: a direction has no bundle, no fake, or a bundle field that no schema can express.
    """
    if op_class.__dict__.get("compile_ops") is not None:
        return op_class.compile_ops
    pair: list[RegisteredOp | None] = []
    for direction, bundle, inline, result in (
        ("forward", op_class.fwd_args_type, op_class.inline_forward, FwdResult),
        ("backward", op_class.bwd_args_type, op_class.inline_backward, BwdResult),
    ):
        impl = getattr(op_class, f"{direction}_impl", None)
        if impl is None or inline:
            pair.append(None)
            continue
        fake = getattr(op_class, f"{direction}_fake", None)
        if bundle is None or fake is None:
            raise TypeError(f"{op_class.__name__}: the {direction} needs an argument bundle and a fake.")
        name = f"{op_class.__name__.lower()}_{direction}"
        pair.append(_register_op(name, bundle, impl, fake, result, opaque=getattr(op_class, "opaque", False)))
    op_class.compile_ops = (pair[0], pair[1])
    return op_class.compile_ops


def ensure_registered(op_class: type[Any]) -> str | None:
    """Register ``op_class`` once.

    Returns:
        None, or the reason why its eager implementation has to be traced instead.
    """
    if op_class.__dict__.get("compile_ops") is not None:
        return None
    reason: str | None = op_class.compile_unsupported_reason()
    if reason is not None:
        return reason
    try:
        register_custom_op(op_class)
    except TypeError as error:
        return str(error)
    return None


class _StandAlone(torch.autograd.Function):
    """Autograd for one custom-op pair outside a chain."""

    @staticmethod
    def forward(ctx: Any, call: Any, *tensors: Any) -> Any:
        args = pytree.replace(call.args, **dict(zip(call.inputs, tensors, strict=True)))
        result = call.forward(args)
        saved, ctx.spec = pytree.tree_flatten(call.setup_context(args, result.aux))
        kept, ctx.values = split_saved(saved)
        ctx.save_for_backward(*kept)
        ctx.call = call
        return tensors[0].clone() if result.output is None else result.output

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        saved = pytree.tree_unflatten(ctx.spec, merge_saved(ctx.values, ctx.saved_tensors))
        result = ctx.call.backward(ctx.call.resolve_bwd_args(saved, grads[0]))
        grad_input = grads[0] if result.grad_input is None else result.grad_input
        return (None, grad_input, *result.grad_params)


class _StandAloneCall:
    def __init__(self, args: Any, inputs: Any, forward: Any, backward: Any, setup_context: Any, resolve: Any) -> None:
        self.args = args
        self.inputs = inputs
        self.forward = forward
        self.backward = backward
        self.setup_context = setup_context
        self.resolve_bwd_args = resolve


def register_custom_op_with_autograd(
    op_class: type[Any], *, inputs: tuple[str, ...], resolve_bwd_args: Callable[[Any, torch.Tensor], Any]
) -> Callable[[Any], torch.Tensor]:
    """Register an op class as a stand-alone differentiable custom op.

    Args:
        op_class: as for :func:`register_custom_op`, with both directions.
        inputs: names of the bundle's tensor fields that get gradients, in the order in which the backward returns
            them: the main input first.
        resolve_bwd_args: from what ``setup_context`` saved and the output gradient to the backward bundle.

    Returns:
        A function from a forward bundle to the output, differentiable in ``inputs`` and traceable by Dynamo.
    """
    forward, backward = register_custom_op(op_class)
    if forward is None or backward is None:
        raise TypeError(f"{op_class.__name__}: a differentiable op needs both directions.")

    def call(args: Any) -> torch.Tensor:
        record = _StandAloneCall(args, inputs, forward, backward, op_class.setup_context, resolve_bwd_args)
        output: torch.Tensor = _StandAlone.apply(record, *[getattr(args, name) for name in inputs])
        return output

    return call
