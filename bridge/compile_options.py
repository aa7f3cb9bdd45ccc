"""Options of ``torch.compile`` that suit chains."""

from __future__ import annotations

import torch

__all__ = ["cpp_wrapper_options"]


def cpp_wrapper_options() -> dict[str, bool]:
    """Options with which Inductor launches the kernels of a compiled step from C++ instead of Python.

    ``torch.compile(model, options=bridge.cpp_wrapper_options())``. The bits are those of plain ``torch.compile``. A C++
    compiler has to be installed, and compiling takes longer: over a minute for eight MLP blocks on a GPU. It is for
    graphs of many short kernels where CUDA graphs (``mode="reduce-overhead"``) are not wanted; a single block was no
    faster on an H200.

    In PyTorch 2.11 ``{"cpp_wrapper": True}`` alone fails on a GPU when the backward is compiled: Inductor sets the
    three options that it derives from that one before it applies ``options`` to the backward, which is compiled later,
    in a thread of autograd's. So they are all given here.
    """
    return {
        "cpp_wrapper": True,
        # kernels are compiled, and their binaries kept for C++, while the code is generated
        "triton.autotune_at_compile_time": torch.cuda.is_available(),
        "triton.store_cubin": True,
        "triton.autotune_cublasLt": False,
    }
