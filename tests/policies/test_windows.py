"""The reuse profile against plain Python, and what is made of it."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstore.directory import HandleSpace
from tierstore.interfaces import Access, EvictionPolicy
from tierstore.memory import unlimited
from tierstore.policies import CLOCK, LRU, S3FIFO
from tierstore.policies.knapsack import exact, greedy
from tierstore.policies.profile import ReuseProfile
from tierstore.policies.windows import BUDGETS, WINDOWS, allocate_budgets, allocate_windows
from tierstore.testing import PolicyTests
from tierstore.testing.policy_cache import PolicyCache
from tierstore.testing.policy_traces import KEYS, Requests, capacities, requests

if TYPE_CHECKING:
    from collections.abc import Sequence

BLOCKS, COUNT = 60, 6


class TestReuseProfile(PolicyTests):
    """Around another policy, it is one."""

    def make_policy(self) -> ReuseProfile:
        return ReuseProfile(LRU())


class TestReuseProfileOfAQueue(PolicyTests):
    """A queue policy hears of more than accesses."""

    def make_policy(self) -> ReuseProfile:
        return ReuseProfile(CLOCK())

    @given(requests, capacities)
    def test_it_decides_as_the_policy_alone(self, trace: Requests, capacity: int) -> None:
        for alone in (CLOCK, S3FIFO):
            wrapped = PolicyCache(ReuseProfile(alone()), KEYS, capacity)
            assert wrapped.run(trace) == PolicyCache(alone(), KEYS, capacity).run(trace)

    def test_every_event_reaches_the_policy(self) -> None:
        """Also one that this test does not know."""
        events = [name for name in vars(EvictionPolicy) if not name.startswith("_")]
        assert set(events) <= set(vars(ReuseProfile))


class Profiled:
    """A profile of a few segments that select any blocks."""

    def __init__(self, segments: int, warm_up: int) -> None:
        self.profile = ReuseProfile(LRU(), warm_up)
        self.space = HandleSpace(unlimited())
        self.profile.bind(self.space)
        self.segments = self.space.open(segments)
        self.handles = self.space.extend(self.segments, BLOCKS)
        self.step_number = 0

    def step(self, chosen: Sequence[Sequence[int]], first: int = 0) -> None:
        """Rows of segments from `first` on select these blocks."""
        rows = [self.handles[first + i][list(blocks)] for i, blocks in enumerate(chosen)]
        handles = np.concatenate(rows).astype(np.int32)
        row_ptr = np.cumsum([0, *map(len, chosen)])
        self.step_number += 1
        scores = np.zeros(len(handles), np.float32)
        self.profile.on_access(Access(row_ptr, handles, scores, self.step_number))


def walks(seed: int, segments: int, steps: int) -> list[list[list[int]]]:
    """Each segment selects blocks that change slowly, at a pace of its own."""
    random = np.random.default_rng(seed)
    scores = random.standard_normal((segments, BLOCKS))
    pace = np.linspace(0.05, 0.6, segments)[:, None]
    story = []
    for _ in range(steps):
        scores = (1 - pace) * scores + np.sqrt(pace) * random.standard_normal(scores.shape)
        story.append([np.argsort(-row)[:COUNT].tolist() for row in scores])
    return story


def denning(story: list[list[int]], warm_up: int, sizes: Sequence[float]) -> list[float]:
    """Misses by definition: look `t` steps back for every t, and count."""
    steps = range(warm_up, len(story))

    def misses(memory: int) -> float:
        fresh = 0
        for step in steps:
            known = set(itertools.chain(*story[max(0, step - memory) : step]))
            fresh += len(set(story[step]) - known)
        return fresh / len(steps)

    curve, held = [], 0.0
    for memory in range(255):
        curve.append((held, misses(memory)))
        held += curve[-1][1]
    xs, ys = zip(*curve, strict=True)
    return [float(np.interp(size, xs, ys)) for size in sizes]


def lru_misses(story: list[list[int]], size: int, warm_up: int) -> float:
    """Misses in a step of a cache of `size` blocks that keeps what was selected last."""
    order: list[int] = []
    missed = 0
    for number, chosen in enumerate(story):
        if number >= warm_up:
            missed += len(set(chosen) - set(order[:size]))
        order = chosen + [block for block in order if block not in chosen]
    return missed / (len(story) - warm_up)


@given(seed=st.integers(0, 2**32 - 1), steps=st.integers(20, 60), warm_up=st.integers(0, 12))
def test_a_profile_counts_what_plain_python_counts(seed: int, steps: int, warm_up: int) -> None:
    """Interleaved as layers are, and with other steps in between."""
    story = walks(seed, 4, steps)
    profiled = Profiled(4, warm_up)
    for rows in story:
        profiled.step(rows[:2])
        profiled.step(rows[2:], first=2)
    sizes = COUNT * WINDOWS
    found = profiled.profile.misses(profiled.segments, np.tile(sizes, (4, 1)))
    for segment in range(4):
        expected = denning([rows[segment] for rows in story], warm_up, sizes.tolist())
        np.testing.assert_allclose(found[segment], expected, atol=1e-9)
    assert profiled.profile.steps == steps - warm_up


def test_on_a_stationary_stream_a_profile_tells_what_lru_misses() -> None:
    story = walks(3, 3, 600)
    profiled = Profiled(3, 100)
    for rows in story:
        profiled.step(rows)
    found = profiled.profile.misses(profiled.segments, np.tile(COUNT * WINDOWS, (3, 1)))
    for segment, of_segment in enumerate(found):
        rows = [step[segment] for step in story]
        for window in (1.0, 1.5, 2.0, 3.0, 4.0):
            true = lru_misses(rows, round(COUNT * window), 100)
            assert of_segment[window == WINDOWS][0] == pytest.approx(true, rel=0.08)


def test_a_restart_forgets_and_a_stop_counts_nothing() -> None:
    profiled = Profiled(1, 2)
    for _ in range(5):
        profiled.step([[0, 1, 2]])
    assert profiled.profile.steps == 3
    profiled.profile.restart()
    assert profiled.profile.steps == 0
    assert (profiled.profile.misses(profiled.segments, np.array([[3.0]])) == 0).all()
    profiled.profile.is_counting = False
    profiled.step([[0]])
    assert profiled.profile.steps == 0


def test_blocks_that_come_later_and_rows_without_blocks_are_counted_rightly() -> None:
    profiled = Profiled(1, 0)
    for _ in range(3):
        profiled.step([[0, 1]])
    later = profiled.space.open(3)
    profiled.handles = np.concatenate([profiled.handles, profiled.space.extend(later, BLOCKS)])
    for _ in range(3):
        profiled.step([[0, 1], [], [4], []])
    # Half of the steps of segment 2 did not happen: its misses are spread over all six.
    found = profiled.profile.misses(np.array([0, later[1]], np.int32), np.array([[2.0], [1.0]]))
    np.testing.assert_allclose(found[:, 0], [2 / 6, 1 / 6])


def test_a_segment_with_the_number_of_another_begins_anew() -> None:
    """It warms up, and the ages of the other one are not its own."""
    profiled = Profiled(2, 2)
    for blocks in ([0, 1], [2, 3], [0, 4], [2, 5]):
        profiled.step([blocks, blocks])
    gone = profiled.segments[:1]
    profiled.profile.on_remove(profiled.space.all_handles(int(gone[0])))
    profiled.space.close(int(gone[0]))
    profiled.profile.on_close(gone, gone)
    assert profiled.space.open(1).tolist() == gone.tolist()
    sizes = np.array([[2.0, 4.0]])
    assert profiled.profile.misses(gone, sizes).tolist() == [[0, 0]]
    assert (profiled.profile.misses(profiled.segments[1:], sizes) > 0).all()
    profiled.handles[0] = profiled.space.extend(gone, BLOCKS)[0]
    profiled.step([[0, 1]])
    profiled.step([[2, 3]])
    assert profiled.profile.misses(gone, sizes).tolist() == [[0, 0]]


def test_windows_go_where_they_save_most_at_the_same_total() -> None:
    flat, steep = np.full(len(WINDOWS), 5.0), 20 / WINDOWS
    windows = allocate_windows(np.stack([flat, steep, steep]), 2.0)
    assert windows[0] == 1.0
    assert windows.sum() <= 6.0
    assert windows[1:].tolist() == [2.5, 2.5]
    even = allocate_windows(np.stack([steep] * 3), 2.0)
    assert even.tolist() == [2.0] * 3


@given(seed=st.integers(0, 2**32 - 1), window=st.floats(1, 8), heads=st.integers(1, 20))
def test_windows_hold_their_budgets_and_keep_to_the_total(
    seed: int, window: float, heads: int
) -> None:
    random = np.random.default_rng(seed)
    budgets = BUDGETS[random.integers(0, len(BUDGETS), heads)]
    budgets = np.maximum(np.floor(budgets / max(1.0, budgets.mean()) * 64) / 64, 1 / 64)
    misses = -np.sort(-random.random((heads, len(WINDOWS))), axis=1)
    windows = allocate_windows(misses, max(window, 1.0), budgets)
    assert (windows >= budgets).all()
    assert windows.sum() <= max(window, 1.0) * heads + 1e-6
    best = allocate_windows(misses, max(window, 1.0), budgets, solve=exact)
    assert best.sum() <= max(window, 1.0) * heads + 1e-6


def test_budgets_go_where_mass_is_missed() -> None:
    spread = np.exp(-0.2 * BUDGETS)
    narrow = np.exp(-9.0 * BUDGETS)
    budgets = allocate_budgets(np.stack([spread, narrow]))
    assert budgets[0] > 1 > budgets[1]
    assert budgets.mean() <= 1


@pytest.mark.parametrize(
    ("window", "budgets", "smallest"),
    [
        (0.5, [0.5, 0.5], [0.5, 0.5]),
        (1.0, [1 / 3, 5 / 3], [342 / 1024, 1707 / 1024]),
        (1 / 64, [1 / 64, 1 / 64], [1 / 64, 1 / 64]),
    ],
)
def test_where_budgets_alone_fill_the_total_each_head_gets_its_own(
    window: float, budgets: list[float], smallest: list[float]
) -> None:
    """Budgets that are no whole 1/1024 come to more than the total when rounded up."""
    misses = np.stack([5 / WINDOWS, 9 / WINDOWS])
    for solve in (greedy, exact):
        found = allocate_windows(misses, window, np.array(budgets), solve)
        assert found.tolist() == smallest
