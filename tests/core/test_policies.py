"""The shipped policies pass the public suite; each has a few cases of its own."""

from __future__ import annotations

import numpy as np
import pytest

from tierstore.errors import ConfigError
from tierstore.interfaces import Access, BlockScores
from tierstore.policies import (
    ARC,
    CLOCK,
    FIFO,
    GDSF,
    LFU,
    LFUDA,
    LIRS,
    LRU,
    MRU,
    S3FIFO,
    SIEVE,
    SLRU,
    Lookahead,
    QueueLRU,
    Random,
    TwoQueue,
    WTinyLFU,
)
from tierstore.testing import PolicyTests
from tierstore.testing.policies import Fact, History


class TestLRU(PolicyTests):
    def make_policy(self) -> LRU:
        return LRU()


class TestLookahead(PolicyTests):
    def make_policy(self) -> Lookahead:
        return Lookahead()


class TestLookaheadWithAPool(PolicyTests):
    def make_policy(self) -> Lookahead:
        return Lookahead(pool=4)


class TestRandom(PolicyTests):
    def make_policy(self) -> Random:
        return Random(seed=3)


class TestARC(PolicyTests):
    def make_policy(self) -> ARC:
        return ARC()


class TestCLOCK(PolicyTests):
    def make_policy(self) -> CLOCK:
        return CLOCK()


class TestFIFO(PolicyTests):
    def make_policy(self) -> FIFO:
        return FIFO()


class TestGDSF(PolicyTests):
    def make_policy(self) -> GDSF:
        return GDSF()


class TestLFU(PolicyTests):
    def make_policy(self) -> LFU:
        return LFU()


class TestLFUDA(PolicyTests):
    def make_policy(self) -> LFUDA:
        return LFUDA()


class TestLIRS(PolicyTests):
    def make_policy(self) -> LIRS:
        return LIRS()


class TestMRU(PolicyTests):
    def make_policy(self) -> MRU:
        return MRU()


class TestQueueLRU(PolicyTests):
    def make_policy(self) -> QueueLRU:
        return QueueLRU()


class TestS3FIFO(PolicyTests):
    def make_policy(self) -> S3FIFO:
        return S3FIFO()


class TestSIEVE(PolicyTests):
    def make_policy(self) -> SIEVE:
        return SIEVE()


class TestSLRU(PolicyTests):
    def make_policy(self) -> SLRU:
        return SLRU()


class TestTwoQueue(PolicyTests):
    def make_policy(self) -> TwoQueue:
        return TwoQueue()


class TestWTinyLFU(PolicyTests):
    def make_policy(self) -> WTinyLFU:
        return WTinyLFU()


def access(
    history: History, step: int, chosen: list[int], everything: BlockScores | None = None
) -> None:
    """Select some blocks of segment 0 in one step."""
    handles = history.handles(0)[chosen]
    scores = np.zeros(len(chosen), np.float32)
    history.last = Access(np.array([0, len(chosen)]), handles, scores, step, everything)
    history.policy.on_access(history.last)


def leaving(history: History, blocks: list[int], need: int, segment: int = 0) -> list[int]:
    """Which of the blocks of a segment must leave, as block numbers, ascending."""
    handles = history.handles(segment).tolist()
    residents = np.array([handles[block] for block in blocks], np.int32)
    victims = history.victims([Fact(segment, residents, [True] * len(blocks), need)])
    return sorted(handles.index(victim) for victim in victims)


def scores_of(history: History, scores: dict[int, list[float]]) -> BlockScores:
    """An index that gives the blocks of each segment these scores, one unit for each block."""
    width = max(map(len, scores.values()))
    units = np.arange(width, dtype=np.int32)[None]
    values = np.full((len(scores), width), -np.inf, np.float32)
    for row, of_segment in enumerate(scores.values()):
        values[row, : len(of_segment)] = of_segment
    return BlockScores(values, units, np.array(list(scores), np.int32))


def test_lru_evicts_what_was_selected_longest_ago() -> None:
    history = History(LRU())
    for step, chosen in enumerate([[0, 1, 2, 3], [2], [0, 3], [2]]):
        access(history, step, chosen)
    assert leaving(history, [0, 1, 2, 3], 1) == [1]
    assert leaving(history, [0, 1, 2, 3], 3) == [0, 1, 3]
    assert leaving(history, [0, 1, 2, 3, 9], 2) == [1, 9]


def test_lru_decides_between_equally_old_blocks_by_score() -> None:
    history = History(LRU())
    access(history, 1, [0, 1, 2], scores_of(history, {0: [-3.0, -1.0, -2.0]}))
    assert leaving(history, [0, 1, 2], 1) == [0]
    assert leaving(history, [2, 1, 0], 2) == [0, 2]


def test_lookahead_evicts_what_scores_lowest_now() -> None:
    history = History(Lookahead())
    access(history, 1, [2], scores_of(history, {0: [-1.0, -2.0, -9.0, -3.0]}))
    assert leaving(history, [0, 1, 2, 3], 1) == [2]
    assert leaving(history, [0, 1, 2, 3], 2) == [2, 3]
    assert leaving(history, [0, 1, 2, 3, 7], 1) == [7]


def test_lookahead_looks_at_the_row_of_the_segment() -> None:
    """Segments are not in the order of rows, and one has no row."""
    history = History(Lookahead())
    access(history, 1, [0], scores_of(history, {2: [-1.0, -5.0], 0: [-5.0, -1.0]}))
    assert leaving(history, [0, 1], 1, segment=2) == [1]
    assert leaving(history, [0, 1], 1, segment=0) == [0]
    assert leaving(history, [0, 1], 1, segment=1) == [0]


def test_lookahead_with_a_pool_keeps_its_best_and_is_lru_beyond() -> None:
    history = History(Lookahead(pool=2))
    scores = scores_of(history, {2: [-1.0, -1.0], 0: [-1.0, -2.0, -3.0, -4.0]})
    access(history, 1, [0, 3])
    access(history, 2, [2], scores)
    assert leaving(history, [0, 1, 2, 3], 1) == [3]
    access(history, 3, [3], scores)
    assert leaving(history, [0, 1, 2, 3], 1) == [2]
    assert leaving(history, [0, 1, 2, 3], 3) == [1, 2, 3]


def test_a_pool_ranks_the_blocks_of_its_row_and_nothing_else() -> None:
    """Tables of an index are wider than a short row: what stands beyond its blocks is no block."""
    history = History(Lookahead(pool=2))
    history.space.truncate(0, 3)
    values = np.array([[-1.0, -2.0, -3.0, 0.0, 0.0, 0.0]], np.float32)
    everything = BlockScores(values, np.arange(6, dtype=np.int32)[None], np.zeros(1, np.int32))
    access(history, 1, [0], everything)
    access(history, 2, [2], everything)
    assert leaving(history, [0, 1, 2], 1) == [2]


@pytest.mark.parametrize("pool", [0, -1])
def test_a_pool_of_no_blocks_is_refused(pool: int) -> None:
    with pytest.raises(ConfigError, match=f"pool={pool}: expected"):
        Lookahead(pool=pool)


def test_random_spreads_and_depends_on_its_seed() -> None:
    blocks = list(range(40))
    draws = []
    for seed in range(3):
        history = History(Random(seed))
        for step in range(3):
            access(history, step, [])
            draws.append(leaving(history, blocks, 4))
    assert len(set(map(tuple, draws))) == len(draws)
    assert len({block for draw in draws for block in draw}) > 15
