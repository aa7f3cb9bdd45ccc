"""What begins a compiled pass: steps are closed, scales copied and zeros for casts to observe into made in one launch.

On a GPU that is how every compiled step of delayed scaling begins. Here the kernels run in the interpreter, and the ops
around them closed.
"""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch

import bridge
import functional_te as fte
from bridge import program, state
from functional_te.kernels import resolve_backend
from functional_te.quantization.quantizers import Float8DelayedScalingQuantizer
from functional_te.quantization.tensor import BoundQuantizer


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch, device: str) -> list[tuple[int, int]]:
    """How many scales and zeros recordings have begun with; a chain's are made anew."""
    from functional_te.kernels.triton.state import Closing, close_step, copies

    own, found = state.open_, list[tuple[int, int]]()

    def open_(entries: Any, opens: Any, blanks: bool) -> Any:
        if device == "cpu":  # a closed op cannot close and copy at once
            state.close_states_([(*entry, None) for entry, closes in zip(entries, opens, strict=True) if closes])
            opens = [False] * len(opens)
        reads, zeros = own(entries, opens, True)
        found.append((len(reads), len(zeros)))
        return reads, zeros

    if device == "cpu":
        for module in list(sys.modules.values()):
            named = getattr(module, "__name__", "").partition(".")[0] in ("functional_te", "bridge")
            if named and vars(module).get("resolve_backend") is resolve_backend:
                monkeypatch.setattr(module, "resolve_backend", lambda *args, **kwargs: "triton")
        monkeypatch.setattr(state, "_kernel", lambda device: close_step)
        monkeypatch.setattr(state, "_fused", lambda device: types.SimpleNamespace(copies=copies, closing=Closing))
    monkeypatch.setattr(state, "open_", open_)
    monkeypatch.setattr(program, "_found", {})
    return found


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
def test_steps_are_those_of_eager_mode(algorithm: str, begun: list[tuple[int, int]], device: str, dynamo: Any) -> None:
    recipe = fte.recipes.DelayedScaling(amax_history_len=3, margin=1, amax_compute_algo=algorithm)

    def steps(compiled: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        ops = bridge.ops
        model = ops.Sequential(ops.RMSNorm(64), ops.Linear(64, 128), ops.SwiGLU(), ops.Linear(64, 32)).to(device)

        def call(x: torch.Tensor) -> torch.Tensor:
            with bridge.autocast(recipe=recipe):
                return model(x)

        if compiled:
            call = torch.compile(call, fullgraph=True, backend="aot_eager")
        found = []
        for step in range(4):
            for part in range(2):  # accumulates
                x = (torch.randn(16, 64) * (step + 1) / (part + 1)).to(device).requires_grad_()
                y = call(x)
                y.square().mean().backward()
                found += [y.detach(), x.grad]
            found += [own.grad.clone() for own in model.parameters()]
            with torch.no_grad():
                call(torch.full((16, 64), 3.0 + step, device=device))
        return found

    want = steps(False)
    assert not begun
    got = steps(True)
    assert (4, 4) in begun
    assert len(want) == len(got)
    # states differ in when, not in what: a compiled backward closes its step, an eager one leaves that to the next
    assert all(torch.equal(mine, eager) for mine, eager in zip(got, want, strict=True))


@pytest.mark.parametrize("closed", [False, True])
def test_scales_are_copied_with_and_without_zeros(closed: bool, begun: list[tuple[int, int]], device: str) -> None:
    op = getattr(torch.ops.functional_te, "keep_scales_opaque" if closed else "keep_scales")
    scales = [torch.full((1,), value, device=device) for value in (2.0, 3.0)]
    for arguments, zeros in (((), []), ((False,), []), ((True,), [0.0, 0.0])):
        assert [own.item() for own in op(scales, *arguments)] == [2.0, 3.0, *zeros]


def test_a_closed_op_leaves_the_zero_alone(device: str) -> None:
    quantizer = Float8DelayedScalingQuantizer(torch.float8_e4m3fn)
    blank = torch.zeros(1, device=device)
    bound = BoundQuantizer(quantizer=quantizer, scale=torch.ones(1, device=device), blank=blank)
    x = torch.full((16, 32), 3.0, device=device)
    args = fte.Quantize.fwd_args_type(tensor=x, quantizer=bound, backend="triton")
    forward, _ = bridge.register_custom_op(fte.Quantize)
    (closed,) = fte.pytree.leaves(forward(args, opaque=True).amaxes)
    (seen,) = fte.pytree.leaves(fte.Quantize.forward_impl(args).amaxes)
    assert seen is blank
    assert closed is not blank
    assert closed.item() == seen.item() == 3.0
    blank.zero_()
    forward(args, opaque=True)
    assert blank.item() == 0
