"""Eviction policies on recorded attention: hit ratios, the share of the gap to Belady, and cost."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tierstore.adapters.cli.trace_file import read_attention
from tierstore.benchmarks.findings import Findings
from tierstore.benchmarks.machine import Machine
from tierstore.benchmarks.policy_cost import COSTS, cost_ratios, costs
from tierstore.benchmarks.recorded import traces_in
from tierstore.benchmarks.rounds import Measure, Ratio
from tierstore.errors import ConfigError
from tierstore.policies.attention import ATTENTION_POLICIES, Place
from tierstore.policies.comparison import BASELINE, CEILING, FIRST_STEP, compare, gap_closed

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from tierstore.benchmarks.rounds import Say
    from tierstore.traces.attention import AttentionTrace

BUDGETS = (1 / 64, 1 / 32, 1 / 16)
WINDOWS = (1.5, 2.0, 3.0)
DEFAULT = "blend"

CONFIGURATIONS = {
    "random": "any block: the floor",
    "lru": "last used longest ago; among equals, the lowest score",
    "lrfu": "uses that fade by 5 % a step",
    "lookahead-pool": "outside the 2K best scores, the one last used longest ago (K8 with a pool)",
    "lookahead": "lowest score of the step (K8, all scores)",
    "ewma": "lowest mean of log mass, alpha 0.3",
    "ewma-use": "mean margin over the cut, alpha 0.3, and log of uses that fade by 5 %",
    "blend": "two means of log mass, alpha 0.6 and 0.1 up, 0.04 down, a little of the block before "
    "and of log of uses: the default",
    "adaptive": "per segment, of Blend, EwmaUse, Lookahead, LRU, LRFU the one that misses least",
    "belady": "next used farthest away: the ceiling, which knows the future",
}


class Case(NamedTuple):
    """Whose scores (a preset), budget and window."""

    scores: str
    budget: float
    window: float

    def __str__(self) -> str:
        return f"{self.scores}, budget {100 * self.budget:.4g} %, window x{self.window:g}"


def run(say: Say, *, traces: str | None = None, repeat: int = 7) -> Findings:
    """Replay every attention trace in a directory, then measure what a choice costs."""
    if traces is None:
        raise ConfigError("traces=None: expected a directory of attention traces; pass --traces")
    paths = traces_in(traces, "*.trace")
    hits, facts = hit_ratios(say, paths)
    speed = costs(say, repeat)
    gaps = {case: gap for case, values in hits.items() if (gap := _gaps(values)) is not None}
    measures = {f"hits: {case}": Measure("share", values) for case, values in hits.items()}
    return Findings(
        benchmark="policies",
        machine=Machine.here(),
        baseline=BASELINE,
        settings={"traces": ", ".join(path.stem for path in paths), "from step": FIRST_STEP},
        configurations=CONFIGURATIONS | COSTS,
        measures=measures | {f"gap closed: {case}": gap for case, gap in gaps.items()} | speed,
        ratios=[*_targets(gaps), *cost_ratios()],
        notes=_notes(hits),
        details={"traces": facts},
    )


def hit_ratios(
    say: Say, paths: Sequence[Path]
) -> tuple[dict[Case, dict[str, list[float]]], list[dict[str, object]]]:
    """By case and policy, one for each trace of that index; and the facts of the traces."""
    hits: dict[Case, dict[str, list[float]]] = {}
    facts: list[dict[str, object]] = []
    for path in paths:
        whole = read_attention(path, steps=FIRST_STEP + 1)
        facts.append(dict(whole.facts))
        scores = str(whole.facts.get("preset", "unknown"))
        for budget in BUDGETS:
            trace = whole.with_budget(budget)
            for window, ratios in _replays(trace).items():
                case = hits.setdefault(Case(scores, budget, window), {})
                for name, ratio in ratios.items():
                    case.setdefault(name, []).append(ratio)
            say(f"{path.stem}, budget {100 * budget:.4g} %: done")
    return hits, facts


def _replays(trace: AttentionTrace) -> dict[float, dict[str, float]]:
    """Hit ratios by window and policy."""
    selections = list(trace.selections())
    blocks = int(trace.counts.max())
    found: dict[float, dict[str, float]] = {}
    for window in WINDOWS:
        outcomes = compare(
            trace, selections, [*ATTENTION_POLICIES, CEILING], Place(window, blocks),
            math.ceil(window * blocks),
        )  # fmt: skip
        found[window] = {name: outcome.hit_ratio for name, outcome in outcomes.items()}
    return found


def _gaps(hits: Mapping[str, Sequence[float]]) -> Measure | None:
    """What is closed of the gap in each trace that has one; None where no trace has."""
    ends = list(zip(hits[BASELINE], hits[CEILING], strict=True))
    values = {
        name: [
            closed
            for each, (low, high) in zip(ratios, ends, strict=True)
            if (closed := gap_closed(each, low, high)) is not None
        ]
        for name, ratios in hits.items()
    }
    return Measure("share of Belady's gain over LRU", values) if values[BASELINE] else None


def _targets(cases: Iterable[Case]) -> list[Ratio]:
    """What the shares at two budgets should be; Belady's is 1, so a quotient by it is a share."""
    ratios = []
    for case in cases:
        if case.window == 2:
            exact = case.scores == "exact"
            for name, least in (
                ("lookahead", 0.22 if exact else 0.20),
                (DEFAULT, 0.33 if exact else 0.28),
            ):
                says = f"gap closed by {name}: {case}"
                ratios.append(Ratio(says, f"gap closed: {case}", name, CEILING, at_least=least))
    return ratios


def _notes(hits: Mapping[Case, Mapping[str, Sequence[float]]]) -> list[str]:
    """Means over traces and budgets, and the worst cases."""
    notes = []
    for scores in dict.fromkeys(case.scores for case in hits):
        for window in WINDOWS:
            cases = [hits[case] for case in hits if case.scores == scores and case.window == window]
            mean = {
                name: float(np.mean([case[name] for case in cases]))
                for name in (BASELINE, "lookahead", "ewma", DEFAULT, "adaptive", CEILING)
            }
            low, high = mean[BASELINE], mean[CEILING]
            gains = ", ".join(
                f"{name} {100 * (value - low):+.2f} points "
                f"({100 * (gap_closed(value, low, high) or 0):.0f} % of the gap)"
                for name, value in mean.items()
                if name not in (BASELINE, CEILING)
            )
            notes.append(
                f"{scores}, x{window:g}, mean of traces and budgets: LRU {low:.3f}, "
                f"Belady {high:.3f}; {gains}"
            )
    return [*notes, _worst(hits)]


def _worst(hits: Mapping[Case, Mapping[str, Sequence[float]]]) -> str:
    """Where the adaptive policy and the default lose most."""
    fixed = [name for name in ATTENTION_POLICIES if name != "adaptive"]
    regret = {
        case: max(float(np.mean(each[name])) for name in fixed) - float(np.mean(each["adaptive"]))
        for case, each in hits.items()
    }
    below = {
        case: float(np.mean(each[DEFAULT])) - float(np.mean(each[BASELINE]))
        for case, each in hits.items()
    }
    most, least = max(regret, key=lambda c: regret[c]), min(below, key=lambda c: below[c])
    return (
        f"Adaptive loses at most {100 * regret[most]:.2f} points to the best fixed policy ({most});"
        f" {DEFAULT} gains at least {100 * below[least]:.2f} points over LRU ({least})."
    )
