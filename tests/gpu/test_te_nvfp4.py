"""NVFP4 casts are those of Transformer Engine's pure-Python reference; its kernels for newer GPUs, where they run."""

from typing import Any

import pytest
import torch
from torch import Tensor

import functional_te as fte
from tests.gpu import bits, te
from tests.gpu.bits import Bits
from tests.gpu.inputs import DTYPES, FP8, KINDS, MXFP8_SHAPES, NVFP4_SHAPES, make

te.require()
pytestmark = te.MARKS

NVFP4: dict[str, dict[str, Any]] = {
    "1d": {},
    "2d": {"square": True},
    "rht": {"rht": True},
    "row_scaled": {"row_scaled": True, "columnwise": False},
    "mae-448": {"four_over_six": "MAE"},
    "mse-448": {"four_over_six": "MSE"},
    "mae-256": {"four_over_six": "MAE", "e4m3_max": 256},
    "mse-256-2d": {"four_over_six": "MSE", "e4m3_max": 256, "square": True},
}


def _nvfp4(options: dict[str, Any]) -> fte.NVFP4Quantizer:
    return fte.NVFP4Quantizer(
        columnwise=options.get("columnwise", True),
        with_rht=options.get("rht", False),
        with_2d_quantization=options.get("square", False),
        row_scaled=options.get("row_scaled", False),
        four_over_six=options.get("four_over_six"),
        e4m3_max=options.get("e4m3_max", 448),
    )


def _nibbles(data: Tensor) -> Tensor:
    """E2M1 codes ``[R, C]`` of packed data ``[R, C / 2]``, the first of two in the lower half of a byte."""
    return torch.stack((data & 15, data >> 4), dim=-1).flatten(-2)


def _plain_zeros(codes: Tensor) -> Tensor:
    """Transformer Engine's Python code gives a scaled value of -0 the code of +0; hardware and this library keep it."""
    return torch.where(codes == 8, 0, codes)


def _unpacked(cast: Bits) -> Bits:
    row, column = (None if part is None else _plain_zeros(_nibbles(part)) for part in (cast.row, cast.column))
    return cast._replace(row=row, column=column)


# what the reference makes of them is an accident: comparisons with NaN give code 0, torch.max() gives NaN
NVFP4_KINDS = [kind for kind in KINDS if kind not in ("inf", "nan")]


@pytest.mark.parametrize("kind", NVFP4_KINDS)
@pytest.mark.parametrize("dtype", ["bf16", "f32"])
@pytest.mark.parametrize("setting", [name for name in NVFP4 if name != "rht"])
def test_nvfp4_like_the_python_reference(setting: str, dtype: str, kind: str) -> None:
    options, found = NVFP4[setting], []
    for shape in NVFP4_SHAPES:
        x = make(kind, shape, DTYPES[dtype])
        theirs = _unpacked(te.nvfp4_reference(x.cuda(), **options))
        for device in ("cpu", "cuda"):
            own = _unpacked(bits.cast(x, _nvfp4(options), device))
            found += bits.of_casts(f"{kind} {dtype} {shape}, ours on {device}", theirs, own, x, _nvfp4(options).tile)
    bits.assert_none(found)


# sums that overflow are infinity or NaN by their order; a matrix product may flush subnormal numbers
TRANSFORMED_KINDS = [kind for kind in NVFP4_KINDS if kind not in ("huge", "tiny", "subnormal")]


@pytest.mark.parametrize("kind", TRANSFORMED_KINDS)
def test_nvfp4_with_the_transform_like_the_python_reference(kind: str, record_property) -> None:
    """The rowwise copy is bitwise the same. The transformed copy is a matrix product there, whose order of sums is
    its own: where that moves a rounding to bfloat16, elements may differ; they are counted.
    """
    found, different, total = [], 0, 0
    for shape in NVFP4_SHAPES:
        x = make(kind, shape, torch.bfloat16)
        theirs = _unpacked(te.nvfp4_reference(x.cuda(), rht=True))
        for device in ("cpu", "cuda"):
            own = _unpacked(bits.cast(x, _nvfp4({"rht": True}), device))
            what = f"{kind} {shape}, ours on {device}"
            one, other = (cast._replace(column=None, column_scale=None, column_amax=None) for cast in (theirs, own))
            found += bits.of_casts(what, one, other, x, (1, 16))
            torch.testing.assert_close(own.column_amax, theirs.column_amax, rtol=2.0**-8, atol=0)
            for name in ("column", "column_scale"):
                left, right = (bits.integers(getattr(cast, name)) for cast in (theirs, own))
                assert left.shape == right.shape
                different, total = different + int((left != right).sum()), total + left.numel()
    bits.assert_none(found)
    record_property("columnwise, differ:", f"{different} of {total}")
    assert different <= 0.002 * total


# ---------------------------------------------------------------------------- kernels


@pytest.mark.parametrize("task", ["mxfp8", "mxfp8-2d", "nvfp4", "nvfp4-2d", "nvfp4-rht"])
def test_kernels_that_hopper_may_not_run(task: str, tmp_path) -> None:
    """Transformer Engine's MXFP8 and NVFP4 kernels, where the GPU runs them; else skipped with what they said."""
    mx, kinds = task.startswith("mxfp8"), ("normal", "spread", "zeros", "huge", "powers_of_2")
    cases = [(kind, shape) for kind in kinds for shape in (MXFP8_SHAPES if mx else NVFP4_SHAPES)]
    tensors = [make(kind, shape, torch.bfloat16) for kind, shape in cases]
    theirs = te.isolated(task, tensors, tmp_path)
    if mx:
        quantizer = fte.MXFP8Quantizer(dtype=FP8["e4m3"], columnwise=True, with_2d_quantization=task.endswith("2d"))
    else:
        quantizer = _nvfp4({"square": task.endswith("2d"), "rht": task.endswith("rht")})
    found = []
    for (kind, shape), x, cast in zip(cases, tensors, theirs, strict=True):
        for device in ("cpu", "cuda"):
            own = bits.cast(x, quantizer, device)
            found += bits.of_casts(f"{kind} {shape}, ours on {device}", cast, own, x, quantizer.tile)
    bits.assert_none(found)
