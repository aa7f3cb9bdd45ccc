"""Constructor signatures are those of te.ops; options that are not supported are refused by name."""

import inspect

import pytest
import torch

from bridge import ops

_LAYER = "device=None, dtype=None, tensor_parallel_mode=None, tensor_parallel_group=None, sequence_parallel=False"
_RNG = "rng_state_tracker_function=None, accumulate_into_main_grad=False"
_NORM = "normalized_shape, *, eps=1e-05, device=None, dtype=None, zero_centered_gamma=False, sm_margin=0"
_GLU = "cache_quantized_input=False, glu_interleave_size=None"
_SCALED_GLU = "glu_interleave_size=None, *, activation_recompute_in_mlp=False"
_GROUPED = (
    "bias=True, device=None, dtype=None, single_grouped_weight=False, single_grouped_bias=False, "
    "delay_wgrad_compute=False, scale_bias=False"
)

# constructor signatures of transformer_engine.pytorch.ops; keyword-only arguments are compared without their order
SIGNATURES = {
    "BasicLinear": f"in_features, out_features, *, {_LAYER}, {_RNG}, userbuffers_options=None",
    "Linear": f"in_features, out_features, *, bias=True, {_LAYER}, {_RNG}",
    "Bias": "size, *, device=None, dtype=None, tensor_parallel=False, tensor_parallel_group=None",
    "LayerNorm": _NORM,
    "RMSNorm": _NORM,
    "AdaptiveLayerNorm": "hidden_size, *, eps=1e-05, batch_dim=0",
    "L2Normalization": "*, eps=1e-06, seq_length=None, micro_batch_size=None",
    "Quantize": "forward=True, backward=False",
    "Dropout": "p",
    "Identity": "",
    "Reshape": "shape",
    "ConstantScale": "scale",
    "AddExtraInput": "*, in_place=False",
    "AllGather": "process_group=None",
    "AllReduce": "process_group=None, reduce_in_backward=True",
    "ReduceScatter": "process_group=None",
    "MakeExtraOutput": "*, in_place=False",
    "GroupedLinear": f"num_groups, in_features, out_features, *, {_GROUPED}, {_RNG}",
    "SwiGLU": f"*, {_GLU}",
    "SiTUGLU": f"*, beta1=4.0, beta2=25.0, {_GLU}",
    "ClampedSwiGLU": f"*, limit=7.0, alpha=1.702, glu_linear_offset=1.0, {_GLU}",
    "ScaledSwiGLU": _SCALED_GLU,
    "ScaledSiTUGLU": f"{_SCALED_GLU}, beta1=4.0, beta2=25.0",
    "ScaledClampedQGeGLU": f"{_SCALED_GLU}, limit=7.0, alpha=1.702, glu_linear_offset=1.0",
    "ScaledSReLU": "*, activation_recompute_in_mlp=False",
    "ScaledTanhSReLU": "*, tanh_clamp_scale, activation_recompute_in_mlp=False",
    **dict.fromkeys(
        ("GELU", "ErfGELU", "QGELU", "SiLU", "ReLU", "SReLU", "GLU", "GEGLU", "QGEGLU", "ReGLU", "SReGLU"),
        "*, cache_quantized_input=False",
    ),
}


def _signature(parameters):
    """Positional names in order, and keyword-only names with their defaults; varargs count as names of their own."""
    positional = [str(p.replace(annotation=p.empty)) for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    return positional, {str(p.replace(annotation=p.empty)) for p in parameters if p.kind is not p.POSITIONAL_OR_KEYWORD}


def test_every_module_has_a_signature_here():
    bases = {"BasicOperation", "FusedOperation", "FusibleOperation", "OperationContext", "Sequential"}
    modules = {name for name in ops.__all__ if isinstance(getattr(ops, name), type)}
    assert modules - bases == set(SIGNATURES)


@pytest.mark.parametrize("name", SIGNATURES)
def test_constructor_signature(name):
    wanted = inspect.signature(eval(f"lambda {SIGNATURES[name]}: None")).parameters.values()
    assert _signature(inspect.signature(getattr(ops, name)).parameters.values()) == _signature(wanted)


@pytest.mark.parametrize("name", [name for name in SIGNATURES if "cache_quantized_input" in SIGNATURES[name]])
def test_unknown_arguments_are_refused(name):
    with pytest.raises(TypeError, match="name"):
        getattr(ops, name)(name="mine")


def test_refused_options_are_named():
    with pytest.raises(NotImplementedError, match="userbuffers_options"):
        ops.BasicLinear(8, 8, userbuffers_options={"comm_name": "qkv"})


@pytest.mark.parametrize(("name", "sizes"), [("BasicLinear", (8, 8)), ("Linear", (8, 8)), ("Bias", (8,))])
def test_a_process_group_has_to_be_one(name, sizes):
    mode = {"tensor_parallel": True} if name == "Bias" else {"tensor_parallel_mode": "column"}
    with pytest.raises(TypeError, match="tensor_parallel_group: expected None or a torch"):
        getattr(ops, name)(*sizes, tensor_parallel_group="world", **mode)


@pytest.mark.parametrize("name", ["BasicLinear", "Linear", "Bias", "LayerNorm", "RMSNorm"])
def test_parameter_dtypes(name):
    sizes = (8, 8) if "Linear" in name else (8,)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        assert {p.dtype for p in getattr(ops, name)(*sizes, dtype=dtype).parameters()} == {dtype}
    with pytest.raises(ValueError, match=r"dtype.*float64"):
        getattr(ops, name)(*sizes, dtype=torch.float64)


def test_default_dtype_is_torchs():
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert ops.Linear(4, 4).weight.dtype is torch.bfloat16
    finally:
        torch.set_default_dtype(torch.float32)
