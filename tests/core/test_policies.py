"""The shipped policies pass the public suite; each has a few cases of its own."""

from __future__ import annotations

import re
import tracemalloc
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tierstore.directory import HandleSpace
from tierstore.errors import ConfigError
from tierstore.interfaces import Access, BlockScores, Demand
from tierstore.memory import unlimited
from tierstore.policies import (
    ARC,
    CLOCK,
    EWMA,
    FIFO,
    GDSF,
    LFU,
    LFUDA,
    LIRS,
    LRFU,
    LRU,
    MRU,
    S3FIFO,
    SIEVE,
    SLRU,
    Adaptive,
    Belady,
    Blend,
    EwmaUse,
    Lookahead,
    QueueLRU,
    QueuePolicy,
    Random,
    TwoQueue,
    WorkloadAware,
    WTinyLFU,
)
from tierstore.policies.history import ScoreHistory
from tierstore.testing import PolicyTests, QueuePolicyTests, ReplayTests
from tierstore.testing.policies import Fact, History
from tierstore.testing.policy_cache import PolicyCache
from tierstore.testing.policy_traces import skewed

if TYPE_CHECKING:
    from collections.abc import Callable


class TestLRU(PolicyTests):
    is_stack = True

    def make_policy(self) -> LRU:
        return LRU()


class TestLookahead(PolicyTests):
    is_stack = True

    def make_policy(self) -> Lookahead:
        return Lookahead()


class TestLookaheadWithAPool(PolicyTests):
    def make_policy(self) -> Lookahead:
        return Lookahead(pool=4)


class TestRandom(PolicyTests):
    def make_policy(self) -> Random:
        return Random(seed=3)


class TestEWMA(PolicyTests):
    is_stack = True

    def make_policy(self) -> EWMA:
        return EWMA()


class TestLRFU(PolicyTests):
    is_stack = True

    def make_policy(self) -> LRFU:
        return LRFU()


class TestEwmaUse(PolicyTests):
    is_stack = True

    def make_policy(self) -> EwmaUse:
        return EwmaUse()


class TestBlend(PolicyTests):
    is_stack = True
    sees_handles = True

    def make_policy(self) -> Blend:
        return Blend()


class TestAdaptive(PolicyTests):
    sees_handles = True

    def make_policy(self) -> Adaptive:
        return Adaptive(every=2)


class TestFIFO(QueuePolicyTests):
    def make_policy(self) -> FIFO:
        return FIFO()


class TestQueueLRU(QueuePolicyTests):
    is_stack = True

    def make_policy(self) -> QueueLRU:
        return QueueLRU()


class TestMRU(QueuePolicyTests):
    is_stack = True

    def make_policy(self) -> MRU:
        return MRU()


class TestCLOCK(QueuePolicyTests):
    def make_policy(self) -> CLOCK:
        return CLOCK()


class TestLFU(QueuePolicyTests):
    def make_policy(self) -> LFU:
        return LFU()


class TestLFUDA(QueuePolicyTests):
    def make_policy(self) -> LFUDA:
        return LFUDA()


class TestGDSF(QueuePolicyTests):
    def make_policy(self) -> GDSF:
        return GDSF()


class TestSLRU(QueuePolicyTests):
    def make_policy(self) -> SLRU:
        return SLRU()


class TestTwoQueue(QueuePolicyTests):
    def make_policy(self) -> TwoQueue:
        return TwoQueue()


class TestARC(QueuePolicyTests):
    def make_policy(self) -> ARC:
        return ARC()


class TestLIRS(QueuePolicyTests):
    def make_policy(self) -> LIRS:
        return LIRS()


class TestSIEVE(QueuePolicyTests):
    def make_policy(self) -> SIEVE:
        return SIEVE()


class TestS3FIFO(QueuePolicyTests):
    def make_policy(self) -> S3FIFO:
        return S3FIFO()


class TestWTinyLFU(QueuePolicyTests):
    def make_policy(self) -> WTinyLFU:
        return WTinyLFU()


class TestWorkloadAware(QueuePolicyTests):
    def make_policy(self) -> WorkloadAware:
        return WorkloadAware()


class TestCLOCKWithManyBits(QueuePolicyTests):
    def make_policy(self) -> CLOCK:
        return CLOCK(bits=3)


class TestS3FIFOOfThePaper(QueuePolicyTests):
    def make_policy(self) -> S3FIFO:
        return S3FIFO(promote_at=2)


class TestWTinyLFUWithAWideWindow(QueuePolicyTests):
    def make_policy(self) -> WTinyLFU:
        return WTinyLFU(window=0.5)


class TestBelady(ReplayTests):
    always_admits = False

    def make_policy(self) -> Belady:
        return Belady()


class TestBeladyThatAdmitsAll(ReplayTests):
    def make_policy(self) -> Belady:
        return Belady(bypass=False)


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


def test_a_mean_of_scores_outlives_a_bad_moment() -> None:
    """Lookahead would evict block 0, which matters but for this step."""
    history = History(EWMA(alpha=0.3))
    for step, score in enumerate([-1.0, -1.0, -1.0, -6.0]):
        access(history, step, [2], scores_of(history, {0: [score, -4.0, -1.0]}))
    assert leaving(history, [0, 1], 1) == [1]


def test_a_mean_begins_with_the_first_score() -> None:
    history = History(EWMA(alpha=0.3))
    access(history, 1, [], scores_of(history, {0: [-5.0]}))
    access(history, 2, [], scores_of(history, {0: [-3.0, -4.0]}))
    assert leaving(history, [0, 1], 1) == [0]
    assert leaving(history, [0, 1, 9], 1) == [9]


def test_uses_fade() -> None:
    """Block 0 was used three times long ago, block 1 twice just now."""
    history = History(LRFU(decay=0.8))
    for step, chosen in enumerate([[0], [0], [0], *[[5]] * 8, [1], [1]]):
        access(history, step, chosen)
    assert leaving(history, [0, 1], 1) == [0]
    history = History(LRFU(decay=1.0))
    for step, chosen in enumerate([[0], [0], [0], *[[5]] * 8, [1], [1]]):
        access(history, step, chosen)
    assert leaving(history, [0, 1], 1) == [1]


def test_a_score_of_nothing_spoils_no_mean() -> None:
    """Indexes give -inf to units that stand for no token."""
    for policy in (EWMA(), EwmaUse(), Blend()):
        history = History(policy)
        nothing = scores_of(history, {0: [-np.inf, -1.0]})
        history.last = Access(
            np.array([0, 1]), history.handles(0)[:1], np.full(1, -np.inf, np.float32), 1, nothing
        )
        history.policy.on_access(history.last)
        for step in range(2, 40):
            access(history, step, [1], scores_of(history, {0: [-1.0, -9.0]}))
        ranks = leaving(history, [0, 1, 7], 1)
        assert ranks == [7]


@pytest.mark.parametrize("alpha", [0.0, -0.1, 1.1])
def test_a_weight_that_is_none_is_refused(alpha: float) -> None:
    with pytest.raises(ConfigError, match=rf"alpha={alpha}: expected a weight in \(0, 1\]"):
        EWMA(alpha)


@pytest.mark.parametrize("decay", [-0.1, 1.1])
def test_a_decay_that_is_none_is_refused(decay: float) -> None:
    with pytest.raises(ConfigError, match=rf"decay={decay}: expected a factor in \[0, 1\]"):
        LRFU(decay)


def test_a_blend_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"share=1.0, weight=0.15: expected a part in \(0, 1\)"):
        Blend(share=1.0)
    with pytest.raises(ConfigError, match="weight=-1: expected a part"):
        Blend(weight=-1)
    with pytest.raises(ConfigError, match="lean"):
        Blend(lean=1.5)
    with pytest.raises(ConfigError, match="alpha"):
        Blend(slow=(0.1, 0.0))


def test_a_choice_between_no_or_too_many_candidates_is_refused() -> None:
    for candidates in ((), (LRU,) * 9):
        with pytest.raises(ConfigError, match=f"{len(candidates)} candidates: expected 1 to 8"):
            Adaptive(candidates)
    with pytest.raises(ConfigError, match=r"memory=1, .*: expected at least 1 and 1"):
        Adaptive(memory=1)


@pytest.mark.parametrize(
    ("policy", "trace", "capacity"),
    [(ARC, skewed(579), 5), (WTinyLFU, skewed(38, 250), 6)],
    ids=["ARC", "W-TinyLFU"],
)
def test_a_store_that_misses_what_its_policy_never_knew_decides_as_a_replay_does(
    policy: type[QueuePolicy], trace: list[int], capacity: int
) -> None:
    """The policy hears of the miss only when the block is in, after the eviction.

    (a) ARC went on as after its last miss, which had been a ghost's. (b) W-TinyLFU halved its
    counts after the eviction, where a replay did so before.
    """
    replayed = policy()
    replayed.start(12, capacity)
    expected = replayed.request(np.array(trace, np.int32)).tolist()
    assert PolicyCache(policy(), 12, capacity).run(trace).hits == expected


@pytest.mark.parametrize("tables", [1, 16])
def test_scores_of_many_rows_are_gathered_in_little_memory(tables: int) -> None:
    """A few rows at a time, for the work space is no part of the limit."""
    rows, blocks = 16, 20_000
    space, past = HandleSpace(unlimited()), ScoreHistory([0.5], -9.0, np.inf)
    past.bind(space)
    segments = space.open(rows)
    handles = space.extend(segments, blocks)
    random = np.random.default_rng(5)
    units = random.integers(0, 50, (tables, blocks)).astype(np.int32)
    scores = random.normal(size=(rows, 50)).astype(np.float32)
    shift = random.normal(size=rows).astype(np.float32)
    none = np.empty(0, np.int32)
    step = Access(
        np.zeros(rows + 1, np.int64), none, none.astype(np.float32), 1,
        BlockScores(scores, units, segments),
    )  # fmt: skip
    past.update(step, shift)
    expected = (scores - shift[:, None])[np.arange(rows)[:, None], units]
    np.testing.assert_array_equal(past.mean(0, handles.ravel()), expected.ravel())

    fresh = ScoreHistory([0.5], -9.0, np.inf)
    fresh.bind(space)
    tracemalloc.start()
    fresh.update(step, shift)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4 * rows * blocks / 3


def test_a_search_that_was_interrupted_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By Ctrl-C, say, or for lack of memory."""
    asked, other = (PolicyCache(CLOCK(), 12, 6) for _ in range(2))
    for cache in (asked, other):
        cache.run(skewed(3, 60))
    search = CLOCK._search

    def interrupted(*demand: Any) -> None:  # noqa: ANN401 (whatever it takes)
        search(*demand)
        raise KeyboardInterrupt

    monkeypatch.setattr(CLOCK, "_search", interrupted)
    with pytest.raises(KeyboardInterrupt):
        asked.victims(3)
    monkeypatch.undo()
    assert asked.run(skewed(4, 60)) == other.run(skewed(4, 60))


def test_what_a_policy_knows_of_handles_is_charged() -> None:
    """Also the nodes that a search saves."""
    space = HandleSpace(unlimited())
    policy = S3FIFO()
    policy.bind(space)
    segments = space.open(1)
    handles = space.extend(segments, 5000)[0]
    before = space.memory.by_purpose()["policy"]
    history = Access(np.zeros(1, np.int64), handles[:0], np.zeros(0, np.float32), 1)
    able = np.ones(5000, np.bool_)
    policy.victims(Demand(segments, np.array([0, 5000]), handles, able, np.array([9]), history))
    assert space.memory.by_purpose()["policy"] == before
    uncharged = [value for value in vars(policy).values() if isinstance(value, np.ndarray)]
    assert sum(array.nbytes for array in uncharged) < 1000


def test_requests_that_the_arrays_do_not_have_are_refused() -> None:
    """Compiled code would read and write beside them."""
    policy = CLOCK()
    with pytest.raises(ConfigError, match=r"^CLOCK: request before start: call start first$"):
        policy.request(np.zeros(1, np.int32))
    policy.start(5, 3)
    for keys, named in (([0, 5], "0 to 5"), ([-1, 2], "-1 to 2")):
        with pytest.raises(ConfigError, match=f"^keys from {named}: expected 0 to 4, as start"):
            policy.request(np.array(keys, np.int32))
    assert policy.request(np.array([], np.int32)).tolist() == []
    assert policy.request(np.array([4, 4], np.int32)).tolist() == [False, True]
    for sizes, costs in ((np.ones(4, np.int64), None), (None, np.ones(6))):
        with pytest.raises(ConfigError, match=r"^(4 sizes|6 costs) for 5 keys: expected one"):
            GDSF().start(5, 3, sizes, costs)


WRONG_NUMBERS = (0, -1, np.nan, np.inf, -np.inf, "1", None, True, 10**400, 1j, np.array([1, 1]))
"""What no parameter of a policy is; some of them are arrays, which have no one truth."""


@pytest.mark.parametrize("wrong", WRONG_NUMBERS)
@pytest.mark.parametrize(
    ("make", "names"),
    [
        (CLOCK, ["bits"]),
        (S3FIFO, ["small", "ghosts", "promote_at"]),
        (TwoQueue, ["small", "ghosts"]),
        (LIRS, ["queue", "ghosts"]),
        (SLRU, ["protected"]),
        (WTinyLFU, ["window", "protected"]),
        (WorkloadAware, ["decay"]),
        (EWMA, ["alpha"]),
        (Blend, ["fast", "slow", "share"]),
        (Lookahead, ["pool"]),
        (Adaptive, ["window", "every"]),
    ],
)
def test_what_is_no_parameter_is_refused(
    make: Callable[..., object], names: list[str], wrong: object
) -> None:
    for name in names:
        if not (name == "pool" and wrong is None):
            with pytest.raises(ConfigError, match="expected "):
                make(**{name: wrong})


@pytest.mark.parametrize("wrong", [each for each in WRONG_NUMBERS if each is not WRONG_NUMBERS[0]])
@pytest.mark.parametrize(
    ("make", "name"),
    [(EwmaUse, "decay"), (LRFU, "decay"), (Blend, "decay"), (Blend, "weight"), (Random, "seed"),
     (Adaptive, "memory"), (Adaptive, "lead")],
)  # fmt: skip
def test_what_is_no_parameter_and_not_zero_is_refused(
    make: Callable[..., object], name: str, wrong: object
) -> None:
    with pytest.raises(ConfigError, match="expected "):
        make(**{name: wrong})


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (CLOCK, {"bits": 1.5}), (S3FIFO, {"promote_at": 1.5}), (Lookahead, {"pool": 1.5}),
        (Random, {"seed": 1.5}), (Adaptive, {"every": 1.5}), (Adaptive, {"every": 2**32}),
        (Adaptive, {"window": 1e300}), (Adaptive, {"lead": 1e300}), (Blend, {"weight": 1e300}),
        (Adaptive, {"candidates": None}), (Adaptive, {"candidates": [LRU()]}),
        (Adaptive, {"candidates": [CLOCK]}), (Belady, {"bypass": "no"}),
        (Belady, {"bypass": np.nan}),
    ],
)  # fmt: skip
def test_a_parameter_has_its_type_and_bounds(
    make: Callable[..., object], options: dict[str, object]
) -> None:
    with pytest.raises(ConfigError, match="expected "):
        make(**options)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"keys": -1}, "keys=-1"),
        ({"keys": 2**31}, "keys="),
        ({"keys": 8.0}, "keys=8.0"),
        ({"capacity": 0}, "capacity=0"),
        ({"capacity": 2.7}, "capacity=2.7"),
        ({"capacity": np.nan}, "capacity=nan"),
        ({"capacity": "3"}, "capacity='3'"),
        ({"capacity": None}, "capacity=None"),
        ({"capacity": True}, "capacity=True"),
        ({"capacity": 2**59 + 1}, "capacity="),
        ({"capacity": 2**64}, "capacity="),
        ({"size": np.zeros(8, np.int64)}, "sizes"),
        ({"size": np.array([1, -9, 2, 1, 1, 1, 1, 1])}, "sizes"),
        ({"size": np.full(8, np.nan)}, "sizes"),
        ({"size": np.full(8, 2**60)}, "sizes"),
        ({"size": [1] * 8}, "sizes"),
        ({"size": np.ones((8, 1), np.int64)}, "sizes"),
        ({"cost": np.full(8, np.nan)}, "costs"),
        ({"cost": np.full(8, -np.inf)}, "costs"),
        ({"cost": np.zeros(8)}, "costs"),
        ({"cost": ["a"] * 8}, "costs"),
        ({"category": [0, 1]}, "categories"),
        ({"category": np.zeros(9)}, "categories"),
        ({"category": np.full(9, -5, np.int32)}, "categories"),
    ],
)
def test_a_replay_that_would_count_wrong_does_not_start(
    options: dict[str, Any], named: str
) -> None:
    policy = GDSF()
    with pytest.raises(ConfigError, match=f"^{re.escape(named)}.*expected"):
        policy.start(**{"keys": 8, "capacity": 3, **options})
    policy.start(8, 3)


@pytest.mark.parametrize(
    "wrong", [[1, 2], np.full(2, np.nan), np.ones((2, 1), np.int64), None, np.array(["a"] * 2)]
)
def test_keys_and_futures_are_whole_numbers(wrong: Any) -> None:  # noqa: ANN401
    """A future of NaN was no future: the search for victims had no end."""
    policy = Belady()
    policy.start(8, 3)
    with pytest.raises(ConfigError, match=r"^future: expected an array \[n\] of whole numbers"):
        policy.expect(wrong)
    with pytest.raises(ConfigError, match=r"^keys: expected an array \[n\] of whole numbers"):
        policy.request(wrong)


@pytest.mark.parametrize("ghosts", [0.1, 8.0])
@pytest.mark.parametrize("make", [S3FIFO, TwoQueue, LIRS])
def test_the_largest_capacity_is_counted_right(make: Callable[..., Any], ghosts: float) -> None:
    """Eight times as much wrapped round to less than nothing, which no ghost could fit: no end."""
    policy = make(ghosts=ghosts)
    policy.start(7, 2**59, np.full(7, 2**59, np.int64))
    keys = np.tile(np.arange(7, dtype=np.int32), 3)
    assert policy.request(keys).sum() == 0
    larger = make(ghosts=ghosts)
    larger.start(7, 2**59, np.full(7, 2**56, np.int64))
    assert larger.request(keys).sum() == 14


def test_belady_is_asked_for_no_future_that_it_was_not_told() -> None:
    policy = Belady()
    policy.start(5, 3)
    refusal = "^Belady knows the future of {} requests, {} were made: tell it more with expect$"
    with pytest.raises(ConfigError, match=refusal.format(0, 1)):
        policy.request(np.zeros(1, np.int32))
    policy.expect(np.array([2, 9, 9]))
    assert policy.request(np.array([0, 1], np.int32)).tolist() == [False, False]
    with pytest.raises(ConfigError, match=refusal.format(3, 4)):
        policy.request(np.array([0, 1], np.int32))
    assert policy.request(np.array([0], np.int32)).tolist() == [True]


def test_w_tinylfu_counts_what_stays_out() -> None:
    """A store with hysteresis does not fetch all that misses, however often it is selected."""
    cache = PolicyCache(WTinyLFU(), 12, 3)
    assert cache.run([*[0, 1, 2] * 4, 7, 8]).evicted[-1] == 7
    for step in range(20, 25):
        again = Access(np.array([0, 1]), cache.handles([7]), np.zeros(1, np.float32), step)
        cache.policy.on_access(again)
    cache.run([7, 9])
    assert 7 in cache.residents


@pytest.mark.parametrize("policy", [ARC, S3FIFO, GDSF, WTinyLFU, LIRS, SIEVE])
def test_the_numbers_of_a_domain_that_ended_are_those_of_a_new_one(
    policy: type[QueuePolicy],
) -> None:
    old, new = (PolicyCache(policy(), 12, 5) for _ in range(2))
    old.run(skewed(7, 300))
    old.start_over()
    found, expected = (vars(cache.policy)["_head"][0].tolist() for cache in (old, new))
    assert found == expected


def test_a_segment_follows_no_leader_of_one_that_had_its_number() -> None:
    history = History(Adaptive(every=1))
    for seed in range(9):
        history.access(np.random.default_rng(seed))
    shadows = vars(history.policy)["_shadows"]
    one, others = history.segments[:1], history.segments[1:]
    before = shadows.misses(others)
    history.policy.on_remove(history.handles(int(one[0])))
    history.policy.on_close(one, one)
    assert not shadows.misses(one).any()
    assert before.any()
    assert (shadows.misses(others) == before).all()
