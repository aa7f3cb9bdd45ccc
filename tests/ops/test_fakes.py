"""What a custom op relies on: fakes agree with implementations, and results are fresh tensors."""

from typing import Any

import pytest
import torch

import functional_te as fte
from functional_te import pytree
from functional_te.pipeline import backward_pass, forward_pass
from functional_te.tensor_spec import TensorSpec, spec_of
from tests.helpers import FLOATING_OPS, RECIPES, extra_shape, random_params, recipe_id, unchanged, uniform


def described(tree: Any) -> tuple[list[tuple[Any, ...]], Any]:
    flat, spec = pytree.tree_flatten(tree)
    assert all(isinstance(leaf, TensorSpec) for leaf in flat)
    return [(tuple(s.shape), s.dtype, torch.device(s.device)) for s in flat], spec


class Checked:
    """Launches a step as the pipeline does, and checks what its custom op would rely on."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str]] = []

    def __call__(self, op: Any, direction: str, args: Any) -> Any:
        self.seen.append((type(op).__name__, direction))
        impl, fake = getattr(op, f"{direction}_impl"), getattr(op, f"{direction}_fake")
        with unchanged(args):
            result = impl(args)
        real = described(pytree.tree_map(spec_of, result))
        promised = described(fake(pytree.tree_map(spec_of, args)))
        assert promised == real, (type(op).__name__, direction)
        if not getattr(op, f"inline_{direction}"):
            inside = {t.untyped_storage().data_ptr() for t in pytree.leaves(args) if t.numel()}
            made = [t.untyped_storage().data_ptr() for t in pytree.leaves(result) if t.numel()]
            assert len(set(made)) == len(made), f"{type(op).__name__} {direction} returns one storage twice"
            assert inside.isdisjoint(made), f"{type(op).__name__} {direction} returns an input"
        return result


def walk(block: fte.Chain, recipe: Any, dtype: torch.dtype, shape: tuple[int, ...], **options: Any) -> Checked:
    """Forward and backward of a chain with every step checked."""
    launch = Checked()
    extra = options.pop("extra", 0)
    x, params = uniform(shape, dtype), random_params(block, options.pop("params_dtype", dtype))
    plan = fte.plan(block, recipe=recipe, **options)
    state = fte.init_state(block, recipe)
    takers = [op for op in block.ops for channel in op.extra_input_channels if channel is None]
    beside = (*shape[:-1], extra or shape[-1])
    extras = tuple(uniform(extra_shape(op, beside), dtype, i) for i, op in enumerate(takers))
    forward = forward_pass(plan, x, params, state, extras, None, launch)
    grads = [torch.randn_like(out) for out in forward.extra_outputs]
    backward_pass(plan, forward.saved, state, torch.randn_like(forward.output), grads, launch)
    return launch


def between(op: fte.Op, last: int) -> fte.Chain:
    """The op between two linears, so that it casts for both neighbours."""
    width = 4 if isinstance(op, fte.Reshape) else last // 2 if getattr(op, "gated", False) else last
    if isinstance(op, fte.BasicLinear):
        width = op.out_features
    return fte.chain(fte.BasicLinear(last, last), op, fte.BasicLinear(width, 8))


@pytest.mark.parametrize("recipe", RECIPES, ids=recipe_id)
@pytest.mark.parametrize(("op", "last"), FLOATING_OPS, ids=[type(op).__name__ for op, _ in FLOATING_OPS])
def test_basic_ops(op: fte.Op, last: int, recipe: Any) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for shape in ((3, last), (2, 3, last), (last,))[: 2 if isinstance(op, fte.AdaptiveLayerNorm) else 3]:
            launch = walk(between(op, last), recipe, dtype, shape, fusions=fte.Fusions())
            assert launch.seen.count((type(op).__name__, "forward")) == (3 if isinstance(op, fte.BasicLinear) else 1)
        assert (type(op).__name__, "backward") in launch.seen


@pytest.mark.parametrize("recipe", RECIPES, ids=recipe_id)
@pytest.mark.parametrize(("op", "last"), FLOATING_OPS, ids=[type(op).__name__ for op, _ in FLOATING_OPS])
def test_basic_ops_mixed_dtypes_and_no_rows(op: fte.Op, last: int, recipe: Any) -> None:
    none = fte.Fusions()
    block = between(op, last)
    walk(block, recipe, torch.bfloat16, (3, last), params_dtype=torch.float32, fusions=none)
    walk(block, recipe, torch.float32, (3, last), params_dtype=torch.bfloat16, fusions=none)
    walk(block, recipe, torch.float32, (3, last), compute_dtype=torch.bfloat16, fusions=none)
    if not isinstance(op, fte.Reshape):
        walk(block, recipe, torch.float32, (0, last), fusions=none)


@pytest.mark.parametrize("recipe", RECIPES, ids=recipe_id)
@pytest.mark.parametrize("op", [fte.GELU(cache_quantized_input=True), fte.SwiGLU(cache_quantized_input=True)], ids=str)
def test_cached_activations(op: fte.Op, recipe: Any) -> None:
    walk(between(op, 16), recipe, torch.float32, (3, 16), fusions=fte.Fusions())
    walk(between(op, 16), recipe, torch.bfloat16, (3, 16))
    walk(
        fte.chain(fte.Linear(8, 16), op, fte.Linear(16 if isinstance(op, fte.GELU) else 8, 8)),
        recipe,
        torch.float32,
        (3, 8),
    )


FUSED = {
    "ForwardLinearBiasActivation": fte.chain(fte.Linear(8, 16), fte.SwiGLU(), fte.BasicLinear(8, 8)),
    "ForwardLinearBiasAdd": fte.chain(fte.RMSNorm(8), fte.Linear(8, 8), fte.AddExtraInput()),
    "BackwardActivationBias": fte.chain(fte.Linear(8, 8), fte.GELU(), fte.Linear(8, 8), fte.ReLU()),
    "BackwardLinearAdd": fte.chain(fte.Linear(8, 8), fte.MakeExtraOutput(), fte.Linear(8, 8)),
    "BackwardAddRMSNorm": fte.chain(fte.Linear(8, 8), fte.MakeExtraOutput(), fte.RMSNorm(8), fte.Bias(8)),
    "ForwardLinearScaleAdd": fte.chain(
        fte.RMSNorm(8), fte.BasicLinear(8, 8), fte.ConstantScale(2.0), fte.AddExtraInput()
    ),
    "BackwardLinearScale": fte.chain(fte.BasicLinear(8, 8), fte.BasicLinear(8, 8), fte.ConstantScale(2.0), fte.GELU()),
    "ForwardAddRMSNorm": fte.chain(fte.AddExtraInput(), fte.MakeExtraOutput(), fte.RMSNorm(8), fte.Linear(8, 8)),
    "BackwardRMSNormLinear": fte.chain(fte.Linear(8, 8), fte.MakeExtraOutput(), fte.RMSNorm(8), fte.Linear(8, 8)),
}


@pytest.mark.parametrize("recipe", RECIPES, ids=recipe_id)
@pytest.mark.parametrize("name", FUSED)
def test_fused_ops(name: str, recipe: Any) -> None:
    block = FUSED[name]
    for dtype in (torch.float32, torch.bfloat16):
        launch = walk(block, recipe, dtype, (2, 3, 8))
        assert name in {op for op, _ in launch.seen}
    walk(block, recipe, torch.float32, (0, 8))
    walk(block, recipe, torch.bfloat16, (3, 8), params_dtype=torch.float32)
    walk(block, recipe, torch.float32, (3, 8), params_dtype=torch.bfloat16)
    walk(block, recipe, torch.float32, (3, 8), compute_dtype=torch.bfloat16)
    flags = tuple((False,) * len(op.param_names) for op in block.ops)
    walk(block, recipe, torch.float32, (3, 8), requires_grad=(True, flags, (False,) * block.num_extra_inputs))
    last = (*flags[:-2], tuple(True for _ in flags[-2]), tuple(True for _ in flags[-1]))
    walk(block, recipe, torch.float32, (3, 8), requires_grad=(False, last, (True,) * block.num_extra_inputs))
