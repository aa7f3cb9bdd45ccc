"""What the device can do at most, measured in the same run, and the floor of a block that follows."""

from __future__ import annotations

from typing import Any

import torch

from tests.benchmarks.gpu.blocks import Llama, Mlp
from tests.benchmarks.gpu.measure import kernel_ms


def ceilings(device: str) -> dict[str, Any]:
    """TFLOP/s of 8192 cubed matrix products, TB/s (read and written) of a copy of 1 GiB; None with why it failed."""
    size = 8192 if device == "cuda" else 128
    found: dict[str, Any] = {}
    a, b = torch.randn(2, size, size, device=device, dtype=torch.bfloat16).unbind(0)

    def low(fast: bool) -> torch.Tensor:
        return torch._scaled_mm(a8, b8.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=fast)

    one = torch.ones((), device=device)
    a8, b8 = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
    runs = {"fp8_fast": lambda: low(True), "fp8": lambda: low(False), "bf16": lambda: a @ b.t()}
    for name, run in runs.items():
        try:
            found[f"{name}_tflops"] = 2 * size**3 / kernel_ms(run, device) / 1e9
        except Exception as error:
            found[f"{name}_tflops"], found[f"{name}_error"] = None, f"{type(error).__name__}: {error}"[:300]
    source = torch.empty(1 << (29 if device == "cuda" else 12), device=device, dtype=torch.bfloat16)
    target = torch.empty_like(source)
    found["copy_tb_s"] = 2 * source.nbytes / kernel_ms(lambda: target.copy_(source), device, captured=False) / 1e9
    return found


def floor_ms(shape: Mlp | Llama, ceiling: dict[str, Any]) -> float | None:
    """The least time of forward and backward of MLP blocks in FP8; None for other models.

    The products run at the measured FP8 rate (fast accumulation, 8192 cubed) and, one after the other with them, every
    byte that the rest has to move once runs at the measured copy bandwidth (read + written). Of t tokens, width h, f
    features after the gate, BF16 tensors and FP8 copies, per block:

    * FLOPs: three products per linear, ``3 * 2t * (h * 2f + f * h) = 18 t h f``
    * RMSNorm with both copies: ``2th`` read, ``2th`` written
    * both copies of the weights: ``3hf`` elements, ``2 * 3hf`` read, ``2 * 3hf`` written
    * SwiGLU with both copies: ``4tf`` read, ``2tf`` written; residual sum ``2th`` read
    * both copies of the output's gradient: ``2th`` read, ``2th`` written
    * gradient of SwiGLU with both copies: ``2tf + 4tf`` read, ``4tf`` written
    * gradient of RMSNorm with the residual's: ``3 * 2th`` read, ``2th`` written

    together ``18 th + 12 hf + 16 tf`` bytes. What the products read and write is in their rate.
    """
    if not isinstance(shape, Mlp) or not ceiling.get("fp8_fast_tflops"):
        return None
    t, h, f = shape.tokens, shape.width, shape.hidden
    products = 18 * t * h * f / ceiling["fp8_fast_tflops"] / 1e9
    moved = (18 * t * h + 12 * h * f + 16 * t * f) / ceiling["copy_tb_s"] / 1e9
    return shape.layers * (products + moved)
