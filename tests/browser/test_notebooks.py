"""Notebooks in JupyterLab in a browser: they run, and their drawings are there, fit and can be read."""

import pytest

from tests.browser import browsing

pytest.importorskip("playwright", reason="an extra: functional_te[browser]")
pytest.importorskip("jupyterlab", reason="an extra: functional_te[notebook]")
if browsing.chromium() is None:
    pytest.skip("needs a Chromium", allow_module_level=True)

pytestmark = pytest.mark.slow

# name: how many drawings it shows
NOTEBOOKS = {"01_first_chain.ipynb": 1, "02_fusion.ipynb": 3}
OUTPUTS = ".jp-NotebookPanel:not(.lm-mod-hidden) .jp-OutputArea-output"


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lab")
    with browsing.jupyterlab(folder, tuple(NOTEBOOKS)) as address, browsing.browser() as chromium:
        yield address, chromium


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", list(NOTEBOOKS))
def test_a_notebook_runs_and_can_be_read(opened, name, scheme):
    address, chromium = opened
    page = chromium.new_page(viewport={"width": 1280, "height": 900})
    browsing.run_notebook(page, address(name), dark=scheme == "dark")
    assert page.query_selector_all(f"{OUTPUTS} [data-mime-type*=error], {OUTPUTS}[data-mime-type*=error]") == []
    drawings = page.query_selector_all(f"{OUTPUTS} svg[role=img]")
    assert len(drawings) == NOTEBOOKS[name]
    for drawing in drawings:
        box = drawing.bounding_box()
        assert box["width"] > 600
        assert box["height"] > 300
    fill = page.evaluate("getComputedStyle(document.querySelector('.jp-OutputArea-output .fte-page')).fill")
    assert fill == ("rgb(13, 17, 23)" if scheme == "dark" else "rgb(255, 255, 255)")
    assert browsing.wrong(page, OUTPUTS) == []
    page.close()
