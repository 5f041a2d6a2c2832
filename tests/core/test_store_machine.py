"""The block store against a dictionary: anything in any order, over chains of any length."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np
from chains import BLOCK, LAYOUT, MISTAKES, Unruly, failing, make_tier
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tierstore.errors import CapacityError, ConfigError, PolicyError
from tierstore.interfaces import BlockScores, Selection
from tierstore.policies import LRU, Lookahead, Random
from tierstore.store import BlockStore
from tierstore.tiers import MmapTier

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from unittest import TestCase

    from tierstore.interfaces import Bytes, EvictionPolicy, Ids
    from tierstore.kernels.element import Array

LIMITS = [12 << 10, 32 << 10, 128 << 10]
POLICIES: list[Callable[[], EvictionPolicy]] = [
    LRU,
    Lookahead,
    Random,
    lambda: Lookahead(pool=2),
]
MOST_SEGMENTS = 8

randoms = st.integers(0, 2**32 - 1).map(np.random.default_rng)


class Block(NamedTuple):
    """What the model knows of a block; `tokens` is None for those that follow from its number."""

    content: bytes
    valid: int
    tokens: list[int] | None


class Lease(NamedTuple):
    """Held (segment, block) pairs, and the slot of each in each tier that had it."""

    stack: ExitStack
    blocks: set[tuple[int, int]]
    slots: dict[tuple[int, int, int], int]


class StoreMachine(RuleBasedStateMachine):
    """`model` maps a segment to its blocks; a block's content is unique within its segment.

    Hypothesis chooses what happens, and a seed for how.
    """

    length: ClassVar[int]

    @initialize(data=st.data(), random=randoms)
    def build(self, data: st.DataObject, random: np.random.Generator) -> None:
        """A chain whose upper tiers have few slots, and two segments in it."""
        first, others = ["device", "pinned", "mmap"], ["pinned", "late", "mmap"]
        kinds = [data.draw(st.sampled_from(others if i else first)) for i in range(self.length)]
        self.limits = [data.draw(st.sampled_from(LIMITS)) for _ in kinds]
        self.policies = [Unruly(data.draw(st.sampled_from(POLICIES))()) for _ in kinds[1:]]
        self.folder = TemporaryDirectory()
        self.tiers = [
            make_tier(kind, limit, Path(self.folder.name), level)
            for level, (kind, limit) in enumerate(zip(kinds, self.limits, strict=True))
        ]
        self.store = BlockStore(LAYOUT, self.tiers, self.policies)
        self.model: dict[int, list[Block]] = {}
        self.domain: dict[int, int] = {}
        self.leases: list[Lease] = []
        self.taken: list[tuple[int, Array]] = []
        self.selected = self.blocks_made = 0
        with self.allowed(CapacityError):
            for level in range(self.store.backing):
                self.store.resize(level, int(random.integers(2, 30)))
            self.open_some(random, 2)
            self.append_to(list(self.model), random, int(random.integers(6, 20)))

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
        if hasattr(self, "folder"):
            self.folder.cleanup()

    # What is known from outside

    def handles(self, segment: int) -> Ids:
        return self.store.space.all_handles(segment)

    def slots(self, level: int, segment: int) -> list[int]:
        """The slot of each block of a segment in a tier, -1 for none."""
        slot_of = self.store._moves.residency[level].slot_of.array
        slots: list[int] = slot_of[self.handles(segment)].tolist()
        return slots

    def quota(self, domain: int) -> int:
        """Blocks that a domain may have in the top tier; all where that is the only tier."""
        if not self.store.backing:
            return self.tiers[0].capacity
        return int(self.store._moves.residency[0].quota[domain])

    def held(self) -> set[tuple[int, int]]:
        return {block for lease in self.leases for block in lease.blocks}

    @property
    def tables_are_limited(self) -> bool:
        """Whether tables of the store compete with something for room."""
        return self.store.memory.limit_bytes < 1 << 62

    def some(self, random: np.random.Generator, most: int = 3) -> list[int]:
        """Some open segments, in any order."""
        order: list[int] = random.permutation(list(self.model)).tolist()
        return order[: random.integers(1, most + 1)]

    @contextmanager
    def allowed(self, *errors: type[Exception]) -> Iterator[list[Exception]]:
        """Let these errors happen; yields those that did."""
        raised: list[Exception] = []
        try:
            yield raised
        except errors as error:
            raised.append(error)

    # Segments

    @precondition(lambda self: len(self.model) < MOST_SEGMENTS)
    @rule(random=randoms, joins=st.booleans())
    def open(self, random: np.random.Generator, joins: bool) -> None:
        """New segments with domains of their own, or in the domain of another segment."""
        with self.allowed(CapacityError):
            self.open_some(random, int(random.integers(1, 3)), joins=joins)

    def open_some(self, random: np.random.Generator, count: int, *, joins: bool = False) -> None:
        domains = None
        if joins and self.model:
            domains = np.full(count, self.domain[self.some(random)[0]], np.int32)
        segments = self.store.open(count, domains).tolist()
        assert not self.model.keys() & segments
        own = segments if domains is None else domains.tolist()
        self.model |= {segment: [] for segment in segments}
        self.domain |= dict(zip(segments, own, strict=True))
        if random.random() < 0.8:
            self.share_out_among(sorted(set(self.domain.values())), random)

    @precondition(lambda self: self.model)
    @rule(random=randoms, count=st.sampled_from([0, 1, 2, 3, 5, 8, 13, 64, 130]))
    def append(self, random: np.random.Generator, count: int) -> None:
        segments = self.some(random)
        with self.allowed(CapacityError) as raised:
            self.append_to(segments, random, count)
        if raised and not self.tables_are_limited:
            backing, tier = self.store._moves.residency[-1], self.tiers[-1]
            assert backing.free_slots + tier.limit - tier.capacity < len(segments) * count

    def append_to(self, segments: list[int], random: np.random.Generator, count: int) -> None:
        """Append with or without valid counts, homes and tokens."""
        shape = (len(segments), count)
        blocks = self.new_blocks(*shape)
        valid = random.integers(0, LAYOUT.tokens + 1, shape).astype(np.uint8)
        home = random.integers(0, self.store.backing + 1, shape).astype(np.uint8)
        tokens = random.integers(0, 99, (*shape, LAYOUT.tokens)).astype(np.int32)
        given = random.random(3) < [0.5, 0.5, 0.2]
        handles = self.store.append(
            np.array(segments, np.int32),
            blocks,
            valid=valid if given[0] else None,
            home=home if given[1] else None,
            tokens=tokens if given[2] else None,
        )
        for row, segment in enumerate(segments):
            valids = valid[row].tolist() if given[0] else [LAYOUT.tokens] * count
            own = tokens[row].tolist() if given[2] else [None] * count
            new = [block.tobytes() for block in blocks[row]]
            self.model[segment] += map(Block, new, valids, own)
            assert handles[row].tolist() == self.handles(segment).tolist()[-count or None :][:count]

    def new_blocks(self, rows: int, count: int) -> Bytes:
        """Blocks with a content that was never there before."""
        numbers = self.blocks_made + np.arange(rows * count, dtype=np.int64)
        self.blocks_made += rows * count
        words = np.stack([numbers, ~numbers, numbers * 0x1E3779B97F4A7C15], 1)
        return words.view(np.uint8).reshape(rows, count, BLOCK)

    @precondition(lambda self: self.model)
    @rule(random=randoms, keep=st.sampled_from([0, 1, 2, 3, 5, 8, 13, 63, 64, 65]))
    def truncate(self, random: np.random.Generator, keep: int) -> None:
        segments = self.some(random, most=2)
        is_held = any(s in segments and block >= keep for s, block in self.held())
        with self.allowed(CapacityError) as raised:
            self.store.truncate(np.array(segments, np.int32), keep)
        assert bool(raised) == is_held
        if not raised:
            self.model |= {segment: self.model[segment][:keep] for segment in segments}

    @precondition(lambda self: len(self.model) > 2)
    @rule(random=randoms)
    def drop(self, random: np.random.Generator) -> None:
        segments = self.some(random)
        is_held = any(s in segments for s, _ in self.held())
        with self.allowed(CapacityError) as raised:
            self.store.drop(np.array(segments, np.int32))
        assert bool(raised) == is_held
        if not raised:
            for segment in segments:
                del self.model[segment], self.domain[segment]

    @precondition(lambda self: 0 < len(self.model) < MOST_SEGMENTS)
    @rule(random=randoms)
    def duplicate(self, random: np.random.Generator) -> None:
        (source,) = self.some(random, most=1)
        with self.allowed(CapacityError):
            copy = self.store.open(1)
            number = int(copy[0])
            self.model[number], self.domain[number] = [], number
            self.store.duplicate(np.array([source], np.int32), copy)
            self.model[number] = list(self.model[source])

    # Reading

    @precondition(lambda self: any(self.model.values()))
    @rule(random=randoms, times=st.integers(1, 4), abandon=st.sampled_from([False, False, True]))
    def visit(self, random: np.random.Generator, times: int, abandon: bool) -> None:
        for _ in range(times):
            with self.allowed(CapacityError) as raised:
                self.visit_some(random, abandon=abandon)
            if raised:
                assert "room for no block" in str(raised[0])
                assert self.leases or 0 in map(self.quota, self.domain.values())

    def selection(self, random: np.random.Generator) -> tuple[Selection, list[int], list[set[int]]]:
        """Blocks of some segments, few or all, with scores of every block or of none."""
        segments, share = self.some(random, most=4), random.choice([0.2, 0.5, 1.0])
        chosen = [
            random.permutation(np.flatnonzero(random.random(len(self.model[s])) < share)).tolist()
            for s in segments
        ]
        ids = np.array([block for row in chosen for block in row], np.int32)
        everything = None
        if random.random() < 0.5:
            width = max(len(self.model[s]) for s in segments)
            unit_scores = random.normal(size=(len(segments), width)).astype(np.float32)
            units = np.arange(width, dtype=np.int32)[None]
            everything = BlockScores(unit_scores, units, np.array(segments, np.int32))
        scores = random.normal(size=len(ids)).astype(np.float32)
        row_ptr = np.cumsum([0, *map(len, chosen)])
        selection = Selection(row_ptr, ids, scores, everything=everything)
        return selection, segments, [set(row) for row in chosen]

    def visit_some(self, random: np.random.Generator, *, abandon: bool = False) -> None:
        """Every selected block comes once, in the top tier, with its bytes and valid count."""
        selection, segments, left = self.selection(random)
        top, slots = self.store.metrics.tiers[0], [self.slots(0, s) for s in segments]
        resident = sum(at[b] >= 0 for at, row in zip(slots, left, strict=True) for b in row)
        hits = top.hits
        for visit in self.store.visit(selection, np.array(segments, np.int32)):
            assert visit.is_whole == (len(visit.slots) == len(selection.ids))
            view, domains = self.tiers[0].view, dict.fromkeys(self.domain.values(), 0)
            for row, segment in enumerate(segments):
                here = slice(visit.row_ptr[row], visit.row_ptr[row + 1])
                names = {block.content: i for i, block in enumerate(self.model[segment])}
                found = [names[view[slot].tobytes()] for slot in visit.slots[here]]
                domains[self.domain[segment]] += len(found)
                assert left[row] >= set(found), "visited twice, or not selected"
                left[row] -= set(found)
                assert visit.valid[here].tolist() == [self.model[segment][b].valid for b in found]
                assert visit.handles[here].tolist() == self.handles(segment)[found].tolist()
            assert all(count <= self.quota(domain) for domain, count in domains.items())
            self.check_read(random)
            if abandon:
                return
        assert not any(left)
        assert self.store.metrics.selected == self.selected + len(selection.ids)
        self.selected = self.store.metrics.selected
        assert self.leases or top.hits == hits + resident

    @precondition(lambda self: self.model)
    @rule(random=randoms)
    def read(self, random: np.random.Generator) -> None:
        self.check_read(random)

    def check_read(self, random: np.random.Generator) -> None:
        segments = self.some(random)
        shortest = min(len(self.model[segment]) for segment in segments)
        first = int(random.integers(0, shortest + 1))
        count = int(random.integers(0, shortest - first + 1))
        numbers, blocks = np.array(segments, np.int32), range(first, first + count)
        out: Bytes = np.empty((len(segments), count, BLOCK), np.uint8)
        valid = self.store.read(numbers, first, count, out)
        asked = np.tile(np.array(blocks, np.int32), (len(segments), 1))
        tokens = self.store.tokens_of(numbers, asked)
        for row, segment in enumerate(segments):
            expected = [self.model[segment][block] for block in blocks]
            assert [block.tobytes() for block in out[row]] == [b.content for b in expected]
            assert valid[row].tolist() == [block.valid for block in expected]
            assert tokens[row].tolist() == [
                own.tokens or [LAYOUT.tokens * block, LAYOUT.tokens * block + 1]
                for block, own in zip(blocks, expected, strict=True)
            ]

    @precondition(lambda self: self.model and self.store.backing)
    @rule(random=randoms)
    def residents(self, random: np.random.Generator) -> None:
        """All that the top tier holds of each segment, for domains of one segment."""
        domains = list(self.domain.values())
        segments = [s for s in self.some(random) if domains.count(self.domain[s]) == 1]
        visit = self.store.residents(np.array(segments, np.int32))
        for row, segment in enumerate(segments):
            here = slice(visit.row_ptr[row], visit.row_ptr[row + 1])
            blocks = [b for b, slot in enumerate(self.slots(0, segment)) if slot >= 0]
            content = [self.tiers[0].view[slot].tobytes() for slot in visit.slots[here]]
            found = set(zip(content, visit.valid[here].tolist(), strict=True))
            assert len(content) == len(found) == len(blocks)
            assert found == {self.model[segment][block][:2] for block in blocks}
            assert sorted(visit.handles[here]) == sorted(self.handles(segment)[blocks])

    @precondition(lambda self: any(self.model.values()) and len(self.leases) < 3)
    @rule(random=randoms)
    def lease(self, random: np.random.Generator) -> None:
        segments = [segment for segment in self.some(random) if self.model[segment]]
        count = int(random.integers(1, 4))
        chosen = [random.integers(0, len(self.model[s]), count) for s in segments]
        blocks = np.array(chosen, np.int32).reshape(len(segments), count)
        held = {(s, int(b)) for s, row in zip(segments, blocks, strict=True) for b in row}
        slots = {
            (level, segment, block): slot
            for level in range(self.length)
            for segment, block in held
            if (slot := self.slots(level, segment)[block]) >= 0
        }
        stack = ExitStack()
        stack.enter_context(self.store.lease(np.array(segments, np.int32), blocks))
        self.leases.append(Lease(stack, held, slots))

    @precondition(lambda self: self.leases)
    @rule(random=randoms)
    def release(self, random: np.random.Generator) -> None:
        self.leases.pop(int(random.integers(len(self.leases)))).stack.close()

    # Capacity

    @rule(random=randoms, kind=st.sampled_from(["few", "few", "share", "limit", "too many"]))
    def resize(self, random: np.random.Generator, kind: str) -> None:
        level = int(random.integers(self.length))
        limit, before = self.store.limit(level), self.tiers[level].capacity
        share, few = int(random.random() * limit), int(random.integers(0, 40))
        slots = {"few": few, "share": share, "limit": limit, "too many": limit + 1}[kind]
        with self.allowed(CapacityError) as raised:
            self.store.resize(level, slots)
        if not raised:
            assert self.tiers[level].capacity == slots
        elif slots < before:
            assert self.leases or level == self.store.backing
        elif slots <= limit:
            # Its tables are in the memory of another tier.
            assert self.tables_are_limited
            assert self.store.memory is not self.tiers[level].memory

    @precondition(lambda self: self.model)
    @rule(random=randoms)
    def share_out(self, random: np.random.Generator) -> None:
        segments = self.some(random, most=MOST_SEGMENTS)
        self.share_out_among(sorted({self.domain[segment] for segment in segments}), random)

    def share_out_among(self, domains: list[int], random: np.random.Generator) -> None:
        """New quotas, of a few blocks each or all that is free and sometimes a little more."""
        if not self.store.backing:
            return
        others = sum(self.quota(d) for d in set(self.domain.values()) - set(domains))
        free = self.tiers[0].capacity - others
        each = int(random.choice([3, free / len(domains), 1.2 * free / len(domains)]))
        quotas = random.integers(1, max(each, 1) + 1, len(domains))
        with self.allowed(CapacityError, ConfigError) as raised:
            self.store.set_quota(np.array(domains, np.int32), quotas)
        if quotas.sum() > free:
            assert isinstance(raised[0], ConfigError)
        elif raised:
            assert isinstance(raised[0], CapacityError)
            assert self.leases or self.tables_are_limited
        else:
            assert [self.quota(domain) for domain in domains] == quotas.tolist()

    @precondition(lambda self: any(tier.memory for tier in self.tiers) and len(self.taken) < 4)
    @rule(random=randoms)
    def take(self, random: np.random.Generator) -> None:
        """Other data wants room in the memory of a tier; slots give way to it."""
        level = int(random.choice([i for i, tier in enumerate(self.tiers) if tier.memory]))
        memory = self.tiers[level].memory
        assert memory is not None
        size = random.random() * random.choice([500, memory.free_bytes, self.limits[level]])
        with self.allowed(CapacityError):
            array = memory.take(int(size), np.uint8, "test")
            array.fill(0xEE)
            self.taken.append((level, array))

    @precondition(lambda self: self.taken)
    @rule(random=randoms)
    def give(self, random: np.random.Generator) -> None:
        level, array = self.taken.pop(int(random.integers(len(self.taken))))
        assert (array == 0xEE).all()
        memory = self.tiers[level].memory
        assert memory is not None
        memory.give(array)

    # Members that fail

    @precondition(lambda self: any(self.model.values()) and self.store.backing)
    @rule(random=randoms, mistake=st.sampled_from(sorted(MISTAKES)), visits=st.booleans())
    def misbehave(self, random: np.random.Generator, mistake: str, visits: bool) -> None:
        """A policy gives a wrong answer: the call fails, and nothing is lost."""
        policy = self.policies[int(random.integers(len(self.policies)))]
        policy.mistake, policy.mistakes = mistake, 0
        with self.allowed(PolicyError, CapacityError) as raised:
            self.visit_or_append(random, visits)
        policy.mistake = None
        assert policy.mistakes == any(isinstance(error, PolicyError) for error in raised)

    @precondition(lambda self: any(self.model.values()))
    @rule(
        random=randoms,
        operation=st.sampled_from(["read", "write"]),
        late=st.booleans(),
        visits=st.booleans(),
    )
    def fail(self, random: np.random.Generator, operation: str, late: bool, visits: bool) -> None:
        """A tier has an I/O error: the call fails with it, and nothing is lost."""
        tier = self.tiers[int(random.integers(self.length))]
        with failing(tier, operation, late=late) as refused:
            with self.allowed(OSError, CapacityError) as raised:
                self.visit_or_append(random, visits)
            assert bool(refused) == any(isinstance(error, OSError) for error in raised)

    def visit_or_append(self, random: np.random.Generator, visits: bool) -> None:
        if visits:
            self.visit_some(random)
        else:
            self.append_to(self.some(random), random, int(random.integers(1, 9)))

    # Invariants

    @invariant()
    def the_directory_is_sound(self) -> None:
        if hasattr(self, "store"):
            self.store.validate()
            assert self.store._moves.residency[0].quota.sum() <= self.tiers[0].capacity
            lengths = [len(self.handles(segment)) for segment in self.model]
            assert lengths == [len(blocks) for blocks in self.model.values()]
            self.selected = self.store.metrics.selected

    @invariant()
    def every_copy_in_every_tier_is_the_block(self) -> None:
        for level, tier in enumerate(getattr(self, "tiers", ())):
            for segment, blocks in self.model.items():
                slots = self.slots(level, segment)
                here = [block for block, slot in enumerate(slots) if slot >= 0]
                out: Bytes = np.empty((len(here), BLOCK), np.uint8)
                at = np.array([slots[block] for block in here], np.int32)
                tier.read(at, out, np.arange(len(here), dtype=np.int32)).wait()
                assert out.tobytes() == b"".join(blocks[block].content for block in here)
                assert level < self.store.backing or len(here) == len(blocks)

    @invariant()
    def leased_blocks_stay_where_they_are(self) -> None:
        for lease in getattr(self, "leases", ()):
            for (level, segment, block), slot in lease.slots.items():
                assert self.slots(level, segment)[block] == slot

    @invariant()
    def no_tier_is_larger_than_its_limit(self) -> None:
        """By file sizes, and by the arrays that exist."""
        for level, tier in enumerate(getattr(self, "tiers", ())):
            limit = self.limits[level]
            if isinstance(tier, MmapTier):
                assert tier.path.stat().st_size == tier.used_bytes <= limit
            elif tier.memory is not None:
                arrays = [array for owner, array in self.taken if owner == level]
                if tier.memory is self.store.memory:
                    arrays += self.tables()
                used = tier.capacity * BLOCK + sum(array.nbytes for array in arrays)
                assert tier.memory.used_bytes == used
                assert used <= tier.memory.peak_bytes <= limit

    def tables(self) -> list[Array]:
        space, residency = self.store.space, self.store._moves.residency
        arrays = [space.chunks, space.blocks, space.owner_segment, space.owner_index]
        arrays += [column.array for column in space._columns]
        for at in residency:
            arrays += [at.handle_of, at.members, at.counts, at.quota, at.domain_of, at._free]
        return arrays


def machine(tiers: int) -> type[TestCase]:
    """The test case of a machine over so many tiers."""

    class Machine(StoreMachine):
        length = tiers

    Machine.TestCase.settings = settings(stateful_step_count=40)
    return Machine.TestCase


TestStoreOnOneTier = machine(1)
TestStoreOnTwoTiers = machine(2)
TestStoreOnThreeTiers = machine(3)
TestStoreOnFiveTiers = machine(5)
