"""The cases: shapes at the edges of blocks, and kinds of values that casts get wrong."""

import functools
import zlib
from collections.abc import Callable

import torch
from torch import Generator, Tensor

DEVICE = "cuda"
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
FP8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}

# whole and partial tiles of 128, one row, odd sizes, more than two dimensions
SHAPES = (
    (128, 128),
    (256, 384),
    (128, 144),
    (16, 16),
    (144, 272),
    (1, 128),
    (303, 300),
    (2, 3, 128),
    (5, 32, 40),
)
# features in multiples of 32, which every format takes
EVEN_SHAPES = ((128, 128), (33, 96), (2, 3, 160), (1, 32), (300, 32), (0, 64))
# both dimensions in multiples of 16 (NVFP4) or 32 (MXFP8), as Transformer Engine wants them
NVFP4_SHAPES = ((128, 128), (16, 16), (144, 272), (32, 48), (2, 16, 64))
MXFP8_SHAPES = ((128, 128), (32, 32), (160, 96), (2, 32, 64))


def _uniform(shape: tuple[int, ...], low: float, high: float, generator: Generator) -> Tensor:
    return low + (high - low) * torch.rand(shape, generator=generator)


def _signs(shape: tuple[int, ...], generator: Generator) -> Tensor:
    return torch.randint(0, 2, shape, generator=generator).float() * 2 - 1


def _integers(shape: tuple[int, ...], low: int, high: int, generator: Generator) -> Tensor:
    return torch.randint(low, high, shape, generator=generator).float()


def _normal(shape, dtype, generator):
    return torch.randn(shape, generator=generator)


def _spread(shape, dtype, generator):
    """Magnitudes over 2**-12 to 2**12, so that neighbouring blocks have different scales."""
    return torch.randn(shape, generator=generator) * 2.0 ** _integers(shape, -12, 13, generator)


def _zeros(shape, dtype, generator):
    return torch.zeros(shape)


def _signed_zeros(shape, dtype, generator):
    return torch.where(_signs(shape, generator) > 0, 0.0, -0.0)


def _one_hot(shape, dtype, generator):
    x = torch.zeros(shape)
    if x.numel():
        x.view(-1)[int(torch.randint(0, x.numel(), (), generator=generator))] = -1.3
    return x


def _subnormal(shape, dtype, generator):
    """Subnormal numbers of the dtype only."""
    smallest = torch.finfo(dtype).smallest_normal
    steps = round(1 / torch.finfo(dtype).eps)
    return _signs(shape, generator) * _integers(shape, 0, steps, generator) * (smallest / steps)


def _tiny(shape, dtype, generator):
    """Just above the subnormal numbers: in float32 and bfloat16 the scale overflows."""
    return _signs(shape, generator) * _uniform(shape, 1.0, 40.0, generator) * torch.finfo(dtype).smallest_normal


def _huge(shape, dtype, generator):
    """Half of the dtype's largest number and above, the largest itself included."""
    x = _signs(shape, generator) * _uniform(shape, 0.5, 1.0, generator) * torch.finfo(dtype).max
    return torch.where(torch.rand(shape, generator=generator) < 0.02, torch.finfo(dtype).max, x)


def _sprinkled(value: float, shape, generator) -> Tensor:
    """Normal numbers with ``value``, of both signs, in one element of two hundred, at least in one."""
    x = torch.randn(shape, generator=generator) * 100
    where = torch.rand(shape, generator=generator) < 0.005
    if where.numel():
        where.view(-1)[where.numel() // 2] = True
    return torch.where(where, _signs(shape, generator) * value, x)


def _inf(shape, dtype, generator):
    return _sprinkled(float("inf"), shape, generator)


def _nan(shape, dtype, generator):
    return _sprinkled(float("nan"), shape, generator)


def _constant(shape, dtype, generator):
    return torch.full(shape, -0.7)


def _powers_of_2(shape, dtype, generator):
    return _signs(shape, generator) * 2.0 ** _integers(shape, -10, 11, generator)


def _ties(shape, dtype, generator):
    """Halfway between two neighbours of E4M3 (some are of E5M2 too), their neighbours, and a scale of 2**n.

    An element of the diagonal of every tile of 128 is 448, the amax of its row and of its column.
    """
    grid = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    halfway = (grid[1:] + grid[:-1]) / 2
    points = torch.cat((halfway, grid, 7 * 2.0 ** torch.arange(-17, 6), 5 * 2.0 ** torch.arange(-17, 7)))
    x = points[torch.randint(0, len(points), shape, generator=generator)].to(dtype)
    step = torch.randint(-1, 2, shape, generator=generator)
    direction = torch.where(step > 0, 448.0, 0.0).to(dtype)
    x = torch.where(step == 0, x, torch.nextafter(x, direction))
    rows = x.view(-1, shape[-1])
    i, j = torch.meshgrid(torch.arange(rows.shape[0]), torch.arange(rows.shape[1]), indexing="ij")
    rows[i % 128 == j % 128] = 448.0
    return x * _signs(shape, generator).to(dtype)


def _scale_edges(shape, dtype, generator):
    """Amaxes at which a scale reaches the next power of two, and their neighbours."""
    x = _uniform(shape, -1.0, 1.0, generator)
    rows = x.view(-1, shape[-1])
    count = rows.shape[0]
    edge = (1.75 * 2.0 ** _integers((count,), -8, 8, generator)).to(dtype)
    step = torch.randint(-1, 2, (count,), generator=generator)
    beside = torch.nextafter(edge, torch.where(step > 0, 1e4, 0.0).to(dtype))
    edge = torch.where(step == 0, edge, beside).float()
    rows.mul_(edge[:, None] / 2)
    rows[torch.arange(count), torch.arange(count) % shape[-1]] = edge
    return x


KINDS: dict[str, Callable[..., Tensor]] = {
    "normal": _normal,
    "spread": _spread,
    "zeros": _zeros,
    "signed_zeros": _signed_zeros,
    "one_hot": _one_hot,
    "subnormal": _subnormal,
    "tiny": _tiny,
    "huge": _huge,
    "inf": _inf,
    "nan": _nan,
    "constant": _constant,
    "powers_of_2": _powers_of_2,
    "ties": _ties,
    "scale_edges": _scale_edges,
}


@functools.lru_cache(maxsize=4096)
def _made(kind: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    seed = zlib.crc32(f"{kind} {shape} {dtype}".encode())
    return KINDS[kind](shape, dtype, torch.Generator().manual_seed(seed)).to(dtype)


def make(kind: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The tensor of a case, on the CPU; always the same."""
    return _made(kind, tuple(shape), dtype).clone()
