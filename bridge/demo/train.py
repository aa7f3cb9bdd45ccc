"""The training loop: deterministic, interruptible after any step, resumable bit for bit."""

from __future__ import annotations

import contextlib
import math
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch._dynamo.utils import counters
from tqdm import tqdm

import bridge
from bridge.demo.checkpoint import Progress, checkpoint_path, read_checkpoint, write_checkpoint
from bridge.demo.data import Corpus
from bridge.demo.model import LanguageModel, held_out_loss, train_loss
from bridge.demo.ranks import ALONE, Ranks
from bridge.demo.settings import RECIPES, Settings
from functional_te.recipes import DelayedScaling

__all__ = ["Interrupts", "Trainer", "deterministic", "run", "saved_for_backward"]

_PEAK_RATE = 4e-3
_WARMUP_STEPS = 20
_EVALUATIONS = 6
_STEPS_PER_CHECKPOINT = 50


class Interrupts:
    """Turns Ctrl-C into a request to stop after the running step; a second one stops at once.

    Attributes:
        requested: whether the user asked to stop.
        at_once: whether the first Ctrl-C already raises KeyboardInterrupt. True while nothing would be lost.
    """

    def __init__(self) -> None:
        self.requested = False
        self.at_once = True
        self._before: Any = None

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        again, self.requested = self.requested, True
        if self.at_once or again:
            raise KeyboardInterrupt
        tqdm.write("stopping after this step; Ctrl-C again to stop at once", file=sys.stderr)


class _Compiled:
    """A function compiled into one graph, and how often Dynamo compiled it."""

    def __init__(self, function: Callable[..., torch.Tensor], backend: str, progress: Progress) -> None:
        eager = backend == "none"
        self._function = function if eager else torch.compile(function, fullgraph=True, backend=backend)
        self._progress = progress
        self._called = False

    def __call__(self, *args: Any) -> torch.Tensor:
        graphs, breaks = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
        result = self._function(*args)
        new = counters["stats"]["unique_graphs"] - graphs
        self._progress.graph_breaks += sum(counters["graph_break"].values()) - breaks
        if self._called:
            self._progress.recompiles += new
        else:
            self._progress.graphs += new
        self._called = True
        return result


@contextlib.contextmanager
def deterministic(device: str) -> Iterator[None]:
    """Have torch pick deterministic kernels, as far as the device has them."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=torch.device(device).type != "cpu")
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def saved_for_backward(settings: Settings, recipe: str, corpus: Corpus) -> int:
    """Bytes that one eager training forward keeps for its backward: distinct storages, parameters not counted."""
    torch.manual_seed(settings.seed)
    model = LanguageModel(settings)
    windows = corpus.held_out[0].to(settings.device)
    known = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    sizes: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor  # which keeps the storage, so that no other one gets its address

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), _autocast(recipe):
        loss = train_loss(model, windows)
    del loss
    return sum(sizes.values())


def _autocast(recipe: str) -> Any:
    return bridge.autocast(enabled=RECIPES[recipe] is not None, recipe=RECIPES[recipe])


class _TrainLoss(torch.nn.Module):
    """The training loss as a module of its model, as DistributedDataParallel wants it."""

    def __init__(self, model: LanguageModel, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.model, self.function = model, function

    def forward(self, windows: torch.Tensor) -> torch.Tensor:
        return self.function(self.model, windows)


class Trainer:
    """One run: model, optimizer, data order and what has been recorded.

    Args:
        settings: the settings.
        recipe: name of the recipe.
        corpus: the text.
        ranks: the processes that train together.
    """

    def __init__(self, settings: Settings, recipe: str, corpus: Corpus, ranks: Ranks = ALONE) -> None:
        torch.compiler.reset()
        self.settings, self.recipe, self.corpus, self.ranks = settings, recipe, corpus, ranks
        self.progress = Progress(recipe)
        torch.manual_seed(settings.seed)
        self.model = LanguageModel(settings)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=_PEAK_RATE, betas=(0.9, 0.95), weight_decay=0.1)
        self.order = torch.Generator().manual_seed(settings.seed)
        self.agreement = ranks.agree(self.model) if isinstance(RECIPES[recipe], DelayedScaling) else None
        self._compile()

    def _compile(self) -> None:
        compiled = _Compiled(train_loss, self.settings.backend, self.progress)
        self._train_loss = self.ranks.wrap(_TrainLoss(self.model, compiled))
        self._held_out_loss = _Compiled(held_out_loss, self.settings.backend, self.progress)

    def _rate(self, step: int) -> float:
        """Linear warm-up, then a cosine down to a tenth."""
        warmup = min(1.0, (step + 1) / _WARMUP_STEPS)
        return _PEAK_RATE * warmup * (0.55 + 0.45 * math.cos(math.pi * step / self.settings.steps))

    def step(self) -> float:
        """One optimizer step. Returns its training loss."""
        settings, started = self.settings, time.perf_counter()
        windows = self.corpus.sample(settings.batch, settings.context, self.order).to(settings.device)
        for group in self.optimizer.param_groups:
            group["lr"] = self._rate(len(self.progress.losses))
        with _autocast(self.recipe):
            loss = self._train_loss(self.ranks.rows(windows))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        value = self.ranks.mean(loss)
        self.progress.losses.append(value)
        self.progress.seconds.append(time.perf_counter() - started)
        return value

    def evaluate(self) -> float:
        """Record and return the mean held-out loss."""
        total = 0.0
        with torch.no_grad(), _autocast(self.recipe):
            for windows in self.corpus.held_out:
                total += self._held_out_loss(self.model, windows.to(self.settings.device)).item()
        value = total / len(self.corpus.held_out)
        self.progress.held_out.append([len(self.progress.losses), value])
        return value

    def save(self, path: Path) -> None:
        """Write a checkpoint: all that :meth:`restore` needs to continue bit for bit. The first process does."""
        if self.agreement is not None:
            self.agreement.agree()  # what the running step has observed: the first process writes that of all
        if not self.ranks.is_first:
            return
        tensors = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "order": self.order.get_state(),
            "rng": torch.get_rng_state(),
        }
        write_checkpoint(path, self.settings, self.progress, tensors)

    def restore(self, progress: Progress, tensors: dict[str, Any]) -> None:
        """Take over a checkpoint's content. What is compiled anew in this process is counted anew."""
        self.model.load_state_dict(tensors["model"])
        self.optimizer.load_state_dict(tensors["optimizer"])
        self.order.set_state(tensors["order"].cpu())
        torch.set_rng_state(tensors["rng"].cpu())
        self.progress = progress
        progress.graphs = 0
        self._compile()


def run(
    settings: Settings,
    recipe: str,
    corpus: Corpus,
    out: Path,
    resume: bool,
    interrupts: Interrupts,
    ranks: Ranks = ALONE,
) -> Progress:
    """Train with one recipe, or continue where its checkpoint stands. On several processes all of them call it.

    Returns:
        The progress; ``finished`` is False if the user asked to stop. In that case a checkpoint has been written.

    Raises:
        DemoError: a checkpoint does not fit.
        KeyboardInterrupt: the user stopped at once; the checkpoint in ``out`` is that of an earlier step.
    """
    path = checkpoint_path(out, recipe)
    found = read_checkpoint(path, settings) if resume else None
    if found is not None and found[0].finished:
        return found[0]
    saved_bytes = found[0].saved_bytes if found else saved_for_backward(settings, recipe, corpus)
    ranks.wait()  # all have read
    trainer = Trainer(settings, recipe, corpus, ranks)
    if found is not None:
        trainer.restore(*found)
    else:
        trainer.progress.saved_bytes = saved_bytes
        trainer.save(path)
    try:
        _loop(trainer, path, interrupts)
    finally:
        interrupts.at_once = True
        if trainer.agreement is not None:
            trainer.agreement.remove()
    return trainer.progress


def _loop(trainer: Trainer, path: Path, interrupts: Interrupts) -> None:
    settings, progress = trainer.settings, trainer.progress
    every = max(1, settings.steps // _EVALUATIONS)
    held_out = progress.held_out[-1][1] if progress.held_out else math.nan
    with tqdm(
        total=settings.steps,
        initial=len(progress.losses),
        desc=f"{progress.recipe:8}",
        unit="step",
        mininterval=0.2 if sys.stderr.isatty() else 10.0,
        disable=not trainer.ranks.is_first,
    ) as bar:
        bar.set_postfix_str("compiling")
        while len(progress.losses) < settings.steps:
            loss = trainer.step()
            interrupts.at_once = False
            interrupts.requested = trainer.ranks.any(interrupts.requested)
            done = len(progress.losses)
            if done % every == 0 or done == settings.steps:
                held_out = trainer.evaluate()
            progress.finished = done == settings.steps
            measured = "" if math.isnan(held_out) else f", held-out {held_out:.3f}"
            bar.set_postfix_str(f"loss {loss:.3f}{measured}", refresh=False)
            bar.update()
            if progress.finished or interrupts.requested or done % _STEPS_PER_CHECKPOINT == 0:
                trainer.save(path)
            if interrupts.requested:
                return
