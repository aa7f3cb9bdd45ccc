"""One float64 formula per op in plain torch, and an interpreter that runs whole chains with them under autograd."""

import math

import torch
from torch import Tensor

import functional_te as fte

_GELU = 0.79788456


def _gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(_GELU * (x + 0.044715 * x**3)))


def _srelu(x: Tensor) -> Tensor:
    return torch.where(x > 0, x, torch.zeros_like(x)) ** 2


def _relu(x: Tensor) -> Tensor:
    return torch.where(x > 0, x, torch.zeros_like(x))


def _logistic(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))


def halves(op: fte.Op, x: Tensor) -> tuple[Tensor, Tensor]:
    """The gate and the linear half, of two halves or of interleaved blocks."""
    size = getattr(op, "glu_interleave_size", None)
    if size is None:
        half = x.shape[-1] // 2
        return x[..., :half], x[..., half:]
    blocks = x.reshape(*x.shape[:-1], x.shape[-1] // (2 * size), 2, size)
    shape = (*x.shape[:-1], x.shape[-1] // 2)
    return blocks[..., 0, :].reshape(shape), blocks[..., 1, :].reshape(shape)


def _gated(op: fte.Op, x: Tensor) -> Tensor:
    a, b = halves(op, x)
    match type(op).__name__.removeprefix("Scaled"):
        case "GLU":
            return _logistic(a) * b
        case "GEGLU":
            return _gelu(a) * b
        case "QGEGLU":
            return a * _logistic(1.702 * a) * b
        case "ReGLU":
            return _relu(a) * b
        case "SReGLU":
            return _srelu(a) * b
        case "SwiGLU":
            return a * _logistic(a) * b
        case "SiTUGLU":
            gate = op.beta1 * torch.tanh(a / op.beta1) * _logistic(a)
            return gate * op.beta2 * torch.tanh(b / op.beta2)
        case "ClampedSwiGLU" | "ClampedQGeGLU":
            gate = torch.where(a <= op.limit, a, torch.full_like(a, op.limit))
            inside = (b >= -op.limit) & (b <= op.limit)
            linear = torch.where(inside, b, op.limit * torch.sign(b).detach()) + op.glu_linear_offset
            return gate * _logistic(op.alpha * gate) * linear
    raise NotImplementedError(type(op).__name__)


_UNARY = {
    "GELU": _gelu,
    "ErfGELU": lambda x: 0.5 * x * torch.erfc(-x / 2**0.5),
    "QGELU": lambda x: x * _logistic(1.702 * x),
    "SiLU": lambda x: x * _logistic(x),
    "ReLU": _relu,
    "SReLU": _srelu,
}


def _unscaled(op: fte.Op, x: Tensor) -> Tensor:
    if isinstance(op, fte.ScaledTanhSReLU):
        return (op.tanh_clamp_scale * torch.tanh(_relu(x) / op.tanh_clamp_scale)) ** 2
    return _srelu(x) if isinstance(op, fte.ScaledSReLU) else _gated(op, x)


def _norm(op: fte.Op, x: Tensor, params: dict[str, Tensor]) -> Tensor:
    dims = tuple(range(-len(op.normalized_shape), 0))
    gain = 1 + params["weight"] if op.zero_centered_gamma else params["weight"]
    if isinstance(op, fte.RMSNorm):
        return gain * x / torch.sqrt((x**2).mean(dims, keepdim=True) + op.eps)
    centered = x - x.mean(dims, keepdim=True)
    return gain * centered / torch.sqrt((centered**2).mean(dims, keepdim=True) + op.eps) + params["bias"]


def _adaptive_norm(op: fte.Op, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    centered = x - x.mean(-1, keepdim=True)
    xhat = centered / torch.sqrt((centered**2).mean(-1, keepdim=True) + op.eps)
    shape = [size if dim in (op.batch_dim, x.dim() - 1) else 1 for dim, size in enumerate(x.shape)]
    return xhat * (1 + scale.reshape(shape)) + shift.reshape(shape)


def _grouped(op: fte.Op, x: Tensor, params: dict[str, Tensor], splits: Tensor, scales: Tensor | None) -> Tensor:
    parts, start = [], 0
    for group, rows in enumerate(splits.tolist()):
        own = x[start : start + int(rows)]
        weight = params["weight"][group] if op.single_weight else params[f"weight{group}"]
        y = (own.unsqueeze(-2) * weight).sum(-1)
        if op.bias:
            bias = params["bias"][group] if op.single_bias else params[f"bias{group}"]
            y = y + (bias if scales is None else scales[start : start + int(rows)].unsqueeze(-1) * bias)
        parts.append(y)
        start += int(rows)
    return torch.cat(parts)


def _dropout(op: fte.Op, x: Tensor) -> Tensor:
    assert op.p == 0, "a mask needs a key"
    return x


def _same(op: fte.Op, x: Tensor, params: dict[str, Tensor], extras: tuple[Tensor, ...]) -> Tensor:
    return x


# from (op, x, params, extra inputs) to the main output
_FORMULAS = {
    # of one rank, and in high precision
    **dict.fromkeys(("Identity", "AllReduce", "AllGather", "ReduceScatter", "Quantize", "MakeExtraOutput"), _same),
    "BasicLinear": lambda op, x, params, extras: (x.unsqueeze(-2) * params["weight"]).sum(-1),
    "Bias": lambda op, x, params, extras: x + params["bias"],
    "ConstantScale": lambda op, x, params, extras: x * op.scale,
    "AddExtraInput": lambda op, x, params, extras: extras[0] + x,
    "Reshape": lambda op, x, params, extras: x.reshape(op.shape),
    "Dropout": lambda op, x, params, extras: _dropout(op, x),
    "GroupedLinear": lambda op, x, params, extras: _grouped(op, x, params, extras[0], *(extras[1:] or (None,))),
    "L2Normalization": lambda op, x, params, extras: x / torch.sqrt((x**2).sum(-1, keepdim=True) + op.eps),
    "AdaptiveLayerNorm": lambda op, x, params, extras: _adaptive_norm(op, x, *extras),
    "RMSNorm": lambda op, x, params, extras: _norm(op, x, params),
    "LayerNorm": lambda op, x, params, extras: _norm(op, x, params),
}


def reference(
    op: fte.Op, x: Tensor, params: dict[str, Tensor], extras: tuple[Tensor, ...] = ()
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Main output and extra outputs of one op."""
    name = type(op).__name__
    if name.startswith("Scaled"):
        return extras[0].reshape(*x.shape[:-1], 1) * _unscaled(op, x), ()
    if name in _UNARY:
        return _UNARY[name](x), ()
    if name in _FORMULAS:
        return _FORMULAS[name](op, x, params, extras), (x,) * op.num_extra_outputs
    return _gated(op, x), ()


def run(
    block: fte.Chain, params: tuple[dict[str, Tensor], ...], x: Tensor, extras: tuple[Tensor, ...] = ()
) -> tuple[Tensor, ...]:
    """Main output and public extra outputs of a chain, routing channels by name."""
    channels: dict[str, Tensor] = {}
    public = iter(extras)
    outputs = []
    for op, own in zip(block.ops, params, strict=True):
        taken = tuple(next(public) if channel is None else channels[channel] for channel in op.extra_input_channels)
        x, made = reference(op, x, own, taken)
        for extra in made:
            if op.channel is not None:
                channels[op.channel] = extra
            if op.output_to_caller:
                outputs.append(extra)
    assert next(public, None) is None
    return (x, *outputs)


def snr(actual: Tensor, expected: Tensor) -> float:
    """Signal to noise ratio in dB."""
    signal, noise = expected.double().square().sum().item(), (actual.double() - expected.double()).square().sum().item()
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal > 0 else -math.inf
