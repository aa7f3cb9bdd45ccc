"""State of modules when the recipe changes between steps, and the keys of stochastic rounding over a training run."""

import copy
import io

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import bridge
import functional_te as fte
from bridge import ops
from functional_te.recipes import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)
from tests.every_recipe import delayed_input

from .compiled import assert_same_bits, break_count, graph_count, same_bits

DELAYED = DelayedScaling(amax_history_len=4)
BLOCK, CURRENT, MX = Float8BlockScaling(), Float8CurrentScaling(), MXFP8BlockScaling()
NVFP4, NO_RHT = NVFP4BlockScaling(), NVFP4BlockScaling(disable_rht=True)
STATELESS = {
    "block": BLOCK,
    "current": CURRENT,
    "mxfp8": MX,
    "nearest": NVFP4BlockScaling(disable_stochastic_rounding=True),
}
SIZE = 32


def make(seed=0):
    torch.manual_seed(seed)
    return ops.Sequential(ops.RMSNorm(SIZE), ops.Linear(SIZE, 64), ops.SwiGLU(), ops.Linear(SIZE, SIZE, bias=False))


def linear(seed=0):
    torch.manual_seed(seed)
    return ops.Linear(SIZE, SIZE, bias=False)


def batch(seed, tokens=16):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, SIZE, generator=generator), torch.randn(tokens, SIZE, generator=generator)


def step(model, recipe, seed, run=None):
    """One step without an update: output and gradients."""
    x, dy = batch(seed)
    x.requires_grad_()
    model.zero_grad()
    with bridge.autocast(recipe=recipe):
        y = (model if run is None else run)(x)
    y.backward(dy)
    return [y.detach(), x.grad, *[p.grad.clone() for p in model.parameters()]]


def modules_of(model):
    return [module for module in model.modules() if getattr(module, "_state_roles", ())]


def state_of(model):
    """Copies of the quantizer state that is in use, by module and role."""
    return [
        {
            role: (type(state).__name__, state.read.clone(), state.amax_history.clone())
            for role, _, state in m.named_states()
        }
        for m in modules_of(model)
    ]


def close(recipe):
    """Enter a context: what any model has observed is closed."""
    with bridge.autocast(recipe=recipe):
        pass


def keys_of(model):
    return [module.grad_output_key.clone() for module in modules_of(model)]


# ---- one recipe after another ------------------------------------------------------------------------------------


@pytest.mark.parametrize("between", STATELESS)
@pytest.mark.parametrize("recipe", [DELAYED, NVFP4], ids=["delayed", "nvfp4"])
def test_a_recipe_without_state_in_between(recipe, between):
    """Its steps neither see nor touch the state of the other one."""
    model = make()
    only = copy.deepcopy(model)
    for seed in range(4):
        assert_same_bits(step(model, recipe, seed), step(only, recipe, seed))
        found = step(model, STATELESS[between], seed + 50)
        assert_same_bits(found, step(make(), STATELESS[between], seed + 50))
    close(recipe)
    assert_same_bits(state_of(model), state_of(only))


def test_delayed_scaling_after_nvfp4_starts_afresh():
    """The two have different state for gradients; a state belongs to the recipe that ran last."""
    model, twin = make(), make()
    for seed in range(2):
        step(model, DELAYED, seed)
    step(model, NVFP4, 10)
    assert [set(own) for own in state_of(model)] == [{"grad_output"}] * 2
    for seed in range(20, 23):
        assert_same_bits(step(model, DELAYED, seed), step(twin, DELAYED, seed))
    close(DELAYED)
    assert_same_bits(state_of(model), state_of(twin))
    names = {name.rpartition(".")[2] for name, _ in model.named_buffers()}
    assert {
        f"{role}_{part}" for role in ("input", "weight", "grad_output") for part in ("scale", "amax_history")
    } <= names


def test_nvfp4_after_delayed_scaling_starts_afresh():
    model, twin = make(), make()
    step(model, DELAYED, 0)
    for seed in range(3):
        assert_same_bits(step(model, NVFP4, seed), step(twin, NVFP4, seed))
    close(NVFP4)
    assert_same_bits(state_of(model), state_of(twin))


def test_another_variant_of_nvfp4_keeps_the_keys():
    """Which values are rounded changes, not which bits come next."""
    model, only = make(), make()
    for seed, recipe in enumerate((NVFP4, NO_RHT, NVFP4, NO_RHT)):
        step(model, recipe, seed)
        step(only, NVFP4, seed)
        close(recipe)
        assert_same_bits(keys_of(model), keys_of(only))


@pytest.mark.parametrize("second", [2, 6])
def test_another_history_length_with_another_recipe_in_between(second):
    """The history is cut at its end or padded there, whatever ran in between."""
    model, twin = make(), make()
    longer = DelayedScaling(amax_history_len=second)
    for seed in range(3):
        step(model, DELAYED, seed)
        step(twin, DELAYED, seed)
    step(model, BLOCK, 7)
    assert_same_bits(step(model, longer, 8), step(twin, longer, 8))
    close(longer)
    assert_same_bits(state_of(model), state_of(twin))
    histories = [own["input"][2] for own in state_of(model)]
    assert all(len(history) == second for history in histories)


def test_a_custom_recipe_with_state_for_one_role():
    """Delayed scaling of inputs only, between steps of a recipe that has it for all roles."""
    recipe = CustomRecipe(qfactory=delayed_input)
    model = linear()
    for seed in range(2):
        step(model, recipe, seed)
    (state,) = state_of(model)
    assert set(state) == {"input"}
    assert_same_bits(state["input"][1], 448 / batch(0)[0].abs().max().reshape(1))
    assert_same_bits(state["input"][2], torch.stack((batch(1)[0].abs().max(), batch(0)[0].abs().max())))


def test_switching_in_compiled_code(dynamo):
    """One graph for each recipe; state is carried over as in eager mode."""
    model, eager = linear(), linear()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for seed, recipe in enumerate((DELAYED, BLOCK, DELAYED, NVFP4, BLOCK, NVFP4, NO_RHT, NVFP4)):
        assert_same_bits(step(model, recipe, seed, compiled), step(eager, recipe, seed))
        close(recipe)
        assert_same_bits(state_of(model), state_of(eager))
    assert break_count(dynamo) == 0


# ---- keys over a run ---------------------------------------------------------------------------------------------


def train(model, recipe, seeds, run=None, between=None):
    """Steps of an optimizer: everything that came out, and the state at the end."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    seen = []
    for seed in seeds:
        seen.append(step(model, recipe, seed, run))
        optimizer.step()
        if between is not None:
            between(model)
    return seen, state_of(model)


def test_every_step_has_its_own_key():
    model = make()
    keys = []
    for _ in range(4):
        step(model, NVFP4, 0)
        keys.append([tuple(key.tolist()) for key in keys_of(model)])
    assert len({key for own in keys for key in own}) == 8


def test_the_key_moves_on_with_the_step():
    """It is closed when the next context is entered, as scales are: the data stay the same, the bits do not."""
    model = linear()
    first = step(model, NVFP4, 0)
    key = keys_of(model)[0]
    assert_same_bits(
        key, fte.init_quantizer_state(NVFP4.quantizer(_grad()), seed=model.basic_ops[0]._seed, path=(2,)).key
    )
    second = step(model, NVFP4, 0)
    assert not torch.equal(keys_of(model)[0], key)
    assert_same_bits(first[0], second[0])
    assert not same_bits(first[1], second[1])
    assert not same_bits(first[2], second[2])


def _grad():
    from functional_te.recipes import Role

    return Role("BasicLinear", "grad_output")


def test_microbatches_in_one_context():
    """One key for the step, mixed with the data: equal microbatches round alike, others do not; it moves on once."""
    model, one = linear(), linear()
    x, dy = batch(3)
    with bridge.autocast(recipe=NVFP4):
        for _ in range(2):
            model(x).backward(dy)
    expected = step(one, NVFP4, 3)[2]
    assert_same_bits(model.weight.grad, 2 * expected)
    close(NVFP4)
    close(NVFP4)
    for _ in range(2):
        close(NVFP4)
    step(one, NVFP4, 3)
    assert_same_bits(keys_of(model), keys_of(one))


def test_a_skipped_backward_leaves_the_key():
    model, twin = linear(), linear()
    with bridge.autocast(recipe=NVFP4):
        model(batch(5)[0])
    assert_same_bits(train(model, NVFP4, range(3)), train(twin, NVFP4, range(3)))


def test_a_gradient_of_zeros_leaves_the_key():
    model, twin = linear(), linear()
    x, dy = batch(5)
    for zeros in (True, False):
        with bridge.autocast(recipe=NVFP4):
            y = model(x)
        y.backward(0 * dy if zeros else dy)
        model.zero_grad()
    step(twin, NVFP4, 5)
    close(NVFP4)
    assert_same_bits(state_of(model), state_of(twin))


@pytest.mark.parametrize("no_grad", [torch.no_grad, torch.inference_mode])
def test_evaluation_in_between(no_grad):
    def evaluate(model):
        before = state_of(model)
        with no_grad(), bridge.autocast(recipe=NVFP4):
            closed = state_of(model)
            for seed in range(2):
                model(batch(seed + 30)[0])
            assert_same_bits(state_of(model), closed)
        close(NVFP4)
        assert_same_bits(state_of(model), closed)
        # what the last backward rounded was closed on entry, once
        assert not same_bits([own["grad_output"][1] for own in before], [own["grad_output"][1] for own in closed])

    model, twin = make(), make()
    found = train(model, NVFP4, range(3), between=evaluate)
    expected = train(twin, NVFP4, range(3))
    close(NVFP4)
    assert_same_bits(found[0], expected[0])
    assert_same_bits(state_of(model), state_of(twin))


def test_evaluation_before_the_first_step():
    model, twin = make(), make()
    with torch.inference_mode(), bridge.autocast(recipe=NVFP4):
        model(batch(1)[0])
    assert_same_bits(train(model, NVFP4, range(2)), train(twin, NVFP4, range(2)))


def _checkpointed(model):
    return lambda x: checkpoint(model, x, use_reentrant=False)


@pytest.mark.parametrize("recipe", [NVFP4, BLOCK], ids=["nvfp4", "block"])
def test_checkpointing(recipe):
    model, twin = make(), make()
    assert_same_bits(train(model, recipe, range(3), run=_checkpointed(model)), train(twin, recipe, range(3)))


def test_checkpointing_with_the_next_step_entered_before_the_backward():
    """The forward is recomputed with the key of its own step."""
    recipe = CustomRecipe(qfactory=_random_inputs)
    model, twin = linear(), linear()
    for one, run in ((model, _checkpointed(model)), (twin, twin)):
        step(one, recipe, 0)
        x, dy = batch(1)
        one.zero_grad()
        with bridge.autocast(recipe=recipe):
            y = run(x)
        close(recipe)
        y.backward(dy)
    assert_same_bits(model.weight.grad, twin.weight.grad)


def _random_inputs(role):
    if role.is_gradient:
        return fte.MXFP8Quantizer(dtype=torch.float8_e4m3fn)
    return fte.NVFP4Quantizer(stochastic_rounding=role.tensor == "input")


def _shared(depth):
    module = linear()

    class Twice(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = module

        def forward(self, x):
            for _ in range(depth):
                x = self.inner(x)
            return x

    return Twice()


@pytest.mark.parametrize("mode", ["eager", "compiled"])
def test_a_shared_module(dynamo, mode):
    """Both calls of a step read one key; it moves on once. The functional calls give the same."""
    model = _shared(2)
    own = model.inner.basic_ops[0]
    run = torch.compile(model, fullgraph=True, backend="aot_eager") if mode == "compiled" else None
    block, params = fte.BasicLinear(SIZE, SIZE), ({"weight": own.weight.detach()},)
    state = None
    for seed in range(2):
        found = step(model, NVFP4, seed, run)
        if state is None:
            entry = fte.init_quantizer_state(NVFP4.quantizer(_grad()), seed=own._seed, path=(2,))
            state = ({"grad_output": entry},)
        x, dy = batch(seed)
        first, first_pullback = fte.vjp(block, params, x, recipe=NVFP4, state=state)
        second, second_pullback = fte.vjp(block, params, first.output, recipe=NVFP4, state=first.state)
        outer = second_pullback(dy)
        inner = first_pullback(outer.input)
        assert_same_bits(found[0], second.output)
        assert_same_bits(found[1], inner.input)
        assert_same_bits(found[2], outer.params[0]["weight"] + inner.params[0]["weight"])
        amax = torch.maximum(outer.state[0]["grad_output"].amax_history, inner.state[0]["grad_output"].amax_history)
        assert_same_bits(own.grad_output_amax_history, amax)
        assert_same_bits(own.grad_output_key, state[0]["grad_output"].key)
        state = fte.update_state(block, NVFP4, outer.state)


def test_compiled_training(dynamo):
    """Keys are tensors: twelve steps, one graph, the bits of eager mode."""
    model, eager = linear(), linear()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert_same_bits(train(model, NVFP4, range(12), compiled), train(eager, NVFP4, range(12)))
    assert graph_count(dynamo) == 1
    assert break_count(dynamo) == 0


def test_a_context_inside_of_compiled_code(dynamo):
    """There the backward closes its own step: two steps do not share their bits."""
    model = linear()

    def run(x):
        with bridge.autocast(recipe=NVFP4):
            return model(x)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    seen, keys = [], []
    for _ in range(3):
        x, dy = batch(0)
        model.zero_grad()
        compiled(x).backward(dy)
        seen.append(model.weight.grad.clone())
        keys.append(keys_of(model)[0])
    assert len({tuple(key.tolist()) for key in keys}) == 3
    assert not same_bits(seen[0], seen[1])
    eager = linear()
    assert_same_bits(seen[0], step(eager, NVFP4, 0)[2])
    assert_same_bits(seen[1], step(eager, NVFP4, 0)[2])
    assert graph_count(dynamo) == 1


# ---- moving, copying, saving -------------------------------------------------------------------------------------


def test_moving_and_casting_a_model_keeps_its_keys():
    model = make()
    step(model, NVFP4, 0)
    before = state_of(model)
    model.to(torch.bfloat16)
    assert_same_bits(state_of(model), before)
    assert all(key.dtype is torch.int64 for key in keys_of(model))
    with bridge.autocast(recipe=NVFP4):
        model(batch(1)[0].bfloat16()).sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


@pytest.mark.parametrize("recipe", [NVFP4, DELAYED], ids=["nvfp4", "delayed"])
def test_a_copied_model_goes_its_own_way(recipe):
    model, twin = make(), make()
    train(model, recipe, range(2))
    train(twin, recipe, range(2))
    copied = copy.deepcopy(model)
    expected = train(twin, recipe, range(2, 4))
    assert_same_bits(train(copied, recipe, range(2, 4)), expected)
    assert_same_bits(train(model, recipe, range(2, 4)), expected)


def saved(value):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


STATEFUL = {"nvfp4": NVFP4, "no rht": NO_RHT, "delayed": DELAYED, "custom": CustomRecipe(qfactory=delayed_input)}


@pytest.mark.parametrize("recipe", STATEFUL.values(), ids=STATEFUL)
@pytest.mark.parametrize("ran", [False, True], ids=["fresh", "used"])
def test_state_dict_round_trip(recipe, ran):
    """A run that was interrupted goes on bit for bit, also in a model that has trained on something else."""
    model, other = make(), make(seed=5)
    train(model, recipe, range(3))
    if ran:
        train(other, recipe, range(10, 12))
    other.load_state_dict(saved(model.state_dict()))
    assert_same_bits(state_of(other), state_of(model))
    for one in (other, model):
        one.zero_grad()
    assert_same_bits(train(other, recipe, range(3, 6)), train(model, recipe, range(3, 6)))
    assert_same_bits(list(other.parameters()), list(model.parameters()))


@pytest.mark.parametrize("first", STATEFUL)
@pytest.mark.parametrize("second", [*STATEFUL, *STATELESS])
def test_a_state_that_is_loaded_into_a_model_with_another_recipe(first, second):
    """What the other recipe can use is used; else it starts afresh. Nothing raises."""
    after = {**STATEFUL, **STATELESS}[second]
    if first == second:
        return
    model = make()
    train(model, STATEFUL[first], range(2))
    loaded = make(seed=5)
    loaded.load_state_dict(saved(model.state_dict()))
    switched = train(model, after, range(3, 6))
    found = train(loaded, after, range(3, 6))
    if {first, second} <= {"nvfp4", "no rht"} or second not in ("nvfp4", "no rht"):
        assert_same_bits(found[0], switched[0])
    else:  # fresh keys belong to the seed that a model was made with
        assert_same_bits(found[0][0][0], switched[0][0][0])
        assert not same_bits(found[0][0], switched[0][0])


def test_what_is_saved_is_tensors():
    model = linear()
    step(model, NVFP4, 0)
    content = model.state_dict()
    extra = content["basic_ops.0._extra_state"]
    assert extra.dtype is torch.uint8
    read = torch.load(io.BytesIO(extra.numpy().tobytes()), weights_only=True)
    assert set(read) == {"grad_output"}
    assert_same_bits(read["grad_output"]["key"], keys_of(model)[0])
    assert read["grad_output"]["amax_history"].item() == batch(0)[1].abs().max().item()


@pytest.mark.parametrize(
    "entry",
    [
        {"key": torch.zeros(3, dtype=torch.int64), "amax_history": torch.zeros(1)},
        {"key": torch.zeros(2), "amax_history": torch.zeros(1)},
        {"key": torch.zeros(2, dtype=torch.int64)},
        {"key": torch.zeros(2, dtype=torch.int64), "amax_history": torch.zeros(0)},
        {"key": "nothing", "amax_history": torch.zeros(1)},
    ],
    ids=["long", "float", "no history", "empty history", "no tensor"],
)
def test_a_broken_key_is_refused(entry):
    model = linear()
    step(model, NVFP4, 0)
    before = state_of(model)
    buffer = io.BytesIO()
    torch.save({"grad_output": {"dtype": "torch.float4_e2m1fn_x2", **entry}}, buffer)
    content = {
        **model.state_dict(),
        "basic_ops.0._extra_state": torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8),
    }
    with pytest.raises(ValueError, match="BasicLinear: extra state 'grad_output': expected"):
        model.load_state_dict(content)
    assert_same_bits(state_of(model), before)
