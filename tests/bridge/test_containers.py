"""Sequential: container semantics, groups, extra tensors, kwargs and channels."""

import collections
import copy

import pytest
import torch

from bridge import ops

from .compiled import assert_close, assert_same_bits, graph_count
from .testing_ops import Gain


class GainModule(ops.BasicOperation):
    """A module over an op that takes forward kwargs."""

    def __init__(self, size):
        super().__init__(Gain(size))


def _scales(model, x=None):
    """The factor by which a container of ConstantScale ops multiplies: what really runs, not what is listed."""
    x = torch.ones(1) if x is None else x
    return model(x).item()


# ---------------------------------------------------------------------------- container semantics


def test_len_iteration_indices_and_slices():
    modules = [ops.ConstantScale(float(n)) for n in (2, 3, 5)]
    model = ops.Sequential(*modules)
    assert len(model) == 3
    assert list(model) == modules
    assert model[1] is modules[1]
    assert model[-1] is modules[2]
    assert type(model[:2]) is ops.Sequential
    assert list(model[:2]) == modules[:2]
    assert _scales(model) == 30
    assert _scales(model[1:]) == 15
    with pytest.raises(IndexError):
        model[3]
    assert [name for name, _ in model.named_children()] == ["0", "1", "2"]


def _set(model):
    model[1] = ops.ConstantScale(7.0)


def _delete(model):
    del model[0]


def _delete_slice(model):
    del model[:2]


def _add_in_place(model):
    model += ops.Sequential(ops.ConstantScale(11.0))


def _multiply_in_place(model):
    model *= 2


MUTATIONS = {
    "setitem": (_set, 70),
    "delitem": (_delete, 15),
    "delitem_slice": (_delete_slice, 5),
    "append": (lambda m: m.append(ops.ConstantScale(7.0)), 210),
    "extend": (lambda m: m.extend([ops.ConstantScale(7.0), ops.ConstantScale(0.5)]), 105),
    "extend_container": (lambda m: m.extend(ops.Sequential(ops.ConstantScale(7.0))), 210),
    "insert": (lambda m: m.insert(1, ops.ConstantScale(7.0)), 210),
    "insert_front": (lambda m: m.insert(-3, ops.ConstantScale(7.0)), 210),
    "pop": (lambda m: m.pop(1), 10),
    "pop_last": (lambda m: m.pop(-1), 6),
    "iadd": (_add_in_place, 330),
    "imul": (_multiply_in_place, 900),
    "add_module": (lambda m: m.add_module("3", ops.ConstantScale(7.0)), 210),
    "register_module": (lambda m: m.register_module("3", ops.ConstantScale(7.0)), 210),
}


@pytest.mark.parametrize("how", MUTATIONS)
@pytest.mark.parametrize("called_before", [False, True])
def test_what_runs_follows_every_mutation(how, called_before):
    model = ops.Sequential(ops.ConstantScale(2.0), ops.ConstantScale(3.0), ops.ConstantScale(5.0))
    if called_before:
        assert _scales(model) == 30
    mutate, expected = MUTATIONS[how]
    mutate(model)
    assert _scales(model) == expected
    x = torch.ones(1)
    for module in model:
        x = module(x)
    assert x.item() == expected


def test_sum_of_containers():
    one, other = ops.Sequential(ops.ConstantScale(2.0)), ops.Sequential(ops.ConstantScale(3.0), ops.ConstantScale(5.0))
    both = one + other
    assert type(both) is ops.Sequential
    assert list(both) == [*one, *other]
    assert (len(one), len(other)) == (1, 2)
    assert _scales(both) == 30
    assert _scales(one * 3) == 8
    with pytest.raises((TypeError, ValueError)):
        one + 3


def test_pop_returns_the_module_and_the_rest_is_numbered_again():
    modules = [ops.ConstantScale(float(n)) for n in (2, 3, 5)]
    model = ops.Sequential(*modules)
    assert model.pop(0) is modules[0]
    assert list(model) == modules[1:]
    model.append(ops.ConstantScale(7.0))
    assert len(model) == 3
    assert _scales(model) == 105


@pytest.mark.parametrize("as_mapping", [dict, collections.OrderedDict])
def test_named_modules(as_mapping):
    model = ops.Sequential(as_mapping({"norm": ops.RMSNorm(4), "mlp": ops.Linear(4, 4)}))
    assert [name for name, _ in model.named_children()] == ["norm", "mlp"]
    assert "mlp.basic_ops.0.weight" in model.state_dict()
    assert model.mlp is model[1]
    assert model.norm is model[0]


def test_a_module_exchanged_by_name_is_the_one_that_runs():
    model = ops.Sequential({"norm": ops.RMSNorm(4), "mlp": ops.Linear(4, 4)})
    model.mlp = ops.ConstantScale(2.0)
    x = torch.randn(3, 4)
    assert_same_bits(model(x).detach(), (2 * model.norm(x)).detach())


def test_an_empty_container_returns_its_input():
    x = torch.randn(2)
    assert ops.Sequential()(x) is x


def test_other_modules_split_the_groups():
    model = ops.Sequential(
        ops.Linear(4, 8), torch.nn.Tanh(), ops.Sequential(ops.GELU(), ops.Linear(8, 8)), ops.ReLU(), ops.Bias(8)
    )
    x = torch.randn(3, 4, requires_grad=True)
    other = x.detach().clone().requires_grad_()
    model(x).square().sum().backward()
    grads = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    y = other
    for module in model:
        y = module(y)
    y.square().sum().backward()
    assert_close([x.grad, *grads], [other.grad, *[p.grad for p in model.parameters()]])


@pytest.mark.parametrize("mode", ["eager", "compiled"])
def test_mutation_after_a_call(dynamo, mode):
    model = ops.Sequential(ops.ConstantScale(2.0), ops.ConstantScale(3.0))
    run = torch.compile(model, fullgraph=True, backend="aot_eager") if mode == "compiled" else model
    assert run(torch.ones(1)).item() == 6
    model.append(ops.ConstantScale(5.0))
    assert run(torch.ones(1)).item() == 30


# ---------------------------------------------------------------------------- extra tensors and kwargs


def _branching():
    return ops.Sequential(
        ops.AddExtraInput(), ops.MakeExtraOutput(), torch.nn.Tanh(), ops.AddExtraInput(), ops.MakeExtraOutput()
    )


@pytest.mark.parametrize("mode", ["eager", "compiled"])
def test_extra_tensors_are_dealt_across_groups(dynamo, mode):
    model = _branching()
    run = torch.compile(model, fullgraph=True, backend="aot_eager") if mode == "compiled" else model
    x, a, b = (torch.randn(3, 4, requires_grad=True) for _ in range(3))
    wide_x, wide_a, wide_b = (t.detach().clone().requires_grad_() for t in (x, a, b))
    outputs = run(x, a, b)
    first = wide_x + wide_a
    second = torch.tanh(first) + wide_b
    expected = (second, first, second)
    assert_close([out.detach() for out in outputs], [out.detach() for out in expected])
    grads = [torch.randn(3, 4) for _ in range(3)]
    torch.autograd.backward(outputs, grads)
    torch.autograd.backward(expected, grads)
    assert_close([x.grad, a.grad, b.grad], [wide_x.grad, wide_a.grad, wide_b.grad])
    if mode == "compiled":
        assert graph_count(dynamo) == 1


@pytest.mark.parametrize("count", [0, 1, 3])
def test_wrong_number_of_extra_inputs(count):
    x = torch.randn(3, 4)
    with pytest.raises(ValueError, match="extra_inputs"):
        _branching()(x, *[x] * count)


def test_extra_input_of_another_shape_names_the_op():
    with pytest.raises(ValueError, match=r"op 0 \(AddExtraInput\).*extra input 0.*\(3, 4\).*\(4,\)"):
        _branching()(torch.randn(3, 4), torch.randn(4), torch.randn(3, 4))


def test_op_kwargs_by_op_and_by_index():
    model = ops.Sequential(ops.ConstantScale(2.0), GainModule(4), torch.nn.Tanh(), GainModule(4))
    x, gains = torch.randn(3, 4), [model[1].gain, model[3].gain]

    def expected(first, second):
        return torch.tanh(2 * x * gains[0] * first + 1) * gains[1] * second + 1

    assert_close(model(x, op_kwargs={model[1]: {"factor": 3.0}}), expected(3, 1))
    assert_close(model(x, op_kwargs={1: {"factor": 3.0}, -1: {"factor": 0.5}}), expected(3, 0.5))
    assert_close(model(x), expected(1, 1))
    assert_close(model(x, op_kwargs={}), expected(1, 1))
    assert_close(model[1](x, factor=3.0), x * gains[0] * 3 + 1)


@pytest.mark.parametrize("key", [4, -5, "Linear", "other op", "plain module"])
def test_bad_targets_of_op_kwargs(key):
    model = ops.Sequential(ops.Linear(4, 4), torch.nn.Tanh(), GainModule(4), ops.GELU())
    target = {"Linear": model[0], "other op": GainModule(4), "plain module": model[1]}.get(key, key)
    with pytest.raises(ValueError, match="op_kwargs"):
        model(torch.randn(3, 4), op_kwargs={target: {"factor": 1.0}})


def test_unknown_kwargs_are_named():
    model = ops.Sequential(ops.GELU(), GainModule(4))
    with pytest.raises(ValueError, match=r"op 1 \(Gain\).*'nonsense'"):
        model(torch.randn(3, 4), op_kwargs={1: {"nonsense": 1}})
    with pytest.raises(ValueError, match="'factor'"):
        model(torch.randn(3, 4), op_kwargs={0: {"factor": 1.0}})


# ---------------------------------------------------------------------------- channels


def _residual():
    """A chain whose middle has a residual branch through a channel."""
    return ops.Sequential(ops.MakeExtraOutput(), ops.Linear(4, 4), ops.AddExtraInput())


def test_channels_route_inside_a_container_and_setters_return_the_op():
    model, x = _residual(), torch.randn(3, 4, requires_grad=True)
    assert model[0].set_extra_output_channel(0, "skip", output_to_caller=False) is model[0]
    assert model[2].set_extra_input_channel(0, "skip") is model[2]
    y = model(x)
    other = x.detach().clone().requires_grad_()
    expected = other + torch.nn.functional.linear(other, model[1].weight, model[1].bias)
    assert_close(y.detach(), expected.detach())
    (grad,) = torch.autograd.grad(y, x, torch.ones_like(y))
    (wanted,) = torch.autograd.grad(expected, other, torch.ones_like(y))
    assert_close(grad, wanted)


def test_last_setting_wins_and_none_returns_the_output_to_the_caller():
    model, x = _residual(), torch.randn(3, 4)
    model[0].set_extra_output_channel(0, "other").set_extra_output_channel(0, "skip")
    model[2].set_extra_input_channel(0, "skip")
    y, skip = model(x)  # output_to_caller defaults to True
    assert torch.equal(skip, x)
    model = _residual()
    model[0].set_extra_output_channel(0, "skip", output_to_caller=False)
    model[0].set_extra_output_channel(0, None, output_to_caller=False)
    y, skip = model(x, x)
    assert torch.equal(skip, x)
    assert_close(y, model[1](x) + x)


def test_bad_channel_arguments():
    give, take = ops.MakeExtraOutput(), ops.AddExtraInput()
    for index in (-1, 1):
        with pytest.raises(IndexError, match="out of range"):
            give.set_extra_output_channel(index, "c")
        with pytest.raises(IndexError, match="out of range"):
            take.set_extra_input_channel(index, "c")
    with pytest.raises(IndexError, match="out of range"):
        ops.GELU().set_extra_input_channel(0, "c")
    for channel in ("", 3, b"c"):
        with pytest.raises(ValueError, match="non-empty string"):
            give.set_extra_output_channel(0, channel)
        with pytest.raises(ValueError, match="non-empty string"):
            take.set_extra_input_channel(0, channel)
    for flag in (1, None, "yes"):
        with pytest.raises(TypeError, match="output_to_caller must be a bool"):
            give.set_extra_output_channel(0, "c", output_to_caller=flag)
    x = torch.ones(2)
    assert give(x)[1] is not None  # nothing was set
    assert_same_bits(take(x, x), 2 * x)


def _channels(*spec):
    """A container from letters: ``>c`` produces into channel c, ``<c`` consumes from it."""
    modules = []
    for item in spec:
        if item == "tanh":
            modules.append(torch.nn.Tanh())
        elif item[0] == ">":
            modules.append(ops.MakeExtraOutput().set_extra_output_channel(0, item[1:], output_to_caller=False))
        else:
            modules.append(ops.AddExtraInput().set_extra_input_channel(0, item[1:]))
    return ops.Sequential(*modules)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (("<c",), "has no producer"),
        ((">d", "<c"), "has no producer"),
        (("<c", ">c"), "has no earlier producer"),
        ((">c", ">c", "<c"), "multiple producers"),
        ((">c", "tanh", "<c"), "has no producer"),  # channels do not cross other modules
    ],
)
def test_broken_routing_raises_at_the_first_call(spec, message):
    model = _channels(*spec)
    with pytest.raises(ValueError, match=message):
        model(torch.ones(2))


def test_routing_is_repaired_by_setting_the_channel_after_a_failed_call():
    model = _channels(">d", "<c")
    with pytest.raises(ValueError, match="has no producer"):
        model(torch.ones(2))
    model[1].set_extra_input_channel(0, "d")
    assert_same_bits(model(torch.ones(2)), torch.full((2,), 2.0))


def test_fan_out_and_unconsumed_channels():
    model = _channels(">c", "<c", "<c", ">unused")
    x = torch.randn(3, requires_grad=True)
    y = model(x)
    assert_close(y.detach(), 3 * x.detach())
    y.sum().backward()
    assert_same_bits(x.grad, torch.full((3,), 3.0))


@pytest.mark.parametrize("how", ["container", "alone", "after regrouping", "copy"])
def test_channels_are_fixed_by_the_first_call(how):
    model, x = _channels(">c", "<c"), torch.ones(2)
    give, take = model
    give.set_extra_output_channel(0, "d")  # building a container fixes nothing
    take.set_extra_input_channel(0, "d")
    if how == "alone":
        give(x)
        take.set_extra_input_channel(0, None)(x, x)
    else:
        model(x)
    if how == "after regrouping":
        model.append(ops.GELU())
    if how == "copy":
        give, take = copy.deepcopy(model)
    with pytest.raises(RuntimeError, match="already captured its channel routing"):
        give.set_extra_output_channel(0, "e")
    with pytest.raises(RuntimeError, match="already captured its channel routing"):
        take.set_extra_input_channel(0, None)


def test_a_channel_changed_after_compiling_is_taken_up(dynamo):
    model, x = _channels(">c", "<c"), torch.ones(2)
    run = torch.compile(model, fullgraph=True, backend="aot_eager")
    expected = run(x)
    run(x)
    assert graph_count(dynamo) == 1
    give, take = model
    give.set_extra_output_channel(0, "e", output_to_caller=False)
    take.set_extra_input_channel(0, "e")
    assert_same_bits(run(x), expected)
    give.set_extra_output_channel(0, None)
    take.set_extra_input_channel(0, None)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="extra"):  # now the caller owes the extra input
        run(x)


def _named(**modules):
    return ops.Sequential(modules)


def test_names_are_kept_when_modules_come_and_go():
    """Only the names that a Sequential gives itself are numbered again."""
    model = _named(a=ops.Identity(), b=ops.Bias(2), c=ops.GELU())
    model.append(ops.ReLU())
    assert list(model._modules) == ["a", "b", "c", "0"]
    model.insert(1, ops.SiLU())
    assert list(model._modules) == ["a", "1", "b", "c", "0"]
    assert isinstance(model[1], ops.SiLU)
    assert isinstance(model.pop(0), ops.Identity)
    del model[1:3]
    assert list(model._modules) == ["1", "0"]
    model += [ops.Identity()]
    assert list(model._modules) == ["1", "0", "2"]
    with pytest.raises(IndexError, match="out of range"):
        model.insert(9, ops.Identity())
    x = torch.randn(3, 2)
    torch.testing.assert_close(model(x), torch.relu(torch.nn.functional.silu(x)))


def test_a_number_that_is_taken_is_not_given_again():
    model = ops.Sequential({"1": ops.Bias(2)})
    model.append(ops.Identity())
    assert list(model._modules) == ["1", "2"]


def test_modules_under_a_meta_default_device():
    with torch.device("meta"):
        model = ops.Sequential(ops.Linear(8, 8), ops.GroupedLinear(2, 8, 8))
    assert {own.device.type for own in model.parameters()} == {"meta"}


def test_keys_of_a_linear_without_those_of_its_ops():
    source, target = ops.Linear(4, 4), ops.Sequential(ops.Linear(4, 4))
    keys = {"0.weight": source.weight.detach(), "0.bias": source.bias.detach()}
    result = target.load_state_dict(keys, strict=False)
    assert result.unexpected_keys == []
    assert all("_extra_state" in key for key in result.missing_keys)
    torch.testing.assert_close(target[0].weight, source.weight, rtol=0, atol=0)
    plain = ops.Linear(4, 4, bias=False)
    plain.bias = None
    with pytest.raises(ValueError, match="without bias"):
        plain.bias = torch.nn.Parameter(torch.zeros(4))
