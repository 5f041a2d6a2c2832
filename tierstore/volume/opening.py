"""What happens when a volume is opened: whose it is, what is in it, what is damaged.

The file ``IDENTITY`` says whose it is, the directory what each group of rows was at the latest
commit, and the tables of the segment files say everything. A group that is as the directory says is
taken as it is; of any other, each row speaks for itself.
"""

from __future__ import annotations

import errno
import os
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import numpy as np

from tierstore.aligned import aligned_rows
from tierstore.errors import (
    CapacityError,
    ConfigError,
    CorruptBlockError,
    StoreMismatchError,
)
from tierstore.identity import Facts
from tierstore.io import read_fully
from tierstore.volume.capacity import directory_bytes, segment_size, segments_in
from tierstore.volume.format import (
    DEAD,
    FREE,
    GROUP,
    KEY_BYTES_MOST,
    KEY_INLINE,
    LIVE,
    PAGE,
    Header,
    key_field,
    row_check,
    whole_pages,
)
from tierstore.volume.lock import DirectoryLock
from tierstore.volume.manifest import FOLDER, Commit, Groups, Manifest, NoManifest
from tierstore.volume.namespace import (
    IDENTITY,
    SEGMENT_NAME,
    SEGMENTS,
    UNFINISHED,
    absolute,
    make_namespace,
    read_facts,
    write_facts,
)
from tierstore.volume.segment import Segment

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Iterator

    import numpy.typing as npt

    from tierstore.identity import Identity
    from tierstore.interfaces import Pointers
    from tierstore.io import FileIO
    from tierstore.volume.files import SegmentFiles
    from tierstore.volume.records import Records
    from tierstore.volume.space import Space

_MOST_SEQUENCES = 1 << 63
"""No store lives that long."""
_NOT_THE_MEDIUM = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES, errno.EPERM)
"""Errors that say nothing about a file's content."""


class Opening:
    """One attempt to open a volume. `fill` reads what is in it.

    ConfigError, StoreMismatchError, StoreLockedError, CapacityError, and in strict mode
    CorruptBlockError: then nothing is changed or held.
    """

    def __init__(
        self,
        parent: str | os.PathLike[str],
        identity: Identity,
        capacity_bytes: int,
        segment_bytes: int | None,
        io: FileIO,
        *,
        read_only: bool,
        is_strict: bool,
        dropped: Counter[str],
    ) -> None:
        self.identity = identity
        self.sequence = 1
        self.is_clean = self._is_new = False
        self.older: Pointers = np.empty(0, np.int64)
        """Live rows of which a newer one has the same key."""
        self.damaged: Pointers = np.empty(0, np.int64)
        """Places whose rows are free here, but not yet in their tables."""
        self.noticed: list[tuple[str, str, int]] = []
        """Damage that was found: reason, path, and how often."""
        self._io = io
        self._dropped = dropped
        self._is_strict = is_strict
        self._read_only = read_only
        self._most_bytes = capacity_bytes
        self._check_room(parent, segment_bytes)
        self.directory = make_namespace(io, parent, identity.folder, read_only=read_only)
        self.folder = os.path.join(self.directory, SEGMENTS)
        self.lock = DirectoryLock(self.directory, shared=read_only)
        try:
            self._make_folder()
            self._names = self._segment_names()
            self.manifest, self._commit, self._groups = self._open_manifest()
            try:
                self.facts = self._find_facts(segment_bytes)
            except BaseException:
                self.manifest.close()
                raise
        except BaseException:
            self.lock.release()
            raise

    def _check_room(self, parent: str | os.PathLike[str], segment_bytes: int | None) -> None:
        """Refuse what cannot be, before anything is made: another version, a useless capacity."""
        path = os.path.join(absolute(parent), self.identity.folder, IDENTITY)
        with suppress(OSError):  # `make_namespace` says what is wrong
            facts = read_facts(self._io, path)
            if facts is not None:
                segments_in(self._most_bytes, facts.segment_bytes)
            elif not os.path.lexists(path):
                segments_in(self._most_bytes, segment_size(self._most_bytes, segment_bytes))

    def _make_folder(self) -> None:
        """The folder of segments; what a `clear` that did not finish left behind goes."""
        if self._read_only:
            return
        names = self._io.list(self.directory)
        if SEGMENTS not in names:
            self._io.make_directory(self.folder)
            self._io.sync_directory(self.directory)
        if UNFINISHED in names:
            self._io.remove(os.path.join(self.directory, UNFINISHED))

    def _segment_names(self) -> dict[int, str]:
        """Regular files with the name of a segment, by number; all else is left alone."""
        names = {}
        for name in sorted(self._io.list(self.folder)):
            match = SEGMENT_NAME.fullmatch(name)
            path = os.path.join(self.folder, name)
            if match and os.path.isfile(path) and not os.path.islink(path):
                names[int(match[1])] = path
        return names

    def _open_manifest(self) -> tuple[Manifest, Commit | None, Groups]:
        """The directory; a new one in place of one that cannot be used."""
        most = directory_bytes(self._most_bytes)
        for attempt in range(2):
            try:
                manifest = Manifest(
                    self._io, self.directory, self.identity.digest, most, read_only=self._read_only
                )
                try:
                    commit, groups, damaged = manifest.load()
                except CorruptBlockError:
                    manifest.close()
                    raise
            except CorruptBlockError:
                if self._is_strict or attempt:
                    raise
                self._complain(1, "damaged directory", os.path.join(self.directory, FOLDER))
                if self._read_only:
                    return NoManifest(self.directory), None, Groups()
                Manifest.discard(self._io, self.directory)
            else:
                self._complain(damaged, "damaged directory entry", manifest.path)
                return manifest, commit, groups
        raise AssertionError("unreachable")

    def _complain(self, count: int, reason: str, where: str) -> None:
        """Count damage, or raise in strict mode."""
        if count and self._is_strict:
            raise CorruptBlockError(
                f"{where!r}: {count} × {reason}; open with recovery='quiet' to drop what is damaged"
            )
        if count:
            self._dropped[reason] += count
            self.noticed.append((reason, where, count))

    # Whose it is

    def _find_facts(self, segment_bytes: int | None) -> Facts:
        path = os.path.join(self.directory, IDENTITY)
        facts = read_facts(self._io, path)
        if facts is not None:
            self.identity.check(facts.identity, repr(path))
            if segment_bytes not in (None, facts.segment_bytes):
                raise StoreMismatchError(
                    f"{path!r}: segments have {facts.segment_bytes} bytes, expected "
                    f"{segment_bytes}: leave segment= out, or choose another directory"
                )
            return facts
        self._is_new = is_new = not self._names and IDENTITY not in self._io.list(self.directory)
        self._complain(int(not is_new), "damaged identity", path)
        facts = self._facts_from_segments() or Facts(
            self.identity, 1, segment_size(self._most_bytes, segment_bytes)
        )
        if not self._read_only:
            write_facts(self._io, self.directory, facts)
        elif is_new:
            raise ConfigError(
                f"{self.directory!r} holds no store of this identity: open it with read_only=False "
                "to make one"
            )
        return facts

    def _facts_from_segments(self) -> Facts | None:
        """What the segment files' headers say, if one of them is readable and ours."""
        epochs, sizes = [], []
        for number, path in self._names.items():
            size = os.path.getsize(path)
            segment = Segment(self._io, self.folder, number, size)
            try:
                segment.open(read_only=True)
                header = segment.read_header()
            except OSError:
                continue
            finally:
                segment.close()
            if header is not None and header.identity == self.identity.digest:
                epochs.append(header.epoch)
                sizes.append(size)
        if not sizes:
            return None
        known = self._commit.epoch if self._commit is not None else 1
        return Facts(self.identity, max(known, *epochs), max(set(sizes), key=sizes.count))

    # What is in it

    @contextmanager
    def _giving_up(self, segment: Segment, files: SegmentFiles, records: Records) -> Iterator[None]:
        """Go on without a segment that cannot be read."""
        try:
            yield
        except OSError as error:
            with suppress(OSError):
                segment.close()
            if isinstance(error, CorruptBlockError) or error.errno in _NOT_THE_MEDIUM:
                raise
            self._complain(1, "unreadable segment", f"{segment.path} ({error})")
            self._give_up(segment, files, records)

    def fill(self, files: SegmentFiles, records: Records, space: Space) -> None:
        """Open the segment files, index what is live, and reserve the rest of the capacity."""
        commit = self._commit
        if commit is not None and commit.epoch == self.facts.epoch:
            self.is_clean = commit.is_clean
            self.sequence = commit.sequence
        else:
            self._groups = Groups()
        newest: dict[int, int] = {}
        for (number, _), (generation, _) in self._groups.items():
            newest[number] = max(generation, newest.get(number, 0))
        missing = newest.keys() - self._names.keys()
        self._complain(len(missing), "missing segment", self.folder)
        opened = []
        for number in self._names:
            segment = Segment(self._io, self.folder, number, self.facts.segment_bytes)
            with self._giving_up(segment, files, records):
                if self._open_segment(segment, files, space, newest.get(number, 0)):
                    opened.append(segment)
        records.reserve(sum(segment.header.extents for segment in opened))
        live = [np.empty(0, np.int64)]
        for segment in opened:
            with self._giving_up(segment, files, records):
                live.append(self._read_table(segment, records, space))
        places = np.concatenate(live)
        self.older = records.enter_newest(places)
        sequences = records.rows["sequence"]
        self.sequence = max(self.sequence, int(sequences.max(initial=0)) + 1)
        self._order_by_age(records, places)
        if not self._read_only:
            self.manifest.forget(missing)
            try:
                self._reserve(files, space)
            except (OSError, CapacityError):
                if self._is_new:  # the next attempt may choose another size for segments
                    self._io.remove(os.path.join(self.directory, IDENTITY))
                raise

    def _give_up(self, segment: Segment, files: SegmentFiles, records: Records) -> None:
        """Remove a file that cannot be read: once it can, it would bring back what is deleted."""
        files.by_number.pop(segment.number, None)
        records.segment[segment.places] = -1
        if not self._read_only:
            self.manifest.forget([segment.number])
            self._io.remove(segment.path)

    def _open_segment(
        self, segment: Segment, files: SegmentFiles, space: Space, newest: int
    ) -> bool:
        """Open a file and take it in; whether it has extents of this epoch.

        newest: the latest generation that the directory knows of it.
        """
        size = segment.open(read_only=self._read_only)
        header = segment.read_header()
        if header is not None and header.identity != self.identity.digest:
            segment.close()
            raise StoreMismatchError(
                f"{segment.path!r} belongs to another store ({header.identity.hex()}, expected "
                f"{self.identity.digest.hex()}): move it away"
            )
        if header is not None and header.number != segment.number:
            header = None  # a copy of another file: both would hold the same records
        is_new = header is None and segment.is_new()
        if header is None and not is_new and size != segment.nbytes:
            segment.close()  # nothing of ours
            return False
        if header is None and (newest > 0 or not is_new):
            self._empty(segment, "damaged segment header")
        if size < segment.nbytes and not self._read_only:
            has_extents = header is not None and header.extents > 0
            self._complain(int(has_extents), "short segment", segment.path)
            segment.extend()
        # Of what a killed process wrote nobody knows whether it is durable.
        segment.is_dirty = not self.is_clean
        files.by_number[segment.number] = segment
        if header is not None and header.extents and header.epoch == self.facts.epoch:
            self.sequence = max(self.sequence, header.generation + 1)
            if header.generation >= newest:
                segment.take(header)
                return True
            self._empty(segment, "stale segment header")
        space.blank.append(segment)
        return False

    def _empty(self, segment: Segment, reason: str) -> None:
        """Do without what a file holds, for good: it must not be believed some other time."""
        self._complain(1, reason, segment.path)
        if not self._read_only:
            segment.write_header(Header(self.identity.digest, 0, segment.number, 0, 0, 0))

    def _read_table(self, segment: Segment, records: Records, space: Space) -> Pointers:
        """Rows of a segment into `records`; the places of live ones."""
        segment.first = records.open_run(segment.number, segment.header.extents)
        segment.read_rows(records)
        rows = records.rows[segment.places]
        is_bad = self._bad_rows(segment, records)
        self._complain(int(is_bad.sum()), "damaged row", segment.path)
        is_lost = self._read_long_keys(segment, records, ~is_bad)
        self._complain(int(is_lost.sum()), "damaged key", segment.path)
        is_bad |= is_lost
        rows[is_bad] = np.zeros(1, rows.dtype)
        self.damaged = np.append(self.damaged, np.flatnonzero(is_bad) + segment.first)
        state = rows["state"]
        live = np.flatnonzero(state == LIVE)
        space.add(segment, np.flatnonzero(state != LIVE) + segment.first)
        return live + segment.first

    def _bad_rows(self, segment: Segment, records: Records) -> npt.NDArray[np.bool_]:
        """Which rows are not to be believed."""
        is_bad = np.zeros(segment.header.extents, np.bool_)
        for group in range(-(-segment.header.extents // GROUP)):
            known = self._groups.get((segment.number, group))
            is_known = known is not None and known[0] == segment.header.generation
            if is_known and known is not None and known[1] == segment.digest(group, records):
                continue
            part = slice(group * GROUP, (group + 1) * GROUP)
            bad = failing_rows(segment, records, part)
            if is_known and self.is_clean and not bad.any():
                # A whole table of right rows, but not the one that was synced: an older one.
                self._complain(1, "stale table", segment.path)
                bad[:] = True
            is_bad[part] = bad
            segment.dirty_groups.add(group)
        return is_bad

    def _read_long_keys(
        self, segment: Segment, records: Records, is_right: npt.NDArray[np.bool_]
    ) -> npt.NDArray[np.bool_]:
        """Keys that do not fit into rows, from the ends of their payloads; whose are lost."""
        rows = records.rows[segment.places]
        is_lost = np.zeros(len(rows), np.bool_)
        is_long = is_right & (rows["state"] == LIVE) & (rows["key_bytes"] > KEY_INLINE)
        for extent in np.flatnonzero(is_long).tolist():
            row, place = rows[extent], segment.first + extent
            start, size = segment.offset(place) + int(row["stored_bytes"]), int(row["key_bytes"])
            first = start // PAGE * PAGE
            buffer = aligned_rows(1, whole_pages(start + size - first))[0].data
            key = b""
            with suppress(OSError):
                read_fully(self._io, segment.direct, buffer, first)
                key = bytes(buffer[start - first : start - first + size])
            if key_field(key) == row["key"].tobytes():
                records.long_keys[place] = key
            else:
                is_lost[extent] = True
        return is_lost

    def _order_by_age(self, records: Records, places: Pointers) -> None:
        """Count records as used in the order in which they were written."""
        order = np.argsort(records.rows["sequence"][places], kind="stable")
        records.used[places[order]] = np.arange(1, len(places) + 1)
        records.tick = len(places)

    def _reserve(self, files: SegmentFiles, space: Space) -> None:
        """Blank segments for the whole capacity; blank ones beyond it go."""
        most = segments_in(self._most_bytes, files.nbytes)
        leaving = space.blank[: max(0, len(files.by_number) - most)]
        self.manifest.forget([segment.number for segment in leaving])
        for segment in leaving:
            files.remove(segment)
        files.create_missing(most)
        if not self.is_clean:
            self._io.sync_directory(self.folder)


def failing_rows(segment: Segment, records: Records, part: slice) -> npt.NDArray[np.bool_]:
    """Which rows of a group do not match their check, or say what cannot be."""
    rows = records.rows[segment.places][part]
    written = rows["sequence"] > 0
    is_bad: npt.NDArray[np.bool_] = ~written & (rows["state"] != FREE)
    for i in np.flatnonzero(written).tolist():
        place = segment.first + part.start + i
        row = rows[i].tobytes()
        is_bad[i] = row_check(row, segment.binding(place)) != int(rows["check"][i])
    size = rows["stored_bytes"].astype(np.int64)
    size += np.where(rows["key_bytes"] > KEY_INLINE, rows["key_bytes"], 0)
    is_possible: npt.NDArray[np.bool_] = (
        (size <= segment.header.extent_bytes)
        & (rows["key_bytes"] >= 1)
        & (rows["key_bytes"] <= KEY_BYTES_MOST)
        & np.isin(rows["state"], (LIVE, DEAD))
        & (rows["sequence"] < _MOST_SEQUENCES)
        & (rows["value_bytes"] <= segment.nbytes)
        & ((rows["codec"] != 0) | (rows["value_bytes"] == rows["stored_bytes"]))
    )
    return is_bad | (written & ~is_possible)
