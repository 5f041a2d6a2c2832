"""A policy that breaks its contract is named, with the block; and the store is as it was."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np
import pytest
from chains import LAYOUT, make_tier

from tierstore.errors import ConfigError, PolicyError
from tierstore.interfaces import Access, Demand, Ids, Selection
from tierstore.policies import LRU
from tierstore.store import BlockStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tierstore.policies.ranked import Rank

WINDOW, BLOCKS = 4, 9


class Wrong(LRU):
    """Answers otherwise, or raises, when told to; notes what is gone."""

    answer: Callable[[Demand, Ids], object] | None = None
    error: Exception | None = None
    raises_in = ""
    """Names of methods."""

    def __init__(self) -> None:
        self.removed: list[int] = []
        self.closed: list[tuple[list[int], list[int]]] = []

    def victims(self, demand: Demand) -> Ids:
        self._may_raise("victims")
        right = super().victims(demand)
        return right if self.answer is None else cast("Ids", self.answer(demand, right))

    def on_access(self, access: Access) -> None:
        self._may_raise("on_access")
        super().on_access(access)

    def on_admit(self, handles: Ids, domains: Ids) -> None:
        self._may_raise("on_admit")
        super().on_admit(handles, domains)

    def on_evict(self, handles: Ids) -> None:
        self._may_raise("on_evict")
        super().on_evict(handles)

    def on_remove(self, handles: Ids) -> None:
        self.removed += handles.tolist()
        self._may_raise("on_remove")
        super().on_remove(handles)

    def on_close(self, segments: Ids, domains: Ids) -> None:
        self.closed.append((segments.tolist(), domains.tolist()))
        self._may_raise("on_close")

    def _may_raise(self, where: str) -> None:
        if self.error is not None and where in self.raises_in.split():
            raise self.error


class Setting(NamedTuple):
    """Two segments, numbers 0 and 1, whose blocks 0 to 3 fill their windows; 0 and 1 are older."""

    store: BlockStore
    policy: Wrong
    segments: Ids

    def visit(self, *blocks: int) -> None:
        ids = np.array([*blocks, *blocks], np.int32)
        row_ptr = np.array([0, len(blocks), 2 * len(blocks)])
        selection = Selection(row_ptr, ids, np.zeros(len(ids), np.float32))
        for _ in self.store.visit(selection, self.segments):
            pass

    def handle(self, segment: int, block: int) -> int:
        return int(self.store.space.all_handles(segment)[block])

    def state(self) -> tuple[list[int], bytes]:
        """Which blocks are in which slots of the window, and what everything reads as."""
        out = np.empty((2, BLOCKS, LAYOUT.block_bytes), np.uint8)
        self.store.read(self.segments, 0, BLOCKS, out)
        handles = self.store.space.handles_of(
            self.segments, np.tile(np.arange(BLOCKS, dtype=np.int32), (2, 1))
        )
        slots = self.store._moves.residency[0].slot_of.array[handles]
        return slots.reshape(-1).tolist(), out.tobytes()


@pytest.fixture
def it(tmp_path: Path) -> Iterator[Setting]:
    tiers = [make_tier(kind, 1 << 20, tmp_path) for kind in ("device", "mmap")]
    policy = Wrong()
    with closing(BlockStore(LAYOUT, tiers, [policy])) as store:
        store.resize(0, 2 * WINDOW)
        segments = store.open(2)
        store.set_quota(segments, np.array([WINDOW, WINDOW]))
        random = np.random.default_rng(0)
        blocks = random.integers(0, 60, (2, BLOCKS, LAYOUT.block_bytes), np.uint8)
        store.append(segments, blocks)
        setting = Setting(store, policy, segments)
        assert sorted(segments.tolist()) == [0, 1]
        setting.visit(0, 1)
        setting.visit(2, 3)
        yield setting
        store.validate()


def unchanged_by(it: Setting, message: str, *blocks: int) -> None:
    """The visit fails so, nothing has moved, and all goes well when the policy does."""
    before = it.state()
    with pytest.raises(PolicyError, match=message):
        it.visit(*blocks)
    assert it.state() == before
    it.store.validate()
    it.policy.answer = it.policy.error = None
    it.visit(*blocks)
    assert it.state() != before


FIRST_OF_0 = r"^Wrong\.victims named block {} of segment 0, which {}: expected distinct eligible"


def test_a_block_used_by_the_running_step_is_refused(it: Setting) -> None:
    it.policy.answer = lambda _, right: swapped(right, it.handle(0, 3))
    unchanged_by(it, FIRST_OF_0.format(3, "is used by the running step"), 3, 4)


def test_a_leased_block_is_refused(it: Setting) -> None:
    it.policy.answer = lambda _, right: swapped(right, it.handle(0, 0))
    with it.store.lease(np.array([0], np.int32), np.array([[0]], np.int32)):
        unchanged_by(it, FIRST_OF_0.format(0, "is leased"), 4)


def test_a_block_that_is_not_there_is_refused(it: Setting) -> None:
    it.policy.answer = lambda _, right: swapped(right, it.handle(0, 7))
    unchanged_by(it, FIRST_OF_0.format(7, "is not in the tier"), 4)


def test_a_repeated_block_is_refused(it: Setting) -> None:
    it.policy.answer = lambda _, right: np.array([right[0], right[0], *right[2:]], np.int32)
    unchanged_by(it, r"block \d of segment 0, which was named before: expected distinct", 4, 5)


def test_a_block_of_another_domain_is_refused(it: Setting) -> None:
    it.policy.answer = lambda _, right: swapped(right, it.handle(1, 0))
    message = r"block 0 of segment 1, which is of domain 1, where one of 0 was due: expected"
    unchanged_by(it, message, 4)


def swapped(right: Ids, handle: int) -> Ids:
    """The right answer, but for the first victim of segment 0: another block."""
    return np.where(np.arange(len(right)) == int(np.argmin(right)), handle, right).astype(np.int32)


@pytest.mark.parametrize("handle", [-1, 1 << 20, np.iinfo(np.int32).min, np.iinfo(np.int32).max])
def test_a_handle_of_no_block_is_refused(it: Setting, handle: int) -> None:
    it.policy.answer = lambda _, right: np.full_like(right, handle)
    unchanged_by(it, rf"^Wrong\.victims named handle {handle}, which is no block's", 4)


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        (lambda _, right: right[:-1], r"int32 \[1\]"),
        (lambda _, right: np.append(right, right[:1]), r"int32 \[3\]"),
        (lambda _, right: right[:, None], r"int32 \[2, 1\]"),
        (lambda _, right: right.astype(np.float64), r"float64 \[2\]"),
        (lambda _, right: right.tolist(), "list"),
        (lambda _, right: None, "NoneType"),
    ],
    ids=["too few", "too many", "of another shape", "of another type", "a list", "nothing"],
)
def test_what_is_no_array_of_as_many_handles_is_refused(
    it: Setting, answer: Callable[[Demand, Ids], object], found: str
) -> None:
    it.policy.answer = answer
    unchanged_by(it, rf"^Wrong\.victims returned {found}: expected int32 \[2\]", 4)


@pytest.mark.parametrize("name", ["rank", "tie"])
@pytest.mark.parametrize(
    ("answer", "found"),
    [
        (lambda right: right[:-1], r"\[5\]"),
        (lambda right: np.append(right, right), r"\[12\]"),
        (lambda right: right[:, None], r"\[6, 1\]"),
        (lambda right: np.float64(3), "3.0"),
        (lambda right: None, "None"),
    ],
    ids=["too few", "too many", "of another shape", "a number", "nothing"],
)
def test_what_is_not_one_rank_for_each_handle_is_refused(
    it: Setting,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    answer: Callable[[Rank], object],
    found: str,
) -> None:
    right = getattr(it.policy, name)
    monkeypatch.setattr(it.policy, name, lambda stats: answer(right(stats)))
    before = it.state()
    with pytest.raises(PolicyError, match=rf"^Wrong\.{name} returned {found}: expected .* \[6\]"):
        it.visit(3, 4)
    assert it.state() == before
    it.store.validate()


@pytest.mark.parametrize("where", ["victims", "on_access"])
def test_an_exception_of_the_policy_is_its_own_fault(it: Setting, where: str) -> None:
    it.policy.error, it.policy.raises_in = ZeroDivisionError("no blocks"), where
    unchanged_by(it, rf"^Wrong\.{where} raised ZeroDivisionError\('no blocks'\)$", 4)


@pytest.mark.parametrize(
    ("where", "resident"),
    [("on_evict", {1, 2, 3}), ("on_admit", {1, 2, 3, 4})],
)
def test_what_a_policy_is_told_has_happened_even_if_it_raises(
    it: Setting, where: str, resident: set[int]
) -> None:
    """The store goes on: the blocks are where the message says, and their bytes right."""
    slots, content = it.state()
    assert {block for block, slot in enumerate(slots[:BLOCKS]) if slot >= 0} == {0, 1, 2, 3}
    it.policy.error, it.policy.raises_in = ZeroDivisionError("no blocks"), where
    with pytest.raises(PolicyError, match=rf"^Wrong\.{where} raised ZeroDivisionError"):
        it.visit(4)
    slots, after = it.state()
    assert {block for block, slot in enumerate(slots[:BLOCKS]) if slot >= 0} == resident
    assert after == content
    it.store.validate()
    it.policy.error = None
    it.visit(4, 5)
    assert it.state()[1] == content


def test_an_error_of_the_library_passes_through(it: Setting) -> None:
    it.policy.error, it.policy.raises_in = ConfigError("not for a store"), "victims"
    with pytest.raises(ConfigError, match="not for a store"):
        it.visit(4)


def test_a_policy_of_a_lower_tier_that_raises_takes_no_slots(tmp_path: Path) -> None:
    """It hears of blocks on their way into its tier, when they have slots already."""
    tiers = [
        make_tier(kind, 1 << 20, tmp_path, level)
        for level, kind in enumerate(["device", "pinned", "mmap"])
    ]
    policy = Wrong()
    with closing(BlockStore(LAYOUT, tiers, [LRU(), policy])) as store:
        store.resize(0, 2)
        store.resize(1, 3)
        segments = store.open(1)
        store.set_quota(segments, np.array([2]))
        blocks = np.ones((1, 2, LAYOUT.block_bytes), np.uint8)
        policy.error, policy.raises_in = ValueError("not today"), "on_access"
        for _ in range(5):
            with pytest.raises(PolicyError, match=r"Wrong\.on_access raised ValueError"):
                store.append(segments, blocks)
        assert store.space.blocks[segments].tolist() == [0]
        policy.error = None
        store.append(segments, blocks)
        both = np.arange(2, dtype=np.int32)
        selection = Selection(np.array([0, 2]), both, np.zeros(2, np.float32))
        policy.error = ValueError("not today")
        for _ in range(5):
            with pytest.raises(PolicyError, match=r"Wrong\.on_access raised ValueError"):
                list(store.visit(selection, segments))
        assert store._moves.residency[0].resident == 0
        policy.error = None
        assert len(list(store.visit(selection, segments))) == 1
        store.validate()


class Deep(NamedTuple):
    """One segment over three tiers, its two blocks in each of them."""

    store: BlockStore
    top: Wrong
    lower: Wrong
    segments: Ids


@pytest.fixture
def deep(tmp_path: Path) -> Iterator[Deep]:
    tiers = [
        make_tier(kind, 1 << 20, tmp_path, level)
        for level, kind in enumerate(["device", "pinned", "mmap"])
    ]
    top, lower = Wrong(), Wrong()
    with closing(BlockStore(LAYOUT, tiers, [top, lower])) as store:
        store.resize(0, 4)
        store.resize(1, 4)
        segments = store.open(1)
        store.set_quota(segments, np.array([2]))
        store.append(segments, np.ones((1, 2, LAYOUT.block_bytes), np.uint8))
        both = np.arange(2, dtype=np.int32)
        selection = Selection(np.array([0, 2]), both, np.zeros(2, np.float32))
        assert len(list(store.visit(selection, segments))) == 1
        assert [store._moves.residency[level].resident for level in range(3)] == [2, 2, 2]
        yield Deep(store, top, lower, segments)
        store.validate()


def test_blocks_are_gone_though_a_policy_raises_when_it_hears_of_it(deep: Deep) -> None:
    store, handles = deep.store, deep.store.space.all_handles(int(deep.segments[0])).tolist()
    deep.top.error, deep.top.raises_in = ValueError("no"), "on_remove"
    deep.lower.error, deep.lower.raises_in = KeyError("nor I"), "on_remove"
    with pytest.raises(PolicyError, match=r"^Wrong\.on_remove raised ValueError\('no'\)$"):
        store.truncate(deep.segments, 0)
    assert [store._moves.residency[level].resident for level in range(3)] == [0, 0, 0]
    assert store.space.blocks[deep.segments].tolist() == [0]
    assert deep.lower.removed == deep.top.removed == handles


def test_segments_are_gone_though_a_policy_raises_when_it_hears_of_it(deep: Deep) -> None:
    store = deep.store
    deep.top.error, deep.top.raises_in = ValueError("no"), "on_remove on_close"
    with pytest.raises(PolicyError, match=r"^Wrong\.on_close raised ValueError"):
        store.drop(deep.segments)
    assert deep.lower.closed == [(deep.segments.tolist(), [])]
    deep.top.error = None
    again = store.open(1)
    assert again.tolist() == deep.segments.tolist()
    assert store.space.blocks[again].tolist() == store.quota(again).tolist() == [0]


def test_an_error_is_not_hidden_by_that_of_a_policy_that_hears_of_its_blocks(deep: Deep) -> None:
    store = deep.store
    deep.top.error, deep.top.raises_in = KeyError("nor I"), "on_remove"
    deep.lower.error, deep.lower.raises_in = ValueError("no"), "on_access"
    blocks = np.ones((1, 2, LAYOUT.block_bytes), np.uint8)
    with pytest.raises(PolicyError, match=r"^Wrong\.on_access raised ValueError") as caught:
        store.append(deep.segments, blocks)
    note = "taking the blocks back: Wrong.on_remove raised KeyError('nor I')"
    assert caught.value.__notes__ == [note]
    assert store.space.blocks[deep.segments].tolist() == [2]
    assert [store._moves.residency[level].resident for level in range(3)] == [2, 2, 2]


def test_a_policy_hears_of_domains_that_have_no_segment_any_more(it: Setting) -> None:
    domain = it.segments[:1]
    shared = it.store.open(1, domain)
    it.store.drop(shared)
    it.store.drop(it.segments)
    assert it.policy.closed == [(shared.tolist(), []), (it.segments.tolist(), [0, 1])]
