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
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from tierstore.deadlines import end_of, left_until
from tierstore.errors import CapacityError, ConfigError, CorruptBlockError, TierOfflineError
from tierstore.events import emit
from tierstore.reads import LateReadError
from tierstore.volume.capacity import segments_in
from tierstore.volume.check import Check, Finding
from tierstore.volume.files import SegmentFiles
from tierstore.volume.format import (
    DEAD,
    LIVE,
    PAGE,
    PAYLOAD_BYTES_MOST,
    ROW,
    KeyFields,
)
from tierstore.volume.health import Health
from tierstore.volume.leftovers import Leftovers, discard_leftovers
from tierstore.volume.manifest import Commit
from tierstore.volume.namespace import write_facts
from tierstore.volume.opening import Opening
from tierstore.volume.records import Records
from tierstore.volume.sealing import Stored, dead_row
from tierstore.volume.space import Space
from tierstore.volume.syncing import Syncing
from tierstore.volume.writing import Writing

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
        self.evicts = evicts
        self.lock = threading.RLock()
        self.identity = identity
        self.is_read_only = read_only
        self.is_closed = False
        self.removals = 0
        """Calls that removed something, or may have."""
        self._closer = -1
        self.records = Records()
        self.health = Health(str(parent))
        self.dropped: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.on_free: Callable[[Pointers], None] | None = None
        """Told which places hold nothing any more, before they are used again."""
        self._io = io
        self._space = Space(self.records)
        opening = Opening(
            parent, identity, capacity_bytes, segment_bytes, io, read_only=read_only,
            is_strict=recovery == "strict", dropped=self.dropped,
        )  # fmt: skip
        self.directory = opening.directory
        self.files = SegmentFiles(
            io, opening.folder, identity.digest, opening.facts.segment_bytes, self.records,
            self._space, self.health, threads=threads,
        )  # fmt: skip
        self._writing = Writing(self, self._space, io)
        self._end = weakref.finalize(
            self, _let_go, os.getpid(), self.files, opening.manifest, opening.lock
        )
        self._end.atexit = False
        try:
            self._take_in(opening)
            if not read_only and evicts and self.disk_bytes > capacity_bytes:
                self.resize(capacity_bytes)
            self._say_opened()
        except BaseException:
            self._end()
            raise

    def _take_in(self, opening: Opening) -> None:
        """Have what is on disk, and repair what opening found damaged."""
        opening.fill(self.files, self.records, self._space)
        self.facts = opening.facts
        self._manifest = opening.manifest
        self._syncing = Syncing(self, opening.manifest, self._io)
        self.sequence, self._is_clean = opening.sequence, opening.is_clean
        self.noticed = opening.noticed
        self.kill(opening.older, "superseded")
        self.write_rows(opening.damaged)

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
            commit = Commit(self.facts.epoch, self.sequence, is_clean=False)
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
        return self._writing.write(keys, stored, until, keep)

    def make_room(self, size: int, count: int) -> bool:
        """Free places of a size; False if nothing may leave, or a file takes no header."""
        self.files.collect()
        if not self._space.blank and self.evicts:
            self._empty_coldest(size)
        if self._space.blank:
            self.sequence += 1
            return self.files.begin(size, self.facts.epoch, self.sequence - 1)
        if not self.evicts:
            return False
        victims = self._space.victims(size, count)
        self.kill(victims, "evicted")
        self._io.reached("evict.after_rows")
        return len(victims) > 0

    def is_live(self, places: Pointers) -> npt.NDArray[np.bool_]:
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
        places = places[self.is_live(places)]
        if not len(places):
            return
        dead = [
            dead_row(self.records.rows[place], self.files.of(place).binding(place))
            for place in places.tolist()
        ]
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
            commit = Commit(facts.epoch, self.sequence, is_clean=False)
            self.health.call(self._manifest.commit, commit, {})
            self._syncing.is_identity_sure = False
            self.health.call(write_facts, self._io, self.directory, facts)
            self._syncing.is_identity_sure = True
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
                if not self._space.blank and not (self.evicts and self._empty_coldest(0)):
                    raise CapacityError(
                        f"{self.directory!r}: every segment file holds a value that must stay"
                        f"{': release leases first' if self.evicts else ''}"
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
        self._syncing.sync()

    def replace(self, segment: Segment) -> None:
        """Move what can be read of a segment elsewhere, and put a new file in its place."""
        self._syncing.replace(segment)

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
            is_idle = self._writing.wait(until)
        try:
            if not self.is_read_only and not self.health.is_offline and not self._is_clean:
                self._io.reached("close.before_sync")
                self._syncing.finish()
        finally:
            if is_idle:  # one that hangs keeps its descriptors
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
            assert not self.is_live(free).any(), "a live place is free"
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
