"""Bad input: an error that says where, what came and what was wanted, before any kernel and without side effects."""

import dataclasses

import numpy as np
import pytest
import torch

import bridge
import functional_te as fte
from functional_te import pytree
from tests.helpers import CURRENT, DELAYED, clone, random_params, recorded_kernels, require_grad, unchanged, uniform

BLOCK = fte.chain(
    fte.RMSNorm(8), fte.Linear(8, 16), fte.AddExtraInput(), fte.SwiGLU(), fte.BasicLinear(8, 8, name="out")
)
PARAMS = random_params(BLOCK)
X, EXTRA = uniform((3, 8)), uniform((3, 16))
META = torch.device("meta")
ENTRIES = {"apply": fte.apply, "vjp": fte.vjp, "eval_shape": fte.eval_shape, "bridge": bridge.apply}
every_entry = pytest.mark.parametrize("entry", ENTRIES)


def refused(entry: str, error: type[Exception], parts: tuple[str, ...], block, params, x, *extras, **options) -> None:
    """``entry`` raises ``error`` with every part in its message, runs no kernel and changes nothing."""
    watched = [t for t in pytree.leaves((params, x, extras, options.get("state"))) if isinstance(t, torch.Tensor)]
    with (
        unchanged([t for t in watched if not t.is_meta]),
        recorded_kernels() as kernels,
        pytest.raises(error) as caught,
    ):
        ENTRIES[entry](block, params, x, *extras, **options)
    assert kernels == []
    for part in parts:
        assert part in str(caught.value)


def with_param(index: int, name: str, value) -> tuple:
    """The parameters with one of them replaced."""
    return tuple({**own, name: value} if i == index else own for i, own in enumerate(PARAMS))


CALLS = {
    "wrong last dim": (
        ValueError,
        ("op 0 (RMSNorm)", "input", "(8,)", "(3, 9)"),
        (BLOCK, PARAMS, uniform((3, 9)), EXTRA),
    ),
    "wrong last dim further on": (
        ValueError,
        ("op 1 (BasicLinear)", "input", "16", "(3, 8)"),
        (
            fte.chain(fte.GELU(), fte.BasicLinear(16, 8)),
            random_params(fte.chain(fte.GELU(), fte.BasicLinear(16, 8))),
            X,
        ),
    ),
    "no dims": (ValueError, ("op 0 (RMSNorm)", "input", "()"), (BLOCK, PARAMS, torch.tensor(1.0), EXTRA)),
    "odd gate": (ValueError, ("op 0 (SwiGLU)", "input", "2", "(3, 9)"), (fte.SwiGLU(), ({},), uniform((3, 9)))),
    "interleave": (
        ValueError,
        ("op 0 (SwiGLU)", "input", "8", "(3, 12)"),
        (fte.SwiGLU(glu_interleave_size=4), ({},), uniform((3, 12))),
    ),
    "reshape": (ValueError, ("op 0 (Reshape)", "input", "(5, -1)", "(3, 8)"), (fte.Reshape((5, -1)), ({},), X)),
    "int input": (
        TypeError,
        ("op 0 (RMSNorm)", "input", "float32", "torch.int64"),
        (BLOCK, PARAMS, X.long(), EXTRA),
    ),
    "float64 input": (
        TypeError,
        ("op 0 (RMSNorm)", "input", "float32", "torch.float64"),
        (BLOCK, PARAMS, X.double(), EXTRA),
    ),
    "int input of an identity": (
        TypeError,
        ("op 0 (Identity)", "input", "torch.int64"),
        (fte.Identity(), ({},), X.long()),
    ),
    "input is no tensor": (TypeError, ("op 0 (RMSNorm)", "input", "a tensor", "list"), (BLOCK, PARAMS, [1.0], EXTRA)),
    "input is an array": (
        TypeError,
        ("op 0 (RMSNorm)", "input", "a tensor", "ndarray"),
        (BLOCK, PARAMS, np.ones((3, 8), np.float32), EXTRA),
    ),
    "input is None": (TypeError, ("op 0 (RMSNorm)", "input", "a tensor", "NoneType"), (BLOCK, PARAMS, None, EXTRA)),
    "extra is no tensor": (
        TypeError,
        ("op 3 (AddExtraInput)", "extra input 0", "a tensor", "float"),
        (BLOCK, PARAMS, X, 1.0),
    ),
    "extra of another shape": (
        ValueError,
        ("op 3 (AddExtraInput)", "extra input 0", "(3, 16)", "(3, 8)"),
        (BLOCK, PARAMS, X, X),
    ),
    "extra that would broadcast": (
        ValueError,
        ("op 3 (AddExtraInput)", "extra input 0", "(3, 16)", "(1, 16)"),
        (BLOCK, PARAMS, X, EXTRA[:1]),
    ),
    "extra of another dtype": (
        TypeError,
        ("op 3 (AddExtraInput)", "extra input 0", "float32", "torch.int64"),
        (BLOCK, PARAMS, X, EXTRA.long()),
    ),
    "extra on another device": (
        ValueError,
        ("op 3 (AddExtraInput)", "extra input 0", "cpu", "meta"),
        (BLOCK, PARAMS, X, EXTRA.to(META)),
    ),
    "missing extra": (
        ValueError,
        ("extra_inputs", "1 extra inputs", "op 3 (AddExtraInput)", "got 0"),
        (BLOCK, PARAMS, X),
    ),
    "surplus extra": (ValueError, ("extra_inputs", "1 extra inputs", "got 2"), (BLOCK, PARAMS, X, EXTRA, EXTRA)),
    "params of another chain": (ValueError, ("params", "6 entries", "2 entries"), (BLOCK, PARAMS[:2], X, EXTRA)),
    "params is a dict": (TypeError, ("params", "a tuple of 6 dicts", "dict"), (BLOCK, {"weight": X}, X, EXTRA)),
    "params is None": (TypeError, ("params", "a tuple of 6 dicts", "NoneType"), (BLOCK, None, X, EXTRA)),
    "params entry is no dict": (
        TypeError,
        ("op 1 (BasicLinear)", "params", "a dict", "Tensor"),
        (BLOCK, (PARAMS[0], X, *PARAMS[2:]), X, EXTRA),
    ),
    "param missing": (
        ValueError,
        ("op 2 (Bias)", "params", "['bias']", "[]"),
        (BLOCK, (*PARAMS[:2], {}, *PARAMS[3:]), X, EXTRA),
    ),
    "param surplus": (
        ValueError,
        ("op 1 (BasicLinear)", "params", "'weight'", "'more'"),
        (BLOCK, with_param(1, "more", X), X, EXTRA),
    ),
    "param shape": (
        ValueError,
        ("op 5 (BasicLinear 'out')", "weight", "(8, 8)", "(8, 9)"),
        (BLOCK, with_param(5, "weight", torch.ones(8, 9)), X, EXTRA),
    ),
    "param dtype": (
        TypeError,
        ("op 0 (RMSNorm)", "weight", "float32", "torch.float64"),
        (BLOCK, with_param(0, "weight", torch.ones(8).double()), X, EXTRA),
    ),
    "param device": (
        ValueError,
        ("op 2 (Bias)", "bias", "cpu", "meta"),
        (BLOCK, with_param(2, "bias", torch.ones(16, device=META)), X, EXTRA),
    ),
    "param is no tensor": (
        TypeError,
        ("op 0 (RMSNorm)", "weight", "a tensor", "float"),
        (BLOCK, with_param(0, "weight", 1.0), X, EXTRA),
    ),
    "block is no chain": (TypeError, ("block", "a chain or an op", "Linear"), (torch.nn.Linear(8, 8), PARAMS, X)),
    "block is a class": (TypeError, ("block", "a chain or an op"), (fte.GELU, ({},), X)),
}


@every_entry
@pytest.mark.parametrize("case", CALLS)
def test_refused_before_any_kernel(entry: str, case: str) -> None:
    error, parts, arguments = CALLS[case]
    refused(entry, error, parts, *arguments)
    if entry != "eval_shape":
        # a call that fits, and that is remembered as such, does not open the door
        fte.apply(BLOCK, PARAMS, X, EXTRA)
        refused(entry, error, parts, *arguments)


RUNNING = ("apply", "vjp", "bridge")
SHORT = fte.recipes.DelayedScaling(amax_history_len=2)
STATE = fte.init_state(BLOCK, DELAYED)


def state_with(index: int, role: str, value) -> tuple:
    return tuple({**own, role: value} if i == index else own for i, own in enumerate(STATE))


def packed_state() -> tuple:
    """Histories that are views of one buffer."""
    buffer = torch.zeros(100)
    return tuple(
        {
            role: fte.DelayedScalingState(scale=own.scale, amax_history=buffer[10 * i : 10 * i + 4])
            for i, (role, own) in enumerate(entry.items())
        }
        for entry in STATE
    )


STATES = {
    "missing": (ValueError, ("state", "DelayedScaling", "None"), DELAYED, None),
    "of a stateless recipe": (
        ValueError,
        ("op 1 (BasicLinear)", "state", "'input'", "DelayedScaling", "[]"),
        DELAYED,
        fte.init_state(BLOCK, CURRENT),
    ),
    "for a stateless recipe": (
        ValueError,
        ("op 1 (BasicLinear)", "state", "Float8CurrentScaling", "'input'"),
        CURRENT,
        STATE,
    ),
    "without a recipe": (ValueError, ("op 1 (BasicLinear)", "state", "no recipe", "'input'"), None, STATE),
    "of another length": (
        ValueError,
        ("op 1 (BasicLinear)", "state['input'].amax_history", "length 2", "4"),
        SHORT,
        STATE,
    ),
    "of another chain": (ValueError, ("state", "6 entries", "2 entries"), DELAYED, STATE[:2]),
    "no tuple": (ValueError, ("state", "6 entries", "Tensor"), DELAYED, torch.ones(3)),
    "entry is no dict": (
        (ValueError, TypeError),
        ("op 1 (BasicLinear)", "state", "int"),
        DELAYED,
        (STATE[0], 3, *STATE[2:]),
    ),
    "other roles": (
        ValueError,
        ("op 1 (BasicLinear)", "state", "'grad_output'"),
        DELAYED,
        (STATE[0], dict.fromkeys(("input", "weight", "output"), STATE[1]["input"]), *STATE[2:]),
    ),
    "role without state": (
        (ValueError, TypeError),
        ("op 1 (BasicLinear)", "state['input']", "DelayedScalingState", "NoneType"),
        DELAYED,
        state_with(1, "input", None),
    ),
    "role with a tensor": (
        (ValueError, TypeError),
        ("op 1 (BasicLinear)", "state['input']", "DelayedScalingState", "Tensor"),
        DELAYED,
        state_with(1, "input", torch.ones(1)),
    ),
    "views of one buffer": (ValueError, ("op 1 (BasicLinear)", "state['input']", "view"), DELAYED, packed_state()),
}


@pytest.mark.parametrize("entry", RUNNING)
@pytest.mark.parametrize("case", STATES)
def test_states_that_do_not_fit(entry: str, case: str) -> None:
    error, parts, recipe, state = STATES[case]
    refused(entry, error, parts, BLOCK, PARAMS, X, EXTRA, recipe=recipe, state=state)


@pytest.mark.parametrize("entry", RUNNING)
@pytest.mark.parametrize(
    "recipe", ["DelayedScaling", fte.recipes.DelayedScaling, 8, object()], ids=["str", "class", "int", "object"]
)
def test_recipes_of_unknown_type(entry: str, recipe) -> None:
    refused(entry, TypeError, ("recipe", "None or a recipe"), BLOCK, PARAMS, X, EXTRA, recipe=recipe)


@pytest.mark.parametrize("entry", RUNNING)
def test_other_options(entry: str) -> None:
    refused(entry, ValueError, ("backend", "'reference'", "'no'"), BLOCK, PARAMS, X, EXTRA, backend="no")
    refused(entry, TypeError, ("kwargs", "a mapping", "list"), BLOCK, PARAMS, X, EXTRA, kwargs=[1])
    refused(entry, ValueError, ("kwargs", "[0, 6)", "6"), BLOCK, PARAMS, X, EXTRA, kwargs={6: {}})
    refused(
        entry,
        ValueError,
        ("op 1 (BasicLinear)", "kwargs", "'scale'"),
        BLOCK,
        PARAMS,
        X,
        EXTRA,
        kwargs={1: {"scale": 1}},
    )


@pytest.mark.parametrize("entry", RUNNING)
def test_a_spec_is_no_tensor(entry: str) -> None:
    """eval_shape takes specs; what runs needs tensors. Also after a call of the same shapes has been remembered."""
    fte.apply(BLOCK, PARAMS, X, EXTRA)
    for device in ("cpu", torch.device("cpu")):
        spec = fte.TensorSpec((3, 8), torch.float32, device)
        refused(entry, TypeError, ("op 0 (RMSNorm)", "input", "a tensor", "TensorSpec"), BLOCK, PARAMS, spec, EXTRA)


@every_entry
def test_quantized_where_only_tensors_go(entry: str) -> None:
    quantized = fte.quantize(torch.ones(16), fte.Float8CurrentScalingQuantizer(dtype=torch.float8_e4m3fn))
    refused(
        entry,
        TypeError,
        ("op 2 (Bias)", "bias", "a tensor", "QuantizedTensor"),
        BLOCK,
        with_param(2, "bias", quantized),
        X,
        EXTRA,
    )


def test_gradients_given_to_a_pullback() -> None:
    block = fte.chain(fte.Linear(8, 4), fte.MakeExtraOutput())
    _, pullback = fte.vjp(block, random_params(block), X)
    good = torch.ones(3, 4)
    for grads, error, parts in (
        ((None,), TypeError, ("grad_output", "a tensor", "NoneType")),
        ((1.0,), TypeError, ("grad_output", "a tensor", "float")),
        ((X,), ValueError, ("grad_output", "(3, 4)", "(3, 8)")),
        ((good.to(META),), ValueError, ("grad_output", "cpu", "meta")),
        ((good, X), ValueError, ("grad_extra_outputs[0]", "(3, 4)", "(3, 8)")),
        ((good, good, good), ValueError, ("grad_extra_outputs", "at most 1", "2")),
        ((good.long(),), TypeError, ("grad_output", "torch.int64")),
    ):
        with recorded_kernels() as kernels, pytest.raises(error) as caught:
            pullback(*grads)
        assert kernels == []
        assert all(part in str(caught.value) for part in parts)


CONSTRUCTORS = [
    (lambda: fte.BasicLinear(0, 8), ValueError, "BasicLinear: in_features: expected at least 1, got 0"),
    (lambda: fte.BasicLinear(8, -1), ValueError, "BasicLinear: out_features: expected at least 1, got -1"),
    (lambda: fte.BasicLinear(8, 8.0), TypeError, "BasicLinear: out_features: expected an int, got 8.0"),
    (lambda: fte.BasicLinear(True, 8), TypeError, "BasicLinear: in_features: expected an int, got True"),
    (lambda: fte.Linear("8", 8), TypeError, "in_features: expected an int, got '8'"),
    (lambda: fte.Bias(0), ValueError, "Bias: size: expected at least 1, got 0"),
    (lambda: fte.RMSNorm(()), ValueError, "RMSNorm: normalized_shape: expected at least one dimension"),
    (lambda: fte.RMSNorm((8, 0)), ValueError, "RMSNorm: normalized_shape: expected at least 1, got 0"),
    (lambda: fte.LayerNorm(8.5), TypeError, "LayerNorm"),
    (lambda: fte.SiTUGLU(beta1=0.0), ValueError, "SiTUGLU: beta1: expected a finite positive number, got 0.0"),
    (lambda: fte.SiTUGLU(beta2=float("inf")), ValueError, "SiTUGLU: beta2"),
    (lambda: fte.SwiGLU(glu_interleave_size=0), ValueError, "SwiGLU: glu_interleave_size: expected at least 1"),
    (lambda: fte.SwiGLU(glu_interleave_size=2.0), TypeError, "SwiGLU: glu_interleave_size: expected None or an int"),
    (lambda: fte.Reshape((-1, -1)), ValueError, "Reshape: shape: expected at most one -1"),
    (lambda: fte.Reshape((2, -3)), ValueError, "Reshape: shape: expected sizes of at least -1"),
    (lambda: fte.Reshape((2.0,)), TypeError, "Reshape: shape: expected ints, got 2.0"),
    (lambda: fte.GELU(approximate="tanh"), TypeError, "approximate"),
    (lambda: fte.ConstantScale(), TypeError, "scale"),
    (lambda: fte.init(BLOCK, dtype=torch.float64), ValueError, "dtype: expected float32, float16 or bfloat16"),
    (lambda: fte.init(torch.nn.Identity()), TypeError, "block: expected a chain or an op"),
    (lambda: fte.init_state(BLOCK, "delayed"), TypeError, "recipe"),
    (lambda: fte.update_state(BLOCK, DELAYED, None), ValueError, "state"),
    (lambda: fte.plan(BLOCK, backend="cuda"), ValueError, "backend"),
]


@pytest.mark.parametrize(("make", "error", "message"), CONSTRUCTORS, ids=[m for *_, m in CONSTRUCTORS])
def test_constructors(make, error, message: str) -> None:
    with pytest.raises(error) as caught:
        make()
    assert message in str(caught.value)


@pytest.mark.parametrize("field", ["margin", "fp8_format"])
def test_nothing_is_half_written(field: str) -> None:
    """An error in update_state leaves the state alone; an error in a recipe's replacement leaves the recipe alone."""
    state = clone(STATE)
    with unchanged(state), pytest.raises(ValueError, match="length 2, got 4"):
        fte.update_state(BLOCK, SHORT, state)
    with pytest.raises((TypeError, ValueError), match=field):
        dataclasses.replace(DELAYED, **{field: "no"})
    assert fte.recipes.DelayedScaling(amax_history_len=4) is DELAYED


# ---- values that are allowed and special -----------------------------------------------------------------------

MLP = fte.chain(fte.Linear(8, 16), fte.GELU(), fte.Linear(16, 8))


@pytest.mark.parametrize("recipe", [CURRENT, DELAYED], ids=["current", "delayed"])
def test_all_zero_tensors(recipe) -> None:
    """Zeros are exact in low precision, whatever the scale: the outputs are the biases, and scales stay 1."""
    params, state = random_params(MLP), fte.init_state(MLP, recipe)
    zeros = pytree.tree_map(torch.zeros_like, params)
    for x, own in ((torch.zeros(3, 8), zeros), (torch.zeros(3, 8), (zeros[0], *params[1:3], zeros[3], zeros[4])[:5])):
        own = tuple(own[: len(MLP)])
        result, pullback = fte.vjp(MLP, own, x, recipe=recipe, state=state)
        grads = pullback(torch.zeros(3, 8))
        assert torch.equal(result.output, own[-1]["bias"].expand(3, 8))
        assert all(torch.equal(g, torch.zeros_like(g)) for g in pytree.leaves((grads.input, grads.params)))
        if recipe is DELAYED and own is zeros:
            after = fte.update_state(MLP, recipe, grads.state)
            assert all(torch.equal(s, r) for s, r in zip(pytree.leaves(after), pytree.leaves(state), strict=True))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("recipe", [None, CURRENT, DELAYED], ids=["none", "current", "delayed"])
def test_inf_and_nan_inputs(recipe, bad: float) -> None:
    """High precision loses the row. FP8: inf saturates, nan loses its row; other rows and the state stay finite."""
    block = fte.chain(fte.Linear(8, 8))
    params, state = random_params(block), fte.init_state(block, recipe)
    x = uniform((4, 8))
    x[1, 2] = bad
    result, pullback = fte.vjp(block, params, x, recipe=recipe, state=state)
    rows = result.output.isfinite().all(-1)
    saturates = recipe is not None and bad == bad
    assert rows.tolist() == [True, saturates, True, True]
    grads = pullback(torch.ones(4, 8))
    assert grads.input.isfinite().all()
    if recipe is DELAYED:
        after = fte.update_state(block, recipe, grads.state)
        assert torch.equal(after[0]["input"].scale, torch.ones(1))  # not usable: the scale stays
        assert after[0]["weight"].scale.item() > 1
    leaf_x, leaf_params = require_grad((x, params))
    y, _ = bridge.apply(block, leaf_params, leaf_x, recipe=recipe, state=fte.init_state(block, recipe))
    torch.testing.assert_close(y.detach(), result.output, rtol=0, atol=0, equal_nan=True)
