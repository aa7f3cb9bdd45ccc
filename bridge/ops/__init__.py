"""Modules with the names, signatures and checkpoint keys of ``transformer_engine.pytorch.ops``."""

from bridge.ops.activation import (
    GEGLU,
    GELU,
    GLU,
    QGEGLU,
    QGELU,
    ClampedSwiGLU,
    ReGLU,
    ReLU,
    SiLU,
    SiTUGLU,
    SReGLU,
    SReLU,
    SwiGLU,
)
from bridge.ops.linear import BasicLinear, Bias, Linear
from bridge.ops.norm import LayerNorm, RMSNorm
from bridge.ops.operation import BasicOperation, FusedOperation, FusibleOperation
from bridge.ops.sequential import Sequential
from bridge.ops.structural import AddExtraInput, ConstantScale, Identity, MakeExtraOutput, Reshape

__all__ = [
    "GEGLU",
    "GELU",
    "GLU",
    "QGEGLU",
    "QGELU",
    "AddExtraInput",
    "BasicLinear",
    "BasicOperation",
    "Bias",
    "ClampedSwiGLU",
    "ConstantScale",
    "FusedOperation",
    "FusibleOperation",
    "Identity",
    "LayerNorm",
    "Linear",
    "MakeExtraOutput",
    "RMSNorm",
    "ReGLU",
    "ReLU",
    "Reshape",
    "SReGLU",
    "SReLU",
    "Sequential",
    "SiLU",
    "SiTUGLU",
    "SwiGLU",
]
