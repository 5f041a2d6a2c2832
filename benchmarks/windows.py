"""Windows and budgets shared out between layers and heads: bytes saved on text never seen before.

Traces of several documents are recorded, or read. For each document a plan is made from the others,
and one from its own first steps; all are replayed over its later steps, at equal memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tierstore.adapters.cli.trace_file import read_attention
from tierstore.adapters.models import DEMO_MODEL, load_model
from tierstore.adapters.presets import PRESETS
from tierstore.benchmarks.findings import Findings
from tierstore.benchmarks.language import real_text
from tierstore.benchmarks.machine import Machine
from tierstore.benchmarks.recorded import traces_in
from tierstore.benchmarks.rounds import Measure, Ratio, Say
from tierstore.errors import ConfigError
from tierstore.policies import Lookahead
from tierstore.policies.knapsack import exact, greedy
from tierstore.policies.planning import missed_mass, model_shape, reuse_misses
from tierstore.policies.run_facts import MODEL
from tierstore.policies.windows import BUDGETS, allocate_budgets, allocate_windows
from tierstore.traces.attention import AttentionTrace
from tierstore.traces.attention_replay import replay

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tierstore.policies.knapsack import Choices, Picks
    from tierstore.policies.profile import Amounts

SIZES = (1.5, 2.0, 3.0)
STARTS = (0, 120_000, 240_000)
STEPS = 192
CALIBRATION = 64
"""Steps that a plan is made anew from."""

FIRST = 96
"""Step of a document that counting begins at."""

CONFIGURATIONS = {
    "uniform": "the same window and budget for every head",
    "others": "the plan of the other documents",
    "recalibrated": f"that plan, recalibrated by the document's own first {CALIBRATION} steps",
    "hindsight": "a plan of the steps that it is tried on; of missed mass, of all steps",
    "budgets of others": "budgets, and windows for them, by the other documents",
}
_AIMS = {2.0: 0.98, 3.0: 0.95}


def run(
    say: Say, *, tokens: int = 4_096, budget: str = "3.125%", traces: str | None = None
) -> Findings:
    """Measure on ``exact-*.trace`` in the folder `traces`, or on SmolLM2-135M-Instruct."""
    loaded = _record(say, tokens) if traces is None else _load(traces)
    return measure(say, loaded, budget=budget)


def measure(
    say: Say, traces: Sequence[AttentionTrace], *, budget: str, sizes: Sequence[float] = SIZES
) -> Findings:
    """Measure on at least two traces of one model."""
    machine = Machine.here()
    curves = _Curves(traces, budget)
    missed = curves.missed()
    _check_losses("all windows", missed["uniform"])
    measures = {}
    for size in sizes:
        fetched: dict[str, list[float]] = {name: [] for name in CONFIGURATIONS}
        for number, trace in enumerate(traces):
            for name, blocks in curves.fetched(number, size).items():
                fetched[name].append(blocks)
            latest = {name: values[-1] for name, values in fetched.items()}
            _check_losses(f"x{size:g}", [latest["uniform"]])
            say(f"{trace.facts.get('document')}, x{size:g}: " + _shares(latest))
        measures[f"fetched at x{size:g}"] = Measure("blocks in a step, by document", fetched)
        losses = {
            solve.__name__: [curves.loss(number, size, solve) for number in range(len(traces))]
            for solve in (greedy, exact)
        }
        _check_losses(f"x{size:g}", losses["exact"])
        measures[f"expected at x{size:g}"] = Measure("blocks missed, by document", losses)
    measures["missed mass"] = Measure("of all attention, by document", missed)
    return Findings(
        benchmark="windows",
        machine=machine,
        baseline="uniform",
        settings={
            "model": traces[0].facts.get("model"),
            "dtype": traces[0].facts.get("dtype"),
            "documents": [trace.facts.get("document") for trace in traces],
            "context tokens": [trace.facts["context_tokens"] for trace in traces],
            "steps": [trace.steps for trace in traces],
            "counted from step": FIRST,
            "budget": budget,
            "policy": "lookahead",
        },
        configurations=CONFIGURATIONS | {
            "greedy": "the plan of each document, solved greedily",
            "exact": "the same by dynamic programming",
        },
        measures=measures,
        ratios=_ratios(sizes),
        notes=_totals(measures),
    )  # fmt: skip


class _Curves:
    """Profiles of each document, and what plans made from them fetch."""

    def __init__(self, traces: Sequence[AttentionTrace], budget: str) -> None:
        self.traces, self.budget = traces, budget
        ones = np.ones(traces[0].segments)
        self.masses = [missed_mass(trace, budget) for trace in traces]
        self.whole = [reuse_misses(trace, budget, ones) for trace in traces]
        self.early = [reuse_misses(trace, budget, ones, CALIBRATION) for trace in traces]
        self.late = [_late_misses(trace, budget) for trace in traces]

    def _others(self, profiles: Sequence[Amounts], number: int) -> Amounts:
        total: Amounts = np.sum([p for i, p in enumerate(profiles) if i != number], axis=0)
        return total

    def fetched(self, number: int, size: float) -> dict[str, float]:
        """Blocks that document `number` fetches in a step, by configuration."""
        trace, heads = self.traces[number], self.traces[0].segments
        shares = allocate_budgets(self._others(self.masses, number))
        for_shares = np.sum(
            [
                reuse_misses(each, self.budget, shares)
                for i, each in enumerate(self.traces)
                if i != number
            ],
            axis=0,
        )
        plans = {
            "uniform": np.full(heads, size),
            "others": allocate_windows(self._others(self.whole, number), size),
            "recalibrated": allocate_windows(
                self._others(self.whole, number) / (len(self.traces) - 1) + self.early[number], size
            ),
            "hindsight": allocate_windows(self.late[number], size),
        }
        found = {
            name: _fetched(trace, self.budget, windows, np.ones(heads))
            for name, windows in plans.items()
        }
        windows = allocate_windows(for_shares, size, shares)
        found["budgets of others"] = _fetched(trace, self.budget, windows, shares)
        return found

    def loss(self, number: int, size: float, solve: Callable[[Choices, int], Picks]) -> float:
        """Blocks that the plan of document `number` is expected to miss in a step."""
        profile = self.whole[number]
        windows = allocate_windows(profile, size, solve=solve)
        choices = np.rint((windows - 1) / 0.25).astype(int)
        blocks = self.traces[number].budget_blocks(self.budget)
        return float(profile[np.arange(len(choices)), choices].sum()) * blocks

    def missed(self) -> dict[str, list[float]]:
        """Attention mass missed with even budgets and with those of plans, by document."""
        even: list[float] = []
        others: list[float] = []
        hindsight: list[float] = []
        for number, profile in enumerate(self.masses):
            heads = np.arange(len(profile))
            even.append(float(profile[:, BUDGETS == 1].mean()))
            for found, by in ((others, self._others(self.masses, number)), (hindsight, profile)):
                choices = np.rint(allocate_budgets(by) / BUDGETS[0]).astype(int) - 1
                found.append(float(profile[heads, choices].mean()))
        return {"uniform": even, "budgets of others": others, "hindsight": hindsight}


def _late_misses(trace: AttentionTrace, budget: str) -> Amounts:
    """The profile of the steps that count."""
    steps = slice(FIRST - 16, None)
    ends = np.cumsum(trace.counts.sum(1))
    first = int(ends[FIRST - 17])
    late = AttentionTrace(
        trace.facts, trace.blocks[steps], trace.unit_scores[steps], trace.unit_of,
        trace.counts[steps], trace.ids[first:],
    )  # fmt: skip
    return reuse_misses(late, budget, np.ones(trace.segments))


def _fetched(trace: AttentionTrace, budget: str, windows: Amounts, shares: Amounts) -> float:
    """Blocks fetched in a step from `FIRST` on, with `windows` and `shares` in mean budgets."""
    chosen = trace.with_budget(budget, shares)
    slots = np.floor(windows * trace.budget_blocks(budget) + 1e-9).astype(np.int64)
    least = chosen.counts.max(0).astype(np.int64)
    result = replay(chosen, Lookahead(), np.maximum(slots, least))
    return float(result.fetched[FIRST:].sum() / (trace.steps - FIRST))


def _load(folder: str) -> list[AttentionTrace]:
    traces = [
        read_attention(path, needed=(*MODEL, "selectable"), steps=FIRST + 1)
        for path in traces_in(folder, "exact-*.trace", least=2)
    ]
    model_shape(traces)
    return traces


def _record(say: Say, tokens: int) -> list[AttentionTrace]:
    from tierstore.adapters.cli.recording import record_trace

    say(f"loading {DEMO_MODEL}")
    loaded = load_model(DEMO_MODEL)
    traces = []
    for start in STARTS:
        text = real_text(loaded.tokenizer, tokens + STEPS, start)
        name = f"pydoc topics from character {start:,}"
        traces.append(
            record_trace(
                loaded, text[:tokens], text[tokens:], STEPS, PRESETS["exact"], document=name
            )
        )
        say(f"recorded {name}")
    return traces


def _ratios(sizes: Sequence[float]) -> list[Ratio]:
    ratios = []
    for size in sizes:
        fetched, aim = f"fetched at x{size:g}", _AIMS.get(size)
        ratios += [
            Ratio(f"blocks at x{size:g}, {name} / uniform", fetched, name, "uniform", at_most=bound)
            for name, bound in (
                ("others", aim),
                ("recalibrated", aim),
                ("hindsight", None),
                ("budgets of others", None),
            )
        ]
        expected = f"expected at x{size:g}"
        ratios.append(
            Ratio(f"greedy / exact at x{size:g}", expected, "greedy", "exact", None, 1.005)
        )
    return ratios + [
        Ratio(f"missed mass, {name} / uniform", "missed mass", name, "uniform")
        for name in ("budgets of others", "hindsight")
    ]


def _totals(measures: Mapping[str, Measure]) -> list[str]:
    """One sentence for each window: all documents together."""
    notes = []
    for name, measure in measures.items():
        if name.startswith("fetched"):
            totals = {key: sum(values) for key, values in measure.values.items()}
            notes.append(f"All documents together, {name}, of uniform: {_shares(totals)}.")
    return notes


def _check_losses(window: str, losses: Sequence[float]) -> None:
    """ConfigError where a document loses nothing, so that there is nothing to save."""
    if not all(losses):
        raise ConfigError(
            f"windows of {window}: hold all that a document uses, so that plans have nothing to "
            "save; pass traces of longer contexts"
        )


def _shares(fetched: Mapping[str, float]) -> str:
    base = fetched["uniform"]
    return ", ".join(f"{name} {value / base:.3f}" for name, value in fetched.items())
