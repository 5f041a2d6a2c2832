"""Fetching from disk, level by level: time per layer of the four ways, and of warm-up (K19 to K23).

Every level decodes the same steps over the same long context, one level after the other, each in
tiers of its own that begin without a page in memory. The window of two budgets and a quarter of
the keys and values in DRAM are all that a level has; what the system's page cache adds is counted
by the system itself.
"""

from __future__ import annotations

import resource
import tempfile
import time
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from tierstore.adapters.attention import SparseAttention
from tierstore.adapters.attention.sync import mapped
from tierstore.adapters.capture import capture
from tierstore.adapters.models import DEMO_MODEL, load_model
from tierstore.adapters.presets import PRESETS
from tierstore.benchmarks.findings import Findings
from tierstore.benchmarks.language import real_text
from tierstore.benchmarks.machine import Machine, file_system_of
from tierstore.benchmarks.resampled import MEASURED, ResampledText, reloads, resampled_blocks
from tierstore.benchmarks.rounds import Measure, Ratio, Say
from tierstore.sizes import format_size
from tierstore.traces.capture import Capture

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierstore.policies.profile import Amounts

BUDGET = 2_048
"""Tokens that a step selects of each KV head: the paper's number."""

DRAM_SHARE = 1 / 4
TABLE_BYTES = 128
"""Of directory and policies for each block; DRAM has them beside its share."""

CAPTURED, STEPS, PROBE = 7_000, 96, 16
"""Tokens and steps of the captured text; steps of a probe run that level (d) is divided by."""

_WIDTH, _HIDDEN = 576, 1_536


class Rung(NamedTuple):
    """A level, None for no disk at all, and where the prompt's blocks start."""

    level: str | None
    ranking: str = "none"


RUNGS = {
    "a": Rung("a"),
    "b": Rung("b"),
    "c": Rung("c"),
    "d": Rung("d"),
    "d, warm-up": Rung("d", "head"),
}
_IN_MEMORY = {"memory": Rung(None, "head")}
_ABOUT = {
    "a": "whole layers through a memory map",
    "b": "blocks in extents of 4 KiB past the page cache, merged, many at once",
    "c": "blocks through mapped pages, all asked for as soon as they are known; DRAM is page cache",
    "d": "as (c), but 3/4 of DRAM are slots, shared out between heads by their stalls in a probe",
    "d, warm-up": "as (d), and the blocks that the prompt's end attends to start in fast and DRAM",
    "memory": "without a disk: all of them in DRAM",
}
_RATIOS = (
    *(
        Ratio(f"fetch time, {above} / {below}", "fetch", above, below, at_least=1.0)
        for above, below in zip(RUNGS, list(RUNGS)[1:], strict=False)
    ),
    Ratio("fetch time, a / (d, warm-up)", "fetch", "a", "d, warm-up", at_least=100.0),
    Ratio("layer's speed, (d, warm-up) / memory", "layer", "memory", "d, warm-up", at_least=0.75),
    Ratio("attention's speed, (d, warm-up) / memory", "step", "memory", "d, warm-up"),
)


@dataclass
class Climb:
    """What one level did, step by step."""

    fetch_ms: list[float] = field(default_factory=list)
    """For each layer, the mean of a step."""
    step_ms: list[float] = field(default_factory=list)
    layer_ms: list[float] = field(default_factory=list)
    disk_mb: list[float] = field(default_factory=list)
    faults: list[float] = field(default_factory=list)
    facts: dict[str, object] = field(default_factory=dict)


def run(
    say: Say,
    *,
    tokens: int = 32_768,
    layers: int = 8,
    repeat: int = 96,
    captures: str | None = None,
    disk: str | None = None,
) -> Findings:
    """Measure so many layers of SmolLM2-135M-Instruct for `repeat` steps, or of captures of it.

    The first capture is decoded; all are compared with what was measured of whole documents.
    """
    seen = [_captured(say)] if captures is None else _loaded(captures)
    return measure(
        say, seen, tokens=tokens, layers=layers, repeat=repeat, disk=disk or tempfile.gettempdir()
    )


def _captured(say: Say) -> Capture:
    say(f"{DEMO_MODEL} reads {CAPTURED:,} tokens")
    loaded = load_model(DEMO_MODEL)
    steps = STEPS + PROBE
    text = real_text(loaded.tokenizer, CAPTURED + steps)
    return capture(loaded.model, text, steps, name=loaded.name, document="pydoc topics")


def _loaded(captures: str) -> list[Capture]:
    return [Capture.load(Path(name)) for name in captures.split(",")]


def measure(
    say: Say, captures: Sequence[Capture], *, tokens: int, layers: int, repeat: int, disk: str
) -> Findings:
    """Climb the ladder over the first capture, drawn out to `tokens`."""
    seen = captures[0]
    chosen = np.linspace(0, len(seen.keys) - 1, layers).round().astype(int).tolist()
    text = ResampledText(seen, tokens, chosen)
    repeat = min(repeat, text.steps - PROBE)
    say("comparing reloads with those of the captured text")
    notes = _reload_notes(captures, tokens, chosen)
    stalls = _probe(say, text, disk)
    climbs = {}
    for name, rung in (RUNGS | _IN_MEMORY).items():
        with closing(_engine(text, rung, disk, stalls if rung.level == "d" else None)) as engine:
            _fill(engine, text)
            climbs[name] = _climb(engine, text, range(repeat))
        say(f"{name}: fetching took {np.median(climbs[name].fetch_ms):.3f} ms for a layer")
    return Findings(
        benchmark="ladder",
        machine=Machine.here(),
        baseline="a",
        settings={
            "model": seen.facts["model"],
            "dtype": str(text.geometry.dtype),
            "layers": f"{layers} of {len(seen.keys)}",
            "context tokens": text.tokens,
            "budget": f"{BUDGET} tokens",
            "keys and values": format_size(text.geometry.kv_bytes(text.tokens)),
            "DRAM": f"{DRAM_SHARE:.0%} of them, and tables",
            "steps": repeat,
            "file system": file_system_of(Path(disk)),
        },
        configurations=_ABOUT,
        measures=_measures(climbs),
        ratios=_RATIOS,
        notes=notes,
        details={"levels": {name: climb.facts for name, climb in climbs.items()}},
    )


def _measures(climbs: dict[str, Climb]) -> dict[str, Measure]:
    """By name: what each level did in each step."""
    return {
        "fetch": Measure(
            "ms for a layer, by step", {name: each.fetch_ms for name, each in climbs.items()}
        ),
        "step": Measure(
            "ms for a layer, by step", {name: each.step_ms for name, each in climbs.items()}
        ),
        "layer": Measure(
            "ms for a layer with its matrices, by step",
            {name: each.layer_ms for name, each in climbs.items()},
        ),
        "read": Measure(
            "MB from the disk for a layer, as the system counts them, by step",
            {name: each.disk_mb for name, each in climbs.items()},
        ),
        "page faults": Measure(
            "that waited for the disk, for a layer, by step",
            {name: each.faults for name, each in climbs.items()},
        ),
    }


def _reload_notes(captures: Sequence[Capture], tokens: int, layers: Sequence[int]) -> list[str]:
    """How the long context's reloads differ from the captured one's, and from those measured."""
    own: list[Amounts] = []
    long: list[Amounts] = []
    for seen in captures:
        for target, count in ((own, seen.prompt_tokens), (long, tokens)):
            found = reloads(seen, resampled_blocks(seen, count, 0), layers)
            target.append(np.array([found[budget] for budget in MEASURED]))
    drawn, as_it_was = np.mean(long, 0), np.mean(own, 0)
    measured = np.array(list(MEASURED.values()))
    rows = [
        f"budget {budget:.4g}: " + ", ".join(f"{value:.3f}" for value in values)
        for budget, values in zip(MEASURED, drawn.tolist(), strict=True)
    ]
    change, away = np.abs(drawn - as_it_was).max(), np.abs(drawn - measured).max()
    return [
        (
            f"Reloads in windows of 1, 2 and 3 budgets, true attention, over {len(captures)} "
            f"documents: {'; '.join(rows)}."
        ),
        (
            f"Largest difference to the captured text {change:.3f} (at most 0.02: "
            f"{'yes' if change <= 0.02 else 'no'}), to what was measured over all layers of three "
            f"documents {away:.3f}."
        ),
    ]


def _engine(text: ResampledText, rung: Rung, disk: str, stalls: Amounts | None) -> SparseAttention:
    preset = replace(PRESETS["kvdrive"], attends_residents=False, ranking=rung.ranking)
    kv, shape = text.geometry.kv_bytes(text.tokens), text.geometry
    blocks = text.tokens // preset.block_tokens * shape.layers * shape.kv_heads
    share = DRAM_SHARE if rung.level else 2
    return SparseAttention(
        shape,
        preset=preset,
        budget=BUDGET,
        fast=kv + (64 << 20),  # the window is what limits the slots
        dram=int(share * kv) + TABLE_BYTES * blocks,
        disk=disk if rung.level else None,
        window=2.0,
        sync=rung.level,
        stalls=stalls,
    )


def _fill(engine: SparseAttention, text: ResampledText) -> None:
    """Store the context; when this returns it is on disk, and none of its pages in memory."""
    for layer in range(text.geometry.layers):
        key, value = text.context(layer)
        engine.absorb(layer, key, value, query=text.last_queries(layer), scale=text.scale)
    engine.store.tiers[-1].sync()
    pages = mapped(engine.store)
    if pages is not None:
        pages.drop_cache()


def _probe(say: Say, text: ResampledText, disk: str) -> Amounts:
    """How often each head stalls at level (d) with DRAM shared out alike, in steps kept for it."""
    with closing(_engine(text, Rung("d"), disk, None)) as engine:
        _fill(engine, text)
        before = engine.stalls()
        _climb(engine, text, range(text.steps - PROBE, text.steps))
        stalls: Amounts = engine.stalls() - before
    say(f"probed the stalls of {stalls.size} heads: {stalls.sum():,.0f} in {PROBE} steps")
    return stalls


def _climb(engine: SparseAttention, text: ResampledText, steps: range) -> Climb:
    layers, climb, rest = text.geometry.layers, Climb(), _Rest(text.geometry.dtype)
    pages = mapped(engine.store)
    cached = 0 if pages is None else pages.cached_bytes()
    for number in steps:
        fetched, faults, read = engine.store.metrics.fetch_seconds, _faults(), _read_bytes()
        seconds, started = 0.0, time.perf_counter()
        for layer, token in enumerate(text.step(number)):
            asked = time.perf_counter()
            engine.attend(layer, token.query, token.key, token.value, scale=text.scale)
            seconds += time.perf_counter() - asked
            rest()
        climb.layer_ms.append(1e3 * (time.perf_counter() - started) / layers)
        fetched = engine.store.metrics.fetch_seconds - fetched
        climb.fetch_ms.append(1e3 * fetched / layers)
        climb.step_ms.append(1e3 * seconds / layers)
        climb.disk_mb.append((_read_bytes() - read) / 1e6 / layers)
        climb.faults.append((_faults() - faults) / layers)
    climb.facts = engine.report().to_dict() | {
        "page cache before": cached,
        "page cache after": 0 if pages is None else pages.cached_bytes(),
        "page cache at most": 0 if pages is None else pages.cache_bytes,
    }
    return climb


class _Rest:
    """The matrices of a layer of the demo model beside attention: what reads can go on behind."""

    def __init__(self, dtype: torch.dtype) -> None:
        shapes = [(_WIDTH, 3 * _WIDTH), (_WIDTH, 3 * _HIDDEN)]
        self._weights = [torch.zeros(shape, dtype=dtype) for shape in shapes]
        self._hidden = torch.zeros(1, _WIDTH, dtype=dtype)

    def __call__(self) -> None:
        for weight in self._weights:
            self._hidden @ weight


def _faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt


def _read_bytes() -> int:
    """Bytes that this process had read from disks so far; 0 where the system does not tell."""
    try:
        text = Path("/proc/self/io").read_text()
    except OSError:
        return 0
    return int(dict(line.split(": ") for line in text.splitlines())["read_bytes"])
