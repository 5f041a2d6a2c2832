"""Small attention traces, and what plain Python makes of them."""

from __future__ import annotations

from itertools import combinations

import numpy as np

from tierstore.traces.attention import AttentionTrace

Choice = list[list[list[int]]]
"""Blocks selected in each step and segment, in the order of the trace."""


def drifting(
    seed: int, *, steps: int = 20, segments: int = 3, blocks: int = 40, budget: int = 5,
    per_unit: int = 1,
) -> AttentionTrace:  # fmt: skip
    """Scores that change slowly, segments that grow, and the best blocks selected."""
    random = np.random.default_rng(seed)
    units = -(-blocks // per_unit)
    have = np.minimum(blocks, blocks // 2 + np.arange(steps)[:, None] * 2 + np.arange(segments))
    have = have.astype(np.int32)
    shared = per_unit == 1
    unit_of = np.arange(blocks, dtype=np.int32)[None]
    if not shared:
        rows = [np.sort(random.integers(0, units, blocks)) for _ in range(segments)]
        unit_of = np.stack(rows).astype(np.int32)
    scores = random.normal(-6, 2, (segments, units))
    steps_of_scores = []
    for _ in range(steps):
        scores = 0.9 * scores + 0.1 * -6 + random.normal(0, 0.8, scores.shape)
        steps_of_scores.append(scores.astype(np.float16))
    trace = AttentionTrace(
        facts={"block_tokens": 4, "context_tokens": 4 * blocks},
        blocks=have,
        unit_scores=np.stack(steps_of_scores),
        unit_of=unit_of,
        counts=np.zeros_like(have),
        ids=np.empty(0, np.int32),
    )
    return with_choice(trace, best(trace, budget))


def best(trace: AttentionTrace, budget: int) -> Choice:
    """Best blocks of each step and segment: those of better units first, then lower numbers."""
    tables = trace.unit_of.tolist() * (trace.segments if len(trace.unit_of) == 1 else 1)
    return [
        [
            _best(count, table, of_units)[:budget]
            for count, table, of_units in zip(have, tables, scores, strict=True)
        ]
        for have, scores in zip(trace.blocks.tolist(), trace.unit_scores.tolist(), strict=True)
    ]


def _best(count: int, table: list[int], scores: list[float]) -> list[int]:
    return sorted(range(count), key=lambda block: (-scores[table[block]], table[block], block))


def with_choice(trace: AttentionTrace, choice: Choice) -> AttentionTrace:
    """The trace with other blocks selected."""
    counts = np.array([[len(ids) for ids in step] for step in choice], np.int32)
    ids = np.array([i for step in choice for segment in step for i in segment], np.int32)
    return AttentionTrace(trace.facts, trace.blocks, trace.unit_scores, trace.unit_of, counts, ids)


def choice_of(trace: AttentionTrace) -> Choice:
    """What the trace says was selected."""
    ids = trace.ids.tolist()
    return [[[ids.pop(0) for _ in range(n)] for n in step] for step in trace.counts.tolist()]


def fewest_misses(requests: list[frozenset[int]], capacity: int) -> int:
    """Of one segment, over every choice of what leaves: all of a request must come in."""
    states = {frozenset[int](): 0}
    for request in requests:
        after: dict[frozenset[int], int] = {}
        for held, misses in states.items():
            total = misses + len(request - held)
            for kept in _subsets(held - request, capacity - len(request)):
                state = request | kept
                after[state] = min(total, after.get(state, total))
        states = after
    return min(states.values())


def _subsets(blocks: frozenset[int], most: int) -> list[frozenset[int]]:

    size = min(most, len(blocks))
    return [frozenset(chosen) for chosen in combinations(sorted(blocks), size)]
