"""Moves blocks between the tiers of one chain, and makes room for them."""

from __future__ import annotations

from contextlib import ExitStack
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tierstore.directory import Residency
from tierstore.errors import CapacityError, ConfigError, PolicyError, TierstoreError
from tierstore.growth import grow
from tierstore.interfaces import Access, Bytes, Demand, Ids, Pointers, Selection
from tierstore.kernels import tables

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from contextlib import AbstractContextManager

    from tierstore.directory import HandleSpace
    from tierstore.interfaces import EvictionPolicy, Tier
    from tierstore.layout import BlockLayout
    from tierstore.metrics import StoreMetrics
    from tierstore.timeline import Timeline

_NONE: Ids = np.empty(0, np.int32)

_BATCHES = 64
"""A tier below the top makes room for 1/64 of its blocks at once: ranking costs O(blocks)."""


class _Source(NamedTuple):
    """Blocks that one tier will read: its slots, and the rows of the reader's array."""

    level: int
    slots: Ids
    rows: Ids


class Fetch(NamedTuple):
    """Blocks on their way into reserved slots of the top tier, and where each comes from."""

    handles: Ids
    slots: Ids
    sources: Sequence[_Source]


class Transfers:
    """The tiers of a chain with what each holds; level 0 is the top, the last one is `backing`.

    Invariants: every block is in the backing tier; a block that is leased, or stamped with the
    running step, is not evicted, nor from below the top tier one stamped since a live visit began;
    there, what is not leased may also leave if the top tier has it and goes on to have it.
    """

    def __init__(
        self,
        layout: BlockLayout,
        tiers: Sequence[Tier],
        policies: Sequence[EvictionPolicy],
        space: HandleSpace,
        metrics: StoreMetrics,
    ) -> None:
        self.layout = layout
        self.tiers = tuple(tiers)
        self.policies = tuple(policies)
        self.metrics = metrics
        self.backing = len(tiers) - 1
        self.step = 0
        self.visiting: list[int] = []
        """The steps of live visits, rising."""
        self.timeline: Timeline | None = None
        self.leased = 0
        """Leases held on blocks, counted once for each lease of each block."""
        self._space = space
        self.valid = space.column(np.uint8, purpose="directory")
        self.leases = space.column(np.uint16, purpose="directory")
        self.last_used = space.column(np.int64, fill=-1, purpose="directory")
        self.residency = [Residency(space) for _ in tiers]
        for policy in policies:
            policy.bind(space)

    def idle_access(self) -> Access:
        """The running step as seen by a policy when nothing was selected."""
        return Access(np.zeros(1, np.int64), _NONE, np.zeros(0, np.float32), self.step)

    # Into a tier

    def write(self, level: int, handles: Ids, data: Bytes, rows: Ids) -> None:
        """Put ``data[rows[i]]`` into a free slot of a tier as block ``handles[i]``, in their order.

        CapacityError if there are too few slots, OSError of the tier: then nothing has changed.
        """
        residency = self.residency[level]
        slots = residency.take_slots(len(handles))
        slots.sort()
        try:
            self.tiers[level].write(slots, data, rows).wait()
            if level < self.backing:
                self._touch(level, handles)
        except (OSError, PolicyError):
            residency.return_slots(slots)
            raise
        self._enter(level, handles, slots)
        self.metrics.tiers[level].bytes_written += len(handles) * self.layout.block_bytes

    def _enter(self, level: int, handles: Ids, slots: Ids) -> None:
        residency = self.residency[level]
        residency.install(handles, slots)
        if level < self.backing:
            self.tell(level, "on_admit", handles, residency.domains(handles))

    def cache(self, level: int, handles: Ids, data: Bytes, rows: Ids) -> int:
        """`write` those blocks, in order, that their domains have room for; returns how many."""
        residency = self.residency[level]
        short = len(handles) - residency.free_slots
        grow(self.tiers[level], residency, short, self._space.memory)
        fits: Ids = np.empty(len(handles), np.int32)
        taken = np.zeros(len(residency.counts), np.int64)
        n = tables.fitting(
            residency.domains(handles), residency.counts, residency.quota, residency.free_slots,
            taken, fits,
        )  # fmt: skip
        self.write(level, handles[fits[:n]], data, rows[fits[:n]])
        return int(n)

    def reserve(self, handles: Ids, access: Access) -> Fetch:
        """Room in the top tier for those of `handles` that it lacks, and where they are now.

        The backing tier begins to read before others make room, so that both go on at once.
        """
        top = self.residency[0]
        missing = handles[top.slot_of.array[handles] < 0]
        self.expect(missing)
        self.make_room(0, missing, access)
        slots = top.take_slots(len(missing))
        try:
            sources = list(self._sources(missing, slots))
        except PolicyError:
            top.return_slots(slots)
            raise
        return Fetch(missing, slots, sources)

    def expect(self, handles: Ids) -> None:
        """Let the backing tier begin with those blocks that no tier above it has."""
        started = perf_counter()
        for residency in self.residency[: self.backing]:
            handles = handles[residency.slot_of.array[handles] < 0]
        if len(handles):
            self.tiers[self.backing].expect(self.residency[self.backing].slot_of.array[handles])
        self.metrics.fetch_seconds += perf_counter() - started

    def _sources(self, missing: Ids, slots: Ids) -> Iterator[_Source]:
        """The first tier below the top that has each block, for all blocks of a tier at once."""
        left, rows = missing, slots
        for level in range(1, len(self.tiers)):
            here, found = self._found(level, left)
            if len(found):
                yield _Source(level, found, rows[here])
                if level < self.backing:
                    self._touch(level, left[here])
            left, rows = left[~here], rows[~here]

    def bring(self, fetch: Fetch, lock: AbstractContextManager[object]) -> None:
        """Do what `reserve` prepared, in any thread.

        The lock, which guards everything here, is not held while the backing tier reads: nobody
        writes that during a visit. Of tiers between, others may write while they have the lock.
        After an error of a tier, none has come, and the slots are free again.
        """
        started = perf_counter()
        out = self.tiers[0].view
        between = [source for source in fetch.sources if source.level < self.backing]
        try:
            if between:
                with lock:
                    self._read_from(between, out)
            self._read_from(fetch.sources[len(between) :], out)
        except BaseException:
            with lock:
                self.residency[0].return_slots(fetch.slots)
            raise
        with lock:
            self._enter(0, fetch.handles, fetch.slots)
            for source in fetch.sources:
                self.metrics.tiers[source.level].hits += len(source.slots)
                self._count_read(source.level, len(source.slots))
            self.metrics.fetch_seconds += perf_counter() - started
            self.metrics.fetched += len(fetch.handles)
            self.metrics.tiers[0].bytes_written += len(fetch.handles) * self.layout.block_bytes

    def _read_from(self, sources: Sequence[_Source], out: Bytes) -> None:
        """Also with an error, no transfer is under way when this returns."""
        with ExitStack() as under_way:
            for source in sources:
                tier = self.tiers[source.level]
                if self.timeline is None:
                    under_way.callback(tier.read(source.slots, out, source.rows).wait)
                else:
                    nbytes = len(source.slots) * self.layout.block_bytes
                    under_way.enter_context(self.timeline.transfer(tier.name, "read", nbytes))
                    under_way.callback(tier.read(source.slots, out, source.rows).wait)

    def read(self, handles: Ids, out: Bytes, rows: Ids | None = None) -> None:
        """Block ``handles[i]`` into ``out[rows[i]]``, by default ``out[i]``, from the first tier
        that has it.

        Also with an error, no transfer is under way when this returns.
        """
        rows = np.arange(len(handles), dtype=np.int32) if rows is None else rows
        sources = []
        for level in range(len(self.tiers)):
            here, found = self._found(level, handles)
            if len(found):
                sources.append(_Source(level, found, rows[here]))
                self._count_read(level, len(found))
            handles, rows = handles[~here], rows[~here]
        self._read_from(sources, out)

    def _found(self, level: int, handles: Ids) -> tuple[npt.NDArray[np.bool_], Ids]:
        """Which blocks a tier has, and the slots of those."""
        slots = self.residency[level].slot_of.array[handles]
        here = slots >= 0
        return here, slots[here]

    def _count_read(self, level: int, blocks: int) -> None:
        self.metrics.tiers[level].bytes_read += blocks * self.layout.block_bytes

    def use_below(self, level: int, handles: Ids) -> None:
        """Blocks were used where they are, in a tier below the top."""
        self.metrics.tiers[level].hits += len(handles)
        if level < self.backing:
            self._touch(level, handles)

    def levels(self, handles: Ids) -> Bytes:
        """The first tier that has each block."""
        found: Bytes = np.full(len(handles), self.backing, np.uint8)
        for level in reversed(range(self.backing)):
            found[self.residency[level].slot_of.array[handles] >= 0] = level
        return found

    def _touch(self, level: int, handles: Ids) -> None:
        """Tell a tier's policy that blocks there were used."""
        row_ptr = np.array([0, len(handles)], np.int64)
        no_scores = np.zeros(len(handles), np.float32)
        self.tell(level, "on_access", Access(row_ptr, handles, no_scores, self.step))

    # In parts

    def judge(self, selection: Selection, segments: Ids) -> tuple[Ids, Ids, Bytes, int]:
        """Begin a step: handles, top-tier slots (-1 = miss) and valid counts, and the misses.

        PolicyError if the selection names a block that its segment does not have, or one twice.
        """
        self.step += 1
        n = len(selection.ids)
        handles, slots = np.empty(n, np.int32), np.empty(n, np.int32)
        valid = np.empty(n, np.uint8)
        misses = tables.judge(
            self._space.chunks, self._space.blocks, segments, selection.row_ptr, selection.ids,
            self.residency[0].slot_of.array, self.valid.array, self.last_used.array, self.step,
            handles, slots, valid,
        )  # fmt: skip
        if misses < 0:
            raise PolicyError(bad_selection(selection, -1 - misses))
        return handles, slots, valid, misses

    def worth_fetching(
        self, selection: Selection, segments: Ids, slots: Ids, delta: float
    ) -> tuple[Pointers, Ids]:
        """Which of the judged blocks to go on with: those there, and those worth fetching.

        Returns row pointers, and positions in the selection.
        """
        top, n = self.residency[0], len(slots)
        row_ptr: Pointers = np.empty_like(selection.row_ptr)
        kept: Ids = np.empty(n, np.int32)
        held = top.counts[top.domain_of[segments]]
        count = tables.worth_fetching(
            selection.row_ptr, selection.scores, slots, held, delta, row_ptr, kept
        )
        return row_ptr, kept[:count]

    def passes(
        self, row_ptr: Pointers, handles: Ids, slots: Ids
    ) -> Iterator[tuple[Pointers, Ids | None]]:
        """Split a selection so that each part fits its domains; None means all of it.

        Leased blocks come in the first part, since they stay; then residents. The blocks of a part
        are stamped with a step of their own, which protects just them.
        """
        top = self.residency[0]
        domains, stays = top.domains(handles), self.leases.array[handles] > 0
        n = len(top.counts)
        held = self.leased_in(domains) + np.bincount(domains[stays & (slots < 0)], minlength=n)
        wanted, room = np.bincount(domains[~stays], minlength=n), top.quota - held
        if (wanted <= room)[domains].all():
            yield row_ptr, None
            return
        if (room < np.minimum(wanted, 1))[domains].any():
            raise CapacityError(
                f"{self.tiers[0].name}: a domain of the selection has room for no block at all: "
                "raise the limit or release leases"
            )
        others = np.flatnonzero(~stays)
        order = others[np.lexsort((slots[others] < 0, domains[others]))]
        starts = np.concatenate([[0], np.cumsum(wanted)])[domains[order]]
        number = np.zeros(len(handles), np.int64)
        number[order] = (np.arange(len(order)) - starts) // room[domains[order]]
        rows = np.repeat(np.arange(len(row_ptr) - 1), np.diff(row_ptr))
        for part in range(int(number.max()) + 1):
            chosen = np.flatnonzero(number == part).astype(np.int32)
            self.step += 1
            self.last_used.array[handles[chosen]] = self.step
            counts = np.bincount(rows[chosen], minlength=len(row_ptr) - 1)
            yield np.concatenate([[0], np.cumsum(counts)]).astype(np.int64), chosen

    def leased_in(self, domains: Ids, level: int = 0) -> Pointers:
        """Leased residents of a tier, for each domain; only `domains` are counted."""
        tier = self.residency[level]
        leased: Pointers = np.zeros(len(tier.counts), np.int64)
        if self.leased:
            _, residents = tier.collect(np.unique(domains).astype(np.int32))
            held = residents[self.leases.array[residents] > 0]
            np.add.at(leased, tier.domains(held), 1)
        return leased

    def set_quota(self, level: int, domains: Ids, blocks: Pointers) -> None:
        """Most blocks each of `domains` may hold in a tier, no less than it holds now."""
        self.residency[level].set_quota(domains, blocks)
        if level < self.backing:
            self.tell(level, "on_capacity", domains, blocks)

    # Out of a tier

    def make_room(self, level: int, incoming: Ids, access: Access, *, leaving: Ids = _NONE) -> None:
        """Evict until the domains of `incoming` have room for it, as far as anything may leave.

        Below the top tier, copies of what the last step uses there leave first, and the policy is
        asked where that is not enough. leaving: blocks on their way out of the tiers above, whose
        copies stay.
        """
        residency = self.residency[level]
        need: Pointers = np.zeros(len(residency.counts), np.int64)
        if not tables.room_needed(
            residency.domains(incoming), residency.counts, residency.quota, need
        ):
            return
        domains = np.flatnonzero(need).astype(np.int32)
        wanted = short = need[domains]
        if level > 0:
            most = np.maximum(short, residency.quota[domains] // _BATCHES)
            wanted = self._drop_copies(level, domains, most, leaving)
            is_short = most - wanted < short
            domains, wanted = domains[is_short], wanted[is_short]
        if len(domains):
            victims = self.victims(level, domains, wanted, access, incoming)
            self.evict(level, victims, leaving)

    def _drop_copies(self, level: int, domains: Ids, most: Pointers, leaving: Ids) -> Pointers:
        """Let blocks go that the last step uses in the top tier, so that they are not lost.

        At most so many of each domain; returns how many fewer they were.
        """
        row_ptr, residents = self.residency[level].collect(domains)
        found: Ids = np.empty(len(residents), np.int32)
        left = most.copy()
        count = tables.copies(
            residents, row_ptr, self.residency[0].slot_of.array, self.leases.array,
            self.last_used.array, self.step, np.sort(leaving), left, found,
        )  # fmt: skip
        self._remove(level, found[:count])
        return left

    def victims(
        self, level: int, domains: Ids, need: Pointers, access: Access, incoming: Ids = _NONE
    ) -> Ids:
        """Ask the policy for `need` blocks of each domain, or all that may leave.

        PolicyError if it raises, or names what may not leave; nothing has moved then.
        """
        residency = self.residency[level]
        row_ptr, residents = residency.collect(domains)
        eligible: npt.NDArray[np.bool_] = np.empty(len(residents), np.bool_)
        able: Pointers = np.empty(len(domains), np.int64)
        leases, last_used = self.leases.array, self.last_used.array
        # In the top tier a visit has its domains to itself; below, others may be reading.
        since = self.step if level == 0 else min(self.visiting, default=self.step)
        tables.eligible(residents, row_ptr, leases, last_used, since, eligible, able)
        need = np.minimum(need, able)
        demand = Demand(domains, row_ptr, residents, eligible, need, access, incoming)
        victims = self._named(level, demand)
        expected = np.repeat(domains, need)
        bad = tables.first_bad_victim(
            victims, expected, residency.domain_of, self._space.owner_segment,
            residency.slot_of.array, leases, last_used, since,
        )  # fmt: skip
        if bad >= 0:
            raise PolicyError(
                f"{type(self.policies[level]).__name__}.victims named "
                f"{self._fault(level, victims, bad, int(expected[bad]))}: expected distinct "
                f"eligible residents, {need.tolist()} of the domains {domains.tolist()}"
            )
        return victims

    def tell(self, level: int, event: str, *facts: object) -> Any:  # noqa: ANN401 (see `_named`)
        """Call a method of a tier's policy; PolicyError for an exception of its own."""
        policy = self.policies[level]
        try:
            return getattr(policy, event)(*facts)
        except TierstoreError:
            raise
        except Exception as error:
            raise PolicyError(f"{type(policy).__name__}.{event} raised {error!r}") from error

    def _named(self, level: int, demand: Demand) -> Ids:
        """The policy's answer, if it is an array of as many handles as it should be."""
        victims = self.tell(level, "victims", demand)
        count = int(demand.need.sum())
        found = type(victims).__name__
        if isinstance(victims, np.ndarray):
            found = f"{victims.dtype} {list(victims.shape)}"
            if victims.dtype == np.int32 and victims.shape == (count,):
                return victims
        raise PolicyError(
            f"{type(self.policies[level]).__name__}.victims returned {found}: expected int32 "
            f"[{count}], {demand.need.tolist()} handles of the domains {demand.domains.tolist()}"
        )

    def _fault(self, level: int, victims: Ids, position: int, domain: int) -> str:
        """The block that a policy should not have named at that position, and why."""
        residency, handle = self.residency[level], int(victims[position])
        segment, number = self._space.block_of(handle)
        if segment < 0:
            return f"handle {handle}, which is no block's"
        block = f"block {number} of segment {segment}"
        if residency.slot_of.array[handle] < 0:
            reason = "is not in the tier"
        elif handle in victims[:position]:
            reason = "was named before"
        elif residency.domain_of[segment] != domain:
            reason = f"is of domain {residency.domain_of[segment]}, where one of {domain} was due"
        elif self.leases.array[handle] > 0:
            reason = "is leased"
        else:
            reason = "is used by the running step"
        return f"{block}, which {reason}"

    def evict(self, level: int, handles: Ids, leaving: Ids = _NONE) -> None:
        """Take blocks out of a tier; the next gets those it lacks, unless it is the last.

        leaving: blocks that leave the tiers above for that.
        """
        if not len(handles):
            return
        below = level + 1
        if below < self.backing:
            lost = handles[self.residency[below].slot_of.array[handles] < 0]
            leaving = np.concatenate([leaving, handles])
            self.make_room(below, lost, self.idle_access(), leaving=leaving)
            cached = self.cache(below, lost, *self._bytes_of(level, lost))
            self.metrics.tiers[level].demotions += cached
        self._remove(level, handles)

    def _remove(self, level: int, handles: Ids) -> None:
        """Take blocks out of a tier, into none."""
        if len(handles):
            self.residency[level].remove(handles)
            self.tell(level, "on_evict", handles)
            self.metrics.tiers[level].evictions += len(handles)

    def _bytes_of(self, level: int, handles: Ids) -> tuple[Bytes, Ids]:
        """Where the bytes of blocks in a tier can be read: an array and rows of it."""
        tier, slots = self.tiers[level], self.residency[level].slot_of.array[handles]
        if tier.is_addressable:
            return tier.view, slots
        out: Bytes = np.empty((len(handles), self.layout.block_bytes), np.uint8)
        rows = np.arange(len(handles), dtype=np.int32)
        tier.read(slots, out, rows).wait()
        return out, rows

    def forget(self, handles: Ids) -> None:
        """Take blocks out of every tier, then out of every policy.

        The first error of a policy is raised when all have been told.
        """
        for residency in self.residency:
            residency.remove(handles[residency.slot_of.array[handles] >= 0])
        self._tell_all("on_remove", [(handles,)] * self.backing)

    def close(self, segments: Ids, partitioned: int) -> None:
        """Take empty segments out of their domains; those that were theirs, in some tiers, end.

        The first error of a policy is raised when all have been told.
        """
        if self.backing > 0:
            nobody: Ids = np.empty(0, np.int32)
            theirs = [tier.unassign(segments) for tier in self.residency[:partitioned]]
            ended = [*theirs, *[nobody] * (self.backing - partitioned)]
            self._tell_all("on_close", [(segments, domains) for domains in ended])

    def _tell_all(self, event: str, facts: Sequence[tuple[object, ...]]) -> None:
        """`tell` every policy; ``facts[level]`` is what."""
        errors = []
        for level, of_level in enumerate(facts):
            try:
                self.tell(level, event, *of_level)
            except TierstoreError as error:
                errors.append(error)
        if errors:
            raise errors[0]


def check_chain(
    layout: BlockLayout, tiers: Sequence[Tier], policies: Sequence[EvictionPolicy]
) -> None:
    """ConfigError for tiers and policies that do not make a chain."""
    if not tiers:
        raise ConfigError("tiers=[]: expected at least one tier")
    if len(policies) != len(tiers) - 1:
        raise ConfigError(
            f"{len(policies)} policies for {len(tiers)} tiers: expected one for each but the last"
        )
    for tier in tiers:
        if tier.layout != layout:
            raise ConfigError(
                f"tier {tier.name!r} has another layout than the store: build both from one"
            )
    if not tiers[0].is_addressable:
        raise ConfigError(
            f"tier {tiers[0].name!r} cannot be read in place: put a memory tier first"
        )


def bad_selection(selection: Selection, position: int) -> str:
    """What is wrong with a selection at a position, or behind it with its row pointers."""
    if position == len(selection.ids):
        return (
            f"row pointers {selection.row_ptr.tolist()[:8]}... of a selection: expected one more "
            f"than there are rows, rising from 0 to {position}, the number of its ids"
        )
    return (
        f"id {selection.ids[position]} at position {position} of a selection: expected distinct "
        "numbers of blocks that the row's segment has"
    )
