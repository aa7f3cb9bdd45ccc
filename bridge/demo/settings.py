"""What a demo run is made of, and the errors it reports in one line."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import torch

import functional_te as fte
from bridge.demo.files import write_atomically
from functional_te import recipes
from functional_te.recipes import Recipe, Role

__all__ = ["DEFAULT_RECIPES", "HEAD_WIDTH", "RECIPES", "DemoError", "Settings"]

HEAD_WIDTH = 32


def _mixed(role: Role) -> fte.Quantizer:
    """Weights in MXFP8, inputs in NVFP4, gradients per tensor in E5M2."""
    if role.tensor == "weight":
        return fte.MXFP8Quantizer(dtype=torch.float8_e4m3fn)
    if role.tensor == "input":
        return fte.NVFP4Quantizer(with_rht=True)
    return fte.Float8CurrentScalingQuantizer(dtype=torch.float8_e5m2)


# name on the command line -> recipe; None is high precision
RECIPES: dict[str, Recipe | None] = {
    "none": None,
    "current": recipes.Float8CurrentScaling(),
    "delayed": recipes.DelayedScaling(amax_history_len=16),
    "block": recipes.Float8BlockScaling(),
    "mxfp8": recipes.MXFP8BlockScaling(),
    "nvfp4": recipes.NVFP4BlockScaling(),
    "custom": recipes.CustomRecipe(_mixed),
}
DEFAULT_RECIPES = ("none", "current", "delayed")


class DemoError(Exception):
    """Something the user can fix; the message is one line."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings that decide a run's numbers. A resumed run must have those of the interrupted one.

    Attributes:
        steps: optimizer steps.
        layers: transformer blocks.
        width: model width, a multiple of 32, which is the width of an attention head.
        batch: sequences per step.
        context: bytes per sequence.
        seed: seed of the initial parameters and of the data order.
        device: where to train.
        text: a file to train on, or None for the standard library's help texts.
        backend: torch.compile's backend; ``"none"`` does not compile.
    """

    steps: int = 300
    layers: int = 2
    width: int = 128
    batch: int = 16
    context: int = 128
    seed: int = 0
    device: str = "cpu"
    text: str | None = None
    backend: str = "inductor"

    def check(self) -> None:
        """Raise :class:`DemoError` for settings that cannot be run."""
        for name in ("steps", "layers", "width", "batch"):
            if getattr(self, name) < 1:
                raise DemoError(f"--{name}: expected at least 1, got {getattr(self, name)}")
        if self.context < 2:
            raise DemoError(f"--context: expected at least 2, got {self.context}")
        if self.width % HEAD_WIDTH:
            raise DemoError(f"--width: expected a multiple of {HEAD_WIDTH}, got {self.width}")
        if not 0 <= self.seed < 2**63:
            raise DemoError(f"--seed: expected a number in [0, 2**63), got {self.seed}")
        try:
            torch.empty(1, device=self.device)
        except (RuntimeError, AssertionError, NotImplementedError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise DemoError(f"--device: cannot use {self.device!r}: {reason}") from error
        if torch.device(self.device).type == "meta":
            raise DemoError("--device: expected a device with storage, got 'meta'")
        if self.backend != "none" and self.backend not in torch.compiler.list_backends(exclude_tags=()):
            raise DemoError(f"--backend: unknown backend {self.backend!r}")

    def save(self, path: Path, **more: Any) -> None:
        """Write the settings, and ``more``, as JSON."""
        text = json.dumps({**dataclasses.asdict(self), **more}, indent=2)
        write_atomically(path, functools.partial(_write_text, text=text))


def _write_text(path: Path, text: str) -> None:
    path.write_text(text + "\n", encoding="utf-8")
