"""All segment files of a volume: where payloads and rows go, and what to do when a file fails."""

from __future__ import annotations

import errno
import logging
import os
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tierstore.aligned import aligned_rows
from tierstore.errors import CapacityError, CorruptBlockError
from tierstore.events import emit
from tierstore.reads import LateReadError, Read, Reading, ReadPool
from tierstore.sizes import format_size
from tierstore.volume.format import (
    KEY_INLINE,
    LIVE,
    ROW_BYTES,
    Header,
    extents_in,
    payload_checksum,
    whole_pages,
)
from tierstore.volume.segment import SUFFIX, Segment, stored_digest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tierstore.interfaces import Pointers
    from tierstore.io import FileIO
    from tierstore.volume.health import Health
    from tierstore.volume.records import Records
    from tierstore.volume.space import Space

_log = logging.getLogger(__name__)

_ZEROS = memoryview(bytes(1 << 16))


class Run(NamedTuple):
    """Payloads whose extents follow each other: from place `first` of a segment on.

    positions: which of the payloads that are being written.
    """

    segment: Segment
    first: int
    positions: list[int]


class SegmentFiles:
    """The segments of one volume, by number. The volume's lock guards all but `write` and `read`.

    Invariant: a segment here is blank and in ``space.blank``, or has extents and is in
    ``space.used``, or is draining after `clear`. One that failed is in `retired`: readers may still
    have its descriptor.
    """

    def __init__(
        self, io: FileIO, folder: str, identity: bytes, nbytes: int, records: Records,
        space: Space, health: Health, *, threads: int,
    ) -> None:  # fmt: skip
        self.folder = folder
        self.nbytes = nbytes
        self.by_number: dict[int, Segment] = {}
        self.retired: list[Segment] = []
        self._io = io
        self._identity = identity
        self._records = records
        self._space = space
        self._health = health
        self._draining: list[Segment] = []
        self._pool = ReadPool(io, threads)

    @property
    def is_draining(self) -> bool:
        """Whether files stay that were cleared, because somebody reads what was in them."""
        return bool(self._draining)

    def of(self, place: int) -> Segment:
        """The segment that owns a place."""
        return self.by_number[int(self._records.segment[place])]

    def owner(self, place: int) -> Segment | None:
        """Like `of`, without the lock; None if its segment was given up."""
        segment = self.by_number.get(int(self._records.segment[place]))
        is_own = segment is not None and segment.places.start <= place < segment.places.stop
        return segment if is_own else None

    def by_segment(self, places: Pointers) -> Iterator[tuple[Segment, Pointers]]:
        """Places, segment by segment."""
        numbers = self._records.segment[places]
        for number in np.unique(numbers).tolist():
            yield self.by_number[number], places[numbers == number]

    # A segment's life

    def create(self, number: int) -> None:
        """Add a blank segment. OSError, or CapacityError if the disk is full."""
        segment = Segment(self._io, self.folder, number, self.nbytes)
        segment.create()
        try:
            # Zeros would be a lost header, if the directory knows an earlier file of that number.
            segment.write_header(Header(self._identity, 0, number, 0, 0, 0))
        except OSError:
            segment.discard()
            raise
        self.by_number[number] = segment
        self._space.blank.append(segment)

    def create_missing(self, most: int) -> None:
        """Add blank segments until there are `most`. OSError or CapacityError, and none."""
        missing = most - len(self.by_number)
        needed, free = missing * self.nbytes, self._io.free_bytes(self.folder)
        if needed > free:
            raise CapacityError(
                f"{self.folder!r}: {format_size(needed)} are needed, {format_size(free)} are free: "
                "free disk space, or give the store less with disk="
            )
        numbers = (n for n in range(1 << 30) if not self._is_taken(n))
        made: list[int] = []
        try:
            for _ in range(missing):
                made.append(next(numbers))
                self.create(made[-1])
            if missing > 0:
                self._io.sync_directory(self.folder)
        except BaseException:
            for number in made:
                if number in self.by_number:
                    self._space.blank.remove(self.by_number[number])
                    self.by_number.pop(number).discard()
            raise

    def _is_taken(self, number: int) -> bool:
        path = os.path.join(self.folder, f"{number:08d}{SUFFIX}")
        return number in self.by_number or os.path.lexists(path)

    def begin(self, size: int, epoch: int, generation: int) -> bool:
        """Make a blank segment one of free extents of that size; whether it took that."""
        segment = self._space.blank.pop()
        extents = extents_in(self.nbytes, size)
        header = Header(self._identity, epoch, segment.number, generation, size, extents)
        try:
            self._health.call(segment.begin, header)
        except OSError:
            if segment.is_stale:
                self._retire(segment)
            else:
                self._space.blank.insert(0, segment)
            return False
        segment.first = self._records.open_run(segment.number, extents)
        self._space.add(segment, np.arange(segment.first, segment.first + extents))
        return True

    def live(self, segment: Segment) -> Pointers:
        """Places of a segment's live records."""
        run = segment.places
        places: Pointers = np.flatnonzero(self._records.rows["state"][run] == LIVE) + run.start
        return places

    def blank(self, segment: Segment) -> None:
        """Make a segment blank in memory; nothing of it may be live or pinned."""
        self._space.remove(segment)
        self._records.close_run(segment.first, segment.header.extents)
        segment.forget()
        segment.is_stale = True
        self._space.blank.append(segment)

    def blank_empty(self) -> None:
        """Make every segment blank that holds nothing."""
        for segments in list(self._space.used.values()):
            for segment in segments.copy():
                if not len(self.live(segment)) and not self._records.pins[segment.places].any():
                    self.blank(segment)

    def drain_all(self) -> None:
        """Have every segment blank, as soon as nobody has a pin in it; nothing may be live."""
        for segments in list(self._space.used.values()):
            for segment in segments.copy():
                self._space.remove(segment)
                segment.is_draining = True
                self._draining.append(segment)
        self.collect()

    def collect(self) -> None:
        """Make draining segments blank that nobody has pinned any more."""
        for segment in self._draining.copy():
            if not self._records.pins[segment.places].any():
                self._draining.remove(segment)
                self._records.close_run(segment.first, segment.header.extents)
                segment.forget()
                self._space.blank.append(segment)

    def give_up(self, segment: Segment) -> None:
        """Take a segment out of use whose live records were dropped."""
        if segment.is_blank:
            self._space.blank.remove(segment)
        elif segment.is_draining:
            self._draining.remove(segment)
        else:
            self._space.remove(segment)
        self._records.segment[segment.places] = -1
        self._retire(segment)

    def _retire(self, segment: Segment) -> None:
        """Let the file say that it is blank, or remove it; offline if it does not even take that.

        A file whose header cannot be replaced would show old records when it is opened again.
        """
        del self.by_number[segment.number]
        self.retired.append(segment)
        self._health.errors["failed segment"] += 1
        emit(
            _log, logging.ERROR, "segment.failed", f"{segment.path}: given up after an error",
            path=segment.path,
        )  # fmt: skip
        try:
            segment.begin(Header(self._identity, 0, segment.number, 0, 0, 0))
            segment.sync()
        except OSError:
            try:
                self._io.remove(segment.path)
                self._io.sync_directory(self.folder)
            except OSError:
                self._health.give_up()

    def renew(self, segment: Segment) -> None:
        """Put a new, blank file in the place of one that was given up. OSError if that fails."""
        with suppress(FileNotFoundError):
            self._io.remove(segment.path)
        self.create(segment.number)
        self._io.sync_directory(self.folder)

    def remove(self, segment: Segment) -> None:
        """Take a blank segment and its file away, durably. OSError if the file stays."""
        try:
            self._io.remove(segment.path)
        except OSError:
            self.give_up(segment)
            raise
        self._space.blank.remove(segment)
        del self.by_number[segment.number]
        self.retired.append(segment)
        self._io.sync_directory(self.folder)

    def wipe(self, segment: Segment) -> None:
        """Let the disk forget what is in a blank segment's file. OSError if it is full."""
        segment.wipe(Header(self._identity, 0, segment.number, 0, 0, 0))
        segment.forget()

    def renew_blank(self, segment: Segment) -> None:
        """Put a new file in the place of a blank segment's, which is gone or another."""
        with suppress(FileNotFoundError):
            self.remove(segment)
        self.create(segment.number)
        self._io.sync_directory(self.folder)

    def close(self, deadline: float) -> None:
        """Close every file; a reader that hangs keeps its own."""
        if self._pool.close(deadline):
            for segment in [*self.by_number.values(), *self.retired]:
                with suppress(OSError):
                    self._health.call(segment.close)

    # Payloads and rows

    def write_rows(self, places: Pointers, dropped: Callable[[Segment], None]) -> None:
        """Bring rows to disk. A segment that refuses twice is given up, after `dropped` of it."""
        owned = places[self._records.segment[places] >= 0]
        for segment, own in self.by_segment(owned):
            for attempt in range(2):
                try:
                    self._health.call(segment.write_rows, own, self._records)
                    break
                except OSError:
                    if attempt:
                        dropped(segment)
                        self.give_up(segment)

    def runs(self, places: Pointers) -> list[Run]:
        """Pinned places that follow each other in a file, by position; -1 and lost ones are none.

        The lock is not needed.
        """
        order = np.argsort(places, kind="stable")
        order = order[places[order] >= 0]
        owners = self._records.segment[places[order]]
        is_next = (np.diff(places[order]) == 1) & (np.diff(owners) == 0)
        found = []
        for run in np.split(order, np.flatnonzero(~is_next) + 1):
            first = int(places[run[0]]) if len(run) else -1
            segment = self.owner(first) if len(run) else None
            if segment is not None:
                found.append(Run(segment, first, run.tolist()))
        return found

    def write(self, runs: list[Run], pieces: Sequence[Sequence[memoryview | bytes]]) -> list[int]:
        """Write payloads, each of some pieces, a run in one call.

        Returns the positions of those that failed. The lock is not needed.
        """
        failed: list[int] = []
        for run in runs:
            together: list[memoryview | bytes] = []
            extent_bytes = run.segment.header.extent_bytes
            for i in run.positions:
                together.extend(pieces[i])
                size = sum(map(len, pieces[i]))
                # The kernel would first read a page that is written in part.
                room = extent_bytes if i != run.positions[-1] else whole_pages(size)
                if room > size:
                    together.extend(_ZEROS[: room - at] for at in range(size, room, len(_ZEROS)))
            try:
                self._health.call(run.segment.write_extents, run.first, together)
            except OSError:
                failed.extend(run.positions)
        return failed

    def disk_bytes(self, place: int) -> int:
        """Bytes of a record's payload on disk, a long key included."""
        row = self._records.rows[place]
        long_key = int(row["key_bytes"]) if row["key_bytes"] > KEY_INLINE else 0
        return int(row["stored_bytes"]) + long_key

    def reads(
        self, places: Sequence[int], buffers: Sequence[memoryview], *, verify: bool = True
    ) -> list[Read]:
        """Requests that fill buffers with the payloads of pinned places, padded to whole pages.

        Buffers begin at multiples of 4 KiB. The lock must be held; not so for `perform`.
        """
        numbers = self._records.segment[places].tolist()
        segments = [self.by_number[number] for number in numbers]
        return self._requests(segments, places, buffers, verify=verify)

    def _requests(
        self, segments: Sequence[Segment], places: Sequence[int], buffers: Sequence[memoryview],
        *, verify: bool = True,
    ) -> list[Read]:  # fmt: skip
        rows = self._records.rows_of(places)
        of_key = np.where(rows["key_bytes"] > KEY_INLINE, rows["key_bytes"].astype(np.int64), 0)
        sizes = (rows["stored_bytes"] + of_key).tolist()
        joined, requests = rows.tobytes(), []
        for i, (segment, place, buffer, size) in enumerate(
            zip(segments, places, buffers, sizes, strict=True)
        ):
            check = None
            if verify:
                row = joined[i * ROW_BYTES : (i + 1) * ROW_BYTES]
                check = _check(segment, place, buffer[:size], row)
            pages = buffer[: whole_pages(size)]
            requests.append(Read(segment.direct, segment.offset(place), pages, check))
        return requests

    def salvage(self, segment: Segment, place: int) -> memoryview | None:
        """What is stored in a place of a segment that was given up, if it can be read and is right.

        Requires: the segment has the header that it had.
        """
        buffer = aligned_rows(1, whole_pages(max(self.disk_bytes(place), 1)))[0].data
        (outcome,) = self.perform(self._requests([segment], [place], [buffer]), None)
        stored_bytes = int(self._records.rows["stored_bytes"][place])
        return buffer[:stored_bytes] if outcome is None else None

    def attempt(self, requests: list[Read]) -> list[Exception | None]:
        """`perform` without a deadline, and without counting what fails against the disk."""
        return self._pool.read(requests)

    def perform(self, requests: list[Read], deadline: float | None) -> list[Exception | None]:
        """The outcome of each request: None, CorruptBlockError, OSError or LateReadError."""
        return self.noted(self._pool.read(requests, deadline))

    def start(self, requests: list[Read], deadline: float | None) -> Reading:
        """`perform` without waiting; its outcomes go through `noted`."""
        return self._pool.begin(requests, deadline)

    def noted(self, outcomes: list[Exception | None]) -> list[Exception | None]:
        """Outcomes, after the disk's health took note of them."""
        for outcome in outcomes:
            if outcome is None:
                self._health.praise()
            elif isinstance(outcome, OSError) and not isinstance(
                outcome, CorruptBlockError | LateReadError
            ):
                self._health.note(outcome)
        return outcomes


def _check(segment: Segment, place: int, payload: memoryview, row: bytes) -> Callable[[], None]:
    binding = segment.binding(place)

    def check() -> None:
        if payload_checksum(stored_digest([payload]), row, binding) != row[8:24]:
            raise CorruptBlockError(
                errno.EIO,
                f"{segment.path!r}: extent {place - segment.first} does not match its checksum",
            )

    return check
