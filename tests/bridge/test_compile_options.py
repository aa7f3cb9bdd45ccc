"""Compiled steps whose kernels are launched from C++."""

from __future__ import annotations

import torch

import bridge
import functional_te as fte


def test_launches_from_cpp_change_no_bit(dynamo):
    chain = fte.chain(fte.RMSNorm(32), fte.Linear(32, 16))
    recipe = fte.recipes.DelayedScaling(amax_history_len=4)

    def steps(**options):
        model = bridge.ops.Sequential(bridge.ops.RMSNorm(32), bridge.ops.Linear(32, 16))
        for own, value in zip(model.parameters(), fte.pytree.leaves(params), strict=True):
            own.data.copy_(value)

        @torch.compile(fullgraph=True, **options)
        def call(x):
            with bridge.autocast(recipe=recipe):
                return model(x)

        found = []
        for scale in (1.0, 3.0):
            x = (values * scale).requires_grad_()
            y = call(x)
            y.square().sum().backward()
            found += [y.detach(), x.grad, *[own.grad.clone() for own in model.parameters()]]
        return [*found, *[own.clone() for own in model.buffers()]]

    params, values = fte.init(chain, seed=0), torch.randn(8, 32, generator=torch.Generator().manual_seed(0))
    want, got = steps(), steps(options=bridge.cpp_wrapper_options())
    assert len(want) > 10
    assert len(want) == len(got)
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))
    assert not dynamo["graph_break"]
