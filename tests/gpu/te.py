"""How Transformer Engine is called. All that these tests know of its interface is in this file.

Run as a program (``python -m tests.gpu.te TASK FOLDER``) it casts the tensors of ``FOLDER/inputs.pt`` with one of
Transformer Engine's kernels in a process of its own: a kernel that this GPU cannot run may break the process.
"""

import functools
import importlib
import importlib.util
import pkgutil
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.gpu.bits import Bits, matrix

TILES = {1: (1, 128), 2: (128, 128)}
_NAMES = {
    torch.float8_e4m3fn: "kFloat8E4M3",
    torch.float8_e5m2: "kFloat8E5M2",
    torch.float4_e2m1fn_x2: "kFloat4E2M1",
}
_UNTOUCHED = 0xA5  # what memory holds before a kernel of doubt runs
_REFUSED = 3  # exit status: Transformer Engine or CUDA raised
ROOT = Path(__file__).parents[2]
MARKS = [
    pytest.mark.te,
    # Transformer Engine and what it imports use what others deprecated
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]


@functools.cache
def modules() -> tuple[Any, Any]:
    """``transformer_engine.pytorch`` and ``transformer_engine_torch``. Importing them warns."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module("transformer_engine.pytorch"), importlib.import_module(
            "transformer_engine_torch"
        )


def require() -> None:
    """Skip the calling test file where there is no GPU, or no Transformer Engine."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device", allow_module_level=True)
    if importlib.util.find_spec("transformer_engine") is None:
        pytest.skip("needs transformer_engine (the `te` extra)", allow_module_level=True)
    modules()


def element(dtype: torch.dtype) -> Any:
    """Transformer Engine's name of an element type."""
    te, tex = modules()
    return getattr(getattr(te, "DType", tex.DType), _NAMES[dtype])


def recipes() -> Any:
    """The module of recipes."""
    modules()
    return importlib.import_module("transformer_engine.common.recipe")


def reset() -> None:
    """Forget the quantizers of delayed scaling that earlier tests left."""
    importlib.import_module("transformer_engine.pytorch.quantization").FP8GlobalStateManager.reset()


# ---------------------------------------------------------------------------- casts


def _cpu(x: Tensor | None, dtype: torch.dtype | None = None) -> Tensor | None:
    if x is None:
        return None
    return (x if dtype is None else x.view(dtype)).detach().cpu().contiguous()


def _per_tensor(out: Any, dtype: torch.dtype, columnwise: bool, amax: Tensor | None = None) -> Bits:
    """The transposed copy is stored ``[K, leading dimensions]``; both copies share one factor."""
    scale = _cpu(out._scale_inv)
    row, column = matrix(_cpu(out._data, dtype)), None
    if columnwise:
        assert not out._transpose_invalid
        column = _cpu(out._transpose, dtype).reshape(row.shape[1], row.shape[0])
    return Bits(row, scale, column, scale if columnwise else None, _cpu(amax))


@torch.no_grad()
def delayed(x: Tensor, dtype: torch.dtype, scale: float, columnwise: bool = True) -> Bits:
    """Cast with a given scale; the amax that was observed beside."""
    te, _ = modules()
    amax = torch.zeros(1, device=x.device)
    given = torch.tensor([scale], device=x.device)
    quantizer = te.Float8Quantizer(given, amax, element(dtype), rowwise=True, columnwise=columnwise)
    return _per_tensor(quantizer(x), dtype, columnwise, amax)


@torch.no_grad()
def current(
    x: Tensor, dtype: torch.dtype, *, power_of_2: bool = False, epsilon: float = 0.0, columnwise: bool = True
) -> Bits:
    """Cast with the scale of the tensor's own amax."""
    te, _ = modules()
    quantizer = te.Float8CurrentScalingQuantizer(
        element(dtype),
        device=x.device,
        rowwise=True,
        columnwise=columnwise,
        force_pow_2_scales=power_of_2,
        amax_epsilon=epsilon,
    )
    return _per_tensor(quantizer(x), dtype, columnwise)


@torch.no_grad()
def block(
    x: Tensor,
    dtype: torch.dtype,
    *,
    dim: int,
    power_of_2: bool = True,
    epsilon: float = 0.0,
    columnwise: bool = True,
) -> Bits:
    """Cast with a scale per 1x128 block (``dim`` 1) or 128x128 tile (``dim`` 2)."""
    te, _ = modules()
    quantizer = te.Float8BlockQuantizer(
        element(dtype),
        rowwise=True,
        columnwise=columnwise,
        amax_epsilon=epsilon,
        force_pow_2_scales=power_of_2,
        block_scaling_dim=dim,
    )
    out = quantizer(x)
    row = matrix(_cpu(out._rowwise_data, dtype))
    row_scale = _block_scales(out._rowwise_scale_inv, dim, row.shape)
    if not columnwise:
        return Bits(row, row_scale)
    column = _cpu(out._columnwise_data, dtype).reshape(row.shape[1], row.shape[0])
    return Bits(row, row_scale, column, _block_scales(out._columnwise_scale_inv, dim, column.shape))


def _block_scales(stored: Tensor, dim: int, shape: tuple[int, ...]) -> Tensor:
    """Factors as a grid over the tiles of data of ``shape``.

    In 1-D they are stored transposed, ``[ceil(C / 128), R]`` with R padded to a multiple of 4; in 2-D as a grid whose
    width is padded to a multiple of 4. What is in the padding is undefined.
    """
    rows, across = shape[0], -(-shape[1] // 128)
    stored = _cpu(stored)
    if dim == 1:
        assert stored.shape == (across, -(-rows // 4) * 4)
        return stored[:, :rows].t().contiguous()
    down = -(-rows // 128)
    assert stored.shape == (down, -(-across // 4) * 4)
    return stored[:, :across].contiguous()


def _one_per_tile(scales: Tensor, rows: int) -> Tensor:
    """Square tiles have their scale once for each of their rows; one of them."""
    tiles = scales.reshape(-1, rows, scales.shape[1])
    raw = tiles.view(torch.uint8)
    assert (raw == raw[:, :1]).all()
    return tiles[:, 0].contiguous()


# ---------------------------------------------------------------------------- delayed scaling


def update(
    history: Tensor, scale: Tensor, dtype: torch.dtype, *, algorithm: str = "max", margin: int = 0
) -> tuple[Tensor, Tensor]:
    """History ``[L, n]`` and scale ``[n]`` after the fused kernel closed a step, whose amax is slot 0."""
    _, tex = modules()
    history, scale = history.clone().contiguous(), scale.clone().contiguous()
    tex.fused_amax_and_scale_update_after_reduction(
        history[0].clone(), [history], [scale], algorithm, element(dtype), margin
    )
    return history, scale


def linear_state(linear: Any) -> dict[str, tuple[Tensor, Tensor]]:
    """``(scale [1], history [L])`` of the three quantizers of a ``te.ops`` BasicLinear, by role."""
    found = {}
    for mode, key, roles in (
        ("forward", "scaling_fwd", ("input", "weight")),
        ("backward", "scaling_bwd", ("grad_output",)),
    ):
        state = linear._fp8_metas[mode][key]
        for index, role in enumerate(roles):
            found[role] = _cpu(state.scale[index : index + 1]), _cpu(state.amax_history[:, index])
    return found


def step(model: Any, recipe: Any, x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """One forward and backward of ``te.ops`` modules; output and gradient of the input. Weights accumulate theirs."""
    te, _ = modules()
    x = x.detach().clone().requires_grad_()
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        y = model(x)
    y.backward(dy)
    return y.detach(), x.grad


# ---------------------------------------------------------------------------- NVFP4 in pure Python


def _holders() -> Iterator[Any]:
    """Modules of Transformer Engine that may hold its pure-Python NVFP4 quantizer."""
    te, _ = modules()
    known = "transformer_engine.pytorch.custom_recipes.reference_nvfp4"
    names = [known] + [
        info.name
        for package in ("custom_recipes", "experimental")
        if (folder := Path(te.__file__).parent / package).is_dir()
        for info in pkgutil.iter_modules([str(folder)], f"transformer_engine.pytorch.{package}.")
        if "nvfp4" in info.name and info.name != known
    ]
    for name in names:
        try:
            yield importlib.import_module(name)
        except ImportError:
            continue


@functools.cache
def nvfp4_reference_module() -> Any:
    """The module with ``NVFP4QuantizerRef``; skips where there is none."""
    for module in _holders():
        if hasattr(module, "NVFP4QuantizerRef"):
            return module
    pytest.skip("this Transformer Engine has no pure-Python NVFP4 quantizer")


def nvfp4_reference(
    x: Tensor,
    *,
    columnwise: bool = True,
    square: bool = False,
    rht: bool = False,
    row_scaled: bool = False,
    four_over_six: str | None = None,
    e4m3_max: int = 448,
) -> Bits:
    """Cast by Transformer Engine's own pure-Python reference."""
    module = nvfp4_reference_module()
    formats = next(
        value.Fp4Formats for value in vars(module).values() if hasattr(value, "Fp4Formats")
    )  # its helper module, under one of two names
    options: dict[str, Any] = {"quant_tile_shape": (16, 16) if square else (1, 16), "with_rht": rht}
    if row_scaled:
        options["row_scaled_nvfp4"] = True
    if four_over_six is not None:
        options |= {"nvfp4_use_4over6": True, "nvfp4_e4m3_max": e4m3_max, "nvfp4_4over6_err_mode": four_over_six}
    quantizer = module.NVFP4QuantizerRef(
        dtype=formats.E2M1, rowwise=True, columnwise=columnwise, pow_2_scales=False, eps=0.0, **options
    )
    out = quantizer.quantize(x.contiguous())
    height = 16 if square else 1
    row, row_scale = _cpu(out.data), _one_per_tile(_cpu(out.scale, torch.float8_e4m3fn), height)
    if not columnwise:
        return Bits(row, row_scale, row_amax=_cpu(out.global_amax_row))
    column_scale = _one_per_tile(_cpu(out.scale_t, torch.float8_e4m3fn), height)
    return Bits(row, row_scale, _cpu(out.data_t), column_scale, _cpu(out.global_amax_row), _cpu(out.global_amax_col))


# ---------------------------------------------------------------------------- kernels that need a newer GPU


def isolated(task: str, tensors: list[Tensor], folder: Path) -> list[Bits]:
    """Cast ``tensors`` by the kernels of ``task`` in a process of its own; skips if this GPU cannot run them."""
    torch.save(tensors, folder / "inputs.pt")
    command = [sys.executable, "-m", "tests.gpu.te", task, str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    capability = ".".join(map(str, torch.cuda.get_device_capability()))
    said = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    if done.returncode == _REFUSED or done.returncode < 0:
        told = next((line for line in said if "PTX" in line), said[-1] if said else f"signal {-done.returncode}")
        pytest.skip(f"Transformer Engine's {task} kernel fails on compute capability {capability}: {told[:200]}")
    assert done.returncode == 0, "\n".join(said[-30:])
    found = torch.load(folder / "outputs.pt", weights_only=True)
    if any((part == _UNTOUCHED).all() for parts in found for part in parts.values()):
        pytest.skip(f"Transformer Engine's {task} kernel does nothing on compute capability {capability}")
    undo, size = (_undo_mxfp8, 32) if task.startswith("mxfp8") else (_undo_nvfp4, 16)
    height = size if task.endswith("2d") else 1
    return [undo(parts, matrix(x), height) for parts, x in zip(found, tensors, strict=True)]


def _undo_mxfp8(parts: dict[str, Tensor], x: Tensor, height: int) -> Bits:
    """Both copies have the logical layout; scales are padded to 128 along the outer and to 4 along the inner one."""
    rows, cols = x.shape
    column = matrix(parts["_columnwise_data"]).t().contiguous().view(torch.float8_e4m3fn)
    column_scale = _one_per_tile(parts["_columnwise_scale_inv"][: rows // 32, :cols].t(), height)
    row = matrix(parts["_rowwise_data"]).view(torch.float8_e4m3fn)
    return Bits(row, _one_per_tile(parts["_rowwise_scale_inv"][:rows, : cols // 32], height), column, column_scale)


def _undo_nvfp4(parts: dict[str, Tensor], x: Tensor, height: int) -> Bits:
    """The columnwise copy is transposed; scales are padded to 128 along the outer and to 4 along the inner one."""
    rows, cols = x.shape
    scales = (
        parts["_rowwise_scale_inv"][:rows, : cols // 16],
        parts["_columnwise_scale_inv"][:cols, : rows // 16],
    )
    row_scale, column_scale = (_one_per_tile(scale, height).view(torch.float8_e4m3fn) for scale in scales)
    return Bits(
        matrix(parts["_rowwise_data"]),
        row_scale,
        parts["_columnwise_data"].reshape(cols, rows // 2),
        column_scale,
        parts["_amax_rowwise"],
        parts["_amax_columnwise"],
    )


def _quantizer(task: str) -> Any:
    te, _ = modules()
    return {
        "mxfp8": lambda: te.MXFP8Quantizer(element(torch.float8_e4m3fn)),
        "mxfp8-2d": lambda: te.MXFP8Quantizer(element(torch.float8_e4m3fn), with_2d_quantization=True),
        "nvfp4": lambda: te.NVFP4Quantizer(),
        "nvfp4-2d": lambda: te.NVFP4Quantizer(with_2d_quantization=True),
        "nvfp4-rht": lambda: te.NVFP4Quantizer(with_rht=True, with_post_rht_amax=True),
    }[task]()


def _main(task: str, folder: Path) -> None:
    quantizer = _quantizer(task)
    found = []
    for x in torch.load(folder / "inputs.pt", weights_only=True):
        out = quantizer.make_empty(x.shape, dtype=x.dtype, device="cuda")
        names = [f"_{way}wise_{part}" for way in ("row", "column") for part in ("data", "scale_inv")]
        for name in names:
            getattr(out, name).fill_(_UNTOUCHED)
        try:
            with torch.no_grad():
                quantizer.update_quantized(x.cuda(), out)
            torch.cuda.synchronize()
        except RuntimeError as refusal:
            print(" ".join(str(refusal).split()))
            sys.exit(_REFUSED)
        names += [name for name in ("_amax_rowwise", "_amax_columnwise") if getattr(out, name, None) is not None]
        found.append({name: getattr(out, name).cpu() for name in names})
    torch.save(found, folder / "outputs.pt")


if __name__ == "__main__":
    _main(sys.argv[1], Path(sys.argv[2]))
