"""Shared by the tests that go through all recipes: variants of each, a decoder in float64, blocks."""

import math

import torch
from torch import Tensor

import functional_te as fte
from functional_te.quantization import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8DelayedScalingQuantizer,
    HybridQuantizer,
    IdentityQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    QuantizedTensor,
    Quantizer,
    make_key,
)
from functional_te.recipes import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Role,
)

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
CURRENT, MX = Float8CurrentScalingQuantizer(dtype=E4M3), MXFP8Quantizer(dtype=E4M3)
BLOCK_1D = Float8BlockQuantizer(dtype=E5M2, block_scaling_dim=1)
ROTATED = NVFP4Quantizer(with_rht=True)


def mixed(role):
    """Another format for every role: per tensor, blocks of 32, blocks of 128."""
    return {"input": CURRENT, "weight": MX, "grad_output": BLOCK_1D}[role.tensor]


def rotated_gradient(role):
    """Only one operand of the weight gradient is rotated, and padded with tokens."""
    gradient = NVFP4Quantizer(with_rht=True, stochastic_rounding=True)
    return {"input": CURRENT, "weight": BLOCK_1D, "grad_output": gradient}[role.tensor]


def rotated_input(role):
    """The other way around, with blocks of tokens that are partial in one operand and padded in the other."""
    return {"input": ROTATED, "weight": CURRENT, "grad_output": MX}[role.tensor]


def plain_input(role):
    return IdentityQuantizer() if role.tensor == "input" else MX


def plain_weight(role):
    return IdentityQuantizer() if role.tensor == "weight" else ROTATED


def plain_gradient(role):
    return IdentityQuantizer() if role.tensor == "grad_output" else ROTATED


def hybrid(role):
    """Copies of two formats; one of them made from the other."""
    pairs = {
        "input": (MX, BLOCK_1D, "original"),
        "weight": (CURRENT, ROTATED, "original"),
        "grad_output": (MXFP8Quantizer(dtype=E5M2), ROTATED, "rowwise_dequantized"),
    }
    row, column, source = pairs[role.tensor]
    return HybridQuantizer(rowwise_quantizer=row, columnwise_quantizer=column, columnwise_source=source)


def delayed_input(role):
    return Float8DelayedScalingQuantizer(dtype=E4M3, amax_history_len=2) if role.tensor == "input" else MX


# one of each, as users write them
WHOLE = {
    "delayed": DelayedScaling(amax_history_len=4),
    "current": Float8CurrentScaling(),
    "block": Float8BlockScaling(),
    "mxfp8": MXFP8BlockScaling(),
    "nvfp4": NVFP4BlockScaling(),
    "mixed": CustomRecipe(qfactory=mixed),
}
VARIANTS = {
    **WHOLE,
    "delayed e4m3": DelayedScaling(amax_history_len=4, fp8_format=Format.E4M3, margin=1),
    "current pow2": Float8CurrentScaling(use_power_2_scales=True),
    "current e4m3": Float8CurrentScaling(fp8_format=Format.E4M3),
    "block f32": Float8BlockScaling(use_f32_scales=True),
    "block hybrid": Float8BlockScaling(fp8_format=Format.HYBRID),
    "block x 2-D": Float8BlockScaling(x_block_scaling_dim=2, w_block_scaling_dim=1),
    "block grad 2-D": Float8BlockScaling(w_block_scaling_dim=1, grad_block_scaling_dim=2),
    "mxfp8 2-D": MXFP8BlockScaling(enable_2d_quantization=True),
    "mxfp8 hybrid": MXFP8BlockScaling(fp8_format=Format.HYBRID),
    "nvfp4 no rht": NVFP4BlockScaling(disable_rht=True),
    "nvfp4 to nearest": NVFP4BlockScaling(disable_stochastic_rounding=True),
    "nvfp4 1-D": NVFP4BlockScaling(disable_2d_quantization=True),
    "nvfp4 rows": NVFP4BlockScaling(row_scaled_activation=True),
    "nvfp4 4over6 weights": NVFP4BlockScaling(nvfp4_4over6="weights"),
    "nvfp4 4over6 all": NVFP4BlockScaling(nvfp4_4over6="all", disable_rht=True, nvfp4_4over6_err_mode="MSE"),
    "rotated gradient": CustomRecipe(qfactory=rotated_gradient),
    "rotated input": CustomRecipe(qfactory=rotated_input),
    "plain input": CustomRecipe(qfactory=plain_input),
    "plain weight": CustomRecipe(qfactory=plain_weight),
    "plain gradient": CustomRecipe(qfactory=plain_gradient),
    "hybrid": CustomRecipe(qfactory=hybrid),
    "delayed input": CustomRecipe(qfactory=delayed_input),
}
# one quantizer for every way of casting, making both copies
QUANTIZERS = {
    "current": CURRENT,
    "delayed": Float8DelayedScalingQuantizer(dtype=E4M3, amax_history_len=2),
    "block": Float8BlockQuantizer(dtype=E4M3, block_scaling_dim=1),
    "block 2-D": Float8BlockQuantizer(dtype=E4M3),
    "mxfp8": MX,
    "mxfp8 2-D": MXFP8Quantizer(dtype=E4M3, with_2d_quantization=True),
    "nvfp4": NVFP4Quantizer(),
    "nvfp4 rotated": NVFP4Quantizer(with_rht=True),
    "nvfp4 random": NVFP4Quantizer(with_rht=True, stochastic_rounding=True),
    "nvfp4 2-D": NVFP4Quantizer(with_2d_quantization=True),
    "nvfp4 rows": NVFP4Quantizer(row_scaled=True),
    "nvfp4 4over6": NVFP4Quantizer(four_over_six="MAE"),
    "hybrid": HybridQuantizer(rowwise_quantizer=MX, columnwise_quantizer=NVFP4Quantizer(with_rht=True)),
}
QUANTIZERS = {name: quantizer.with_usage(True, True) for name, quantizer in QUANTIZERS.items()}
OVERRIDES = ("high_precision", "dequantized")


def with_state(block, recipe, params, x, dy, *, seed=0):
    """State after one step, so that no scale is 1 and no key the first one."""
    state = fte.init_state(block, recipe, seed=seed)
    _, pullback = fte.vjp(block, params, x, recipe=recipe, state=state)
    return fte.update_state(block, recipe, pullback(dy).state)


def quantizer_of(recipe, tensor: str, both: bool = True):
    """A linear's quantizer, making both copies; None for a role in high precision."""
    quantizer = recipe.quantizer(Role("BasicLinear", tensor))
    if not isinstance(quantizer, Quantizer):
        return None
    return quantizer.with_usage(True, True) if both else quantizer


def quantized(x: Tensor, quantizer, state=None) -> QuantizedTensor:
    """``fte.quantize`` without the new state."""
    if not quantizer.stateful:
        return fte.quantize(x, quantizer)
    return fte.quantize(x, quantizer, a_state(quantizer) if state is None else state)[0]


def a_state(quantizer):
    """Some state of a quantizer with state."""
    if quantizer.stochastic:
        return fte.StochasticRoundingState(key=make_key(5, 1), amax_history=torch.zeros(1))
    return fte.DelayedScalingState(scale=torch.tensor([3.5]), amax_history=torch.zeros(quantizer.amax_history_len))


# ---- decoding, in float64 and by the definitions of the formats -------------------------------------------------

_E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)
_SIGNS = torch.tensor([1.0 if sign == "+" else -1.0 for sign in "+++-+------+-+--"], dtype=torch.float64)


def rotation() -> Tensor:
    """The matrix that 16 tokens (a row vector) are multiplied with: signs, then Sylvester's Hadamard matrix over 4."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    for _ in range(4):
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return _SIGNS[:, None] * matrix / 4


def _per_element(scale: Tensor, tile: tuple[int, int], shape: tuple[int, int]) -> Tensor:
    rows, cols = torch.arange(shape[0]) // tile[0], torch.arange(shape[1]) // tile[1]
    return scale[rows][:, cols]


def decode64(copy, quantizer: Quantizer, columnwise: bool) -> Tensor:
    """Float64 values of a copy in its own layout, a matrix; transformed values stay transformed."""
    data = copy.data if copy.data.dim() else copy.data[None]
    data = data.reshape(math.prod(data.shape[:-1]), data.shape[-1])
    kind = type(quantizer).__name__
    if kind.startswith("Float8") and quantizer.tile is None:
        return data.double() * copy.scale_inv.double()
    if kind == "Float8BlockQuantizer":
        tile = (1, 128) if quantizer.block_scaling_dim == 1 else (128, 128)
        return data.double() * _per_element(copy.scale_inv.double(), tile, data.shape)
    if kind == "MXFP8Quantizer":
        tile = (32, 32) if quantizer.with_2d_quantization else (1, 32)
        powers = torch.pow(2.0, copy.scale_inv.double() - 127)
        powers[copy.scale_inv == 255] = math.nan
        return data.double() * _per_element(powers, tile, data.shape)
    assert kind == "NVFP4Quantizer"
    codes = torch.stack((data & 15, data >> 4), -1).reshape(data.shape[0], 2 * data.shape[1])
    tile = (16, 16) if quantizer.with_2d_quantization else (1, 16)
    scale = _per_element(copy.scale_inv.float().double(), tile, codes.shape)
    amax = copy.amax.double()
    amax = amax[:, None] if quantizer.row_scaled and not columnwise else amax
    return _E2M1[codes.long()] * scale * amax / (6 * quantizer.e4m3_max)


def values64(q: QuantizedTensor, columnwise: bool) -> Tensor:
    """What a copy says of the tensor: float64 ``[M, K]``, a transformed copy transformed back.

    A copy that is not there is read from the other one if that is its transpose.
    """
    own = q.copy(columnwise)
    quantizer = q.quantizer.of(columnwise)
    if own is None:
        assert quantizer.transposable
        return values64(q, not columnwise)
    values = decode64(own, quantizer, columnwise)
    if not columnwise:
        return values
    if quantizer.rotates:
        features, tokens = values.shape
        values = (values.reshape(features, tokens // 16, 16) @ rotation().T).reshape(features, tokens)
    return values.t()


# ---- blocks ----------------------------------------------------------------------------------------------------


def feed_forward(size: int = 32, hidden: int = 64) -> fte.Chain:
    """A feed-forward block with a residual branch: norm and activation cast for their neighbours."""
    return fte.chain(
        fte.MakeExtraOutput(channel="residual", output_to_caller=False),
        fte.RMSNorm(size),
        fte.Linear(size, 2 * hidden, bias=False),
        fte.SwiGLU(),
        fte.Linear(hidden, size, bias=False),
        fte.AddExtraInput(channel="residual"),
    )


def with_biases(size: int = 32, hidden: int = 64) -> fte.Chain:
    """The older kind of block."""
    return fte.chain(fte.LayerNorm(size), fte.Linear(size, hidden), fte.GELU(), fte.Linear(hidden, size))
