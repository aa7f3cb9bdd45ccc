"""The block that the benchmarks measure, in torch.nn and as a chain: RMSNorm, Linear, SwiGLU, Linear, residual."""

from __future__ import annotations

from typing import Any

import torch

import bridge
import functional_te as fte


class TorchBlock(torch.nn.Module):
    """The block in plain torch.nn."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = torch.nn.RMSNorm(width, eps=1e-5)
        self.up = torch.nn.Linear(width, 4 * width, bias=False)
        self.down = torch.nn.Linear(2 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.up(self.norm(x)).chunk(2, -1)
        return self.down(torch.nn.functional.silu(gate) * up) + x


def chain(width: int) -> fte.Chain:
    """The block as a chain."""
    return fte.chain(
        fte.MakeExtraOutput(channel="residual", output_to_caller=False),
        fte.RMSNorm(width),
        fte.Linear(width, 4 * width, bias=False),
        fte.SwiGLU(),
        fte.Linear(2 * width, width, bias=False),
        fte.AddExtraInput(channel="residual"),
    )


def chain_params(reference: TorchBlock) -> Any:
    """The parameters of ``reference`` in the structure of the chain; the very same tensors."""
    return (
        {},
        {"weight": reference.norm.weight},
        {"weight": reference.up.weight},
        {},
        {"weight": reference.down.weight},
        {},
    )


def module(width: int) -> bridge.ops.Sequential:
    """The block as modules."""
    ops = bridge.ops
    return ops.Sequential(
        ops.MakeExtraOutput().set_extra_output_channel(0, "residual", output_to_caller=False),
        ops.RMSNorm(width, device="cpu"),
        ops.Linear(width, 4 * width, bias=False, device="cpu"),
        ops.SwiGLU(),
        ops.Linear(2 * width, width, bias=False, device="cpu"),
        ops.AddExtraInput().set_extra_input_channel(0, "residual"),
    )
