"""Chains that the tests of graphs look at."""

import torch

import functional_te as fte

BF16 = torch.bfloat16


def mlp(hidden: int, inner: int) -> fte.Chain:
    """A feed-forward block with a residual."""
    return fte.chain(
        fte.MakeExtraOutput(channel="residual", output_to_caller=False),
        fte.RMSNorm(hidden),
        fte.Linear(hidden, 2 * inner, bias=False, name="up"),
        fte.SwiGLU(),
        fte.Linear(inner, hidden),
        fte.AddExtraInput(channel="residual"),
    )


def stack(count: int) -> fte.Chain:
    """Four ops again and again."""
    return fte.chain(
        *[
            op
            for _ in range(count)
            for op in (fte.RMSNorm(64), fte.Linear(64, 128, bias=False), fte.SwiGLU(), fte.Bias(64))
        ]
    )


def spec(*shape: int, dtype: torch.dtype = BF16) -> fte.TensorSpec:
    return fte.TensorSpec(shape, dtype)


# every recipe, over shapes that each can cast
RECIPES = {
    "none": None,
    "delayed": fte.recipes.DelayedScaling(amax_history_len=4),
    "current": fte.recipes.Float8CurrentScaling(),
    "block": fte.recipes.Float8BlockScaling(),
    "mxfp8": fte.recipes.MXFP8BlockScaling(),
    "nvfp4": fte.recipes.NVFP4BlockScaling(),
    "high_precision_backward": fte.recipes.Float8CurrentScaling(backward_override="high_precision"),
}
