"""Tests of Triton kernels run on CUDA, or on the CPU when the interpreter is on (``TRITON_INTERPRET=1``)."""

from __future__ import annotations

import importlib.util

import pytest
import torch


def _device() -> str | None:
    """Where kernels can run; None if nowhere."""
    if importlib.util.find_spec("triton") is None:
        return None
    from functional_te.kernels.triton.launch import INTERPRETED

    if INTERPRETED:
        return "cpu"
    return "cuda" if torch.cuda.is_available() else None


DEVICE = _device()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if DEVICE is None:
        reason = "needs Triton, and a CUDA device or TRITON_INTERPRET=1"
        for item in items:
            if "/kernels/triton/" in item.path.as_posix():
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def device() -> str:
    """Where the kernels of a test run."""
    assert DEVICE is not None
    return DEVICE
