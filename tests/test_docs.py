"""The pages in docs/ say what the code says."""

import importlib.util
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"


def _generator():
    spec = importlib.util.spec_from_file_location("docs_generate", DOCS / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_list_of_operations_is_what_the_code_gives():
    generator = _generator()
    assert generator.PAGE.read_text() == generator.page(), "run: make docs"


@pytest.mark.parametrize("page", sorted(path.name for path in DOCS.glob("*.md")))
def test_links_lead_to_files(page):
    for target in re.findall(r"\]\(([^)#]+)\)", (DOCS / page).read_text()):
        assert "://" in target or (DOCS / target).is_file(), target


def test_every_operation_has_a_formula():
    for line in _generator()._operations()[2:]:
        assert "`" in line.split(" | ")[1], line


def test_the_code_of_the_pages_runs():
    for page in sorted(DOCS.glob("*.md")):
        blocks = re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.S)
        if blocks:
            exec(compile("\n".join(blocks), str(page), "exec"), {"__name__": "__main__"})
