"""Both directions: GroupedLinear, scaled activation, GroupedLinear (the experts of a mixture) in one step each.

The pre-activation is kept, and what the second layer's backward reads: the casts of its input, or the input itself.
With ``activation_recompute_in_mlp`` that is not kept: the backward makes it again from the pre-activation.
Each layer takes its own extra input of sizes, so nothing has to be known of whether they are the same tensor.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch

from functional_te import pytree
from functional_te.fuser.rule import FusionRule, Slot, Window
from functional_te.kernels import kernels
from functional_te.ops import BackwardContext, BwdResult, FusedOp, FwdResult, GroupedLinear, Op, OpRequiresGrad
from functional_te.ops.grouped import (
    GroupedBackwardArgs,
    GroupedForwardArgs,
    cast_again,
    grouped_grad_specs,
    grouped_grads,
    grouped_operand_specs,
    grouped_output,
    grouped_output_spec,
    recast_spec,
    saved_operands,
)
from functional_te.ops.op import Amaxes
from functional_te.ops.scaled_activation import (
    ScaledActivation,
    ScaledBackwardArgs,
    ScaledForwardArgs,
    ScaledSaved,
    scaled_activation,
    scaled_grad_specs,
    scaled_grads,
    scaled_output_spec,
)
from functional_te.quantization.quantizers import Quantizer
from functional_te.quantization.recipes import Role
from functional_te.quantization.tensor import BoundQuantizer

__all__ = ["GROUPED_MLP", "GroupedMLP", "GroupedMLPBackwardArgs", "GroupedMLPForwardArgs"]


@pytree.bundle
class GroupedMLPForwardArgs:
    """Bundle of the forward: those of the three ops, without the inputs of the last two.

    Attributes:
        first: the first layer.
        activation: the activation.
        second: the second layer.
        saves_activation: whether the backward needs the pre-activation.
        recomputes: whether the backward makes the input of the second layer again.
    """

    first: GroupedForwardArgs
    activation: ScaledForwardArgs
    second: GroupedForwardArgs
    saves_activation: bool = pytree.static(default=False)
    recomputes: bool = pytree.static(default=False)


@pytree.bundle
class GroupedMLPBackwardArgs:
    """Bundle of the backward: those of the three ops, without the gradients of the first two.

    Attributes:
        first: the first layer, or None if it needs no gradient.
        activation: the activation, or None if nothing before the second layer needs a gradient.
        second: the second layer.
        gated: whether the activation halves the size.
        recomputes: whether the input of the second layer has to be made again.
        recast: how it is cast then.
        override: which copy of the cast is read; see :class:`GroupedForwardArgs`.
    """

    first: GroupedBackwardArgs | None
    activation: ScaledBackwardArgs | None
    second: GroupedBackwardArgs
    gated: bool = pytree.static(default=False)
    recomputes: bool = pytree.static(default=False)
    recast: tuple[BoundQuantizer, ...] = ()
    override: str = pytree.static(default="")


def _at(position: int, amaxes: Amaxes | None) -> tuple[tuple[str, ...], tuple[Any, ...]]:
    """Observations as those of the covered op at ``position``."""
    if amaxes is None:
        return (), ()
    return tuple(f"{position}:{role}" for role in amaxes.roles), amaxes.values


def _both(first: Amaxes | None, second: Amaxes | None) -> Amaxes | None:
    (roles, values), (more, other) = _at(0, first), _at(2, second)
    return Amaxes(roles=(*roles, *more), values=(*values, *other)) if roles or more else None


def _keeps_input(args: GroupedMLPForwardArgs) -> bool:
    """Whether the input of the second layer is kept as it is."""
    second = args.second
    return second.save_input and (not second.input_quantizers or second.override == "high_precision")


def _forward(args: GroupedMLPForwardArgs) -> FwdResult:
    pre, aux1, observed1 = grouped_output(args.first)
    h = scaled_activation(pytree.replace(args.activation, input_=pre)).to(args.activation.dtype)
    y, aux2, observed2 = grouped_output(pytree.replace(args.second, input_=h))
    kept = (pre if args.saves_activation else None, h if _keeps_input(args) else None)
    return FwdResult(y, (aux1, kept, aux2), (), _both(observed1, observed2))


def _forward_fake(args: GroupedMLPForwardArgs) -> FwdResult:
    aux1, observed1 = grouped_operand_specs(args.first)
    pre: Any = grouped_output_spec(args.first)
    h: Any = scaled_output_spec(pytree.replace(args.activation, input_=pre))
    second = pytree.replace(args.second, input_=h)
    aux2, observed2 = grouped_operand_specs(second)
    kept = (pre if args.saves_activation else None, h if _keeps_input(args) else None)
    return FwdResult(grouped_output_spec(second), (aux1, kept, aux2), (), _both(observed1, observed2))


def _setup_context(args: GroupedMLPForwardArgs, aux: Any) -> tuple[Any, ...]:
    aux1, (pre, h), aux2 = aux
    act = args.activation
    second = saved_operands(pytree.replace(args.second, input_=h), aux2)
    if args.recomputes:
        second = pytree.replace(second, recast=args.second.input_quantizers)
    saved = None
    if args.saves_activation:
        saved = ScaledSaved(input_=pre, scale=act.scale, dtype=act.dtype)
    return saved_operands(args.first, aux1), saved, second


def _activation_again(args: GroupedMLPBackwardArgs) -> ScaledForwardArgs:
    act: Any = args.activation
    return ScaledForwardArgs(
        input_=act.input_,
        scale=act.scale,
        kind=act.kind,
        gated=args.gated,
        config=act.config,
        interleave=act.interleave,
        dtype=act.dtype,
        backend=act.backend,
    )


def _backward(args: GroupedMLPBackwardArgs) -> BwdResult:
    second: Any = args.second
    if args.recomputes:
        h: Any = scaled_activation(_activation_again(args)).to(second.dtype)
        if args.recast:
            h = cast_again(kernels(second.backend), h, args.recast, second, args.override)
        second = pytree.replace(second, input_=h)
    result = grouped_grads(second)
    dpre = dp = None
    if args.activation is not None and result.grad_input is not None:
        dpre, dp = scaled_grads(pytree.replace(args.activation, grad_output=result.grad_input))
    first = BwdResult(None)
    if args.first is not None and dpre is not None:
        first = grouped_grads(pytree.replace(args.first, grad_output=dpre))
    return _joined(first, dp, result)


def _joined(first: BwdResult, dp: Any, second: BwdResult) -> BwdResult:
    return BwdResult(
        first.grad_input,
        (first.grad_params, (), second.grad_params),
        (first.grad_extra_inputs, (dp,), second.grad_extra_inputs),
        _both(first.amaxes, second.amaxes),
    )


def _backward_fake(args: GroupedMLPBackwardArgs) -> BwdResult:
    second: Any = args.second
    if args.recomputes:
        h: Any = scaled_output_spec(_activation_again(args)).with_(dtype=second.dtype)
        if args.recast:
            h = recast_spec(h, args.recast, second, args.override)
        second = pytree.replace(second, input_=h)
    result = grouped_grad_specs(second)
    dpre = dp = None
    if args.activation is not None and result.grad_input is not None:
        dpre, dp = scaled_grad_specs(args.activation)
    first = BwdResult(None)
    if args.first is not None and dpre is not None:
        first = grouped_grad_specs(pytree.replace(args.first, grad_output=dpre))
    return _joined(first, dp, result)


@dataclasses.dataclass(frozen=True, eq=False)
class GroupedMLP(FusedOp):
    """GroupedLinear, ScaledActivation, GroupedLinear."""

    fwd_args_type: ClassVar[type[Any]] = GroupedMLPForwardArgs
    bwd_args_type: ClassVar[type[Any]] = GroupedMLPBackwardArgs
    # see GroupedLinear
    opaque: ClassVar[bool] = True

    forward_impl = staticmethod(_forward)
    forward_fake = staticmethod(_forward_fake)
    backward_impl = staticmethod(_backward)
    backward_fake = staticmethod(_backward_fake)
    setup_context = staticmethod(_setup_context)

    def resolve_fwd_args(
        self,
        input_: torch.Tensor,
        *,
        params: tuple[Any, ...],
        state: tuple[Any, ...],
        requires_grad: tuple[OpRequiresGrad, ...],
        extra_inputs: tuple[tuple[torch.Tensor, ...], ...],
        compute_dtype: torch.dtype | None = None,
        backward_override: str | None = None,
        backend: str = "reference",
    ) -> GroupedMLPForwardArgs:
        """The forward bundle."""
        fc1: Any
        act: Any
        fc2: Any
        fc1, act, fc2 = self.ops
        common = {"compute_dtype": compute_dtype, "backward_override": backward_override, "backend": backend}
        fc2.check_splits(extra_inputs[2][0], input_)
        first, second = [
            op.resolve_fwd_args(
                x,
                params=params[i],
                state=state[i],
                requires_grad=requires_grad[i],
                extra_inputs=extra_inputs[i],
                **common,
            )
            for op, x, i in ((fc1, input_, 0), (fc2, None, 2))
        ]
        # what the first layer gives has its dtype, and autocast would ask for no other
        activation = act.resolve_fwd_args(
            None,
            params=params[1],
            state=state[1],
            requires_grad=requires_grad[1],
            extra_inputs=extra_inputs[1],
            compute_dtype=first.dtype,
            backend=backend,
        )
        recomputes = act.activation_recompute_in_mlp and requires_grad[1].any and second.save_input
        if recomputes:
            second = pytree.replace(second, save_input=False)
        return GroupedMLPForwardArgs(
            first=first,
            activation=activation,
            second=second,
            saves_activation=requires_grad[1].any,
            recomputes=recomputes,
        )

    def resolve_bwd_args(
        self, contexts: tuple[BackwardContext, ...], grad_output: torch.Tensor
    ) -> GroupedMLPBackwardArgs:
        """The backward bundle."""
        fc1: Any
        act: Any
        fc2: Any
        fc1, act, fc2 = self.ops
        ctx1, ctx_act, ctx2 = contexts
        saved = ctx2.saved
        weights = any(ctx2.requires_grad.params[: len(fc2.weight_names)])
        recomputes = act.activation_recompute_in_mlp and ctx_act.requires_grad.any and weights
        needs = ctx1.requires_grad.any
        return GroupedMLPBackwardArgs(
            first=fc1.resolve_bwd_args(ctx1, None) if needs else None,
            activation=None if ctx_act.saved is None else act.resolve_bwd_args(ctx_act, None),
            second=fc2.resolve_bwd_args(ctx2, grad_output),
            gated=act.gated,
            recomputes=recomputes,
            recast=saved.recast if saved.override != "high_precision" else (),
            override=saved.override,
        )


def _build(ops: tuple[Op, ...]) -> GroupedMLP:
    return GroupedMLP(ops)


def _refuse(window: Window) -> str | None:
    fc1: Any
    act: Any
    fc2: Any
    fc1, act, fc2 = window.ops
    if fc1.num_groups != fc2.num_groups:
        return f"the layers have {fc1.num_groups} and {fc2.num_groups} groups"
    wanted = fc2.in_features * (2 if act.gated else 1)
    if fc1.out_features != wanted:
        return f"the first layer gives {fc1.out_features} features, the activation needs {wanted}"
    if act.activation_recompute_in_mlp and window.recipe is not None:
        quantizer = window.recipe.quantizer(Role("GroupedLinear", "input", fc2.name))
        if isinstance(quantizer, Quantizer) and quantizer.stateful:
            return "an activation that is recomputed would be cast with a later state"
    return None


GROUPED_MLP = FusionRule(
    name="grouped_mlp",
    pattern=(Slot((GroupedLinear,)), Slot((ScaledActivation,)), Slot((GroupedLinear,))),
    build=_build,
    refuse=_refuse,
)
