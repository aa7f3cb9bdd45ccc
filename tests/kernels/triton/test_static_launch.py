"""Compiled code launches our kernels through PyTorch's launcher, and others' as it did."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PREPARE = """
import pickle, sys
from types import SimpleNamespace
import torch, triton
import triton.language as tl
from torch._inductor.runtime import static_triton_launcher, triton_heuristics
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from functional_te.kernels.triton import state, static_launch

@triton.jit
def foreign(x, size, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    tl.store(x + offsets, offsets.to(tl.float32), mask=offsets < size)

launched = []
own = static_triton_launcher.StaticallyLaunchedCudaKernel
own.C_impl = SimpleNamespace(_launch_kernel=lambda *args: launched.append(args))

def load_kernel(self, device):
    self.function, self.n_regs, self.n_spills = 77, 32, 0

own.load_kernel = load_kernel

def compiled(kernel, signature, constants):
    '''What Inductor's worker process sends back for a kernel of somebody's.'''
    names = kernel.arg_names
    source = ASTSource(
        fn=kernel,
        signature={name: "constexpr" if name in constants else signature(name) for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
    )
    binary = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    config = triton.Config(constants, num_warps=4)
    meta = {"device": 0, "device_type": "cuda", "signature": source.signature, "constants": constants}
    grid = ["_grid_0", "_grid_1", "_grid_2"]
    own = {"grid_type": "FixedGrid", "fixed_grid": grid, "extra_launcher_args": grid}
    result = triton_heuristics.TritonCompileResult(binary, config, meta, own)
    for name in ("fn", "__globals__", "used_global_vals", "repr", "_hash_lock"):
        setattr(kernel, name, None)  # as CachingAutotuner.prepare_for_pickle does
    return pickle.loads(pickle.dumps(result))

CONSTANTS = dict(
    COUNT=1, FOLDS=True, CLOSES=True, RECENT=False, KEEPS="old", BLANKS=False, APART=4, BLOCK=1024
)

def ours():
    kinds = {"L": "i32", "huge": "fp64", **{f"top{index}": "fp64" for index in range(8)}}
    return compiled(state._close_kernel, lambda name: kinds.get(name, "*fp32"), CONSTANTS)

def theirs():
    return compiled(foreign, lambda name: {"x": "*fp32", "size": "i32"}[name], {"BLOCK": 64})
"""


def run(code: str, folder: Path) -> None:
    """In a process that compiles kernels instead of interpreting them."""
    paths = [str(Path(__file__).parents[3]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "TRITON_CACHE_DIR": str(folder / "cache"), "PYTHONPATH": os.pathsep.join(paths)}
    environment.pop("TRITON_INTERPRET", None)
    script = folder / "case.py"
    script.write_text(PREPARE + code)
    done = subprocess.run(
        [sys.executable, script], env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_a_kernel_of_ours(tmp_path: Path) -> None:
    run(
        """
static_launch.launch_statically(state._close_kernel)
made = ours()
launch = made.make_launcher()
assert launch._is_static and launch.config is made.config
arguments = [f"{name} it has" for name in state._close_kernel.arg_names if name not in CONSTANTS]
launch(*arguments, 3, 1, 1, stream=5)
(call,) = launched
# the function, the grid, warps, shared memory, types, arguments and the stream
assert call[:5] == (77, 3, 1, 1, 4), call
assert call[6].startswith("O" * 24 + "d" * 8 + "Oid"), call
assert [own for own in call[7] if own is not None] == arguments, call
assert call[8] == 5, call
""",
        tmp_path,
    )


def test_a_kernel_of_somebody_else(tmp_path: Path) -> None:
    run(
        """
before = triton_heuristics.TritonCompileResult.make_launcher
static_launch.launch_statically(state._close_kernel)
after = triton_heuristics.TritonCompileResult.make_launcher
assert after.__wrapped__ is before
made = theirs()
assert static_launch.static_launcher(made) is None
from triton.compiler import CompiledKernel
def initialize(self):
    raise RuntimeError("Triton's own launcher")
CompiledKernel._init_handles = initialize
try:
    made.make_launcher()
except RuntimeError as error:
    assert "Triton's own launcher" in str(error)
else:
    raise AssertionError("another launcher")
# the same text, wherever it comes from, is the same kernel
static_launch._ours.add(foreign.src.strip())
assert made.make_launcher()._is_static
""",
        tmp_path,
    )


@pytest.mark.parametrize("case", ["switched off", "C++ wrapper", "changed"])
def test_what_falls_back(case: str, tmp_path: Path) -> None:
    """Users' options hold, and where PyTorch's classes are others, Triton's launcher is used."""
    change = {
        "switched off": "torch._inductor.config.use_static_triton_launcher = False",
        "C++ wrapper": "torch._inductor.config.cpp_wrapper = True",
        "changed": "triton_heuristics.StaticTritonCompileResult.can_statically_launch = None",
    }[case]
    run(
        f"""
import torch._inductor.config
static_launch.launch_statically(state._close_kernel)
made = ours()
{change}
from triton.compiler import CompiledKernel
asked = []
CompiledKernel._init_handles = lambda self: asked.append(self) or (_ for _ in ()).throw(RuntimeError("Triton's"))
try:
    made.make_launcher()
except RuntimeError as error:
    assert "Triton's" in str(error)
assert asked
""",
        tmp_path,
    )
