"""Write the pages of operations and fusions, recipes and quantizers, and backends from the code."""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bridge import ops as modules  # noqa: E402
from functional_te.fuser.rules import BACKWARD, FORWARD, JOINT  # noqa: E402
from functional_te.graph.tensors import format_of  # noqa: E402
from functional_te.kernels.registry import BACKENDS  # noqa: E402
from functional_te.ops import OPS  # noqa: E402
from functional_te.quantization.quantizers import QUANTIZERS  # noqa: E402
from functional_te.quantization.recipes import RECIPES, CustomRecipe, Role  # noqa: E402

FOLDER = Path(__file__).parent

_OPERATIONS = """# Operations and fusions

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


def _table(header: str, rows: list[tuple[str, ...]]) -> list[str]:
    return [header, "| --- " * (header.count("|") - 1) + "|", *(f"| {' | '.join(row)} |" for row in rows)]


# ---- recipes and quantizers ----

_RECIPES = """# Recipes and quantizers

Made from the code by `python docs/generate.py`. A recipe says with which quantizer every tensor role is cast; it is a
frozen value with the fields and defaults of Transformer Engine's. A quantizer says what a cast is.
"""


def _recipes() -> list[str]:
    """What each recipe casts a linear's three tensors to, and its fields."""
    roles = ("input", "weight", "grad_output")
    rows, fields = [], []
    for kind in RECIPES:
        recipe = kind()
        quantizers = [recipe.quantizer(Role("BasicLinear", tensor)) for tensor in roles]
        state = {"key" if own.stochastic else "scale, amax history" for own in quantizers if own.stateful}
        formats = [format_of(own) for own in quantizers]
        rows.append((f"`{kind.__name__}`", _first_line(kind), *formats, ", ".join(sorted(state)), _link(kind)))
    for kind in (*RECIPES, CustomRecipe):
        own = ", ".join(f"`{field.name}={_shown(field.default)}`" for field in dataclasses.fields(kind))
        fields.append((f"`{kind.__name__}`", own))
    header = "| recipe | what it does | input | weight | gradient | state | file |"
    return [
        *_table(header, rows),
        "",
        "`CustomRecipe(qfactory)` asks a function of the role for the quantizer, so any mix is possible; None leaves a",
        "tensor in high precision. Blocks are written as rows x columns of values that share a scale.",
        "",
        "## Fields and defaults",
        "",
        *_table("| recipe | fields |", fields),
    ]


def _quantizers() -> list[str]:
    rows = []
    for kind in QUANTIZERS:
        own = ", ".join(f"`{field.name}={_shown(field.default)}`" for field in dataclasses.fields(kind))
        multiples = f"{kind.feature_multiple}" if kind.feature_multiple > 1 else ""
        rows.append((f"`{kind.__name__}`", _first_line(kind), own, multiples, _link(kind)))
    return _table("| quantizer | what it makes | fields | features a multiple of | file |", rows)


def _shown(value: Any) -> str:
    if value is dataclasses.MISSING:
        return "..."
    return str(value) if hasattr(value, "name") and hasattr(value, "value") else repr(value)


# ---- backends ----

_BACKENDS = """# Backends

Made from the code by `python docs/generate.py`. A backend is a record of functions: *parts*, which it takes from the
reference unless it has its own, and *fused* kernels, which do in one launch what a producer does together with the cast
of its result. Where it has none for a case, the parts run. `print(fte.backends())` says what can run on a machine.
"""


def _backends() -> list[str]:
    records = {source.name: source.load() for source in BACKENDS}
    reference = records["reference"]
    about = []
    for source in BACKENDS:
        record = records[source.name]
        about.append((f"`{source.name}`", source.summary, "yes" if record.transposed_copies else "no"))
    parts, fused = [], []
    for field in dataclasses.fields(reference):
        if callable(getattr(reference, field.name)) and field.name != "fused":
            base = getattr(reference, field.name)
            own = ["own" if getattr(record, field.name) is not base else "" for record in records.values()]
            parts.append((f"`{field.name}`", _first_line(base), "plain PyTorch", *own[1:]))
    for field in dataclasses.fields(reference.fused):
        own = ["fused" if getattr(record.fused, field.name) is not None else "" for record in records.values()]
        fused.append((f"`{field.name}`", *own[1:]))
    names = " | ".join(list(records)[1:])
    return [
        *_table("| backend | kernels | products read transposed copies |", about),
        "",
        "## Parts",
        "",
        *_table(f"| part | what it computes | reference | {names} |", parts),
        "",
        "## Fused kernels",
        "",
        *_table(f"| kernel | {names} |", fused),
    ]


def pages() -> dict[str, str]:
    """Every page by file name."""
    fusions = ["## Fusions", "", "In order of priority within a pass. Places in brackets may stay empty."]
    contents = {
        "operations.md": [_OPERATIONS, *_operations(), "", *fusions, "", *_fusions()],
        "recipes.md": [_RECIPES, *_recipes(), "", "## Quantizers", "", *_quantizers()],
        "backends.md": [_BACKENDS, *_backends()],
    }
    return {name: "\n".join(lines) + "\n" for name, lines in contents.items()}


if __name__ == "__main__":
    for name, text in pages().items():
        (FOLDER / name).write_text(text)
