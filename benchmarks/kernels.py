"""Every CPU kernel beside plain torch and beside what this machine could do at most.

A kernel could reach the longer of two times: its bytes at the speed of a stream over as many, and
its work (multiply-adds, exponentials, ...) in a loop over what a cache holds. Both are measured in
the same round, on as many threads.
"""

from __future__ import annotations

import gc
import statistics
import time
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from rich.table import Table

from tierstore.benchmarks.attention_cases import ATTENTION
from tierstore.benchmarks.findings import Findings
from tierstore.benchmarks.index_upkeep import (
    CONFIGURATIONS,
    append_measure,
    append_ratios,
    build_measure,
    build_ratios,
)
from tierstore.benchmarks.kernel_cases import DEMO, LARGE
from tierstore.benchmarks.machine import Machine
from tierstore.benchmarks.rounds import Measure, Ratio, alternate
from tierstore.benchmarks.scoring_cases import SCORING
from tierstore.errors import ConfigError
from tierstore.kernels.backend import backend_of
from tierstore.kernels.threads import thread_count

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tierstore.benchmarks.kernel_cases import Case, Sizes
    from tierstore.benchmarks.rounds import Say

PARTS = ("large", "demo", "append", "build")
SIZES: Mapping[str, Sizes] = {"large": LARGE, "demo": DEMO}
CASES = {**SCORING, **ATTENTION}
REACHED, FASTER, PQ_SCAN_MS = 0.6, 4.0, 6.0
_FASTER = ("dot_logits", "attend_blocks")
_OURS, _PLAIN, _ATTAINABLE, _MOVED, _WORK = "ours", "torch", "attainable", "moved", "work"
_LIMIT = "limit"
_TURN = 2e-2
"""Seconds that a turn takes at least."""


def run(say: Say, *, repeat: int = 5, parts: str | None = None) -> Findings:
    """Measure some of `PARTS`; all by default."""
    if backend_of(np.empty(0)) != "numba":
        raise ConfigError("kernels: Numba is missing, and its kernels are what is measured")
    chosen = PARTS if parts is None else tuple(parts.split(","))
    if not chosen or set(chosen) - set(PARTS):
        raise ConfigError(f"parts={parts!r}: expected some of {', '.join(PARTS)}")
    return measure(say, repeat=repeat, parts=chosen)


def measure(
    say: Say,
    *,
    repeat: int,
    parts: Sequence[str],
    sizes: Mapping[str, Sizes] = SIZES,
    cases: Mapping[str, Callable[[Sizes], Case]] = CASES,
) -> Findings:
    """Measure some of `PARTS` in so many rounds."""
    machine = Machine.here()
    measures: dict[str, Measure] = {}
    ratios: list[Ratio] = []
    tables, says = [], {}
    for size in [part for part in parts if part in sizes]:
        own = {name: f"{name}, {size}" for name in cases}
        for name, label in own.items():
            measures[label], says[label] = _measure(cases[name](sizes[size]), repeat)
            say(f"{label}: {_line(measures[label])}")
            gc.collect()
        ratios += [ratio for name, label in own.items() for ratio in _ratios(name, label, size)]
        if (scan := own.get("pq_logits")) is not None and size == "large":
            measures[scan] = _with_limit(measures[scan], PQ_SCAN_MS)
        tables.append(_table(f"{size}: {_said(sizes[size])}", own, measures, says))
    for part, found, wanted in (
        ("append", append_measure, append_ratios), ("build", build_measure, build_ratios)
    ):  # fmt: skip
        if part in parts:
            measures[part] = found(say, repeat)
            ratios += wanted(part)
    return Findings(
        benchmark="kernels",
        machine=machine,
        baseline=_PLAIN,
        settings={"parts": ", ".join(parts), "rounds": repeat},
        configurations={
            _OURS: "the Numba kernel",
            _PLAIN: "the same in plain torch",
            _ATTAINABLE: "the longer one of moved and work",
            _MOVED: "loops that only read, or copy, the same bytes, on as many threads",
            _WORK: "the kernel's work on what a cache holds, divided by the threads",
            _LIMIT: "a number of milliseconds that was set",
            **CONFIGURATIONS,
        },
        measures=measures,
        ratios=ratios,
        details={"work": says},
        tables=tables,
    )


def _measure(case: Case, rounds: int) -> tuple[Measure, str]:
    """Milliseconds of a kernel and its bounds, and what bounds it."""
    runs = {_OURS: case.run, _PLAIN: case.plain}
    # Two of a kind are two bounds.
    moves = {f"move {i}": each.run for i, each in enumerate(case.moves)}
    work = {f"work {i}": each.run for i, each in enumerate(case.work)}
    runs |= moves | work
    calls = {name: _calls(each) for name, each in runs.items()}
    found = alternate(
        {name: partial(_milliseconds, each, calls[name]) for name, each in runs.items()},
        rounds,
        lambda number, latest: None,
    )
    spread = thread_count()
    moved = [sum(found[name][at] for name in moves) for at in range(rounds)]
    worked = [
        sum(each.share * found[name][at] for name, each in zip(work, case.work, strict=True))
        / spread
        for at in range(rounds)
    ]
    values = {
        _OURS: found[_OURS],
        _PLAIN: [case.plain_share * value for value in found[_PLAIN]],
        _ATTAINABLE: [max(pair) for pair in zip(moved, worked, strict=True)],
        _MOVED: moved,
        _WORK: worked,
    }
    is_work = statistics.median(worked) > statistics.median(moved)
    says = dict.fromkeys(each.says for each in (case.work if is_work else case.moves))
    return Measure("ms", values), " + ".join(says)


def _calls(run: Callable[[], object]) -> int:
    """How many calls make a turn; compiles it first."""
    run()
    start = time.perf_counter()
    run()
    return max(1, int(_TURN / (time.perf_counter() - start)))


def _milliseconds(run: Callable[[], object], calls: int, number: int) -> float:
    if calls > 1:  # What ran before left the caches to itself.
        run()
    start = time.perf_counter()
    for _ in range(calls):
        run()
    return 1e3 * (time.perf_counter() - start) / calls


def _ratios(name: str, label: str, size: str) -> list[Ratio]:
    ratios = [Ratio(f"{label}: attainable / time", label, _ATTAINABLE, _OURS, at_least=REACHED)]
    if name in _FASTER:
        ratios.append(Ratio(f"{label}: torch / ours", label, _PLAIN, _OURS, at_least=FASTER))
    if name == "pq_logits" and size == "large":
        ratios.append(Ratio(f"{label}: time / {PQ_SCAN_MS:.0f} ms", label, _OURS, _LIMIT,
                            at_most=1.0))  # fmt: skip
    return ratios


def _with_limit(measure: Measure, limit: float) -> Measure:
    rounds = len(measure.values[_OURS])
    return Measure(measure.unit, {**measure.values, _LIMIT: [limit] * rounds})


def _said(sizes: Sizes) -> str:
    return (
        f"{sizes.rows} KV heads, {sizes.group} query heads each, head dimension {sizes.dim}, "
        f"{sizes.tokens:,} tokens, {sizes.picked:,} attended to"
    )


def _line(measure: Measure) -> str:
    medians = {name: statistics.median(values) for name, values in measure.values.items()}
    reached = medians[_ATTAINABLE] / medians[_OURS]
    return f"{medians[_OURS]:.3f} ms, {reached:.0%} of attainable"


def _table(
    title: str,
    labels: Mapping[str, str],
    measures: Mapping[str, Measure],
    says: Mapping[str, str],
) -> Table:
    table = Table("kernel", title=title)
    for heading in ("ms", "torch, ms", "torch / ours", "attainable, ms", "reached"):
        table.add_column(heading, justify="right")
    table.add_column("bounded by")
    for name, label in labels.items():
        values = measures[label].values
        ours, plain, attainable = (
            statistics.median(values[key]) for key in (_OURS, _PLAIN, _ATTAINABLE)
        )
        numbers = f"{ours:.3f}", f"{plain:.3f}", f"{plain / ours:.1f}", f"{attainable:.3f}"
        table.add_row(name, *numbers, f"{attainable / ours:.0%}", says[label])
    return table
