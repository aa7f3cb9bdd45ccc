"""The folder needs a CUDA device; what the tests measured is printed at the end of the run."""

from pathlib import Path

import pytest
import torch
import torch._inductor.config

from tests.gpu import inputs

HERE = Path(__file__).parent
NO_CUDA = "needs a CUDA device"


def pytest_collection_modifyitems(items):
    """Skip, with the reason, what this machine cannot run."""
    for item in items:
        if not item.path.is_relative_to(HERE):
            continue
        item.add_marker(pytest.mark.gpu)
        # PyTorch's own: a backward thread that is the first to call cuBLAS makes the context it needs
        item.add_marker(pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS:UserWarning"))
        if not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason=NO_CUDA))


@pytest.fixture
def device():
    """Where the tests run."""
    return torch.device(inputs.DEVICE)


@pytest.fixture(autouse=True)
def _one_compile_process():
    """The tests share the cores already."""
    with torch._inductor.config.patch(compile_threads=1):
        yield


def pytest_terminal_summary(terminalreporter):
    """Print what tests recorded with ``record_property``."""
    lines = [
        f"{report.nodeid.rsplit('::', 1)[-1]}: {name} {value}"
        for kind in ("passed", "failed")
        for report in terminalreporter.getreports(kind)
        if report.when == "call" and "tests/gpu/" in report.nodeid
        for name, value in report.user_properties
    ]
    if lines:
        terminalreporter.section("measured")
        for line in sorted(lines):
            terminalreporter.write_line(line)
