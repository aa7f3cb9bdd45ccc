"""Eager calls by recorded launches give what the pipeline gives, or leave the call to it.

Where there is no GPU, Triton's interpreter runs the kernels, and programs are allowed on the CPU for the tests.
"""

import sys
import threading
import types

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

import bridge
import functional_te as fte
from bridge import replay, state

pytest.importorskip("triton", reason="needs triton (the `triton` extra)")

pytestmark = [
    # of the first product in the thread of the backward, and of every profile
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS"),
    pytest.mark.filterwarnings("ignore:.*Profiler clears events"),
]

BF16 = torch.bfloat16
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RECIPES = {
    "none": None,
    "delayed": fte.recipes.DelayedScaling(amax_history_len=3),
    "current": fte.recipes.Float8CurrentScaling(),
    "block": fte.recipes.Float8BlockScaling(),
}
autograd = sys.modules["bridge.autograd"]


def block(bias=True):
    return fte.chain(
        fte.MakeExtraOutput(),
        fte.RMSNorm(32),
        fte.Linear(32, 64, bias=bias),
        fte.SwiGLU(),
        fte.Linear(32, 32, bias=False),
        fte.AddExtraInput(),
    )


def short():
    """With few kernels, which the interpreter is slow at."""
    return fte.chain(fte.MakeExtraOutput(), fte.RMSNorm(32), fte.Linear(32, 32), fte.AddExtraInput())


class Programs:
    """How many calls ran by a program."""

    def __init__(self, monkeypatch):
        self.calls = 0
        inner = autograd.replayed

        def counted(*args):
            found = inner(*args)
            self.calls += found is not None
            return found

        monkeypatch.setattr(autograd, "replayed", counted)

    @staticmethod
    def kinds():
        return [type(known).__name__ for known in replay._known.values()]


@pytest.fixture(autouse=True)
def on_device():
    torch.set_default_device(DEVICE)
    yield
    torch.set_default_device(None)


@pytest.fixture
def programs(monkeypatch):
    monkeypatch.setattr(replay, "_DEVICES", {"cuda", "cpu"})
    monkeypatch.setattr(replay, "_known", {})
    monkeypatch.setattr(replay, "_starts", 0)
    return Programs(monkeypatch)


def step(chain, params, state, recipe, x, grads, **options):
    """Outputs, gradients and new state of one training step; parameters are left without gradients."""
    extra = torch.full_like(x, 0.5) if chain.num_extra_inputs else None
    inputs = (x,) if extra is None else (x, extra)
    outputs, new = bridge.apply(chain, params, *inputs, state=state, recipe=recipe, backend="triton", **options)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    made = [out.detach().clone() for out in outputs]
    if any(out.requires_grad for out in outputs):
        wanted = [(out, grad) for out, grad in zip(outputs, grads, strict=False) if grad is not None]
        torch.autograd.backward([out for out, _ in wanted], [grad for _, grad in wanted])
    leaves = [x, *[param for own in params for param in own.values()]]
    made.extend(torch.zeros(0) if leaf.grad is None else leaf.grad.clone() for leaf in leaves)
    for leaf in leaves:
        leaf.grad = None
    if new:
        made.extend(entry.amax_history.clone() for own in new for entry in own.values())
        new = fte.update_state(chain, recipe, new)
        made.extend(entry.scale.clone() for own in new for entry in own.values())
    return made, new


def run(recipe, count, *, chain=None, tokens=(8,), needs_x=True, frozen=(), grads=None, seed=0):
    """What ``count`` steps made."""
    torch.manual_seed(seed)
    chain = block() if chain is None else chain
    params = fte.init(chain, dtype=BF16, seed=0, device=DEVICE)
    for index, own in enumerate(params):
        for name, param in own.items():
            param.requires_grad_((index, name) not in frozen)
    state = None if recipe is None else fte.init_state(chain, recipe, device=DEVICE)
    found = []
    for _ in range(count):
        x = torch.randn(*tokens, 32).to(BF16).requires_grad_(needs_x)
        given = [torch.randn(*tokens, 32).to(BF16) for _ in range(2)] if grads is None else grads(x)
        made, state = step(chain, params, state, recipe, x, given)
        found.append(made)
    return found


def assert_equal(one, other):
    for left, right in zip(one, other, strict=True):
        assert len(left) == len(right)
        for a, b in zip(left, right, strict=True):
            assert a.dtype is b.dtype
            assert torch.equal(a, b)


@pytest.fixture
def compare(programs, monkeypatch):
    """Run the same steps by the pipeline and by programs; how many calls of the second run were programs' calls."""

    def compared(recipe, count=5, **options):
        monkeypatch.setattr(replay, "_CALLS", 10**9)
        expected = run(recipe, count, **options)
        assert programs.calls == 0
        monkeypatch.setattr(replay, "_CALLS", 2)
        replay._known.clear()
        assert_equal(run(recipe, count, **options), expected)
        return programs.calls

    return compared


@pytest.mark.parametrize(
    "name", ["none", "delayed", *(pytest.param(name, marks=pytest.mark.slow) for name in ("current", "block"))]
)
def test_steps_have_the_bits_of_the_pipeline(compare, programs, name):
    assert compare(RECIPES[name]) == 4
    assert programs.kinds() == ["Program"]


@pytest.mark.parametrize(
    "options",
    [
        {"needs_x": False},
        {"frozen": ((2, "weight"), (3, "bias"))},
        {"frozen": ((1, "weight"), (2, "weight"), (3, "bias"))},
        {"needs_x": False, "frozen": ((1, "weight"), (2, "weight"), (3, "bias"))},
        {"tokens": (3, 4)},
        {"tokens": (5,)},
        {"tokens": (1,)},
        {"tokens": (0,)},
        # gradients that are views of one number, in another order, and of one output alone
        {"grads": lambda x: [torch.ones((), dtype=BF16).expand(8, 32)] * 2},
        {"grads": lambda x: [torch.randn(32, 8).to(BF16).t()] * 2},
        {"grads": lambda x: [None, torch.ones(8, 32, dtype=BF16)]},
        {"grads": lambda x: [torch.ones(8, 32, dtype=BF16), None]},
    ],
    ids=[
        "input-frozen", "weight-frozen", "weights-frozen", "nothing-needed", "three-dims", "ragged", "one-row", "empty",
        "expanded", "transposed", "extra-alone", "main-alone",
    ],
)  # fmt: skip
def test_patterns_of_calls(compare, options):
    assert compare(RECIPES["delayed"], count=3, chain=short(), **options) == 2


@settings(max_examples=3, deadline=None)
@given(
    tokens=st.integers(1, 9),
    needs_x=st.booleans(),
    bias=st.booleans(),
    name=st.sampled_from(["none", "delayed", "current"]),
    dtype=st.sampled_from([torch.float32, torch.float16, BF16]),
)
def test_random_chains(tokens, needs_x, bias, name, dtype):
    chain = fte.chain(fte.LayerNorm(16), fte.Linear(16, 48, bias=bias), fte.GELU(), fte.Linear(48, 16, bias=not bias))
    recipe = RECIPES[name]
    made = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replay, "_DEVICES", {"cuda", "cpu"})
        for calls in (10**9, 2):
            patch.setattr(replay, "_CALLS", calls)
            patch.setattr(replay, "_known", {})
            torch.manual_seed(0)
            params = fte.init(chain, dtype=dtype, seed=0, device=DEVICE)
            for own in params:
                for param in own.values():
                    param.requires_grad_()
            state = None if recipe is None else fte.init_state(chain, recipe, device=DEVICE)
            steps = []
            for _ in range(3):
                x = torch.randn(tokens, 16).to(dtype).requires_grad_(needs_x)
                result, state = step(chain, params, state, recipe, x, [torch.randn(tokens, 16).to(dtype)])
                steps.append(result)
            made.append(steps)
            assert Programs.kinds() == (["int"] if calls > 2 else ["Program"])
    assert_equal(*made)


def test_kinds_have_programs_of_their_own(programs, monkeypatch):
    monkeypatch.setattr(replay, "_CALLS", 2)
    monkeypatch.setattr(replay, "_MOST", 3)
    for tokens in (4, 8, 4, 8):
        run(RECIPES["current"], 1, tokens=(tokens,), chain=_SHARED)
    assert programs.calls == 2
    assert programs.kinds() == ["Program", "Program"]
    for tokens in (1, 2, 3):
        run(RECIPES["current"], 1, tokens=(tokens,), chain=_SHARED)
    assert len(replay._known) <= 3


def test_more_kinds_than_are_remembered_are_recorded_ever_more_rarely(programs, monkeypatch):
    recorded = []
    monkeypatch.setattr(replay, "_made", recorded.append)
    monkeypatch.setattr(replay, "_MOST", 20)
    order = torch.randint(0, 22, (4000,), generator=torch.Generator("cpu").manual_seed(0), device="cpu")
    for kind in order.tolist():
        calls = replay._known.get(kind, 0)
        if type(calls) is int:
            replay._counted(kind, calls)
    assert len(replay._known) <= 20
    assert 0 < len(recorded) < 40


_SHARED = fte.chain(fte.RMSNorm(32), fte.Linear(32, 32))


def test_no_grad_and_inference(programs, monkeypatch):
    chain, params = _SHARED, fte.init(_SHARED, dtype=BF16, seed=0, device=DEVICE)
    x = torch.randn(8, 32).to(BF16)
    for mode in (torch.no_grad, torch.inference_mode):
        monkeypatch.setattr(replay, "_known", {})
        monkeypatch.setattr(replay, "_CALLS", 2)
        with mode():
            made = [bridge.apply(chain, params, x, recipe=RECIPES["current"], backend="triton")[0] for _ in range(3)]
        assert torch.equal(made[0], made[2])
    assert programs.calls == 4


def modules(monkeypatch):
    """A module whose calls run the Triton kernels, also on the CPU."""
    inner = autograd.make_plan
    monkeypatch.setattr(
        autograd, "make_plan", lambda *args, **options: inner(*args, **{**options, "backend": "triton"})
    )
    replays = autograd.replayed
    monkeypatch.setattr(
        autograd, "replayed", lambda *args: replays(*args[:6], (args[6][0], "triton", args[6][2]), *args[7:])
    )
    torch.manual_seed(0)
    ops = bridge.ops
    return ops.Sequential(ops.RMSNorm(32), ops.Linear(32, 64), ops.SwiGLU(), ops.Linear(32, 32)).to(BF16)


def train(module, steps=4, checkpointed=None, recipe=None, after=None):
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    losses = []
    for index in range(steps):
        x = torch.randn(8, 32).to(BF16).requires_grad_()
        with bridge.autocast(recipe=RECIPES["delayed"] if recipe is None else recipe):
            if checkpointed is None:
                y = module(x)
            else:
                y = torch.utils.checkpoint.checkpoint(module, x, use_reentrant=checkpointed)
        y.float().square().sum().backward()
        losses.append([y.detach().clone(), x.grad.clone()])
        if after is not None:
            after(index, module)
        optimizer.step()
        optimizer.zero_grad()
    losses.append([buffer.clone() for _, buffer in module.named_buffers()])
    return losses


@pytest.mark.parametrize(
    "checkpointed",
    [None, pytest.param(False, marks=pytest.mark.slow), pytest.param(True, marks=pytest.mark.slow)],
    ids=["plain", "checkpoint", "reentrant"],
)
def test_modules_train_alike(programs, monkeypatch, checkpointed):
    monkeypatch.setattr(replay, "_CALLS", 10**9)
    expected = train(modules(monkeypatch), checkpointed=checkpointed)
    assert programs.calls == 0
    monkeypatch.setattr(replay, "_CALLS", 3)
    replay._known.clear()
    assert_equal(train(modules(monkeypatch), checkpointed=checkpointed), expected)
    assert programs.calls >= 2


def closing(monkeypatch):
    """Have one kernel close the steps of all modules, also on the CPU, as on a GPU; what it is launched for."""
    from functional_te.kernels.triton.record import TRITON

    seen = []

    def kernel(scales, histories, amaxes, **options):
        seen.append([amax is not None for amax in amaxes])
        return TRITON.fused.close_step(scales, histories, amaxes, **options)

    monkeypatch.setattr(state, "_kernel", lambda device: kernel)

    class Closing(TRITON.fused.closing):
        def __call__(self):
            seen.append([False] * self.count)
            return super().__call__()

    fused = types.SimpleNamespace(closing=Closing, close_step=kernel)
    monkeypatch.setattr(state, "_fused", lambda device: fused)
    return seen


@pytest.mark.parametrize("checkpointed", [None, False, True], ids=["plain", "checkpoint", "reentrant"])
def test_casts_of_modules_observe_into_their_histories(programs, monkeypatch, checkpointed):
    """Nothing is left to fold in; and what does not count is observed elsewhere: evaluations, recomputations."""

    def accumulate(index, module):
        x = torch.full((8, 32), 1.0 + index).to(BF16).requires_grad_()
        with bridge.autocast(recipe=RECIPES["delayed"]):
            for part in range(2):
                (module(x * (2 - part)).float().sum() * 1e-3).backward()
        with torch.no_grad(), bridge.autocast(recipe=RECIPES["delayed"]):
            module(x * 4)

    found = []
    for calls in (10**9, 2):
        monkeypatch.setattr(replay, "_CALLS", calls)
        replay._known.clear()
        with monkeypatch.context() as patch:
            launched = closing(patch)
            found.append(train(modules(patch), checkpointed=checkpointed, after=accumulate))
        folds = [sum(own) for own in launched]
        # a recomputation may be stopped before it counts, so what one observes is folded in if it comes to its end
        assert programs.calls == 0 or checkpointed is True or sum(folds[-len(folds) // 2 :]) == 0
        assert sum(folds) > 0
        assert programs.calls > 0 or calls > 2
    assert_equal(*found)


def test_recomputations_that_are_stopped_early_observe_nothing(programs, monkeypatch):
    """Of a forward whose step was closed before its backward, by an evaluation or by another micro-batch."""
    found = []
    for calls in (10**9, 2):
        monkeypatch.setattr(replay, "_CALLS", calls)
        replay._known.clear()
        with monkeypatch.context() as patch:
            closing(patch)
            modules(patch)  # the Triton kernels, and the seed
            own = []
            model = bridge.ops.Sequential(bridge.ops.Linear(32, 32)).to(BF16)
            for index in range(4):
                outputs = []
                for part in range(2):
                    x = (torch.randn(8, 32) * (1 + index) * (4 - 3 * part)).to(BF16).requires_grad_()
                    with bridge.autocast(recipe=RECIPES["delayed"]):
                        outputs.append(torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False))
                with torch.no_grad(), bridge.autocast(recipe=RECIPES["delayed"]):
                    model(x)
                for y in outputs:
                    y.float().sum().backward()
                    own.append([buffer.clone() for buffer in model.buffers()])
            found.append(own)
    assert programs.calls > 2
    assert_equal(*found)


def test_an_output_of_one_number_may_be_written_to(programs, monkeypatch):
    monkeypatch.setattr(replay, "_CALLS", 2)
    chain = fte.chain(fte.SiLU())
    for _ in range(3):
        x = torch.ones(1, requires_grad=True)
        y, _ = bridge.apply(chain, ({},), x, backend="triton")
        torch.nn.functional.relu_(y).sum().backward()
    assert programs.calls == 2


def test_casts_that_make_their_own_amaxes_are_found(programs, monkeypatch):
    """Rows of groups are cast by PyTorch's operators; so might others be."""
    monkeypatch.setattr(replay, "_CALLS", 2)
    closing(monkeypatch)
    monkeypatch.setattr(fte.GroupedLinear, "check_splits", lambda *args, **options: None)  # as for sizes on a GPU
    monkeypatch.setattr(sys.modules["functional_te.kernels.reference.grouped"], "_grouped_mm", None)
    chain = fte.chain(fte.GroupedLinear(2, 32, 32))
    params = fte.init(chain, seed=0, device=DEVICE)
    for ask in (True, False):  # and if nobody knew of the op
        with monkeypatch.context() as patch:
            replay._known.clear()
            if not ask:
                patch.setattr(sys.modules["bridge.recording"], "GroupedLinear", type(None))
            state_of = fte.init_state(chain, RECIPES["delayed"], device=DEVICE)
            for _ in range(3):
                x = torch.randn(32, 32)
                with torch.no_grad():
                    _, new = bridge.apply(
                        chain, params, x, torch.tensor([16, 16]), state=state_of, recipe=RECIPES["delayed"],
                        backend="triton",
                    )  # fmt: skip
                for rows, role in ((x[:16], "input0"), (x[16:], "input1")):
                    assert new[0][role].amax_history[0] == rows.abs().max()
    assert programs.calls == 4


def test_saved_tensor_hooks_see_what_the_pipeline_saves(programs, monkeypatch):
    module = modules(monkeypatch)
    monkeypatch.setattr(replay, "_CALLS", 2)
    x = torch.randn(8, 32).to(BF16).requires_grad_()
    seen = []
    for _ in range(3):
        own = []

        def pack(tensor, own=own):
            own.append((tuple(tensor.shape), tensor.dtype))
            return tensor

        with (
            torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
            bridge.autocast(recipe=RECIPES["current"]),
        ):
            module(x).sum().backward()
        seen.append(own)
    assert programs.calls == 2
    assert seen[0] == seen[1] == seen[2]
    assert len(seen[0]) > 3


def test_saved_tensors_may_come_back_with_other_strides(programs, monkeypatch):
    module = modules(monkeypatch)
    monkeypatch.setattr(replay, "_CALLS", 1)

    def unpack(tensor):
        return tensor.t().contiguous().t() if tensor.dim() == 2 else tensor

    grads = []
    for unpacked in (lambda tensor: tensor, unpack):
        x = torch.linspace(-1, 1, 256).reshape(8, 32).to(BF16).requires_grad_()
        with (
            torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpacked),
            bridge.autocast(recipe=RECIPES["current"]),
        ):
            module(x).sum().backward()
        grads.append([x.grad])
    assert programs.calls == 2
    assert_equal(*[[grad] for grad in grads])


def test_second_derivatives_are_refused(programs, monkeypatch):
    module = modules(monkeypatch)
    monkeypatch.setattr(replay, "_CALLS", 1)
    y = module(torch.randn(8, 32).to(BF16).requires_grad_())
    assert programs.calls == 1
    with pytest.raises(RuntimeError, match="cannot be differentiated again"):
        y.sum().backward(create_graph=True)


def test_tied_parameters(programs, monkeypatch):
    chain = fte.chain(fte.Linear(32, 32, bias=False), fte.SiLU(), fte.Linear(32, 32, bias=False))
    x, grad = (torch.randn(8, 32).to(BF16) for _ in range(2))
    weight = torch.randn(32, 32).to(BF16)
    made = []
    for calls in (10**9, 1):
        monkeypatch.setattr(replay, "_CALLS", calls)
        replay._known.clear()
        own = weight.clone().requires_grad_()
        params = ({"weight": own}, {}, {"weight": own})
        result = bridge.apply(chain, params, x, recipe=RECIPES["current"], backend="triton")[0]
        result.backward(grad)
        made.append([result.detach(), own.grad])
    assert programs.calls == 1
    assert_equal(made[:1], made[1:])


def calls_of(monkeypatch, programs, *args, times=3, **options):
    """How many of some equal calls ran by a program."""
    monkeypatch.setattr(replay, "_CALLS", 1)
    replay._known.clear()
    before = programs.calls
    for _ in range(times):
        bridge.apply(*args, backend="triton", **options)
    return programs.calls - before


def test_what_the_pipeline_keeps(programs, monkeypatch):
    params = fte.init(_SHARED, dtype=BF16, seed=0, device=DEVICE)
    x = torch.randn(8, 32).to(BF16)
    recipe = RECIPES["current"]
    assert calls_of(monkeypatch, programs, _SHARED, params, x, recipe=recipe) == 3
    # other strides than those that were recorded
    assert calls_of(monkeypatch, programs, _SHARED, params, torch.randn(32, 8).to(BF16).t(), recipe=recipe) == 0
    # arguments that are cast already
    cast, _ = fte.quantize_params(_SHARED, params, recipe)
    assert calls_of(monkeypatch, programs, _SHARED, cast, x, recipe=recipe) == 0
    # labels of a profile, forward kwargs, transforms
    with torch.profiler.profile():
        assert calls_of(monkeypatch, programs, _SHARED, params, x, recipe=recipe) == 0
    dropout = fte.chain(fte.Dropout(0.5))
    key = {"key": fte.make_key(0, device=DEVICE)}
    assert calls_of(monkeypatch, programs, dropout, ({},), x, kwargs={0: key}) == 0
    before = programs.calls
    torch.func.vjp(lambda x: bridge.apply(_SHARED, params, x, backend="triton")[0], x)
    assert programs.calls == before


def test_a_mode_counts_the_operators_of_the_pipeline(programs, monkeypatch):
    params = fte.init(_SHARED, dtype=BF16, seed=0, device=DEVICE)
    x = torch.randn(8, 32).to(BF16)
    counts = []
    for calls in (10**9, 1):
        monkeypatch.setattr(replay, "_CALLS", calls)
        with FlopCounterMode(display=False) as counter:
            bridge.apply(_SHARED, params, x, backend="triton")
        counts.append(counter.get_total_flops())
    assert counts == [2 * 8 * 32 * 32] * 2


@pytest.mark.parametrize("name", ["none", "current"])
@pytest.mark.parametrize("where", ["around-the-backward", "around-all"])
def test_autocast(programs, monkeypatch, name, where):
    chain = fte.chain(fte.Linear(32, 32))
    kind = torch.device(DEVICE).type
    x = torch.linspace(-1, 1, 256).reshape(8, 32)
    made = []
    for calls in (10**9, 1):
        monkeypatch.setattr(replay, "_CALLS", calls)
        replay._known.clear()
        params = fte.init(chain, dtype=torch.float32, seed=0, device=DEVICE)
        leaves = [x.clone().requires_grad_(), *[param.requires_grad_() for own in params for param in own.values()]]
        with torch.autocast(kind, dtype=torch.float16, enabled=where == "around-all"):
            y, _ = bridge.apply(chain, params, leaves[0], recipe=RECIPES[name], backend="triton")
        with torch.autocast(kind, dtype=BF16):
            y.backward(torch.full_like(y, 1 / 3))
        made.append([y.detach(), *[leaf.grad for leaf in leaves]])
    assert programs.calls == 1
    assert_equal(made[:1], made[1:])


def test_the_default_dtype_changes_nothing(programs, monkeypatch):
    monkeypatch.setattr(replay, "_CALLS", 1)
    params = fte.init(_SHARED, dtype=BF16, seed=0, device=DEVICE)
    x = torch.linspace(-1, 1, 256).reshape(8, 32).to(BF16)
    made = []
    for dtype in (torch.float32, torch.float64):
        state = fte.init_state(_SHARED, RECIPES["delayed"], device=DEVICE)
        torch.set_default_dtype(dtype)
        try:
            y, new = bridge.apply(_SHARED, params, x, state=state, recipe=RECIPES["delayed"], backend="triton")
        finally:
            torch.set_default_dtype(torch.float32)
        made.append([y.detach(), *[entry.amax_history for own in new for entry in own.values()]])
    assert programs.calls == 2
    assert_equal(made[:1], made[1:])


def test_states_shared_by_two_places_run_the_pipeline(programs, monkeypatch):
    chain = fte.chain(fte.Linear(32, 32, bias=False), fte.Linear(32, 32, bias=False))
    params = fte.init(chain, dtype=BF16, seed=0, device=DEVICE)
    recipe = RECIPES["delayed"]
    own = fte.init_state(chain, recipe, device=DEVICE)
    x = torch.randn(8, 32).to(BF16)
    assert calls_of(monkeypatch, programs, chain, params, x, state=own, recipe=recipe) == 3
    assert calls_of(monkeypatch, programs, chain, params, x, state=(own[0], own[0]), recipe=recipe) == 0


def test_two_threads_record_a_kind_once(programs, monkeypatch):
    started, recorded = threading.Event(), []

    def made(key):
        recorded.append(key)
        started.set()
        second.join(0.2)  # which waits for the lock

    monkeypatch.setattr(replay, "_made", made)
    monkeypatch.setattr(replay, "_CALLS", 1)
    second = threading.Thread(target=lambda: started.wait(10) and replay._counted("kind", 0))
    second.start()
    replay._counted("kind", 0)
    second.join()
    assert recorded == ["kind"]


class Doubled(fte.SiLU):
    """An op of the user's, whose Python a program would leave out."""


def test_ops_of_the_users_run_the_pipeline(programs, monkeypatch):
    chain = fte.chain(fte.Linear(32, 32), Doubled())
    params = fte.init(chain, dtype=BF16, seed=0, device=DEVICE)
    x = torch.randn(8, 32).to(BF16)
    assert calls_of(monkeypatch, programs, chain, params, x) == 0
    assert programs.kinds() == ["NoneType"]


class CountedQuantizer(fte.Float8CurrentScalingQuantizer):
    """A quantizer of the user's."""


def counted_quantizer(role):
    return CountedQuantizer(torch.float8_e4m3fn)


def test_quantizers_of_the_users_run_the_pipeline(programs, monkeypatch):
    recipe = fte.recipes.CustomRecipe(counted_quantizer)
    params = fte.init(_SHARED, dtype=BF16, seed=0, device=DEVICE)
    assert calls_of(monkeypatch, programs, _SHARED, params, torch.randn(8, 32).to(BF16), recipe=recipe) == 0
    assert programs.kinds() == ["NoneType"]


def test_fusions_that_are_registered_later_take_effect(programs, monkeypatch):
    chain = fte.chain(fte.BasicLinear(32, 32), fte.AddExtraInput())
    params = fte.init(chain, dtype=BF16, seed=0, device=DEVICE)
    x = torch.randn(8, 32).to(BF16)
    (rule,) = (known for known in fte.default_fusions().forward if known.name == "forward_linear_bias_add")
    kind = type(rule.build(chain.ops))
    runs = []

    def forward_impl(args):
        runs.append(args)
        return kind.forward_impl(args)

    own = type("OwnFusion", (kind,), {"forward_impl": staticmethod(forward_impl), "__module__": __name__})
    pattern = (fte.Slot((fte.BasicLinear,)), fte.Slot((fte.AddExtraInput,)))
    registry = sys.modules["functional_te.fuser.registry"]
    monkeypatch.setattr(registry, "_current", registry._current)  # puts the rules back
    assert calls_of(monkeypatch, programs, chain, params, x, x) == 3
    fte.register_forward_fusion(fte.FusionRule("own", pattern, lambda ops: own(ops)), prepend=True)
    assert calls_of(monkeypatch, programs, chain, params, x, x) == 0
    assert len(runs) == 3
    replay._known.clear()
    assert calls_of(monkeypatch, programs, chain, params, x, x) == 0
    assert len(runs) == 6


def test_chains_over_ranks_run_the_pipeline(programs, monkeypatch):
    sharded = fte.TensorParallel("column", "nowhere", 1)
    for op in (fte.AllReduce(), fte.BasicLinear(32, 32, tensor_parallel=sharded)):
        chain = fte.chain(op, fte.SiLU())
        params = fte.init(chain, dtype=BF16, seed=0, device=DEVICE)
        assert calls_of(monkeypatch, programs, chain, params, torch.randn(8, 32).to(BF16)) == 0


def test_wrong_calls_raise_as_before(programs, monkeypatch):
    params = fte.init(_SHARED, dtype=BF16, seed=0, device=DEVICE)
    x = torch.randn(8, 32).to(BF16)
    assert calls_of(monkeypatch, programs, _SHARED, params, x) == 3
    with pytest.raises(ValueError, match=r"op 0 .*input"):
        bridge.apply(_SHARED, params, x[:, :16].contiguous(), backend="triton")
    with pytest.raises((ValueError, TypeError), match="params"):
        bridge.apply(_SHARED, params[:1], x, backend="triton")
    with pytest.raises(ValueError, match="state"):
        bridge.apply(_SHARED, params, x, backend="triton", recipe=RECIPES["delayed"])
    with pytest.raises(ValueError, match="params"):
        bridge.apply(_SHARED, tuple({**own, "other": x} for own in params), x, backend="triton")
    with pytest.raises(TypeError, match="params"):
        bridge.apply(_SHARED, tuple(torch.nn.ParameterDict(own) for own in params), x, backend="triton")
    for name in ("recipe", "fusions"):
        with pytest.raises(TypeError, match=name):
            bridge.apply(_SHARED, params, x, backend="triton", **{name: object()})
    with pytest.raises(TypeError, match="strided"):
        bridge.apply(_SHARED, params, torch.eye(32).to(BF16).to_sparse(), backend="triton")


def test_wrong_states_raise_as_before(programs, monkeypatch):
    params = fte.init(_SHARED, dtype=BF16, seed=0, device=DEVICE)
    x = torch.randn(8, 32).to(BF16)
    state = fte.init_state(_SHARED, RECIPES["delayed"], device=DEVICE)
    options = {"recipe": RECIPES["delayed"], "backend": "triton"}
    renamed = tuple({f"other_{role}": entry for role, entry in own.items()} for own in state)
    for wrong in ((*state, {}), renamed, (*state[1:], state[0])):
        assert calls_of(monkeypatch, programs, _SHARED, params, x, state=state, recipe=RECIPES["delayed"]) == 3
        with pytest.raises(ValueError, match="state"):
            bridge.apply(_SHARED, params, x, state=wrong, **options)


def test_a_missing_key_raises_on_every_call(programs, monkeypatch):
    monkeypatch.setattr(replay, "_CALLS", 2)
    for _ in range(3):
        with pytest.raises(ValueError, match="key"):
            bridge.apply(fte.chain(fte.Dropout(0.5)), ({},), torch.ones(8, 32), backend="triton")
    assert programs.calls == 0


def test_the_reference_backend_has_no_programs(programs, monkeypatch):
    monkeypatch.setattr(replay, "_CALLS", 1)
    params = fte.init(_SHARED, dtype=BF16, seed=0, device=DEVICE)
    bridge.apply(_SHARED, params, torch.randn(8, 32).to(BF16), backend="reference")
    assert programs.calls == 0
    assert programs.kinds() == ["NoneType"]
