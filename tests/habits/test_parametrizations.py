"""torch.nn.utils.parametrize on the basic ops of a chain. (weight_norm: tests/bridge/test_modules.py.)"""

import copy

import pytest
import torch
from torch.nn.utils import parametrizations, parametrize

from bridge import ops
from tests.bridge.compiled import assert_close, assert_same_bits, break_count
from tests.habits.models import as_mode, batch, every_mode, gradients, mlp, precision, train, twin

KINDS = {
    "orthogonal": parametrizations.orthogonal,
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
}


def _both(kind):
    """The model and its twin, with the first linear layer's weight parametrized in the same way."""
    model = mlp()
    plain = twin(model)
    for linear in (model[1].basic_ops[0], plain[1]):
        torch.manual_seed(1)  # spectral_norm starts from random vectors
        KINDS[kind](linear, "weight")
    return model.eval(), plain.eval()


def _named_gradients(model):
    """Gradients by name, with the names of the twin."""
    return {
        name.replace("basic_ops.0.", "").replace("basic_ops.1.", ""): own.grad for name, own in model.named_parameters()
    }


@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        *[(kind, "eager") for kind in KINDS],
        ("weight_norm", "compiled"),
        pytest.param("orthogonal", "compiled", marks=pytest.mark.slow),
    ],
)
def test_in_a_chain(dynamo, kind, mode):
    model, plain = _both(kind)
    y, expected = as_mode(mode, model)(batch(0)), plain(batch(0))
    assert_close(y.detach(), expected.detach(), rtol=1e-4, atol=1e-5)
    y.square().sum().backward()
    expected.square().sum().backward()
    found, wanted = _named_gradients(model), _named_gradients(plain)
    assert found.keys() == wanted.keys()
    assert_close(list(found.values()), [wanted[name] for name in found], rtol=1e-3, atol=1e-3)
    assert break_count(dynamo) == 0


@pytest.mark.parametrize("recipe", ["current", "delayed"])
def test_trained_in_low_precision(recipe):
    model = mlp()
    parametrizations.orthogonal(model[1].basic_ops[0])
    exact = copy.deepcopy(model)
    losses, expected = train(model, model, recipe, steps=5)[:5], train(exact, exact, steps=5)[:5]
    assert_close(losses, expected, rtol=0.03, atol=0)
    weight = model[1].weight
    torch.testing.assert_close(weight.mT @ weight, torch.eye(32), atol=1e-5, rtol=0)


def test_a_parametrization_of_ones_own():
    class Masked(torch.nn.Module):
        """What pruning wants: a mask that every forward applies."""

        def __init__(self, mask):
            super().__init__()
            self.register_buffer("mask", mask)

        def forward(self, weight):
            return weight * self.mask

    model = mlp()
    mask = (model[1].weight.abs() > 0.1).float()
    parametrize.register_parametrization(model[1].basic_ops[0], "weight", Masked(mask))
    with precision("current"):
        model(batch(0)).sum().backward()
    assert torch.equal(model[1].basic_ops[0].parametrizations.weight.original.grad == 0, mask == 0)


def test_removed_again():
    model = mlp()
    expected, linear = model(batch(0)).detach(), model[1].basic_ops[0]
    parametrizations.weight_norm(linear)
    parametrize.remove_parametrizations(linear, "weight")
    assert_close(model(batch(0)).detach(), expected)
    model(batch(0)).sum().backward()
    assert all(grad is not None for grad in gradients(model))


def test_copies_and_files():
    model = mlp()
    parametrizations.weight_norm(model[1].basic_ops[0])
    copied, loaded = copy.deepcopy(model), mlp(1)
    parametrizations.weight_norm(loaded[1].basic_ops[0])
    loaded.load_state_dict(model.state_dict())
    for other in (copied, loaded):
        assert_same_bits(other(batch(0)).detach(), model(batch(0)).detach())


@every_mode
def test_cached_within_a_forward(dynamo, mode):
    model, calls = mlp(), []

    class Counting(torch.nn.Module):
        def forward(self, weight):
            calls.append(1)
            return 2 * weight

    parametrize.register_parametrization(model[1].basic_ops[0], "weight", Counting())
    calls.clear()
    run = as_mode(mode, lambda x: model(x) + model(x))
    with parametrize.cached():
        run(batch(0))
    assert len(calls) == 1


def test_the_layer_says_where_its_weight_is():
    """``Linear`` is a container of two ops: the parameter belongs to the first of them."""
    layer = ops.Linear(8, 8, device="cpu")
    with pytest.raises(ValueError, match="basic_ops"):
        parametrizations.weight_norm(layer)
    parametrizations.weight_norm(layer.basic_ops[0])
    names = {name.rpartition(".")[2] for name, _ in layer.named_parameters()}
    assert names == {"original0", "original1", "bias"}
