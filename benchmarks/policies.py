"""Eviction policies on recorded attention: hit ratios, the share of the gap to Belady, and cost."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tierstore.benchmarks.findings import Findings
from tierstore.benchmarks.machine import Machine
from tierstore.benchmarks.policy_cost import COSTS, cost_ratios, costs
from tierstore.benchmarks.rounds import Measure, Ratio
from tierstore.errors import ConfigError
from tierstore.policies import Clairvoyant
from tierstore.policies.attention import ATTENTION_POLICIES, Place
from tierstore.traces.attention import AttentionTrace
from tierstore.traces.attention_replay import Replay, replay

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tierstore.benchmarks.rounds import Say
    from tierstore.interfaces import EvictionPolicy

BUDGETS = (1 / 64, 1 / 32, 1 / 16)
WINDOWS = (1.5, 2.0, 3.0)
FIRST_STEP = 16
"""Steps before are not counted: windows begin empty."""

BASELINE, CEILING, DEFAULT = "lru", "belady", "blend"


CONFIGURATIONS = {
    "random": "any block: the floor",
    "lru": "last used longest ago; among equals, the lowest score",
    "lrfu": "uses that fade by 5 % a step",
    "lookahead-pool": "outside the 2K best scores, the one last used longest ago (K8 with a pool)",
    "lookahead": "lowest score of the step (K8, all scores)",
    "ewma": "lowest mean of log mass, alpha 0.3",
    "ewma-use": "mean margin over the cut, alpha 0.3, and log of uses that fade by 5 %",
    "blend": "two means of log mass, alpha 0.6 and 0.1, and a little of log of uses: the default",
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
    paths = sorted(Path(traces).glob("*.trace"))
    if not paths:
        raise ConfigError(
            f"traces={traces!r}: no *.trace in that directory; make some with tierstore trace "
            "record"
        )
    hits, facts = hit_ratios(say, paths)
    speed = costs(say, repeat)
    gaps = {f"gap closed: {case}": _gaps(values) for case, values in hits.items()}
    measures = {f"hits: {case}": Measure("share", values) for case, values in hits.items()}
    return Findings(
        benchmark="policies",
        machine=Machine.here(),
        baseline=BASELINE,
        settings={"traces": ", ".join(path.stem for path in paths), "from step": FIRST_STEP},
        configurations=CONFIGURATIONS | COSTS,
        measures=measures | gaps | speed,
        ratios=[*_targets(hits), *cost_ratios()],
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
        whole = AttentionTrace.load(path)
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
        sizes = np.full(trace.segments, math.ceil(window * blocks), np.int64)
        play: Callable[[EvictionPolicy], Replay] = partial(
            replay, trace, windows=sizes, selections=selections
        )
        place = Place(window, blocks)
        made = {name: make(place) for name, make in ATTENTION_POLICIES.items()}
        made[CEILING] = Clairvoyant.of(selections)
        found[window] = {name: play(policy).hit_ratio(FIRST_STEP) for name, policy in made.items()}
    return found


def _gaps(hits: Mapping[str, Sequence[float]]) -> Measure:
    """(policy - LRU) / (Belady - LRU) for each trace; the baseline would be 0 everywhere."""
    low, high = (np.array(hits[name]) for name in (BASELINE, CEILING))
    values = {name: ((np.array(each) - low) / (high - low)).tolist() for name, each in hits.items()}
    return Measure("share of Belady's gain over LRU", values)


def _targets(hits: Mapping[Case, Mapping[str, Sequence[float]]]) -> list[Ratio]:
    """What the shares at two budgets should be; Belady's is 1, so a quotient by it is a share."""
    ratios = []
    for case in hits:
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
            gap = mean[CEILING] - mean[BASELINE]
            gains = ", ".join(
                f"{name} {100 * (value - mean[BASELINE]):+.2f} points "
                f"({100 * (value - mean[BASELINE]) / gap:.0f} % of the gap)"
                for name, value in mean.items()
                if name not in (BASELINE, CEILING)
            )
            notes.append(
                f"{scores}, x{window:g}, mean of traces and budgets: LRU {mean[BASELINE]:.3f}, "
                f"Belady {mean[CEILING]:.3f}; {gains}"
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
