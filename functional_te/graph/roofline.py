"""How long a step takes at best, and why: a roofline that knows waves of tiles and the cost of a launch.

A kernel takes the longer of its products' time and its memory's time, and one launch. A product is made of tiles that
the processors work on side by side; the last wave of tiles takes as long as a full one, which is what makes small
products slow. Of the tile sizes the best counts. Sources of the rates: :mod:`functional_te.graph.devices`; the model is
that of Williams, Waterman and Patterson, "Roofline", 2009.
"""

from __future__ import annotations

from typing import NamedTuple

from functional_te.graph.devices import Device
from functional_te.graph.value import Kernel, Step

__all__ = ["Estimate", "estimate", "kernel_estimate", "substituted"]

_LAYOUTS = ("nt", "nn", "tn")


class Estimate(NamedTuple):
    """An estimate.

    Attributes:
        seconds: the time.
        bound: what most of it goes to: ``"compute"``, ``"memory"``, ``"launch"``, or an empty string for nothing.
    """

    seconds: float
    bound: str


def estimate(step: Step, device: Device) -> Estimate:
    """The time of a step: its kernels one after another."""
    shares: dict[str, float] = {}
    for kernel in step.kernels:
        own = kernel_estimate(kernel, device, step.direction)
        shares[own.bound] = shares.get(own.bound, 0.0) + own.seconds
    if not shares:
        return Estimate(0.0, "")
    return Estimate(sum(shares.values()), max(shares, key=lambda bound: shares[bound]))


def substituted(steps: tuple[Step, ...], device: Device) -> tuple[str, ...]:
    """What the steps multiply and the device cannot, so that BF16 stands for it; as in :attr:`Kernel.math`."""
    found = {kernel.math for step in steps for kernel in step.kernels if kernel.math}
    return tuple(sorted(found - set(device.products)))


def kernel_estimate(kernel: Kernel, device: Device, direction: str) -> Estimate:
    """The time of one kernel."""
    share = 1.0
    if kernel.kind != "product":
        share = device.share(kernel.kind, direction, kernel.scaling)
    memory = (kernel.read + kernel.written) / (device.bandwidth * 1e12 * share)
    compute = _product_seconds(kernel, device) if kernel.kind == "product" else 0.0
    work = max(memory, compute)
    if work < device.launch:
        return Estimate(work + device.launch, "launch")
    return Estimate(work + device.launch, "compute" if compute >= memory else "memory")


def _product_seconds(kernel: Kernel, device: Device) -> float:
    name = "fp8-fast" if kernel.math == "fp8" and kernel.fast else kernel.math
    rates = device.products.get(name) or device.products.get(kernel.math) or device.products["bf16"]
    per_unit = rates[_LAYOUTS.index(kernel.layout)] * 1e12 / device.units
    rows, columns, reduced = kernel.sizes
    best = float("inf")
    for height, width, share in device.tiles:
        tiles = -(-rows // height) * -(-columns // width)
        # with fewer tiles than processors, several share the sum of one
        waves = float(-(-tiles // device.units)) if tiles >= device.units else max(tiles / device.units, 1 / 8)
        best = min(best, waves * 2 * height * width * reduced / (per_unit * share))
    return best
