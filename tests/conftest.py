"""Settings and fixtures shared by every test."""

import importlib.util
import os
from pathlib import Path

import hypothesis
import pytest
import torch

GPU_TESTS = Path(__file__).parent / "gpu"

pytest.register_assert_rewrite("tests.helpers")

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton reads it when it is imported

hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, max_examples=25)
hypothesis.settings.register_profile("thorough", deadline=None, max_examples=300)


def pytest_configure(config):
    hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))
    if "PYTEST_XDIST_WORKER" in os.environ:
        torch.set_num_threads(1)  # the workers share the cores


def pytest_collection_modifyitems(config, items):
    """Skip, with the reason, what this machine cannot run."""
    no_cuda = None if torch.cuda.is_available() else pytest.mark.skip(reason="needs a CUDA device")
    has_te = importlib.util.find_spec("transformer_engine") is not None
    no_te = None if has_te else pytest.mark.skip(reason="needs transformer_engine (the `te` extra)")
    for item in items:
        wants_gpu = item.get_closest_marker("gpu") is not None or item.path.is_relative_to(GPU_TESTS)
        if no_cuda is not None and wants_gpu:
            item.add_marker(no_cuda)
        if no_te is not None and item.get_closest_marker("te"):
            item.add_marker(no_te)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture
def dynamo():
    """Yield Dynamo's counters, with the compiler's state reset before and after the test."""
    import torch._dynamo
    from torch._dynamo.utils import counters

    def reset():
        torch._dynamo.reset()
        counters.clear()

    reset()
    yield counters
    reset()
