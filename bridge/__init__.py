"""The bridge: functional chains under autograd and torch.compile, and as torch.nn modules."""

from bridge import ops
from bridge.autograd import apply
from bridge.gate import CompileEagerFallbackWarning, warn_compile_eager_fallback
from bridge.library import register_custom_op, register_custom_op_with_autograd
from bridge.recipe_context import autocast

__all__ = [
    "CompileEagerFallbackWarning",
    "apply",
    "autocast",
    "ops",
    "register_custom_op",
    "register_custom_op_with_autograd",
    "warn_compile_eager_fallback",
]
