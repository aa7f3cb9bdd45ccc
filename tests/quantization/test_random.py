"""Random bits: published Philox vectors, an independent generator in numpy, keys as values, compiled = eager."""

import itertools

import numpy as np
import pytest
import torch

from functional_te.quantization import random
from functional_te.quantization.random import fold_in, make_key, next_key, philox_4x32, random_bits

MASK = 0xFFFFFFFF
# counter, key and result of philox4x32 with 10 rounds, from the known-answer file of Random123
VECTORS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((MASK,) * 4, (MASK,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def numpy_philox(counter, key) -> np.ndarray:
    """The generator in unsigned 64-bit arithmetic, which holds a 32 by 32 bit product as it is."""
    c = [np.atleast_1d(np.asarray(word, np.uint64)) for word in counter]
    k = [np.uint64(word) for word in key]
    for _ in range(10):
        products = [np.uint64(0xD2511F53) * c[0], np.uint64(0xCD9E8D57) * c[2]]
        high, low = zip(*((p >> np.uint64(32), p & np.uint64(MASK)) for p in products), strict=True)
        c = [high[1] ^ c[1] ^ k[0], low[1], high[0] ^ c[3] ^ k[1], low[0]]
        k = [(k[0] + np.uint64(0x9E3779B9)) & np.uint64(MASK), (k[1] + np.uint64(0xBB67AE85)) & np.uint64(MASK)]
    return np.stack(np.broadcast_arrays(*c))


@pytest.mark.parametrize(("counter", "key", "words"), VECTORS)
def test_published_vectors(counter, key, words) -> None:
    assert philox_4x32(counter, key) == words
    tensors = philox_4x32(tuple(torch.tensor(word) for word in counter), tuple(torch.tensor(word) for word in key))
    assert tuple(word.item() for word in tensors) == words
    assert tuple(int(word[0]) for word in numpy_philox(counter, key)) == words


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 1000])
@pytest.mark.parametrize("stream", [0, 1, 2**32 - 1])
def test_bits_against_numpy(count: int, stream: int) -> None:
    key = make_key(2**63 + 12345)
    bits = random_bits(key, count, stream)
    assert bits.dtype is torch.int32
    assert bits.shape == (count,)
    blocks = -(-count // 8)
    words = numpy_philox((np.arange(blocks), 0, stream, 0), key.tolist()).astype(np.uint32)
    want = words.astype("<u4").view("<u2").reshape(4, blocks, 2).transpose(0, 2, 1).reshape(-1)[:count]
    assert (bits.numpy() == want).all()


def test_bits_are_uniform() -> None:
    """Chi-square of the 65,536 values, of every bit, and of pairs of neighbours; bounds of five sigma."""
    bits = random_bits(make_key(0), 1 << 20)
    for values, bins in ((bits, 1 << 16), (bits[:-1] % 256 * 256 + bits[1:] % 256, 1 << 16)):
        expected = len(values) / bins
        chi2 = ((torch.bincount(values.long(), minlength=bins) - expected) ** 2 / expected).sum().item()
        assert abs(chi2 - bins) < 5 * (2 * bins) ** 0.5
    for bit in range(16):
        assert abs((bits >> bit & 1).double().mean().item() - 0.5) < 5 * 0.5 / 1024


def test_streams_and_keys_differ() -> None:
    keys = [make_key(0), make_key(1), make_key(0, 0), next_key(make_key(0)), fold_in(make_key(0), torch.zeros(1))]
    drawn = [random_bits(key, 4096, stream) for key, stream in itertools.product(keys, (0, 1, 7))]
    for one, other in itertools.combinations(drawn, 2):
        assert (one == other).sum().item() < 10  # 4096 pairs agree by chance with probability 2**-16 each


def test_keys_are_values() -> None:
    state = torch.get_rng_state()
    key = make_key(3, 1)
    copy = key.clone()
    first, second = random_bits(key, 100), random_bits(key, 100)
    next_key(key), fold_in(key, torch.ones(1))
    assert torch.equal(first, second)
    assert torch.equal(key, copy)
    assert torch.equal(torch.get_rng_state(), state)


def assert_key(key: torch.Tensor) -> tuple[int, int]:
    assert key.dtype is torch.int64
    assert key.shape == (2,)
    low, high = key.tolist()
    assert 0 <= low <= MASK
    assert 0 <= high <= MASK
    return low, high


def test_make_key() -> None:
    assert assert_key(make_key(0x0123456789ABCDEF)) == (0x89ABCDEF, 0x01234567)
    numbers = (0, 1, 2, 2**32, 2**64 - 1)
    paths = [path for length in range(4) for path in itertools.product(numbers, repeat=length)]
    assert len({assert_key(make_key(seed, *path)) for seed in numbers for path in paths}) == len(numbers) * len(paths)
    assert torch.equal(make_key(7, 8, 9), make_key(7, 8, 9))


@pytest.mark.parametrize("number", [-1, 2**64])
def test_make_key_range(number: int) -> None:
    with pytest.raises(ValueError, match=r"make_key: seed: expected an int in \[0, 2\*\*64\)"):
        make_key(number)
    with pytest.raises(ValueError, match="make_key: path: expected an int in"):
        make_key(0, number)
    with pytest.raises(TypeError, match="make_key: seed: expected an int, got float"):
        make_key(1.0)


def test_next_key_never_repeats_soon() -> None:
    key, seen = make_key(0), set()
    for _ in range(2000):
        seen.add(assert_key(key))
        key = next_key(key)
    assert len(seen) == 2000


def test_fold_in_reads_every_bit() -> None:
    key = make_key(5)
    patterns = torch.tensor([0, *(1 << bit for bit in range(31)), -(1 << 31)], dtype=torch.int32)
    keys = {assert_key(fold_in(key, pattern.reshape(1).view(torch.float32))) for pattern in patterns}
    assert len(keys) == 33
    assert torch.equal(fold_in(key, torch.tensor([1.5])), fold_in(key, torch.tensor([1.5])))
    assert not torch.equal(fold_in(key, torch.tensor([0.0])), fold_in(key, torch.tensor([-0.0])))


def test_compiled_is_eager(dynamo) -> None:
    """One graph for all counts and streams, and for a key that it made itself."""

    def draw(key: torch.Tensor, data: torch.Tensor, count: int, stream: int):
        key = fold_in(next_key(key), data)
        return key, random_bits(key, count, stream)

    compiled = torch.compile(draw, fullgraph=True, dynamic=True)
    for seed, count, stream in ((0, 5000, 3), (2**64 - 1, 1001, 2**32 - 1), (77, 16, 9)):
        arguments = (make_key(seed), torch.tensor([seed + 0.5]), count, stream)
        for got, want in zip(compiled(*arguments), draw(*arguments), strict=True):
            assert got.dtype is want.dtype
            assert torch.equal(got, want)
    assert dynamo["stats"]["unique_graphs"] == 1


def test_bits_of_rows_against_numpy() -> None:
    """Each row has its own key and number, whatever rows are beside it."""
    keys = torch.stack([make_key(7), make_key(2**40), make_key(7)], 1)
    rows = torch.tensor([0, 5, 2**31])
    bits = random.random_bits_of_rows(keys, rows, 20, 1)
    assert bits.dtype is torch.int32
    for i in range(3):
        words = numpy_philox((np.arange(3), int(rows[i]), 1, 4), keys[:, i].tolist()).astype(np.uint32)
        want = words.astype("<u4").view("<u2").reshape(4, 3, 2).transpose(0, 2, 1).reshape(-1)[:20]
        assert (bits[i].numpy() == want).all()
    assert torch.equal(random.random_bits_of_rows(keys[:, 1:2], rows[1:2], 20, 1), bits[1:2])


def test_folding_into_many_keys_is_folding_into_each() -> None:
    keys = torch.stack([make_key(seed) for seed in range(4)], 1)
    data = torch.tensor([0.0, 1.5, float("nan"), -2.0])
    want = [fold_in(keys[:, i].contiguous(), data[i : i + 1]) for i in range(4)]
    assert torch.equal(fold_in(keys, data), torch.stack(want, 1))


def test_all_names_are_public() -> None:
    names = {"fold_in", "make_key", "next_key", "philox_4x32", "random_bits", "random_bits_of_rows"}
    assert set(random.__all__) == names
