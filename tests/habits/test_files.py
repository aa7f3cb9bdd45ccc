"""Files and moves of modules: safe loading, safetensors, meta tensors, .to(). Pickles: tests/bridge/test_modules.py."""

import copy

import pytest
import torch

from tests.bridge.compiled import assert_same_bits, graph_count
from tests.habits.models import as_mode, batch, every_mode, every_recipe, mlp, precision, train


def _output(model, recipe):
    with torch.no_grad(), precision(recipe):
        return model(batch(50))


@every_recipe
@pytest.mark.parametrize("assign", [False, True])
def test_a_state_dict_through_torch_save(tmp_path, recipe, assign):
    model = mlp()
    train(model, model, recipe)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    loaded = mlp(7)
    loaded.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True, mmap=True), assign=assign)
    assert_same_bits(_output(loaded, recipe), _output(model, recipe))
    assert_same_bits(train(loaded, loaded, recipe), train(model, model, recipe))


@every_recipe
def test_a_state_dict_through_safetensors(tmp_path, recipe):
    safetensors = pytest.importorskip("safetensors.torch", reason="the file format under test")
    model, loaded = mlp(), mlp(7)
    train(model, model, recipe)
    safetensors.save_file(model.state_dict(), tmp_path / "model.safetensors")
    loaded.load_state_dict(safetensors.load_file(tmp_path / "model.safetensors"))
    assert_same_bits(_output(loaded, recipe), _output(model, recipe))
    safetensors.save_model(model, tmp_path / "whole.safetensors")
    other = mlp(8)
    assert safetensors.load_model(other, tmp_path / "whole.safetensors") == (set(), [])
    assert_same_bits(_output(other, recipe), _output(model, recipe))


@every_recipe
def test_optimizer_and_model_resume_together(tmp_path, recipe):
    def resume(model, optimizer, steps):
        for step in steps:
            optimizer.zero_grad()
            with precision(recipe):
                model(batch(step)).square().mean().backward()
            optimizer.step()

    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    resume(model, optimizer, range(2))
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "run.pt")
    resume(model, optimizer, range(2, 4))
    found = torch.load(tmp_path / "run.pt", weights_only=True)
    other = mlp(7)
    other.load_state_dict(found["model"])
    again = torch.optim.AdamW(other.parameters(), fused=True)
    again.load_state_dict(found["optimizer"])
    resume(other, again, range(2, 4))
    assert_same_bits(list(other.parameters()), list(model.parameters()))


@every_mode
def test_a_model_from_meta(dynamo, mode):
    """The way of large models: made on meta, given storage, loaded; and loaded without giving storage first."""
    model = mlp()
    with torch.device("meta"):
        empty, assigned = copy.deepcopy(model), copy.deepcopy(model)
    empty, assigned = empty.to("meta"), assigned.to("meta")
    assert all(own.is_meta for own in empty.parameters())
    empty.to_empty(device="cpu").load_state_dict(model.state_dict())
    assigned.load_state_dict(model.state_dict(), assign=True)
    for loaded in (empty, assigned):
        assert_same_bits(as_mode(mode, loaded)(batch(0)).detach(), model(batch(0)).detach())


@every_mode
def test_dtypes_move_with_to(dynamo, mode):
    model, x = mlp(), batch(0)
    run = as_mode(mode, model)
    exact = run(x).detach()
    model.to(torch.bfloat16)
    y = run(x.bfloat16())
    assert y.dtype is torch.bfloat16
    torch.testing.assert_close(y.float(), exact, rtol=0.1, atol=0.05)
    y.float().sum().backward()
    assert {own.grad.dtype for own in model.parameters()} == {torch.bfloat16}
    model.zero_grad()
    assert run.to(torch.float32) is run
    assert run(x).dtype is torch.float32
    assert graph_count(dynamo) in ((0,) if mode == "eager" else (2, 3))


@pytest.mark.parametrize("recipe", ["none", pytest.param("delayed", marks=pytest.mark.slow)])
def test_a_compiled_module_is_copied_and_saved_like_the_module(dynamo, tmp_path, recipe):
    model = mlp()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with precision(recipe):
        compiled(batch(0)).sum().backward()
    torch.save(compiled.state_dict(), tmp_path / "model.pt")
    names = {name.removeprefix("_orig_mod.") for name in torch.load(tmp_path / "model.pt", weights_only=True)}
    assert names == set(model.state_dict())
    copied = copy.deepcopy(compiled)
    assert_same_bits(_output(copied, recipe), _output(compiled, recipe))
    with torch.no_grad():
        copied._orig_mod[0].bias.add_(1)
    assert not torch.equal(_output(copied, recipe), _output(compiled, recipe))
