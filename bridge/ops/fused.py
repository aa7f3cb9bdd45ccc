"""The built-in fused ops under te.ops' names: what stands in ``_forward_ops`` and ``_backward_ops`` of a group."""

from functional_te.fuser.rules.backward_activation_bias import BackwardActivationBias
from functional_te.fuser.rules.backward_add_rms_norm import BackwardAddRMSNorm
from functional_te.fuser.rules.backward_linear_add import BackwardLinearAdd
from functional_te.fuser.rules.backward_linear_scale import BackwardLinearScale
from functional_te.fuser.rules.forward_linear_bias_activation import ForwardLinearBiasActivation
from functional_te.fuser.rules.forward_linear_bias_add import ForwardLinearBiasAdd
from functional_te.fuser.rules.forward_linear_scale_add import ForwardLinearScaleAdd

__all__ = [
    "BackwardActivationBias",
    "BackwardAddRMSNorm",
    "BackwardLinearAdd",
    "BackwardLinearScale",
    "ForwardLinearBiasActivation",
    "ForwardLinearBiasAdd",
    "ForwardLinearScaleAdd",
]
