"""Which backend runs: by name, by device, and what an absent one says."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import Any

import pytest
import torch

import functional_te as fte
from functional_te.kernels import BACKENDS, kernels, measured, registry, resolve_backend

BLOCK = fte.chain(fte.RMSNorm(16), fte.Linear(16, 16))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Pretend what every backend lacks on a device type: a dict from name to None or a reason."""

    def pretend(**missing: str | None) -> None:
        def source(own: registry.Source) -> registry.Source:
            return registry.Source(own.name, own.load, lambda device: missing.get(own.name), own.summary)

        monkeypatch.setattr(registry, "BACKENDS", tuple(source(own) for own in BACKENDS))
        monkeypatch.setattr(registry, "_found", {})

    return pretend


def test_auto_takes_the_fastest_that_can_run(machine: Any) -> None:
    machine()
    assert resolve_backend("auto", "cuda") == "triton"
    assert resolve_backend("auto", "cpu") == resolve_backend("auto") == resolve_backend("auto", "meta") == "reference"
    machine(triton="too old")
    assert resolve_backend("auto", "cuda") == "te"
    machine(triton="too old", te="it is not installed")
    assert resolve_backend("auto", "cuda") == "reference"


def test_the_measurements_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    times = {"one": {"reference": 1.0, "te": 2.0, "triton": 3.0}, "other": {"reference": 9.0, "te": 1.0, "triton": 1.0}}
    monkeypatch.setattr(measured, "MEASURED", times)
    assert measured.fastest_first() == ("te", "triton", "reference")


def test_the_table_says_why() -> None:
    text = repr(fte.backends("cuda"))
    for recipe, times in measured.MEASURED.items():
        (line,) = [line for line in text.splitlines() if line.strip().startswith(recipe)]
        assert set(map(str, times.values())) <= set(line.split())
    assert "H200" in text
    assert "H200" not in repr(fte.backends("cpu"))


def test_what_is_missing_is_said_before_anything_runs(machine: Any) -> None:
    machine(te="it is not installed: pip install it")
    with pytest.raises(
        ValueError, match=r"plan: backend: expected one that can run on cuda, got 'te'\. It is not inst"
    ):
        fte.plan(BLOCK, backend="te", device="cuda")
    with pytest.raises(ValueError, match="It is not installed"):
        fte.apply(BLOCK, fte.init(BLOCK), torch.ones(2, 16), backend="te")
    with pytest.raises(ValueError, match=r"'auto' or one of \['reference', 'te', 'triton'\], got 'cutlass'"):
        fte.plan(BLOCK, backend="cutlass")


def test_old_gpus_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "A100")
    registry._old_gpu.cache_clear()
    try:
        with pytest.raises(ValueError, match=r"FP8 needs compute capability 8\.9 or later, A100 has 8\.0"):
            fte.plan(BLOCK, backend="triton", device="cuda")
    finally:
        registry._old_gpu.cache_clear()


def test_a_plan_is_of_the_device_it_runs_on(machine: Any) -> None:
    machine()
    plans = {device: fte.plan(BLOCK, device=device) for device in ("cpu", "cuda", torch.device("cuda", 0))}
    assert [plan.backend for plan in plans.values()] == ["reference", "triton", "triton"]
    assert fte.plan(BLOCK, device="cuda:0") is plans["cuda"]


def test_the_table_says_what_can_run(machine: Any) -> None:
    machine(te="not installed")
    table = fte.backends("cuda")
    assert table.auto == "triton"
    assert {name: note for name, _, note in table.rows} == {
        "reference": "usable",
        "triton": "usable",
        "te": "not installed",
    }
    assert "auto: triton" in repr(table)
    assert "not installed" in repr(table)


@pytest.mark.parametrize("name", [source.name for source in BACKENDS])
def test_every_backend_has_a_record(name: str) -> None:
    if name == "triton":
        pytest.importorskip("triton", reason="needs Triton")
    record = kernels(name)
    assert record.name == name
    assert kernels(name) is record


def test_a_recipe_says_how_products_accumulate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformer Engine's ``use_split_accumulator``, for backends that have the choice."""
    mm, seen = fte.recipes.MMParams, []

    def product(name: str) -> Any:
        def run(*args: Any, fast: bool, **kwargs: Any) -> torch.Tensor:
            seen.append((name, fast))
            return getattr(registry.REFERENCE, name)(*args, **kwargs)

        return run

    names = ("gemm_nt", "gemm_nn", "gemm_tn")
    record = dataclasses.replace(
        registry.REFERENCE, fast_accumulation=(True, False, False), **{name: product(name) for name in names}
    )
    monkeypatch.setattr(registry, "_BY_NAME", {"reference": record})
    block = fte.chain(fte.Linear(16, 32, bias=False))
    x, params = torch.randn(4, 16), fte.init(block)
    recipe = fte.recipes.Float8CurrentScaling(
        fp8_gemm_fprop=mm(use_split_accumulator=True), fp8_gemm_wgrad=mm(use_split_accumulator=False)
    )
    out, pullback = fte.vjp(block, params, x, recipe=recipe)
    pullback(out.output)
    assert dict(seen) == {"gemm_nt": False, "gemm_nn": False, "gemm_tn": True}
    assert fte.plan(block, recipe=fte.recipes.Float8CurrentScaling()).backend == "reference"
    assert fte.recipes.DelayedScaling().fast_accumulation == (True, False, False)
    assert fte.recipes.Float8BlockScaling().fast_accumulation == (False, False, False)


def test_importing_the_library_imports_no_kernels() -> None:
    """Triton itself may be imported by PyTorch."""
    names = ("functional_te.kernels.triton", "transformer_engine", "transformer_engine_torch")
    code = f"import sys, functional_te, bridge; print([name for name in {names} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
