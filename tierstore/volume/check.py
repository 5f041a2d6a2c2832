"""Whether a volume is what it should be: its files, tables, directory, memory and payloads."""

from __future__ import annotations

import os
import stat
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tierstore.errors import StoreMismatchError, TierOfflineError
from tierstore.io import read_fully
from tierstore.volume.format import DEAD, FREE, GROUP, LIVE, MAGIC, PAGE
from tierstore.volume.lock import LOCK
from tierstore.volume.manifest import FILES, FOLDER, group_of
from tierstore.volume.namespace import (
    IDENTITY,
    SEGMENT_NAME,
    SEGMENTS,
    UNFINISHED,
    read_facts,
    write_facts,
)
from tierstore.volume.opening import failing_rows
from tierstore.volume.verifier import ROWS_AT_ONCE, UNREADABLE, Verifier, is_as, used_segments

if TYPE_CHECKING:
    import numpy.typing as npt

    from tierstore.interfaces import Pointers
    from tierstore.io import FileIO
    from tierstore.volume.format import Header
    from tierstore.volume.manifest import Manifest
    from tierstore.volume.segment import Segment
    from tierstore.volume.space import Space
    from tierstore.volume.verifier import Progress
    from tierstore.volume.volume import Volume

FOREIGN = "foreign"
_MOST_OF_A_KIND = 100
"""Findings of one kind in one file that are listed; the rest are counted."""

_FILES = {"": {IDENTITY, LOCK}, SEGMENTS: set[str](), FOLDER: set(FILES)}
_FOLDERS = {SEGMENTS, FOLDER}
_OPENING_KINDS = {
    "damaged identity": "identity",
    "damaged directory": "directory",
    "damaged segment header": "header",
    "stale segment header": "stale",
    "missing segment": "missing",
    "damaged key": "row",
    "short segment": "short",
    "stale table": "stale",
    "damaged row": "row",
}
"""What opening repairs, so that nothing shows it afterwards. Other damage is found again here."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Something in a store that is not as it should be.

    kind
        ``identity``, ``directory``, ``header``, ``row``, ``stale`` (a table from before the latest
        sync), ``payload``, ``unreadable``, ``missing``, ``short`` and ``long`` (files),
        ``leftover``, ``permissions``, ``index`` and ``space`` (memory), ``foreign``.
    path
        file or directory.
    extent
        number of the extent in a segment file, -1 where it is about all of it.
    is_fixed
        it was repaired, or what was damaged was dropped. What is foreign never is, nor what the
        disk cannot read: it may be right.
    """

    kind: str
    path: str
    extent: int
    message: str
    is_fixed: bool

    @property
    def is_damage(self) -> bool:
        """Whether the store itself is concerned, and not a file that is none of its own."""
        return self.kind != FOREIGN


class Check:
    """One check of an open volume. The store goes on serving: the lock is held for parts of it.

    Everything is read once: the time is that of reading the disk, memory does not grow with it.
    With `fix`, what is damaged is dropped, and disk and directory are brought to what memory says.
    """

    def __init__(
        self, volume: Volume, space: Space, manifest: Manifest, io: FileIO, *, fix: bool
    ) -> None:
        self._volume, self._space, self._manifest, self._io = volume, space, manifest, io
        self._records, self._files = volume.records, volume.files
        self._fix = fix
        self._found: list[Finding] = []
        self._counts: Counter[tuple[str, str]] = Counter()

    @property
    def findings(self) -> list[Finding]:
        """What was found, in order of the search."""
        rest = [
            Finding(
                kind, path, -1, f"{count - _MOST_OF_A_KIND} more of this kind", self._fixes(kind)
            )
            for (kind, path), count in self._counts.items()
            if count > _MOST_OF_A_KIND
        ]
        return self._found + rest

    def _fixes(self, kind: str) -> bool:
        return self._fix and kind not in (FOREIGN, UNREADABLE)

    def _note(
        self, kind: str, path: str, message: str, extent: int = -1, *, is_fixed: bool | None = None
    ) -> None:
        self._counts[kind, path] += 1
        if self._counts[kind, path] <= _MOST_OF_A_KIND:
            is_fixed = self._fix if is_fixed is None else is_fixed
            self._found.append(Finding(kind, path, extent, message, is_fixed))

    def run(self, progress: Progress | None) -> None:
        """Check everything."""
        with self._volume.lock:
            self._note_opening()
            self._check_folders()
            self._check_facts()
            for segment in list(self._files.by_number.values()):
                self._check_segment(segment)
            self._check_directory()
        for segment, header in used_segments(self._volume):
            self._check_table(segment, header)
        with self._volume.lock:
            self._check_index()
            self._check_space()
        self.verify(progress)

    def verify(self, progress: Progress | None) -> None:
        """Check the payloads alone."""
        Verifier(self._volume, self._note, fix=self._fix).run(progress)

    # Files

    def _note_opening(self) -> None:
        is_fixed = not self._volume.is_read_only
        for reason, path, count in self._volume.noticed:
            kind = _OPENING_KINDS.get(reason)
            if kind is not None and (is_fixed or kind != "row"):
                message = f"{count} × {reason}, found when the store was opened"
                self._note(kind, path, message, is_fixed=is_fixed)
        if self._fix:
            self._volume.noticed.clear()

    def _check_folders(self) -> None:
        self._check_mode(self._volume.directory, 0o700)
        for folder, files in _FILES.items():
            path = os.path.join(self._volume.directory, folder).rstrip("/")
            if not os.path.isdir(path):
                continue  # opening has said so
            for name in sorted(self._io.list(path)):
                self._check_name(os.path.join(path, name), name, folder, files)

    def _check_name(self, path: str, name: str, folder: str, files: set[str]) -> None:
        try:
            kind = os.lstat(path).st_mode
        except FileNotFoundError:
            return
        match = SEGMENT_NAME.fullmatch(name) if folder == SEGMENTS else None
        if stat.S_ISDIR(kind) and folder == "" and name in _FOLDERS:
            self._check_mode(path, 0o700)
        elif stat.S_ISREG(kind) and match and int(match[1]) not in self._files.by_number:
            self._check_unused(path)
        elif stat.S_ISREG(kind) and (name in files or match):
            self._check_mode(path, 0o600)
        elif stat.S_ISREG(kind) and folder == "" and name == UNFINISHED:
            self._note("leftover", path, "is of a clear() that did not finish")
            if self._fix:
                self._io.remove(path)
        else:
            self._note(FOREIGN, path, "is no part of the store: move it away", is_fixed=False)

    def _check_mode(self, path: str, expected: int) -> None:
        found = stat.S_IMODE(os.lstat(path).st_mode)
        if found & 0o077:
            self._note("permissions", path, f"has mode {found:04o}, expected {expected:04o}")
            if self._fix:
                os.chmod(path, expected)

    def _check_unused(self, path: str) -> None:
        """A file with the name of a segment that opening did not take."""
        start = bytearray(len(MAGIC))
        try:
            fd = self._io.open(path, os.O_RDONLY)
            try:
                with suppress(TierOfflineError):  # shorter than that
                    read_fully(self._io, fd, start, 0)
            finally:
                self._io.close(fd)
        except OSError as error:
            self._note(UNREADABLE, path, f"cannot be read ({error})", is_fixed=False)
            return
        if start != MAGIC:
            self._note(FOREIGN, path, "is named like a segment and is none", is_fixed=False)
            return
        self._note("short", path, "was too short when the store was opened")
        if self._fix:
            self._io.remove(path)

    def _check_facts(self) -> None:
        path = os.path.join(self._volume.directory, IDENTITY)
        try:
            facts = read_facts(self._io, path)
        except StoreMismatchError:
            facts = None
        if facts != self._volume.facts:
            self._note("identity", path, "is damaged, or not that of this store")
            if self._fix:
                write_facts(self._io, self._volume.directory, self._volume.facts)

    def _check_segment(self, segment: Segment) -> None:
        try:
            if not segment.is_in_place():
                self._replace(segment, "is another file than when the store was opened")
                return
            if self._has_header(segment):
                self._check_header(segment)
        except FileNotFoundError:
            self._replace(segment, "is gone")
        except OSError as error:
            self._note(UNREADABLE, segment.path, f"cannot be read ({error})", is_fixed=False)

    def _replace(self, segment: Segment, message: str) -> None:
        self._note("missing", segment.path, message)
        if self._fix and segment.is_blank:
            self._files.renew_blank(segment)
        elif self._fix:
            self._volume.replace(segment)

    def _has_header(self, segment: Segment) -> bool:
        """Whether a file is long enough for a header, after its size was checked."""
        size = segment.size()
        if size != segment.nbytes:
            kind = "short" if size < segment.nbytes else "long"
            self._note(kind, segment.path, f"has {size} bytes, expected {segment.nbytes}")
            if self._fix:
                (segment.extend if kind == "short" else segment.cut)()
        return self._fix or size >= PAGE

    def _check_header(self, segment: Segment) -> None:
        try:
            found = segment.read_header()
        except StoreMismatchError:
            found = None
        if segment.is_draining:
            return
        if segment.is_blank:
            is_right = segment.is_new() if found is None else not self._is_of_now(found)
            message = "has a damaged header" if found is None else "shows values that are gone"
        else:
            is_right, message = found == segment.header, "has a header that is not its own"
        if is_right:
            return
        self._note("header", segment.path, message)
        if self._fix and segment.is_blank:
            self._files.wipe(segment)
        elif self._fix:
            segment.write_header(segment.header)

    def _is_of_now(self, header: Header) -> bool:
        return header.extents > 0 and header.epoch == self._volume.facts.epoch

    # Tables and directory

    def _check_directory(self) -> None:
        damaged = self._manifest.damaged_keys()
        for key in damaged:
            self._note("directory", self._manifest.path, f"entry {key.hex()} is damaged")
        if self._fix and damaged:
            self._manifest.remove(damaged)
            for number, group in filter(None, map(group_of, damaged)):
                if number in self._files.by_number:
                    self._files.by_number[number].dirty_groups.add(group)

    def _check_table(self, segment: Segment, header: Header) -> None:
        for first in range(0, header.extents, ROWS_AT_ONCE):
            part = slice(first, min(first + ROWS_AT_ONCE, header.extents))
            with self._volume.lock:
                if not is_as(self._volume, segment, header):
                    return
                self._check_checks(segment, part)
                if not is_as(self._volume, segment, header):
                    return
                self._check_rows(segment, part)
                self._check_groups(segment, part)

    def _check_checks(self, segment: Segment, part: slice) -> None:
        """Rows in memory, which a good digest may have vouched for, against their own checks."""
        bad = np.flatnonzero(failing_rows(segment, self._records, part)) + part.start
        for extent in bad.tolist():
            self._note("row", segment.path, "a row does not match its check", extent)
        if self._fix and len(bad):
            self._drop(bad + segment.first)

    def _drop(self, places: Pointers) -> None:
        """Drop what is live of these, and make the rows of the others empty."""
        is_live = self._records.rows["state"][places] == LIVE
        self._volume.kill(places[is_live], "corrupt")
        self._records.rows[places[~is_live]] = np.zeros(1, self._records.rows.dtype)
        self._volume.write_rows(places[~is_live])

    def _check_rows(self, segment: Segment, part: slice) -> None:
        """Rows on disk against those in memory."""
        memory = self._records.rows[segment.places][part]
        try:
            disk = segment.rows_on_disk(part.start, len(memory))
        except OSError as error:
            self._note(UNREADABLE, segment.path, f"{len(memory)} rows ({error})", part.start)
            differs = np.ones(len(memory), np.bool_)
        else:
            differs = (_bytes(disk) != _bytes(memory)).any(axis=1)
            if self._volume.is_read_only:  # memory alone knows that a newer one is elsewhere
                is_older = (disk["state"] == LIVE) & (memory["state"] == DEAD)
                differs &= ~is_older | (disk["sequence"] != memory["sequence"])
            for i in np.flatnonzero(differs).tolist():
                self._note("row", segment.path, _difference(memory[i]), part.start + i)
        if self._fix:
            self._volume.write_rows(np.flatnonzero(differs) + segment.first + part.start)

    def _check_groups(self, segment: Segment, part: slice) -> None:
        groups = set(range(part.start // GROUP, -(-part.stop // GROUP))) - segment.dirty_groups
        known = self._manifest.known(segment.number, groups)
        for group in sorted(groups):
            expected = segment.header.generation, segment.digest(group, self._records)
            if known.get((segment.number, group)) != expected:
                message = f"rows {group * GROUP} and up of segment {segment.number} are unknown"
                self._note("directory", self._manifest.path, message)
                if self._fix:
                    segment.dirty_groups.add(group)

    # Memory

    def _check_index(self) -> None:
        """Each live row, and no other row with its key, is found under its key."""
        lost = 0
        for segment, _ in used_segments(self._volume):
            live = self._files.live(segment)
            for start in range(0, len(live), ROWS_AT_ONCE):
                part = live[start : start + ROWS_AT_ONCE]
                lost += int((self._records.find(self._records.fields(part)) != part).sum())
        if lost:
            self._note("index", self._volume.directory, f"{lost} values are not found by their key")
            if self._fix:
                self._volume.kill(self._records.rebuild(), "superseded")

    def _check_space(self) -> None:
        """Each place is live, pinned, or free once."""
        records = self._records
        free = np.bincount(self._space.all_free(), minlength=len(records.rows))
        for segment, header in used_segments(self._volume):
            run = segment.places
            held = (records.rows["state"][run] == LIVE) | (records.pins[run] > 0)
            expected = np.where(held, 0, 1)
            wrong = np.flatnonzero(free[run] != expected)
            for extent in wrong.tolist():
                count = int(free[run][extent])
                message = f"is free {count} times, expected {expected[extent]}"
                self._note("space", segment.path, message, extent)
            if self._fix and len(wrong):
                for place in (wrong + segment.first).tolist():
                    self._space.forget(place, header.extent_bytes)
                unheld = wrong[expected[wrong] == 1] + segment.first
                self._space.free(header.extent_bytes).push(unheld)


def _bytes(rows: npt.NDArray[np.void]) -> npt.NDArray[np.uint8]:
    return np.ascontiguousarray(rows).view(np.uint8).reshape(len(rows), -1)


def _difference(memory: np.void) -> str:
    if memory["state"] == FREE:
        return "a row is damaged or old: its value is lost"
    return "a row in the table is not the one in memory"
