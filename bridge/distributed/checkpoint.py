"""Checkpoints of sharded models, by ``torch.distributed.checkpoint``: resumed bit for bit, on any number of ranks.

A folder holds one checkpoint, in a folder of its own, and a file ``latest`` that names it. A checkpoint is written
beside the one before and takes its place in one step, when all ranks have written all of it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

from bridge import compat
from bridge.distributed.groups import check_model, operations_of
from bridge.distributed.sharded_weight import ShardedWeight, sharded_weights
from bridge.recipe_context import agreements, shared_modules
from functional_te._errors import value_error
from functional_te.quantization.state import DelayedScalingState

__all__ = ["latest_checkpoint", "load_checkpoint", "save_checkpoint"]

_LATEST = "latest"
_EXTRA_STATE = "_extra_state"


def _is_distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _rank() -> int:
    return torch.distributed.get_rank() if _is_distributed() else 0


def _size() -> int:
    return torch.distributed.get_world_size() if _is_distributed() else 1


@contextlib.contextmanager
def _alone_or_not() -> Iterator[None]:
    """One process without ``torch.distributed`` is meant, and needs no warning."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        yield


def _barrier() -> None:
    if _is_distributed():
        torch.distributed.barrier()


def _plain(tensor: Any) -> Any:
    """A tensor that files hold: the values of a sharded weight, which it shares."""
    local = compat.local_tensor(tensor)
    if not isinstance(local, ShardedWeight):
        return tensor
    if not isinstance(tensor, DTensor):
        return local.value
    return DTensor.from_local(
        local.value,
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def _model_tensors(model: torch.nn.Module) -> dict[str, Any]:
    """Parameters and buffers by name; writing to them writes to the model's."""
    found = get_model_state_dict(model)
    return {name: _plain(value) for name, value in found.items() if not name.endswith(_EXTRA_STATE)}


def _states(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """The operations that have quantizer state, and the names of their states in a checkpoint."""
    for name, op in operations_of(model):
        if op.op.forward_quantizers or op.op.backward_quantizers:
            yield name, op


def _quantizer_states(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Quantizer states as bytes, the same on all ranks. A collective."""
    ops = dict(_states(model))
    if _size() > 1:
        shared = shared_modules()
        for name, op in ops.items():
            if op not in shared and any(isinstance(own, DelayedScalingState) for *_, own in op.named_states()):
                wanted = "amaxes that all ranks agree on (bridge.distributed.agree_amaxes)"
                raise value_error("save_checkpoint", name, wanted, "delayed scaling with scales of every rank's own")
        for agreement in agreements():
            agreement.agree()  # what the running step has observed; no step is closed
    states = {name: op.get_extra_state() for name, op in ops.items()}
    return {name: state for name, state in states.items() if state.numel()}


def latest_checkpoint(folder: str | os.PathLike[str]) -> Path | None:
    """The complete checkpoint in a folder, or None."""
    pointer = Path(folder) / _LATEST
    return Path(folder) / pointer.read_text(encoding="utf-8").strip() if pointer.is_file() else None


def save_checkpoint(
    folder: str | os.PathLike[str],
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    extra: Any = None,
) -> Path:
    """Write parameters, optimizer state and quantizer state. A collective of all ranks.

    The checkpoint before is there until this one is complete, and is then removed.

    Args:
        folder: where checkpoints lie, the same on all ranks.
        model: any model, sharded or not.
        optimizer: its optimizer, or None.
        extra: plain data that JSON can hold, the number of the step say; rank 0's is written.

    Returns:
        Where the checkpoint lies.

    Raises:
        TypeError: ``model`` is no module.
        ValueError: delayed scaling on several ranks that do not agree on amaxes: they have different states.
        OSError: a folder that cannot be made, on all ranks.
    """
    check_model(model, "save_checkpoint")
    folder = Path(folder)
    content: dict[str, Any] = {"model": _model_tensors(model), "quantizers": _quantizer_states(model)}
    if optimizer is not None:
        content["optimizer"] = get_optimizer_state_dict(model, optimizer)
    content["extra"] = _as_bytes(extra)
    found: list[Any] = [None]
    if _rank() == 0:
        try:
            found = [_next_name(folder)]
        except OSError as error:
            found = [error]
    if _is_distributed():  # also an error, or the others would wait
        torch.distributed.broadcast_object_list(found, src=0)
    (name,) = found
    if isinstance(name, OSError):
        raise name
    temporary, final = folder / f".writing-{name}", folder / name
    with _alone_or_not():
        dcp.save(  # type: ignore[attr-defined]
            content, checkpoint_id=temporary, no_dist=not _is_distributed()
        )
    _barrier()
    if _rank() == 0:
        os.replace(temporary, final)
        _point_to(folder, name)
        for other in folder.iterdir():
            if other.is_dir() and other.name != name and other.name.removeprefix(".writing-").isdigit():
                shutil.rmtree(other, ignore_errors=True)
    _barrier()
    return final


def _next_name(folder: Path) -> str:
    """The name of the next checkpoint in a folder, which is made; leftovers of that name are removed."""
    folder.mkdir(parents=True, exist_ok=True)
    before = latest_checkpoint(folder)
    name = str(int(before.name) + 1 if before is not None else 0)
    for leftover in (folder / f".writing-{name}", folder / name):
        shutil.rmtree(leftover, ignore_errors=True)
    return name


def _point_to(folder: Path, name: str) -> None:
    temporary = folder / f".{_LATEST}"
    with temporary.open("w", encoding="utf-8") as file:
        file.write(name + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, folder / _LATEST)


def _as_bytes(extra: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(extra).encode()), dtype=torch.uint8).clone()


def load_checkpoint(
    folder: str | os.PathLike[str], model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> Any:
    """Read what :func:`save_checkpoint` wrote last, on as many ranks as there are now. A collective of all ranks.

    Args:
        folder: where checkpoints lie.
        model: a model with the same parameters, sharded in any way; written to in place.
        optimizer: its optimizer, or None to leave that state out.

    Returns:
        What was given as ``extra``.

    Raises:
        ValueError: there is no complete checkpoint in the folder.
    """
    check_model(model, "load_checkpoint")
    path = latest_checkpoint(folder)
    if path is None:
        raise value_error("load_checkpoint", "folder", "a folder with a complete checkpoint", str(folder))
    known = FileSystemReader(path).read_metadata().state_dict_metadata
    content: dict[str, Any] = {"model": _model_tensors(model), "quantizers": {}}
    for name, _ in _states(model):
        saved = known.get(f"quantizers.{name}")
        if saved is not None:
            content["quantizers"][name] = torch.empty(saved.size, dtype=torch.uint8)  # type: ignore[union-attr]
    if optimizer is not None:
        content["optimizer"] = get_optimizer_state_dict(model, optimizer)
    content["extra"] = torch.empty(known["extra"].size, dtype=torch.uint8)  # type: ignore[union-attr]
    with _alone_or_not():
        dcp.load(  # type: ignore[attr-defined]
            content, checkpoint_id=path, no_dist=not _is_distributed()
        )
    if optimizer is not None:
        set_optimizer_state_dict(model, optimizer, content["optimizer"])
    for name, op in _states(model):
        if name in content["quantizers"]:
            op.set_extra_state(content["quantizers"][name])
    for weight in sharded_weights(model):
        weight.weights.fresh = False
    return json.loads(bytes(content["extra"].tolist()).decode())
