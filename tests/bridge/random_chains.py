"""Random chains of the library's ops that fit together, with arguments for them."""

import random

import functional_te as fte

from .compiled import leaf, leaves_of

UNARY = (fte.GELU, fte.QGELU, fte.SiLU, fte.ReLU, fte.SReLU)
GATED = (fte.GLU, fte.GEGLU, fte.QGEGLU, fte.ReGLU, fte.SReGLU, fte.SwiGLU, fte.SiTUGLU, fte.ClampedSwiGLU)
SIZES = (16, 32, 48)


def _next_op(rng, size, open_channels, place):
    """One op that takes ``[..., size]``, and the size of its output."""
    kinds = ["linear", "linear", "bias", "norm", "unary", "scale", "identity", "fork", "extra", "reshape"]
    if size % 32 == 0:
        kinds += ["gated", "gated"]
    if size in open_channels:
        kinds += ["join", "join"]
    kind = rng.choice(kinds)
    if kind == "linear":
        out = rng.choice(SIZES)
        return fte.BasicLinear(size, out), out
    if kind == "gated":
        return rng.choice(GATED)(cache_quantized_input=rng.random() < 0.3), size // 2
    if kind == "fork":
        channel = f"branch{place}" if rng.random() < 0.7 else None
        to_caller = channel is None or rng.random() < 0.5
        if channel is not None:
            open_channels.setdefault(size, []).append(channel)
        return fte.MakeExtraOutput(channel=channel, output_to_caller=to_caller), size
    simple = {
        "bias": lambda: fte.Bias(size),
        "norm": lambda: rng.choice((fte.RMSNorm, fte.LayerNorm))(size, zero_centered_gamma=rng.random() < 0.5),
        "unary": lambda: rng.choice(UNARY)(),
        "scale": lambda: fte.ConstantScale(rng.choice((1.0, 0.5, -1.25))),
        "identity": fte.Identity,
        "extra": fte.AddExtraInput,
        "reshape": lambda: fte.Reshape((-1, size)),
        "join": lambda: fte.AddExtraInput(channel=rng.choice(open_channels[size])),
    }
    return simple[kind](), size


def random_chain(length, seed):
    """A chain of ``length`` basic ops on ``[8, size]``; equal arguments give an equal chain.

    Returns:
        The chain and its input size.
    """
    rng = random.Random(f"{length}/{seed}")
    first = size = rng.choice(SIZES)
    ops, open_channels = [], {}
    for place in range(length):
        op, size = _next_op(rng, size, open_channels, place)
        ops.append(op)
    return fte.chain(*ops), first


def arguments(block, size, seed=0, rows=8):
    """Main input, parameters and extra inputs, all leaves."""
    x = leaf(rows, size, seed=seed)
    extras, flow = [], size
    for op in block.ops:
        if isinstance(op, fte.AddExtraInput) and op.channel is None:
            extras.append(leaf(rows, flow, seed=seed + 50 + len(extras)))
        if isinstance(op, fte.BasicLinear):
            flow = op.out_features
        elif getattr(op, "gated", False):
            flow //= 2
    return x, leaves_of(block, seed=seed), extras
