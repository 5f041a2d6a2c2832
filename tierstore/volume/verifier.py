"""Reading every payload of a volume, to compare it with its checksum."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np

from tierstore.aligned import aligned_rows
from tierstore.errors import CorruptBlockError
from tierstore.volume.format import GROUP, KEY_INLINE, LIVE, whole_pages

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy.typing as npt

    from tierstore.interfaces import Pointers
    from tierstore.reads import Read
    from tierstore.volume.format import Header
    from tierstore.volume.segment import Segment
    from tierstore.volume.volume import Volume

    Progress = Callable[[int, int], None]
    """Told how many bytes of payloads are verified, of how many."""

UNREADABLE = "unreadable"
ROWS_AT_ONCE = 64 * GROUP
_BYTES_AT_ONCE = 1 << 24


class Note(Protocol):
    """Takes a finding down: kind, path, message, number of the extent, whether it is repaired."""

    def __call__(
        self, kind: str, path: str, message: str, extent: int, *, is_fixed: bool
    ) -> None: ...


def used_segments(volume: Volume) -> Iterator[tuple[Segment, Header]]:
    """Segments with extents, and their headers as of now."""
    for segment in list(volume.files.by_number.values()):
        with volume.lock:
            header = segment.header
            is_used = not segment.is_blank and not segment.is_draining
        if is_used:
            yield segment, header


def is_as(volume: Volume, segment: Segment, header: Header) -> bool:
    """Whether a segment has not been emptied meanwhile."""
    is_ours = volume.files.by_number.get(segment.number) is segment
    return is_ours and segment.header is header and not segment.is_draining


class Verifier:
    """One pass over the payloads of an open volume, which goes on serving.

    note: told what does not match, or cannot be read. fix: drop what does not match; what cannot be
    read may be right, and stays.
    """

    def __init__(self, volume: Volume, note: Note, *, fix: bool) -> None:
        self._volume, self._note, self._fix = volume, note, fix
        self._records, self._files = volume.records, volume.files

    def run(self, progress: Progress | None) -> None:
        """Read every payload and compare it with its checksum."""
        with self._volume.lock:
            total = sum(
                int(self._sizes(self._files.live(segment)).sum())
                for segment, _ in used_segments(self._volume)
            )
        done = 0
        for places in self._pinned_parts():
            for batch, buffers in self._batches(places):
                done += int(self._sizes(np.array(batch)).sum())
                self._verify_some(batch, buffers)
                if progress is not None:
                    progress(done, max(done, total))

    def _sizes(self, places: Pointers) -> npt.NDArray[np.int64]:
        rows = self._records.rows[places]
        long_keys = np.where(rows["key_bytes"] > KEY_INLINE, rows["key_bytes"], 0)
        return rows["stored_bytes"].astype(np.int64) + long_keys

    def _pinned_parts(self) -> Iterator[Pointers]:
        """Live places, some at a time, pinned until the next are asked for."""
        for segment, header in used_segments(self._volume):
            for first in range(0, header.extents, ROWS_AT_ONCE):
                with self._volume.lock:
                    if not is_as(self._volume, segment, header):
                        break
                    live = self._files.live(segment) - segment.first
                    chosen = live[(live >= first) & (live < first + ROWS_AT_ONCE)]
                    places = chosen + segment.first
                    self._volume.pin(places)
                try:
                    yield places
                finally:
                    self._volume.let_go(places)

    def _batches(self, places: Pointers) -> Iterator[tuple[list[int], list[memoryview]]]:
        """Places with buffers for their payloads, all in one piece of memory."""
        rooms = [whole_pages(max(size, 1)) for size in self._sizes(places).tolist()]
        memory = aligned_rows(1, max(_BYTES_AT_ONCE, *rooms, 0))[0].data if rooms else None
        batch: list[int] = []
        buffers: list[memoryview] = []
        used = 0
        for place, room in zip(places.tolist(), rooms, strict=True):
            assert memory is not None
            if used + room > len(memory):
                yield batch, buffers
                batch, buffers, used = [], [], 0
            batch.append(place)
            buffers.append(memory[used : used + room])
            used += room
        if batch:
            yield batch, buffers

    def _verify_some(self, places: list[int], buffers: list[memoryview]) -> None:
        with self._volume.lock:
            if (self._records.segment[places] < 0).any():
                return  # the file failed meanwhile, and what it held was dropped
            requests = self._files.reads(places, buffers)
        outcomes = self._attempt(requests)
        damaged = []
        with self._volume.lock:
            for place, buffer, outcome in zip(places, buffers, outcomes, strict=True):
                if self._records.rows["state"][place] != LIVE:
                    continue
                problem = self._problem(place, buffer, outcome)
                if problem is not None:
                    is_proven = problem[0] != UNREADABLE
                    extent = place - self._files.of(place).first
                    self._note(*problem, extent, is_fixed=self._fix and is_proven)
                    damaged += [place] if is_proven else []
            if self._fix:
                self._volume.kill(np.array(damaged, np.int64), "corrupt")

    def _attempt(self, requests: list[Read]) -> list[Exception | None]:
        """Outcomes of reads; those that failed, but for their checksum, are tried once more."""
        outcomes = self._files.attempt(requests)
        failed = [
            i
            for i, outcome in enumerate(outcomes)
            if outcome is not None and not isinstance(outcome, CorruptBlockError)
        ]
        for i, outcome in zip(
            failed, self._files.attempt([requests[i] for i in failed]), strict=True
        ):
            outcomes[i] = outcome
        return outcomes

    def _problem(
        self, place: int, buffer: memoryview, outcome: Exception | None
    ) -> tuple[str, str, str] | None:
        """Kind, path and message of what is wrong with a payload that was read."""
        path, size = self._files.of(place).path, self._files.disk_bytes(place)
        if isinstance(outcome, CorruptBlockError):
            return "payload", path, f"{size} bytes do not match their checksum"
        if outcome is not None:
            return UNREADABLE, path, f"{size} bytes cannot be read ({outcome})"
        row = self._records.rows[place]
        start = int(row["stored_bytes"])
        if start < size and self._records.long_keys.get(place) != bytes(buffer[start:size]):
            return "index", path, "the key in memory is not the one on disk"
        return None
