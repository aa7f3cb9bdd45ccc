"""Importing the packages stays cheap: nothing that only some users need is loaded before they use it."""

import json
import subprocess
import sys

# matplotlib, treescope, networkx, triton, transformers and the like are none of these
LATER = ("functional_te.graph.", "functional_te.views", "functional_te.kernels.triton", "functional_te.kernels.te")


def _loaded(statement: str) -> set[str]:
    """The modules that a statement loads on top of torch and optree."""
    code = f"""
import json, sys
import torch, optree
before = set(sys.modules)
{statement}
print(json.dumps(sorted(set(sys.modules) - before)))
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return set(json.loads(done.stdout.splitlines()[-1]))


def _foreign(modules: set[str], own: tuple[str, ...]) -> set[str]:
    return {name for name in modules if name.partition(".")[0] not in {*own, *sys.stdlib_module_names}}


def test_functional_te_loads_itself_and_nothing_else():
    loaded = _loaded("import functional_te")
    assert not _foreign(loaded, ("functional_te",))
    assert not {name for name in loaded if name.startswith(LATER)}


def test_bridge_loads_no_other_library():
    loaded = _loaded("import bridge")  # torch's compiler comes with it, and what that loads
    assert not {"matplotlib", "networkx", "safetensors", "torchao", "tqdm", "transformer_engine"} & loaded
    assert not {"transformers", "treescope", "functional_te.graph.svg", "functional_te.views"} & loaded
    assert not {name for name in loaded if name.startswith("bridge.demo")}


def test_a_graph_as_text_loads_no_drawing():
    loaded = _loaded(
        "import functional_te as fte\nprint(fte.graph(fte.GELU(), None, fte.TensorSpec((8, 16), torch.float32)))"
    )
    assert "functional_te.graph.build" in loaded
    assert not _foreign(loaded, ("functional_te",))
    assert not {"functional_te.graph.svg", "functional_te.graph.mermaid"} & loaded
