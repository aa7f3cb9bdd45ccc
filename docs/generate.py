"""Write ``operations.md``, the list of operations and fusions, from the code: ``python docs/generate.py``."""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bridge import ops as modules  # noqa: E402
from functional_te.fuser.rules import BACKWARD, FORWARD, JOINT  # noqa: E402
from functional_te.ops import OPS  # noqa: E402

PAGE = Path(__file__).with_name("operations.md")

HEAD = """# Operations and fusions

Made from the code by `python docs/generate.py`; the first line of every docstring is the formula. A chain of operations
is run by `functional_te`, differentiated by `bridge.apply`, and held by the modules of `bridge.ops`.
"""


def _first_line(thing: Any) -> str:
    """The first sentence of a docstring, on one line, fit for a table."""
    paragraph = (inspect.getdoc(thing) or "").split("\n\n")[0].replace("\n", " ")
    sentence = re.split(r"(?<=[.`)])\s+(?=[A-Z])", paragraph)[0].rstrip(".")
    return re.sub(r":\w+:`~?\.?([\w.]+)`", r"`\1`", sentence).replace("``", "`").replace("|", "\\|")


def _link(thing: Any) -> str:
    path = Path(inspect.getfile(thing)).resolve().relative_to(ROOT).as_posix()
    return f"[{Path(path).name}](../{path})"


def _names(names: Any) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _collapsed(names: Any) -> list[str]:
    """Numbered names as one."""
    plain = dict.fromkeys(names)
    return list(dict.fromkeys(f"{n.rstrip('0123456789')}0 .." if n[-1:].isdigit() else n for n in plain))


def _operations() -> list[str]:
    lines = [
        "| operation | what it computes | parameters | extra inputs / outputs | casts | module | file |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    examples: dict[type[Any], list[Any]] = {}
    for op, _ in OPS:
        examples.setdefault(type(op), []).append(op)
    for kind, own in examples.items():
        casts = [role for op in own for role in (*op.forward_quantizers, *op.backward_quantizers)]
        takes = sorted({f"{op.num_extra_inputs} / {op.num_extra_outputs}" for op in own} - {"0 / 0"})
        module = f"`ops.{kind.__name__}`" if hasattr(modules, kind.__name__) else ""
        cells = (
            f"`{kind.__name__}`",
            _first_line(kind),
            _names(_collapsed(name for op in own for name in op.param_names)),
            " or ".join(takes),
            _names(dict.fromkeys(role.rstrip("0123456789") for role in casts)),
            module,
            _link(kind),
        )
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _fusions() -> list[str]:
    lines = ["| fusion | pass | pattern | what it does | file |", "| --- | --- | --- | --- | --- |"]
    for name, rules in (("joint", JOINT), ("forward", FORWARD), ("backward", BACKWARD)):
        for rule in rules:
            slots = []
            for slot in rule.pattern:
                text = " or ".join(f"`{kind.__name__}`" for kind in slot.types)
                slots.append(f"[{text}]" if slot.optional else text)
            module = inspect.getmodule(rule.build)
            cells = (f"`{rule.name}`", name, ", ".join(slots), _first_line(module), _link(module))
            lines.append("| " + " | ".join(cells) + " |")
    return lines


def page() -> str:
    """The whole page."""
    lines = [
        HEAD,
        *_operations(),
        "",
        "## Fusions",
        "",
        "In order of priority within a pass. Places in brackets may stay empty.",
        "",
    ]
    return "\n".join([*lines, *_fusions()]) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
