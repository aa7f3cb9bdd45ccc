"""Docstrings of the packages on the site: roles such as ``:func:`x` `` become code."""

from __future__ import annotations

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:attr|class|data|exc|func|meth|mod):`(~?)\.?([^`<]+)`")


def plain(docstring: str) -> str:
    """A docstring without roles: ``~a.b.c`` is shown as ``c``."""
    return _ROLE.sub(lambda found: f"`{found[2].rpartition('.')[2] if found[1] else found[2]}`", docstring)


class Roles(griffe.Extension):
    """Applies :func:`plain` to every docstring."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Called for everything that has been read."""
        del kwargs
        if obj.docstring is not None:
            obj.docstring.value = plain(obj.docstring.value)
