"""What of the `te` backend can be seen without Transformer Engine: what it says is missing, what it leaves alone."""

import importlib.util
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from functional_te import quantization as qz
from functional_te.kernels import reference
from functional_te.kernels import te as own
from functional_te.kernels.te import library, tensors
from functional_te.quantization.tensor import BoundQuantizer

CURRENT = qz.Float8CurrentScalingQuantizer(dtype=torch.float8_e4m3fn, columnwise=True)


def test_importing_it_imports_nothing_of_transformer_engine():
    code = "import sys, functional_te.kernels.te as te; te.available(); "
    code += "print([name for name in sys.modules if name.startswith('transformer_engine')])"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("release", "files", "said"),
    [
        (None, (), "not installed"),
        ("2.19.0", ("transformer_engine_torch.so",), "2.19.0 is installed, 2.20.x is needed"),
        ("2.20.2", (), "without its PyTorch extension"),
        ("2.20.2", ("transformer_engine_torch.cpython-312.so",), None),
    ],
)
def test_what_is_missing(release, files, said, tmp_path, monkeypatch):
    folder = tmp_path / "transformer_engine"
    folder.mkdir()
    for name in files:
        (tmp_path / name).touch()
    spec = SimpleNamespace(submodule_search_locations=[str(folder)])
    find = importlib.util.find_spec
    own_spec = None if release is None else spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: own_spec if name == "transformer_engine" else find(name)
    )
    monkeypatch.setattr(library.importlib.metadata, "version", lambda name: release)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    found = own.available()
    if said is None:
        assert found is None
    else:
        assert said in found
        assert "\n" not in found


def test_tensors_on_the_cpu_are_left_to_the_reference():
    x, w = torch.randn(32, 48), torch.randn(16, 48)
    bound = BoundQuantizer(quantizer=CURRENT)
    made, expected = own.quantize(x, bound)[0], reference.quantize(x, bound)[0]
    assert torch.equal(made.dequantize(), expected.dequantize())
    assert torch.equal(own.gemm_nt(made, made, dtype=x.dtype), reference.gemm_nt(made, made, dtype=x.dtype))
    assert torch.equal(own.gemm_nt(x, w, dtype=x.dtype), reference.gemm_nt(x, w, dtype=x.dtype))
    norm = {"eps": 1e-5, "zero_centered_gamma": False, "dtype": x.dtype}
    assert own.rms_norm(x, w[0], **norm) is None
    assert own.layer_norm(x, w[0], w[0], **norm) is None
    assert own.activation(x, "gelu", dtype=x.dtype) is None
    assert own.activation_grad(x, x, "gelu", dtype=x.dtype) is None
    assert own.cast_bias(x, bound, dtype=x.dtype) is None


@pytest.mark.parametrize("shape", [(1, 1), (130, 257), (256, 384)], ids=str)
@pytest.mark.parametrize("dim", [1, 2])
@pytest.mark.parametrize("columnwise", [False, True])
def test_grids_of_blocks_there_and_back(columnwise, dim, shape):
    """Cut out of a padded grid come the factors that went in, strided as a new tensor."""
    quantizer = qz.Float8BlockQuantizer(dtype=torch.float8_e4m3fn, columnwise=True, block_scaling_dim=dim)
    q = reference.quantize(torch.randn(shape), BoundQuantizer(quantizer=quantizer))[0]
    data, scale = tensors.te_layout(q.copy(columnwise), quantizer, columnwise)
    padded = torch.nn.functional.pad(scale, (0, -scale.shape[1] % 4), value=float("nan"))
    fields = dict.fromkeys(("_rowwise_data", "_columnwise_data", "_rowwise_scale_inv", "_columnwise_scale_inv"))
    name = "_columnwise" if columnwise else "_rowwise"
    fields |= {f"{name}_data": data, f"{name}_scale_inv": padded, "_is_2D_scaled": dim == 2}
    back = tensors.read_block(SimpleNamespace(**fields), quantizer.dtype, quantizer.tile)[columnwise]
    kept = q.copy(columnwise)
    assert torch.equal(back.scale_inv, kept.scale_inv)
    assert back.scale_inv.stride() == kept.scale_inv.stride()
    assert torch.equal(back.data.view(torch.uint8), kept.data.view(torch.uint8))
