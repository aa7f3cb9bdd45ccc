"""Built-in fusions: one file each, one line each here. Order is priority."""

from functional_te.fuser.rule import FusionRule
from functional_te.fuser.rules.backward_activation_bias import BACKWARD_ACTIVATION_BIAS
from functional_te.fuser.rules.backward_add_rms_norm import BACKWARD_ADD_RMS_NORM
from functional_te.fuser.rules.backward_bias_dropout import BACKWARD_BIAS_DROPOUT
from functional_te.fuser.rules.backward_linear_add import BACKWARD_LINEAR_ADD
from functional_te.fuser.rules.backward_linear_scale import BACKWARD_LINEAR_SCALE
from functional_te.fuser.rules.backward_rms_norm_linear import BACKWARD_RMS_NORM_LINEAR
from functional_te.fuser.rules.forward_activation_quantize import FORWARD_ACTIVATION_QUANTIZE
from functional_te.fuser.rules.forward_add_rms_norm import FORWARD_ADD_RMS_NORM
from functional_te.fuser.rules.forward_bias_dropout_add import FORWARD_BIAS_DROPOUT_ADD
from functional_te.fuser.rules.forward_linear_bias_activation import FORWARD_LINEAR_BIAS_ACTIVATION
from functional_te.fuser.rules.forward_linear_bias_add import FORWARD_LINEAR_BIAS_ADD
from functional_te.fuser.rules.forward_linear_scale_add import FORWARD_LINEAR_SCALE_ADD
from functional_te.fuser.rules.forward_norm_quantize import FORWARD_NORM_QUANTIZE
from functional_te.fuser.rules.grouped_mlp import GROUPED_MLP

__all__ = ["BACKWARD", "FORWARD", "JOINT"]

JOINT: tuple[FusionRule, ...] = (GROUPED_MLP,)

FORWARD: tuple[FusionRule, ...] = (
    FORWARD_LINEAR_BIAS_ADD,
    FORWARD_LINEAR_SCALE_ADD,
    FORWARD_LINEAR_BIAS_ACTIVATION,
    FORWARD_ADD_RMS_NORM,
    FORWARD_BIAS_DROPOUT_ADD,
    FORWARD_NORM_QUANTIZE,
    FORWARD_ACTIVATION_QUANTIZE,
)

BACKWARD: tuple[FusionRule, ...] = (
    BACKWARD_RMS_NORM_LINEAR,
    BACKWARD_LINEAR_ADD,
    BACKWARD_LINEAR_SCALE,
    BACKWARD_ACTIVATION_BIAS,
    BACKWARD_BIAS_DROPOUT,
    BACKWARD_ADD_RMS_NORM,
)
