"""``eval_shape`` says what ``apply`` gives: shapes and dtypes, over every op and whole chains, without storage."""

from __future__ import annotations

import pytest
import torch

import functional_te as fte
from tests.helpers import FLOATING_OPS, extra_shape, uniform

RESIDUAL = fte.chain(
    fte.MakeExtraOutput(channel="r"),
    fte.LayerNorm((6, 4)),
    fte.Reshape((-1, 24)),
    fte.Linear(24, 32),
    fte.SwiGLU(),
    fte.Linear(16, 24),
    fte.Reshape((-1, 6, 4)),
    fte.AddExtraInput(channel="r"),
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("op", "size"), FLOATING_OPS, ids=lambda value: type(value).__name__ if isinstance(value, fte.Op) else ""
)
def test_every_op(op, size, dtype) -> None:
    block = fte.chain(op)
    params = fte.init(block, dtype=dtype)
    x = torch.randn(4, 2, size, dtype=dtype)
    extras = [uniform(extra_shape(op, tuple(x.shape)), dtype) for _ in range(block.num_extra_inputs)]
    found = fte.eval_shape(block, params, fte.TensorSpec((4, 2, size), dtype), *extras)
    expected = fte.apply(block, params, x, *extras)
    assert (found.output.shape, found.output.dtype) == (tuple(expected.output.shape), expected.output.dtype)
    assert [(e.shape, e.dtype) for e in found.extra_outputs] == [
        (tuple(e.shape), e.dtype) for e in expected.extra_outputs
    ]


def test_a_chain_from_specs_alone() -> None:
    params = fte.init(RESIDUAL, dtype=torch.float16, device="meta")
    found = fte.eval_shape(RESIDUAL, params, fte.TensorSpec((5, 6, 4), torch.float32, "meta"))
    assert (found.output.shape, found.output.dtype) == ((5, 6, 4), torch.float32)  # the residual promotes
    assert [(e.shape, e.dtype) for e in found.extra_outputs] == [((5, 6, 4), torch.float32)]
    assert fte.eval_shape(
        RESIDUAL, params, fte.TensorSpec((5, 6, 4), torch.float32, "meta"), compute_dtype=torch.bfloat16
    )


def test_a_chain_made_inside_a_compiled_function_is_refused(dynamo) -> None:
    with pytest.raises(torch._dynamo.exc.Unsupported, match="made outside of the compiled function"):
        torch.compile(lambda x: fte.apply(fte.chain(fte.GELU()), ({},), x).output, fullgraph=True, backend="eager")(
            torch.ones(2)
        )
