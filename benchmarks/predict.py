"""What the cost model says of this machine beside what is measured on it.

First the machine's rates are measured, then decoding is predicted and measured for a grid:
attention at the sizes of Llama-3-8B over synthetic keys, and the demo model as a whole.
"""

from __future__ import annotations

import statistics
import tempfile
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rich.table import Table

from tierstore.adapters.attention import Geometry, SparseAttention
from tierstore.adapters.attention.places import ATTEND_WHERE
from tierstore.adapters.generate import TierOptions
from tierstore.adapters.models import DEMO_MODEL, LoadedModel, load_model
from tierstore.adapters.planner.measuring import measure as measure_machine
from tierstore.adapters.planner.models import MODELS, ModelSize
from tierstore.adapters.planner.prediction import Load, predict
from tierstore.adapters.planner.systems import SYSTEMS
from tierstore.adapters.presets import PRESETS
from tierstore.benchmarks.findings import Findings
from tierstore.benchmarks.language import check_window, kv_bytes, real_text
from tierstore.benchmarks.machine import Machine, file_system_of
from tierstore.benchmarks.rounds import Measure, Ratio, Say, Spread, alternate, listed
from tierstore.benchmarks.steps import STEPS, time_steps
from tierstore.benchmarks.subject import Subject
from tierstore.benchmarks.synthetic import SyntheticText

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from tierstore.benchmarks.synthetic import Token
    from tierstore.hardware import Hardware

_BUDGETS, _WINDOWS = (1 / 64, 1 / 16), (1.0, 2.0)
_WARM = 16
_FLOOR_TOKENS = 64
_MODEL_STEPS = 32
_DRAM, _DISK = "DRAM", "disk"
_EXTENT = 64 << 10
_WHERE_BUDGET = 1 / 16


@dataclass(frozen=True)
class Case:
    """One point of the grid."""

    context: int
    budget: float
    window: float
    under: str

    def __str__(self) -> str:
        return f"{self.context >> 10}k, {self.budget:.2%}, x{self.window:g}, {self.under}"


@dataclass(frozen=True)
class Outcome:
    """Milliseconds of a step: measured in each round, predicted, and with the misses measured.

    misses: share of the selected blocks that were fetched: predicted, and measured.
    """

    measured: Sequence[float]
    blind: float
    informed: float
    misses: tuple[float, float]

    def error(self, predicted: float) -> float:
        """Of the median, as a share of what was measured."""
        return predicted / statistics.median(self.measured) - 1


def run(
    say: Say,
    *,
    repeat: int = 3,
    tokens: int = 32_768,
    layers: int = 2,
    disk: str | Path | None = None,
) -> Findings:
    """Measure this machine, predict, and measure again."""
    loaded = load_model(DEMO_MODEL, torch.bfloat16)  # what is predicted has 16-bit numbers
    geometry = Geometry(layers, 32, 8, 128, torch.bfloat16, torch.device("cpu"))
    folder = Path(tempfile.gettempdir() if disk is None else disk)
    return measure(say, loaded, geometry, repeat=repeat, tokens=tokens, disk=folder)


def measure(
    say: Say, loaded: LoadedModel, geometry: Geometry, *, repeat: int, tokens: int, disk: Path
) -> Findings:
    """Predict and measure at `tokens` of context and a quarter of them."""
    machine = Machine.here()
    hardware = measure_machine(disk, say)
    grid = [
        Case(context, budget, window, under)
        for context in (tokens // 4, tokens)
        for budget in _BUDGETS
        for window in _WINDOWS
        for under in (_DRAM, _DISK)
    ]
    outcomes = {}
    for case in grid:
        outcome = outcomes[str(case)] = _attention(geometry, case, hardware, disk, repeat)
        say(f"{case}: {statistics.median(outcome.measured):.2f} ms, predicted {outcome.blind:.2f}")
    outcomes |= _model(say, loaded, hardware, tokens // 4, repeat)
    where = _places(say, geometry, tokens, repeat)
    return _findings(machine, hardware, outcomes, where, geometry, disk)


def _attention(
    geometry: Geometry, case: Case, hardware: Hardware, disk: Path, repeat: int
) -> Outcome:
    """Attention of all layers over synthetic keys."""
    text = SyntheticText(geometry)
    options: dict[str, object] = {"dram": _ample(geometry, case.context)}
    if case.under == _DISK:
        options = {"disk": disk / "predict-kv", "disk_codec": "raw"}
    with closing(_filled(geometry, case, text, **options)) as engine:
        for _ in range(_WARM):
            _attend(engine, text.step())
        metrics = engine.store.metrics
        selected, fetched, start = metrics.selected, metrics.fetched, _disk_bytes()
        measured = [
            time_steps(partial(_attend, engine), [text.step() for _ in range(STEPS)]).median_ms
            for _ in range(repeat)
        ]
        misses = (metrics.fetched - fetched) / (metrics.selected - selected)
        read = (_disk_bytes() - start) / (repeat * STEPS)
    size = _size_of(geometry)
    load = Load(size, case.context, 1, case.budget, case.window, extent_bytes=_EXTENT)
    # With files under the fast tier, nothing is between them.
    where = hardware if case.under == _DRAM else hardware.with_memory(None, 1)
    return _outcome(measured, load, where, misses, disk_bytes=read)


def _outcome(
    measured: Sequence[float],
    load: Load,
    hardware: Hardware,
    misses: float,
    *,
    rest_ms: float = 0.0,
    disk_bytes: float | None = None,
) -> Outcome:
    system = SYSTEMS["kvdrive"]
    known = replace(load, reload=misses, disk_bytes=disk_bytes)
    blind, informed = (predict(system, each, hardware) for each in (load, known))

    def milliseconds(stages: dict[str, float]) -> float:
        return rest_ms + 1e3 * sum(seconds for name, seconds in stages.items() if name != "rest")

    return Outcome(
        measured, milliseconds(blind.stages), milliseconds(informed.stages), (blind.missed, misses)
    )


def _model(
    say: Say, loaded: LoadedModel, hardware: Hardware, tokens: int, repeat: int
) -> dict[str, Outcome]:
    """The demo model: what is not attention is measured at a short context, the rest predicted."""
    count = _MODEL_STEPS * (1 + repeat)
    contexts = (tokens // 4, tokens - tokens // 8)
    check_window(loaded.model, contexts[-1] + count)
    text = real_text(loaded.tokenizer, contexts[-1] + count)
    shape = MODELS["smollm2"]
    outcomes = {}
    with ExitStack() as stack:
        floor = stack.enter_context(closing(Subject(loaded.model, None)))
        for context in contexts:
            ample = 3 * kv_bytes(loaded.model, context) + (64 << 20)
            tiers = TierOptions("kvdrive", dram=ample, fast=ample)
            with closing(Subject(loaded.model, tiers)) as subject:
                subject.prefill(text[:context])
                rounds = []
                for number in range(1 + repeat):
                    floor.prefill(text[:_FLOOR_TOKENS])
                    at = context + _MODEL_STEPS * number
                    story = text[at : at + _MODEL_STEPS]
                    rounds.append((floor.decode(story).median_ms, subject.decode(story).median_ms))
                report = subject.report()
            assert report is not None
            misses = 1 - float(str(report["hit_rate"]))
            rest = statistics.median(pair[0] for pair in rounds[1:])
            load = Load(shape, context, 1, 0.0625, 2.0)
            name = f"demo model, {context:,} tokens"
            measured = [pair[1] for pair in rounds[1:]]
            outcome = outcomes[name] = _outcome(measured, load, hardware, misses, rest_ms=rest)
            say(f"{name}: {statistics.median(measured):.1f} ms, predicted {outcome.blind:.1f}")
    return outcomes


def _places(say: Say, geometry: Geometry, tokens: int, repeat: int) -> dict[str, list[float]]:
    """Milliseconds of a step by where missing blocks are attended to, in turn on equal texts.

    Of preset kvdrive, which attends to all of the fast tier, and of one that attends to just what
    is selected.
    """
    case = Case(tokens, _WHERE_BUDGET, 1.0, _DRAM)
    with ExitStack() as stack:
        runs: dict[str, Callable[[int], float]] = {}
        for residents in (True, False):
            preset = replace(PRESETS["kvdrive"], attends_residents=residents)
            for where in ATTEND_WHERE:
                text = SyntheticText(geometry)
                engine = _filled(
                    geometry, case, text, preset=preset, dram=_ample(geometry, tokens),
                    attend_where=where,
                )  # fmt: skip
                stack.enter_context(closing(engine))
                runs[_where(where, residents=residents)] = partial(_round, engine, text)

        def after(number: int, latest: Mapping[str, float]) -> None:
            say(f"where, round {number} of {repeat}: {listed(latest)} ms")

        return alternate(runs, repeat, after)


def _where(where: str, *, residents: bool) -> str:
    return f"{where}, {'residents' if residents else 'selected'}"


def _round(engine: SparseAttention, text: SyntheticText, number: int) -> float:
    story = [text.step() for _ in range(STEPS)]
    return time_steps(partial(_attend, engine), story).median_ms


def _filled(
    geometry: Geometry, case: Case, text: SyntheticText, **options: object
) -> SparseAttention:
    """An engine of preset kvdrive that holds a text of the case's length."""
    engine = SparseAttention(
        geometry, budget=case.budget, fast=_ample(geometry, case.context), window=case.window,
        **options,  # type: ignore[arg-type]
    )  # fmt: skip
    for layer, (key, value) in _layers(text, geometry, case.context):
        engine.absorb(layer, key, value, scale=geometry.head_dim**-0.5)
    return engine


def _disk_bytes() -> int:
    """Bytes that this process has read from disks so far."""
    for line in Path("/proc/self/io").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "read_bytes":
            return int(value)
    return 0


def _layers(
    text: SyntheticText, geometry: Geometry, tokens: int
) -> Iterator[tuple[int, tuple[torch.Tensor, torch.Tensor]]]:
    for layer in range(geometry.layers):
        yield layer, text.context(tokens)


def _attend(engine: SparseAttention, token: Sequence[Token]) -> None:
    for layer, (query, key, value) in enumerate(token):
        engine.attend(layer, query, key, value, scale=engine.geometry.head_dim**-0.5)


def _ample(geometry: Geometry, tokens: int) -> int:
    return 3 * geometry.kv_bytes(tokens) // 2 + (64 << 20)


def _size_of(geometry: Geometry) -> ModelSize:
    """The attention of a geometry; the rest of its layers is that of Llama-3-8B."""
    return replace(
        MODELS["llama3-8b"], layers=geometry.layers, query_heads=geometry.query_heads,
        kv_heads=geometry.kv_heads, head_dim=geometry.head_dim,
    )  # fmt: skip


def _findings(
    machine: Machine,
    hardware: Hardware,
    outcomes: dict[str, Outcome],
    where: dict[str, list[float]],
    geometry: Geometry,
    disk: Path,
) -> Findings:
    """Measured and predicted, side by side."""
    steps = {name: list(each.measured) for name, each in outcomes.items()}
    for kind in ("blind", "informed"):
        steps |= {
            f"{name}, {kind}": [getattr(each, kind)] * len(each.measured)
            for name, each in outcomes.items()
        }
    return Findings(
        benchmark="predict",
        machine=machine,
        baseline=_where("fetch", residents=True),
        settings={
            "layers": geometry.layers,
            "dtype": str(geometry.dtype),
            "steps in a round": STEPS,
            "file system of the disk": file_system_of(disk),
        },
        configurations={name: name for name in (*steps, *where)},
        measures={
            "step": Measure("ms/token, median of a round", steps),
            "where": Measure("ms/token, by where missing blocks are attended to", where),
        },
        ratios=_ratios(outcomes),
        notes=[f"Error of the prediction: {_errors(outcomes)}."],
        details={"hardware": hardware.to_dict()},
        tables=[_table(outcomes)],
    )


def _ratios(outcomes: Iterable[str]) -> list[Ratio]:
    """Predicted over measured, and the rules of where over fetching."""
    ratios = [
        Ratio(f"predicted / measured, {name}", "step", f"{name}, blind", name) for name in outcomes
    ]
    for residents in (True, False):
        fetch = _where("fetch", residents=residents)
        for rule in ("in-tier", "auto"):
            own = _where(rule, residents=residents)
            ratios.append(Ratio(f"time of a step, {own} / fetch", "where", own, fetch))
    return ratios


def _errors(outcomes: Mapping[str, Outcome]) -> str:
    """How far off both kinds of predictions are, in words."""
    words = []
    for kind in ("blind", "informed"):
        found = [abs(each.error(getattr(each, kind))) for each in outcomes.values()]
        median = Spread.of(found).median
        words.append(f"{kind}: {median:.0%} in the median, {max(found):.0%} at most")
    return "; ".join(words)


def _table(outcomes: dict[str, Outcome]) -> Table:
    """Predicted beside measured."""
    shown = Table("case")
    for heading in (
        "measured, ms", "predicted", "error", "with its misses", "error", "missed, predicted",
        "missed",
    ):  # fmt: skip
        shown.add_column(heading, justify="right")
    for name, each in outcomes.items():
        shown.add_row(
            name,
            f"{statistics.median(each.measured):.2f}",
            f"{each.blind:.2f}",
            f"{each.error(each.blind):+.0%}",
            f"{each.informed:.2f}",
            f"{each.error(each.informed):+.0%}",
            f"{each.misses[0]:.1%}",
            f"{each.misses[1]:.1%}",
        )
    return shown
