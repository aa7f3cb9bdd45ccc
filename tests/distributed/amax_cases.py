"""Delayed scaling whose amaxes ranks agree on."""

import pytest
import torch

import bridge
import functional_te as fte
from bridge import distributed, ops
from bridge.demo.checkpoint import read_checkpoint
from bridge.demo.data import Corpus
from bridge.demo.ranks import Ranks
from bridge.demo.settings import Settings
from bridge.demo.train import Trainer
from tests.bridge.delayed import SIZE as WIDTH
from tests.bridge.delayed import mlp, state_of, with_amax
from tests.distributed.common import main, messages, same_on_all_ranks
from tests.helpers import DELAYED, assert_same, uniform

STEPS = 4


def inputs(step, rank):
    """Different amaxes on every rank, now the one and now the other the larger."""
    return with_amax(1.0 + (step * 3 + rank * 5) % 7, step + 10 * rank)


def gradient(step, rank):
    return with_amax(0.5 + (step * 5 + rank * 3) % 4, 50 + step + 10 * rank)


def train(model, steps, ranks, run=None, close=True):
    """Steps of a model in which these ranks' rows are seen. Returns the outputs and the state after every step."""
    seen = []
    for step in range(steps):
        outputs = []
        with bridge.autocast(recipe=DELAYED):
            for rank in ranks:
                outputs.append((run or model)(inputs(step, rank)))
        torch.autograd.backward(outputs, [gradient(step, rank) for rank in ranks])
        seen.append([out.detach() for out in outputs])
    if close:
        with bridge.autocast(recipe=DELAYED):
            pass
    return seen


def case_values(rank, size, folder):
    """The functional interface: one message, the largest of all, NaN above all."""
    block = fte.chain(fte.Linear(WIDTH, WIDTH), fte.GELU(), fte.Linear(WIDTH, WIDTH))
    params = fte.init(block, seed=0)
    states = []
    for own in range(size):
        _, pullback = fte.vjp(block, params, inputs(0, own), state=fte.init_state(block, DELAYED), recipe=DELAYED)
        states.append(pullback(gradient(0, own)).state)
    states[1][3]["input"].amax_history[0] = float("nan")
    with messages() as sent:
        found = fte.update_state(block, DELAYED, states[rank], group="", size=size)
    assert sent == [("all_reduce", torch.int32, 6)]
    merged = fte.tree_map(lambda *own: torch.stack(own).amax(0), *states)
    assert_same(found, fte.update_state(block, DELAYED, merged))
    assert fte.agree_amaxes(states[0], "", 1) is states[0]
    keys = fte.init_state(block, fte.recipes.NVFP4BlockScaling(), seed=1)
    with messages() as sent:
        assert_same(fte.agree_amaxes(keys, "", size), keys)
    assert sent == []


def case_one_process_with_all_rows(rank, size, folder):
    """Eager and compiled: scales and histories are those of one process that saw every rank's rows, bit for bit."""
    one = mlp()
    expected = train(one, STEPS, range(size))
    for backend in (None, "aot_eager"):
        model = mlp()
        run = model if backend is None else torch.compile(model, fullgraph=True, backend=backend)
        with distributed.agree_amaxes(model):
            found = train(model, STEPS, [rank], run)
        for step in range(STEPS):
            torch.testing.assert_close(found[step][0], expected[step][rank], rtol=1e-6, atol=1e-6)
        assert_same(state_of(model), state_of(one))
        same_on_all_ranks(state_of(model).values())


def case_one_message_of_one_size_per_step(rank, size, folder):
    model = mlp()
    roles = 6
    with distributed.agree_amaxes(model):
        with messages() as sent:
            train(model, STEPS, [rank], close=False)
        assert sent == [("all_reduce", torch.int32, roles)] * STEPS
        # microbatches inside of one context are one step
        with messages() as sent, bridge.autocast(recipe=DELAYED):
            for part in range(3):
                model(inputs(part, rank))
        assert sent == [("all_reduce", torch.int32, roles)]
        with messages() as sent, bridge.autocast(recipe=fte.recipes.DelayedScaling(reduce_amax=False)):
            model(inputs(0, rank))
        assert sent == []
    with messages() as sent:
        train(model, 2, [rank])
    assert sent == []  # nothing without an agreement


class Experts(torch.nn.Module):
    """Two experts, of which a rank may leave one out."""

    def __init__(self):
        super().__init__()
        self.experts = torch.nn.ModuleList([mlp(0), mlp(1)])

    def forward(self, x, chosen):
        return sum((self.experts[index](x) for index in chosen), x)


def case_ranks_that_do_less(rank, size, folder):
    """A rank skips an expert, evaluates, or has no rows: nobody waits, and scales are the same everywhere."""
    one, model = Experts(), Experts()
    chosen = [(0,), (0, 1)]  # by rank
    with distributed.agree_amaxes(model):
        for step in range(STEPS):
            if rank == 0 and step > 0:  # evaluates alone, and changes nothing by it
                before = state_of(model)
                with torch.no_grad(), bridge.autocast(recipe=DELAYED):
                    model(inputs(step + 5, 0), (0, 1))
                assert_same(state_of(model), before)
            with bridge.autocast(recipe=DELAYED):
                rows = inputs(step, rank)[:0] if (step, rank) == (2, 1) else inputs(step, rank)
                out = model(rows, chosen[rank])
            out.sum().backward()
            with bridge.autocast(recipe=DELAYED):
                outs = [one(inputs(step, own), chosen[own]) for own in range(2) if (step, own) != (2, 1)]
            sum(own.sum() for own in outs).backward()
        with bridge.autocast(recipe=DELAYED):  # closes the last step of both
            pass
        # nothing came to an expert that nobody used in step 2: its history stands still on all ranks
        assert_same(state_of(model), state_of(one))
        same_on_all_ranks(state_of(model).values())


def case_checkpointed(rank, size, folder):
    """Activation checkpointing changes no scale."""
    plain, model = mlp(), mlp()
    recomputed = lambda x: torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)  # noqa: E731
    with distributed.agree_amaxes(plain):
        train(plain, STEPS, [rank])
    with distributed.agree_amaxes(model):
        train(model, STEPS, [rank], recomputed)
    assert_same(state_of(model), state_of(plain))


def case_refusals(rank, size, folder):
    model = mlp()
    world = torch.distributed.group.WORLD
    with pytest.raises(NotImplementedError, match=r"agree_amaxes\(model, group\)"):
        bridge.autocast(amax_reduction_group=world)
    with distributed.agree_amaxes(model):
        bridge.autocast(amax_reduction_group=world)

        @torch.compile(fullgraph=True, backend="eager")
        def inside(x):
            with bridge.autocast(recipe=DELAYED):
                return model(x)

        with pytest.raises(Exception, match="one message per step"):
            inside(inputs(0, rank))
    with pytest.raises(ValueError, match="operations with quantizers"):
        distributed.agree_amaxes(torch.nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"torch\.nn\.Module"):
        distributed.agree_amaxes("model")


def case_differences_are_named(rank, size, folder):
    with pytest.raises(
        ValueError, match=r"agree_amaxes: operation 0\.basic_ops\.0: .*16.* on rank 0; .*32.* on rank 1"
    ):
        distributed.agree_amaxes(ops.Sequential(ops.Linear(WIDTH, 16 * (rank + 1))))
    recipe = [fte.recipes.DelayedScaling(margin=0), fte.recipes.DelayedScaling(margin=1)][rank]
    layer = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH))
    with pytest.raises(ValueError, match=r"recipe: .*margin=0.* on rank 0; .*margin=1.* on rank 1"):
        distributed.agree_amaxes(bridge.convert(layer, recipe))
    with pytest.raises(ValueError, match="seed: expected the same on all ranks, got 0 on rank 0; 1 on rank 1"):
        distributed.check_same_on_all_ranks({"steps": 3, "seed": rank})
    with pytest.raises(ValueError, match=r"only: .* got 0 on rank 0; nothing of that name on rank 1"):
        distributed.check_same_on_all_ranks({"only": 0} if rank == 0 else {})
    distributed.check_same_on_all_ranks({"steps": 3, "recipe": DELAYED})


def case_ddp(rank, size, folder):
    """DistributedDataParallel: the same weights and scales on all ranks."""
    model = mlp()
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with distributed.agree_amaxes(model):
        for step in range(STEPS):
            with bridge.autocast(recipe=DELAYED):
                loss = ddp(uniform((8, WIDTH), seed=step * size + rank)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        with bridge.autocast(recipe=DELAYED):
            pass
    same_on_all_ranks([*model.parameters(), *state_of(model).values()])


def case_demo_resumes_bit_for_bit(rank, size, folder):
    """The first process writes what all of them observed in the running step."""
    text = torch.arange(2000) * 7919 % 97
    settings = Settings(steps=8, layers=1, width=32, batch=2 * size, context=16, backend="none")
    corpus = Corpus(text, text[: settings.batch * 17].view(1, settings.batch, 17), "")
    through = Trainer(settings, "delayed", corpus, Ranks(rank, size))
    expected = [through.step() for _ in range(6)]
    through.agreement.remove()
    stopped = Trainer(settings, "delayed", corpus, Ranks(rank, size))
    path = folder / "demo.pt"
    assert [stopped.step() for _ in range(3)] == expected[:3]
    stopped.save(path)
    stopped.agreement.remove()
    torch.distributed.barrier()
    resumed = Trainer(settings, "delayed", corpus, Ranks(rank, size))
    resumed.restore(*read_checkpoint(path, settings))
    assert [resumed.step() for _ in range(3)] == expected[3:]
    resumed.agreement.remove()


if __name__ == "__main__":
    main(globals())
