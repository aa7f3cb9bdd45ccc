"""Built-in fusions: one file each, one line each here. Order is priority."""

from functional_te.fuser.rule import FusionRule
from functional_te.fuser.rules.backward_activation_bias import BACKWARD_ACTIVATION_BIAS
from functional_te.fuser.rules.backward_add_rms_norm import BACKWARD_ADD_RMS_NORM
from functional_te.fuser.rules.backward_linear_add import BACKWARD_LINEAR_ADD
from functional_te.fuser.rules.forward_linear_bias_activation import FORWARD_LINEAR_BIAS_ACTIVATION
from functional_te.fuser.rules.forward_linear_bias_add import FORWARD_LINEAR_BIAS_ADD

__all__ = ["BACKWARD", "FORWARD", "JOINT"]

JOINT: tuple[FusionRule, ...] = ()

FORWARD: tuple[FusionRule, ...] = (
    FORWARD_LINEAR_BIAS_ADD,
    FORWARD_LINEAR_BIAS_ACTIVATION,
)

BACKWARD: tuple[FusionRule, ...] = (
    BACKWARD_LINEAR_ADD,
    BACKWARD_ACTIVATION_BIAS,
    BACKWARD_ADD_RMS_NORM,
)
