"""Records under keys in the preallocated segment files of one directory.

`write` makes records readable in this process, `sync` makes them survive a power loss. What is
found damaged is dropped and counted; it never comes back as bytes.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
import weakref
from collections import Counter
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from tierstore.deadlines import end_of, left_until
from tierstore.errors import CapacityError, ConfigError, CorruptBlockError, TierOfflineError
from tierstore.events import emit
from tierstore.reads import LateReadError
from tierstore.volume.capacity import segments_in
from tierstore.volume.check import Check, Finding
from tierstore.volume.files import Run, SegmentFiles
from tierstore.volume.format import (
    DEAD,
    LIVE,
    PAGE,
    PAYLOAD_BYTES_MOST,
    ROW,
    ROW_BYTES,
    KeyFields,
    extent_size,
    payload_checksum,
    row_check,
)
from tierstore.volume.health import Health
from tierstore.volume.leftovers import Leftovers, discard_leftovers
from tierstore.volume.manifest import Commit, Groups
from tierstore.volume.namespace import write_facts
from tierstore.volume.opening import Opening
from tierstore.volume.records import Records
from tierstore.volume.segment import stored_digest
from tierstore.volume.space import Space

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tierstore.identity import Identity
    from tierstore.interfaces import Pointers
    from tierstore.io import FileIO
    from tierstore.volume.lock import DirectoryLock
    from tierstore.volume.manifest import Manifest
    from tierstore.volume.segment import Segment
    from tierstore.volume.verifier import Progress

_log = logging.getLogger(__name__)

_COMMIT_GROUPS = 1024
"""Groups of rows that may differ from what the directory knows: tables alone say what is durable,
so the directory follows in larger steps, and at the end."""

_STATE_AT = ROW.fields["state"][1] if ROW.fields else 0


@dataclass(slots=True)
class Stored:
    """Values as they are on disk: the bytes of each, how long each was before, and by which codec.

    valid: uint32, blocks that each holds; 0 where that means nothing. least_bytes: room that each
    takes at least. sequences: of values that only move; others get the next ones.
    """

    pieces: Sequence[memoryview]
    value_bytes: Sequence[int]
    codec: int
    valid: Sequence[int] | None = None
    least_bytes: int = 0
    sequences: Sequence[int] | None = None


class Volume:
    """The durable tier of a keyed store. Any thread may call; `lock` guards what is in memory.

    Parameters
    ----------
    parent: directory of namespaces; made (0700) if only its last part is missing.
    capacity_bytes: most bytes on disk, directory included; all are reserved when the volume opens.
    segment_bytes: size of segment files; by default 1/64 of the capacity, within 1 MiB to 16 GiB.
    recovery: ``"quiet"`` drops and counts what is damaged, ``"strict"`` raises CorruptBlockError.
    evicts: whether records may leave to make room for others, or new ones are refused.
    threads: reads under way at once.
    """

    def __init__(
        self,
        parent: str | os.PathLike[str],
        identity: Identity,
        *,
        capacity_bytes: int,
        segment_bytes: int | None,
        recovery: str,
        read_only: bool,
        io: FileIO,
        threads: int = 32,
        evicts: bool = True,
    ) -> None:
        if not isinstance(threads, int) or threads < 0:
            raise ConfigError(f"threads={threads!r}: expected a number of threads, 0 or more")
        self._evicts = evicts
        self.lock = threading.RLock()
        self.identity = identity
        self.is_read_only = read_only
        self.is_closed = False
        self.removals = 0
        """Calls that removed something, or may have."""
        self._closer = -1
        self._writers = 0
        self._idle = threading.Condition(self.lock)
        self.records = Records()
        self.health = Health(str(parent))
        self.dropped: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.on_free: Callable[[Pointers], None] | None = None
        """Told which places hold nothing any more, before they are used again."""
        self._io = io
        self._space = Space(self.records)
        self._syncing = threading.Lock()
        self._syncs_begun = self._syncs_done = 0
        self._is_identity_sure = True
        opening = Opening(
            parent, identity, capacity_bytes, segment_bytes, io, read_only=read_only,
            is_strict=recovery == "strict", dropped=self.dropped,
        )  # fmt: skip
        self.directory = opening.directory
        self.files = SegmentFiles(
            io, opening.folder, identity.digest, opening.facts.segment_bytes, self.records,
            self._space, self.health, threads=threads,
        )  # fmt: skip
        self._end = weakref.finalize(
            self, _let_go, os.getpid(), self.files, opening.manifest, opening.lock
        )
        self._end.atexit = False
        try:
            opening.fill(self.files, self.records, self._space)
            self.facts = opening.facts
            self._manifest = opening.manifest
            self._sequence, self._is_clean = opening.sequence, opening.is_clean
            self.noticed = opening.noticed
            self.kill(opening.older, "superseded")
            self.write_rows(opening.damaged)
            if not read_only and evicts and self.disk_bytes > capacity_bytes:
                self.resize(capacity_bytes)
            self._say_opened()
        except BaseException:
            self._end()
            raise

    def _say_opened(self) -> None:
        facts = {"path": self.directory, "epoch": self.facts.epoch, "records": self.records.live}
        emit(_log, logging.INFO, "store.opened", f"{self.directory}: opened", **facts)
        if +self.dropped:
            emit(
                _log, logging.WARNING, "store.recovered",
                f"{self.directory}: dropped on opening: {dict(+self.dropped)}",
                dropped=dict(+self.dropped), **facts,
            )  # fmt: skip

    # Facts

    @property
    def largest(self) -> int:
        """Most bytes that a value may take on disk."""
        return min((self.files.nbytes - 2 * PAGE) // PAGE * PAGE, PAYLOAD_BYTES_MOST)

    @property
    def disk_bytes(self) -> int:
        """Bytes on disk: segment files and the directory."""
        return len(self.files.by_number) * self.files.nbytes + self._manifest.nbytes

    @property
    def is_direct(self) -> bool:
        """Whether reads pass the page cache by."""
        return any(segment.is_direct for segment in self.files.by_number.values())

    @contextmanager
    def locked(self, deadline: float | None = None) -> Iterator[None]:
        """The lock; TierOfflineError if somebody else still has it after `deadline` seconds."""
        if not self.lock.acquire(timeout=-1 if deadline is None else max(deadline, 0)):
            raise TierOfflineError(
                f"{self.directory!r} did not answer within {deadline} seconds: the disk hangs, or "
                "the deadline is too short"
            )
        try:
            yield
        finally:
            self.lock.release()

    def check_writable(self) -> None:
        """ConfigError if closed or open for reading only, TierOfflineError if offline."""
        # The last sync may have to move records to other files.
        if self.is_closed and threading.get_ident() != self._closer:
            raise ConfigError("the store is closed: open it again")
        if self.is_read_only:
            raise ConfigError("the store is open for reading only: open it with read_only=False")
        if self.health.is_offline:
            raise TierOfflineError(
                f"{self.directory!r} failed too often and is offline: see stats().errors, then "
                "close the store and open it again"
            )
        self._begin_changes()

    def _begin_changes(self) -> None:
        """Let the directory say, durably, that tables may differ from what it knows."""
        if self._is_clean:
            commit = Commit(self.facts.epoch, self._sequence, is_clean=False)
            self.health.call(self._manifest.commit, commit, {})
            self._is_clean = False

    # Writing

    def write(
        self,
        keys: KeyFields,
        stored: Stored,
        until: float | None = None,
        keep: int | None = None,
    ) -> npt.NDArray[np.bool_]:
        """Store values under distinct keys; which of them are readable now.

        Others are refused, with a reason in `refused`; nothing of them is visible.

        until: time of `time.monotonic` after which nothing becomes visible any more. keep: store
        only under keys that have no value, and only if `removals` still is that number.
        """
        pieces = [[piece] for piece in stored.pieces]
        for i, key in keys.tails.items():
            pieces[i].append(memoryview(key))
        sizes = [max(sum(map(len, own)), stored.least_bytes) for own in pieces]
        with self.locked(left_until(until)):
            self.check_writable()
            self._writers += 1
            epoch = self.facts.epoch
            try:
                places = self._reserve(sizes, stored.value_bytes)
            except BaseException:
                self._writers -= 1
                raise
            first, self._sequence = self._sequence, self._sequence + len(sizes)
        try:
            runs = self.files.runs(places)
            rows = _sealed_rows(self._rows(keys, stored, first), pieces, runs)
            failed = self.files.write(runs, pieces)
            self._io.reached("put.after_payload")
            with self.lock:
                lost = np.flatnonzero((places >= 0) & (self.records.segment[places] < 0))
                self._refuse(places, "io", sorted({*failed, *lost.tolist()}))
                if until is not None and time.monotonic() > until:
                    self._refuse(places, "deadline", np.flatnonzero(places >= 0).tolist())
                if keep is not None:
                    is_new = (self.records.find(keys) < 0) & (keep == self.removals)
                    self._refuse(
                        places, "changed", np.flatnonzero((places >= 0) & ~is_new).tolist()
                    )
                return self._publish(keys, places, rows, epoch)
        except BaseException:
            self.let_go(places[places >= 0])
            raise
        finally:
            self._end_write()

    def _end_write(self) -> None:
        with self.lock:
            self._writers -= 1
            self._idle.notify_all()

    def _reserve(self, sizes: list[int], value_bytes: Sequence[int]) -> Pointers:
        """A pinned place for each payload, -1 where it is refused."""
        places: Pointers = np.full(len(sizes), -1, np.int64)
        classes = np.array([extent_size(size) for size in sizes], np.int64)
        is_large = (classes > self.largest) | (
            np.array(value_bytes) > min(self.files.nbytes, PAYLOAD_BYTES_MOST)
        )
        self.refused["too large"] += int(is_large.sum())
        try:
            for size in np.unique(classes[~is_large]).tolist():
                wanted = np.flatnonzero((classes == size) & ~is_large)
                count = self._fill(places, wanted, size)
                if count < len(wanted):
                    is_held = self._evicts and (self.files.is_draining or self._space.is_held())
                    reason = "all pinned" if is_held else "no room"
                    self.refused[reason] += len(wanted) - count
        except BaseException:
            self.unpin(places[places >= 0])
            raise
        return places

    def _fill(self, places: Pointers, wanted: Pointers, size: int) -> int:
        """Put free places of one size, pinned, where they are wanted; others leave for them.

        Returns how many there were.
        """
        free, count = self._space.free(size), 0
        while True:
            found = free.pop(len(wanted) - count)
            self.records.pins[found] = 1
            places[wanted[count : count + len(found)]] = found
            count += len(found)
            if count == len(wanted) or not self._make_room(size, len(wanted) - count):
                return count

    def _make_room(self, size: int, count: int) -> bool:
        """Free places of a size; False if nothing may leave, or a file takes no header."""
        self.files.collect()
        if not self._space.blank and self._evicts:
            self._empty_coldest(size)
        if self._space.blank:
            self._sequence += 1
            return self.files.begin(size, self.facts.epoch, self._sequence - 1)
        if not self._evicts:
            return False
        victims = self._space.victims(size, count)
        self.kill(victims, "evicted")
        self._io.reached("evict.after_rows")
        return len(victims) > 0

    def _rows(self, keys: KeyFields, stored: Stored, first: int) -> npt.NDArray[np.void]:
        """Rows that describe values, but for their places and checksums."""
        n = len(keys)
        rows = np.zeros(n, ROW)
        rows["sequence"] = np.arange(first, first + n, dtype=np.uint64)
        if stored.sequences is not None:
            rows["sequence"] = stored.sequences
        rows["stored_bytes"] = [piece.nbytes for piece in stored.pieces]
        rows["value_bytes"] = stored.value_bytes
        rows["key_bytes"] = keys.lengths
        rows["codec"], rows["state"] = stored.codec, LIVE
        rows["valid"] = 0 if stored.valid is None else stored.valid
        rows.view(np.uint64).reshape(n, -1)[:, 5:11] = keys.fields
        return rows

    def _refuse(self, places: Pointers, reason: str, positions: list[int]) -> None:
        """Give back the places of payloads that are not to be seen."""
        if positions:
            self.refused[reason] += len(positions)
            self._give_back(places, np.array(positions))

    def _give_back(self, places: Pointers, chosen: npt.NDArray[np.int64 | np.bool_]) -> None:
        """Unpin some places, and note that it is done, whatever happens next."""
        held = places[chosen]
        places[chosen] = -1
        self.unpin(held)

    def _publish(
        self, keys: KeyFields, places: Pointers, rows: npt.NDArray[np.void], epoch: int
    ) -> npt.NDArray[np.bool_]:
        """Make written payloads findable, in place of older ones under their keys."""
        written = places >= 0
        if self.is_closed or self.facts.epoch != epoch:
            self.dropped["cleared"] += int(written.sum())
            self._give_back(places, written)
            return written & (not self.is_closed)
        current = self.records.find(keys)
        sequences = self.records.rows["sequence"]
        is_late = written & (current >= 0)
        is_late[is_late] = sequences[current[is_late]] > rows["sequence"][is_late]
        self._give_back(places, is_late)
        self.dropped["superseded"] += int(is_late.sum())
        fresh = np.flatnonzero(written & ~is_late)
        new = places[fresh]
        try:
            for i in keys.tails.keys() & set(fresh.tolist()):
                self.records.long_keys[int(places[i])] = keys.tails[i]
            self.records.rows[new] = rows[fresh]
            fine = self._show(new, current[fresh])
            done = is_late.copy()
            done[fresh[fine]] = True
        except BaseException:
            self._take_back(new)
            raise
        self._give_back(places, fresh)
        self._io.reached("put.after_rows")
        return done

    def _show(self, new: Pointers, old: Pointers) -> npt.NDArray[np.bool_]:
        """Let new rows count in place of old ones; which of them do."""
        self.write_rows(new)
        self.kill(old[(old >= 0) & self._is_live(new)], "overwritten")
        # A segment that failed meanwhile has dropped what it held.
        fine = self._is_live(new)
        self.records.enter(new[fine])
        self.records.touch(new[fine])
        self.refused["io"] += int((~fine).sum())
        return fine

    def _take_back(self, places: Pointers) -> None:
        """Show nothing of values that are live in part."""
        try:
            self.kill(places, "interrupted")
        except MemoryError:
            self.forget(places[self._is_live(places)], "interrupted")

    def _is_live(self, places: Pointers) -> npt.NDArray[np.bool_]:
        is_live: npt.NDArray[np.bool_] = self.records.rows["state"][places] == LIVE
        return is_live

    def write_rows(self, places: Pointers) -> None:
        """Bring rows to disk as they are in memory; a file that refuses them is given up."""
        if self.is_read_only or not len(places):
            return
        with suppress(OSError):  # the tables would be taken for damaged: a loss, never a lie
            self._begin_changes()

        def drop(segment: Segment) -> None:
            self.forget(self.files.live(segment), "io")

        self.files.write_rows(places, drop)

    # Removing

    def kill(self, places: Pointers, reason: str) -> None:
        """Drop those records that are live, in memory and in their tables; `reason` is counted.

        Pinned places stay as they are until they are unpinned.
        """
        places = places[self._is_live(places)]
        if not len(places):
            return
        dead = []
        for place in places.tolist():
            row = bytearray(self.records.rows[place].tobytes())
            row[_STATE_AT] = DEAD
            dead.append(_sealed(bytes(row), self.files.of(place).binding(place)))
        self._withdraw(places, reason)
        self.records.rows[places] = np.frombuffer(b"".join(dead), ROW)
        try:
            self.write_rows(places)
        finally:
            self._free(places[self.records.pins[places] == 0])

    def forget(self, places: Pointers, reason: str) -> None:
        """`kill` in memory only, for records whose file is about to be emptied."""
        self._withdraw(places, reason)
        self.records.rows["state"][places] = DEAD
        self._free(places[self.records.pins[places] == 0])

    def _withdraw(self, places: Pointers, reason: str) -> None:
        self.records.withdraw(places)
        self.dropped[reason] += len(places)
        if self.records.long_keys:
            for place in places.tolist():
                self.records.long_keys.pop(place, None)

    def pin(self, places: Pointers) -> None:
        """Keep live records where they are; the lock must be held."""
        np.add.at(self.records.pins, places, 1)

    def let_go(self, places: Pointers) -> None:
        """`unpin` for those who do not hold the lock."""
        with self.lock:
            self.unpin(places)

    def unpin(self, places: Pointers) -> None:
        """Let go of pinned places; those that hold nothing become free."""
        self._free(self.records.unpin(places))

    def _free(self, places: Pointers) -> None:
        if not len(places):
            return
        if self.on_free is not None:
            self.on_free(places)
        owned = places[self.records.segment[places] >= 0]
        for segment, own in self.files.by_segment(owned):
            if not segment.is_draining:
                self._space.free(segment.header.extent_bytes).push(own)

    def clear(self) -> None:
        """Drop everything at once, durably, by beginning a new epoch. OSError, and no change."""
        with self.lock:
            self.check_writable()
            self.removals += 1
            facts = replace(self.facts, epoch=self.facts.epoch + 1)
            commit = Commit(facts.epoch, self._sequence, is_clean=False)
            self.health.call(self._manifest.commit, commit, {})
            self._is_identity_sure = False
            self.health.call(write_facts, self._io, self.directory, facts)
            self._is_identity_sure = True
            self._io.reached("clear.after_facts")
            self.facts = facts
            self.forget(self.records.live_places(), "cleared")
            self.files.drain_all()
        emit(
            _log, logging.INFO, "store.cleared", f"{self.directory}: cleared",
            path=self.directory, epoch=facts.epoch,
        )  # fmt: skip

    def resize(self, capacity_bytes: int) -> None:
        """Have another capacity: blank files are made or removed, the coldest emptied for that.

        CapacityError if pinned records are in the way or the disk is full, ConfigError if not even
        one segment fits; as far as it came, the volume is in order.
        """
        with self.lock:
            self.check_writable()
            self.files.blank_empty()
            most = segments_in(capacity_bytes, self.files.nbytes)
            while len(self.files.by_number) > most:
                self.files.collect()
                if not self._space.blank and not (self._evicts and self._empty_coldest(0)):
                    raise CapacityError(
                        f"{self.directory!r}: every segment file holds a value that must stay"
                        f"{': release leases first' if self._evicts else ''}"
                    )
                leaving = self._space.blank[-1]
                self.health.call(self._manifest.forget, [leaving.number])
                self.health.call(self.files.remove, leaving)
            self.files.create_missing(most)

    def _empty_coldest(self, size: int) -> bool:
        """Evict all of the segment that is used least, unless it is one of extents of that size."""
        coldest = self._space.coldest(size)
        if coldest is not None:
            self.forget(self.files.live(coldest), "evicted")
            self.files.blank(coldest)
        return coldest is not None

    # Durability

    def sync(self) -> None:
        """Return when everything readable now survives a power loss.

        OSError if it may not: then nothing since the last good `sync` is promised. Files that
        failed have been replaced, so a later call may succeed. Calls that wait share one sync.
        """
        self.check_writable()
        arrival = self._syncs_begun
        with self._syncing:
            if self._syncs_done > arrival:
                return
            self.check_writable()
            self._syncs_begun += 1
            begun = self._syncs_begun
            self._sync(is_clean=False)
            self._syncs_done = begun

    def _sync(self, *, is_clean: bool) -> None:
        if not self._is_identity_sure:  # a `clear` failed, and its epoch may be on disk
            self.health.call(write_facts, self._io, self.directory, self.facts)
            self._is_identity_sure = True
        with self.lock:
            files = self.files.by_number.values()
            dirty = [segment for segment in files if segment.is_dirty]
            # A digest is of hundreds of rows, and a lookup waits for this lock.
            changed = sum(len(segment.dirty_groups) for segment in files)
            is_due = is_clean or changed >= _COMMIT_GROUPS
            groups = self._changed_groups() if is_due else {}
            commit = Commit(self.facts.epoch, self._sequence, is_clean)
            for segment in dirty:
                segment.is_dirty = False
        self._io.reached("sync.before_files")
        failures: list[tuple[Segment, OSError]] = []
        for segment in dirty:
            try:
                self.health.call(segment.sync)
            except OSError as error:
                failures.append((segment, error))
        if failures:
            self._replace_failed(failures)
        if is_due:
            self._io.reached("sync.before_commit")
            self.health.call(self._manifest.commit, commit, groups)
            self._io.reached("sync.after_commit")
            with self.lock:
                self._mark_known(groups)

    def _changed_groups(self) -> Groups:
        return {
            (number, group): (segment.header.generation, segment.digest(group, self.records))
            for number, segment in self.files.by_number.items()
            for group in segment.dirty_groups
        }

    def _mark_known(self, groups: Groups) -> None:
        """Forget that groups changed, unless they changed again since."""
        for (number, group), (generation, digest) in groups.items():
            segment = self.files.by_number.get(number)
            is_same = segment is not None and segment.header.generation == generation
            if segment is not None and is_same and segment.digest(group, self.records) == digest:
                segment.dirty_groups.discard(group)

    def _replace_failed(self, failures: list[tuple[Segment, OSError]]) -> None:
        """Save what can still be read of files that failed to sync, and replace them; then raise.

        After a failed fsync the kernel may have thrown away what it could not write, and a second
        call would succeed without it.
        """
        with self.lock:
            for segment, _ in failures:
                if self.files.by_number.get(segment.number) is segment:
                    self.replace(segment)
        number, error = failures[0][0].number, failures[0][1]
        emit(
            _log, logging.ERROR, "sync.failed",
            f"{self.directory}: {len(failures)} segment files could not be synced ({error})",
            path=self.directory, segments=[segment.number for segment, _ in failures],
            error=str(error),
        )  # fmt: skip
        raise OSError(
            error.errno,
            f"{self.directory!r}: segment {number} could not be synced ({error.strerror}); what "
            "was written since the last sync may be lost; what can be read was moved to other "
            "files, so call sync() again",
        ) from error

    def replace(self, segment: Segment) -> None:
        """Move what can be read of a segment elsewhere, and put a new file in its place.

        One value at a time: memory does not grow with what the segment holds.
        """
        header, live = segment.header, self.files.live(segment)
        keys = self.records.fields(live)
        self.records.pins[live] += 1
        self.forget(live, "io")
        self.files.give_up(segment)
        self.unpin(live)
        try:
            self.health.call(self.files.renew, segment)
        except OSError:
            self.health.errors["lost segment file"] += 1
        segment.take(header)  # of the old file, which is open and has the payloads still
        for i, place in enumerate(live.tolist()):
            stored = self.files.salvage(segment, place)
            if stored is None:
                continue
            row = self.records.rows[place].copy()
            # With a new sequence it would take the place of a value that is being put right now.
            one = Stored(
                [stored], [int(row["value_bytes"])], int(row["codec"]), [int(row["valid"])],
                sequences=[int(row["sequence"])],
            )  # fmt: skip
            self.write(keys.take(np.array([i])), one)

    def read(
        self, places: Sequence[int], buffers: Sequence[memoryview], deadline: float | None
    ) -> list[Exception | None]:
        """Fill buffers with pinned records' payloads; the outcome of each, None where it is right.

        A record found damaged is dropped. Outcomes: CorruptBlockError, OSError, LateReadError.
        """
        return self.begin_read(places, buffers, deadline)()

    def begin_read(
        self, places: Sequence[int], buffers: Sequence[memoryview], deadline: float | None
    ) -> Callable[[], list[Exception | None]]:
        """`read` without waiting for the disk: call the result for the outcomes."""
        until = end_of(deadline)
        lost = TierOfflineError(errno.EIO, f"{self.directory!r}: the file, or the disk, failed")
        outcomes: list[Exception | None] = [lost] * len(places)
        if self.health.is_offline:
            return lambda: outcomes
        try:
            with self.locked(deadline):
                there = [i for i, place in enumerate(places) if self.records.segment[place] >= 0]
                requests = self.files.reads([places[i] for i in there], [buffers[i] for i in there])
        except TierOfflineError as error:
            late = LateReadError(str(error), None)
            return lambda: [late] * len(places)
        reading = self.files.start(requests, left_until(until))

        def finish() -> list[Exception | None]:
            for i, outcome in zip(there, self.files.noted(reading.wait()), strict=True):
                outcomes[i] = outcome
            bad = [
                place
                for place, outcome in zip(places, outcomes, strict=True)
                if isinstance(outcome, CorruptBlockError)
            ]
            self.drop_damaged(np.array(bad, np.int64), "corrupt")
            return outcomes

        return finish

    def drop_damaged(self, places: Pointers, reason: str) -> None:
        """Drop those records of them that are still live."""
        if len(places):
            with self.lock:
                self.kill(places, reason)
            emit(
                _log, logging.WARNING, "record.dropped",
                f"{self.directory}: {len(places)} values dropped: {reason}",
                path=self.directory, reason=reason, count=len(places),
            )  # fmt: skip

    # The end

    def close(self, deadline: float = 30.0) -> None:
        """Sync, if anything can be, and give up the directory. A second call does nothing."""
        with self.lock:
            if self.is_closed:
                return
            self.is_closed = True
            self._closer = threading.get_ident()
            until = time.monotonic() + deadline
            while self._writers and (left := until - time.monotonic()) > 0:
                self._idle.wait(left)
        try:
            if not self.is_read_only and not self.health.is_offline and not self._is_clean:
                self._io.reached("close.before_sync")
                with self._syncing:
                    self._sync(is_clean=True)
        finally:
            if not self._writers:  # one that hangs keeps its descriptors
                self.files.close(deadline)
            self._end()
            emit(
                _log, logging.INFO, "store.closed", f"{self.directory}: closed",
                path=self.directory, records=self.records.live, dropped=dict(+self.dropped),
            )  # fmt: skip

    def abandon(self) -> None:
        """Give up the directory without a sync, for files that are about to be removed."""
        with self.lock:
            self.is_closed = True
        self._end()

    def validate(self) -> None:
        """Assert every invariant; for tests."""
        with self.lock:
            self.records.validate()
            free = self._space.all_free()
            assert len(np.unique(free)) == len(free), "a place is free twice"
            assert not self._is_live(free).any(), "a live place is free"
            assert not self.records.pins[free].any(), "a pinned place is free"

    def check(self, *, fix: bool, progress: Progress | None = None) -> list[Finding]:
        """Compare disk, directory and memory, and verify every payload; see `KeyedStore.check`."""
        if fix:
            self.check_writable()
        check = Check(self, self._space, self._manifest, self._io, fix=fix)
        check.run(progress)
        if fix:
            self.sync()
        return check.findings

    def discard_leftovers(self) -> Leftovers:
        """Remove from disk what was cleared or evicted, as far as whole files hold nothing else."""
        self.check_writable()
        with self.lock:
            found = discard_leftovers(self, self._space, self._manifest, self._io)
        self.sync()
        return found

    def verify(self, progress: Progress | None = None) -> list[Finding]:
        """Verify every payload; what is damaged stays."""
        check = Check(self, self._space, self._manifest, self._io, fix=False)
        check.verify(progress)
        return check.findings


def _let_go(process: int, files: SegmentFiles, manifest: Manifest, lock: DirectoryLock) -> None:
    """Give up what a volume holds, unless this is a fork of its process, which has it too."""
    if os.getpid() == process:
        files.close(1.0)
        manifest.close()
        lock.release()


def _sealed_rows(
    rows: npt.NDArray[np.void], pieces: list[list[memoryview]], runs: list[Run]
) -> npt.NDArray[np.void]:
    """Rows bound to their places and payloads; those in no run are empty."""
    whole = rows.tobytes()
    done = [bytes(ROW_BYTES)] * len(rows)
    for segment, first, positions in runs:
        for place, i in enumerate(positions, first):
            binding = segment.binding(place)
            row = whole[i * ROW_BYTES : (i + 1) * ROW_BYTES]
            checksum = payload_checksum(stored_digest(pieces[i]), row, binding)
            done[i] = _sealed(row[:8] + checksum + row[24:], binding)
    return np.frombuffer(b"".join(done), ROW)


def _sealed(row: bytes, binding: bytes) -> bytes:
    """A row with its check."""
    return row[:-8] + row_check(row, binding).to_bytes(8, "little")
