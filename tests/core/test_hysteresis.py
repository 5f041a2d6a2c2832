"""The fetch filter of the store against plain Python, and the controller of its difference."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import pytest
from chains import LAYOUT
from hypothesis import given, settings
from hypothesis import strategies as st

from tierstore.errors import ConfigError
from tierstore.hysteresis import MOST, Hysteresis
from tierstore.interfaces import BlockScores, Selection
from tierstore.policies import Lookahead
from tierstore.store import BlockStore
from tierstore.tiers import DeviceTier, PinnedTier

if TYPE_CHECKING:
    from tierstore.interfaces import Ids, Scores

SEGMENTS, BLOCKS = 3, 24


def filled(quota: int) -> tuple[BlockStore, Ids]:
    """A store whose top tier is empty, with `quota` slots for each segment."""
    tiers = [DeviceTier(LAYOUT, 1 << 20), PinnedTier(LAYOUT, 1 << 20)]
    store = BlockStore(LAYOUT, tiers, [Lookahead()])
    segments = store.open(SEGMENTS)
    store.resize(0, SEGMENTS * quota)
    store.set_quota(segments, np.full(SEGMENTS, quota, np.int64))
    blocks = np.arange(SEGMENTS * BLOCKS, dtype=np.uint8)
    content = np.repeat(blocks, LAYOUT.block_bytes).reshape(SEGMENTS, BLOCKS, -1)
    store.append(segments, content, home=np.full((SEGMENTS, BLOCKS), 1, np.uint8))
    return store, segments


def select(scores: Scores, segments: Ids, counts: list[int]) -> Selection:
    """The best blocks of each row."""
    best = [np.argsort(-row, kind="stable")[:n] for row, n in zip(scores, counts, strict=True)]
    ids = np.concatenate(best).astype(np.int32)
    picked = np.concatenate([row[each] for row, each in zip(scores, best, strict=True)])
    units = np.arange(BLOCKS, dtype=np.int32)[None]
    return Selection(
        np.cumsum([0, *counts]), ids, picked, BlockScores(scores, units, segments.copy())
    )


class PlainRow:
    """What one row should do: a set of residents, and the rule in plain Python."""

    def __init__(self, quota: int) -> None:
        self.quota = quota
        self.residents: set[int] = set()
        self.last_used: dict[int, int] = {}

    def step(
        self, number: int, scores: list[float], count: int, delta: float
    ) -> tuple[set[int], set[int]]:
        """Blocks that are fetched and blocks that are attended."""
        chosen = sorted(range(BLOCKS), key=lambda block: -scores[block])[:count]
        lowest = min((scores[block] for block in chosen), default=math.inf)
        is_cold = len(self.residents) < count
        fetched = {
            block
            for block in chosen
            if block not in self.residents
            and (delta == 0 or is_cold or float(np.float32(scores[block] - lowest)) >= delta)
        }
        attended = {block for block in chosen if block in self.residents} | fetched
        self.last_used |= dict.fromkeys(chosen, number)
        leaving = sorted(
            self.residents - set(chosen), key=lambda block: (scores[block], self.last_used[block])
        )
        surplus = max(0, len(self.residents) + len(fetched) - self.quota)
        self.residents = (self.residents - set(leaving[:surplus])) | fetched
        return fetched, attended


@given(
    seed=st.integers(0, 2**32 - 1),
    quota=st.integers(4, 12),
    delta=st.sampled_from([0.0, 0.1, 0.5, 1.0, 3.0, 20.0]),
)
@settings(max_examples=40)
def test_a_step_fetches_and_attends_what_plain_python_does(
    seed: int, quota: int, delta: float
) -> None:
    random = np.random.default_rng(seed)
    store, segments = filled(quota)
    plain = [PlainRow(quota) for _ in range(SEGMENTS)]
    scores = random.standard_normal((SEGMENTS, BLOCKS)).astype(np.float32)
    filtered = total = 0
    for number in range(20):
        scores = (0.9 * scores + 0.5 * random.standard_normal(scores.shape)).astype(np.float32)
        counts = random.integers(1, min(quota, 8) + 1, SEGMENTS).tolist()
        before = store.metrics.fetched
        selection = select(scores, segments, counts)
        (attended,) = [
            [set(blocks.tolist()) for blocks in np.split(store_blocks(store, visit.handles),
                                                         visit.row_ptr[1:-1])]
            for visit in store.visit(selection, segments, hysteresis=delta)
        ]  # fmt: skip
        expected = [
            row.step(number, scores[i].tolist(), counts[i], delta) for i, row in enumerate(plain)
        ]
        assert attended == [wanted for _, wanted in expected]
        assert store.metrics.fetched - before == sum(len(each) for each, _ in expected)
        residents = store.residents(segments)
        held = np.split(store_blocks(store, residents.handles), residents.row_ptr[1:-1])
        assert [set(blocks.tolist()) for blocks in held] == [row.residents for row in plain]
        filtered += sum(counts) - sum(len(wanted) for _, wanted in expected)
        total += sum(counts)
    assert store.metrics.filtered == filtered
    assert store.metrics.selected == total
    assert filtered == 0 or delta > 0
    store.validate()
    store.close()


def store_blocks(store: BlockStore, handles: Ids) -> Ids:
    """Numbers of blocks in their segments."""
    numbers: Ids = store.space.owner_index[handles // 64] * 64 + handles % 64
    return numbers


def test_a_high_difference_leaves_blocks_where_they_are() -> None:
    """The guard of the test above: filtering happens there, and is not vacuous."""
    store, segments = filled(8)
    scores = np.zeros((SEGMENTS, BLOCKS), np.float32)
    scores[:, :8] = 1.0
    counts = [4] * SEGMENTS
    list(store.visit(select(scores, segments, counts), segments, hysteresis=5.0))
    assert store.metrics.fetched == 12, "a cold window fills"
    scores[:, 8:12], scores[:, 8] = 2.0, 7.5
    (visit,) = store.visit(select(scores, segments, counts), segments, hysteresis=5.0)
    assert store.metrics.fetched == 15, "only the block that is 5 nats better comes"
    assert store_blocks(store, visit.handles).tolist() == [8] * SEGMENTS
    assert store.metrics.filtered == 9
    store.close()


def test_a_row_with_all_its_blocks_there_has_nothing_to_fetch() -> None:
    store, segments = filled(8)
    scores = np.arange(BLOCKS, dtype=np.float32)[None].repeat(SEGMENTS, 0)
    for _ in range(2):
        (visit,) = store.visit(select(scores, segments, [4] * 3), segments, hysteresis=1.0)
    assert len(visit.handles) == 12
    assert (store.metrics.fetched, store.metrics.filtered) == (12, 0)
    store.close()


@pytest.mark.parametrize("slope", [0.4, 1.0, 1.5, 4.0, 7.0])
@pytest.mark.parametrize("share", [0.5, 0.1, 0.02])
def test_the_controller_settles_on_a_stationary_stream(slope: float, share: float) -> None:
    """Bytes fall by e^slope for each nat, as far as they fall at all."""
    hysteresis, most = Hysteresis(f"{round(share * 1e6)}B"), 1e6
    wanted = -math.log(share) / slope
    differences = []
    for _ in range(200):
        hysteresis.after_step(round(most * math.exp(-slope * hysteresis.delta)))
        differences.append(hysteresis.delta)
    reachable = min(wanted, MOST)
    settled = 60 if slope >= 1 else 120
    assert np.abs(np.array(differences[settled:]) - reachable).max() < 0.02


@given(fetched=st.lists(st.integers(0, 10**9), max_size=300))
def test_whatever_is_fetched_the_difference_moves_little_and_stays_in_its_bounds(
    fetched: list[int],
) -> None:
    hysteresis = Hysteresis("64KiB")
    for amount in fetched:
        before = hysteresis.delta
        hysteresis.after_step(amount)
        assert 0 <= hysteresis.delta <= MOST
        assert abs(hysteresis.delta - before) <= 0.25 + 1e-12
        if amount > 65536:
            assert hysteresis.delta > before or before == MOST


def test_noise_is_followed_in_the_mean() -> None:
    random = np.random.default_rng(1)
    hysteresis, fetched = Hysteresis("100kB"), []
    for _ in range(2_000):
        burst = random.lognormal(0, 0.8)
        fetched.append(1e6 * burst * math.exp(-1.3 * hysteresis.delta))
        hysteresis.after_step(round(fetched[-1]))
    median = float(np.median(fetched[100:]))
    assert 0.8 * 100e3 < median < 1.25 * 100e3


def test_after_a_reset_the_difference_begins_again() -> None:
    hysteresis = Hysteresis("64KiB")
    for _ in range(3):
        hysteresis.after_step(10**9)
    assert hysteresis.delta == 0.75
    hysteresis.reset()
    assert hysteresis.delta == 0


def test_any_number_of_bytes_moves_it_by_one_step() -> None:
    hysteresis = Hysteresis("1B")
    hysteresis.after_step(10**400)
    assert hysteresis.delta == 0.25


def test_a_fixed_difference_stays() -> None:
    hysteresis = Hysteresis("1.5")
    hysteresis.after_step(10**9)
    hysteresis.reset()
    assert (hysteresis.delta, hysteresis.target_bytes, hysteresis.is_on) == (1.5, None, True)
    assert not Hysteresis(0).is_on
    assert Hysteresis("2MiB").is_on
    assert Hysteresis("2MiB").target_bytes == 2 << 20


@pytest.mark.parametrize(
    "amount",
    ["x", "", -1, math.nan, math.inf, None, True, "0KiB", [1], "1%", 10**400, "9" * 400 + "B",
     b"5", np.True_, 1j],
)  # fmt: skip
def test_what_is_no_difference_is_refused(amount: object) -> None:
    with pytest.raises(ConfigError, match=r"hysteresis=|size="):
        Hysteresis(amount)  # type: ignore[arg-type]
