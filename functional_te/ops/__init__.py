"""The basic ops: one file each (one per family), one line each here."""

from functional_te.ops.activation import (
    GEGLU,
    GELU,
    GLU,
    QGEGLU,
    QGELU,
    Activation,
    ClampedSwiGLU,
    GatedActivation,
    ReGLU,
    ReLU,
    SiLU,
    SiTUGLU,
    SReGLU,
    SReLU,
    SwiGLU,
)
from functional_te.ops.bias import Bias
from functional_te.ops.constant_scale import ConstantScale
from functional_te.ops.extra import AddExtraInput, MakeExtraOutput
from functional_te.ops.layer_norm import LayerNorm
from functional_te.ops.linear import BasicLinear
from functional_te.ops.op import BackwardContext, BwdResult, FusedOp, FwdResult, Op, OpRequiresGrad
from functional_te.ops.rms_norm import RMSNorm
from functional_te.ops.structural import Identity, Reshape

__all__ = [
    "GEGLU",
    "GELU",
    "GLU",
    "OPS",
    "QGEGLU",
    "QGELU",
    "Activation",
    "AddExtraInput",
    "BackwardContext",
    "BasicLinear",
    "Bias",
    "BwdResult",
    "ClampedSwiGLU",
    "ConstantScale",
    "FusedOp",
    "FwdResult",
    "GatedActivation",
    "Identity",
    "LayerNorm",
    "MakeExtraOutput",
    "Op",
    "OpRequiresGrad",
    "RMSNorm",
    "ReGLU",
    "ReLU",
    "Reshape",
    "SReGLU",
    "SReLU",
    "SiLU",
    "SiTUGLU",
    "SwiGLU",
]

# every basic op, with a tiny example of its configuration and the last input dimension it takes
OPS: tuple[tuple[Op, int], ...] = (
    (Identity(), 8),
    (BasicLinear(8, 16), 8),
    (Bias(8), 8),
    (LayerNorm((8,)), 8),
    (RMSNorm((8,)), 8),
    (GELU(), 8),
    (QGELU(), 8),
    (SiLU(), 8),
    (ReLU(), 8),
    (SReLU(), 8),
    (GLU(), 16),
    (GEGLU(), 16),
    (QGEGLU(), 16),
    (ReGLU(), 16),
    (SReGLU(), 16),
    (SwiGLU(), 16),
    (SiTUGLU(), 16),
    (ClampedSwiGLU(), 16),
    (ConstantScale(0.5), 8),
    (AddExtraInput(), 8),
    (MakeExtraOutput(), 8),
    (Reshape((-1, 4)), 8),
)
