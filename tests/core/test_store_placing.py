"""Where the store puts blocks: order on disk, homes that come late, quotas below the top."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from chains import BLOCK, LAYOUT, failing, make_tier
from hypothesis import given
from hypothesis import strategies as st

from tierstore.errors import ConfigError
from tierstore.interfaces import Selection
from tierstore.placement import packing_order
from tierstore.policies import LRU, FairShares
from tierstore.store import BlockStore
from tierstore.tiers import DeviceTier, MmapTier, PinnedTier

if TYPE_CHECKING:
    from pathlib import Path

    from tierstore.interfaces import Bytes, EvictionPolicy, Ids


def store_of(
    folder: Path,
    *,
    top: int = 6,
    middle: int = 9,
    partitioned: int = 1,
    below: EvictionPolicy | None = None,
) -> BlockStore:
    """Three tiers; the upper two with so many slots, and in the top so many for each segment."""
    tiers = [
        DeviceTier(LAYOUT, 1 << 14, name="top"),
        PinnedTier(LAYOUT, 1 << 15, name="middle"),
        MmapTier(LAYOUT, folder / "blocks", name="disk"),
    ]
    store = BlockStore(LAYOUT, tiers, [LRU(), below or LRU()], partitioned=partitioned)
    store.resize(0, 4 * top)
    store.resize(1, middle)
    return store


def bytes_of(segments: int, count: int, seed: int = 0) -> Bytes:
    random = np.random.default_rng(seed)
    return random.integers(0, 120, (segments, count, BLOCK), np.uint8)


def read(store: BlockStore, segments: Ids, count: int) -> Bytes:
    out = np.zeros((len(segments), count, BLOCK), np.uint8)
    store.read(segments, 0, count, out)
    return out


def test_blocks_stand_on_disk_in_the_order_given(tmp_path: Path) -> None:
    store = store_of(tmp_path)
    segments = store.open(2)
    data = bytes_of(2, 5)
    order = np.array([[4, 0, 3, 1, 2], [1, 2, 0, 4, 3]])
    store.append(segments, data, order=order)
    on_disk = store.tiers[2].view[:10].reshape(2, 5, BLOCK)
    for row in range(2):
        assert np.array_equal(on_disk[row], data[row, order[row]])
    assert np.array_equal(read(store, segments, 5), data)
    assert store.owners(2)[:10].tolist() == [segments[0]] * 5 + [segments[1]] * 5
    store.validate()
    store.close()


def test_freed_slots_are_filled_in_order_again(tmp_path: Path) -> None:
    store = store_of(tmp_path)
    first = store.open(2)
    store.append(first, bytes_of(2, 4))
    store.drop(first[:1])
    again = store.open(1)
    data = bytes_of(1, 4, seed=3)
    store.append(again, data, order=np.array([[3, 2, 1, 0]]))
    assert np.array_equal(store.tiers[2].view[:4], data[0, ::-1])
    store.close()


@pytest.mark.parametrize(
    "order", [[[0, 1, 2, 2]], [[1, 2, 3, 4]], [[0, 1, 2]], [[0, 1, 2, 3], [0, 1, 2, 3]]]
)
def test_an_order_that_is_none_is_refused(order: list[list[int]], tmp_path: Path) -> None:
    store = store_of(tmp_path)
    segment = store.open(1)
    with pytest.raises(ConfigError, match=r"order .* of blocks: expected \[1, 4\]"):
        store.append(segment, bytes_of(1, 4), order=np.array(order))
    assert store.space.blocks[segment[0]] == 0
    store.validate()
    store.close()


@given(st.lists(st.lists(st.integers(0, 5), min_size=7, max_size=7), min_size=1, max_size=4))
def test_packing_puts_clusters_side_by_side_in_order_of_appearance(rows: list[list[int]]) -> None:
    order = packing_order(np.array(rows))
    for row, places in zip(rows, order.tolist(), strict=True):
        assert sorted(places) == list(range(7))
        packed = [row[place] for place in places]
        appearance = list(dict.fromkeys(row))
        assert packed == [cluster for cluster in appearance for _ in range(row.count(cluster))]
        for cluster in appearance:
            inside = [place for place in places if row[place] == cluster]
            assert inside == sorted(inside)


def test_nothing_has_no_order() -> None:
    assert packing_order(np.empty((3, 0), np.int64)).shape == (3, 0)


def residents(store: BlockStore, segment: int, level: int) -> list[int]:
    handles = store.space.all_handles(segment)
    slots = store._moves.residency[level].slot_of.array[handles]
    return np.flatnonzero(slots >= 0).tolist()


def test_blocks_are_promoted_to_homes_that_come_late(tmp_path: Path) -> None:
    store = store_of(tmp_path, top=2, middle=4)
    segments = store.open(2)
    store.set_quota(segments, np.array([2, 2], np.int64))
    data = bytes_of(2, 6)
    store.append(segments, data[:, :2], home=np.full((2, 2), 2, np.uint8))
    store.append(segments, data[:, 2:], home=np.full((2, 4), 2, np.uint8))
    home = np.array([[0, 1, 2, 0, 0][:4], [2, 0, 1, 1]], np.uint8)
    store.promote(segments, 2, home)
    assert residents(store, segments[0], 0) == [2, 5]
    assert residents(store, segments[1], 0) == [3]
    assert residents(store, segments[0], 1) == [3]
    assert residents(store, segments[1], 1) == [4, 5]
    store.promote(segments, 2, home)
    store.validate()
    assert np.array_equal(read(store, segments, 6), data)
    store.close()


def test_promotion_evicts_nobody(tmp_path: Path) -> None:
    store = store_of(tmp_path, top=2, middle=0)
    segment = store.open(1)
    store.set_quota(segment, np.array([2], np.int64))
    store.append(segment, bytes_of(1, 5), home=np.array([[0, 2, 2, 2, 2]], np.uint8))
    store.promote(segment, 0, np.zeros((1, 5), np.uint8))
    assert residents(store, segment[0], 0) == [0, 1]
    store.validate()
    store.close()


def test_a_promotion_that_the_disk_refuses_leaves_blocks_where_they_were(tmp_path: Path) -> None:
    store = store_of(tmp_path)
    segment = store.open(1)
    store.set_quota(segment, np.array([3], np.int64))
    data = bytes_of(1, 4)
    store.append(segment, data, home=np.full((1, 4), 2, np.uint8))
    with failing(store.tiers[2], "read", late=True), pytest.raises(OSError, match="does not read"):
        store.promote(segment, 0, np.zeros((1, 4), np.uint8))
    store.validate()
    assert residents(store, segment[0], 0) == []
    assert np.array_equal(read(store, segment, 4), data)
    store.close()


def visit(store: BlockStore, segments: Ids, ids: list[list[int]]) -> None:
    row_ptr = np.cumsum([0, *map(len, ids)]).astype(np.int64)
    flat = np.array([block for row in ids for block in row], np.int32)
    for _ in store.visit(Selection(row_ptr, flat, np.zeros(len(flat), np.float32)), segments):
        pass


def test_segments_have_their_own_capacity_in_every_partitioned_tier(tmp_path: Path) -> None:
    """Blocks that one segment's steps push out of the top never cost another its place below."""
    store = store_of(tmp_path, top=2, middle=6, partitioned=2)
    segments = store.open(2)
    store.set_quota(segments, np.array([2, 2], np.int64))
    store.set_quota(segments, np.array([4, 2], np.int64), 1)
    data = bytes_of(2, 12)
    home = np.full((2, 12), 2, np.uint8)
    home[1, :2] = 1
    store.append(segments, data, home=home)
    for step in range(10):
        visit(store, segments[:1], [[step, step + 1]])
        store.validate()
    assert residents(store, segments[1], 1) == [0, 1]
    assert len(residents(store, segments[0], 1)) == 4
    assert np.array_equal(read(store, segments, 12), data)
    assert store.quota(segments, 1).tolist() == [4, 2]
    store.drop(segments[:1])
    assert store.quota(segments, 1).tolist() == [0, 2]
    store.set_quota(segments[1:], np.array([6], np.int64), 1)
    store.resize(1, 3)
    assert store.quota(segments[1:], 1).tolist() == [6]
    store.validate()
    store.close()


def hits_beside_a_scan(
    store: BlockStore, quotas: bool, fair: FairShares | None = None
) -> list[int]:
    """Hits in the middle tier of a segment that asks for 8 blocks in turn, beside a busy one."""
    segments = store.open(2)
    store.set_quota(segments, np.array([2, 2], np.int64))
    if quotas:
        store.set_quota(segments, np.array([8, 8], np.int64), 1)
    if fair is not None:
        fair.own(segments, segments)
    store.append(segments, bytes_of(2, 60), home=np.full((2, 60), 2, np.uint8))
    hits = []
    for step in range(40):
        for other in range(0, 12, 2):
            block = (6 * step + other) % 60
            visit(store, segments[1:], [[block, block + 1]])
        before = store.metrics.tiers[1].hits
        visit(store, segments[:1], [[step % 8]])
        hits.append(store.metrics.tiers[1].hits - before)
        store.validate()
    return hits


def test_fair_shares_serve_a_small_segment_as_an_equal_partition_does(tmp_path: Path) -> None:
    found, fair = {}, FairShares(LRU())
    for name, below in {"pool": None, "partition": None, "fair": fair}.items():
        quotas = name == "partition"
        (tmp_path / name).mkdir()
        store = store_of(tmp_path / name, top=2, middle=16, partitioned=1 + quotas, below=below)
        found[name] = hits_beside_a_scan(store, quotas, below)
        store.close()
    assert sum(found["pool"]) == 0
    assert sum(found["partition"]) > 20
    assert found["fair"] == found["partition"]


def test_room_is_made_by_those_who_hold_most(tmp_path: Path) -> None:
    below = FairShares(LRU())
    store = store_of(tmp_path, middle=9, below=below)
    segments = store.open(2)
    below.own(segments, segments)
    store.append(segments, bytes_of(2, 7), home=np.array([[1] * 7, [1, 1, *[2] * 5]], np.uint8))
    store.make_room(1, 3)
    assert [len(residents(store, each, 1)) for each in segments] == [4, 2]
    store.make_room(1, 3)
    assert len(residents(store, segments[0], 1)) == 4
    store.make_room(1, 99)
    assert residents(store, segments[1], 1) == []
    store.validate()
    store.close()


def test_room_is_not_made_in_a_tier_of_own_capacities(tmp_path: Path) -> None:
    store = store_of(tmp_path, partitioned=2)
    for level, name in enumerate(["top", "middle"]):
        with pytest.raises(ConfigError, match=f"{name}: .* expected a tier that all share"):
            store.make_room(level, 1)
    store.close()


def test_a_tier_under_the_top_grows_up_to_its_quotas(tmp_path: Path) -> None:
    store = store_of(tmp_path, top=2, middle=0, partitioned=2)
    segments = store.open(2)
    store.set_quota(segments, np.array([2, 2], np.int64))
    store.set_quota(segments, np.array([40, 8], np.int64), 1)
    assert store.tiers[1].capacity == 0
    data = bytes_of(2, 12)
    store.append(segments, data, home=np.full((2, 12), 2, np.uint8))
    for step in range(8):
        visit(store, segments, [[step, step + 1], [step, step + 1]])
        held = [len(residents(store, each, 1)) for each in segments]
        assert held == [step] * 2, "what leaves the top has a slot"
        assert sum(held) <= store.tiers[1].capacity <= sum(held) + 48 // 16
        store.validate()
    for step in range(8, 11):
        visit(store, segments, [[step, step + 1], [step, step + 1]])
    assert [len(residents(store, each, 1)) for each in segments] == [10, 8]
    assert np.array_equal(read(store, segments, 12), data)
    store.close()


def test_a_tier_that_grows_stops_at_its_limit(tmp_path: Path) -> None:
    store = store_of(tmp_path, top=2, middle=0, partitioned=2)
    segments = store.open(2)
    memory = store.tiers[1].memory
    assert memory is not None
    store.set_quota(segments, np.array([30, 30], np.int64), 1)
    data = bytes_of(2, 30)
    store.append(segments, data, home=np.full((2, 30), 2, np.uint8))
    memory.take(memory.free_bytes - 20 * (BLOCK + 12), np.uint8, "index")
    for first in range(0, 30, 5):
        store.promote(segments, first, np.ones((2, 5), np.uint8))
        store.validate()
    assert 10 < store.tiers[1].capacity <= 20
    assert store.quota(segments, 1).tolist() == [30, 30], "nobody was pressed"
    assert np.array_equal(read(store, segments, 30), data)
    store.close()


def test_pressure_on_a_tier_that_grows_takes_no_more_than_it_needs(tmp_path: Path) -> None:
    store = store_of(tmp_path, top=2, middle=0, partitioned=2)
    segments = store.open(2)
    memory = store.tiers[1].memory
    assert memory is not None
    store.set_quota(segments, np.array([30, 30], np.int64), 1)
    store.append(segments, bytes_of(2, 30), home=np.full((2, 30), 2, np.uint8))
    store.promote(segments[:1], 0, np.ones((1, 20), np.uint8))
    store.resize(1, 20)
    assert len(residents(store, segments[0], 1)) == 20
    taken = memory.take(memory.free_bytes + BLOCK, np.uint8, "index")
    assert len(residents(store, segments[0], 1)) == 19
    assert store.quota(segments, 1).tolist() == [30, 30]
    store.validate()
    memory.give(taken)
    store.promote(segments, 0, np.ones((2, 25), np.uint8))
    assert [len(residents(store, each, 1)) for each in segments] == [25, 25]
    store.validate()
    memory.take(memory.free_bytes + store.tiers[1].capacity * BLOCK, np.uint8, "index")
    assert store.tiers[1].capacity == 0, "no domain is owed a slot below the top"
    store.validate()
    store.close()


def test_a_shared_tier_has_no_quotas(tmp_path: Path) -> None:
    store = store_of(tmp_path)
    segments = store.open(1)
    with pytest.raises(ConfigError, match="middle: all segments share its capacity"):
        store.set_quota(segments, np.array([1], np.int64), 1)
    store.close()


@pytest.mark.parametrize("partitioned", [0, 3])
def test_the_last_tier_is_never_partitioned(partitioned: int, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"partitioned={partitioned} of 3 tiers"):
        store_of(tmp_path, partitioned=partitioned)


def test_tiers_that_can_prepare_nothing_are_not_disturbed(tmp_path: Path) -> None:
    tier = make_tier("pinned", 1 << 12, tmp_path)
    tier.expect(np.arange(3, dtype=np.int32))
    tier.close()
