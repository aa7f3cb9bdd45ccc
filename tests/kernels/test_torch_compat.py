"""The private functions of torch that the Triton backend calls are what they were."""

from __future__ import annotations

import torch

SCHEMAS = {
    "_scaled_mm": "aten::_scaled_mm(Tensor self, Tensor mat2, Tensor scale_a, Tensor scale_b, Tensor? bias=None, "
    "Tensor? scale_result=None, ScalarType? out_dtype=None, bool use_fast_accum=False) -> Tensor",
    "_scaled_grouped_mm": "aten::_scaled_grouped_mm(Tensor self, Tensor mat2, Tensor scale_a, Tensor scale_b, "
    "Tensor? offs=None, Tensor? bias=None, Tensor? scale_result=None, ScalarType? out_dtype=None, "
    "bool use_fast_accum=False) -> Tensor",
}


def test_schemas() -> None:
    for name, schema in SCHEMAS.items():
        assert hasattr(torch, name)
        assert str(getattr(torch.ops.aten, name).default._schema) == schema


def test_product_on_the_cpu() -> None:
    """What it computes: the scales multiply, and the second operand comes transposed."""
    a, b = torch.arange(32.0).reshape(2, 16), torch.arange(-24.0, 24.0).reshape(3, 16)
    one, other = torch.tensor([0.5]), torch.tensor([4.0])
    fp8 = [x.to(torch.float8_e4m3fn) for x in (a, b)]
    y = torch._scaled_mm(fp8[0], fp8[1].t(), one, other, out_dtype=torch.float32)
    torch.testing.assert_close(y, 2 * fp8[0].float() @ fp8[1].float().t())
