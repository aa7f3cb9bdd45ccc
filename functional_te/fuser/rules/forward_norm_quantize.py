"""Forward: a norm whose output a Quantize casts, in one step that ends in the cast."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch

from functional_te import pytree
from functional_te.fuser.rule import FusionRule, Slot, Window
from functional_te.ops import AdaptiveLayerNorm, FusedOp, FwdResult, LayerNorm, Op, OpRequiresGrad, Quantize, RMSNorm
from functional_te.ops.adaptive_layer_norm import AdaptiveLayerNormForwardArgs
from functional_te.ops.layer_norm import LayerNormForwardArgs
from functional_te.ops.op import Amaxes
from functional_te.ops.rms_norm import RMSNormForwardArgs
from functional_te.quantization.quantizers import Quantizer
from functional_te.quantization.recipes import Role

__all__ = ["FORWARD_NORM_QUANTIZE", "ForwardNormQuantize", "NormQuantizeArgs", "observed_by_quantize", "refuse_no_cast"]


@pytree.bundle
class NormQuantizeArgs:
    """Bundle: the norm's, whose output quantizer is the Quantize's."""

    norm: RMSNormForwardArgs | LayerNormForwardArgs | AdaptiveLayerNormForwardArgs


_NORMS: dict[type[Any], Any] = {
    RMSNormForwardArgs: RMSNorm,
    LayerNormForwardArgs: LayerNorm,
    AdaptiveLayerNormForwardArgs: AdaptiveLayerNorm,
}


def observed_by_quantize(result: FwdResult) -> FwdResult:
    """A producer's result whose cast belongs to the Quantize of the same step: what it observed is that op's input."""
    if result.amaxes is None:
        return result
    return result._replace(amaxes=Amaxes(roles=("input",), values=result.amaxes.values))


def _forward(args: NormQuantizeArgs) -> FwdResult:
    return observed_by_quantize(_NORMS[type(args.norm)].forward_impl(args.norm))


def _forward_fake(args: NormQuantizeArgs) -> FwdResult:
    return observed_by_quantize(_NORMS[type(args.norm)].forward_fake(args.norm))


def _setup_context(args: NormQuantizeArgs, aux: Any) -> tuple[Any, ...]:
    return _NORMS[type(args.norm)].setup_context(args.norm, aux), ()


@dataclasses.dataclass(frozen=True, eq=False)
class ForwardNormQuantize(FusedOp):
    """RMSNorm, LayerNorm or AdaptiveLayerNorm; Quantize."""

    fwd_args_type: ClassVar[type[Any]] = NormQuantizeArgs

    forward_impl = staticmethod(_forward)
    forward_fake = staticmethod(_forward_fake)
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
        backend: str = "reference",
    ) -> NormQuantizeArgs:
        """The forward bundle."""
        norm: Any = self.ops[0]
        provided = {
            "params": params[0],
            "state": {},
            "requires_grad": requires_grad[0],
            "extra_inputs": extra_inputs[0],
            "next_op_input_quantizer": state[1].get("input"),
            "compute_dtype": compute_dtype,
            "backend": backend,
        }
        names = norm.provided_names
        return NormQuantizeArgs(
            norm=norm.resolve_fwd_args(input_, **{name: value for name, value in provided.items() if name in names})
        )


def _build(ops: tuple[Op, ...]) -> ForwardNormQuantize:
    return ForwardNormQuantize(ops)


def refuse_no_cast(window: Window) -> str | None:
    """Why the Quantize that ends a window casts nothing in the forward."""
    quantize = window.ops[-1]
    assert isinstance(quantize, Quantize)
    if not quantize.forward:
        return "the Quantize casts no forward tensor"
    if window.recipe is None:
        return "without a recipe nothing is cast"
    if not isinstance(window.recipe.quantizer(Role("Quantize", "input", quantize.name)), Quantizer):
        return "the recipe keeps the tensor in high precision"
    return None


FORWARD_NORM_QUANTIZE = FusionRule(
    name="forward_norm_quantize",
    pattern=(Slot((RMSNorm, LayerNorm, AdaptiveLayerNorm)), Slot((Quantize,))),
    build=_build,
    refuse=refuse_no_cast,
)
