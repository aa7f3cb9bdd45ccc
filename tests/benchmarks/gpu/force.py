"""Choosing a kernel backend for a whole process, modules included, which take ``"auto"``."""

from __future__ import annotations

import sys
from typing import Any

from functional_te.kernels import resolve_backend


def force_backend(name: str) -> None:
    """Make ``"auto"`` mean the backend called ``name`` wherever the packages resolve it.

    Raises:
        ValueError: no such backend.
    """
    resolve_backend(name)

    def resolve(wanted: str, *args: Any, **kwargs: Any) -> str:
        return resolve_backend(name if wanted == "auto" else wanted, *args, **kwargs)

    for module in list(sys.modules.values()):
        own = getattr(module, "__name__", "").partition(".")[0] in ("functional_te", "bridge")
        if own and vars(module).get("resolve_backend") is resolve_backend:
            module.resolve_backend = resolve  # type: ignore[attr-defined]
