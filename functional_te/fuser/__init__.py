"""The functional fuser: rules, the matcher, and plans with independent forward and backward layouts."""

from functional_te.fuser.match import Refusal
from functional_te.fuser.plan import BackwardStep, ForwardStep, GradPattern, Plan, full_pattern, plan
from functional_te.fuser.registry import (
    default_fusions,
    register_backward_fusion,
    register_forward_backward_fusion,
    register_forward_fusion,
)
from functional_te.fuser.rule import FusionRule, Fusions, Slot, Window

__all__ = [
    "BackwardStep",
    "ForwardStep",
    "FusionRule",
    "Fusions",
    "GradPattern",
    "Plan",
    "Refusal",
    "Slot",
    "Window",
    "default_fusions",
    "full_pattern",
    "plan",
    "register_backward_fusion",
    "register_forward_backward_fusion",
    "register_forward_fusion",
]
