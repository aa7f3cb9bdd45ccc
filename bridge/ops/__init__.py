"""Modules with the names, signatures and checkpoint keys of ``transformer_engine.pytorch.ops``."""

from bridge.ops import fused
from bridge.ops.activation import (
    GEGLU,
    GELU,
    GLU,
    QGEGLU,
    QGELU,
    ClampedSwiGLU,
    ErfGELU,
    ReGLU,
    ReLU,
    SiLU,
    SiTUGLU,
    SReGLU,
    SReLU,
    SwiGLU,
)
from bridge.ops.collectives import AllGather, AllReduce, ReduceScatter
from bridge.ops.context import OperationContext
from bridge.ops.fusions import register_backward_fusion, register_forward_backward_fusion, register_forward_fusion
from bridge.ops.grouped_linear import GroupedLinear
from bridge.ops.hooks import is_op_fuser_grouped_tensor_path_supported
from bridge.ops.linear import BasicLinear, Bias, Linear
from bridge.ops.norm import AdaptiveLayerNorm, L2Normalization, LayerNorm, RMSNorm
from bridge.ops.operation import BasicOperation, FusedOperation, FusibleOperation
from bridge.ops.scaled_activation import (
    ScaledClampedQGeGLU,
    ScaledSiTUGLU,
    ScaledSReLU,
    ScaledSwiGLU,
    ScaledTanhSReLU,
)
from bridge.ops.sequential import Sequential
from bridge.ops.structural import (
    AddExtraInput,
    ConstantScale,
    Dropout,
    Identity,
    MakeExtraOutput,
    Quantize,
    Reshape,
)

__all__ = [
    "GEGLU",
    "GELU",
    "GLU",
    "QGEGLU",
    "QGELU",
    "AdaptiveLayerNorm",
    "AddExtraInput",
    "AllGather",
    "AllReduce",
    "BasicLinear",
    "BasicOperation",
    "Bias",
    "ClampedSwiGLU",
    "ConstantScale",
    "Dropout",
    "ErfGELU",
    "FusedOperation",
    "FusibleOperation",
    "GroupedLinear",
    "Identity",
    "L2Normalization",
    "LayerNorm",
    "Linear",
    "MakeExtraOutput",
    "OperationContext",
    "Quantize",
    "RMSNorm",
    "ReGLU",
    "ReLU",
    "ReduceScatter",
    "Reshape",
    "SReGLU",
    "SReLU",
    "ScaledClampedQGeGLU",
    "ScaledSReLU",
    "ScaledSiTUGLU",
    "ScaledSwiGLU",
    "ScaledTanhSReLU",
    "Sequential",
    "SiLU",
    "SiTUGLU",
    "SwiGLU",
    "fused",
    "is_op_fuser_grouped_tensor_path_supported",
    "register_backward_fusion",
    "register_forward_backward_fusion",
    "register_forward_fusion",
]
