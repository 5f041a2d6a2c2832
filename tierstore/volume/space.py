"""Which extents are free, and who leaves when none is."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tierstore.volume.format import LIVE

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tierstore.interfaces import Ids, Pointers
    from tierstore.volume.records import Records
    from tierstore.volume.segment import Segment

_BATCHES = 64
"""At least 1/64 of a size class leaves at once, since finding who leaves costs O(places)."""


class FreePlaces:
    """A stack of places of one extent size; the lowest of a new file come out first."""

    def __init__(self) -> None:
        self._stack: Ids = np.empty(16, np.int32)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def push(self, places: Pointers) -> None:
        """Add places so that they come out in the order given."""
        need = self._count + len(places)
        if need > len(self._stack):
            self._stack = np.resize(self._stack, max(need, 2 * len(self._stack)))
        self._stack[self._count : need] = places[::-1]
        self._count = need

    def pop(self, count: int) -> Pointers:
        """Up to `count` places."""
        first = max(0, self._count - count)
        places: Pointers = self._stack[first : self._count][::-1].astype(np.int64)
        self._count = first
        return places

    def discard(self, run: slice) -> None:
        """Forget the places of a run."""
        stack = self._stack[: self._count]
        kept = stack[(stack < run.start) | (stack >= run.stop)]
        self._stack[: len(kept)] = kept
        self._count = len(kept)

    def content(self) -> Pointers:
        """All of them, in no order that matters."""
        return self._stack[: self._count].astype(np.int64)


class Space:
    """Free extents by size, and blank segments. The volume's lock guards it."""

    def __init__(self, records: Records) -> None:
        self._records = records
        self._free: dict[int, FreePlaces] = {}
        self.blank: list[Segment] = []
        self.used: dict[int, list[Segment]] = {}
        """Segments that have extents, by extent size."""

    def free(self, extent_bytes: int) -> FreePlaces:
        """Free places of one size."""
        return self._free.setdefault(extent_bytes, FreePlaces())

    def add(self, segment: Segment, free: Pointers) -> None:
        """Take in a segment with extents, of which those are free."""
        size = segment.header.extent_bytes
        self.used.setdefault(size, []).append(segment)
        self.free(size).push(free)

    def remove(self, segment: Segment) -> None:
        """Forget a segment with extents."""
        size = segment.header.extent_bytes
        self.used[size].remove(segment)
        self.free(size).discard(segment.places)

    def all_free(self) -> Pointers:
        """Free places of all sizes."""
        return np.concatenate(
            [np.empty(0, np.int64), *(free.content() for free in self._free.values())]
        )

    def forget(self, place: int, extent_bytes: int) -> None:
        """Let a place not be free."""
        self.free(extent_bytes).discard(slice(place, place + 1))

    def coldest(self, extent_bytes: int) -> Segment | None:
        """The segment whose latest use is longest ago among those that nobody has pinned.

        One of another size only if it is colder than everything of this size.
        """
        candidates = [
            (self._latest_use(segment), segment.number, segment)
            for segments in self.used.values()
            for segment in segments
            if segment.header.extent_bytes != extent_bytes and not self._is_pinned(segment)
        ]
        if not candidates:
            return None
        latest, _, segment = min(candidates)
        own = self._evictable(self.used.get(extent_bytes, ()))
        is_colder = not len(own) or latest < int(self._records.used[own].min())
        return segment if is_colder else None

    def victims(self, extent_bytes: int, need: int) -> Pointers:
        """Places of one size that leave to make room for `need`: the least recently used."""
        own = self._evictable(self.used.get(extent_bytes, ()))
        count = min(len(own), max(need, len(own) // _BATCHES))
        if count == len(own):
            return own
        order = np.argpartition(self._records.used[own], count)
        return own[order[:count]]

    def is_held(self) -> bool:
        """Whether room could be made if nobody held values."""
        states, pins = self._records.rows["state"], self._records.pins
        return not self.blank and any(
            bool((pins[segment.places][states[segment.places] == LIVE] > 0).any())
            for segments in self.used.values()
            for segment in segments
        )

    def _evictable(self, segments: Iterable[Segment]) -> Pointers:
        records = self._records
        found = [np.empty(0, np.int64)]
        for segment in segments:
            run = segment.places
            is_live = records.rows["state"][run] == LIVE
            found.append(np.flatnonzero(is_live & (records.pins[run] == 0)) + run.start)
        return np.concatenate(found)

    def _latest_use(self, segment: Segment) -> int:
        return int(self._records.used[segment.places].max(initial=0))

    def _is_pinned(self, segment: Segment) -> bool:
        return bool(self._records.pins[segment.places].any())
