"""The Triton backend on a GPU: chains against the reference in every recipe; eager, compiled and in CUDA graphs."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import bridge
import functional_te as fte
from bridge import replay

# Inductor warns that float32 products could run in TF32
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch.*")

R = fte.recipes
RECIPES: dict[str, Any] = {
    "none": None,
    "current": R.Float8CurrentScaling(),
    "delayed": R.DelayedScaling(amax_history_len=4),
    "block": R.Float8BlockScaling(),
    "mxfp8": R.MXFP8BlockScaling(),
    "nvfp4": R.NVFP4BlockScaling(disable_stochastic_rounding=True),
}
every_recipe = pytest.mark.parametrize("recipe", RECIPES)
# relative difference of two backends. Products are summed in another order and rounded to bfloat16, after which a cast
# may fall to the other side: one step of its format.
TOLERANCE = {"none": 0.01, "current": 0.06, "delayed": 0.06, "block": 0.06, "mxfp8": 0.06, "nvfp4": 0.3}
DTYPE = torch.bfloat16


def mlp(width: int, hidden: int, norm: Any = fte.RMSNorm, bias: bool = False, gated: bool = True) -> fte.Chain:
    """Norm, linear, activation, linear, residual."""
    return fte.chain(
        fte.MakeExtraOutput(channel="residual", output_to_caller=False),
        norm(width),
        fte.Linear(width, 2 * hidden if gated else hidden, bias=bias),
        fte.SwiGLU() if gated else fte.GELU(),
        fte.Linear(hidden, width, bias=bias),
        fte.AddExtraInput(channel="residual"),
    )


CHAINS: dict[str, fte.Chain] = {
    "swiglu": mlp(256, 384),
    "bias": mlp(128, 256, fte.LayerNorm, bias=True, gated=False),
    "ragged": mlp(96, 160, bias=True),
}


def tokens_of(chain: str) -> tuple[int, ...]:
    """The leading shape of a chain's input."""
    return {"swiglu": (2, 128), "bias": (192,), "ragged": (3, 32)}[chain]


def width_of(chain: fte.Chain) -> int:
    return chain.ops[1].normalized_shape[0]  # type: ignore[attr-defined, no-any-return]


def relative(got: Tensor, want: Tensor) -> float:
    """Norm of the difference over the norm: a few casts that fall to the other side count as few."""
    return (torch.linalg.norm(got.float() - want.float()) / torch.linalg.norm(want.float()).clamp(min=1e-12)).item()


def training(chain: fte.Chain, recipe: Any, backends: tuple[str, ...], shape: tuple[int, ...], steps: int) -> Any:
    """For every step and backend its output, its gradients and its state after the step.

    All backends see the parameters that the first one trains: two runs on their own drift apart.
    """
    params = fte.init(chain, seed=1, dtype=DTYPE, device="cuda")
    states = dict.fromkeys(backends, fte.init_state(chain, recipe, device="cuda", seed=3))
    generator = torch.Generator("cuda").manual_seed(0)
    history = []
    for _ in range(steps):
        x = torch.randn(shape, dtype=DTYPE, device="cuda", generator=generator)
        dy = torch.randn(shape, dtype=DTYPE, device="cuda", generator=generator)
        found, step = {}, []
        for backend in backends:
            out, pullback = fte.vjp(chain, params, x, state=states[backend], recipe=recipe, backend=backend)
            found[backend] = pullback(dy)
            states[backend] = fte.update_state(chain, recipe, found[backend].state)
            grads = fte.pytree.leaves((found[backend].params, found[backend].input))
            step.append((out.output, grads, fte.pytree.leaves(states[backend])))
        params = fte.pytree.tree_map(lambda p, g: p - 1e-3 * g, params, found[backends[0]].params)
        history.append(step)
    return history


@every_recipe
@pytest.mark.parametrize("chain", CHAINS)
def test_the_reference_gives_the_same_over_20_steps(chain: str, recipe: str, record_property: Any) -> None:
    if recipe in ("mxfp8", "nvfp4") and chain != "swiglu":
        pytest.skip("no kernels of its own: one chain is enough")
    block, shape = CHAINS[chain], (*tokens_of(chain), width_of(CHAINS[chain]))
    worst = 0.0
    for (want, want_grads, want_state), (got, grads, state) in training(
        block, RECIPES[recipe], ("reference", "triton"), shape, 20
    ):
        pairs = zip((got, *grads), (want, *want_grads), strict=True)
        worst = max([worst, *(relative(mine, theirs) for mine, theirs in pairs)])
        for mine, theirs in zip(state, want_state, strict=True):
            if mine.dtype is torch.float32:
                torch.testing.assert_close(mine, theirs, rtol=0.13, atol=0)
    record_property("worst relative difference", round(worst, 4))
    assert worst < TOLERANCE[recipe]


@every_recipe
def test_two_runs_give_the_same_bits(recipe: str) -> None:
    shape = (*tokens_of("ragged"), width_of(CHAINS["ragged"]))
    if recipe in ("mxfp8", "nvfp4"):
        shape = (*tokens_of("swiglu"), width_of(CHAINS["swiglu"]))
    block = CHAINS["swiglu" if recipe in ("mxfp8", "nvfp4") else "ragged"]
    one, other = (training(block, RECIPES[recipe], ("triton",), shape, steps=3) for _ in range(2))
    for a, b in zip(fte.pytree.leaves(one), fte.pytree.leaves(other), strict=True):
        assert torch.equal(a, b)


# ---------------------------------------------------------------------------- modules


def module(width: int = 256, hidden: int = 384, bias: bool = False) -> torch.nn.Module:
    ops = bridge.ops
    torch.manual_seed(0)
    options = {"bias": bias, "device": "cuda", "dtype": DTYPE}
    return ops.Sequential(
        ops.MakeExtraOutput().set_extra_output_channel(0, "residual", output_to_caller=False),
        ops.RMSNorm(width, device="cuda", dtype=DTYPE),
        ops.Linear(width, 2 * hidden, **options),
        ops.SwiGLU(),
        ops.Linear(hidden, width, **options),
        ops.AddExtraInput().set_extra_input_channel(0, "residual"),
    )


def buffers(model: torch.nn.Module) -> list[Tensor]:
    return [buffer.clone() for _, buffer in sorted(model.named_buffers())]


def step(model: Any, call: Any, recipe: Any, x: Tensor) -> tuple[Tensor, list[Tensor]]:
    """One training step without an optimizer; the output and the gradients."""
    for parameter in model.parameters():
        parameter.grad = None
    own = x.clone().requires_grad_()
    with bridge.autocast(enabled=recipe is not None, recipe=recipe):
        y = call(own)
    (y.float() ** 2).mean().backward()
    return y.detach().clone(), [own.grad.clone(), *(p.grad.clone() for p in model.parameters())]


def inputs(count: int, shape: tuple[int, ...] = (64, 256)) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(5)
    return [torch.randn(shape, dtype=DTYPE, device="cuda", generator=generator) * 0.5 * (i + 1) for i in range(count)]


def runs(recipe: str, mode: str | None, count: int = 6, bias: bool = False) -> Any:
    """Outputs, gradients and buffers after every step."""
    model = module(bias=bias)
    how: dict[str, Any] = {"mode": None if mode == "default" else mode}
    if mode == "cpp wrapper":
        how = {"options": bridge.cpp_wrapper_options()}
    call = model if mode is None else torch.compile(model, fullgraph=True, **how)
    found = []
    for x in inputs(count):
        if mode == "reduce-overhead":
            torch.compiler.cudagraph_mark_step_begin()
        found.append((*step(model, call, RECIPES[recipe], x), buffers(model)))
    return found


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@every_recipe
def test_compiled_steps_are_those_of_eager_ones(recipe: str, mode: str, dynamo: Any) -> None:
    want, got = runs(recipe, None), runs(recipe, mode)
    for (y, grads, state), (y2, grads2, state2) in zip(want, got, strict=True):
        assert relative(y2, y) < 0.02
        assert max(relative(b, a) for a, b in zip(grads, grads2, strict=True)) < TOLERANCE[recipe]
        for a, b in zip(state, state2, strict=True):
            torch.testing.assert_close(b, a, rtol=0.02, atol=0)
    assert dynamo["stats"]["unique_graphs"] == 1
    assert not dynamo["graph_break"]


@pytest.mark.timeout(180)  # a C++ compiler runs twice
def test_launches_from_cpp_change_no_bit(dynamo: Any) -> None:
    want, got = (fte.pytree.leaves(runs("delayed", mode, count=3)) for mode in ("default", "cpp wrapper"))
    assert len(got) == len(want)
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))


def test_a_compiled_forward_launches_what_it_needs() -> None:
    model, recipe = module(), RECIPES["delayed"]

    @torch.compile(fullgraph=True)
    def call(x: Tensor) -> Tensor:
        with bridge.autocast(recipe=recipe):
            return model(x)

    x, dy = inputs(1)[0].requires_grad_(), inputs(2)[1]
    for _ in range(3):
        call(x).backward(dy)
    y = None

    def forward() -> None:
        nonlocal y
        y = call(x)

    names = launched(forward)
    # one that closes steps, copies scales and makes the zeros that casts observe into; one that folds what they did
    assert len([name for name in names if "_close_kernel" in name]) == 2
    assert len([name for name in names if name.startswith("triton_")]) == 1  # the residual sum
    assert len(names) == 3 + 4 + 2, names  # the norm, the activation, two casts of weights; two products
    x.grad = None
    for parameter in model.parameters():
        parameter.grad = None
    names = launched(lambda: y.backward(dy))
    # casts observe into the histories, and one kernel closes their steps
    assert len([name for name in names if "_close_kernel" in name]) == 1
    assert not [name for name in names if name.startswith("triton_")]
    # the cast of the gradient, the activation's and the norm's gradient, and the sum of its partial sums; four products
    assert len(names) == 1 + 4 + 4, names


def launched(run: Any) -> list[str]:
    """The names of the kernels that a call launches."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiled:
        run()
        torch.cuda.synchronize()
    events = [event for event in profiled.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    return [event.name for event in events if not event.name.startswith("Mem")]


def test_compiled_code_launches_kernels_through_pytorchs_launcher(dynamo: Any) -> None:
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner
    from torch._inductor.utils import fresh_cache

    gc.collect()
    # by type(): some of the objects warn when they are asked for their class
    before = {id(own) for own in gc.get_objects() if type(own) is CachingAutotuner}
    with fresh_cache():  # what earlier tests compiled would be taken from there
        runs("delayed", "default", count=2)
        made = [own for own in gc.get_objects() if type(own) is CachingAutotuner and id(own) not in before]
    launchers = {own.fn.__name__: launcher for own in made for launcher in own.launchers}
    assert {"_cast_kernel", "_rows_kernel", "_close_kernel"} <= launchers.keys()
    assert [name for name, launcher in launchers.items() if not getattr(launcher, "_is_static", False)] == []


@pytest.mark.parametrize("recipe", ["none", "current", "delayed", "block"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_no_step_waits_for_the_gpu(recipe: str, compiled: bool) -> None:
    model = module(bias=True)
    call = torch.compile(model, fullgraph=True) if compiled else model
    x = inputs(1)[0]
    for _ in range(3):
        step(model, call, RECIPES[recipe], x)
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        step(model, call, RECIPES[recipe], x)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(("recipe", "warmups"), [*((recipe, 3) for recipe in RECIPES), ("delayed", 2), ("current", 2)])
def test_a_captured_step_replays_as_eager_ones_run(recipe: str, warmups: int, monkeypatch: Any) -> None:
    """Forward, backward and the state of quantizers in one CUDA graph; also where the captured call is recorded."""
    monkeypatch.setattr(replay, "_known", {})
    model = module()
    xs = inputs(8)
    static = xs[0].clone()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for x in xs[:warmups]:
            static.copy_(x)
            step(model, model, RECIPES[recipe], static)
        graph = torch.cuda.CUDAGraph()
        static.copy_(xs[warmups])
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph, stream=stream):
        y, grads = step(model, model, RECIPES[recipe], static)
    found = []
    for x in xs[warmups:]:
        static.copy_(x)
        graph.replay()
        found.append([y.clone(), *(grad.clone() for grad in grads), *buffers(model)])
    # a context closes the steps of all modules that are alive, so the twin runs when the model is done
    twin = module()
    for x in xs[:warmups]:
        step(twin, twin, RECIPES[recipe], x)
    for x, got in zip(xs[warmups:], found, strict=True):
        want, want_grads = step(twin, twin, RECIPES[recipe], x)
        for a, b in zip(got, [want, *want_grads, *buffers(twin)], strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("recipe", ["none", "current", "delayed"])
def test_make_graphed_callables(recipe: str) -> None:
    model, twin = module(), module()
    x = inputs(1)[0]
    with bridge.autocast(enabled=RECIPES[recipe] is not None, recipe=RECIPES[recipe]):
        graphed = torch.cuda.make_graphed_callables(model, (x.clone().requires_grad_(),))
    if recipe == "delayed":  # what the warm-up observed
        for mine, theirs in zip(model.buffers(), twin.buffers(), strict=False):
            theirs.copy_(mine)
    y, grads = step(model, graphed, None, x)
    want, want_grads = step(twin, twin, RECIPES[recipe], x)
    assert relative(y, want) < 0.07
    assert max(relative(a, b) for a, b in zip(grads, want_grads, strict=True)) < 0.07


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("recipe", ["current", "delayed"])
def test_recomputed_forwards_change_nothing(recipe: str, compiled: bool) -> None:
    """Activation checkpointing: outputs, gradients and state are those of steps without it."""
    found = []
    for recomputes in (False, True):
        model = module()

        def run(x: Tensor, model: Any = model, recomputes: bool = recomputes) -> Tensor:
            return checkpoint(model, x, use_reentrant=False) if recomputes else model(x)

        call = torch.compile(run, fullgraph=True) if compiled else run
        steps = []
        for x in inputs(4):
            for parameter in model.parameters():
                parameter.grad = None
            own = x.clone().requires_grad_()
            with bridge.autocast(recipe=RECIPES[recipe]):
                y = call(own)
            (y.float() ** 2).mean().backward()
            grads = [own.grad, *(parameter.grad for parameter in model.parameters())]
            steps.append([y.detach().clone(), *(grad.clone() for grad in grads if grad is not None), *buffers(model)])
        found.append(steps)
    for plain, recomputed in zip(*found, strict=True):
        assert max(relative(a, b) for a, b in zip(recomputed, plain, strict=True)) < (0.01 if compiled else 1e-6)


# ---------------------------------------------------------------------------- bad input


def test_a_backend_that_cannot_run_names_the_need() -> None:
    block = mlp(32, 32)
    params, x = fte.init(block), torch.randn(4, 32)
    with pytest.raises(ValueError, match=r"backend.*cpu.*'triton'.*CUDA tensors"):
        fte.apply(block, params, x, backend="triton")


def test_auto_on_cuda_is_triton() -> None:
    assert fte.backends("cuda").auto == "triton"
    plan = fte.plan(mlp(32, 32), device="cuda")
    assert plan.backend == "triton"
    assert "triton" in repr(fte.backends())
