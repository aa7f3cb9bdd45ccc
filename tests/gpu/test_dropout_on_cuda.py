"""Dropout on a GPU: the mask of the CPU, eager and compiled; CUDA graphs draw a new mask with every replay."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import bridge
import functional_te as fte
from bridge import ops

# Inductor warns that float32 products could run in TF32
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch.*")

KEY = fte.make_key(3, 1)


@pytest.mark.parametrize("shape", [(7,), (128, 96), (0, 8)])
def test_the_mask_is_that_of_the_cpu(shape):
    x = torch.ones(shape)
    wanted = fte.functional.dropout(x, KEY, p=0.3)
    x, key = x.cuda(), KEY.cuda()
    assert torch.equal(fte.functional.dropout(x, key, p=0.3).cpu(), wanted)
    op = fte.Dropout(0.3)
    compiled = torch.compile(lambda x, key: bridge.apply(op, ({},), x, kwargs={0: {"key": key}})[0], fullgraph=True)
    assert torch.equal(compiled(x, key).cpu(), wanted)


def test_a_key_on_another_device_is_refused():
    with pytest.raises(ValueError, match="key: expected device cuda"):
        fte.functional.dropout(torch.ones(8, device="cuda"), KEY, p=0.3)


def check_masks(mode):
    """Forward and backward see one mask, every call another."""
    torch.manual_seed(0)
    module = ops.Dropout(0.5)
    call = module if mode == "eager" else torch.compile(module, fullgraph=True, mode=mode)
    masks = []
    for _ in range(5):
        x = torch.ones(64, 64, device="cuda", requires_grad=True)
        y = call(x)
        y.sum().backward()
        assert torch.equal(x.grad, y)
        assert 0.4 < (y == 0).float().mean() < 0.6
        masks.append(y.detach().clone())
    assert len({tuple(mask.flatten().tolist()) for mask in masks}) == 5


@pytest.mark.parametrize("mode", ["eager", "default"])
def test_forward_and_backward_agree_and_masks_differ(mode):
    check_masks(mode)


def test_masks_in_cuda_graphs():
    """In a process of its own: CUDA graphs of other tests are registered with the same random generator."""
    code = "from tests.gpu.test_dropout_on_cuda import check_masks; check_masks('reduce-overhead')"
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=140, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_manual_seed():
    module, x = ops.Dropout(0.5), torch.ones(64, 64, device="cuda")
    torch.manual_seed(1)
    first = module(x)
    torch.manual_seed(1)
    assert torch.equal(module(x), first)
