"""The random Hadamard transform against a matrix product in float64."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from functional_te.quantization.hadamard import GROUP, SIGNS, hadamard, hadamard_inverse, hadamard_matrix
from tests.helpers import DTYPES, uniform


def sylvester() -> torch.Tensor:
    """H of size 16 by doubling, in float64."""
    h = torch.ones(1, 1, dtype=torch.float64)
    for _ in range(4):
        h = torch.cat((torch.cat((h, h), 1), torch.cat((h, -h), 1)))
    return h


def product(x: torch.Tensor, dim: int, *, inverse: bool = False) -> torch.Tensor:
    """The transform in float64 as a matrix product."""
    matrix = torch.tensor(SIGNS, dtype=torch.float64).diag() @ sylvester() / 4
    matrix = matrix.T if inverse else matrix
    moved = x.double().movedim(dim, -1)
    return (moved.unflatten(-1, (-1, GROUP)) @ matrix).flatten(-2).movedim(-1, dim)


def test_matrix() -> None:
    matrix = hadamard_matrix(torch.float64, "cpu")
    assert torch.equal(matrix, torch.tensor(SIGNS, dtype=torch.float64).diag() @ sylvester() / 4)
    assert torch.equal(matrix @ matrix.T, torch.eye(GROUP, dtype=torch.float64))
    assert torch.equal(hadamard_matrix(torch.bfloat16, "cpu").double(), matrix)
    assert "".join("+" if sign > 0 else "-" for sign in SIGNS) == "+++-+------+-+--"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(groups=st.integers(1, 3), other=st.integers(1, 5), dim=st.sampled_from([0, 1, -1, -2]), seed=st.integers(0, 99))
def test_against_matrix_product(dtype: torch.dtype, groups: int, other: int, dim: int, seed: int) -> None:
    shape = [other, other]
    shape[dim] = groups * GROUP
    x = uniform(shape, dtype, seed)
    for function, inverse in ((hadamard, False), (hadamard_inverse, True)):
        got = function(x, dim)
        assert got.dtype is dtype
        assert got.shape == x.shape
        assert got.is_contiguous()
        want = product(x, dim, inverse=inverse)
        # float32 sums of 16 values below 1, then one rounding to the dtype
        assert ((got.double() - want).abs() <= 4e-6 + torch.finfo(dtype).eps / 2 * want.abs()).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_exact_on_small_integers(dtype: torch.dtype) -> None:
    """Every sum is exact here, so the result is the float64 product, and the inverse gives the input back."""
    x = torch.randint(-8, 9, (7, 5 * GROUP), generator=torch.Generator().manual_seed(0)).to(dtype)
    transformed = hadamard(x)
    assert torch.equal(transformed.double(), product(x, -1))
    assert torch.equal(hadamard_inverse(transformed), x)
    assert torch.equal(hadamard(hadamard_inverse(x)), x)


def test_product_over_tokens_is_unchanged() -> None:
    """What the weight gradient relies on: both operands transformed along the dimension that is reduced."""
    x, dy = uniform((64, 5), seed=1), uniform((64, 3), seed=2)
    transformed = hadamard(dy, dim=0).T @ hadamard(x, dim=0)
    torch.testing.assert_close(transformed, dy.T @ x)
    assert not torch.allclose(hadamard(dy, dim=0).T @ x, dy.T @ x)


@pytest.mark.parametrize("shape", [(3, 2, 32), (48,), (0, 16), (4, 0)])
def test_shapes_and_strides(shape) -> None:
    x = uniform(shape)
    assert torch.equal(hadamard(x), hadamard(x, dim=len(shape) - 1))
    if len(shape) == 2:
        assert torch.equal(hadamard(x), hadamard(x.T.contiguous(), dim=0).T)
        assert torch.equal(hadamard(x), hadamard(x.T.contiguous().T))
        wide = torch.cat((x, x), 1)[:, : shape[1]]
        assert torch.equal(hadamard(x), hadamard(wide))


@pytest.mark.parametrize("function", [hadamard, hadamard_inverse])
def test_partial_group_is_refused(function) -> None:
    with pytest.raises(ValueError, match="hadamard: x: expected a multiple of 16 values along dimension 1, got 24"):
        function(torch.ones(2, 24))


@pytest.mark.slow
def test_compiled_is_eager(dynamo) -> None:
    def both(x: torch.Tensor):
        return hadamard(x, dim=0), hadamard_inverse(x)

    compiled = torch.compile(both, fullgraph=True)
    for tokens in (32, 48, 112):
        x = uniform((tokens, 160), torch.bfloat16, seed=tokens) * 1e3
        torch._dynamo.maybe_mark_dynamic(x, 0)
        for got, want in zip(compiled(x), both(x), strict=True):
            assert torch.equal(got, want)
    assert dynamo["stats"]["unique_graphs"] == 1
