"""Training steps beside ``te.ops``: the state of delayed scaling bit for bit, results within tolerances."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import functional_te as fte
from tests.gpu import bits, te
from tests.gpu.inputs import DTYPES, FP8, make

te.require()
pytestmark = te.MARKS

DRIVEN = {"hybrid": "HYBRID", "e4m3": "E4M3"}


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
@pytest.mark.parametrize("fmt", DRIVEN)
@pytest.mark.parametrize("dtype", DTYPES)
def test_state_of_a_driven_module(dtype: str, fmt: str, algorithm: str) -> None:
    """Training steps of a ``te.ops.BasicLinear``: scales and histories of its three quantizers, from the tensors cast.

    One step's input is zero, one's is huge, one's holds an infinity.
    """
    settings = {"margin": 2, "amax_history_len": 4, "amax_compute_algo": algorithm}
    te.reset()
    te_recipe = te.recipes().DelayedScaling(fp8_format=te.recipes().Format[DRIVEN[fmt]], **settings)
    recipe = fte.recipes.DelayedScaling(fp8_format=fte.recipes.Format[DRIVEN[fmt]], **settings)
    ops = te.modules()[0].ops
    linear = ops.BasicLinear(32, 48, device="cuda", dtype=DTYPES[dtype])
    model = ops.Sequential(linear)
    block, found = fte.chain(fte.BasicLinear(32, 48)), []
    state = fte.init_state(block, recipe, device="cuda")
    for step in range(9):
        x = make("spread", (64, 32), DTYPES[dtype]).cuda() * 2.0**-step
        x = {3: torch.zeros_like(x), 5: x.sign() * torch.finfo(DTYPES[dtype]).max / 4, 6: x.clone()}.get(step, x)
        if step == 6:
            x[1, 2] = math.inf
        dy = make("normal", (64, 48), DTYPES[dtype]).cuda() * 2.0 ** (step % 3 - 4)
        te.step(model, te_recipe, x, dy)
        params = ({"weight": linear.weight.detach()},)
        _, pullback = fte.vjp(block, params, x, state=state, recipe=recipe)
        state = fte.update_state(block, recipe, pullback(dy).state)
        for role, (scale, history) in te.linear_state(linear).items():
            found += bits.differences(f"step {step}: scale of {role}", scale, state[0][role].scale)
            found += bits.differences(f"step {step}: history of {role}", history, state[0][role].amax_history)
        with torch.no_grad():
            linear.weight.mul_(1.5)
    bits.assert_none(found)


# ---------------------------------------------------------------------------- whole chains


def _chain_recipes() -> Iterator[tuple[str, Any, Any]]:
    r, own = te.recipes(), fte.recipes
    yield "none", None, None
    for fmt in ("HYBRID", "E4M3"):
        formats = {"fp8_format": r.Format[fmt]}, {"fp8_format": own.Format[fmt]}
        yield (
            f"delayed-{fmt}",
            r.DelayedScaling(amax_history_len=8, **formats[0]),
            own.DelayedScaling(amax_history_len=8, **formats[1]),
        )
        yield f"current-{fmt}", r.Float8CurrentScaling(**formats[0]), own.Float8CurrentScaling(**formats[1])
        yield f"block-{fmt}", r.Float8BlockScaling(**formats[0]), own.Float8BlockScaling(**formats[1])


CHAIN_RECIPES = {name: (theirs, own) for name, theirs, own in _chain_recipes()}
# rtol and atol of Transformer Engine's own tests: high precision (float32 products run in TF32 there), E4M3, E5M2
HIGH = {"f32": (1e-3, 1e-3), "bf16": (1.6e-2, 1e-2), "f16": (1e-3, 1e-3)}
LOW = {"E4M3": (0.125, 0.0675), "HYBRID": (0.25, 0.125)}


def _model(dtype: torch.dtype) -> Any:
    ops = te.modules()[0].ops
    model = ops.Sequential(
        ops.Linear(256, 512, bias=False, device="cuda", dtype=dtype),
        ops.GELU(),
        ops.Linear(512, 256, bias=True, device="cuda", dtype=dtype),
    )
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            values = 2 * torch.rand(parameter.shape, generator=generator) - 1
            parameter.copy_(values / 16 if parameter.dim() == 2 else values)
    return model


@pytest.mark.parametrize("recipe", CHAIN_RECIPES)
@pytest.mark.parametrize("dtype", ["bf16", "f32", "f16"])
def test_linear_gelu_linear(dtype: str, recipe: str, record_property) -> None:
    """Three training steps: outputs and all gradients within the tolerances of Transformer Engine's own tests.

    Not bitwise: a GPU sums products in another order and, in FP8, with fewer bits.
    """
    theirs, own = CHAIN_RECIPES[recipe]
    te.reset()
    model = _model(DTYPES[dtype])
    first, second, bias = (parameter for parameter in model.parameters())
    block = fte.chain(fte.Linear(256, 512, bias=False), fte.GELU(), fte.Linear(512, 256, bias=True))
    params = ({"weight": first.detach()}, {}, {"weight": second.detach()}, {"bias": bias.detach()})
    state, worst = fte.init_state(block, own, device="cuda"), {}
    rtol, atol = HIGH[dtype] if own is None else LOW[recipe.split("-")[1]]
    for step in range(3):
        x = make("normal", (96 + 32 * step, 256), DTYPES[dtype]).cuda() / 2
        dy = make("normal", (96 + 32 * step, 256), DTYPES[dtype]).flip(0).cuda() / 4
        for parameter in model.parameters():
            parameter.grad = None
        y, dx = te.step(model, theirs, x, dy)
        result, pullback = fte.vjp(block, params, x, state=state, recipe=own)
        grads = pullback(dy)
        state = fte.update_state(block, own, grads.state)
        pairs = {
            "y": (y, result.output),
            "dx": (dx, grads.input),
            "dw1": (first.grad, grads.params[0]["weight"]),
            "dw2": (second.grad, grads.params[2]["weight"]),
            "db": (bias.grad, grads.params[3]["bias"]),
        }
        for name, (reference, value) in pairs.items():
            assert value.dtype is reference.dtype, name
            # weight gradients are sums over the tokens: large numbers, whose error is that of one product of them
            unit = max(1.0, reference.double().abs().max().item())
            error = (reference.double() - value.double()).abs().max().item() / unit
            worst[name] = max(worst.get(name, 0.0), error)
            torch.testing.assert_close(
                value.double() / unit,
                reference.double() / unit,
                rtol=rtol,
                atol=atol,
                msg=lambda text, name=name, step=step: f"step {step}, {name}: {text}",
            )
    record_property("max errors", ", ".join(f"{name} {error:.2g}" for name, error in worst.items()))


# ---------------------------------------------------------------------------- objects of Transformer Engine


@pytest.mark.parametrize("name", [kind.__name__ for kind in fte.recipes.RECIPES])
def test_recipe_objects_are_accepted(name: str) -> None:
    """The defaults of both libraries are the same; settings survive."""
    assert fte.recipes.as_recipe(getattr(te.recipes(), name)()) == getattr(fte.recipes, name)()


def test_recipe_objects_with_settings_are_accepted() -> None:
    r, own = te.recipes(), fte.recipes
    delayed = r.DelayedScaling(margin=1, fp8_format=r.Format.E4M3, amax_history_len=3, amax_compute_algo="most_recent")
    assert own.as_recipe(delayed) == own.DelayedScaling(
        margin=1, fp8_format=own.Format.E4M3, amax_history_len=3, amax_compute_algo="most_recent"
    )
    block = r.Float8BlockScaling()
    block.fp8_quant_fwd_inp = r.QParams(power_2_scale=False, amax_epsilon=0.25)
    assert own.as_recipe(block) == own.Float8BlockScaling(
        fp8_quant_fwd_inp=own.QParams(power_2_scale=False, amax_epsilon=0.25)
    )
    block_chain = fte.chain(fte.BasicLinear(128, 128))
    params = fte.init(block_chain, device="cuda")
    x = make("normal", (64, 128), torch.float32).cuda()
    one = fte.apply(block_chain, params, x, recipe=r.Float8CurrentScaling()).output
    bits.assert_same("output", fte.apply(block_chain, params, x, recipe=own.Float8CurrentScaling()).output, one)


QUANTIZERS: dict[str, tuple[Callable[[Any], Any], fte.Quantizer]] = {
    "current": (
        lambda t: t.Float8CurrentScalingQuantizer(te.element(FP8["e5m2"]), "cuda", amax_epsilon=0.5),
        fte.Float8CurrentScalingQuantizer(dtype=FP8["e5m2"], amax_epsilon=0.5),
    ),
    "block": (
        lambda t: t.Float8BlockQuantizer(
            te.element(FP8["e4m3"]), rowwise=True, columnwise=True, force_pow_2_scales=False, block_scaling_dim=1
        ),
        fte.Float8BlockQuantizer(dtype=FP8["e4m3"], power_2_scale=False, block_scaling_dim=1),
    ),
    "mxfp8": (lambda t: t.MXFP8Quantizer(te.element(FP8["e4m3"])), fte.MXFP8Quantizer(dtype=FP8["e4m3"])),
    "nvfp4": (lambda t: t.NVFP4Quantizer(with_2d_quantization=True), fte.NVFP4Quantizer(with_2d_quantization=True)),
}


def _factory(name: str) -> Any:
    return lambda role: QUANTIZERS[name][0](te.modules()[0])


@pytest.mark.parametrize("name", QUANTIZERS)
def test_quantizer_objects_are_accepted(name: str) -> None:
    """A custom recipe of Transformer Engine, whose function returns its quantizers."""
    recipe = fte.recipes.as_recipe(te.recipes().CustomRecipe(qfactory=_factory(name)))
    made = recipe.quantizer(fte.recipes.Role(op="BasicLinear", tensor="input"))
    assert made.with_usage(True, False) == QUANTIZERS[name][1]
