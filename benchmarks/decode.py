"""Decoding and prefill of the demo model in several caches, paired with transformers' own.

All are filled with the same text and then fed its continuation, some tokens in each round, so that
within a round all have the same past.
"""

from __future__ import annotations

import statistics
import tempfile
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tierstore.adapters.models import DEMO_MODEL, LoadedModel, load_model
from tierstore.benchmarks.caches import CACHES, FLOOR_TOKENS, tier_options
from tierstore.benchmarks.findings import Findings
from tierstore.benchmarks.language import check_window, kv_bytes, real_text
from tierstore.benchmarks.machine import Machine, file_system_of
from tierstore.benchmarks.rounds import Measure, Ratio, Say, alternate, listed
from tierstore.benchmarks.steps import STEPS, Steps, step_measures
from tierstore.benchmarks.subject import Subject
from tierstore.sizes import format_size

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_PREFILL_ROUNDS = 5
_PREFILLED = ("dynamic", "kvdrive", "half")

_RATIOS = (
    Ratio("decode speed, kvdrive / DynamicCache", "decode", "dynamic", "kvdrive", at_least=3.0),
    Ratio("decode speed, half / DynamicCache", "decode", "dynamic", "half", at_least=2.0),
    Ratio("decode speed, demo / DynamicCache", "decode", "dynamic", "demo"),
    Ratio("decode speed, quarter / window", "decode", "window", "quarter", at_least=0.75),
    Ratio("mean decode speed, quarter / window", "decode mean", "window", "quarter"),
    Ratio("decode speed, window / kvdrive", "decode", "kvdrive", "window"),
    Ratio("decode speed, kvdrive / full", "decode", "full", "kvdrive", at_least=1.15, stretch=1.25),
    Ratio("mean decode speed, kvdrive / DynamicCache", "decode mean", "dynamic", "kvdrive"),
    Ratio("mean decode speed, half / DynamicCache", "decode mean", "dynamic", "half"),
    Ratio("mean decode speed, kvdrive / full", "decode mean", "full", "kvdrive"),
    Ratio("decode speed, full / DynamicCache", "decode", "dynamic", "full"),
    Ratio("cap: decode speed, floor / DynamicCache", "decode", "dynamic", "floor"),
    Ratio("cap: decode speed, floor / full", "decode", "full", "floor"),
    Ratio("prefill time, kvdrive / DynamicCache", "prefill", "kvdrive", "dynamic", at_most=1.1),
    Ratio("prefill time, half / DynamicCache", "prefill", "half", "dynamic", at_most=1.1),
)


def run(
    say: Say, *, repeat: int = 7, tokens: int = 7_000, disk: str | Path | None = None
) -> Findings:
    """Measure SmolLM2-135M-Instruct."""
    say(f"loading {DEMO_MODEL}")
    loaded = load_model(DEMO_MODEL)
    return measure(say, loaded, repeat=repeat, tokens=tokens, disk=disk or tempfile.gettempdir())


def measure(
    say: Say, loaded: LoadedModel, *, repeat: int, tokens: int, disk: str | Path
) -> Findings:
    """Measure a model at `tokens` of context, with the disk tier in the directory `disk`."""
    machine, kv = Machine.here(), kv_bytes(loaded.model, tokens)
    needed = tokens + STEPS * (1 + repeat)
    check_window(loaded.model, needed)
    text = real_text(loaded.tokenizer, needed)
    with ExitStack() as stack:
        subjects = {
            name: stack.enter_context(closing(Subject(loaded.model, tiers)))
            for name, tiers in tier_options(kv, loaded.model.dtype.itemsize, disk).items()
        }
        steps = _decode(say, subjects, text, tokens, repeat)
        reports = {name: subject.report() for name, subject in subjects.items()}
        seconds = alternate(
            {name: partial(_prefill, subjects[name], text[:tokens]) for name in _PREFILLED},
            min(repeat, _PREFILL_ROUNDS),
            lambda number, latest: say(f"prefill round {number}: {listed(latest)} s"),
            warm_up=0,
        )
    measures = step_measures(steps, "decode", "ms/token") | {"prefill": Measure("s", seconds)}
    return Findings(
        benchmark="decode",
        machine=machine,
        baseline="dynamic",
        settings={
            "model": loaded.name,
            "dtype": str(loaded.model.dtype),
            "context tokens": tokens,
            "keys and values": format_size(kv),
            "steps in a round": STEPS,
            "file system of the disk tier": file_system_of(Path(disk)),
        },
        configurations=CACHES,
        measures=measures,
        ratios=_RATIOS,
        notes=[_cap(measures["decode"])],
        details={"tiers": {name: report for name, report in reports.items() if report}},
    )


def _decode(
    say: Say, subjects: Mapping[str, Subject], text: Sequence[int], tokens: int, rounds: int
) -> dict[str, list[Steps]]:
    """Fill every subject; then each decodes on in every round, and the floor starts anew."""
    for name, subject in subjects.items():
        if name != "floor":
            say(f"first prefill, {name}: {subject.prefill(text[:tokens]):.2f} s")

    def decode(name: str, number: int) -> Steps:
        if name == "floor":
            subjects[name].prefill(text[:FLOOR_TOKENS])
        start = tokens + STEPS * number
        return subjects[name].decode(text[start : start + STEPS])

    def after_round(number: int, latest: Mapping[str, Steps]) -> None:
        medians = {name: steps.median_ms for name, steps in latest.items()}
        say(f"decode round {number} of {rounds}: {listed(medians)} ms/token")

    return alternate({name: partial(decode, name) for name in subjects}, rounds, after_round)


def _prefill(subject: Subject, text: Sequence[int], number: int) -> float:
    return subject.prefill(text)


def _cap(decode: Measure) -> str:
    floor, own = (statistics.median(decode.values[name]) for name in ("floor", "dynamic"))
    return (
        f"Cap: at {FLOOR_TOKENS} tokens of context a token takes {floor:.1f} ms, which is the part "
        f"that is not attention, and at the full context with DynamicCache {own:.1f} ms. However "
        f"sparse, attention alone can make decoding {own / floor:.2f} times as fast, not more."
    )
