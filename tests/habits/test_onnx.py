"""ONNX export of inference chains: standard operators, and the results of eager mode in another runtime."""

import collections
import logging
import sys

import pytest
import torch

import functional_te as fte
from bridge import ops
from bridge.interop import to_onnx
from tests.habits.models import RECIPES, batch, mlp, precision

onnx = pytest.importorskip("onnx", reason="the format under test")
pytest.importorskip("onnxscript", reason="torch.onnx.export needs it")
from onnx.reference import ReferenceEvaluator  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated:FutureWarning"),  # torch's own
    # what onnx and onnxscript say of each other
    pytest.mark.filterwarnings("ignore::DeprecationWarning:onnx.*"),
    pytest.mark.filterwarnings("ignore::FutureWarning:onnx.*"),
]
DYNAMIC = ({0: torch.export.Dim("rows")},)


@pytest.fixture(autouse=True)
def _quiet(caplog):
    caplog.set_level(logging.ERROR, logger="torch.onnx")


def _gated():
    return ops.Sequential(
        ops.MakeExtraOutput().set_extra_output_channel(0, "residual", output_to_caller=False),
        ops.RMSNorm(32, device="cpu"),
        ops.Linear(32, 128, bias=False, device="cpu"),
        ops.SwiGLU(),
        ops.Dropout(0.1),
        ops.Linear(64, 32, device="cpu"),
        ops.AddExtraInput().set_extra_input_channel(0, "residual"),
    )


def _erf():
    return ops.Sequential(ops.Linear(32, 64, device="cpu"), ops.ErfGELU(), ops.Linear(64, 32, device="cpu"))


def _kinds(program):
    nodes = program.model_proto.graph.node
    assert {node.domain for node in nodes} <= {"", "ai.onnx"}
    assert not program.model_proto.functions
    return collections.Counter(node.op_type for node in nodes)


def _run(program, x):
    proto = program.model_proto
    onnx.checker.check_model(proto, full_check=True)
    (found,) = ReferenceEvaluator(proto).run(None, {proto.graph.input[0].name: x.numpy()})
    return torch.from_numpy(found)


@pytest.mark.parametrize("make", [mlp, _gated, _erf])
def test_high_precision(make):
    model = make().eval()
    program = to_onnx(model, (batch(0),), dynamic_shapes=DYNAMIC, verbose=False)
    kinds = _kinds(program)
    assert kinds["Gemm"] + kinds["MatMul"] == 2
    assert kinds["Dropout"] == 0
    for rows in (16, 5):
        x = batch(1, rows=rows)
        torch.testing.assert_close(_run(program, x), model(x).detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("recipe", ["current", "delayed"])
def test_per_tensor_casts(recipe):
    """Every product reads two tensors in FP8, and the results are those of eager mode."""
    model = mlp()
    for step in range(2):
        with precision(recipe):
            model(batch(step)).sum().backward()
    model.eval()
    program = to_onnx(model, (batch(0),), recipe=RECIPES[recipe], dynamic_shapes=DYNAMIC, verbose=False)
    _kinds(program)
    values = {node.output[0]: node for node in program.model_proto.graph.node}
    casts = [node for node in values.values() if node.op_type == "Cast"]
    low = onnx.TensorProto.FLOAT8E4M3FN
    folded = [own for own in program.model_proto.graph.initializer if own.data_type == low]
    assert sum(node.attribute[0].i == low for node in casts if node.attribute[0].name == "to") + len(folded) >= 2
    for rows in (16, 5):
        x = batch(2, rows=rows)
        with torch.no_grad(), precision(recipe):
            expected = model(x)
        torch.testing.assert_close(_run(program, x), expected, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        assert not torch.allclose(_run(program, x), model(x), rtol=1e-4, atol=1e-5)


def test_a_model_that_never_ran(tmp_path):
    model = mlp().eval()
    to_onnx(model, (batch(0),), tmp_path / "model.onnx", recipe=RECIPES["delayed"], verbose=False)
    assert onnx.load(tmp_path / "model.onnx").graph.node
    assert all(type(buffer) is torch.Tensor for buffer in model.buffers())


@pytest.mark.parametrize("recipe", [fte.recipes.MXFP8BlockScaling(), fte.recipes.NVFP4BlockScaling()], ids=str)
def test_block_formats_are_refused_before_anything_is_traced(recipe):
    with pytest.raises(ValueError, match=rf"to_onnx: recipe: .*per-tensor.*{type(recipe).__name__}.*recipe=None"):
        to_onnx(mlp(), (batch(0),), recipe=recipe)


def test_a_missing_package_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'functional_te\[onnx\]'"):
        to_onnx(mlp(), (batch(0),))
