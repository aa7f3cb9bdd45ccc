"""Transformer Engine itself, imported when it is first used."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import math
import types
import warnings
from pathlib import Path
from typing import Any

import torch

__all__ = ["DTYPES", "Library", "available", "library", "multiplies_every_layout", "takes"]

# The functions of the extension module have changed between releases; these are the ones that were tried.
RELEASE = "2.20."
_INSTALL = "pip install 'functional_te[te]'"
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class Library:
    """What this backend uses of Transformer Engine.

    Attributes:
        kernels: the extension module ``transformer_engine_torch``.
        dtypes: its names of dtypes, by torch's.
    """

    def __init__(self) -> None:
        with warnings.catch_warnings():  # on import it uses what others deprecated
            warnings.simplefilter("ignore")
            try:
                constants = _module("constants")
                self.kernels: Any = importlib.import_module("transformer_engine_torch")
                self.per_tensor: types.ModuleType = _module("tensor.float8_tensor")
                self.block: types.ModuleType = _module("tensor.float8_blockwise_tensor")
                self.mxfp8: types.ModuleType = _module("tensor.mxfp8_tensor")
                self.storage: Any = _storages()
            except (ImportError, OSError, AssertionError) as error:
                raise ImportError(
                    f"backend 'te': Transformer Engine cannot be imported ({error}); {_INSTALL}"
                ) from error
        self.dtypes: dict[torch.dtype, Any] = constants.TE_DType


def _module(name: str) -> Any:
    return importlib.import_module(f"transformer_engine.pytorch.{name}")


def _storages() -> types.SimpleNamespace:
    """The bare tensor classes, which are no torch tensors."""
    names = {"per_tensor": "float8_tensor", "block": "float8_blockwise_tensor", "mxfp8": "mxfp8_tensor"}
    classes = {
        "per_tensor": "Float8TensorStorage",
        "block": "Float8BlockwiseQTensorStorage",
        "mxfp8": "MXFP8TensorStorage",
    }
    return types.SimpleNamespace(
        **{name: getattr(_module(f"tensor.storage.{file}_storage"), classes[name]) for name, file in names.items()}
    )


@functools.cache
def library() -> Library:
    """Transformer Engine.

    Raises:
        ImportError: it cannot be imported.
    """
    return Library()


def available() -> str | None:
    """None if this backend can run, else one line that says what is missing. Imports nothing."""
    spec = importlib.util.find_spec("transformer_engine")
    if spec is None:
        return f"Transformer Engine is not installed: {_INSTALL}"
    try:
        found = importlib.metadata.version("transformer_engine")
    except importlib.metadata.PackageNotFoundError:
        return f"Transformer Engine is there without its package metadata: {_INSTALL}"
    if not found.startswith(RELEASE):
        return f"Transformer Engine {found} is installed, {RELEASE}x is needed: {_INSTALL}"
    folders = [Path(place) for place in spec.submodule_search_locations or ()]
    places = [place for folder in folders for place in (folder.parent, folder, folder / "wheel_lib")]
    if not any(any(place.glob("transformer_engine_torch*.so")) for place in places):
        return f"Transformer Engine is installed without its PyTorch extension: {_INSTALL}"
    return None if torch.cuda.is_available() else "no CUDA device is there"


@functools.cache
def multiplies_every_layout() -> bool:
    """Whether the GPU multiplies FP8 matrices in every layout, so that a transposed copy is no copy of its own."""
    capability = torch.cuda.get_device_capability()
    return (10, 0) <= capability < (12, 0) or capability >= (13, 0)


def takes(*tensors: Any, dtype: torch.dtype | None = None) -> bool:
    """Whether kernels can be called with these tensors (None is left out): on the current CUDA device, not empty.

    Args:
        tensors: high precision tensors.
        dtype: which they all have to have; default: float32, float16 or bfloat16.
    """
    here = None
    for x in tensors:
        if x is None:
            continue
        if x.device.type != "cuda":
            return False
        here = torch.cuda.current_device() if here is None else here
        if x.device.index != here:
            return False
        if x.dtype not in DTYPES or (dtype is not None and x.dtype is not dtype) or math.prod(x.shape) == 0:
            return False
    return True
