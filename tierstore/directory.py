"""Which slot of which tier holds each block: dense integer tables, no dictionaries.

`HandleSpace` numbers blocks. `Residency` says where the blocks of one tier are and to which domain
each counts; a domain is a set of segments that share one capacity and one policy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from tierstore.errors import CapacityError
from tierstore.kernels import tables
from tierstore.kernels.tables import CHUNK

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tierstore.interfaces import Ids, Pointers
    from tierstore.kernels.element import Array
    from tierstore.memory import Memory


TABLE_BYTES_PER_SLOT = 12
"""What `Residency` keeps for each slot: who is there, entries of member list and free stack."""


class Column:
    """One entry per handle, in `array`; it grows with the space it belongs to."""

    def __init__(
        self,
        memory: Memory,
        shape: tuple[int, ...],
        dtype: npt.DTypeLike,
        fill: float,
        purpose: str,
    ) -> None:
        self._memory = memory
        self._purpose = purpose
        self.fill = fill
        self.array: Array = memory.take(shape, dtype, purpose)
        if fill:
            self.array.fill(fill)

    def grow(self, handles: int) -> None:
        """Make room for so many handles."""
        shape = (handles, *self.array.shape[1:])
        self.array = self._memory.grow(self.array, shape, self._purpose, self.fill)


class HandleSpace:
    """Numbers the blocks of segments with dense handles that stay the same while the segment lives.

    A segment gets handles `CHUNK` at a time, wherever they are free; `chunks[segment, block //
    CHUNK]` says where. Columns registered here grow together and are reset when handles are given
    out.
    """

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.chunks: Ids = memory.take((1, 1), np.int32, "directory")
        self.blocks: Ids = memory.take(1, np.int32, "directory")
        self.owner_segment: Ids = memory.take(1, np.int32, "directory")
        self.owner_index: Ids = memory.take(1, np.int32, "directory")
        self._columns: list[Column] = []
        self._free_segments: list[int] = [0]
        self._free_chunks: list[int] = [0]

    @property
    def handles(self) -> int:
        """Handles that columns have room for."""
        return len(self.owner_segment) * CHUNK

    def column(
        self,
        dtype: npt.DTypeLike,
        fill: float = 0,
        purpose: str = "policy",
        entry: tuple[int, ...] = (),
    ) -> Column:
        """A new column with entries of shape `entry`; `fill` is that of a block just born."""
        column = Column(self.memory, (self.handles, *entry), dtype, fill, purpose)
        self._columns.append(column)
        return column

    def reserve(self, segments: int, blocks_each: int) -> None:
        """Make room now for `segments` more segments of so many blocks, in one growth."""
        self._reserve_segments(segments)
        self._reserve_chunks(segments * -(-blocks_each // CHUNK))
        self._reserve_index(-(-blocks_each // CHUNK))

    def reserve_blocks(self, segments: Ids, count: int) -> None:
        """Make room now for `count` more blocks of each of `segments`."""
        chunks = -(-(self.blocks[segments] + count) // CHUNK)
        self._reserve_index(int(chunks.max(initial=0)))
        self._reserve_chunks(int((chunks - -(-self.blocks[segments] // CHUNK)).sum()))

    def open(self, count: int) -> Ids:
        """Numbers of `count` new, empty segments."""
        self._reserve_segments(count)
        return np.array([self._free_segments.pop() for _ in range(count)], np.int32)

    def extend(self, segments: Ids, count: int) -> Ids:
        """Handles [len(segments), count] of new blocks at the end of each segment."""
        self.reserve_blocks(segments, count)
        for segment in segments.tolist():
            have = int(self.blocks[segment])
            for index in range(-(-have // CHUNK), -(-(have + count) // CHUNK)):
                chunk = self._free_chunks.pop()
                self.chunks[segment, index] = chunk
                self.owner_segment[chunk], self.owner_index[chunk] = segment, index
        new = self.blocks[segments][:, None] + np.arange(count, dtype=np.int32)
        self.blocks[segments] += count
        handles = self.handles_of(segments, new.astype(np.int32))
        for column in self._columns:
            column.array[handles] = column.fill
        return handles

    def handles_of(self, segments: Ids, blocks: Ids) -> Ids:
        """Handles of ``blocks[i, :]`` of ``segments[i]``."""
        chunk = self.chunks[segments[:, None], blocks // CHUNK]
        handles: Ids = (chunk * CHUNK + blocks % CHUNK).astype(np.int32)
        return handles

    def all_handles(self, segment: int, first: int = 0) -> Ids:
        """Handles of the blocks of `segment` from number `first` on."""
        blocks = np.arange(first, self.blocks[segment], dtype=np.int32)[None]
        handles: Ids = self.handles_of(np.array([segment], np.int32), blocks)[0]
        return handles

    def block_of(self, handle: int) -> tuple[int, int]:
        """Segment and number of the block with that handle; segment -1 if there is none."""
        chunk, offset = divmod(handle, CHUNK)
        if not 0 <= chunk < len(self.owner_segment):
            return -1, -1
        return int(self.owner_segment[chunk]), int(self.owner_index[chunk]) * CHUNK + offset

    def truncate(self, segment: int, blocks: int) -> None:
        """Let `segment` end after so many blocks at most; chunks no longer needed become free."""
        blocks = min(blocks, int(self.blocks[segment]))
        for index in range(-(-blocks // CHUNK), -(-int(self.blocks[segment]) // CHUNK)):
            chunk = int(self.chunks[segment, index])
            self.owner_segment[chunk] = -1
            self._free_chunks.append(chunk)
        self.blocks[segment] = blocks

    def close(self, segment: int) -> None:
        """Forget `segment`; its number may be given out again."""
        self.truncate(segment, 0)
        self._free_segments.append(segment)

    def _reserve_segments(self, count: int) -> None:
        short = count - len(self._free_segments)
        if short > 0:
            have = len(self.blocks)
            want = have + max(short, have // 4)
            self.chunks = self.memory.grow(self.chunks, (want, self.chunks.shape[1]), "directory")
            self.blocks = self.memory.grow(self.blocks, (want,), "directory")
            self._free_segments = [*range(want - 1, have - 1, -1), *self._free_segments]

    def _reserve_index(self, chunks_each: int) -> None:
        rows, have = self.chunks.shape
        if chunks_each > have:
            want = max(chunks_each, have + have // 4)
            self.chunks = self.memory.grow(self.chunks, (rows, want), "directory")

    def _reserve_chunks(self, count: int) -> None:
        short = count - len(self._free_chunks)
        if short > 0:
            have = len(self.owner_index)
            want = have + max(short, have // 8)
            for column in self._columns:
                column.grow(want * CHUNK)
            self.owner_segment = self.memory.grow(self.owner_segment, (want,), "directory", fill=-1)
            self.owner_index = self.memory.grow(self.owner_index, (want,), "directory")
            self._free_chunks = [*range(want - 1, have - 1, -1), *self._free_chunks]


class Residency:
    """The blocks that one tier holds, slot by slot and domain by domain.

    Invariants: ``handle_of[slot_of[h]] == h`` for every resident h; `members` of a domain lists
    each of its residents once, at ``position[h]``; a slot is free or holds one block.
    """

    def __init__(self, space: HandleSpace) -> None:
        self._space = space
        self._memory = space.memory
        self.slot_of = space.column(np.int32, fill=-1, purpose="directory")
        self.position = space.column(np.int32, fill=-1, purpose="directory")
        self.handle_of: Ids = self._memory.take(0, np.int32, "directory")
        self.slots = 0
        self.members: Ids = self._memory.take((1, 1), np.int32, "directory")
        # One array, so that counts and quotas always know the same domains.
        self._per_domain: Pointers = self._memory.take((2, 1), np.int64, "directory")
        self.counts, self.quota = self._per_domain
        self.domain_of: Ids = self._memory.take(0, np.int32, "directory")
        self._free: Ids = self._memory.take(0, np.int32, "directory")
        self.free_slots = 0
        """Slots that hold nothing; their numbers are the first so many of a stack."""

    @property
    def resident(self) -> int:
        """Blocks in the tier."""
        return self.slots - self.free_slots

    def assign(self, segments: Ids, domains: Ids) -> None:
        """Count ``segments[i]``, which has no blocks here yet, to ``domains[i]``."""
        if len(segments) and int(segments.max()) >= len(self.domain_of):
            want = max(int(segments.max()) + 1, len(self._space.blocks))
            self.domain_of = self._memory.grow(self.domain_of, (want,), "directory", fill=-1)
        if len(domains) and int(domains.max()) >= len(self.quota):
            want = max(int(domains.max()) + 1, len(self.quota) + len(self.quota) // 4)
            self.members = self._memory.grow(
                self.members, (want, self.members.shape[1]), "directory"
            )
            self._per_domain = self._memory.grow(self._per_domain, (2, want), "directory")
            self.counts, self.quota = self._per_domain
        self.domain_of[segments] = domains

    def unassign(self, segments: Ids) -> Ids:
        """Take empty segments out of their domains; returns those that have no segment any more.

        They have no quota either.
        """
        segments = segments[segments < len(self.domain_of)]
        domains = self.domain_of[segments]
        self.domain_of[segments] = -1
        ended: Ids = np.setdiff1d(domains, self.domain_of)
        self.quota[ended] = 0
        return ended

    def set_quota(self, domains: Ids, blocks: Pointers) -> None:
        """Most blocks each of `domains` may hold, reserved before, and no less than it holds."""
        self.quota[domains] = blocks

    def domains(self, handles: Ids) -> Ids:
        """The domain that each handle counts to."""
        return self.domain_of[self._space.owner_segment[handles // CHUNK]]

    def take_slots(self, count: int) -> Ids:
        """Free slots, the one freed last first; CapacityError if there are too few."""
        if count > self.free_slots:
            raise CapacityError(
                f"{count} slots wanted, {self.free_slots} of {self.slots} are free: give the tier "
                "more slots or forget blocks"
            )
        self.free_slots -= count
        return self._free[self.free_slots : self.free_slots + count][::-1].copy()

    def return_slots(self, slots: Ids) -> None:
        """Give back slots from `take_slots` that nothing was installed in."""
        self._free[self.free_slots : self.free_slots + len(slots)] = slots[::-1]
        self.free_slots += len(slots)

    def install(self, handles: Ids, slots: Ids) -> None:
        """Enter blocks into slots from `take_slots`."""
        domains = self.domains(handles)
        tables.install(handles, slots, domains, self.slot_of.array, self.handle_of,
                       self.members, self.counts, self.position.array)  # fmt: skip

    def remove(self, handles: Ids) -> Ids:
        """Take resident blocks out; returns the slots they held, now free."""
        freed: Ids = np.empty(len(handles), np.int32)
        tables.remove(handles, self.domains(handles), self.slot_of.array, self.handle_of,
                      self.members, self.counts, self.position.array, freed)  # fmt: skip
        self._free[self.free_slots : self.free_slots + len(freed)] = freed
        self.free_slots += len(freed)
        return freed

    def collect(self, domains: Ids) -> tuple[Pointers, Ids]:
        """Row pointers and handles of the residents of each of `domains`."""
        row_ptr: Pointers = np.empty(len(domains) + 1, np.int64)
        residents: Ids = np.empty(int(self.counts[domains].sum()), np.int32)
        tables.collect(domains, self.members, self.counts, row_ptr, residents)
        return row_ptr, residents

    def reserve(self, slots: int, quota: int) -> None:
        """Make room for tables of so many slots, and of domains with so many blocks each."""
        self.handle_of = self._memory.grow(self.handle_of, (slots,), "directory", fill=-1)
        self._free = self._memory.grow(self._free, (slots,), "directory")
        shape = (len(self.members), quota)
        self.members = self._memory.grow(self.members, shape, "directory")

    def resize(self, slots: int) -> None:
        """Have `slots` slots, reserved before; those that go must be free."""
        stack = self._free[: self.free_slots]
        if slots > self.slots:
            new = np.arange(slots - 1, self.slots - 1, -1, dtype=np.int32)
            kept = np.concatenate([new, stack])
        else:
            kept = stack[stack < slots]
        self._free[: len(kept)] = kept
        self.free_slots, self.slots = len(kept), slots

    def above(self, slot: int) -> Ids:
        """Handles of the blocks in slots from `slot` on."""
        held = self.handle_of[slot : self.slots]
        return held[held >= 0]

    def validate(self, handles: Iterable[int]) -> None:
        """Assert the invariants over `handles`, which should be all handles in use."""
        resident = [h for h in handles if self.slot_of.array[h] >= 0]
        assert len(resident) == self.resident, "residents and used slots differ"
        assert sorted(resident) == sorted(
            self.handle_of[: self.slots][self.handle_of[: self.slots] >= 0]
        )
        for handle in resident:
            assert self.handle_of[self.slot_of.array[handle]] == handle
            domain = self.domains(np.array([handle], np.int32))[0]
            assert self.members[domain, self.position.array[handle]] == handle
        assert int(self.counts.sum()) == len(resident)
        free = self._free[: self.free_slots]
        assert len(np.unique(free)) == len(free)
        assert (self.handle_of[free] < 0).all()
