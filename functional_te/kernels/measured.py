"""What kernel backends took where they were measured: the rule behind ``backend="auto"``.

One training step of an MLP block (RMSNorm, Linear, SwiGLU, Linear, residual sum; 2048 tokens, 2048 features, 5632
behind the gate, BF16), captured in a CUDA graph, where only kernels count. ``python -m tests.benchmarks.gpu.backends``
measures it again.
"""

from __future__ import annotations

from types import MappingProxyType

__all__ = ["MEASURED", "MEASURED_ON", "fastest_first"]

MEASURED_ON = "one H200, PyTorch 2.11, Triton 3.6, Transformer Engine 2.20.2"
# milliseconds by recipe and backend
MEASURED = MappingProxyType(
    {
        "high precision": MappingProxyType({"triton": 0.646, "te": 0.645, "reference": 1.299}),
        "DelayedScaling": MappingProxyType({"triton": 0.491, "te": 0.526, "reference": 11.079}),
        "Float8CurrentScaling": MappingProxyType({"triton": 0.565, "te": 0.582, "reference": 11.335}),
        "Float8BlockScaling": MappingProxyType({"triton": 0.692, "te": 0.644, "reference": 13.140}),
    }
)


def fastest_first() -> tuple[str, ...]:
    """The backends by their time over all recipes: one backend runs all, so that graphs do not mix kernels."""
    names = next(iter(MEASURED.values()))
    return tuple(sorted(names, key=lambda name: sum(times[name] for times in MEASURED.values())))
