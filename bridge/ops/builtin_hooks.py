"""te.ops' hooks of built-in ops, for subclasses that call ``super().op_forward`` and fusions that call a basic op's."""

from __future__ import annotations

from typing import Any

import torch

from bridge.ops.context import OperationContext
from bridge.ops.te_context import native_from_te, te_from_native
from functional_te.kernels import resolve_backend
from functional_te.ops import BackwardContext, BwdResult, FwdResult, Op, OpRequiresGrad

__all__ = ["run_op_backward", "run_op_forward"]


def _requires_grad(params: dict[str, Any], needed: bool) -> OpRequiresGrad:
    flags = tuple(needed and value.requires_grad for value in params.values())
    return OpRequiresGrad(any=needed, input=needed, params=flags)


def _context(saved: Any, params: dict[str, Any], device: torch.device) -> BackwardContext:
    backend = resolve_backend("auto", device.type)
    return BackwardContext(saved, _requires_grad(params, True), {}, None, (), backend, None)


def run_op_forward(
    module: Any, op: Op, params: dict[str, Any], ctx: OperationContext, input_: torch.Tensor, kwargs: dict[str, Any]
) -> torch.Tensor:
    """The forward of one op in high precision; ``ctx`` gets what te.ops' op saves."""
    provided = {
        "params": params,
        "state": {},
        "requires_grad": _requires_grad(params, ctx.requires_grad),
        "backend": resolve_backend("auto", input_.device.type),
    }
    names = op.provided_names
    args = op.resolve_fwd_args(input_, **{k: v for k, v in provided.items() if k in names}, **kwargs)  # type: ignore[attr-defined]
    result = op.forward_impl(args)  # type: ignore[attr-defined]
    result = result if type(result) is FwdResult else FwdResult(*result)
    if ctx.requires_grad:
        filled = te_from_native(op, module, _context(op.setup_context(args, result.aux), params, input_.device))
        ctx.save_for_backward(*filled.saved_tensors)
        for name, value in filled.attributes().items():
            setattr(ctx, name, value)
    return input_ if result.output is None else result.output


def run_op_backward(
    module: Any, op: Op, params: dict[str, Any], ctx: OperationContext, grad_output: torch.Tensor
) -> tuple[Any, Any]:
    """The backward of one op in high precision, from what te.ops' op saves."""
    forward = OperationContext(True)
    forward.save_for_backward(*ctx.saved_tensors)
    for name, value in ctx.attributes().items():
        setattr(forward, name, value)
    # ops whose saved tensors depend on the shape of the input have a gradient of that shape
    native = native_from_te(op, module, params, forward, grad_output)
    args = op.resolve_bwd_args(_context(native, params, grad_output.device), grad_output)  # type: ignore[attr-defined]
    result = op.backward_impl(args)  # type: ignore[attr-defined]
    result = result if type(result) is BwdResult else BwdResult(result[0], tuple(result[1:]))
    return grad_output if result.grad_input is None else result.grad_input, result.grad_params
