"""torch.nn.utils.prune on an op that is called by itself, and before a chain runs it once."""

import torch
from torch.nn.utils import prune

from bridge import ops
from tests.bridge.compiled import assert_close
from tests.habits.models import batch, mlp, twin


def test_a_pruned_layer_trains():
    layer, plain = ops.BasicLinear(32, 32, device="cpu"), torch.nn.Linear(32, 32, bias=False)
    with torch.no_grad():
        plain.weight.copy_(layer.weight)
    for module in (layer, plain):
        prune.l1_unstructured(module, "weight", amount=0.5)
        for step in range(2):
            module(batch(step)).square().sum().backward()
    assert_close(layer.weight_orig.grad, plain.weight_orig.grad, rtol=1e-4, atol=1e-4)
    prune.remove(layer, "weight")
    assert (layer.weight == 0).float().mean() == 0.5


def test_a_mask_made_permanent_stays_in_a_chain():
    model = mlp()
    prune.l1_unstructured(model[1].basic_ops[0], "weight", amount=0.5)
    before = model(batch(0)).detach()
    prune.remove(model[1].basic_ops[0], "weight")
    assert_close(model(batch(0)).detach(), before)
    assert_close(model(batch(0)).detach(), twin(model)(batch(0)).detach(), rtol=1e-4, atol=1e-5)
