"""The private PyTorch interfaces in ``bridge.compat`` still mean what the bridge takes them to mean."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from bridge import compat


def test_every_function_of_compat_has_a_test_here():
    tested = {name.removeprefix("test_").split("__")[0] for name in globals() if name.startswith("test_")}
    assert set(compat.__all__) <= tested


def test_in_backward__outside_and_in_a_forward():
    assert compat.in_backward() is False
    x = torch.ones(2, requires_grad=True)
    y = (x * x).sum()
    assert compat.in_backward() is False
    y.backward()
    assert compat.in_backward() is False


def test_in_backward__inside_a_backward():
    seen = []

    class Spy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            seen.append(("forward", compat.in_backward()))
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            seen.append(("backward", compat.in_backward()))
            return grad * 2

    Spy.apply(torch.ones(2, requires_grad=True)).sum().backward()
    assert seen == [("forward", False), ("backward", True)]


def test_in_backward__inside_a_recomputed_forward():
    for use_reentrant in (True, False):
        seen = []

        def forward(x, seen=seen):
            seen.append(compat.in_backward())
            return torch.sin(x)

        x = torch.ones(2, requires_grad=True)
        y = checkpoint(forward, x, use_reentrant=use_reentrant)
        assert seen == [False]
        y.sum().backward()
        assert seen == [False, True]


def test_in_backward__is_over_after_a_backward_that_failed():
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            raise RuntimeError("on purpose")

    y = Fails.apply(torch.ones(2, requires_grad=True)).sum()
    with pytest.raises(RuntimeError, match="on purpose"):
        y.backward()
    assert compat.in_backward() is False


def test_functorch_active__only_inside_a_transform():
    seen = []

    def function(x):
        seen.append(compat.functorch_active())
        return (x * x).sum()

    x = torch.ones(2, requires_grad=True)
    function(x).backward()
    with torch.no_grad():
        function(x)
    assert seen == [False, False]
    torch.func.grad(function)(x.detach())
    _, pullback = torch.func.vjp(function, x.detach())
    pullback(torch.ones(()))
    torch.func.vmap(function)(torch.ones(3, 2))
    assert seen[2:] == [True, True, True]
    assert compat.functorch_active() is False


def test_preserved_versions() -> None:
    kept, changed = torch.zeros(2), torch.zeros(2)
    with compat.preserved_versions((kept,)):
        kept.add_(1.0)
        changed.add_(1.0)
    assert kept.tolist() == [1.0, 1.0]
    assert (kept._version, changed._version) == (0, 1)


def test_no_torch_function__leaves_subclasses_to_dispatch() -> None:
    class Plain(torch.Tensor):
        __torch_function__ = compat.no_torch_function

    class Usual(torch.Tensor):
        pass

    assert type(torch.ones(2).as_subclass(Plain) + 1) is torch.Tensor
    assert type(torch.ones(2).as_subclass(Usual) + 1) is Usual


def test_wrapper__has_a_shape_and_no_storage() -> None:
    seen = []

    class Wrapper(torch.Tensor):
        __torch_function__ = compat.no_torch_function

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            seen.append(func)
            return torch.ones(1)

    made = compat.wrapper(Wrapper, (2, 3), None, torch.bfloat16, torch.device("cpu"))
    assert (type(made), made.shape, made.dtype, made.requires_grad) == (Wrapper, (2, 3), torch.bfloat16, False)
    assert torch.equal(torch.neg(made), torch.ones(1))
    assert seen == [torch.ops.aten.neg.default]


def test_written_arguments() -> None:
    aten = torch.ops.aten
    assert compat.written_arguments(aten.add.Tensor) == ()
    assert compat.written_arguments(aten.view.default) == ()  # an alias that is not written to
    assert compat.written_arguments(aten.copy_.default) == ((0, "self"),)
    assert compat.written_arguments(aten.add.out) == ((3, "out"),)
    assert compat.written_arguments(aten._foreach_add_.List) == ((0, "self"),)


def test_register_torch_pytree() -> None:
    class Pair:
        def __init__(self, left, right, name):
            self.left, self.right, self.name = left, right, name

    assert not compat.is_torch_pytree(Pair)
    compat.register_torch_pytree(
        Pair,
        ("left", "right"),
        (lambda pair: ([pair.left, pair.right], pair.name), lambda values, name: Pair(*values, name)),
        (str, str),
    )
    assert compat.is_torch_pytree(Pair)
    with_paths, spec = torch.utils._pytree.tree_flatten_with_path([Pair(1, 2, "a")])
    assert [(torch.utils._pytree.keystr(path), value) for path, value in with_paths] == [
        ("[0].left", 1),
        ("[0].right", 2),
    ]
    (again,) = torch.utils._pytree.tree_unflatten([3, 4], spec)
    assert (type(again), again.left, again.right, again.name) == (Pair, 3, 4, "a")
    loaded = torch.utils._pytree.treespec_loads(torch.utils._pytree.treespec_dumps(spec))
    assert loaded == spec


def test_is_torch_pytree__of_builtin_containers() -> None:
    assert compat.is_torch_pytree(dict)
    assert not compat.is_torch_pytree(int)


def test_copy_all__writes_through_views() -> None:
    whole = [torch.zeros(3), torch.zeros(2)]
    compat.copy_all([own[:1] for own in whole], [torch.ones(1), torch.full((1,), 2.0)])
    assert [own.tolist() for own in whole] == [[1, 0, 0], [2, 0]]


def test_local_tensor__is_the_same_object_every_time() -> None:
    from torch.distributed.tensor import Replicate, distribute_tensor

    plain = torch.ones(2)
    assert compat.local_tensor(plain) is plain
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        made = distribute_tensor(plain, mesh, [Replicate()])
        assert torch.equal(compat.local_tensor(made), plain)
        assert compat.local_tensor(made) is compat.local_tensor(made)
    finally:
        torch.distributed.destroy_process_group()


def test_mark_static__reaches_the_graph_of_a_tensor_from_outside() -> None:
    """Also a tensor that is no buffer: the graph's input is marked as one that stays where it is."""

    class Holder:
        def __init__(self, tensor):
            self.tensor = tensor

    marks = []

    def backend(graph, inputs):
        for node in graph.graph.nodes:
            if node.op == "placeholder":
                marks.append(node.meta.get("tensor_dict", {}).get("_dynamo_static_input_type"))
        return graph

    for mark in (False, True):
        holder = Holder(torch.ones(2))
        if mark:
            compat.mark_static(holder.tensor)
        torch._dynamo.reset()
        torch.compile(lambda x, holder=holder: x + holder.tensor, backend=backend, fullgraph=True)(torch.ones(2))
    assert marks[:2] == [None, None]
    assert sorted(map(str, marks[2:])) == ["None", "unguarded"]


def _sized(rows):
    """A tensor without storage of ``rows`` rows, a symbol if None, and what knows the symbol."""
    mode, environment = compat.storage_free_mode()
    size = compat.symbolic_size(mode, 6) if rows is None else rows
    with mode:
        return torch.empty(size, 4), environment


def test_storage_free_mode():
    tensor, _ = _sized(1 << 40)
    assert tensor.shape == (1 << 40, 4)


def test_symbolic_size():
    mode, _ = compat.storage_free_mode()
    sizes = [compat.symbolic_size(mode, 6) for _ in range(2)]
    assert all(isinstance(size, torch.SymInt) for size in sizes)
    assert str(sizes[0]) != str(sizes[1])


@pytest.mark.parametrize(
    ("question", "assumes"), [(None, False), (lambda n: n % 2 == 0, True), (lambda n: n // 3 != 1, False)]
)
def test_assumed(question, assumes):
    tensor, environment = _sized(None)
    if question is not None:
        assert question(tensor.shape[0])
    assert compat.assumed(environment) == assumes


def test_compiling():
    assert not torch.compiler.is_compiling()
    with compat.compiling():
        assert torch.compiler.is_compiling()
    assert not torch.compiler.is_compiling()


def test_record():
    tensor, _ = _sized(None)
    graph = compat.record(lambda x: [x * 2, None], [tensor])
    targets = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    assert targets == [torch.ops.aten.mul.Tensor]


def test_results():
    tensor, _ = _sized(None)
    made, nothing, same = compat.results(compat.record(lambda x: [x.sum(1), None, x], [tensor]))
    assert str(made.shape) == f"torch.Size([{tensor.shape[0]}])"
    assert nothing is None
    assert same.shape[1] == 4


def test_straight_line():
    tensor, _ = _sized(None)
    graph = compat.record(lambda x: [(x * 2).reshape(-1, 2), None, x.shape[0] + 1], [tensor])
    names = []

    def rename(op):
        names.append(op)
        return torch.ops.aten.add.Tensor if op is torch.ops.aten.mul.Tensor else op

    function = compat.straight_line(graph, rename)
    x = torch.ones(4, 6).t()[:, :4]  # a view of these strides is none
    y, nothing, size = function(x)
    assert torch.equal(y, torch.full((12, 2), 3.0))
    assert nothing is None
    assert size == 7
    assert torch.ops.aten.mul.Tensor in names


def test_straight_line__numbers_come_from_methods():
    tensor, _ = _sized(None)
    graph = compat.record(lambda x: [x.as_strided((x.numel(),), (1,)), x.new_zeros(x.shape[0])], [tensor])
    function = compat.straight_line(graph, lambda op: op)
    assert [name for name in function.__code__.co_names if name.startswith("sym_")] == []
    assert [part.shape for part in function(torch.ones(3, 4))] == [(12,), (3,)]


def test_straight_line__constants():
    graph = compat.record(lambda x: [x + torch.tensor([1.0, 2.0, 3.0, 4.0])], [torch.ones(2, 4)])
    with pytest.raises(NotImplementedError, match="a constant tensor"):
        compat.straight_line(graph, lambda op: op)


def test_forward_ad_active__inside_a_level_and_a_transform():
    seen = []

    def function(x):
        seen.append(compat.forward_ad_active())
        return x

    function(torch.ones(1))
    with torch.autograd.forward_ad.dual_level():
        function(torch.ones(1))
    torch.func.jvp(function, (torch.ones(1),), (torch.ones(1),))
    torch.func.grad(lambda x: function(x).sum())(torch.ones(1))
    assert seen == [False, True, True, False]


def test_dispatch_modes_active__inside_one_of_the_callers():
    seen = [compat.dispatch_modes_active()]
    with FlopCounterMode(display=False):
        seen.append(compat.dispatch_modes_active())
    with torch.device("cpu"), torch.no_grad():
        seen.append(compat.dispatch_modes_active())
    assert seen == [False, True, False]


def test_real_tensors__while_a_program_is_exported():
    made = []

    class Module(torch.nn.Module):
        def forward(self, x):
            with compat.real_tensors(), torch.no_grad():
                made.append(torch.ones(2))
            return x + 1

    program = torch.export.export(Module(), (torch.ones(1),))
    assert type(made[0]) is torch.Tensor
    assert [node.target for node in program.graph.nodes if node.op == "call_function"] == [torch.ops.aten.add.Tensor]
