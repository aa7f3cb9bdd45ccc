"""The basic ops: one file each (one per family), one line each here."""

from functional_te.ops.activation import (
    GEGLU,
    GELU,
    GLU,
    QGEGLU,
    QGELU,
    Activation,
    ClampedSwiGLU,
    ErfGELU,
    GatedActivation,
    ReGLU,
    ReLU,
    SiLU,
    SiTUGLU,
    SReGLU,
    SReLU,
    SwiGLU,
)
from functional_te.ops.adaptive_layer_norm import AdaptiveLayerNorm
from functional_te.ops.bias import Bias
from functional_te.ops.collectives import AllGather, AllReduce, ReduceScatter
from functional_te.ops.constant_scale import ConstantScale
from functional_te.ops.dropout import Dropout
from functional_te.ops.extra import AddExtraInput, MakeExtraOutput
from functional_te.ops.grouped_linear import GroupedLinear
from functional_te.ops.l2_normalization import L2Normalization
from functional_te.ops.layer_norm import LayerNorm
from functional_te.ops.linear import BasicLinear
from functional_te.ops.op import BackwardContext, BwdResult, FusedOp, FwdResult, Op, OpRequiresGrad
from functional_te.ops.quantize import Quantize
from functional_te.ops.rms_norm import RMSNorm
from functional_te.ops.scaled_activation import (
    ScaledActivation,
    ScaledClampedQGeGLU,
    ScaledSiTUGLU,
    ScaledSReLU,
    ScaledSwiGLU,
    ScaledTanhSReLU,
)
from functional_te.ops.structural import Identity, Reshape
from functional_te.ops.tensor_parallel import TensorParallel

__all__ = [
    "GEGLU",
    "GELU",
    "GLU",
    "OPS",
    "QGEGLU",
    "QGELU",
    "Activation",
    "AdaptiveLayerNorm",
    "AddExtraInput",
    "AllGather",
    "AllReduce",
    "BackwardContext",
    "BasicLinear",
    "Bias",
    "BwdResult",
    "ClampedSwiGLU",
    "ConstantScale",
    "Dropout",
    "ErfGELU",
    "FusedOp",
    "FwdResult",
    "GatedActivation",
    "GroupedLinear",
    "Identity",
    "L2Normalization",
    "LayerNorm",
    "MakeExtraOutput",
    "Op",
    "OpRequiresGrad",
    "Quantize",
    "RMSNorm",
    "ReGLU",
    "ReLU",
    "ReduceScatter",
    "Reshape",
    "SReGLU",
    "SReLU",
    "ScaledActivation",
    "ScaledClampedQGeGLU",
    "ScaledSReLU",
    "ScaledSiTUGLU",
    "ScaledSwiGLU",
    "ScaledTanhSReLU",
    "SiLU",
    "SiTUGLU",
    "SwiGLU",
    "TensorParallel",
]

# every basic op, with a tiny example of its configuration and the last input dimension it takes
OPS: tuple[tuple[Op, int], ...] = (
    (Identity(), 8),
    (BasicLinear(8, 16), 8),
    (Bias(8), 8),
    (LayerNorm((8,)), 8),
    (RMSNorm((8,)), 8),
    (AdaptiveLayerNorm(8), 8),
    (L2Normalization(), 8),
    (GELU(), 8),
    (ErfGELU(), 8),
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
    (AllReduce(), 8),
    (AllGather(), 8),
    (ReduceScatter(), 8),
    (Quantize(), 8),
    (Dropout(0.0), 8),  # any other probability needs a key
    (GroupedLinear(2, 8, 16), 8),
    (ScaledSwiGLU(), 16),
    (ScaledSiTUGLU(), 16),
    (ScaledClampedQGeGLU(), 16),
    (ScaledSReLU(), 8),
    (ScaledTanhSReLU(0.75), 8),
)
