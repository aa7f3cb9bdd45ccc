"""What autograd saves, moved elsewhere: save_on_cpu, packing, and a limit. (bridge.apply: test_traps.py.)"""

import pytest
import torch

from tests.bridge.compiled import assert_same_bits
from tests.habits.models import as_mode, batch, every_recipe_and_mode, gradients, mlp, precision


def _gradients(model, run, recipe, context):
    model.zero_grad()
    x = batch(0).requires_grad_()
    with precision(recipe), context:
        y = run(x)
    y.sin().sum().backward()
    return [y.detach(), x.grad, *gradients(model)]


@every_recipe_and_mode
def test_save_on_cpu(dynamo, mode, recipe):
    one, other = mlp(), mlp()
    expected = _gradients(one, as_mode(mode, one), recipe, torch.enable_grad())
    found = _gradients(other, as_mode(mode, other), recipe, torch.autograd.graph.save_on_cpu(pin_memory=False))
    assert_same_bits(found, expected)


@every_recipe_and_mode
def test_packing_into_files(dynamo, mode, recipe, tmp_path):
    """Hooks that keep nothing in memory: what comes back has the bits that went out."""
    paths = []

    def pack(tensor):
        paths.append(tmp_path / f"{len(paths)}.pt")
        torch.save(tensor, paths[-1])
        return paths[-1]

    one, other = mlp(), mlp()
    expected = _gradients(one, as_mode(mode, one), recipe, torch.enable_grad())
    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda path: torch.load(path, weights_only=True))
    assert_same_bits(_gradients(other, as_mode(mode, other), recipe, hooks), expected)
    assert len(paths) > 2


@pytest.mark.parametrize("recipe", ["none", "current"])
def test_what_is_packed_in_low_precision_is_small(recipe):
    """Bytes beside the parameters, which are saved as themselves."""
    model, sizes = mlp(), []
    own = {parameter.data_ptr() for parameter in model.parameters()}

    def pack(tensor):
        if tensor.data_ptr() not in own:
            sizes.append(tensor.nbytes)
        return tensor

    with precision(recipe), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(batch(0, rows=512))
    # x (the norm) and the first linear's output (the GELU) stay float32; both linears' inputs, of 32 and 64, need not
    rows_of_floats = sum(sizes) / 512 / 4
    assert rows_of_floats < (32 + 64 + 32 + 64 + 8 if recipe == "none" else 32 + 64 + (32 + 64) / 4 + 24)


def test_saving_may_be_forbidden():
    model, message = mlp(), "not here"
    with torch.autograd.graph.disable_saved_tensors_hooks(message):
        model(batch(0)).sum().backward()
        with pytest.raises(RuntimeError, match=message), torch.autograd.graph.save_on_cpu():
            pass
