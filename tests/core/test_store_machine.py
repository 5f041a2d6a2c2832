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
    from collections.abc import Iterator

    from tierstore.interfaces import Bytes, Ids
    from tierstore.kernels.element import Array

LIMITS = [12 << 10, 32 << 10, 128 << 10]
POLICIES = [LRU, Lookahead, Random, lambda: Lookahead(pool=2)]
REFUSED = (CapacityError, PolicyError, OSError)

random = st.integers(0, 2**32 - 1).map(np.random.default_rng)


class Block(NamedTuple):
    """What the model knows of a block."""

    content: bytes
    valid: int


class Lease(NamedTuple):
    """Held blocks, and the slot of each in each tier that had it."""

    stack: ExitStack
    blocks: set[tuple[int, int]]
    slots: dict[tuple[int, int, int], int]


class StoreMachine(RuleBasedStateMachine):
    """`model` maps segment to blocks; a block's content is unique within its segment."""

    firsts: ClassVar[list[str]] = ["device", "pinned", "mmap"]
    others: ClassVar[list[str]] = ["pinned", "late", "mmap"]
    length: ClassVar[int]

    @initialize(data=st.data())
    def build(self, data: st.DataObject) -> None:
        self.folder = TemporaryDirectory()
        kinds = [
            data.draw(st.sampled_from(self.others if level else self.firsts))
            for level in range(self.length)
        ]
        self.limits = [data.draw(st.sampled_from(LIMITS)) for _ in kinds]
        place = Path(self.folder.name)
        self.tiers = [
            make_tier(kind, limit, place, level)
            for level, (kind, limit) in enumerate(zip(kinds, self.limits, strict=True))
        ]
        made = [data.draw(st.sampled_from(POLICIES))() for _ in kinds[1:]]
        self.policies = [Unruly(policy) for policy in made]
        self.model: dict[int, list[Block]] = {}
        self.domain: dict[int, int] = {}
        self.leases: list[Lease] = []
        self.taken: list[tuple[int, Array]] = []
        self.selected = 0
        self.next_content = 0
        self.store = BlockStore(LAYOUT, self.tiers, self.policies)
        for level in range(1, self.store.backing):
            with self.allowed(CapacityError):
                self.store.resize(level, data.draw(st.integers(0, self.store.limit(level) // 4)))

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
        self.folder.cleanup()

    # What is known from outside

    def handles(self, segment: int) -> Ids:
        return self.store.space.all_handles(segment)

    def slots(self, level: int, segment: int) -> list[int]:
        """The slot of each block of a segment in a tier, -1 for none."""
        slot_of = self.store._moves.residency[level].slot_of.array
        return slot_of[self.handles(segment)].tolist()

    def quota(self, domain: int) -> int:
        """Blocks that a domain may have in the top tier; all where that is the only tier."""
        if not self.store.backing:
            return self.tiers[0].capacity
        return int(self.store._moves.residency[0].quota[domain])

    def held(self) -> set[tuple[int, int]]:
        return {block for lease in self.leases for block in lease.blocks}

    def some(self, random: np.random.Generator, most: int = 3) -> list[int]:
        """Some open segments, in any order."""
        return random.permutation(list(self.model))[: random.integers(1, most + 1)].tolist()

    def new_blocks(self, random: np.random.Generator, rows: int, count: int) -> Bytes:
        numbers = self.next_content + np.arange(rows * count, dtype=np.int64)
        self.next_content += rows * count
        words = np.stack([numbers, ~numbers, numbers * 0x1E3779B97F4A7C15], 1)
        return words.view(np.uint8).reshape(rows, count, BLOCK)

    @contextmanager
    def allowed(self, *errors: type[Exception]) -> Iterator[list[Exception]]:
        """Let these errors happen; yields those that did."""
        raised: list[Exception] = []
        try:
            yield raised
        except errors as error:
            raised.append(error)

    # Rules

    @precondition(lambda self: len(self.model) < 8)
    @rule(random=random, count=st.integers(1, 3), joins=st.booleans())
    def open(self, random: np.random.Generator, count: int, joins: bool) -> None:
        """New segments with domains of their own, or in the domain of another segment."""
        domains = None
        if joins and self.model:
            domains = np.full(count, self.domain[self.some(random)[0]], np.int32)
        with self.allowed(CapacityError):
            segments = self.store.open(count, domains).tolist()
            assert not self.model.keys() & segments
            self.model |= {segment: [] for segment in segments}
            own = segments if domains is None else domains.tolist()
            self.domain |= dict(zip(segments, own, strict=True))

    def append_to(self, segments: list[int], random: np.random.Generator, count: int) -> None:
        shape = (len(segments), count)
        blocks = self.new_blocks(random, *shape)
        valid = random.integers(0, LAYOUT.tokens + 1, shape).astype(np.uint8)
        home = random.integers(0, self.store.backing + 1, shape).astype(np.uint8)
        options = {"valid": valid} if random.random() < 0.5 else {}
        options |= {"home": home} if random.random() < 0.5 else {}
        handles = self.store.append(np.array(segments, np.int32), blocks, **options)
        for row, segment in enumerate(segments):
            valids = valid[row].tolist() if "valid" in options else [LAYOUT.tokens] * count
            new = zip(blocks[row], valids, strict=True)
            self.model[segment] += [Block(block.tobytes(), n) for block, n in new]
            assert handles[row].tolist() == self.handles(segment)[-count:].tolist() or not count

    @precondition(lambda self: self.model)
    @rule(random=random, count=st.one_of(st.integers(0, 6), st.sampled_from([63, 64, 130])))
    def append(self, random: np.random.Generator, count: int) -> None:
        segments = self.some(random)
        wanted = len(segments) * count
        with self.allowed(CapacityError) as raised:
            self.append_to(segments, random, count)
        if raised and self.store.memory.limit_bytes == 1 << 62:
            free = self.store._moves.residency[self.store.backing].free_slots
            assert free + self.growth(self.store.backing) < wanted, raised

    def tables_are_limited(self, level: int) -> bool:
        """Whether another tier's limit may leave too little room for the tables of this one."""
        memory = self.store.memory
        return memory is not self.tiers[level].memory and memory.limit_bytes < 1 << 62

    def growth(self, level: int) -> int:
        return self.store.limit(level) - self.tiers[level].capacity

    def selection(
        self, random: np.random.Generator
    ) -> tuple[Selection, list[int], list[list[int]]]:
        """Blocks of some segments, few or all, with scores of every block or of none."""
        segments = self.some(random, most=4)
        share = random.choice([0.1, 0.4, 1.0])
        chosen = [
            random.permutation(np.flatnonzero(random.random(len(self.model[s])) < share)).tolist()
            for s in segments
        ]
        row_ptr = np.cumsum([0, *map(len, chosen)])
        ids = np.array([block for row in chosen for block in row], np.int32)
        everything = None
        if random.random() < 0.5:
            width = max(len(self.model[s]) for s in segments)
            scores = random.normal(size=(len(segments), width)).astype(np.float32)
            units = np.arange(width, dtype=np.int32)[None]
            everything = BlockScores(scores, units, np.array(segments, np.int32))
        scores = random.normal(size=len(ids)).astype(np.float32)
        return Selection(row_ptr, ids, scores, everything=everything), segments, chosen

    def visit_some(self, random: np.random.Generator, *, abandon: bool = False) -> None:
        selection, segments, chosen = self.selection(random)
        hits = sum(
            slots[block] >= 0
            for segment, row in zip(segments, chosen, strict=True)
            for slots in [self.slots(0, segment)]
            for block in row
        )
        counters = self.store.metrics.tiers[0]
        before, left = counters.hits, [set(row) for row in chosen]
        for visit in self.store.visit(selection, np.array(segments, np.int32)):
            view = self.tiers[0].view
            assert len(visit.row_ptr) == len(segments) + 1
            for row, segment in enumerate(segments):
                here = slice(visit.row_ptr[row], visit.row_ptr[row + 1])
                names = {block.content: i for i, block in enumerate(self.model[segment])}
                found = [names[view[slot].tobytes()] for slot in visit.slots[here].tolist()]
                assert len(set(found)) == len(found) <= self.quota(self.domain[segment])
                assert left[row] >= set(found), "a block is visited twice or was not selected"
                left[row] -= set(found)
                valid = [self.model[segment][block].valid for block in found]
                assert visit.valid[here].tolist() == valid
                assert visit.handles[here].tolist() == self.handles(segment)[found].tolist()
            assert visit.is_whole == (len(visit.slots) == len(selection.ids))
            self.check_read(random)
            if abandon:
                break
        else:
            assert not any(left)
            assert self.store.metrics.selected == self.selected + len(selection.ids)
            if not self.leases:
                assert counters.hits - before == hits

    @precondition(lambda self: self.model)
    @rule(random=random, abandon=st.sampled_from([False, False, False, True]))
    def visit(self, random: np.random.Generator, abandon: bool) -> None:
        with self.allowed(CapacityError) as raised:
            self.visit_some(random, abandon=abandon)
        quotas = [self.quota(domain) for domain in self.domain.values()]
        if raised:
            assert "room for no block" in str(raised[0])
            assert self.leases or 0 in quotas, raised

    def check_read(self, random: np.random.Generator) -> None:
        segments = self.some(random)
        shortest = min(len(self.model[segment]) for segment in segments)
        first = int(random.integers(0, shortest + 1))
        count = int(random.integers(0, shortest - first + 1))
        out: Bytes = np.empty((len(segments), count, BLOCK), np.uint8)
        valid = self.store.read(np.array(segments, np.int32), first, count, out)
        for row, segment in enumerate(segments):
            expected = self.model[segment][first : first + count]
            assert [block.tobytes() for block in out[row]] == [b.content for b in expected]
            assert valid[row].tolist() == [block.valid for block in expected]

    @precondition(lambda self: self.model)
    @rule(random=random)
    def read(self, random: np.random.Generator) -> None:
        self.check_read(random)

    @precondition(lambda self: self.model)
    @rule(random=random)
    def residents(self, random: np.random.Generator) -> None:
        """Everything of each segment that the top tier holds, for domains of one segment."""
        shared = list(self.domain.values())
        segments = [s for s in self.some(random) if shared.count(self.domain[s]) == 1]
        if not segments or not self.store.backing:
            return
        visit = self.store.residents(np.array(segments, np.int32))
        for row, segment in enumerate(segments):
            here = slice(visit.row_ptr[row], visit.row_ptr[row + 1])
            blocks = [b for b, slot in enumerate(self.slots(0, segment)) if slot >= 0]
            found = {
                (self.tiers[0].view[slot].tobytes(), valid)
                for slot, valid in zip(
                    visit.slots[here].tolist(), visit.valid[here].tolist(), strict=True
                )
            }
            assert found == {self.model[segment][block] for block in blocks}
            assert sorted(visit.handles[here]) == sorted(self.handles(segment)[blocks])

    @precondition(lambda self: self.model)
    @rule(random=random, keep=st.one_of(st.integers(0, 8), st.integers(60, 70)))
    def truncate(self, random: np.random.Generator, keep: int) -> None:
        segments = self.some(random)
        is_held = any(s in segments and block >= keep for s, block in self.held())
        with self.allowed(CapacityError) as raised:
            self.store.truncate(np.array(segments, np.int32), keep)
        assert bool(raised) == is_held
        if not raised:
            self.model |= {segment: self.model[segment][:keep] for segment in segments}

    @precondition(lambda self: self.model)
    @rule(random=random)
    def drop(self, random: np.random.Generator) -> None:
        segments = self.some(random)
        is_held = any(s in segments for s, _ in self.held())
        with self.allowed(CapacityError) as raised:
            self.store.drop(np.array(segments, np.int32))
        assert bool(raised) == is_held
        if not raised:
            for segment in segments:
                del self.model[segment], self.domain[segment]

    @precondition(lambda self: 0 < len(self.model) < 8)
    @rule(random=random)
    def duplicate(self, random: np.random.Generator) -> None:
        source = self.some(random)[0]
        with self.allowed(CapacityError):
            target = self.store.open(1)
            self.model[int(target[0])], self.domain[int(target[0])] = [], int(target[0])
            self.store.duplicate(np.array([source], np.int32), target)
            self.model[int(target[0])] = list(self.model[source])

    @precondition(lambda self: any(self.model.values()) and len(self.leases) < 3)
    @rule(random=random)
    def lease(self, random: np.random.Generator) -> None:
        segments = [segment for segment in self.some(random) if self.model[segment]]
        if not segments:
            return
        count = int(random.integers(1, 4))
        blocks = np.array(
            [random.integers(0, len(self.model[s]), count) for s in segments], np.int32
        )
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
    @rule(random=random)
    def release(self, random: np.random.Generator) -> None:
        self.leases.pop(int(random.integers(len(self.leases)))).stack.close()

    @rule(random=random, share=st.floats(0, 1.05))
    def resize(self, random: np.random.Generator, share: float) -> None:
        level = int(random.integers(self.length))
        slots, before = int(share * self.store.limit(level)), self.tiers[level].capacity
        with self.allowed(CapacityError) as raised:
            self.store.resize(level, slots)
        if not raised:
            assert self.tiers[level].capacity == slots
        elif slots < before:
            assert self.leases or level == self.store.backing
        elif slots <= self.store.limit(level):
            assert self.tables_are_limited(level)

    @precondition(lambda self: self.model and self.store.backing)
    @rule(random=random, share=st.floats(0.05, 1.05))
    def share_out(self, random: np.random.Generator, share: float) -> None:
        """Give the domains of some segments new quotas, all together a share of what is free."""
        domains = sorted({self.domain[segment] for segment in self.some(random, most=8)})
        others = sum(self.quota(d) for d in set(self.domain.values()) - set(domains))
        free = self.tiers[0].capacity - others
        each = int(share * free) // len(domains)
        with self.allowed(CapacityError, ConfigError) as raised:
            self.store.set_quota(np.array(domains, np.int32), np.full(len(domains), each, np.int64))
        if raised and isinstance(raised[0], ConfigError):
            assert each * len(domains) > free
        elif raised:
            assert self.leases or self.store.memory.limit_bytes < 1 << 62
        else:
            assert [self.quota(domain) for domain in domains] == [each] * len(domains)

    @precondition(lambda self: any(tier.memory for tier in self.tiers) and len(self.taken) < 4)
    @rule(random=random, share=st.floats(0.01, 1.01))
    def take(self, random: np.random.Generator, share: float) -> None:
        """Other data wants room in the memory of a tier; slots give way to it."""
        level = int(random.choice([i for i, tier in enumerate(self.tiers) if tier.memory]))
        memory = self.tiers[level].memory
        assert memory is not None
        with self.allowed(CapacityError):
            array = memory.take(int(share * self.limits[level]), np.uint8, "test")
            array.fill(0xEE)
            self.taken.append((level, array))

    @precondition(lambda self: self.taken)
    @rule(random=random)
    def give(self, random: np.random.Generator) -> None:
        level, array = self.taken.pop(int(random.integers(len(self.taken))))
        assert (array == 0xEE).all()
        memory = self.tiers[level].memory
        assert memory is not None
        memory.give(array)

    @precondition(lambda self: self.model and self.store.backing)
    @rule(random=random, mistake=st.sampled_from(sorted(MISTAKES)), visits=st.booleans())
    def misbehave(self, random: np.random.Generator, mistake: str, visits: bool) -> None:
        """A policy gives a wrong answer: the call fails, and nothing is lost."""
        policy = self.policies[int(random.integers(len(self.policies)))]
        policy.mistake, policy.mistakes = mistake, 0
        with self.allowed(PolicyError, CapacityError) as raised:
            if visits:
                self.visit_some(random)
            else:
                self.append_to(self.some(random), random, 3)
        policy.mistake = None
        assert policy.mistakes <= 1
        assert bool(policy.mistakes) == any(isinstance(error, PolicyError) for error in raised)

    @precondition(lambda self: self.model)
    @rule(
        random=random,
        operation=st.sampled_from(["read", "write"]),
        late=st.booleans(),
        visits=st.booleans(),
    )
    def fail(self, random: np.random.Generator, operation: str, late: bool, visits: bool) -> None:
        """A tier has an I/O error: the call fails with it, and nothing is lost."""
        tier = self.tiers[int(random.integers(self.length))]
        with failing(tier, operation, late=late) as refused:
            with self.allowed(OSError, CapacityError) as raised:
                if visits:
                    self.visit_some(random)
                else:
                    self.append_to(self.some(random), random, 3)
            assert bool(refused) == any(isinstance(error, OSError) for error in raised)

    # Invariants

    @invariant()
    def the_directory_is_sound(self) -> None:
        if not hasattr(self, "store"):
            return
        self.store.validate()
        for segment, blocks in self.model.items():
            assert len(self.handles(segment)) == len(blocks)
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
    def quotas_fit_the_top_tier(self) -> None:
        if hasattr(self, "store"):
            assert self.store._moves.residency[0].quota.sum() <= self.tiers[0].capacity

    @invariant()
    def no_tier_is_larger_than_its_limit(self) -> None:
        """By file sizes, and by the arrays that exist."""
        for level, tier in enumerate(getattr(self, "tiers", ())):
            if isinstance(tier, MmapTier):
                stats = tier.path.stat()
                assert stats.st_size == tier.used_bytes <= self.limits[level]
                assert stats.st_blocks * 512 <= self.limits[level]
            elif tier.memory is not None:
                bytes_used = tier.capacity * BLOCK + sum(
                    array.nbytes for owner, array in self.taken if owner == level
                )
                if tier.memory is self.store.memory:
                    bytes_used += self.table_bytes()
                assert tier.memory.used_bytes == bytes_used
                assert bytes_used <= tier.memory.peak_bytes <= self.limits[level]

    def table_bytes(self) -> int:
        space = self.store.space
        arrays = [space.chunks, space.blocks, space.owner_segment, space.owner_index]
        arrays += [column.array for column in space._columns]
        for at in self.store._moves.residency:
            arrays += [at.handle_of, at.members, at.counts, at.quota, at.domain_of]
        return sum(array.nbytes for array in arrays)


def machine(tiers: int) -> type:
    """The test case of the machine over so many tiers."""
    case = type(f"StoreOn{tiers}Tiers", (StoreMachine,), {"length": tiers}).TestCase  # type: ignore[attr-defined]
    case.settings = settings(stateful_step_count=40)
    return case


TestStoreOnOneTier = machine(1)
TestStoreOnTwoTiers = machine(2)
TestStoreOnThreeTiers = machine(3)
TestStoreOnFiveTiers = machine(5)
