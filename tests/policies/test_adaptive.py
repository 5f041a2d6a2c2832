"""The adaptive policy follows whatever wins: on each of these stories another one does."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from attention_traces import with_choice

from tierstore.policies import LRFU, LRU, Adaptive, Blend, EwmaUse, Lookahead
from tierstore.policies.shadows import is_followed
from tierstore.traces.attention import AttentionTrace
from tierstore.traces.attention_replay import replay

if TYPE_CHECKING:
    from collections.abc import Callable

STEPS, SEGMENTS, BLOCKS, BUDGET, LEARNED = 500, 6, 240, 16, 200
CANDIDATES = (Blend, EwmaUse, Lookahead, LRU, LRFU)


def told(scores: np.ndarray, chosen: np.ndarray) -> AttentionTrace:
    """A trace with scores [steps, segments, blocks] and the blocks selected, whatever scores."""
    blocks = np.full((STEPS, SEGMENTS), BLOCKS, np.int32)
    empty = AttentionTrace(
        {"block_tokens": 1, "context_tokens": BLOCKS},
        blocks,
        scores.astype(np.float16),
        np.arange(BLOCKS, dtype=np.int32)[None],
        np.zeros_like(blocks),
        np.empty(0, np.int32),
    )
    return with_choice(empty, chosen.tolist())


def best_of(wishes: np.ndarray) -> np.ndarray:
    return np.argsort(-wishes, axis=2)[:, :, :BUDGET]


def drift(random: np.random.Generator, keep: float) -> np.ndarray:
    """Wishes that change slowly."""
    wish = random.normal(size=(SEGMENTS, BLOCKS))
    steps = []
    for _ in range(STEPS):
        wish = keep * wish + np.sqrt(1 - keep**2) * random.normal(size=wish.shape)
        steps.append(wish)
    return np.stack(steps)


def scores_tell_the_next_step(random: np.random.Generator) -> AttentionTrace:
    """Nothing lasts, and a score now is what is wanted next."""
    wishes = drift(random, 0.5)
    return told(np.roll(wishes, -1, axis=0) - 6, best_of(wishes))


def noise_hides_what_lasts(random: np.random.Generator) -> AttentionTrace:
    """Scores are what lasts and a noise that is new in each step; the best are selected."""
    scores = drift(random, 0.97) + 0.8 * random.normal(size=(STEPS, SEGMENTS, BLOCKS))
    return told(scores - 6, best_of(scores))


def uses_come_in_runs(random: np.random.Generator) -> AttentionTrace:
    """Scores say nothing; what was used is used again soon, or never."""
    wishes = drift(random, 0.9)
    return told(random.normal(-6, 2, wishes.shape), best_of(wishes))


def some_are_used_more(random: np.random.Generator) -> AttentionTrace:
    """Scores say nothing; each block has its own chance to be used, for ever."""
    chances = 2.2 * random.normal(size=(SEGMENTS, BLOCKS)) + random.gumbel(
        size=(STEPS, SEGMENTS, BLOCKS)
    )
    return told(random.normal(-6, 2, chances.shape), best_of(chances))


STORIES: dict[str, tuple[Callable[[np.random.Generator], AttentionTrace], str]] = {
    "scores tell the next step": (scores_tell_the_next_step, "Lookahead"),
    "noise hides what lasts": (noise_hides_what_lasts, "Blend"),
    "uses come in runs": (uses_come_in_runs, "LRU"),
    "some are used more": (some_are_used_more, "LRFU"),
}


@pytest.mark.parametrize("story", STORIES)
def test_adaptive_is_as_good_as_the_best(story: str) -> None:
    tell, winner = STORIES[story]
    trace = tell(np.random.default_rng(7))
    windows = np.full(SEGMENTS, 2 * BUDGET, np.int64)
    hits = {make.__name__: replay(trace, make(), windows).hit_ratio(LEARNED) for make in CANDIDATES}
    ranking = sorted(hits, key=lambda name: -hits[name])
    adaptive = replay(trace, Adaptive(), windows).hit_ratio(LEARNED)

    assert ranking[0] == winner
    assert hits[winner] > hits[ranking[-1]] + 0.03
    assert adaptive >= hits[winner] - 0.003


@pytest.mark.parametrize("every", [1, 2, 3, 4, 8])
def test_the_sample_is_fair_to_runs_and_to_rhythms(every: int) -> None:
    """Of blocks a stride apart, as heads and layers may use them, as many are followed."""
    handles = np.arange(50_000, 50_000 + 2**14, dtype=np.int32)
    for stride in (1, 2, 3, 4, 8, 16):
        for start in range(stride):
            chosen = is_followed(handles[start::stride], every)
            assert chosen.mean() == pytest.approx(1 / every, rel=0.06)
    runs = is_followed(handles, every).reshape(-1, 64).sum(1)
    assert (np.abs(runs - 64 / every) <= 3).all()


def test_each_segment_follows_its_own_winner() -> None:
    """Half of the segments want what scores foretell, half what was used."""
    random = np.random.default_rng(8)
    one, other = scores_tell_the_next_step(random), some_are_used_more(random)
    half = SEGMENTS // 2
    scores = np.concatenate([one.unit_scores[:, :half], other.unit_scores[:, half:]], 1)
    chosen = np.concatenate(
        [each.ids.reshape(STEPS, SEGMENTS, BUDGET)[:, part] for each, part in
         ((one, slice(half)), (other, slice(half, None)))], 1
    )  # fmt: skip
    trace = told(scores, chosen)
    windows = np.full(SEGMENTS, 2 * BUDGET, np.int64)
    fixed = [replay(trace, make(), windows).hit_ratio(LEARNED) for make in CANDIDATES]
    adaptive = replay(trace, Adaptive(), windows).hit_ratio(LEARNED)
    assert adaptive > max(fixed) + 0.01


def test_a_winner_that_no_longer_wins_is_left() -> None:
    """First what was used counts, by far; then, from the middle on, what scores foretell."""
    random = np.random.default_rng(9)
    first, then = some_are_used_more(random), scores_tell_the_next_step(random)
    middle, shape = STEPS // 2, (STEPS, SEGMENTS, BUDGET)
    scores = np.concatenate([first.unit_scores[:middle], then.unit_scores[middle:]])
    chosen = np.concatenate([first.ids.reshape(shape)[:middle], then.ids.reshape(shape)[middle:]])
    trace = told(scores, chosen)
    windows = np.full(SEGMENTS, 2 * BUDGET, np.int64)
    fading, stubborn, best = (
        replay(trace, policy, windows).hit_ratio(middle + 100)
        for policy in (Adaptive(memory=0.97), Adaptive(memory=0.9999), Lookahead())
    )
    assert fading >= best - 0.005
    assert stubborn < best - 0.02
