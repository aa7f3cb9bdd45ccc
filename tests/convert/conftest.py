"""Models of one test are gone before the next: entering a recipe closes the steps of all that are alive."""

import gc

import pytest


@pytest.fixture(autouse=True)
def _collected():
    yield
    gc.collect()
