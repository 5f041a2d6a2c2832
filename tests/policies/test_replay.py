"""Traces replayed through each policy, and through plain Python that says what it should do."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstore.directory import HandleSpace
from tierstore.interfaces import Access, BlockScores, Demand, EvictionPolicy
from tierstore.memory import unlimited
from tierstore.policies import EWMA, LRFU, LRU, Blend, EwmaUse, Lookahead, Random

SEGMENTS, BLOCKS, CAPACITY, BUDGET, STEPS = 2, 90, 14, 6, 30
BLOCKS_PER_UNIT = 2

Trace = npt.NDArray[np.float32]
Victims = list[list[list[int]]]
"""Blocks that leave, of each step and segment, ascending."""


class Step(NamedTuple):
    """What one segment knows in one step: scores of its blocks, and when each was last selected.

    past, choices: the scores and the selected blocks of every step so far, this one included.
    """

    scores: list[float]
    last_used: dict[int, int]
    past: list[list[float]]
    choices: list[list[int]]


Rank = Callable[[Step, int], tuple[float, ...]]
"""Blocks of lowest rank leave first."""


def oldest_first(step: Step, block: int) -> tuple[float, ...]:
    return step.last_used[block], step.scores[block]


def worst_first(step: Step, block: int) -> tuple[float, ...]:
    return step.scores[block], step.last_used[block]


def outside_the_best(pool: int) -> Rank:
    """Blocks outside the best go first, the oldest first; then the best, the worst first."""

    def rank(step: Step, block: int) -> tuple[float, ...]:
        cut = sorted(step.scores, reverse=True)[pool - 1]
        is_outside = step.scores[block] < cut
        return (0, *oldest_first(step, block)) if is_outside else (1, *worst_first(step, block)[:1])

    return rank


def mean(values: list[float], rise: float, fall: float | None = None) -> np.float32:
    """Exponentially weighted, in single precision; begins with the first value.

    fall: the weight of a value below the mean, if it is another.
    """
    total = np.float32(values[0])
    for value in values[1:]:
        way = np.float32(value) - total
        weight = np.float32(rise if way > 0 or fall is None else fall)
        total = np.float32(total + weight * way)
    return total


def uses(step: Step, block: int, decay: float) -> np.float32:
    """Selections of a block, each worth a power of its age."""
    total = np.float32(0)
    for chosen in step.choices:
        total = np.float32(total * np.float32(decay)) + np.float32(block in chosen)
    return total


def lowest_mean_first(alpha: float) -> Rank:
    def rank(step: Step, block: int) -> tuple[float, ...]:
        scores = [max(scores[block], -20.72) for scores in step.past]
        return float(mean(scores, alpha)), step.last_used[block]

    return rank


def fewest_uses_first(decay: float) -> Rank:
    return lambda step, block: (float(uses(step, block, decay)), step.last_used[block])


def lowest_margin_and_uses_first(step: Step, block: int) -> tuple[float, ...]:
    margins = []
    for scores, chosen in zip(step.past, step.choices, strict=True):
        cut = np.float32(min(scores[b] for b in chosen))
        margins.append(float(np.clip(np.float32(scores[block]) - cut, -6, 2)))
    log_uses = np.log(np.float32(uses(step, block, 0.95) + np.float32(0.05)))
    return float(mean(margins, 0.3) + log_uses), step.last_used[block]


def lowest_blend_first(step: Step, block: int) -> tuple[float, ...]:
    scores = [max(scores[block], -20.72) for scores in step.past]
    if block > 0:
        before = [max(scores[block - 1], -20.72) for scores in step.past]
        lean = np.float32(0.2)
        scores = [
            float(np.float32(own) + lean * np.maximum(np.float32(left) - np.float32(own), 0))
            for own, left in zip(scores, before, strict=True)
        ]
    fast, slow = mean(scores, 0.6), mean(scores, 0.1, 0.04)
    log_uses = np.log(np.float32(uses(step, block, 0.9) + np.float32(0.05)))
    share = np.float32(0.65)
    blended = share * fast + (1 - share) * slow + np.float32(0.15) * log_uses
    return float(blended), step.last_used[block]


RULES: dict[str, tuple[Callable[[], EvictionPolicy], Rank]] = {
    "lru": (LRU, oldest_first),
    "lookahead": (Lookahead, worst_first),
    "pool of 8": (lambda: Lookahead(pool=8), outside_the_best(8)),
    "pool of 20": (lambda: Lookahead(pool=20), outside_the_best(20)),
    "ewma": (EWMA, lowest_mean_first(0.3)),
    "ewma of the last few": (lambda: EWMA(alpha=0.8), lowest_mean_first(0.8)),
    "ewma + use": (EwmaUse, lowest_margin_and_uses_first),
    "lrfu": (LRFU, fewest_uses_first(0.95)),
    "lfu": (lambda: LRFU(decay=1.0), fewest_uses_first(1.0)),
    "blend": (Blend, lowest_blend_first),
    "pool of everything": (lambda: Lookahead(pool=BLOCKS), outside_the_best(BLOCKS)),
}


def drifting_scores(seed: int) -> Trace:
    """Log masses [steps, segments, units] that change slowly, as from token to token."""
    random = np.random.default_rng(seed)
    units = random.standard_normal((SEGMENTS, BLOCKS // BLOCKS_PER_UNIT))
    steps = []
    for _ in range(STEPS):
        units = 0.9 * units + 0.44 * random.standard_normal(units.shape)
        steps.append(units.astype(np.float32))
    return np.stack(steps)


def selected_by(scores: list[float]) -> list[int]:
    return sorted(range(BLOCKS), key=lambda block: -scores[block])[:BUDGET]


def replay_rule(trace: Trace, rank: Rank) -> Victims:
    """By lists and dictionaries."""
    residents: list[list[int]] = [[] for _ in range(SEGMENTS)]
    last_used: list[dict[int, int]] = [{} for _ in range(SEGMENTS)]
    past: list[list[list[float]]] = [[] for _ in range(SEGMENTS)]
    choices: list[list[list[int]]] = [[] for _ in range(SEGMENTS)]
    victims: Victims = []
    for number, units in enumerate(trace.tolist()):
        victims.append([])
        for segment, held in enumerate(residents):
            scores = [s for s in units[segment] for _ in range(BLOCKS_PER_UNIT)]
            step = Step(scores, last_used[segment], past[segment], choices[segment])
            selected = selected_by(step.scores)
            step.past.append(scores)
            step.choices.append(selected)
            step.last_used.update(dict.fromkeys(selected, number))
            missing = [block for block in selected if block not in held]
            able = [block for block in held if block not in selected]
            ranked = sorted(able, key=lambda block, step=step: rank(step, block))  # type: ignore[misc]
            gone = ranked[: max(0, len(held) + len(missing) - CAPACITY)]
            residents[segment] = [block for block in held if block not in gone] + missing
            victims[-1].append(sorted(gone))
    return victims


def replay_policy(trace: Trace, policy: EvictionPolicy) -> tuple[Victims, int]:
    """By the policy, with handles. Also returns the hits of all steps.

    Segments are not numbered like rows, one has no row, and the index's table is wide.
    """
    space = HandleSpace(unlimited())
    policy.bind(space)
    segments = space.open(SEGMENTS + 1)[:0:-1].copy()
    space.extend(segments, BLOCKS)
    handles = [space.all_handles(segment).tolist() for segment in segments.tolist()]
    unit_of = np.append(np.arange(BLOCKS) // BLOCKS_PER_UNIT, [0] * 9)[None].astype(np.int32)
    residents: list[list[int]] = [[] for _ in range(SEGMENTS)]
    victims: Victims = []
    hits = 0
    for number, units in enumerate(trace):
        per_block = np.repeat(units, BLOCKS_PER_UNIT, axis=1).tolist()
        selected = [
            [own[b] for b in selected_by(s)] for own, s in zip(handles, per_block, strict=True)
        ]
        access = Access(
            row_ptr=np.arange(SEGMENTS + 1) * BUDGET,
            handles=np.array(selected, np.int32).ravel(),
            scores=np.array([s[b] for s in per_block for b in selected_by(s)], np.float32),
            step=number,
            everything=BlockScores(units, unit_of, segments),
        )
        policy.on_access(access)
        missing = [[h for h in s if h not in r] for s, r in zip(selected, residents, strict=True)]
        after = [len(r) + len(m) for r, m in zip(residents, missing, strict=True)]
        flat = np.array([handle for held in residents for handle in held], np.int32)
        demand = Demand(
            domains=segments,
            row_ptr=np.cumsum([0, *map(len, residents)]),
            residents=flat,
            eligible=~np.isin(flat, access.handles),
            need=np.maximum(np.array(after) - CAPACITY, 0),
            access=access,
        )
        gone = set(policy.victims(demand).tolist())
        residents = [
            [h for h in r if h not in gone] + m for r, m in zip(residents, missing, strict=True)
        ]
        assert max(map(len, residents)) <= CAPACITY
        victims.append([[block for block, h in enumerate(own) if h in gone] for own in handles])
        hits += SEGMENTS * BUDGET - sum(map(len, missing))
    return victims, hits


@pytest.mark.parametrize("rule", RULES)
@given(st.integers(0, 2**32 - 1))
def test_policy_evicts_what_the_rule_says(rule: str, seed: int) -> None:
    make_policy, rank = RULES[rule]
    trace = drifting_scores(seed)

    found, _ = replay_policy(trace, make_policy())

    assert found == replay_rule(trace, rank)


def test_scores_that_drift_are_served_best_by_lookahead() -> None:
    """The order that the paper reports (K8), and chance as the floor."""
    traces = [drifting_scores(seed) for seed in range(20)]

    lookahead, lru, chance = (
        sum(replay_policy(trace, policy())[1] for trace in traces)
        for policy in (Lookahead, LRU, Random)
    )

    assert lookahead > lru > chance
