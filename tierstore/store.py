"""The block store: the one place where directory, tiers, policies and transfers meet.

Tiers are given from the fastest to the last. The last one, the backing tier, holds every block;
each tier above caches some of them. A selected block that is not in the top tier is brought there
straight from the first tier that has it; a block that leaves a tier goes to the next one, unless
that one has it already or is the backing tier. Where that one needs room, copies of what the last
step uses in the top tier leave it first, to none.
"""

from __future__ import annotations

import threading
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import numpy as np

from tierstore.directory import HandleSpace
from tierstore.errors import CapacityError, ConfigError, TierstoreError
from tierstore.growth import most_slots
from tierstore.kernels import tables
from tierstore.kernels.tables import CHUNK
from tierstore.memory import Memory, unlimited
from tierstore.metrics import StoreMetrics
from tierstore.promotion import promote
from tierstore.sizes import format_size
from tierstore.transfer import Transfers, check_chain
from tierstore.visits import PendingVisit, Visit, Visits

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Sequence

    from tierstore.directory import Column
    from tierstore.interfaces import Bytes, EvictionPolicy, Ids, Pointers, Selection, Tier
    from tierstore.layout import BlockLayout
    from tierstore.timeline import Timeline

_ONE_DOMAIN: Ids = np.zeros(1, np.int32)


class BlockStore:
    """Segments of blocks over a chain of one to many tiers.

    Methods may be called from several threads. Visits of several threads overlap unless they share
    a domain; what moves blocks otherwise waits until there is none. While the caller is in a visit,
    it may only look: `residents`, `read` and `lease`. All else is a ConfigError.

    Parameters
    ----------
    layout: what a block is; every tier must have the same.
    tiers: fastest first; the first must be addressable, the last holds everything.
    policies: one for each tier but the last.
    segments, blocks_each: how much to expect; tables grow beyond that, at a cost.
    partitioned: in so many tiers, from the first on, segments have capacities of their own.
    """

    def __init__(
        self,
        layout: BlockLayout,
        tiers: Sequence[Tier],
        policies: Sequence[EvictionPolicy],
        *,
        segments: int = 1,
        blocks_each: int = 0,
        partitioned: int = 1,
    ) -> None:
        check_chain(layout, tiers, policies)
        if not 1 <= partitioned <= max(1, len(tiers) - 1):
            raise ConfigError(
                f"partitioned={partitioned} of {len(tiers)} tiers: expected at least 1, and not "
                "the last tier, which holds everything"
            )
        self.layout = layout
        self.partitioned = partitioned
        self.tiers = tuple(tiers)
        self.metrics = StoreMetrics([tier.name for tier in tiers])
        self.memory = _metadata_memory(tiers)
        self.space = HandleSpace(self.memory)
        self._lock = threading.RLock()
        self._moves = Transfers(layout, tiers, policies, self.space, self.metrics)
        self._tokens: Column | None = None
        self._visits = Visits(self._moves, self._lock)
        self.space.reserve(segments, blocks_each)
        for level, tier in enumerate(self.tiers):
            if tier.memory is not None:
                tier.memory.on_pressure = self._pressure_on(level)

    @property
    def backing(self) -> int:
        """Number of the tier that holds everything."""
        return len(self.tiers) - 1

    @property
    def timeline(self) -> Timeline | None:
        """What notes when tiers move selected blocks; None for nothing."""
        return self._moves.timeline

    @timeline.setter
    def timeline(self, timeline: Timeline | None) -> None:
        self._moves.timeline = timeline

    def close(self) -> None:
        """Close every tier. A second call does nothing."""
        with self._lock:
            for tier in self.tiers:
                tier.close()

    # Segments

    def open(self, count: int, domains: Ids | None = None) -> Ids:
        """Numbers of `count` new, empty segments.

        Each is a domain of its own in the partitioned tiers, the top one as a rule, numbered like
        it, unless `domains` gives one for each. In every other tier all segments share one domain.
        """
        with self._changing():
            segments = self.space.open(count)
            own = segments if domains is None else domains
            try:
                for level, residency in enumerate(self._moves.residency):
                    shared = self._is_shared(level)
                    residency.assign(segments, np.zeros_like(segments) if shared else own)
            except CapacityError:
                self._close(segments)
                raise
            return segments

    def _is_shared(self, level: int) -> bool:
        """Whether all segments are one domain in a tier."""
        return level >= self.partitioned or level == self.backing

    def _close(self, segments: Ids) -> None:
        for segment in segments.tolist():
            self.space.close(segment)
        self._moves.close(segments, self.partitioned)

    def drop(self, segments: Ids) -> None:
        """Forget segments and all their blocks; a domain without segments loses its quota.

        CapacityError, and no change, if a block is leased. PolicyError if a policy raises when it
        hears of that; they are gone then, too.
        """
        with self._changing():
            handles = self._unleased(segments, 0)
            try:
                self._forget(segments, 0, handles)
            finally:
                self._close(segments)

    def renew(self, segments: Ids) -> None:
        """Let segments, each a domain of its own, be as just opened; errors as in `drop`."""
        with self._changing(), ExitStack() as always:
            handles = self._unleased(segments, 0)
            # What is closed last is opened first, so that these get their own numbers again.
            always.callback(self.open, len(segments))
            always.callback(self._close, segments)
            self._forget(segments, 0, handles)

    def truncate(self, segments: Ids, blocks: int) -> None:
        """Forget blocks from number `blocks` on; errors as in `drop`."""
        with self._changing():
            self._forget(segments, blocks, self._unleased(segments, blocks))

    def _unleased(self, segments: Ids, blocks: int) -> Ids:
        """Handles of the blocks from number `blocks` on; CapacityError if one is leased."""
        gone = [self.space.all_handles(segment, blocks) for segment in segments.tolist()]
        handles = np.concatenate(gone) if gone else np.empty(0, np.int32)
        if (self._moves.leases.array[handles] > 0).any():
            raise CapacityError("blocks to forget are leased: release them first")
        return handles

    def _forget(self, segments: Ids, blocks: int, handles: Ids) -> None:
        """Let segments end before number `blocks`, from where on they have these handles."""
        try:
            self._moves.forget(handles)
        finally:
            for segment in segments.tolist():
                self.space.truncate(segment, blocks)

    def duplicate(self, segments: Ids, copies: Ids) -> None:
        """Append the blocks of each segment to ``copies[i]``; the bytes go to the backing tier."""
        with self._changing():
            for source, target in zip(segments.tolist(), copies.tolist(), strict=True):
                handles = self.space.all_handles(source)
                data: Bytes = np.empty((1, len(handles), self.layout.block_bytes), np.uint8)
                self._moves.read(handles, data[0])
                home = np.full((1, len(handles)), self.backing, np.uint8)
                valid = self._moves.valid.array[handles][None]
                tokens = None if self._tokens is None else self._tokens.array[handles][None]
                copy = np.array([target], np.int32)
                self.append(copy, data, valid=valid, home=home, tokens=tokens)

    # Capacity

    def limit(self, level: int) -> int:
        """Slots that tier `level` could have at most, with the tables that go with them."""
        return most_slots(self.tiers[level], self.memory)

    def resize(self, level: int, slots: int) -> None:
        """Give tier `level` so many slots; what stands in slots that go is evicted.

        Quotas of the top tier shrink with it, in proportion. CapacityError if the slots do
        not fit, or if leased blocks, or blocks that only the backing tier has, are in the way.
        """
        with self._changing():
            residency, tier = self._moves.residency[level], self.tiers[level]
            if slots < residency.slots:
                self._clear_slots(level, slots)
                residency.resize(slots)
                tier.resize(slots)
            else:
                residency.reserve(slots, slots if self._is_shared(level) else 0)
                tier.resize(slots)
                residency.resize(slots)
            if self._is_shared(level):
                self._moves.set_quota(level, _ONE_DOMAIN, np.array([slots], np.int64))

    def _clear_slots(self, level: int, slots: int) -> None:
        """Evict until a tier can do with its first `slots` slots."""
        residency, tier = self._moves.residency[level], self.tiers[level]
        leaving = residency.above(slots)
        if level == self.backing and len(leaving):
            raise CapacityError(
                f"{tier.name}: {len(leaving)} blocks would be lost: drop segments first"
            )
        if (self._moves.leases.array[leaving] > 0).any():
            raise CapacityError(f"{tier.name}: leased blocks are in the way: release them first")
        if level == 0 < self.backing and residency.quota.sum() > slots:
            domains = np.flatnonzero(residency.quota).astype(np.int32)
            quota, least = residency.quota[domains], int(slots >= len(domains))
            rest = slots - least * len(domains)
            room = (quota - least) * rest // max(1, (quota - least).sum())
            self.set_quota(domains, least + room)
        self._moves.evict(level, residency.above(slots))

    def make_room(self, level: int, blocks: int) -> None:
        """Have so many free slots in a tier that all segments share, as far as blocks may leave.

        ConfigError for a partitioned tier.
        """
        if not self._is_shared(level):
            raise ConfigError(
                f"{self.tiers[level].name}: segments have capacities of their own there: expected "
                "a tier that all share, or lower a quota"
            )
        with self._changing():
            need = np.array([blocks - self._moves.residency[level].free_slots], np.int64)
            if need[0] > 0:
                self._moves.step += 1
                idle = self._moves.idle_access()
                self._moves.evict(level, self._moves.victims(level, _ONE_DOMAIN, need, idle))

    def quota(self, domains: Ids, level: int = 0) -> Pointers:
        """Most blocks that each of these domains of a partitioned tier may hold."""
        with self._lock:
            quota: Pointers = self._moves.residency[level].quota[domains]
            return quota

    def set_quota(self, domains: Ids, blocks: Pointers, level: int = 0) -> None:
        """Most blocks that each domain of a partitioned tier may hold; what exceeds it is evicted.

        In the top tier all quotas together are slots that it has. A tier below grows up to its
        quotas as blocks come in, as far as its limit allows.

        ConfigError if quotas exceed the top tier's slots, or if the tier is not partitioned;
        CapacityError if more blocks of a domain are leased than its quota. Nothing has changed
        then.
        """
        with self._changing():
            tier, name = self._moves.residency[level], self.tiers[level].name
            if level > 0 and self._is_shared(level):
                raise ConfigError(f"{name}: all segments share its capacity: it has no quotas")
            total = int(tier.quota.sum() - tier.quota[domains].sum() + blocks.sum())
            if level == 0 and total > tier.slots:
                raise ConfigError(
                    f"quotas of {total} blocks: expected at most {tier.slots}, the tier's slots"
                )
            tier.reserve(0, int(blocks.max(initial=0)))
            if level == 0 and total > tier.slots:
                raise CapacityError(
                    f"{name}: tables for quotas of {total} blocks leave room for {tier.slots}: "
                    "raise the limit or lower the quotas"
                )
            if (self._moves.leased_in(domains, level)[domains] > blocks).any():
                raise CapacityError(f"{name}: leased blocks are in the way: release them first")
            over = np.maximum(tier.counts[domains] - blocks, 0).astype(np.int64)
            if over.any():
                self._moves.step += 1
                idle = self._moves.idle_access()
                self._moves.evict(level, self._moves.victims(level, domains, over, idle))
            self._moves.set_quota(level, domains, blocks)

    def _pressure_on(self, level: int) -> Callable[[int], None]:
        """Shrinks a tier's slots when other data of its memory needs the room."""

        def shrink(nbytes: int) -> None:
            memory, residency = self.tiers[level].memory, self._moves.residency[level]
            assert memory is not None
            with self._lock:
                slots = (memory.slot_bytes - nbytes) // self.layout.block_bytes
                least = int(np.count_nonzero(residency.quota)) if level == 0 < self.backing else 0
                is_full = level == self.backing and len(residency.above(slots)) > 0
                if slots >= least and not is_full and not self._visits:
                    self.resize(level, slots)

        return shrink

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """The lock, for calls that may move blocks."""
        with self._lock:
            self._visits.wait_for_none()
            yield

    # Writing

    def append(
        self,
        segments: Ids,
        blocks: Bytes,
        *,
        valid: Bytes | None = None,
        home: Bytes | None = None,
        tokens: Ids | None = None,
        order: Pointers | None = None,
        rows: Ids | None = None,
    ) -> Ids:
        """Add the same number of blocks to the end of each segment.

        Parameters
        ----------
        blocks: bytes [S, n, block_bytes]. They are in the backing tier when this returns.
        rows: int32 [S, n], where they stand in another order: `blocks` is then [m, block_bytes].
        valid: uint8 [S, n] tokens that count in each block; all by default. What a block holds
            beyond them must be finite numbers.
        home: uint8 [S, n], the tier that gets a copy now, as far as it has room without evicting;
            the backing tier's number for none. By default the tier next to the backing one, which
            evicts.
        tokens: int32 [S, n, tokens of a block], which tokens of the segment a block holds; by
            default block b holds those from ``b * tokens`` on.
        order: int64 [S, n], for each segment a permutation of its new blocks: the order in which
            they stand in the backing tier, one segment after the other, as far as slots next to
            each other are free. Blocks that are wanted together are read fastest side by side. The
            order of their numbers by default.

        Returns
        -------
        Handles int32 [S, n]. CapacityError if the backing tier is full; PolicyError, and an OSError
        of a tier, pass through. Then the segments are as before.
        """
        with self._changing():
            moves, count = self._moves, (blocks if rows is None else rows).shape[1]
            total = len(segments) * count
            if tokens is not None and self._tokens is None:
                entry = (self.layout.tokens,)
                self._tokens = self.space.column(np.int32, -1, "directory", entry)
            self.space.reserve_blocks(segments, count)
            self._ensure_backing(total)
            handles = self.space.extend(segments, count)
            flat, data = handles.reshape(-1), blocks.reshape(-1, self.layout.block_bytes)
            rows = np.arange(total, dtype=np.int32) if rows is None else rows.reshape(-1)
            moves.valid.array[flat] = self.layout.tokens if valid is None else valid.reshape(-1)
            if tokens is not None and self._tokens is not None:
                self._tokens.array[flat] = tokens.reshape(total, self.layout.tokens)
            try:
                placed = _placed(order, (len(segments), count))
                moves.write(self.backing, flat[placed], data, rows[placed])
                self._settle(flat, data, rows, home)
            except Exception as error:
                self._take_back(segments, count, flat, error)
                raise
            return handles

    def _take_back(self, segments: Ids, count: int, handles: Ids, error: Exception) -> None:
        """Forget the last `count` blocks of each segment, which `error` kept from being added."""
        try:
            self._moves.forget(handles)
        except TierstoreError as another:
            error.add_note(f"taking the blocks back: {another}")
        finally:
            for segment in segments.tolist():
                self.space.truncate(segment, int(self.space.blocks[segment]) - count)

    def _settle(self, handles: Ids, data: Bytes, rows: Ids, home: Bytes | None) -> None:
        """Copy new blocks to their homes above the backing tier; see `append`."""
        moves, next_to_backing = self._moves, self.backing - 1
        if home is not None:
            for level in range(self.backing):
                chosen = np.flatnonzero(home.reshape(-1) == level)
                moves.cache(level, handles[chosen], data, rows[chosen])
        elif self.backing > 0:
            moves.step += 1
            moves.make_room(next_to_backing, handles, moves.idle_access())
            moves.cache(next_to_backing, handles, data, rows)

    def promote(self, segments: Ids, first: int, home: Bytes) -> None:
        """Copy blocks from number `first` on to their homes, as far as these have room.

        home: uint8 [S, n], as of `append`. Nothing is evicted for them. OSError of a tier passes
        through; blocks are then where they were, or at home.
        """
        with self._changing():
            numbers = np.arange(first, first + home.shape[1], dtype=np.int32)
            handles = self._handles(segments, np.broadcast_to(numbers, home.shape))
            promote(self._moves, handles, home.reshape(-1))

    def owners(self, level: int) -> Ids:
        """The segment whose block stands in each slot of a tier, int32 [slots]; -1 for none."""
        with self._lock:
            residency = self._moves.residency[level]
            handles = residency.handle_of[: residency.slots]
            segments = self.space.owner_segment[handles // CHUNK]
            owners: Ids = np.where(handles < 0, -1, segments).astype(np.int32)
            return owners

    def _ensure_backing(self, blocks: int) -> None:
        residency, tier = self._moves.residency[self.backing], self.tiers[self.backing]
        short = blocks - residency.free_slots
        if short <= 0:
            return
        limit = self.limit(self.backing)
        if residency.slots + short > limit:
            raise CapacityError(
                f"{tier.name}: holds every block and is full ({residency.slots} of at most {limit} "
                f"blocks of {format_size(self.layout.block_bytes)}), {short} more are wanted: "
                "raise its limit or add a larger tier after it"
            )
        slots = residency.slots + max(short, residency.slots // 8)
        self.resize(self.backing, min(limit, slots))

    # Reading

    def visit(
        self, selection: Selection, segments: Ids, *, hysteresis: float = 0.0
    ) -> Generator[Visit, None, None]:
        """Bring the selected blocks of each row into the top tier, and yield them.

        Usually once. A selection larger than its domain comes in several visits that together hold
        each block once. While a visit lasts, the top tier stays as it is. CapacityError if a domain
        has no room for a single block. PolicyError if the selection names a block that its segment
        does not have, or one twice.

        hysteresis: a selected block that is not in the top tier is left out, and not fetched,
            unless its score is at least so much above the lowest score selected in its row. 0
            fetches all, and so does a row whose domain holds fewer blocks than the row selects.
        """
        with self._lock:
            self._visits.refuse_own()
        with self.judge(selection, segments, hysteresis=hysteresis) as pending:
            yield from pending.visits()

    def judge(
        self,
        selection: Selection,
        segments: Ids,
        *,
        hysteresis: float = 0.0,
        is_news: bool = True,
    ) -> PendingVisit:
        """The first half of `visit`: hits and misses, the policy's victims, slots for the misses.

        The last tier begins to read what only that one has.

        Fetching, in any thread, is the second half; `PendingVisit.release` ends the visit. A thread
        may have several, each of other domains of the top tier; where another thread has one of the
        domains, this waits.

        is_news: False for a selection that the policy was told of before; then neither it nor the
            hits are counted again.

        Errors as of `visit`; ConfigError if a visit of this thread has one of the domains.
        """
        return self._visits.judge(selection, segments, hysteresis, is_news=is_news)

    @contextmanager
    def holding(self) -> Iterator[Transfers]:
        """The tiers and what they hold, while nobody else changes them; for `tierstore.below`."""
        with self._changing():
            yield self._moves

    def tokens_of(self, segments: Ids, blocks: Ids) -> Ids:
        """Which tokens of its segment each of ``blocks[i, :]`` holds, int32 [S, n, tokens]."""
        with self._lock:
            size, handles = self.layout.tokens, self._handles(segments, blocks)
            inside = blocks[..., None] * size + np.arange(size, dtype=np.int32)
            if self._tokens is None:
                return inside.astype(np.int32)
            given = self._tokens.array[handles].reshape(inside.shape)
            tokens: Ids = np.where(given < 0, inside, given).astype(np.int32)
            return tokens

    def residents(self, segments: Ids) -> Visit:
        """Everything the top tier holds of each segment; each must be a domain of its own there."""
        with self._lock:
            top, domains = self._moves.residency[0], self._moves.residency[0].domain_of[segments]
            n = int(top.counts[domains].sum())
            row_ptr: Pointers = np.empty(len(segments) + 1, np.int64)
            handles, slots = np.empty(n, np.int32), np.empty(n, np.int32)
            valid = np.empty(n, np.uint8)
            tables.residents(
                domains, top.members, top.counts, top.slot_of.array, self._moves.valid.array,
                row_ptr, handles, slots, valid,
            )  # fmt: skip
            return Visit(row_ptr, slots, valid, handles)

    def read(
        self, segments: Ids, first: int, count: int, out: Bytes, rows: Ids | None = None
    ) -> Bytes:
        """Blocks ``first:first + count`` of each segment into out [S, count, block_bytes].

        With rows int32 [S, count], into those of out [m, block_bytes]. Returns their valid counts,
        uint8 [S, count].
        """
        with self._lock:
            handles = self._range(segments, first, count)
            data = out.reshape(-1, self.layout.block_bytes)
            self._moves.read(handles, data, None if rows is None else rows.reshape(-1))
            valid: Bytes = self._moves.valid.array[handles].reshape(len(segments), count)
            return valid

    def levels(self, segments: Ids, count: int) -> Bytes:
        """The first tier that has each of the first `count` blocks, uint8 [S, count]."""
        with self._lock:
            handles = self._range(segments, 0, count)
            return self._moves.levels(handles).reshape(len(segments), count)

    def _range(self, segments: Ids, first: int, count: int) -> Ids:
        numbers = np.arange(first, first + count, dtype=np.int32)
        return self._handles(segments, np.broadcast_to(numbers, (len(segments), count)))

    @contextmanager
    def lease(self, segments: Ids, blocks: Ids) -> Iterator[None]:
        """Hold ``blocks[i, :]`` of ``segments[i]`` wherever they are until the context ends."""
        with self._lock:
            self._visits.wait_for_others()
            handles = self._handles(segments, blocks)
            np.add.at(self._moves.leases.array, handles, 1)
            self._moves.leased += len(handles)
        try:
            yield
        finally:
            with self._lock:
                np.subtract.at(self._moves.leases.array, handles, 1)
                self._moves.leased -= len(handles)

    def _handles(self, segments: Ids, blocks: Ids) -> Ids:
        """Handles of ``blocks[i, :]`` of ``segments[i]``, one after the other; each must exist."""
        have = self.space.blocks[segments][:, None]
        wrong = (blocks < 0) | (blocks >= have)
        if wrong.any():
            row, column = np.argwhere(wrong)[0]
            raise ConfigError(
                f"block {blocks[row, column]} of segment {segments[row]}: expected one of its "
                f"{have[row, 0]} blocks"
            )
        return self.space.handles_of(segments, blocks).reshape(-1)

    def validate(self) -> None:
        """Assert every invariant of the directory; for tests."""
        with self._lock:
            used = [self.space.all_handles(segment) for segment in range(len(self.space.blocks))]
            handles = np.concatenate(used)
            assert len(np.unique(handles)) == len(handles), "a handle names two blocks"
            for level, residency in enumerate(self._moves.residency):
                residency.validate(handles)
                assert (residency.counts <= residency.quota).all() or level == self.backing
                assert residency.slots == self.tiers[level].capacity
            backing = self._moves.residency[self.backing]
            assert (backing.slot_of.array[handles] >= 0).all(), "the backing tier lost one"


def _metadata_memory(tiers: Sequence[Tier]) -> Memory:
    """Tables live in the last host memory of the chain, so that they do not crowd the fast tier."""
    memories = [tier.memory for tier in tiers if tier.memory is not None]
    host = [memory for memory in memories if memory.is_host]
    return host[-1] if host else unlimited()


def _placed(order: Pointers | None, shape: tuple[int, int]) -> Ids | slice:
    """Positions among all new blocks [S, n] in the order of their slots; ConfigError if wrong.

    All in order by default.
    """
    count = shape[1]
    if order is None:
        return slice(None)
    if order.shape != shape or not (np.sort(order, 1) == np.arange(count)).all():
        raise ConfigError(
            f"order {list(order.shape)} of blocks: expected {list(shape)}, in each row the numbers "
            f"from 0 to {count - 1}"
        )
    placed: Ids = (order + np.arange(len(order))[:, None] * count).reshape(-1).astype(np.int32)
    return placed
