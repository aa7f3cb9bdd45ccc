"""What whole chains promise under ``torch.compile(fullgraph=True)``, shown with ops of the tests' own."""

import warnings

import pytest
import torch

import bridge
import functional_te as fte
from bridge import gate

from .compiled import CURRENT, GraphLog, assert_close, backward, copy_of, grads_of, graph_count, leaf, leaves_of
from .testing_ops import BACKWARD_GAIN_CUBE, Cube, Gain, NumpyTanh, Sine

NO_FUSIONS = fte.Fusions()


def _formula(x, gain, *, factor=1.0, temperature=1.0, offset=0.0, power=1):
    return x * gain * factor * temperature + offset + power


def _eager_and_compiled(block, x, params, oracle=None, **options):
    """Outputs and gradients of eager and compiled runs agree (and agree with ``oracle``); returns the graphs."""

    def run(x, params):
        return bridge.apply(block, params, x, **options)[0]

    log = GraphLog()
    results = []
    for function in (run, torch.compile(run, fullgraph=True, backend=log)):
        own_x, own_params = copy_of(x), copy_of(params)
        y = function(own_x, own_params)
        backward(y)
        results.append((fte.tree_map(torch.Tensor.detach, y), own_x.grad, grads_of(own_params)))
    assert_close(results[0], results[1])
    if oracle is not None:
        wide_x = x.detach().double().requires_grad_()
        wide = [value.detach().double().requires_grad_() for own in params for value in own.values()]
        y = oracle(wide_x, *wide)
        backward(y)
        expected = (y.detach(), wide_x.grad, [value.grad for value in wide])
        assert_close(fte.tree_map(lambda t: t.float(), expected), results[1])
    return log


@pytest.mark.parametrize("block", [fte.chain(Gain(6)), Gain(6)], ids=["chain of one", "bare op"])
def test_a_group_of_one_op_compiles_and_matches(dynamo, block):
    log = _eager_and_compiled(block, leaf(4, 6), leaves_of(block), oracle=_formula)
    assert graph_count(dynamo) == 1
    assert log.custom_ops("fwd") == ["gain_forward"]
    assert log.custom_ops("bwd") == ["gain_backward"]


def test_b_group_of_two_ops_runs_its_custom_ops_in_one_graph(dynamo):
    block = fte.chain(Gain(6), Cube())
    log = _eager_and_compiled(block, leaf(4, 6), leaves_of(block), oracle=lambda x, g: _formula(x, g) ** 3)
    assert graph_count(dynamo) == 1
    assert len(log.graphs) == 1
    assert log.custom_ops("fwd") == ["gain_forward", "cube_forward"]
    assert log.custom_ops("bwd") == ["cube_backward", "gain_backward"]


def test_c_backward_only_fusion_survives_in_the_compiled_graph(dynamo):
    block = fte.chain(Gain(6), Cube())
    rules = fte.Fusions(backward=(BACKWARD_GAIN_CUBE,))
    assert len(fte.plan(block, fusions=rules).backward) == 1  # otherwise nothing is shown
    log = _eager_and_compiled(
        block, leaf(4, 6), leaves_of(block), oracle=lambda x, g: _formula(x, g) ** 3, fusions=rules
    )
    assert graph_count(dynamo) == 1
    assert log.custom_ops("fwd") == ["gain_forward", "cube_forward"]
    assert log.custom_ops("bwd") == ["backwardgaincube_backward"]


def test_c_built_in_backward_fusion_survives_beside_an_unfused_forward(dynamo):
    block = fte.chain(fte.MakeExtraOutput(), fte.RMSNorm(8))
    log = _eager_and_compiled(block, leaf(4, 8), leaves_of(block))
    assert log.custom_ops("fwd") == ["rmsnorm_forward"]
    assert log.custom_ops("bwd") == ["backwardaddrmsnorm_backward"]


def test_d_op_without_custom_op_runs_its_eager_implementation_and_says_so_once(dynamo, monkeypatch):
    monkeypatch.setattr(gate, "_reported", set())
    block = fte.chain(Gain(6), Sine(), Cube())
    with pytest.warns(bridge.CompileEagerFallbackWarning, match="Sine declares no forward argument bundle") as caught:
        log = _eager_and_compiled(
            block, leaf(4, 6), leaves_of(block), oracle=lambda x, g: torch.sin(_formula(x, g)) ** 3
        )
    assert len(caught) == 1
    assert graph_count(dynamo) == 1
    assert log.custom_ops("fwd") == ["gain_forward", "cube_forward"]
    assert log.custom_ops("bwd") == ["cube_backward", "gain_backward"]
    assert "sin" in log.functions("fwd")
    assert "cos" in log.functions("bwd")
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter(
            "error", bridge.CompileEagerFallbackWarning
        )  # a second graph with the same op: the reason is known by now
        log = _eager_and_compiled(fte.chain(Sine(), Cube()), leaf(4, 6), ({}, {}), oracle=lambda x: torch.sin(x) ** 3)
    assert log.custom_ops("fwd") == ["cube_forward"]


def test_opaque_op_keeps_its_body_closed(dynamo):
    block = fte.chain(Gain(6), NumpyTanh())
    log = _eager_and_compiled(
        block, leaf(4, 6), leaves_of(block), oracle=lambda x, g: torch.tanh(_formula(x, g)), fusions=NO_FUSIONS
    )
    assert graph_count(dynamo) == 1
    assert log.custom_ops("fwd") == ["gain_forward", "numpytanh_forward"]
    assert log.custom_ops("bwd") == ["numpytanh_backward", "gain_backward"]


# ---------------------------------------------------------------------------- (e) forward kwargs


class _Compiled:
    """``Gain`` under ``fullgraph=True`` with forward kwargs, compared with its formula at every call."""

    def __init__(self):
        self.log = GraphLog()
        self.block = fte.chain(Cube(), Gain(6))
        self.params = leaves_of(self.block)
        self.run = torch.compile(self._run, fullgraph=True, backend=self.log)

    def _run(self, x, params, kwargs):
        return bridge.apply(self.block, params, x, kwargs={1: kwargs})[0]

    def check(self, seed, **kwargs):
        """One call with these kwargs agrees with autograd of the formula."""
        x, params = leaf(4, 6, seed=seed), copy_of(self.params)
        y = self.run(x, params, kwargs)
        backward(y)
        wide_x, gain = x.detach().double().requires_grad_(), params[1]["gain"].detach().double().requires_grad_()
        values = {
            name: value.dequantize().double() if isinstance(value, fte.QuantizedTensor) else value
            for name, value in kwargs.items()
        }
        expected = _formula(wide_x**3, gain, **values)
        backward(expected)
        assert_close((expected.float(), wide_x.grad.float(), gain.grad.float()), (y, x.grad, params[1]["gain"].grad))


def test_e_quantized_kwarg_goes_through_the_custom_op_and_changes_without_recompilation(dynamo):
    compiled = _Compiled()
    quantizer = fte.Float8CurrentScalingQuantizer(dtype=torch.float8_e4m3fn)
    for seed in range(4):
        compiled.check(seed, offset=fte.quantize(leaf(4, 6, seed=seed + 50, requires_grad=False), quantizer))
    assert graph_count(dynamo) == 1
    assert compiled.log.custom_ops("fwd") == ["cube_forward", "gain_forward"]
    assert "dequantize" not in compiled.log.functions()
    node = next(
        node
        for module in compiled.log.graphs[0].modules()
        if isinstance(module, torch.fx.GraphModule)
        for node in module.graph.nodes
        if "gain_forward" in str(node.target)
    )
    dtypes = [arg.meta["example_value"].dtype for arg in node.args if isinstance(arg, torch.fx.Node)]
    assert torch.float8_e4m3fn in dtypes  # the FP8 data themselves are the argument


def test_e_scalar_tensor_kwarg_changes_without_recompilation(dynamo):
    compiled = _Compiled()
    for seed in range(4):
        compiled.check(seed, temperature=torch.tensor(0.5 + seed))
    assert graph_count(dynamo) == 1
    assert compiled.log.custom_ops("fwd") == ["cube_forward", "gain_forward"]


@pytest.mark.parametrize(
    ("name", "values"),
    [("factor", (0.5, 1.25, 2.5, 3.0, 0.0, 1.0)), ("power", (3, 5, 7, 11, 2, 13))],
    ids=["float", "int"],
)
def test_e_value_kwarg_costs_at_most_one_recompile(dynamo, name, values):
    compiled = _Compiled()
    counts = []
    for seed, value in enumerate(values):
        compiled.check(seed, **{name: value})
        counts.append(graph_count(dynamo))
    assert counts[1] <= 2
    assert counts[-1] == counts[1]  # third and later values are free
    assert compiled.log.custom_ops("fwd")[:2] == ["cube_forward", "gain_forward"]


def test_kwarg_may_be_absent_after_it_was_given(dynamo):
    compiled = _Compiled()
    compiled.check(0, temperature=torch.tensor(2.0))
    compiled.check(1)
    compiled.check(2, temperature=torch.tensor(3.0))
    assert graph_count(dynamo) == 2


def test_kwargs_beside_a_recipe(dynamo):
    block = fte.chain(Gain(16), fte.Linear(16, 16, bias=False))
    params, x = leaves_of(block), leaf(4, 16)

    def run(x, params, temperature):
        return bridge.apply(block, params, x, recipe=CURRENT, kwargs={0: {"temperature": temperature}})[0]

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for value in (0.5, 2.0, 4.0):
        temperature = torch.tensor(value)
        torch.testing.assert_close(compiled(x, params, temperature), run(x, params, temperature))
    assert graph_count(dynamo) == 1


def test_unknown_kwarg_is_refused_by_name():
    with pytest.raises(ValueError, match=r"Gain.*'offest'"):
        bridge.apply(Gain(6), leaves_of(Gain(6)), leaf(4, 6), kwargs={0: {"offest": 1.0}})
    with pytest.raises(ValueError, match="op indices"):
        bridge.apply(Gain(6), leaves_of(Gain(6)), leaf(4, 6), kwargs={3: {"power": 1}})
