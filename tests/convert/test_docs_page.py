"""The reports in docs/bring_your_model.md are those that its code prints."""

import re
from pathlib import Path

from tests.convert.models import transformers

PAGE = Path(__file__).parents[2] / "docs" / "bring_your_model.md"


def test_the_reports_of_the_page(capsys):
    transformers()
    text = PAGE.read_text()
    code = "\n".join(re.findall(r"```python\n(.*?)```", text, flags=re.S))
    exec(compile(code, str(PAGE), "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out == "".join(re.findall(r"```text\n(.*?)```", text, flags=re.S))
