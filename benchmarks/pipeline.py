"""Decoding steps of a batch whose blocks lie on disk, under each schedule of the stages.

Keys and values are synthetic, at the sizes of some layers of a model, and lie in files that are
read past the page cache. All engines hold the same texts and take the same steps. A second pair
holds everything in memory, where there is nothing to overlap.
"""

from __future__ import annotations

import tempfile
import time
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from tierstore.adapters.attention import Geometry, SparseAttention
from tierstore.adapters.presets import PRESETS
from tierstore.benchmarks.findings import Findings
from tierstore.benchmarks.machine import Machine, file_system_of
from tierstore.benchmarks.rounds import Measure, Ratio, Say, alternate, listed
from tierstore.benchmarks.stage_times import StageTimes
from tierstore.benchmarks.steps import STEPS, Steps, step_measures, time_steps
from tierstore.benchmarks.synthetic import SyntheticText, Token
from tierstore.indexers import WeightedPQIndex
from tierstore.sizes import format_size
from tierstore.tiers import DeviceTier, FileTier
from tierstore.timeline import Timeline

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tierstore.interfaces import Tier
    from tierstore.layout import BlockLayout

GEOMETRY = Geometry(2, 12, 4, 64, torch.bfloat16, torch.device("cpu"))
BATCH, MICRO_BATCH = 8, 2
PRESET = replace(
    PRESETS["best"],
    name="pipeline",
    index=partial(WeightedPQIndex, training_tokens=4_096),
    budget=1 / 64,
)
"""An index that takes some time to select and little to build, and a budget at which most of a
fetch is waiting for the disk."""
_MEMORY = 2 << 30
_DRIFT = 0.98
"""Correlation of successive queries: about a tenth of what is selected has to be fetched."""

CONFIGURATIONS = {
    "sequential": "one stage after the other, for the whole batch",
    "sfc": f"select, judge and fetch overlapped, {MICRO_BATCH} sequences at a time",
    "previous-layer": "fetched while the layer before computes, by a guess that is always right",
    "previous-step": "attends to what the last query selected; others are corrected",
    "memory sequential": "all in memory, one stage after the other",
    "memory sfc": "all in memory, the default micro-batch",
}
_ON_DISK = ("sequential", "sfc", "previous-layer", "previous-step")
_RATIOS = (
    Ratio("speed, sfc / sequential", "step", "sequential", "sfc", at_least=1.25),
    Ratio("speed, previous-layer / sequential", "step", "sequential", "previous-layer"),
    Ratio("speed, previous-step / sequential", "step", "sequential", "previous-step"),
    Ratio(
        "nothing to overlap: speed, sfc / sequential",
        "step", "memory sequential", "memory sfc", at_least=0.97,
    ),
    Ratio("sfc: speed achieved / possible", "sfc", "possible", "achieved"),
    Ratio("throughput, batch of 8 / 1", "throughput", "batch 8", "batch 1", at_least=1.0),
)  # fmt: skip


def run(
    say: Say,
    *,
    repeat: int = 3,
    tokens: int = 32_768,
    layers: int = 2,
    disk: str | Path | None = None,
) -> Findings:
    """Measure so many layers, with files in the directory `disk`."""
    return measure(
        say, replace(GEOMETRY, layers=layers), repeat=repeat, tokens=tokens,
        disk=Path(disk or tempfile.gettempdir()),
    )  # fmt: skip


def measure(say: Say, geometry: Geometry, *, repeat: int, tokens: int, disk: Path) -> Findings:
    """Measure at `tokens` of context in each of 8 sequences."""
    machine = Machine.here()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=disk)))
        engines = {
            name: stack.enter_context(closing(_engine(geometry, name, folder)))
            for name in CONFIGURATIONS
        }
        texts = [SyntheticText(geometry, seed=seed, memory=_DRIFT) for seed in range(BATCH)]
        _fill(say, engines, texts, tokens)
        steps = _decode(say, engines, texts, repeat)
        times = _stage_times(engines["sequential"], texts)
        throughput = _throughput(say, engines["sfc"], texts)
        reports = {name: engine.report() for name, engine in engines.items()}
    measures = step_measures(steps, "step", f"ms in {geometry.layers} layers")
    achieved = [each.median_ms for each in steps["sfc"]]
    possible = [1e3 * times.bound * geometry.layers] * len(achieved)
    measures["sfc"] = Measure("ms", {"achieved": achieved, "possible": possible})
    measures["throughput"] = Measure("tokens/s", {k: [v] for k, v in throughput.items()})
    return Findings(
        benchmark="pipeline",
        machine=machine,
        baseline="sequential",
        settings={
            "layers": geometry.layers,
            "query heads": geometry.query_heads,
            "KV heads": geometry.kv_heads,
            "head dimension": geometry.head_dim,
            "sequences": BATCH,
            "context tokens": tokens,
            "budget": f"{PRESET.budget:.2%}",
            "keys and values": format_size(_kv_bytes(geometry, tokens)),
            "steps in a round": STEPS,
            "file system": file_system_of(disk),
            "disk": reports["sfc"].tiers[-1].medium,
        },
        configurations=CONFIGURATIONS,
        measures=measures,
        ratios=_RATIOS,
        notes=[str(times)],
        details={
            "tiers": {name: report.to_dict() for name, report in reports.items()},
            "stage seconds": times.seconds,
        },
    )


def _kv_bytes(geometry: Geometry, tokens: int) -> int:
    return BATCH * geometry.kv_bytes(tokens)


def _engine(geometry: Geometry, name: str, folder: Path) -> SparseAttention:
    schedule = name.rpartition(" ")[2]
    if name not in _ON_DISK:
        return SparseAttention(geometry, preset=PRESET, dram=2 * _MEMORY, schedule=schedule)

    def tiers(layout: BlockLayout) -> Sequence[Tier]:
        fast = DeviceTier(layout, _MEMORY, device=geometry.device)
        return [fast, FileTier(layout, folder / name)]

    size = MICRO_BATCH if schedule == "sfc" else BATCH
    return SparseAttention(
        geometry, preset=PRESET, tiers=tiers, window=PRESET.window, schedule=schedule,
        micro_batch=size,
    )  # fmt: skip


def _fill(
    say: Say,
    engines: Mapping[str, SparseAttention],
    texts: Sequence[SyntheticText],
    tokens: int,
) -> None:
    """The same keys and values for all engines, without computing attention over them."""
    layers = next(iter(engines.values())).geometry.layers
    for layer in range(layers):
        pairs = [text.context(tokens) for text in texts]
        key, value = (torch.cat(parts) for parts in zip(*pairs, strict=True))
        for engine in engines.values():
            engine.absorb(layer, key, value, scale=_scale(engine))
        say(f"stored and indexed layer {layer + 1} of {layers}")


def _step(texts: Sequence[SyntheticText]) -> list[Token]:
    """The next token of all texts in every layer."""
    each = [text.step() for text in texts]
    return [
        Token(*(torch.cat(parts) for parts in zip(*tokens, strict=True)))
        for tokens in zip(*each, strict=True)
    ]


def _decode(
    say: Say,
    engines: Mapping[str, SparseAttention],
    texts: Sequence[SyntheticText],
    rounds: int,
) -> dict[str, list[Steps]]:
    story = [[_step(texts) for _ in range(STEPS)] for _ in range(1 + rounds)]

    def decode(engine: SparseAttention, number: int) -> Steps:
        steps = time_steps(partial(_attend, engine), story[number])
        _settle(engine)
        return steps

    def after_round(number: int, latest: Mapping[str, Steps]) -> None:
        medians = {name: steps.median_ms for name, steps in latest.items()}
        say(f"round {number} of {rounds}: {listed(medians)} ms")

    runs = {name: partial(decode, engine) for name, engine in engines.items()}
    return alternate(runs, rounds, after_round)


def _settle(engine: SparseAttention) -> None:
    """What goes on in the background must not take time from the next engine."""
    _ = engine.store


def _attend(engine: SparseAttention, token: Sequence[Token]) -> None:
    for layer, (query, key, value) in enumerate(token):
        guess = token[layer + 1].query if layer + 1 < len(token) else None
        engine.attend(layer, query, key, value, scale=_scale(engine), next_query=guess)


def _stage_times(engine: SparseAttention, texts: Sequence[SyntheticText]) -> StageTimes:
    """Of some more steps of the sequential engine."""
    timeline = Timeline("sequential")
    engine.watch(timeline)
    for _ in range(STEPS // 2):
        _attend(engine, _step(texts))
    engine.watch(None)
    return StageTimes.of(timeline, BATCH // MICRO_BATCH)


def _throughput(
    say: Say, engine: SparseAttention, texts: Sequence[SyntheticText]
) -> dict[str, float]:
    """Tokens in a second for fewer and fewer sequences; those of the engine leave."""
    found = {}
    size = BATCH
    while size:
        if size < BATCH:
            engine.select_rows(range(size))
        story = [_step(texts[:size]) for _ in range(STEPS)]
        for token in story[: STEPS // 4]:
            _attend(engine, token)
        start = time.perf_counter()
        for token in story[STEPS // 4 :]:
            _attend(engine, token)
        _settle(engine)
        seconds = time.perf_counter() - start
        found[f"batch {size}"] = size * (STEPS - STEPS // 4) / seconds
        say(f"batch of {size}: {found[f'batch {size}']:.1f} tokens/s")
        size //= 2
    return dict(reversed(found.items()))


def _scale(engine: SparseAttention) -> float:
    return float(engine.geometry.head_dim**-0.5)
