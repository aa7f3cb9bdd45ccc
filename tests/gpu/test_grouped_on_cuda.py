"""GroupedLinear with sizes on the GPU: no synchronization, the CPU's results, CUDA graphs, compiled."""

import contextlib
import copy

import pytest
import torch

import bridge
import functional_te as fte
from tests.every_recipe import WHOLE
from tests.oracles import snr

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch.*")

RECIPES = {"none": None, **WHOLE}
BLOCK = fte.GroupedLinear(4, 128, 256, scale_bias=True)
SPLITS = ((40, 0, 88, 64), (0, 0, 192, 0), (64, 64, 64, 0), (1, 2, 3, 186))
ROWS = 192


@contextlib.contextmanager
def no_synchronization():
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _arguments(dtype, device):
    generator = torch.Generator().manual_seed(2)
    params = fte.init(BLOCK, seed=3, dtype=dtype)
    for own in params[0].values():
        own.add_((torch.rand(own.shape, generator=generator) / 8).to(dtype))
    x, dy = torch.randn(ROWS, 128, generator=generator), torch.randn(ROWS, 256, generator=generator)
    scales = torch.rand(ROWS, generator=generator)
    tree = (params, x.to(dtype), scales.to(dtype), dy.to(dtype))
    return fte.tree_map(lambda t: t.to(device), tree)


def _step(recipe, splits, dtype, device, sync_free=False):
    params, x, scales, dy = _arguments(dtype, device)
    state = fte.init_state(BLOCK, recipe, device=device)
    sizes = torch.tensor(splits, device=device)
    fte.plan(BLOCK, recipe=recipe)
    with no_synchronization() if sync_free else contextlib.nullcontext():
        out, pullback = fte.vjp(BLOCK, params, x, sizes, scales, state=state, recipe=recipe)
        grads = pullback(dy)
    return [out.output, grads.input, grads.extra_inputs[1], *grads.params[0].values()]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "f32"])
def test_no_synchronization_and_the_results_of_the_cpu(recipe, dtype) -> None:
    for splits in SPLITS:
        _step(RECIPES[recipe], splits, dtype, "cuda")  # libraries are loaded
        found = _step(RECIPES[recipe], splits, dtype, "cuda", sync_free=True)
        wanted = _step(RECIPES[recipe], splits, dtype, "cpu")
        for place, (one, other) in enumerate(zip(found, wanted, strict=True)):
            if other.abs().max() == 0:
                assert one.abs().max() == 0, place
            else:
                # stochastic rounding sees amaxes that differ in the last bit
                assert snr(one.cpu(), other) > (8 if recipe == "nvfp4" else 35), (place, splits)


@pytest.mark.parametrize("recipe", RECIPES)
def test_cuda_graph(recipe) -> None:
    """Captured once, replayed with other sizes."""
    own = RECIPES[recipe]
    params, x, scales, dy = _arguments(torch.bfloat16, "cuda")
    state = fte.init_state(BLOCK, own, device="cuda")
    sizes = torch.tensor(SPLITS[0], device="cuda")

    def step():
        out, pullback = fte.vjp(BLOCK, params, x, sizes, scales, state=state, recipe=own)
        grads = pullback(dy)
        return [out.output, grads.input, *grads.params[0].values()]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for splits in SPLITS:
        sizes.copy_(torch.tensor(splits))
        graph.replay()
        wanted = step()
        for one, other in zip(captured, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
@pytest.mark.parametrize("recipe", ["none", "delayed", "block"])
def test_compiled(recipe, mode) -> None:
    """One graph for every split; modules with state."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    options = {"device": "cuda", "dtype": torch.bfloat16}
    model = bridge.ops.Sequential(
        bridge.ops.RMSNorm(128, **options),
        bridge.ops.GroupedLinear(4, 128, 256, **options),
        bridge.ops.ScaledSwiGLU(),
        bridge.ops.GroupedLinear(4, 128, 128, **options),
    )
    other_model = copy.deepcopy(model)
    compiled = torch.compile(other_model, fullgraph=True, mode=mode)
    x = torch.randn(ROWS, 128, **options)
    scales = torch.rand(ROWS, **options)
    for splits in SPLITS * 2:
        sizes = torch.tensor(splits, device="cuda")
        results = []
        for run, owner in ((compiled, other_model), (model, model)):
            owner.zero_grad(set_to_none=True)
            with bridge.autocast(enabled=recipe != "none", recipe=RECIPES[recipe]):
                y = run(x, sizes, scales, sizes)
            y.float().square().mean().backward()
            results.append([y.detach().clone(), *[own.grad.clone() for own in owner.parameters()]])
        for one, other in zip(*results, strict=True):
            if other.abs().max() > 0:
                assert snr(one, other) > 20
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
