"""torch.export of modules, and AOTInductor: inference without Python. Chains: tests/bridge/test_export.py."""

import shutil

import pytest
import torch

from tests.habits.models import FEATURES, batch, mlp, precision

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated:FutureWarning"),  # torch's own
    pytest.mark.skipif(shutil.which("g++") is None and shutil.which("clang++") is None, reason="needs a C++ compiler"),
]


class Served(torch.nn.Module):
    """A model with the recipe that it is served in."""

    def __init__(self, recipe):
        super().__init__()
        self.recipe, self.model = recipe, mlp()
        for step in range(2):  # a recipe with state has scales from training
            with precision(recipe):
                self.model(batch(step)).sum().backward()
        with precision(recipe):  # closes the last step, before anything is traced
            pass
        self.model.zero_grad()
        self.eval().requires_grad_(False)

    def forward(self, x):
        with precision(self.recipe):
            return self.model(x)


def _exported(recipe):
    served = Served(recipe)
    rows = torch.export.Dim("rows", min=2, max=4096)
    with torch.no_grad():
        return served, torch.export.export(served, (batch(0),), dynamic_shapes=({0: rows},))


@pytest.mark.parametrize("recipe", ["none", "current", "delayed"])
def test_export_of_a_module(recipe):
    served, program = _exported(recipe)
    names = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert "functional_te.forwardlinearbiasactivation_forward.default" in names
    for rows in (16, 7):
        with torch.no_grad():
            torch.testing.assert_close(program.module()(batch(3, rows)), served(batch(3, rows)))
    assert all(type(buffer) is torch.Tensor for buffer in served.buffers())


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["none", "current", "delayed"])
def test_a_package_runs_without_the_model(tmp_path, recipe):
    served, program = _exported(recipe)
    with torch.no_grad():
        path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))
        runner = torch._inductor.aoti_load_package(path)
        for rows in (16, 3):
            x = batch(4, rows)
            torch.testing.assert_close(runner(x), served(x), rtol=1e-4, atol=1e-5)
            assert runner(x).shape == (rows, FEATURES)


def test_the_program_holds_plain_operations():
    _, program = _exported("current")
    plain = program.run_decompositions()
    names = {str(node.target) for node in plain.graph.nodes if node.op == "call_function"}
    assert all(name.startswith(("aten.", "<built-in function", "_operator")) for name in names)
    assert any("mm" in name for name in names)


def test_a_model_whose_state_is_made_while_it_is_exported():
    model = mlp().eval().requires_grad_(False)

    class Fresh(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, x):
            with precision("delayed"):
                return self.model(x)

    with torch.no_grad():
        program = torch.export.export(Fresh(), (batch(0),))
        assert all(type(buffer) is torch.Tensor for buffer in model.buffers())
        torch.testing.assert_close(program.module()(batch(1)), Fresh()(batch(1)))
    assert not any("set_grad" in str(node.target) for node in program.graph.nodes)
