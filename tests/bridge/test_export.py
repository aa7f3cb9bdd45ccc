"""Quantized tensors through PyTorch's own machinery: export, pytrees, custom ops, autograd functions in one graph."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils import _pytree

import bridge
import functional_te as fte
from bridge.interop import register_pytrees
from functional_te import pytree
from functional_te import quantization as qz
from functional_te.quantization.serialization import quantizer_from_json, quantizer_to_json, to_tensors
from tests.helpers import uniform

E4M3 = torch.float8_e4m3fn
CURRENT = qz.Float8CurrentScalingQuantizer(dtype=E4M3)
BOTH = qz.Float8CurrentScalingQuantizer(dtype=E4M3, columnwise=True)
DELAYED = qz.Float8DelayedScalingQuantizer(dtype=E4M3, columnwise=True, amax_history_len=4)
BLOCK = fte.chain(fte.RMSNorm(16), fte.Linear(16, 32, bias=False), fte.GELU())
# torch's own, while it copies a program
pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated:FutureWarning")


def bits(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8)


def assert_same_bits(actual, expected):
    left, spec = pytree.tree_flatten(actual)
    right, wanted = pytree.tree_flatten(expected)
    assert spec == wanted
    for one, other in zip(left, right, strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert torch.equal(bits(one), bits(other))


class Block(torch.nn.Module):
    """A chain whose weight and state are inputs, and that returns a quantized tensor and the new state."""

    def __init__(self, apply, recipe):
        super().__init__()
        self.apply_, self.recipe = apply, recipe
        self.gain = torch.nn.Parameter(uniform((16,)) + 2)

    def forward(self, x, weight, state):
        params = ({"weight": self.gain}, {"weight": weight}, {})
        y, state = self.apply_(BLOCK, params, x, state, self.recipe)
        return {"y": y, "q": fte.quantize(y, CURRENT)}, state


def by_bridge(block, params, x, state, recipe):
    return bridge.apply(block, params, x, state=state, recipe=recipe)


def by_functions(block, params, x, state, recipe):
    out = fte.apply(block, params, x, state=state, recipe=recipe)
    return out.output, out.state


def delayed_example():
    recipe = fte.recipes.DelayedScaling(amax_history_len=4)
    state = fte.init_state(BLOCK, recipe)
    weight = uniform((32, 16), seed=1)
    quantized, _ = fte.quantize(weight, DELAYED, qz.init_quantizer_state(DELAYED))
    return recipe, (uniform((8, 16)), qz.CachedWeight(value=weight, quantized=quantized), state)


def current_example():
    weight = fte.quantize(uniform((32, 16), seed=1), BOTH)
    return fte.recipes.Float8CurrentScaling(), (uniform((8, 16)), weight, None)


EXAMPLES = {"current": current_example, "delayed": delayed_example}


@pytest.mark.parametrize("strict", [False, True], ids=["traced", "strict"])
@pytest.mark.parametrize("name", EXAMPLES)
def test_exported_chain(tmp_path, name, strict):
    recipe, inputs = EXAMPLES[name]()
    module = Block(by_bridge, recipe)
    with torch.no_grad():
        expected = module(*inputs)
        program = torch.export.export(module, inputs, strict=strict)
        assert_same_bits(program.module()(*inputs), expected)
        targets = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
        assert any(target.startswith("functional_te.") for target in targets)
        plain = program.run_decompositions()
        targets = {str(node.target) for node in plain.graph.nodes if node.op == "call_function"}
        assert all(target.startswith("aten.") for target in targets)
        assert_same_bits(plain.module()(*inputs), expected)
        for saved in () if strict else (program, plain):
            torch.export.save(saved, tmp_path / "program.pt2")
            again = torch.export.load(tmp_path / "program.pt2")
            assert_same_bits(again.module()(*inputs), expected)
            assert_same_bits(again.example_inputs[0], inputs)


def test_exported_functions():
    """The functional interface has no custom ops: its kernels are traced through."""
    recipe, inputs = current_example()
    module = Block(by_functions, recipe)
    with torch.no_grad():
        program = torch.export.export(module, inputs)
        assert_same_bits(program.module()(*inputs), module(*inputs))


def test_exported_batch_size():
    recipe, (x, weight, state) = current_example()
    module = Block(by_bridge, recipe)
    batch = torch.export.Dim("batch", min=2)
    # a quantized tensor counts as the list of its six fields
    shapes = ({0: batch}, [None] * 6, None)
    with torch.no_grad():
        program = torch.export.export(module, (x, weight, state), dynamic_shapes=shapes)
        for size in (3, 8, 20):
            x = uniform((size, 16), seed=size)
            assert_same_bits(program.module()(x, weight, state), module(x, weight, state))


ROOT = Path(__file__).parents[2]
LOADER = """
import sys, torch
import bridge.interop
from functional_te.quantization.serialization import from_tensors, to_tensors
tensors = torch.load(sys.argv[1], weights_only=True)
inputs, expected = from_tensors(tensors)
result = torch.export.load(sys.argv[2]).module()(*inputs)
actual = to_tensors((inputs, result))
assert actual.keys() == tensors.keys()
bits = lambda tensor: tensor.contiguous().view(-1).view(torch.uint8)
assert all(torch.equal(bits(actual[name]), bits(tensors[name])) for name in tensors)
print("same bits")
"""


def test_loading_in_another_process(tmp_path):
    recipe, inputs = delayed_example()
    module = Block(by_bridge, recipe)
    with torch.no_grad():
        program = torch.export.export(module, inputs).run_decompositions()
        torch.export.save(program, tmp_path / "program.pt2")
        torch.save(to_tensors((inputs, module(*inputs))), tmp_path / "tensors.pt")
    command = [sys.executable, "-W", "ignore", "-c", LOADER, tmp_path / "tensors.pt", tmp_path / "program.pt2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout == "same bits\n", done.stderr


# ---------------------------------------------------------------------------- pytrees


def test_nodes_of_torch_pytrees():
    register_pytrees()  # again: does nothing
    _, (_, cached, state) = delayed_example()
    key = qz.StochasticRoundingState(key=torch.zeros(2, dtype=torch.int64), amax_history=torch.zeros(1))
    tree = (cached, state, key, fte.quantize(uniform((3, 64)), qz.MXFP8Quantizer(dtype=E4M3, columnwise=True)))
    flat, spec = _pytree.tree_flatten(tree)
    assert all(leaf is None or type(leaf) is torch.Tensor for leaf in flat)
    assert_same_bits(_pytree.tree_unflatten(flat, spec), tree)
    assert_same_bits(_pytree.tree_map(lambda leaf: leaf, tree), tree)
    again = _pytree.treespec_loads(_pytree.treespec_dumps(spec))
    assert again == spec
    assert_same_bits(_pytree.tree_unflatten(flat, again), tree)
    names = [_pytree.keystr(path) for path, leaf in _pytree.tree_leaves_with_path(tree[3]) if leaf is not None]
    assert names == [".rowwise_data", ".rowwise_scale_inv", ".columnwise_data", ".columnwise_scale_inv"]
    assert _pytree.tree_structure(tree[3]) != _pytree.tree_structure(fte.quantize(uniform((3, 64)), BOTH))


def test_structures_outlive_quantizers():
    quantizer = qz.Float8CurrentScalingQuantizer(dtype=E4M3, amax_epsilon=0.123)
    flat, spec = _pytree.tree_flatten(fte.quantize(uniform((3, 4)), quantizer))
    uid = quantizer.uid
    del quantizer
    assert _pytree.tree_unflatten(flat, spec).quantizer.uid == uid


def test_saved_structures_hold_no_code():
    spec = _pytree.tree_structure(fte.quantize(uniform((3, 4)), CURRENT))
    text = _pytree.treespec_dumps(spec)
    with pytest.raises(ValueError, match=r"torch\.export of a QuantizedTensor: structure: expected"):
        _pytree.treespec_loads(text.replace("Float8CurrentScalingQuantizer", "os.system"))


def test_torch_pytrees_in_a_graph():
    def double(q):
        return _pytree.tree_map(lambda leaf: None if leaf is None else leaf.clone(), q)

    q = fte.quantize(uniform((3, 4)), BOTH)
    assert_same_bits(torch.compile(double, fullgraph=True, backend="eager")(q), q)


# ---------------------------------------------------------------------------- autograd functions and custom ops


class Product(torch.autograd.Function):
    """A user's function that takes a quantized tensor and keeps it for the backward."""

    @staticmethod
    def forward(ctx, x, q):
        ctx.save_for_backward(q.rowwise_data, q.rowwise_scale_inv)
        ctx.quantizer, ctx.dtype = q.quantizer, q.dtype
        return x @ q.dequantize().t()

    @staticmethod
    def backward(ctx, grad):
        data, scale_inv = ctx.saved_tensors
        q = fte.QuantizedTensor(
            rowwise_data=data, rowwise_scale_inv=scale_inv, dtype=ctx.dtype, quantizer=ctx.quantizer
        )
        return grad @ q.dequantize(), None


def given(x, w, q):
    return Product.apply(x, q)


def made_inside(x, w, q):
    return Product.apply(x, fte.quantize(w, q.quantizer))


@pytest.mark.parametrize("function", [given, made_inside])
@pytest.mark.parametrize(
    "quantizer", [CURRENT, qz.Float8BlockQuantizer(dtype=E4M3), qz.MXFP8Quantizer(dtype=E4M3)], ids=str
)
def test_autograd_function_in_one_graph(function, quantizer):
    x, w = uniform((4, 64)).requires_grad_(), uniform((6, 64), seed=1)
    q = fte.quantize(w, quantizer)
    expected = function(x, w, q)
    (grad,) = torch.autograd.grad(expected.sum(), x)
    assert torch.equal(grad, torch.ones(4, 6) @ q.dequantize())
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")(x, w, q)
    assert torch.equal(compiled, expected)
    assert torch.equal(torch.autograd.grad(compiled.sum(), x)[0], grad)


@torch.library.custom_op("functional_te_tests::product", mutates_args=())
def product(x: torch.Tensor, data: torch.Tensor, scale_inv: torch.Tensor, quantizer: str) -> torch.Tensor:
    """A user's custom op: a quantized tensor goes in by its tensors and its quantizer as text."""
    q = fte.QuantizedTensor(
        rowwise_data=data, rowwise_scale_inv=scale_inv, dtype=x.dtype, quantizer=quantizer_from_json(quantizer)
    )
    return x @ q.dequantize().t()


@product.register_fake
def _(x, data, scale_inv, quantizer):
    return x.new_empty(x.shape[0], data.shape[0])


def test_custom_op_in_one_graph():
    text = quantizer_to_json(CURRENT)

    def function(x, q):
        return product(x, q.rowwise_data, q.rowwise_scale_inv, text)

    x, q = uniform((4, 8)), fte.quantize(uniform((6, 8)), CURRENT)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, q), x @ q.dequantize().t())
