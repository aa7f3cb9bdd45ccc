"""Contestants: a model, a recipe and a way to run it, made into one training step without optimizer.

Ways to run (modes): eager; compiled; "compiled, cpp wrapper", whose kernels are launched from C++; reduce-overhead,
which is ``torch.compile`` with CUDA graphs; captured, which is one ``torch.cuda.graph`` of forward and backward;
graphed, which is ``te.make_graphed_callables``.
"""

from __future__ import annotations

import dataclasses
import importlib
import sys
import types
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import bridge
import functional_te as fte
from tests.benchmarks.gpu.blocks import Shape, bridge_model, te_model, torch_model

Call = Callable[[Tensor], Tensor]
RECIPES: dict[str, Any] = {
    "none": None,
    "delayed": fte.recipes.DelayedScaling(),
    "current": fte.recipes.Float8CurrentScaling(),
    "block": fte.recipes.Float8BlockScaling(),
}
COMPILE: dict[str, dict[str, Any]] = {
    "compiled": {},
    "compiled, cpp wrapper": {"options": bridge.cpp_wrapper_options()},
    "reduce-overhead": {"mode": "reduce-overhead"},
}


@dataclasses.dataclass(frozen=True)
class Step:
    """One forward and backward.

    Attributes:
        run: does it.
        clear: drops the gradients, as an optimizer does between steps; not timed.
        tensors: what is kept between steps: parameters, input, gradient of the output.
    """

    run: Callable[[], Any]
    clear: Callable[[], None]
    tensors: tuple[Tensor, ...] = ()


@dataclasses.dataclass(frozen=True)
class Contestant:
    """Something to measure.

    Attributes:
        who: "ours", or the library.
        mode: how it is run.
        build: makes the step.
        peer: whether it counts as a peer that goals compare with.
        alone: whether it must not share the process's state with others: what closes a step of delayed scaling in
            Python visits every module that is alive, ours and Transformer Engine's alike. Such contestants are
            measured first, one at a time; the others alternate.
        extra: whether ``--quick`` leaves it out.
    """

    who: str
    mode: str
    build: Callable[[], Step]
    peer: bool = False
    alone: bool = False
    extra: bool = False

    @property
    def name(self) -> str:
        return f"{self.who}, {self.mode}"


def inputs(shape: Shape, device: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """An input that requires its gradient, and the gradient of the output."""
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(shape.input_shape, device=device, dtype=dtype, generator=generator)
    dy = torch.randn(shape.input_shape, device=device, dtype=dtype, generator=generator) / 64
    return x.requires_grad_(), dy


def training_step(model: torch.nn.Module, call: Call, shape: Shape, device: str, dtype: torch.dtype) -> Step:
    """Forward and backward of ``call``, which runs ``model``."""
    x, dy = inputs(shape, device, dtype)
    kept = (*model.parameters(), x)

    def run() -> None:
        call(x).backward(dy)

    def clear() -> None:
        for tensor in kept:
            tensor.grad = None

    return Step(run, clear, (*kept, dy))


def with_own_code(function: Call) -> Call:
    """The same function with a code object of its own: Dynamo keeps what it compiles by code object."""
    made = types.FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def compiled(call: Call, mode: str, fullgraph: bool) -> Call:
    """``call`` compiled; under reduce-overhead every call is a new iteration."""
    fast = torch.compile(with_own_code(call), fullgraph=fullgraph, dynamic=False, **COMPILE[mode])
    if mode != "reduce-overhead":
        return fast

    def begin(x: Tensor) -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        return fast(x)

    return begin


def captured(step: Step, warmups: int = 3) -> Step:
    """A step as one CUDA graph. Warm-up and capture share a side stream, gradients live in the graph's memory."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(warmups):
            step.clear()
            step.run()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    step.clear()
    # cuBLAS's workspace has to be the graph's own: one of the warm-up would be freed when reduce-overhead records next,
    # which frees all, and replays would write to what others hold by then
    torch._C._cuda_clearCublasWorkspaces()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        step.run()
    # the step is kept with the graph: the graph reads its tensors
    return Step(graph.replay, lambda kept=step: None, step.tensors)


# ---------------------------------------------------------------------------- one builder per library


def build_ours(shape: Shape, recipe: str, mode: str, device: str, dtype: torch.dtype) -> Step:
    """``bridge.ops``. The recipe's context is entered inside of what is compiled, except in the mode that says so."""
    model, chosen = bridge_model(shape, device, dtype), RECIPES[recipe]

    def call(x: Tensor) -> Tensor:
        if chosen is None:
            return model(x)
        with bridge.autocast(recipe=chosen):
            return model(x)

    if mode == "compiled, autocast outside":
        fast = compiled(lambda x: model(x), "compiled", True)

        def outside(x: Tensor) -> Tensor:
            with bridge.autocast(recipe=chosen):
                return fast(x)

        return training_step(model, outside, shape, device, dtype)
    if mode in COMPILE or mode == "compiled, captured":
        call = compiled(call, "compiled" if mode == "compiled, captured" else mode, True)
    step = training_step(model, call, shape, device, dtype)
    return captured(step) if mode.endswith("captured") else step


def build_torch(shape: Shape, mode: str, device: str, dtype: torch.dtype, float8: bool = False) -> Step:
    """torch.nn; with ``float8``, its linears are torchao's with dynamic tensorwise scaling."""
    model = torch_model(shape, device, dtype)
    if float8:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            library = importlib.import_module("torchao.float8")
            config = library.Float8LinearConfig.from_recipe_name("tensorwise")
            model = library.convert_to_float8_training(model, config=config)

    def call(x: Tensor) -> Tensor:
        return model(x)

    if mode in COMPILE or mode == "compiled, captured":
        call = compiled(call, "compiled" if mode == "compiled, captured" else mode, False)
    step = training_step(model, call, shape, device, dtype)
    return captured(step) if mode.endswith("captured") else step


def te_recipe(name: str) -> Any:
    """Transformer Engine's recipe with its defaults, which are ours too."""
    chosen = RECIPES[name]
    if chosen is None:
        return None
    return getattr(importlib.import_module("transformer_engine.common.recipe"), type(chosen).__name__)()


def build_te(shape: Shape, recipe: str, mode: str, module: str, dtype: torch.dtype) -> Step:
    """Transformer Engine, eager or graphed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        te = importlib.import_module("transformer_engine.pytorch")
    forget_te_state()
    model, chosen = te_model(te, shape, dtype, module), te_recipe(recipe)
    if mode == "graphed":
        sample, _ = inputs(shape, "cuda", dtype)
        how = {"enabled": chosen is not None, "recipe": chosen}
        model = te.make_graphed_callables(model, (sample,), num_warmup_iters=3, **how)

    def call(x: Tensor) -> Tensor:
        with te.autocast(enabled=chosen is not None, recipe=chosen):
            return model(x)

    return training_step(model, call, shape, "cuda", dtype)


def forget_te_state() -> None:
    """Make Transformer Engine forget the quantizers of modules that are gone, which it would update on every step."""
    known = sys.modules.get("transformer_engine.pytorch.quantization")
    if known is not None:
        known.FP8GlobalStateManager.reset()


# ---------------------------------------------------------------------------- who runs in a row


def ours(shape: Shape, recipe: str, device: str, dtype: torch.dtype) -> list[Contestant]:
    """Every mode of ours."""
    modes = ["eager", "compiled", "compiled, cpp wrapper", "reduce-overhead", "captured"]
    extras = ["compiled, captured"]
    if recipe == "delayed":
        extras.append("compiled, autocast outside")
    return [
        Contestant(
            "ours",
            mode,
            lambda mode=mode: build_ours(shape, recipe, mode, device, dtype),
            alone=mode in ("eager", "compiled, autocast outside"),
            extra=mode in extras,
        )
        for mode in modes + extras
    ]


def torch_peers(shape: Shape, device: str, dtype: torch.dtype, *, capture: bool = False) -> list[Contestant]:
    """PyTorch in high precision."""
    return [
        Contestant(
            "torch bf16",
            mode,
            lambda mode=mode: build_torch(shape, mode, device, dtype),
            peer=not mode.endswith("captured"),
            extra=mode.endswith("captured"),
        )
        for mode in ["eager", "compiled", "compiled, cpp wrapper", "reduce-overhead"] + ["compiled, captured"] * capture
    ]


def torchao_peers(shape: Shape, device: str, dtype: torch.dtype, *, capture: bool = False) -> list[Contestant]:
    """torchao's tensorwise FP8, compiled."""
    return [
        Contestant(
            "torchao",
            mode,
            lambda mode=mode: build_torch(shape, mode, device, dtype, float8=True),
            peer=not mode.endswith("captured"),
            extra=mode.endswith("captured"),
        )
        for mode in ["compiled", "compiled, cpp wrapper", "reduce-overhead"] + ["compiled, captured"] * capture
    ]


def te_peers(shape: Shape, recipe: str, dtype: torch.dtype, ways: dict[str, tuple[str, ...]]) -> list[Contestant]:
    """Transformer Engine: modes by module."""
    return [
        Contestant(
            f"te.{module}",
            mode,
            lambda mode=mode, module=module: build_te(shape, recipe, mode, module, dtype),
            peer=True,
            alone=True,
        )
        for module, modes in ways.items()
        for mode in modes
    ]
