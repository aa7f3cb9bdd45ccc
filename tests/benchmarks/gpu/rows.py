"""The rows of the benchmark: what is measured, who takes part, and the measuring."""

from __future__ import annotations

import dataclasses
import fnmatch
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from functional_te.kernels import resolve_backend
from tests.benchmarks.gpu import contestants as who
from tests.benchmarks.gpu import converted, kernel_rows, measure
from tests.benchmarks.gpu.blocks import Llama, Mlp, Shape
from tests.benchmarks.gpu.ceilings import floor_ms
from tests.benchmarks.gpu.compile_time import cold
from tests.benchmarks.gpu.contestants import Contestant, Step
from tests.benchmarks.gpu.results import Results

BF16 = torch.bfloat16
ROUNDS = 4  # how often contestants alternate


def shapes(device: str) -> dict[str, Shape]:
    """Sizes by name; tiny ones of the same kind where there is no GPU."""
    if device != "cuda":
        mlp = dict.fromkeys(("t8192", "t2048", "t512"), Mlp(32, 64, 128))
        llama = Llama(1, 16, 64, 4, 2, 128)
    else:
        mlp = {"t8192": Mlp(8192, 4096, 14336), "t2048": Mlp(2048, 2048, 5632), "t512": Mlp(512, 1024, 4096)}
        llama = Llama(1, 2048, 2048, 16, 4, 5632)
    found: dict[str, Shape] = {f"mlp-{name}": shape for name, shape in mlp.items()}
    found["blocks8-t2048"] = dataclasses.replace(mlp["t2048"], layers=8)
    found["llama-large"] = Llama(2, 4096, 4096, 32, 8, 14336) if device == "cuda" else llama
    found["llama-small"] = llama
    found["llama8-small"] = dataclasses.replace(llama, layers=8)
    return found


@dataclasses.dataclass(frozen=True)
class Settings:
    """How to run.

    Attributes:
        device: "cuda" or "cpu".
        backend: of ours, "auto" or a name.
        quick: fewer contestants and iterations.
        only: patterns of the names of contestants to measure; none: all.
        profile: where to write tables of kernels, or None.
        deadline: ``time.time()`` after which nothing new is begun, or None.
        ceilings: of the device.
    """

    device: str
    backend: str = "auto"
    quick: bool = False
    only: tuple[str, ...] = ()
    profile: Path | None = None
    deadline: float | None = None
    ceilings: dict[str, Any] = dataclasses.field(default_factory=dict)

    def takes(self, name: str) -> bool:
        """Whether a contestant is to be measured."""
        return not self.only or any(fnmatch.fnmatch(name, pattern) for pattern in self.only)

    def did(self, row: dict[str, Any]) -> bool:
        """Whether a row of results has all these contestants."""
        return bool(row.get("done")) and row.get("only", []) in ([], list(self.only))

    @property
    def late(self) -> bool:
        return self.deadline is not None and time.time() > self.deadline

    @property
    def kernel_backend(self) -> str:
        return resolve_backend("auto", self.device) if self.backend == "auto" else self.backend


# ---------------------------------------------------------------------------- rows of steps


def _contestants(shape: Shape, recipe: str, settings: Settings) -> list[Contestant]:
    device, is_mlp = settings.device, isinstance(shape, Mlp)
    found = who.ours(shape, recipe, device, BF16)
    if recipe in ("none", "delayed"):
        found += who.torch_peers(shape, device, BF16, capture=recipe == "none")
    if recipe in ("delayed", "current"):
        found += who.torchao_peers(shape, device, BF16, capture=recipe == "delayed")
    ways: dict[str, tuple[str, ...]] = {"ops": ("eager",)} if is_mlp else {"TransformerLayer": ("eager",)}
    if is_mlp and recipe in ("delayed", "current"):
        ways = {"ops": ("eager", "graphed"), "LayerNormMLP": ("eager",)}
    found += who.te_peers(shape, recipe, BF16, ways)
    if not is_mlp:  # none of the peers that the goals were set with
        graphed = who.te_peers(shape, recipe, BF16, {"TransformerLayer": ("graphed",)})
        found += [dataclasses.replace(one, peer=False, extra=True) for one in graphed]
    found = [one for one in found if settings.takes(one.name) and not (settings.quick and one.extra)]
    return sorted(found, key=lambda one: not one.alone)


def _attempt(
    one: Contestant,
    row: str,
    results: Results,
    device: str,
    action: Callable[[], dict[str, Any]],
    quiet: bool = False,
) -> bool:
    """Record what ``action`` gives, or its error. Whether it worked. ``quiet``: print errors only.

    Raises:
        DeviceLost: the process has to end; the entry says so.
    """
    results.begin(row, one.who, one.mode)
    try:
        fields = action()
    except Exception as error:
        try:
            fields = {"error": measure.explain(error, device), "value": None}
        except measure.DeviceLost as lost:
            results.record(row, one.who, one.mode, peer=one.peer, error=str(lost), value=None, fatal=True)
            raise
    results.record(row, one.who, one.mode, peer=one.peer, **fields)
    shown = f"{fields['value']:.4g}" if fields.get("value") else fields.get("error", "ready").splitlines()[0][:200]
    if not quiet or "error" in fields:
        print(f"  {row}: {one.name}: {shown}", flush=True)
    return "error" not in fields


def measure_steps(row: str, shape: Shape, recipe: str, settings: Settings, results: Results) -> bool:
    """A row of training steps. False if time ran out."""
    device = settings.device
    steps: dict[str, tuple[Contestant, Step]] = {}
    samples: dict[str, list[float]] = {}
    counts: dict[str, int] = {}

    def timed(one: Contestant, step: Step, count: int) -> dict[str, Any]:
        speed = measure.drift(device)
        times = samples.setdefault(one.name, [])
        times += measure.durations(step.run, count, device, step.clear)
        step.clear()
        return {**measure.summary(times), "drift_ms": speed}

    def prepare(one: Contestant) -> dict[str, Any]:
        start = time.perf_counter()
        step = one.build()
        ms = measure.settle(step, device)
        counts[one.name] = measure.iterations(ms, settings.quick, device)
        fields: dict[str, Any] = {"settled_ms": ms, "prepare_s": time.perf_counter() - start}
        if settings.profile is not None and one.who == "ours":
            _profile(step, settings.profile / f"{row}-{one.mode.replace(', ', '-').replace(' ', '-')}.txt", device)
        if one.alone:
            return {**fields, **timed(one, step, counts[one.name])}
        step.clear()
        steps[one.name] = one, step
        return fields

    for one in _contestants(shape, recipe, settings):
        if results.fatal(row, one.who, one.mode):
            continue
        if settings.late:
            return False
        _attempt(one, row, results, device, partial(prepare, one))
        measure.release(device)
    for turn in range(ROUNDS):
        for name, (one, step) in list(steps.items()):
            count = -(-counts[name] // ROUNDS)
            action = partial(timed, one, step, count)
            if not _attempt(one, row, results, device, action, turn + 1 < ROUNDS):
                del steps[name]
        step = action = None  # type: ignore[assignment]
    steps.clear()
    measure.release(device, compiled=True)
    return True


def _profile(step: Step, path: Path, device: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        measure.write_profile(step, path, device)
    except Exception as error:
        print(f"profile {path.name}: {measure.explain(error, device)}", flush=True)


# ---------------------------------------------------------------------------- other rows

_NO_STEP: Any = None  # these rows measure no steps


def measure_memory(row: str, settings: Settings, results: Results) -> bool:
    """Peak memory of the large block in eager mode and compiled, each alone."""
    device, shape = settings.device, shapes(settings.device)["mlp-t8192"]
    wanted = {"ours": ("eager", "compiled"), "torch bf16": ("eager", "compiled"), "torchao": ("compiled",)}
    everyone = who.ours(shape, "delayed", device, BF16)
    everyone += who.torch_peers(shape, device, BF16) + who.torchao_peers(shape, device, BF16)
    chosen = [one for one in everyone if one.mode in wanted[one.who]]
    chosen += who.te_peers(shape, "delayed", BF16, {"ops": ("eager",), "LayerNormMLP": ("eager",)})
    for one in chosen:
        if results.fatal(row, one.who, one.mode) or not settings.takes(one.name):
            continue
        if settings.late:
            return False
        _attempt(one, row, results, device, lambda one=one: measure.peak_megabytes(one.build, device))
        measure.release(device, compiled=True)
    return True


def measure_compile_time(row: str, settings: Settings, results: Results) -> bool:
    """Cold compilation of 8 Llama layers, each in a process of its own."""
    for name in ("ours", "torchao", "torch bf16"):
        if settings.late:
            return False
        one = Contestant(name, "compiled", _NO_STEP, peer=name != "ours", extra=name == "torch bf16")
        if results.fatal(row, name, "compiled") or not settings.takes(one.name) or (settings.quick and one.extra):
            continue
        action = lambda name=name: cold(name, "llama8-small", settings.device, settings.backend)  # noqa: E731
        _attempt(one, row, results, settings.device, action)
    return True


def measure_converted(row: str, batch: int | None, settings: Settings, results: Results) -> bool:
    """Training steps of a Hugging Face Llama, each contestant alone: at least 20 steps after those that warm up."""
    device = settings.device

    def timed(one: Contestant) -> dict[str, Any]:
        step = one.build()
        ms = measure.settle(step, device)
        count = measure.iterations(ms, settings.quick, device)
        summary = measure.summary(measure.durations(step.run, count, device, step.clear))
        return {**summary, "settled_ms": ms, "tokens_s": converted.tokens_per_second(summary["value"], device, batch)}

    for one in converted.contestants(device, batch):
        if results.fatal(row, one.who, one.mode) or not settings.takes(one.name) or (settings.quick and one.extra):
            continue
        if settings.late:
            return False
        _attempt(one, row, results, device, partial(timed, one))
        measure.release(device, compiled=True)
    return True


def measure_kernels(row: str, settings: Settings, results: Results, source: Any) -> bool:
    """Kernels alone, ours only."""
    shape = shapes(settings.device)["mlp-t8192"]
    for kernel, recipe, action in source(shape, settings.kernel_backend, settings.device, BF16):
        if settings.late:
            return False
        one = Contestant(kernel, recipe, _NO_STEP)
        if results.fatal(row, kernel, recipe) or not settings.takes(one.name):
            continue
        _attempt(one, row, results, settings.device, action)
        measure.release(settings.device)
    return True


# ---------------------------------------------------------------------------- the table


@dataclasses.dataclass(frozen=True)
class Row:
    """A row: what it is, its unit, and its measurement, which says whether it came to its end."""

    name: str
    title: str
    unit: str
    measure: Callable[[Settings, Results], bool]
    shape: str | None = None


def _step_row(shape: str, recipe: str) -> Row:
    name = f"{shape}-{recipe}"

    def run(settings: Settings, results: Results) -> bool:
        return measure_steps(name, shapes(settings.device)[shape], recipe, settings, results)

    return Row(name, f"forward and backward, {recipe} scaling", "ms", run, shape)


def _all_rows() -> dict[str, Row]:
    recipes = ("delayed", "current", "block", "none")
    rows = [
        Row("kernels", "fused kernels", "TB/s", lambda s, r: measure_kernels("kernels", s, r, kernel_rows.bandwidth)),
        Row("gemms", "FP8 products", "TFLOP/s", lambda s, r: measure_kernels("gemms", s, r, kernel_rows.products)),
        Row("memory", "peak over weights and input", "MB", lambda s, r: measure_memory("memory", s, r)),
    ]
    for shape in ("mlp-t8192", "mlp-t2048", "mlp-t512", "blocks8-t2048"):
        rows += [_step_row(shape, recipe) for recipe in recipes]
    for shape in ("llama-large", "llama-small"):
        rows += [_step_row(shape, recipe) for recipe in ("delayed", "current")]
    rows.append(
        Row("compile-time", "8 Llama layers, cold", "s", lambda s, r: measure_compile_time("compile-time", s, r))
    )
    title = "training step of a converted Llama (transformers)"
    rows.append(Row("hf-llama", title, "ms", lambda s, r: measure_converted("hf-llama", None, s, r)))
    title += ", four times the tokens"
    rows.append(Row("hf-llama-t32768", title, "ms", lambda s, r: measure_converted("hf-llama-t32768", 16, s, r)))
    return {row.name: row for row in rows}


ROWS = _all_rows()


def run_row(row: Row, settings: Settings, results: Results) -> None:
    """Measure a row. Whatever happens but a lost device, the next one can follow."""
    fields: dict[str, Any] = {"title": row.title, "unit": row.unit, "ceilings": settings.ceilings}
    if row.shape is not None:
        shape = shapes(settings.device)[row.shape]
        fields["shape"] = dataclasses.asdict(shape)
        fields["floor_ms"] = None if row.name.endswith("-none") else floor_ms(shape, settings.ceilings)
    results.row(row.name, **fields)
    start = time.perf_counter()
    done = False
    try:
        done = row.measure(settings, results)
    except measure.DeviceLost:
        raise
    except Exception as error:
        results.row(row.name, error=f"{type(error).__name__}: {error}"[:1500], done=True)
        results.write()
        measure.explain(error, settings.device)
        done = True
    results.row(row.name, done=done, only=list(settings.only), seconds=round(time.perf_counter() - start, 1))
    results.data["current"] = None
    results.write()
