"""The bridge: functional chains under autograd and torch.compile, and as torch.nn modules."""

from bridge import interop, ops
from bridge.autograd import apply
from bridge.checkpointing import selective_checkpoint_contexts
from bridge.compile_options import cpp_wrapper_options
from bridge.convert import conversion_report, convert, revert
from bridge.gate import CompileEagerFallbackWarning, warn_compile_eager_fallback
from bridge.glu import deinterleave_glu_tensor, interleave_glu_tensor
from bridge.graph import graph
from bridge.library import register_custom_op, register_custom_op_with_autograd
from bridge.model_init import quantized_model_init
from bridge.quantized_weight import QuantizedWeight
from bridge.recipe_context import autocast

__all__ = [
    "CompileEagerFallbackWarning",
    "QuantizedWeight",
    "apply",
    "autocast",
    "conversion_report",
    "convert",
    "cpp_wrapper_options",
    "deinterleave_glu_tensor",
    "graph",
    "interleave_glu_tensor",
    "interop",
    "ops",
    "quantized_model_init",
    "register_custom_op",
    "register_custom_op_with_autograd",
    "revert",
    "selective_checkpoint_contexts",
    "warn_compile_eager_fallback",
]
