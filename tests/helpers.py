"""What several test files share: data, tolerances, and watching what runs."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import functional_te as fte
from functional_te import pytree

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# ops whose extra inputs are all floating, with the last dimension they take
FLOATING_OPS = tuple((op, last) for op, last in fte.ops.OPS if not isinstance(op, fte.GroupedLinear))
# rtol and atol of Transformer Engine's own tests of te.ops
TOLERANCES = {torch.float32: (1.3e-6, 1e-5), torch.float16: (1e-3, 1e-5), torch.bfloat16: (1.6e-2, 1e-5)}
DELAYED = fte.recipes.DelayedScaling(amax_history_len=4)
CURRENT = fte.recipes.Float8CurrentScaling()
RECIPES = (None, CURRENT, DELAYED)


def recipe_id(recipe: Any) -> str:
    return "none" if recipe is None else type(recipe).__name__


def assert_close(actual: Tensor | None, expected: Tensor, dtype: torch.dtype, what: str = "") -> None:
    """Compare with a float64 result, in the tolerance of ``dtype``."""
    assert actual is not None, what
    rtol, atol = TOLERANCES[dtype]
    torch.testing.assert_close(
        actual.double(), expected.detach().double(), rtol=rtol, atol=atol, msg=lambda text: f"{what}: {text}"
    )


def assert_same(actual: Any, expected: Any) -> None:
    """Bitwise equality of two trees of tensors, NaN included."""
    one, spec = pytree.tree_flatten(actual)
    other, expected_spec = pytree.tree_flatten(expected)
    assert spec == expected_spec
    for left, right in zip(one, other, strict=True):
        assert left.dtype is right.dtype
        torch.testing.assert_close(left, right, rtol=0, atol=0, equal_nan=True)


def random_params(block: Any, dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[dict[str, Tensor], ...]:
    """Parameters without structure: in [0.25, 1.25), so that every gain and bias matters."""
    generator = torch.Generator().manual_seed(seed)
    ops = block.ops if isinstance(block, fte.Chain) else (block,)
    return tuple(
        {
            name: (torch.rand(spec.shape, generator=generator) + 0.25).to(dtype)
            for name, spec in op.param_specs(dtype, "cpu").items()
        }
        for op in ops
    )


def uniform(shape: Any, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Values in [-1, 1)."""
    return (2 * torch.rand(shape, generator=torch.Generator().manual_seed(seed)) - 1).to(dtype)


def extra_shape(op: fte.Op, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of an op's extra inputs beside a main input of ``shape``."""
    if isinstance(op, fte.AdaptiveLayerNorm):
        return (shape[op.batch_dim], shape[-1])
    return shape[:-1] if isinstance(op, fte.ops.ScaledActivation) else shape


def require_grad(tree: Any) -> Any:
    """Copies of the tensors in ``tree`` that require gradients."""
    return pytree.tree_map(lambda t: t.detach().clone().requires_grad_(), tree)


def double(tree: Any) -> Any:
    """Float64 copies that require gradients."""
    return pytree.tree_map(lambda t: t.detach().double().requires_grad_(), tree)


def clone(tree: Any) -> Any:
    return pytree.tree_map(torch.clone, tree)


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if any(isinstance(value, Tensor) for value in tree_leaves((args, kwargs, result))):  # not dtype arithmetic
            self.seen.append(str(func))
        return result


@contextlib.contextmanager
def recorded_kernels() -> Iterator[list[str]]:
    """Yield the list of the ATen ops that run inside."""
    recorder = _Recorder()
    with recorder:
        yield recorder.seen


@contextlib.contextmanager
def unchanged(tree: Any) -> Iterator[None]:
    """Nothing inside may write to a tensor of ``tree``: neither its version nor its bits change."""
    tensors = [t for t in pytree.leaves(tree) if isinstance(t, Tensor)]
    versions = [t._version for t in tensors]
    copies = [t.detach().clone() for t in tensors]
    yield
    assert [t._version for t in tensors] == versions
    for tensor, copy in zip(tensors, copies, strict=True):
        torch.testing.assert_close(tensor.detach(), copy, rtol=0, atol=0, equal_nan=True)
