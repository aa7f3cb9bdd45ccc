"""Casts and scales are those of Transformer Engine 2.20.2 bit for bit, on a GPU of the Hopper generation.

Every cast is compared twice: as this library computes it on the CPU, and on the GPU. Where Transformer Engine gives
something else on purpose, :data:`DIFFERENCES` says what and why, and that very result is what the tests expect of it.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import functional_te as fte
from functional_te.quantization.scaling import delayed_scale
from tests.gpu import bits, te
from tests.gpu.bits import Bits
from tests.gpu.inputs import DTYPES, FP8, KINDS, SHAPES, make

te.require()
pytestmark = te.MARKS

NAN = torch.nan
every_kind = pytest.mark.parametrize("kind", KINDS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES)
every_format = pytest.mark.parametrize("fp8", FP8)


# ---------------------------------------------------------------------------- differences on purpose


@dataclasses.dataclass(frozen=True)
class Difference:
    """A rule that the two libraries do not share.

    Attributes:
        reason: both rules, in words.
        applies: whether it matters for a tensor.
        seen: the tensor that our cast has to be given to find Transformer Engine's scales.
        restored: Transformer Engine's result, from our cast of that tensor and the original one.
    """

    reason: str
    applies: Callable[[Tensor], bool]
    seen: Callable[[Tensor], Tensor]
    restored: Callable[[Bits, Tensor], Bits]


def _has_nan(x: Tensor) -> bool:
    return bool(x.isnan().any())


def _without_nan(x: Tensor) -> Tensor:
    return torch.where(x.isnan(), 0.0, x)


def _with_nan(cast: Bits, x: Tensor) -> Bits:
    """NaN back in the data."""
    where = bits.matrix(x).isnan()

    def put(data: Tensor | None, places: Tensor) -> Tensor | None:
        if data is None:
            return None
        raw = data.view(torch.uint8).clone()
        raw[places] = 0x7F
        return raw.view(data.dtype)

    return cast._replace(row=put(cast.row, where), column=put(cast.column, where.t()))


DIFFERENCES = (
    Difference(
        reason="Transformer Engine's maximum passes over NaN, so a tile that holds one gets the scale of its other "
        "elements, and a history an amax without it. Here NaN is an amax that cannot be used: scale 1, or the previous "
        "one. In both, NaN elements stay NaN.",
        applies=_has_nan,
        seen=_without_nan,
        restored=_with_nan,
    ),
)


# ---------------------------------------------------------------------------- casts to FP8


def expected(x: Tensor, quantizer: fte.Quantizer, device: str, scale: float | None = None) -> Bits:
    """What Transformer Engine should give: our cast, but for the differences."""
    for difference in DIFFERENCES:
        if difference.applies(x):
            return difference.restored(bits.cast(difference.seen(x), quantizer, device, scale), x)
    return bits.cast(x, quantizer, device, scale)


def compare(
    kind: str,
    dtype: str,
    cast: Callable[[Tensor, bool], Bits],
    quantizer: fte.Quantizer,
    scale: float | None = None,
    shapes: tuple[tuple[int, ...], ...] = SHAPES,
) -> None:
    """Fail with every difference between Transformer Engine's ``cast(x, columnwise)`` and our quantizer."""
    found = []
    for shape in shapes:
        x = make(kind, shape, DTYPES[dtype])
        for columnwise in (True, False):
            theirs = cast(x.cuda(), columnwise)
            for device in ("cpu", "cuda"):
                own = expected(x, quantizer.with_usage(True, columnwise), device, scale)
                what = f"{kind} {dtype} {shape}, ours on {device}, columnwise {columnwise}"
                what += "" if scale is None else f", scale {scale!r}"
                found += bits.of_casts(what, theirs, own, x, quantizer.tile)
    bits.assert_none(found)


# a fresh state, numbers without structure, a power of two, the largest scale, and one that makes all subnormal
SCALES = (1.0, 0.37, 57.3, 2.0**-9, torch.finfo(torch.float32).max, 1e-30)


@every_kind
@every_dtype
@every_format
def test_delayed_scaling(fp8: str, dtype: str, kind: str) -> None:
    quantizer = fte.Float8DelayedScalingQuantizer(dtype=FP8[fp8], amax_history_len=1)
    for scale in SCALES:
        compare(
            kind,
            dtype,
            lambda x, columnwise, scale=scale: te.delayed(x, FP8[fp8], scale, columnwise),
            quantizer,
            scale,
            SHAPES if scale == 0.37 else SHAPES[:4],
        )


CURRENT = {
    "plain": {},
    "pow2": {"power_of_2": True},
    "epsilon": {"epsilon": 0.3},
    "pow2-epsilon": {"power_of_2": True, "epsilon": 0.3},
}


@every_kind
@every_dtype
@every_format
@pytest.mark.parametrize("setting", CURRENT)
def test_current_scaling(setting: str, fp8: str, dtype: str, kind: str) -> None:
    options = CURRENT[setting]
    quantizer = fte.Float8CurrentScalingQuantizer(
        dtype=FP8[fp8],
        power_2_scale=options.get("power_of_2", False),
        amax_epsilon=options.get("epsilon", 0.0),
    )
    compare(kind, dtype, lambda x, columnwise: te.current(x, FP8[fp8], columnwise=columnwise, **options), quantizer)


BLOCK = {
    "pow2": {"power_of_2": True},
    "f32": {"power_of_2": False},
    "pow2-epsilon": {"power_of_2": True, "epsilon": 0.3},
    "f32-epsilon": {"power_of_2": False, "epsilon": 0.3},
}


@every_kind
@every_dtype
@every_format
@pytest.mark.parametrize("setting", BLOCK)
@pytest.mark.parametrize("dim", [1, 2])
def test_block_scaling(dim: int, setting: str, fp8: str, dtype: str, kind: str) -> None:
    options = BLOCK[setting]
    quantizer = fte.Float8BlockQuantizer(
        dtype=FP8[fp8],
        power_2_scale=options["power_of_2"],
        amax_epsilon=options.get("epsilon", 0.0),
        block_scaling_dim=dim,
    )
    compare(
        kind,
        dtype,
        lambda x, columnwise: te.block(x, FP8[fp8], dim=dim, columnwise=columnwise, **options),
        quantizer,
    )


@pytest.mark.parametrize("scheme", ["delayed", "current", "block-1d", "block-2d"])
@every_dtype
def test_strided_input(dtype: str, scheme: str) -> None:
    x = make("spread", (144, 272), DTYPES[dtype]).t()
    e4m3 = FP8["e4m3"]
    quantizer, theirs, scale = {
        "delayed": lambda: (
            fte.Float8DelayedScalingQuantizer(dtype=e4m3, columnwise=True),
            te.delayed(x.cuda(), e4m3, 0.37),
            0.37,
        ),
        "current": lambda: (
            fte.Float8CurrentScalingQuantizer(dtype=e4m3, columnwise=True),
            te.current(x.cuda(), e4m3),
            None,
        ),
        "block-1d": lambda: (
            fte.Float8BlockQuantizer(dtype=e4m3, columnwise=True, block_scaling_dim=1),
            te.block(x.cuda(), e4m3, dim=1),
            None,
        ),
        "block-2d": lambda: (
            fte.Float8BlockQuantizer(dtype=e4m3, columnwise=True),
            te.block(x.cuda(), e4m3, dim=2),
            None,
        ),
    }[scheme]()
    for device in ("cpu", "cuda"):
        bits.assert_none(bits.of_casts(f"strided {device}", theirs, bits.cast(x, quantizer, device, scale), x))


@every_format
def test_our_side_of_the_difference_in_nan(fp8: str) -> None:
    """A tile with NaN has scale 1, and the NaN of a tensor reaches the history; see :data:`DIFFERENCES`."""
    x = make("nan", (256, 384), torch.bfloat16)
    for device in ("cpu", "cuda"):
        current = bits.cast(x, fte.Float8CurrentScalingQuantizer(dtype=FP8[fp8]), device)
        assert current.row_scale.item() == 1
        quantizer = fte.Float8BlockQuantizer(dtype=FP8[fp8], block_scaling_dim=1, power_2_scale=False)
        with_nan = x.reshape(256, 3, 128).isnan().any(-1)
        assert with_nan.any()
        assert not with_nan.all()
        assert torch.equal(bits.cast(x, quantizer, device).row_scale == 1, with_nan)
        delayed = bits.cast(x, fte.Float8DelayedScalingQuantizer(dtype=FP8[fp8]), device, 2.0)
        assert delayed.row_amax.isnan().all()


# ---------------------------------------------------------------------------- delayed scaling over steps


def _amaxes(count: int, generator: torch.Generator, with_nan: bool) -> Tensor:
    """What ``count`` quantizers observe in one step: mostly usable numbers, some at the limits."""
    usable = torch.exp2(40 * torch.rand(count, generator=generator) - 20)
    special = torch.tensor([0.0, 0.0, math.inf, 1e-45, 1e-38, 5e-37, 1.3e-36, 3.3e38, 448.0, 57344.0])
    pick = torch.randint(0, len(special), (count,), generator=generator)
    amaxes = torch.where(torch.rand(count, generator=generator) < 0.3, special[pick], usable)
    if with_nan:
        amaxes = torch.where(torch.rand(count, generator=generator) < 0.1, NAN, amaxes)
    return amaxes


def _ours_over_nan(quantizer: Any, history: Tensor, scale: Tensor) -> Tensor:
    """Transformer Engine's scale where a history holds NaN: "max" passes over it. (The history rolls as ours does.)"""
    if quantizer.amax_compute_algo != "max":
        return fte.update_scale(quantizer, fte.DelayedScalingState(scale=scale, amax_history=history)).scale
    amax = torch.where(history.isnan(), 0.0, history).amax(-1, keepdim=True)
    updated = delayed_scale(amax, scale, quantizer.limit, margin=quantizer.margin)
    return torch.where(history[:, :1] != 0, updated, scale)


@pytest.mark.parametrize("values", ["numbers", "nan"])
@pytest.mark.parametrize("margin", [0, 2])
@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
@pytest.mark.parametrize("length", [1, 2, 8, 1024])
@every_format
def test_update_of_scales(fp8: str, length: int, algorithm: str, margin: int, values: str) -> None:
    """The fused update, 24 quantizers over 12 steps: the same history and scale after every step."""
    quantizer = fte.Float8DelayedScalingQuantizer(
        dtype=FP8[fp8], margin=margin, amax_history_len=length, amax_compute_algo=algorithm
    )
    generator, count, found = torch.Generator().manual_seed(length + margin), 24, []
    history = torch.stack([_amaxes(count, generator, values == "nan") for _ in range(length)], dim=1)
    scale = torch.exp2(_amaxes(count, generator, False).clamp(1e-3, 8.0))[:, None]
    for step in range(12):
        history[:, 0] = _amaxes(count, generator, values == "nan")
        their_history, their_scale = te.update(
            history.t().cuda(), scale[:, 0].cuda(), FP8[fp8], algorithm=algorithm, margin=margin
        )
        for device in ("cpu", "cuda"):
            own = fte.update_scale(
                quantizer,
                fte.DelayedScalingState(scale=scale.to(device), amax_history=history.to(device)),
            )
            if values == "nan":
                own = dataclasses.replace(own, scale=_ours_over_nan(quantizer, history.to(device), scale.to(device)))
            what = f"step {step}, ours on {device}"
            used = (history if algorithm == "max" else history[:, :1]).nan_to_num(0.0, math.inf).amax(-1)
            found += bits.differences(f"{what}: history", their_history.t(), own.amax_history)
            found += bits.differences(
                f"{what}: scale (x is the amax)", their_scale, own.scale[:, 0], lambda used=used: used
            )
        history, scale = their_history.t().cpu().contiguous(), their_scale.cpu()[:, None]
    bits.assert_none(found)
