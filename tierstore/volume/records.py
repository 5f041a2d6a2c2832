"""What is known of every record while a store is open: its row, its place, who is using it.

A *place* is the number of a row here. Segments get runs of places, one for each extent.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tierstore.kernels import keys as kernels
from tierstore.volume.format import FREE, KEY_INLINE, LIVE, ROW, KeyFields

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierstore.interfaces import Bytes, Ids, Pointers

_SMALLEST_INDEX = 64
_LAST_TICK = (1 << 32) - 1


@dataclass(slots=True)
class Visited:
    """Records that were looked up: place, bytes of the value and page in memory, -1 for none.

    hits: how many are in memory.
    """

    places: Pointers
    sizes: Pointers
    pages: Pointers
    hits: int

    @property
    def missing(self) -> Pointers:
        """Positions of what is not in memory."""
        return np.flatnonzero(self.pages < 0)


class Records:
    """Rows of all places, and an index from keys to those that are live.

    Invariants: a place is in the index exactly when its row is live, and no two of those have one
    key. Not thread-safe: the store's lock guards it.

    Attributes
    ----------
    rows: as in the files. segment: int32, number of the segment that owns the place, -1 none.
    cached: int32, page in the memory tier where a copy of the value begins, -1 none.
    used: uint32, tick of the latest use. pins: uint32, readers and leases.
    long_keys: the whole key of places whose key does not fit into a row.
    """

    rows: npt.NDArray[np.void]
    segment: Ids
    cached: Ids
    used: npt.NDArray[np.uint32]
    pins: npt.NDArray[np.uint32]

    def __init__(self) -> None:
        self.long_keys: dict[int, bytes] = {}
        self.tick = 0
        self.live = 0
        self._seed = np.uint64(secrets.randbits(64))
        self._index: Ids = np.full(_SMALLEST_INDEX, -1, np.int32)
        self._runs: dict[int, list[int]] = {}
        self._size = 0
        self._allocate(1)  # so that place -1, which is nowhere, can be looked up

    def _allocate(self, places: int) -> None:
        """Have columns for so many places.

        A column is complete before it takes the place of the old one: pinned places are looked at
        without the lock.
        """
        rows: npt.NDArray[np.void] = np.zeros(places, ROW)
        segment: Ids = np.full(places, -1, np.int32)
        cached: Ids = np.full(places, -1, np.int32)
        used: npt.NDArray[np.uint32] = np.zeros(places, np.uint32)
        pins: npt.NDArray[np.uint32] = np.zeros(places, np.uint32)
        if self._size:
            kept = slice(self._size)
            rows[kept], segment[kept], cached[kept] = (
                self.rows[kept], self.segment[kept], self.cached[kept]
            )  # fmt: skip
            used[kept], pins[kept] = self.used[kept], self.pins[kept]
        self.rows, self.segment, self.cached, self.used, self.pins = (
            rows, segment, cached, used, pins
        )  # fmt: skip
        self._words: npt.NDArray[np.uint64] = self.rows.view(np.uint64).reshape(-1, kernels.WORDS)

    @property
    def nbytes(self) -> int:
        """Bytes of all tables; long keys count their own length and 100 bytes each."""
        columns = (self.rows, self.segment, self.cached, self.used, self.pins, self._index)
        long_keys = sum(len(key) + 100 for key in self.long_keys.values())
        return sum(column.nbytes for column in columns) + long_keys

    # Places

    def rows_of(self, places: Sequence[int]) -> npt.NDArray[np.void]:
        """A copy of their rows, whole; NumPy would copy it field by field."""
        words = self._words.take(np.asarray(places, np.int64), axis=0)
        rows: npt.NDArray[np.void] = words.view(ROW).reshape(-1)
        return rows

    def open_run(self, segment: int, count: int) -> int:
        """The first of `count` places for a segment, with empty rows."""
        free = self._runs.get(count)
        first = free.pop() if free else self._grow(count)
        run = slice(first, first + count)
        self.rows[run] = np.zeros(1, ROW)
        self.segment[run], self.cached[run], self.used[run], self.pins[run] = segment, -1, 0, 0
        return first

    def close_run(self, first: int, count: int) -> None:
        """Give places back; none of them may be live or pinned."""
        self.segment[first : first + count] = -1
        self._runs.setdefault(count, []).append(first)

    def reserve(self, places: int) -> None:
        """Have room for so many places in all, in one growth."""
        if places > len(self.rows):
            self._allocate(places)

    def _grow(self, count: int) -> int:
        first, need = self._size, self._size + count
        if need > len(self.rows):
            self._allocate(max(need, len(self.rows) + len(self.rows) // 32))
        self._size = need
        return first

    # Keys

    def find(self, keys: KeyFields) -> Pointers:
        """The live place of each key, int64 [n]; -1 where there is none."""
        places: Pointers = np.empty(len(keys), np.int64)
        kernels.find(keys.fields, keys.lengths, self._index, self._words, self._seed, places)
        for position, key in keys.tails.items():
            if places[position] >= 0 and self.long_keys.get(int(places[position])) != key:
                places[position] = -1
        return places

    def visit(self, keys: KeyFields, *, pin_cached: bool) -> Visited:
        """Find records, note that they are used now, and pin those that are not in memory.

        pin_cached: pin the others as well.
        """
        n = len(keys)
        tick = self._next_ticks(n)
        places: Pointers = np.empty(n, np.int64)
        sizes: Pointers = np.empty(n, np.int64)
        pages: Pointers = np.empty(n, np.int64)
        hits = kernels.visit(
            keys.fields, keys.lengths, self._index, self._words, self._seed, self.cached,
            self.used, self.pins, tick, pin_cached, places, sizes, pages,
        )  # fmt: skip
        for position, key in keys.tails.items():
            place = int(places[position])
            if place >= 0 and self.long_keys.get(place) != key:
                is_cached = bool(pages[position] >= 0)
                self.pins[place] -= pin_cached or not is_cached
                hits -= is_cached
                places[position] = sizes[position] = pages[position] = -1
        return Visited(places, sizes, pages, hits)

    def unpin(self, places: Pointers) -> Pointers:
        """Take one pin from each place; returns those that nobody holds and that hold nothing."""
        empty: Pointers = np.empty(len(places), np.int64)
        count = kernels.unpin(places, self.pins, self._words, np.uint64(LIVE), empty)
        return empty[:count]

    def enter(self, places: Pointers) -> None:
        """Make live places findable; no live place may have one of their keys."""
        self._reserve(len(places))
        kernels.insert(places, self._index, self._words, self._seed)
        self.live += len(places)

    def withdraw(self, places: Pointers) -> None:
        """Take live places out of the index."""
        self.live -= int(kernels.remove(places, self._index, self._words, self._seed))

    def enter_newest(self, places: Pointers) -> Pointers:
        """Like `enter`, where several places may have one key; returns those that are older."""
        self._reserve(len(places))
        older: Pointers = np.empty(len(places), np.int64)
        lost = kernels.newest(places, self._index, self._words, self._seed, older)
        self.live += len(places) - lost
        return older[:lost].copy()

    def rebuild(self) -> Pointers:
        """Make the index anew from the rows; returns live places that a newer one supersedes."""
        owned = np.flatnonzero(self.segment[: self._size] >= 0)
        self.clear()
        return self.enter_newest(owned[self.rows["state"][owned] == LIVE])

    def _reserve(self, count: int) -> None:
        need = (self.live + count) * 5 // 4
        if need <= len(self._index):
            return
        places = self.live_places()
        self._index = np.full(1 << need.bit_length(), -1, np.int32)
        kernels.insert(places, self._index, self._words, self._seed)

    def clear(self) -> None:
        """Empty the index."""
        self._index = np.full(_SMALLEST_INDEX, -1, np.int32)
        self.live = 0

    def live_places(self) -> Pointers:
        """Places that are in the index, in order of place."""
        places: Pointers = np.sort(self._index[self._index >= 0]).astype(np.int64)
        return places

    def key(self, place: int) -> bytes:
        """The key of a place."""
        long = self.long_keys.get(place)
        if long is not None:
            return long
        row = self.rows[place]
        return bytes(row["key"])[: int(row["key_bytes"])].ljust(int(row["key_bytes"]), b"\0")

    def key_bytes(self, places: Pointers) -> Bytes:
        """The first 48 bytes of keys, uint8 [n, 48], zero-padded."""
        words = np.ascontiguousarray(self._words[places, kernels.FIELD : kernels.FIELD + 6])
        return words.view(np.uint8)

    def fields(self, places: Pointers) -> KeyFields:
        """The keys of places, to be looked for."""
        own = KeyFields(self.key_bytes(places))
        own.lengths = self.rows["key_bytes"][places].astype(np.uint64)
        own.tails = {
            position: self.long_keys.get(place, b"")
            for position, place in enumerate(places.tolist())
            if own.lengths[position] > KEY_INLINE
        }
        return own

    def touch(self, places: Pointers) -> None:
        """Note that records were used, the last of them last."""
        first = self._next_ticks(len(places))
        self.used[places] = np.arange(first, first + len(places))

    def _next_ticks(self, count: int) -> int:
        """The first of so many ticks."""
        if self.tick + count > _LAST_TICK:
            self._number_uses_anew()
        first, self.tick = self.tick + 1, self.tick + count
        return first

    def _number_uses_anew(self) -> None:
        """Give uses the lowest ticks in the same order, before the counter runs over."""
        ticks, ranks = np.unique(self.used, return_inverse=True)
        self.used[:] = ranks
        self.tick = len(ticks)

    def validate(self) -> None:
        """Assert the invariants; for tests."""
        indexed = self.live_places()
        assert len(indexed) == self.live == len(np.unique(indexed))
        owned = np.flatnonzero(self.segment[: self._size] >= 0)
        live = owned[self.rows["state"][owned] == LIVE]
        assert np.array_equal(np.sort(live), indexed), "index and live rows differ"
        assert (self.rows["state"][owned][self.rows["sequence"][owned] == 0] == FREE).all()
        keys: dict[bytes, Any] = {self.key(int(place)): place for place in indexed}
        assert len(keys) == self.live, "two live rows have one key"
