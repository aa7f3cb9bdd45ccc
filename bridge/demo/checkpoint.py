"""Progress of one run, and the checkpoint it is kept in."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

from bridge.demo.files import write_atomically
from bridge.demo.settings import DemoError, Settings

__all__ = ["Progress", "checkpoint_path", "read_checkpoint", "write_checkpoint"]

_FORMAT = 1


@dataclasses.dataclass
class Progress:
    """What a run has recorded so far; everything the report needs.

    Attributes:
        recipe: name of the recipe.
        losses: training loss of every step.
        seconds: wall time of every step.
        held_out: pairs of a step and the held-out loss after it.
        saved_bytes: bytes that one eager training forward keeps for its backward.
        graphs: graphs compiled for the first call of the training and of the held-out function.
        graph_breaks: graph breaks of all processes that took part.
        recompiles: further graphs, likewise.
        finished: whether all steps are done and the last held-out loss is taken.
    """

    recipe: str
    losses: list[float] = dataclasses.field(default_factory=list)
    seconds: list[float] = dataclasses.field(default_factory=list)
    held_out: list[list[float]] = dataclasses.field(default_factory=list)
    saved_bytes: int = 0
    graphs: int = 0
    graph_breaks: int = 0
    recompiles: int = 0
    finished: bool = False


def checkpoint_path(out: Path, recipe: str) -> Path:
    """Where the checkpoint of a run lies."""
    return out / f"checkpoint-{recipe}.pt"


def write_checkpoint(path: Path, settings: Settings, progress: Progress, tensors: dict[str, Any]) -> None:
    """Write tensors, numbers and strings only, so that ``torch.load(weights_only=True)`` reads it."""
    content = {
        "format": _FORMAT,
        "settings": dataclasses.asdict(settings),
        "progress": dataclasses.asdict(progress),
        **tensors,
    }
    write_atomically(path, lambda temporary: torch.save(content, temporary))


def read_checkpoint(path: Path, settings: Settings) -> tuple[Progress, dict[str, Any]] | None:
    """Progress and the other content of a checkpoint; None if there is none.

    Raises:
        DemoError: the file is damaged, or belongs to a run with other settings.
    """
    if not path.exists():
        return None
    try:
        content = torch.load(path, map_location=settings.device, weights_only=True)
        known = content.pop("settings")
        progress = Progress(**content.pop("progress"))
    except Exception as error:
        raise DemoError(f"--resume: cannot read {path}: {type(error).__name__}") from error
    if content.pop("format") != _FORMAT or known != dataclasses.asdict(settings):
        raise DemoError(f"--resume: {path} was written by a run with other settings")
    return progress, content
