"""What the block store promises, one promise at a time; `test_store_machine` mixes them."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pytest
from chains import BLOCK, LAYOUT, MISTAKES, Later, LateTier, Unruly, failing, make_tier

from tierstore.errors import CapacityError, ConfigError, PolicyError
from tierstore.interfaces import Selection
from tierstore.layout import BlockLayout
from tierstore.policies import LRU
from tierstore.store import BlockStore
from tierstore.testing import TierTests

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tierstore.interfaces import Bytes, Ids, Tier

PLENTY = 1 << 20


class TestLateTier(TierTests):
    """The tests' own tier, which cannot be read in place, is a tier as well."""

    def make_tier(self, layout: BlockLayout, limit_bytes: int, folder: Path) -> LateTier:
        return LateTier(layout, limit_bytes)


@pytest.fixture
def make_store(tmp_path: Path) -> Iterator[Callable[..., BlockStore]]:
    """Makes a store over tiers of these kinds; `slots` of all tiers but the backing one."""
    stores = []

    def make(*kinds: str, slots: tuple[int, ...] = (), limit: int = PLENTY) -> BlockStore:
        tiers = [make_tier(kind, limit, tmp_path, level) for level, kind in enumerate(kinds)]
        store = BlockStore(LAYOUT, tiers, [Unruly(LRU()) for _ in kinds[1:]])
        for level, count in enumerate(slots):
            store.resize(level, count)
        stores.append(store)
        return store

    yield make
    for store in stores:
        store.validate()
        store.close()


class Filled(NamedTuple):
    """A store with segments of equally many blocks, and what those are."""

    store: BlockStore
    segments: Ids
    blocks: Bytes

    def select(self, *rows: list[int]) -> Selection:
        ids = np.array([block for row in rows for block in row], np.int32)
        row_ptr = np.cumsum([0, *map(len, rows)])
        return Selection(row_ptr, ids, np.zeros(len(ids), np.float32))

    def visit(self, *rows: list[int]) -> list[list[set[int]]]:
        """Visit these blocks of each segment; returns the blocks of each visit, row by row."""
        names = {
            (row, block.tobytes()): number
            for row, blocks in enumerate(self.blocks)
            for number, block in enumerate(blocks)
        }
        visits = []
        for visit in self.store.visit(self.select(*rows), self.segments[: len(rows)]):
            parts = np.split(visit.slots, visit.row_ptr[1:-1])
            view = self.store.tiers[0].view
            visits.append(
                [{names[row, view[s].tobytes()] for s in part} for row, part in enumerate(parts)]
            )
        return visits

    def where(self, level: int, segment: int = 0) -> set[int]:
        """The blocks of a segment that a tier has."""
        handles = self.store.space.all_handles(int(self.segments[segment]))
        slots = self.store._moves.residency[level].slot_of.array[handles]
        return set(np.flatnonzero(slots >= 0).tolist())

    def content(self) -> Bytes:
        out = np.empty_like(self.blocks)
        self.store.read(self.segments, 0, self.blocks.shape[1], out)
        return out


def content(seed: int, segments: int, count: int) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, (segments, count, BLOCK), np.uint8)


def filled(store: BlockStore, segments: int, count: int, quota: int = 0) -> Filled:
    """Blocks that are in the backing tier alone, in domains of so many blocks."""
    numbers, blocks = store.open(segments), content(7, segments, count)
    if quota:
        store.set_quota(numbers, np.full(segments, quota))
    home = np.full((segments, count), store.backing, np.uint8)
    store.append(numbers, blocks, home=home)
    return Filled(store, numbers, blocks)


# The chain


@pytest.mark.parametrize(
    ("kinds", "policies", "message"),
    [
        ([], 0, r"tiers=\[\]: expected at least one tier"),
        (["pinned", "mmap"], 0, "0 policies for 2 tiers: expected one for each but the last"),
        (["pinned"], 1, "1 policies for 1 tiers"),
        (["late", "pinned"], 1, "'late0' cannot be read in place: put a memory tier first"),
    ],
)
def test_a_chain_that_cannot_work_is_refused(
    tmp_path: Path, kinds: list[str], policies: int, message: str
) -> None:
    tiers = [make_tier(kind, PLENTY, tmp_path, level) for level, kind in enumerate(kinds)]
    with pytest.raises(ConfigError, match=message):
        BlockStore(LAYOUT, tiers, [LRU() for _ in range(policies)])


def test_a_tier_of_another_layout_is_refused(tmp_path: Path) -> None:
    other = BlockLayout.kv(4, 3, LAYOUT.parts[0].dtype)
    with pytest.raises(ConfigError, match="'late0' has another layout"):
        BlockStore(other, [make_tier("late", PLENTY, tmp_path)], [])


def test_closing_closes_every_tier_and_may_happen_twice(
    make_store: Callable[..., BlockStore], tmp_path: Path
) -> None:
    tiers: list[Tier] = [make_tier(kind, PLENTY, tmp_path) for kind in ("device", "late", "mmap")]
    store = BlockStore(LAYOUT, tiers, [LRU(), LRU()])
    filled(store, 1, 3)
    store.close()
    store.close()
    assert [tier.capacity for tier in tiers] == [0, 0, 0]


# Segments


def test_cutting_a_segment_beyond_its_end_changes_nothing(
    make_store: Callable[..., BlockStore],
) -> None:
    it = filled(make_store("mmap"), 2, 3)
    it.store.truncate(it.segments, 5)
    assert np.array_equal(it.content(), it.blocks)
    it.store.append(it.segments, content(8, 2, 1))
    assert it.store.space.blocks[it.segments].tolist() == [4, 4]


def test_a_dropped_segment_leaves_its_quota_to_others(
    make_store: Callable[..., BlockStore],
) -> None:
    store = make_store("device", "mmap", slots=(8,))
    first = store.open(2)
    store.set_quota(first, np.array([4, 4]))
    store.drop(first[:1])
    second = store.open(2)
    store.set_quota(second, np.array([2, 2]))
    with pytest.raises(ConfigError, match="quotas of 9 blocks: expected at most 8"):
        store.set_quota(first[1:], np.array([5]))


def test_a_shared_domain_keeps_its_quota_until_its_last_segment_goes(
    make_store: Callable[..., BlockStore],
) -> None:
    store = make_store("device", "mmap", slots=(8,))
    first = store.open(1)
    joined = store.open(2, np.repeat(first, 2))
    store.set_quota(first, np.array([8]))
    store.drop(first)
    store.append(joined, content(1, 2, 4), home=np.zeros((2, 4), np.uint8))
    assert store._moves.residency[0].resident == 8
    store.drop(joined)
    store.set_quota(store.open(1), np.array([8]))


def test_lower_tiers_work_on_after_every_segment_went(
    make_store: Callable[..., BlockStore],
) -> None:
    store = make_store("device", "pinned", "mmap", slots=(2, 4))
    store.drop(filled(store, 2, 3).segments)
    it = filled(store, 1, 3, quota=1)
    it.visit([0])
    it.visit([1])
    assert (it.where(0), it.where(1)) == ({1}, {0})


def test_a_number_that_could_not_be_opened_is_not_lost(
    make_store: Callable[..., BlockStore],
) -> None:
    store = make_store("pinned", limit=8 << 10)
    memory = store.memory
    rest = memory.take(memory.free_bytes, np.uint8, "test")
    with pytest.raises(CapacityError):
        store.open(50)
    memory.give(rest)
    assert sorted(store.open(4)) == [0, 1, 2, 3]


def test_policies_are_told_of_blocks_that_went_for_good(
    make_store: Callable[..., BlockStore],
) -> None:
    """Whether they were in the policy's tier or not; eviction alone is not the end of a block."""
    it = filled(make_store("device", "pinned", "mmap", slots=(2, 2)), 1, 4, quota=1)
    it.visit([0])
    it.visit([3])
    handles = it.store.space.all_handles(int(it.segments[0])).tolist()
    policies = it.store._moves.policies
    assert [policy.removed for policy in policies if isinstance(policy, Unruly)] == [[], []]
    it.store.truncate(it.segments, 2)
    it.store.drop(it.segments)
    for policy in policies:
        assert isinstance(policy, Unruly)
        assert policy.removed == handles[2:] + handles[:2]


def test_copies_are_equal_and_apart(make_store: Callable[..., BlockStore]) -> None:
    store = make_store("device", "late", slots=(4,))
    segments = store.open(1)
    valid = np.array([[2, 1, 0]], np.uint8)
    store.append(segments, content(3, 1, 3), valid=valid)
    copies = store.open(1)
    store.duplicate(segments, copies)
    store.drop(segments)
    out = np.empty((1, 3, BLOCK), np.uint8)
    assert store.read(copies, 0, 3, out).tolist() == valid.tolist()
    assert np.array_equal(out, content(3, 1, 3))


@pytest.mark.parametrize("block", [-1, 3])
def test_blocks_that_do_not_exist_cannot_be_read_or_leased(
    make_store: Callable[..., BlockStore], block: int
) -> None:
    it = filled(make_store("mmap"), 2, 3)
    message = rf"block {block} of segment {it.segments[0]}: expected one of its 3 blocks"
    with pytest.raises(ConfigError, match=message):
        it.store.read(it.segments, block, 1, np.empty((2, 1, BLOCK), np.uint8))
    with pytest.raises(ConfigError, match=message):
        it.store.lease(it.segments[:1], np.array([[0, block]], np.int32)).__enter__()


# Capacity


def test_a_full_store_refuses_and_keeps_what_it_has(make_store: Callable[..., BlockStore]) -> None:
    """Tables for one more chunk of handles would take the slots that the new blocks need."""
    store = make_store("pinned", limit=8 << 10)
    segments, everything = store.open(1), content(1, 1, 1_000)
    pieces = np.split(everything, 200, axis=1)
    with pytest.raises(CapacityError):
        any(store.append(segments, piece) is None for piece in pieces)
    kept = int(store.space.blocks[segments[0]])
    out = np.empty((1, kept, BLOCK), np.uint8)
    store.read(segments, 0, kept, out)
    assert np.array_equal(out, everything[:, :kept])
    assert 100 < kept < 1_000
    assert kept % 5 == 0


def test_every_slot_within_the_limit_can_be_had(make_store: Callable[..., BlockStore]) -> None:
    for kinds in (["pinned"], ["mmap"], ["device", "pinned"]):
        store = make_store(*kinds, limit=16 << 10)
        filled(store, 1, 100)
        limit = store.limit(store.backing)
        store.resize(store.backing, limit)
        assert store.tiers[-1].capacity == limit > 100


@pytest.mark.parametrize("slots", [7, 4, 3])
def test_when_the_top_tier_shrinks_every_domain_keeps_a_share(
    make_store: Callable[..., BlockStore], slots: int
) -> None:
    store = make_store("device", "mmap", slots=(10,))
    it = filled(store, 4, 7)
    store.set_quota(it.segments, np.array([1, 1, 1, 7]))
    it.visit([0], [0], [0], [0, 1, 2, 3, 4, 5, 6])
    store.resize(0, slots)
    quota = store._moves.residency[0].quota[it.segments]
    assert quota.sum() <= slots
    assert (quota.min() >= 1) == (slots >= 4)
    assert quota[3] == quota.max()


def test_other_data_takes_slots_but_leaves_every_domain_one(
    make_store: Callable[..., BlockStore],
) -> None:
    store = make_store("device", "pinned", "mmap", slots=(100,))
    it = filled(store, 2, 60, quota=50)
    it.visit(list(range(50)), list(range(50)))
    memory = store.tiers[0].memory
    assert memory is not None
    memory.take(PLENTY - 2 * BLOCK, np.uint8, "test")
    assert store._moves.residency[0].quota[it.segments].tolist() == [1, 1]
    with pytest.raises(CapacityError, match="test needs"):
        memory.take(BLOCK, np.uint8, "test")
    assert it.visit([3], [4]) == [[{3}, {4}]]


def test_blocks_that_only_the_backing_tier_has_are_in_the_way(
    make_store: Callable[..., BlockStore],
) -> None:
    it = filled(make_store("device", "late", slots=(4,)), 1, 6)
    with pytest.raises(CapacityError, match="late1: 2 blocks would be lost"):
        it.store.resize(1, 4)
    assert np.array_equal(it.content(), it.blocks)


# Visits


def test_a_selection_larger_than_its_domain_comes_in_several_visits(
    make_store: Callable[..., BlockStore],
) -> None:
    """What is resident comes first, so that nothing selected is evicted before its visit."""
    it = filled(make_store("device", "mmap", slots=(5,)), 2, 9)
    it.store.set_quota(it.segments, np.array([3, 2]))
    it.visit([7, 8], [4])
    visits = it.visit([0, 1, 2, 3, 7, 8, 6], [4])
    assert [len(first) for first, _ in visits] == [3, 3, 1]
    assert visits[0][0] > {7, 8}
    assert [second for _, second in visits] == [{4}, set(), set()]
    assert set.union(*(first for first, _ in visits)) == {0, 1, 2, 3, 6, 7, 8}
    assert it.store.metrics.tiers[0].hits == 3


def test_a_visit_says_whether_it_is_all(make_store: Callable[..., BlockStore]) -> None:
    it = filled(make_store("device", "mmap", slots=(2,)), 1, 4, quota=2)
    for blocks, expected in (([0, 1], [True]), ([0, 1], [True]), ([0, 1, 2], [False, False])):
        visits = it.store.visit(it.select(blocks), it.segments)
        assert [visit.is_whole for visit in visits] == expected


def test_nothing_selected_is_one_empty_visit(make_store: Callable[..., BlockStore]) -> None:
    it = filled(make_store("device", "mmap", slots=(2,)), 2, 4, quota=1)
    assert it.visit([], []) == [[set(), set()]]
    assert it.store.metrics.selected == 0


def test_blocks_come_straight_from_the_first_tier_that_has_them(
    make_store: Callable[..., BlockStore],
) -> None:
    it = filled(make_store("device", "pinned", "late", slots=(1, 4)), 1, 4, quota=1)
    for block in (0, 1, 0, 3, 3):
        it.visit([block])
    assert [tier.hits for tier in it.store.metrics.tiers] == [1, 1, 3]
    assert [tier.bytes_read // BLOCK for tier in it.store.metrics.tiers] == [0, 1, 3]
    assert [tier.demotions for tier in it.store.metrics.tiers] == [2, 0, 0]
    assert (it.where(0), it.where(1)) == ({3}, {0, 1})


def test_only_copies_that_found_room_are_demotions(make_store: Callable[..., BlockStore]) -> None:
    it = filled(make_store("device", "pinned", "mmap", slots=(1, 0)), 1, 4, quota=1)
    for block in range(4):
        it.visit([block])
    top = it.store.metrics.tiers[0]
    assert (top.evictions, top.demotions) == (3, 0)


def test_no_more_blocks_leave_than_must(make_store: Callable[..., BlockStore]) -> None:
    it = filled(make_store("device", "pinned", "mmap", slots=(6, 4)), 2, 9, quota=3)
    it.visit([0, 1, 2], [0])
    it.visit([3, 1], [1, 2])
    assert [it.where(0, segment) for segment in (0, 1)] == [{1, 2, 3}, {0, 1, 2}]
    assert it.where(1) == {0}


def test_copies_of_what_a_step_has_above_leave_first(
    make_store: Callable[..., BlockStore],
) -> None:
    it = filled(make_store("device", "pinned", "late", slots=(2, 2)), 1, 5, quota=2)
    for blocks in ([0, 1], [2, 3], [0, 2]):
        it.visit(blocks)
    assert (it.where(0), it.where(1)) == ({0, 2}, {0, 3})
    it.visit([0, 4])
    assert (it.where(0), it.where(1)) == ({0, 4}, {2, 3})


def test_a_block_that_leaves_keeps_its_copy_below(make_store: Callable[..., BlockStore]) -> None:
    it = filled(make_store("device", "pinned", "late", slots=(2, 2)), 1, 5, quota=2)
    for blocks in ([0, 1], [2, 3], [0, 2], [1, 4]):
        it.visit(blocks)
    assert (it.where(0), it.where(1)) == ({1, 4}, {0, 2})


@pytest.mark.parametrize("slots", [(3, 2, 3), (4, 4, 8)])
def test_what_leaves_the_top_of_four_tiers_is_not_lost_by_its_copy(
    make_store: Callable[..., BlockStore], slots: tuple[int, int, int]
) -> None:
    """Of blocks that the top tier had, those with a copy below keep it as they leave."""
    it = filled(
        make_store("device", "pinned", "pinned", "mmap", slots=slots), 1, 24, quota=slots[0]
    )
    random = np.random.default_rng(3)
    for _ in range(300):
        top, copies = it.where(0), it.where(1) | it.where(2)
        it.visit(random.choice(24, 3, replace=False).tolist())
        left = top - it.where(0)
        assert left & copies <= it.where(1) | it.where(2)


def test_the_last_tier_is_told_of_what_no_other_has(make_store: Callable[..., BlockStore]) -> None:
    it = filled(make_store("device", "pinned", "late", slots=(3, 3)), 1, 9, quota=3)
    told: list[int] = []
    it.store.tiers[2].expect = lambda slots: told.extend(slots.tolist())  # type: ignore[method-assign]
    it.visit([0, 1, 2])
    it.visit([3, 4, 5])
    assert it.where(1) == {0, 1, 2}
    told.clear()
    it.visit([0, 3, 6])
    slot_of = it.store._moves.residency[2].slot_of.array
    (handle,) = it.store.space.all_handles(int(it.segments[0]))[[6]].tolist()
    assert told == [slot_of[handle]]
    told.clear()
    it.visit([0, 2, 4, 6, 8, 7, 5])  # in parts
    assert len(told) == len(set(told)) > 0


def test_a_leased_copy_stays(make_store: Callable[..., BlockStore]) -> None:
    it = filled(make_store("device", "pinned", "late", slots=(2, 2)), 1, 5, quota=2)
    for blocks in ([0, 1], [2, 3], [0, 2]):
        it.visit(blocks)
    with it.store.lease(it.segments, np.array([[0]], np.int32)):
        it.visit([0, 4])
        assert (it.where(0), it.where(1)) == ({0, 4}, {0, 2})


def test_a_domain_without_room_is_refused(make_store: Callable[..., BlockStore]) -> None:
    it = filled(make_store("device", "mmap", slots=(2,)), 2, 4)
    it.store.set_quota(it.segments[:1], np.array([2]))
    with pytest.raises(CapacityError, match="device0: a domain of the selection has room for no"):
        it.visit([0], [1])
    assert it.visit([0, 1]) == [[{0, 1}]]


@pytest.mark.parametrize("change", ["visit", "append", "truncate", "drop", "duplicate", "open",
                                    "resize", "set_quota"])  # fmt: skip
def test_nothing_changes_while_a_visit_lasts(
    make_store: Callable[..., BlockStore], change: str
) -> None:
    it = filled(make_store("device", "mmap", slots=(4,)), 1, 4, quota=2)
    store, segments = it.store, it.segments
    changes: dict[str, Callable[[], object]] = {
        "visit": lambda: next(store.visit(it.select([0]), segments)),
        "append": lambda: store.append(segments, content(1, 1, 1)),
        "truncate": lambda: store.truncate(segments, 1),
        "drop": lambda: store.drop(segments),
        "duplicate": lambda: store.duplicate(segments, segments),
        "open": lambda: store.open(1),
        "resize": lambda: store.resize(0, 4),
        "set_quota": lambda: store.set_quota(segments, np.array([1])),
    }
    visits = store.visit(it.select([0, 1, 2]), segments)
    visit = next(visits)
    with pytest.raises(ConfigError, match="the caller is in a visit: finish or close it first"):
        changes[change]()
    assert np.array_equal(it.content(), it.blocks)
    with store.lease(segments, np.array([[3]], np.int32)):
        assert set(visit.handles) <= set(store.residents(segments).handles)
    visits.close()
    changes[change]()


def test_a_visit_does_not_move_for_other_data(make_store: Callable[..., BlockStore]) -> None:
    """Work space that the caller takes meanwhile must not come from under its feet."""
    store = make_store("device", "pinned", "mmap", slots=(8,))
    it = filled(store, 1, 8, quota=8)
    memory = store.tiers[0].memory
    assert memory is not None
    memory.take(memory.free_bytes, np.uint8, "test")
    for visit in store.visit(it.select(list(range(8))), it.segments):
        with pytest.raises(CapacityError, match="work space needs"):
            memory.take(BLOCK, np.uint8, "work space")
        assert np.array_equal(store.tiers[0].view[visit.slots], it.blocks[0])
    memory.take(BLOCK, np.uint8, "work space")
    assert store.tiers[0].capacity == 7
    assert [len(row) for (row,) in it.visit(list(range(8)))] == [7, 1]


def test_an_abandoned_visit_frees_the_store(make_store: Callable[..., BlockStore]) -> None:
    it = filled(make_store("device", "mmap", slots=(2,)), 1, 6, quota=2)
    for _ in it.store.visit(it.select([0, 1, 2, 3]), it.segments):
        break
    done = threading.Thread(target=it.store.drop, args=(it.segments,))
    done.start()
    done.join(20)
    assert it.store.space.blocks[it.segments].tolist() == [0]


def test_threads_take_turns(make_store: Callable[..., BlockStore]) -> None:
    it = filled(make_store("device", "pinned", "mmap", slots=(8, 12)), 4, 12, quota=2)
    wrong: list[object] = []

    def visit_often(seed: int) -> None:
        random = np.random.default_rng(seed)
        for _ in range(30):
            rows = [random.choice(12, random.integers(0, 5), replace=False) for _ in range(4)]
            visits = it.visit(*[row.tolist() for row in rows])
            found = [set.union(*parts) for parts in zip(*visits, strict=True)]
            wrong.extend(f for f, row in zip(found, rows, strict=True) if f != set(row.tolist()))

    threads = [threading.Thread(target=visit_often, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == []


# Leases


def test_a_leased_block_takes_room_in_every_visit(make_store: Callable[..., BlockStore]) -> None:
    """It comes with the first visit and stays, so the others share what is left of the domain."""
    it = filled(make_store("device", "mmap", slots=(6,)), 2, 9, quota=3)
    it.visit([0])
    with it.store.lease(it.segments[:1], np.array([[0, 5]], np.int32)):
        assert [row for (row,) in it.visit([1, 0, 2])] == [{0, 1, 2}]
        assert [row for (row,) in it.visit([3, 5, 4])] == [{3, 5}, {4}]
        assert [row for (row,) in it.visit([6, 7])] == [{6}, {7}]
        assert it.where(0) == {0, 5, 7}
    assert it.visit([1, 2, 3]) == [[{1, 2, 3}]]


def test_a_domain_full_of_leased_blocks_has_no_room(make_store: Callable[..., BlockStore]) -> None:
    it = filled(make_store("device", "mmap", slots=(4,)), 2, 6, quota=2)
    it.visit([0, 1], [0])
    with it.store.lease(it.segments[:1], np.array([[0, 1]], np.int32)):
        with pytest.raises(CapacityError, match="release leases"):
            it.visit([2])
        lease = it.store.lease(it.segments[:1], np.array([[2]], np.int32))
        with lease, pytest.raises(CapacityError, match="release leases"):
            it.visit([2])
        assert it.visit([0, 1], [5]) == [[{0, 1}, {5}]]
    assert it.visit([2]) == [[{2}]]


def test_leased_blocks_stand_in_the_way_of_smaller_quotas_and_tiers(
    make_store: Callable[..., BlockStore],
) -> None:
    it = filled(make_store("device", "mmap", slots=(4,)), 2, 6, quota=2)
    it.visit([0, 1], [0, 1])
    slots = it.store._moves.residency[0].slot_of.array.copy()
    with it.store.lease(it.segments[:1], np.array([[0, 1, 1]], np.int32)):
        changes: list[Callable[[], None]] = [
            lambda: it.store.set_quota(it.segments, np.array([1, 3])),
            lambda: it.store.resize(0, 3),
            lambda: it.store.resize(0, 1),
            lambda: it.store.truncate(it.segments, 1),
            lambda: it.store.drop(it.segments),
        ]
        for change in changes:
            with pytest.raises(CapacityError, match="leased"):
                change()
        assert np.array_equal(it.store._moves.residency[0].slot_of.array, slots)
        assert it.store._moves.residency[0].quota[it.segments].tolist() == [2, 2]
    it.store.resize(0, 2)
    assert it.store._moves.residency[0].resident <= 2


def test_leased_blocks_stand_in_the_way_of_a_smaller_lower_tier(
    make_store: Callable[..., BlockStore],
) -> None:
    it = filled(make_store("device", "pinned", "mmap", slots=(1, 4)), 1, 5, quota=1)
    it.visit([0])
    it.visit([1])
    assert it.where(1) == {0}
    with (
        it.store.lease(it.segments, np.array([[0]], np.int32)),
        pytest.raises(CapacityError, match="pinned1: leased blocks are in the way"),
    ):
        it.store.resize(1, 0)
    it.store.resize(1, 0)
    assert np.array_equal(it.content(), it.blocks)


def test_leased_blocks_are_counted_once_for_each_lease(
    make_store: Callable[..., BlockStore],
) -> None:
    it = filled(make_store("mmap"), 1, 3)
    block = np.array([[1]], np.int32)
    with it.store.lease(it.segments, block):
        with it.store.lease(it.segments, block):
            pass
        with pytest.raises(CapacityError, match="blocks to forget are leased"):
            it.store.truncate(it.segments, 1)
        it.store.truncate(it.segments, 2)
    it.store.truncate(it.segments, 1)


# Errors of members


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("level", [0, 1, 2])
def test_an_append_that_fails_leaves_the_segments_as_before(
    make_store: Callable[..., BlockStore], level: int, late: bool
) -> None:
    it = filled(make_store("device", "pinned", "late", slots=(4, 4)), 2, 2, quota=2)
    home = np.array([[0, 1, 2]] * 2, np.uint8)
    with (
        failing(it.store.tiers[level], "write", late=late),
        pytest.raises(OSError, match="does not write"),
    ):
        it.store.append(it.segments, content(1, 2, 3), home=home)
    assert it.store.space.blocks[it.segments].tolist() == [2, 2]
    assert np.array_equal(it.content(), it.blocks)
    it.store.append(it.segments, content(1, 2, 3), home=home)
    assert it.where(0) == {2}


def test_a_visit_that_fails_can_be_tried_again(make_store: Callable[..., BlockStore]) -> None:
    """C17. No device fails here: a tier that raises in the middle stands for one that does."""
    it = filled(make_store("device", "late", slots=(2,)), 1, 4, quota=2)
    it.visit([0, 1])
    with failing(it.store.tiers[1], "read", late=True), pytest.raises(OSError, match="read"):
        it.visit([1, 2])
    assert it.visit([1, 2]) == [[{1, 2}]]


def test_no_transfer_is_left_under_way_when_another_fails(
    make_store: Callable[..., BlockStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its bytes would arrive in slots that are somebody else's by then."""
    it = filled(make_store("device", "late", "mmap", slots=(3, 4)), 1, 4, quota=1)
    it.visit([0])
    it.visit([1])
    assert it.where(1) == {0}
    it.store.set_quota(it.segments, np.array([3]))
    waited: list[str] = []
    monkeypatch.setattr(it.store.tiers[1], "read", lambda *_: Later(lambda: waited.append("late1")))
    with failing(it.store.tiers[2], "read", late=False), pytest.raises(OSError, match="mmap2"):
        it.visit([0, 2])
    assert waited == ["late1"]


@pytest.mark.parametrize("mistake", sorted(MISTAKES))
def test_a_policy_that_breaks_its_contract_is_found_out(
    make_store: Callable[..., BlockStore], mistake: str
) -> None:
    it = filled(make_store("device", "mmap", slots=(8,)), 2, 9, quota=4)
    it.visit([0, 1, 2, 3], [0, 1, 2, 3])
    policy = it.store._moves.policies[0]
    assert isinstance(policy, Unruly)
    policy.mistake = mistake
    with pytest.raises(
        PolicyError,
        match=r"Unruly\.victims (named .* expected distinct|returned .* expected int32)",
    ):
        it.visit([3, 4, 5, 6], [3, 4, 5, 6])
    assert it.where(0) == {0, 1, 2, 3}
    policy.mistake = None
    assert it.visit([3, 4, 5, 6], [3, 4, 5, 6]) == [[{3, 4, 5, 6}, {3, 4, 5, 6}]]


def test_an_append_with_a_broken_policy_leaves_the_segments_as_before(
    make_store: Callable[..., BlockStore],
) -> None:
    store = make_store("device", "pinned", "mmap", slots=(1, 2))
    segments = store.open(1)
    store.append(segments, content(1, 1, 2))
    policy = store._moves.policies[1]
    assert isinstance(policy, Unruly)
    policy.mistake = "unknown"
    with pytest.raises(PolicyError):
        store.append(segments, content(2, 1, 1))
    assert store.space.blocks[segments].tolist() == [2]
