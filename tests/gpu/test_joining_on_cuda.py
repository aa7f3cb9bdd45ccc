"""Projections that run as one, compiled: the kernel joins their weights and the gradients of their parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bridge import joining

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch.*")

SIZES = (256, 64, 72)


def attend(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
    q, k, v = joining.split(x @ joining.join(weights, 0).t(), SIZES)
    heads = (q * 2).unflatten(-1, (4, 64)).transpose(-3, -2)
    return torch.cat([heads.flatten(), (k * 3).flatten(), v.flatten()])


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_the_kernel_changes_no_bit(mode: str | None, dynamic: bool, device: torch.device, dynamo: Any) -> None:
    if mode is not None and dynamic:
        pytest.skip("CUDA graphs are made for every size anew")
    fast = torch.compile(attend, fullgraph=True, mode=mode, dynamic=dynamic)
    for lead in ((2, 40), (2, 40), (3, 56)):
        torch.manual_seed(0)
        own: list[torch.Tensor] = [
            torch.randn(size, device=device).bfloat16().requires_grad_()
            for size in ((*lead, 128), *((size, 128) for size in SIZES))
        ]
        want = attend(*own)
        grad = torch.randn_like(want)
        want_grads = torch.autograd.grad(want, own, grad)
        torch.compiler.cudagraph_mark_step_begin()
        got = fast(*own)
        assert torch.equal(got, want)
        for found, wanted in zip(torch.autograd.grad(got, own, grad), want_grads, strict=True):
            assert torch.equal(found, wanted)


def test_it_is_launched(device: torch.device, dynamo: Any) -> None:
    fast = torch.compile(attend, fullgraph=True)
    own = [torch.randn(size, 128, device=device, dtype=torch.bfloat16, requires_grad=True) for size in (80, *SIZES)]
    fast(*own).sum().backward()  # compiles
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiled:
        fast(*own).sum().backward()
        torch.cuda.synchronize()
    names = [event.name for event in profiled.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert sum(name.startswith("_concatenate_kernel") for name in names) == 2, names
