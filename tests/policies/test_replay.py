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
from tierstore.policies import LRU, Lookahead, Random

SEGMENTS, BLOCKS, CAPACITY, BUDGET, STEPS = 2, 90, 14, 6, 30
BLOCKS_PER_UNIT = 2

Trace = npt.NDArray[np.float32]
Victims = list[list[list[int]]]
"""Blocks that leave, of each step and segment, ascending."""


class Step(NamedTuple):
    """What one segment knows in one step: scores of its blocks, and when each was last selected."""

    scores: list[float]
    last_used: dict[int, int]


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


RULES: dict[str, tuple[Callable[[], EvictionPolicy], Rank]] = {
    "lru": (LRU, oldest_first),
    "lookahead": (Lookahead, worst_first),
    "pool of 8": (lambda: Lookahead(pool=8), outside_the_best(8)),
    "pool of 20": (lambda: Lookahead(pool=20), outside_the_best(20)),
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
    victims: Victims = []
    for number, units in enumerate(trace.tolist()):
        victims.append([])
        for segment, held in enumerate(residents):
            step = Step(
                [s for s in units[segment] for _ in range(BLOCKS_PER_UNIT)], last_used[segment]
            )
            selected = selected_by(step.scores)
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
            scores=np.zeros(SEGMENTS * BUDGET, np.float32),
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
