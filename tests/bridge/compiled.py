"""Shared by the tests of compiled chains: a backend that keeps the graphs, leaves, and one training step."""

import torch
from torch._dynamo.backends.registry import lookup_backend
from torch.utils import _pytree as torch_pytree

import functional_te as fte

SMALL_HISTORY = fte.recipes.DelayedScaling(amax_history_len=4)
CURRENT = fte.recipes.Float8CurrentScaling()
RECIPES = {"none": None, "current": CURRENT, "delayed": SMALL_HISTORY}


class GraphLog:
    """A Dynamo backend that keeps every graph it is given and then hands it to another backend."""

    def __init__(self, backend="aot_eager"):
        self.graphs = []
        self._compile = lookup_backend(backend)

    def __call__(self, graph, inputs):
        self.graphs.append(graph)
        return self._compile(graph, inputs)

    def custom_ops(self, part=""):
        """Names of the library's custom ops, in order, in subgraphs whose name holds ``part`` (fwd or bwd)."""
        return [
            node.target.name().removeprefix("functional_te::")
            for graph in self.graphs
            for name, module in graph.named_modules()
            if part in name and isinstance(module, torch.fx.GraphModule)
            for node in module.graph.nodes
            if isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "functional_te"
        ]

    def functions(self, part=""):
        """Names of every other function or method called in those subgraphs."""
        return [
            getattr(node.target, "__name__", str(node.target))
            for graph in self.graphs
            for name, module in graph.named_modules()
            if part in name and isinstance(module, torch.fx.GraphModule)
            for node in module.graph.nodes
            if node.op in ("call_function", "call_method")
        ]


def leaf(*shape, seed=0, dtype=torch.float32, requires_grad=True):
    """A random leaf tensor."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype).requires_grad_(requires_grad)


def leaves_of(block, seed=0, dtype=torch.float32):
    """Parameters that require gradients, none of them at its initial value."""
    params = fte.init(block, seed=seed, dtype=dtype)
    generator = torch.Generator().manual_seed(seed + 100)
    for own in params:
        for value in own.values():
            value.add_(0.1 * torch.randn(value.shape, generator=generator).to(dtype)).requires_grad_()
    return params


def copy_of(tree):
    """Deep copies of every tensor, with their own storage; leaves stay leaves."""
    return fte.tree_map(
        lambda t: t.detach().clone().requires_grad_(t.requires_grad) if isinstance(t, torch.Tensor) else t, tree
    )


def grads_of(params):
    """Gradients in the structure of the parameters."""
    return tuple({name: value.grad for name, value in own.items()} for own in params)


def tensors(tree):
    """All tensors of a tree."""
    return [value for value in fte.pytree.leaves(tree) if isinstance(value, torch.Tensor)]


def same_bits(left, right):
    """Whether two trees hold bitwise the same tensors."""
    a, b = tensors(left), tensors(right)
    return len(a) == len(b) and all(x.dtype is y.dtype and torch.equal(x, y) for x, y in zip(a, b, strict=True))


def assert_same_bits(left, right):
    """Assert that two trees hold bitwise the same tensors."""
    a, b = tensors(left), tensors(right)
    assert len(a) == len(b)
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)


def assert_close(left, right, rtol=1e-5, atol=1e-6):
    """Assert that two trees hold nearly the same tensors."""
    a, b = tensors(left), tensors(right)
    assert len(a) == len(b)
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, rtol=rtol, atol=atol)


def backward(outputs, seed=7):
    """Backward from random gradients of every output."""
    outputs = [out for out in torch_pytree.tree_leaves(outputs) if out.requires_grad]
    generator = torch.Generator().manual_seed(seed)
    grads = [torch.randn(out.shape, generator=generator).to(out.dtype) for out in outputs]
    torch.autograd.backward(outputs, grads)


def graph_count(counters):
    """Graphs that Dynamo compiled since its counters were cleared."""
    return counters["stats"]["unique_graphs"]


def break_count(counters):
    """Graph breaks that Dynamo met."""
    return sum(counters["graph_break"].values())
