"""The halves of a visit: several at once, in several threads, and what a failure leaves."""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import pytest
from chains import BLOCK, LAYOUT, LateTier, Unruly, failing, make_tier

from tierstore.errors import CapacityError, ConfigError, PolicyError
from tierstore.interfaces import Selection
from tierstore.policies import LRU
from tierstore.store import BlockStore
from tierstore.tiers import DeviceTier, FileTier, PinnedTier
from tierstore.timeline import Timeline

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator
    from pathlib import Path

    from tierstore.interfaces import Access, Bytes, Completion, Ids, Tier
    from tierstore.visits import PendingVisit

SEGMENTS, BLOCKS, QUOTA = 3, 12, 4


class HeldTier(LateTier):
    """Reads when it is told to; knows whether somebody wrote meanwhile."""

    def __init__(self, limit_bytes: int, name: str) -> None:
        super().__init__(LAYOUT, limit_bytes, name)
        self.asked, self.told = threading.Event(), threading.Event()
        self.told.set()
        self.reading = 0
        self.is_disturbed = False

    def read(
        self, slots: Ids, out: Bytes, rows: Ids, parts: Collection[str] | None = None
    ) -> Completion:
        self.asked.set()
        self.reading += 1
        assert self.told.wait(20)
        super().read(slots, out, rows, parts).wait()
        self.reading -= 1
        return super().read(slots[:0], out, rows[:0], parts)

    def write(
        self, slots: Ids, blocks: Bytes, rows: Ids, parts: Collection[str] | None = None
    ) -> Completion:
        self.is_disturbed |= self.reading > 0
        return super().write(slots, blocks, rows, parts)


class Made:
    """A store with three segments of twelve blocks, none of them in the top tier."""

    def __init__(self, tiers: list[Tier], middle: int = 0) -> None:
        policies = [Unruly(LRU()) for _ in tiers[1:]]
        self.policy = policies[0]
        self.store = BlockStore(LAYOUT, tiers, policies, segments=SEGMENTS, blocks_each=BLOCKS)
        self.segments = self.store.open(SEGMENTS)
        self.store.resize(0, SEGMENTS * QUOTA)
        if middle:
            self.store.resize(1, middle)
        self.store.set_quota(self.segments, np.full(SEGMENTS, QUOTA))
        random = np.random.default_rng(0)
        self.blocks: Bytes = random.integers(0, 256, (SEGMENTS, BLOCKS, BLOCK), np.uint8)
        home = np.full((SEGMENTS, BLOCKS), self.store.backing, np.uint8)
        self.store.append(self.segments, self.blocks, home=home)

    def judge(self, segment: int, blocks: list[int]) -> PendingVisit:
        row_ptr = np.array([0, len(blocks)])
        ids = np.array(blocks, np.int32)
        selection = Selection(row_ptr, ids, np.zeros(len(ids), np.float32))
        return self.store.judge(selection, self.segments[segment : segment + 1])

    def check(self, segment: int, pending: PendingVisit, blocks: list[int]) -> None:
        """What is fetched is what was asked for, byte by byte."""
        visit = pending.fetch()
        assert np.array_equal(self.store.tiers[0].view[visit.slots], self.blocks[segment, blocks])

    def where(self, segment: int) -> set[int]:
        """Blocks of a segment in the top tier."""
        handles = self.store.space.all_handles(int(self.segments[segment]))
        slots = self.store._moves.residency[0].slot_of.array[handles]
        return set(np.flatnonzero(slots >= 0).tolist())

    def content(self) -> Bytes:
        out: Bytes = np.empty((SEGMENTS, BLOCKS, BLOCK), np.uint8)
        self.store.read(self.segments, 0, BLOCKS, out)
        return out


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Made]]:
    """Makes a store over these kinds of tiers; "file" reads past the page cache, checksummed."""
    stores = []

    def make_one(*kinds: str, middle: int = 0) -> Made:
        def tier(kind: str, level: int) -> Tier:
            if kind == "file":
                return FileTier(LAYOUT, tmp_path / f"file{level}", extent_bytes=4096)
            if kind == "held":
                return HeldTier(1 << 20, f"held{level}")
            return make_tier(kind, 1 << 20, tmp_path, level)

        made = Made([tier(kind, level) for level, kind in enumerate(kinds)], middle)
        stores.append(made.store)
        return made

    yield make_one
    for store in stores:
        store.validate()
        store.close()


def in_thread(call: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize("kinds", [("device", "mmap"), ("device", "late"), ("device", "file"),
                                   ("device", "pinned", "file")], ids="-".join)  # fmt: skip
def test_visits_overlap_in_any_order_of_their_halves(
    make: Callable[..., Made], kinds: tuple[str, ...]
) -> None:
    it = make(*kinds, middle=6 if len(kinds) > 2 else 0)
    for blocks in ([0, 5, 7], [1, 5, 2], [11, 3, 7]):
        pending = [it.judge(segment, blocks) for segment in range(SEGMENTS)]
        for segment in (1, 0, 2):
            it.check(segment, pending[segment], blocks)
        for each in pending:
            each.release()
        it.store.validate()
        assert all(it.where(segment) >= set(blocks) for segment in range(SEGMENTS))
    assert np.array_equal(it.content(), it.blocks)


def test_a_micro_batch_is_judged_while_another_is_fetched(make: Callable[..., Made]) -> None:
    it = make("device", "held")
    disk = it.store.tiers[1]
    assert isinstance(disk, HeldTier)
    disk.told.clear()
    first = it.judge(0, [0, 1])
    fetching = in_thread(lambda: it.check(0, first, [0, 1]))
    assert disk.asked.wait(20)
    second = it.judge(1, [2, 3])
    assert it.where(0) == it.where(1) == set()
    disk.told.set()
    fetching.join(20)
    it.check(1, second, [2, 3])
    first.release()
    second.release()
    assert (it.where(0), it.where(1)) == ({0, 1}, {2, 3})


def test_nothing_is_written_to_the_last_tier_during_a_visit(make: Callable[..., Made]) -> None:
    """Another thread's new blocks wait until the visit is over, not for its reads only."""
    it = make("device", "held")
    disk = it.store.tiers[1]
    assert isinstance(disk, HeldTier)
    disk.told.clear()
    pending = it.judge(0, [0, 1])
    fetching = in_thread(lambda: it.check(0, pending, [0, 1]))
    assert disk.asked.wait(20)
    appending = in_thread(lambda: it.store.append(it.segments, it.blocks[:, :1]))
    appending.join(0.05)
    assert appending.is_alive()
    disk.told.set()
    fetching.join(20)
    appending.join(0.05)
    assert appending.is_alive()
    pending.release()
    appending.join(20)
    assert not disk.is_disturbed
    assert it.store.space.blocks[it.segments].tolist() == [BLOCKS + 1] * SEGMENTS


def test_what_a_visit_reads_from_a_middle_tier_stays_there(make: Callable[..., Made]) -> None:
    """Room for what others push down never comes from blocks that are about to be read.

    1. Segment 0 has two blocks in the middle tier alone, which is full.
    2. They are judged, and not read yet.
    3. Segment 1 evicts blocks from the top tier, which go to the middle one.
    """
    it = make("device", "pinned", "mmap", middle=2)
    held = in_the_middle(it)
    first = it.judge(0, held)
    second = it.judge(1, [0, 1, 2, 3])
    it.check(1, second, [0, 1, 2, 3])
    it.check(0, first, held)
    first.release()
    second.release()


def in_the_middle(it: Made) -> list[int]:
    """Blocks of segment 0 in the middle tier alone, which has two slots."""
    for blocks in ([0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]):
        for segment in (1, 0):
            with it.judge(segment, blocks) as pending:
                it.check(segment, pending, blocks)
    handles = it.store.space.all_handles(int(it.segments[0]))
    below = it.store._moves.residency[1].slot_of.array[handles]
    held: list[int] = np.flatnonzero(below >= 0).tolist()
    assert len(held) == 2
    assert not it.where(0) & set(held)
    return held


def test_a_middle_tier_is_not_written_while_it_is_read(make: Callable[..., Made]) -> None:
    it = make("device", "held", "mmap", middle=2)
    held, middle = in_the_middle(it), it.store.tiers[1]
    assert isinstance(middle, HeldTier)
    first = it.judge(0, held)
    middle.told.clear()
    middle.asked.clear()
    fetching = in_thread(lambda: it.check(0, first, held))
    assert middle.asked.wait(20)
    judged: list[PendingVisit] = []
    judging = in_thread(lambda: judged.append(it.judge(1, [0, 1, 2, 3])))
    judging.join(0.05)
    middle.told.set()
    fetching.join(20)
    judging.join(20)
    assert not middle.is_disturbed
    it.check(1, judged[0], [0, 1, 2, 3])
    first.release()
    judged[0].release()


def test_a_domain_has_one_visit_at_a_time(make: Callable[..., Made]) -> None:
    it = make("device", "mmap")
    first = it.judge(0, [0, 1])
    with pytest.raises(ConfigError, match="the caller is in a visit: finish or close it first"):
        it.judge(0, [2])
    found: list[set[int]] = []

    def visit() -> None:
        with it.judge(0, [2, 3, 4, 5]) as pending:
            it.check(0, pending, [2, 3, 4, 5])
            found.append(it.where(0))

    waiting = in_thread(visit)
    waiting.join(0.05)
    assert waiting.is_alive()
    it.check(0, first, [0, 1])
    assert it.where(0) == {0, 1}
    first.release()
    waiting.join(20)
    assert found == [{2, 3, 4, 5}]


@pytest.mark.parametrize("change", ["append", "drop", "resize", "visit"])
def test_who_judged_may_not_change_what_is_visited(make: Callable[..., Made], change: str) -> None:
    it = make("device", "mmap")
    selection = Selection(np.array([0, 1]), np.zeros(1, np.int32), np.zeros(1, np.float32))
    changes: dict[str, Callable[[], object]] = {
        "append": lambda: it.store.append(it.segments, it.blocks[:, :1]),
        "drop": lambda: it.store.drop(it.segments[2:]),
        "resize": lambda: it.store.resize(0, SEGMENTS * QUOTA + 1),
        "visit": lambda: list(it.store.visit(selection, it.segments[:1])),
    }
    with it.judge(1, [0]), pytest.raises(ConfigError, match="the caller is in a visit"):
        changes[change]()
    changes[change]()


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("kinds", [("device", "mmap"), ("device", "pinned", "late")], ids="-".join)
def test_a_failed_fetch_leaves_the_directory_true(
    make: Callable[..., Made], kinds: tuple[str, ...], late: bool
) -> None:
    it = make(*kinds, middle=4 if len(kinds) > 2 else 0)
    with it.judge(0, [0, 1]) as pending:
        it.check(0, pending, [0, 1])
    free = it.store._moves.residency[0].free_slots
    other = it.judge(1, [5, 6])
    with (
        failing(it.store.tiers[-1], "read", late=late),
        it.judge(0, [1, 2, 3]) as pending,
        pytest.raises(OSError, match="does not read"),
    ):
        pending.fetch()
    assert it.where(0) == {0, 1}
    it.check(1, other, [5, 6])
    other.release()
    assert it.store._moves.residency[0].free_slots == free - 2
    it.store.validate()
    with it.judge(0, [1, 2, 3]) as pending:
        it.check(0, pending, [1, 2, 3])


def test_a_visit_given_up_before_its_fetch_gives_its_slots_back(make: Callable[..., Made]) -> None:
    it = make("device", "mmap")
    free = it.store._moves.residency[0].free_slots
    pending = it.judge(0, [0, 1, 2])
    assert it.store._moves.residency[0].free_slots == free - 3
    pending.release()
    pending.release()
    assert it.store._moves.residency[0].free_slots == free
    it.store.validate()


def test_a_policy_that_errs_while_judging_leaves_no_visit(make: Callable[..., Made]) -> None:
    it = make("device", "mmap")
    with it.judge(0, [0, 1, 2, 3]) as pending:
        it.check(0, pending, [0, 1, 2, 3])
    it.policy.mistake = "too few"
    with pytest.raises(PolicyError):
        it.judge(0, [4, 5])
    it.policy.mistake = None
    it.store.append(it.segments, it.blocks[:, :1])
    with it.judge(0, [4, 5]) as pending:
        it.check(0, pending, [4, 5])


def test_a_selection_larger_than_its_domain_says_so_and_comes_in_parts(
    make: Callable[..., Made],
) -> None:
    it = make("device", "mmap")
    blocks = [9, 0, 3, 1, 7, 2]
    with it.judge(0, blocks) as pending, it.judge(1, [0, 1, 2, 3]) as other:
        assert not pending.is_whole
        assert other.is_whole
        it.check(1, other, [0, 1, 2, 3])
        found: list[bytes] = []
        for visit in pending.visits():
            assert len(visit.slots) <= QUOTA
            found += [block.tobytes() for block in it.store.tiers[0].view[visit.slots]]
    assert sorted(found) == sorted(it.blocks[0, block].tobytes() for block in blocks)


def test_what_the_policy_knows_is_not_told_again(make: Callable[..., Made]) -> None:
    it = make("device", "mmap")
    told: list[int] = []
    policy = it.policy
    hear = policy.on_access

    def listen(access: Access) -> None:
        told.append(len(access.handles))
        hear(access)

    policy.on_access = listen  # type: ignore[method-assign]
    selection = Selection(np.array([0, 2]), np.array([3, 4], np.int32), np.zeros(2, np.float32))
    for is_news in (True, False):
        with it.store.judge(selection, it.segments[:1], is_news=is_news) as pending:
            it.check(0, pending, [3, 4])
    assert told == [2]
    assert it.store.metrics.selected == 2
    assert it.store.metrics.hit_rate == 0


def test_work_space_waits_for_no_visit(make: Callable[..., Made]) -> None:
    """Memory that a visit's thread takes cannot come from slots, also when another one judged."""
    it = make("device", "mmap")
    memory = it.store.tiers[0].memory
    assert memory is not None
    memory.take(memory.free_bytes, np.uint8, "test")
    judged: list[PendingVisit] = []
    in_thread(lambda: judged.append(it.judge(0, [0]))).join(20)
    with pytest.raises(CapacityError, match="work space needs"):
        memory.take(BLOCK, np.uint8, "work space")
    judged[0].release()
    memory.take(BLOCK, np.uint8, "work space")


def test_transfers_are_noted(make: Callable[..., Made]) -> None:
    it = make("device", "pinned", "mmap", middle=4)
    timeline = it.store.timeline = Timeline()
    with it.judge(0, [0, 1]) as pending:
        it.check(0, pending, [0, 1])
    it.store.timeline = None
    with it.judge(0, [2]) as pending:
        it.check(0, pending, [2])
    assert [(span.name, span.facts) for span in timeline.spans] == [
        ("read mmap2", {"bytes": 2 * BLOCK})
    ]


def test_threads_that_visit_and_change_agree_with_the_bytes(make: Callable[..., Made]) -> None:
    """Halves in different threads, random blocks, and a writer that comes between."""
    it = make("device", "pinned", "file", middle=5)
    wrong: list[object] = []

    def visit_often(segment: int) -> None:
        random = np.random.default_rng(segment)
        for _ in range(40):
            blocks = random.choice(BLOCKS, random.integers(0, QUOTA + 1), replace=False).tolist()
            with it.judge(segment, blocks) as pending:
                try:
                    it.check(segment, pending, blocks)
                except BaseException as error:
                    wrong.append(error)

    def change_often() -> None:
        for _ in range(20):
            it.store.append(it.segments, it.blocks[:, :1])
            it.store.truncate(it.segments, BLOCKS)

    threads = [in_thread(partial(visit_often, segment)) for segment in range(SEGMENTS)]
    threads.append(in_thread(change_often))
    for thread in threads:
        thread.join(120)
    assert not any(thread.is_alive() for thread in threads)
    assert wrong == []
    assert np.array_equal(it.content(), it.blocks)


def test_the_tiers_of_these_tests_are_what_they_say(make: Callable[..., Made]) -> None:
    it = make("device", "pinned", "file", middle=1)
    assert [type(tier) for tier in it.store.tiers] == [DeviceTier, PinnedTier, FileTier]
