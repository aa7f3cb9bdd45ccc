"""Pipelines and experts."""

import pytest
import torch
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import bridge
from bridge import distributed, ops
from tests.bridge.delayed import SIZE as WIDTH
from tests.bridge.delayed import mlp, state_of, with_amax
from tests.distributed.common import main
from tests.helpers import CURRENT, DELAYED, assert_same, uniform

MICROBATCHES = 4


class Noted(torch.nn.Module):
    """A stage that notes what it is given and in which order; ``opens`` enters a context for every microbatch."""

    def __init__(self, inner, opens):
        super().__init__()
        self.inner, self.opens, self.events = inner, opens, []

    def forward(self, x):
        place = sum(kind == "forward" for kind, *_ in self.events)
        self.events.append(("forward", place, x.detach().clone()))
        y = self.run(x)
        if y.requires_grad:
            y.register_hook(lambda grad: self.events.append(("backward", place, grad.clone())))
        return y

    def run(self, x):
        with bridge.autocast(recipe=DELAYED) if self.opens else torch.enable_grad():
            return self.inner(x)


def _train(rank, size, opens, steps=3):
    model = Noted(mlp(rank), opens)
    # with examples: without, PyTorch runs the stage once on numbers of its own, whose amaxes would count
    given, made = (torch.zeros(WIDTH, WIDTH, requires_grad=needs) for needs in (rank > 0, True))
    stage = PipelineStage(model, rank, size, torch.device("cpu"), input_args=given, output_args=made)
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=lambda y, target: (y - target).square().mean())
    for step in range(steps):
        model.zero_grad()
        x = torch.cat([with_amax(1.0 + (3 * step + part) % 5, 10 * step + part) for part in range(MICROBATCHES)])
        target = uniform(x.shape, seed=step)
        with torch.enable_grad() if opens else bridge.autocast(recipe=DELAYED):
            schedule.step(*[x] * (rank == 0), target=target if rank == size - 1 else None)
        model.events.append(("step", step, None))
    return model


def _closed(model):
    with bridge.autocast(recipe=DELAYED):
        pass
    return state_of(model)


def _replay(model, rank):
    """The same forwards and backwards in the same order, in one process."""
    twin, outputs, context, begins = Noted(mlp(rank), model.opens), {}, None, True
    for kind, place, tensor in model.events:
        if kind == "step":
            begins = True
            context = None if context is None else context.__exit__(None, None, None)
        elif not model.opens and context is None:
            context = bridge.autocast(recipe=DELAYED)
            context.__enter__()
        if kind == "forward":
            if begins:
                twin.zero_grad()
            begins = False
            outputs[place] = twin.run(tensor.requires_grad_(rank > 0))
        elif kind == "backward":
            outputs[place].backward(tensor)
    return twin


def case_one_forward_one_backward(rank, size, folder):
    """Several forwards run before the first backward. Each keeps the scales it was cast with."""
    for opens in (False, True):
        model = _train(rank, size, opens)
        order = [kind for kind, *_ in model.events if kind != "step"][:4]
        assert order == (["forward"] * 2 + ["backward", "forward"] if rank == 0 else ["forward", "backward"] * 2)
        found = _closed(model)  # contexts close the steps of all modules that are alive
        twin = _replay(model, rank)
        assert_same(found, _closed(twin))
        for own, other in zip(model.parameters(), twin.parameters(), strict=True):
            assert_same(own.grad * MICROBATCHES, other.grad)  # the schedule divides by their number
        scales = {own.item() for name, own in found.items() if name.endswith("input_scale")}
        assert scales != {1.0}


def case_gradients_of_a_pipeline(rank, size, folder):
    """Of one step: those of one process that runs both stages on every microbatch."""
    model = _train(rank, size, False, steps=1)
    stages = torch.nn.ModuleList([mlp(own) for own in range(size)])
    x = torch.cat([with_amax(1.0 + part % 5, part) for part in range(MICROBATCHES)])
    parts = zip(x.chunk(MICROBATCHES), uniform(x.shape, seed=0).chunk(MICROBATCHES), strict=True)
    with bridge.autocast(recipe=DELAYED):
        losses = [(stages[1](stages[0](part)) - target).square().mean() for part, target in parts]
    for loss in losses:
        loss.backward()
    for own, other in zip(model.parameters(), stages[rank].parameters(), strict=True):
        torch.testing.assert_close(own.grad * MICROBATCHES, other.grad, rtol=1e-6, atol=1e-6)


# ---- experts

EXPERTS = 4


def _experts(count):
    fork = ops.Sequential(
        ops.GroupedLinear(count, 16, 32, bias=False),
        ops.SwiGLU(),
        ops.GroupedLinear(count, 16, 16, bias=False),
    )
    return fork


def _both(size):
    """Experts of one process, and every rank's part of them."""
    torch.manual_seed(0)
    one = _experts(EXPERTS)
    parts = []
    for own in range(size):
        part = _experts(EXPERTS // size)
        for layer in (0, 2):
            for index in range(EXPERTS // size):
                source = getattr(one[layer], f"weight{own * (EXPERTS // size) + index}")
                getattr(part[layer], f"weight{index}").data.copy_(source.data)
        parts.append(part)
    return one, parts


def _counts(rank, step):
    # no expert gets rows everywhere; in step 2 rank 1 holds none
    table = [[[3, 0, 5, 2], [1, 4, 0, 0]], [[0, 0, 0, 6], [2, 2, 2, 2]], [[4, 4, 0, 1], [0, 0, 0, 0]]]
    return torch.tensor(table[step][rank])


def case_experts(rank, size, folder):
    """Rows come back in their order, with the values and gradients of one process that has all experts."""
    for recipe in (None, CURRENT):
        one, parts = _both(size)
        model = distributed.ExpertParallel(parts[rank], EXPERTS, layers=2)
        for step in range(3):
            counts = [_counts(own, step) for own in range(size)]
            rows = [uniform((int(own.sum()), 16), seed=10 * step + place) for place, own in enumerate(counts)]
            x = rows[rank].clone().requires_grad_()
            for own in (one, model):
                own.zero_grad()
            with bridge.autocast(enabled=recipe is not None, recipe=recipe):
                y = model(x, counts[rank])
            y.square().sum().backward()
            # all rows of an expert together, in the order of the ranks
            pieces = [own.split(count.tolist()) for own, count in zip(rows, counts, strict=True)]
            ordered = torch.cat([pieces[own][expert] for expert in range(EXPERTS) for own in range(size)])
            ordered.requires_grad_()
            with bridge.autocast(enabled=recipe is not None, recipe=recipe):
                z = one(ordered, sum(counts), sum(counts))
            z.square().sum().backward()
            sizes = [int(counts[own][expert]) for expert in range(EXPERTS) for own in range(size)]
            for found, whole in ((y.detach(), z.detach()), (x.grad, ordered.grad)):
                mine = torch.cat(whole.split(sizes)[rank::size])
                torch.testing.assert_close(found, mine, rtol=1e-5, atol=1e-5)
            for layer in (0, 2):
                for index in range(EXPERTS // size):
                    expected = getattr(one[layer], f"weight{rank * (EXPERTS // size) + index}").grad
                    found = getattr(parts[rank][layer], f"weight{index}").grad
                    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def case_refusals(rank, size, folder):
    layer = ops.GroupedLinear(2, 16, 16)
    with pytest.raises(ValueError, match="num_experts: expected a multiple of the 2 ranks, got 3"):
        distributed.ExpertParallel(layer, 3)
    with pytest.raises(ValueError, match=r"num_experts: .* 2 on rank 0; 4 on rank 1"):
        distributed.ExpertParallel(layer, 2 + 2 * rank)
    model = distributed.ExpertParallel(layer, 4)
    with pytest.raises(ValueError, match=r"counts: expected shape \(4,\)"):
        model(torch.zeros(2, 16), torch.tensor([1, 1]))
    with pytest.raises(TypeError, match="counts: expected a tensor of integers"):
        model(torch.zeros(2, 16), torch.tensor([1.0] * 4))


if __name__ == "__main__":
    main(globals())
