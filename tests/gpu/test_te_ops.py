"""Every op and fusion of ``te.ops`` beside ours: the same constructor calls, weights, inputs and output gradients.

Ours is run through the module API (eager, and compiled for whole chains) and through the functional API. Tolerances are
those of Transformer Engine's own tests of ``te.ops``: of the dtype (float32 products run in TF32 there), of E4M3 for
forward tensors and of E5M2 where gradients are cast to it.
"""

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import bridge
import functional_te as fte
from tests.gpu import te

te.require()
pytestmark = [*te.MARKS, pytest.mark.filterwarnings("ignore::UserWarning:torch.*")]

DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
EXACT = {"f32": (1.3e-6, 1e-5), "f16": (1e-3, 1e-5), "bf16": (1.6e-2, 1e-5)}
# sums of products: in another order, and in TF32 for float32
PRODUCT = {"f32": (1e-3, 1e-3), "f16": (1e-3, 1e-3), "bf16": (1.6e-2, 1e-2)}
E4M3, E5M2 = (0.125, 0.0675), (0.25, 0.125)
SPLITS = (256, 0, 384, 128)


class Case(NamedTuple):
    """One model.

    Attributes:
        build: from a module of ops and a dtype to a list of modules.
        shape: of the main input.
        extras: shapes of the extra inputs in the dtype; a string names something else.
        product: whether there is a matrix product in it (tolerances, and recipes are worth running).
        recipes: whether it is run with recipes.
    """

    build: Callable[[Any, torch.dtype], list[Any]]
    shape: tuple[int, ...]
    extras: tuple[Any, ...] = ()
    product: bool = False
    recipes: bool = False


def _options(dtype: torch.dtype) -> dict[str, Any]:
    return {"device": "cuda", "dtype": dtype}


def _activations() -> dict[str, Case]:
    names = ("GELU", "QGELU", "SiLU", "ReLU", "SReLU", "GLU", "GEGLU", "QGEGLU", "ReGLU", "SReGLU", "SwiGLU")
    cases = {}
    for name in (*names, "SiTUGLU", "ClampedSwiGLU"):
        cases[name] = Case(lambda o, d, name=name: [getattr(o, name)()], (5, 32, 64))
    return cases


BASIC: dict[str, Case] = {
    "Identity": Case(lambda o, d: [o.Identity()], (6, 32)),
    "Reshape": Case(lambda o, d: [o.Reshape((-1, 6))], (5, 4, 3, 2)),
    "Bias": Case(lambda o, d: [o.Bias(32, **_options(d))], (4, 3, 32)),
    "BasicLinear": Case(lambda o, d: [o.BasicLinear(64, 128, **_options(d))], (4, 32, 64), (), True, True),
    "Linear": Case(lambda o, d: [o.Linear(64, 128, **_options(d))], (128, 64), (), True, True),
    "Linear-no-bias": Case(lambda o, d: [o.Linear(64, 128, bias=False, **_options(d))], (128, 64), (), True, True),
    "LayerNorm": Case(lambda o, d: [o.LayerNorm(64, eps=0.3, **_options(d))], (6, 16, 64)),
    "LayerNorm-2d": Case(lambda o, d: [o.LayerNorm((7, 2), zero_centered_gamma=True, **_options(d))], (6, 16, 7, 2)),
    "RMSNorm": Case(lambda o, d: [o.RMSNorm(64, eps=0.3, **_options(d))], (6, 16, 64)),
    "RMSNorm-zero": Case(lambda o, d: [o.RMSNorm(19, zero_centered_gamma=True, **_options(d))], (6, 16, 19)),
    "L2Normalization": Case(lambda o, d: [o.L2Normalization()], (6, 16, 64)),
    **_activations(),
    "SwiGLU-interleaved": Case(lambda o, d: [o.SwiGLU(glu_interleave_size=32)], (32, 192)),
    "SiTUGLU-options": Case(lambda o, d: [o.SiTUGLU(beta1=3.0, beta2=12.0, glu_interleave_size=32)], (17, 192)),
    "ClampedSwiGLU-options": Case(
        lambda o, d: [o.ClampedSwiGLU(limit=0.75, alpha=1.702, glu_linear_offset=0.0, glu_interleave_size=32)],
        (32, 192),
    ),
    "ConstantScale": Case(lambda o, d: [o.ConstantScale(-2.5)], (4, 4, 2)),
    "AddExtraInput": Case(lambda o, d: [o.AddExtraInput()], (32, 32), ((32, 32),)),
    "AddExtraInput-in-place": Case(lambda o, d: [o.AddExtraInput(in_place=True)], (32, 32), ((32, 32),)),
    "MakeExtraOutput": Case(lambda o, d: [o.MakeExtraOutput()], (32, 32)),
    "ScaledSwiGLU": Case(lambda o, d: [o.ScaledSwiGLU()], (71, 192), ((71,),)),
    "ScaledSwiGLU-interleaved": Case(lambda o, d: [o.ScaledSwiGLU(glu_interleave_size=32)], (71, 192), ((71,),)),
    "ScaledClampedQGeGLU": Case(lambda o, d: [o.ScaledClampedQGeGLU(limit=0.75)], (5, 7, 128), ((5, 7),)),
    "ScaledSiTUGLU": Case(lambda o, d: [o.ScaledSiTUGLU(glu_interleave_size=32)], (17, 192), ((17,),)),
    "ScaledSReLU": Case(lambda o, d: [o.ScaledSReLU()], (5, 7, 128), ((5, 7),)),
    "ScaledTanhSReLU": Case(lambda o, d: [o.ScaledTanhSReLU(tanh_clamp_scale=0.5)], (5, 7, 128), ((5, 7),)),
    "GroupedLinear": Case(
        lambda o, d: [o.GroupedLinear(4, 128, 256, **_options(d))], (768, 128), ("splits",), True, True
    ),
    "GroupedLinear-no-bias": Case(
        lambda o, d: [o.GroupedLinear(4, 128, 128, bias=False, **_options(d))], (768, 128), ("splits",), True, True
    ),
    "GroupedLinear-scaled-bias": Case(
        lambda o, d: [o.GroupedLinear(4, 128, 128, scale_bias=True, **_options(d))],
        (768, 128),
        ("splits", (768,)),
        True,
    ),
}

CHAINS: dict[str, Case] = {
    "linear-bias-activation": Case(
        lambda o, d: [o.Linear(64, 128, **_options(d)), o.GELU(), o.Linear(128, 64, **_options(d))],
        (128, 64),
        (),
        True,
        True,
    ),
    "linear-bias-add": Case(
        lambda o, d: [o.Linear(64, 64, **_options(d)), o.AddExtraInput(in_place=True)],
        (128, 64),
        ((128, 64),),
        True,
        True,
    ),
    "linear-scale-add": Case(
        lambda o, d: [
            o.Linear(64, 64, bias=False, **_options(d)),
            o.ConstantScale(-2.5),
            o.AddExtraInput(in_place=True),
        ],
        (128, 64),
        ((128, 64),),
        True,
        True,
    ),
    "activation-bias": Case(
        lambda o, d: [
            o.Linear(64, 128, bias=False, **_options(d)),
            o.Bias(128, **_options(d)),
            o.ReLU(),
            o.Linear(128, 64, bias=False, **_options(d)),
        ],
        (128, 64),
        (),
        True,
        True,
    ),
    "add-rms-norm": Case(lambda o, d: [o.MakeExtraOutput(), o.RMSNorm(64, **_options(d))], (6, 16, 64)),
    "backward-linear-add": Case(
        lambda o, d: [o.MakeExtraOutput(in_place=True), o.Linear(64, 128, bias=False, **_options(d))],
        (128, 64),
        (),
        True,
        True,
    ),
    "linear-scale": Case(
        lambda o, d: [o.Linear(64, 128, bias=False, **_options(d)), o.ConstantScale(3.5)], (128, 64), (), True, True
    ),
    "norm-linear": Case(
        lambda o, d: [o.RMSNorm(64, **_options(d)), o.Linear(64, 128, bias=False, **_options(d))],
        (128, 64),
        (),
        True,
        True,
    ),
    "layer-norm-mlp": Case(
        lambda o, d: [
            o.LayerNorm(256, **_options(d)),
            o.Linear(256, 768, **_options(d)),
            o.SwiGLU(),
            o.Linear(384, 256, **_options(d)),
        ],
        (256, 256),
        (),
        True,
        True,
    ),
    "grouped-mlp": Case(
        lambda o, d: [
            o.GroupedLinear(4, 128, 256, **_options(d)),
            o.ScaledSwiGLU(),
            o.GroupedLinear(4, 128, 128, **_options(d)),
        ],
        (768, 128),
        ("splits", (768,), "splits"),
        True,
        True,
    ),
}


def _recipes() -> dict[str, tuple[Any, Any]]:
    r, own = te.recipes(), fte.recipes
    return {
        "none": (None, None),
        "delayed": (r.DelayedScaling(amax_history_len=8), own.DelayedScaling(amax_history_len=8)),
        "current": (r.Float8CurrentScaling(), own.Float8CurrentScaling()),
        "block": (r.Float8BlockScaling(), own.Float8BlockScaling()),
    }


RECIPES = _recipes()


def _run(model: Any, context: Any, x: Tensor, extras: list[Tensor], seed: int) -> tuple[list[Tensor], list[Any]]:
    """Outputs and gradients of one training step, on copies of the inputs."""
    x = x.clone().requires_grad_()
    leaves = [extra.clone().requires_grad_(extra.is_floating_point()) for extra in extras]
    for own in model.parameters():
        own.grad = None
    with context:
        outputs = model(x, *[leaf * 1 if leaf.requires_grad else leaf for leaf in leaves])
    outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    generator = torch.Generator().manual_seed(seed)
    grads = [(torch.rand(out.shape, generator=generator) / 4).to(out.dtype).cuda() for out in outputs]
    torch.autograd.backward(outputs, grads)
    gradients = [x.grad, *[leaf.grad for leaf in leaves], *[own.grad for own in model.parameters()]]
    return [out.detach() for out in outputs], gradients


def _compare(theirs: Any, ours: Any, tolerance: tuple[float, float], what: str) -> float:
    worst = 0.0
    for place, (reference, value) in enumerate(zip(theirs, ours, strict=True)):
        if reference is None or not reference.is_floating_point():
            continue
        assert value is not None, f"{what} {place}"
        assert value.dtype is reference.dtype, f"{what} {place}"
        # sums over the tokens are large numbers, whose error is that of one product of them
        unit = max(1.0, reference.double().abs().max().item())
        worst = max(worst, (reference.double() - value.double()).abs().max().item() / unit)
        torch.testing.assert_close(
            value.double() / unit,
            reference.double() / unit,
            rtol=tolerance[0],
            atol=tolerance[1],
            msg=lambda text, place=place: f"{what} {place}: {text}",
        )
    return worst


def _inputs(case: Case, dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
    generator = torch.Generator().manual_seed(5)
    x = (2 * torch.rand(case.shape, generator=generator) - 1).to(dtype).cuda()
    extras = []
    for shape in case.extras:
        if shape == "splits":
            extras.append(torch.tensor(SPLITS, dtype=torch.int32, device="cuda"))
        else:
            extras.append(torch.rand(shape, generator=generator).to(dtype).cuda())
    return x, extras


def _models(case: Case, dtype: torch.dtype) -> tuple[Any, Any]:
    """Transformer Engine's model and ours, with its state_dict loaded strictly."""
    their_ops = te.modules()[0].ops
    torch.manual_seed(11)
    theirs = their_ops.Sequential(*case.build(their_ops, dtype))
    ours = bridge.ops.Sequential(*case.build(bridge.ops, dtype))
    with torch.no_grad():
        for own in theirs.parameters():
            own.copy_((2 * torch.rand(own.shape, device="cuda") - 1) / (8 if own.dim() == 2 else 1))
    ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
    return theirs, ours


def _tolerances(case: Case, dtype: str, recipe: str) -> tuple[tuple[float, float], tuple[float, float]]:
    if recipe == "none":
        own = (PRODUCT if case.product else EXACT)[dtype]
        return own, own
    return E4M3, E4M3 if recipe == "block" else E5M2


def _functional(ours: Any, recipe: Any, x: Tensor, extras: list[Tensor], seed: int) -> tuple[list[Tensor], list[Any]]:
    """The same step through values and pure functions."""
    (group,) = ours._module_groups
    block = group.block
    params = tuple({n: getattr(m, n).detach() for n in m.op.param_names} for m in group.modules)
    state = fte.init_state(block, recipe, device="cuda")
    result, pullback = fte.vjp(block, params, x, *extras, state=state, recipe=recipe)
    outputs = [result.output, *result.extra_outputs]
    generator = torch.Generator().manual_seed(seed)
    grads = pullback(*[(torch.rand(out.shape, generator=generator) / 4).to(out.dtype).cuda() for out in outputs])
    own = [grad for given in grads.params for grad in given.values()]
    return outputs, [grads.input, *grads.extra_inputs, *own]


def _theirs(model: Any, recipe: Any, x: Tensor, extras: list[Tensor]) -> tuple[list[Tensor], list[Any]]:
    """The step of te.ops; skips where its matrix product refuses the shapes or dtypes."""
    try:
        return _run(model, te.modules()[0].autocast(enabled=recipe is not None, recipe=recipe), x, extras, 3)
    except RuntimeError as refusal:
        if "Unable to find suitable cuBLAS" not in str(refusal):
            raise
        pytest.skip(f"te.ops: {' '.join(str(refusal).split())[-110:]}")


def _skip(name: str, dtype: str, recipe: str) -> None:
    if recipe != "none" and "grouped" in name.lower() and dtype == "f32":
        pytest.skip("te.ops.GroupedLinear takes FP8 recipes with 16-bit dtypes only")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("name", "recipe"),
    [(name, recipe) for name, case in (BASIC | CHAINS).items() for recipe in (RECIPES if case.recipes else ("none",))],
)
def test_beside_te_ops(name: str, recipe: str, dtype: str, record_property) -> None:
    """Outputs and all gradients of the first training step: modules, and functions."""
    case = (BASIC | CHAINS)[name]
    _skip(name, dtype, recipe)
    te.reset()
    theirs, ours = _models(case, DTYPES[dtype])
    x, extras = _inputs(case, DTYPES[dtype])
    their_recipe, own_recipe = RECIPES[recipe]
    outputs, gradients = _theirs(theirs, their_recipe, x, extras)
    forward, backward = _tolerances(case, dtype, recipe)
    context = bridge.autocast(enabled=own_recipe is not None, recipe=own_recipe)
    for way, (own_outputs, own_gradients) in (
        ("module", _run(ours, context, x, extras, 3)),
        ("functional", _functional(ours, own_recipe, x, extras, 3)),
    ):
        errors = (
            _compare(outputs, own_outputs, forward, f"{way}: output"),
            _compare(gradients, own_gradients, backward, f"{way}: gradient"),
        )
        if way == "module":
            record_property("error of outputs, gradients", f"{errors[0]:.2g}, {errors[1]:.2g}")


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", CHAINS)
def test_compiled_beside_te_ops(name: str, recipe: str) -> None:
    """The same chains, ours compiled into one graph."""
    case = CHAINS[name]
    if recipe != "none" and not case.recipes:
        pytest.skip("nothing is cast")
    torch._dynamo.reset()
    te.reset()
    theirs, ours = _models(case, torch.bfloat16)
    x, extras = _inputs(case, torch.bfloat16)
    their_recipe, own_recipe = RECIPES[recipe]
    outputs, gradients = _theirs(theirs, their_recipe, x, extras)
    forward, backward = _tolerances(case, "bf16", recipe)
    compiled = torch.compile(ours, fullgraph=True)
    context = bridge.autocast(enabled=own_recipe is not None, recipe=own_recipe)
    own_outputs, own_gradients = _run(compiled, context, x, extras, 3)
    _compare(outputs, own_outputs, forward, "output")
    _compare(gradients, own_gradients, backward, "gradient")


def test_dropout_keeps_as_many() -> None:
    """Both libraries drop the same share, and scale what is kept alike."""
    p, x = 0.25, torch.ones(1024, 1024, device="cuda", dtype=torch.bfloat16)
    for ops in (te.modules()[0].ops, bridge.ops):
        y = ops.Sequential(ops.Dropout(p))(x)
        assert set(y.unique().tolist()) == {0.0, torch.tensor(1 / (1 - p), dtype=torch.bfloat16).item()}
        share = (y == 0).double().mean().item()
        assert abs(share - p) < 4 * (p * (1 - p) / x.numel()) ** 0.5


@pytest.mark.parametrize("recipe", ["delayed", "current", "block"])
def test_checkpoints_of_te_ops_load(recipe: str, monkeypatch) -> None:
    """A trained te.ops model's state_dict, quantizer state included, loads into ours, and ours into te.ops."""
    monkeypatch.setenv("NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE", "1")
    te.reset()
    case = CHAINS["linear-bias-activation"]
    theirs, ours = _models(case, torch.bfloat16)
    x, _ = _inputs(case, torch.bfloat16)
    their_recipe, own_recipe = RECIPES[recipe]
    for step in range(3):
        _run(theirs, te.modules()[0].autocast(enabled=True, recipe=their_recipe), x * (step + 1), [], step)
    saved = theirs.state_dict()
    ours.load_state_dict(copy.deepcopy(saved))
    if recipe == "delayed":
        linear = theirs[0].basic_ops[0]
        states = {role: own for role, _, own in ours[0].basic_ops[0].named_states()}
        for role, (scale, history) in te.linear_state(linear).items():
            assert torch.equal(states[role].scale, scale.to(states[role].scale.device).reshape(1)), role
            assert torch.equal(states[role].amax_history.cpu(), history.cpu().reshape(-1)), role
    outputs, _ = _run(theirs, te.modules()[0].autocast(enabled=True, recipe=their_recipe), x, [], 9)
    own_outputs, _ = _run(ours, bridge.autocast(enabled=True, recipe=own_recipe), x, [], 9)
    _compare(outputs, own_outputs, E4M3, "output")
    te.reset()
    fresh, _ = _models(case, torch.bfloat16)
    fresh.load_state_dict(bridge.interop.te_state_dict(ours))
    outputs, _ = _run(fresh, te.modules()[0].autocast(enabled=True, recipe=their_recipe), x, [], 9)
    own_outputs, _ = _run(ours, bridge.autocast(enabled=True, recipe=own_recipe), x, [], 9)
    _compare(outputs, own_outputs, E4M3, "output")
