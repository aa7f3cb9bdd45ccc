"""What devices do: achievable rates of products and of memory, with their sources."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from functional_te._errors import type_error, value_error

__all__ = ["DEVICES", "Device", "device_of", "this_cpu"]

Rates = tuple[float, float, float]  # of products nt, nn, tn, in TFLOP/s


@dataclasses.dataclass(frozen=True)
class Device:
    """What a device achieves on large, well-shaped work. Nothing here is a peak of a datasheet.

    Attributes:
        name: how it is asked for.
        bandwidth: TB/s of a device copy, bytes read and written together.
        products: TFLOP/s of ``nt``, ``nn`` and ``tn`` products by what is multiplied; see :attr:`Kernel.math`.
            ``"fp8-fast"`` are FP8 products with fast accumulation. What is missing is multiplied in ``"bf16"``.
        units: processors that work on tiles of a product side by side.
        tiles: rows and columns of a tile, and the share of the rate that it reaches; largest first.
        launch: seconds that a kernel takes at least in a captured graph, its start and its end.
        passes: share of the bandwidth that kernels reach, by kind, or by kind and direction, or :attr:`Kernel.scaling`,
            or both, in this order.
        source: where the numbers come from.
    """

    name: str
    bandwidth: float
    products: Mapping[str, Rates]
    units: int
    tiles: tuple[tuple[int, int, float], ...]
    launch: float
    passes: Mapping[str, float]
    source: str

    def share(self, kind: str, direction: str, scaling: str) -> float:
        """The share of the bandwidth that a kernel reaches that is no product."""
        for name in (f"{kind} {direction} {scaling}", f"{kind} {scaling}", f"{kind} {direction}"):
            if name in self.passes:
                return self.passes[name]
        return self.passes[kind]

    def __reduce__(self) -> tuple[Any, ...]:
        """Views of dicts, which keep the table from being changed, cannot be pickled."""
        values = (getattr(self, field.name) for field in dataclasses.fields(self))
        return Device, tuple(dict(value) if isinstance(value, Mapping) else value for value in values)


_GPU_TILES = ((128, 256, 1.0), (128, 128, 0.85), (64, 128, 0.6), (64, 64, 0.4))
# Measured on an H200 with the Triton backend, 8192 rows: of bytes that have to move, so that passes which read twice
# (current scaling, RMSNorm with a transposed copy) have small shares.
_GPU_PASSES = MappingProxyType(
    {
        "elementwise": 0.92,
        "elementwise current": 0.45,
        "elementwise blocks": 0.40,
        "elementwise backward": 1.0,
        "elementwise backward delayed": 0.75,
        "elementwise backward current": 0.37,
        "elementwise backward blocks": 0.30,
        "cast": 0.82,
        "cast current": 0.55,
        "cast blocks": 0.34,
        "rows": 0.83,
        "rows delayed": 0.37,
        "rows current": 0.34,
        "rows blocks": 0.20,
        "rows backward": 1.0,
    }
)
_HOPPER = MappingProxyType(
    {
        "fp8-fast": (1386.0, 1465.0, 1355.0),
        "fp8": (1380.0, 1369.0, 1307.0),
        "fp8-block": (1152.0, 1139.0, 922.0),
        "bf16": (795.0, 812.0, 783.0),
        "fp32": (50.0, 50.0, 50.0),
    }
)


def _alike(**rates: float) -> Mapping[str, Rates]:
    return MappingProxyType({name.replace("_", "-"): (rate, rate, rate) for name, rate in rates.items()})


_MEASURED = "measured with PyTorch 2.11 on an H200: products of 8192 rows, device copies (FP32 from the datasheet)"
_SHEET = "NVIDIA's datasheet, times the share of it that an H200 reaches: 0.70 of FP8, 0.80 of BF16, 0.89 of the memory"

DEVICES: Mapping[str, Device] = MappingProxyType(
    {
        device.name: device
        for device in (
            Device("H200", 4.25, _HOPPER, 132, _GPU_TILES, 3e-6, _GPU_PASSES, _MEASURED),
            # the same processor with 3.35 TB/s
            Device("H100", 2.97, _HOPPER, 132, _GPU_TILES, 3e-6, _GPU_PASSES, f"{_MEASURED}; memory as in {_SHEET}"),
            # dense peaks: FP4 9000, FP8 4500, BF16 2250 TFLOP/s; 8 TB/s
            Device(
                "B200",
                7.1,
                _alike(fp4=6300.0, mxfp8=3150.0, fp8_fast=3150.0, fp8=3150.0, fp8_block=2300.0, bf16=1800.0, fp32=60.0),
                148,
                _GPU_TILES,
                3e-6,
                _GPU_PASSES,
                _SHEET,
            ),
            # dense peaks: BF16 312, FP32 19.5 TFLOP/s; 2.04 TB/s
            Device("A100", 1.8, _alike(bf16=250.0, fp32=17.0), 108, _GPU_TILES, 3e-6, _GPU_PASSES, _SHEET),
        )
    }
)


def device_of(device: Any) -> Device:
    """A device by name, in capitals or not, ``"cpu"`` for this machine's processor, or a :class:`Device` as it is.

    Raises:
        TypeError: neither a name nor a device.
        ValueError: no device of that name.
    """
    if isinstance(device, Device):
        return device
    known = [*DEVICES, "cpu"]
    if not isinstance(device, str):
        raise type_error("graph", "device", f"a Device or one of {known}", type(device).__name__)
    if device.lower() == "cpu":
        return this_cpu()
    name = device.upper().removesuffix(" SXM")
    if name not in DEVICES:
        raise value_error("graph", "device", f"one of {known}", repr(device))
    return DEVICES[name]


def here(kind: str) -> Device:
    """The device to estimate for where none is named: the GPU of this machine if tensors are there, else an H200."""
    if kind == "cuda" and torch.cuda.is_available():
        own = torch.cuda.get_device_name().upper()
        for name, device in DEVICES.items():
            if name in own:
                return device
    return DEVICES["H200"]


@functools.cache
def this_cpu() -> Device:
    """This machine's processor, from products and a copy that are timed once, in a tenth of a second."""
    rates = {}
    for name, dtype, size in (("fp32", torch.float32, 512), ("bf16", torch.bfloat16, 256)):
        a = torch.ones(size, size, dtype=dtype)
        rates[name] = 2 * size**3 / _fastest(lambda a=a: a @ a) / 1e12
    source, target = torch.ones(4 << 20), torch.ones(4 << 20)
    bandwidth = 2 * source.nbytes / _fastest(lambda: target.copy_(source)) / 1e12
    passes = MappingProxyType({"elementwise": 0.5, "cast": 0.2, "rows": 0.4})
    tiles = ((1, 1, 1.0),)
    measured = "measured on this machine: products of 512 and 256 rows, a copy of 16 MiB"
    return Device("cpu", bandwidth, _alike(**rates), 1, tiles, 5e-6, passes, measured)


def _fastest(function: Any) -> float:
    times = []
    for _ in range(4):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times)
