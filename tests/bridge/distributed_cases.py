"""What two ranks run together: every ``case_*`` gets (rank, size). Run with rank, size, rendezvous and report."""

import contextlib
import copy
import json
import pickle
import sys
import time
import traceback
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import gelu

import bridge
import functional_te as fte
from bridge import ops
from functional_te.pipeline import forward_pass
from tests import oracles
from tests.bridge.compiled import GraphLog
from tests.helpers import CURRENT, DELAYED, DTYPES, TOLERANCES, assert_same, uniform

TOKENS, IN, OUT = 6, 32, 64
SIZE = 2
MODES = [(mode, sequence) for mode in ("column", "row") for sequence in (False, True)]
# decibels between a result in FP8 and the one in high precision
FLOOR = 20


def mine(full, rank, dim):
    return full.chunk(SIZE, dim)[rank]


def close(actual, expected, dtype, what):
    rtol, atol = TOLERANCES[dtype]
    # sums over ranks round in the dtype
    torch.testing.assert_close(
        actual.double(), expected.double(), rtol=4 * rtol, atol=max(atol, rtol), msg=lambda text: f"{what}: {text}"
    )


def step(module, x, dy):
    """Output, input gradient and parameter gradients of one forward and backward."""
    x = x.detach().clone().requires_grad_()
    module.zero_grad()
    y = module(x)
    y.backward(dy)
    return [y.detach(), x.grad, *[p.grad for p in module.parameters()]]


# ---- collectives


def case_collectives(rank, size):
    for dtype in DTYPES:
        parts = [uniform((4, 3), dtype, 1 + r) for r in range(size)]
        grads = [uniform((8, 3), dtype, 10 + r) for r in range(size)]
        y, dx = step(ops.AllReduce(), parts[rank], grads[rank][:4])
        close(y, sum(p.double() for p in parts), dtype, "all-reduce")
        assert_same(dx, grads[rank][:4])
        y, dx = step(ops.AllGather(), parts[rank], grads[rank])
        assert_same(y, torch.cat(parts))
        close(dx, mine(sum(g.double() for g in grads), rank, 0), dtype, "all-gather")
        y, dx = step(ops.ReduceScatter(), parts[rank], grads[rank][:2])
        close(y, mine(sum(p.double() for p in parts), rank, 0), dtype, "reduce-scatter")
        assert_same(dx, torch.cat([g[:2] for g in grads]))


def case_collectives_take_strided_and_empty_tensors(rank, size):
    x = uniform((3, 4), seed=rank).t()
    both = torch.cat([uniform((3, 4), seed=r).t() for r in range(size)])
    assert_same(ops.AllGather()(x), both)
    assert_same(ops.ReduceScatter()(x), mine(both[:4] + both[4:], rank, 0))
    for module in (ops.AllReduce(), ops.AllGather(), ops.ReduceScatter()):
        assert module(torch.zeros(0, 4)).shape == (0, 4)


def case_collectives_compiled(rank, size):
    x, dy = uniform((4, 3), seed=rank), uniform((4, 3), seed=5 + rank)
    module = ops.Sequential(ops.AllGather(), ops.AllReduce(), ops.ConstantScale(0.5), ops.ReduceScatter())
    log = GraphLog()
    eager = step(module, x, dy)
    assert_same(step(torch.compile(module, fullgraph=True, backend=log), x, dy), eager)
    named = ["allgather_forward", "allreduce_forward", "constantscale_forward", "reducescatter_forward"]
    assert log.custom_ops("fwd") == named
    assert log.custom_ops("bwd") == ["reducescatter_backward", "constantscale_backward", "allgather_backward"]


def case_collectives_as_functions(rank, size):
    """Without modules; shapes are known without sending anything."""
    block = fte.chain(fte.AllGather("", size), fte.ReduceScatter("", size))
    if rank == 0:  # the other rank would have to answer
        assert fte.eval_shape(block, ({}, {}), fte.TensorSpec((4, 3), torch.bfloat16)).output.shape == (4, 3)
        spec = fte.eval_shape(fte.AllGather("", size), ({},), fte.TensorSpec((4, 3), torch.float32)).output
        assert spec.shape == (8, 3)
    x = uniform((4, 3), seed=rank)
    result, pullback = fte.vjp(block, ({}, {}), x)
    torch.testing.assert_close(result.output, size * x)
    torch.testing.assert_close(pullback(x).input, size * x)


def case_collective_errors(rank, size):
    wants(RuntimeError, "first dimension divisible by 2", lambda: ops.ReduceScatter()(torch.zeros(3, 2)))
    wants(ValueError, "at least one dimension", lambda: ops.AllGather()(torch.zeros(())))
    wants(RuntimeError, "expected 3 ranks, got 2", lambda: fte.apply(fte.AllReduce("", 3), ({},), torch.zeros(3)))
    wants(TypeError, "process_group", lambda: ops.AllReduce("world"))


def wants(kind, part, call):
    with pytest.raises(kind, match=part):
        call()


# ---- groups


def case_groups(rank, size):
    pair, alone = dist.new_group([0, 1]), [dist.new_group([r]) for r in range(size)][rank]
    module = ops.AllReduce(pair)
    assert module.process_group is pair
    assert module.process_group_size == 2
    torch.testing.assert_close(module(torch.ones(3)), torch.full((3,), 2.0))
    single = ops.ReduceScatter(alone)
    x = torch.ones(3, 2)
    assert single.process_group_size == 1
    assert single(x) is x
    linear = ops.BasicLinear(8, 8, tensor_parallel_mode="row", tensor_parallel_group=pair)
    assert linear.tensor_parallel_group is pair
    for made in (copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))):
        assert made(module).process_group is pair
        twin = made(linear)
        assert twin.tensor_parallel_group is pair
        assert_same(twin(torch.ones(2, 4)), linear(torch.ones(2, 4)))
    # a group of one rank resets the mode, whatever it is
    for mode in ("column", "row", "nonsense"):
        reset = ops.BasicLinear(8, 8, tensor_parallel_mode=mode, tensor_parallel_group=alone, sequence_parallel=True)
        assert (reset.tensor_parallel_mode, reset.sequence_parallel, reset.tensor_parallel_size) == (None, False, 1)
        assert reset.weight.shape == (8, 8)
        whole = ops.Linear(8, 8, tensor_parallel_mode=mode, tensor_parallel_group=alone)
        assert len(whole.basic_ops) == 2


# ---- linear layers


class Sharded:
    """A sharded layer and its slices of the float64 result of the whole one."""

    def __init__(self, kind, mode, sequence, rank, dtype=torch.float32, bias=True, shape=(TOKENS,)):
        self.what = f"{kind} {mode} sequence={sequence} {dtype}"
        self.mode, self.sequence, self.rank, self.dtype = mode, sequence, rank, dtype
        weight = uniform((OUT, IN), dtype, 1) / 8
        parts = [uniform((OUT,), dtype, 2 + r) for r in range(SIZE)]
        x, dy = uniform((*shape, IN), dtype, 5), uniform((*shape, OUT), dtype, 6)
        options = {"bias": bias} if kind == "Linear" else {}
        self.module = getattr(ops, kind)(
            IN, OUT, dtype=dtype, tensor_parallel_mode=mode, sequence_parallel=sequence, **options
        )
        has_bias = kind == "Linear" and bias
        with torch.no_grad():
            self.module.weight.copy_(mine(weight, rank, 0 if mode == "column" else 1))
            if has_bias:  # in row mode the layer's is the sum of the ranks'
                self.module.bias.copy_(mine(parts[0], rank, 0) if mode == "column" else parts[rank])
        self.x = self.shard(x, mode == "row")
        self.dy = self.shard(dy, mode == "column")
        x64, w64 = x.double().requires_grad_(), weight.double().requires_grad_()
        b64 = (parts[0] if mode == "column" else sum(p.double() for p in parts)).double().requires_grad_()
        y64 = x64 @ w64.t() + (b64 if has_bias else 0)
        y64.backward(dy.double())
        self.expected = [self.shard(y64.detach(), mode == "column"), self.shard(x64.grad, mode == "row")]
        self.expected.append(mine(w64.grad, rank, 0 if mode == "column" else 1))
        if has_bias:
            self.expected.append(mine(b64.grad, rank, 0) if mode == "column" else b64.grad)

    def shard(self, full, features):
        if features:
            return mine(full, self.rank, -1)
        return mine(full, self.rank, 0) if self.sequence else full

    def run(self):
        return step(self.module, self.x, self.dy)

    def check(self, found):
        for i, (got, want) in enumerate(zip(found, self.expected, strict=True)):
            assert got.shape == want.shape, (self.what, i)
            assert got.dtype is self.dtype
            close(got, want, self.dtype, f"{self.what} result {i}")


def case_basic_linear(rank, size):
    for mode, sequence in MODES:
        for dtype in DTYPES:
            made = Sharded("BasicLinear", mode, sequence, rank, dtype)
            made.check(made.run())
    made = Sharded("BasicLinear", "row", True, rank, shape=(4, 2, 3))
    made.check(made.run())


def case_linear(rank, size):
    for mode, sequence in MODES:
        for bias in (True, False):
            made = Sharded("Linear", mode, sequence, rank, bias=bias)
            assert (made.module.tensor_parallel_mode, made.module.sequence_parallel) == (mode, sequence)
            assert made.module.tensor_parallel_group is dist.group.WORLD
            made.check(made.run())
            for context in (torch.no_grad, torch.inference_mode):
                with context():
                    close(made.module(made.x), made.expected[0], torch.float32, made.what)


def case_compiled(rank, size):
    """All kinds in one graph."""
    made = [Sharded("BasicLinear", mode, sequence, rank) for mode, sequence in MODES]
    made.append(Sharded("Linear", "row", True, rank))
    eager = [one.run() for one in made]

    def call(inputs):
        return [one.module(x) for one, x in zip(made, inputs, strict=True)]

    inputs = [one.x.detach().clone().requires_grad_() for one in made]
    for one in made:
        one.module.zero_grad()
    log = GraphLog()
    outputs = torch.compile(call, fullgraph=True, backend=log)(inputs)
    torch.autograd.backward(outputs, [one.dy for one in made])
    for one, y, x, want in zip(made, outputs, inputs, eager, strict=True):
        assert_same([y.detach(), x.grad, *[p.grad for p in one.module.parameters()]], want)
    assert log.custom_ops("fwd") == ["basiclinear_forward"] * 4 + [
        "forwardlinearbiasactivation_forward",
        "reducescatter_forward",
    ]


def case_low_precision(rank, size):
    for recipe in (CURRENT, DELAYED):
        for kind in ("BasicLinear", "Linear"):
            for mode, sequence in MODES:
                made = Sharded(kind, mode, sequence, rank)
                with bridge.autocast(enabled=True, recipe=recipe):
                    for got, want in zip(made.run(), made.expected, strict=True):
                        assert got.shape == want.shape
                        assert oracles.snr(got, want) > FLOOR, made.what


def case_stored_weights(rank, size):
    """Weights that are kept as casts are sharded likewise."""
    for mode, sequence in MODES:
        with bridge.quantized_model_init(enabled=True, recipe=CURRENT):
            made = Sharded("BasicLinear", mode, sequence, rank)
        with bridge.autocast(enabled=True, recipe=CURRENT):
            for got, want in zip(made.run(), made.expected, strict=True):
                assert oracles.snr(got, want) > FLOOR, made.what


def case_low_precision_compiled(rank, size):
    made = Sharded("BasicLinear", "column", True, rank)
    with bridge.autocast(enabled=True, recipe=CURRENT):
        eager = made.run()
        made.module.compile(fullgraph=True, backend="aot_eager")
        assert_same(made.run(), eager)


def case_backward_overrides(rank, size):
    for override in ("high_precision", "dequantized"):
        recipe = fte.recipes.Float8CurrentScaling(backward_override=override)
        for mode, sequence in MODES:
            made = Sharded("BasicLinear", mode, sequence, rank)
            with bridge.autocast(enabled=True, recipe=recipe):
                found = made.run()
            for i, (got, want) in enumerate(zip(found, made.expected, strict=True)):
                if i > 0 and override == "high_precision":
                    close(got, want, torch.float32, made.what)
                assert oracles.snr(got, want) > FLOOR, made.what


def case_ranks_cast_a_gathered_input_alike(rank, size):
    """The scale of a tensor is that of the gathered one, so the sharded forward is the whole one's, bit for bit."""
    x, weight = uniform((TOKENS, IN), seed=1) * torch.arange(1, TOKENS + 1)[:, None], uniform((OUT, IN), seed=2)
    norm, gain = fte.RMSNorm(IN), torch.ones(IN)
    op = fte.BasicLinear(IN, 2 * OUT, fte.TensorParallel("column", "", size, True))
    # both ranks have the same part of the weight, so that its scale is the same
    for block, params in (
        (fte.chain(op), ({"weight": weight},)),
        (fte.chain(norm, op), ({"weight": gain}, {"weight": weight})),
    ):
        whole = fte.chain(*block.ops[:-1], fte.BasicLinear(IN, OUT))
        expected = fte.apply(whole, params, x, recipe=CURRENT, fusions=fte.Fusions()).output
        assert_same(fte.apply(block, params, mine(x, rank, 0), recipe=CURRENT).output, expected)
    # the norm may not cast for a layer that gathers first
    assert fte.plan(fte.chain(norm, op), recipe=CURRENT).forward[0].next_quantizer is None
    quantized = fte.quantize(mine(x, rank, 0), fte.Float8CurrentScalingQuantizer(dtype=torch.float8_e4m3fn))
    assert fte.apply(op, ({"weight": weight},), quantized).output.shape == (TOKENS, OUT)


def case_what_is_saved(rank, size):
    """In high precision the local rows, gathered again; in low precision one cast copy of all rows."""
    op = fte.BasicLinear(IN, OUT, fte.TensorParallel("column", "", size, True))
    x, params = uniform((TOKENS // size, IN), seed=rank), ({"weight": uniform((OUT // size, IN))},)
    saved = forward_pass(fte.plan(op), x, params, ({},)).saved[0]
    assert saved.input_ is x
    cast = forward_pass(fte.plan(op, recipe=CURRENT), x, params, ({},)).saved[0].input_
    assert cast.shape == (TOKENS, IN)
    assert cast.rowwise_data is None or cast.columnwise_data is None


def case_mlp(rank, size):
    """Norm, column-parallel, activation, row-parallel, with the fusions that still apply."""
    for sequence in (False, True):
        options = {"sequence_parallel": sequence}
        first = ops.Linear(IN, OUT, tensor_parallel_mode="column", **options)
        second = ops.Linear(OUT, IN, tensor_parallel_mode="row", **options)
        module = ops.Sequential(ops.RMSNorm(IN), first, ops.GELU(), second)
        w1, b1, w2 = uniform((OUT, IN), seed=1) / 8, uniform(OUT, seed=2), uniform((IN, OUT), seed=3) / 8
        with torch.no_grad():
            first.weight.copy_(mine(w1, rank, 0))
            first.bias.copy_(mine(b1, rank, 0))
            second.weight.copy_(mine(w2, rank, 1))
        x, dy = uniform((TOKENS, IN), seed=4), uniform((TOKENS, IN), seed=5)
        x64, w1d, b1d, w2d = (t.double().requires_grad_() for t in (x, w1, b1, w2))
        normed = x64 / (x64.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        y64 = gelu(normed @ w1d.t() + b1d, approximate="tanh") @ w2d.t()
        y64.backward(dy.double())
        local = (lambda t: mine(t, rank, 0)) if sequence else (lambda t: t)
        expected = [local(y64.detach()), local(x64.grad), mine(w1d.grad, rank, 0), mine(b1d.grad, rank, 0)]
        expected.append(mine(w2d.grad, rank, 1))

        def check(call, floor, module=module, x=x, dy=dy, first=first, second=second, local=local, expected=expected):
            y, dx = step_of(module, call, local(x), local(dy))
            found = [y, dx, first.weight.grad, first.bias.grad, second.weight.grad]
            for got, want in zip(found, expected, strict=True):
                assert oracles.snr(got, want) > floor
            return found

        eager = check(module, 100)
        if sequence:
            assert_same(check(torch.compile(module, fullgraph=True, backend="aot_eager"), 100), eager)
        with bridge.autocast(enabled=True, recipe=CURRENT):
            check(module, FLOOR)


def step_of(module, call, x, dy):
    module.zero_grad()
    x = x.detach().clone().requires_grad_()
    y = call(x)
    y.backward(dy)
    return y.detach(), x.grad


def case_state_dict_keys(rank, size):
    assert list(ops.BasicLinear(4, 4, tensor_parallel_mode="row").state_dict()) == ["weight", "_extra_state"]
    column = ops.Linear(4, 4, tensor_parallel_mode="column").state_dict()
    assert [key for key in column if "extra" not in key] == ["basic_ops.0.weight", "basic_ops.1.bias"]
    row = ops.Linear(4, 4, tensor_parallel_mode="row", sequence_parallel=True)
    assert set(row.state_dict()) == {
        "basic_ops.0.weight",
        "basic_ops.1.bias",
        *(f"basic_ops.{i}._extra_state" for i in range(3)),
    }
    row.load_state_dict(row.state_dict())
    bare = ops.Linear(4, 4, bias=False, tensor_parallel_mode="row")
    assert bare.bias is None
    assert [type(op).__name__ for op in bare.basic_ops] == ["BasicLinear", "AllReduce"]
    wants(ValueError, "without bias", lambda: setattr(bare, "bias", torch.nn.Parameter(torch.zeros(4))))


def case_attributes_and_initial_values(rank, size):
    column = ops.BasicLinear(16, 64, tensor_parallel_mode="column", sequence_parallel=True)
    assert (column.in_features, column.out_features) == (16, 64)
    assert (column.local_in_features, column.local_out_features) == (16, 32)
    assert (column.tensor_parallel_mode, column.tensor_parallel_size, column.sequence_parallel) == ("column", 2, True)
    assert column.tensor_parallel_group is dist.group.WORLD
    row = ops.BasicLinear(16, 640, tensor_parallel_mode="row")
    assert (row.local_in_features, row.local_out_features) == (8, 640)
    # the bound is that of the local fan-in
    assert 0.98 / 8**0.5 < row.weight.abs().max().item() <= 1 / 8**0.5
    bias = ops.Bias(8, tensor_parallel=True)
    assert bias.bias.shape == (4,)
    assert bias.tensor_parallel_group is dist.group.WORLD


class Tracker:
    """A random state of its own for every rank."""

    def __init__(self, seed):
        self.seed, self.forks = seed, 0

    @contextlib.contextmanager
    def fork(self):
        self.forks += 1
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(self.seed)
            yield


def case_random_state_tracker(rank, size):
    tracker = Tracker(100 + rank)
    linear = ops.Linear(8, 8, tensor_parallel_mode="column", rng_state_tracker_function=lambda: tracker)
    parts = ops.AllGather()(linear.weight.detach())
    assert not torch.equal(parts[:4], parts[4:])
    assert tracker.forks == 1
    before = linear.weight.detach().clone()
    linear.basic_ops[0].reset_parameters()
    assert tracker.forks == 2
    assert torch.equal(before, linear.weight)  # the tracker starts every fork at its seed


def case_constructor_errors(rank, size):
    for kind in (ops.BasicLinear, ops.Linear):
        wants(ValueError, "tensor_parallel_mode", lambda kind=kind: kind(8, 8, tensor_parallel_mode="diagonal"))
        wants(ValueError, "out_features", lambda kind=kind: kind(8, 7, tensor_parallel_mode="column"))
        wants(ValueError, "in_features", lambda kind=kind: kind(7, 8, tensor_parallel_mode="row"))
        wants(
            TypeError,
            "tensor_parallel_group",
            lambda kind=kind: kind(8, 8, tensor_parallel_mode="row", tensor_parallel_group="g"),
        )
    wants(ValueError, "size", lambda: ops.Bias(7, tensor_parallel=True))


def case_shape_errors(rank, size):
    row = ops.BasicLinear(8, 8, tensor_parallel_mode="row", sequence_parallel=True)
    wants(ValueError, "last dimension 4", lambda: row(torch.zeros(2, 8)))
    wants(RuntimeError, "divisible by 2", lambda: row(torch.zeros(3, 4)))
    wants(ValueError, "a dimension before the features", lambda: row(torch.zeros(4)))
    column = ops.BasicLinear(8, 8, tensor_parallel_mode="column", sequence_parallel=True)
    wants(ValueError, "a dimension before the features", lambda: column(torch.zeros(8)))


CASES = {name.removeprefix("case_"): function for name, function in globals().items() if name.startswith("case_")}


def main(rank, size, rendezvous, report):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=size, timeout=timedelta(seconds=60)
    )
    found = {}
    try:
        for name, function in CASES.items():
            torch.manual_seed(0)
            torch._dynamo.reset()
            start = time.perf_counter()
            function(rank, size)
            found[name] = "ok"
            print(f"{name}: {time.perf_counter() - start:.1f} s", flush=True)
    except BaseException:  # the other rank waits for calls that do not come, so nothing can follow
        found[name] = traceback.format_exc()
    finally:
        with open(report, "w") as file:
            json.dump(found, file)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
