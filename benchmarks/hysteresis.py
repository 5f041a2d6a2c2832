"""Fetch hysteresis: what it saves in bytes, and what that costs in quality.

For two indexes, all with a fast tier of two budgets: fetch all and attend to what is selected;
fetch all and attend to everything in the fast tier; and the same with several differences.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean
from typing import TYPE_CHECKING

from tierstore.adapters.models import DEMO_MODEL, LoadedModel, load_model
from tierstore.adapters.presets import PRESETS, Preset
from tierstore.benchmarks.distance import distances
from tierstore.benchmarks.facts import BUDGET, Fact, answers
from tierstore.benchmarks.findings import Findings
from tierstore.benchmarks.machine import Machine
from tierstore.benchmarks.rounds import Measure, Ratio, Say
from tierstore.benchmarks.systems import System, named

if TYPE_CHECKING:
    from collections.abc import Sequence

KV_BUDGET = 1 / 32
DELTAS = (0.5, 1.0, 2.0)
STARTS = (0, 120_000, 240_000)
"""Characters of the text that the documents begin at."""

STEPS = 128
CITIES = (
    "Lima", "Cairo", "Oslo", "Accra", "Quito", "Kyoto", "Riga", "Sofia", "Hanoi", "Tunis", "Perth",
    "Bern",
)  # fmt: skip
FACTS = tuple(
    Fact(city, 20_011 + 6_427 * i, (i + 0.5) / len(CITIES)) for i, city in enumerate(CITIES)
)


def _systems() -> dict[str, System]:
    systems = {}
    for index in ("exact", "kvdrive"):
        base = replace(PRESETS["kvdrive"], index=PRESETS[index].index)

        def add(name: str, says: str, preset: Preset, index: str = index) -> None:
            named = replace(preset, name=f"{index}, {name}")
            systems[named.name] = System(f"index of {index}: {says}", named, has_window=True)

        add("selected", "fetches all, attends to what is selected",
            replace(base, attends_residents=False))  # fmt: skip
        add("residents", "fetches all, attends to everything in the fast tier", base)
        for delta in DELTAS:
            add(
                f"{delta:g} nats",
                f"fetches what is {delta:g} nats better, attends as residents",
                replace(base, hysteresis=delta),
            )
        add(
            "steered",
            "follows 64 KiB fetched in a step, attends as residents",
            replace(base, hysteresis="64KiB"),
        )
    return systems


SYSTEMS = _systems()
_NAMES = {system: named(system, KV_BUDGET) for system in SYSTEMS}


def _ratios() -> list[Ratio]:
    ratios = []
    for index in ("exact", "kvdrive"):
        of = {name: _NAMES[f"{index}, {name}"] for name in ("selected", "residents")}
        for delta in DELTAS:
            own = _NAMES[f"{index}, {delta:g} nats"]
            is_aim = delta == 1.0
            says = f"{index}, {delta:g} nats"
            ratios += [
                Ratio(f"bytes saved, {says}", "fetched", of["selected"], own,
                      at_least=3.0 if is_aim else None),
                Ratio(f"KL, {says} / selected", "KL", own, of["selected"],
                      at_most=1.2 if is_aim else None),
                Ratio(f"KL, {says} / residents", "KL", own, of["residents"]),
            ]  # fmt: skip
    return ratios


def run(say: Say, *, tokens: int = 6_000) -> Findings:
    """Measure SmolLM2-135M-Instruct."""
    say(f"loading {DEMO_MODEL}")
    return measure(say, load_model(DEMO_MODEL), tokens=tokens)


def measure(
    say: Say,
    loaded: LoadedModel,
    *,
    tokens: int,
    starts: Sequence[int] = STARTS,
    steps: int = STEPS,
    facts: Sequence[Fact] = FACTS,
) -> Findings:
    """Measure a model on a document at each of `starts`, and ask it for `facts`."""
    machine = Machine.here()
    wanted = [(system, KV_BUDGET) for system in SYSTEMS]
    runs = [
        distances(say, loaded, tokens, wanted, SYSTEMS, steps=steps, start=start)
        for start in starts
    ]
    answered = answers(say, loaded, tokens, facts, {"full": System("", "full"), **SYSTEMS})
    means = {
        unit: {name: [fmean(getattr(run, field)[name]) for run in runs] for name in _NAMES.values()}
        for unit, field in (("KL", "kl"), ("fetched", "fetched"), ("same token", "same"))
    }
    found = {name: [float(each.is_right) for each in row] for name, row in answered.items()}
    return Findings(
        benchmark="hysteresis",
        machine=machine,
        baseline=_NAMES["kvdrive, selected"],
        settings={
            "model": loaded.name,
            "dtype": str(loaded.model.dtype),
            "context tokens": tokens,
            "documents": len(starts),
            "steps of each": steps,
            "window in budgets": PRESETS["kvdrive"].window,
            "facts": len(facts),
        },
        configurations={_NAMES[name]: system.says for name, system in SYSTEMS.items()},
        measures={
            "KL": Measure("nats, KL(full || sparse), mean of a document", means["KL"]),
            "fetched": Measure("bytes in a step, mean of a document", means["fetched"]),
            "same token": Measure(
                "share of steps with full attention's likeliest token", means["same token"]
            ),
            "facts": Measure(f"1 where the number was found, at {BUDGET:.2%}", found),
        },
        ratios=_ratios(),
        details={
            "fetched in each step": [run.fetched for run in runs],
            "tiers": [run.tiers for run in runs],
        },
    )
