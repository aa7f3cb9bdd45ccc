"""The text: bytes of the standard library's help topics, or of a file, split into training and held-out parts."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path

import torch

from bridge.demo.settings import DemoError, Settings

__all__ = ["VOCABULARY", "Corpus", "load_corpus"]

VOCABULARY = 256
_HELD_OUT_SHARE = 0.1


@dataclasses.dataclass(frozen=True)
class Corpus:
    """A tokenized text; a token is a byte.

    Attributes:
        train: int64 ``[bytes]``.
        held_out: int64 ``[batches, batch, context + 1]``: windows that cover the last tenth of the text.
        digest: of the whole text, to recognize it by.
    """

    train: torch.Tensor
    held_out: torch.Tensor
    digest: str

    def sample(self, batch: int, context: int, generator: torch.Generator) -> torch.Tensor:
        """Random windows of the training part: int64 ``[batch, context + 1]``."""
        starts = torch.randint(len(self.train) - context, (batch, 1), generator=generator)
        return self.train[starts + torch.arange(context + 1)]


def _read(path: str | None) -> bytes:
    if path is None:
        from pydoc_data.topics import topics

        return "\n".join(topics[key] for key in sorted(topics)).encode()
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise DemoError(f"--text: cannot read {path!r}: {error.strerror}") from error


def load_corpus(settings: Settings) -> Corpus:
    """Read and split the text.

    Raises:
        DemoError: the file cannot be read, or is too short for one batch of held-out windows.
    """
    raw = _read(settings.text)
    tokens = torch.frombuffer(bytearray(raw), dtype=torch.uint8).long() if raw else torch.empty(0, dtype=torch.long)
    split = len(tokens) - int(len(tokens) * _HELD_OUT_SHARE)
    train, tail = tokens[:split], tokens[split:]
    window, batch = settings.context, settings.batch
    batches = (len(tail) - 1) // (window * batch)
    if batches < 1 or len(train) <= window:
        needed = int((window * batch + 1) / _HELD_OUT_SHARE) + 1
        raise DemoError(
            f"--text: {len(tokens)} bytes are too few for --batch {batch} --context {window}: at least {needed} needed"
        )
    windows = tail.unfold(0, window + 1, window)[: batches * batch]
    held_out = windows.reshape(batches, batch, window + 1).clone()
    return Corpus(train, held_out, hashlib.sha256(raw).hexdigest())
