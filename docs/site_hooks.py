"""What the site shows beside the pages in this folder: the notebooks, and pages about the code (a hook of MkDocs).

Links of the pages that lead out of this folder are right where a repository is browsed. Here those to notebooks and
pages lead to them, and those to other files show the path alone.
"""

from __future__ import annotations

import html
import importlib
import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import nbformat
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from functional_te.graph.html import SHRINK  # noqa: E402

RESULTS = ROOT / "tests" / "benchmarks" / "results"
_LINK = re.compile(r"(!?)\[([^\]]+)\]\((\.\./[^)\s]+)\)")
_DRAWING = re.compile(r"!\[[^\]]*\]\((images/\w+\.svg)\)")
# pages with wide drawings or tables give up the list of their headings
_WIDE = ("index.md", "concepts.md", "graph.md", "performance.md", "operations.md", "recipes.md", "backends.md")


def on_files(files: Files, config: Any) -> Files:
    """Add the generated pages and what the pages show from other folders."""
    pages = {f"notebooks/{path.stem}.md": notebook_page(path) for path in sorted(ROOT.glob("notebooks/*.ipynb"))}
    pages |= {f"api/{name}.md": text for name, text in api_pages().items()}
    for uri, text in pages.items():
        files.append(File.generated(config, uri, content=text))
    for path in sorted(RESULTS.glob("*.svg")):
        files.append(File.generated(config, f"results/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **kwargs: Any) -> str:
    """Mend the links of a page that lead out of this folder, and put in drawings and results."""
    del kwargs
    if page.file.src_uri in _WIDE or page.file.src_uri.startswith("notebooks/"):
        page.meta["hide"] = ["toc"]
    up = "../" * page.file.src_uri.count("/")
    # in the page rather than beside it, so that they follow its theme
    markdown = _DRAWING.sub(lambda found: _html(Path(__file__).parent / found[1]), markdown)
    markdown = markdown.replace("<!-- results -->", results())
    return _LINK.sub(lambda found: _mended(*found.groups(), up), markdown)


def _mended(image: str, text: str, target: str, up: str) -> str:
    path = target.removeprefix("../").partition("#")[0]
    if image:
        return f"![{text}]({up}results/{Path(path).name})"
    if path.startswith("notebooks/") and path.endswith(".ipynb"):
        return f"[{text}]({up}{path.removesuffix('.ipynb')}.md)"
    return f"`{path}`"


def _html(path: Path) -> str:
    """A drawing as one line of HTML, because an empty line would end it; it shrinks as it does in notebooks."""
    width, svg = 0.0, " ".join(path.read_text().splitlines())
    found = re.search(r' width="(\d+)" height="\d+"', svg)
    if found is not None:
        width = float(found[1])
        svg = svg.replace(found[0], ' width="100%"', 1)
    size = f"min-width:{width * SHRINK:.0f}px;max-width:{width:.0f}px"
    return f'<div class="drawing"><div style="{size}">{svg}</div></div>'


def results() -> str:
    """What was measured, as tables: medians of every row, and the goals."""
    lines, goals = [], {}
    files = {path: json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))}
    for path, found in sorted(files.items(), key=lambda file: file[1]["written"]):
        versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items() if version)
        lines += [f"## {path.stem}", "", f"{found['machine']['device']}; {versions}; {found['written']}.", ""]
        lines += ["| row | who | how | median |", "| --- | --- | --- | --- |"]
        for name, row in found["rows"].items():
            lines += [
                f"| {name}, {row['title']} | {one['name']} | {one['mode']} | {one['value']:.4g} {row['unit']} |"
                for one in row["entries"]
                if one.get("value") is not None
            ]
        lines.append("")
        goals |= {  # of several measurements the last counts
            (goal["row"], goal["ours"], goal["against"]): f"{goal['measured']:.2f} | {goal['limit']:.3g} | "
            f"{'yes' if goal['met'] else 'no'} |"
            for goal in found["goals"]
            if goal.get("measured") is not None
        }
    head = ["## Goals", "", "| row | ours | against | ratio | goal | met |", "| --- | --- | --- | --- | --- | --- |"]
    return "\n".join([*lines, *head, *(f"| {' | '.join(names)} | {rest}" for names, rest in goals.items())])


# ---- notebooks ----


def notebook_page(path: Path) -> str:
    """A notebook as a page: its words, its code and what came out when it ran."""
    cells = []
    for cell in nbformat.read(path, as_version=4).cells:
        if cell.cell_type == "markdown":
            cells.append(re.sub(r"\]\((\w+)\.ipynb\)", r"](\1.md)", cell.source))
        elif cell.cell_type == "code":
            cells.append(f"```python\n{cell.source}\n```")
            cells += [_output(output) for output in cell.outputs]
    return "\n\n".join(cells) + "\n"


def _output(output: Any) -> str:
    """One output, in the richest form that there is."""
    if output.output_type == "stream":
        return _text(output.text)
    data = output.get("data", {})
    if "text/html" in data:
        # one line: Markdown takes an empty line for the end of the HTML
        return f'<div class="notebook-output">{" ".join(data["text/html"].split(chr(10)))}</div>'
    if "image/png" in data:
        return (
            f'<div class="notebook-output"><img alt="" src="data:image/png;base64,{data["image/png"].strip()}"></div>'
        )
    return _text(data.get("text/plain", ""))


def _text(text: str) -> str:
    return f'<div class="notebook-output"><pre><code>{html.escape(text.rstrip())}</code></pre></div>'.replace(
        "\n", "&#10;"
    )


# ---- pages about the code ----

_FUNCTIONS = {
    "Chains": ("chain", "Chain", "Linear", "init", "eval_shape", "tree_map", "TensorSpec"),
    "Running": ("apply", "ApplyResult", "vjp", "Grads", "plan", "Plan", "backends"),
    "State": ("init_state", "update_state", "quantize_params", "make_key", "next_key"),
    "Looking": ("graph", "numerics"),
}


def api_pages() -> dict[str, str]:
    """The pages about the public names, by file name."""
    fte = importlib.import_module("functional_te")
    ops = importlib.import_module("functional_te.ops")
    fuser = importlib.import_module("functional_te.fuser")
    quantization = importlib.import_module("functional_te.quantization")
    bridge = importlib.import_module("bridge")
    homes = importlib.import_module("functional_te.graph")._HOMES.values()
    graph = [importlib.import_module(f"functional_te.graph.{name}") for name in dict.fromkeys(("value", *homes))]
    views = importlib.import_module("functional_te.views")
    own = {name for names in _FUNCTIONS.values() for name in names}
    kinds = {name for name in fte.__all__ if name in ops.__all__}
    fusion = [name for name in fte.__all__ if name in fuser.__all__ and name not in own]
    casts = [name for name in fte.__all__ if name in quantization.__all__ and name not in own]
    rest = [name for name in fte.__all__ if name not in own | kinds | {*fusion, *casts}]
    functions = "".join(f"\n## {title}\n\n{_members(fte, names)}" for title, names in _FUNCTIONS.items())
    return {
        "functional_te": f"# functional_te\n{functions}\n## More\n\n{_members(fte, rest)}",
        "operations": f"# Operations\n\nAll of them are names of `functional_te`.\n\n{_members(fte, kinds)}",
        "functional": f"# functional_te.functional\n\n{_members(fte.functional)}",
        "recipes": f"# functional_te.recipes\n\n{_members(fte.recipes)}",
        "quantization": f"# Quantization\n\n{_members(fte, casts)}",
        "fusion": f"# Fusion\n\n{_members(fte, fusion)}",
        "graph": "# The op graph and views\n\n"
        + "\n".join(_members(module) for module in graph)
        + f"\n## functional_te.views\n\n{_members(views)}",
        "bridge": f"# bridge\n\n{_members(bridge)}",
        "bridge_ops": f"# bridge.ops\n\n{_members(bridge.ops)}",
        "interop": f"# bridge.interop\n\n{_members(bridge.interop)}",
        "distributed": f"# bridge.distributed\n\n{_members(importlib.import_module('bridge.distributed'))}",
    }


def _members(module: ModuleType, names: Iterable[str] | None = None) -> str:
    """A directive for each name that stands for a function or a class, under the place where that is defined."""
    lines = []
    for name in sorted(module.__all__ if names is None else names, key=str.lower) if names is None else names:
        thing = getattr(module, name)
        home, own = getattr(thing, "__module__", None), getattr(thing, "__qualname__", None)
        if home is not None and own is not None:
            lines.append(f"::: {home}.{own}\n")
    return "\n".join(lines)
