"""Results of kernels as they are stored: inputs, quantizers, and comparisons with what the reference stores."""

import dataclasses

import torch
from torch import Tensor

from functional_te import pytree
from functional_te import quantization as qz
from functional_te.quantization.tensor import BoundQuantizer, QuantizedTensor
from tests.gpu.inputs import FP8

DEVICE = "cuda"
BF16 = torch.bfloat16
E4M3, E5M2 = FP8["e4m3"], FP8["e5m2"]
QUANTIZERS = {
    "delayed": qz.Float8DelayedScalingQuantizer(dtype=E4M3),
    "current": qz.Float8CurrentScalingQuantizer(dtype=E4M3),
    "current-pow2": qz.Float8CurrentScalingQuantizer(dtype=E4M3, power_2_scale=True, amax_epsilon=0.3),
    "block-1d": qz.Float8BlockQuantizer(dtype=E4M3, block_scaling_dim=1),
    "block-2d": qz.Float8BlockQuantizer(dtype=E4M3),
    "block-f32": qz.Float8BlockQuantizer(dtype=E4M3, block_scaling_dim=1, power_2_scale=False),
}


def data(*shape: int, dtype: torch.dtype = BF16, seed: int = 0, spread: bool = False) -> Tensor:
    """Normal numbers; with ``spread`` rows of very different size."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    if spread:
        x = x * 2.0 ** torch.randint(-6, 7, (*shape[:-1], 1), generator=generator)
    return x.to(dtype).to(DEVICE)


def bind(name: str | None, rowwise: bool = True, columnwise: bool = True, fp8: torch.dtype = E4M3):
    if name is None:
        return None
    quantizer = dataclasses.replace(QUANTIZERS[name], dtype=fp8, rowwise=rowwise, columnwise=columnwise)
    scale = torch.full((1,), 13.7, device=DEVICE) if quantizer.stateful else None
    return BoundQuantizer(quantizer=quantizer, scale=scale)


def raw(x: Tensor) -> Tensor:
    return x.contiguous().view(-1).view(torch.uint8)


def assert_same_bits(actual, expected) -> None:
    left, spec = pytree.tree_flatten(actual)
    right, wanted = pytree.tree_flatten(expected)
    assert spec == wanted
    for one, other in zip(left, right, strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert one.is_contiguous()
        assert torch.equal(raw(one), raw(other))


def ordered(x: Tensor) -> Tensor:
    """Numbers as integers in their order: neighbours differ by one."""
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32}[x.element_size()]
    whole = x.contiguous().view(bits).long()
    return torch.where(whole < 0, -(whole & (2 ** (8 * x.element_size() - 1) - 1)), whole)


def assert_steps(actual: Tensor, expected: Tensor, steps: int = 1, small: float = 0.0) -> None:
    """At most ``steps`` numbers of the format between two tensors, or a difference below ``small``."""
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    apart = (ordered(actual) - ordered(expected)).abs() > steps
    apart &= (actual.float() - expected.float()).abs() > small
    assert not apart.any(), f"{int(apart.sum())} of {apart.numel()} differ"


def assert_near(actual, expected, small: float = 0.0) -> None:
    """Stored results of one quantizer: data one step apart, factors and amaxes nearly the same."""
    if expected is None:
        assert actual is None
        return
    if isinstance(expected, Tensor):
        steps = 64 if expected.dtype is torch.float32 else 1
        assert_steps(actual, expected, steps, small)
        return
    assert isinstance(actual, QuantizedTensor)
    assert (actual.dtype, actual.quantizer, actual.shape) == (expected.dtype, expected.quantizer, expected.shape)
    for columnwise in (False, True):
        one, other = actual.copy(columnwise), expected.copy(columnwise)
        assert (one is None) == (other is None)
        if one is None:
            continue
        assert one.data.shape == other.data.shape
        assert one.scale_inv.shape == other.scale_inv.shape
        assert one.data.is_contiguous()
        assert one.scale_inv.is_contiguous()
        left, right = (q.dequantize(torch.float32, columnwise=columnwise) for q in (actual, expected))
        # where a block's scale moved, data are one step of the coarser one apart
        steps = 2.0**-2 if actual.quantizer.dtype is E5M2 else 2.0**-3
        floor = other.scale_inv.max() * 2.0 ** (-16 if actual.quantizer.dtype is E5M2 else -9)
        allowed = right.abs() * steps * 1.01 + floor + small
        assert ((left - right).abs() <= allowed).all()
        if actual.quantizer.tile is None:
            assert (one.data.float() != other.data.float()).float().mean() < 0.02


def assert_amax(actual: Tensor | None, expected: Tensor | None) -> None:
    assert (actual is None) == (expected is None)
    if actual is not None:
        assert (actual.dtype, tuple(actual.shape)) == (torch.float32, (1,))
        torch.testing.assert_close(actual, expected, rtol=2.0**-8, atol=0)
