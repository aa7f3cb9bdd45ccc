"""The code of the README runs, in the order in which it stands there."""

from __future__ import annotations

import re
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"


def test_code_of_the_readme(dynamo, capsys) -> None:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 4
    code = "\n".join(blocks).replace("fullgraph=True", 'fullgraph=True, backend="aot_eager"')
    namespace: dict[str, object] = {}
    exec(compile(code, str(README), "exec"), namespace)
    assert dynamo["graph_break"] == {}
    assert namespace["y"].shape == (8, 256)
    assert namespace["state"][2]["input"].scale.item() != 1.0
    printed = capsys.readouterr().out
    assert "forward:" in printed
    assert "NVFP4 E2M1" in printed
