"""The pages in docs/ say what the code says."""

import importlib.util
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"
PAGES = sorted(path.name for path in DOCS.glob("*.md"))


def _script(name):
    spec = importlib.util.spec_from_file_location(f"docs_{name}", DOCS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", ["operations.md", "recipes.md", "backends.md"])
def test_generated_pages_are_what_the_code_gives(page):
    pytest.importorskip("triton", reason="the page says what its kernels are")
    assert (DOCS / page).read_text() == _script("generate").pages()[page], "run: make docs"


def test_drawings_are_what_the_code_gives():
    figures = _script("figures")
    for name in figures.FIGURES:
        assert (figures.IMAGES / f"{name}.svg").read_text() == figures.drawing(name), "run: make docs"


def test_pictures_are_small():
    assert sum(path.stat().st_size for path in (DOCS / "images").iterdir()) < 1_000_000


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files(page):
    for target in re.findall(r"\]\(([^)#]+)\)", (DOCS / page).read_text()):
        assert "://" in target or (DOCS / target).exists(), target


def test_every_operation_has_a_formula():
    for line in _script("generate")._operations()[2:]:
        assert "`" in line.split(" | ")[1], line


@pytest.mark.parametrize("page", [page for page in PAGES if "```python" in (DOCS / page).read_text()])
def test_the_code_of_a_page_runs(page):
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), flags=re.S)
    # what is said holds for every backend of the compiler, and this one is quick
    code = "\n".join(blocks).replace("compile(fullgraph=True)", 'compile(fullgraph=True, backend="aot_eager")')
    exec(compile(code, page, "exec"), {"__name__": "__main__"})
