"""Make the pictures in docs/images that are photographs: ``python -m tests.browser.screenshots``.

A notebook in JupyterLab, light and dark. Needs what the tests in this folder need.
"""

from __future__ import annotations

import io
import tempfile
from pathlib import Path

from PIL import Image

from tests.browser import browsing

NOTEBOOK = "01_first_chain.ipynb"
_SIZE = {"width": 1280, "height": 1080}


def main() -> None:
    """Run the notebook once for each theme and take a picture where its drawing is."""
    with (
        tempfile.TemporaryDirectory() as folder,
        browsing.jupyterlab(Path(folder), (NOTEBOOK,)) as address,
        browsing.browser() as chromium,
    ):
        for theme in ("light", "dark"):
            page = chromium.new_page(viewport=_SIZE, color_scheme=theme)
            browsing.run_notebook(page, address(NOTEBOOK), dark=theme == "dark")
            page.evaluate("jupyterapp.commands.execute('application:toggle-left-area')")
            cell = page.query_selector(".jp-CodeCell:has(svg[role=img])")
            cell.evaluate("element => element.scrollIntoView({block: 'start'})")
            page.wait_for_timeout(1000)
            picture = Image.open(io.BytesIO(page.screenshot()))
            picture.save(browsing.ROOT / "docs" / "images" / f"jupyterlab-{theme}.webp", lossless=True, method=6)
            page.close()


if __name__ == "__main__":
    main()
