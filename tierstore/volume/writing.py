"""How values come into a volume: a place for each, its payload, its row, and then its key."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from tierstore.deadlines import left_until
from tierstore.volume.format import (
    PAYLOAD_BYTES_MOST,
    KeyFields,
    extent_size,
)
from tierstore.volume.sealing import Stored, rows_of, sealed_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierstore.interfaces import Pointers
    from tierstore.io import FileIO
    from tierstore.volume.space import Space
    from tierstore.volume.volume import Volume


class Writing:
    """Writes values to a volume. Any thread may call.

    Payloads are written without the volume's lock, to places that are pinned meanwhile.
    """

    def __init__(self, volume: Volume, space: Space, io: FileIO) -> None:
        self._volume, self._space, self._io = volume, space, io
        self._records, self._files = volume.records, volume.files
        self._writers = 0
        self._idle = threading.Condition(volume.lock)

    def wait(self, until: float) -> bool:
        """Whether nobody writes any more by that time. Requires the lock; others get it."""
        while self._writers and (left := until - time.monotonic()) > 0:
            self._idle.wait(left)
        return not self._writers

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
        with self._volume.locked(left_until(until)):
            self._volume.check_writable()
            self._writers += 1
            epoch = self._volume.facts.epoch
            try:
                places = self._reserve(sizes, stored.value_bytes)
            except BaseException:
                self._writers -= 1
                raise
            first, self._volume.sequence = self._volume.sequence, self._volume.sequence + len(sizes)
        try:
            runs = self._files.runs(places)
            rows = sealed_rows(rows_of(keys, stored, first), pieces, runs)
            failed = self._files.write(runs, pieces)
            self._io.reached("put.after_payload")
            with self._volume.lock:
                lost = np.flatnonzero((places >= 0) & (self._records.segment[places] < 0))
                self._refuse(places, "io", sorted({*failed, *lost.tolist()}))
                if until is not None and time.monotonic() > until:
                    self._refuse(places, "deadline", np.flatnonzero(places >= 0).tolist())
                if keep is not None:
                    is_new = (self._records.find(keys) < 0) & (keep == self._volume.removals)
                    self._refuse(
                        places, "changed", np.flatnonzero((places >= 0) & ~is_new).tolist()
                    )
                return self._publish(keys, places, rows, epoch)
        except BaseException:
            self._volume.let_go(places[places >= 0])
            raise
        finally:
            self._end_write()

    def _end_write(self) -> None:
        with self._volume.lock:
            self._writers -= 1
            self._idle.notify_all()

    def _reserve(self, sizes: list[int], value_bytes: Sequence[int]) -> Pointers:
        """A pinned place for each payload, -1 where it is refused."""
        places: Pointers = np.full(len(sizes), -1, np.int64)
        classes = np.array([extent_size(size) for size in sizes], np.int64)
        is_large = (classes > self._volume.largest) | (
            np.array(value_bytes) > min(self._files.nbytes, PAYLOAD_BYTES_MOST)
        )
        self._volume.refused["too large"] += int(is_large.sum())
        try:
            for size in np.unique(classes[~is_large]).tolist():
                wanted = np.flatnonzero((classes == size) & ~is_large)
                count = self._fill(places, wanted, size)
                if count < len(wanted):
                    is_held = self._volume.evicts and (
                        self._files.is_draining or self._space.is_held()
                    )
                    reason = "all pinned" if is_held else "no room"
                    self._volume.refused[reason] += len(wanted) - count
        except BaseException:
            self._volume.unpin(places[places >= 0])
            raise
        return places

    def _fill(self, places: Pointers, wanted: Pointers, size: int) -> int:
        """Put free places of one size, pinned, where they are wanted; others leave for them.

        Returns how many there were.
        """
        free, count = self._space.free(size), 0
        while True:
            found = free.pop(len(wanted) - count)
            self._records.pins[found] = 1
            places[wanted[count : count + len(found)]] = found
            count += len(found)
            if count == len(wanted) or not self._volume.make_room(size, len(wanted) - count):
                return count

    def _refuse(self, places: Pointers, reason: str, positions: list[int]) -> None:
        """Give back the places of payloads that are not to be seen."""
        if positions:
            self._volume.refused[reason] += len(positions)
            self._give_back(places, np.array(positions))

    def _give_back(self, places: Pointers, chosen: npt.NDArray[np.int64 | np.bool_]) -> None:
        """Unpin some places, and note that it is done, whatever happens next."""
        held = places[chosen]
        places[chosen] = -1
        self._volume.unpin(held)

    def _publish(
        self, keys: KeyFields, places: Pointers, rows: npt.NDArray[np.void], epoch: int
    ) -> npt.NDArray[np.bool_]:
        """Make written payloads findable, in place of older ones under their keys."""
        written = places >= 0
        if self._volume.is_closed or self._volume.facts.epoch != epoch:
            self._volume.dropped["cleared"] += int(written.sum())
            self._give_back(places, written)
            return written & (not self._volume.is_closed)
        current = self._records.find(keys)
        sequences = self._records.rows["sequence"]
        is_late = written & (current >= 0)
        is_late[is_late] = sequences[current[is_late]] > rows["sequence"][is_late]
        self._give_back(places, is_late)
        self._volume.dropped["superseded"] += int(is_late.sum())
        fresh = np.flatnonzero(written & ~is_late)
        new = places[fresh]
        try:
            for i in keys.tails.keys() & set(fresh.tolist()):
                self._records.long_keys[int(places[i])] = keys.tails[i]
            self._records.rows[new] = rows[fresh]
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
        self._volume.write_rows(new)
        self._volume.kill(old[(old >= 0) & self._volume.is_live(new)], "overwritten")
        # A segment that failed meanwhile has dropped what it held.
        fine = self._volume.is_live(new)
        self._records.enter(new[fine])
        self._records.touch(new[fine])
        self._volume.refused["io"] += int((~fine).sum())
        return fine

    def _take_back(self, places: Pointers) -> None:
        """Show nothing of values that are live in part."""
        try:
            self._volume.kill(places, "interrupted")
        except MemoryError:
            self._volume.forget(places[self._volume.is_live(places)], "interrupted")
