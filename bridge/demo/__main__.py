"""Command line of the demo: ``python -m bridge.demo``."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from bridge.demo.checkpoint import Progress, checkpoint_path
from bridge.demo.data import Corpus, load_corpus
from bridge.demo.ranks import Ranks, join, leave
from bridge.demo.settings import DEFAULT_RECIPES, RECIPES, DemoError, Settings

__all__ = ["main"]

_GAP_EXCEEDED, _BAD_USE, _INTERRUPTED = 1, 2, 130
_SETTINGS_FILE = "settings.json"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise DemoError(message)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m bridge.demo",
        description="Train a small language model in high precision and with FP8 and FP4 recipes, and compare.",
        allow_abbrev=False,
    )
    defaults = Settings()

    def add(name: str, kind: type, text: str) -> None:
        parser.add_argument(f"--{name}", type=kind, help=f"{text} (default: {getattr(defaults, name)})")

    add("steps", int, "optimizer steps")
    add("layers", int, "transformer blocks")
    add("width", int, "model width, a multiple of 32")
    add("batch", int, "sequences per step")
    add("context", int, "bytes per sequence")
    add("seed", int, "seed of parameters and data order")
    add("device", str, "device to train on")
    parser.add_argument("--text", help="file to train on (default: the help topics of Python's standard library)")
    add("backend", str, "torch.compile backend, or none to run eagerly")
    parser.add_argument(
        "--recipe",
        action="append",
        metavar="NAME[,NAME]",
        help=f"what to run: all, or names among {', '.join(RECIPES)}; may be repeated "
        f"(default: {','.join(DEFAULT_RECIPES)})",
    )
    parser.add_argument(
        "--gap-limit",
        type=float,
        default=2.0,
        metavar="PERCENT",
        help="largest gap of a low-precision run's held-out loss to high precision's; four times that for 4-bit runs "
        "(default: 2)",
    )
    parser.add_argument("--out", type=Path, default=Path("demo-out"), help="output folder (default: demo-out)")
    parser.add_argument(
        "--resume", action="store_true", help="continue an interrupted run in --out; its settings are the defaults"
    )
    return parser


def _recipes(given: Sequence[str] | None) -> list[str]:
    if given is None:
        return list(DEFAULT_RECIPES)
    names = [name.strip() for item in given for name in item.split(",")]
    if names == ["all"]:
        return list(RECIPES)
    for name in names:
        if name not in RECIPES:
            raise DemoError(f"--recipe: expected all, or names among {', '.join(RECIPES)}, got {name!r}")
    return list(dict.fromkeys(names))


def _settings(arguments: argparse.Namespace) -> tuple[Settings, dict[str, Any]]:
    """Settings from flags; of a resumed run, from its folder, where flags may only repeat them."""
    names = [field.name for field in dataclasses.fields(Settings)]
    given = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    if given.get("text") is not None:
        given["text"] = str(Path(given["text"]).absolute())
    if not arguments.resume:
        return Settings(**given), {}
    path = arguments.out / _SETTINGS_FILE
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
        settings = Settings(**{name: known.pop(name) for name in names})
    except FileNotFoundError as error:
        raise DemoError(f"--resume: nothing to resume in {arguments.out}") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DemoError(f"--resume: cannot read {path}: {type(error).__name__}") from error
    for name, value in given.items():
        if value != getattr(settings, name):
            raise DemoError(f"--resume: the run in {arguments.out} has --{name} {getattr(settings, name)}, not {value}")
    return settings, known


def _prepare(arguments: argparse.Namespace, ranks: Ranks) -> tuple[Settings, list[str], Corpus]:
    """Check everything there is to check, and set the output folder up."""
    if not math.isfinite(arguments.gap_limit) or arguments.gap_limit < 0:
        raise DemoError(f"--gap-limit: expected a percentage of at least 0, got {arguments.gap_limit}")
    settings, known = _settings(arguments)
    names = known.get("recipes", list(DEFAULT_RECIPES)) if arguments.recipe is None else _recipes(arguments.recipe)
    settings.check()
    corpus = load_corpus(settings)
    if known and known.get("digest") != corpus.digest:
        raise DemoError("--resume: the text has changed since the run was started")
    if settings.batch % ranks.size:
        raise DemoError(f"--batch: expected a multiple of the {ranks.size} processes, got {settings.batch}")
    ranks.check_same(settings=settings, recipes=names, text=corpus.digest, resume=arguments.resume)
    if ranks.is_first:
        _set_up(arguments, settings, names, corpus)
    ranks.wait()
    return settings, names, corpus


def _set_up(arguments: argparse.Namespace, settings: Settings, names: list[str], corpus: Corpus) -> None:
    try:
        arguments.out.mkdir(parents=True, exist_ok=True)
        if not arguments.resume:
            for name in RECIPES:
                checkpoint_path(arguments.out, name).unlink(missing_ok=True)
        settings.save(arguments.out / _SETTINGS_FILE, recipes=names, digest=corpus.digest)
    except OSError as error:
        raise DemoError(f"--out: cannot write to {arguments.out}: {error.strerror}") from error


def _train(
    arguments: argparse.Namespace, settings: Settings, names: list[str], corpus: Corpus, ranks: Ranks
) -> list[Progress]:
    """All runs; fewer, the last of them unfinished, after Ctrl-C."""
    from bridge.demo.train import Interrupts, deterministic, run

    runs: list[Progress] = []
    with Interrupts() as interrupts, deterministic(settings.device):
        for name in names:
            try:
                runs.append(run(settings, name, corpus, arguments.out, arguments.resume, interrupts, ranks))
            except KeyboardInterrupt:
                interrupts.requested = True
            except Exception:
                # Ctrl-C also reaches the C++ compilers that Inductor starts, and fails what they were doing
                if not interrupts.requested:
                    raise
            if interrupts.requested:
                break
    return runs


def _report(arguments: argparse.Namespace, runs: list[Progress], processes: int) -> int:
    from bridge.demo.report import plot, table, verdict

    plot(runs, arguments.out / "loss.png", arguments.gap_limit)
    text = table(runs)
    good, sentence = verdict(runs, arguments.gap_limit)
    if processes > 1:
        sentence += f" {processes} processes trained together."
    (arguments.out / "table.txt").write_text(f"{text}\n\n{sentence}\n", encoding="utf-8")
    print(f"\n{text}\n\n{sentence}\nPlot: {arguments.out / 'loss.png'}")
    return 0 if good else _GAP_EXCEEDED


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo.

    Args:
        argv: command-line arguments; None for the process's.

    Returns:
        The exit status: 0, or 1 if an FP8 run is out of the limit, 2 for bad use, 130 if interrupted.
    """
    from bridge.demo.report import require

    started = time.perf_counter()
    ranks = Ranks()
    try:
        arguments = _parser().parse_args(argv)
        ranks = join(arguments.device or Settings().device)
        require()
        settings, names, corpus = _prepare(arguments, ranks)
        runs = _train(arguments, settings, names, corpus, ranks)
        if not ranks.is_first:
            return 0
        if len(runs) < len(names) or not all(run.finished for run in runs):
            again = f"--resume --out {arguments.out}"
            command = f'make demo ARGS="{again}"'
            if ranks.size > 1:
                command = f"torchrun --nproc-per-node {ranks.size} -m bridge.demo {again}"
            print(f"\ninterrupted; continue with: {command}")
            return _INTERRUPTED
        status = _report(arguments, runs, ranks.size)
    except DemoError as error:
        print(f"error: {error}", file=sys.stderr)
        return _BAD_USE
    except KeyboardInterrupt:
        return _INTERRUPTED
    except ModuleNotFoundError as error:
        print(f"error: {error.name} is not installed; pip install 'functional_te[demo]'", file=sys.stderr)
        return _BAD_USE
    finally:
        leave(ranks)
    print(f"Wall time: {time.perf_counter() - started:.0f} s")
    return status


if __name__ == "__main__":
    sys.exit(main())
