"""How what is in a volume comes to survive a power loss, and what becomes of files that refuse."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

import numpy as np

from tierstore.events import emit
from tierstore.volume.manifest import Commit, Groups
from tierstore.volume.namespace import write_facts
from tierstore.volume.sealing import Stored

if TYPE_CHECKING:
    from tierstore.io import FileIO
    from tierstore.volume.manifest import Manifest
    from tierstore.volume.segment import Segment
    from tierstore.volume.volume import Volume

_log = logging.getLogger(__name__)

_COMMIT_GROUPS = 1024
"""Groups of rows that may differ from what the directory knows: tables alone say what is durable,
so the directory follows in larger steps, and at the end."""


class Syncing:
    """Makes a volume durable. Any thread may call.

    is_identity_sure: whether the file ``IDENTITY`` is known to be on disk as it should be.
    """

    def __init__(self, volume: Volume, manifest: Manifest, io: FileIO) -> None:
        self._volume, self._manifest, self._io = volume, manifest, io
        self._records, self._files, self._health = volume.records, volume.files, volume.health
        self.is_identity_sure = True
        self._one = threading.Lock()
        self._begun = self._done = 0

    def sync(self) -> None:
        """Return when everything readable now survives a power loss.

        OSError if it may not: then nothing since the last good `sync` is promised. Files that
        failed have been replaced, so a later call may succeed. Calls that wait share one sync.
        """
        self._volume.check_writable()
        arrival = self._begun
        with self._one:
            if self._done > arrival:
                return
            self._volume.check_writable()
            self._begun += 1
            begun = self._begun
            self._run(is_clean=False)
            self._done = begun

    def finish(self) -> None:
        """The last sync, after which nothing is written."""
        with self._one:
            self._run(is_clean=True)

    def _run(self, *, is_clean: bool) -> None:
        if not self.is_identity_sure:  # a `clear` failed, and its epoch may be on disk
            directory, facts = self._volume.directory, self._volume.facts
            self._health.call(write_facts, self._io, directory, facts)
            self.is_identity_sure = True
        with self._volume.lock:
            files = self._files.by_number.values()
            dirty = [segment for segment in files if segment.is_dirty]
            # A digest is of hundreds of rows, and a lookup waits for this lock.
            changed = sum(len(segment.dirty_groups) for segment in files)
            is_due = is_clean or changed >= _COMMIT_GROUPS
            groups = self._changed_groups() if is_due else {}
            commit = Commit(self._volume.facts.epoch, self._volume.sequence, is_clean)
            for segment in dirty:
                segment.is_dirty = False
        self._io.reached("sync.before_files")
        failures: list[tuple[Segment, OSError]] = []
        for segment in dirty:
            try:
                self._health.call(segment.sync)
            except OSError as error:
                failures.append((segment, error))
        if failures:
            self._replace_failed(failures)
        if is_due:
            self._io.reached("sync.before_commit")
            self._health.call(self._manifest.commit, commit, groups)
            self._io.reached("sync.after_commit")
            with self._volume.lock:
                self._mark_known(groups)

    def _changed_groups(self) -> Groups:
        return {
            (number, group): (segment.header.generation, segment.digest(group, self._records))
            for number, segment in self._files.by_number.items()
            for group in segment.dirty_groups
        }

    def _mark_known(self, groups: Groups) -> None:
        """Forget that groups changed, unless they changed again since."""
        for (number, group), (generation, digest) in groups.items():
            segment = self._files.by_number.get(number)
            is_same = segment is not None and segment.header.generation == generation
            if segment is not None and is_same and segment.digest(group, self._records) == digest:
                segment.dirty_groups.discard(group)

    def _replace_failed(self, failures: list[tuple[Segment, OSError]]) -> None:
        """Save what can still be read of files that failed to sync, and replace them; then raise.

        After a failed fsync the kernel may have thrown away what it could not write, and a second
        call would succeed without it.
        """
        with self._volume.lock:
            for segment, _ in failures:
                if self._files.by_number.get(segment.number) is segment:
                    self.replace(segment)
        number, error, directory = failures[0][0].number, failures[0][1], self._volume.directory
        emit(
            _log, logging.ERROR, "sync.failed",
            f"{directory}: {len(failures)} segment files could not be synced ({error})",
            path=directory, segments=[segment.number for segment, _ in failures], error=str(error),
        )  # fmt: skip
        raise OSError(
            error.errno,
            f"{directory!r}: segment {number} could not be synced ({error.strerror}); what was "
            "written since the last sync may be lost; what can be read was moved to other files, "
            "so call sync() again",
        ) from error

    def replace(self, segment: Segment) -> None:
        """Move what can be read of a segment elsewhere, and put a new file in its place.

        One value at a time: memory does not grow with what the segment holds.
        """
        header, live = segment.header, self._files.live(segment)
        keys = self._records.fields(live)
        self._records.pins[live] += 1
        self._volume.forget(live, "io")
        self._files.give_up(segment)
        self._volume.unpin(live)
        try:
            self._health.call(self._files.renew, segment)
        except OSError:
            self._health.errors["lost segment file"] += 1
        segment.take(header)  # of the old file, which is open and has the payloads still
        for i, place in enumerate(live.tolist()):
            stored = self._files.salvage(segment, place)
            if stored is None:
                continue
            row = self._records.rows[place].copy()
            # With a new sequence it would take the place of a value that is being put right now.
            one = Stored(
                [stored], [int(row["value_bytes"])], int(row["codec"]), [int(row["valid"])],
                sequences=[int(row["sequence"])],
            )  # fmt: skip
            self._volume.write(keys.take(np.array([i])), one)
