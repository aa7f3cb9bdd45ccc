"""Modules of Transformer Engine, by stand-ins with the names and attributes of its classes.

The classes themselves need CUDA: ``tests/gpu/test_convert_te.py``.
"""

import types

import pytest
import torch
from torch import nn
from torch.nn import functional

import bridge
from tests.convert.models import CURRENT, HIDDEN, WIDTH, data, run, snr

ABSENT = torch.Tensor()


def _named(name, module="transformer_engine.pytorch.module"):
    """Give a class the name and place of one of Transformer Engine's."""

    def rename(kind):
        kind.__name__ = kind.__qualname__ = name
        kind.__module__ = module
        return kind

    return rename


def _parameter(*shape):
    return nn.Parameter(torch.randn(shape) / 8)


@_named("Linear")
class TELinear(nn.Module):
    def __init__(self, bias=True, **attributes):
        super().__init__()
        self.weight = _parameter(HIDDEN, WIDTH)
        self.bias = _parameter(HIDDEN) if bias else ABSENT
        self.__dict__.update({"tp_size": 1, "return_bias": False, **attributes})

    def forward(self, inp, is_first_microbatch=None, fp8_output=False):
        return functional.linear(inp, self.weight, self.bias if len(self.bias) else None)


def _norm(module, x):
    gain = module.layer_norm_weight + float(module.zero_centered_gamma)
    if module.normalization == "RMSNorm":
        return functional.rms_norm(x, (WIDTH,), gain, module.eps)
    return functional.layer_norm(x, (WIDTH,), gain, module.layer_norm_bias, module.eps)


class _WithNorm(nn.Module):
    def __init__(self, normalization, **attributes):
        super().__init__()
        self.layer_norm_weight = _parameter(WIDTH)
        self.layer_norm_bias = _parameter(WIDTH) if normalization == "LayerNorm" else None
        own = {"normalization": normalization, "eps": 1e-5, "zero_centered_gamma": False, "tp_size": 1}
        self.__dict__.update({**own, "return_layernorm_output": False, "return_bias": False, **attributes})


@_named("LayerNormLinear")
class TELayerNormLinear(_WithNorm):
    def __init__(self, normalization, **attributes):
        super().__init__(normalization, **attributes)
        self.weight, self.bias = _parameter(HIDDEN, WIDTH), _parameter(HIDDEN)

    def forward(self, inp, is_first_microbatch=None):
        return functional.linear(_norm(self, inp), self.weight, self.bias)


@_named("LayerNormMLP")
class TELayerNormMLP(_WithNorm):
    def __init__(self, normalization, activation, **attributes):
        super().__init__(normalization, **attributes)
        self.activation = activation
        rows = 2 * HIDDEN if activation.endswith("glu") else HIDDEN
        self.fc1_weight, self.fc1_bias = _parameter(rows, WIDTH), ABSENT
        self.fc2_weight, self.fc2_bias = _parameter(WIDTH, HIDDEN), _parameter(WIDTH)

    def forward(self, inp, is_first_microbatch=None):
        hidden = functional.linear(_norm(self, inp), self.fc1_weight)
        if self.activation == "swiglu":
            gate, value = hidden.chunk(2, -1)
            hidden = functional.silu(gate) * value
        else:
            hidden = functional.gelu(hidden, approximate="tanh")
        return functional.linear(hidden, self.fc2_weight, self.fc2_bias)


OPS = "transformer_engine.pytorch.ops.basic"


@_named("BasicLinear", OPS)
class OpLinear(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight = _parameter(outputs, inputs)

    def forward(self, x):
        return functional.linear(x, self.weight)


@_named("Bias", OPS)
class OpBias(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.bias = _parameter(size)

    def forward(self, x):
        return x + self.bias


@_named("Linear", "transformer_engine.pytorch.ops.linear")
class OpWholeLinear(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.basic_ops = nn.ModuleList([OpLinear(inputs, outputs), OpBias(outputs)])

    def forward(self, x):
        return self.basic_ops[1](self.basic_ops[0](x))


@_named("RMSNorm", OPS)
class OpRMSNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.eps, self.zero_centered_gamma = _parameter(WIDTH), 1e-5, True

    def forward(self, x):
        return functional.rms_norm(x, (WIDTH,), 1 + self.weight, self.eps)


@_named("SiLU", OPS)
class OpSiLU(nn.SiLU):
    def forward(self, x):
        return functional.silu(x)


@_named("Dropout", OPS)
class OpDropout(nn.Module):
    def forward(self, x):
        return x


@_named("Sequential", "transformer_engine.pytorch.ops.sequential")
class OpSequential(nn.Module):
    def __init__(self, *modules):
        super().__init__()
        for index, module in enumerate(modules):
            self.add_module(str(index), module)

    def forward(self, input, *extra_inputs):
        for module in self._modules.values():
            input = module(input)
        return input


MODULES = {
    "linear": TELinear,
    "linear-no-bias": lambda: TELinear(bias=False),
    "layer-norm-linear": lambda: TELayerNormLinear("LayerNorm"),
    "rms-norm-linear": lambda: TELayerNormLinear("RMSNorm", zero_centered_gamma=True),
    "mlp-swiglu": lambda: TELayerNormMLP("RMSNorm", "swiglu"),
    "mlp-gelu": lambda: TELayerNormMLP("LayerNorm", "gelu"),
    "ops": lambda: OpSequential(OpRMSNorm(), OpWholeLinear(WIDTH, HIDDEN), OpSiLU(), OpLinear(HIDDEN, WIDTH)),
}


@pytest.mark.parametrize("name", MODULES)
def test_modules_compute_the_same(name):
    model = nn.ModuleDict({"part": MODULES[name]()})
    keys, x = list(model.state_dict()), data(4, WIDTH)
    expected = run(model, lambda m: m["part"](x))
    converted = bridge.convert(model)
    assert bridge.conversion_report(converted).counts["left alone"] == 0
    assert list(converted.state_dict()) == keys
    actual = run(converted, lambda m: m["part"](x))
    torch.testing.assert_close(actual.output, expected.output, rtol=1e-5, atol=1e-5)
    for own in expected.grads:
        torch.testing.assert_close(actual.grads[own], expected.grads[own], rtol=1e-4, atol=1e-5)
    low = run(bridge.convert(model, CURRENT), lambda m: m["part"](x))
    assert 15 < snr(expected.output, low.output) < 60


@pytest.mark.parametrize(
    ("module", "why"),
    [
        (TELinear(tp_size=2), "it is sharded over ranks"),
        (TELinear(return_bias=True), "return_bias asks for more than the output"),
        (TELayerNormMLP("RMSNorm", "situ"), "no operation for the activation 'situ'"),
        (OpSequential(OpLinear(WIDTH, WIDTH), OpDropout()), "no rule for 1"),
        (OpLinear(WIDTH, WIDTH), "operations of te.ops are converted with the te.ops.Sequential that they are in"),
    ],
    ids=["sharded", "more", "activation", "operation", "alone"],
)
def test_what_is_left_alone(module, why):
    model = nn.ModuleDict({"part": module})
    converted = bridge.convert(model)
    rows = {row.name: row for row in bridge.conversion_report(converted).rows}
    assert (rows["part"].what, rows["part"].why) == ("left alone", why)
    x = data(4, WIDTH)
    if not isinstance(module, TELayerNormMLP):
        assert torch.equal(converted["part"](x), module(x))


def test_options_of_a_forward():
    converted = bridge.convert(nn.Sequential(TELinear()))[0]
    x = data(4, WIDTH)
    assert torch.equal(converted(x, is_first_microbatch=True), converted(x))
    with pytest.raises(ValueError, match="fp8_output"):
        converted(x, fp8_output=True)


def test_stand_ins_are_told_by_their_package():
    kind = types.new_class("Linear", (nn.Module,))
    model = nn.ModuleDict({"part": kind()})
    assert bridge.conversion_report(bridge.convert(model)).rows == ()
