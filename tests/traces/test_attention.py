"""Attention traces in files, with other budgets, and replayed through policies."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from attention_traces import best, choice_of, drifting, fewest_misses, with_choice
from hypothesis import given
from hypothesis import strategies as st

from tierstore.errors import ConfigError, PolicyError, TraceError
from tierstore.layout import BlockLayout, Part
from tierstore.policies import (
    EWMA,
    LRFU,
    LRU,
    Adaptive,
    Blend,
    Clairvoyant,
    EwmaUse,
    Lookahead,
)
from tierstore.policies.knapsack import Choices
from tierstore.policies.plan import Plan
from tierstore.store import BlockStore
from tierstore.tiers import PinnedTier
from tierstore.traces.attention import AttentionTrace
from tierstore.traces.attention_replay import replay
from tierstore.traces.file import write_trace

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tierstore.interfaces import Access, EvictionPolicy, Ids, Pointers

POLICIES: dict[str, Callable[[], EvictionPolicy]] = {
    "lru": LRU, "lookahead": Lookahead, "ewma": EWMA, "use": EwmaUse, "lrfu": LRFU,
    "adaptive": Adaptive, "blend": Blend,
}  # fmt: skip
ARRAYS = ("blocks", "unit_scores", "unit_of", "counts", "ids")
seeds = st.integers(0, 2**32 - 1)


def windows(trace: AttentionTrace, blocks: int) -> np.ndarray:
    return np.full(trace.segments, blocks, np.int64)


def test_what_holds_arrays_is_compared_by_identity() -> None:
    """Comparing field by field would raise, and hashing too."""
    trace, other = drifting(1), drifting(1)
    window = np.ones((2, 3))
    pairs: list[tuple[object, object]] = [
        (trace, other),
        (replay(trace, LRU(), windows(trace, 9)), replay(trace, LRU(), windows(trace, 9))),
        (Plan(window, 6, 64), Plan(window.copy(), 6, 64)),
        (Choices(np.arange(2)[None], window[:1, :2]), Choices(np.arange(2)[None], window[:1, :2])),
    ]
    for one, equal in pairs:
        assert one != equal
        assert len({one, equal, one}) == 2


@pytest.mark.parametrize("per_unit", [1, 4])
def test_a_trace_comes_back(tmp_path: Path, per_unit: int) -> None:
    trace = drifting(1, per_unit=per_unit)
    path = tmp_path / "a.trace"
    trace.save(path)
    back = AttentionTrace.load(path)
    assert back.facts == trace.facts
    for name in ARRAYS:
        np.testing.assert_array_equal(getattr(back, name), getattr(trace, name))
        assert getattr(back, name).dtype == getattr(trace, name).dtype


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"ids": np.zeros(3, np.int32)}, "shapes that do not fit each other"),
        ({"blocks": np.zeros((20, 3), np.int32)}, "a selected block that its segment does not"),
        ({"blocks": np.full((20, 3), 41, np.int32)}, "more blocks than units are known for"),
        ({"unit_of": np.full((1, 40), 40, np.int32)}, "a unit that has no score"),
        ({"unit_of": np.zeros((2, 40), np.int32)}, "shapes that do not fit each other"),
        ({"unit_scores": np.zeros((20, 3, 40))}, r"unit_scores of shape \(20, 3, 40\), float64"),
        ({"unit_scores": np.full((20, 3, 40), np.nan, np.float16)}, "a score that is no number"),
        ({"counts": np.zeros(3, np.int32)}, r"counts of shape \(3,\), int32"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(
    tmp_path: Path, changes: dict[str, Any], found: str
) -> None:
    trace = drifting(1)
    arrays = {name: getattr(trace, name) for name in ARRAYS} | changes
    path = tmp_path / "a.trace"
    write_trace(path, "attention", trace.facts, arrays)
    with pytest.raises(TraceError, match=f"expected a trace of attention, found .*{found}"):
        AttentionTrace.load(path)


def test_a_segment_cannot_get_shorter(tmp_path: Path) -> None:
    trace = drifting(1)
    blocks = trace.blocks.copy()
    blocks[0] = 40
    replace(trace, blocks=blocks).save(tmp_path / "a.trace")
    with pytest.raises(TraceError, match="segments that get shorter"):
        AttentionTrace.load(tmp_path / "a.trace")


@pytest.mark.parametrize(
    "facts",
    [{}, {"block_tokens": 4}, {"block_tokens": 0}, {"block_tokens": True, "context_tokens": 9},
     {"block_tokens": 4, "context_tokens": 10**400}],
)  # fmt: skip
def test_facts_must_tell_what_a_budget_is_a_share_of(tmp_path: Path, facts: dict[str, int]) -> None:
    replace(drifting(1), facts=facts).save(tmp_path / "a.trace")
    with pytest.raises(TraceError, match=r"found (block|context)_tokens="):
        AttentionTrace.load(tmp_path / "a.trace")


@given(seeds, st.sampled_from([1, 3]), st.sampled_from([2, 5, 11]))
def test_another_budget_takes_the_best_blocks(seed: int, per_unit: int, blocks: int) -> None:
    trace = drifting(seed, per_unit=per_unit)
    found = choice_of(trace.with_budget(4 * blocks))
    expected = best(trace, blocks)
    assert [[sorted(ids) for ids in step] for step in found] == [
        [sorted(ids) for ids in step] for step in expected
    ]


@pytest.mark.parametrize(
    ("budget", "blocks"), [(0.1, 4), ("10%", 4), (16, 4), (17, 5), (0.001, 1), (1.0, 40)]
)
def test_a_budget_is_a_share_of_the_context_or_tokens(budget: float | str, blocks: int) -> None:
    assert drifting(1).budget_blocks(budget) == blocks


@pytest.mark.parametrize(
    "shares",
    [np.array([1, 1, np.nan]), np.array([1, 1, np.inf]), np.array([1, 1, -1.0]), np.ones(2),
     np.ones((3, 1)), np.array(["a"] * 3), [1, 1, 1], 1.0],
)  # fmt: skip
def test_shares_are_numbers_for_each_segment(shares: Any) -> None:  # noqa: ANN401
    with pytest.raises(ConfigError, match="shares: expected "):
        drifting(1).with_budget(0.1, shares)


def test_a_selection_comes_with_its_scores() -> None:
    trace = drifting(2, per_unit=3)
    for step, selection in enumerate(trace.selections()):
        everything = selection.everything
        assert everything is not None
        for row in range(trace.segments):
            for at in range(selection.row_ptr[row], selection.row_ptr[row + 1]):
                unit = trace.unit_of[row, selection.ids[at]]
                assert selection.scores[at] == trace.unit_scores[step, row, unit]
        assert everything.segments.tolist() == [0, 1, 2]
        np.testing.assert_array_equal(everything.unit_scores, trace.unit_scores[step])


@given(seeds, st.sampled_from([1, 3]))
def test_a_block_of_no_unit_is_not_selected(seed: int, per_unit: int) -> None:
    """Most of them have none, so that a budget may want more than there are."""
    trace = drifting(seed, per_unit=per_unit)
    is_known = np.random.default_rng(seed).random(trace.unit_of.shape) < 0.2
    unit_of = np.where(is_known, trace.unit_of, -1).astype(np.int32)
    trace = replace(trace, unit_of=unit_of).with_budget(40)
    for step, segments in enumerate(choice_of(trace)):
        for segment, ids in enumerate(segments):
            table = unit_of[segment % len(unit_of), : trace.blocks[step, segment]]
            assert len(set(ids)) == len(ids) == min(10, np.count_nonzero(table >= 0))
            assert (table[ids] >= 0).all()
    assert sum(len(s.ids) for s in trace.selections()) == len(trace.ids)


def test_a_selected_block_of_no_unit_has_the_least_score() -> None:
    trace = replace(drifting(2), unit_of=np.full((1, 40), -1, np.int32))
    for selection in trace.selections():
        assert (selection.scores == -np.inf).all()


@pytest.mark.parametrize("name", POLICIES)
def test_a_replay_fetches_what_a_block_store_would(name: str) -> None:
    """Layer by layer or all at once, with bytes or without: the same blocks are missed."""
    trace = drifting(5, segments=4)
    found = replay(trace, POLICIES[name](), windows(trace, 9))
    assert found.fetched.sum(1).tolist() == _misses_of_a_store(trace, POLICIES[name]())
    np.testing.assert_array_equal(found.selected, trace.counts)


@pytest.mark.parametrize(
    ("policy", "plain"),
    [(Lookahead, LRU), (EWMA, LRU), (EwmaUse, LRFU), (Blend, lambda: LRFU(0.9)), (Adaptive, LRFU)],
)
def test_where_an_index_scores_only_what_it_selects_uses_decide(
    policy: Callable[[], EvictionPolicy], plain: Callable[[], EvictionPolicy]
) -> None:
    trace = drifting(4, steps=100, segments=6, blocks=120, budget=12)
    selections = [replace(each, everything=None) for each in trace.selections()]
    hits, least = (
        replay(trace, make(), windows(trace, 24), selections).hit_ratio(16)
        for make in (policy, plain)
    )
    assert hits >= least - 0.002


def _misses_of_a_store(trace: AttentionTrace, policy: EvictionPolicy) -> list[int]:
    layout = BlockLayout((Part("k", (4, 8), torch.float32),))
    tiers = [PinnedTier(layout, "4MiB", name=name) for name in ("fast", "dram")]
    store = BlockStore(layout, tiers, [policy])
    segments = store.open(trace.segments)
    store.resize(0, 9 * trace.segments)
    store.resize(1, 40 * trace.segments)
    store.set_quota(segments, windows(trace, 9))
    misses = []
    for step, selection in enumerate(trace.selections()):
        before = store.metrics.tiers[1].hits
        for row, segment in enumerate(segments.tolist()):
            own = segments[row : row + 1]
            more = int(trace.blocks[step, row] - store.space.blocks[segment])
            blocks = np.zeros((1, more, layout.block_bytes), np.uint8)
            store.append(own, blocks, home=np.full((1, more), 1, np.uint8))
            mine = slice(selection.row_ptr[row], selection.row_ptr[row + 1])
            everything = selection.everything
            assert everything is not None
            part = replace(
                selection,
                row_ptr=np.array([0, mine.stop - mine.start]),
                ids=selection.ids[mine],
                scores=selection.scores[mine],
                everything=replace(
                    everything, unit_scores=everything.unit_scores[row : row + 1], segments=own
                ),
            )
            for _ in store.visit(part, own):
                pass
        misses.append(store.metrics.tiers[1].hits - before)
    store.close()
    return misses


@given(seeds)
def test_no_choice_of_victims_fetches_less_than_the_clairvoyant(seed: int) -> None:
    random = np.random.default_rng(seed)
    trace = drifting(seed, steps=9, segments=2, blocks=7, budget=2)
    choice = [
        [random.choice(have, 2, replace=False).tolist() for have in blocks]
        for blocks in trace.blocks.tolist()
    ]
    trace = with_choice(trace, choice)
    found = replay(trace, Clairvoyant.of(list(trace.selections())), windows(trace, 4))
    for segment, misses in enumerate(found.fetched.sum(0).tolist()):
        requests = [frozenset(step[segment]) for step in choice]
        assert misses == fewest_misses(requests, 4)


def test_a_policy_is_told_how_much_it_may_hold() -> None:
    told: list[tuple[list[int], list[int]]] = []

    class Listener(LRU):
        def on_capacity(self, domains: Ids, blocks: Pointers) -> None:
            told.append((domains.tolist(), blocks.tolist()))

    replay(drifting(3), Listener(), np.array([5, 9, 20]))
    assert told == [([0, 1, 2], [5, 9, 20])]


def test_an_exception_of_a_replayed_policy_is_its_own_fault() -> None:
    class Wrong(LRU):
        def on_access(self, access: Access) -> None:
            raise ZeroDivisionError("no blocks")

    with pytest.raises(PolicyError, match=r"^Wrong\.on_access raised ZeroDivisionError"):
        replay(drifting(3), Wrong(), windows(drifting(3), 9))


def test_each_window_has_its_own_size() -> None:
    trace = drifting(3)
    one = replay(trace, LRU(), np.array([5, 9, 20]))
    for segment, size in enumerate((5, 9, 20)):
        alike = replay(trace, LRU(), windows(trace, size))
        np.testing.assert_array_equal(one.fetched[:, segment], alike.fetched[:, segment])
    assert one.fetched.sum(0).argmax() == 0


def test_the_hit_ratio_is_of_the_steps_that_count() -> None:
    trace = drifting(3)
    found = replay(trace, LRU(), windows(trace, 9))
    assert found.hit_ratio() == 1 - found.fetched.sum() / found.selected.sum()
    assert found.hit_ratio(10) == 1 - found.fetched[10:].sum() / found.selected[10:].sum()
    assert found.hit_ratio(20) == 1.0


@pytest.mark.parametrize("blocks", [10**9, 2**62])
def test_a_window_for_more_blocks_than_there_are_holds_all(blocks: int) -> None:
    """Memory of a policy is by the size of windows: such a one took all of it, or hung."""
    trace = drifting(3)
    for make in POLICIES.values():
        found = replay(trace, make(), windows(trace, blocks))
        expected = replay(trace, make(), windows(trace, 40))
        np.testing.assert_array_equal(found.fetched, expected.fetched)


@pytest.mark.parametrize("sizes", [[9, 9, 9], np.full(3, 8.5), np.array(["9"] * 3), 9])
def test_windows_are_whole_numbers(sizes: Any) -> None:  # noqa: ANN401
    with pytest.raises(ConfigError, match="expected one for each of 3 segments"):
        replay(drifting(3), LRU(), sizes)


def test_only_policies_of_stores_are_replayed() -> None:
    wrong: Any = 5
    with pytest.raises(ConfigError, match="policy=5: expected an EvictionPolicy"):
        replay(drifting(3), wrong, windows(drifting(3), 9))


@pytest.mark.parametrize("sizes", [[4, 9, 9], [9, 9]])
def test_a_window_must_hold_a_selection(sizes: list[int]) -> None:
    trace = drifting(3)
    with pytest.raises(ConfigError, match="of at least the 5 blocks that a step selects"):
        replay(trace, LRU(), np.array(sizes))
